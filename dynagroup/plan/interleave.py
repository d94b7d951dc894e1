"""Rows of a padded window made shorter together: every batch goes to the row whose time it fills best."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.runs import TINY, SortedWindow
from dynagroup.shapes import IntArray

__all__ = ["interleaved"]

LEAST_RANKS, MOST_BATCHES = 4, 64
"""Fewer ranks, or more batches of a window, gain less than 0.3 %, which is not worth the time."""
SPREADS = (0.08, 0.03)
"""By how much the rows' times are varied about the best so far, round after round."""
TIMES, SCALES = 32, 8
"""Times of the rows that are tried in a round, each at so many scales from a little less time to a little more."""


# Samples come whole: of a batch's time up to one sample's remains unused, n * work instead of the row's time T. Batches of
# one row begin at neighbouring lengths, so in one row this is much the same for all; but a batch may as well belong to another
# row, of another T, whose time it fills better. For given times T_1..T_k the batches are cut from the longest sample on, each
# as large as the row allows that it then fills best, among rows that lack batches: times that reach the end are a plan. So only
# the times are searched: some hundred at once, around the rows' present ones. Cost: batches * rows * tried times.
def interleaved(window: SortedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """The cut with as many batches whose rows take less time together; the one that was given where none is found."""
    num_rows = (len(offsets) - 1) // num_ranks
    if num_rows < 2 or num_ranks < LEAST_RANKS or len(offsets) - 1 > MOST_BATCHES or window.allowed is not None:
        return offsets
    times = np.maximum(np.sort(window.total(offsets))[::-1][::num_ranks], TINY)
    search = _Search(window, num_ranks)
    least, low, high = float(times.sum()), 0.96, 1.03
    for spread in SPREADS:
        shares = 1.0 + spread * _varied(TIMES, num_rows)
        shares *= times.sum() / (shares * times).sum(axis=1, keepdims=True)
        scales = np.linspace(low, high, SCALES)
        tried = ((shares * times)[:, None] * scales[None, :, None]).reshape(-1, num_rows)
        total = np.where(search.stops(tried) == len(window), tried.sum(axis=1), np.inf)
        best = int(total.argmin())
        if total[best] < least:
            least, times = float(total[best]), tried[best]
            offsets = search.cut(times)
        low, high = 1.0 - (high - low) / 8, 1.0
    return offsets


def _varied(count: int, wide: int) -> NDArray[np.float64]:
    """Numbers from -1 to 1, (count, wide), evenly spread and the same every time; the first row is zero."""
    golden = np.sqrt(5.0) / 2 - 0.5
    grid = np.arange(count)[:, None] * (golden * (np.arange(wide) * 2 + 1)) % 1.0
    return np.where(grid > 0, 2 * grid - 1, 0.0)


class _Search:
    """Where cuts under given times of the rows end."""

    def __init__(self, window: SortedWindow, num_ranks: int) -> None:
        self._ranks = num_ranks
        self._work = np.maximum(np.append(window.work, window.work[-1]), TINY)
        self._most = np.append(window.most, 0)

    def stops(self, times: NDArray[np.float64]) -> IntArray:
        """The sample that each of these cuts reaches; times: (cuts, rows)."""
        return self._walk(times)[-1]

    def cut(self, times: NDArray[np.float64]) -> IntArray:
        """Offsets of the cut under these times, (rows,)."""
        return np.unique(np.concatenate(self._walk(times[None])))

    def _walk(self, times: NDArray[np.float64]) -> list[IntArray]:
        """The places of all cuts after each batch: (batches + 1) of (cuts,)."""
        every, place = np.arange(len(times)), np.zeros(len(times), np.int64)
        left = np.full(times.shape, self._ranks)
        places = [place]
        for _ in range(times.shape[1] * self._ranks):
            work = self._work[place][:, None]
            sizes = np.minimum(times / work, self._most[place][:, None]).astype(np.int64)
            row = np.where(left > 0, sizes * work / times, -1.0).argmax(axis=1)
            left[every, row] -= 1
            place = place + sizes[every, row]
            places.append(place)
        return places
