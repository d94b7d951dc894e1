"""Packed batches: samples end to end under a cap, dealt so that the batches of a row are equal work."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import UNLIMITED, AdditiveCap, AllOf, Budget, padded_streams
from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.batches import Batches, RoundBatch, offsets_of, smaller_size
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams

__all__ = ["pack"]

WORTH = 1.02
"""Times the predicted time of the fewest rows: what one more may take that makes them equal work."""
EQUAL = 0.05
"""Of a row's mean work: what its batches may differ by."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LENGTHS = 97
"""Numbers of samples and quantiles of the lengths for which a budget is asked how many tokens a batch may have."""


def pack(
    lengths: Streams,
    budget: Budget,
    multiple: int = 1,
    *,
    work: Work = DEFAULT_WORK,
    round_batch: RoundBatch | None = None,
) -> Batches:
    """Divide one window of samples into packed batches that fit ``budget``: few rows of ``multiple`` batches, of equal work.

    A sample of more work than a batch's fair share sets the pace of its row whatever is done, so that row's other batches are
    filled up to it. O(N log N) and a few passes: 4,096 samples take some 10 ms where a budget only sums.

    Args:
        lengths: stream -> int32 (N,).
        budget: any monotone budget; a sample that does not fit even alone gets a batch of its own.
        multiple: batches a row, one for each rank.
        work: what samples cost.
        round_batch: batches are divided further into sizes that are values of this function.

    Returns:
        Positions into the window, in order of arrival inside a batch. Batches come dearest first; their number is a
        multiple of ``multiple`` wherever there are samples enough (and nothing is rounded).

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> batches = pack({"tokens": np.array([4, 6, 3, 7, 2, 8], np.int32)}, TokenBudget(10, layout="packed"))
    >>> [batch.tolist() for batch in batches]
    [[4, 5], [2, 3], [0, 1]]
    """
    if not len(lengths[TOKENS]):
        return Batches.concatenate([])
    costs = work.of_lengths({name: lengths[name] for name in padded_streams(budget, lengths)})
    bins = _Packing(lengths, budget, costs, multiple).rows(work.per_step)
    members = [np.sort(np.asarray(bin.members, np.int64)) for bin in bins]
    if round_batch is not None:
        members = [part for batch in members for part in _rounded_parts(batch, round_batch)]
        members.sort(key=lambda part: -float(costs[part].sum()))
    return Batches(np.concatenate(members), offsets_of(np.asarray([len(m) for m in members])))


def _rounded_parts(batch: IntArray, round_batch: RoundBatch) -> list[IntArray]:
    size = smaller_size(len(batch), round_batch)
    return [batch] if size == len(batch) else [batch[:size], *_rounded_parts(batch[size:], round_batch)]


class SumLimits(NamedTuple):
    """What a budget says about sums over the samples of a packed batch."""

    sums: list[tuple[IntArray, int]]
    """Units of each sample, and the most that a batch may sum to."""
    samples: int
    """Most samples of a batch."""
    asks: bool
    """Some part of the budget knows more than sums and must be asked."""


def sum_limits(budget: Budget, lengths: Streams) -> SumLimits:
    """The limits of a budget that are mere sums, for these samples.

    >>> budget = TokenBudget(100, max_samples=7, layout="packed") & AdditiveCap("patches", 9)
    >>> limits = sum_limits(budget, {"tokens": np.array([3, 4]), "patches": np.array([1, 0])})
    >>> [(units.tolist(), limit) for units, limit in limits.sums], limits.samples, limits.asks
    ([([3, 4], 100), ([1, 0], 9)], 7, False)
    """
    parts = budget.parts if type(budget) is AllOf else (budget,)
    capped = {part.stream for part in parts if isinstance(part, AdditiveCap)} if type(budget) is AllOf else set()
    sums: list[tuple[IntArray, int]] = []
    samples, asks = UNLIMITED, False
    for part in parts:
        if type(part) is TokenBudget and part.layout == "packed":
            names = part.names_in(name for name in lengths if part.streams or name not in capped)
            most = part.max_tokens - part.max_tokens % budget.pad_to_multiple_of
            sums.append((np.stack([lengths[name] for name in names]).sum(axis=0, dtype=np.int64), most))
            samples = min(samples, part.max_samples or UNLIMITED, part.max_tokens)
        elif type(part) is AdditiveCap:
            sums.append((lengths[part.stream].astype(np.int64), part.limit))
        else:  # a class of its own may say anything
            asks = True
    return SumLimits(sums, samples, asks)


