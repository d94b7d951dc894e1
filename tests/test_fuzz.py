"""Whatever is read back may be damaged: only the project's errors come of it, and nothing is half changed.

Each thing is saved, damaged in one place at a time, from seeds, and loaded. Journals and receipts have tests of their own
(``tests/oom/test_storage.py``); loaders' states are in the table of laws.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest

from dynagroup import LearningBudget, LengthAwareBatchSampler, TokenBudget
from dynagroup.errors import StateError
from dynagroup.shapes import BatchShape

LENGTHS = [1 + (7 * i) % 40 for i in range(60)]
JUNK: list[Any] = [None, -1, 10**12, 2**80, 1.5, "", "x", [], {}, True, float("nan"), [[]], {"a": 1}]


def mutated(rng: random.Random, value: Any) -> Any:
    """``value`` with one part of it damaged, or missing."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice(JUNK)
    damaged = copy(value)
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.2:
        del damaged[place]
    else:
        damaged[place] = mutated(rng, value[place])
    return damaged


def refused(read: Callable[[Any], Any], whole: Any) -> int:
    """How many of 200 damaged values were refused; any error but a StateError fails."""
    number = 0
    for damaged in (mutated(random.Random(seed), whole) for seed in range(200)):
        try:
            read(damaged)
        except StateError:
            number += 1
        except Exception as error:  # noqa: BLE001 - that is the finding
            raise AssertionError(f"{damaged!r:.300} ends in {type(error).__name__}: {error}") from error
    return number


def sampler() -> Any:
    made = LengthAwareBatchSampler(LENGTHS, TokenBudget(160), shuffle=True, rank=0, world_size=1)
    next(iter(made))
    return made


def learning() -> Any:
    budget = LearningBudget(TokenBudget(160))
    budget.record_oom(BatchShape.of(4, 40))
    return budget


@pytest.mark.parametrize("make", [sampler, learning])
def test_states_of_samplers_and_budgets(make: Callable[[], Any]) -> None:
    def load(damaged: Any) -> None:
        victim = make()
        untouched = json.dumps(victim.state_dict())
        try:
            victim.load_state_dict(damaged)
        except StateError:
            assert json.dumps(victim.state_dict()) == untouched, "a refused state changed something"
            raise

    assert refused(load, json.loads(json.dumps(make().state_dict()))) > 150
