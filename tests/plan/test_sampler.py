"""The sampler: it emits its plan, moves through epochs, and its state says what remains. The table of laws holds the rest."""

import copy
import json
import threading
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dynagroup import AlignmentError, Budget, ConfigError, LengthAwareBatchSampler, StateError, TokenBudget, multiple_of
from dynagroup.distributed import World
from dynagroup.plan import epoch as epoch_module
from dynagroup.plan import planner as planner_module
from dynagroup.plan import sampler as sampler_module
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.ranks import cut_kinds
from dynagroup.testing import assert_conserves, run_ranks
from tests import strategies

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 300).astype(np.int32).clip(max=1024)
BUDGET = TokenBudget(1024)


def sampler(rank: int | None = 0, world_size: int | None = 1, **options: Any) -> LengthAwareBatchSampler:
    return LengthAwareBatchSampler(LENGTHS, BUDGET, rank=rank, world_size=world_size, **options)


def shuffled_order(seed: int) -> Any:
    return RandomSampler(range(300), generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


def reread(state: Any) -> Any:
    return json.loads(json.dumps(state))


MODES: list[Any] = [{}, {"shuffle": True, "window": 40, "uneven": "drop"}, {"samples_per_update": 37}]
MODES += [{"window": 64, "round_batch": multiple_of(4)}]


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


def test_a_state_is_small_and_only_what_comes_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sampler(shuffle=True, window=40), sampler(shuffle=True, window=40)
    assert len(list(islice(one, 5))) == 5
    state = one.state_dict()
    assert set(state) == {"kind", "version", "identity", "cursor", "learned", "left_out", "order", "seal"}
    assert Cursor.of(reread(state["cursor"])) == Cursor(steps=5, window_size=40, segments=((1, 5, None),))
    other.load_state_dict(state)
    asked = []
    monkeypatch.setattr(planner_module, "cut_kinds", lambda *args, **how: asked.append(1) or cut_kinds(*args, **how))
    next(iter(other))
    assert len(asked) == 1


def test_epochs_advance_by_themselves_and_by_set_epoch() -> None:
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    first, second = list(one), list(one)
    assert first != second
    for _ in range(2):  # frameworks say it twice
        other.set_epoch(1)
    assert list(other) == second
    other.set_epoch(0)
    assert list(other) == first
    other.sampler.set_epoch(1)  # what accelerate and Lightning reach
    assert list(other) == second
    with pytest.raises(ConfigError, match="`epoch` must be an int of at least 0, but is -1"):
        one.set_epoch(-1)


def test_a_state_from_the_end_of_an_epoch_continues_with_the_next_and_frameworks_may_count_from_zero() -> None:
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    list(one)
    state = one.state_dict()
    other.load_state_dict(state)
    assert (other.epoch, other.plan.epoch, len(other)) == (1, 1, other.plan.num_steps)
    assert list(other) == list(one)
    other.load_state_dict(state)
    other.set_epoch(0)  # a loop that counts its epochs itself: nothing of epoch 0 remains
    assert list(other) == []
    one, other, third = sampler(shuffle=True), sampler(shuffle=True), sampler(shuffle=True)
    list(one)
    next(iter(one))
    rest = list(copy.deepcopy(one.plan.rows))[1:]
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(0)
    assert list(other) == [row[0] for row in rest]
    other.sampler.set_epoch(1)
    third.set_epoch(2)
    assert list(other) == list(third)


@pytest.mark.parametrize("ranks", [2, 4])
def test_after_a_resume_the_plan_is_what_is_emitted_and_len_is_the_whole_epoch(ranks: int) -> None:
    one = sampler(0, 2, samples_per_update=64)
    resumed, whole = (sampler(0, ranks, samples_per_update=64) for _ in range(2))
    steps = int(np.flatnonzero(one.plan.update_ends)[1]) + 1
    assert len(list(islice(one, steps))) == steps
    resumed.load_state_dict(reread(one.state_dict(num_steps=steps)))
    plan = resumed.plan
    assert list(resumed) == [row[0] for row in plan.rows]
    assert plan.num_updates == 3  # of five
    held = sum(len(batch) for row in plan.rows for batch in row)
    assert plan.report().startswith(f"epoch 0: {held} samples ")
    assert resumed.plan_of(0).fingerprint == whole.plan.fingerprint
    assert len(resumed) == len(whole) > plan.num_steps


def test_steps_are_counted_from_the_beginning_of_the_epoch_across_resumes() -> None:
    everything, one, steps = list(sampler(shuffle=True, window=40)), sampler(shuffle=True, window=40), 0
    seen: list[list[int]] = []
    for more in (3, 4, 2):
        seen += list(islice(one, more + 2))[:more]  # two more were fetched ahead
        steps += more
        state = reread(one.state_dict(num_steps=steps))
        with pytest.raises(StateError, match=f"must be from {steps - more} to {steps + 2}, .* but is {steps + 3}"):
            one.state_dict(num_steps=steps + 3)
        one = sampler(shuffle=True, window=40)
        one.load_state_dict(state)
        assert one.state_dict() == state
    assert seen + list(one) == everything


def test_given_order_is_read_once_an_epoch_and_checked() -> None:
    one, expected = sampler(order=shuffled_order(3), samples_per_update=50), list(shuffled_order(3))
    seen = [index for batch in list(one) for index in batch]
    assert [set(seen[k : k + 50]) for k in range(0, 300, 50)] == [set(expected[k : k + 50]) for k in range(0, 300, 50)]
    assert_conserves(sampler(order=[5, 5, 7, 9], shuffle=True), [5, 5, 7, 9])
    with pytest.raises(StateError, match="gives other indices in epoch 0"):
        sampler(order=range(300), samples_per_update=50).load_state_dict(one.state_dict())


def test_arguments_and_samples_that_do_not_fit() -> None:
    with pytest.warns(UserWarning, match=r"1 samples do not fit .* alone and are emitted alone; .* sample 1 with 99"):
        LengthAwareBatchSampler([3, 99], TokenBudget(10), rank=0, world_size=1)
    with pytest.warns(UserWarning, match=r"samples \[1\] are used a second time"):
        list(LengthAwareBatchSampler([9, 3, 9], TokenBudget(10), rank=0, world_size=2))
    assert not hasattr(sampler(None, 4), "batch_size")
    with pytest.raises(ConfigError, match="would shard it a second time"):
        _ = sampler(1, 4).batch_size


def test_a_state_behind_workers_is_told_the_steps_that_training_used() -> None:
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    batches = iter(DataLoader(range(300), batch_sampler=one, num_workers=2, prefetch_factor=4))  # type: ignore[arg-type]
    used = [next(batches).tolist() for _ in range(3)]
    with pytest.raises(StateError, match="worker processes fetch batches ahead"):
        one.state_dict()
    other.load_state_dict(one.state_dict(num_steps=3))
    assert used + list(other) == list(sampler(shuffle=True))


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize(("num_workers", "stop"), [(0, 3), (2, 3), (2, -1)])
def test_stateful_dataloader_resumes_exactly(num_workers: int, stop: int) -> None:
    def make() -> StatefulDataLoader:
        return StatefulDataLoader(range(300), batch_sampler=sampler(shuffle=True), num_workers=num_workers)  # type: ignore[arg-type]

    reference = sampler(shuffle=True)
    whole, following = list(reference), list(reference)
    stop = len(whole) if stop < 0 else stop
    loader, resumed = make(), make()
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    resumed.load_state_dict(loader.state_dict())
    rest = [[batch.tolist() for batch in resumed] for _ in range(2)]
    assert rest in ([whole[stop:], following], [[], following], [following, list(reference)])
    assert stop == len(whole) or rest[0] == whole[stop:]


def test_an_order_that_differs_between_ranks_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = threading.local()
    monkeypatch.setattr(sampler_module, "rank_and_size", lambda: (mine.world.rank, mine.world.size))
    monkeypatch.setattr(epoch_module, "current_world", lambda: mine.world)

    def run(world: World, seed: int) -> list[list[int]]:
        mine.world = world
        return list(sampler(None, None, order=shuffled_order(seed), samples_per_update=50))

    with pytest.raises(AlignmentError, match="`order` gives other indices on other ranks in epoch 0, .* seed it alike"):
        run_ranks(2, lambda world: run(world, world.rank))
    columns = run_ranks(2, lambda world: run(world, 7))
    assert_conserves((batch for column in columns for batch in column), range(300))


@pytest.mark.parametrize("settings", [{"samples_per_update": 2}, {"shuffle": True, "window": 2}])
def test_a_last_window_that_fills_no_row_does_not_hold_an_epoch_open(settings: dict[str, Any]) -> None:
    def make() -> LengthAwareBatchSampler:
        return LengthAwareBatchSampler([5] * 9, TokenBudget(10), uneven="drop", rank=0, world_size=2, **settings)

    sampler, resumed = make(), make()
    resumed.load_state_dict(sampler.state_dict(num_steps=len(list(sampler))))
    assert (resumed.epoch, len(list(resumed))) == (1, 4)


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"samples_per_update": 4}], ids=str)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_samples_make_no_batches(how: dict[str, Any], layout: Any) -> None:
    made = LengthAwareBatchSampler([], TokenBudget(9, layout=layout), rank=0, world_size=2, **how)
    assert (list(made), len(made), made.plan.num_steps) == ([], 0, 0)
