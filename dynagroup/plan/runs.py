"""Cut an ordered window into runs: fewest, or least in predicted time. Pure arithmetic on positions.

A division into runs is its offsets: int64 (B + 1,), from 0 to the number of samples.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.rounding import RoundBatch, allowed_sizes
from dynagroup.shapes import IntArray

__all__ = [
    "TINY",
    "Greedy",
    "OrderedWindow",
    "SortedWindow",
    "by_queue",
    "by_sizes",
    "fewest",
    "offsets_of_path",
    "one_by_one",
    "split_dearest",
]

EXACT_UP_TO = 1 << 16
"""Samples; beyond them neighbours are so alike that a batch can be chosen by itself, in a tenth of the time and memory."""

TINY = 1e-9
"""Stands for the work of an empty sample, which any batch may hold."""


class Greedy(Protocol):
    """From a start on: runs as large as a limit of work allows, a single sample at least, until a stop or so many runs."""

    def __call__(self, limit: float, most_runs: int, start: int = 0, stop: int = ..., /) -> list[int]:
        """The offsets, ``start`` among them; their last is ``stop`` where it was reached."""
        ...


@dataclass(frozen=True, slots=True)
class OrderedWindow(ABC):
    """What cutting needs to know of a window in the order in which it is cut. A run becomes no less work with a sample more."""

    work: NDArray[np.float64]
    """Work of the sample at each position by itself: float64 (N,)."""
    most: IntArray
    """Samples that a batch which starts at a position may have: int64 (N,), at least 1 and at most what is left."""
    allowed: IntArray | None = None
    """Batch sizes to choose from, growing, 1 among them; None: any."""

    def __len__(self) -> int:
        return len(self.work)

    @abstractmethod
    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray[np.float64]:
        """Work of the runs of so many samples from these positions on."""

    @abstractmethod
    def greedy(self) -> Greedy:
        """Cuts from the first sample on, each run as large as a limit of its work allows."""

    @abstractmethod
    def least_time(self, per_step: float) -> IntArray:
        """The runs of least total work plus ``per_step`` each."""

    @property
    @abstractmethod
    def heaviest(self) -> float:
        """No sample of any run is more work than this."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """Work of the dearest run that a budget allows."""

    def rounded(self, most: IntArray) -> IntArray:
        """The largest allowed sizes up to these."""
        if self.allowed is None:
            return most
        return self.allowed[np.searchsorted(self.allowed, most, side="right") - 1]

    def total(self, offsets: IntArray) -> NDArray[np.float64]:
        """Work of each run."""
        return self.work_of(offsets[:-1], offsets[1:] - offsets[:-1])

    def middle(self, start: int, stop: int) -> int | None:
        """Where to split a run so that the dearer part is least work; None where no allowed sizes make it up."""
        first = np.arange(1, stop - start)
        if self.allowed is not None:
            first = first[np.isin(first, self.allowed) & np.isin(stop - start - first, self.allowed)]
            if not len(first):
                return None
        dearer = np.maximum(self.work_of(start, first), self.work_of(start + first, stop - start - first))
        return start + int(first[np.argmin(dearer)])


@dataclass(frozen=True, slots=True)
class SortedWindow(OrderedWindow):
    """A window of one padded stream, longest sample first: ``work`` falls, and the first of a run says what each is padded to."""

    @property
    def heaviest(self) -> float:
        return float(self.work[0])

    @property
    def largest(self) -> float:
        return float((self.most * self.work).max())

    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray[np.float64]:
        return sizes * self.work[starts]

    def middle(self, start: int, stop: int) -> int | None:
        """The same by bisection: the front part's work grows with each sample, the other's falls."""
        if self.allowed is not None:
            return OrderedWindow.middle(self, start, stop)
        work, each = self.work.data, self.work.data[start]
        low, high = start, stop - 1  # the front part is less work than the other at low, and not at high
        while high - low > 1:
            place = (low + high) // 2
            low, high = (place, high) if (place - start) * each < (stop - place) * work[place] else (low, place)
        if low > start and (stop - low) * work[low] <= (high - start) * each:
            return low
        return high

    def least_time(self, per_step: float) -> IntArray:
        """Exact up to 65,536 samples."""
        if len(self) > EXACT_UP_TO:
            return one_by_one(self, per_step)
        return by_queue(self, per_step) if self.allowed is None else by_sizes(self, per_step)

    def greedy(self) -> Greedy:
        works, most = np.maximum(self.work, TINY).tolist(), self.most.tolist()
        allowed = None if self.allowed is None else self.allowed.tolist()

        def runs(limit: float, most_runs: int, start: int = 0, stop: int = len(self)) -> list[int]:
            offsets = [start]
            for _ in range(most_runs):
                size = max(min(int(limit / works[start]), most[start]), 1)
                if allowed is not None:
                    size = allowed[bisect_right(allowed, size) - 1]
                start = min(start + size, stop)
                offsets.append(start)
                if start == stop:
                    break
            return offsets

        return runs

    @classmethod
    def of(cls, work: NDArray[np.float64], most: IntArray, round_batch: RoundBatch | None) -> SortedWindow:
        allowed = None if round_batch is None else allowed_sizes(int(most.max(initial=1)), round_batch)
        return cls(work, most, allowed)


def fewest(window: OrderedWindow) -> IntArray:
    """The fewest runs: each, from the first sample on, as large as it may be.

    No other cut can be ahead of it after any number of runs, because what starts later reaches at least as far.
    """
    reach = (np.arange(len(window)) + window.rounded(window.most)).data
    offsets, start = [0], 0
    while start < len(window):
        start = reach[start]
        offsets.append(start)
    return np.asarray(offsets, np.int64)


def by_queue(window: SortedWindow, per_step: float) -> IntArray:
    """Least time by dynamic programming: ``best[stop] = min over start of best[start] + per_step + (stop - start) * work``.

    Every start is a straight line in ``stop``, from its own place to its reach. Later lines are flatter and reach further:
    a later line that has overtaken an earlier one stays ahead. So the lines that will still be best somewhere form a
    queue, each with the stop from which it is ahead of the one before; a line that would be overtaken before it gets
    ahead is dropped for good. Every line enters and leaves once: O(N) time, O(N) memory.
    """
    num = len(window)
    work, after = window.work.tolist(), (np.arange(1, num + 1) + window.most).tolist()  # first stop out of reach
    came_from, since = [0] * (num + 1), [0] * (num + 1)
    base, slope, limit = per_step, work[0], after[0]  # of the last line; the queue is lines[front : tail + 1]
    lines = [(0, base, slope, limit)] * (num + 1)
    best, best_base, best_slope = 0, base, slope  # the line in front, which is best now
    front, tail, upcoming = 0, 0, num + 1  # upcoming: where the next one overtakes it
    for stop in range(1, num):
        if upcoming <= stop:
            front += 1
            while front < tail and since[front + 1] <= stop:
                front += 1
            best, best_base, best_slope, _ = lines[front]
            upcoming = since[front + 1] if front < tail else num + 1
        came_from[stop] = best
        flatter = work[stop]
        height = best_base + best_slope * stop + per_step - stop * flatter
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


def by_sizes(window: OrderedWindow, per_step: float) -> IntArray:
    """The least time over the allowed sizes only: O(N * sizes) time, O(N) memory."""
    assert window.allowed is not None
    num = len(window)
    counts = np.searchsorted(window.allowed, window.most, side="right").tolist()
    best = np.full(num + 1, np.inf)
    best[0] = 0.0
    came_from = np.zeros(num + 1, np.int64)
    for start in range(num):
        sizes = window.allowed[: counts[start]]
        cost = best[start] + per_step + window.work_of(start, sizes)
        stops = start + sizes
        better = cost < best[stops]
        best[stops[better]] = cost[better]
        came_from[stops[better]] = start
    return offsets_of_path(came_from.tolist())


def offsets_of_path(came_from: list[int]) -> IntArray:
    """Offsets from where each stop was come from."""
    offsets = [len(came_from) - 1]
    while offsets[-1] > 0:
        offsets.append(came_from[offsets[-1]])
    return np.asarray(offsets[::-1], np.int64)


def one_by_one(window: SortedWindow, per_step: float) -> IntArray:
    """Each run, from the longest sample on, as large as makes its price and padding a sample least.

    A run should end where what its samples are padded down to the next sample's length has paid for a new run; that
    grows with every sample, so it is found from the size of the run before, by doubling steps and bisection. In a window
    of alike neighbours the next run can do no better than its own least, which makes this as good as the exact cut:
    O(B log N) time.
    """
    sums = np.append(0.0, np.cumsum(window.work)).data
    work, most, num = window.work.data, window.most.data, len(window)
    sizes = None if window.allowed is None else window.allowed

    def has_paid(start: int, size: int) -> bool:
        return sums[start + size] - sums[start] - size * work[start + size] >= per_step

    offsets, start, size = [0], 0, 1
    while start < num:
        limit = min(most[start], num - start - 1)
        low, high = _bracket(has_paid, start, min(size, limit + 1), limit)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if has_paid(start, middle) else (middle, high)
        size = min(max(high, 1), most[start])
        if sizes is not None:
            size = int(sizes[np.searchsorted(sizes, size, side="right") - 1])
        start += size
        offsets.append(start)
    return np.asarray(offsets, np.int64)


def _bracket(has_paid: Callable[[int, int], bool], start: int, guess: int, limit: int) -> tuple[int, int]:
    """Sizes (low, high) around the least that has paid: low has not, high has or is past the limit. Close to a good guess."""
    step = 1
    if guess > limit or has_paid(start, guess):
        low, high = guess - 1, guess
        while low > 0 and has_paid(start, low):
            low, high, step = low - 2 * step, low, 2 * step
        return max(low, 0), high
    low, high = guess, guess + 1
    while high <= limit and not has_paid(start, high):
        low, high, step = high, high + 2 * step, 2 * step
    return low, min(high, limit + 1)


def split_dearest(window: OrderedWindow, offsets: IntArray, number: int) -> IntArray:
    """The runs, the dearest of them split until there are ``number``, or only single samples.

    Nothing is dropped or repeated, and a part of a run that fits also fits. Parts have allowed sizes.
    """
    if len(offsets) - 1 >= number:
        return offsets
    heap = [(-work, start, stop) for work, start, stop in zip(window.total(offsets).tolist(), offsets[:-1].tolist(),
                                                             offsets[1:].tolist(), strict=True) if stop - start > 1]  # fmt: skip
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
