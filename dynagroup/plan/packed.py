"""Forms packed batches (samples end to end, without padding) within limits, with equal work for all ranks."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import UNLIMITED, AdditiveCap, AllOf, Budget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.batches import Batches
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.shapes import BatchShape, IntArray, Streams, primary

WORTH = 1.02  # factor: one step more than necessary may take so much longer, if ranks then have equal work
EQUAL = 0.05  # work is equal if it differs by at most this share of the mean
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LENGTHS = 97  # a budget is asked about so many lengths, with each number of samples in COUNTS


def pack(
    lengths: Streams,
    budget: Budget,
    multiple: int = 1,
    *,
    work: Work = DEFAULT_WORK,
    costs: NDArray | None = None,
) -> Batches:
    """Divides a window into packed batches that fit ``budget``: few steps of ``multiple`` batches with equal work.

    A sample with more work than an equal part sets the time of its step anyway, so other batches may have as much work.
    An oversize sample is a batch of its own. Returns positions in the window, sorted within a batch; batches of most
    work (or ``costs`` of samples) first. Their number is a multiple of ``multiple`` if there are enough samples."""
    if not len(lengths[primary(lengths)]):
        return Batches.concatenate([])
    if costs is None:
        costs = work.of_lengths({name: lengths[name] for name in work.priced(budget, lengths)})
    parts = Packing(lengths, budget, costs, multiple).rows(work.per_step)
    members = [np.sort(np.asarray(part, np.int64)) for part in parts]
    return Batches.of(sorted(members, key=lambda part: -float(costs[part].sum())))


@dataclass(slots=True)
class Bin:
    """A batch that is being filled with items (samples)."""

    load: float  # cost of its items, plus a start value that lets other batches be filled first
    room: float  # size of the largest item that still fits
    slots: int  # number of items that it may still get
    used: list[float]  # sum over its items so far, for each limit on a sum
    members: list[int] = field(default_factory=list)


class Room:
    """The limits of a batch of items (samples), which are put in largest first. ``sums``: pairs of (units of each item,
    largest sum in a batch); units of the first pair are an item's size. ``slots``: most items. For other budgets
    ``asked``: a function (number of items, largest item) -> largest sum of sizes; or ``together``: whether items fit."""

    def __init__(
        self,
        sums: Sequence[tuple[NDArray, float]],
        slots: int,
        *,
        asked: Callable[[int, int], float] | None = None,
        together: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.sums = [(units.tolist(), limit) for units, limit in sums]
        self.sizes = self.sums[0][0]
        self._slots, self._asked, self._together = slots, asked, together

    def bin(self, load: float = 0.0, slots: int | None = None) -> Bin:
        slots = self._slots if slots is None else slots
        return Bin(load, self.sums[0][1] if slots else -1, slots, [0] * len(self.sums))

    def admits(self, bin: Bin, item: int) -> bool:
        """Returns whether an item, which fits an empty batch, also fits this one."""
        if not bin.members:
            return bin.slots > 0
        sums = zip(bin.used, self.sums, strict=True)
        if bin.room < self.sizes[item] or any(
            used + units[item] > limit for used, (units, limit) in sums
        ):
            return False
        return self._together is None or self._together([*bin.members, item])

    def add(self, bin: Bin, item: int, cost: float) -> None:
        bin.members.append(item)
        bin.load += cost
        bin.slots -= 1
        bin.used = [
            used + units[item] for used, (units, _) in zip(bin.used, self.sums, strict=True)
        ]
        bin.room = self.sums[0][1] - bin.used[0] if bin.slots else -1
        if self._asked is not None and bin.slots:
            bin.room = min(
                bin.room, self._asked(len(bin.members) + 1, bin.members[0]) - bin.used[0]
            )


# List scheduling, longest processing time first (LPT; Graham 1969), with limits. Batches with too little room for an
# item wait in a heap, sorted by room, until an item is small enough, each at most once per item in it. O(N log N).
def least_loaded(order: Iterable[int], costs: Sequence[float], bins: list[Bin], room: Room) -> bool:
    """Puts each item, in this order, into the batch with the least load that has room; returns False if none has."""
    open_ = [(bin.load, number) for number, bin in enumerate(bins)]
    heapq.heapify(open_)
    waiting: list[tuple[float, int]] = []
    for item in order:
        while waiting and -waiting[0][0] >= room.sizes[item]:
            number = heapq.heappop(waiting)[1]
            heapq.heappush(open_, (bins[number].load, number))
        refused: list[tuple[float, int]] = []
        while open_ and not room.admits(bins[open_[0][1]], item):
            entry = heapq.heappop(open_)
            if bins[entry[1]].room < room.sizes[item]:
                heapq.heappush(waiting, (-bins[entry[1]].room, entry[1]))
            else:
                refused.append(entry)
        if not open_:
            return False
        number = open_[0][1]
        room.add(bins[number], item, costs[item])
        heapq.heapreplace(open_, (bins[number].load, number))
        for entry in refused:
            heapq.heappush(open_, entry)
    return True


def best_fit(
    order: Iterable[int], costs: Sequence[float], new: Callable[[], Bin], room: Room
) -> list[Bin]:
    """Best fit: puts each item, in order, into the fullest batch with room, or into a new one. O(N log batches)."""
    bins: list[Bin] = []
    by_room: list[tuple[float, int]] = []
    for item in order:
        place = bisect_left(by_room, (room.sizes[item], -1))
        while place < len(by_room) and not room.admits(bins[by_room[place][1]], item):
            place += 1
        if place == len(by_room):
            bins.append(new())
            by_room.append((0, len(bins) - 1))
        number = by_room.pop(place)[1]
        room.add(bins[number], item, costs[item])
        insort(by_room, (bins[number].room, number))
    return bins


def fill_empty(parts: list[list[int]]) -> None:
    """Gives each empty part an item of the part with the most items, as long as that has two or more."""
    fullest = [(-len(part), number) for number, part in enumerate(parts) if part]
    heapq.heapify(fullest)
    for part in [part for part in parts if not part]:
        size, number = fullest[0] if fullest else (-1, 0)
        if size == -1:
            return
        part.append(parts[number].pop())
        heapq.heapreplace(fullest, (size + 1, number))


def room_of(lengths: Streams, budget: Budget) -> Room:
    """Returns a budget's limits on packed batches of these samples: limits on sums, or else calls of the budget."""
    parts = budget.parts if type(budget) is AllOf else (budget,)
    capped = (
        {part.stream for part in parts if isinstance(part, AdditiveCap)}
        if type(budget) is AllOf
        else set()
    )
    sums: list[tuple[NDArray, float]] = []
    slots, only_sums = UNLIMITED, True
    for part in parts:
        if type(part) is TokenBudget and part.layout == "packed":
            names = [name for name in lengths if name not in capped or name == primary(lengths)]
            most = part.max_tokens - part.max_tokens % budget.pad_to_multiple_of
            sums.append(
                (np.stack([lengths[name] for name in names]).sum(axis=0, dtype=np.int64), most)
            )
            slots = min(slots, part.max_samples or UNLIMITED, part.max_tokens)
        elif type(part) is AdditiveCap:
            sums.append((lengths[part.stream].astype(np.int64), part.limit))
        else:
            only_sums = False
    sums = sums or [(lengths[primary(lengths)].astype(np.int64), UNLIMITED)]
    if only_sums:
        return Room(sums, slots)
    if len(lengths) == 1:
        return Room(sums, slots, asked=_asked(budget, sums[0][0]))
    shape = lambda members: BatchShape.of_samples(  # noqa: E731
        {name: values[members] for name, values in lengths.items()}
    )
    return Room(sums, slots, together=lambda members: bool(budget.fits(shape(members))[0]))


