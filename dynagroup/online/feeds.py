"""Where an epoch's windows come from: one small class a kind of source, each with its own place and its restoring.

========================  =======================================================  ==========================================
feed                      when                                                     its place in the epoch
========================  =======================================================  ==========================================
:class:`HandedOutFeed`    nothing is known of the samples                          what was handed out, what is still to be
:class:`ExactFeed`        lengths were seen in an earlier epoch                    the next request of the plan
:class:`RoughFeed`        lengths are hinted at, or change from epoch to epoch     the next request of the plan
:class:`UpdateFeed`       ``samples_per_update`` is set                            where the next update begins
:class:`BatchesFeed`      the user gives batches                                   the number of the next batch
:class:`StreamFeed`       the dataset is iterable                                  where each worker stands
========================  =======================================================  ==========================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.checks import Check, a_list, a_mapping, an_int, anything, either, nothing
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.online.align import hand_out
from dynagroup.online.collate import RefinementCollator
from dynagroup.online.config import OnlineConfig
from dynagroup.online.datasets import IndexedDataset
from dynagroup.online.records import Planned, Queued, Refined, RefinedWindow
from dynagroup.online.requests import Order, Rank, UpdateMark, exact_plans, exact_window, rough_plans, update_plans
from dynagroup.online.state import a_pack, pack, pack_groups, some_groups, unpack, unpack_groups
from dynagroup.online.windows import Windows, Workers
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.sizes import Cursor, UpdateSizes
from dynagroup.update.stats import LoaderStats
from dynagroup.world import World

__all__ = ["BatchesFeed", "ExactFeed", "Feed", "HandedOutFeed", "RoughFeed", "Source", "StreamFeed", "UpdateFeed"]

AN_OPTIONAL_MARK = either(a_list(an_int(), most=8), nothing())
A_REST = a_list(a_list(either(a_pack(), nothing(), a_list(an_int()), an_int()), length=4))


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What the feeds of an epoch draw on: facts, and the knobs they were given.

    Args:
        order: dataset indices by position; empty where the dataset or the user brings batches.
        lengths: known lengths by position. rough: roughly known ones. At most one of them.
        restart: where updates go on, on another number of ranks than they began on.
        batches: this rank's batches of dataset indices, where the user gives them.
    """

    dataset: Any
    world: World
    epoch: int
    budget: Budget
    config: OnlineConfig
    collator: RefinementCollator
    stats: LoaderStats
    workers: Workers
    order: Order
    sizes: UpdateSizes | None = None
    batches: list[list[int]] | None = None
    lengths: Streams | None = None
    rough: IntArray | None = None
    restart: UpdateMark | None = None

    def rank(self, number: int | None = None, size: int | None = None) -> Rank:
        """This rank, or another one."""
        who = self.world.rank if number is None else number
        return Rank(who, size or self.world.size, self.config.seed, self.epoch)

    def windows(self, plans: Iterable[Planned] = (), *, whole: bool = False, order: Order | None = None) -> Windows:
        """Requests for this epoch's workers."""
        return Windows(
            self.workers.queue,
            self.workers.open_map,
            self.order if order is None else order,
            self.epoch,
            plans=plans,
            max_bytes=None if whole else self.config.window_bytes,
        )


class Feed(ABC):
    """Windows of one rank in one epoch, in the order in which it opened them."""

    kind: ClassVar[str]
    """Stands in saved states."""
    ordered: ClassVar[bool] = True
    """Batches keep the order in which they come (they were planned in rows), instead of being shuffled."""
    bounded: ClassVar[bool] = True
    """What a rank still receives is known beforehand."""
    place: ClassVar[Mapping[str, Check]] = {}
    """What its saved place must be."""

    @property
    @abstractmethod
    def receiving(self) -> bool:
        """Something was handed out and not taken yet, or more may be handed out."""

    @property
    @abstractmethod
    def can_take(self) -> bool:
        """:meth:`take` would return a window, or find the end of a stream."""

    @property
    def pending_samples(self) -> int:
        """Samples handed out and not taken yet; 0 where it is not known."""
        return 0

    @property
    def shares(self) -> bool:
        """Positions are left that the ranks' loads hand out, see :meth:`share`."""
        return False

    def share(self, loads: Sequence[int], ahead: int) -> None:
        """Hand out positions by all ranks' loads, in samples, so that each has ``ahead`` and what its workers prefetch."""
        raise ConfigError(f"a {type(self).__name__} hands nothing out")

    @abstractmethod
    def take(self) -> Sequence[Queued] | None:
        """The next window's batches; None at the end of a stream. Raises what a worker raised."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them."""

    @abstractmethod
    def spare(self) -> Refined:
        """One sample as a batch, for a rank that idles and never had any."""

    @abstractmethod
    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        """Its place, and the batches that it gave and that are not used: ``front`` are agreed steps, ``pool`` is queued."""

    @abstractmethod
    def reload(self) -> tuple[list[Queued | None], list[Queued]]:
        """What a resumed epoch had agreed and queued, loaded again."""

    @classmethod
    @abstractmethod
    def left(cls, source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
        """Positions that no rank has emitted, from the places of all of them.

        Raises:
            StateError: the ranks' parts were fixed beforehand, so that they resume on as many ranks only.
        """

    def unused(self, pool: Sequence[Queued]) -> list[int]:
        """Dataset indices of what this rank would still have emitted."""
        return [index for queued in pool for index in queued.refined.indices]

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end."""
        raise ConfigError("updates are counted only with `samples_per_update`")

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from the first on that no rank's workers can have been asked for."""
        raise ConfigError("set_samples_per_update needs a loader with samples_per_update: this one is free-running")


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
            start=tuple(start or (0, 0)),
        )


