"""Cuts one window of samples into padded batches with the least predicted time.

The window is sorted first. Each batch is a run, which means consecutive samples of the sorted window. A cut is an array
of offsets, int64 (B + 1,): batch i has the samples from offsets[i] to offsets[i + 1]."""

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import allowed_sizes, longest_first, offsets_of, offsets_of_path
from dynagroup.plan.multistream import RunMaxima, alike_order
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within, primary, round_up

FEW_BATCHES = 64
"""Windows of one stream that need more batches are cut greedily: several times faster, 0.1 % more time."""
FEWEST = 1e12
"""A cost of a batch so high that the cut with the fewest batches takes the least time."""
NUM_ENDS = 64
"""If batches are large, at least so many of their possible ends are tried, evenly spaced."""
TILE = 256
FEW_RUNS = 1 << 19
"""The work of up to so many runs of a window with several streams is kept in a table."""
TINY = 1e-9
"""Replaces the work of an empty sample, to avoid a division by 0."""


@dataclass(frozen=True)
class OrderedWindow:
    """A sorted window of samples, to be cut into runs (consecutive samples that form a batch).

    A longer run never has less work. With one padded stream, ``work`` falls, and the first sample of a run is the
    longest. A subclass that prices runs otherwise overrides ``work_of``, ``sizes_within`` and ``least_time``.

    Args:
        work: float64 (N,), predicted time of each sample alone.
        largest: int64 (N,), most samples of a batch that starts at each position, at least 1.
        allowed: int64, allowed batch sizes, ascending from 1; None: all sizes.
        streams: if several streams are padded, the work of each sample by stream: float64 (N,) each.
        limits: float64, the only amounts of work that a batch may have, ascending; empty: any.
    """

    work: NDArray[np.float64]
    largest: IntArray
    allowed: IntArray | None = None
    streams: tuple[NDArray[np.float64], ...] = ()
    limits: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def _work_table(self) -> NDArray[np.float64] | None:
        """With several streams, the work of all runs by first position and size - 1; None: they are too many."""
        reach = int(self.largest.max(initial=1))
        if not self.streams or len(self) * reach > FEW_RUNS:
            return None
        return _work_of_runs(self.streams, reach)

    @cached_property
    def _maxima(self) -> tuple[RunMaxima, ...]:
        reach = int(self.largest.max(initial=1))
        return tuple(RunMaxima(work, reach) for work in self.streams)

    def __len__(self) -> int:
        return len(self.work)

    @property
    def fewest_batches(self) -> float:
        """About the number of batches, if each is as large as fits."""
        return float((1.0 / self.largest).sum())

    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray[np.float64]:
        """Returns the predicted time of runs, given by their first positions and their sizes."""
        if not self.streams:
            return sizes * self.work[starts]
        if self._work_table is not None:
            return self._work_table[starts, sizes - 1]
        longest = [maxima.of(starts, sizes) for maxima in self._maxima]
        return sizes * np.sum(longest, axis=0)

    def work_of_cut(self, offsets: IntArray) -> NDArray[np.float64]:
        """Returns the predicted time of each batch of a cut."""
        starts = offsets[:-1]
        sizes = np.diff(offsets)
        if not self.streams:
            return self.work_of(starts, sizes)
        # without a table of all runs
        longest = [np.maximum.reduceat(work, starts) for work in self.streams]
        return sizes * np.sum(longest, axis=0)

    def rounded(self, sizes: IntArray) -> IntArray:
        """Rounds batch sizes down to allowed sizes."""
        if self.allowed is None:
            return sizes
        return self.allowed[np.searchsorted(self.allowed, sizes, side="right") - 1]

    def sizes_within(self, starts: IntArray, limits: NDArray[np.float64]) -> IntArray:
        """Returns the size of the longest run from each start whose work is within its limit; at least 1.

        ``starts`` and ``limits`` are broadcast against each other.
        """
        largest = self.largest[starts]
        if not self.streams:
            sizes = np.minimum(limits / np.maximum(self.work[starts], TINY), largest)
            return self.rounded(np.maximum(sizes.astype(np.int64), 1))
        if self._work_table is not None and starts.shape == limits.shape:
            num_within = (self._work_table[starts] <= limits[:, None]).sum(axis=1)
            return self.rounded(np.minimum(np.maximum(num_within, 1), largest))
        starts, limits, largest = np.broadcast_arrays(starts, limits, largest)
        flat_starts = starts.ravel()
        flat_limits = limits.ravel()
        sizes = largest_within(
            lambda sizes: self.work_of(flat_starts, sizes) <= flat_limits,
            starts.size,
            largest.ravel(),
        )
        return self.rounded(np.maximum(sizes.reshape(starts.shape), 1))

    def least_time(self, per_step: float) -> IntArray:
        """Returns the cut with the least time: its work, plus ``per_step`` for each batch."""
        if self.streams or self.fewest_batches <= FEW_BATCHES:
            return shortest_path(self, per_step)
        return one_by_one(self, per_step)

    def middle(self, start: int, stop: int) -> int | None:
        """Returns where to divide a run so that the larger part has least work; None: no allowed sizes divide it."""
        size = stop - start
        firsts = np.arange(1, size)
        if self.allowed is not None:
            is_allowed = np.isin(firsts, self.allowed) & np.isin(size - firsts, self.allowed)
            firsts = firsts[is_allowed]
            if not len(firsts):
                return None
        work_of_first = self.work_of(start, firsts)
        work_of_second = self.work_of(start + firsts, size - firsts)
        dearer = np.maximum(work_of_first, work_of_second)
        return start + int(firsts[np.argmin(dearer)])


