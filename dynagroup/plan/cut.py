"""Cut a window of samples into batches that fit.

Because a budget is monotone, the longest prefix of a sorted window that fits is found by looking at prefixes alone. One
kernel serves planning a million known lengths and re-cutting one window inside a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.plan.batches import Batches, longest_first, offsets_of
from dynagroup.plan.pack import pack
from dynagroup.plan.rounding import RoundBatch, smaller_size
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, round_up

__all__ = ["Method", "cut"]

Method: TypeAlias = Literal["greedy", "optimal"]
Caps: TypeAlias = Callable[[int], int]

BLOCK = 4096  # starts whose longest fitting runs are searched together


def cut(
    lengths: Streams,
    budget: Budget,
    *,
    method: Method = "greedy",
    round_batch: RoundBatch | None = None,
    charge: float | None = None,
) -> Batches:
    """Divide one window of samples into batches that fit ``budget``.

    A padded window is sorted, longest first (ties keep their order), and cut into runs. A packed one is filled first-fit
    decreasing on token sums, and samples keep their order of arrival inside a batch. A sample that does not fit even
    alone gets a batch of its own; the caller decides what becomes of it.

    Args:
        lengths: stream -> int32 (N,) of the window's samples.
        method: "greedy" makes the fewest batches of all cuts into runs; "optimal" is a dynamic programme that minimises
            padded tokens plus ``charge`` for each batch.
        round_batch: batch sizes are chosen among the values of this function.
        charge: tokens that a further batch must save to be worth it; None: as many batches as greedy, padding least.

    Returns:
        Positions into the window. Padded: longest batch first. Packed: in order of arrival.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> batches = cut({"tokens": np.array([3, 9, 2, 8], np.int32)}, TokenBudget(18))
    >>> [batch.tolist() for batch in batches]
    [[1, 3], [0, 2]]
    """
    if method not in ("greedy", "optimal"):
        raise ConfigError(f"`method` must be 'greedy' or 'optimal', but is {method!r}")
    tokens = lengths[TOKENS]
    if not len(tokens):
        return Batches(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if budget.layout == "packed":
        return pack(lengths, budget, round_batch=round_batch)
    order = longest_first(lengths)
    ordered = {name: values[order] for name, values in lengths.items()}
    most = _most_by_start(ordered, budget, round_batch)
    if method == "greedy":
        return Batches(order, _greedy(len(order), most))
    padded = round_up(ordered[TOKENS].astype(np.int64), budget.pad_to_multiple_of)
    if charge is None and round_batch is None:
        return Batches(order, _fewest_then_least(padded, most))
    return Batches(order, _optimal(padded, most, round_batch, charge))


def _greedy(num_samples: int, most: Caps) -> IntArray:
    offsets = [0]
    start = 0
    while start < num_samples:
        start = min(start + most(start), num_samples)
        offsets.append(start)
    return np.asarray(offsets, np.int64)


def _most_by_start(ordered: Streams, budget: Budget, round_batch: RoundBatch | None) -> Caps:
    """How many samples a batch that starts at a position of the sorted window may have; at least 1."""
    tokens = ordered[TOKENS]
    runs = np.concatenate([[0], np.flatnonzero(np.diff(tokens)) + 1])
    table = budget.largest(tokens[runs].astype(np.int64)) if len(ordered) == 1 else None
    if table is None:
        return _prefix_search(ordered, budget, round_batch)
    if (np.diff(table) < 0).any():
        raise BudgetError("`budget.largest` falls for shorter samples; a budget must never refuse a smaller batch")
    table = np.clip(table, 1, len(tokens))
    if round_batch is not None:
        sizes, where = np.unique(table, return_inverse=True)
        table = np.asarray([smaller_size(int(s), round_batch) for s in sizes], np.int64)[where]
    by_start = np.repeat(table, np.diff(np.append(runs, len(tokens)))).data
    return by_start.__getitem__


def _prefix_search(ordered: Streams, budget: Budget, round_batch: RoundBatch | None) -> Caps:
    """Batch sizes where the longest sample's tokens do not decide alone: found for a block of starts at a time."""
    num_samples = len(ordered[TOKENS])
    block: IntArray = np.zeros(0, np.int64)
    first, reach = 0, 64

    def most(start: int) -> int:
        nonlocal block, first, reach
        if not first <= start < first + len(block):
            first = start
            block, reach = _longest_fitting_runs(
                ordered, budget, np.arange(start, min(start + BLOCK, num_samples)), reach
            )
        return smaller_size(max(int(block[start - first]), 1), round_batch)

    return most


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
            found = np.where(inside & budget.fits(runs.shape(starts, size)), size, found)
            step //= 2
        if not ((found == reach - 1) & (starts + found < num_samples)).any():
            return found, reach
        reach *= 2


