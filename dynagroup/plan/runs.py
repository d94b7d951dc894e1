"""Cut an ordered window into runs: fewest, or least in predicted time. Pure arithmetic on positions.

A division into runs is its offsets: int64 (B + 1,), from 0 to the number of samples.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.rounding import RoundBatch, allowed_sizes
from dynagroup.shapes import IntArray

__all__ = [
    "TINY",
    "OrderedWindow",
    "SortedWindow",
    "by_queue",
    "by_rows",
    "by_sizes",
    "fewest",
    "offsets_of_path",
    "one_by_one",
    "split_dearest",
    "under_one_limit",
]

EXACT_UP_TO = 1 << 16
"""Samples; beyond them neighbours are so alike that a batch can be chosen by itself, in a tenth of the time and memory."""

TINY = 1e-9
"""Stands for the work of an empty sample, which any batch may hold."""
LIMITS = 32
"""Limits of the work of a row's batches that are tried."""
PRICES = (1.0, 4.0, 16.0)
"""Times the price of a step, with which rows are chosen."""
TABLE = 1 << 17
"""Entries of a table of starts by limits; in windows that would need more, fewer limits are tried."""


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
    def fewest_under(self, work: float) -> IntArray:
        """The fewest runs none of which is more work than this, unless it is a single sample."""

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
        return self.work_of(offsets[:-1], np.diff(offsets))


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

    def least_time(self, per_step: float) -> IntArray:
        """Exact up to 65,536 samples."""
        if len(self) > EXACT_UP_TO:
            return one_by_one(self, per_step)
        return by_queue(self, per_step) if self.allowed is None else by_sizes(self, per_step)

    def fewest_under(self, work: float) -> IntArray:
        by_work = np.minimum(work / np.maximum(self.work, TINY), len(self)).astype(np.int64)
        return fewest(replace(self, most=np.maximum(np.minimum(self.most, by_work), 1)))

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
    heap = [(-work, start, stop) for work, start, stop in zip(window.total(offsets).tolist(), offsets[:-1].tolist(),
                                                             offsets[1:].tolist(), strict=True) if stop - start > 1]  # fmt: skip
    heapq.heapify(heap)
    inner: list[int] = []
    while len(offsets) - 1 + len(inner) < number and heap:
        _, start, stop = heapq.heappop(heap)
        middle = _middle(window, start, stop)
        if middle is None:
            continue
        inner.append(middle)
        for first, last in ((start, middle), (middle, stop)):
            if last - first > 1:
                heapq.heappush(heap, (-float(window.work_of(first, last - first)), first, last))
    return np.sort(np.append(offsets, np.asarray(inner, np.int64)))


def _middle(window: OrderedWindow, start: int, stop: int) -> int | None:
    """Where to split a run so that the dearer part is least work; None where no allowed sizes make it up."""
    first = np.arange(1, stop - start)
    if window.allowed is not None:
        first = first[np.isin(first, window.allowed) & np.isin(stop - start - first, window.allowed)]
        if not len(first):
            return None
    dearer = np.maximum(window.work_of(start, first), window.work_of(start + first, stop - start - first))
    return start + int(first[np.argmin(dearer)])


def under_one_limit(window: OrderedWindow, most_runs: int, high: float = np.inf) -> IntArray | None:
    """At most so many runs, none of more work than the others can be brought under, by bisection; None where that is too few.

    ``high``: work that they can all be brought under for certain.
    """
    low, high = float(window.work.sum()) / most_runs, min(high, window.largest)
    best = fewest(window)
    if len(best) - 1 > most_runs:
        return None
    while low < high * (1 - 1 / 256):
        middle = (low + high) / 2
        tried = window.fewest_under(middle)
        if len(tried) - 1 <= most_runs:
            best, high = tried, middle
        else:
            low = middle
    return best


def by_rows(window: SortedWindow, num_ranks: int, per_step: float) -> list[IntArray]:
    """Cuts of least time on several ranks, where a row of ``num_ranks`` runs costs its price and its dearest run.

    Under a limit of work a row from any start on is greedy: each run as large as the limit allows. Where it ends, for all
    starts and limits at once, comes from doubling: two runs further is one run further, twice. Dynamic programming over
    the starts of rows then picks each row's limit; at last each is lowered until the row just ends where it did.
    O(N * limits * log ranks) time, O(N * limits) memory. The limits are few, and the times of more rows and of fewer alike:
    so higher prices are tried, too, which take fewer rows.
    """
    num = len(window)
    if num <= num_ranks:
        return [np.arange(num + 1)]
    limits = _limits(window, num_ranks, per_step)
    ends, dearest = _row_ends(window, num_ranks, limits)
    found = {}
    for rows in _best_rows(ends, dearest, num_ranks, per_step * np.asarray(PRICES)):
        lows = [limits[which - 1] if which else 0.0 for *_, which in rows]
        if rows and len(rows) not in found:
            found[len(rows)] = [_tight_row(window, start, stop, num_ranks, low, float(limits[which]))
                                for (start, stop, which), low in zip(rows, lows, strict=True)]  # fmt: skip
    return [np.concatenate([[0], *rows]) for rows in found.values()]


