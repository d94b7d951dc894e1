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
from dynagroup.online.requests import EpochOrders, OnlineConfig, Order, Source, pools_of
from dynagroup.online.state import LearnedLengths, State, pack, pack_groups, unpack, unpack_groups
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray
from dynagroup.update.loader import ENDED_EARLY, Inner
from dynagroup.validation import warn_user

BLANK = Request(np.zeros(0, np.int64))
COMPARED = 4  # first batches of a user's batch sampler that are compared between ranks


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
        self.collator = collator
        self._dataset = dataset
        self._config = config
        self.iterable = is_stream(dataset)
        self.num_workers: int = self.kwargs.setdefault("num_workers", 0)
        self.persistent = bool(self.kwargs.get("persistent_workers"))
        if self.num_workers:
            # Windows: a worker prepares one while another one is used.
            self.kwargs.setdefault("prefetch_factor", 1)
        prefetched: int = self.kwargs.get("prefetch_factor") or 2  # torch's default
        self.depth = self.num_workers * prefetched
        self._windows: IterableWindows | None = None
        self._has_warned = False

    @property
    def identity(self) -> dict[str, Any]:
        kind_of = self.collator.kind_of
        return {
            "oversize": self.collator.oversize,
            "kind_of": None if kind_of is None else described(kind_of),
            "budget": self.collator.budget.fingerprint,
            "num_workers": self.num_workers if self.iterable else None,
        }

    def warn_of_sharing(self, who: str) -> None:
        """Warns, once in all epochs, that an iterable dataset is not sharded."""
        if self._has_warned:
            return
        self._has_warned = True
        warn_user(
            f"{who} read the same samples, which are repeated: the iterable dataset is not sharded; "
            "make each worker and rank yield its own part, by torch.utils.data.get_worker_info() for "
            "workers, and by dynagroup.distributed.rank_and_size() or datasets' split_dataset_by_node "
            "for ranks"
        )

    def open_map(self) -> Iterator[RefinedWindow]:
        if self.loader is None or not self.persistent:
            dataset: Any = IndexedDataset(self._dataset)
            requests: Any = self.queue
            self.loader = DataLoader(
                dataset, batch_sampler=requests, collate_fn=self.collator, **self.kwargs
            )
        return iter(self.loader)

    def open_iterable(self, epoch: int, world: World, spots: State) -> Iterator[RefinedWindow]:
        if self.loader is None or self._windows is None or not self.persistent or spots:
            self._windows = IterableWindows(
                self._dataset,
                _window=self._config.window,
                _max_bytes=self._config.window_bytes,
                _rank=world.rank,
                _size=world.size,
            )
            self.loader = DataLoader(
                self._windows, batch_size=None, collate_fn=self.collator, **self.kwargs
            )
        begin_at(self._windows, epoch, spots)
        if spots:
            self._windows = None  # workers that live on would begin at these spots again
        return iter(self.loader)