class _Asked:
    """Most tokens of a batch by (samples, longest), by bisection of a budget for a grid at once. Monotone budgets fit a batch of
    fewer samples and a shorter longest than a cell's with the cell's tokens."""

    def __init__(self, budget: Budget, tokens: IntArray) -> None:
        self._counts = [n for n in COUNTS if n < len(tokens)] + [len(tokens)]
        spread = np.linspace(0, 1, LENGTHS)
        self._longest: list[int] = np.unique(np.quantile(tokens, spread, method="higher")).tolist()
        longest, counts = (grid.ravel() for grid in np.meshgrid(self._longest, self._counts, indexing="ij"))
        low, high = np.full(len(counts), -1), np.full(len(counts), int(tokens.sum(dtype=np.int64)) + 1)
        while (high - low > 1).any():
            middle = (low + high) // 2
            fits = budget.fits(BatchShape.of(counts, longest, np.maximum(middle, 0)))
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        self._most: list[list[int]] = low.reshape(len(self._longest), -1).tolist()

    def most(self, count: int, longest: int) -> int:
        """With at most so many tokens a batch of that many samples fits."""
        return self._most[bisect_left(self._longest, longest)][bisect_left(self._counts, count)]


@dataclass(slots=True)
class Bin:
    """A packed batch that is being filled."""

    load: float
    """Work it holds, plus what it was given beforehand so that others fill first."""
    room: int
    """A sample of more tokens does not fit."""
    members: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """What its samples sum to under each limit on a sum."""