def _work_of_runs(streams: tuple[NDArray[np.float64], ...], reach: int) -> NDArray[np.float64]:
    """Returns the work of all runs by first position and size: (N, reach). Samples behind the window count as empty."""
    longest = np.zeros((len(streams[0]), reach))
    for work in streams:
        behind = np.append(work, np.zeros(reach - 1))
        longest += np.maximum.accumulate(sliding_window_view(behind, reach), axis=1)
    return longest * np.arange(1, reach + 1)


def orders_of(lengths: Streams, budget: Budget, size: int) -> IntArray:
    """Sorts padded windows of ``size`` samples each, given one after another; returns positions in a window: (windows, size).

    The longest sample comes first; if samples have several padded lengths, similar samples stand together.
    """
    names = padded_streams(budget, lengths)
    if len(names) > 1:
        units = [lengths[name].astype(np.int64) for name in names]
        return alike_order(units, size).reshape(-1, size) % size
    windows = len(lengths[primary(lengths)]) // size
    orders = []
    for window in range(windows):
        span = slice(window * size, (window + 1) * size)
        orders.append(longest_first({name: values[span] for name, values in lengths.items()}))
    return np.stack(orders)


def in_order(lengths: Streams, rules: CutRules) -> tuple[IntArray, OrderedWindow]:
    """Sorts a padded window (not empty) for cutting; returns the order as positions, and the sorted window."""
    [window] = windows_in_order(lengths, rules, len(lengths[primary(lengths)]))
    return window


def windows_in_order(
    lengths: Streams, rules: CutRules, size: int
) -> list[tuple[IntArray, OrderedWindow]]:
    """Sorts padded windows of ``size`` samples each, given one after another, as :func:`in_order` sorts one."""
    budget = rules.budget
    names = padded_streams(budget, lengths)
    orders = orders_of(lengths, budget, size)
    places = (orders + size * np.arange(len(orders))[:, None]).ravel()
    ordered = {name: values[places] for name, values in lengths.items()}
    streams = []
    for name in names:
        padded = round_up(ordered[name].astype(np.int64), budget.pad_to_multiple_of)
        streams.append(rules.work.price(name).of(padded))
    work = np.sum(streams, axis=0)
    if len(names) == 1:
        streams = []
    largest = largest_sizes(ordered, budget, size)
    windows = []
    for number, order in enumerate(orders):
        inside = slice(number * size, (number + 1) * size)
        if budget.ladder is not None:
            of_window = {name: values[inside] for name, values in ordered.items()}
            window = budget.ladder.window(of_window, work[inside], largest[inside])
            windows.append((order, window))
            continue
        allowed = None
        if rules.round_batch is not None:
            allowed = allowed_sizes(int(largest[inside].max()), rules.round_batch)
        work_of_streams = tuple(of_stream[inside] for of_stream in streams)
        window = OrderedWindow(work[inside], largest[inside], allowed, work_of_streams)
        windows.append((order, window))
    return windows


