"""Cuts one window of samples into padded batches with the least predicted time.

The window is sorted first. Each batch is a run, which means consecutive samples of the sorted window. A cut is an array
of offsets, int64 (B + 1,): batch i has the samples from offsets[i] to offsets[i + 1]."""

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dynagroup.budget.base import BoolArray, Budget, padded_streams
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import (
    Batches,
    RoundBatch,
    allowed_sizes,
    longest_first,
    offsets_of,
    offsets_of_path,
)
from dynagroup.plan.cost import Work
from dynagroup.plan.multistream import RunMaxima, alike_order
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within, primary, round_up

# Windows with more samples or batches are cut by the greedy `one_by_one`: five times faster, 0.1 % more step time.
EXACT_UP_TO, MANY_RUNS = 1 << 12, 128
FEWEST = 1e12  # cost of a batch so high that the cut with the fewest batches is the cheapest
FINE = 128  # for a long batch, at least this many possible sizes are tried, evenly spaced
TILE = 256
TINY = 1e-9  # replaces the work of an empty sample, to avoid a division by 0


def longest_batches_first(batches: Batches, lengths: Streams, budget: Budget) -> IntArray:
    """Returns the order of a window's batches (their numbers), the batch with the longest sample first."""
    names = padded_streams(budget, lengths)
    if len(names) == 1:
        return np.arange(len(batches))
    tokens = np.sum([lengths[name][batches.order].astype(np.int64) for name in names], axis=0)
    return np.argsort(-np.maximum.reduceat(tokens, batches.offsets[:-1]), kind="stable")


def in_order(
    lengths: Streams, budget: Budget, work: Work, to: RoundBatch | None
) -> "tuple[IntArray, OrderedWindow]":
    """Sorts a padded window (not empty) for cutting: the longest sample first, or if samples have several padded
    lengths, similar samples together. Returns the order as positions, and the sorted window."""
    names = padded_streams(budget, lengths)
    several = len(names) > 1
    order = (
        alike_order([lengths[n].astype(np.int64) for n in names])
        if several
        else longest_first(lengths)
    )
    ordered = {name: values[order] for name, values in lengths.items()}
    each = [
        work.price(name).of(round_up(ordered[name].astype(np.int64), budget.pad_to_multiple_of))
        for name in names
    ]
    most = most_by_start(ordered, budget)
    if budget.ladder is not None:
        return order, budget.ladder.window(ordered, np.sum(each, axis=0), most)
    allowed = None if to is None else allowed_sizes(int(most.max()), to)
    return order, OrderedWindow(np.sum(each, axis=0), most, allowed, tuple(each) if several else ())


