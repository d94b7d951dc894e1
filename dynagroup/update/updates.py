"""Plans the samples and batches of updates: of a given number of samples, or of a given number of steps."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dynagroup.budget.base import padded_tokens, real_tokens
from dynagroup.budget.memory import predicted_memory
from dynagroup.distributed import PARTS, World, differing, without_parts
from dynagroup.errors import AlignmentError
from dynagroup.fingerprint import described, ends_of
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochWindows
from dynagroup.plan.mixture import Change, Mixture
from dynagroup.plan.order import OrderSource
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Order, Planner, UpdatePlans
from dynagroup.update.schedule import Sizes, UpdateSizes, Walk, begun
from dynagroup.update.shared_plans import Column, Part, SharedColumns, columns_of

T = TypeVar("T")
W = TypeVar("W", BatchPlan, Column)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a plan, on one rank."""

    indices: list[int]  # dataset indices
    idle: bool
    tokens: tuple[int, int]  # tokens of this rank's batch: without padding, with padding
    memory: float | None  # predicted, as a share of the limit; None: no budget predicts it
    row_samples: int  # samples of the step on all ranks
    kind: Any
    cursor: Cursor  # the point in the epoch's windows after this step


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """An update, or the rest of one after resuming, on one rank."""

    steps: Sequence[PlannedStep]
    before: Cursor  # where it begins, or in a resumed update, after the steps taken before
    after: Cursor

    @property
    def num_samples(self) -> int:
        """Samples of the whole update over all ranks."""
        return self._samples_of(len(self.steps))

    def behind(self, step: int, weight: float) -> Cursor:
        """Returns the point after this step of the update. ``weight``: that of the update's steps so far, with this one."""
        num_taken = step + 1
        if num_taken == len(self.steps):
            return self.after
        before = self.before
        return replace(
            self.steps[step].cursor,
            update=before.update,
            samples_used=before.samples_used,
            samples_seen=before.samples_seen,
            current=before.current,
            begun_rows=before.begun_rows + num_taken,
            begun_samples=self._samples_of(num_taken),
            begun_weight=weight,
        )

    def _samples_of(self, num_taken: int) -> int:
        return self.before.begun_samples + sum(step.row_samples for step in self.steps[:num_taken])


def steps_of(
    column: Column, start: Cursor, end: Cursor, planner: Planner, world_size: int
) -> Iterator[PlannedStep]:
    """Yields the steps of one rank in a window from ``start`` to ``end``."""
    shapes = shapes_of(column.batches, planner.lengths)
    real = real_tokens(shapes, planner.budget).tolist()
    padded = padded_tokens(shapes, planner.budget).tolist()
    shares = predicted_memory(planner.budget, shapes)
    row_samples = column.row_samples.tolist()
    num_rows = column.num_steps
    for row, batch in enumerate(column.batches):
        indices = batch.tolist()
        code = planner.kinds.codes[indices[0]]
        after = end
        if row + 1 < num_rows:
            after = start.after_rows(row + 1, world_size, planner.limit)
        memory = None if shares is None else float(shares[row])
        yield PlannedStep(
            indices=indices,
            idle=bool(column.is_idle[row]),
            tokens=(real[row], padded[row]),
            memory=memory,
            row_samples=row_samples[row],
            kind=planner.kinds.labels[code],
            cursor=after,
        )


