"""Cut a window of several padded streams into runs of least predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dynagroup.plan.maxima import RunMaxima
from dynagroup.plan.rounding import RoundBatch, allowed_sizes
from dynagroup.plan.runs import EXACT_UP_TO, TINY, Greedy, OrderedWindow, by_sizes, offsets_of_path
from dynagroup.shapes import IntArray

__all__ = ["AlikeWindow"]

FINE = 128
"""Places at which a run may end, at least, between its start and the most that it may hold: beyond 256 samples not every one."""
TILE = 256


@dataclass(frozen=True, slots=True)
class AlikeWindow(OrderedWindow):
    """A window whose neighbours are alike in every stream; its samples fall in none."""

    streams: tuple[NDArray[np.float64], ...] = ()
    """Work of one sample padded to each sample's length in one stream: float64 (N,), for every padded stream."""
    maxima: tuple[RunMaxima, ...] = ()

    @classmethod
    def of_streams(
        cls, streams: Sequence[NDArray[np.float64]], most: IntArray, round_batch: RoundBatch | None
    ) -> AlikeWindow:
        reach = int(most.max(initial=1))
        allowed = None if round_batch is None else allowed_sizes(reach, round_batch)
        maxima = tuple(RunMaxima(values, reach) for values in streams)
        return cls(np.sum(streams, axis=0), most, allowed, tuple(streams), maxima)

    @property
    def heaviest(self) -> float:
        return float(sum(values.max() for values in self.streams))

    @property
    def largest(self) -> float:
        return float(self.work_of(np.arange(len(self)), self.most).max())

    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray[np.float64]:
        return sizes * np.sum([maxima.of(starts, sizes) for maxima in self.maxima], axis=0)

    def greedy(self) -> Greedy:
        def runs(limit: float, most_runs: int, start: int = 0, stop: int = len(self)) -> list[int]:
            offsets = [start]
            while start < stop and len(offsets) <= most_runs:
                most = min(int(self.most[start]), int(limit / max(self.work[start], TINY)))
                run = slice(start, start + most)
                each = np.maximum.accumulate(self.streams[0][run])
                for values in self.streams[1:]:
                    each = each + np.maximum.accumulate(values[run])
                size = max(int((each * np.arange(1, len(each) + 1)).searchsorted(limit, side="right")), 1)
                if self.allowed is not None:
                    size = int(self.allowed[self.allowed.searchsorted(size, side="right") - 1])
                start = min(start + size, stop)
                offsets.append(start)
            return offsets

        return runs

    def least_time(self, per_step: float) -> IntArray:
        """Exact for every 65,536 samples where no run may hold more than 256, else at places that lie so close that a run
        can be filled to more than 99 %."""
        parts = [np.zeros(1, np.int64)]
        for first in range(0, len(self), EXACT_UP_TO):
            part = self._part(first, min(first + EXACT_UP_TO, len(self)))
            parts.append(first + (_by_places(part, per_step) if self.allowed is None else by_sizes(part, per_step))[1:])
        return np.concatenate(parts)

    def _part(self, start: int, stop: int) -> AlikeWindow:
        if stop - start == len(self):
            return self
        most = np.minimum(self.most[start:stop], np.arange(stop - start, 0, -1))
        part = AlikeWindow.of_streams([values[start:stop] for values in self.streams], most, None)
        return replace(part, allowed=self.allowed)


# Dynamic programming over the places where runs may end: best[stop] = min over start of best[start] + per_step + work of the
# run between them, which is its samples times the sum of its maxima. Those grow with the run but follow no line, so all
# starts from which a stop can be reached are looked at; that they are as far as the budget lets a run reach, and no two
# places closer than 1/128 of that, bounds them. O(N * 128) arithmetic in whole tiles, and some microseconds a place.
def _by_places(window: AlikeWindow, per_step: float) -> IntArray:
    places = _places(window.most)
    reach = np.searchsorted(places, places[:-1] + window.most[places[:-1]], side="right") - 1
    last = len(places) - 1
    starts = np.arange(1, last + 1) - np.searchsorted(reach, np.arange(1, last + 1))  # from which a stop is reached
    behind = np.full(last + 1, np.inf)  # best, from the last place to the first
    behind[last] = 0.0
    came_from = np.zeros(last + 1, np.int64)
    for first, work in _tiles(window, places, starts):
        work += per_step
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


def _tiles(window: AlikeWindow, places: IntArray, starts: IntArray) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Work of the runs that end at each place, begun at the place before, the one before that, and so on: tile by tile."""
    steps = [np.maximum.reduceat(values, places[:-1]) for values in window.streams]
    for first in range(0, len(starts), TILE):
        wide = int(starts[first : first + TILE].max())
        stops = np.arange(first + 1, min(first + TILE, len(starts)) + 1)
        begin = np.maximum(stops[:, None] - 1 - np.arange(wide), 0)
        work = np.zeros((len(stops), wide))
        for values in steps:
            around = np.concatenate([np.zeros(max(wide - first - 1, 0)), values[max(first + 1 - wide, 0) : stops[-1]]])
            work += np.maximum.accumulate(sliding_window_view(around, wide)[:, ::-1], axis=1)
        yield first, work * (places[stops][:, None] - places[begin])
