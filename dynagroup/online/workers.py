"""How requests reach workers: the queue that a DataLoader pulls from, and the DataLoader that holds the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dynagroup.distributed import World
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.datasets import IndexedDataset, IterableWindows, is_stream
from dynagroup.online.messages import Refined, Request
from dynagroup.online.plans import OnlineConfig
from dynagroup.validation import warn_user

__all__ = ["RequestQueue", "Workers"]

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
    """The inner DataLoader of a loader: made when first needed, kept over epochs where its workers persist.

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