class RoughFeed(PlanFeed):
    """Windows of similar samples, by lengths that are only roughly known; workers cut them."""

    kind = "rough"

    @classmethod
    def plans(cls, source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Planned]:
        if source.rough is None:
            return ()
        return rough_plans(source.rough, who, window=source.config.window, start=tuple(start or (0, 0)))


class UpdateFeed(PlanFeed):
    """Each window is this rank's share of one update: whole, because ranks agree on an update's steps at once."""

    kind = "updates"
    ordered = False

    def __init__(self, source: Source, place: Mapping[str, Any] | None) -> None:
        super().__init__(source, place, whole=True)

    @classmethod
    def plans(cls, source: Source, who: Rank, start: Sequence[int] | None) -> Iterable[Planned]:
        first = UpdateMark(*start) if start else source.restart
        known = {"lengths": source.lengths, "hint": source.rough, "work": source.config.work}
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
        """Where updates go on, on another number of ranks: what remains of one is an update of its own."""
        begun = sum(len(unpack(place["front"][1])) for place in places)
        mark = UpdateMark(*places[0]["next"])
        if not begun:
            return mark
        return mark._replace(update=mark.update - 1, samples_used=mark.samples_used - begun, until=mark.samples_used)

    @classmethod
    def _still_planned(cls, source: Source, who: Rank, place: Mapping[str, Any]) -> list[IntArray]:
        first = UpdateMark(*place["next"]).samples_used - source.order.skipped
        return [np.arange(first, len(source.order))] if who.rank == 0 else []


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


class StreamFeed(Feed):
    """Windows of an iterable dataset, until it ends. Its place is where each worker reads on, and what it leaves out."""

    kind = "stream"
    ordered = False
    bounded = False
    place = {
        "workers": a_mapping(
            values=a_mapping({"read": an_int(), "until": an_int(), "keep": a_list(an_int()), "state": anything()})
        )
    }

    def __init__(self, source: Source, place: Mapping[str, Any] | None) -> None:
        self._source = source
        self._place = None if place is None else {"epoch": source.epoch, "workers": place["workers"]}
        self._iterator: Iterator[RefinedWindow] | None = None
        self._receiving = True
        self._spare: Refined | None = None
        self._opened: dict[int, deque[dict[str, Any]]] = {}
        """Worker -> its windows that may not be fully used: where each began, and its samples' numbers."""

    @property
    def receiving(self) -> bool:
        return self._receiving

    @property
    def can_take(self) -> bool:
        return self._receiving

    def take(self) -> list[Queued] | None:
        source = self._source
        if self._iterator is None:
            self._iterator = source.workers.open_stream(source.epoch, source.world, self._place)
        for window in self._iterator:
            if not window.spare:
                self._opened.setdefault(window.worker, deque()).append({**window.resume})
                return [Queued(refined, tuple(refined.indices)) for refined in window]
            self._spare = window.batches[0]
        self._receiving = False
        return None

    def close(self) -> None:
        self._iterator = None

    def spare(self) -> Refined:
        if self._spare is None:
            raise AlignmentError(
                f"rank {self._source.world.rank} has no samples at all to idle on; give every rank at least one sample"
            )
        return self._spare

    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        workers, size = max(self._source.workers.num_workers, 1), self._source.world.size
        remaining: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        for queued in (*front, *pool):
            for arrival in queued.refined.indices if queued else ():
                number, worker = divmod(arrival // size, workers)
                remaining[worker].add(number)
        spots = {} if self._place is None else dict(self._place["workers"])  # of workers that gave nothing since
        for worker, opened in self._opened.items():
            while len(opened) > 1 and not remaining[worker].intersection(opened[0]["numbers"]):
                opened.popleft()
            first, last = opened[0], opened[-1]
            before = spots.get(str(worker), {"until": 0, "keep": ()})
            keep = remaining[worker].union(n for n in before["keep"] if n >= last["until"])  # not read again so far
            until = max(last["until"], before["until"])
            spots[str(worker)] = {"read": first["read"], "until": until, "keep": sorted(keep), "state": first["state"]}
        return {"workers": spots}

    def reload(self) -> tuple[list[Queued | None], list[Queued]]:
        return [], []

    @classmethod
    def left(cls, source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
        raise StateError(
            f"a stream is divided among ranks by itself: it resumes on {len(places)} ranks, as before, not on "
            f"{source.world.size}"
        )


def _groups(batches: Sequence[Queued | None]) -> list[str]:
    return pack_groups([q.positions if q is not None else () for q in batches])