def largest_sizes(ordered: Streams, budget: Budget, size: int) -> IntArray:
    """Returns the largest size of a batch from each position of sorted windows: int64 (N,), at least 1.

    Samples with a single length must be sorted, longest first. Later batches end at least as late: position + size
    never falls in a window. ``size``: samples of a window.
    """
    tokens = ordered[primary(ordered)]
    num_left = size - np.arange(len(tokens)) % size
    largest = None
    if len(ordered) == 1:
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(tokens)) + 1])
        largest = budget.largest(tokens[firsts].astype(np.int64))
        if largest is not None:
            is_shorter = firsts[1:] % size > 0  # else a window begins
            if (np.diff(largest)[is_shorter] < 0).any():
                raise BudgetError(
                    "`budget.largest` must allow at least as many shorter samples; "
                    "try assert_budget_law"
                )
            largest = np.repeat(largest, np.diff(np.append(firsts, len(tokens))))
    if largest is None:
        largest = _largest_by_search(ordered, budget, num_left)
    return np.minimum(np.maximum(largest, 1), num_left)


def _largest_by_search(ordered: Streams, budget: Budget, num_left: IntArray) -> IntArray:
    """Returns the largest size of a batch from each position, for budgets that look at more than the longest sample.

    Bisects for all positions at once, up to a size that is doubled for the positions where it is too small.
    """
    sums = {name: offsets_of(values) for name, values in ordered.items()}
    largest = np.zeros(len(num_left), np.int64)
    starts = np.arange(len(num_left))
    reach = 64
    while len(starts):
        highest = np.minimum(reach - 1, num_left[starts])
        maxima = {name: RunMaxima(values, reach - 1) for name, values in ordered.items()}
        runs = _Runs(starts, highest, maxima, sums)
        largest[starts] = largest_within(
            lambda sizes, runs=runs: budget.fits(runs.shapes(sizes)), len(starts), highest
        )
        has_more = (largest[starts] == reach - 1) & (num_left[starts] > reach - 1)
        starts = starts[has_more]
        reach *= 2
    return largest


@dataclass(frozen=True)
class _Runs:
    """Runs of a sorted window from fixed first positions."""

    starts: IntArray
    highest: IntArray  # largest size that is asked about
    maxima: dict[str, RunMaxima]
    sums: dict[str, IntArray]  # by stream: tokens before each position

    def shapes(self, sizes: IntArray) -> BatchShape:
        sizes = np.minimum(sizes, self.highest)
        stops = self.starts + sizes
        longest = {}
        total = {}
        for name, sums in self.sums.items():
            longest[name] = self.maxima[name].of(self.starts, sizes).astype(np.int64)
            total[name] = sums[stops] - sums[self.starts]
        return BatchShape(sizes, longest, total)


