"""Cut a window of one padded stream into rows of runs, each row under its own limit of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.lowest import Stretch, lowest_limits
from dynagroup.plan.runs import TINY, SortedWindow
from dynagroup.shapes import IntArray

__all__ = ["by_rows"]

LIMITS = 32
"""Limits of the work of a row's batches that are tried."""
PRICES = (1.0, 4.0, 16.0)
"""Times the price of a step, with which rows are chosen."""
TABLE = 1 << 17
"""Entries of a table of starts by limits; in windows that would need more, fewer limits are tried."""
TOGETHER = 1 << 14
"""Entries of the tables of windows that are looked at together."""


class LimitedRow(NamedTuple):
    """A row of runs, and between which limits of work the lowest lies that brings it to ``stop``."""

    start: int
    stop: int
    low: float
    high: float


RowLimits: TypeAlias = list[list[LimitedRow]]
"""Divisions of a window into rows, each of another number of rows."""


# Under a limit of work a row from any start on is greedy: each run as large as the limit allows. Where it ends, for all starts
# and limits at once, comes from doubling: two runs further is one run further, twice. Dynamic programming over the starts of
# rows then picks each row's limit; at last each is lowered until the row just ends where it did. O(N * limits * log ranks)
# time, O(N * limits) memory. The limits are few, and the times of more rows and of fewer alike: so higher prices are tried,
# too, which take fewer rows. Windows of one size are one table, which saves most of the time of small ones.
def by_rows(windows: Sequence[SortedWindow], num_ranks: int, per_step: Sequence[float]) -> Iterator[list[IntArray]]:
    """For each window cuts of least time on several ranks, where a row of ``num_ranks`` runs costs its price and its dearest run.

    Args:
        per_step: of each window, the price of a row.
    """
    found = [
        [[_tight(window, row, num_ranks) for row in rows] for rows in divisions]
        for window, divisions in zip(windows, _divisions(windows, num_ranks, per_step), strict=True)
    ]
    lowered = iter(lowest_limits([stretch for divisions in found for rows in divisions for stretch in rows]))
    for window, divisions in zip(windows, found, strict=True):
        if len(window) <= num_ranks:
            yield [np.arange(len(window) + 1)]
            continue
        ends = [[next(lowered) or _loose(stretch) for stretch in rows] for rows in divisions]
        yield [np.asarray([0, *(end for row in rows for end in row[1:])], np.int64) for rows in ends]


def _tight(window: SortedWindow, row: LimitedRow, num_ranks: int) -> Stretch:
    start, stop, low, high = row
    return Stretch(
        window, start, stop, num_ranks, max(low, float(np.add.reduce(window.work[start:stop])) / num_ranks), high
    )


def _loose(row: Stretch) -> list[int]:
    return row.window.greedy()(row.high, row.most_runs, row.start, row.stop)