class _Runs:
    """Shapes of runs of a window: totals from running sums, maxima from maxima over powers of two."""

    def __init__(self, ordered: Streams, start: int, stop: int, reach: int) -> None:
        self._start = start
        self._maxima = {name: self._doubling(values[start:stop], reach) for name, values in ordered.items()}
        self._sums = {name: offsets_of(values[start:stop].astype(np.int64)) for name, values in ordered.items()}

    @staticmethod
    def _doubling(values: NDArray[np.int32], reach: int) -> NDArray[np.int32]:
        levels = [values]
        width = 1
        while 2 * width < reach:
            last = levels[-1]
            shifted = np.append(last[width:], np.zeros(min(width, len(last)), np.int32))
            levels.append(np.maximum(last, shifted))
            width *= 2
        return np.stack(levels)

    def shape(self, starts: IntArray, sizes: IntArray) -> BatchShape:
        begin = starts - self._start
        level = np.frexp(sizes.astype(np.float64))[1] - 1
        second = begin + sizes - (1 << level.astype(np.int64))
        longest = {n: np.maximum(m[level, begin], m[level, second]).astype(np.int64) for n, m in self._maxima.items()}
        return BatchShape(sizes, longest, {n: sums[begin + sizes] - sums[begin] for n, sums in self._sums.items()})


def _fewest_then_least(padded: IntArray, most: Caps) -> IntArray:
    """Of all cuts into the fewest runs, one that pads least.

    A dynamic programme over batches, not samples: where the k-th batch may start without costing a batch more is a short
    range, from what the batches behind it can reach back to what those before it can reach.
    """
    num_samples = len(padded)
    reach = np.fromiter((min(start + most(start), num_samples) for start in range(num_samples)), np.int64, num_samples)
    latest = [0]
    while latest[-1] < num_samples:
        latest.append(int(reach[latest[-1]]))
    earliest = [num_samples]
    for _ in latest[1:]:
        earliest.append(int(np.searchsorted(reach, earliest[-1])))
    ranges = list(zip(earliest[::-1], latest, strict=True))
    cost, came_from = np.zeros(1), []
    starts = np.zeros(1, np.int64)
    for first, last in ranges[1:]:
        stops = np.arange(first, last + 1)
        size = stops[None, :] - starts[:, None]
        total = cost[:, None] + size * padded[starts][:, None]
        total[(size <= 0) | (stops[None, :] > reach[starts][:, None])] = np.inf
        best = total.argmin(axis=0)
        came_from.append(starts[best])
        cost = total[best, np.arange(len(stops))]
        starts = stops
    offsets = [num_samples]
    for number in range(len(came_from) - 1, -1, -1):
        offsets.append(int(came_from[number][offsets[-1] - ranges[number + 1][0]]))
    return np.asarray(offsets[::-1], np.int64)


def _optimal(padded: IntArray, most: Caps, round_batch: RoundBatch | None, charge: float | None) -> IntArray:
    """Of all cuts into runs, one that is cheapest: padded tokens plus ``charge`` a batch."""
    num_samples = len(padded)
    if charge is None:
        charge = float(padded.sum()) + 1.0  # dearer than any padding: no more batches than greedy makes
    best = np.full(num_samples + 1, np.inf)
    best[0] = 0.0
    came_from = np.zeros(num_samples + 1, np.int64)
    counts = np.arange(num_samples + 1)
    for start in range(num_samples):
        stop = min(start + most(start), num_samples)
        cost = best[start] + charge + padded[start] * counts[1 : stop - start + 1].astype(np.float64)
        if round_batch is not None:
            allowed = [
                n == smaller_size(n, round_batch) or start + n == num_samples for n in range(1, stop - start + 1)
            ]
            cost[~np.asarray(allowed)] = np.inf
        better = cost < best[start + 1 : stop + 1]
        best[start + 1 : stop + 1][better] = cost[better]
        came_from[start + 1 : stop + 1][better] = start
    offsets = [num_samples]
    while offsets[-1] > 0:
        offsets.append(int(came_from[offsets[-1]]))
    return np.asarray(offsets[::-1], np.int64)
