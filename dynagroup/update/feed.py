"""Planned updates become loaded and weighed ones: a plain ``DataLoader`` that is told which samples come next."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.shapes import TOKENS, said
from dynagroup.update.loader import ENDED_EARLY, answers_of, checked_kwargs
from dynagroup.update.loss_weight import Share, Weigh, loss_scale, weigher
from dynagroup.update.step import LoaderStats, Step, total_of, width_of
from dynagroup.update.updates import PlannedStep, PlannedUpdate
from dynagroup.validation import warn_user

__all__ = ["BatchNotice", "LoadedUpdate", "PlannedFeed", "unplanned"]

TAKEN = ("batch_size", "batch_sampler", "generator")


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


class _Requests:
    """The batch sampler of the inner DataLoader: hands out indices and remembers, in order, what they belong to."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.planned: deque[PlannedUpdate] = deque()
        self.source: Iterator[PlannedUpdate] = iter(())

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for update in self.source:
            self.planned.append(update)
            before = update.before
            for row, step in enumerate(update.steps, start=before.begun_rows):
                yield seed_of(self.seed, before.epoch, before.update, row), step.indices


def seed_of(*place: int) -> int:
    """A seed for this place alone.

    >>> seed_of(0, 1) == seed_of(0, 1) != seed_of(1, 0)
    True
    """
    return int(np.random.SeedSequence(place).generate_state(1)[0])


class LoadedUpdate(NamedTuple):
    """An update's batches on this rank, and what they weigh."""

    planned: PlannedUpdate
    batches: list[Any]
    weights: list[float]
    """Of each batch on this rank."""
    summed: list[float]
    """Of all ranks' batches behind each step, and of what was taken of the update before; first that alone."""

    def step(self, number: int, world_size: int) -> Step[Any]:
        """What a training loop gets."""
        planned = self.planned.steps[number]
        weight = Share(self.weights[number], self.summed[-1])
        return Step(
            batch=self.batches[number],
            indices=planned.indices,
            samples=Share(0 if planned.idle else len(planned.indices), self.planned.num_samples),
            weight=weight,
            loss_scale=loss_scale(weight, world_size),
            ends_update=number == len(self.batches) - 1,
            idle=planned.idle,
        )


