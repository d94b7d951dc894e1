"""Which samples an update holds, and which batches it takes: of a set size, or so many rows of the plan as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynagroup.budget.base import padded_squares, padded_streams, padded_tokens, real_tokens
from dynagroup.errors import BudgetError
from dynagroup.fingerprint import described
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import OrderSource, epoch_order
from dynagroup.plan.plan import BatchPlan, PlannedWindow
from dynagroup.plan.planner import Planner, PlanNotices
from dynagroup.shapes import IntArray
from dynagroup.update.schedule import BatchSizeSchedule, UpdateSizes, Walk, next_epoch
from dynagroup.validation import check_int

__all__ = ["FreeUpdates", "PlannedStep", "PlannedUpdate", "PreservedUpdates", "Updates"]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One row of a plan, as one rank runs it."""

    indices: list[int]
    """Dataset indices."""
    idle: bool
    real: int
    """Tokens of this rank's batch, of all padded streams."""
    padded: int
    squares: int
    streams: Mapping[str, tuple[int, int]]
    """The longest sample, and all of them, in each padded stream: what its field of a batch should come out as."""
    row_samples: int
    """Samples on all ranks."""
    row_padded: list[int]
    """Padded tokens of each rank."""
    cursor: Cursor
    """Where the epoch's windows stand behind it."""


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """What remains of one update, or all of it, as one rank runs it."""

    steps: Sequence[PlannedStep]
    before: Cursor
    """Where it goes on: behind the update before, and behind what was taken of this one."""
    after: Cursor

    @property
    def num_samples(self) -> int:
        """Samples of the whole update over all ranks."""
        return self.before.begun_samples + sum(step.row_samples for step in self.steps)

    def behind(self, number: int, weight: float) -> Cursor:
        """The place behind a step, when all that was taken of the update by then weighs ``weight``."""
        if number == len(self.steps) - 1:
            return self.after
        before = self.before
        return replace(
            self.steps[number].cursor,
            update=before.update,
            samples_used=before.samples_used,
            samples_seen=before.samples_seen,
            current=before.current,
            begun_rows=before.begun_rows + number + 1,
            begun_samples=before.begun_samples + sum(step.row_samples for step in self.steps[: number + 1]),
            begun_weight=weight,
        )


def steps_of(window: Any, planner: Planner, rank: int) -> Iterator[PlannedStep]:
    """The rows of a window as the steps of one rank."""
    size, idle = window.table.shape[1], window.loss_scale == 0.0
    shapes = shapes_of(window.batches.take(window.table.ravel()), planner.lengths)
    padded = np.where(idle, 0, padded_tokens(shapes, planner.budget).reshape(idle.shape))
    samples = np.where(idle, 0, shapes.num_samples.reshape(idle.shape)).sum(axis=1).tolist()
    real, squares = (of(shapes, planner.budget)[rank::size].tolist() for of in (real_tokens, padded_squares))
    longest, total = (
        {name: by[name][rank::size].tolist() for name in padded_streams(planner.budget, shapes.longest)}
        for by in (shapes.longest, shapes.total)
    )
    for row, row_padded in enumerate(padded.tolist()):
        yield PlannedStep(
            indices=window.batches[int(window.table[row, rank])].tolist(),
            idle=bool(idle[row, rank]),
            real=real[row],
            padded=row_padded[rank],
            squares=squares[row],
            streams={name: (longest[name][row], total[name][row]) for name in longest},
            row_samples=samples[row],
            row_padded=row_padded,
            cursor=window.after(row + 1),
        )


class Updates(ABC):
    """Plans updates one after another; knows ranks only by number.

    Args:
        planner: lengths, budget and how to cut.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.notices = PlanNotices()
        self._remembered: tuple[tuple[Any, ...], BatchPlan] | None = None

    @abstractmethod
    def updates(self, cursor: Cursor, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        """What remains of the cursor's epoch."""

    @abstractmethod
    def walk(self, world_size: int) -> Walk:
        """How a run's updates follow one another."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples of an epoch."""

    @property
    @abstractmethod
    def num_changes(self) -> int:
        """Grows whenever the number of updates may have changed."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What updates depend on besides epoch and ranks; JSON-able."""

    @abstractmethod
    def state(self, cursor: Cursor, world_size: int) -> dict[str, Any]:
        """What a place needs besides itself: ``walk``, and a checksum of the epoch's ``order`` where a sampler gives it."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Take over what :meth:`state` held of another run, which stands at ``cursor``."""

    @abstractmethod
    def _plan(self, cursor: Cursor, world_size: int) -> BatchPlan:
        """What remains of the cursor's epoch on all ranks."""

    def begin(self, planner: Planner, epoch: int, world_size: int) -> None:
        """An epoch begins, planned by this planner."""
        self.planner = planner

    def end(self, cursor: Cursor) -> None:  # noqa: B027 - most have nothing to note
        """An epoch has ended at this cursor."""

    def order_of(self, epoch: int) -> IntArray | None:
        """The epoch's order of samples, where there is one."""
        return None

    def is_over(self, cursor: Cursor, world_size: int) -> bool:
        """Whether nothing of its epoch remains."""
        return not cursor.begun_rows and next(self.walk(world_size).cursors(cursor), None) is None

    def plan(self, cursor: Cursor, world_size: int) -> BatchPlan:
        """What remains of the cursor's epoch on all ranks. Remembered until something changes."""
        place = replace(cursor, update=0, samples_seen=0, current=None)
        key = (place, world_size, self.num_changes, self.planner)
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = key, self._plan(cursor, world_size)
        return self._remembered[1]


