"""Plans samples with several lengths (streams): an order with similar neighbours, maxima of runs, costs to balance."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import padded_streams
from dynagroup.plan.batches import longest_first
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import TOKENS, IntArray, Streams

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
# padding in every stream. O(N log N) per level: 10 ms for 1,000 samples.
def alike_order(units: Sequence[IntArray]) -> IntArray:
    """Sorts samples so that neighbours are similar in every stream (``units``: one array each); returns positions.

    >>> alike_order([np.array([90, 10, 90, 11]), np.array([10, 90, 11, 90])]).tolist()
    [2, 0, 3, 1]
    """
    lengths = np.stack(units)
    num_samples = lengths.shape[1]
    least_saved = int(np.clip(lengths.sum() // SAVED_SHARE, *SAVED_BOUNDS))
    box_of = np.zeros(num_samples, np.int64)
    num_boxes = 0
    stack = [np.arange(num_samples)]
    while stack:
        box = stack.pop()
        parts = _divided(box, lengths[:, box], least_saved)
        stack += parts
        if not parts:
            box_of[box] = num_boxes
            num_boxes += 1
    keys = [-stream for stream in units[::-1]]
    return np.lexsort([*keys, -lengths.sum(axis=0), box_of])


def _divided(box: IntArray, units: IntArray, least_saved: int) -> list[IntArray]:
    """Returns the two parts of a box of samples that need least padding, larger samples last; [] if little is saved."""
    num_samples = len(box)
    highest = num_samples * int(units.max(axis=1).sum()) - least_saved
    parts: list[IntArray] = []
    if num_samples == 1:
        return parts
    num_before = np.arange(1, num_samples)
    for stream in units:
        order = longest_first({TOKENS: stream})
        ordered = units[:, order]
        longest_before = np.maximum.accumulate(ordered, axis=1).sum(axis=0)
        longest_after = np.maximum.accumulate(ordered[:, ::-1], axis=1).sum(axis=0)[::-1]
        padded = num_before * longest_before[:-1] + num_before[::-1] * longest_after[1:]
        cut = int(padded.argmin())
        if padded[cut] <= highest:
            highest = int(padded[cut]) - 1
            parts = [box[order[cut + 1 :]], box[order[: cut + 1]]]
    return parts


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