def _divisions(windows: Sequence[SortedWindow], num_ranks: int, per_step: Sequence[float]) -> Iterator[RowLimits]:
    """For each window its divisions into rows of least time, at its price of a row and at higher ones."""
    limits = [_limits(window, num_ranks, price) for window, price in zip(windows, per_step, strict=True)]

    def shape(number: int) -> tuple[int, int, bool]:
        return len(windows[number]), len(limits[number]), windows[number].allowed is None

    for (num, wide, free), alike in groupby(range(len(windows)), key=shape):
        numbers = list(alike)
        if num <= num_ranks:
            yield from ([] for _ in numbers)
            continue
        count = max(TOGETHER // (num * wide), 1) if free else 1  # allowed sizes differ by window
        for first in range(0, len(numbers), count):
            few = slice(numbers[first], numbers[first] + min(count, len(numbers) - first))
            yield from _Tables(windows[few], np.asarray(limits[few]), num_ranks).rows(np.asarray(per_step[few]))


def _limits(window: SortedWindow, num_ranks: int, per_step: float) -> NDArray[np.float64]:
    """Limits to try: from far below the price of a step, where rows no longer pay, to what a single row would need."""
    mean = float(window.work.sum()) / num_ranks
    high = min(window.largest, 2 * mean + window.heaviest)
    low = max(min(per_step / 8, mean), float(window.work[-1]), high / 1e6)
    count = min(max(TABLE // len(window), 12), LIMITS)
    return low * (high / low) ** np.linspace(0.0, 1.0, count) if TINY < low < high else np.asarray([high])


class _Tables:
    """Where rows end, for each start and limit of K windows of N samples each. Places are counted over all windows, N + 1 to
    a window."""

    def __init__(self, windows: Sequence[SortedWindow], limits: NDArray[np.float64], num_ranks: int) -> None:
        self._limits, self._ranks = limits, num_ranks
        self._ends, self._dearest = _row_ends(windows, limits, num_ranks)

    def rows(self, per_step: NDArray[np.float64]) -> Iterator[RowLimits]:
        """For each window its rows of least time at each price; a price that takes as many as one before is left out."""
        best, choice = self._best_choices(per_step * np.asarray(PRICES)[:, None])
        num = self._ends.shape[1] - 1
        for window, limits in enumerate(self._limits.tolist()):
            first, found = window * (num + 1), {}
            for times, chosen in zip(best, choice, strict=True):
                rows, start = [], 0
                while start < num and times[first + start] < np.inf:
                    which = int(chosen[first + start])
                    stop = int(self._ends[window, start, which]) - first
                    rows.append(LimitedRow(start, stop, limits[which - 1] if which else 0.0, limits[which]))
                    start = stop
                if rows:
                    found.setdefault(len(rows), rows)
            yield list(found.values())

    def _best_choices(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.float64], IntArray]:
        """The least time from each place on, at each price of a window, and the limit of the row there: (prices,
        K * (N + 1)). A row takes at least a sample a rank, so so many starts are done at once."""
        wide, num = len(prices), self._ends.shape[1] - 1
        best = np.full((wide, len(self._limits), num + 1), np.inf)
        best[:, :, num] = 0.0
        flat = best.reshape(wide, -1)
        choice = np.zeros(best.shape, np.int64)
        for last in range(num - self._ranks, -1, -self._ranks):
            block = slice(max(last - self._ranks + 1, 0), last + 1)
            time = flat.take(self._ends[:, block], axis=1)
            time += self._dearest[:, block]
            choice[:, :, block] = time.argmin(axis=-1)
            best[:, :, block] = prices[:, :, None] + time.min(axis=-1)
        return flat, choice.reshape(wide, -1)


def _row_ends(
    windows: Sequence[SortedWindow], limits: NDArray[np.float64], num_ranks: int
) -> tuple[IntArray, NDArray[np.float64]]:
    """Where a row ends and what its dearest run is, for each window, start and limit: (K, N + 1, limits)."""
    work, most = np.stack([w.work for w in windows])[:, :, None], np.stack([w.most for w in windows])[:, :, None]
    (count, num, _), wide = work.shape, limits.shape[1]
    by_work = limits[:, None, :] / np.maximum(work, TINY)
    sizes = np.minimum(by_work, num, out=by_work).astype(np.int64)
    sizes = windows[0].rounded(np.clip(sizes, 1, most, out=sizes))
    places = np.arange(count * (num + 1)).reshape(count, num + 1, 1)
    step = np.empty((count, num + 1, wide), np.int64)  # flat places in the table: place * limits + limit
    step[:, :num] = sizes
    step[:, num] = 0
    step += places
    step *= wide
    step += np.arange(wide)
    step_work = np.zeros((count, num + 1, wide))
    np.multiply(sizes, work, out=step_work[:, :num])
    ends, dearest = None, step_work
    left = num_ranks
    while left:
        if left & 1:
            dearest = step_work if ends is None else np.maximum(dearest, step_work.take(ends))
            ends = step if ends is None else step.take(ends)
        left >>= 1
        if left:
            step_work = np.maximum(step_work, step_work.take(step))
            step = step.take(step)
    assert ends is not None
    return ends // wide, dearest