# An epoch's order is cut into spans, and each span is planned by itself, as if it were an epoch of one window: rows of batches
# that fit, of like cost. So what an update holds depends on order and schedule alone, not on budget or ranks; only its division
# does. Cost: one plan of so many samples an update, when its turn comes.
class PreservedUpdates(Updates):
    """Updates of exactly as many samples as a schedule says, drawn as fixed batches would draw them.

    Args:
        planner: its window must be at least as large as any update.
        schedule: samples an update, or (update, current) -> samples.
        order: the user's order of samples; None: seeded by the planner's seed and the epoch.
        shuffle: without ``order``; False: the dataset's order in every epoch.
        drop_last: leave out an epoch's last update if it is smaller than asked.
    """

    def __init__(
        self,
        planner: Planner,
        schedule: int | BatchSizeSchedule,
        order: OrderSource | None,
        *,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        super().__init__(planner)
        self._schedule, self._order, self._shuffle = schedule, order, shuffle
        self.sizes = UpdateSizes(schedule, self._num_ordered, drop_last=drop_last)

    def _num_ordered(self) -> int:
        return self.planner.num_planned if self._order is None else self._order.counted

    @property
    def num_samples(self) -> int:
        return self._num_ordered()

    @property
    def num_changes(self) -> int:
        return len(self.sizes.changes)

    @property
    def identity(self) -> dict[str, Any]:
        return {
            **self.planner.identity,
            "samples_per_update": described(self._schedule),
            "drop_last": self.sizes.drop_last,
            "shuffle": self._shuffle,
            "sampler": self._order is not None,
        }

    def walk(self, world_size: int) -> Walk:
        return self.sizes

    def order_of(self, epoch: int) -> IntArray:
        if self._order is not None:
            return self._order.counted_epoch(epoch)
        count = self.planner.num_samples
        order = epoch_order(count, seed=self.planner.config.seed, epoch=epoch) if self._shuffle else np.arange(count)
        left_out = self.planner.left_out
        return order[~np.isin(order, left_out)] if len(left_out) else order

    def updates(self, cursor: Cursor, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        for window, before, after in self._windows(cursor, world_size):
            self.notices.of_padding(self.planner, window, cursor.epoch, world_size)
            yield PlannedUpdate(list(steps_of(window, self.planner, rank)), before, after)

    def _windows(self, cursor: Cursor, world_size: int) -> Iterator[tuple[PlannedWindow, Cursor, Cursor]]:
        """What remains of each update, where it goes on, and where it ends."""
        ordered = self.order_of(cursor.epoch)
        for start, stop, after in self.sizes.spans(cursor):
            window = next(self.planner.steps_from(cursor, world_size, ordered[start:stop]), None)
            if window is None or not len(window.table):
                raise BudgetError(
                    f"no sample of update {cursor.update} fits the budget even alone; filter such samples out beforehand, "
                    "or pass oversize='alone'"
                )
            after = replace(after, steps=cursor.steps + len(window.table))
            yield window, cursor, after
            cursor = after

    def _plan(self, cursor: Cursor, world_size: int) -> BatchPlan:
        windows = [window for window, *_ in self._windows(cursor, world_size)]
        return self.planner.joined(windows, cursor.epoch, world_size)

    def state(self, cursor: Cursor, world_size: int) -> dict[str, Any]:
        order = None if self._order is None else self._order.checksum(cursor.epoch)
        return {"walk": [list(change) for change in self.sizes.changes], "order": order}

    def restore(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        self.sizes.restore(state["walk"])


# The plan's rows, window after window, so many to an update. How many an epoch has depends on the number of ranks and on what the
# budget has learned, so an epoch that was begun keeps the beginning that it had.
class FreeUpdates(Updates):
    """Every ``accumulation`` rows of the plan are an update: batches as large as fit, updates as large as they come. Only an
    epoch's last update may have fewer rows."""

    def __init__(self, planner: Planner, *, accumulation: int = 1) -> None:
        super().__init__(planner)
        self.accumulation = check_int("accumulation", accumulation)
        self.resumed: Cursor | None = None
        """Where the epoch goes on that was begun by another run: it has the rest of this plan, not all of it."""
        self._begun = [Cursor()]
        """The beginnings of the epochs that were begun."""
        self._walk = FreeWalk(self, 0, self._begun)
        self._replans = 0

    @property
    def num_samples(self) -> int:
        return self.planner.num_planned

    @property
    def num_changes(self) -> int:
        return self._replans

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.planner.identity, "accumulation": self.accumulation}

    def walk(self, world_size: int) -> Walk:
        if self._walk.world_size != world_size:
            self._walk = FreeWalk(self, world_size, self._begun)
        return self._walk

    def begin(self, planner: Planner, epoch: int, world_size: int) -> None:
        begun = [self.walk(world_size).start(earlier) for earlier in range(epoch + 1)]
        self._replans += planner is not self.planner
        self.planner = planner
        self._settle(begun, None)

    def end(self, cursor: Cursor) -> None:
        self._settle([*self._begun[: cursor.epoch + 1], next_epoch(cursor)], self.resumed)

    def _settle(self, begun: list[Cursor], resumed: Cursor | None) -> None:
        """These epochs were begun; those to come may be planned otherwise than before."""
        self._begun, self.resumed = begun, resumed
        self._walk = FreeWalk(self, 0, begun)

    def updates(self, cursor: Cursor, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        before, taken = cursor, list[PlannedStep]()
        for window in self.planner.steps_from(cursor, world_size):
            self.notices.of_padding(self.planner, window, cursor.epoch, world_size)
            for step in steps_of(window, self.planner, rank):
                taken.append(step)
                if before.begun_rows + len(taken) == self.accumulation:
                    yield (update := _update_of(taken, before))
                    before, taken = update.after, []
        if taken:
            yield _update_of(taken, before)

    def _plan(self, cursor: Cursor, world_size: int) -> BatchPlan:
        windows = list(self.planner.steps_from(cursor, world_size))
        plan = self.planner.joined(windows, cursor.epoch, world_size)
        if not plan.num_steps:
            return plan
        update = (np.arange(plan.num_steps) + cursor.begun_rows) // self.accumulation
        firsts = np.flatnonzero(np.diff(update, prepend=-1))
        counts = np.where(plan.loss_scale > 0, plan.batches.sizes[plan.table], 0)
        totals = np.add.reduceat(counts.sum(axis=1), firsts)
        totals[0] += cursor.begun_samples
        return replace(
            plan,
            update_ends=np.diff(update, append=-1) != 0,
            loss_scale=counts * world_size / np.maximum(totals, 1)[update - update[0]][:, None],
        )

    def state(self, cursor: Cursor, world_size: int) -> dict[str, Any]:
        begun = [self.walk(world_size).start(epoch) for epoch in range(cursor.epoch + 1)]
        return {"walk": [[start.update, start.samples_seen, start.current] for start in begun], "order": None}

    def restore(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        begun = [
            Cursor(epoch, update=update, samples_seen=seen, current=current)
            for epoch, (update, seen, current) in enumerate(state["walk"])
        ]
        self._settle(begun, cursor)


def _update_of(steps: list[PlannedStep], before: Cursor) -> PlannedUpdate:
    """An update that holds what these steps do, and what was taken of it before."""
    samples = before.begun_samples + sum(step.row_samples for step in steps)
    after = replace(
        steps[-1].cursor,
        update=before.update + 1,
        samples_used=before.samples_used + samples,
        samples_seen=before.samples_seen + samples,
        current=samples,
        begun_rows=0,
        begun_samples=0,
        begun_weight=0.0,
    )
    return PlannedUpdate(steps, before, after)


class FreeWalk(Walk):
    """Free-running updates on so many ranks: of epochs that were begun what they had, of the others what is planned."""

    def __init__(self, plan: FreeUpdates, world_size: int, begun: list[Cursor]) -> None:
        super().__init__()
        self.plan, self.world_size = plan, world_size
        self._starts = list(begun)

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        return (update.after for update in self.plan.updates(cursor, 0, self.world_size))

    def end(self, epoch: int) -> Cursor:
        resumed = self.plan.resumed
        if resumed is not None and resumed.epoch == epoch:
            return [resumed, *self.cursors(resumed)][-1]
        start = self.start(epoch)
        steps, samples = self.plan.plan(Cursor(epoch), self.world_size).num_steps, self.plan.num_samples
        updates = -(-steps // self.plan.accumulation)
        return replace(
            start, update=start.update + updates, samples_used=samples, samples_seen=start.samples_seen + samples
        )
