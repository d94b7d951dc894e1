"""Planned updates as they come: so many rows of the plan an update, as large as batches that fit make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from dynagroup.errors import StateError
from dynagroup.plan.plan import PlannedWindow
from dynagroup.plan.planner import Planner
from dynagroup.plan.position import Position, Trail
from dynagroup.update.place import Place
from dynagroup.update.plans import PlannedUpdate, Updates, as_planned
from dynagroup.update.sizes import Cursor, Walk
from dynagroup.validation import check_int

__all__ = ["FreeUpdates"]


Counts: TypeAlias = tuple[int, int]
"""(updates, samples) of an epoch."""


def totals(counts: Iterable[Sequence[int]]) -> Counts:
    """(updates, samples) of several epochs."""
    updates, samples = (sum(column) for column in zip((0, 0), *counts, strict=True))
    return updates, samples


class EpochCounts:
    """How many updates and samples each epoch has: of those that are over what they had, of the others what is planned.

    Args:
        planned: (epoch, world size) -> the counts of an epoch to come; asked once each.
    """

    def __init__(self, planned: Callable[[int, int], Counts]) -> None:
        self._planned = planned
        self._past: list[Counts] = []
        self._known: dict[tuple[int, int], Counts] = {}

    def of(self, epoch: int, world_size: int) -> Counts:
        if epoch < len(self._past):
            return self._past[epoch]
        key = (epoch, world_size)
        if key not in self._known:
            self._known[key] = self._planned(epoch, world_size)
        return self._known[key]

    def before(self, epoch: int, world_size: int) -> list[Counts]:
        """Of each epoch before this one."""
        return [self.of(earlier, world_size) for earlier in range(epoch)]

    def since_begin(self, cursor: Cursor) -> Counts:
        """What of the cursor's epoch lies before it."""
        updates, samples = totals(self._past[: cursor.epoch])
        return cursor.update - updates, cursor.samples_seen - samples

    def settle(self, past: Iterable[Counts]) -> None:
        """These epochs are over; those to come may be planned otherwise than before."""
        self._past, self._known = list(past), {}

    def end(self, cursor: Cursor) -> None:
        """The cursor's epoch is over, and had what lies before it."""
        self._past = [*self._past[: cursor.epoch], self.since_begin(cursor)]


