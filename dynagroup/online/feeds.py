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

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import padded_streams
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.online.messages import Refined, RefinedWindow, Request
from dynagroup.online.plans import (
    OnlineConfig,
    Order,
    Rank,
    batch_plans,
    exact_plans,
    rough_plans,
    update_plans,
)
from dynagroup.online.protocol import hand_out
from dynagroup.online.state import LearnedLengths, pack, pack_groups, unpack, unpack_groups
from dynagroup.online.workers import Workers
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.loader import ENDED_EARLY
from dynagroup.update.schedule import UpdateSizes

__all__ = ["FREE_RUNNING", "KINDS", "MapFeed", "Source", "left"]

FREE_RUNNING = "set_samples_per_update needs a loader with samples_per_update: this one is free-running"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What an epoch's feed draws on: facts, and the settings they were given.

    Args:
        cursor: where the updates that come begin.
        order: dataset indices by position; empty of an iterable dataset.
        sizes: how many samples each update holds, where it is set.
        batches: this rank's batches of dataset indices, where the user gives them.
        lengths: known lengths by position. rough: roughly known ones. At most one of them.
    """

    world: World
    config: OnlineConfig
    workers: Workers
    cursor: Cursor
    order: Order
    sizes: UpdateSizes | None = None
    batches: list[list[int]] | None = None
    lengths: Streams | None = None
    rough: IntArray | None = None

    @property
    def kind(self) -> str:
        """Which kind of epoch it makes, see the table."""
        if self.workers.iterable:
            return "iterable"
        if self.batches is not None:
            return "batches"
        if self.sizes is not None:
            return "updates"
        if self.lengths is not None:
            return "exact"
        return "windows" if self.rough is None else "rough"

    def plans(self, start: Sequence[int] | None, rank: int | None = None, size: int | None = None) -> Iterable[Request]:
        """The requests of a rank, this one by default, from a mark on; None: from the epoch's beginning."""
        rank, size = (self.world.rank, self.world.size) if rank is None or size is None else (rank, size)
        who = Rank(rank, size, self.cursor.epoch, self.workers.collator.budget, self.config)
        return KINDS[self.kind].plans(self, who, start)

    def with_lengths(self, learned: LearnedLengths | None, hint: IntArray | None) -> Source:
        """The same with what is known of the lengths of its order: exact ones for plans, or rough ones for like windows."""
        source, count = replace(self, lengths=None, rough=None), self.order.count
        if not count or (hint is None and (learned is None or not learned.seen)):
            return source
        at, used = np.asarray(self.order.at(np.arange(count)), np.int64), count
        if self.sizes is not None:
            used = self.sizes.end(self.cursor.epoch).samples_used - self.order.skipped
        known = None if learned is None else learned.known(at[:used])
        if known is None or learned is None:
            return source if hint is None else replace(source, rough=hint[at])
        unused = np.zeros(count - used, np.int32)  # what an epoch drops is never measured, and never asked for
        whole = {name: np.append(values, unused) for name, values in known.items()}
        if learned.steady:
            return replace(source, lengths=whole)
        padded = [whole[name] for name in padded_streams(self.workers.collator.budget, whole)]
        return replace(source, rough=np.sum(padded, axis=0, dtype=np.int64))


class Kind(NamedTuple):
    """Where the requests of an epoch come from, and what may be done with their batches."""

    plans: Callable[[Any, Rank, Sequence[int] | None], Iterable[Request]] = lambda source, who, start: ()
    ordered: bool = False
    """Batches keep the order in which they come (they were planned in rows), instead of being shuffled."""
    bounded: bool = True
    """What a rank still receives is known beforehand."""
    divided: str = ""
    """What divides the samples among ranks, if the user's does."""


def _updates(source: Source, who: Rank, start: Any) -> Iterable[Request]:
    sizes, known = source.sizes, {"lengths": source.lengths, "hint": source.rough}
    cursor = start or source.cursor
    return () if sizes is None else update_plans(sizes, who, cursor, skipped=source.order.skipped, **known)


KINDS: Mapping[str, Kind] = {
    "windows": Kind(),
    "exact": Kind(lambda source, who, start: exact_plans(source.lengths, who, start or (0, 0)), ordered=True),
    "rough": Kind(lambda source, who, start: rough_plans(source.rough, who, start or (0, 0))),
    "updates": Kind(_updates),
    "batches": Kind(
        lambda source, who, start: batch_plans(source.batches, start or (0,)),
        ordered=True,
        bounded=False,
        divided="a batch_sampler",
    ),
    "iterable": Kind(bounded=False, divided="an iterable dataset"),
}


