"""What brings an epoch's windows: the queue that a DataLoader pulls requests from, the DataLoader that holds the workers, and the
feed of a dataset with positions, which sends them requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.datasets import IndexedDataset, IterableWindows, is_stream
from dynagroup.online.messages import Refined, RefinedWindow, Request
from dynagroup.online.plans import OnlineConfig, Source
from dynagroup.online.protocol import hand_out
from dynagroup.online.state import pack, pack_groups, unpack, unpack_groups
from dynagroup.plan.cursor import Cursor
from dynagroup.update.loader import ENDED_EARLY
from dynagroup.validation import warn_user

__all__ = ["FREE_RUNNING", "MapFeed", "RequestQueue", "Workers"]

FREE_RUNNING = "set_samples_per_update needs a loader with samples_per_update: this one is free-running"
BLANK = Request(np.zeros(0, np.int64))


class RequestQueue:
    """The ``batch_sampler`` of the inner DataLoader: hands out what was put, and blanks where nothing was yet.

    Workers fetch ahead, so the DataLoader may pull before the ranks have agreed who opens what, or before it is known
    whether an answer is whole. A blank is an empty window. The queue ends when ``more`` may come says no.
    """

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """What waits belongs to an iteration, which a copy has none of."""
        return RequestQueue, ()

    def reset(
        self, pull: Callable[[], Request | None] = lambda: None, more: Callable[[], bool] = lambda: False
    ) -> None:
        """Forget everything. ``pull`` gives requests beyond those that wait; ``more``: whether others may come."""
        self.waiting.clear()
        self._next, self._more = pull, more

    def __iter__(self) -> Iterator[Request]:
        while True:
            request = self.waiting.popleft() if self.waiting else self._next()
            if request is not None:
                yield request
            elif self._more():
                yield BLANK
            else:
                return


class Workers:
    """The DataLoader of a loader: made when first needed, kept over epochs where its workers persist.

    Args:
        kwargs: for torch's ``DataLoader``.
    """

    def __init__(
        self, dataset: Any, collator: RefinementCollator, config: OnlineConfig, kwargs: Mapping[str, Any]
    ) -> None:
        self.queue = RequestQueue()
        self.iterable = is_stream(dataset)
        self.collator = collator
        self.num_workers: int = kwargs.get("num_workers", 0)
        self.prefetch_factor: int = kwargs.get("prefetch_factor") or 1
        self.in_order: bool = kwargs.get("in_order") is not False
        self.persistent = bool(kwargs.get("persistent_workers"))
        self._dataset, self._config = dataset, config
        # Its own, unless there is one: a DataLoader would draw its workers' seed from torch's, and shift that on resuming.
        self._generator = torch.Generator() if kwargs.get("generator") is None else None
        self._kwargs = dict(kwargs) if self._generator is None else {**kwargs, "generator": self._generator}
        self._loader: DataLoader[Any] | None = None
        self._windows: IterableWindows | None = None
        self._told = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loader": None, "_windows": None}

    @property
    def depth(self) -> int:
        """Windows that workers fetch ahead."""
        return self.num_workers * self.prefetch_factor

    def tell_of_sharing(self, message: str) -> None:
        """Warn, once for all epochs, that an iterable does not divide itself."""
        if not self._told:
            self._told = True
            warn_user(message)

    def seed(self, *key: int) -> None:
        """Seed what workers draw in this epoch, unless the user gave a generator."""
        if self._generator is not None:
            self._generator.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))

    def restart(self) -> None:
        """Start workers anew at the next epoch."""
        self._loader = None

    def made_here(self, index: list[int]) -> Refined:
        """A batch of one sample, processed in this process."""
        return self.collator(IndexedDataset(self._dataset).__getitems__(index)).batches[0]

    def open_map(self) -> Iterator[Any]:
        """Iterate over what is put into the queue."""
        if self._loader is None or not self.persistent:
            data: Any = IndexedDataset(self._dataset)
            self._loader = DataLoader(data, batch_sampler=self.queue, collate_fn=self.collator, **self._kwargs)  # type: ignore[arg-type]
        return iter(self._loader)

    def open_iterable(self, epoch: int, world: World, spots: Mapping[str, Any]) -> Iterator[Any]:
        """Iterate over the iterable's windows, from the spots where its workers stood."""
        if self._loader is None or self._windows is None or not self.persistent or spots:
            of_window = {"window": self._config.window, "max_bytes": self._config.window_bytes}
            self._windows = IterableWindows(self._dataset, **of_window, rank=world.rank, size=world.size)
            self._loader = DataLoader(self._windows, batch_size=None, collate_fn=self.collator, **self._kwargs)
        self._windows.start(epoch, spots)
        return iter(self._loader)


