"""Packed batches: samples end to end under a cap, dealt so that the batches of a row are equal work."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.plan.batches import Batches, RoundBatch, offsets_of, smaller_size
from dynagroup.plan.level import is_equal, level
from dynagroup.plan.room import Bin, Room
from dynagroup.shapes import TOKENS, IntArray, Streams

__all__ = ["SampleWork", "pack"]

SHARES = (1.0, 0.8)  # of the work that is dealt to the least loaded before the fullest are topped up
FURTHER_ROWS = 2
WORTH = 1.02  # times the least predicted time: what rows of equal work may take


class SampleWork(Protocol):
    """What samples cost in a packed batch."""

    @property
    def per_step(self) -> float:
        """Linear tokens that a step costs before its first sample."""
        ...

    def of_lengths(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Linear tokens of each sample: float64 (N,)."""
        ...


class _UsualWork:
    per_step = 1024.0

    def of_lengths(self, tokens: ArrayLike) -> NDArray[np.float64]:
        linear = np.asarray(tokens, np.float64)
        return linear + linear * linear / 12_288.0


def pack(
    lengths: Streams,
    budget: Budget,
    multiple: int = 1,
    *,
    work: SampleWork | None = None,
    round_batch: RoundBatch | None = None,
) -> Batches:
    """Divide one window of samples into packed batches that fit ``budget``: few rows of ``multiple`` batches, of equal work.

    Dearest first, each sample goes to the batch that has least work of those it fits. Where the batches must be filled so
    closely that this leaves samples over, the smaller samples fill the fullest place they fit instead; what is then unequal is
    exchanged between the batches of a row. A sample of more work than a batch's fair share sets the pace of its row
    whatever is done, so that row's other batches are filled up to it. O(N log N) and a few passes: 4,096 samples take
    some 10 ms where a budget only sums.

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
        return Batches(np.zeros(0, np.int64), np.zeros(1, np.int64))
    work = work or _UsualWork()
    costs = np.sum([work.of_lengths(lengths[name]) for name in padded_streams(budget, lengths)], axis=0)
    bins = _rows(Room(lengths, budget), costs, multiple, work.per_step)
    members = [np.sort(np.asarray(bin.members, np.int64)) for bin in bins]
    if round_batch is not None:
        members = [part for batch in members for part in _rounded_parts(batch, round_batch)]
        members.sort(key=lambda part: -float(costs[part].sum()))
    return Batches(np.concatenate(members), offsets_of(np.asarray([len(m) for m in members])))


def _rows(room: Room, costs: NDArray[np.float64], multiple: int, per_step: float) -> list[Bin]:
    """The fewest rows; or one or two more, where the fewest cannot be made equal and that is worth its time."""
    packing = _Packing(room, costs, multiple)
    fewest = level(packing.fewest(), room, costs, multiple)
    if multiple == 1 or len(fewest) % multiple or _are_equal(fewest, costs, multiple):
        return fewest
    found, rows = [fewest], len(fewest) // multiple
    for further in range(rows + 1, rows + 1 + FURTHER_ROWS):
        bins = packing.balanced(further)
        if bins is None or len(bins) % multiple:
            continue
        found.append(level(bins, room, costs, multiple))
        if _are_equal(found[-1], costs, multiple):
            break
    best = min(found, key=lambda bins: _time(bins, multiple, per_step))
    worth = _are_equal(found[-1], costs, multiple)
    worth &= _time(found[-1], multiple, per_step) <= WORTH * _time(best, multiple, per_step)
    return found[-1] if worth else best


def _time(bins: Sequence[Bin], multiple: int, per_step: float) -> float:
    return sum(bin.load for bin in bins[::multiple]) + per_step * (len(bins) // multiple)


def _are_equal(bins: Sequence[Bin], costs: NDArray[np.float64], multiple: int) -> bool:
    """Whether the batches of each row are equal work, wherever no single sample is more work than their mean."""
    return all(is_equal(bins[first : first + multiple], costs) for first in range(0, len(bins), multiple))


def _rounded_parts(batch: IntArray, round_batch: RoundBatch) -> list[IntArray]:
    size = smaller_size(len(batch), round_batch)
    return [batch] if size == len(batch) else [batch[:size], *_rounded_parts(batch[size:], round_batch)]


class _Packing:
    """One window being packed into rows of ``multiple`` batches."""

    def __init__(self, room: Room, costs: NDArray[np.float64], multiple: int) -> None:
        self._room, self._costs, self._multiple = room, costs.tolist(), multiple
        alone = room.fits_alone
        order = np.argsort(-costs, kind="stable").tolist()
        self._order: list[int] = [s for s in order if alone[s]]
        self._oversize: list[int] = [s for s in order if not alone[s]]

    def fewest(self) -> list[Bin]:
        """The window in few rows, at most a hundredth more than best fit needs; every batch has a sample."""
        if self._room.known:
            found = self.balanced(self._num_rows(self._room.fewest(self._order) + len(self._oversize)))
            if found is not None:
                return found
        fullest: list[Bin] = []
        self._fullest(self._order, fullest, opening=True)
        rows = self._num_rows(len(fullest) + len(self._oversize))
        if self._multiple > 1:
            for more in dict.fromkeys((rows, rows + rows // 100)):
                found = self.balanced(more)
                if found is not None:
                    return found
        empty = self._num_batches(rows) - len(self._oversize) - len(fullest)
        return self._complete([*fullest, *(self._room.bin() for _ in range(empty))])

    def _num_rows(self, num_batches: int) -> int:
        return -(-num_batches // self._multiple)

    def _num_batches(self, rows: int) -> int:
        return min(rows * self._multiple, len(self._order) + len(self._oversize))

    def balanced(self, rows: int) -> list[Bin] | None:
        """The window in exactly so many rows; None where that way the samples do not fit in."""
        paces = _paces(np.sort(np.asarray(self._costs))[::-1], rows, self._multiple)
        count = self._num_batches(rows) - len(self._oversize)
        if count < 1:
            return None if self._order else self._complete([])
        loads = [max(paces) - pace for pace in paces for _ in range(self._multiple)][-count:]
        for share in SHARES if self._multiple > 1 else SHARES[:1]:
            bins = [self._room.bin(load) for load in loads]
            first = self._dealt(share)
            if self._least_loaded(self._order[:first], bins) and self._fullest(self._order[first:], bins):
                return self._complete(bins)
        return None

    def _dealt(self, share: float) -> int:
        """How many samples, dearest first, make up this share of the work."""
        if share == 1.0:
            return len(self._order)
        sums = np.cumsum([self._costs[s] for s in self._order])
        return int(np.searchsorted(sums, share * sums[-1]))

    def _complete(self, bins: list[Bin]) -> list[Bin]:
        """With the samples that fit nowhere; and no bin stays empty: the fullest give one of theirs."""
        empty = [bin for bin in bins if not bin.members]
        givers = [(-len(bin.members), number) for number, bin in enumerate(bins) if bin.members]
        heapq.heapify(givers)
        for bin in empty:
            size, number = heapq.heappop(givers)
            if size == -1:
                break
            bin.members = [bins[number].members.pop()]
            heapq.heappush(givers, (size + 1, number))
        return [*(Bin(0.0, -1, [s]) for s in self._oversize), *(bin for bin in bins if bin.members)]

    def _least_loaded(self, samples: Sequence[int], bins: list[Bin]) -> bool:
        """Each sample to the bin of least load that it fits; False as soon as one fits none.

        Bins with too little room for a sample wait, ordered by their room, for one that is small enough: a bin waits at
        most once for each sample it holds, so N samples cost O(N log N).
        """
        room, tokens, costs = self._room, self._room.tokens, self._costs
        open_ = [(bin.load, number) for number, bin in enumerate(bins)]
        heapq.heapify(open_)
        waiting: list[tuple[int, int]] = []
        for sample in samples:
            size = tokens[sample]
            while waiting and -waiting[0][0] >= size:
                number = heapq.heappop(waiting)[1]
                heapq.heappush(open_, (bins[number].load, number))
            refused: list[tuple[float, int]] = []
            while open_:
                number = open_[0][1]
                bin = bins[number]
                if bin.room >= size and room.admits(bin, sample):
                    room.add(bin, sample, costs[sample])
                    heapq.heapreplace(open_, (bin.load, number))
                    break
                entry = heapq.heappop(open_)
                if bin.room < size:
                    heapq.heappush(waiting, (-bin.room, number))
                else:
                    refused.append(entry)
            else:
                return False
            for entry in refused:
                heapq.heappush(open_, entry)
        return True

    def _fullest(self, samples: Sequence[int], bins: list[Bin], *, opening: bool = False) -> bool:
        """Best fit: each sample to the bin with least room that it fits. Where it fits none: a new one, or False."""
        room, costs = self._room, self._costs
        by_room = sorted((bin.room, number) for number, bin in enumerate(bins))
        for sample in samples:
            number = self._fullest_that_fits(sample, bins, by_room)
            if number is None and not opening:
                return False
            if number is None:
                number = len(bins)
                bins.append(room.bin())
            room.add(bins[number], sample, costs[sample])
            bisect.insort(by_room, (bins[number].room, number))
        return True

    def _fullest_that_fits(self, sample: int, bins: list[Bin], by_room: list[tuple[int, int]]) -> int | None:
        """The bin, taken out of ``by_room``."""
        size = self._room.tokens[sample]
        place = bisect.bisect_left(by_room, (size, -1))
        while place < len(by_room):
            believed, number = by_room[place]
            if self._room.admits(bins[number], sample):
                del by_room[place]
                return number
            if bins[number].room == believed:
                place += 1
                continue
            del by_room[place]  # asked, it had less room than believed
            bisect.insort(by_room, (bins[number].room, number))
            place = bisect.bisect_left(by_room, (size, -1))
        return None


def _paces(dearest: NDArray[np.float64], rows: int, multiple: int) -> tuple[float, ...]:
    """Work that a batch of each row should hold: as long as one sample is more than the rest's mean, it sets a row's pace.

    >>> _paces(np.array([9.0, 1.0, 1.0, 1.0]), 2, 2)
    (9.0, 1.0)
    """
    rest, paces = float(dearest.sum()), []
    for row in range(rows):
        mean = rest / ((rows - row) * multiple)
        first = row * multiple
        pace = max(mean, float(dearest[first]) if first < len(dearest) else 0.0)
        paces.append(pace)
        if pace == mean:
            return (*paces, *[mean] * (rows - row - 1))
        rest = max(rest - pace * multiple, 0.0)
    return tuple(paces)
