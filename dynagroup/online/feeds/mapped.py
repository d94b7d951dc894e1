"""Windows of a map-style dataset: what feeds share whose samples have positions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynagroup.online.codec import a_pack, pack, pack_groups, some_groups, unpack, unpack_groups
from dynagroup.online.datasets import IndexedDataset
from dynagroup.online.feeds.base import Feed, Source
from dynagroup.online.records import Planned, Queued, Refined
from dynagroup.online.requests import Rank
from dynagroup.online.workers import Windows
from dynagroup.shapes import IntArray
from dynagroup.validation import a_list, an_int, either, nothing

__all__ = ["MapFeed"]

A_REST = a_list(a_list(either(a_pack(), nothing(), a_list(an_int()), an_int()), length=4))


class MapFeed(Feed):
    """Windows of a map-style dataset.

    Its place holds batches by positions. Resumed, they are asked for first, in the very same groups, so the epoch goes on
    exactly; on another number of ranks the positions that nobody emitted become an order of their own.
    """

    place = {"front": some_groups(), "pool": some_groups(), "flags": a_list(an_int(0, 3)), "rest": A_REST}

    def __init__(self, source: Source, windows: Windows, place: Mapping[str, Any] | None) -> None:
        self.source, self.windows = source, windows
        self._resumed = place
        if place is not None:
            for planned in self._first(place):
                windows.send(planned, whole=True)
            for positions, groups, costs, keep in place["rest"]:
                parts = [None if part is None else tuple(part) for part in (groups, costs)]
                windows.send(Planned(unpack(positions), parts[0], keep, costs=parts[1]))

    @property
    def receiving(self) -> bool:
        return self.windows.under_way

    @property
    def can_take(self) -> bool:
        return self.windows.under_way

    @property
    def pending_samples(self) -> int:
        return sum(len(planned.positions) for planned in self.windows.pending)

    def take(self) -> list[Queued]:
        return self.windows.take()

    def close(self) -> None:
        self.windows.close()

    def spare(self) -> Refined:
        order = self.source.order
        index = order.at(np.zeros(1, np.int64)) if len(order) else [0]
        return self.source.collator(IndexedDataset(self.source.dataset).__getitems__(index)).batches[0]

    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        rest = [
            [pack(p.positions), p.groups and list(p.groups), p.costs and list(p.costs), p.keep]
            for p in self.windows.pending
            if not p.mark
        ]
        flags = [2 * q.late + q.kept for q in pool]
        return {"front": _groups(front), "pool": _groups(pool), "flags": flags, "rest": rest}

    def reload(self) -> tuple[list[Queued | None], list[Queued]]:
        place, self._resumed = self._resumed, None
        if place is None:
            return [], []
        front, pool = unpack_groups(place["front"]), unpack_groups(place["pool"])
        pieces: dict[int, list[Queued]] = {}
        for queued in self.windows.take() if any(front) or any(pool) else ():
            pieces.setdefault(queued.refined.group, []).append(queued)
        numbers = iter(range(len(pieces)))
        slots = [pieces[next(numbers)] if group else [] for group in (*front, *pool)]
        extra = [q for slot in slots[: len(front)] for q in slot[1:]]
        agreed = [slot[0] if slot else None for slot in slots[: len(front)]]
        queued = [q for slot in slots[len(front) :] for q in slot] + extra
        if len(place["flags"]) == len(queued):  # processing may have changed lengths, and so the number of batches
            queued = [
                replace(q, late=bool(f & 2), kept=bool(f & 1)) for q, f in zip(queued, place["flags"], strict=True)
            ]
        return agreed, queued

    @classmethod
    def left(cls, source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
        parts = [np.zeros(0, np.int64)]
        for rank, place in enumerate(places):
            parts += [unpack(place[name][1]) for name in ("front", "pool")]
            parts += [unpack(rest[0]) for rest in place["rest"]]
            parts += cls._still_planned(source, source.rank(rank, len(places)), place)
        return np.sort(np.concatenate(parts))

    @classmethod
    @abstractmethod
    def _still_planned(cls, source: Source, who: Rank, place: Mapping[str, Any]) -> list[IntArray]:
        """Positions that a rank would still have been given."""

    def unused(self, pool: Sequence[Queued]) -> list[int]:
        held = [np.asarray(q.positions, np.int64) for q in pool] + [p.positions for p in self.windows.pending]
        return [index for positions in held for index in self.source.order.at(positions)]

    @staticmethod
    def _first(place: Mapping[str, Any]) -> Iterator[Planned]:
        groups = [group for name in ("front", "pool") for group in unpack_groups(place[name]) if group]
        if groups:
            keep = len(groups) if any(flag & 1 for flag in place["flags"]) else 0
            flat = np.asarray([position for group in groups for position in group], np.int64)
            yield Planned(flat, tuple(len(group) for group in groups), keep)


def _groups(batches: Sequence[Queued | None]) -> list[str]:
    return pack_groups([q.positions if q is not None else () for q in batches])
