"""Forms packed batches (samples end to end, without padding) within limits, with equal work for all ranks."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import UNLIMITED, AdditiveCap, AllOf, Budget, padded_streams
from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.batches import Batches, tokens_of
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import BatchShape, IntArray, Streams, primary

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FULL = 0.99
"""Batches that are fuller on average are of equal work only if their samples happen to allow it."""
NUM_LENGTHS = 97
"""A budget is asked about so many lengths, with each number of samples in ``COUNTS``."""


def pack(
    lengths: Streams,
    rules: CutRules,
    num_ranks: int = 1,
    *,
    costs: NDArray[np.float64] | None = None,
) -> Batches:
    """Divides a window into packed batches that fit: few steps, of batches with equal work.

    A sample with more work than an equal part sets the time of its step anyway, so other batches may have as much work.
    An oversize sample is a batch of its own. ``costs``: of each sample, to be equal instead of the work.

    Returns positions in the window, sorted within a batch; the most expensive batches first. Their number is a multiple
    of ``num_ranks`` if there are enough samples.
    """
    if not len(lengths[primary(lengths)]):
        return Batches.concatenate([])
    if costs is None:
        costs = rules.work_of_samples(lengths)
    parts = PackedWindow(lengths, rules, costs, num_ranks).batches()
    members = [np.sort(np.asarray(part, np.int64)) for part in parts]
    members.sort(key=lambda part: -float(costs[part].sum()))
    return Batches.of(members)


@dataclass(slots=True)
class Bin:
    """A batch that is being filled with items (samples)."""

    load: float  # cost of its items, plus a start value that lets other batches be filled first
    room: float  # size of the largest item that may still fit
    slots: int  # number of items that it may still get
    size: float = 0  # sum of the sizes of its items
    longest: int = 0  # length of its longest item
    sums: list[float] = field(default_factory=list)  # over its items, for each further limit
    members: list[int] = field(default_factory=list)


class Limits:
    """The limits of a batch of items (samples).

    Args:
        sizes: of each item.
        most: largest sum of the sizes in a batch.
        slots: int, most items of a batch.
        sums: further pairs: units of each item, and the largest sum of these units in a batch.
        largest_sum: function from a number of items and the longest length to the largest sum of sizes; None: no
            such limit.
        lengths: of each item, for this function.
    """

    def __init__(
        self,
        sizes: NDArray,
        most: float,
        slots: int = UNLIMITED,
        sums: Sequence[tuple[NDArray, float]] = (),
        largest_sum: Callable[[int, int], float] | None = None,
        lengths: IntArray | None = None,
    ) -> None:
        self.sizes = sizes.tolist()
        self._most = most
        self._slots = slots
        self._sums = [(units.tolist(), limit) for units, limit in sums]
        self._largest_sum = largest_sum
        self._lengths = [] if lengths is None else lengths.tolist()

    def bin(self, load: float = 0.0, slots: int | None = None) -> Bin:
        """Returns an empty batch, of at most ``slots`` items."""
        slots = self._slots if slots is None else slots
        room = self._most if slots else -1
        return Bin(load, room, slots, sums=[0] * len(self._sums))

    def admits(self, bin: Bin, item: int) -> bool:
        """Returns whether an item, which fits an empty batch, also fits this one."""
        if not bin.members:
            return bin.slots > 0
        size = self.sizes[item]
        if bin.room < size:
            return False
        for total, (units, limit) in zip(bin.sums, self._sums, strict=True):
            if total + units[item] > limit:
                return False
        if self._largest_sum is None or self._lengths[item] <= bin.longest:
            return True  # `bin.room` already is what the longest item so far leaves
        largest = self._largest_sum(len(bin.members) + 1, self._lengths[item])
        return bin.size + size <= largest

    def add(self, bin: Bin, item: int, cost: float) -> None:
        bin.members.append(item)
        bin.load += cost
        bin.slots -= 1
        bin.size += self.sizes[item]
        bin.room = self._most - bin.size if bin.slots else -1
        for place, (units, _) in enumerate(self._sums):
            bin.sums[place] += units[item]
        if self._largest_sum is not None and bin.slots:
            bin.longest = max(bin.longest, self._lengths[item])
            largest = self._largest_sum(len(bin.members) + 1, bin.longest)
            bin.room = min(bin.room, largest - bin.size)

    def fewest_bins(self, items: Sequence[int]) -> float:
        """Returns a lower bound on the number of batches: sums over all items, divided by the limits of a batch."""
        bound = len(items) / self._slots
        for units, limit in ((self.sizes, self._most), *self._sums):
            total = sum(units[item] for item in items)
            bound = max(bound, total / max(limit, 1))
        return bound


# List scheduling, longest processing time first (LPT; Graham 1969), with limits. Batches with too little room for an
# item wait in a heap, sorted by room, until an item is small enough, each at most once per item in it. O(N log N).
def least_loaded(
    order: Iterable[int], costs: Sequence[float], bins: list[Bin], limits: Limits
) -> bool:
    """Puts each item, in this order, into the batch with the least load that has room; returns False if none has."""
    open_bins = [(bin.load, place) for place, bin in enumerate(bins)]
    heapq.heapify(open_bins)
    waiting: list[tuple[float, int]] = []
    sizes = limits.sizes
    for item in order:
        while waiting and -waiting[0][0] >= sizes[item]:
            _, place = heapq.heappop(waiting)
            heapq.heappush(open_bins, (bins[place].load, place))
        refused: list[tuple[float, int]] = []
        while open_bins and not limits.admits(bins[open_bins[0][1]], item):
            load, place = heapq.heappop(open_bins)
            if bins[place].room < sizes[item]:
                heapq.heappush(waiting, (-bins[place].room, place))
            else:
                refused.append((load, place))
        if not open_bins:
            return False
        _, place = open_bins[0]
        limits.add(bins[place], item, costs[item])
        heapq.heapreplace(open_bins, (bins[place].load, place))
        for entry in refused:
            heapq.heappush(open_bins, entry)
    return True


def best_fit(
    order: Iterable[int], costs: Sequence[float], new_bin: Callable[[], Bin], limits: Limits
) -> list[Bin]:
    """Best fit: puts each item, in order, into the fullest batch with room, or into a new one. O(N log batches)."""
    bins: list[Bin] = []
    by_room: list[tuple[float, int]] = []
    for item in order:
        first = bisect_left(by_room, (limits.sizes[item], -1))
        while first < len(by_room) and not limits.admits(bins[by_room[first][1]], item):
            first += 1
        if first == len(by_room):
            bins.append(new_bin())
            by_room.append((0, len(bins) - 1))
        _, place = by_room.pop(first)
        limits.add(bins[place], item, costs[item])
        insort(by_room, (bins[place].room, place))
    return bins


def fill_empty(parts: list[list[int]]) -> None:
    """Gives each empty part an item of the part with the most items, as long as that has two or more."""
    fullest = [(-len(part), place) for place, part in enumerate(parts) if part]
    heapq.heapify(fullest)
    empty = [part for part in parts if not part]
    for part in empty:
        if not fullest or fullest[0][0] == -1:
            return
        size, place = fullest[0]
        part.append(parts[place].pop())
        heapq.heapreplace(fullest, (size + 1, place))


def limits_of(lengths: Streams, budget: Budget) -> Limits:
    """Returns a budget's limits on packed batches of these samples.

    Token budgets and caps limit sums. Other budgets are asked about a grid of shapes, with each further stream without
    a cap at its longest.
    """
    first = primary(lengths)
    all_tokens = tokens_of(lengths, budget).astype(np.int64)
    sums: list[tuple[NDArray, float]] = []
    slots = UNLIMITED
    is_asked = False
    for part in budget.parts if isinstance(budget, AllOf) else (budget,):
        if isinstance(part, AdditiveCap):
            sums.append((lengths[part.stream].astype(np.int64), part.limit))
        elif type(part) is TokenBudget:
            whole = part.max_tokens - part.max_tokens % budget.pad_to_multiple_of
            sums.append((all_tokens, whole))
            slots = min(slots, part.max_samples or UNLIMITED, part.max_tokens)
        else:
            is_asked = True
    if not is_asked:
        (sizes, most), *others = sums
        return Limits(sizes, most, slots, others)
    tokens = lengths[first].astype(np.int64)
    longest = dict.fromkeys(lengths, 0)  # only caps look at streams that have one
    for name in padded_streams(budget, lengths):
        longest[name] = int(lengths[name].max())
    largest_sum = _largest_sums(budget, tokens, first, longest)
    most = largest_sum(1, int(tokens.min()))
    return Limits(tokens, most, slots, sums, largest_sum, tokens)


def _largest_sums(
    budget: Budget, tokens: IntArray, first: str, longest: dict[str, int]
) -> Callable[[int, int], float]:
    """Returns a function (number of samples, longest sample) -> the most tokens of a batch, from a grid.

    Bisection fills the grid. What a cell allows is also allowed with fewer samples or a shorter longest one, because
    budgets are monotone.

    Args:
        first: name of the stream ``tokens``.
        longest: of each stream; the further ones always count as long as that.
    """
    counts = [count for count in COUNTS if count <= len(tokens)]
    counts.append(len(tokens) + 1)  # a full batch is asked whether one more would fit
    quantiles = np.linspace(0, 1, NUM_LENGTHS)
    lengths: list[int] = np.unique(np.quantile(tokens, quantiles, method="higher")).tolist()
    count_of = np.tile(counts, len(lengths))
    longest_of = {name: np.full(len(count_of), length) for name, length in longest.items()}
    longest_of[first] = np.repeat(lengths, len(counts))
    low = np.full(len(count_of), -1)
    high = np.full(len(count_of), int(tokens.sum()) + 1)
    while (high - low > 1).any():
        middle = (low + high) // 2
        total_of = {name: count_of * length for name, length in longest_of.items()}
        total_of[first] = np.maximum(middle, 0)
        fits = budget.fits(BatchShape(count_of, longest_of, total_of))
        low = np.where(fits, middle, low)
        high = np.where(fits, high, middle)
    grid: list[list[int]] = low.reshape(len(lengths), len(counts)).tolist()
    return lambda count, length: grid[bisect_left(lengths, length)][bisect_left(counts, count)]


class PackedWindow:
    """A window of samples, to be divided into packed batches for steps with a batch on each rank."""

    def __init__(
        self, lengths: Streams, rules: CutRules, costs: NDArray[np.float64], num_ranks: int
    ) -> None:
        wide = {name: values.astype(np.int64) for name, values in lengths.items()}
        # Asked before the limits are read: it reports streams that `lengths` lacks.
        fits_alone = rules.budget.fits(BatchShape(np.ones(len(costs), np.int64), wide, wide))
        self._limits = limits_of(lengths, rules.budget)
        self._costs = costs.tolist()
        self._dearest_first = np.sort(costs)[::-1]
        self._num_ranks = num_ranks
        order = np.argsort(-costs, kind="stable")
        self._order: list[int] = order[fits_alone[order]].tolist()
        self._oversize: list[int] = order[~fits_alone[order]].tolist()

    def batches(self) -> list[list[int]]:
        """Returns batches of equal work, none of them empty: for as few steps as full batches would need; if they do not fit,
        as few as best fit needs, or one more."""
        num_bins = self._limits.fewest_bins(self._order)
        fewest_steps = self._num_steps(num_bins)
        num_steps = self._num_steps(num_bins / FULL) if self._num_ranks > 1 else fewest_steps
        parts = self._balanced(fewest_steps)
        if fewest_steps < num_steps and parts is not None and not self._are_even(parts):
            parts = self._balanced(num_steps)
        if parts is None:
            parts = self._by_best_fit()
        return [[sample] for sample in self._oversize] + parts

    def _are_even(self, parts: list[list[int]]) -> bool:
        loads = [sum(self._costs[sample] for sample in part) for part in parts]
        return min(loads, default=0.0) >= FULL * max(loads, default=0.0)

    def _by_best_fit(self) -> list[list[int]]:
        """Returns equal parts for as many steps as best fit needs, or for one more; if they do not fit, those of best fit."""
        bins = best_fit(self._order, self._costs, self._limits.bin, self._limits)
        parts = [bin.members for bin in bins]
        if self._num_ranks == 1:
            return parts
        num_steps = self._num_steps(len(bins))
        for num_tried in (num_steps, num_steps + 1):
            equal_parts = self._balanced(num_tried)
            if equal_parts is not None:
                return equal_parts
        num_parts = min(num_steps * self._num_ranks - len(self._oversize), len(self._order))
        parts += [[] for _ in range(num_parts - len(parts))]
        fill_empty(parts)
        return parts

    def _num_steps(self, num_bins: float) -> int:
        return math.ceil((num_bins + len(self._oversize)) / self._num_ranks)

    def _balanced(self, num_steps: int) -> list[list[int]] | None:
        """Divides the samples over steps, in which oversize samples take a batch each; None: they do not fit."""
        num_samples = len(self._order) + len(self._oversize)
        num_bins = min(num_steps * self._num_ranks, num_samples) - len(self._oversize)
        if num_bins < 1:
            return None if self._order else []
        # Batches start with a load, and end with equal loads if each gets the work of its step's pace. Oversize samples
        # take the places of the first batches, which have the most work.
        paces = np.repeat(_paces(self._dearest_first, num_steps, self._num_ranks), self._num_ranks)
        first_loads = (paces.max() - paces)[-num_bins:]
        bins = [self._limits.bin(load) for load in first_loads.tolist()]
        if not least_loaded(self._order, self._costs, bins, self._limits):
            return None
        parts = [bin.members for bin in bins]
        fill_empty(parts)
        return [part for part in parts if part]


def _paces(dearest_first: NDArray[np.float64], num_steps: int, num_ranks: int) -> list[float]:
    """Returns the work that each step's batches should have: an equal part of the rest, or that of one larger sample."""
    rest = float(dearest_first.sum())
    paces: list[float] = []
    for step in range(num_steps):
        mean = rest / ((num_steps - step) * num_ranks)
        first = step * num_ranks
        dearest = float(dearest_first[first]) if first < len(dearest_first) else 0.0
        if dearest <= mean:
            return paces + [mean] * (num_steps - step)
        paces.append(dearest)
        rest = max(rest - dearest * num_ranks, 0.0)
    return paces


