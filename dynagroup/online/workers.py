"""How requests reach workers and come back: the queue that a DataLoader pulls from, what is under way, the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dynagroup.distributed import World
from dynagroup.online.datasets import IndexedDataset, StreamDataset
from dynagroup.online.records import Planned, Queued, RefinedWindow, WindowRequest
from dynagroup.online.refine import RefinementCollator
from dynagroup.online.requests import Order
from dynagroup.update.dataloader import ENDED_EARLY, answers_of
from dynagroup.validation import warn_user

__all__ = ["RequestQueue", "Windows", "Workers", "split_queued"]


class RequestQueue:
    """The ``batch_sampler`` of the inner DataLoader: hands out what was put, and blanks where nothing was yet.

    Workers fetch ahead, so the DataLoader may pull before the ranks have agreed who opens what, or before it is known
    whether an answer is whole. A blank is an empty window. The queue ends when ``more`` may come says no.
    """

    def __init__(self) -> None:
        self._waiting: deque[WindowRequest] = deque()
        self._next: Callable[[], WindowRequest | None] = lambda: None
        self._more: Callable[[], bool] = lambda: False

    def reset(self, pull: Callable[[], WindowRequest | None], more: Callable[[], bool]) -> None:
        """Forget everything. ``pull`` gives requests beyond those that are put; ``more``: whether others may come."""
        self._waiting.clear()
        self._next, self._more = pull, more

    def put(self, request: WindowRequest, *, first: bool = False) -> None:
        if first:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def __iter__(self) -> Iterator[WindowRequest]:
        while True:
            request = self._waiting.popleft() if self._waiting else self._next()
            if request is not None:
                yield request
            elif self._more():
                yield WindowRequest(-1, ())
            else:
                return


class Windows:
    """Requests that are under way: sent to the workers in one order, and taken back in the same one.

    A worker may answer a large window in part (``max_bytes``). What is left is asked for again at once and stands before
    all later windows, so the order does not depend on which worker is faster. Cost: one entry a window under way.

    Args:
        queue: what the DataLoader pulls from.
        open_iterator: starts the DataLoader's iteration.
        plans: requests that are known beforehand, pulled as workers ask; they come after those that are sent.
        max_bytes: of processed samples in an answer; None: windows come whole.
    """

    def __init__(
        self,
        queue: RequestQueue,
        open_iterator: Callable[[], Iterator[RefinedWindow]],
        order: Order,
        epoch: int,
        *,
        plans: Iterable[Planned] = (),
        max_bytes: int | None = None,
    ) -> None:
        self._queue, self._open, self._order, self._epoch = queue, open_iterator, order, epoch
        self._max_bytes = max_bytes
        self._iterator: Iterator[RefinedWindow] | None = None
        self._number = 0
        self._turns: deque[int] = deque()
        self._sent: dict[int, Planned] = {}
        self._early: dict[int, RefinedWindow] = {}
        self.open = False
        """More may be sent: workers that have nothing to do are given blanks."""
        self.replan(plans)
        queue.reset(self._pull, lambda: self.open or (self._max_bytes is not None and bool(self._sent)))

    @property
    def under_way(self) -> bool:
        """Something was sent, or is planned, that did not come back yet."""
        return bool(self._sent) or self.upcoming is not None

    @property
    def pending(self) -> list[Planned]:
        """What was sent and did not come back yet, in order."""
        return [self._sent[number] for number in self._turns]

    @property
    def next_mark(self) -> tuple[int, ...] | None:
        """Where the first request stands in its plan that did not come back yet."""
        marked = next((planned.mark for planned in self.pending if planned.mark), None)
        return marked if marked is not None or self.upcoming is None else self.upcoming.mark

    def send(self, planned: Planned, *, whole: bool = False) -> None:
        """Ask for these samples, after all that were asked for."""
        self._queue.put(self._request(planned, whole=whole))

    def replan(self, plans: Iterable[Planned]) -> None:
        """From the upcoming request on, take other plans."""
        self._plans = iter(plans)
        self.upcoming = next(self._plans, None)

    def take(self) -> list[Queued]:
        """The next window's batches, in the order in which windows were sent, also where workers answer out of order."""
        if self._iterator is None:
            self._iterator = self._open()
        while not self._turns or self._turns[0] not in self._early:  # the next request may not have been pulled yet
            window = next(self._iterator, None)
            if window is None:
                raise RuntimeError(ENDED_EARLY)
            if window.number >= 0:
                self._early[window.number] = window
        number = self._turns.popleft()
        window, planned = self._early.pop(number), self._sent.pop(number)
        count = sum(len(refined) for refined in window)
        if count < len(planned.positions):
            self._queue.put(self._request(planned.behind(count), first=True), first=True)
        return _queued(window, planned)

    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them."""
        self._iterator = None

    def _pull(self) -> WindowRequest | None:
        if self.upcoming is None:
            return None
        planned, self.upcoming = self.upcoming, next(self._plans, None)
        return self._request(planned)

    def _request(self, planned: Planned, *, first: bool = False, whole: bool = False) -> WindowRequest:
        number = self._number
        self._number += 1
        self._sent[number] = planned
        if first:
            self._turns.appendleft(number)
        else:
            self._turns.append(number)
        limit = None if whole else self._max_bytes
        indices = self._order.at(planned.positions)
        return WindowRequest(number, indices, planned.groups, planned.keep, self._epoch, planned.costs, limit)


def _queued(window: RefinedWindow, planned: Planned) -> list[Queued]:
    """A refined window's batches with their positions. What splitting planned batches brought on top waits behind them."""
    positions = planned.positions.tolist()
    seen: set[int] = set()
    queued = []
    for refined in window:
        late = planned.groups is not None and refined.group in seen
        seen.add(refined.group)
        places = tuple(positions[offset] for offset in refined.offsets)
        queued.append(Queued(refined, places, late=late, kept=refined.samples is not None))
    return queued