def _limits(window: SortedWindow, num_ranks: int, per_step: float) -> NDArray[np.float64]:
    """Limits to try: from far below the price of a step, where rows no longer pay, to what a single row would need."""
    mean = float(window.work.sum()) / num_ranks
    high = min(float((window.most * window.work).max()), 2 * mean + float(window.work[0]))
    low = max(min(per_step / 8, mean), float(window.work[-1]), high / 1e6)
    count = int(np.clip(TABLE // len(window), 12, LIMITS))
    return low * (high / low) ** np.linspace(0.0, 1.0, count) if TINY < low < high else np.asarray([high])


def _row_ends(
    window: SortedWindow, num_ranks: int, limits: NDArray[np.float64]
) -> tuple[IntArray, NDArray[np.float64]]:
    """Where a row ends and what its dearest run is, for each start and limit: (N + 1, limits)."""
    num, wide = len(window), len(limits)
    by_work = np.minimum(limits / np.maximum(window.work, TINY)[:, None], num).astype(np.int64)
    sizes = window.rounded(np.clip(by_work, 1, window.most[:, None]))
    step = np.empty((num + 1, wide), np.int64)  # flat places in the table: start * wide + limit
    step[:num] = (np.arange(num)[:, None] + sizes) * wide
    step[num] = num * wide
    step += np.arange(wide)
    step_work = np.zeros((num + 1, wide))
    step_work[:num] = sizes * window.work[:, None]
    step, step_work = step.ravel(), step_work.ravel()
    ends, dearest = np.arange(len(step)), np.zeros(len(step))
    left = num_ranks
    while left:
        if left & 1:
            dearest = np.maximum(dearest, step_work[ends])
            ends = step[ends]
        left >>= 1
        if left:
            step_work = np.maximum(step_work, step_work[step])
            step = step[step]
    return ends.reshape(num + 1, wide) // wide, dearest.reshape(num + 1, wide)


def _best_rows(
    ends: IntArray, dearest: NDArray[np.float64], num_ranks: int, prices: NDArray[np.float64]
) -> Iterator[list[tuple[int, int, int]]]:
    """Rows (start, stop, limit) of least time at each price. A row takes at least a sample a rank, so so many starts are done
    at once."""
    num = len(ends) - 1
    best = np.full((num + 1, len(prices)), np.inf)
    best[num] = 0.0
    choice = np.zeros((num + 1, len(prices)), np.int64)
    for last in range(num - num_ranks, -1, -num_ranks):
        block = slice(max(last - num_ranks + 1, 0), last + 1)
        time = dearest[block, :, None] + best[ends[block]]
        choice[block] = time.argmin(axis=1)
        best[block] = prices + time.min(axis=1)
    for price in range(len(prices)):
        rows, start = [], 0
        while start < num and np.isfinite(best[0, price]):
            which = int(choice[start, price])
            rows.append((start, int(ends[start, which]), which))
            start = rows[-1][1]
        yield rows


def _tight_row(window: SortedWindow, start: int, stop: int, num_ranks: int, low: float, high: float) -> list[int]:
    """Ends of a row's runs under about the lowest limit, between two, that still brings it to ``stop``."""
    best = _greedy_row(window, start, stop, num_ranks, high)
    low = max(low, float(window.work[start:stop].sum()) / num_ranks)
    while low < high * (1 - 1 / 256):
        middle = (low + high) / 2
        tried = _greedy_row(window, start, stop, num_ranks, middle)
        if tried[-1] == stop:
            best, high = tried, middle
        else:
            low = middle
    return best


def _greedy_row(window: SortedWindow, start: int, stop: int, num_ranks: int, limit: float) -> list[int]:
    work, most = window.work.data, window.most.data
    ends: list[int] = []
    for _ in range(num_ranks):
        size = max(1, min(most[start], int(limit / max(work[start], TINY))))
        if window.allowed is not None:
            size = int(window.allowed[np.searchsorted(window.allowed, size, side="right") - 1])
        start = min(start + size, stop)
        ends.append(start)
        if start == stop:
            break
    return ends
