"""Plans: each sample once, in rows that fit; the samples of updates; kinds; times of real plans, as commit bbc3155 had them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

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
from tests.plan.helpers import CAPS, joined, streams

RANKS = st.integers(1, 16)


def planner_of(values: Any, budget: Any, **settings: Any) -> Planner:
    return Planner(streams(values), budget, PlanConfig(**settings))


# Laws of all plans


def labels_of(num_samples: int, num_kinds: int) -> list[int | None]:
    """Labels of so many kinds or fewer, of which None is one."""
    labels = []
    for sample in range(num_samples):
        label = sample * sample % num_kinds
        labels.append(label or None)
    return labels


def assert_rows_of_one_kind(plan: BatchPlan, labels: list[Any], one_kind: str) -> None:
    """Law 10."""
    for batches, kinds in zip(plan.rows, plan.kinds, strict=True):
        for batch, kind in zip(batches, kinds, strict=True):
            kinds_of_batch = {labels[index] for index in batch}
            assert kinds_of_batch == {kind}
        assert one_kind == "batch" or len(set(kinds)) == 1


def assert_batches_fit(plan: BatchPlan, planner: Planner) -> None:
    oversize = set(plan.oversize.tolist())
    for batch in joined(plan.rows):
        tokens = plan.lengths["tokens"][batch]
        shape = BatchShape.of_samples({"tokens": tokens})
        is_oversize = len(batch) == 1 and batch[0] in oversize
        assert is_oversize or planner.budget.fits(shape)[0]


def assert_few_are_repeated_or_dropped(
    plan: BatchPlan, config: PlanConfig, num_samples: int, num_kinds: int
) -> None:
    """At most what the last rows of windows and kinds lack."""
    num_windows = 1
    if config.samples_per_update:
        num_windows = -(-num_samples // config.samples_per_update)
    num_parts = num_windows
    if config.one_kind == "step":
        num_parts *= num_kinds
    num_lacking = num_parts * (plan.world_size - 1)
    if config.uneven == "repeat":
        assert len(plan.repeated) <= num_lacking
    else:
        assert not len(plan.repeated)
    assert len(plan.dropped) <= num_lacking or config.oversize == "drop"
    is_one_cut = num_windows == 1 and num_kinds == 1 and not config.round_batch
    if is_one_cut and plan.budget.layout == "padded" and len(plan.repeated):
        assert (plan.batches.sizes == 1).all()


def by_update(plan: BatchPlan) -> list[list[int]]:
    """The samples of each update."""
    ends = np.flatnonzero(plan.update_ends) + 1
    updates = []
    for table in np.split(plan.table, ends[:-1]):
        batches = plan.batches.take(table.ravel())
        samples = np.unique(batches.order)
        updates.append(samples.tolist())
    return updates


@settings(max_examples=160, deadline=None)
@given(
    values=strategies.lengths,
    budget=strategies.budgets,
    config=strategies.configs,
    ranks=RANKS,
    num_labels=st.integers(0, 9),
    epoch=st.integers(0, 2),
)
def test_laws_of_a_plan(values, budget, config, ranks, num_labels, epoch):
    without_kinds = replace(config, one_kind="step")
    labels = labels_of(len(values), num_labels) if num_labels else None
    config = config if num_labels else without_kinds
    planner = Planner.of(values, budget, config, labels)
    plan = planner.plan(epoch, ranks)
    emitted = [*joined(plan.rows), plan.dropped.tolist()]
    repeated = plan.repeated.tolist()
    assert_conserves(emitted, [*range(len(values)), *repeated])
    for row in plan.rows:
        assert len(row) == ranks, "equal steps"
        assert all(row)
    known_labels = labels or [None] * len(values)
    assert_rows_of_one_kind(plan, known_labels, config.one_kind)
    assert_batches_fit(plan, planner)
    assert_few_are_repeated_or_dropped(plan, config, len(values), len(set(known_labels)))
    again = Planner(planner.lengths, budget, planner.config, planner.kinds)
    same = again.plan(epoch, ranks)
    assert same.fingerprint == plan.fingerprint
    if config.samples_per_update and labels:
        plainer = Planner.of(values, budget, without_kinds)
        plain = plainer.plan(epoch, ranks)
        assert by_update(plan) == by_update(plain)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([2, 15, 26, 33, 60]), min_size=4, max_size=40), st.integers(2, 4))
@example([15, 32, 60, 55, 2], 2)
def test_no_sample_is_lost_where_lengths_of_two_streams_are_equal(targets, ranks):
    """The work of a batch, divided by that of a sample, may be rounded to just below a whole number."""
    target = np.asarray(targets, np.int32)
    lengths = {"source": np.full_like(target, 26), "target": target}
    config = PlanConfig(samples_per_update=8)
    plan = Planner(lengths, TokenBudget(200), config).plan(0, ranks)
    repeated = plan.repeated.tolist()
    assert_conserves(joined(plan.rows), [*range(len(targets)), *repeated])


# Updates

UPDATES = (
    strategies.lengths,
    strategies.token_budgets,
    st.integers(16, 40),
    RANKS,
    st.integers(0, 2),
)


def rows_of_updates(plan: BatchPlan) -> Iterator[slice]:
    """The rows of each update."""
    start = 0
    stops = np.flatnonzero(plan.update_ends) + 1
    for stop in stops.tolist():
        yield slice(start, stop)
        start = stop


@settings(max_examples=40, deadline=None)
@given(*UPDATES)
def test_an_update_holds_the_samples_that_fixed_batches_would(values, budget, size, ranks, epoch):
    planner = planner_of(values, budget, samples_per_update=size, seed=7)
    plan = planner.plan(epoch, ranks)
    order = epoch_order(len(values), seed=7, epoch=epoch)
    starts = range(0, len(values), size)
    fixed = [order[start : start + size] for start in starts]
    assert plan.num_updates == len(fixed)
    for rows, samples in zip(rows_of_updates(plan), fixed, strict=True):
        used = joined(joined(plan.rows[rows]))
        assert set(used) == set(samples.tolist())


@settings(max_examples=40, deadline=None)
@given(*UPDATES)
def test_mean_losses_of_an_update_give_each_sample_the_same_weight(
    values, budget, size, ranks, epoch
):
    """The ranks' gradients are averaged: 1 / the update's samples remains for each."""
    planner = planner_of(values, budget, samples_per_update=size, seed=7)
    plan = planner.plan(epoch, ranks)
    num_left = len(values)
    for rows in rows_of_updates(plan):
        num_samples = min(size, num_left)
        num_left -= num_samples
        scales = plan.loss_scale[rows]
        table = plan.table[rows]
        expected = plan.batches.sizes[table] * ranks / num_samples
        is_idle = scales == 0
        assert np.isclose(scales.sum() / ranks, 1.0)
        assert (is_idle | np.isclose(scales, expected)).all()


# By hand


def test_neighbours_in_length_share_a_step() -> None:
    planner = planner_of([1, 9, 2, 8, 3, 7], TokenBudget(18))
    plan = planner.plan(0, 2)
    assert list(plan.rows) == [[[1, 3], [5, 4]], [[2], [0]]]
    assert plan.statistics["padding"] == 1 - 30 / (18 + 14 + 2 + 1)


def test_no_samples_are_no_steps() -> None:
    planner = planner_of([], TokenBudget(9))
    plan = planner.plan(0, 3)
    assert plan.num_steps == 0


def test_the_smallest_samples_are_repeated_where_a_row_lacks_some_and_weigh_nothing() -> None:
    planner = planner_of([9, 9, 8, 9, 9], TokenBudget(9))
    plan = planner.plan(0, 4)
    assert plan.num_steps == 2
    assert len(plan.repeated) == 3
    assert plan.repeated[0] == 2
    assert plan.loss_scale[1].tolist() == [4.0, 0.0, 0.0, 0.0]


def test_a_single_sample_is_repeated_on_all_ranks() -> None:
    planner = planner_of([4], TokenBudget(9))
    [row] = planner.plan(0, 3).rows
    assert row == [[0], [0], [0]]


def test_a_row_that_lacks_some_may_be_dropped() -> None:
    planner = planner_of([9, 9, 8, 9, 9], TokenBudget(9), uneven="drop")
    plan = planner.plan(0, 4)
    assert plan.num_steps == 1
    assert plan.dropped.tolist() == [2]


# Shuffled epochs

DRAWN = np.random.default_rng(0).lognormal(5, 1, 3000)
VARIED = DRAWN.astype(np.int32) + 1


def shuffled_plan(epoch: int, layout: Any = "padded") -> BatchPlan:
    budget = TokenBudget(8192, layout=layout)
    planner = planner_of(VARIED, budget, shuffle=True)
    return planner.plan(epoch, 2)


def groups_of(plan: BatchPlan) -> set[tuple[int, ...]]:
    """The batches of more than three samples."""
    groups = set()
    for batch in joined(plan.rows):
        if len(batch) > 3:
            groups.add(tuple(sorted(batch)))
    return groups


def test_shuffled_epochs_share_hardly_a_batch_and_hardly_pad() -> None:
    first = shuffled_plan(0)
    shared = groups_of(first) & groups_of(shuffled_plan(1))
    assert len(shared) <= 1  # two long samples may meet again
    assert first.statistics["padding"] < 0.1


@pytest.mark.parametrize(("epoch", "layout"), [(0, "padded"), (1, "padded"), (0, "packed")])
def test_a_shuffled_epoch_begins_with_the_longest_sample(epoch: int, layout: str) -> None:
    plan = shuffled_plan(epoch, layout)
    longest = int(VARIED.argmax())
    assert longest in joined(plan.rows[0])


def test_the_hardest_steps_of_a_window_are_first_and_only_those() -> None:
    values = np.arange(1, 401)
    planner = planner_of(values, TokenBudget(1000), shuffle=True, window=400, hardest_first=3)
    plan = planner.plan(1, 2)
    longest = [max(values[joined(row)]) for row in plan.rows]
    from_the_longest = sorted(longest, reverse=True)
    assert longest[:3] == from_the_longest[:3]
    assert longest != from_the_longest


def test_windows_are_used_one_after_the_other() -> None:
    values = np.arange(1, 101)
    planner = planner_of(values, TokenBudget(300), window=20, hardest_first=0)
    batches = joined(planner.plan().rows)
    seen = np.array(joined(batches)).reshape(5, 20)
    windows = np.arange(100).reshape(5, 20)
    assert np.sort(seen).tolist() == windows.tolist()


# Samples that do not fit


def test_samples_that_do_not_fit_are_batches_of_their_own() -> None:
    planner = planner_of([5, 50, 3, 60], TokenBudget(10))
    plan = planner.plan()
    assert joined(plan.rows) == [[3], [1], [0, 2]]
    assert plan.oversize.tolist() == [1, 3]


def test_samples_that_do_not_fit_may_be_dropped() -> None:
    planner = planner_of([5, 50, 3, 60], TokenBudget(10), oversize="drop")
    assert planner.plan().dropped.tolist() == [1, 3]
    assert planner.left_out.tolist() == [1, 3]
    assert planner.num_samples == 4
    assert planner.num_planned == 2


@pytest.mark.parametrize("order", [[1, 0, 1, 2], [2, 0]])
def test_samples_are_dropped_as_often_as_they_were_drawn(order: list[int]) -> None:
    planned = plan([5, 50, 3, 60], 1, budget=10, order=order, oversize="drop")
    used = planned.batches.order
    assert sorted([*used, *planned.dropped]) == sorted(order)


def test_a_sample_does_not_fit_if_any_of_its_lengths_does_not() -> None:
    lengths = streams([5, 50, 3, 60], patches=[0, 0, 99, 0])
    budget = TokenBudget(55) & AdditiveCap("patches", 9)
    planner = Planner(lengths, budget, PlanConfig())
    assert planner.oversize.tolist() == [2, 3]


# Windows one by one


@pytest.fixture
def two_windows() -> Planner:
    values = [9, 9, 9, 9, 9, 9, 1, 1, 1, 1]
    return planner_of(values, TokenBudget(10), window=4, hardest_first=0)


def test_samples_that_fill_no_row_go_on_to_the_next_window(two_windows: Planner) -> None:
    start = two_windows.start_of(0, 4)
    first, second = two_windows.steps_from(start, 4)
    assert len(first.table) == 1
    assert first.end.carried == (4, 5)
    assert len(first.dropped) == 0
    order = second.batches.order
    assert sorted(order.tolist()) == [4, 5, 6, 7, 8, 9]
    assert second.end.carried == ()


def test_samples_that_fill_no_row_go_on_after_a_resume(two_windows: Planner) -> None:
    start = two_windows.start_of(0, 4)
    first, second = two_windows.steps_from(start, 4)
    text = json.dumps(first.end.state())
    cursor = Cursor.of(json.loads(text))
    [resumed] = two_windows.steps_from(cursor, 4)
    expected = second.batches.order
    assert resumed.batches.order.tolist() == expected.tolist()


FOURTEEN = np.arange(14)


def prove_two_batches(order: NDArray[np.int64], limit: int) -> None:
    """Of 14 samples of length 1: the first seven of an order, and the rest."""
    borders = np.array([0, 7, len(order)])
    batches = Batches(order, borders)
    lengths = streams(np.ones(14))
    is_oversize = np.zeros(14, np.bool_)
    prove(batches, 14, lengths, TokenBudget(limit), is_oversize)


def test_a_plan_is_proved_to_fit() -> None:
    prove_two_batches(FOURTEEN, 7)
    with pytest.raises(BudgetError, match="a batch of 7 samples, longest 1 tokens, does not fit"):
        prove_two_batches(FOURTEEN, 6)


@pytest.mark.parametrize("order", [FOURTEEN[:13], np.array([0, 0, *range(2, 14)])])
def test_a_plan_is_proved_to_have_each_sample_once(order: Any) -> None:
    with pytest.raises(AssertionError, match="lost or repeated"):
        prove_two_batches(order, 7)


# Times

SAMPLES = 2048
BEFORE: list[Any] = json.loads((Path(__file__).parent / "predicted_times.json").read_text())
"""[layout, lengths, update, ranks, predicted time in linear tokens] of some plans of commit bbc3155."""
COLUMNS = {"tokens": "tokens"}
COLUMNS_OF_PAIRS = {"tokens": "src_tokens", "target": "tgt_tokens"}


def real_lengths(file: str, columns: dict[str, str]) -> dict[str, NDArray[np.int32]]:
    arrays = np.load(LENGTHS / f"{file}.npz")
    num_samples = len(arrays["tokens"])
    order = np.random.default_rng(0).permutation(num_samples)[:SAMPLES]
    lengths = {}
    for name, column in columns.items():
        values = arrays[column][order]
        lengths[name] = values.astype(np.int32)
    return lengths


def four_long_samples(lengths: dict[str, NDArray[np.int32]]) -> TokenBudget:
    """Room for four of them, and for one as long as any."""
    total = np.sum(list(lengths.values()), axis=0)
    long = int(np.quantile(total, 0.99))
    longest = sum(int(values.max()) for values in lengths.values())
    return TokenBudget(max(4 * long, longest))


def predicted_time(layout: str, file: str, update: str, ranks: int) -> float:
    columns = COLUMNS_OF_PAIRS if layout == "pairs" else COLUMNS
    lengths = real_lengths(file, columns)
    budget = four_long_samples(lengths)
    if layout == "packed":
        budget = TokenBudget(CAPS[file], layout="packed")
    config = PlanConfig(shuffle=True)
    if update != "window":
        config = PlanConfig(samples_per_update=int(update))
    planner = Planner.of(lengths, budget, config)
    plan = planner.plan(0, ranks)
    return plan.predicted_time


@pytest.mark.filterwarnings("ignore")
def test_plans_take_about_the_time_that_they_took() -> None:
    more = {}
    for *case, time in BEFORE:
        name = str(case)
        more[name] = predicted_time(*case) / time - 1
    mean = np.mean(list(more.values()))
    worst = max(more, key=more.__getitem__)
    assert mean <= 0.006
    assert more[worst] <= 0.03, worst


# Kinds

RNG = np.random.default_rng(0)
MANY = RNG.lognormal(4, 0.8, 6000).clip(4, 2000).astype(np.int32)
SHARES = RNG.choice(["text", "image", None], 6000, p=[0.75, 0.2, 0.05])
LENGTHS_OF_FIVE = [5, 4, 3, 2, 9]
FIVE: Any = ["a", None, "a", None, ("b", 1)]


def plan(lengths: Any, ranks: int, kinds: Any = None, budget: Any = 60, **options: Any) -> Any:
    sampler = LengthAwareBatchSampler(
        lengths, budget, kinds=kinds, rank=0, world_size=ranks, **options
    )
    return sampler.plan


def test_a_step_has_one_kind_and_a_single_sample_idles_beside_itself() -> None:
    planned = plan(LENGTHS_OF_FIVE, 2, FIVE, samples_per_update=5)
    assert planned.rows == [[[0], [2]], [[1], [3]], [[4], [4]]]
    assert planned.kinds == [["a", "a"], [None, None], [("b", 1), ("b", 1)]]
    assert planned.loss_scale[2].tolist() == [2 / 5, 0]
    assert planned.repeated.tolist() == [4]


def test_a_single_sample_of_a_kind_may_be_dropped() -> None:
    planned = plan(LENGTHS_OF_FIVE, 2, FIVE, samples_per_update=5, uneven="drop")
    assert planned.num_steps == 2
    assert planned.dropped.tolist() == [4]


def test_a_kind_may_have_fewer_samples_than_there_are_ranks() -> None:
    planned = plan([5, 4, 3], 8, [1, 1, 2], samples_per_update=8)
    assert planned.num_steps == 2


def test_ranks_may_run_different_kinds_at_a_time() -> None:
    planned = plan([5, 4, 3, 2], 2, [*"aabb"], one_kind="batch")
    assert planned.kinds == [["a", "b"]]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"samples_per_update": 64}], ids=str)
def test_one_kind_is_as_none(options: dict[str, Any]) -> None:
    without = plan(MANY, 4, budget=4000, **options)
    same = plan(MANY, 4, ["x"] * 6000, budget=4000, **options)
    assert without.fingerprint == same.fingerprint
    assert without.kinds[0] == [None] * 4
    assert same.kinds[0] == ["x"] * 4


@pytest.fixture(scope="module")
def plans_of_kinds() -> list[Any]:
    """One for each of three seeds."""
    return [plan(MANY, 4, SHARES, budget=4000, shuffle=True, seed=seed) for seed in range(3)]


def test_without_updates_kinds_come_throughout_an_epoch(plans_of_kinds: list[Any]) -> None:
    for planned in plans_of_kinds:
        kinds = np.array([row[0] for row in planned.kinds])
        for quarter in np.array_split(kinds, 4):
            assert set(quarter) >= {"text", "image"}


def test_without_updates_batches_of_kinds_are_full(plans_of_kinds: list[Any]) -> None:
    time = plan(MANY, 4, budget=4000, shuffle=True).predicted_time
    for planned in plans_of_kinds:
        assert not len(planned.repeated)
        assert planned.statistics["padding"] < 0.07
        assert planned.predicted_time < 1.06 * time


def test_the_longest_sample_of_any_kind_comes_first(plans_of_kinds: list[Any]) -> None:
    for planned in plans_of_kinds:
        assert MANY[joined(planned.rows[0])].max() == MANY.max()


def test_plans_of_kinds_differ_by_their_seeds(plans_of_kinds: list[Any]) -> None:
    assert plans_of_kinds[0].rows != plans_of_kinds[1].rows


def test_without_shuffle_the_longest_come_first_whatever_their_kind() -> None:
    planned = plan(MANY, 4, SHARES, budget=4000)
    longest = [max(MANY[joined(row)]) for row in planned.rows]
    assert longest == sorted(longest, reverse=True)


def test_a_report_says_how_many_steps_each_kind_has() -> None:
    planned = plan(MANY, 8, SHARES, budget=4000, samples_per_update=64)
    assert "steps of each of 3 kinds" in planned.report()


def test_only_fixed_batches_mix_kinds_and_a_comparison_says_so() -> None:
    comparison = compare(MANY, 8, world_size=8, kinds=SHARES)
    ways = comparison.figures()["ways"]
    fixed = ways["fixed 8, shuffled"]
    assert fixed["mixed_steps"] > 80
    ours = [name for name in ways if name.startswith("dynagroup")]
    assert ours
    for name in ours:
        assert not ways[name]["mixed_steps"]


def test_idle_steps_of_a_kind_are_counted() -> None:
    def stats_of(world: Any) -> str:
        loader = PlannedDataLoader(
            range(3),
            [5, 4, 3],
            60,
            world=world,
            kinds=["a", "a", "b"],
            collate_fn=list,
            weigh="samples",
        )
        list(loader)
        return str(loader.stats)

    _, second = run_ranks(2, stats_of)
    assert "(1 idle, of 3 tokens)" in second


# Blocks of lengths


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK", 8)


def drawn_streams(size: int) -> dict[str, NDArray[np.int32]]:
    """One stream or two."""
    rng = np.random.default_rng(size)
    lengths = {"tokens": rng.integers(0, 40, size, np.int32)}
    if size % 2:
        lengths["target"] = rng.integers(0, 40, size, np.int32)
    return lengths


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("limit", [30, 59, 60])
def test_samples_that_do_not_fit_are_those_that_all_lengths_say(limit: int) -> None:
    for size in range(1, 200, 3):
        lengths = drawn_streams(size)
        total = np.sum(list(lengths.values()), axis=0)
        expected = np.flatnonzero(total > limit)
        oversize = oversize_of(lengths, TokenBudget(limit), maxima_of(lengths))
        assert oversize.tolist() == expected.tolist()


@pytest.mark.usefixtures("small_blocks")
def test_the_longest_sample_of_those_kept_is_that_of_all_lengths() -> None:
    for size in range(1, 200, 3):
        lengths = drawn_streams(size)
        total = np.sum(list(lengths.values()), axis=0)
        is_out = np.random.default_rng(size).random(size) < 0.3
        kept = np.flatnonzero(~is_out)
        out = np.flatnonzero(is_out)
        longest = longest_of(lengths, TokenBudget(60), out, maxima_of(lengths))
        if len(kept):
            assert longest in kept
            assert total[longest] == total[kept].max()


SIZE = 2 * blocks.CHUNK + 5
MANY_LENGTHS = np.random.default_rng(0).integers(1, 500, SIZE).astype(np.int32)


def changed_at(place: int, other: int) -> Iterator[NDArray[np.int32]]:
    """One length replaced by another one; and both swapped, if they differ."""
    changed = MANY_LENGTHS.copy()
    changed[other] = MANY_LENGTHS[place]
    yield changed.copy()
    if MANY_LENGTHS[place] != MANY_LENGTHS[other]:
        changed[place] = MANY_LENGTHS[other]
        yield changed


def test_lengths_of_which_one_changes_or_moves_have_another_checksum():
    """Within a block, and over blocks."""
    arrays = [MANY_LENGTHS, MANY_LENGTHS[:-1], MANY_LENGTHS[::-1]]
    arrays += [np.roll(MANY_LENGTHS, 1024), np.roll(MANY_LENGTHS, blocks.CHUNK)]
    for place in (0, 7, blocks.CHUNK, SIZE - 7):
        for step in (1, 2, 6, 1024, blocks.CHUNK, SIZE // 2):
            arrays += changed_at(place, (place + step) % SIZE)
    checksums = {scanned(array)[1] for array in arrays}
    assert len(checksums) == len(arrays)


def test_a_checksum_does_not_depend_on_how_lengths_lie_in_memory():
    strided = np.stack([MANY_LENGTHS, MANY_LENGTHS], axis=1)[:, 0]
    assert scanned(strided)[1] == scanned(MANY_LENGTHS)[1]