# Shortest path through the places where batches may start and end, by dynamic programming:
# least[stop] = min over start of least[start] + per_step + work of the samples from start to stop.
# Exact if batches have up to 128 samples; else 64 or more ends of each batch are tried. O(N * 64).
def shortest_path(window: OrderedWindow, per_step: float) -> IntArray:
    """Returns the cut of least predicted time."""
    places = _places(window)
    num_places = len(places) - 1
    ends = places[:-1] + window.largest[places[:-1]]
    first_start = np.searchsorted(ends, places[1:])  # of the longest batch that ends at each place
    wide = int((np.arange(1, num_places + 1) - first_start).max())
    front = np.zeros(wide)
    between = []  # by stream: the largest work between two neighbouring places
    for work in window.streams or (window.work,):
        largest_between = np.maximum.reduceat(work, places[:-1])
        between.append(np.append(front, largest_between))

    least = np.full(wide + num_places + 1, np.inf)  # least[wide + place]
    least[wide] = 0.0
    came_from = [0]
    for first in range(0, num_places, TILE):
        stops = np.arange(first + 1, min(first + TILE, num_places) + 1)
        starts = stops[:, None] - np.arange(1, wide + 1)  # the nearest first
        sizes = places[stops][:, None] - places[np.maximum(starts, 0)]
        time = np.zeros(starts.shape)
        for work in between:
            nearest_first = sliding_window_view(work, wide)[stops][:, ::-1]
            time += np.maximum.accumulate(nearest_first, axis=1)
        time = sizes * time + per_step
        time[starts < first_start[stops - 1][:, None]] = np.inf
        if window.allowed is not None:
            time[np.isin(sizes, window.allowed, invert=True)] = np.inf
        for stop, row in zip(stops.tolist(), time, strict=True):
            row += least[stop : stop + wide][::-1]
            nearest = int(row.argmin())
            least[wide + stop] = row[nearest]
            came_from.append(stop - 1 - nearest)
    return places[offsets_of_path(came_from)]


def _places(window: OrderedWindow) -> IntArray:
    """Returns positions where batches may start and end: all; or if batches are large, 1/64 of the largest apart."""
    num_samples = len(window)
    if window.allowed is not None or window.largest.max() < 2 * NUM_ENDS:
        return np.arange(num_samples + 1)
    strides = np.maximum(window.largest // NUM_ENDS, 1).tolist()
    places = [0]
    while places[-1] < num_samples:
        places.append(places[-1] + strides[places[-1]])
    return np.asarray(places, np.int64)


def one_by_one(window: OrderedWindow, per_step: float) -> IntArray:
    """Returns a greedy cut for one padded stream: batch after batch, from the longest sample to the shortest.

    Where lengths fall evenly by d a sample, n samples have n * n * d / 2 of padding, and (n * n * d / 2 + per_step) / n, the
    time a sample beyond its own work, is least where the padding equals the price of a step. So a batch ends where its
    samples exceed the next sample by that price. This excess equals the padding if lengths fall evenly, and it grows with
    every sample, so bisection finds the end. O(B log N)."""
    sums = np.append(0.0, np.cumsum(window.work)).data
    work = window.work.data
    largest = window.largest.data
    allowed = None if window.allowed is None else window.allowed.tolist()
    offsets = [0]
    start = 0
    while start < len(window):
        before = sums[start]
        low = 0
        size = largest[start]
        while size - low > 1:
            middle = (low + size) // 2
            excess = sums[start + middle] - before - middle * work[start + middle]
            if excess >= per_step:
                size = middle
            else:
                low = middle
        if allowed is not None:
            size = allowed[bisect_right(allowed, size) - 1]
        start += size
        offsets.append(start)
    return np.asarray(offsets, np.int64)


def split_dearest(window: OrderedWindow, offsets: IntArray, num_batches: int) -> IntArray:
    """Splits the batch with the most work, again and again, until there are ``num_batches``.

    Stops earlier if allowed sizes divide none.
    """
    num_missing = num_batches - (len(offsets) - 1)
    heap = []
    work_of_batches = window.work_of_cut(offsets).tolist()
    for work, run in zip(work_of_batches, pairwise(offsets.tolist()), strict=True):
        heap.append((-work, *run))
    heapq.heapify(heap)
    borders: list[int] = []
    while len(borders) < num_missing and heap:
        _, start, stop = heapq.heappop(heap)
        if stop - start == 1:
            continue
        middle = window.middle(start, stop)
        if middle is None:
            continue
        borders.append(middle)
        for first, last in ((start, middle), (middle, stop)):
            work = float(window.work_of(first, last - first))
            heapq.heappush(heap, (-work, first, last))
    return np.sort(np.append(offsets, np.asarray(borders, np.int64)))
