"""The attack in small: see attack.py. Hundreds more: ``python -m tests.online.attack 0 500``."""

from __future__ import annotations

import copy
import json
import random

import pytest

from dynagroup import StateError
from dynagroup.testing import run_ranks
from tests.online.attack import EPOCHS, Attack, leg, run

HUGE = 10**12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 120, 20)], ids=str)
def test_whatever_the_settings_every_sample_comes_once(seeds):
    """Stopped and saved anywhere, twice, and resumed on other ranks. A failure names the seed that repeats it."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"attack {seed} (python -m tests.online.attack {seed}): {error}") from error


def leaves(value, path=()):
    """Paths to everything inside a state."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for place, element in enumerate(value[:3]):
            yield from leaves(element, (*path, place))


def damaged(state, path, r):
    """The state with one part changed, removed, or replaced by something of another kind."""
    state = copy.deepcopy(state)
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    old, key = holder[path[-1]], path[-1]
    changes = [None, "x", -1, HUGE, 2.5, [], {}, [HUGE], True]
    if isinstance(old, int):
        changes += [old + 1, old - 1]
    if isinstance(old, str):
        changes += [old[:-1], old + "A"]
    if isinstance(old, list):
        changes += [old + old, old[1:]]
    if isinstance(holder, dict) and r.random() < 0.2:
        del holder[key]
    else:
        holder[key] = r.choice(changes)
    return state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [0, 2, 5, 6, 7, 8, 15, 21, 40])
def test_damaged_states_are_refused_and_change_nothing(seed):
    attack = Attack(seed)
    size = attack.sizes[0]
    states = [state for _, state in run_ranks(size, lambda world: leg(attack, world, None, 1, 2))]
    r = random.Random(seed)
    paths = [path for path in leaves(states[0]) if path]

    def refuse(world):
        loader, mine = attack.loader(world), states[world.rank]
        loader.set_epoch(EPOCHS - 1)
        next(iter(loader), None)
        before = json.dumps(loader.state_dict())
        for path in r.sample(paths, min(len(paths), 60)) if world.rank == 0 else ():
            broken = damaged(mine, path, r)
            if broken == mine:
                continue
            given = broken if r.random() < 0.5 else [broken, *states[1:]]
            with pytest.raises(StateError):
                loader.load_state_dict(given)
            assert json.dumps(loader.state_dict()) == before, f"refusing a state without its {path} changed the loader"
        for other in (
            None,
            3,
            "state",
            {},
            [],
            [None],
            [mine, 3],
            [states[world.rank - 1]] if size > 1 else [mine] * 2,
            [*states, mine],
        ):
            with pytest.raises(StateError):
                loader.load_state_dict(other)
        loader.load_state_dict(mine)
        return [i for step in loader for i in step.indices if not step.idle]

    run_ranks(size, refuse)
