"""Plans samples with several lengths (streams): an order with similar neighbours, maxima of runs, costs to balance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, is_packed, padded_streams
from dynagroup.plan.batches import Batches, longest_first, shapes_of
from dynagroup.plan.cost import Work
from dynagroup.shapes import TOKENS, IntArray, Streams

LEAST, SHARE, MOST = (
    128,
    4096,
    2048,
)  # padded tokens that a division must save: 1/SHARE, but LEAST to MOST
# For exchanges: how many similar batches, samples and exchanges are tried; where they stop; the least gain that counts
BESIDE, SOME, TRIED, ENOUGH, WORTH = 8, 32, 8, 1.01, 1e-6


class RunMaxima:
    """Sparse table: returns the maximum of up to ``reach`` consecutive values in O(1); takes O(N log reach) memory."""

    def __init__(self, values: NDArray, reach: int) -> None:
        levels, width = [values], 1
        while 2 * width <= reach:
            last = levels[-1]
            levels.append(
                np.maximum(
                    last, np.append(last[width:], np.zeros(min(width, len(last)), last.dtype))
                )
            )
            width *= 2
        self._levels = np.stack(levels)

    def of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray:
        """Returns the maxima of groups of consecutive values, given by first positions and sizes (1 or more)."""
        level = np.frexp(np.asarray(sizes, np.float64))[1] - 1
        return np.maximum(
            self._levels[level, starts],
            self._levels[level, starts + sizes - (1 << level.astype(np.int64))],
        )


# Recursive bisection, like building a k-d tree. At first all samples are one box, padded to its longest sample in each
# stream. A box is divided along the stream where that saves the most padding, until no division saves enough. The part
# with larger samples comes first; in an undivided box, samples are sorted by their tokens. Neighbours then need little
# padding in every stream. O(N log N) per level: 10 ms for 1,000 samples.
def alike_order(units: Sequence[IntArray]) -> IntArray:
    """Sorts samples so that neighbours are similar in every stream (``units``: one array each); returns positions.

    >>> alike_order([np.array([90, 10, 90, 11]), np.array([10, 90, 11, 90])]).tolist()
    [2, 0, 3, 1]
    """
    lengths = np.stack(units)
    box_of = np.zeros(lengths.shape[1], np.int64)
    stack, number, worth = (
        [np.arange(len(box_of))],
        0,
        min(max(LEAST, int(lengths.sum()) // SHARE), MOST),
    )
    while stack:
        box = stack.pop()
        halves = _divided(box, lengths[:, box], worth)
        stack += halves
        if not halves:
            box_of[box] = number
            number += 1
    return np.lexsort([*(-u for u in units[::-1]), -np.sum(units, axis=0), box_of])


def _divided(box: IntArray, units: IntArray, worth: int) -> list[IntArray]:
    """Returns the two parts of a box of samples that need least padding, larger samples last; [] if little is saved."""
    most, best = len(box) * int(units.max(axis=1).sum()) - worth, []
    before = np.arange(1, len(box))
    for stream in units:
        order = longest_first({TOKENS: stream})
        wide = units[:, order]
        front = np.add.reduce(np.maximum.accumulate(wide, axis=1))[:-1]
        padded = (
            before * front
            + before[::-1] * np.add.reduce(np.maximum.accumulate(wide[:, ::-1], axis=1))[-2::-1]
        )
        cut = int(padded.argmin()) if len(padded) else 0
        if len(padded) and padded[cut] <= most:
            most, best = int(padded[cut]) - 1, [box[order[cut + 1 :]], box[order[: cut + 1]]]
    return best


def costs_of_rows(lengths: Streams, budget: Budget, work: Work) -> NDArray[np.float64] | None:
    """Returns the costs of each sample that ranks should share equally in a step: float64 (K, N). Each stream is a
    cost; the sum of all streams is one, too, if ranks wait for each other only at the end of a step. None: a single
    cost is enough, because all streams are tokens with one price."""
    summed, priced = work.meet == "step", work.priced(budget, lengths)
    each = {n: work.price(n).of(v) if n in priced else v for n, v in lengths.items() if v.any()}
    if len(each) < 2 or (
        summed and len(padded_streams(budget, lengths)) == len(lengths) and not work.streams
    ):
        return None
    shared = [each[name] for name in priced if name in each]
    found = np.asarray(
        [*([np.sum(shared, axis=0)] if summed and len(shared) > 1 else []), *each.values()],
        np.float64,
    )
    return found * (found[0].sum() / found.sum(axis=1, keepdims=True))


# Local search by exchanges (Kernighan and Lin 1970). A batch's rating adds up its costs, each divided by the mean over
# its step and raised to the 16th power, so that the most expensive batches decide. For each cost, the most expensive
# batch gives or takes a sample, or exchanges two, with a batch of similar length: whatever lowers ratings most, if both
# fit and no step takes longer. Squares of squares give all ranks the same last bit, and so the same plan.
class Exchanges:
    """Exchanges samples between batches, so that the ranks of a step have about equal work in every stream."""

    def __init__(
        self, rows: Batches, num_ranks: int, lengths: Streams, budget: Budget, work: Work
    ) -> None:
        self.rows, self.nobody, self.fits, self.ranks = (
            rows,
            len(rows.order),
            budget.fits,
            num_ranks,
        )
        self.starts, self.of = (
            rows.offsets[:-1] + np.arange(len(rows)),
            np.repeat(np.arange(len(rows)), rows.sizes + 1),
        )
        self.who = np.insert(np.arange(self.nobody), rows.offsets[1:], self.nobody)
        self.units, priced = (
            {name: v[rows.order] for name, v in lengths.items()},
            work.priced(budget, lengths),
        )
        pads = () if is_packed(budget, lengths) else padded_streams(budget, lengths)
        self.padded, timed = (
            np.asarray([name in names for name in lengths]) for names in (pads, priced)
        )
        self.timed = (
            [timed] if work.meet == "step" else np.eye(len(timed), dtype=np.bool_)[timed]
        )  # a sum if in a step
        each = [work.price(name).of(v) if name in priced else v for name, v in self.units.items()]
        self.each = np.pad(
            np.asarray([*each, np.ones(self.nobody)]), ((0, 0), (0, 1))
        )  # last row: number of samples
        self.renew()
        self.place = np.argsort(
            np.argsort(self.longest[:-1][self.padded].sum(axis=0), kind="stable")
        )
        mean = self.costs.reshape(len(each), -1, num_ranks).mean(axis=2)
        self.mean = np.repeat(np.where(mean > 0, mean, np.inf), num_ranks, axis=1)

    def renew(self) -> None:
        own = self.each[:, self.who]
        self.sums, self.longest = (
            np.add.reduceat(own, self.starts, 1),
            np.maximum.reduceat(own, self.starts, 1),
        )
        self.costs = self.costs_of(self.sums, self.longest)

    def costs_of(self, sums: NDArray[Any], longest: NDArray[Any]) -> NDArray[np.float64]:
        found = zip(self.padded, sums, longest, strict=False)
        return np.asarray(
            [
                np.where(sums[-1] > 0, most * sums[-1] if pad else own, np.inf)
                for pad, own, most in found
            ]
        )

    def made(self) -> Batches:
        for first in [*range(0, len(self.rows), self.ranks)] * 2:
            for _ in range(8 * self.ranks):
                row = (self.costs / self.mean)[:, first : first + self.ranks]
                dearest = first + row.argmax(axis=1)[np.argsort(-row.max(axis=1), kind="stable")]
                if row.max() <= ENOUGH or not any(map(self.exchanged, dearest.tolist())):
                    break
        members = [
            np.sort(part[part < self.nobody]) for part in np.split(self.who, self.starts[1:])
        ]
        return Batches.of(members).map(self.rows.order)

    def exchanged(self, at: int) -> bool:
        near = (abs(self.place - self.place[at]) <= BESIDE) & (np.arange(len(self.rows)) != at)
        ours, theirs = (
            np.flatnonzero(which[self.of])[::-1]
            for which in (np.arange(len(self.rows)) == at, near)
        )
        pairs = (
            ours[:: 1 + len(ours) // SOME, None],
            theirs[None, :: 1 + len(theirs) // (16 * SOME)],
        )
        gain, slow = (
            np.zeros(1),
            np.zeros(1, np.bool_),
        )  # (samples of this batch, samples of others)
        for one, other in (pairs, pairs[::-1]):
            batch, gives, takes = (
                self.of[one],
                self.each[:, self.who[one]],
                self.each[:, self.who[other]],
            )
            costs = self.costs_of(
                self.sums[:, batch] - gives + takes, np.maximum(self.longest[:, batch], takes)
            )
            shares = (found / self.mean[:, batch] for found in (costs, self.costs[:, batch]))
            after, before = (
                np.square(np.square(np.square(np.square(share)))).sum(axis=0) for share in shares
            )
            gain = gain + after - before
            for timed in self.timed:
                most = self.costs[timed].sum(axis=0).reshape(-1, self.ranks).max(axis=1)
                slow = slow | (costs[timed].sum(axis=0) > most[batch // self.ranks])
        gain[slow] = 0.0
        lower = np.flatnonzero(gain < -WORTH)
        for best in lower[np.argsort(gain.ravel()[lower], kind="stable")[:TRIED]]:
            pair = np.asarray(
                [pairs[0][best // gain.shape[1], 0], pairs[1][0, best % gain.shape[1]]]
            )
            self.who[pair] = self.who[pair[::-1]]
            parts = [
                self.who[(self.of == batch) & (self.who < self.nobody)] for batch in self.of[pair]
            ]
            if self.fits(shapes_of(Batches.of(parts), self.units)).all():
                self.renew()
                return True
            self.who[pair] = self.who[pair[::-1]]
        return False
