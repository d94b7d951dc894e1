"""Every state that a loader gives is taken back, on any number of ranks, and each sample of the epoch comes once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynagroup import LengthAwareBatchSampler, PlannedDataLoader, TokenBudget
from dynagroup.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:too few samples for an equal number"),
    pytest.mark.filterwarnings("ignore:.*do not fit the budget even alone"),
]
LENGTHS = np.random.default_rng(24).integers(1, 60, 23).tolist()
SIZES: dict[str, dict[str, Any]] = {
    "set": {"samples_per_update": 6},
    "free": {"accumulation": 2},
}


def loader_of(world: Any, lengths: list[int], most: int, kind: str, seed: int) -> Any:
    budget = TokenBudget(60, max_samples=most)
    if kind == "sampler":
        return LengthAwareBatchSampler(lengths, budget, shuffle=True, seed=seed, rank=world.rank, world_size=world.size)
    options = {"collate_fn": list, "weigh": "samples", "world": world, "seed": seed, **SIZES[kind]}
    return PlannedDataLoader(range(len(lengths)), lengths, budget, **options)


def held(item: Any) -> list[int]:
    return list(item) if isinstance(item, list) else [] if item.idle else list(item.indices)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    most=st.integers(1, 4),
    kind=st.sampled_from(["sampler", *SIZES]),
    seed=st.integers(0, 9),
    chain=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=3, max_size=3),
)
@example(lengths=LENGTHS, most=1, kind="free", seed=1, chain=[(2, 1), (5, 3), (1, 1)])
def test_a_state_is_taken_back_after_three_changes_of_ranks(
    lengths: list[int], most: int, kind: str, seed: int, chain: list[tuple[int, int]]
) -> None:
    """Rows are filled by repeats where a batch holds one sample: those come beyond the epoch's samples, never instead of them."""
    emitted: Counter[int] = Counter()
    states: Any = None
    for ranks, steps in [*chain, (2, None)]:

        def run(world: Any, states: Any = states, steps: int | None = steps) -> tuple[list[int], Any]:
            loader = loader_of(world, lengths, most, kind, seed)
            if states is not None:
                loader.load_state_dict(states)
            assert loader.epoch == 0, "samples of the epoch are still to come"
            used = [index for item in islice(loader, steps) for index in held(item)]
            return used, json.loads(json.dumps(loader.state_dict()))

        if len(emitted) == len(lengths):
            break
        found = run_ranks(ranks, run)
        emitted.update(index for used, _ in found for index in used)
        states = [state for _, state in found]
    assert set(emitted) == set(range(len(lengths)))
    assert kind == "sampler" or emitted.total() == len(lengths)
