"""Which samples an update holds, and how its batches lie on the ranks: the pure half of :mod:`dynagroup.update.planned`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dynagroup.budget.base import padded_tokens
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.order import epoch_order
from dynagroup.plan.plan import PlannedWindow
from dynagroup.plan.planner import Planner
from dynagroup.plan.sampler import OrderSource, Trail
from dynagroup.shapes import TOKENS, IntArray
from dynagroup.update.schedule import BatchSizeSchedule, checked_samples
from dynagroup.update.sizes import Cursor, UpdateSizes

__all__ = ["FreeUpdates", "PlannedUpdate", "PreservedUpdates", "UpdatePlan", "UpdateStats"]


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

    def since(self, before: UpdateStats) -> UpdateStats:
        names = ("updates", "samples", "batches", "idle_steps", "real_tokens", "padded_tokens")
        counts = {name: getattr(self, name) - getattr(before, name) for name in names}
        return UpdateStats(**counts, smallest_batch=self.smallest_batch, largest_batch=self.largest_batch)

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

    def replan(self, planner: Planner, epoch: int, world_size: int) -> None:
        """Plan by another planner, from the beginning of an epoch on."""
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


class PreservedUpdates:
    """Updates of exactly as many samples as a schedule says, drawn as fixed batches would draw them.

    Args:
        planner: lengths, budget and how to cut; its window must be at least as large as any update.
        schedule: (update, current) -> samples.
        order: the host framework's order of samples; None: seeded by the planner's seed and the epoch.
        drop_last: leave out an epoch's last update if it is smaller than asked.
    """

    def __init__(
        self, planner: Planner, schedule: int | BatchSizeSchedule, order: OrderSource | None, *, drop_last: bool
    ) -> None:
        self.planner = planner
        self.order = order
        self.sizes = UpdateSizes(schedule, self._num_ordered, drop_last=drop_last)

    def _num_ordered(self) -> int:
        return self.planner.num_samples if self.order is None else len(self.order)

    def start(self, epoch: int, world_size: int) -> Cursor:
        return self.sizes.start(epoch, world_size)

    def num_updates(self, epoch: int, world_size: int) -> int:
        return self.sizes.num_updates(epoch, world_size)

    def cursors(self, cursor: Cursor, world_size: int) -> Iterator[Cursor]:
        return self.sizes.cursors(cursor, world_size)

    def updates(self, cursor: Cursor, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        ordered = self.order_of(cursor.epoch)
        for start, stop, after in self.sizes.spans(cursor, world_size):
            window = next(self.planner.steps(cursor.epoch, world_size, order=ordered[start:stop]))
            if not len(window.table):
                raise BudgetError(
                    f"no sample of update {after.update - 1} fits the budget even alone; filter such samples out beforehand, "
                    "or pass oversize='alone'"
                )
            yield _planned(window, slice(None), self.planner, rank, after)

    def replan(self, planner: Planner, epoch: int, world_size: int) -> None:
        self.planner = planner

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
        self.past: list[tuple[int, int]] = []
        """(updates, samples) of the first epochs, those that another planner planned."""

    def replan(self, planner: Planner, epoch: int, world_size: int) -> None:
        self.past = [self._count(before, world_size) for before in range(epoch)]
        self.planner, self._counts = planner, {}

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
        if epoch < len(self.past):
            return self.past[epoch]
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
