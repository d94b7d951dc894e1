"""Plans the samples and batches of updates: of a given number of samples, or of a given number of steps."""

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dynagroup.budget.base import padded_tokens, real_tokens
from dynagroup.distributed import PARTS, World, without_parts
from dynagroup.errors import AlignmentError
from dynagroup.fingerprint import described, ends_of
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import OrderSource
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Order, Planner, UpdatePlans
from dynagroup.update.schedule import Sizes, UpdateSizes, Walk, begun


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a plan, on one rank."""

    indices: list[int]  # dataset indices
    idle: bool
    tokens: tuple[int, int]  # tokens of this rank's batch: without padding, with padding
    row_samples: int  # samples of the step on all ranks
    kind: Any
    cursor: Cursor  # the point in the epoch's windows after this step


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """An update, or the rest of one after resuming, on one rank."""

    steps: Sequence[PlannedStep]
    before: (
        Cursor  # the point where it begins, or in a resumed update, after the steps taken before
    )
    after: Cursor

    @property
    def num_samples(self) -> int:
        """Samples of the whole update over all ranks."""
        return self._samples(len(self.steps))

    def behind(self, number: int, weight: float) -> Cursor:
        """Returns the point after step ``number``. ``weight``: that of the update's steps so far, with this one."""
        taken, before = number + 1, self.before
        if taken == len(self.steps):
            return self.after
        begun = {
            "begun_rows": before.begun_rows + taken,
            "begun_samples": self._samples(taken),
            "begun_weight": weight,
        }
        kept = {
            name: getattr(before, name)
            for name in ("update", "samples_used", "samples_seen", "current")
        }
        return replace(self.steps[number].cursor, **kept, **begun)

    def _samples(self, taken: int) -> int:
        return self.before.begun_samples + sum(step.row_samples for step in self.steps[:taken])


def steps_of(window: BatchPlan, planner: Planner, rank: int) -> Iterator[PlannedStep]:
    idle, budget, own = window.loss_scale == 0.0, planner.budget, window.table[:, rank]
    shapes = shapes_of(window.batches.take(own), planner.lengths)
    tokens = zip(
        real_tokens(shapes, budget).tolist(), padded_tokens(shapes, budget).tolist(), strict=True
    )
    labels, codes = planner.kinds.labels, planner.kinds.codes
    samples = np.where(idle, 0, window.batches.sizes[window.table]).sum(axis=1).tolist()
    behind = lambda rows: window.start.after_rows(rows, window.table.shape[1], planner.limit)  # noqa: E731
    for row, (number, counted) in enumerate(zip(own.tolist(), tokens, strict=True)):
        indices, is_idle = window.batches[number].tolist(), bool(idle[row, rank])
        after = window.end if row + 1 == len(own) else behind(row + 1)
        yield PlannedStep(indices, is_idle, counted, samples[row], labels[codes[indices[0]]], after)


class _Updates(Walk):
    """Common base of both kinds of updates. It plans for all ranks, and does not know its own."""

    planner: Planner
    changes: list[tuple[int, int, int]]  # changes of the updates' size, see :class:`UpdateSizes`
    order: OrderSource | None = None  # the user's sampler
    num_renewed, _ranks = 0, 1
    _remembered: tuple[tuple[Any, ...], BatchPlan] | None = None

    @abstractmethod
    def _plan(self, cursor: Cursor) -> BatchPlan: ...

    @property
    def num_samples(self) -> int:
        return (
            self.planner.num_planned
            if self.order is None
            else self.order.counted(self.planner.left_out)
        )

    def start_of(self, epoch: int, done: Cursor) -> Cursor:
        return begun(epoch, done)

    def on_ranks(self, world_size: int) -> None:
        if self._ranks != world_size:
            self._ranks, self._starts = world_size, self._starts[:1]

    def renew(self, planner: Planner) -> None:
        """Uses this planner from the next epoch on."""
        self.num_renewed += planner is not self.planner
        self.planner = planner

    def stand(self, place: Cursor) -> None:
        """Sets the point of the run from which updates continue."""

    def order_print(self, epoch: int) -> int | None:
        """Returns a checksum of the order of the user's sampler in an epoch; None: there is no sampler."""
        return None if self.order is None else self.order.checksum(epoch)

    def plan(self, cursor: Cursor) -> BatchPlan:
        """Returns the plan of the rest of the cursor's epoch on all ranks; cached until something changes."""
        key = (
            replace(cursor, update=0, samples_seen=0, current=None),
            self._ranks,
            tuple(self.changes),
            self.planner,
        )
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = key, self._plan(cursor)
        return self._remembered[1]


