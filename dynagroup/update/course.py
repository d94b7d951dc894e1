"""One iteration of a planned loader: updates are loaded, weighed over all ranks, and given out step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, TypeVar

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError
from dynagroup.update.feed import PlannedFeed
from dynagroup.update.notice import Planned, unplanned
from dynagroup.update.place import Place
from dynagroup.update.plans import PlannedUpdate
from dynagroup.update.stats import LoaderStats
from dynagroup.update.step import Step
from dynagroup.update.weigh import Share, Weigh, loss_scale, weigher
from dynagroup.validation import warn_user

__all__ = ["Course", "Notes", "Taken"]

B = TypeVar("B")


@dataclass
class Notes:
    """What a loader counts and says, over all of its iterations."""

    stats: LoaderStats
    oversize: set[int] = field(default_factory=set)
    """Samples that do not fit even alone."""
    warned: bool = False

    def of(self, update: PlannedUpdate, number: int, batch: Any, budget: Budget) -> None:
        """Count a step as used, and compare its batch with its plan."""
        samples, stats = len(update.batches[number]), self.stats
        idle = update.idle[number]
        stats.count_step(
            samples,
            real_tokens=update.real[number],
            padded_tokens=update.padded[number],
            padded_squares=update.squares[number],
            idle=idle,
        )
        highest, mean = update.row_padded[number]
        stats.row_highest, stats.row_total = stats.row_highest + highest, stats.row_total + round(mean)
        if samples == 1 and not idle:
            stats.oversize += int(update.batches[number][0] in self.oversize)
        if number == len(update.batches) - 1:
            stats.count_update(update.num_samples)
        if idle or self.warned:
            return
        planned = {stream: Planned(*steps[number]) for stream, steps in update.streams.items()}
        differs = unplanned(batch, samples=samples, planned=planned, budget=budget)
        if differs is not None:
            self.warned = True
            warn_user(
                f"a batch is not what was planned: {differs}. `lengths` are in another order than the dataset, or were measured "
                "with another tokenizer, truncation or template, so batches may not fit; measure them the way samples are "
                "processed and collated, or use OnlineDataLoader, which measures them so by itself (said once)"
            )


@dataclass(frozen=True, slots=True)
class Taken(Generic[B]):
    """A step, and where the loader stands behind it."""

    step: Step[B]
    place: Place
    ends_at: PlannedUpdate


# An update's batches are loaded, each is weighed, and one sum over ranks (a number a step) tells every rank what each step
# weighs in all, so that the loss scale of each batch is exact and a place inside the update can be saved by any rank. Plans
# are alike on all ranks, so nothing else needs telling, but for a rank that fails: its numbers are NaN. With "samples" the
# plan says the weights itself. Cost: one all-reduce of a few floats an update; the update's batches are held at once.
class Course(Generic[B]):
    """Steps of one iteration.

    Args:
        feed: loads ``updates``.
        weigh: what a batch weighs.
        notes: counts what is given out.
    """

    def __init__(self, feed: PlannedFeed, weigh: Weigh, world: World, budget: Budget, notes: Notes) -> None:
        self._feed, self._world, self._budget, self._notes = feed, world, budget, notes
        self._weight_of = weigher(weigh)
        self._by_samples = weigh == "samples"

    def run(self, updates: Iterator[PlannedUpdate], epoch: int) -> Iterator[Taken[B]]:
        """Every step of ``updates``, with what it weighs."""
        loaded = self._feed.open(updates, epoch)
        while (found := self._next(loaded)) is not None:
            yield from self._taken(*found)

    def _next(
        self, loaded: Iterator[tuple[PlannedUpdate, list[B]]]
    ) -> tuple[PlannedUpdate, list[B], list[float]] | None:
        """The next update, and what each of its batches weighs here. What fails here is told to the other ranks."""
        began, update = time.perf_counter(), None
        try:
            found = next(loaded, None)
            if found is None:
                return None
            update, batches = found
            return update, batches, [self._weight(update, number, batch) for number, batch in enumerate(batches)]
        except Exception:
            failed = update or self._feed.first
            if failed is not None and not self._by_samples:
                with suppress(AlignmentError):  # this rank's own error says more
                    self._world.all_sum([math.nan] * len(failed.batches))
            raise
        finally:
            self._notes.stats.wait_s += time.perf_counter() - began

    def _weight(self, update: PlannedUpdate, number: int, batch: B) -> float:
        return 0.0 if update.idle[number] else self._weight_of(batch, len(update.batches[number]))

    def _totals(self, update: PlannedUpdate, weights: list[float]) -> list[float]:
        """What each step weighs over all ranks."""
        if self._by_samples:
            return [float(samples) for samples in update.row_samples]
        if self._world.size == 1:
            return weights
        began, stats = time.perf_counter(), self._notes.stats
        found = self._world.all_sum(weights)
        stats.exchange_s += time.perf_counter() - began
        stats.exchanges += 1
        stats.exchanged_bytes += 8 * len(weights)
        if any(map(math.isnan, found)):
            raise AlignmentError(
                f"another rank failed while it loaded or weighed update {update.before.update}; see its error"
            )
        return found

    def _taken(self, update: PlannedUpdate, batches: list[B], weights: list[float]) -> Iterator[Taken[B]]:
        # Summed from the left, step by step: a run resumed in between gets the same bits.
        before = 0.0 if update.begun is None else update.begun.weight
        weighed = list(accumulate(self._totals(update, weights), initial=before))
        for number, (batch, indices) in enumerate(zip(batches, update.batches, strict=True)):
            idle, weight = update.idle[number], Share(weights[number], weighed[-1])
            self._notes.of(update, number, batch, self._budget)
            step = Step(
                batch=batch,
                indices=indices,
                samples=Share(0 if idle else len(indices), update.num_samples),
                weight=weight,
                loss_scale=loss_scale(weight, self._world.size),
                ends_update=number == len(batches) - 1,
                idle=idle,
            )
            yield Taken(step, update.place(number + 1, weighed[number + 1]), update)
