from __future__ import annotations

import copy
import json
import threading
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.plan import epoch as epoch_module
from dynagroup.plan import planner as planner_module
from dynagroup.plan import sampler as sampler_module
from dynagroup.plan.batches import multiple_of
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.ranks import cut_rows
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.testing import assert_conserves, run_ranks
from tests import strategies

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 300).astype(np.int32).clip(max=1024)
BUDGET = TokenBudget(1024)


def sampler(rank: int | None = 0, world_size: int | None = 1, **options: Any) -> LengthAwareBatchSampler:
    return LengthAwareBatchSampler(LENGTHS, BUDGET, rank=rank, world_size=world_size, **options)


MODES: list[dict[str, Any]] = [
    {},
    {"shuffle": True, "window": 40, "uneven": "drop"},
    {"window": 64, "round_batch": multiple_of(4)},
    {"samples_per_update": 37},
]


@settings(max_examples=40, deadline=None)
@given(strategies.lengths, strategies.budgets, st.sampled_from(MODES), st.integers(1, 16), st.integers(0, 2))
@pytest.mark.filterwarnings("ignore")
def test_ranks_together_emit_the_plan(values: list[int], budget: Budget, mode: dict, ranks: int, epoch: int) -> None:
    mine = [LengthAwareBatchSampler(values, budget, rank=r, world_size=ranks, **mode) for r in (0, ranks - 1)]
    every = LengthAwareBatchSampler(values, budget, world_size=ranks, **mode)
    for one in (*mine, every):
        one.set_epoch(epoch)
    rows = list(mine[0].plan.rows)
    assert [list(one) for one in mine] == [[row[rank] for row in rows] for rank in (0, ranks - 1)]
    assert list(every) == [batch for row in rows for batch in row]
    assert len(mine[0]) == len(every) / ranks == len(rows)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4)])
@pytest.mark.filterwarnings("ignore:too few samples for an equal number of steps")
def test_what_comes_on_other_ranks_is_what_remained(mode: dict[str, Any], before: int, after: int) -> None:
    """Each sample once, but for the few that fill a last row or are left out of one: those the plans list."""
    every = Counter(range(len(LENGTHS)))
    for stop in range(0, len(sampler(0, before, **mode)), 7):
        first = [sampler(rank, before, **mode) for rank in range(before)]
        came = Counter(i for row in islice(zip(*first, strict=True), stop) for batch in row for i in batch)
        then = [sampler(rank, after, **mode) for rank in range(after)]
        for one in then:
            one.load_state_dict(json.loads(json.dumps(first[0].state_dict())))
        came += Counter(i for row in zip(*then, strict=True) for batch in row for i in batch)
        plans = [sampler(0, before, **mode).plan, then[0].plan]
        assert came - every <= sum((Counter(plan.repeated.tolist()) for plan in plans), Counter())
        assert every - came <= sum((Counter(plan.dropped.tolist()) for plan in plans), Counter())
        assert "uneven" in mode or not every - came


def test_literal_state_is_small_and_json_able() -> None:
    one = sampler(shuffle=True, window=40)
    batches = iter(one)
    for _ in range(5):
        next(batches)
    state = one.state_dict()
    assert set(state) == {"kind", "version", "identity", "cursor", "learned", "order", "seal"}
    expected = Cursor(steps=5, window_size=40, segments=((1, 5),))
    assert Cursor.of(json.loads(json.dumps(state["cursor"]))) == expected