class MapFeed:
    """Feeds windows of a map-style dataset. It requests samples from workers, and uses the answers in the order of the
    requests. If an answer has only a part of a large window (``window_bytes``), the rest is requested at once and used
    before later windows. The answer to a pool of updates is fed update by update. A resumed feed first requests the
    batches that were loaded but not used, grouped as they were."""

    def __init__(self, source: Source, workers: Workers, place: State | None) -> None:
        self.source = source
        self.workers = workers
        self._place = place
        self.opening = self._opening_of(source)
        # With `sizes`, ranks agree on all steps of an update at once, so windows must be whole.
        self._max_bytes = None if source.sizes is not None else source.config.window_bytes
        self._plans = source.requests(source.world.rank, source.world.size)
        self._num_planned = 0  # requests taken from the plans so far
        self._upcoming: Request | None = None
        self._start = 0  # positions from here to `_stop` are handed out during the epoch
        self._stop = source.order.num_positions if source.shares else 0
        self._number = 0  # of the last request
        self._iterator: Iterator[RefinedWindow] | None = None
        # Requests that workers have not taken yet.
        self._waiting: deque[Request] = deque()
        # Requests whose answers were not used yet, in order.
        self._pending: deque[Request] = deque()
        # Answers that came too early, by number of the request.
        self._early: dict[int, RefinedWindow] = {}
        # The batches of each update of a pool that was not used yet.
        self._updates: deque[list[Refined]] = deque()
        self.kinds_before: list[int] = []  # kinds of the agreed steps in the saved state
        workers.queue.pull = self.pull
        if place is not None:
            self._send_again(place)

    def __getstate__(self) -> dict[str, Any]:
        # Loaders are copied only between iterations, when plans are used up.
        return {**vars(self), "_plans": iter(())}

    @staticmethod
    def _opening_of(source: Source) -> int:
        """Returns a hash of the first batches and samples of the user's batch sampler; 0: there is none."""
        if not source.groups:
            return 0
        first = source.groups[:COMPARED]
        return print_of([first, source.order.at(np.arange(sum(first)))])

    def _send_again(self, place: State) -> None:
        """Requests again what was agreed or queued when the state was saved, then what was left of requests."""
        self._start = place["start"]
        for _ in islice(self._plans, place["next"]):
            self._num_planned += 1
        groups = [group for group in unpack_groups(place["batches"]) if len(group)]
        if groups:
            keep = len(groups) if place["kept"] else 0
            request = Request(np.concatenate(groups), tuple(map(len, groups)), keep)
            self._send(self._numbered(request))
        for positions, sizes, keep in place["rest"]:
            groups_of_rest = None if sizes is None else tuple(sizes)
            request = Request(unpack(positions), groups_of_rest, keep, max_bytes=self._max_bytes)
            self._send(self._numbered(request))

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
        world = self.source.world
        window = self.source.config.window
        windows, self._start = hand_out(
            loads,
            self._start,
            self._stop,
            window=window,
            target=(self.workers.depth + 1) * window + ahead,
        )
        for start, stop in windows[world.rank]:
            positions = np.arange(start, stop)
            request = Request(positions, keep=world.size > 1, max_bytes=self._max_bytes)
            self._send(self._numbered(request))

    def pull(self) -> Request | None:
        """Returns the next request for a worker; a blank one if none is agreed yet, because workers ask before that."""
        if self._waiting:
            return self._waiting.popleft()
        planned = self._peeked()
        if planned is not None:
            self._upcoming = None
            self._num_planned += 1
            request = self._numbered(replace(planned, planned=True, max_bytes=self._max_bytes))
            self._pending.append(request)
            return request
        may_need_rest = self._max_bytes is not None and bool(self._pending)
        return BLANK if self.shares or may_need_rest else None

    def _peeked(self) -> Request | None:
        if self._upcoming is None:
            self._upcoming = next(self._plans, None)
        return self._upcoming

    def take(self) -> list[Refined]:
        """Returns the batches of the next window, or update, in the order of requests. Raises the error of a worker."""
        if self._updates:
            return self._updates.popleft()
        window = self._answer()
        request = self._pending.popleft()
        if request.pool is not None:
            for number in range(len(request.pool.share_sizes)):
                self._updates.append([b for b in window.batches if b.update == number])
            return self._updates.popleft()
        count = sum(map(len, window.batches))
        if count < len(request):
            rest = replace(request.part(count, len(request)), planned=False)
            rest = self._numbered(rest)
            self._pending.appendleft(rest)
            self._waiting.appendleft(rest)
        return window.batches

    def _answer(self) -> RefinedWindow:
        """Returns the answer to the first pending request; the request may not even be sent yet."""
        if self._iterator is None:
            self._iterator = self.workers.open_map()
        while not self._pending or self._pending[0].number not in self._early:
            window = next(self._iterator, None)
            if window is None:
                raise RuntimeError(ENDED_EARLY)
            if window.number >= 0:
                self._early[window.number] = window
        return self._early.pop(self._pending[0].number)

    def close(self) -> None:
        self._iterator = None
        self.workers.queue.pull = None

    def _send(self, request: Request) -> None:
        self._pending.append(request)
        self._waiting.append(request)

    def _numbered(self, request: Request) -> Request:
        """Returns a request with a number and all that a worker needs to know."""
        self._number += 1
        return replace(
            request,
            number=self._number,
            indices=self.source.order.at(request.positions),
            epoch=self.source.epoch,
        )

    def state(self, front: Sequence[Refined], pool: Sequence[Refined]) -> dict[str, Any]:
        """Returns the state to save: batches not used yet, of agreed steps (``front``) and from the queue (``pool``)."""
        batches = [*front, *pool]
        kept = [
            number
            for number in range(len(front), len(batches))
            if batches[number].samples is not None
        ]
        rest = [self._update_to_resume(update) for update in self._updates]
        for request in self._pending:
            if not request.planned:
                groups = None if request.groups is None else list(request.groups)
                rest.append([pack(request.positions), groups, request.keep])
        num_planned_pending = sum(request.planned for request in self._pending)
        return {
            "kinds": pack(batch.kind for batch in front),
            "batches": pack_groups(batch.positions for batch in batches),
            "kept": kept,
            "rest": rest,
            "next": self._num_planned - num_planned_pending,
            "start": self._start,
        }

    def _update_to_resume(self, update: Sequence[Refined]) -> list[Any]:
        sizes, positions = pack_groups(batch.positions for batch in update)
        return [positions, sizes, self.source.world.size > 1]

    def reload(self) -> tuple[list[Refined], list[Refined]]:
        """Returns the batches of the agreed steps in the saved state, and those of the queue."""
        place = self._place
        self._place = None
        if place is None:
            return [], []
        self.kinds_before = unpack(place["kinds"]).tolist()
        sizes, _ = place["batches"]
        loaded = self.take() if any(sizes) else []
        pieces = (list(alike) for _, alike in groupby(loaded, lambda batch: batch.group))
        agreed: list[Refined] = []
        queue: list[Refined] = []
        for number, size in enumerate(sizes):
            # Processing may have changed lengths, so that several batches come in place of one.
            batches = next(pieces) if size else []
            if number < len(self.kinds_before):
                batches = batches or [Refined.idle(self.kinds_before[number])]
                agreed.append(batches.pop(0))
            if number not in place["kept"]:
                batches = [replace(batch, samples=None) for batch in batches]
            queue += batches
        return agreed, queue


