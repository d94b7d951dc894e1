"""How windows reach workers and come back: the datasets, the queue that a DataLoader pulls from, and the feeds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dynagroup.errors import ConfigError
from dynagroup.online.collate import Refined, RefinedWindow, RefinementCollator, WindowRequest, WindowSamples, shorten
from dynagroup.online.engine import Queued, late
from dynagroup.plan.order import EpochOrder
from dynagroup.shapes import IntArray

__all__ = [
    "IndexedDataset",
    "MapFeed",
    "Order",
    "Planned",
    "RequestQueue",
    "StreamDataset",
    "StreamFeed",
    "split_queued",
]


class _Forwarding:
    """Attributes that are not its own are the dataset's, also when set: ``worker_init_fn`` may know the dataset only."""

    _own: frozenset[str] = frozenset()
    dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or "dataset" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class IndexedDataset(_Forwarding):
    """A map-style dataset whose batches keep their dataset indices on the way to a RefinementCollator.

    The dataset's own ``__getitems__`` is used where it has one. Its ``set_epoch`` is called in the workers, too.

    >>> window = IndexedDataset(["a", "b", "c"]).__getitems__([2, 0])
    >>> window.samples, window.request.indices
    (['c', 'a'], [2, 0])
    """

    _own = frozenset({"dataset", "_epoch"})

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "dataset", dataset)
        self._epoch = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, request: WindowRequest | list[int]) -> WindowSamples:
        if not isinstance(request, WindowRequest):
            return WindowSamples(WindowRequest(0, request, (len(request),)), self._fetch(request))
        if self._epoch != request.epoch:
            self._epoch = request.epoch
            _set_epoch(self.dataset, request.epoch)
        return WindowSamples(request, self._fetch(request.indices) if len(request) else [])

    def _fetch(self, indices: Sequence[int]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is not None:
            try:
                samples = list(fetch(list(indices)))
            except Exception as error:
                raise RuntimeError(f"dataset items {shorten(indices)} raised {_said(error)}") from error
            if len(samples) != len(indices):
                raise RuntimeError(
                    f"the dataset's __getitems__ gave {len(samples)} samples for {len(indices)} indices "
                    f"{shorten(indices)}; it must give one for each, in their order"
                )
            return samples
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                raise RuntimeError(f"dataset item {index} raised {_said(error)}") from error
        return samples


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _set_epoch(dataset: Any, epoch: int) -> None:
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


class StreamDataset(_Forwarding, IterableDataset):
    """An iterable dataset, a window at a time. Sharding over ranks and workers is the dataset's own affair.

    Args:
        window: samples a window.
        arrivals: a worker's n-th sample is given the number ``(n * workers + worker) * size + rank``.
    """

    _own = frozenset({"dataset", "window", "rank", "size", "_epoch", "_resume"})

    def __init__(self, dataset: Any, window: int, *, rank: int = 0, size: int = 1) -> None:
        object.__setattr__(self, "dataset", dataset)
        self.window, self.rank, self.size = window, rank, size
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers see it change
        self._resume: Mapping[str, Any] | None = None

    def start(self, epoch: int, resume: Mapping[str, Any] | None) -> None:
        """Choose the epoch of the next iteration, and from where each worker resumes it."""
        self._epoch.fill_(epoch)
        self._resume = resume
        _set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[WindowSamples]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch = int(self._epoch)
        _set_epoch(self.dataset, epoch)
        resume = self._resume if self._resume and self._resume["epoch"] == epoch else None
        spot = (resume or {}).get("workers", {}).get(str(worker))
        read, until, keep = (spot["read"], spot["until"], set(spot["keep"])) if spot else (0, 0, set())
        if spot and spot["state"] is not None:
            self.dataset.load_state_dict(spot["state"])
        samples = iter(self.dataset)
        passed = list(islice(samples, 1 if spot and spot["state"] is None and read else 0))
        if passed:
            next(islice(samples, read - 1, read - 1), None)
        came = False
        while True:
            state, first, chosen, numbers = self._state(), read, [], []
            while len(chosen) < self.window:
                try:
                    sample = next(samples)
                except StopIteration:
                    break
                if read >= until or read in keep:
                    chosen.append(sample)
                    numbers.append(read)
                elif not passed:
                    passed.append(sample)
                read += 1
            if not chosen:
                break
            came = True
            arrivals = [(n * workers + worker) * self.size + self.rank for n in numbers]
            place = {"read": first, "until": read, "state": state, "numbers": numbers}
            yield WindowSamples(WindowRequest(first, arrivals, epoch=epoch), chosen, place, worker)
        if passed and not came:  # nothing is left here, but other ranks may go on
            yield WindowSamples(WindowRequest(-1, (0,), epoch=epoch), passed, {}, worker, spare=True)

    def _state(self) -> Any:
        """The dataset's own state before the next sample, where it keeps one."""
        if callable(getattr(self.dataset, "state_dict", None)) and hasattr(self.dataset, "load_state_dict"):
            return self.dataset.state_dict()
        return None


class Order:
    """The epoch's order: dataset indices by position. ``base`` restricts it to what a resumed epoch still has."""

    def __init__(self, indices: IntArray | EpochOrder, base: IntArray | None = None) -> None:
        self._indices = indices
        self.base = base

    def __len__(self) -> int:
        return len(self._indices) if self.base is None else len(self.base)

    def at(self, positions: IntArray) -> list[int]:
        """Dataset indices at these positions."""
        positions = positions if self.base is None else self.base[positions]
        if isinstance(self._indices, EpochOrder):
            return self._indices.index_at(positions).tolist()
        return self._indices[positions].tolist()


@dataclass(frozen=True, slots=True)
class Planned:
    """A request before it is sent: positions, and how they are grouped; ``mark`` says where it stands in its source."""

    positions: IntArray
    groups: tuple[int, ...] | None = None
    keep: int = 0
    mark: tuple[int, ...] = ()
    costs: tuple[int, ...] | None = None
    """Padded tokens planned for each of the groups."""


class RequestQueue:
    """The ``batch_sampler`` of the inner DataLoader: hands out what was granted, and blanks where nothing was yet.

    Workers fetch ahead, so the DataLoader may pull before the ranks have agreed who opens what. A blank is an empty window.
    """

    def __init__(self) -> None:
        self._waiting: deque[WindowRequest] = deque()
        self._more: Iterator[WindowRequest] | None = None
        self.closed = False

    def reset(self, more: Iterator[WindowRequest] | None = None) -> None:
        """Forget everything; ``more`` are requests that come after those that are put."""
        self._waiting.clear()
        self._more = more
        self.closed = False

    def put(self, request: WindowRequest) -> None:
        self._waiting.append(request)

    def __iter__(self) -> Iterator[WindowRequest]:
        while True:
            if self._waiting:
                yield self._waiting.popleft()
            elif self._more is not None:
                request = next(self._more, None)
                if request is None:
                    return
                yield request
            elif self.closed:
                return
            else:
                yield WindowRequest(-1, ())


class MapFeed:
    """Windows of a map-style dataset: those granted one by one, or all that a source of plans gives.

    Args:
        queue: what the DataLoader pulls from.
        open_iterator: starts the DataLoader's iteration.
        source: plans that are known beforehand; None: windows are granted at the exchanges.
        first: plans that come before all others (what a resumed epoch had in its queues).
    """

    def __init__(
        self,
        queue: RequestQueue,
        open_iterator: Callable[[], Iterator[RefinedWindow]],
        order: Order,
        epoch: int,
        *,
        first: Iterable[Planned] = (),
        source: Iterable[Planned] | None = None,
    ) -> None:
        self._queue, self._open, self._order, self._epoch = queue, open_iterator, order, epoch
        self._iterator: Iterator[RefinedWindow] | None = None
        self._number = 0
        self._sent: dict[int, Planned] = {}
        self._early: dict[int, RefinedWindow] = {}
        self._source = None if source is None else iter(source)
        self.upcoming = None if self._source is None else next(self._source, None)
        queue.reset(None if source is None else self._from_source())
        for planned in first:
            queue.put(self._request(planned))

    @property
    def receiving(self) -> bool:
        if self._source is None:
            return bool(self._sent) or not self._queue.closed
        return bool(self._sent) or self.upcoming is not None

    @property
    def can_take(self) -> bool:
        return bool(self._sent) or self.upcoming is not None

    @property
    def pending_samples(self) -> int:
        return sum(len(p.positions) for p in self._sent.values())

    @property
    def pending(self) -> list[Planned]:
        """What was handed out and not taken yet, in order."""
        return [self._sent[number] for number in sorted(self._sent)]

    def grant(self, ranges: Sequence[tuple[int, int]], *, closed: bool, keep: int | None = None) -> None:
        for start, stop in ranges:
            kept = keep if keep is not None else (stop - start if closed else 0)
            self._queue.put(self._request(Planned(np.arange(start, stop), keep=kept)))
        self._queue.closed = closed

    def take(self) -> list[Queued] | None:
        """The next window's batches, in the order in which windows were opened, also where workers answer out of order."""
        if self._iterator is None:
            self._iterator = self._open()
        turn = min(self._sent, default=-1)
        if turn < 0:  # the next request was not pulled yet
            turn = self._number
        while turn not in self._early:
            window = next(self._iterator, None)
            assert window is not None, "the DataLoader ended with windows outstanding"
            if window.number >= 0:
                self._early[window.number] = window
        return queued_of(self._early.pop(turn), self._sent.pop(turn))

    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them."""
        self._iterator = None

    def replan(self, source: Iterable[Planned]) -> None:
        """From the upcoming request on, take other plans."""
        self._source = iter(source)
        self.upcoming = next(self._source, None)

    def _from_source(self) -> Iterator[WindowRequest]:
        assert self._source is not None
        while self.upcoming is not None:
            planned, self.upcoming = self.upcoming, next(self._source, None)
            yield self._request(planned)

    def _request(self, planned: Planned) -> WindowRequest:
        number = self._number
        self._number += 1
        self._sent[number] = planned
        indices = self._order.at(planned.positions)
        return WindowRequest(number, indices, planned.groups, planned.keep, self._epoch, planned.costs)


def queued_of(window: RefinedWindow, planned: Planned) -> list[Queued]:
    """A refined window's batches with their positions in the epoch's order."""
    positions = planned.positions.tolist()
    queued = [Queued(r, tuple(positions[o] for o in r.offsets), kept=r.samples is not None) for r in window]
    return queued if planned.groups is None else late(window, queued)


class StreamFeed:
    """Windows of an iterable dataset, until it ends."""

    pending_samples = 0

    def __init__(self, open_iterator: Callable[[], Iterator[RefinedWindow]]) -> None:
        self._open = open_iterator
        self._iterator: Iterator[RefinedWindow] | None = None
        self.receiving = True
        self.spare: Refined | None = None
        """A batch to idle on, of a sample that was used before the epoch was resumed."""
        self.opened: dict[int, deque[dict[str, Any]]] = {}
        """Worker -> its windows that may not be fully used: where each began, and its samples' numbers."""

    @property
    def can_take(self) -> bool:
        return self.receiving

    def grant(self, ranges: Sequence[tuple[int, int]], *, closed: bool) -> None:
        raise ConfigError("an iterable dataset has its own sharding; windows cannot be handed out")

    def take(self) -> list[Queued] | None:
        if self._iterator is None:
            self._iterator = self._open()
        window = next(self._iterator, None)
        if window is None:
            self.receiving = False
            return None
        if window.spare:
            self.spare = window.batches[0]
            return self.take()
        self.opened.setdefault(window.worker, deque()).append({**window.resume})
        return [Queued(r, tuple(r.indices)) for r in window]

    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them."""
        self._iterator = None


def split_queued(collator: RefinementCollator, queued: Queued, parts: int) -> list[Queued]:
    """A queued batch in parts; positions go with their samples."""
    made, start = [], 0
    for part in collator.split(queued.refined, parts):
        made.append(Queued(part, queued.positions[start : start + len(part)], queued.late, queued.kept))
        start += len(part)
    return made