def split_queued(collator: RefinementCollator, queued: Queued, parts: int) -> list[Queued]:
    """A queued batch in parts; positions go with their samples."""
    made, start = [], 0
    for part in collator.split(queued.refined, parts):
        made.append(replace(queued, refined=part, positions=queued.positions[start : start + len(part)]))
        start += len(part)
    return made


class Workers:
    """The inner DataLoader of a loader: made when first needed, kept over epochs where its workers persist.

    Args:
        kwargs: for torch's ``DataLoader``.
        window, max_bytes: of a stream's windows.
    """

    def __init__(
        self,
        dataset: Any,
        collator: RefinementCollator,
        kwargs: Mapping[str, Any],
        *,
        window: int,
        max_bytes: int | None,
    ) -> None:
        self.queue = RequestQueue()
        self.num_workers: int = kwargs.get("num_workers", 0)
        self.prefetch_factor: int = kwargs.get("prefetch_factor") or 1
        self.in_order: bool = kwargs.get("in_order") is not False
        self.persistent = bool(kwargs.get("persistent_workers"))
        self._dataset, self._collator, self._window, self._max_bytes = dataset, collator, window, max_bytes
        # Its own, unless there is one: a DataLoader would draw its workers' seed from torch's, and shift that on resuming.
        self._generator = torch.Generator() if kwargs.get("generator") is None else None
        self._kwargs = {**kwargs, "generator": self._generator} if self._generator is not None else dict(kwargs)
        self._loader: DataLoader[Any] | None = None
        self._stream: StreamDataset | None = None
        self._told = False

    def tell_of_sharing(self, message: str) -> None:
        """Warn, once for all epochs, that a stream does not divide itself."""
        if not self._told:
            self._told = True
            warn_user(message)

    @property
    def depth(self) -> int:
        """Windows that workers fetch ahead."""
        return self.num_workers * self.prefetch_factor

    def seed(self, *key: int) -> None:
        """Seed what workers draw in this epoch, unless the user gave a generator."""
        if self._generator is not None:
            self._generator.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))

    def restart(self) -> None:
        """Start workers anew at the next epoch."""
        self._loader = None

    def open_map(self) -> Iterator[Any]:
        """Iterate over what is put into the queue."""
        if self._loader is None or not self.persistent:
            data: Any = IndexedDataset(self._dataset)
            self._loader = DataLoader(data, batch_sampler=self.queue, collate_fn=self._collator, **self._kwargs)  # type: ignore[arg-type]
        return answers_of(self._loader)

    def open_stream(self, epoch: int, world: World, resume: Mapping[str, Any] | None) -> Iterator[Any]:
        """Iterate over the stream, from where its workers stood."""
        if self._loader is None or self._stream is None or not self.persistent or resume is not None:
            self._stream = StreamDataset(
                self._dataset, self._window, max_bytes=self._max_bytes, rank=world.rank, size=world.size
            )
            self._loader = DataLoader(self._stream, batch_size=None, collate_fn=self._collator, **self._kwargs)
        self._stream.start(epoch, resume)
        return answers_of(self._loader)
