"""Nothing is known of the samples: ranks hand windows out to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynagroup.errors import StateError
from dynagroup.online.align import hand_out
from dynagroup.online.feeds.base import Source
from dynagroup.online.feeds.mapped import MapFeed
from dynagroup.online.records import Planned, Queued
from dynagroup.online.requests import Rank
from dynagroup.shapes import IntArray
from dynagroup.validation import a_list, an_int

__all__ = ["HandedOutFeed"]


class HandedOutFeed(MapFeed):
    """Windows that the ranks hand out to each other at their exchanges, by how much each has left to do."""

    kind = "windows"
    ordered = False
    place = {**MapFeed.place, "handed_out": a_list(an_int(), length=2)}

    def __init__(self, source: Source, place: Mapping[str, Any] | None) -> None:
        self.start, self.stop = place["handed_out"] if place else (0, len(source.order))
        super().__init__(source, source.windows(), place)
        self.windows.open = self.start < self.stop

    @property
    def receiving(self) -> bool:
        return self.windows.under_way or self.windows.open

    @property
    def shares(self) -> bool:
        return self.start < self.stop

    def share(self, loads: Sequence[int], ahead: int) -> None:
        window = self.source.config.window
        target = (self.source.workers.depth + 1) * window + ahead
        grants, self.start = hand_out(loads, self.start, self.stop, window=window, target=target)
        for start, stop in grants[self.source.world.rank].ranges:
            self.windows.send(Planned(np.arange(start, stop), keep=0 if self.shares else stop - start))
        self.windows.open = self.shares

    def check_given(self, samples: int) -> None:
        if samples != self.start:
            raise StateError(
                f"the state is damaged: its hand-out stands at sample {self.start}, but ranks were given {samples} samples"
            )

    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        return super().state(front, pool) | {"handed_out": [self.start, self.stop]}

    @classmethod
    def left(cls, source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
        open_range = np.arange(*places[0]["handed_out"])
        return np.sort(np.concatenate([super().left(source, places), open_range]))

    @classmethod
    def _still_planned(cls, source: Source, who: Rank, place: Mapping[str, Any]) -> list[IntArray]:
        return []

    def unused(self, pool: Sequence[Queued]) -> list[int]:
        open_range = np.arange(self.start, self.stop if self.source.world.rank == 0 else self.start)
        return super().unused(pool) + self.source.order.at(open_range)