# An epoch's order is cut into updates, and each update is planned alone, as one window. So order and schedule alone
# decide which samples an update has; budget and ranks decide only how the samples are divided into batches.
class PreservedUpdates(UpdateSizes, _Updates):
    """Updates of exactly as many samples as ``schedule`` says: as with fixed batches, the next ones in the order of the
    user's sampler, in a seeded random order, or in dataset order. ``drop_last``: a smaller last update is left out."""

    def __init__(
        self, planner: Planner, schedule: Sizes, order: OrderSource | None, *, drop_last: bool
    ) -> None:
        UpdateSizes.__init__(
            self, schedule, partial(getattr, self, "num_samples"), drop_last=drop_last
        )
        self.planner, self.order = planner, order

    @property
    def identity(self) -> dict[str, Any]:
        own = {"drop_last": self.drop_last, "sampler": self.order is not None}
        return {**self.planner.identity, **own, "samples_per_update": described(self.schedule)}

    def start_of(self, epoch: int, done: Cursor) -> Cursor:
        return self.start(epoch)

    # The epoch's first update decides how many samples are grouped, so a change of size leaves the order as it is.
    def order_of(self, epoch: int) -> Order:
        """Returns dataset indices in the epoch's order; with ``grouping``, stratified updates."""
        planner = self.planner
        drawn = None if self.order is None else self.order.counted_epoch(epoch, planner.left_out)
        first = (
            next(self.spans(self.start(epoch)), None)
            if planner.config.grouping is not None
            else None
        )
        size = planner.num_samples if first is None else first[2].current
        return planner.order_of(epoch, drawn, shuffle=planner.config.shuffle, size=size or 1)

    def updates(self, cursor: Cursor, rank: int) -> Iterator[PlannedUpdate]:
        for window, before, after in self._windows(cursor):
            yield PlannedUpdate(list(steps_of(window, self.planner, rank)), before, after)

    def _windows(self, cursor: Cursor) -> Iterator[tuple[BatchPlan, Cursor, Cursor]]:
        """Yields (remaining plan, point before, point after) of each update."""
        plans = UpdatePlans(self.planner, self.order_of(cursor.epoch), self._ranks)
        for start, stop, after in self.spans(cursor):
            window = plans.plan(start, stop, cursor)
            after = replace(after, steps=cursor.steps + len(window.table))
            yield window, cursor, after
            cursor = after

    def _plan(self, cursor: Cursor) -> BatchPlan:
        windows = [window for window, *_ in self._windows(cursor)]
        given = None if self.order is None else self.order.of_epoch(cursor.epoch)
        return self.planner.joined(windows, cursor, self._ranks, given)


# Every `accumulation` steps of the plan are one update. How many updates an epoch has depends on the number of ranks
# and on learned limits, so updates are counted from the current point. All updates but an epoch's last have equally
# many steps, so the beginning of the epoch can be computed from any point in it.
class FreeUpdates(_Updates):
    """Updates of ``accumulation`` steps each (the last of an epoch may have fewer). Batches are as large as the budget
    allows, so updates have different numbers of samples."""

    def __init__(self, planner: Planner, *, accumulation: int) -> None:
        super().__init__()
        self.planner, self.accumulation = planner, accumulation
        self.changes, self._place = [], Cursor()

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.planner.identity, "accumulation": self.accumulation}

    def stand(self, place: Cursor) -> None:
        updates = place.update + (place.begun_rows - place.steps) // self.accumulation
        seen = place.samples_seen - place.samples_used
        self._place, self._starts = place, [Cursor(place.epoch, update=updates, samples_seen=seen)]

    def updates(self, cursor: Cursor, rank: int) -> Iterator[PlannedUpdate]:
        before, taken = cursor, list[PlannedStep]()
        for window in self.planner.steps_from(cursor, self._ranks):
            for step in steps_of(window, self.planner, rank):
                taken.append(step)
                if before.begun_rows + len(taken) == self.accumulation:
                    yield (update := _update_of(taken, before))
                    before, taken = update.after, []
        if taken:
            yield _update_of(taken, before)

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        if (
            cursor == self._starts[0] != self._place
        ):  # the beginning of an epoch of which a part is done
            yield (cursor := self._place)
        yield from (update.after for update in self.updates(cursor, 0))

    def _plan(self, cursor: Cursor) -> BatchPlan:
        plan = self.planner.joined(
            list(self.planner.steps_from(cursor, self._ranks)), cursor, self._ranks
        )
        if not plan.num_steps:
            return plan
        update = (np.arange(plan.num_steps) + cursor.begun_rows) // self.accumulation
        counts = np.where(plan.loss_scale > 0, plan.batches.sizes[plan.table], 0)
        totals = np.bincount(update, weights=counts.sum(axis=1))
        totals[0] += cursor.begun_samples
        loss_scale = counts * self._ranks / np.maximum(totals, 1)[update][:, None]
        return replace(plan, update_ends=np.diff(update, append=-1) != 0, loss_scale=loss_scale)


def _update_of(steps: list[PlannedStep], before: Cursor) -> PlannedUpdate:
    """Returns an update of these steps; a resumed update also has the steps that were taken before the resume."""
    samples = before.begun_samples + sum(step.row_samples for step in steps)
    done = {"update": before.update + 1, "current": samples}
    done |= {name: getattr(before, name) + samples for name in ("samples_used", "samples_seen")}
    return PlannedUpdate(
        steps,
        before,
        replace(steps[-1].cursor, **done, begun_rows=0, begun_samples=0, begun_weight=0.0),
    )


Updates: TypeAlias = PreservedUpdates | FreeUpdates


def compare_ranks(
    world: World, plan: Updates, identity: Mapping[str, Any], place: Cursor, dataset: Any
) -> None:
    """Raises AlignmentError if ranks are about to plan different updates, or updates of different samples."""
    if world.size == 1:
        return
    facts: dict[str, Any] = {
        "lengths, budget, settings or place in the epoch": (identity, place),
        PARTS: ends_of(dataset),
    }
    if isinstance(plan, UpdateSizes):
        sizes: Any = (
            plan.schedule if plan.is_constant else [stop for _, stop, _ in plan.spans(place)]
        )
        facts |= {"order of samples": plan.order_print(place.epoch), "samples_per_update": sizes}
    marks = [zlib.crc32(repr(fact).encode()) for fact in facts.values()]
    found = world.all_max([*marks, *(-mark for mark in marks)])
    differing = [name for i, name in enumerate(facts) if found[i] != -found[i + len(marks)]]
    if without_parts(differing):
        told = f"ranks have different {', '.join(differing)} at the start of epoch {place.epoch}"
        raise AlignmentError(
            f"{told}; give all ranks the same data, seeds, schedules and saved states"
        )