class IterableFeed:
    """Feeds windows of an iterable dataset until it ends. The saved state has each worker's resume point, and which
    later samples were used. Warns if workers read the same samples, because then the dataset is not sharded."""

    shares = False
    pending_samples = 0
    kinds_before: Sequence[int] = []

    def __init__(self, source: Source, workers: Workers, place: State | None) -> None:
        self._workers = workers
        self._epoch = source.epoch
        self._world = source.world
        self._spots: State = place["workers"] if place else {}
        self._iterator: Iterator[RefinedWindow] | None = None
        self._openings: dict[int, int] = {}  # hash of first samples -> the worker that read them
        # Worker -> its windows that may have unused samples: where each begins, and the numbers of its samples.
        self._opened: dict[int, deque[State]] = {}
        self.can_take = True
        self.receiving = True
        self.opening = 0  # hash of the first samples that this rank read; 0: not known

    def take(self) -> list[Refined] | None:
        if self._iterator is None:
            self._iterator = self._workers.open_iterable(self._epoch, self._world, self._spots)
        window = next(self._iterator, None)
        if window is None:
            self.can_take = False
            self.receiving = False
            return None
        opening = window.place["opening"]
        worker = window.place["worker"]
        if opening:
            self.opening = self.opening or opening
            first_reader = self._openings.setdefault(opening, worker)
            if first_reader != worker:
                self._workers.warn_of_sharing(f"workers {first_reader} and {worker}")
        self._opened.setdefault(worker, deque()).append(window.place)
        return window.batches

    def close(self) -> None:
        self._iterator = None

    def state(self, front: Sequence[Refined], pool: Sequence[Refined]) -> dict[str, Any]:
        """Returns the state to save: each worker's resume point, and which later samples are not used yet."""
        num_workers = max(self._workers.num_workers, 1)
        unused: dict[int, set[int]] = {worker: set() for worker in range(num_workers)}
        for batch in (*front, *pool):
            for arrival in batch.indices:
                number, worker = divmod(arrival // self._world.size, num_workers)
                unused[worker].add(number)
        spots = dict(self._spots)  # for workers that have not returned anything since
        for worker, opened in self._opened.items():
            while len(opened) > 1 and unused[worker].isdisjoint(opened[0]["numbers"]):
                opened.popleft()
            first = opened[0]
            read_until = opened[-1]["until"]
            before = spots.get(str(worker), {"until": 0, "keep": ()})
            not_read_again = {number for number in before["keep"] if number >= read_until}
            spots[str(worker)] = {
                "read": first["read"],
                "until": max(read_until, before["until"]),
                "keep": sorted(unused[worker] | not_read_again),
                "state": first["state"],
            }
        return {"workers": spots}

    def reload(self) -> tuple[list[Refined], list[Refined]]:
        return [], []  # queued samples are read again


def resumed(
    source: Source,
    states: list[State],
    learned: LearnedLengths | None,
    orders: EpochOrders,
) -> tuple[Source, State | None]:
    """Returns from what an online epoch resumes: its source, and this rank's saved state. On another number of ranks, a
    new order has all unused samples; with updates of a set size, first those of the current update."""
    if not states:
        return source.with_lengths(learned, orders), None
    place = states[0]["running"]
    indices = source.order.indices
    if place["base"] is not None:
        source = source._replace(order=Order(indices, unpack(place["base"])))
    source = source.with_lengths(learned, orders)
    if states[0]["world_size"] == source.world.size:
        return source, place
    rest = left(source, [state["running"]["feed"] for state in states])
    base = source.order.base
    order = Order(indices, rest if base is None else base[rest])
    return source._replace(order=order).with_lengths(learned, orders), None


def joined(states: list[State], rank: int, size: int) -> Cursor:
    """Returns a rank's point in the run when it resumes from these states. If other ranks have begun the current update,
    the first rank counts what they have used of it."""
    cursors = [Cursor.of(state["cursor"]) for state in states]
    if states[0]["world_size"] == size:
        return cursors[0]
    if rank:
        cursors = [replace(cursors[0], begun_samples=0, begun_weight=0.0)]
    return replace(
        cursors[0],
        begun_samples=sum(cursor.begun_samples for cursor in cursors),
        begun_weight=float(sum(cursor.begun_weight for cursor in cursors)),
    )


def left(source: Source, places: Sequence[State]) -> IntArray:
    """Returns the positions of samples that no rank has used, computed from the states of all ranks."""
    size = len(places)
    if source.iterable or source.groups is not None:
        what = "an iterable dataset" if source.iterable else "`batch_sampler`"
        raise StateError(
            f"with {what}, which shards its samples over ranks itself, a run can resume only on the "
            f"{size} ranks that saved the state, but there are {source.world.size} ranks"
        )
    loaded = np.concatenate([unpack(place["batches"][1]) for place in places])
    later: list[IntArray] = []
    for place in places:
        later += [unpack(rest[0]) for rest in place["rest"]]
    num_positions = source.order.num_positions
    if source.sizes is not None:
        pools = list(islice(pools_of(source, source.sizes), places[0]["next"]))
        stop = pools[-1][-1].stop if pools else 0
        later.append(np.arange(stop, num_positions))
        return np.concatenate([np.sort(loaded), np.sort(np.concatenate(later))])
    if source.shares:
        later.append(np.arange(places[0]["start"], num_positions))
    for rank, place in enumerate(places):
        requests = islice(source.requests(rank, size), place["next"], None)
        later += [request.positions for request in requests]
    return np.sort(np.concatenate([loaded, *later]))