# Updates as they come: the plan's rows, window after window, so many to an update. How many an epoch has depends on the
# number of ranks and on what the budget has learned, so epochs that were trained keep the counts they had.
class FreeUpdates(Updates):
    """Every ``accumulation`` rows of the plan are an update: batches as large as fit, updates as large as they come."""

    def __init__(self, planner: Planner, *, accumulation: int = 1) -> None:
        super().__init__(planner)
        self._accumulation = check_int("accumulation", accumulation)
        self._counts = EpochCounts(self._planned_counts)
        self._resumed: Place | None = None
        """Where the epoch goes on that was begun by another run: it has the rest of this plan, not all of it."""
        self._replans = 0

    @property
    def num_samples(self) -> int:
        return self.planner.num_planned

    @property
    def num_changes(self) -> int:
        return self._replans

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.planner.identity, "accumulation": self._accumulation}

    def begin(self, planner: Planner, epoch: int, world_size: int) -> None:
        self._counts.settle(self._counts.before(epoch, world_size))
        self._resumed = None
        self._replans += planner is not self.planner
        self.planner = planner

    def end(self, cursor: Cursor) -> None:
        self._counts.end(cursor)

    def start(self, epoch: int, world_size: int) -> Cursor:
        updates, samples = totals(self._counts.before(epoch, world_size))
        position = self.planner.start(world_size, epoch)
        return Cursor(epoch=epoch, update=updates, samples_seen=samples, position=position)

    def counts(self, epoch: int, world_size: int) -> Counts:
        """(updates, samples) of a whole epoch."""
        return self._counts.of(epoch, world_size)

    def _planned_counts(self, epoch: int, world_size: int) -> Counts:
        resumed = self._resumed
        if resumed is not None and resumed.cursor.epoch == epoch:
            last = resumed.cursor
            for update in self.updates(resumed, 0, world_size):
                last = update.after
            return self._counts.since_begin(last)
        windows = list(self.planner.steps(epoch, world_size))
        updates = sum(-(-len(window.table) // self._accumulation) for window in windows)
        return updates, sum(len(window.batches.order) - len(window.repeated) for window in windows)

    def walk(self, world_size: int) -> Walk:
        return _FreeWalk(self, world_size)

    def _num_steps(self, epoch: int, world_size: int) -> int:
        return self.planner.num_steps(epoch, world_size)

    def _windows(self, epoch: int, world_size: int) -> Iterator[PlannedWindow]:
        return (_accumulated(window, self._accumulation) for window in self.planner.steps(epoch, world_size))

    def is_over(self, cursor: Cursor) -> bool:
        return cursor.position is not None and self.planner.is_over(cursor.position, cursor.epoch)

    def updates(self, place: Place, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        before, begun = place.cursor, place.begun
        position = (
            begun.position if begun is not None else before.position or self.planner.start(world_size, before.epoch)
        )
        trail = Trail(position, world_size)
        for window in self.planner.steps(before.epoch, world_size, position):
            self._notice(window, before.epoch, world_size)
            trail.open(len(window.table), window.num_windows)
            first = 0
            while first < len(window.table):
                rows = slice(first, first + self._accumulation - (begun.rows if begun is not None else 0))
                numbers = window.table[rows][window.loss_scale[rows] > 0]
                samples = int(window.batches.sizes[numbers].sum()) + (begun.samples if begun is not None else 0)
                done = trail.steps
                trail.steps += len(window.table[rows])
                after = replace(
                    before,
                    update=before.update + 1,
                    samples_used=before.samples_used + samples,
                    samples_seen=before.samples_seen + samples,
                    current=samples,
                    position=trail.position(trail.steps),
                )
                where = {"before": before, "after": after, "begun": begun, "position": _Behind(trail, done)}
                yield as_planned(window, rows, self.planner, rank, **where)
                first, before, begun = rows.stop, after, None

    def state(self, epoch: int, world_size: int) -> dict[str, Any]:
        past = [list(counts) for counts in self._counts.before(epoch, world_size)]
        return {"changes": [], "past": past, "order": None}

    def check(self, state: Mapping[str, Any], place: Place) -> None:
        cursor, begun = place.cursor, place.begun
        positions = [p for p in (cursor.position, None if begun is None else begun.position) if p is not None]
        updates, samples = totals(state["past"])
        most = self.planner.num_samples
        sound = (
            cursor.position is not None
            and not state["changes"]
            and len(state["past"]) == cursor.epoch
            and updates <= cursor.update <= updates + cursor.samples_used
            and cursor.samples_seen == samples + cursor.samples_used
            and cursor.samples_used <= most
            and all(p.window_size >= self.planner.window_size(1) for p in positions)
            and all(p.window_size <= 2 * max(most, 1) + (1 << 20) for p in positions)
            and all((p.windows_done - 1) * p.window_size < max(most, 1) for p in positions)
            and (begun is None or begun.rows < self._accumulation)
        )
        if not sound or cursor.samples_used + (begun.samples if begun else 0) != self._used(
            positions[-1], cursor.epoch
        ):
            raise StateError(f"the state is damaged: no run of these updates comes by {cursor}")

    def _used(self, position: Position, epoch: int) -> int:
        """Samples of an epoch that come before a position; of a window in use, its plan says which."""
        windows = list(self.planner.windows(epoch, position))
        left = 0
        if position.segments:
            planned = next(self.planner.steps(epoch, position.segments[-1][0], position), None)
            if planned is None:
                return -1
            left = int(planned.batches.sizes[planned.table[planned.loss_scale > 0]].sum())
            counted = planned.num_windows
            while windows and counted > 0:
                counted -= windows.pop(0).num_windows
        return self.num_samples - left - sum(len(window.indices) for window in windows)

    def restore(self, state: Mapping[str, Any], place: Place) -> None:
        self._counts.settle((updates, samples) for updates, samples in state["past"])
        self._resumed = place


def _accumulated(window: PlannedWindow, rows: int) -> PlannedWindow:
    """The same steps, every ``rows`` of them an update."""
    firsts = np.arange(0, len(window.table), rows)
    counts = np.where(window.loss_scale > 0, window.batches.sizes[window.table], 0)
    update = np.arange(len(window.table)) // rows
    total = np.add.reduceat(counts.sum(axis=1), firsts)[update] if len(firsts) else np.zeros(0)
    return replace(
        window,
        update_ends=np.append(update[1:] != update[:-1], [True] * (len(update) > 0)),
        loss_scale=counts * counts.shape[1] / np.maximum(total, 1)[:, None],
    )


@dataclass(frozen=True, slots=True)
class _Behind:
    trail: Trail
    done: int

    def __call__(self, steps: int) -> Position:
        return self.trail.position(self.done + steps)


@dataclass(frozen=True, slots=True)
class _FreeWalk:
    plan: FreeUpdates
    world_size: int

    def start(self, epoch: int) -> Cursor:
        return self.plan.start(epoch, self.world_size)

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        return (update.after for update in self.plan.updates(Place(cursor), 0, self.world_size))

    def num_updates(self, epoch: int) -> int:
        return self.plan.counts(epoch, self.world_size)[0]
