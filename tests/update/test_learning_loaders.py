"""Loaders apply what running out of memory has taught when an epoch begins, and keep it in their state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, TokenBudget
from dynagroup.oom import LearningBudget
from dynagroup.shapes import BatchShape
from dynagroup.testing import run_ranks
from dynagroup.update.planned import PlannedDataLoader

LENGTHS = np.random.default_rng(0).integers(5, 100, 300).tolist()
DATA = [{"input_ids": [1] * length} for length in LENGTHS]
FAILED = BatchShape.of(9, 100)
LEARNED = 810  # 0.9 of what failed


def loader_of(kind: str, learning: Any, world: Any = None, **options: Any) -> Any:
    if kind == "sampler":
        return LengthAwareBatchSampler(LENGTHS, learning, shuffle=True, rank=0, world_size=1)
    if kind == "online":
        return OnlineDataLoader(
            DATA, learning, collate_fn=list, weigh="samples", shuffle=True, window=64, world=world, **options
        )
    per_update = None if kind == "free" else 48
    return PlannedDataLoader(
        DATA, LENGTHS, learning, samples_per_update=per_update, collate_fn=list, weigh="samples", world=world, **options
    )


def batches(loader: Any) -> list[list[int]]:
    if isinstance(loader, (PlannedDataLoader, OnlineDataLoader)):
        return [list(step.indices) for step in loader if not step.idle]
    return list(loader)


def largest(found: list[list[int]]) -> int:
    return max(len(batch) * max(LENGTHS[i] for i in batch) for batch in found)


KINDS = ["sampler", "preserved", "free", "online"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_follows_what_the_one_before_taught(kind):
    learning = LearningBudget(TokenBudget(1000))
    loader = loader_of(kind, learning)
    items, sizes = iter(loader), []
    next(items)
    learning.record_oom(FAILED)
    for item in items:
        sizes.append(list(item if kind == "sampler" else item.indices))
    assert largest(sizes) > LEARNED, "a plan stays what it was while it is carried out"
    second = batches(loader)
    assert largest(second) <= LEARNED
    assert sorted(i for batch in second for i in batch) == list(range(300))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaders_state_holds_what_was_learned(kind):
    learning = LearningBudget(TokenBudget(1000))
    loader = loader_of(kind, learning)
    batches(loader)
    learning.record_oom(FAILED)
    items = loader.updates() if kind in ("preserved", "free") else iter(loader)
    used = [next(items) for _ in range(2)]
    learning.record_oom(BatchShape.of(8, 100))
    state = json.loads(json.dumps(loader.state_dict()))

    again = LearningBudget(TokenBudget(1000))
    resumed = loader_of(kind, again)
    resumed.load_state_dict(state)
    assert again.report.num_ooms == 2
    assert batches(resumed) == batches_of_rest(items, kind)
    if kind == "free":
        assert resumed.cursor == loader.cursor, "the books count what was, not what the new limit would have made of it"
        counts = [resumed.num_updates_in(epoch) for epoch in range(2)]
        assert counts[0] < counts[1]
        assert counts == [loader.num_updates_in(epoch) for epoch in range(2)]
        assert sum(counts) == resumed.cursor.update
    assert largest(batches(resumed)) <= 0.9 * 800
    del used


def batches_of_rest(items: Any, kind: str) -> list[list[int]]:
    if kind == "sampler":
        return list(items)
    flat = [step for item in items for step in (item if isinstance(item, list) else [item])]
    return [list(step.indices) for step in flat]


@pytest.mark.parametrize("kind", ["preserved", "free", "online"])
def test_ranks_follow_the_one_that_learned_most(kind):
    def run(world):
        learning = LearningBudget(TokenBudget(1000))
        loader = loader_of(kind, learning, world)
        batches(loader)
        if world.rank == 1:
            learning.record_oom(FAILED)
        return batches(loader), loader.budget.fingerprint

    results = run_ranks(2, run)
    assert largest([batch for found, _ in results for batch in found]) <= LEARNED
    assert results[0][1] == results[1][1]
    assert sorted(i for found, _ in results for batch in found for i in batch) == list(range(300))