class _Updates(Walk):
    """Common base of both kinds of updates. It plans for all ranks, alone or together with them."""

    planner: Planner
    changes: list[tuple[int, int, int]]  # changes of the updates' size, see :class:`UpdateSizes`
    order: OrderSource | None = None  # the user's sampler
    num_renewed = 0
    _world_size = 1
    _remembered: Mapping[str, tuple[object, Any]] = MappingProxyType({})
    _shared = SharedColumns()

    @abstractmethod
    def _plan(self, cursor: Cursor) -> BatchPlan: ...

    @abstractmethod
    def _number(self, place: Cursor) -> int:
        """Returns the number of the part that begins at a place, or in which it is."""

    @abstractmethod
    def _ahead(self, place: Cursor) -> Iterator[Part]:
        """Yields the part of number ``_number(place)`` and all later ones of the epoch."""

    @abstractmethod
    def _plans_of(self, parts: list[Part], place: Cursor) -> list[BatchPlan]:
        """Plans some consecutive parts of the epoch of ``place``."""

    def begin_sharing(self, place: Cursor) -> None:
        """Forgets what the ranks have planned together, because an epoch is iterated from ``place`` on."""
        self._shared = SharedColumns(self._number(place))

    def share(self, world: World, place: Cursor) -> None:
        """Plans further parts of the epoch, each rank some of them, if it is time for it. All ranks must call it."""
        if world.size == 1:
            return
        self._shared.refill(
            world,
            self._number(place),
            self._ahead(place),
            lambda parts: self._plans_of(parts, place),
        )

    @property
    def num_samples(self) -> int:
        if self.order is None:
            return self.planner.num_planned
        return self.order.counted(self.planner.left_out)

    def start_of(self, epoch: int, done: Cursor) -> Cursor:
        return begun(epoch, done)

    def on_ranks(self, world_size: int) -> None:
        if self._world_size != world_size:
            self._world_size = world_size
            self._starts = self._starts[:1]

    def renew(self, planner: Planner) -> None:
        """Uses this planner from the next epoch on."""
        self.num_renewed += planner is not self.planner
        self.planner = planner

    def stand(self, place: Cursor) -> None:
        """Sets the point of the run from which updates continue."""

    def order_print(self, epoch: int) -> int | None:
        """Returns a checksum of the order of the user's sampler in an epoch; None: there is no sampler."""
        return None if self.order is None else self.order.checksum(epoch)

    @property
    def mixture(self) -> Mixture | None:
        """The user's sampler, if it gives every update the same shares."""
        return None if self.order is None else self.order.mixture

    @property
    def shares(self) -> list[Change]:
        """Changes of a mixture's shares."""
        return [] if self.mixture is None else self.mixture.changes

    def restore_shares(self, changes: Sequence[Sequence[Any]]) -> None:
        if self.mixture is not None and self.order is not None:
            self.mixture.restore(changes)
            self._remembered = {}
            self._shared.forget()
            self.order.forget()

    def facts(self, place: Cursor) -> dict[str, object]:
        """Returns what else must be equal on all ranks, by the name that a user knows."""
        return {}

    def plan(self, cursor: Cursor) -> BatchPlan:
        """Returns the plan of the rest of the cursor's epoch on all ranks; cached until something changes."""
        place = replace(cursor, update=0, samples_seen=0, current=None)
        key = (place, self._world_size, tuple(self.changes), self.planner)
        return self._once("plan", key, lambda: self._plan(cursor))

    def _once(self, what: str, key: object, make: Callable[[], T]) -> T:
        """Returns what ``make`` returns, or returned before if ``key`` was the same the last time."""
        known_key, value = self._remembered.get(what, (None, None))
        if known_key == key:
            return value
        value = make()
        self._remembered = {**self._remembered, what: (key, value)}
        return value


