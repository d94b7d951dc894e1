"""Where an epoch's windows come from: a table of kinds, and the feed of datasets with positions, which reads it.

============  =====================================  ========================================
kind          when                                   its place in the epoch
============  =====================================  ========================================
``windows``   nothing is known of the samples        what was handed out, what is still to be
``exact``     lengths were seen in an earlier epoch  the next request of the plan
``rough``     lengths are hinted at, or change       the next request of the plan
``updates``   ``samples_per_update`` is set          the run's cursor
``batches``   the user gives batches                 the number of the next batch
``iterable``  the dataset is iterable                where each worker stands
============  =====================================  ========================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.config import OnlineConfig
from dynagroup.online.datasets import IndexedDataset
from dynagroup.online.messages import Refined, Request
from dynagroup.online.plans import (
    Order,
    Rank,
    batch_plans,
    exact_plans,
    exact_window,
    rough_plans,
    update_plans,
)
from dynagroup.online.protocol import hand_out
from dynagroup.online.state import pack, pack_groups, unpack, unpack_groups
from dynagroup.online.workers import Windows, Workers
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.schedule import UpdateSizes

__all__ = ["KINDS", "MapFeed", "Source", "kind_of", "left"]


FREE_RUNNING = "set_samples_per_update needs a loader with samples_per_update: this one is free-running"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What an epoch's feed draws on: facts, and the settings they were given.

    Args:
        cursor: where the updates that come begin.
        order: dataset indices by position; empty of an iterable dataset.
        lengths: known lengths by position. rough: roughly known ones. At most one of them.
        sizes: how many samples each update holds, where it is set.
        batches: this rank's batches of dataset indices, where the user gives them.
    """

    dataset: Any
    iterable: bool
    world: World
    config: OnlineConfig
    collator: RefinementCollator
    workers: Workers
    cursor: Cursor
    order: Order
    sizes: UpdateSizes | None = None
    batches: list[list[int]] | None = None
    lengths: Streams | None = None
    rough: IntArray | None = None

    @property
    def epoch(self) -> int:
        """The one that is run."""
        return self.cursor.epoch

    @property
    def budget(self) -> Budget:
        """What a batch may be."""
        return self.collator.budget

    def rank(self, number: int, size: int) -> Rank:
        """Whose requests."""
        return Rank(number, size, self.epoch, self.budget, self.config)


Plans = Callable[[Source, Rank, "Sequence[int] | None"], Iterable[Request]]
"""A rank's requests from a mark on; None: from the epoch's beginning."""


class Kind(NamedTuple):
    """Where the requests of an epoch come from, and what may be done with their batches."""

    plans: Plans = lambda source, who, start: ()
    ordered: bool = False
    """Batches keep the order in which they come (they were planned in rows), instead of being shuffled."""
    bounded: bool = True
    """What a rank still receives is known beforehand."""
    divided: bool = False
    """The user divides the samples among ranks."""


def _exact(source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Request]:
    if source.lengths is None or not len(source.order):
        return ()
    window = exact_window(source.lengths, source.budget, who.size, source.config)
    return exact_plans(source.lengths, who, window=window, start=start or (0, 0))


def _rough(source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Request]:
    return () if source.rough is None else rough_plans(source.rough, who, start=start or (0, 0))


def _updates(source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Request]:
    return _updates_from(source, who, source.cursor)


def _updates_from(source: Source, who: Rank, cursor: Cursor) -> Iterable[Request]:
    if source.sizes is None:
        return ()
    known = {"lengths": source.lengths, "hint": source.rough}
    return update_plans(source.sizes, who, start=cursor, skipped=source.order.skipped, **known)


def _batches(source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Request]:
    return batch_plans(source.batches or [], start=start or (0,))


KINDS: Mapping[str, Kind] = {
    "windows": Kind(),
    "exact": Kind(_exact, ordered=True),
    "rough": Kind(_rough),
    "updates": Kind(_updates),
    "batches": Kind(_batches, ordered=True, bounded=False, divided=True),
    "iterable": Kind(bounded=False, divided=True),
}