def _asked(budget: Budget, tokens: IntArray) -> Callable[[int, int], float]:
    """Returns a function (number of samples, longest sample) -> the most tokens of a batch, from a grid that bisection
    fills. What a cell allows is also allowed with fewer samples or a shorter longest one, because budgets are monotone."""
    counts = [n for n in COUNTS if n <= len(tokens)] + [len(tokens) + 1]
    longest: list[int] = np.unique(
        np.quantile(tokens, np.linspace(0, 1, LENGTHS), method="higher")
    ).tolist()
    longest_of, count_of = (grid.ravel() for grid in np.meshgrid(longest, counts, indexing="ij"))
    low, high = (
        np.full(len(count_of), -1),
        np.full(len(count_of), int(tokens.sum(dtype=np.int64)) + 1),
    )
    while (high - low > 1).any():
        middle = (low + high) // 2
        fits = budget.fits(BatchShape.of(count_of, longest_of, np.maximum(middle, 0)))
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    most: list[list[int]] = low.reshape(len(longest), -1).tolist()
    return lambda count, sample: most[bisect_left(longest, tokens[sample])][
        bisect_left(counts, count)
    ]


class Packing:
    """Packs one window into batches for steps of ``multiple`` batches (one for each rank)."""

    def __init__(
        self, lengths: Streams, budget: Budget, costs: NDArray[np.float64], multiple: int
    ) -> None:
        wide = {name: values.astype(np.int64) for name, values in lengths.items()}
        alone = budget.fits(
            BatchShape(np.ones(len(costs), np.int64), wide, wide)
        )  # first use: reports missing streams
        self._room = room_of(lengths, budget)
        self._costs, self._list, self._multiple = costs, costs.tolist(), multiple
        order = np.argsort(-costs, kind="stable")
        self._order: list[int] = order[alone[order]].tolist()
        self._oversize: list[int] = order[~alone[order]].tolist()

    def rows(self, per_step: float) -> list[list[int]]:
        """Returns batches for the fewest steps; or for one step more, if work is then equal in at most 2 % more time."""
        fewest = self._fewest()
        if self._multiple == 1 or len(fewest) % self._multiple or self._judged(fewest, per_step)[1]:
            return fewest
        more = [
            *([s] for s in self._oversize),
            *(self.balanced(len(fewest) // self._multiple + 1) or []),
        ]
        if len(more) < len(fewest) or len(more) % self._multiple:
            return fewest
        time, equal = self._judged(more, per_step)
        return (
            more
            if time <= (WORTH if equal else 1.0) * self._judged(fewest, per_step)[0]
            else fewest
        )

    def _judged(self, parts: list[list[int]], per_step: float) -> tuple[float, bool]:
        """Returns the predicted time of these batches, and whether steps have equal work, but for one larger sample."""
        work = np.asarray([self._costs[part].sum() for part in parts])
        by_row = np.argsort(-work, kind="stable").reshape(-1, self._multiple)
        longest = np.asarray([self._costs[part].max() for part in parts])[by_row].max(axis=1)
        rows, mean = work[by_row], work[by_row].mean(axis=1)
        equal = (np.ptp(rows, axis=1) <= EQUAL * mean) | (longest > mean)
        return per_step * len(rows) + rows[:, 0].sum(), bool(equal.all())

    def _fewest(self) -> list[list[int]]:
        """Returns about as few batches as best fit, none of them empty."""
        rows = self._num_rows(self._least_bins())
        found = self.balanced(rows)
        if found is None:
            bins = best_fit(self._order, self._list, self._room.bin, self._room)
            rows = max(self._num_rows(len(bins)), 1)
            found = None if self._multiple == 1 else self.balanced(rows)
            if (
                found is None
            ):  # parts of equal work do not fit; those of best fit do, in as many steps
                found = [bin.members for bin in bins]
                free = min(rows * self._multiple - len(self._oversize), len(self._order))
                found += [[] for _ in range(free - len(found) if self._multiple > 1 else 0)]
                fill_empty(found)
        return [*([s] for s in self._oversize), *found]

    def _least_bins(self) -> int:
        """Returns a lower bound on the number of batches: sums over all samples, divided by the limits of a batch."""
        sums = ((sum(units[s] for s in self._order), limit) for units, limit in self._room.sums)
        by_sums = (math.ceil(total / max(limit, 1)) for total, limit in sums)
        return max(-(-len(self._order) // self._room.bin().slots), *by_sums)

    def _num_rows(self, bins: int) -> int:
        return -(-(bins + len(self._oversize)) // self._multiple)

    def balanced(self, rows: int) -> list[list[int]] | None:
        """Divides the samples over ``rows`` steps, in which oversize samples take a batch each; None: they do not fit."""
        count = min(rows * self._multiple, len(self._order) + len(self._oversize)) - len(
            self._oversize
        )
        if count < 1:
            return None if self._order else []
        paces = np.asarray(_paces(np.sort(self._costs)[::-1], rows, self._multiple))
        bins = [
            self._room.bin(load)
            for load in np.repeat(paces.max() - paces, self._multiple)[-count:].tolist()
        ]
        if not least_loaded(self._order, self._list, bins, self._room):
            return None
        parts = [bin.members for bin in bins]
        fill_empty(parts)
        return [part for part in parts if part]


def _paces(dearest: NDArray[np.float64], rows: int, multiple: int) -> list[float]:
    """Returns the work that each step's batches should have: an equal part of the rest, or that of one larger sample."""
    rest, paces = float(dearest.sum()), []
    for row in range(rows):
        mean, first = rest / ((rows - row) * multiple), row * multiple
        pace = max(mean, float(dearest[first]) if first < len(dearest) else 0.0)
        paces.append(pace)
        if pace == mean:
            return [*paces, *[mean] * (rows - row - 1)]
        rest = max(rest - pace * multiple, 0.0)
    return paces
