"""How far a batch may reach: for every start in an ordered window, the most samples that fit together."""

from __future__ import annotations

import numpy as np

from dynagroup.budget.base import Budget, fits_of, largest_of
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import offsets_of
from dynagroup.plan.maxima import RunMaxima
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams

__all__ = ["most_by_start"]

BLOCK = 4096  # starts whose longest fitting runs are searched together


def most_by_start(ordered: Streams, budget: Budget) -> IntArray:
    """Most samples that a batch may have which starts at a position of the window: int64 (N,), at least 1. One stream must
    be sorted, longest first; of several any order will do.

    Because a budget is monotone, what starts later reaches at least as far.

    Raises:
        BudgetError: the budget breaks its law.
    """
    tokens = ordered[TOKENS]
    runs = np.concatenate([[0], np.flatnonzero(np.diff(tokens)) + 1])
    table = largest_of(budget, tokens[runs].astype(np.int64)) if len(ordered) == 1 else None
    left = np.arange(len(tokens), 0, -1)
    if table is None:
        return np.minimum(np.maximum(_by_search(ordered, budget), 1), left)
    if (np.diff(table) < 0).any():
        raise BudgetError("`budget.largest` falls for shorter samples; a budget must never refuse a smaller batch")
    by_start = np.repeat(np.maximum(table, 1), np.diff(np.append(runs, len(tokens))))
    return np.minimum(by_start, left)


def _by_search(ordered: Streams, budget: Budget) -> IntArray:
    """Where the longest sample's tokens do not decide alone: bisection, a block of starts at a time."""
    num_samples = len(ordered[TOKENS])
    reach, parts = 64, []
    for first in range(0, num_samples, BLOCK):
        starts = np.arange(first, min(first + BLOCK, num_samples))
        found, reach = _longest_fitting_runs(ordered, budget, starts, reach)
        parts.append(found)
    return np.concatenate(parts)


def _longest_fitting_runs(ordered: Streams, budget: Budget, starts: IntArray, reach: int) -> tuple[IntArray, int]:
    """For each start the most samples from there on that fit together, by bisection; and the reach that sufficed."""
    num_samples = len(ordered[TOKENS])
    while True:
        runs = _Runs(ordered, int(starts[0]), min(int(starts[-1]) + reach, num_samples), reach)
        found = np.zeros(len(starts), np.int64)
        step = reach // 2
        while step:
            inside = starts + found + step <= num_samples
            size = np.where(inside, found + step, 1)
            found = np.where(inside & fits_of(budget, runs.shape(starts, size)), size, found)
            step //= 2
        if not ((found == reach - 1) & (starts + found < num_samples)).any():
            return found, reach
        reach *= 2


class _Runs:
    """Shapes of runs of a window."""

    def __init__(self, ordered: Streams, start: int, stop: int, reach: int) -> None:
        self._start = start
        self._maxima = {name: RunMaxima(values[start:stop], reach - 1) for name, values in ordered.items()}
        self._sums = {name: offsets_of(values[start:stop].astype(np.int64)) for name, values in ordered.items()}

    def shape(self, starts: IntArray, sizes: IntArray) -> BatchShape:
        begin = starts - self._start
        longest = {name: maxima.of(begin, sizes).astype(np.int64) for name, maxima in self._maxima.items()}
        return BatchShape(sizes, longest, {n: sums[begin + sizes] - sums[begin] for n, sums in self._sums.items()})