def kind_of(source: Source) -> str:
    """Which kind of epoch a source makes."""
    if source.iterable:
        return "iterable"
    if source.batches is not None:
        return "batches"
    if source.sizes is not None:
        return "updates"
    if source.lengths is not None:
        return "exact"
    return "windows" if source.rough is None else "rough"


def left(source: Source, kind: str, places: Sequence[Mapping[str, Any]]) -> IntArray:
    """Positions that no rank has emitted, from the places of all of them.

    Raises:
        StateError: the user divides the samples among ranks, so that they resume on as many ranks only.
    """
    if KINDS[kind].divided:
        whose = "an iterable dataset" if kind == "iterable" else "a batch_sampler"
        raise StateError(
            f"{whose} is divided among ranks by itself: it resumes on {len(places)} ranks, as before, not on {source.world.size}"
        )
    parts = [unpack(place[name][1]) for place in places for name in ("front", "pool")]
    parts += [unpack(rest[0]) for place in places for rest in place["rest"]]
    if kind == "windows":
        parts.append(np.arange(*places[0]["handed_out"]))
    elif kind == "updates":
        parts.append(np.arange(source.cursor.samples_used - source.order.skipped, len(source.order)))
    else:
        for rank, place in enumerate(places):
            if place["next"] is not None:
                who = source.rank(rank, len(places))
                parts += [request.positions for request in KINDS[kind].plans(source, who, place["next"])]
    return np.sort(np.concatenate(parts))


