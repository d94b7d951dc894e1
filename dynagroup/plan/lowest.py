"""The lowest limit of work under which a stretch of a window can be cut into so many runs; of one stretch, or of many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynagroup.plan.runs import TINY, OrderedWindow, SortedWindow, fewest
from dynagroup.shapes import IntArray

__all__ = ["Stretch", "lowest_limits", "under_one_limit", "whole"]

CLOSE = 1 - 1 / 256
"""Limits that are so close are the same."""
MANY = 32
"""Stretches; fewer are faster looked at one by one."""
MOST = 512
"""Stretches that are looked at together, those of about as many runs."""


class Stretch(NamedTuple):
    """Samples of a window that are to be cut into at most so many runs, none of more work than lies between two limits."""

    window: OrderedWindow
    start: int
    stop: int
    most_runs: int
    low: float
    """Work under which it cannot be done, or need not."""
    high: float


# Bisection: under a limit the runs are greedy, each as large as the limit allows, which needs the fewest of them. Stretches of
# windows that are sorted and know no allowed sizes take their steps together, each as numbers in one array: a hundred stretches
# cost little more than one. O(most_runs * probes) steps, some nine probes.
def lowest_limits(stretches: Sequence[Stretch]) -> list[list[int] | None]:
    """For each stretch the offsets of its runs under the lowest limit that was found, to 1/256; None where none was."""
    together = [n for n, s in enumerate(stretches) if isinstance(s.window, SortedWindow) and s.window.allowed is None]
    if len(together) < MANY:
        together = []
    found: list[list[int] | None] = [None] * len(stretches)
    for number in sorted(set(range(len(stretches))) - set(together)):
        found[number] = _one(stretches[number])
    together.sort(key=lambda n: stretches[n].most_runs)
    for first in range(0, len(together), MOST):
        few = together[first : first + MOST]
        for number, offsets in zip(few, _Together([stretches[n] for n in few]).found(), strict=True):
            found[number] = offsets
    return found


def under_one_limit(window: OrderedWindow, most_runs: int, high: float = np.inf) -> IntArray | None:
    """At most so many runs, none of more work than the others can be brought under; None where that is too few.

    ``high``: work that they can all be brought under for certain.
    """
    found = fewest(window)
    if len(found) - 1 > most_runs:
        return None
    return np.asarray(lowest_limits(whole(window, [most_runs], high))[0] or found, np.int64)


def whole(window: OrderedWindow, most_runs: Sequence[int], high: float = np.inf) -> list[Stretch]:
    """All of a window, in each of these numbers of runs."""
    total, high = float(window.work.sum()), min(high, window.largest)
    return [Stretch(window, 0, len(window), most, total / most, high) for most in most_runs]


def _one(stretch: Stretch) -> list[int] | None:
    window, start, stop, most_runs, low, high = stretch
    runs, best = window.greedy(), None
    while low < high * CLOSE:
        middle = (low + high) / 2
        tried = runs(middle, most_runs, start, stop)
        if tried[-1] == stop:
            best, high = tried, middle
        else:
            low = middle
    return best


class _Together:
    """Stretches of sorted windows laid end to end: ``work`` and ``most`` are those of all their windows."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        windows = {id(s.window): s.window for s in stretches}
        self._work = np.maximum(np.concatenate([w.work for w in windows.values()]), TINY)
        self._most = np.concatenate([w.most for w in windows.values()])
        starts = np.cumsum([0, *(len(w) for w in windows.values())]).tolist()
        first = dict(zip(windows, starts, strict=False))
        self._first = np.asarray([first[id(s.window)] for s in stretches])
        self._start = self._first + np.asarray([s.start for s in stretches])
        self._stop = self._first + np.asarray([s.stop for s in stretches])
        self._most_runs = np.asarray([s.most_runs for s in stretches])
        self._low = np.asarray([s.low for s in stretches])
        self._high = np.asarray([s.high for s in stretches])

    def found(self) -> list[list[int] | None]:
        low, high, lowered = self._low, self._high.copy(), np.zeros(len(self._high), np.bool_)
        while len(open_ := np.flatnonzero(low < high * CLOSE)):
            middle = (low[open_] + high[open_]) / 2
            reached = self._cut(open_, middle)[-1] == self._stop[open_]
            high[open_[reached]], low[open_[~reached]] = middle[reached], middle[~reached]
            lowered[open_[reached]] = True
        every = np.arange(len(high))
        offsets = np.stack(self._cut(every, high), axis=1) - self._first[:, None]
        stops = (self._stop - self._first).tolist()
        return [
            row[: row.index(stop) + 1] if yes else None
            for row, stop, yes in zip(offsets.tolist(), stops, lowered.tolist(), strict=True)
        ]

    def _cut(self, which: IntArray, limit: np.ndarray) -> list[IntArray]:
        """Where these stretches stand after each run under these limits; at the stop they stay."""
        place, stop = self._start[which], self._stop[which]
        most_runs = self._most_runs[which]
        places = [place]
        for run in range(int(most_runs.max())):
            here = np.minimum(place, len(self._work) - 1)
            sizes = (limit / self._work.take(here)).astype(np.int64)
            sizes = np.maximum(np.minimum(sizes, self._most.take(here)), 1)
            place = np.where(run < most_runs, np.minimum(place + sizes, stop), place)
            places.append(place)
        return places
