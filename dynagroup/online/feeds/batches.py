"""The user gives batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dynagroup.errors import StateError
from dynagroup.online.feeds.base import Feed, Source
from dynagroup.online.feeds.planned import PlanFeed
from dynagroup.online.records import Planned, Queued
from dynagroup.online.requests import Order, Rank
from dynagroup.shapes import IntArray

__all__ = ["BatchesFeed"]


class BatchesFeed(PlanFeed):
    """The user's batches, each refined by itself; positions number this rank's samples as they come."""

    kind = "batches"
    bounded = False

    @classmethod
    def order(cls, source: Source) -> Order:
        return Order(np.asarray([index for batch in source.batches or () for index in batch], np.int64))

    @classmethod
    def plans(cls, source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Planned]:
        position = 0
        for number, batch in enumerate(source.batches or ()):
            if number >= (start or (0,))[0]:
                yield Planned(np.arange(position, position + len(batch)), (len(batch),), mark=(number,))
            position += len(batch)

    @classmethod
    def left(cls, source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
        raise StateError(
            f"a batch_sampler is divided among ranks by itself: it resumes on {len(places)} ranks, as before, not on "
            f"{source.world.size}"
        )

    def unused(self, pool: Sequence[Queued]) -> list[int]:
        pending = [index for p in self.windows.pending for index in self.order(self.source).at(p.positions)]
        return Feed.unused(self, pool) + pending
