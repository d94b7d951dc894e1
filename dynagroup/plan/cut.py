"""Cut a window of samples into batches that fit.

Because a budget is monotone, the longest prefix of a sorted window that fits is found by looking at prefixes alone. One
kernel serves planning a million known lengths and re-cutting one window inside a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, round_up

__all__ = ["Batches", "Method", "RoundBatch", "cut", "friendly_size", "multiple_of", "shapes_of", "smaller_size"]

Method: TypeAlias = Literal["greedy", "optimal"]
RoundBatch: TypeAlias = Callable[[int], int]
Caps: TypeAlias = Callable[[int], int]

BLOCK = 4096  # starts whose longest fitting runs are searched together
MAX_OPEN = 256  # open batches that first-fit looks at; more finds hardly better places and costs time per sample


class Batches(Sequence[IntArray]):
    """A division of samples into batches, stored flat.

    Args:
        order: int64 (N,), positions of the samples, batch after batch.
        offsets: int64 (B + 1,), where each batch starts in ``order``; the last entry is N.

    >>> [batch.tolist() for batch in Batches(np.array([4, 2, 7]), np.array([0, 1, 3]))]
    [[4], [2, 7]]
    """

    __slots__ = ("offsets", "order")

    def __init__(self, order: IntArray, offsets: IntArray) -> None:
        self.order = order
        self.offsets = offsets

    @classmethod
    def concatenate(cls, parts: Sequence[Batches]) -> Batches:
        """The batches of all parts, one after another."""
        if not parts:
            return cls(np.zeros(0, np.int64), np.zeros(1, np.int64))
        sizes = np.concatenate([p.sizes for p in parts])
        return cls(np.concatenate([p.order for p in parts]), _offsets(sizes))

    @property
    def sizes(self) -> IntArray:
        """Samples in each batch: int64 (B,)."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> IntArray: ...
    @overload
    def __getitem__(self, index: slice) -> list[IntArray]: ...
    def __getitem__(self, index: int | slice) -> IntArray | list[IntArray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        bounds = self.offsets.tolist()
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            yield self.order[start:stop]

    def take(self, chosen: IntArray) -> Batches:
        """These batches, in this order."""
        sizes = self.sizes[chosen]
        offsets = _offsets(sizes)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return Batches(self.order[np.repeat(self.offsets[:-1][chosen], sizes) + within], offsets)

    def map(self, index_of: IntArray) -> Batches:
        """The same batches with every position ``p`` replaced by ``index_of[p]``."""
        return Batches(index_of[self.order], self.offsets)


def multiple_of(number: int) -> RoundBatch:
    """Round batch sizes down to a multiple of ``number``; a batch smaller than it stays as it is.

    >>> [multiple_of(8)(n) for n in (5, 8, 23)]
    [5, 8, 16]
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"`number` of multiple_of must be an int of at least 1, but is {number!r}")
    return _MultipleOf(number)


class _MultipleOf:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, size: int) -> int:
        return size - size % self.number or size

    def __repr__(self) -> str:
        return f"multiple_of({self.number})"


def friendly_size(size: int) -> int:
    """The largest ``2**n`` or ``3 * 2**n`` that is at most ``size``: few different shapes, well-filled tiles.

    >>> [friendly_size(n) for n in (1, 5, 7, 11, 100)]
    [1, 4, 6, 8, 96]
    """
    power = 1 << (size.bit_length() - 1)
    return power + power // 2 if power > 1 and size >= power + power // 2 else power


def smaller_size(size: int, round_batch: RoundBatch | None) -> int:
    """The largest batch size up to ``size`` that ``round_batch`` produces; ``size`` itself where there is none."""
    if round_batch is None:
        return size
    for candidate in range(size, 0, -1):
        rounded = round_batch(candidate)
        if isinstance(rounded, bool) or not isinstance(rounded, (int, np.integer)) or rounded < 1:
            raise ConfigError(
                f"`round_batch` must return an int of at least 1, but returned {rounded!r} for {candidate}"
            )
        if rounded <= size:
            return int(rounded)
    return size


def shapes_of(batches: Batches, lengths: Streams) -> BatchShape:
    """The true shape of every batch. ``lengths`` are indexed by the positions that ``batches`` hold."""
    if not len(batches.order):
        none = np.zeros(0, np.int64)
        return BatchShape(none, dict.fromkeys(lengths, none), dict.fromkeys(lengths, none))
    starts = batches.offsets[:-1]
    longest, total = {}, {}
    for name, values in lengths.items():
        ordered = values[batches.order]
        longest[name] = np.maximum.reduceat(ordered, starts).astype(np.int64)
        total[name] = np.add.reduceat(ordered, starts, dtype=np.int64)
    return BatchShape(batches.sizes, longest, total)


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
    order = longest_first(lengths)
    if budget.layout == "packed":
        return _first_fit(lengths, order, budget, round_batch)
    ordered = {name: values[order] for name, values in lengths.items()}
    most = _most_by_start(ordered, budget, round_batch)
    if method == "greedy":
        return Batches(order, _greedy(len(order), most))
    padded = round_up(ordered[TOKENS].astype(np.int64), budget.pad_to_multiple_of)
    if charge is None and round_batch is None:
        return Batches(order, _fewest_then_least(padded, most))
    return Batches(order, _optimal(padded, most, round_batch, charge))


def longest_first(lengths: Streams) -> IntArray:
    """Positions sorted by tokens, longest first, then by the other streams; ties keep their order."""
    if len(lengths) > 1:
        others = [-values for name, values in lengths.items() if name != TOKENS]
        return np.lexsort([*others[::-1], -lengths[TOKENS]])
    tokens = lengths[TOKENS]
    falling = tokens.max() - tokens
    if falling.max(initial=0) < 1 << 16:
        falling = falling.astype(np.uint16)  # numpy sorts 16-bit keys by radix, ten times faster
    return np.argsort(falling, kind="stable")


def _offsets(sizes: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


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
    table = budget.largest(tokens[runs].astype(np.int64))
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
        self._sums = {name: _offsets(values[start:stop].astype(np.int64)) for name, values in ordered.items()}

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


def _first_fit(lengths: Streams, order: IntArray, budget: Budget, round_batch: RoundBatch | None) -> Batches:
    bins = _Bins(lengths, budget)
    for position in order.tolist():
        bins.place(position)
    batches = [np.sort(np.asarray(members)) for members in bins.members]
    if round_batch is not None:
        batches = [part for batch in batches for part in _rounded_parts(batch, round_batch)]
    batches.sort(key=lambda batch: int(batch[0]))
    return Batches(np.concatenate(batches), _offsets(np.asarray([len(b) for b in batches])))


def _rounded_parts(batch: IntArray, round_batch: RoundBatch) -> list[IntArray]:
    size = smaller_size(len(batch), round_batch)
    return [batch] if size == len(batch) else [batch[:size], *_rounded_parts(batch[size:], round_batch)]


class _Bins:
    """Packed batches being filled; the ``MAX_OPEN`` youngest are open."""

    def __init__(self, lengths: Streams, budget: Budget) -> None:
        self.members: list[list[int]] = []
        self._lengths = {name: values.astype(np.int64) for name, values in lengths.items()}
        self._budget = budget
        self._count = np.zeros(0, np.int64)
        self._longest = {name: np.zeros(0, np.int64) for name in lengths}
        self._total = {name: np.zeros(0, np.int64) for name in lengths}

    def place(self, position: int) -> None:
        sample = {name: values[position] for name, values in self._lengths.items()}
        slot = self._first_that_fits(sample)
        if slot is None:
            slot = self._open()
            self.members.append([])
        self.members[len(self.members) - len(self._count) + slot].append(position)
        self._count[slot] += 1
        for name, units in sample.items():
            self._longest[name][slot] = max(self._longest[name][slot], units)
            self._total[name][slot] += units

    def _first_that_fits(self, sample: dict[str, np.int64]) -> int | None:
        if not len(self._count):
            return None
        shape = BatchShape(
            self._count + 1,
            {name: np.maximum(values, sample[name]) for name, values in self._longest.items()},
            {name: values + sample[name] for name, values in self._total.items()},
        )
        fits = self._budget.fits(shape)
        first = int(np.argmax(fits))
        return first if fits[first] else None

    def _open(self) -> int:
        keep = slice(1, None) if len(self._count) == MAX_OPEN else slice(None)
        self._count = np.append(self._count[keep], 0)
        for table in (self._longest, self._total):
            for name in table:
                table[name] = np.append(table[name][keep], 0)
        return len(self._count) - 1
