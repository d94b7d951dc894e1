"""A loader says what price and crossover its loop's own times suggest; it never uses them by itself."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.plan.cost import Work
from dynagroup.testing import run_ranks
from dynagroup.update.step import LoaderStats

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens are padding")
TRUE = Work(per_step=300, crossover=900)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 1500), 2, 400).astype(int)
DATA = [{"input_ids": [1] * n} for n in LENGTHS]


class Clock:
    """A clock that only the loop moves on."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, steps):
        for step in steps:
            if not step.idle:
                n, longest = len(step.indices), int(LENGTHS[list(step.indices)].max())
                self.now += 1e-6 * (TRUE.per_step + n * float(TRUE.of_lengths(longest)))


def planned(**options):
    return PlannedDataLoader(
        DATA, LENGTHS, TokenBudget(2000), samples_per_update=16, collate_fn=list, weigh="samples", **options
    )


def online(**options):
    return OnlineDataLoader(
        DATA, TokenBudget(2000), samples_per_update=16, collate_fn=list, weigh="samples", shuffle=True, **options
    )


PAIRS = {"source": LENGTHS, "target": np.random.default_rng(1).permutation(LENGTHS)}


def planned_pairs():
    return PlannedDataLoader(DATA, PAIRS, TokenBudget(4000), samples_per_update=16, collate_fn=list, weigh="samples")


def online_pairs():
    rows = [{"source": int(a), "target": int(b)} for a, b in zip(*PAIRS.values(), strict=True)]
    return OnlineDataLoader(
        rows, TokenBudget(4000), samples_per_update=16, collate_fn=list, weigh="samples", shuffle=True, length_of=dict
    )


@pytest.mark.parametrize("make", [planned, online])
def test_times_give_back_the_work_that_made_them(make, monkeypatch):
    loader = make()
    assert loader.stats.work is None
    Clock(monkeypatch).run(loader)
    assert loader.stats.work is not None
    assert loader.stats.work.per_step == pytest.approx(TRUE.per_step, rel=1e-3)
    assert loader.stats.work.crossover == pytest.approx(TRUE.crossover, rel=1e-3)


@pytest.mark.parametrize("make", [planned_pairs, online_pairs])
def test_two_padded_streams_each_cost_their_own_attention(make, monkeypatch):
    loader, clock = make(), Clock(monkeypatch)
    for step in loader:
        widest = {name: PAIRS[name][list(step.indices)].max(keepdims=True) for name in PAIRS}
        clock.now += 1e-6 * (TRUE.per_step + len(step.indices) * float(TRUE.of_lengths(widest)[0]))
    assert loader.stats.work is not None
    assert loader.stats.work.crossover == pytest.approx(TRUE.crossover, rel=1e-3)


def test_an_update_at_a_time_gives_the_same(monkeypatch):
    loader, clock = planned(), Clock(monkeypatch)
    for update in loader.updates():
        clock.run(update)
    assert loader.stats.work is not None
    assert loader.stats.work.per_step == pytest.approx(TRUE.per_step, rel=1e-3)


def test_a_plan_does_not_follow_the_clock(monkeypatch):
    loader, other = planned(), planned()
    clock = Clock(monkeypatch)
    first = [list(step.indices) for step in loader]
    clock.run(other)
    loader.set_epoch(1)
    other.set_epoch(1)
    assert first
    assert [list(step.indices) for step in loader] == [list(step.indices) for step in other]


def test_stats_of_ranks_and_of_parts_of_a_run_add_up(monkeypatch):
    loader = planned()
    clock = Clock(monkeypatch)
    clock.run(loader)
    before = loader.stats.copy()
    clock.run(loader)
    assert (loader.stats - before).num_timed > before.num_timed > 20, "only a run warms up, not each epoch"
    doubled = run_ranks(2, lambda world: loader.stats.merged(world))[0]
    assert doubled.work is not None
    assert loader.stats.work is not None
    assert doubled.work.per_step == pytest.approx(loader.stats.work.per_step)
    assert LoaderStats().work is None


def test_packed_batches_are_not_timed():
    loader = PlannedDataLoader(
        DATA, LENGTHS, TokenBudget(2000, layout="packed"), samples_per_update=16, collate_fn=list, weigh="samples"
    )
    for _ in loader:
        pass
    assert loader.stats.num_timed == 0


class Slow:
    """A dataset, and a world of two ranks that do the same, that take time on a clock of their own."""

    rank, size = 0, 2

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        self.clock.now += 1.0
        return DATA[index]

    def all_max(self, values, /):
        self.clock.now += 100.0
        return [int(value) for value in values]

    def all_sum(self, values, /):
        self.clock.now += 10.0
        return [2.0 * value for value in values]


def test_stats_tell_apart_the_seconds_spent_on_samples_and_on_exchanges(monkeypatch):
    slow = Slow(Clock(monkeypatch))
    options = {"samples_per_update": 500, "weigh": len, "collate_fn": list}
    loader = PlannedDataLoader(slow, LENGTHS, TokenBudget(2000), world=slow, **options)
    used = sum(step.samples.local for step in loader)
    assert 0 < used < len(DATA)
    assert loader.stats.wait_s == used
    assert loader.stats.exchange_s == 10.0 * 3  # an exchange an update
    assert loader.stats.exchanges == 3

    alone = OnlineDataLoader(slow, TokenBudget(2000), samples_per_update=500, weigh="samples", collate_fn=list)
    assert sum(step.samples.local for step in alone) == len(DATA)
    assert alone.stats.wait_s == len(DATA)
    assert alone.stats.exchange_s == 0.0
