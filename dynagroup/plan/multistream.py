"""Plans samples with several lengths (streams): an order with similar neighbours, maxima of runs, costs to balance."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import padded_streams
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import IntArray, Streams

SAVED_SHARE = 4096
SAVED_BOUNDS = (128, 2048)
"""Padded tokens that a division must save: 1/4096 of all tokens, but at least 128 and at most 2,048."""


class RunMaxima:
    """Sparse table: returns the maximum of up to ``reach`` consecutive values in O(1); takes O(N log reach) memory."""

    def __init__(self, values: NDArray, reach: int) -> None:
        levels = [values]
        width = 1
        while 2 * width <= reach:
            last = levels[-1]
            shifted = np.zeros_like(last)
            shifted[:-width] = last[width:]
            levels.append(np.maximum(last, shifted))
            width *= 2
        self._levels = np.stack(levels)

    def of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray:
        """Returns the maxima of runs of values, given by their first positions and their sizes (1 or more)."""
        level = np.frexp(np.asarray(sizes, np.float64))[1] - 1
        width = 1 << level.astype(np.int64)
        first_part = self._levels[level, starts]
        last_part = self._levels[level, starts + sizes - width]
        return np.maximum(first_part, last_part)


# Recursive bisection, like building a k-d tree. At first all samples are one box, padded to its longest sample in each
# stream. A box is divided along the stream where that saves the most padding, until no division saves enough. The part
# with larger samples comes first; in an undivided box, samples are sorted by their tokens. Neighbours then need little
# padding in every stream. All boxes of a level are divided at once. O(N log N) per level: 4 ms for 1,000 samples.
def alike_order(units: Sequence[IntArray], size: int = 0) -> IntArray:
    """Sorts samples so that neighbours are similar in every stream (``units``: one array each); returns positions.

    ``size``: samples of a window, if several windows of one size are given, to be sorted one by one; 0: one window.

    >>> alike_order([np.array([90, 10, 90, 11]), np.array([10, 90, 11, 90])]).tolist()
    [2, 0, 3, 1]
    """
    lengths = np.stack(units)
    num_samples = lengths.shape[1]
    size = size or num_samples
    sums = lengths.reshape(len(lengths), -1, size).sum(axis=(0, 2))
    least_saved = np.repeat(np.clip(sums // SAVED_SHARE, *SAVED_BOUNDS), size)
    order = np.arange(num_samples)  # box after box
    is_first = order % size == 0  # whether a box begins here
    places = np.arange(num_samples)  # of the boxes that may be divided
    while len(places):
        level = _Level.of(lengths[:, order[places]], is_first[places], least_saved[places])
        order[places] = order[places[level.order]]
        is_first[places[level.cuts]] = True
        places = places[level.is_divided]
    box_of = np.empty_like(order)
    box_of[order] = np.cumsum(is_first)
    keys = [-stream for stream in units[::-1]]
    return np.lexsort([*keys, -lengths.sum(axis=0), box_of])


@dataclass(frozen=True)
class _Level:
    """Boxes of samples, each divided into the two parts that need least padding; or undivided if little is saved.

    Args:
        order: positions of the samples; in a divided box those of the first part, which are larger, come first.
        cuts: positions where second parts begin.
        is_divided: of each sample, whether its box is divided.
    """

    order: IntArray
    cuts: IntArray
    is_divided: NDArray[np.bool_]

    @classmethod
    def of(cls, lengths: IntArray, is_first: NDArray[np.bool_], least_saved: IntArray) -> "_Level":
        """Divides boxes.

        Args:
            lengths: (streams, samples), box after box.
            is_first: whether a box begins here.
            least_saved: padded tokens that a division of the box of each sample must save.
        """
        places = np.arange(len(is_first))
        firsts = np.flatnonzero(is_first)
        box = np.cumsum(is_first) - 1
        lasts = np.append(firsts[1:], len(places)) - 1
        # Raised by more than any length from box to box, samples of one box stay together.
        rising = box * (lengths.max() + 1)
        orders = np.argsort(rising - lengths, axis=1, kind="stable")  # by each stream
        padded = _padded_tokens(lengths[:, orders], rising, firsts[box], lasts[box])
        undivided = padded[0, lasts]
        least = np.minimum.reduceat(padded, firsts, axis=1)
        is_divided = (least.min(axis=0) <= undivided - least_saved[firsts])[box]
        stream = least.argmin(axis=0)[box]  # along which the box is divided
        padded = padded[stream, places]
        is_least = is_divided & (padded == np.minimum.reduceat(padded, firsts)[box])
        from_last = np.flatnonzero(is_least)[::-1]
        cuts = np.zeros(len(firsts), np.int64)
        cuts[box[from_last]] = from_last + 1  # the first of a box, written last, stays
        order = np.where(is_divided, orders[stream, places], places)
        return cls(order, cuts[cuts > 0], is_divided)


def _padded_tokens(
    ordered: IntArray, rising: IntArray, first: IntArray, last: IntArray
) -> NDArray[np.int64]:
    """Returns the padded tokens of each box if it is divided after a place: (streams that sort it, samples). After the
    last place of a box, they are those of the whole box.

    Args:
        ordered: lengths of shape (streams, streams that sort the boxes, samples).
        rising: of each sample, the number of its box times more than any length: a running maximum of lengths raised
            by it starts anew in each box.
        first, last: of each sample, the places of the first and last sample of its box.
    """
    places = np.arange(len(rising))
    falling = rising[-1] - rising
    before = np.maximum.accumulate(ordered + rising, axis=2) - rising
    from_last = np.maximum.accumulate((ordered + falling)[..., ::-1], axis=2)
    after = from_last[..., ::-1] - falling
    padded = (places + 1 - first) * before.sum(axis=0)
    longest_after = after[..., 1:].sum(axis=0)
    padded[:, :-1] += (last - places)[:-1] * longest_after
    return padded


def costs_to_balance(lengths: Streams, rules: CutRules) -> NDArray[np.float64] | None:
    """Returns the costs of each sample that ranks should share equally in a step: float64 (K, N), of equal sums.

    Each stream is a cost. The sum of all streams is one, too, if ranks wait for each other only at the end of a step.
    None: a single cost is enough, because all streams are tokens with one price.
    """
    work = rules.work
    priced = work.priced(rules.budget, lengths)
    is_summed = work.meet == "step"
    costs = {}
    for name, units in lengths.items():
        if units.any():
            costs[name] = work.price(name).of(units) if name in priced else units
    all_are_tokens = len(padded_streams(rules.budget, lengths)) == len(lengths) and not work.streams
    if len(costs) < 2 or (is_summed and all_are_tokens):
        return None
    several = [*costs.values()]
    summed = [costs[name] for name in priced if name in costs]
    if is_summed and len(summed) > 1:
        several.insert(0, np.sum(summed, axis=0))
    array = np.asarray(several, np.float64)
    sums = array.sum(axis=1, keepdims=True)
    return array * (sums[0] / sums)
