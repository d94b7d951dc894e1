"""Plans: each sample once, in rows that fit; the samples of updates; kinds; times of real plans, as commit bbc3155 had them."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.data import LENGTHS
from dynagroup import (
    AdditiveCap,
    BatchPlan,
    BudgetError,
    LengthAwareBatchSampler,
    PlannedDataLoader,
    TokenBudget,
)
from dynagroup.plan import batches as blocks
from dynagroup.plan.batches import Batches, longest_of, maxima_of, oversize_of, scanned
from dynagroup.plan.compare import compare
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.cut import prove
from dynagroup.plan.epoch import epoch_order
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.planner import Planner
from dynagroup.shapes import BatchShape
from dynagroup.testing import assert_conserves, run_ranks
from tests import strategies
from tests.plan.test_packed import CAPS

RANKS = st.integers(1, 16)


def planner_of(values: Any, budget: Any, **settings: Any) -> Planner:
    return Planner({"tokens": np.asarray(values, np.int32)}, budget, PlanConfig(**settings))


@settings(max_examples=160, deadline=None)
@given(
    strategies.lengths,
    strategies.budgets,
    strategies.configs,
    RANKS,
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_laws_of_a_plan(values, budget, config, ranks, number, epoch):
    """With ``number`` kinds or fewer, of which None is one; 0: without."""
    labels = (
        [None if k * k % number == 0 else k * k % number for k in range(len(values))]
        if number
        else None
    )
    planner = Planner.of(
        values, budget, config if number else replace(config, one_kind="step"), labels
    )
    plan, labels = planner.plan(epoch, ranks), labels or [None] * len(values)
    emitted, oversize = [batch for row in plan.rows for batch in row], set(plan.oversize.tolist())
    assert_conserves(
        [*emitted, plan.dropped.tolist()], [*range(len(values)), *plan.repeated.tolist()]
    )
    assert all(len(row) == ranks and all(row) for row in plan.rows), "equal steps"
    kinds = [[{labels[i] for i in batch} for batch in row] for row in plan.rows]
    assert kinds == [[{kind} for kind in row] for row in plan.kinds]
    assert config.one_kind == "batch" or all(len(set(row)) == 1 for row in plan.kinds), "law 10"
    for batch in emitted:
        shape = BatchShape.of_samples({"tokens": plan.lengths["tokens"][batch]})
        assert planner.budget.fits(shape)[0] or (len(batch) == 1 and batch[0] in oversize)
    windows = -(-len(values) // config.samples_per_update) if config.samples_per_update else 1
    unfilled = windows * (len(set(labels)) if config.one_kind == "step" else 1) * (ranks - 1)
    assert len(plan.repeated) <= (unfilled if config.uneven == "repeat" else 0)
    assert len(plan.dropped) <= unfilled or config.oversize == "drop"
    if (
        windows == 1
        and number < 2
        and not config.round_batch
        and budget.layout == "padded"
        and len(plan.repeated)
    ):
        assert (plan.batches.sizes == 1).all()
    again = Planner(planner.lengths, budget, planner.config, planner.kinds).plan(epoch, ranks)
    assert again.fingerprint == plan.fingerprint
    if config.samples_per_update and number:
        plain = Planner.of(values, budget, replace(config, one_kind="step")).plan(epoch, ranks)
        assert by_update(plan) == by_update(plain), (
            "the samples of each update are those without kinds"
        )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([2, 15, 26, 33, 60]), min_size=4, max_size=40), st.integers(2, 4))
@example([15, 32, 60, 55, 2], 2)
def test_no_sample_is_lost_where_lengths_of_two_streams_are_equal(targets, ranks):
    """The work of a batch, divided by that of a sample, may be rounded to just below a whole number."""
    lengths = {
        "source": np.full(len(targets), 26, np.int32),
        "target": np.asarray(targets, np.int32),
    }
    plan = Planner(lengths, TokenBudget(200), PlanConfig(samples_per_update=8)).plan(0, ranks)
    assert_conserves(
        [batch for row in plan.rows for batch in row],
        [*range(len(targets)), *plan.repeated.tolist()],
    )


def by_update(plan: BatchPlan) -> list[list[int]]:
    """The samples of each update."""
    parts = np.split(plan.table, np.flatnonzero(plan.update_ends)[:-1] + 1)
    return [np.unique(plan.batches.take(part.ravel()).order).tolist() for part in parts]


@settings(max_examples=40, deadline=None)
@given(strategies.lengths, strategies.token_budgets, st.integers(16, 40), RANKS, st.integers(0, 2))
def test_an_update_holds_the_samples_that_fixed_batches_would(values, budget, size, ranks, epoch):
    plan = planner_of(values, budget, samples_per_update=size, seed=7).plan(epoch, ranks)
    order, first = epoch_order(len(values), seed=7, epoch=epoch), 0
    ends = np.flatnonzero(plan.update_ends) + 1
    assert len(ends) == plan.num_updates == -(-len(values) // size)
    for number, stop in enumerate(ends.tolist()):
        wanted = order[number * size : (number + 1) * size]
        assert {index for row in plan.rows[first:stop] for batch in row for index in batch} == set(
            wanted.tolist()
        )
        # with mean losses, the ranks' averaged gradient gives each sample of the update the weight 1 / its size
        scales, sizes = plan.loss_scale[first:stop], plan.batches.sizes[plan.table[first:stop]]
        assert np.isclose(scales.sum() / ranks, 1.0)
        assert ((scales == 0) | np.isclose(scales, sizes * ranks / len(wanted))).all()
        first = stop


def test_literal_rectangles_and_rows_that_cannot_be_filled() -> None:
    plan = planner_of([1, 9, 2, 8, 3, 7], TokenBudget(18)).plan(0, 2)
    assert list(plan.rows) == [
        [[1, 3], [5, 4]],
        [[2], [0]],
    ]  # four batches, neighbours in length share a step
    assert plan.statistics["padding"] == 1 - 30 / (18 + 14 + 2 + 1)
    assert planner_of([], TokenBudget(9)).plan(0, 3).num_steps == 0
    repeated = planner_of([9, 9, 8, 9, 9], TokenBudget(9)).plan(0, 4)
    assert (repeated.num_steps, len(repeated.repeated), repeated.repeated[0]) == (
        2,
        3,
        2,
    )  # the smallest first
    assert repeated.loss_scale[1].tolist() == [4.0, 0.0, 0.0, 0.0]
    dropped = planner_of([9, 9, 8, 9, 9], TokenBudget(9), uneven="drop").plan(0, 4)
    assert (dropped.num_steps, dropped.dropped.tolist()) == (1, [2])
    assert list(planner_of([4], TokenBudget(9)).plan(0, 3).rows) == [[[0], [0], [0]]]


def test_shuffled_epochs_share_hardly_a_batch_lead_with_the_longest_and_windows_stay_windows() -> (
    None
):
    values = np.random.default_rng(0).lognormal(5, 1, 3000).astype(np.int32) + 1
    plans = [
        planner_of(values, TokenBudget(8192), shuffle=True).plan(epoch, 2) for epoch in range(2)
    ]
    packed = planner_of(values, TokenBudget(8192, layout="packed"), shuffle=True).plan(0, 2)
    assert all(
        any(int(values.argmax()) in batch for batch in plan.rows[0]) for plan in [*plans, packed]
    )
    groups = [{tuple(sorted(b)) for row in plan.rows for b in row if len(b) > 3} for plan in plans]
    assert len(groups[0] & groups[1]) <= 1  # two long samples may meet again
    assert plans[0].statistics["padding"] < 0.1
    values = np.arange(1, 401)
    plan = planner_of(values, TokenBudget(1000), shuffle=True, window=400, hardest_first=3).plan(
        1, 2
    )
    longest = [max(values[i] for batch in row for i in batch) for row in plan.rows]
    assert longest[:3] == sorted(longest, reverse=True)[:3]
    assert longest != sorted(longest, reverse=True)
    plan = planner_of(values[:100], TokenBudget(300), window=20, hardest_first=0).plan()
    seen = [index for row in plan.rows for batch in row for index in batch]
    assert [set(seen[k : k + 20]) for k in range(0, 100, 20)] == [
        set(range(k, k + 20)) for k in range(0, 100, 20)
    ]


@pytest.mark.filterwarnings("ignore:2 samples do not fit")
def test_oversize_samples() -> None:
    alone = planner_of([5, 50, 3, 60], TokenBudget(10)).plan()
    assert [batch for row in alone.rows for batch in row] == [[3], [1], [0, 2]]
    assert alone.oversize.tolist() == [1, 3]
    dropping = planner_of([5, 50, 3, 60], TokenBudget(10), oversize="drop")
    assert dropping.plan().dropped.tolist() == dropping.left_out.tolist() == [1, 3]
    assert (dropping.num_samples, dropping.num_planned) == (4, 2)
    how = {"oversize": "drop", "rank": 0, "world_size": 1}
    for order in ([1, 0, 1, 2], [2, 0]):
        drawn = LengthAwareBatchSampler([5, 50, 3, 60], TokenBudget(10), order=order, **how).plan
        assert sorted([*drawn.batches.order, *drawn.dropped]) == sorted(order), (
            "as often as it was drawn"
        )
    several = {**alone.lengths, "patches": np.array([0, 0, 99, 0], np.int32)}
    assert Planner(
        several, TokenBudget(55) & AdditiveCap("patches", 9), PlanConfig()
    ).oversize.tolist() == [2, 3]


def test_samples_that_fill_no_row_go_on_to_the_next_and_the_proof_catches_what_a_plan_must_never_be() -> (
    None
):
    planner = planner_of([9, 9, 9, 9, 9, 9, 1, 1, 1, 1], TokenBudget(10), window=4, hardest_first=0)
    first, second = planner.steps_from(planner.start_of(0, 4), 4)
    assert (len(first.table), first.end.carried, len(first.dropped)) == (1, (4, 5), 0)
    assert sorted(second.batches.order.tolist()) == [4, 5, 6, 7, 8, 9]
    assert second.end.carried == ()
    resumed = list(planner.steps_from(Cursor.of(json.loads(json.dumps(first.end.state()))), 4))
    assert resumed[0].batches.order.tolist() == second.batches.order.tolist()
    lengths, normal, order = (
        {"tokens": np.ones(14, np.int32)},
        np.zeros(14, np.bool_),
        np.arange(14),
    )
    prove(Batches(order, np.array([0, 7, 14])), 14, lengths, TokenBudget(7), normal)
    with pytest.raises(BudgetError, match="a batch of 7 samples, longest 1 tokens, does not fit"):
        prove(Batches(order, np.array([0, 7, 14])), 14, lengths, TokenBudget(6), normal)
    for wrong in (order[:13], np.array([0, 0, *range(2, 14)])):
        with pytest.raises(AssertionError, match="lost or repeated"):
            prove(Batches(wrong, np.array([0, 7, len(wrong)])), 14, lengths, TokenBudget(7), normal)


SAMPLES = 2048
BEFORE: list[Any] = json.loads((Path(__file__).parent / "predicted_times.json").read_text())
"""[layout, lengths, update, ranks, predicted time in linear tokens] of some plans of commit bbc3155."""


def predicted_time(layout: str, file: str, update: str, ranks: int) -> float:
    found = np.load(LENGTHS / f"{file}.npz")
    names = (
        {"tokens": "src_tokens", "target": "tgt_tokens"}
        if layout == "pairs"
        else {"tokens": "tokens"}
    )
    order = np.random.default_rng(0).permutation(len(found["tokens"]))[:SAMPLES]
    lengths = {name: found[column][order].astype(np.int32) for name, column in names.items()}
    total = np.sum(list(lengths.values()), axis=0)
    budget = TokenBudget(
        max(
            4 * int(np.quantile(total, 0.99)), sum(int(values.max()) for values in lengths.values())
        )
    )
    if layout == "packed":
        budget = TokenBudget(CAPS[file], layout="packed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how: Any = {"shuffle": True} if update == "window" else {"samples_per_update": int(update)}
        return LengthAwareBatchSampler(
            lengths, budget, rank=0, world_size=ranks, **how
        ).plan.predicted_time


def test_plans_take_about_the_time_that_they_took() -> None:
    more = {str(case): predicted_time(*case) / time - 1 for *case, time in BEFORE}
    assert np.mean(list(more.values())) <= 0.006
    assert max(more.values()) <= 0.03, max(more, key=lambda case: more[case])


RNG = np.random.default_rng(0)
MANY = np.clip(RNG.lognormal(4, 0.8, 6000), 4, 2000).astype(np.int32)
SHARES = RNG.choice(["text", "image", None], 6000, p=[0.75, 0.2, 0.05])


def plan(lengths: Any, ranks: int, kinds: Any = None, budget: Any = 60, **how: Any) -> Any:
    return LengthAwareBatchSampler(
        lengths, budget, kinds=kinds, rank=0, world_size=ranks, **how
    ).plan


def test_rows_by_hand_and_one_kind_is_none():
    """Two ranks: one kind fills its row, a single sample idles beside itself, None is a kind."""
    made = plan([5, 4, 3, 2, 9], 2, ["a", None, "a", None, ("b", 1)], samples_per_update=5)
    assert made.rows == [[[0], [2]], [[1], [3]], [[4], [4]]]
    assert made.kinds == [["a", "a"], [None, None], [("b", 1), ("b", 1)]]
    assert made.loss_scale[2].tolist() == [2 / 5, 0]
    assert made.repeated.tolist() == [4]
    dropped = plan(
        [5, 4, 3, 2, 9], 2, ["a", None, "a", None, ("b", 1)], samples_per_update=5, uneven="drop"
    )
    assert (dropped.num_steps, dropped.dropped.tolist()) == (2, [4])
    assert plan([5, 4, 3], 8, [1, 1, 2], samples_per_update=8).num_steps == 2, (
        "fewer samples of a kind than ranks"
    )
    apart = plan([5, 4, 3, 2], 2, [*"aabb"], one_kind="batch")
    assert apart.kinds == [["a", "b"]], "ranks may run different kinds at a time"
    for how in ({"shuffle": True}, {"samples_per_update": 64}):
        one, same = (
            plan(MANY, 4, budget=4000, **how),
            plan(MANY, 4, ["x"] * 6000, budget=4000, **how),
        )
        assert one.fingerprint == same.fingerprint
        assert (one.kinds[0], same.kinds[0]) == ([None] * 4, ["x"] * 4)


def test_without_updates_kinds_come_throughout_an_epoch_in_full_batches():
    free = [plan(MANY, 4, SHARES, budget=4000, shuffle=True, seed=seed) for seed in range(3)]
    for made in free:
        first = [row[0] for row in made.kinds]
        quarters = np.array_split(np.arange(len(first)), 4)
        assert all({first[row] for row in quarter} >= {"text", "image"} for quarter in quarters)
        assert not len(made.repeated)
        assert made.statistics["padding"] < 0.07
        assert made.predicted_time < 1.06 * plan(MANY, 4, budget=4000, shuffle=True).predicted_time
        assert max(max(MANY[i] for i in batch) for batch in made.rows[0]) == MANY.max(), (
            "the hardest lead"
        )
    assert free[0].rows != free[1].rows
    tokens = [
        max(MANY[i] for batch in row for i in batch)
        for row in plan(MANY, 4, SHARES, budget=4000).rows
    ]
    assert tokens == sorted(tokens, reverse=True), (
        "without shuffle the longest come first, whatever their kind"
    )


def test_what_is_found_by_blocks_is_what_all_lengths_say(monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK", 8)
    rng, limit = np.random.default_rng(0), 60
    for size in range(1, 200, 3):
        lengths = {
            name: rng.integers(0, 40, size, np.int32)
            for name in ("tokens", "target")[: 1 + size % 2]
        }
        tokens, budget, maxima = (
            sum(lengths.values()),
            TokenBudget(limit := limit - size % 2),
            maxima_of(lengths),
        )
        assert (
            oversize_of(lengths, budget, maxima).tolist() == np.flatnonzero(tokens > limit).tolist()
        )
        out = np.flatnonzero(rng.random(size) < 0.3)
        kept, found = np.delete(np.arange(size), out), longest_of(lengths, budget, out, maxima)
        assert not len(kept) or (found in kept and tokens[found] == tokens[kept].max())


def test_lengths_of_which_one_changes_or_moves_have_another_checksum():
    size = 2 * blocks.CHUNK + 5
    values = np.random.default_rng(0).integers(1, 500, size).astype(np.int32)
    others = [
        values[:-1],
        values[::-1],
        np.roll(values, 1024),
        np.roll(values, blocks.CHUNK),
    ]
    for place in (0, 7, blocks.CHUNK, size - 7):
        for step in (
            1,
            2,
            6,
            1024,
            blocks.CHUNK,
            size // 2,
        ):  # within a block, and over blocks
            swapped, to = values.copy(), (place + step) % size
            swapped[to] = values[place]
            others.append(swapped.copy())
            swapped[place] = values[to]
            others += [swapped] if values[place] != values[to] else []
    assert len({scanned(array)[1] for array in [values, *others]}) == 1 + len(others)
    assert scanned(np.stack([values, values], axis=1)[:, 0])[1] == scanned(values)[1]


def test_what_kinds_cost_is_told():
    made = plan(MANY, 8, SHARES, budget=4000, samples_per_update=64)
    report = made.report()
    assert "steps of each of 3 kinds" in report
    found = compare(MANY, 8, world_size=8, kinds=SHARES).figures()["ways"]
    assert found["fixed 8, shuffled"]["mixed_steps"] > 80
    assert all(
        way["mixed_steps"] == 0 for name, way in found.items() if name.startswith("dynagroup")
    )
    how = {"kinds": ["a", "a", "b"], "collate_fn": list, "weigh": "samples"}

    def stats_of(world: Any) -> str:
        loader = PlannedDataLoader(range(3), [5, 4, 3], 60, world=world, **how)
        list(loader)
        return str(loader.stats)

    assert "(1 idle, of 3 tokens)" in run_ranks(2, stats_of)[1]