def test_resuming_plans_only_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sampler(shuffle=True, window=40)
    list(one)
    state = one.state_dict(num_steps=len(one) // 2)
    other = sampler(shuffle=True, window=40)
    other.load_state_dict(state)
    asked = []
    monkeypatch.setattr(planner_module, "cut_rows", lambda *args, **how: asked.append(1) or cut_rows(*args, **how))
    next(iter(other))
    assert len(asked) == 1


def test_epochs_advance_by_themselves_and_by_set_epoch() -> None:
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    first, second = list(one), list(one)
    assert first != second
    other.set_epoch(1)
    other.set_epoch(1)  # frameworks say it twice
    assert list(other) == second
    other.set_epoch(0)
    assert list(other) == first
    other.sampler.set_epoch(1)  # what accelerate and Lightning reach
    assert list(other) == second
    with pytest.raises(ConfigError, match="`epoch` must be an int of at least 0, but is -1"):
        one.set_epoch(-1)


def test_a_state_from_the_end_of_an_epoch_continues_with_the_next() -> None:
    one, unbroken = sampler(shuffle=True), sampler(shuffle=True)
    list(one)
    list(unbroken)
    other = sampler(shuffle=True)
    other.load_state_dict(one.state_dict())
    assert (other.epoch, other.plan.epoch, len(other)) == (1, 1, other.plan.num_steps)
    assert list(other) == list(unbroken)
    other.load_state_dict(one.state_dict())
    other.set_epoch(0)  # a loop that counts its epochs itself: nothing of epoch 0 remains
    assert list(other) == []


def test_a_framework_that_counts_from_zero_after_a_resume_does_not_lose_the_place() -> None:
    one = sampler(shuffle=True)
    list(one)
    it = iter(one)
    next(it)
    rest = list(copy.deepcopy(one.plan.rows))[1:]
    other = sampler(shuffle=True)
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(0)
    assert list(other) == [row[0] for row in rest]
    other.sampler.set_epoch(1)
    third = sampler(shuffle=True)
    third.set_epoch(2)
    assert list(other) == list(third)


def test_states_that_do_not_belong_are_refused() -> None:
    state, other, one = sampler().state_dict(), sampler(), sampler()
    with pytest.raises(StateError, match="seed: 0 then, 4 now"):
        sampler(seed=4).load_state_dict(state)
    with pytest.raises(StateError, match="its seal differs"):
        sampler().load_state_dict({**state, "windows_done": 1})
    other.set_epoch(3)
    with pytest.raises(StateError, match="states differ"):
        sampler().load_state_dict([state, other.state_dict()])
    next(iter(one))
    with pytest.raises(StateError, match="`num_steps` must be from 0 to 1, .* but is 2"):
        one.state_dict(num_steps=2)


def test_a_refused_state_does_not_teach_the_budget() -> None:
    taught, fresh = LearningBudget(BUDGET), LearningBudget(BUDGET)
    taught.record_failed_cost(500.0)
    state = LengthAwareBatchSampler(LENGTHS, taught, seed=1).state_dict()
    before = fresh.state_dict()
    with pytest.raises(StateError, match="seed: 1 then, 0 now"):
        LengthAwareBatchSampler(LENGTHS, fresh).load_state_dict(state)
    assert fresh.state_dict() == before


@pytest.mark.parametrize("ranks", [2, 4])
def test_after_a_resume_the_plan_is_what_is_emitted_and_len_is_the_whole_epoch(ranks: int) -> None:
    one = sampler(0, 2, samples_per_update=64)
    it = iter(one)
    steps = int(np.flatnonzero(one.plan.update_ends)[1]) + 1
    for _ in range(steps):
        next(it)
    resumed = sampler(0, ranks, samples_per_update=64)
    resumed.load_state_dict(json.loads(json.dumps(one.state_dict(num_steps=steps))))
    plan = resumed.plan
    assert list(resumed) == [row[0] for row in plan.rows]
    assert plan.num_updates == 3  # of five
    held = sum(len(batch) for row in plan.rows for batch in row)
    assert plan.report().startswith(f"epoch 0: {held} samples ")
    assert resumed.plan_of(0).fingerprint == sampler(0, ranks, samples_per_update=64).plan.fingerprint
    assert len(resumed) == len(sampler(0, ranks, samples_per_update=64)) > plan.num_steps


def test_steps_are_counted_from_the_beginning_of_the_epoch_across_resumes() -> None:
    everything = list(sampler(shuffle=True, window=40))
    one, steps = sampler(shuffle=True, window=40), 0
    seen: list[list[int]] = []
    for more in (3, 4, 2):
        it = iter(one)
        seen += [next(it) for _ in range(more + 2)][:more]  # two more were fetched ahead
        steps += more
        state = json.loads(json.dumps(one.state_dict(num_steps=steps)))
        with pytest.raises(StateError, match=f"must be from {steps - more} to {steps + 2}, .* but is {steps + 3}"):
            one.state_dict(num_steps=steps + 3)
        one = sampler(shuffle=True, window=40)
        one.load_state_dict(state)
        assert one.state_dict() == state
        with pytest.raises(StateError, match=f"must be from {steps} to {steps}, .* but is 0"):
            one.state_dict(num_steps=0)
    assert seen + list(one) == everything


def test_given_order_is_read_once_an_epoch_and_checked() -> None:
    order = RandomSampler(range(300), generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    one = sampler(order=order, samples_per_update=50)
    expected = list(RandomSampler(range(300), generator=torch.Generator().manual_seed(3)))  # type: ignore[arg-type]
    seen = [index for batch in list(one)[:] for index in batch]
    assert [set(seen[k : k + 50]) for k in range(0, 300, 50)] == [set(expected[k : k + 50]) for k in range(0, 300, 50)]
    weighted = sampler(order=[5, 5, 7, 9], shuffle=True)
    assert_conserves(weighted, [5, 5, 7, 9])
    with pytest.raises(ConfigError, match="gives index 300, but there are lengths for 300 samples"):
        list(sampler(order=[3, 300]))
    with pytest.raises(ConfigError, match="must give integer indices, but gives float64"):
        list(sampler(order=[0.5]))  # type: ignore[list-item]
    state = one.state_dict()
    with pytest.raises(StateError, match="gives other indices in epoch 0"):
        sampler(order=range(300), samples_per_update=50).load_state_dict(state)


def test_warnings_and_errors_of_samples_that_do_not_fit() -> None:
    with pytest.warns(UserWarning, match=r"1 samples do not fit .* alone and are emitted alone; .* sample 1 with 99"):
        LengthAwareBatchSampler([3, 99], TokenBudget(10), rank=0, world_size=1)
    with pytest.warns(UserWarning, match=r"samples \[1\] stand in a row a second time"):
        list(LengthAwareBatchSampler([9, 3, 9], TokenBudget(10), rank=0, world_size=2))


def test_rank_arguments() -> None:
    with pytest.raises(ConfigError, match=r"`rank` \(1\) needs `world_size`"):
        sampler(1, None)
    with pytest.raises(ConfigError, match="`rank` must be an int of at most 3, but is 4"):
        sampler(4, 4)
    with pytest.raises(ConfigError, match="`world_size` must be an int of at least 1, but is 0"):
        sampler(None, 0)
    assert not hasattr(sampler(None, 4), "batch_size")
    assert not hasattr(sampler(0, 1), "batch_size")
    with pytest.raises(ConfigError, match="would shard it a second time"):
        _ = sampler(1, 4).batch_size


class Items(Dataset):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> int:
        return index


def test_a_state_behind_workers_is_told_the_steps_that_training_used() -> None:
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    batches = iter(DataLoader(Items(), batch_sampler=one, num_workers=2, prefetch_factor=4))
    used = [next(batches).tolist() for _ in range(3)]
    with pytest.raises(StateError, match="worker processes fetch batches ahead"):
        one.state_dict()
    other.load_state_dict(one.state_dict(num_steps=3))
    assert used + list(other) == list(sampler(shuffle=True))


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize(("num_workers", "stop"), [(0, 3), (2, 3), (2, -1)])
def test_stateful_dataloader_resumes_exactly(num_workers: int, stop: int) -> None:
    def make() -> StatefulDataLoader:
        return StatefulDataLoader(Items(), batch_sampler=sampler(shuffle=True), num_workers=num_workers)

    reference = sampler(shuffle=True)
    whole, following = list(reference), list(reference)
    stop = len(whole) if stop < 0 else stop
    loader = make()
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    assert rest in ([whole[stop:]] if stop < len(whole) else [[], following])
    if rest:
        assert [batch.tolist() for batch in resumed] == (following if stop < len(whole) else list(reference))


def test_an_order_that_differs_between_ranks_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = threading.local()
    monkeypatch.setattr(sampler_module, "rank_and_size", lambda: (mine.world.rank, mine.world.size))
    monkeypatch.setattr(epoch_module, "current_world", lambda: mine.world)

    def run(world: World, seed: int) -> list[list[int]]:
        mine.world = world
        order = RandomSampler(range(300), generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        return list(sampler(None, None, order=order, samples_per_update=50))

    with pytest.raises(AlignmentError, match="`order` gives other indices on other ranks in epoch 0, .* seed it alike"):
        run_ranks(2, lambda world: run(world, world.rank))
    columns = run_ranks(2, lambda world: run(world, 7))
    assert_conserves((batch for column in columns for batch in column), range(300))
