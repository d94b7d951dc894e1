"""Which samples an optimizer update holds, and how its batches lie on the ranks: the pure half of :mod:`dynagroup.updates`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dynagroup.batch_plan import PlannedWindow
from dynagroup.budget import padded_tokens
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.order import epoch_order
from dynagroup.partition import shapes_of
from dynagroup.plan import Planner, Position
from dynagroup.sampler import OrderSource, Trail
from dynagroup.schedule import BatchSizeSchedule, checked_samples, constant
from dynagroup.shapes import TOKENS, IntArray

__all__ = ["Cursor", "FreeUpdates", "PlannedUpdate", "PreservedUpdates", "UpdatePlan", "UpdateStats"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands between two updates.

    Args:
        epoch: the epoch that is running.
        update: updates done since training began.
        samples_used: samples of this epoch's order that are done or dropped.
        samples_seen: samples trained on since training began.
        current: samples the last update was asked to hold; None before the first.
        position: where the epoch's windows stand, for updates that are not preserved.
    """

    epoch: int = 0
    update: int = 0
    samples_used: int = 0
    samples_seen: int = 0
    current: int | None = None
    position: Position | None = None


@dataclass(slots=True)
class UpdateStats:
    """What the updates so far consisted of, over all ranks. Two of them can be subtracted from one another."""

    updates: int = 0
    samples: int = 0
    batches: int = 0
    idle_steps: int = 0
    """Batches with weight zero that keep a rank in step with the others."""
    real_tokens: int = 0
    padded_tokens: int = 0
    smallest_batch: int = field(default=0)
    largest_batch: int = field(default=0)

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding."""
        return 1.0 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def add(self, other: UpdateStats) -> None:
        for name in ("updates", "samples", "batches", "idle_steps", "real_tokens", "padded_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        least = [n for n in (self.smallest_batch, other.smallest_batch) if n]
        self.smallest_batch = min(least, default=0)
        self.largest_batch = max(self.largest_batch, other.largest_batch)


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One update as this rank runs it: its batches as dataset indices, one a step."""

    batches: Sequence[list[int]]
    idle: Sequence[bool]
    num_samples: int
    """Samples of the update over all ranks."""
    after: Cursor
    stats: UpdateStats


