"""`work="measure"`: the first epoch's steps are timed, the next epochs are cut by what they took, alike on all ranks."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import ConfigError, LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, StateError, Work
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.testing import run_ranks
from dynagroup.update import step as steps

LENGTHS = np.random.default_rng(0).integers(5, 100, 300)
TRUE = Work(per_step=40, crossover=300)
OPTIMIZER = 500.0


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Time that passes only where a test says so."""
    now = [0.0]
    monkeypatch.setattr(steps, "mark", lambda: now[0])
    return now


def made(world: Any = None, work: Any = "measure", **how: Any) -> PlannedDataLoader:
    settings = {"samples_per_update": 48, "weigh": "samples", "collate_fn": list, **how}
    return PlannedDataLoader(range(300), LENGTHS, 500, work=work, world=world, **settings)


def train(items: Any, clock: list[float]) -> list[list[int]]:
    """Steps that take what ``TRUE`` says, and updates that take longer."""
    found = []
    for step in items:
        found.append(list(step.indices))
        padded = len(step.indices) * LENGTHS[step.indices].max()
        clock[0] += 1e-4 * (TRUE.per_step + padded + padded * LENGTHS[step.indices].max() / TRUE.crossover)
        clock[0] += 1e-4 * OPTIMIZER * step.ends_update
    return found


@pytest.mark.parametrize("how", [{}, {"samples_per_update": None, "accumulation": 3}], ids=["preserved", "free"])
def test_the_second_epoch_is_cut_by_what_the_first_took_and_its_state_says_so(clock, how) -> None:
    loader = made(**how)
    first = train(loader, clock)
    ended = made(**how)
    ended.load_state_dict(loader.state_dict())
    items = iter(loader)
    begun = [list(next(items).indices) for _ in range(3)]
    work = loader.plan.work
    assert (work.per_step, work.crossover) == (pytest.approx(40), pytest.approx(300))
    known = made(work=TRUE, **how)
    assert first != [list(step.indices) for step in known]
    resumed = made(**how)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = train(items, clock)
    assert begun + rest == [list(step.indices) for step in known] == [list(step.indices) for step in ended]
    assert [list(step.indices) for step in resumed] == rest
    third = [list(step.indices) for step in loader]
    assert third == [list(step.indices) for step in known] == [list(step.indices) for step in resumed], "once is enough"


def test_a_state_of_the_first_epoch_is_measured_anew_and_that_of_another_work_is_refused(clock) -> None:
    loader, early = made(), made().state_dict()
    train(loader, clock)
    iter(loader).__next__()
    loader.load_state_dict(early)
    assert loader.plan.work == made().plan.work
    train(loader, clock)
    next(iter(loader))
    assert loader.plan.work.per_step == pytest.approx(40)
    for ours, theirs in ((made(), made(work=TRUE)), (made(work=TRUE), made())):
        with pytest.raises(StateError, match="work"):
            ours.load_state_dict(theirs.state_dict())


def test_ranks_agree_whatever_each_of_them_has_seen(clock) -> None:
    def run(world: Any) -> Any:
        loader = made(world)
        times = 1e-3 * np.arange(1, 400) * (1 + world.rank)
        ticks = iter(np.cumsum(times))
        for _ in loader:
            clock[0] = float(next(ticks))
        return [list(step.indices) for step in loader], loader.plan.work

    (first, work), (second, other) = run_ranks(2, run)
    assert work == other != made().plan.work
    assert sorted(i for batch in first + second for i in batch) == list(range(300))


def timed_updates(loader: PlannedDataLoader, clock: list[float]) -> None:
    for update in loader.updates():
        for step in update:
            with loader.timed(step):
                train([step], clock)


def test_a_loop_over_updates_says_what_it_times(clock) -> None:
    loader = made()
    with pytest.warns(UserWarning, match="timed no step: a loop over updates"):
        list(loader.updates())
    timed_updates(loader, clock)
    next(loader.updates())
    assert loader.plan.work.per_step == pytest.approx(40)


class Event:
    """An event of a device that is behind."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at: float | None = None

    def record(self) -> None:
        Event.now = self.later = Event.now + 250.0

    def synchronize(self) -> None:
        self.at = self.later

    def elapsed_time(self, ended: Any) -> float:
        assert ended.at is not None, "asked before it was reached"
        return ended.later - self.later


def test_on_cuda_events_say_what_a_step_took(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times, [first, *_] = steps.StepTimes(), made(work=None)
    with times.of(first):
        pass
    assert [(list(indices), seconds) for indices, seconds in zip(*times.read(), strict=True)] == [(first.indices, 0.25)]


@pytest.mark.parametrize(
    "call",
    [
        lambda: LengthAwareBatchSampler([1], 8, work="measure"),
        lambda: OnlineDataLoader([{"input_ids": [1]}], 8, work="measure"),
        lambda: DynagroupConfig(budget=8, mode="online", plan={"work": "measure"}),
    ],
)
def test_who_sees_no_times_refuses_to_measure(call) -> None:
    with pytest.raises(ConfigError, match="offline"):
        call()