class _Room:
    """Says what fits a bin that is filled longest sample first; bins hold what has been decided."""

    def __init__(self, lengths: Streams, budget: Budget) -> None:
        wide = {name: values.astype(np.int64) for name, values in lengths.items()}
        ones = np.ones(len(wide[TOKENS]), np.int64)
        self.alone = budget.fits(BatchShape(ones, wide, wide))  # first: it names a stream that is missing
        limits = sum_limits(budget, lengths)
        sums = limits.sums or [(wide[TOKENS], UNLIMITED)]
        self.tokens, self._sums = sums[0][0], [(units.tolist(), limit) for units, limit in sums]
        self._samples, self._budget, self._streams = limits.samples, budget, lengths
        self.only_sums = not limits.asks
        self._asked = _Asked(budget, self.tokens) if limits.asks and len(lengths) == 1 else None

    def fewest(self, samples: Sequence[int]) -> int:
        """No division of these samples can do with fewer batches, by the sums alone."""
        sums = [(len(samples), self._samples), *((sum(units[s] for s in samples), most) for units, most in self._sums)]
        return max(-(-total // max(limit, 1)) for total, limit in sums)  # a limit of 0 admits samples without tokens

    def bin(self, load: float = 0.0) -> Bin:
        return Bin(load, self._sums[0][1], used=[0] * len(self._sums))

    def admits(self, bin: Bin, sample: int) -> bool:
        """Whether a sample fits, which is no longer than those that the bin holds."""
        if not bin.members:
            return True
        if any(used + units[sample] > limit for used, (units, limit) in zip(bin.used, self._sums, strict=True)):
            return False
        if self.only_sums or self._asked is not None:
            return self._sums[0][0][sample] <= bin.room
        return self.together([*bin.members, sample])

    def add(self, bin: Bin, sample: int, cost: float) -> None:
        bin.members.append(sample)
        bin.load += cost
        bin.used = [used + units[sample] for used, (units, _) in zip(bin.used, self._sums, strict=True)]
        bin.room = self._sums[0][1] - bin.used[0]
        if len(bin.members) >= self._samples:
            bin.room = -1
        elif self._asked is not None:
            longest = self._sums[0][0][bin.members[0]]
            bin.room = min(bin.room, self._asked.most(len(bin.members) + 1, longest) - bin.used[0])

    def together(self, members: Sequence[int]) -> bool:
        """Whether these samples fit one batch."""
        few = {name: values[list(members)] for name, values in self._streams.items()}
        return bool(self._budget.fits(BatchShape.of_samples(few))[0])


class _Packing:
    """One window being packed into rows of ``multiple`` batches."""

    def __init__(self, lengths: Streams, budget: Budget, costs: NDArray[np.float64], multiple: int) -> None:
        self._room, self._costs, self._multiple = _Room(lengths, budget), costs, multiple
        self._list: list[float] = costs.tolist()
        order = np.argsort(-costs, kind="stable")
        self._order: list[int] = order[self._room.alone[order]].tolist()
        self._oversize: list[int] = order[~self._room.alone[order]].tolist()

    def rows(self, per_step: float) -> list[Bin]:
        """The fewest rows, dearest batches first; or one row more, where that makes rows equal work and is worth its time."""
        bins = self._dearest_first(self._fewest())
        if self._multiple == 1 or len(bins) % self._multiple or self._are_equal(bins):
            return bins
        more = self._balanced(len(bins) // self._multiple + 1)
        if more is None or len(more) % self._multiple:
            return bins
        more = self._dearest_first(more)
        before, after = (sum(bin.load + per_step for bin in found[:: self._multiple]) for found in (bins, more))
        return more if after <= (WORTH if self._are_equal(more) else 1.0) * before else bins

    def _fewest(self) -> list[Bin]:
        """The window in few rows, at most a hundredth more than best fit needs; every batch has a sample."""
        if self._room.only_sums:
            found = self._balanced(-(-(self._room.fewest(self._order) + len(self._oversize)) // self._multiple))
            if found is not None:
                return found
        bins = self._best_fit()
        rows = -(-(len(bins) + len(self._oversize)) // self._multiple)
        for more in dict.fromkeys((rows, rows + rows // 100)) if self._multiple > 1 else ():
            found = self._balanced(more)
            if found is not None:
                return found
        empty = self._num_bins(rows) - len(bins)
        return self._complete([*bins, *(self._room.bin() for _ in range(empty))])

    def _num_bins(self, rows: int) -> int:
        return min(rows * self._multiple, len(self._order) + len(self._oversize)) - len(self._oversize)

    def _balanced(self, rows: int) -> list[Bin] | None:
        """The window in exactly so many rows; None where that way the samples do not fit in."""
        count = self._num_bins(rows)
        if count < 1:
            return None if self._order else self._complete([])
        paces = _paces(np.sort(self._costs)[::-1], rows, self._multiple)
        bins = [self._room.bin(max(paces) - pace) for pace in paces for _ in range(self._multiple)][-count:]
        return self._complete(bins) if self._least_loaded(bins) else None

    def _complete(self, bins: list[Bin]) -> list[Bin]:
        """With the samples that fit nowhere; and no bin stays empty: the fullest give one of theirs."""
        givers = [(-len(bin.members), number) for number, bin in enumerate(bins) if bin.members]
        heapq.heapify(givers)
        for bin in [bin for bin in bins if not bin.members]:
            size, number = heapq.heappop(givers)
            if size == -1:
                break
            bin.members = [bins[number].members.pop()]
            heapq.heappush(givers, (size + 1, number))
        return [*(Bin(0.0, -1, [s]) for s in self._oversize), *(bin for bin in bins if bin.members)]

    # List scheduling, longest processing time first (LPT), under a cap. Bins with too little room for a sample wait in a heap,
    # ordered by their room, for one that is small enough: a bin waits at most once for each sample it holds. O(N log N).
    def _least_loaded(self, bins: list[Bin]) -> bool:
        """Each sample, dearest first, to the bin of least load that it fits; False as soon as one fits none."""
        room, sizes = self._room, self._room.tokens.tolist()
        open_ = [(bin.load, number) for number, bin in enumerate(bins)]
        heapq.heapify(open_)
        waiting: list[tuple[int, int]] = []
        for sample in self._order:
            while waiting and -waiting[0][0] >= sizes[sample]:
                number = heapq.heappop(waiting)[1]
                heapq.heappush(open_, (bins[number].load, number))
            refused: list[tuple[float, int]] = []
            while open_ and not room.admits(bins[open_[0][1]], sample):
                entry = heapq.heappop(open_)
                if bins[entry[1]].room < sizes[sample]:
                    heapq.heappush(waiting, (-bins[entry[1]].room, entry[1]))
                else:
                    refused.append(entry)
            if not open_:
                return False
            number = open_[0][1]
            room.add(bins[number], sample, self._list[sample])
            heapq.heapreplace(open_, (bins[number].load, number))
            for entry in refused:
                heapq.heappush(open_, entry)
        return True

    def _best_fit(self) -> list[Bin]:
        """Best fit decreasing: each sample to the bin with least room that it fits, or to a new one."""
        room, bins, by_room = self._room, [], []
        for sample in self._order:
            place = bisect_left(by_room, (int(room.tokens[sample]), -1))
            while place < len(by_room) and not room.admits(bins[by_room[place][1]], sample):
                place += 1
            if place == len(by_room):
                bins.append(room.bin())
                by_room.append((0, len(bins) - 1))
            number = by_room.pop(place)[1]
            room.add(bins[number], sample, self._list[sample])
            insort(by_room, (bins[number].room, number))
        return bins

    def _dearest_first(self, bins: list[Bin]) -> list[Bin]:
        """Rows of ``multiple`` bins of like work, one after another."""
        for bin in bins:
            bin.load = float(self._costs[bin.members].sum())
        return sorted(bins, key=lambda bin: -bin.load)

    def _are_equal(self, bins: Sequence[Bin]) -> bool:
        """Whether the batches of each row are equal work, or some single sample is more work than their mean."""
        rows = np.asarray([bin.load for bin in bins]).reshape(-1, self._multiple)
        longest = np.asarray([self._costs[bin.members].max() for bin in bins]).reshape(rows.shape).max(axis=1)
        mean = rows.mean(axis=1)
        return bool(((rows[:, 0] - rows[:, -1] <= EQUAL * mean) | (longest > mean)).all())


def _paces(dearest: NDArray[np.float64], rows: int, multiple: int) -> list[float]:
    """Work that a batch of each row should hold: as long as one sample is more than the rest's mean, it sets a row's pace.

    >>> _paces(np.array([9.0, 1.0, 1.0, 1.0]), 2, 2)
    [9.0, 1.0]
    """
    rest, paces = float(dearest.sum()), []
    for row in range(rows):
        mean, first = rest / ((rows - row) * multiple), row * multiple
        pace = max(mean, float(dearest[first]) if first < len(dearest) else 0.0)
        paces.append(pace)
        if pace == mean:
            return [*paces, *[mean] * (rows - row - 1)]
        rest = max(rest - pace * multiple, 0.0)
    return paces
