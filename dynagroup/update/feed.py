"""Planned updates become loaded ones: a plain ``DataLoader`` that is told which samples come next."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dynagroup.errors import ConfigError
from dynagroup.update.dataloader import ENDED_EARLY, answers_of, checked_kwargs
from dynagroup.update.plans import PlannedUpdate

__all__ = ["PlannedFeed"]

TAKEN = ("batch_size", "batch_sampler", "generator")


class SeededIndices(list[int]):
    """Dataset indices with the seed under which a worker processes them, so that a resumed run processes them alike."""

    seed: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded_indices, (list(self), self.seed)


def _seeded_indices(indices: list[int], seed: int) -> SeededIndices:
    seeded = SeededIndices(indices)
    seeded.seed = seed
    return seeded


class _SeededDataset(Dataset):
    """The user's dataset; in a worker process every batch begins with its own seed. In the main process nothing changes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if isinstance(indices, SeededIndices) and get_worker_info() is not None:
            torch.manual_seed(indices.seed)
            random.seed(indices.seed)
            np.random.seed(indices.seed % 2**32)
        together = getattr(self.dataset, "__getitems__", None)
        return together(list(indices)) if together is not None else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


class _Requests:
    """The batch sampler of the inner DataLoader: hands out indices and remembers, in order, what they belong to."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.planned: deque[PlannedUpdate] = deque()
        self.source: Iterator[PlannedUpdate] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        for update in self.source:
            self.planned.append(update)
            for step, indices in enumerate(update.batches, start=update.rows_before):
                key = (self.seed, update.after.epoch, update.after.update, step)
                yield _seeded_indices(indices, int(np.random.SeedSequence(key).generate_state(1)[0]))


class PlannedFeed:
    """Loads planned updates, one after another, with the user's workers and collate function.

    Args:
        seed: of processing.
        kwargs: of the ``DataLoader``.

    Raises:
        ConfigError: an argument of the DataLoader is ours to decide.
    """

    def __init__(self, dataset: Any, seed: int, kwargs: Mapping[str, Any]) -> None:
        taken = sorted(set(TAKEN) & set(kwargs))
        if taken:
            raise ConfigError(f"{taken} are decided by PlannedDataLoader: pass `budget`, `sampler` and `seed` instead")
        if kwargs.get("in_order") is False:
            raise ConfigError("`in_order=False` lets batches of different updates mix; leave it True")
        self._requests = _Requests(seed)
        # A generator of its own: the DataLoader would draw its seed from torch's global one, and shift it on resuming.
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            _SeededDataset(dataset),
            batch_sampler=self._requests,  # type: ignore[arg-type]
            generator=self._generator,
            **checked_kwargs(kwargs),
        )

    @property
    def first(self) -> PlannedUpdate | None:
        """The update whose batches come next."""
        return self._requests.planned[0] if self._requests.planned else None

    @property
    def last(self) -> PlannedUpdate | None:
        """The last update that workers were asked for."""
        return self._requests.planned[-1] if self._requests.planned else None

    def open(self, updates: Iterator[PlannedUpdate], epoch: int) -> Iterator[tuple[PlannedUpdate, list[Any]]]:
        """Each update with its collated batches."""
        requests = self._requests
        requests.planned.clear()
        requests.source = updates
        self._generator.manual_seed(int(np.random.SeedSequence((requests.seed, epoch)).generate_state(1)[0]))
        batches = answers_of(self._loader)
        for batch in batches:
            collected = [batch, *islice(batches, len(requests.planned[0].batches) - 1)]
            if len(collected) == len(requests.planned[0].batches):
                yield requests.planned.popleft(), collected
        if requests.planned:
            raise RuntimeError(ENDED_EARLY)
