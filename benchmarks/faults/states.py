"""States that are damaged, or of another run: refused without a trace, or carried out whole."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from typing import Any

from benchmarks.faults.case import Case, epoch_of
from benchmarks.faults.data import Seen
from dynagroup import StateError
from dynagroup.errors import AlignmentError, BudgetError, ConfigError

__all__ = ["damaged_state", "foreign_state", "mutated"]

OURS = (AlignmentError, BudgetError, ConfigError, StateError)
JUNK: list[Any] = [None, -1, 10**12, 2**80, 1.5, "", "x", [], {}, True, float("nan"), [[]], {"a": 1}]


def mutated(rng: random.Random, value: Any) -> Any:
    """``value`` with one part of it damaged."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place]
        return [*value[:place], mutated(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice("Aa0=é") + value[place + 1 :]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7, -1000, 10**9])
    return rng.choice(JUNK)


def _saved(case: Case, steps: int) -> Any:
    loader = case.loader(None)
    for _ in islice(loader, steps):
        pass
    return json.loads(json.dumps(loader.state_dict()))


def damaged_state(case: Case) -> list[str]:
    """A damaged state is refused by StateError and changes nothing; or what it says is carried out whole."""
    case.ranks = 1
    state = _saved(case, case.rng.randint(0, 3))
    return [fault for _ in range(10) for fault in _after(case, mutated(case.rng, state))]


def _after(case: Case, damaged: Any) -> list[str]:
    victim = case.loader(None)
    try:
        victim.load_state_dict(damaged)
    except StateError:
        same = epoch_of(victim) == epoch_of(case.loader(None))
        return [] if same else ["a refused state changed the loader"]
    except Exception as error:  # noqa: BLE001 - that is the finding
        return [f"a damaged state ends in {type(error).__name__}: {error}"[:300]]
    try:
        steps = list(islice(victim, 5000))
    except OURS:
        return []
    except Exception as error:  # noqa: BLE001 - that is the finding
        return [f"a damaged state was accepted and then ends in {type(error).__name__}: {error}"[:300]]
    if len(steps) >= 5000:
        return ["a damaged state was accepted and makes an endless epoch"]
    if max(Counter(i for step in steps for i in Seen.of(step).samples).values(), default=1) > 1:
        return ["a damaged state was accepted and repeats samples"]
    return []


def foreign_state(case: Case) -> list[str]:
    """A state of a run with other settings is refused, and changes nothing."""
    case.ranks = 1
    state = _saved(case, 1)
    changes: list[dict[str, Any]] = [{"seed": case.options["seed"] + 1}]
    if "samples_per_update" in case.options:
        changes += [{"samples_per_update": case.options["samples_per_update"] + 1}, {"drop_last": True}]
    else:
        changes += [{"accumulation": case.options["accumulation"] + 1}]
    if case.online:
        changes += [{"window": case.options["window"] + 1}]
    change = case.rng.choice(changes)
    stranger, twin = case.loader(None, **change), case.loader(None, **change)
    try:
        stranger.load_state_dict(state)
    except StateError as error:
        wrong = [] if next(iter(change)) in str(error) else [f"the refusal does not name {change}: {error}"]
        return wrong + ([] if epoch_of(stranger) == epoch_of(twin) else ["it changed the loader"])
    return [f"a state of another run was accepted: {change}"]
