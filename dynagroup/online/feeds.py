"""Where an epoch's windows come from: a table of kinds, and the two feeds that read it.

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

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.config import OnlineConfig
from dynagroup.online.datasets import IndexedDataset
from dynagroup.online.messages import Refined, RefinedWindow, Request
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

__all__ = ["KINDS", "Feed", "IterableFeed", "MapFeed", "Source", "kind_of", "left"]


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


class IterableFeed:
    """Windows of an iterable dataset, until it ends. Its place is where each worker reads on, and what it leaves out.

    One that does not divide itself gives every sample to every worker, or every rank. Shares that are one and the same begin
    with the same samples; that is told, and never guessed: samples that are all alike, or drawn at random, say nothing.
    """

    kind = KINDS["iterable"]
    shares = False
    pending_samples = 0

    def __init__(self, source: Source, kind: str, place: Mapping[str, Any] | None) -> None:
        self._source = source
        self._spots: Mapping[str, Any] = place["workers"] if place else {}
        self._iterator: Iterator[RefinedWindow] | None = None
        self._spare: Refined | None = None
        self._gave = False
        self._openings: dict[int, int] = {}
        self._opened: dict[int, deque[dict[str, Any]]] = {}
        """Worker -> its windows that may not be fully used: where each began, and its samples' numbers."""
        self.receiving = True
        self.opening = 0
        """What this rank's share begins with, see :func:`~dynagroup.online.datasets.opening_of`; 0: not known."""

    @property
    def can_take(self) -> bool:
        """:meth:`take` would return a window, or find the end."""
        return self.receiving

    def take(self) -> list[Refined] | None:
        """The next window's batches; None at the end."""
        source = self._source
        if self._iterator is None:
            self._iterator = source.workers.open_iterable(source.epoch, source.world, self._spots)
        for window in self._iterator:
            if not window.spare:
                self._note_opening(window)
                self._opened.setdefault(window.worker, deque()).append({**window.resume})
                self._gave = self._gave or len(window) > 0
                return window.batches
            self._spare = window.batches[0]
        self.receiving = False
        return None

    def _note_opening(self, window: RefinedWindow) -> None:
        opening = window.resume.pop("opening", 0)
        if not opening:
            return
        self.opening = self.opening or opening
        other = self._openings.setdefault(opening, window.worker)
        if other != window.worker:
            self._source.workers.tell_of_sharing(
                f"workers {other} and {window.worker} read the same samples: an iterable dataset must divide itself among its "
                f"workers, or every sample comes {self._source.workers.num_workers} times; let each yield its own part, by "
                "torch.utils.data.get_worker_info(), or use one worker"
            )

    def tell_of_equal_ranks(self) -> None:
        """All ranks have the same ``opening``."""
        size = self._source.world.size
        self._source.workers.tell_of_sharing(
            f"all {size} ranks read the same samples: an iterable dataset must divide itself among ranks, or every sample comes "
            f"{size} times; let each rank yield its own part, by dynagroup.distributed.rank_and_size() or datasets' "
            "split_dataset_by_node"
        )

    @property
    def has_nothing(self) -> bool:
        """It gave no batch and will give none, so that its rank cannot even idle; see :meth:`lent`."""
        return not (self.receiving or self._gave or self._spare)

    def lent(self, refined: Refined) -> None:
        """A batch of another rank's, to idle on."""
        self._spare = refined

    def close(self) -> None:
        self._iterator = None

    def spare(self) -> Refined:
        if self._spare is None:
            raise AlignmentError(f"rank {self._source.world.rank} was lent nothing to idle on")
        return self._spare

    def state(self, front: Sequence[Refined | None], pool: Sequence[Refined]) -> dict[str, Any]:
        workers, size = max(self._source.workers.num_workers, 1), self._source.world.size
        remaining: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        for arrival in (arrival for batch in (*front, *pool) if batch for arrival in batch.indices):
            number, worker = divmod(arrival // size, workers)
            remaining[worker].add(number)
        spots = dict(self._spots)  # of workers that gave nothing since
        for worker, opened in self._opened.items():
            while len(opened) > 1 and not remaining[worker].intersection(opened[0]["numbers"]):
                opened.popleft()
            first, last = opened[0], opened[-1]
            before = spots.get(str(worker), {"until": 0, "keep": ()})
            keep = remaining[worker].union(n for n in before["keep"] if n >= last["until"])  # not read again so far
            until = max(last["until"], before["until"])
            spots[str(worker)] = {"read": first["read"], "until": until, "keep": sorted(keep), "state": first["state"]}
        return {"workers": spots}

    def reload(self) -> tuple[list[Refined | None], list[Refined]]:
        return [], []

    def unused(self, pool: Sequence[Refined]) -> list[int]:
        return [index for batch in pool for index in batch.indices]


Feed = MapFeed | IterableFeed