class UpdatePlan(Protocol):
    """Plans updates one after another; knows ranks only by number."""

    def updates(self, cursor: Cursor, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        """What remains of ``cursor``'s epoch."""
        ...

    def start(self, epoch: int, world_size: int) -> Cursor:
        """The beginning of an epoch."""
        ...

    def num_updates(self, epoch: int, world_size: int) -> int:
        """Updates of a whole epoch."""
        ...

    def cursors(self, cursor: Cursor, world_size: int) -> Iterator[Cursor]:
        """Where each update that remains of an epoch ends."""
        ...


def _planned(window: PlannedWindow, rows: slice, planner: Planner, rank: int, after: Cursor) -> PlannedUpdate:
    table = window.table[rows]
    idle = window.loss_scale[rows] == 0.0
    used = table[~idle]
    num_samples = int(window.batches.sizes[used].sum())
    shapes = shapes_of(window.batches.take(used), planner.lengths)
    stats = UpdateStats(
        updates=1,
        samples=num_samples,
        batches=len(used),
        idle_steps=int(idle.sum()),
        real_tokens=int(shapes.total[TOKENS].sum()),
        padded_tokens=int(padded_tokens(shapes, planner.budget).sum()),
        smallest_batch=int(shapes.num_samples.min(initial=num_samples)),
        largest_batch=int(shapes.num_samples.max(initial=0)),
    )
    batches = [window.batches[int(number)].tolist() for number in table[:, rank]]
    return PlannedUpdate(batches, idle[:, rank].tolist(), num_samples, after, stats)


def _by_update(cursor: Cursor) -> int:
    return cursor.update


class PreservedUpdates:
    """Updates of exactly as many samples as a schedule says, drawn as fixed batches would draw them.

    Args:
        planner: lengths, budget and how to cut; its window must be at least as large as any update.
        schedule: (update, current) -> samples.
        order: the host framework's order of samples; None: seeded by the planner's seed and the epoch.
        drop_last: leave out an epoch's last update if it is smaller than asked.
    """

    def __init__(
        self, planner: Planner, schedule: BatchSizeSchedule, order: OrderSource | None, *, drop_last: bool
    ) -> None:
        self.planner = planner
        self.schedule = schedule
        self.order = order
        self.drop_last = drop_last
        self.changes: list[tuple[int, int]] = []
        """(update, samples): set at run time, in force from that update on."""
        self._starts: list[Cursor] = [Cursor()]

    def change(self, update: int, samples: int) -> None:
        """From ``update`` on every update holds ``samples``."""
        self.changes = [c for c in self.changes if c[0] < update] + [(update, samples)]
        self._starts = [start for start in self._starts if start.update <= update]

    def restore(self, changes: Sequence[tuple[int, int]]) -> None:
        self.changes = [(int(update), int(samples)) for update, samples in changes]
        self._starts = [Cursor()]

    def samples_of(self, cursor: Cursor, world_size: int) -> int:
        """Samples that the update after ``cursor`` is asked to hold."""
        for update, samples in reversed(self.changes):
            if cursor.update >= update:
                return self._checked(samples, cursor.update, world_size)
        return self._checked(self.schedule(cursor.update, cursor.current), cursor.update, world_size)

    def _checked(self, samples: int, update: int, world_size: int) -> int:
        checked_samples(samples, where=f" at update {update}")
        if samples < world_size:
            raise ConfigError(
                f"`samples_per_update` ({samples} at update {update}) must be at least the number of ranks "
                f"({world_size}), so that every rank has a sample in every update"
            )
        return int(samples)

    def num_ordered(self) -> int:
        """Samples an epoch draws."""
        return self.planner.num_samples if self.order is None else len(self.order)

    def spans(self, cursor: Cursor, world_size: int) -> Iterator[tuple[int, int, Cursor]]:
        """(start, stop, cursor after) of the updates that remain of an epoch."""
        count = self.num_ordered()
        while cursor.samples_used < count:
            samples = self.samples_of(cursor, world_size)
            start, stop = cursor.samples_used, min(cursor.samples_used + samples, count)
            if self.drop_last and stop - start < samples:
                return
            cursor = replace(
                cursor,
                update=cursor.update + 1,
                samples_used=stop,
                samples_seen=cursor.samples_seen + stop - start,
                current=samples,
            )
            yield start, stop, cursor

    def start(self, epoch: int, world_size: int) -> Cursor:
        while len(self._starts) <= epoch:
            begin = self._starts[-1]
            last = max((after for *_, after in self.spans(begin, world_size)), key=_by_update, default=begin)
            self._starts.append(replace(last, epoch=len(self._starts), samples_used=0))
        return self._starts[epoch]

    def num_updates(self, epoch: int, world_size: int) -> int:
        if isinstance(self.schedule, constant) and not self.changes:
            count, size = self.num_ordered(), self.schedule.samples
            return count // size if self.drop_last else -(-count // size)
        return sum(1 for _ in self.spans(self.start(epoch, world_size), world_size))

    def cursors(self, cursor: Cursor, world_size: int) -> Iterator[Cursor]:
        return (after for *_, after in self.spans(cursor, world_size))

    def updates(self, cursor: Cursor, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        ordered = self.order_of(cursor.epoch)
        for start, stop, after in self.spans_live(cursor, world_size):
            window = next(self.planner.steps(cursor.epoch, world_size, order=ordered[start:stop]))
            if not len(window.table):
                raise BudgetError(
                    f"no sample of update {after.update - 1} fits the budget even alone; filter such samples out beforehand, "
                    "or pass oversize='alone'"
                )
            yield _planned(window, slice(None), self.planner, rank, after)

    def spans_live(self, cursor: Cursor, world_size: int) -> Iterator[tuple[int, int, Cursor]]:
        """Like :meth:`spans`, but sizes are looked up when each update is planned, so that changes take effect."""
        while True:
            span = next(self.spans(cursor, world_size), None)
            if span is None:
                return
            yield span
            cursor = span[2]

    def order_of(self, epoch: int) -> IntArray:
        if self.order is not None:
            return self.order.of_epoch(epoch)
        return epoch_order(self.planner.num_samples, seed=self.planner.config.seed, epoch=epoch)


class FreeUpdates:
    """Every ``accumulation`` rows of the plan are an update: batches as large as fit, updates as large as they come."""

    def __init__(self, planner: Planner, *, accumulation: int = 1) -> None:
        self.planner = planner
        self.accumulation = checked_samples(accumulation, name="accumulation")
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}

    def start(self, epoch: int, world_size: int) -> Cursor:
        before = [self._count(e, world_size) for e in range(epoch)]
        return Cursor(
            epoch=epoch,
            update=sum(updates for updates, _ in before),
            samples_seen=sum(samples for _, samples in before),
            position=self.planner.start(world_size),
        )

    def num_updates(self, epoch: int, world_size: int) -> int:
        return self._count(epoch, world_size)[0]

    def _count(self, epoch: int, world_size: int) -> tuple[int, int]:
        key = (epoch, world_size)
        if key not in self._counts:
            windows = list(self.planner.steps(epoch, world_size))
            updates = sum(-(-len(window.table) // self.accumulation) for window in windows)
            samples = sum(len(window.batches.order) - len(window.repeated) for window in windows)
            self._counts[key] = (updates, samples)
        return self._counts[key]

    def cursors(self, cursor: Cursor, world_size: int) -> Iterator[Cursor]:
        return (planned.after for planned in self.updates(cursor, 0, world_size))

    def updates(self, cursor: Cursor, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        position = cursor.position or self.planner.start(world_size)
        trail = Trail(position, world_size)
        for window in self.planner.steps(cursor.epoch, world_size, position):
            trail.open(len(window.table), window.num_windows)
            for first in range(0, len(window.table), self.accumulation):
                rows = slice(first, first + self.accumulation)
                numbers = window.table[rows][window.loss_scale[rows] > 0]
                samples = int(window.batches.sizes[numbers].sum())
                trail.steps += len(window.table[rows])
                cursor = replace(
                    cursor,
                    update=cursor.update + 1,
                    samples_used=cursor.samples_used + samples,
                    samples_seen=cursor.samples_seen + samples,
                    current=samples,
                    position=trail.position(None),
                )
                yield _planned(window, rows, self.planner, rank, cursor)