@dataclass(frozen=True, slots=True)
class OrderedWindow:
    """A sorted window of samples, to be cut into runs (consecutive samples that form a batch). A longer run never has
    less work. With one padded stream, ``work`` falls, and the first sample of a run is the longest."""

    work: NDArray[np.float64]  # float64 (N,), predicted time of each sample alone
    most: IntArray  # int64 (N,), most samples of a batch that starts at each position; at least 1
    allowed: IntArray | None = (
        None  # allowed batch sizes, ascending, starting with 1; None: all sizes
    )
    streams: tuple[
        NDArray[np.float64], ...
    ] = ()  # if several streams are padded: work of each sample by stream
    maxima: tuple[RunMaxima, ...] = ()
    limits: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros(0)
    )  # a batch's possible work; empty: any

    def __post_init__(self) -> None:
        reach = int(self.most.max(initial=1))
        object.__setattr__(
            self, "maxima", tuple(RunMaxima(values, reach) for values in self.streams)
        )

    def __len__(self) -> int:
        return len(self.work)

    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray[np.float64]:
        """Returns the predicted time of runs of samples, given by their first positions and their sizes."""
        if not self.maxima:
            return sizes * self.work[starts]
        return sizes * np.sum([maxima.of(starts, sizes) for maxima in self.maxima], axis=0)

    def total(self, offsets: IntArray) -> NDArray[np.float64]:
        return self.work_of(offsets[:-1], offsets[1:] - offsets[:-1])

    def rounded(self, sizes: IntArray) -> IntArray:
        """Rounds batch sizes down to allowed sizes."""
        return (
            sizes
            if self.allowed is None
            else self.allowed[np.searchsorted(self.allowed, sizes, side="right") - 1]
        )

    def sizes_under(self, limits: NDArray[np.float64]) -> IntArray:
        """Returns the size of the longest run from each position with work within each limit: int64 (N, limits)."""
        if not self.maxima:
            by_work = limits / np.maximum(self.work, TINY)[:, None]
            sizes = np.minimum(by_work, len(self), out=by_work).astype(np.int64)
            return self.rounded(
                np.minimum(np.maximum(sizes, 1, out=sizes), self.most[:, None], out=sizes)
            )
        starts, low = np.arange(len(self))[:, None], np.ones((len(self), len(limits)), np.int64)
        high = np.broadcast_to(self.most[:, None] + 1, low.shape)
        while (high - low > 1).any():  # bisection, for all starts and limits at once
            middle = np.maximum((low + high) // 2, 1)
            below = self.work_of(starts, middle) <= limits
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return self.rounded(low)

    def greedy(self, start: int, stop: int, most_runs: int) -> Callable[[float], list[int]]:
        """Returns a function that cuts greedily: from a limit of work to the offsets of runs from ``start``, each as
        long as the limit allows, up to ``stop`` or ``most_runs``. No other cut within the limit has fewer runs."""
        work, most = (
            np.maximum(self.work[start:stop], TINY).tolist(),
            self.most[start:stop].tolist(),
        )
        allowed = None if self.allowed is None else self.allowed.tolist()
        streams, num = [s[start:stop] for s in self.streams], len(work)

        def under(limit: float) -> list[int]:
            offsets, place = [start], 0
            for _ in range(most_runs):
                size, longest = (
                    int(limit / work[place]) + bool(streams),
                    most[place],
                )  # + 1: may be rounded down
                if size > longest or (
                    streams and work[place] <= TINY
                ):  # samples without work, as in `sizes_under`
                    size = longest
                if streams:
                    each = np.sum(
                        [np.maximum.accumulate(s[place : place + max(size, 1)]) for s in streams],
                        axis=0,
                    )
                    size = int(
                        (each * np.arange(1, len(each) + 1)).searchsorted(limit, side="right")
                    )
                if allowed is not None:
                    size = allowed[bisect_right(allowed, size or 1) - 1]
                place += size or 1
                if place >= num:
                    return [*offsets, stop]
                offsets.append(start + place)
            return offsets

        return under

    def least_time(self, price: float) -> IntArray:
        """Returns the cut with the least time: its work, plus ``price`` per batch. Exact up to 4,096 samples."""
        large = len(self) > EXACT_UP_TO
        if self.streams or (self.allowed is not None and not large):
            return by_places(self, price)
        return (
            one_by_one(self, price)
            if large or float((1.0 / self.most).sum()) > MANY_RUNS
            else by_queue(self, price)
        )

    def middle(self, start: int, stop: int) -> int | None:
        """Returns where to divide a run so that the larger part has least work; None: no allowed sizes divide it."""
        first = np.arange(1, stop - start)
        if self.allowed is not None:
            first = first[
                np.isin(first, self.allowed) & np.isin(stop - start - first, self.allowed)
            ]
            if not len(first):
                return None
        dearer = np.maximum(
            self.work_of(start, first), self.work_of(start + first, stop - start - first)
        )
        return start + int(first[np.argmin(dearer)])


def most_by_start(ordered: Streams, budget: Budget) -> IntArray:
    """Returns the largest size of a batch from each position of a sorted window: int64 (N,), at least 1. Samples with a
    single length must be sorted, longest first. Later batches end at least as late: position + size never falls."""
    tokens = ordered[primary(ordered)]
    left = np.arange(len(tokens), 0, -1)
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(tokens)) + 1])
    table = budget.largest(tokens[firsts].astype(np.int64)) if len(ordered) == 1 else None
    if table is None:
        return np.minimum(np.maximum(_by_search(ordered, budget), 1), left)
    if (np.diff(table) < 0).any():
        raise BudgetError(
            "`budget.largest` must allow at least as many shorter samples; try assert_budget_law"
        )
    return np.minimum(
        np.repeat(np.maximum(table, 1), np.diff(np.append(firsts, len(tokens)))), left
    )


