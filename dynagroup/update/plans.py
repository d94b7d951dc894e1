"""Which samples an update holds, and how its batches lie on the ranks: the pure half of :mod:`dynagroup.update.planned`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynagroup.budget.base import padded_squares, padded_tokens, real_tokens
from dynagroup.checks import check_int
from dynagroup.errors import BudgetError, StateError
from dynagroup.fingerprint import described
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.notices import PlanNotices
from dynagroup.plan.order import epoch_order
from dynagroup.plan.plan import PlannedWindow
from dynagroup.plan.planner import Planner, Position
from dynagroup.plan.saving import Trail
from dynagroup.plan.source import OrderSource
from dynagroup.shapes import TOKENS, IntArray
from dynagroup.update.place import Begun, Place
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.update.sizes import Cursor, UpdateSizes, Walk

__all__ = ["FreeUpdates", "PlannedUpdate", "PreservedUpdates", "Updates"]


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """What remains of one update, or all of it, as one rank runs it. Sequences have one entry a step."""

    batches: Sequence[list[int]]
    """Dataset indices."""
    idle: Sequence[bool]
    real: Sequence[int]
    """Tokens of this rank's batches, of all padded streams."""
    first: Sequence[int]
    """Those of the stream ``tokens``, and the longest sample in it: what ``input_ids`` should come out as."""
    longest: Sequence[int]
    padded: Sequence[int]
    squares: Sequence[int]
    row_samples: Sequence[int]
    """Samples on all ranks."""
    row_padded: Sequence[tuple[int, float]]
    """Padded tokens of the fullest rank, and of a rank on average."""
    before: Cursor
    after: Cursor
    begun: Begun | None
    position: Callable[[int], Position]
    """Where the epoch's windows stand after so many of these steps."""

    @property
    def rows_before(self) -> int:
        """Steps of the update that were taken before."""
        return 0 if self.begun is None else self.begun.rows

    @property
    def num_samples(self) -> int:
        """Samples of the whole update over all ranks."""
        return sum(self.row_samples) + (0 if self.begun is None else self.begun.samples)

    def place(self, steps: int, weight: float) -> Place:
        """Behind so many of these steps, when all that was taken of the update weighs ``weight``."""
        if steps == len(self.batches):
            return Place(self.after)
        done = 0 if self.begun is None else self.begun.samples
        samples = done + sum(self.row_samples[:steps])
        return Place(self.before, Begun(self.position(steps), self.rows_before + steps, samples, weight))


class Updates(ABC):
    """Plans updates one after another; knows ranks only by number."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.notices: PlanNotices | None = None
        """Told of the windows that are handed out."""

    @abstractmethod
    def updates(self, place: Place, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        """What remains of ``place``'s epoch."""

    @abstractmethod
    def start(self, epoch: int, world_size: int) -> Cursor:
        """The beginning of an epoch."""

    @abstractmethod
    def walk(self, world_size: int) -> Walk:
        """How a run's updates follow one another."""

    @abstractmethod
    def is_over(self, cursor: Cursor) -> bool:
        """Whether nothing of its epoch remains."""

    @abstractmethod
    def check(self, state: Mapping[str, Any], place: Place) -> None:
        """Refuse a place that these updates cannot reach; its types are right already."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], place: Place) -> None:
        """Take over what :attr:`state` held of another run, which stands at ``place``."""

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

    def state(self, epoch: int, world_size: int) -> dict[str, Any]:
        """What a place needs besides itself."""
        return {"changes": [], "past": [], "order": None}

    def begin(self, planner: Planner, epoch: int, world_size: int) -> None:
        """An epoch begins, planned by this planner."""
        self.planner = planner

    def end(self, cursor: Cursor) -> None:  # noqa: B027 - most have nothing to note
        """An epoch has ended at this cursor."""

    def order_of(self, epoch: int) -> IntArray | None:
        """The epoch's order of samples, where there is one."""
        return None

    def _notice(self, window: PlannedWindow, epoch: int, world_size: int) -> None:
        if self.notices is not None:
            self.notices.of_padding(self.planner, window, epoch, world_size)

    @abstractmethod
    def num_steps(self, epoch: int, world_size: int) -> int:
        """Steps of a whole epoch: all of it is cut, but not planned."""


