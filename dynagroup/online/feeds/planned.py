"""Lengths are known, or roughly: requests that a plan gives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynagroup.online.feeds.base import Source
from dynagroup.online.feeds.mapped import MapFeed
from dynagroup.online.records import Planned, Queued
from dynagroup.online.requests import Order, Rank, exact_plans, exact_window, rough_plans
from dynagroup.shapes import IntArray
from dynagroup.validation import a_list, an_int, either, nothing

__all__ = ["ExactFeed", "PlanFeed", "RoughFeed"]

AN_OPTIONAL_MARK = either(a_list(an_int(), most=8), nothing())


class PlanFeed(MapFeed):
    """Requests that a plan gives, a pure function of the epoch; its place is the mark of the next one."""

    place = {**MapFeed.place, "next": AN_OPTIONAL_MARK}

    def __init__(self, source: Source, place: Mapping[str, Any] | None, *, whole: bool = False) -> None:
        used_up = place is not None and place["next"] is None
        plans = () if used_up else self.plans(source, source.rank(), place["next"] if place else None)
        super().__init__(source, source.windows(plans, whole=whole, order=self.order(source)), place)

    @classmethod
    @abstractmethod
    def plans(cls, source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Planned]:
        """The rank's requests from a mark on; None: from the epoch's beginning."""

    @classmethod
    def order(cls, source: Source) -> Order:
        """What positions mean."""
        return source.order

    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        mark = self.windows.next_mark
        return super().state(front, pool) | {"next": None if mark is None else [int(part) for part in mark]}

    @classmethod
    def _still_planned(cls, source: Source, who: Rank, place: Mapping[str, Any]) -> list[IntArray]:
        return [] if place["next"] is None else [p.positions for p in cls.plans(source, who, place["next"])]


class ExactFeed(PlanFeed):
    """Batches planned like the offline sampler's, in rows over the ranks, from lengths seen in an earlier epoch."""

    kind = "exact"

    @classmethod
    def plans(cls, source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Planned]:
        if source.lengths is None or not len(source.order):
            return ()
        window = exact_window(source.lengths, source.budget, who.size, source.config)
        shuffle = source.config.shuffle
        return exact_plans(
            source.lengths,
            source.budget,
            who,
            window=window,
            shuffle=shuffle,
            work=source.config.work,
            objective=source.config.objective,
            start=tuple(start or (0, 0)),
        )


class RoughFeed(PlanFeed):
    """Windows of similar samples, by lengths that are only roughly known; workers cut them."""

    kind = "rough"
    ordered = False

    @classmethod
    def plans(cls, source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Planned]:
        if source.rough is None:
            return ()
        return rough_plans(source.rough, who, window=source.config.window, start=tuple(start or (0, 0)))