class MapFeed:
    """Windows of a map-style dataset: sent to the workers in one order, and taken back in the same one.

    A worker may answer a large window in part (``window_bytes``). What is left is asked for again at once and stands before
    all later windows, so the order does not depend on which worker is faster. Cost: one entry a window under way.

    Its place holds batches by positions. Resumed, they are asked for first, in the very same groups, so the epoch goes on
    exactly; on another number of ranks the positions that nobody emitted become an order of their own.
    """

    opening = 0
    has_nothing = False

    def __init__(self, source: Source, workers: Workers, place: Mapping[str, Any] | None) -> None:
        self.source, self.workers = source, workers
        self.start, self.stop = (
            place["handed_out"] if place else (0, source.order.num_positions * (source.kind == "windows"))
        )
        # Ranks agree on all steps of an update at once.
        self._max_bytes = None if source.kind == "updates" else source.config.window_bytes
        self._iterator: Iterator[RefinedWindow] | None = None
        self._number = 0
        self._turns: deque[int] = deque()
        self._sent: dict[int, Request] = {}
        self._early: dict[int, RefinedWindow] = {}
        self._replan(() if place and place["next"] is None else source.requests(place and place["next"]))
        self.workers.queue.reset(self._pull, lambda: self.shares or (self._max_bytes is not None and bool(self._sent)))
        self._resumed = place
        if place is not None:
            self._send_again(place)

    def _send_again(self, place: Mapping[str, Any]) -> None:
        """One request for all batches that were agreed or queued, then what was left of larger ones."""
        count = self.source.order.num_positions
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
        target = (self.workers.depth + 1) * window + ahead
        windows, self.start = hand_out(loads, self.start, self.stop, window=window, target=target)
        for start, stop in windows[self.source.world.rank]:
            self._send(Request(np.arange(start, stop), keep=0 if self.shares else stop - start))

    def take(self) -> list[Refined] | None:
        """The next window's batches, in the order in which windows were sent, also where workers answer out of order. Raises what
        a worker raised."""
        if self._iterator is None:
            self._iterator = self.workers.open_map()
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
            self.workers.queue.waiting.appendleft(self._numbered(rest, self._max_bytes))
        return window.batches

    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them. Nor does the queue keep this feed: workers in a circle of
        objects take five seconds each to end when it is collected."""
        self._iterator = None
        self.workers.queue.reset()

    def _send(self, request: Request, *, whole: bool = False) -> None:
        self._turns.append(self._number)
        self.workers.queue.waiting.append(self._numbered(request, None if whole else self._max_bytes))

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
        return self.workers.made_here(order.at(np.zeros(1, np.int64)) if order.num_positions else [0])

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
        place, self._resumed, count = self._resumed, None, self.source.order.num_positions
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
        """Dataset indices of what this rank would still have emitted. Only at an epoch's end: it uses the plans up."""
        open_range = np.arange(self.start, self.stop if self.source.world.rank == 0 else self.start)
        planned = [*([] if self._upcoming is None else [self._upcoming]), *self._plans]
        waiting = [*(request.positions for request in (*self.pending, *planned)), open_range]
        held = [index for batch in pool for index in batch.indices]
        return held + [index for positions in waiting for index in self.source.order.at(positions)]

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from the first on that no rank's workers can have been asked for."""
        sizes, source = self.source.sizes, self.source
        if sizes is None:
            raise ConfigError(FREE_RUNNING)
        cursor = self._next_mark() or sizes.end(source.cursor.epoch)
        for after in islice(sizes.cursors(cursor), self.workers.depth):
            cursor = after
        update = sizes.change(cursor, samples)
        if self._upcoming is not None:
            self._replan(source.requests(self._upcoming.mark))
        return update