def _planned(window: PlannedWindow, rows: slice, planner: Planner, rank: int, **where: Any) -> PlannedUpdate:
    table = window.table[rows]
    idle = window.loss_scale[rows] == 0.0
    shapes = shapes_of(window.batches.take(table.ravel()), planner.lengths)
    padded = np.where(idle, 0, padded_tokens(shapes, planner.budget).reshape(table.shape))
    samples = np.where(idle, 0, shapes.num_samples.reshape(table.shape))
    real = real_tokens(shapes, planner.budget).reshape(table.shape)[:, rank].tolist()
    squares = padded_squares(shapes, planner.budget).reshape(table.shape)[:, rank].tolist()
    longest, first = (by[TOKENS].reshape(table.shape)[:, rank].tolist() for by in (shapes.longest, shapes.total))
    return PlannedUpdate(
        batches=[window.batches[int(number)].tolist() for number in table[:, rank]],
        idle=idle[:, rank].tolist(),
        real=real,
        first=first,
        padded=padded[:, rank].tolist(),
        squares=squares,
        longest=longest,
        row_samples=samples.sum(axis=1).tolist(),
        row_padded=list(zip(padded.max(axis=1).tolist(), padded.mean(axis=1).tolist(), strict=True)),
        **where,
    )


# Updates of a set size. An epoch's order is cut into spans, and each span is planned by itself, as if it were an epoch of one
# window: rows of batches that fit, of like cost. So what an update holds depends on order and schedule alone, not on budget
# or ranks; only its division does. Cost: one plan of so many samples an update, when its turn comes. A place inside an update
# is how many rows were used, on how many ranks: the plan of what remains is a function of that.
class PreservedUpdates(Updates):
    """Updates of exactly as many samples as a schedule says, drawn as fixed batches would draw them.

    Args:
        planner: lengths, budget and how to cut; its window must be at least as large as any update.
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

    def _num_ordered(self) -> int:
        if self._order is not None:
            return len(self._order)
        drops = self.planner.config.oversize == "drop"
        return self.planner.num_samples - (len(self.planner.oversize) if drops else 0)

    def start(self, epoch: int, world_size: int) -> Cursor:
        return self.sizes.start(epoch)

    def walk(self, world_size: int) -> Walk:
        return self.sizes

    def num_steps(self, epoch: int, world_size: int) -> int:
        ordered = self.order_of(epoch)
        spans = self.sizes.spans(self.start(epoch, world_size))
        return sum(self.planner.num_steps_of(ordered[start:stop], world_size) for start, stop, _ in spans)

    def is_over(self, cursor: Cursor) -> bool:
        return next(self.sizes.spans(cursor), None) is None

    def order_of(self, epoch: int) -> IntArray:
        if self._order is not None:
            return self._order.of_epoch(epoch)
        count = self.planner.num_samples
        order = epoch_order(count, seed=self.planner.config.seed, epoch=epoch) if self._shuffle else np.arange(count)
        if self.planner.config.oversize == "drop" and len(self.planner.oversize):
            order = order[~np.isin(order, self.planner.oversize)]
        return order

    def updates(self, place: Place, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        before, begun = place.cursor, place.begun
        ordered = self.order_of(before.epoch)
        for start, stop, after in self.sizes.spans(before):
            position = begun.position if begun is not None else Position(self.planner.window_size(1))
            window = next(self.planner.steps(before.epoch, world_size, position, order=ordered[start:stop]), None)
            if window is None or not len(window.table):
                raise BudgetError(
                    f"no sample of update {before.update} fits the budget even alone; filter such samples out beforehand, "
                    "or pass oversize='alone'"
                )
            self._notice(window, before.epoch, world_size)
            trail = Trail(position, world_size)
            trail.open(len(window.table), 1)
            trail.steps = len(window.table)
            where = {"before": before, "after": after, "begun": begun, "position": trail.position}
            yield _planned(window, slice(None), self.planner, rank, **where)
            before, begun = after, None

    def state(self, epoch: int, world_size: int) -> dict[str, Any]:
        order = None if self._order is None else self._order.checksum(epoch)
        return {"changes": [list(change) for change in self.sizes.changes], "past": [], "order": order}

    def check(self, state: Mapping[str, Any], place: Place) -> None:
        sizes = UpdateSizes(self._schedule, self._num_ordered, drop_last=self.sizes.drop_last)
        sizes.restore(state["changes"])
        cursor = sizes.at(place.cursor.epoch, place.cursor.samples_used)
        over = next(sizes.spans(place.cursor), None) is None
        if cursor != place.cursor or state["past"] or (place.begun is not None and over):
            raise StateError(f"the state is damaged: no run of these updates comes by {place.cursor}")
        begun = place.begun
        if begun is not None and (
            begun.position.window_size != self.planner.window_size(1) or begun.position.windows_done
        ):
            raise StateError(f"the state is damaged: {begun.position} is no place within an update")

    def restore(self, state: Mapping[str, Any], place: Place) -> None:
        self.sizes.restore(state["changes"])


# Updates as they come: the plan's rows, window after window, so many to an update. How many an epoch has depends on the
# number of ranks and on what the budget has learned, so epochs that were trained keep the counts they had.
class FreeUpdates(Updates):
    """Every ``accumulation`` rows of the plan are an update: batches as large as fit, updates as large as they come."""

    def __init__(self, planner: Planner, *, accumulation: int = 1) -> None:
        super().__init__(planner)
        self._accumulation = check_int("accumulation", accumulation)
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}
        self._past: list[tuple[int, int]] = []
        """(updates, samples) of the first epochs, as they were."""
        self._resumed: Place | None = None
        """Where the epoch goes on that was begun by another run: it has the rest of this plan, not all of it."""
        self._replans = 0

    @property
    def num_samples(self) -> int:
        drops = self.planner.config.oversize == "drop"
        return self.planner.num_samples - (len(self.planner.oversize) if drops else 0)

    @property
    def num_changes(self) -> int:
        return self._replans

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.planner.identity, "accumulation": self._accumulation}

    def begin(self, planner: Planner, epoch: int, world_size: int) -> None:
        self._past = [self.counts(before, world_size) for before in range(epoch)]
        self._resumed, self._counts = None, {}
        self._replans += planner is not self.planner
        self.planner = planner

    def end(self, cursor: Cursor) -> None:
        past = self._past[: cursor.epoch]
        updates, samples = (sum(counts) for counts in zip((0, 0), *past, strict=True))
        self._past = [*past, (cursor.update - updates, cursor.samples_seen - samples)]

    def start(self, epoch: int, world_size: int) -> Cursor:
        before = [self.counts(e, world_size) for e in range(epoch)]
        return Cursor(
            epoch=epoch,
            update=sum(updates for updates, _ in before),
            samples_seen=sum(samples for _, samples in before),
            position=self.planner.start(world_size, epoch),
        )

    def counts(self, epoch: int, world_size: int) -> tuple[int, int]:
        """(updates, samples) of a whole epoch."""
        if epoch < len(self._past):
            return self._past[epoch]
        key = (epoch, world_size)
        if key not in self._counts:
            self._counts[key] = self._counted(epoch, world_size)
        return self._counts[key]

    def _counted(self, epoch: int, world_size: int) -> tuple[int, int]:
        resumed = self._resumed
        if resumed is not None and resumed.cursor.epoch == epoch:
            last = resumed.cursor
            for update in self.updates(resumed, 0, world_size):
                last = update.after
            updates, samples = (sum(counts) for counts in zip((0, 0), *self._past[:epoch], strict=True))
            return last.update - updates, last.samples_seen - samples
        windows = list(self.planner.steps(epoch, world_size))
        updates = sum(-(-len(window.table) // self._accumulation) for window in windows)
        return updates, sum(len(window.batches.order) - len(window.repeated) for window in windows)

    def walk(self, world_size: int) -> Walk:
        return _FreeWalk(self, world_size)

    def num_steps(self, epoch: int, world_size: int) -> int:
        return self.planner.num_steps(epoch, world_size)

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
                yield _planned(window, rows, self.planner, rank, **where)
                first, before, begun = rows.stop, after, None

    def state(self, epoch: int, world_size: int) -> dict[str, Any]:
        past = [list(self.counts(before, world_size)) for before in range(epoch)]
        return {"changes": [], "past": past, "order": None}

    def check(self, state: Mapping[str, Any], place: Place) -> None:
        cursor, begun = place.cursor, place.begun
        positions = [p for p in (cursor.position, None if begun is None else begun.position) if p is not None]
        updates, samples = (sum(counts) for counts in zip((0, 0), *state["past"], strict=True))
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
        self._past = [(updates, samples) for updates, samples in state["past"]]
        self._resumed, self._counts = place, {}


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
