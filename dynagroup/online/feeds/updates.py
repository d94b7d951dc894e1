"""``samples_per_update`` is set: one window is a rank's share of one update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.online.codec import unpack
from dynagroup.online.feeds.base import Source
from dynagroup.online.feeds.planned import PlanFeed
from dynagroup.online.records import Planned, Queued
from dynagroup.online.requests import Rank, UpdateMark, update_plans
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray
from dynagroup.update.schedule import UpdateSizes

__all__ = ["UpdateFeed"]


class UpdateFeed(PlanFeed):
    """Each window is this rank's share of one update: whole, because ranks agree on an update's steps at once."""

    kind = "updates"
    ordered = False

    def __init__(self, source: Source, place: Mapping[str, Any] | None) -> None:
        super().__init__(source, place, whole=True)

    @classmethod
    def plans(cls, source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Planned]:
        first = UpdateMark(*start) if start else source.restart
        config = source.config
        known = {"lengths": source.lengths, "hint": source.rough, "work": config.work, "objective": config.objective}
        return update_plans(
            cls._sizes(source), who, budget=source.budget, **known, skipped=source.order.skipped, start=first
        )

    @staticmethod
    def _sizes(source: Source) -> UpdateSizes:
        if source.sizes is None:
            raise ConfigError("updates of a set size need `samples_per_update`")
        return source.sizes

    @property
    def mark(self) -> UpdateMark:
        """Where the first update begins that was not taken yet."""
        mark = self.windows.next_mark
        return UpdateMark(*mark) if mark else UpdateMark.of(self._sizes(self.source).end(self.source.epoch))

    @property
    def cursor(self) -> Cursor:
        return self.mark.cursor(self._sizes(self.source))

    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        return super().state(front, pool) | {"next": [int(part) for part in self.mark]}

    def set_samples_per_update(self, samples: int) -> int:
        sizes = self._sizes(self.source)
        cursor = self.mark.passed.cursor(sizes)
        for after in islice(sizes.cursors(cursor), self.source.workers.depth):
            cursor = after
        update = sizes.change(cursor, samples)
        if self.windows.upcoming is not None:
            self.windows.replan(self.plans(self.source, self.source.rank(), self.windows.upcoming.mark))
        return update

    @classmethod
    def restart(cls, places: Sequence[Mapping[str, Any]]) -> UpdateMark:
        """Where updates go on, on another number of ranks: what remains of one comes next, whole."""
        begun = sum(len(unpack(place["front"][1])) for place in places)
        mark = UpdateMark(*places[0]["next"])
        if not begun:
            return mark
        return mark._replace(update=mark.update - 1, samples_used=mark.samples_used - begun, until=mark.samples_used)

    @classmethod
    def _still_planned(cls, source: Source, who: Rank, place: Mapping[str, Any]) -> list[IntArray]:
        first = UpdateMark(*place["next"]).samples_used - source.order.skipped
        return [np.arange(first, len(source.order))] if who.rank == 0 else []
