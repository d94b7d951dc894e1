"""Laws of the online loader for any lengths, an attack on it (attack.py), and what known lengths and hints are worth."""

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import LengthAwareBatchSampler, TokenBudget
from dynagroup.testing import assert_loader_laws, run_ranks
from tests.online.attack import run
from tests.online.helpers import collate, lengths_of, make_loader

MODES = [{}, {"accumulation": 3}, {"samples_per_update": 12}]


def epochs(size, lengths, num_epochs=1, **options):
    """steps[epoch][rank]"""

    def whole(world):
        loader = make_loader(world, lengths, **options)
        return [list(loader) for _ in range(num_epochs)]

    by_rank = run_ranks(size, whole)
    return [[by_rank[rank][epoch] for rank in range(size)] for epoch in range(num_epochs)]


def fitting(samples):
    """What fits 128 tokens, or one sample."""
    batch = collate(samples)
    assert batch["input_ids"].numel() <= 128 or len(samples) == 1
    return batch


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 200), max_size=70),
    size=st.integers(1, 4),
    window=st.integers(1, 40),
    mode=st.sampled_from(MODES),
    num_epochs=st.integers(1, 2),
)
def test_laws_hold_for_any_lengths(lengths, size, window, mode, num_epochs):
    how = {"window": window, "shuffle": True, "collate_fn": fitting, **mode}
    make = lambda world: make_loader(world, lengths, **how)  # noqa: E731
    assert_loader_laws(make, len(lengths), world_size=size, epochs=num_epochs, resume_at=())


def test_a_state_is_small_and_json():
    lengths = lengths_of(4000, seed=1)
    loader = make_loader(None, lengths, window=1024, shuffle=True)
    list(islice(loader, 20))
    state = loader.state_dict()
    state.pop("lengths")
    assert len(json.dumps(state)) < 6000


def test_an_epoch_with_known_lengths_pads_like_the_offline_plan():
    lengths = lengths_of(600, seed=2)
    _, second = epochs(2, lengths, 2, shuffle=True)
    plan = LengthAwareBatchSampler(lengths, TokenBudget(128), shuffle=True, rank=0, world_size=2).plan
    assert not any(step.idle for steps in second for step in steps)
    assert len(second[0]) <= 1.02 * plan.num_steps + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(start, start + 16) for start in range(0, 48, 16)], ids=str)
def test_whatever_the_settings_every_sample_comes_once(seeds):
    """Stopped and saved anywhere, twice, and resumed on other ranks. Hundreds more: ``python -m tests.online.attack 0 500``."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"attack {seed} (python -m tests.online.attack {seed}): {error}") from error


def test_ranks_take_turns_with_the_dearest_batches_of_planned_updates():
    lengths = lengths_of(256, seed=5, top=60)

    def sizes(world):
        loader = make_loader(world, lengths, samples_per_update=64, max_tokens=300, shuffle=True)
        return [[step.batch["input_ids"].numel() for step in loader] for _ in range(2)][1]

    first, second = run_ranks(2, sizes)
    dearer = [a > b for a, b in zip(first, second, strict=True) if a != b]
    assert 0.25 < sum(dearer) / len(dearer) < 0.75