def share_equally(
    batches: Batches, num_ranks: int, costs: NDArray[np.float64], limits: Limits
) -> Batches:
    """Deals the samples of each step to the ranks again, so that they share several costs about equally.

    A step stays as it is if its samples do not fit so. ``costs``: of each sample, float64 (K, N).
    """
    num_full = len(batches) - len(batches) % num_ranks
    members = list(batches)
    for first in range(0, num_full, num_ranks):
        step = slice(first, first + num_ranks)
        samples = np.sort(np.concatenate(members[step]))
        parts = _dealt(samples, costs[:, samples], num_ranks, limits)
        if parts is not None:
            members[step] = parts
    return Batches.of(members)


# List scheduling, longest processing time first (LPT; Graham 1969), for several costs. A load is relative to its mean
# over the ranks; the largest counts. O(samples * costs * ranks).
def _dealt(
    samples: IntArray, costs: NDArray[np.float64], num_ranks: int, limits: Limits
) -> list[IntArray] | None:
    """Gives each sample to the rank where the largest of its costs adds up to least; None: they do not fit so."""
    sums = costs.sum(axis=1, keepdims=True)
    shares = num_ranks * costs / np.where(sums > 0, sums, 1.0)
    loads = np.zeros((len(costs), num_ranks))
    bins = [limits.bin() for _ in range(num_ranks)]
    for place in np.argsort(-shares.max(axis=0), kind="stable").tolist():
        share = shares[:, place, None]
        after = np.where(share > 0, loads + share, 0.0).max(axis=0)
        sample = int(samples[place])
        for rank in np.argsort(after, kind="stable").tolist():
            if limits.admits(bins[rank], sample):
                limits.add(bins[rank], sample, 0.0)
                loads[:, rank] += share[:, 0]
                break
        else:
            return None
    parts = [bin.members for bin in bins]
    fill_empty(parts)
    return [np.sort(np.asarray(part, np.int64)) for part in parts]
