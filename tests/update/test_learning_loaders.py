"""Loaders learn: they apply what running out of memory has taught when an epoch begins, and keep it in their state; and with
`work="measure"` the first epoch's steps are timed, and the next ones are cut by what they took, alike on all ranks."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import LearningBudget, LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, TokenBudget, Work
from dynagroup.errors import ConfigError, StateError
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.shapes import BatchShape
from dynagroup.testing import run_ranks
from dynagroup.update import step as steps

LENGTHS = np.random.default_rng(0).integers(5, 100, 300)
DATA = [{"input_ids": [1] * length} for length in LENGTHS]
FAILED = BatchShape.of(9, 100)
LEARNED = 810  # 0.9 of what failed
HOW: dict[str, Any] = {"collate_fn": list, "weigh": "samples"}
SIZED = {**HOW, "samples_per_update": 48}
KINDS = {
    "sampler": lambda learning, world: LengthAwareBatchSampler(LENGTHS, learning, shuffle=True, rank=0, world_size=1),
    "preserved": lambda learning, world: PlannedDataLoader(DATA, LENGTHS, learning, world=world, **SIZED),
    "free": lambda learning, world: PlannedDataLoader(DATA, LENGTHS, learning, world=world, **HOW),
    "online": lambda learning, world: OnlineDataLoader(DATA, learning, shuffle=True, window=64, world=world, **HOW),
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Any:
    return lambda learning, world=None: KINDS[request.param](learning, world)


def batches(items: Any) -> list[list[int]]:
    return [list(getattr(item, "indices", item)) for item in items if not getattr(item, "idle", False)]


def largest(found: list[list[int]]) -> int:
    return max(len(batch) * max(LENGTHS[i] for i in batch) for batch in found)


def test_an_epoch_follows_what_the_one_before_taught_and_states_hold_it(make):
    learning = LearningBudget(TokenBudget(1000))
    loader = make(learning)
    items = iter(loader)
    next(items)
    learning.record_oom(FAILED)
    assert largest(batches(items)) > LEARNED, "a plan stays what it was while it is carried out"
    items = iter(loader)
    second = batches([next(items) for _ in range(2)])
    learning.record_oom(BatchShape.of(8, 100))
    again = LearningBudget(TokenBudget(1000))
    resumed = make(again)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert again.report.num_ooms == 2
    rest = batches(items)
    assert largest(second + rest) <= LEARNED
    assert sorted(i for batch in second + rest for i in batch) == list(range(300))
    assert batches(resumed) == rest
    if hasattr(loader, "cursor"):
        assert resumed.cursor == loader.cursor, "the books count what was, not what the new limit would have made of it"
    assert largest(batches(resumed)) <= 0.9 * 800


def test_free_updates_that_were_done_are_counted_as_they_were():
    learning = LearningBudget(TokenBudget(1000))
    loader = KINDS["free"](learning, None)
    list(loader)
    learning.record_oom(FAILED)
    first, announced = loader.cursor.update, loader.num_updates
    list(loader)
    assert first == announced < loader.cursor.update - first
    assert loader.updates_in(2) == loader.cursor.update


@pytest.mark.parametrize("kind", ["preserved", "free", "online"])
def test_ranks_follow_the_one_that_learned_most(kind):
    def run(world):
        learning = LearningBudget(TokenBudget(1000))
        loader = KINDS[kind](learning, world)
        batches(loader)
        if world.rank == 1:
            learning.record_oom(FAILED)
        return batches(loader), loader.budget.fingerprint

    results = run_ranks(2, run)
    assert largest([batch for found, _ in results for batch in found]) <= LEARNED
    assert results[0][1] == results[1][1]
    assert sorted(i for found, _ in results for batch in found for i in batch) == list(range(300))


def test_samples_that_no_batch_may_hold_after_what_was_learned_are_told_and_counted():
    budget = LearningBudget(TokenBudget(64))
    loader = PlannedDataLoader(range(4), [50, 40, 4, 3], budget, samples_per_update=2, oversize="drop", **HOW)
    assert sorted(i for step in loader for i in step.indices) == [0, 1, 2, 3]
    loader.budget.learner.record_oom(BatchShape.of(2, longest=16))
    with pytest.warns(UserWarning, match="do not fit the budget even alone and are left out; the first is sample 0"):
        assert sorted(i for step in loader for i in step.indices) == [2, 3]


TRUE = Work(per_step=40, crossover=300)
OPTIMIZER = 500.0


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Time that passes only where a test says so."""
    now = [0.0]
    monkeypatch.setattr(steps, "mark", lambda: now[0])
    return now


def made(world: Any = None, work: Any = "measure", **how: Any) -> PlannedDataLoader:
    return PlannedDataLoader(range(300), LENGTHS, 500, work=work, world=world, **{**SIZED, **how})


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


def test_a_state_of_the_first_epoch_is_measured_anew_and_a_loop_over_updates_says_what_it_times(clock) -> None:
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
    loader = made()
    with pytest.warns(UserWarning, match="timed no step: a loop over updates"):
        list(loader.updates())
    timed_updates(loader, clock)
    next(loader.updates())
    assert loader.plan.work.per_step == pytest.approx(40)


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


def test_who_sees_no_times_refuses_to_measure() -> None:
    for call in (
        lambda: LengthAwareBatchSampler([1], 8, work="measure"),
        lambda: OnlineDataLoader([{"input_ids": [1]}], 8, work="measure"),
        lambda: DynagroupConfig(budget=8, mode="online", plan={"work": "measure"}),
    ):
        with pytest.raises(ConfigError, match="offline"):
            call()