def _by_search(ordered: Streams, budget: Budget) -> IntArray:
    """Returns the largest size of a batch from each position, for budgets that look at more than the longest sample.
    Bisects for all positions at once, up to a size that is doubled where it is too small."""
    num, reach = len(ordered[primary(ordered)]), 64
    begin, sums = np.arange(num), {name: offsets_of(values) for name, values in ordered.items()}
    found = np.zeros(num, np.int64)
    while len(begin):
        maxima = {name: RunMaxima(of, reach - 1) for name, of in ordered.items()}
        most = np.minimum(reach - 1, num - begin)

        def fits(
            asked: IntArray, begin: IntArray = begin, maxima: Any = maxima, most: IntArray = most
        ) -> BoolArray:
            size = np.minimum(asked, most)
            longest = {
                name: table.of(begin, size).astype(np.int64) for name, table in maxima.items()
            }
            total = {name: values[begin + size] - values[begin] for name, values in sums.items()}
            return budget.fits(BatchShape(size, longest, total))

        found[begin] = largest_within(fits, len(begin), most)
        begin = begin[(found[begin] == reach - 1) & (begin + reach - 1 < num)]
        reach *= 2
    return found


# Dynamic programming over the positions where batches may end: best[stop] = min over start of best[start] + price +
# work of the samples from start to stop. With several streams, work is not linear in the size, so all starts within the
# budget's reach are tried: every one if batches have up to 256 samples (exact), else 128 or more of them. O(N * 128).
def by_places(window: OrderedWindow, price: float) -> IntArray:
    """Returns the cut of least time if several streams are padded, or only some batch sizes are allowed."""
    places = _places(window.most) if window.allowed is None else np.arange(len(window) + 1)
    reach = np.searchsorted(places, places[:-1] + window.most[places[:-1]], side="right") - 1
    last = len(places) - 1
    starts = np.arange(1, last + 1) - np.searchsorted(
        reach, np.arange(1, last + 1)
    )  # how many starts reach each stop
    beyond = np.zeros(int(starts.max()))
    # All in reverse order: for each stream the largest work between neighbouring places; and `best`.
    parts = [
        np.append(np.maximum.reduceat(of, places[:-1])[::-1], beyond)
        for of in window.streams or (window.work,)
    ]
    behind, came_from = np.full(last + 1 + len(beyond), np.inf), [0]
    behind[last] = 0.0
    for first in range(0, last, TILE):
        counts = starts[first : first + TILE]
        stops, wide = np.arange(first + 1, first + 1 + len(counts)), int(counts.max())
        tiles = (
            sliding_window_view(of[last - stops[-1] : last - first - 1 + wide], wide)[::-1]
            for of in parts
        )
        work = np.sum([np.maximum.accumulate(tile, axis=1) for tile in tiles], axis=0)
        sizes = places[stops][:, None] - places[np.maximum(stops[:, None] - 1 - np.arange(wide), 0)]
        work = sizes * work + price
        work[np.arange(wide) >= counts[:, None]] = np.inf
        if window.allowed is not None:
            work[np.isin(sizes, window.allowed, invert=True)] = np.inf
        for here, row in zip(
            range(last - first - 1, last - first - 1 - len(work), -1), work, strict=True
        ):
            row += behind[here + 1 : here + 1 + wide]
            back = int(row.argmin())
            behind[here] = row[back]
            came_from.append(last - here - 1 - back)
    return places[offsets_of_path(came_from)]


