from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap, Budget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.plan import planner as planner_module
from dynagroup.plan.batches import Batches
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import epoch_order
from dynagroup.plan.planner import PlanConfig, Planner
from dynagroup.plan.ranks import cut_rows, prove
from dynagroup.shapes import BatchShape
from dynagroup.testing import assert_conserves
from tests import strategies

configs = st.one_of(
    st.builds(
        PlanConfig,
        shuffle=st.booleans(),
        window=st.one_of(st.none(), st.integers(1, 40)),
        seed=st.integers(0, 9),
        hardest_first=st.integers(0, 3),
        round_batch=strategies.ROUNDINGS,
        uneven=st.sampled_from(["repeat", "drop"]),
        oversize=st.sampled_from(["alone", "drop"]),
    ),
    st.builds(PlanConfig, samples_per_update=st.integers(16, 40), seed=st.integers(0, 9)),
)


@settings(max_examples=80, deadline=None)
@given(strategies.lengths, strategies.budgets, configs, st.integers(1, 16), st.integers(0, 3))
def test_laws_of_a_plan(values: list[int], budget: Budget, config: PlanConfig, ranks: int, epoch: int) -> None:
    planner = Planner({"tokens": np.asarray(values, np.int32)}, budget, config)
    plan = planner.plan(epoch, ranks)
    emitted = [batch for row in plan.rows for batch in row]
    # conservation: what is repeated or left out is listed, everything else is there once
    assert_conserves([*emitted, plan.dropped.tolist()], [*range(len(values)), *plan.repeated.tolist()])
    # equal steps
    assert all(len(row) == ranks and all(row) for row in plan.rows)
    # fit
    oversize = set(plan.oversize.tolist())
    for batch in emitted:
        shape = BatchShape.of_samples({"tokens": plan.lengths["tokens"][batch]})
        assert planner.budget.fits(shape)[0] or (len(batch) == 1 and batch[0] in oversize)
    # only a row that cannot be filled repeats or leaves out, and at most ranks - 1 samples
    windows = -(-len(values) // config.samples_per_update) if config.samples_per_update else 1
    assert len(plan.repeated) <= windows * (ranks - 1)
    if config.oversize == "alone" and config.uneven == "drop":
        assert len(plan.dropped) <= windows * (ranks - 1)
    if windows == 1 and not config.round_batch and budget.layout == "padded" and len(plan.repeated):
        assert (plan.batches.sizes == 1).all()
    # determinism
    assert Planner(planner.lengths, budget, config).plan(epoch, ranks).fingerprint == plan.fingerprint


@settings(max_examples=40, deadline=None)
@given(strategies.lengths, strategies.token_budgets, st.integers(16, 40), st.integers(1, 16), st.integers(0, 2))
def test_an_update_holds_the_samples_that_fixed_batches_would(
    values: list[int], budget: Budget, size: int, ranks: int, epoch: int
) -> None:
    planner = Planner({"tokens": np.asarray(values, np.int32)}, budget, PlanConfig(samples_per_update=size, seed=7))
    plan = planner.plan(epoch, ranks)
    order = epoch_order(len(values), seed=7, epoch=epoch)
    update, scales, number = [], [], 0
    for step, row in enumerate(plan.rows):
        update += [index for batch in row for index in batch]
        scales += [(scale, len(batch)) for scale, batch in zip(plan.loss_scale[step], row, strict=True)]
        if plan.update_ends[step]:
            wanted = order[number * size : (number + 1) * size]
            assert set(update) == set(wanted.tolist())
            # with mean losses, the ranks' averaged gradient gives each sample of the update the weight 1 / its size
            assert np.isclose(sum(scale for scale, _ in scales) / ranks, 1.0)
            assert all(scale in (0.0, n * ranks / len(wanted)) for scale, n in scales)
            update, scales, number = [], [], number + 1
    assert number == plan.num_updates == -(-len(values) // size)
    assert not update


def test_literal_rectangle() -> None:
    lengths = {"tokens": np.array([1, 9, 2, 8, 3, 7], np.int32)}
    plan = Planner(lengths, TokenBudget(18), PlanConfig()).plan(0, 2)
    assert list(plan.rows) == [[[1], [4, 2, 0]], [[3], [5]]]  # four batches, mates of equal work: 9 with 9, 8 with 7
    assert plan.statistics["efficiency"] == 30 / (9 + 8 + 7 + 9)
    assert plan.num_steps == 2


def test_shuffled_epochs_share_hardly_a_batch_and_lead_with_the_longest() -> None:
    values = np.random.default_rng(0).lognormal(5, 1, 3000).astype(np.int32) + 1
    planner = Planner({"tokens": values}, TokenBudget(8192), PlanConfig(shuffle=True))
    plans = [planner.plan(epoch, 2) for epoch in range(3)]
    for plan in plans:
        assert any(int(values.argmax()) in batch for batch in plan.rows[0])
    groups = [{tuple(sorted(b)) for row in plan.rows for b in row if len(b) > 3} for plan in plans]
    assert len(groups[0] & groups[1]) <= 1  # two long samples may meet again
    assert len(groups[1] & groups[2]) <= 1
    assert plans[0].statistics["efficiency"] > 0.9


def test_hardest_first_counts_rows_and_windows_stay_windows() -> None:
    values = np.arange(1, 401, dtype=np.int32)
    config = PlanConfig(shuffle=True, window=400, hardest_first=3)
    plan = Planner({"tokens": values}, TokenBudget(1000), config).plan(1, 2)
    longest = [max(values[i] for batch in row for i in batch) for row in plan.rows]
    assert longest[:3] == sorted(longest, reverse=True)[:3]
    assert longest != sorted(longest, reverse=True)
    plan = Planner({"tokens": values[:100]}, TokenBudget(300), PlanConfig(window=20, hardest_first=0)).plan()
    seen = [index for row in plan.rows for batch in row for index in batch]
    assert [set(seen[k : k + 20]) for k in range(0, 100, 20)] == [set(range(k, k + 20)) for k in range(0, 100, 20)]


def test_first_batches_do_not_need_the_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner({"tokens": np.ones(1_000_000, np.int32)}, TokenBudget(64), PlanConfig(shuffle=True, window=4096))
    asked = []
    monkeypatch.setattr(planner_module, "cut_rows", lambda *args, **how: asked.append(1) or cut_rows(*args, **how))
    steps = planner.steps_from(planner.start_of(0, 8), 8)
    next(steps)
    assert len(asked) == 1


def test_oversize_samples() -> None:
    lengths = {"tokens": np.array([5, 50, 3, 60], np.int32)}
    alone = Planner(lengths, TokenBudget(10), PlanConfig()).plan()
    assert [batch for row in alone.rows for batch in row] == [[3], [1], [0, 2]]
    assert alone.oversize.tolist() == [1, 3]
    dropping = Planner(lengths, TokenBudget(10), PlanConfig(oversize="drop"))
    assert dropping.plan().dropped.tolist() == dropping.left_out.tolist() == [1, 3]
    assert (dropping.num_samples, dropping.num_planned) == (4, 2)
    with pytest.raises(BudgetError, match=r"sample 1 \(50 tokens\) does not fit even alone, nor do 1 others"):
        Planner(lengths, TokenBudget(10), PlanConfig(oversize="error"))
    several = {**lengths, "patches": np.array([0, 0, 99, 0], np.int32)}
    assert Planner(several, TokenBudget(55) & AdditiveCap("patches", 9), PlanConfig()).oversize.tolist() == [2, 3]


def test_rows_that_cannot_be_filled() -> None:
    lengths = {"tokens": np.array([9, 9, 8, 9, 9], np.int32)}
    repeated = Planner(lengths, TokenBudget(9), PlanConfig()).plan(0, 4)
    assert repeated.num_steps == 2
    assert len(repeated.repeated) == 3
    assert repeated.repeated[0] == 2  # the smallest first
    assert repeated.loss_scale[1].tolist() == [4.0, 0.0, 0.0, 0.0]
    dropped = Planner(lengths, TokenBudget(9), PlanConfig(uneven="drop")).plan(0, 4)
    assert dropped.num_steps == 1
    assert dropped.dropped.tolist() == [2]
    one = Planner({"tokens": np.array([4], np.int32)}, TokenBudget(9), PlanConfig()).plan(0, 3)
    assert list(one.rows) == [[[0], [0], [0]]]
    empty = Planner({"tokens": np.zeros(0, np.int32)}, TokenBudget(9), PlanConfig()).plan(0, 3)
    assert empty.num_steps == 0
    assert empty.statistics["num_samples"] == 0


def test_samples_that_fill_no_row_of_their_window_go_on_to_the_next() -> None:
    tokens = np.array([9, 9, 9, 9, 9, 9, 1, 1, 1, 1], np.int32)
    planner = Planner({"tokens": tokens}, TokenBudget(10), PlanConfig(window=4, hardest_first=0))
    first, second = planner.steps_from(planner.start_of(0, 4), 4)
    assert (len(first.table), first.end.carried, len(first.dropped)) == (1, (4, 5), 0)
    assert sorted(second.batches.order.tolist()) == [4, 5, 6, 7, 8, 9]
    assert second.end.carried == ()
    resumed = list(planner.steps_from(Cursor.of(json.loads(json.dumps(first.end.state()))), 4))
    assert resumed[0].batches.order.tolist() == second.batches.order.tolist()


def test_the_proof_catches_what_a_plan_must_never_be() -> None:
    lengths, normal = {"tokens": np.ones(14, np.int32)}, np.zeros(14, np.bool_)
    halves = Batches(np.arange(14), np.array([0, 7, 14]))
    prove(halves, 14, lengths, TokenBudget(7), normal)
    with pytest.raises(BudgetError, match="a batch of 7 samples, longest 1 tokens, does not fit"):
        prove(halves, 14, lengths, TokenBudget(6), normal)
    with pytest.raises(AssertionError, match="lost or repeated"):
        prove(Batches(np.arange(13), np.array([0, 7, 13])), 14, lengths, TokenBudget(7), normal)
    with pytest.raises(AssertionError, match="lost or repeated"):
        prove(Batches(np.array([0, 0, *range(2, 14)]), np.array([0, 7, 14])), 14, lengths, TokenBudget(7), normal)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "`window` must be an int of at least 1, but is 0 (or None)"),
        ({"samples_per_update": 2.0}, "`samples_per_update` must be an int of at least 1"),
        ({"seed": -1}, "`seed` must be an int of at least 0, but is -1"),
        ({"hardest_first": True}, "`hardest_first` must be an int of at least 0, but is True"),
        ({"window": 8, "samples_per_update": 8}, "exclude each other"),
        ({"oversize": "keep"}, "`oversize` must be one of"),
        ({"uneven": "idle"}, "`uneven` must be one of"),
        ({"round_batch": 8}, "`round_batch` must be a function"),
    ],
)
def test_bad_settings_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlanConfig(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="must be at least the number of ranks"):
        Planner({"tokens": np.ones(9, np.int32)}, TokenBudget(9), PlanConfig(samples_per_update=3)).plan(0, 4)
