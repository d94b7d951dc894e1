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
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.datasets import IndexedDataset, IterableWindows
from dynagroup.online.messages import Refined, RefinedWindow, Request
from dynagroup.online.plans import Order
from dynagroup.update.loader import ENDED_EARLY
from dynagroup.validation import warn_user

__all__ = ["RequestQueue", "Windows", "Workers"]

BLANK = Request(np.zeros(0, np.int64))


class RequestQueue:
    """The ``batch_sampler`` of the inner DataLoader: hands out what was put, and blanks where nothing was yet.

    Workers fetch ahead, so the DataLoader may pull before the ranks have agreed who opens what, or before it is known
    whether an answer is whole. A blank is an empty window. The queue ends when ``more`` may come says no.
    """

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._next: Callable[[], Request | None] = lambda: None
        self._more: Callable[[], bool] = lambda: False

    def __reduce__(self) -> tuple[Any, ...]:
        """What waits belongs to an iteration, which a copy has none of."""
        return RequestQueue, ()

    def reset(self, pull: Callable[[], Request | None], more: Callable[[], bool]) -> None:
        """Forget everything. ``pull`` gives requests beyond those that are put; ``more``: whether others may come."""
        self._waiting.clear()
        self._next, self._more = pull, more

    def put(self, request: Request, *, first: bool = False) -> None:
        if first:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def __iter__(self) -> Iterator[Request]:
        while True:
            request = self._waiting.popleft() if self._waiting else self._next()
            if request is not None:
                yield request
            elif self._more():
                yield BLANK
            else:
                return


class Windows:
    """Requests that are under way: sent to the workers in one order, and taken back in the same one.

    A worker may answer a large window in part (``max_bytes``). What is left is asked for again at once and stands before
    all later windows, so the order does not depend on which worker is faster. Cost: one entry a window under way.

    Args:
        workers: start the DataLoader's iteration, and pull from the queue.
        plans: requests that are known beforehand, pulled as workers ask; they come after those that are sent.
        max_bytes: of processed samples in an answer; None: windows come whole.
    """

    def __init__(
        self, workers: Workers, order: Order, epoch: int, *, plans: Iterable[Request] = (), max_bytes: int | None = None
    ) -> None:
        self._workers, self._order, self._epoch, self._max_bytes = workers, order, epoch, max_bytes
        self._iterator: Iterator[RefinedWindow] | None = None
        self._number = 0
        self._turns: deque[int] = deque()
        self._sent: dict[int, Request] = {}
        self._early: dict[int, RefinedWindow] = {}
        self.open = False
        """More may be sent: workers that have nothing to do are given blanks."""
        self.replan(plans)
        workers.queue.reset(self._pull, lambda: self.open or (max_bytes is not None and bool(self._sent)))

    @property
    def under_way(self) -> bool:
        """Something was sent, or is planned, that did not come back yet."""
        return bool(self._sent) or self.upcoming is not None

    @property
    def pending(self) -> list[Request]:
        """What was sent and did not come back yet, in order."""
        return [self._sent[number] for number in self._turns]

    @property
    def next_mark(self) -> Any:
        """Where the first request stands in its plan that did not come back yet."""
        waiting = [*self.pending, *([] if self.upcoming is None else [self.upcoming])]
        return next((request.mark for request in waiting if request.mark is not None), None)

    def send(self, request: Request, *, whole: bool = False) -> None:
        """Ask for these samples, after all that were asked for."""
        self._workers.queue.put(self._numbered(request, whole=whole))

    def replan(self, plans: Iterable[Request]) -> None:
        """From the upcoming request on, take other plans."""
        self._plans = iter(plans)
        self.upcoming = next(self._plans, None)

    def take(self) -> list[Refined]:
        """The next window's batches, in the order in which windows were sent, also where workers answer out of order."""
        if self._iterator is None:
            self._iterator = self._workers.open_map()
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
            self._workers.queue.put(self._numbered(rest, first=True), first=True)
        return window.batches

    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them."""
        self._iterator = None

    def _pull(self) -> Request | None:
        if self.upcoming is None:
            return None
        request, self.upcoming = self.upcoming, next(self._plans, None)
        return self._numbered(request)

    def _numbered(self, request: Request, *, first: bool = False, whole: bool = False) -> Request:
        number = self._number
        self._number += 1
        limit, indices = None if whole else self._max_bytes, self._order.at(request.positions)
        self._sent[number] = replace(request, number=number, indices=indices, epoch=self._epoch, max_bytes=limit)
        if first:
            self._turns.appendleft(number)
        else:
            self._turns.append(number)
        return self._sent[number]


class Workers:
    """The inner DataLoader of a loader: made when first needed, kept over epochs where its workers persist.

    Args:
        kwargs: for torch's ``DataLoader``.
        window, max_bytes: of an iterable's windows.
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
        self._kwargs = dict(kwargs) if self._generator is None else {**kwargs, "generator": self._generator}
        self._loader: DataLoader[Any] | None = None
        self._windows: IterableWindows | None = None
        self._told = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loader": None, "_windows": None}

    def tell_of_sharing(self, message: str) -> None:
        """Warn, once for all epochs, that an iterable does not divide itself."""
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
        return iter(self._loader)

    def open_iterable(self, epoch: int, world: World, spots: Mapping[str, Any]) -> Iterator[Any]:
        """Iterate over the iterable's windows, from the spots where its workers stood."""
        if self._loader is None or self._windows is None or not self.persistent or spots:
            self._windows = IterableWindows(
                self._dataset, self._window, max_bytes=self._max_bytes, rank=world.rank, size=world.size
            )
            self._loader = DataLoader(self._windows, batch_size=None, collate_fn=self._collator, **self._kwargs)
        self._windows.start(epoch, spots)
        return iter(self._loader)