# An epoch's order is cut into updates, and each update is planned alone, as one window. So order and schedule alone
# decide which samples an update has; budget and ranks decide only how the samples are divided into batches.
class PreservedUpdates(UpdateSizes, _Updates):
    """Updates of exactly as many samples as ``schedule`` says: as with fixed batches, the next ones in the order of the
    user's sampler, in a seeded random order, or in dataset order. ``drop_last``: a smaller last update is left out."""

    def __init__(
        self, planner: Planner, schedule: Sizes, order: OrderSource | None, *, drop_last: bool
    ) -> None:
        UpdateSizes.__init__(self, schedule, self._num_ordered, order=order, drop_last=drop_last)
        self.planner = planner

    def _num_ordered(self) -> int:
        return self.num_samples

    @property
    def identity(self) -> dict[str, object]:
        return {
            **self.planner.identity,
            "drop_last": self.drop_last,
            "sampler": self.order is not None,
            "samples_per_update": described(self.schedule),
        }

    def start_of(self, epoch: int, done: Cursor) -> Cursor:
        return self.start(epoch)

    def facts(self, place: Cursor) -> dict[str, object]:
        sizes: object = self.schedule
        if not self.is_constant:
            sizes = [stop for _, stop, _ in self.spans(place)]
        return {"order of samples": self.order_print(place.epoch), "samples_per_update": sizes}

    def change_shares(self, cursor: Cursor, shares: dict[str, float]) -> int:
        """Sets a mixture's shares from ``cursor`` on, with ``grouping`` from the next group on. Returns the number of the
        first update with them, in its epoch."""
        assert self.mixture is not None
        position = cursor.samples_used
        grouping = self.planner.config.grouping
        if grouping is not None:
            group = grouping * self._size_of_first(cursor.epoch)
            position = -(-position // group) * group
        self.mixture.change(cursor.epoch, position, shares)
        self.restore_shares(self.mixture.changes)
        first_changed = cursor.update - self.start(cursor.epoch).update
        for _, stop, _ in self.spans(cursor):
            if stop > position:
                break
            first_changed += 1
        return first_changed

    def _size_of_first(self, epoch: int) -> int:
        """Returns the size of an epoch's first update."""
        for _, _, after in self.spans(self.start(epoch)):
            return after.current or 1
        return self.planner.num_samples or 1

    # The epoch's first update decides how many samples are grouped, so a change of size leaves the order as it is.
    def order_of(self, epoch: int) -> Order:
        """Returns dataset indices in the epoch's order; with ``grouping``, stratified updates."""
        planner = self.planner
        size = 1 if planner.config.grouping is None else self._size_of_first(epoch)

        def make() -> Order:
            drawn = None
            if self.order is not None:
                drawn = self.order.counted_epoch(epoch, planner.left_out)
            return planner.order_of(epoch, drawn, shuffle=planner.config.shuffle, size=size)

        return self._once("order", (planner, epoch, size), make)

    def updates(self, cursor: Cursor, rank: int) -> Iterator[PlannedUpdate]:
        planner = self.planner
        world_size = self._world_size

        def column_of(plans: UpdatePlans, part: Part, before: Cursor) -> Column:
            shared = self._shared.of(rank, before, part)
            if shared is not None:
                return shared
            _, start, stop = part
            [column] = columns_of(plans.plan(start, stop, before), [rank])
            return column

        for column, before, after in self._walk(cursor, column_of):
            end = column.end(before, world_size, planner.limit)
            steps = steps_of(column, before, end, planner, world_size)
            yield PlannedUpdate(list(steps), before, after)

    def _walk(
        self, cursor: Cursor, planned: Callable[[UpdatePlans, Part, Cursor], W]
    ) -> Iterator[tuple[W, Cursor, Cursor]]:
        """Yields (what ``planned`` returns, point before, point after) of each update."""
        plans = UpdatePlans(self.planner, self.order_of(cursor.epoch), self._world_size)
        shares = self.shares
        for start, stop, after in self.spans(cursor):
            if self.shares != shares:
                shares = self.shares
                plans = UpdatePlans(self.planner, self.order_of(cursor.epoch), self._world_size)
            window = planned(plans, (cursor.update, start, stop), cursor)
            after = replace(after, steps=cursor.steps + window.num_steps)
            yield window, cursor, after
            cursor = after

    def _plan(self, cursor: Cursor) -> BatchPlan:
        def plan_of(plans: UpdatePlans, part: Part, before: Cursor) -> BatchPlan:
            _, start, stop = part
            return plans.plan(start, stop, before)

        windows = [window for window, _, _ in self._walk(cursor, plan_of)]
        order = None if self.order is None else self.order.of_epoch(cursor.epoch)
        return self.planner.joined(windows, cursor, self._world_size, order)

    def _number(self, place: Cursor) -> int:
        return place.update

    def _ahead(self, place: Cursor) -> Iterator[Part]:
        for start, stop, after in self.spans(place):
            yield after.update - 1, start, stop

    def _plans_of(self, parts: list[Part], place: Cursor) -> list[BatchPlan]:
        epoch = place.epoch
        plans = UpdatePlans(self.planner, self.order_of(epoch), self._world_size, len(parts))
        return [plans.plan(start, stop, Cursor(epoch)) for _, start, stop in parts]


# Every `accumulation` steps of the plan are one update. How many updates an epoch has depends on the number of ranks
# and on learned limits, so updates are counted from the current point. All updates but an epoch's last have equally
# many steps, so the beginning of the epoch can be computed from any point in it.
class FreeUpdates(_Updates):
    """Updates of ``accumulation`` steps each (the last of an epoch may have fewer). Batches are as large as the budget
    allows, so updates have different numbers of samples."""

    def __init__(self, planner: Planner, *, accumulation: int) -> None:
        super().__init__()
        self.planner = planner
        self.accumulation = accumulation
        self.changes = []
        self._place = Cursor()

    @property
    def identity(self) -> dict[str, object]:
        return {**self.planner.identity, "accumulation": self.accumulation}

    def stand(self, place: Cursor) -> None:
        # Steps of the window that belong to updates that are finished; the first of these may have begun a window earlier.
        num_steps = place.steps - place.begun_rows
        num_updates = math.ceil(num_steps / self.accumulation)
        start = Cursor(
            place.epoch,
            update=place.update - num_updates,
            samples_seen=place.samples_seen - place.samples_used,
        )
        self._place = place
        self._starts = [start]

    def updates(self, cursor: Cursor, rank: int) -> Iterator[PlannedUpdate]:
        before = cursor
        taken: list[PlannedStep] = []
        for column, start, end in self._columns(cursor, rank):
            for step in steps_of(column, start, end, self.planner, self._world_size):
                taken.append(step)
                if before.begun_rows + len(taken) == self.accumulation:
                    update = _update_of(taken, before)
                    yield update
                    before = update.after
                    taken = []
        if taken:
            yield _update_of(taken, before)

    def _columns(self, cursor: Cursor, rank: int) -> Iterator[tuple[Column, Cursor, Cursor]]:
        """Yields (column, point before, point after) of each remaining window."""
        cursor = self.planner.in_windows(cursor, self._world_size)
        epoch = self._windows_of(cursor)
        while cursor.windows_done < len(epoch.spans):
            window = cursor.windows_done
            column = self._shared.of(rank, cursor, (window, *epoch.spans[window]))
            if column is None:
                plan = self.planner.plan_window(epoch, cursor, self._world_size)
                [column] = columns_of(plan, [rank])
            end = column.end(cursor, self._world_size, self.planner.limit)
            yield column, cursor, end
            cursor = end

    def _windows_of(self, cursor: Cursor) -> EpochWindows:
        """Returns the windows of the cursor's epoch. Those of kinds take a sort of all samples, so it is done once."""
        planner = self.planner
        cursor = planner.in_windows(cursor, self._world_size)
        key = (planner, cursor.epoch, cursor.window_size)
        return self._once("windows", key, lambda: planner.windows(cursor))

    def _number(self, place: Cursor) -> int:
        return place.windows_done

    def _ahead(self, place: Cursor) -> Iterator[Part]:
        windows = self._windows_of(place)
        for window in range(place.windows_done, len(windows.spans)):
            yield window, *windows.spans[window]

    def _plans_of(self, parts: list[Part], place: Cursor) -> list[BatchPlan]:
        place = self.planner.in_windows(place, self._world_size)
        windows = self._windows_of(place)
        plans = []
        for window, _, _ in parts:
            cursor = Cursor(place.epoch, window_size=place.window_size, windows_done=window)
            plans.append(self.planner.plan_window(windows, cursor, self._world_size))
        return plans

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        has_begun = self._place != self._starts[0]
        if has_begun and cursor == self._starts[0]:
            cursor = self._place
            yield cursor
        for update in self.updates(cursor, 0):
            yield update.after

    def _plan(self, cursor: Cursor) -> BatchPlan:
        windows = list(self.planner.steps_from(cursor, self._world_size))
        plan = self.planner.joined(windows, cursor, self._world_size)
        if not plan.num_steps:
            return plan
        update = (np.arange(plan.num_steps) + cursor.begun_rows) // self.accumulation
        counts = np.where(plan.loss_scale > 0, plan.batches.sizes[plan.table], 0)
        totals = np.bincount(update, weights=counts.sum(axis=1))
        totals[0] += cursor.begun_samples
        total_of_step = np.maximum(totals, 1)[update]
        return replace(
            plan,
            update_ends=np.diff(update, append=-1) != 0,
            loss_scale=counts * self._world_size / total_of_step[:, None],
        )


def _update_of(steps: list[PlannedStep], before: Cursor) -> PlannedUpdate:
    """Returns an update of these steps; a resumed update also has the steps that were taken before the resume."""
    num_samples = before.begun_samples + sum(step.row_samples for step in steps)
    after = replace(
        steps[-1].cursor,
        update=before.update + 1,
        samples_used=before.samples_used + num_samples,
        samples_seen=before.samples_seen + num_samples,
        current=num_samples,
        begun_rows=0,
        begun_samples=0,
        begun_weight=0.0,
    )
    return PlannedUpdate(steps, before, after)


Updates: TypeAlias = PreservedUpdates | FreeUpdates


def compare_ranks(
    world: World, plan: Updates, identity: Mapping[str, object], place: Cursor, dataset: Any
) -> None:
    """Raises AlignmentError if ranks are about to plan different updates, or updates of different samples."""
    if world.size == 1:
        return
    facts = {
        "lengths, budget, settings or place in the epoch": (identity, place),
        PARTS: ends_of(dataset),
        **plan.facts(place),
    }
    names = differing(world, facts)
    if without_parts(names):
        raise AlignmentError(
            f"ranks have different {', '.join(names)} at the start of epoch {place.epoch}; give "
            "all ranks the same data, seeds, schedules and saved states"
        )
