"""For samples with several lengths: an order in which neighbours are similar, maxima of runs, and costs to balance."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.plan.batches import longest_first
from dynagroup.plan.cost import Work
from dynagroup.shapes import TOKENS, IntArray, Streams

LEAST, SHARE, MOST = 128, 4096, 2048  # padded tokens that a division must save: 1/SHARE, from LEAST to MOST


class RunMaxima:
    """Sparse table: gives the largest value of any run of up to ``reach`` values in O(1); O(N log reach) memory."""

    def __init__(self, values: NDArray, reach: int) -> None:
        levels, width = [values], 1
        while 2 * width <= reach:
            last = levels[-1]
            shifted = np.append(last[width:], np.zeros(min(width, len(last)), last.dtype))
            levels.append(np.maximum(last, shifted))
            width *= 2
        self._levels = np.stack(levels)

    def of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray:
        """Returns the largest value of each run, given by its start and its number of values (at least 1)."""
        level = np.frexp(np.asarray(sizes, np.float64))[1] - 1
        second = starts + sizes - (1 << level.astype(np.int64))
        return np.maximum(self._levels[level, starts], self._levels[level, second])


# Recursive bisection of boxes, like building a k-d tree. At first all samples are one box, as wide in each stream as
# their longest. A box is divided in two along the stream that saves the most padded tokens, unless that saves few. The
# half with larger samples comes first; inside a box samples are sorted by tokens, descending. So neighbours need little
# padding in every stream. O(N log N) per level; a box takes 40 microseconds per stream: 10 ms for 1,000 samples.
def alike_order(units: Sequence[IntArray]) -> IntArray:
    """Returns positions in an order with similar neighbours in every stream, long samples first. ``units``: per stream.

    >>> alike_order([np.array([90, 10, 90, 11]), np.array([10, 90, 11, 90])]).tolist()
    [2, 0, 3, 1]
    """
    lengths = np.stack(units)
    box_of = np.zeros(lengths.shape[1], np.int64)
    stack, number, worth = [np.arange(len(box_of))], 0, min(max(LEAST, int(lengths.sum()) // SHARE), MOST)
    while stack:
        box = stack.pop()
        halves = _divided(box, lengths[:, box], worth)
        stack += halves
        if not halves:
            box_of[box] = number
            number += 1
    return np.lexsort([*(-u for u in units[::-1]), -np.sum(units, axis=0), box_of])


def _divided(box: IntArray, units: IntArray, worth: int) -> list[IntArray]:
    """Returns the best two halves of a box, larger samples last; none if a division saves too little."""
    most, best = len(box) * int(units.max(axis=1).sum()) - worth, []
    before = np.arange(1, len(box))
    for stream in units:
        order = longest_first({TOKENS: stream})
        wide = units[:, order]
        front = np.add.reduce(np.maximum.accumulate(wide, axis=1))[:-1]
        back = np.add.reduce(np.maximum.accumulate(wide[:, ::-1], axis=1))[-2::-1]
        padded = before * front + before[::-1] * back
        cut = int(padded.argmin()) if len(padded) else 0
        if len(padded) and padded[cut] <= most:
            most, best = int(padded[cut]) - 1, [box[order[cut + 1 :]], box[order[: cut + 1]]]
    return best


def costs_of_rows(lengths: Streams, budget: Budget, work: Work) -> NDArray[np.float64] | None:
    """Returns the costs of samples that the batches of a row should share equally, float64 (K, N): the work (or units)
    of each stream, and if ranks wait for each other only at the end of a step, also the work of all streams together.
    None: one cost is enough, because all streams count as tokens with one price."""
    if len(lengths) == 1:
        return None
    summed, priced = work.meet == "step", work.priced(budget, lengths)
    if summed and len(padded_streams(budget, lengths)) == len(lengths) and not work.streams:
        return None
    each = {name: work.price(name).of(v) if name in priced else v for name, v in lengths.items()}
    both = [np.sum([each[name] for name in priced], axis=0)] if summed else []
    return np.asarray([*both, *each.values()], np.float64)
