"""Samples with several lengths: an order in which neighbours are alike in all, cutting it into runs, and costs of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.plan.batches import offsets_of_path
from dynagroup.plan.cost import Work
from dynagroup.shapes import IntArray, Streams

LEAST, SHARE, MOST = 128, 4096, 2048  # padded tokens that dividing a box must save: one in so many, within bounds
FINE = 128  # places where a run may end, at least, between its start and the most that it may hold
TILE = 256


class RunMaxima:
    """Sparse table: the largest value of any run of up to ``reach`` values, in O(1); O(N log reach) memory.

    >>> RunMaxima(np.array([3, 9, 2, 8]), reach=3).of(np.array([0, 2]), np.array([3, 2])).tolist()
    [9, 8]
    """

    def __init__(self, values: NDArray, reach: int) -> None:
        levels, width = [values], 1
        while 2 * width <= reach:
            last = levels[-1]
            shifted = np.append(last[width:], np.zeros(min(width, len(last)), last.dtype))
            levels.append(np.maximum(last, shifted))
            width *= 2
        self._levels = np.stack(levels)

    def of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray:
        """Of the runs from these positions on of so many values, at least 1."""
        level = np.frexp(np.asarray(sizes, np.float64))[1] - 1
        second = starts + sizes - (1 << level.astype(np.int64))
        return np.maximum(self._levels[level, starts], self._levels[level, second])


# Recursive bisection of boxes, as a k-d tree is built: all samples are one box, as wide in each stream as their longest. A box is
# divided in two, along one stream, where that saves most padded tokens; not at all where it saves few. Boxes follow one another,
# the larger half first, and inside a box samples fall in tokens. So a run of neighbours pads little in every stream.
# O(N log N) a level; a box costs some 40 microseconds a stream: 10 ms for 1,000 samples.
def alike_order(units: Sequence[IntArray]) -> IntArray:
    """Positions in an order in which neighbours are alike in every stream, long samples in front. ``units``: of each stream.

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
    """The two halves of a box, the larger samples last, where it is best divided; none where that saves little."""
    most, best = len(box) * int(units.max(axis=1).sum()) - worth, []
    before = np.arange(1, len(box))
    for stream in units:
        order = np.argsort(-stream, kind="stable")
        wide = units[:, order]
        front = np.add.reduce(np.maximum.accumulate(wide, axis=1))[:-1]
        back = np.add.reduce(np.maximum.accumulate(wide[:, ::-1], axis=1))[-2::-1]
        padded = before * front + before[::-1] * back
        cut = int(padded.argmin()) if len(padded) else 0
        if len(padded) and padded[cut] <= most:
            most, best = int(padded[cut]) - 1, [box[order[cut + 1 :]], box[order[: cut + 1]]]
    return best


# Dynamic programming over the places where runs may end: best[stop] = min over start of best[start] + price + work of the run
# between them, its samples times the sum of its maxima. Those follow no line, so all starts from which a stop can be reached are
# looked at: no further than the budget reaches, and no two places closer than 1/128 of that. O(N * 128) arithmetic in whole
# tiles, and some microseconds a place. Exact where no run may hold more than 256 samples.
def least_time_by_places(
    streams: Sequence[NDArray[np.float64]], most: IntArray, price: float, allowed: IntArray | None = None
) -> IntArray:
    """Offsets of the runs of least work plus ``price`` each.

    Args:
        streams: work of each sample's padding in each stream.
        most: samples that a run may have which starts at a position.
        allowed: samples that a run may have anywhere, 1 among them; None: any.
    """
    places = _places(most) if allowed is None else np.arange(len(most) + 1)
    reach = np.searchsorted(places, places[:-1] + most[places[:-1]], side="right") - 1
    last = len(places) - 1
    starts = np.arange(1, last + 1) - np.searchsorted(reach, np.arange(1, last + 1))  # from which a stop is reached
    behind = np.full(last + 1, np.inf)  # best, from the last place to the first
    behind[last] = 0.0
    came_from = np.zeros(last + 1, np.int64)
    for first, work in _tiles(streams, places, starts):
        work += price
        if allowed is not None:
            work[:, np.isin(np.arange(1, work.shape[1] + 1), allowed, invert=True)] = np.inf
        counts = starts[first : first + len(work)].tolist()
        for stop, row, count in zip(range(first + 1, first + 1 + len(work)), work, counts, strict=True):
            here = last - stop
            time = row[:count] + behind[here + 1 : here + 1 + count]
            back = int(time.argmin())
            behind[here] = time[back]
            came_from[stop] = stop - 1 - back
    return places[offsets_of_path(came_from.tolist())]


def _places(most: IntArray) -> IntArray:
    """Where runs may start and end: every sample, or where runs may be long some that lie closer than 1/128 of them."""
    num = len(most)
    if most.max() < 2 * FINE:
        return np.arange(num + 1)
    places, reach = [0], np.maximum(most // FINE, 1).tolist()
    while places[-1] < num:
        places.append(places[-1] + reach[places[-1]])
    return np.asarray(places, np.int64)


def _tiles(
    streams: Sequence[NDArray[np.float64]], places: IntArray, starts: IntArray
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Work of the runs that end at each place, begun at the place before, the one before that, and so on: tile by tile."""
    steps = [np.maximum.reduceat(values, places[:-1]) for values in streams]
    for first in range(0, len(starts), TILE):
        wide = int(starts[first : first + TILE].max())
        stops = np.arange(first + 1, min(first + TILE, len(starts)) + 1)
        begin = np.maximum(stops[:, None] - 1 - np.arange(wide), 0)
        work = np.zeros((len(stops), wide))
        for values in steps:
            around = np.concatenate([np.zeros(max(wide - first - 1, 0)), values[max(first + 1 - wide, 0) : stops[-1]]])
            work += np.maximum.accumulate(sliding_window_view(around, wide)[:, ::-1], axis=1)
        yield first, work * (places[stops][:, None] - places[begin])


def costs_of_rows(lengths: Streams, budget: Budget, work: Work) -> NDArray[np.float64] | None:
    """Several costs of samples in each of which the batches of a row are to be even: float64 (K, N).

    The work or the units of each stream, and where ranks meet at the end of a step what all streams take. None where batches
    have one cost: the predicted time of streams that all count as tokens, at one price.
    """
    if len(lengths) == 1:
        return None
    summed, priced = work.meet == "step", work.priced(budget, lengths)
    if summed and len(padded_streams(budget, lengths)) == len(lengths) and not work.streams:
        return None
    each = {name: work.price(name).of(v) if name in priced else v for name, v in lengths.items()}
    both = [np.sum([each[name] for name in priced], axis=0)] if summed else []
    return np.asarray([*both, *each.values()], np.float64)