# An update's batches are loaded, each is weighed, and one sum over ranks (a number a step) tells every rank what each step
# weighs in all, so that the loss scale of each batch is exact and a place inside the update can be saved by any rank. Plans
# are alike on all ranks, so nothing else needs telling, but for a rank that fails: its numbers are NaN. With "samples" the
# plan says the weights itself. Cost: one all-reduce of a few floats an update; the update's batches are held at once.
class PlannedFeed:
    """Loads planned updates, one after another, with the user's workers and collate function, and weighs them over all ranks.

    Args:
        seed: of processing.
        weigh: what a batch weighs.
        stats: counts exchanges and waiting.
        kwargs: of the ``DataLoader``.

    Raises:
        ConfigError: an argument of the DataLoader is ours to decide.
    """

    def __init__(self, dataset: Any, seed: int, weigh: Weigh, stats: LoaderStats, kwargs: Mapping[str, Any]) -> None:
        taken = sorted(set(TAKEN) & set(kwargs))
        if taken:
            raise ConfigError(f"{taken} are decided by PlannedDataLoader: pass `budget`, `sampler` and `seed` instead")
        if kwargs.get("in_order") is False:
            raise ConfigError("`in_order=False` lets batches of different updates mix; leave it True")
        self._weight_of, self._by_samples = weigher(weigh), weigh == "samples"
        self._stats = stats
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
    def last(self) -> PlannedUpdate | None:
        """The last update that workers were asked for."""
        return self._requests.planned[-1] if self._requests.planned else None

    def open(self, updates: Iterator[PlannedUpdate], epoch: int, world: World) -> Iterator[LoadedUpdate]:
        """Each update, loaded and weighed. Collective, unless samples are what is weighed."""
        loaded = self._load(updates, epoch)
        while (found := self._next(loaded, world)) is not None:
            update, batches, weights = found
            # Summed from the left, step by step: a run resumed in between gets the same bits.
            summed = list(accumulate(self._totals(update, weights, world), initial=update.before.begun_weight))
            yield LoadedUpdate(update, batches, weights, summed)

    def _load(self, updates: Iterator[PlannedUpdate], epoch: int) -> Iterator[tuple[PlannedUpdate, list[Any]]]:
        requests = self._requests
        requests.planned.clear()
        requests.source = updates
        self._generator.manual_seed(seed_of(requests.seed, epoch))
        batches = answers_of(self._loader)
        for batch in batches:
            count = len(requests.planned[0].steps)
            collected = [batch, *islice(batches, count - 1)]
            if len(collected) == count:
                yield requests.planned.popleft(), collected
        requests.source = iter(())  # a generator could not be copied
        if requests.planned:
            raise RuntimeError(ENDED_EARLY)

    def _next(
        self, loaded: Iterator[tuple[PlannedUpdate, list[Any]]], world: World
    ) -> tuple[PlannedUpdate, list[Any], list[float]] | None:
        """The next update, and what each of its batches weighs here. What fails here is told to the other ranks."""
        began, update = time.perf_counter(), None
        try:
            found = next(loaded, None)
            if found is None:
                return None
            update, batches = found
            return update, batches, [self._weight(*each) for each in zip(update.steps, batches, strict=True)]
        except Exception:
            failed = update or next(iter(self._requests.planned), None)
            if failed is not None and not self._by_samples:
                with suppress(AlignmentError):  # this rank's own error says more
                    world.all_sum([math.nan] * len(failed.steps))
            raise
        finally:
            self._stats.wait_s += time.perf_counter() - began

    def _weight(self, step: Any, batch: Any) -> float:
        return 0.0 if step.idle else self._weight_of(batch, len(step.indices))

    def _totals(self, update: PlannedUpdate, weights: list[float], world: World) -> list[float]:
        """What each step weighs over all ranks."""
        if self._by_samples:
            return [float(step.row_samples) for step in update.steps]
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


class BatchNotice:
    """Warns once where a batch is not what was planned."""

    def __init__(self) -> None:
        self._said = False

    def look(self, batch: Any, step: PlannedStep, budget: Budget) -> None:
        if step.idle or self._said:
            return
        differs = unplanned(batch, samples=len(step.indices), planned=step.streams, budget=budget)
        if differs is not None:
            self._said = True
            warn_user(
                f"a batch is not what was planned: {differs}. `lengths` are in another order than the dataset, or were measured "
                "with another tokenizer, truncation or template, so batches may not fit; measure them the way samples are "
                "processed and collated, or use OnlineDataLoader, which measures them so by itself (said once)"
            )


def unplanned(batch: Any, *, samples: int, planned: Mapping[str, tuple[int, int]], budget: Budget) -> str | None:
    """How a collated batch differs from its plan, in words; None if it does not, or does not show.

    Looks at the fields in which streams show: columns where samples are padded, their number where they are packed.

    Args:
        samples: how many samples the batch was planned from.
        planned: stream -> tokens of the longest of them, and of all.
        budget: what it was planned by; says what it pads to, and the layout.

    >>> import numpy as np
    >>> from dynagroup.budget.tokens import TokenBudget
    >>> batch = {"input_ids": np.ones((2, 5)), "labels": np.ones((2, 9))}
    >>> unplanned(batch, samples=2, planned={"tokens": (5, 8), "target": (6, 7)}, budget=TokenBudget(99))
    '2 samples came out 9 target tokens wide, but the longest of them was planned with 6'
    """
    packed = budget.layout == "packed"
    for stream, (longest, total) in planned.items():
        shown = total_of(batch, stream) if packed else width_of(batch, samples, stream)
        least = total if packed else longest
        if shown is None or least <= shown <= budget.padded_to(least):
            continue
        tokens = "tokens" if said(stream) == TOKENS else f"{said(stream)} tokens"
        if packed:
            return f"{samples} samples came out as {shown} {tokens}, but were planned with {total}"
        return f"{samples} samples came out {shown} {tokens} wide, but the longest of them was planned with {longest}"
    return None
