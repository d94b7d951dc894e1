"""Schedules of samples per update in the online loader: the updates that the offline one makes, whatever is prefetched."""

from __future__ import annotations

import json

import pytest

from dynagroup import AlignmentError, ConfigError, StateError, TokenBudget
from dynagroup.testing import assert_resumes_exactly, run_ranks
from dynagroup.update.planned import PlannedDataLoader
from dynagroup.update.schedule import doubling, linear_ramp

from .helpers import Jittered, Tokens, collate, lengths_of, make_loader, used

LENGTHS = lengths_of(90, seed=4)
RAMP = linear_ramp(5, 23, num_updates=7)
WORKERS = {"num_workers": 2, "prefetch_factor": 2}


def offline(num_epochs=2, **options):
    """The samples of each update of each epoch."""
    loader = PlannedDataLoader(Tokens(LENGTHS), LENGTHS, TokenBudget(128), collate_fn=collate, seed=3, **options)
    return [
        [sorted(i for step in update for i in step.indices) for update in loader.updates()] for _ in range(num_epochs)
    ]


def online(world, **options):
    return make_loader(world, LENGTHS, shuffle=True, seed=3, **options)


def updates_of(loader):
    return [[i for step in update for i in used(step)] for update in loader.updates()]


def together(by_rank):
    return [sorted(i for part in parts for i in part) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_offline_loader_makes_the_same_updates(size, drop_last):
    options = {"samples_per_update": RAMP, "drop_last": drop_last}

    def run(world):
        loader = online(world, **options)
        epochs = []
        for _ in range(3):
            loader.set_epoch(len(epochs))
            announced = loader.num_updates
            epochs.append(updates_of(loader))
            assert announced == len(epochs[-1])
        return epochs

    by_rank = run_ranks(size, run)
    found = [together([epochs[number] for epochs in by_rank]) for number in range(3)]
    assert found == offline(3, **options)
    sizes = [len(update) for epoch in found for update in epoch]
    assert sizes[:5] == [5, 7, 10, 12, 15]
    assert sum(sizes) < 270 if drop_last else sum(sizes) == 270
    assert sizes[8:11] == [23, 23, 23], "the schedule counts over the whole run"


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_schedule_resumes_at_every_step_of_a_later_epoch_too(sizes, drop_last):
    def started(world):
        loader = online(world, samples_per_update=RAMP, drop_last=drop_last, dataset=Jittered)
        loader.set_epoch(1)
        return loader

    def first(world, stop):
        loader, before = started(world), []
        items = iter(loader)
        for _ in range(stop):
            before += used(next(items))
        return before, json.loads(json.dumps(loader.state_dict()))

    def rest(world, states):
        loader = started(world)
        loader.load_state_dict(states[world.rank] if len(states) == world.size else states)
        return updates_of(loader)

    updates = offline(samples_per_update=RAMP, drop_last=drop_last)[1]
    whole = sorted(i for update in updates for i in update)
    for stop in (1, 2, 3, 4):
        before = run_ranks(sizes[0], lambda world, stop=stop: first(world, stop))
        after = together(run_ranks(sizes[1], lambda world, b=before: rest(world, [state for _, state in b])))
        assert sorted([i for b, _ in before for i in b] + [i for update in after for i in update]) == whole
        assert after[1:] == updates[len(updates) - len(after) + 1 :]


@pytest.mark.parametrize("size", [1, 2])
def test_a_schedule_resumes_exactly(size):
    assert_resumes_exactly(
        lambda world: online(world, samples_per_update=doubling(6, milestones=(3, 5)), drop_last=True),
        world_size=size,
        indices_of=used,
    )


def test_workers_that_prefetch_change_nothing_and_a_run_resumes_in_the_middle():
    whole = offline(samples_per_update=RAMP)
    loader = online(None, samples_per_update=RAMP, **WORKERS)
    assert [together([updates_of(loader)]) for _ in range(2)] == whole
    first, state = online(None, samples_per_update=RAMP, **WORKERS), {}
    list(first)
    for number, _ in enumerate(first.updates()):
        if number == 1:
            state = json.loads(json.dumps(first.state_dict()))
            break
    resumed = online(None, samples_per_update=RAMP, **WORKERS)
    resumed.load_state_dict(state)
    assert together([updates_of(resumed)]) == whole[1][2:]


@pytest.mark.parametrize("workers", [{}, WORKERS], ids=["alone", "workers"])
@pytest.mark.parametrize("at", [0, 1, 8])
def test_a_change_at_run_time_takes_effect_at_the_update_it_names(workers, at):
    delay = 4 if workers else 0

    def run(world):
        loader = online(world, samples_per_update=10, **workers)
        sizes, first, state = [], -1, {}
        for _ in range(2):
            for update in loader.updates():
                sizes.append(int(update[0].samples.total))
                if len(sizes) == at + 1:
                    first = loader.set_samples_per_update(25)
                    state = json.loads(json.dumps(loader.state_dict()))
        return sizes, first, state, loader.sizes and loader.sizes.num_updates(0)

    def resume(world, states):
        loader = online(world, samples_per_update=10, **workers)
        loader.load_state_dict(states)
        return [int(u[0].samples.total) for _ in range(2) for u in loader.updates()]

    results = run_ranks(2 if not workers else 1, run)
    sizes, first, state, count = results[0]
    assert all(found[:2] == (sizes, first) for found in results)
    assert first == min(at + 1 + delay, 9)
    expected: list[int] = []
    for epoch in (1, 2):
        while sum(expected) < 90 * epoch:
            expected.append(min(10 if len(expected) < first else 25, 90 * epoch - sum(expected)))
    assert sizes == expected
    assert sum(sizes[:count]) == 90
    states = [found[2] for found in results]
    again = run_ranks(len(states), lambda world: resume(world, states if len(states) > 1 else states[0]))
    if at < 8:
        assert again[0] == sizes[at + 1 :]


def test_a_change_between_epochs_begins_with_the_next():
    loader = online(None, samples_per_update=40, drop_last=True)
    list(loader)
    assert loader.set_samples_per_update(30) == 2, "two updates of 40 were made of 90 samples"
    assert [len(update) for update in updates_of(loader)] == [30, 30, 30]


def test_other_schedules_are_told_apart():
    def run(world):
        return updates_of(online(world, samples_per_update=doubling(4 + world.rank, milestones=(2,))))

    with pytest.raises(AlignmentError, match="ranks differ in samples_per_update.*doubling"):
        run_ranks(2, run)

    def follows(world):
        return updates_of(online(world, samples_per_update=lambda update, current: 4 + world.rank))

    with pytest.raises(AlignmentError, match="ranks differ in .*sizes of updates"):
        run_ranks(2, follows)
    loader = online(None, samples_per_update=RAMP)
    next(iter(loader))
    with pytest.raises(StateError, match=r"linear_ramp\(first=5.*doubling"):
        online(None, samples_per_update=doubling(4, milestones=(2,))).load_state_dict(loader.state_dict())


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="`drop_last` needs `samples_per_update`"):
        online(None, drop_last=True)
    with pytest.raises(ConfigError, match="`samples_per_update` must be an int of at least 1.* at update 0"):
        next(iter(online(None, samples_per_update=lambda update, current: 0)))
    with pytest.raises(ConfigError, match="this one is free-running"):
        online(None).set_samples_per_update(4)

    def unordered(world):
        online(world, samples_per_update=8, in_order=False, **WORKERS).set_samples_per_update(4)

    with pytest.raises(ConfigError, match="needs in_order=True"):
        run_ranks(2, unordered)
