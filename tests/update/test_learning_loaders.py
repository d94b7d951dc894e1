"""Loaders learn: they apply what running out of memory has taught when an epoch begins, and keep it in their state; and with
`work="measure"` the first epoch's steps are timed, and the next ones are cut by what they took, alike on all ranks."""

import json
from typing import Any

import numpy as np
import pytest

from dynagroup import LearningBudget, LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.shapes import BatchShape
from dynagroup.testing import run_ranks

LENGTHS = np.random.default_rng(0).integers(5, 100, 300)
DATA = [{"input_ids": [1] * length} for length in LENGTHS]
FAILED = BatchShape.of(9, 100)
LEARNED = 810  # 0.9 of what failed
HOW: dict[str, Any] = {"collate_fn": list, "weigh": "samples"}
SIZED = {**HOW, "samples_per_update": 48}
KINDS = {
    "sampler": lambda learning, world: LengthAwareBatchSampler(LENGTHS, learning, shuffle=True, rank=0, world_size=1),
    "preserved": lambda learning, world: PlannedDataLoader(DATA, LENGTHS, learning, world=world, **SIZED),
    "free": lambda learning, world: PlannedDataLoader(DATA, LENGTHS, learning, world=world, **HOW),
    "online": lambda learning, world: OnlineDataLoader(DATA, learning, shuffle=True, window=64, world=world, **HOW),
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Any:
    return lambda learning, world=None: KINDS[request.param](learning, world)


def batches(items: Any) -> list[list[int]]:
    return [list(getattr(item, "indices", item)) for item in items if not getattr(item, "idle", False)]


def largest(found: list[list[int]]) -> int:
    return max(len(batch) * max(LENGTHS[i] for i in batch) for batch in found)


def test_an_epoch_follows_what_the_one_before_taught_and_states_hold_it(make):
    learning = LearningBudget(TokenBudget(1000))
    loader = make(learning)
    items = iter(loader)
    next(items)
    learning.record_oom(FAILED)
    assert largest(batches(items)) > LEARNED, "a plan stays what it was while it is carried out"
    items = iter(loader)
    second = batches([next(items) for _ in range(2)])
    learning.record_oom(BatchShape.of(8, 100))
    again = LearningBudget(TokenBudget(1000))
    resumed = make(again)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert again.report.num_ooms == 2
    rest = batches(items)
    assert largest(second + rest) <= LEARNED
    assert sorted(i for batch in second + rest for i in batch) == list(range(300))
    assert batches(resumed) == rest
    if hasattr(loader, "cursor"):
        assert resumed.cursor == loader.cursor, "the books count what was, not what the new limit would have made of it"
    assert largest(batches(resumed)) <= 0.9 * 800


def test_free_updates_that_were_done_are_counted_as_they_were():
    learning = LearningBudget(TokenBudget(1000))
    loader = KINDS["free"](learning, None)
    list(loader)
    learning.record_oom(FAILED)
    first, announced = loader.cursor.update, loader.num_updates
    list(loader)
    assert first == announced < loader.cursor.update - first
    assert loader.updates_in(2) == loader.cursor.update


@pytest.mark.parametrize("kind", ["preserved", "free", "online"])
def test_ranks_follow_the_one_that_learned_most(kind):
    def run(world):
        learning = LearningBudget(TokenBudget(1000))
        loader = KINDS[kind](learning, world)
        batches(loader)
        if world.rank == 1:
            learning.record_oom(FAILED)
        return batches(loader), loader.budget.fingerprint

    results = run_ranks(2, run)
    assert largest([batch for found, _ in results for batch in found]) <= LEARNED
    assert results[0][1] == results[1][1]
    assert sorted(i for found, _ in results for batch in found for i in batch) == list(range(300))


def test_samples_that_no_batch_may_hold_after_what_was_learned_are_told_and_counted():
    budget = LearningBudget(TokenBudget(64))
    loader = PlannedDataLoader(range(4), [50, 40, 4, 3], budget, samples_per_update=2, oversize="drop", **HOW)
    assert sorted(i for step in loader for i in step.indices) == [0, 1, 2, 3]
    loader.budget.learner.record_oom(BatchShape.of(2, longest=16))
    with pytest.warns(UserWarning, match="do not fit the budget even alone and are left out; the first is sample 0"):
        assert sorted(i for step in loader for i in step.indices) == [2, 3]
