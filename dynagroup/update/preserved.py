"""Planned updates of a set size: which samples an update holds does not depend on budget or ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dynagroup.errors import BudgetError, StateError
from dynagroup.fingerprint import described
from dynagroup.plan.order import epoch_order
from dynagroup.plan.plan import PlannedWindow
from dynagroup.plan.planner import Planner
from dynagroup.plan.position import Position, Trail
from dynagroup.plan.source import OrderSource
from dynagroup.shapes import IntArray
from dynagroup.update.place import Place
from dynagroup.update.plans import PlannedUpdate, Updates, as_planned
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.update.sizes import Cursor, UpdateSizes, Walk

__all__ = ["PreservedUpdates"]


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
        return self.planner.num_planned if self._order is None else self._order.counted

    def start(self, epoch: int, world_size: int) -> Cursor:
        return self.sizes.start(epoch)

    def walk(self, world_size: int) -> Walk:
        return self.sizes

    def _num_steps(self, epoch: int, world_size: int) -> int:
        ordered = self.order_of(epoch)
        spans = self.sizes.spans(self.start(epoch, world_size))
        return sum(self.planner.num_steps_of((ordered[start:stop] for start, stop, _ in spans), world_size))

    def is_over(self, cursor: Cursor) -> bool:
        return next(self.sizes.spans(cursor), None) is None

    def order_of(self, epoch: int) -> IntArray:
        if self._order is not None:
            return self._order.counted_epoch(epoch)
        count = self.planner.num_samples
        order = epoch_order(count, seed=self.planner.config.seed, epoch=epoch) if self._shuffle else np.arange(count)
        left_out = self.planner.left_out
        return order[~np.isin(order, left_out)] if len(left_out) else order

    def updates(self, place: Place, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        before, begun = place.cursor, place.begun
        ordered = self.order_of(before.epoch)
        for start, stop, after in self.sizes.spans(before):
            position = begun.position if begun is not None else self._beginning
            window = self._window(ordered[start:stop], before, position, world_size)
            self._notice(window, before.epoch, world_size)
            trail = Trail(position, world_size)
            trail.open(len(window.table), 1)
            trail.steps = len(window.table)
            where = {"before": before, "after": after, "begun": begun, "position": trail.position}
            yield as_planned(window, slice(None), self.planner, rank, **where)
            before, begun = after, None

    @property
    def _beginning(self) -> Position:
        return Position(self.planner.window_size(1))

    def _window(self, indices: IntArray, before: Cursor, position: Position, world_size: int) -> PlannedWindow:
        """The update of these samples, from ``position`` on."""
        window = next(self.planner.steps(before.epoch, world_size, position, order=indices), None)
        if window is None or not len(window.table):
            raise BudgetError(
                f"no sample of update {before.update} fits the budget even alone; filter such samples out beforehand, "
                "or pass oversize='alone'"
            )
        return window

    def _windows(self, epoch: int, world_size: int) -> Iterator[PlannedWindow]:
        ordered, before = self.order_of(epoch), self.start(epoch, world_size)
        for start, stop, after in self.sizes.spans(before):
            yield self._window(ordered[start:stop], before, self._beginning, world_size)
            before = after

    def state(self, epoch: int, world_size: int) -> dict[str, Any]:
        order = None if self._order is None else self._order.checksum(epoch)
        return {"changes": [list(change) for change in self.sizes.changes], "past": [], "order": order}

    def check(self, state: Mapping[str, Any], place: Place) -> None:
        sizes = UpdateSizes(self._schedule, self._num_ordered, drop_last=self.sizes.drop_last)
        sizes.restore(state["changes"])
        if (
            not sizes.comes_by(place.cursor)
            or state["past"]
            or (place.begun is not None and next(sizes.spans(place.cursor), None) is None)
        ):
            raise StateError(f"the state is damaged: no run of these updates comes by {place.cursor}")
        begun = place.begun
        if begun is not None and (
            begun.position.window_size != self.planner.window_size(1) or begun.position.windows_done
        ):
            raise StateError(f"the state is damaged: {begun.position} is no place within an update")

    def restore(self, state: Mapping[str, Any], place: Place) -> None:
        self.sizes.restore(state["changes"])
