"""A loader says what price and crossover its loop's own times suggest; it never uses them by itself."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.plan.cost import Work
from dynagroup.testing import run_ranks
from dynagroup.update.step import LoaderStats

TRUE = Work(per_step=300, crossover=900)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 1500), 2, 400).astype(int)
PAIRS = {"source": LENGTHS, "target": np.random.default_rng(1).permutation(LENGTHS)}
ROWS = [{"source": int(a), "target": int(b)} for a, b in zip(*PAIRS.values(), strict=True)]
HOW = {"samples_per_update": 16, "collate_fn": list, "weigh": "samples"}
LOADERS = {
    "planned": lambda **how: PlannedDataLoader(ROWS, LENGTHS, TokenBudget(2000), **{**HOW, **how}),
    "online": lambda: OnlineDataLoader(
        ROWS, TokenBudget(2000), length_of=lambda row: row["source"], shuffle=True, **HOW
    ),
    "planned pairs": lambda: PlannedDataLoader(ROWS, PAIRS, TokenBudget(4000), **HOW),
    "online pairs": lambda: OnlineDataLoader(ROWS, TokenBudget(4000), length_of=dict, shuffle=True, **HOW),
}


class Clock:
    """A clock that only the loop moves on."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, steps, names=("source",)):
        for step in steps:
            if not step.idle:
                widest = {name: PAIRS[name][list(step.indices)].max(keepdims=True) for name in names}
                self.now += 1e-6 * (TRUE.per_step + len(step.indices) * float(TRUE.of_lengths(widest)[0]))


@pytest.mark.parametrize("name", LOADERS)
def test_times_give_back_the_work_that_made_them(name, monkeypatch):
    """Of two padded streams, each costs its own attention."""
    loader = LOADERS[name]()
    assert loader.stats.work is None
    Clock(monkeypatch).run(loader, PAIRS if "pairs" in name else ("source",))
    assert loader.stats.work is not None
    assert loader.stats.work.per_step == pytest.approx(TRUE.per_step, rel=1e-3)
    assert loader.stats.work.crossover == pytest.approx(TRUE.crossover, rel=1e-3)


def test_stats_of_ranks_and_of_parts_of_a_run_add_up(monkeypatch):
    loader, clock = LOADERS["planned"](), Clock(monkeypatch)
    for update in loader.updates():
        clock.run(update)
    before = loader.stats.copy()
    clock.run(loader)
    timed = [stats.times[3, 3] for stats in (before, loader.stats)]
    assert timed[1] - timed[0] > timed[0] > 20, "only a run warms up, not each epoch"
    doubled = run_ranks(2, lambda world: loader.stats.merged(world))[0]
    assert doubled.work is not None
    assert loader.stats.work is not None
    assert doubled.work.per_step == pytest.approx(loader.stats.work.per_step)
    assert LoaderStats().work is None


class Slow:
    """A dataset that takes time on a clock of its own."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        self.clock.now += 1.0
        return ROWS[index]


def test_stats_tell_the_seconds_spent_on_samples(monkeypatch):
    loader = PlannedDataLoader(Slow(Clock(monkeypatch)), LENGTHS, TokenBudget(2000), **HOW)
    assert loader.stats.wait_s == 0.0
    assert sum(step.samples.local for step in loader) == loader.stats.wait_s == len(ROWS)
