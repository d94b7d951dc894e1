"""Planned updates become loaded and weighed ones: a plain ``DataLoader`` that is told which samples come next."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.update.loader import ENDED_EARLY, checked_kwargs
from dynagroup.update.loss_weight import Weigh, weigher
from dynagroup.update.step import LoaderStats
from dynagroup.update.updates import PlannedUpdate

__all__ = ["PlannedFeed"]

TAKEN = ("batch_size", "batch_sampler", "generator")


# An update's batches are loaded, each is weighed, and one sum over ranks (a number a step) tells every rank what each step
# weighs in all, so that the loss scale of each batch is exact and a place inside the update can be saved by any rank. Plans
# are alike on all ranks, so nothing else needs telling, but for a rank that fails: its numbers are NaN. Cost: one all-reduce of
# a few floats an update; the update's batches are held at once.
class PlannedFeed:
    """Loads planned updates, one after another, with the user's workers and collate function, and weighs them over all ranks.

    It is the batch sampler of its DataLoader: hands out indices and remembers, in order, what they belong to. A copy begins
    anew, without workers.
    """

    def __init__(self, dataset: Any, seed: int, weigh: Weigh, stats: LoaderStats, kwargs: Mapping[str, Any]) -> None:
        taken = sorted(set(TAKEN) & set(kwargs))
        if taken:
            raise ConfigError(f"{taken} are decided by PlannedDataLoader: pass `budget`, `sampler` and `seed` instead")
        if kwargs.get("in_order") is False:
            raise ConfigError("`in_order=False` lets batches of different updates mix; leave it True")
        self._made_of = dataset, seed, weigh, stats, kwargs
        self._weight_of, self._seed, self._stats = weigher(weigh), seed, stats
        self.asked: deque[PlannedUpdate] = deque()
        """Updates that workers were asked for and that were not collected yet."""
        self._source: Iterator[PlannedUpdate] = iter(())
        # A generator of its own: the DataLoader would draw its seed from torch's global one, and shift it on resuming.
        self._generator = torch.Generator()
        how = {"generator": self._generator, **checked_kwargs(kwargs)}
        self._loader: DataLoader[Any] = DataLoader(_SeededDataset(dataset), batch_sampler=self, **how)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for update in self._source:
            self.asked.append(update)
            before = update.before
            for row, step in enumerate(update.steps, start=before.begun_rows):
                yield _seed_of(self._seed, before.epoch, before.update, row), step.indices

    def open(
        self, updates: Iterator[PlannedUpdate], epoch: int, world: World
    ) -> Iterator[tuple[PlannedUpdate, list[Any], list[float], list[float]]]:
        """Each update, its batches on this rank, what each of them weighs, and what all ranks' batches behind each step weigh,
        and first what was taken of the update before. Collective."""
        self.asked.clear()
        self._source = updates
        self._generator.manual_seed(_seed_of(self._seed, epoch))
        batches = iter(self._loader)
        while (loaded := self._loaded(batches, world)) is not None:
            update, collected, weights = loaded
            # Summed from the left, step by step: a run resumed in between gets the same bits.
            summed = accumulate(self._totals(update, weights, world), initial=update.before.begun_weight)
            yield update, collected, weights, list(summed)

    def _loaded(self, batches: Iterator[Any], world: World) -> tuple[PlannedUpdate, list[Any], list[float]] | None:
        """The next update, and what each of its batches weighs here. What fails here is told to the other ranks."""
        began = time.perf_counter()
        try:
            collected = [*islice(batches, 1)]  # asks for the update
            if not self.asked:
                return None
            update = self.asked[0]
            collected += islice(batches, len(update.steps) - len(collected))
            if len(collected) < len(update.steps):
                raise RuntimeError(ENDED_EARLY)
            weights = [
                0.0 if step.idle else self._weight_of(batch, len(step.indices))
                for step, batch in zip(update.steps, collected, strict=True)
            ]
            return self.asked.popleft(), collected, weights
        except Exception:
            if self.asked:
                with suppress(AlignmentError):  # this rank's own error says more
                    world.all_sum([math.nan] * len(self.asked[0].steps))
            raise
        finally:
            self._stats.wait_s += time.perf_counter() - began

    def _totals(self, update: PlannedUpdate, weights: list[float], world: World) -> list[float]:
        """What each step weighs over all ranks."""
        if world.size == 1:
            return weights
        began = time.perf_counter()
        found = world.all_sum(weights)
        self._stats.exchange_s += time.perf_counter() - began
        self._stats.exchanges += 1
        self._stats.exchanged_bytes += 8 * len(weights)
        if any(map(math.isnan, found)):
            raise AlignmentError(
                f"another rank failed while it loaded or weighed update {update.before.update}; see its error"
            )
        return found


class _SeededDataset(Dataset):
    """The user's dataset; in a worker process every batch begins with a seed of its own, so that a resumed run processes it
    alike. In the main process nothing changes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, request: tuple[int, list[int]]) -> list[Any]:
        seed, indices = request
        if get_worker_info() is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        together = getattr(self.dataset, "__getitems__", None)
        return together(indices) if together is not None else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


def _seed_of(*place: int) -> int:
    """A seed for this place alone."""
    return int(np.random.SeedSequence(place).generate_state(1)[0])
