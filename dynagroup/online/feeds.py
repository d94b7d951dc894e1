"""Feeds an epoch's windows from the workers: their DataLoader, and a feed for each kind of dataset."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from dynagroup.distributed import World
from dynagroup.errors import StateError
from dynagroup.fingerprint import described
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.datasets import IndexedDataset, IterableWindows, begin_at, is_stream
from dynagroup.online.messages import Refined, RefinedWindow, Request
from dynagroup.online.protocol import hand_out, print_of
from dynagroup.online.requests import EpochOrders, OnlineConfig, Order, Source, handed_out
from dynagroup.online.state import LearnedLengths, pack, pack_groups, unpack, unpack_groups
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray
from dynagroup.update.loader import ENDED_EARLY, Inner
from dynagroup.validation import warn_user

BLANK = Request(np.zeros(0, np.int64))


class Workers(Inner):
    """The DataLoader of an online loader; kept from epoch to epoch if its workers are persistent."""

    def __init__(
        self,
        dataset: Any,
        collator: RefinementCollator,
        config: OnlineConfig,
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(kwargs)
        self.collator, self._dataset, self._config = collator, dataset, config
        self.iterable, self.num_workers = (
            is_stream(dataset),
            self.kwargs.setdefault("num_workers", 0),
        )
        self.persistent = bool(self.kwargs.get("persistent_workers"))
        if self.num_workers:
            self.kwargs.setdefault(
                "prefetch_factor", 1
            )  # windows: a worker prepares one while another one is used
        self.depth = self.num_workers * (self.kwargs.get("prefetch_factor") or 2)  # torch's default
        self._windows: IterableWindows | None = None
        self._told = False

    @property
    def identity(self) -> dict[str, Any]:
        collator = self.collator
        asked = {
            "oversize": collator.oversize,
            "kind_of": collator.kind_of and described(collator.kind_of),
        }
        num_workers = self.num_workers if self.iterable else None
        return {**asked, "budget": collator.budget.fingerprint, "num_workers": num_workers}

    def tell_of_sharing(self, who: str) -> None:
        """Warns, once in all epochs, that an iterable dataset is not sharded."""
        if not self._told:
            self._told = True
            told = f"{who} read the same samples, which are repeated: the iterable dataset is not sharded"
            workers = "make each worker and rank yield its own part, by torch.utils.data.get_worker_info() for workers"
            ranks = (
                "dynagroup.distributed.rank_and_size() or datasets' split_dataset_by_node for ranks"
            )
            warn_user(f"{told}; {workers}, and by {ranks}")

    def open_map(self) -> Iterator[Any]:
        if self.loader is None or not self.persistent:
            how: Any = {"batch_sampler": self.queue, "collate_fn": self.collator, **self.kwargs}
            self.loader = DataLoader(IndexedDataset(self._dataset), **how)  # type: ignore[arg-type]
        return iter(self.loader)

    def open_iterable(self, epoch: int, world: World, spots: Mapping[str, Any]) -> Iterator[Any]:
        if self.loader is None or self._windows is None or not self.persistent or spots:
            how = {"_window": self._config.window, "_max_bytes": self._config.window_bytes}
            self._windows = IterableWindows(
                self._dataset, **how, _rank=world.rank, _size=world.size
            )
            self.loader = DataLoader(
                self._windows, batch_size=None, collate_fn=self.collator, **self.kwargs
            )
        begin_at(self._windows, epoch, spots)
        self._windows = (
            None if spots else self._windows
        )  # workers that live on would begin at these spots again
        return iter(self.loader)


class MapFeed:
    """Feeds windows of a map-style dataset. It requests samples from workers, and uses the answers in the order of the
    requests. If an answer has only a part of a large window (``window_bytes``), the rest is requested at once and used
    before later windows. A resumed feed first requests the batches that were loaded but not used, grouped as they were."""

    def __init__(self, source: Source, workers: Workers, place: Mapping[str, Any] | None) -> None:
        self.source, self.workers, self._place = source, workers, place
        world, first = source.world, (source.groups or ())[:4]
        self.opening = print_of([first, source.order.at(np.arange(sum(first)))]) if first else 0
        # With `sizes`, ranks agree on all steps of an update at once, so windows must be whole.
        self._max_bytes = None if source.sizes is not None else source.config.window_bytes
        self._plans = source.requests(world.rank, world.size)
        self._planned = 0  # requests taken from the plans so far
        self._upcoming: Request | None = None
        self._start, self._stop, self._number = 0, source.order.num_positions * source.shares, 0
        self._iterator: Iterator[RefinedWindow] | None = None
        self._waiting: deque[Request] = deque()  # requests that workers have not taken yet
        self._pending: deque[Request] = (
            deque()
        )  # requests whose answers were not used yet, in order
        self._early: dict[
            int, RefinedWindow
        ] = {}  # answers that came too early, by number of the request
        self.kinds_before: list[int] = []  # kinds of the agreed steps in the saved state
        workers.queue.pull = self.pull
        if place is not None:
            self._send_again(place)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_plans": iter(()),
        }  # loaders are copied only between iterations, when plans are used up

    def _send_again(self, place: Mapping[str, Any]) -> None:
        """Requests again what was agreed or queued when the state was saved, then the rest of large windows."""
        self._start = place["start"]
        if self.source.sizes is None:
            self._planned = sum(1 for _ in islice(self._plans, place["next"]))
        groups = [group for group in unpack_groups(place["batches"]) if group]
        if groups:
            keep = len(groups) * bool(place["kept"])
            self._send(
                Request(np.concatenate(groups), tuple(map(len, groups)), keep), max_bytes=None
            )
        for positions, sizes, keep in place["rest"]:
            self._send(Request(unpack(positions), sizes and tuple(sizes), keep))

    @property
    def shares(self) -> bool:
        return self._start < self._stop

    @property
    def can_take(self) -> bool:
        return bool(self._pending) or self._peeked() is not None

    @property
    def receiving(self) -> bool:
        return self.can_take or self.shares

    @property
    def pending_samples(self) -> int:
        return sum(map(len, self._pending))

    def share(self, loads: Sequence[int], ahead: int) -> None:
        """Gives windows to ranks until each has ``ahead`` plus prefetched samples; ``loads``: samples each has now."""
        window, world = self.source.config.window, self.source.world
        target = (self.workers.depth + 1) * window + ahead
        windows, self._start = hand_out(
            loads, self._start, self._stop, window=window, target=target
        )
        for start, stop in windows[world.rank]:
            self._send(Request(np.arange(start, stop), keep=world.size > 1))

    def pull(
        self,
    ) -> Request | None:  # blank if none is agreed yet, because workers ask before that
        if self._waiting:
            return self._waiting.popleft()
        request, self._upcoming = self._peeked(), None
        if request is not None:
            self._planned += 1
            self._pending.append(self._asked(request, planned=True))
            return self._pending[-1]
        return BLANK if self.shares or (self._max_bytes is not None and self._pending) else None

    def _peeked(self) -> Request | None:
        if self._upcoming is None:
            self._upcoming = next(self._plans, None)
        return self._upcoming

    def take(self) -> list[Refined]:
        """Returns the batches of the next window, in the order of requests. Raises the error of a worker."""
        if self._iterator is None:
            self._iterator = self.workers.open_map()
        while (
            not self._pending or self._pending[0].number not in self._early
        ):  # may not even be requested yet
            window = next(self._iterator, None)
            if window is None:
                raise RuntimeError(ENDED_EARLY)
            if window.number >= 0:
                self._early[window.number] = window
        request = self._pending.popleft()
        window = self._early.pop(request.number)
        count = sum(map(len, window.batches))
        if count < len(request):
            self._pending.appendleft(self._asked(request.part(count, len(request))))
            self._waiting.appendleft(self._pending[0])
        return window.batches

    def close(self) -> None:
        self._iterator = self.workers.queue.pull = None

    def _send(self, request: Request, **how: Any) -> None:
        self._pending.append(self._asked(request, **how))
        self._waiting.append(self._pending[-1])

    def _asked(self, request: Request, **how: Any) -> Request:
        self._number += 1
        how = {"number": self._number, "planned": False, "max_bytes": self._max_bytes, **how}
        return replace(
            request,
            indices=self.source.order.at(request.positions),
            epoch=self.source.cursor.epoch,
            **how,
        )

    def state(self, front: Sequence[Refined], pool: Sequence[Refined]) -> dict[str, Any]:
        """Returns the state to save: batches not used yet, of agreed steps (``front``) and from the queue (``pool``)."""
        batches = [*front, *pool]
        kept = [
            number
            for number, batch in enumerate(batches)
            if number >= len(front) and batch.samples is not None
        ]
        groups = {
            "kinds": pack(batch.kind for batch in front),
            "batches": pack_groups(b.positions for b in batches),
        }
        rest = [
            [pack(r.positions), r.groups and list(r.groups), r.keep]
            for r in self._pending
            if not r.planned
        ]
        upcoming = self._planned - sum(request.planned for request in self._pending)
        return {**groups, "kept": kept, "rest": rest, "next": upcoming, "start": self._start}

    def reload(self) -> tuple[list[Refined], list[Refined]]:
        place, self._place = self._place, None
        if place is None:
            return [], []
        self.kinds_before = unpack(place["kinds"]).tolist()
        sizes, _ = place["batches"]
        pieces = (
            list(alike)
            for _, alike in groupby(self.take() if any(sizes) else (), lambda batch: batch.group)
        )
        slots = [next(pieces) if size else [] for size in sizes]
        agreed = [
            slot[0] if slot else Refined.idle(kind)
            for slot, kind in zip(slots, self.kinds_before, strict=False)
        ]
        # Processing may have changed lengths, and so the number of batches.
        rest = (
            (number, batch)
            for number, slot in enumerate(slots)
            for batch in slot[number < len(agreed) :]
        )
        kept = set(place["kept"])
        return agreed, [
            replace(batch, samples=batch.samples if number in kept else None)
            for number, batch in rest
        ]


class IterableFeed:
    """Feeds windows of an iterable dataset until it ends. The saved state has each worker's resume point, and which
    later samples were used. Warns if workers read the same samples, because then the dataset is not sharded."""

    shares, pending_samples = False, 0
    kinds_before: Sequence[int] = []

    def __init__(self, source: Source, workers: Workers, place: Mapping[str, Any] | None) -> None:
        self._workers, self._epoch, self._world = workers, source.cursor.epoch, source.world
        self._spots: Mapping[str, Any] = place["workers"] if place else {}
        self._iterator: Iterator[RefinedWindow] | None = None
        self._openings: dict[int, int] = {}
        # Worker -> its windows that may have unused samples: where each begins, and the numbers of its samples.
        self._opened: dict[int, deque[Mapping[str, Any]]] = {}
        self.can_take = self.receiving = True
        self.opening = 0  # hash of the first samples that this rank read; 0: not known

    def take(self) -> list[Refined] | None:
        if self._iterator is None:
            self._iterator = self._workers.open_iterable(self._epoch, self._world, self._spots)
        window = next(self._iterator, None)
        if window is None:
            self.can_take = self.receiving = False
            return None
        opening, worker = window.place["opening"], window.place["worker"]
        self.opening = self.opening or opening
        if opening and self._openings.setdefault(opening, worker) != worker:
            self._workers.tell_of_sharing(f"workers {self._openings[opening]} and {worker}")
        self._opened.setdefault(worker, deque()).append(window.place)
        return window.batches

    def close(self) -> None:
        self._iterator = None

    def state(self, front: Sequence[Refined], pool: Sequence[Refined]) -> dict[str, Any]:
        """Returns the state to save: each worker's resume point, and which later samples are not used yet."""
        workers, size = max(self._workers.num_workers, 1), self._world.size
        remaining: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        for arrival in (arrival for batch in (*front, *pool) for arrival in batch.indices):
            number, worker = divmod(arrival // size, workers)
            remaining[worker].add(number)
        spots = dict(self._spots)  # for workers that have not returned anything since
        for worker, opened in self._opened.items():
            while len(opened) > 1 and not remaining[worker].intersection(opened[0]["numbers"]):
                opened.popleft()
            first, last = opened[0], opened[-1]
            before = spots.get(str(worker), {"until": 0, "keep": ()})
            keep = remaining[worker].union(
                n for n in before["keep"] if n >= last["until"]
            )  # not read again yet
            until = max(last["until"], before["until"])
            spots[str(worker)] = {
                "read": first["read"],
                "until": until,
                "keep": sorted(keep),
                "state": first["state"],
            }
        return {"workers": spots}

    def reload(self) -> tuple[list[Refined], list[Refined]]:
        return [], []  # queued samples are read again


def resumed(
    source: Source,
    states: list[Mapping[str, Any]],
    learned: LearnedLengths | None,
    orders: EpochOrders,
) -> tuple[Source, Mapping[str, Any] | None, Cursor]:
    """Returns from what an online epoch resumes: its source, this rank's saved state, and its point in the run. On
    another number of ranks, a new order has all unused samples, first those of the current update."""
    cursor, sizes = source.cursor, source.sizes
    if not states:
        return source.with_lengths(learned, orders), None, cursor
    place, indices = states[0]["running"], source.order.indices
    order = source.order if place["base"] is None else Order(indices, unpack(place["base"]))
    source = source._replace(order=order, cursor=handed_out(cursor, place["under_way"], sizes))
    source = source.with_lengths(learned, orders)
    if states[0]["world_size"] == source.world.size:
        return source, place, cursor
    rest = left(source, [state["running"]["feed"] for state in states])
    order = Order(indices, rest if order.base is None else order.base[rest])
    # Other ranks may have begun the current update: the first rank counts what they have used of it.
    begun = [Cursor.of(state["cursor"]) for state in states] if source.world.rank == 0 else []
    samples, weight = sum(c.begun_samples for c in begun), float(sum(c.begun_weight for c in begun))
    joined = replace(cursor, begun_samples=samples, begun_weight=weight)
    return source._replace(order=order, cursor=cursor).with_lengths(learned, orders), None, joined


def left(source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
    """Returns the positions of samples that no rank has used, computed from the states of all ranks."""
    size, count = len(places), source.order.num_positions
    if source.iterable or source.groups is not None:
        what = "an iterable dataset" if source.iterable else "`batch_sampler`"
        on = f"on the {size} ranks that saved the state, but there are {source.world.size} ranks"
        raise StateError(
            f"with {what}, which shards its samples over ranks itself, a run can resume only {on}"
        )
    parts = [unpack(place["batches"][1]) for place in places]
    parts += [unpack(rest[0]) for place in places for rest in place["rest"]]
    if source.shares:
        parts.append(np.arange(places[0]["start"], count))
    elif source.sizes is not None:
        parts.append(np.arange(source.cursor.samples_used - source.order.skipped, count))
    else:
        for rank, place in enumerate(places):
            parts += [
                request.positions
                for request in islice(source.requests(rank, size), place["next"], None)
            ]
    return np.sort(np.concatenate(parts))
