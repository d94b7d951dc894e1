"""Laws of the online loader on ranks that are threads: conservation, fit, equal steps, exact weights, resume."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.plan.cost import Work
from dynagroup.testing import run_ranks

from .helpers import Jittered, Tokens, all_ids, lengths_of, make_loader, used

MODES = {
    "free": {},
    "accumulation": {"accumulation": 3},
    "update": {"samples_per_update": 12},
}


def epochs(size, lengths, num_epochs=1, **options):
    """steps[epoch][rank]"""

    def run(world):
        loader = make_loader(world, lengths, **options)
        return [list(loader) for _ in range(num_epochs)]

    by_rank = run_ranks(size, run)
    return [[by_rank[rank][epoch] for rank in range(size)] for epoch in range(num_epochs)]


def check_epoch(steps_by_rank, lengths, max_tokens=128):
    assert all_ids(steps_by_rank) == list(range(len(lengths)))
    assert len({len(steps) for steps in steps_by_rank}) == 1
    assert len({tuple(step.ends_update for step in steps) for steps in steps_by_rank}) == 1
    for steps in steps_by_rank:
        assert not steps or steps[-1].ends_update
        for step in steps:
            ids = step.batch["input_ids"]
            assert ids.numel() <= max_tokens or len(ids) == 1
            assert step.loss_scale == 0.0 if step.idle else True
    check_weights(steps_by_rank)


def check_weights(steps_by_rank):
    """Every update's totals are the sums over ranks and steps; scales average to one unit per unit of weight."""
    size = len(steps_by_rank)
    weight = samples = scale = 0.0
    for row in zip(*steps_by_rank, strict=True):
        weight += sum(step.weight.local for step in row)
        samples += sum(step.samples.local for step in row)
        scale += sum(step.loss_scale for step in row)
        if row[0].ends_update:
            assert all(step.weight.total == weight and step.samples.total == samples for step in row)
            assert not weight or scale == pytest.approx(size)
            weight = samples = scale = 0.0


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 200), max_size=70),
    size=st.integers(1, 4),
    window=st.integers(1, 40),
    mode=st.sampled_from(list(MODES.values())),
    num_epochs=st.integers(1, 2),
)
def test_laws_hold_for_any_lengths(lengths, size, window, mode, num_epochs):
    for steps_by_rank in epochs(size, lengths, num_epochs, window=window, shuffle=True, **mode):
        check_epoch(steps_by_rank, lengths)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("resume_size", [2, 3])
@pytest.mark.parametrize("dataset", [Tokens, Jittered])
def test_what_remained_of_a_later_epoch_is_resumed_on_any_ranks(dataset, resume_size, options):
    """Lengths are known by then; where processing is drawn at random, they are known roughly."""
    lengths = lengths_of(80, seed=9)

    def run(world, states=None, stop=None):
        loader = make_loader(world, lengths, dataset=dataset, shuffle=True, **options)
        if states is None:
            list(loader)
        else:
            loader.load_state_dict(states[world.rank] if len(states) == world.size else states)
        steps = [used(step) for step in islice(loader, stop)]
        return steps, json.loads(json.dumps(loader.state_dict()))

    whole = [steps for steps, _ in run_ranks(2, run)]
    for stop in range(1, len(whole[0]) - 1, 3):
        begun = run_ranks(2, lambda world, stop=stop: run(world, stop=stop))
        states = [state for _, state in begun]
        rest = [steps for steps, _ in run_ranks(resume_size, lambda world, states=states: run(world, states))]
        assert dataset is Jittered or resume_size == 3 or rest == [steps[stop:] for steps in whole]
        came = [*(steps for steps, _ in begun), *rest]
        assert sorted(i for steps in came for ids in steps for i in ids) == list(range(80))


def test_a_state_is_small_and_json():
    lengths = lengths_of(4000, seed=1)
    loader = make_loader(None, lengths, window=1024, shuffle=True)
    list(islice(loader, 20))
    state = loader.state_dict()
    state.pop("lengths")
    assert len(json.dumps(state)) < 6000


def test_an_epoch_with_known_lengths_pads_like_the_offline_plan():
    from dynagroup import LengthAwareBatchSampler, TokenBudget

    lengths = lengths_of(600, seed=2)
    _, second = epochs(2, lengths, 2, shuffle=True)
    plan = LengthAwareBatchSampler(lengths, TokenBudget(128), shuffle=True, rank=0, world_size=2).plan
    assert not any(step.idle for steps in second for step in steps)
    assert len(second[0]) <= 1.02 * plan.num_steps + 1


def test_hints_in_any_unit_keep_the_laws_and_cost_less():
    lengths = lengths_of(400, seed=8)
    plain = epochs(2, lengths, shuffle=True, window=32)[0]
    hinted = epochs(2, lengths, shuffle=True, window=32, length_hint=lambda i: 4.7 * lengths[i])[0]
    check_epoch(hinted, lengths)

    def time(by_rank):
        numbers = [step.batch["input_ids"].numel() for steps in by_rank for step in steps if not step.idle]
        return sum(Work().per_step + tokens for tokens in numbers)

    assert time(hinted) <= time(plain)