def _places(most: IntArray) -> IntArray:
    """Returns positions where batches may start and end: all, or for large batches 1/128 of the largest size apart."""
    num = len(most)
    if most.max() < 2 * FINE:
        return np.arange(num + 1)
    places, reach = [0], np.maximum(most // FINE, 1).tolist()
    while places[-1] < num:
        places.append(places[-1] + reach[places[-1]])
    return np.asarray(places, np.int64)


# Convex hull trick with a monotone queue: best[stop] = min over start of best[start] + price + (stop - start) * work.
# As a function of `stop`, each start gives a straight line, which ends at the largest batch from this start. Lines of
# later starts are flatter and end later, so a later line that is below an earlier one stays below. The queue holds the
# lines that are lowest somewhere, each with the stop from which it is lower than the line before. O(N).
def by_queue(window: OrderedWindow, price: float) -> IntArray:
    """Returns the cut of exactly the least predicted time, for one padded stream."""
    num = len(window)
    work, after = (
        window.work.tolist(),
        (np.arange(1, num + 1) + window.most).tolist(),
    )  # first stop that is too far
    came_from, since = [0] * (num + 1), [0] * (num + 1)
    base, slope, limit = (
        price,
        work[0],
        after[0],
    )  # of the last line in the queue, which is lines[front : tail + 1]
    lines = [(0, base, slope, limit)] * (num + 1)
    best, best_base, best_slope = (
        0,
        base,
        slope,
    )  # the first line in the queue, the lowest at the current stop
    front, tail, upcoming = (
        0,
        0,
        num + 1,
    )  # upcoming: the stop at which the next line becomes the lowest
    for stop in range(1, num):
        if upcoming <= stop:
            front += 1
            while front < tail and since[front + 1] <= stop:
                front += 1
            best, best_base, best_slope, _ = lines[front]
            upcoming = since[front + 1] if front < tail else num + 1
        came_from[stop] = best
        flatter = work[stop]
        height = best_base + best_slope * stop + price - stop * flatter
        while True:
            ahead = limit
            if slope > flatter:
                meet = (height - base) / (slope - flatter)
                if meet < ahead - 1:
                    ahead = int(meet) + 1
            if tail == front or ahead > since[tail]:
                break
            tail -= 1
            _, base, slope, limit = lines[tail]
        tail += 1
        base, slope, limit = height, flatter, after[stop]
        lines[tail], since[tail] = (stop, base, slope, limit), ahead
        if tail == front + 1:
            upcoming = ahead
    while front < tail and since[front + 1] <= num:
        front += 1
    came_from[num] = lines[front][0]
    return offsets_of_path(came_from)


# Greedy: a batch ends where cutting saves as much padding as a new batch costs. The saving grows with every sample, so
# bisection finds the end, beginning with the size of the previous batch. The next batch gains little from another end
# because neighbours are similar, so the cut is nearly as good as the exact one. O(B log N).
def one_by_one(window: OrderedWindow, price: float) -> IntArray:
    """Returns a greedy cut for one padded stream: batch after batch, from the longest sample to the shortest."""
    num, sums = len(window), np.append(0.0, np.cumsum(window.work)).data
    work, most = window.work.data, window.most.data
    allowed = None if window.allowed is None else window.allowed.data
    offsets, start, size = [0], 0, 1
    while start < num:
        before, low, high, step = sums[start], 0, most[start], 1
        size = size if size < high else high - 1
        while high - low > 1:
            if sums[start + size] - before - size * work[start + size] >= price:
                high, near = size, size - step
            else:
                low, near = size, size + step
            size, step = near if low < near < high else (low + high) // 2, 2 * step
        size = high if allowed is None else allowed[bisect_right(allowed, high) - 1]
        start += size
        offsets.append(start)
    return np.asarray(offsets, np.int64)


def split_dearest(window: OrderedWindow, offsets: IntArray, number: int) -> IntArray:
    """Splits the most expensive batch, again and again, until there are ``number`` or allowed sizes divide none."""
    if len(offsets) > number:
        return offsets
    runs = zip(
        *(values.tolist() for values in (window.total(offsets), offsets[:-1], offsets[1:])),
        strict=True,
    )
    heap = [(-work, start, stop) for work, start, stop in runs if stop - start > 1]
    heapq.heapify(heap)
    inner: list[int] = []
    while len(offsets) - 1 + len(inner) < number and heap:
        _, start, stop = heapq.heappop(heap)
        middle = window.middle(start, stop)
        if middle is None:
            continue
        inner.append(middle)
        for first, last in ((start, middle), (middle, stop)):
            if last - first > 1:
                heapq.heappush(heap, (-float(window.work_of(first, last - first)), first, last))
    return np.sort(np.append(offsets, np.asarray(inner, np.int64)))