def left(source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
    """Positions that no rank has emitted, from the places of all of them.

    Raises:
        StateError: the user divides the samples among ranks, so that they resume on as many ranks only.
    """
    whose, count = KINDS[source.kind].divided, source.order.count
    if whose:
        raise StateError(
            f"{whose} is divided among ranks by itself: it resumes on {len(places)} ranks, as before, not on {source.world.size}"
        )
    parts = [unpack(place[name][1], count) for place in places for name in ("front", "pool")]
    parts += [unpack(rest[0], count) for place in places for rest in place["rest"]]
    if source.kind == "windows":
        parts.append(np.arange(count)[slice(*places[0]["handed_out"])])
    elif source.kind == "updates":
        parts.append(np.arange(source.cursor.samples_used - source.order.skipped, count))
    else:
        for rank, place in enumerate(places):
            if place["next"] is not None:
                parts += [request.positions for request in source.plans(place["next"], rank, len(places))]
    return np.sort(np.concatenate(parts))


class MapFeed:
    """Windows of a map-style dataset: sent to the workers in one order, and taken back in the same one.

    A worker may answer a large window in part (``window_bytes``). What is left is asked for again at once and stands before
    all later windows, so the order does not depend on which worker is faster. Cost: one entry a window under way.

    Its place holds batches by positions. Resumed, they are asked for first, in the very same groups, so the epoch goes on
    exactly; on another number of ranks the positions that nobody emitted become an order of their own.
    """

    opening = 0
    has_nothing = False

    def __init__(self, source: Source, place: Mapping[str, Any] | None) -> None:
        self.source = source
        self.start, self.stop = place["handed_out"] if place else (0, source.order.count * (source.kind == "windows"))
        # Ranks agree on all steps of an update at once.
        self._max_bytes = None if source.kind == "updates" else source.config.window_bytes
        self._iterator: Iterator[RefinedWindow] | None = None
        self._number = 0
        self._turns: deque[int] = deque()
        self._sent: dict[int, Request] = {}
        self._early: dict[int, RefinedWindow] = {}
        self._replan(() if place and place["next"] is None else source.plans(place and place["next"]))
        source.workers.queue.reset(
            self._pull, lambda: self.shares or (self._max_bytes is not None and bool(self._sent))
        )
        self._resumed = place
        if place is not None:
            self._send_again(place)

    def _send_again(self, place: Mapping[str, Any]) -> None:
        """One request for all batches that were agreed or queued, then what was left of larger ones."""
        count = self.source.order.count
        groups = [group for name in ("front", "pool") for group in unpack_groups(place[name], count) if group]
        if groups:
            keep = len(groups) if any(flag & 1 for flag in place["flags"]) else 0
            self._send(Request(np.concatenate(groups), tuple(map(len, groups)), keep=keep), whole=True)
        for text, sizes, costs, keep in place["rest"]:
            self._send(Request(unpack(text, count), sizes and tuple(sizes), costs and tuple(costs), keep))

    @property
    def shares(self) -> bool:
        """Positions are left that the ranks' loads hand out; meanwhile workers that have nothing to do are given blanks."""
        return self.start < self.stop

    @property
    def can_take(self) -> bool:
        """Something was sent, or is planned, that did not come back yet."""
        return bool(self._sent) or self._upcoming is not None

    @property
    def receiving(self) -> bool:
        """The same, or more may be handed out."""
        return self.can_take or self.shares

    @property
    def pending(self) -> list[Request]:
        """What was sent and did not come back yet, in order."""
        return [self._sent[number] for number in self._turns]

    @property
    def pending_samples(self) -> int:
        """Samples handed out and not taken yet."""
        return sum(len(request.positions) for request in self.pending)

    def share(self, loads: Sequence[int], ahead: int) -> None:
        """Hand out positions by all ranks' loads, in samples, so that each has ``ahead`` and what its workers prefetch."""
        window = self.source.config.window
        target = (self.source.workers.depth + 1) * window + ahead
        windows, self.start = hand_out(loads, self.start, self.stop, window=window, target=target)
        for start, stop in windows[self.source.world.rank]:
            self._send(Request(np.arange(start, stop), keep=0 if self.shares else stop - start))

    def take(self) -> list[Refined] | None:
        """The next window's batches, in the order in which windows were sent, also where workers answer out of order. Raises what
        a worker raised."""
        if self._iterator is None:
            self._iterator = self.source.workers.open_map()
        while not self._turns or self._turns[0] not in self._early:  # the next request may not have been pulled yet
            window = next(self._iterator, None)
            if window is None:
                raise RuntimeError(ENDED_EARLY)
            if window.number >= 0:
                self._early[window.number] = window
        number = self._turns.popleft()
        window, request = self._early.pop(number), self._sent.pop(number)
        count = sum(len(refined) for refined in window)
        if count < len(request):
            rest = replace(request.part(count, len(request)), mark=None)
            self._turns.appendleft(self._number)
            self.source.workers.queue.waiting.appendleft(self._numbered(rest, self._max_bytes))
        return window.batches

    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them. Nor does the queue keep this feed: workers in a circle of
        objects take five seconds each to end when it is collected."""
        self._iterator = None
        self.source.workers.queue.reset()

    def _send(self, request: Request, *, whole: bool = False) -> None:
        self._turns.append(self._number)
        self.source.workers.queue.waiting.append(self._numbered(request, None if whole else self._max_bytes))

    def _pull(self) -> Request | None:
        request, self._upcoming = self._upcoming, next(self._plans, None)
        if request is None:
            return None
        self._turns.append(self._number)
        return self._numbered(request, self._max_bytes)

    def _numbered(self, request: Request, limit: int | None) -> Request:
        number, indices = self._number, self.source.order.at(request.positions)
        epoch = self.source.cursor.epoch
        self._sent[number] = replace(request, number=number, indices=indices, epoch=epoch, max_bytes=limit)
        self._number += 1
        return self._sent[number]

    def _replan(self, plans: Iterable[Request]) -> None:
        """From the upcoming request on, take other plans."""
        self._plans = iter(plans)
        self._upcoming = next(self._plans, None)

    def _next_mark(self) -> Any:
        """Where the first request stands in its plan that did not come back yet."""
        waiting = [*self.pending, *([] if self._upcoming is None else [self._upcoming])]
        return next((request.mark for request in waiting if request.mark is not None), None)

    def spare(self) -> Refined:
        """One sample as a batch, for a rank that idles and never had any."""
        order = self.source.order
        return self.source.workers.made_here(order.at(np.zeros(1, np.int64)) if order.count else [0])

    def state(self, front: Sequence[Refined | None], pool: Sequence[Refined]) -> dict[str, Any]:
        """Its place, and the batches that it gave and that are not used: ``front`` are agreed steps, ``pool`` is queued."""
        mark = self._next_mark()
        return {
            "front": pack_groups(batch.positions if batch else () for batch in front),
            "pool": pack_groups(batch.positions for batch in pool),
            "flags": [2 * batch.late + (batch.samples is not None) for batch in pool],
            "rest": [
                [pack(r.positions), r.groups and list(r.groups), r.costs and list(r.costs), r.keep]
                for r in self.pending
                if r.mark is None
            ],
            "next": None if mark is None else [] if isinstance(mark, Cursor) else [int(part) for part in mark],
            "handed_out": [self.start, self.stop],
        }

    def reload(self) -> tuple[list[Refined | None], list[Refined]]:
        """What a resumed epoch had agreed and queued, loaded again."""
        place, self._resumed, count = self._resumed, None, self.source.order.count
        if place is None:
            return [], []
        front, pool = unpack_groups(place["front"], count), unpack_groups(place["pool"], count)
        pieces: dict[int, list[Refined]] = {}
        for batch in (self.take() or ()) if any(front) or any(pool) else ():
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
        waiting = [*(request.positions for request in self.pending), open_range]
        held = [index for batch in pool for index in batch.indices]
        return held + [index for positions in waiting for index in self.source.order.at(positions)]

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from the first on that no rank's workers can have been asked for."""
        sizes, source = self.source.sizes, self.source
        if sizes is None:
            raise ConfigError(FREE_RUNNING)
        cursor = self._next_mark() or sizes.end(source.cursor.epoch)
        for after in islice(sizes.cursors(cursor), source.workers.depth):
            cursor = after
        update = sizes.change(cursor, samples)
        if self._upcoming is not None:
            self._replan(source.plans(self._upcoming.mark))
        return update