class MapFeed:
    """Windows of a map-style dataset, in the order in which this rank opened them.

    Its place holds batches by positions. Resumed, they are asked for first, in the very same groups, so the epoch goes on
    exactly; on another number of ranks the positions that nobody emitted become an order of their own.
    """

    opening = 0
    has_nothing = False

    def __init__(self, source: Source, kind: str, place: Mapping[str, Any] | None) -> None:
        self.source, self.kind = source, KINDS[kind]
        self.start, self.stop = place["handed_out"] if place else (0, len(source.order) if kind == "windows" else 0)
        over = place is not None and place["next"] is None
        who = source.rank(source.world.rank, source.world.size)
        plans = () if over else self.kind.plans(source, who, place["next"] if place else None)
        max_bytes = (
            None if kind == "updates" else source.config.window_bytes
        )  # ranks agree on all steps of an update at once
        self.windows = Windows(source.workers, source.order, source.epoch, plans=plans, max_bytes=max_bytes)
        self.windows.open = self.shares
        self._resumed = place
        if place is not None:
            for request in _held(place):
                self.windows.send(request, whole=True)
            for positions, groups, costs, keep in place["rest"]:
                self.windows.send(Request(unpack(positions), groups and tuple(groups), costs and tuple(costs), keep))

    @property
    def receiving(self) -> bool:
        """Something was handed out and not taken yet, or more may be handed out."""
        return self.windows.under_way or self.windows.open

    @property
    def can_take(self) -> bool:
        """:meth:`take` would return a window."""
        return self.windows.under_way

    @property
    def pending_samples(self) -> int:
        """Samples handed out and not taken yet."""
        return sum(len(request.positions) for request in self.windows.pending)

    @property
    def shares(self) -> bool:
        """Positions are left that the ranks' loads hand out."""
        return self.start < self.stop

    def share(self, loads: Sequence[int], ahead: int) -> None:
        """Hand out positions by all ranks' loads, in samples, so that each has ``ahead`` and what its workers prefetch."""
        window = self.source.config.window
        target = (self.source.workers.depth + 1) * window + ahead
        windows, self.start = hand_out(loads, self.start, self.stop, window=window, target=target)
        for start, stop in windows[self.source.world.rank]:
            self.windows.send(Request(np.arange(start, stop), keep=0 if self.shares else stop - start))
        self.windows.open = self.shares

    def take(self) -> list[Refined] | None:
        """The next window's batches. Raises what a worker raised."""
        return self.windows.take()

    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them."""
        self.windows.close()

    def spare(self) -> Refined:
        """One sample as a batch, for a rank that idles and never had any."""
        order = self.source.order
        index = order.at(np.zeros(1, np.int64)) if len(order) else [0]
        return self.source.collator(IndexedDataset(self.source.dataset).__getitems__(index)).batches[0]

    def state(self, front: Sequence[Refined | None], pool: Sequence[Refined]) -> dict[str, Any]:
        """Its place, and the batches that it gave and that are not used: ``front`` are agreed steps, ``pool`` is queued."""
        rest = [
            [pack(p.positions), p.groups and list(p.groups), p.costs and list(p.costs), p.keep]
            for p in self.windows.pending
            if p.mark is None
        ]
        mark = self.windows.next_mark
        return {
            "front": pack_groups([batch.positions if batch else () for batch in front]),
            "pool": pack_groups([batch.positions for batch in pool]),
            "flags": [2 * batch.late + (batch.samples is not None) for batch in pool],
            "rest": rest,
            "next": None if mark is None else [] if isinstance(mark, Cursor) else [int(part) for part in mark],
            "handed_out": [self.start, self.stop],
        }

    def reload(self) -> tuple[list[Refined | None], list[Refined]]:
        """What a resumed epoch had agreed and queued, loaded again."""
        place, self._resumed = self._resumed, None
        if place is None:
            return [], []
        front, pool = unpack_groups(place["front"]), unpack_groups(place["pool"])
        pieces: dict[int, list[Refined]] = {}
        for batch in (self.windows.take() or ()) if any(front) or any(pool) else ():
            pieces.setdefault(batch.group, []).append(batch)
        numbers = iter(range(len(pieces)))
        slots = [pieces[next(numbers)] if group else [] for group in (*front, *pool)]
        agreed = [slot[0] if slot else None for slot in slots[: len(front)]]
        queued = [batch for slot in slots[len(front) :] for batch in slot]
        queued += [batch for slot in slots[: len(front)] for batch in slot[1:]]
        if len(place["flags"]) == len(queued):  # processing may have changed lengths, and so the number of batches
            flagged = zip(queued, place["flags"], strict=True)
            queued = [replace(b, late=bool(flag & 2), samples=b.samples if flag & 1 else None) for b, flag in flagged]
        return agreed, queued

    def unused(self, pool: Sequence[Refined]) -> list[int]:
        """Dataset indices of what this rank would still have emitted."""
        open_range = np.arange(self.start, self.stop if self.source.world.rank == 0 else self.start)
        waiting = [*(request.positions for request in self.windows.pending), open_range]
        held = [index for batch in pool for index in batch.indices]
        return held + [index for positions in waiting for index in self.source.order.at(positions)]

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from the first on that no rank's workers can have been asked for."""
        sizes, source = self.source.sizes, self.source
        if sizes is None:
            raise ConfigError(FREE_RUNNING)
        cursor = self.windows.next_mark or sizes.end(source.epoch)
        for after in islice(sizes.cursors(cursor), source.workers.depth):
            cursor = after
        update = sizes.change(cursor, samples)
        if self.windows.upcoming is not None:
            who = source.rank(source.world.rank, source.world.size)
            self.windows.replan(_updates_from(source, who, self.windows.upcoming.mark))
        return update


def _held(place: Mapping[str, Any]) -> Iterator[Request]:
    """One request for all batches that were agreed or queued."""
    groups = [group for name in ("front", "pool") for group in unpack_groups(place[name]) if group]
    if groups:
        keep = len(groups) if any(flag & 1 for flag in place["flags"]) else 0
        yield Request(np.concatenate(groups), tuple(map(len, groups)), keep=keep)
