"""Cuts many updates of one size at once, for padded batches of one stream of lengths.

An update is sorted, longest sample first, and cut into steps of consecutive samples. A step is divided over the ranks
into runs of neighbours, so that its most expensive batch is as cheap as possible. All updates are cut by the same few
operations on arrays, because a call of numpy takes longer than the work of one small update."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.plan.batches import Batches, offsets_of
from dynagroup.plan.padded import OrderedWindow
from dynagroup.plan.rows import Steps, divide
from dynagroup.shapes import IntArray

MOST_PLACES = 64
"""Places of an update where a step may begin; half as many on several ranks."""
FEWEST_PLACES = 8
"""If a step may not begin everywhere: at least so many places must be within the reach of the first step."""
WAYS = np.array([[0.5, 0.0], [0.0, 0.25]])
"""Two estimates of what whole samples cost a step: a share of the shortest one, or of the longest one."""
TABLE = 1 << 16
"""Lengths up to this are looked up in a table."""


@dataclass(frozen=True, slots=True)
class UpdateCuts:
    """The batches of many updates.

    Args:
        batches: positions in the flat list of all samples; update after update, step after step, rank after rank.
        num_steps: int64 (updates,), steps of each update. 0: this way found no batches that fit, so it has none.
    """

    batches: Batches
    num_steps: IntArray


def cut_updates(
    tokens: IntArray, budget: Budget, num_ranks: int, work: NDArray[np.float64], per_step: float
) -> UpdateCuts | None:
    """Cuts each update into the steps of least predicted time.

    Args:
        tokens: int64 (updates, samples), lengths of the samples of each update, longest first.
        work: float64 (updates, samples), predicted time of each sample alone.
        per_step: predicted fixed time of a step.

    Returns None if updates have fewer samples than ranks, or if the budget looks at more than the longest sample.
    """
    num_updates, size = tokens.shape
    if size < num_ranks:
        return None
    largest = _largest_sizes(tokens, budget)
    if largest is None:
        return None
    ways = WAYS if num_ranks > 1 else WAYS[:1]
    begins = _cheapest_steps(work, largest, num_ranks, per_step, ways)
    num_steps = begins.sum(axis=2)
    update, way, begin = np.unravel_index(np.flatnonzero(begins), begins.shape)
    if not len(begin):
        return UpdateCuts(Batches.concatenate([]), num_steps[:, 0])
    end = np.append(begin[1:], 0)
    end[end == 0] = size  # the next step begins another cut
    # Both ways have many steps in common, and each of these is divided once.
    codes = (update * size + begin) * (size + 1) + end - begin
    codes, code_of_step = np.unique(codes, return_inverse=True)
    firsts, num_samples = np.divmod(codes, size + 1)
    window = OrderedWindow(work.ravel(), largest.ravel())
    steps = Steps(window, firsts, firsts + num_samples, num_ranks)
    sizes = divide(steps, steps.least(), np.full(len(firsts), np.inf))
    times = np.where(num_steps > 0, 0.0, np.inf)
    np.add.at(times, (update, way), (per_step + steps.dearest(sizes))[code_of_step])
    best = times.argmin(axis=1)
    num_steps = num_steps[np.arange(num_updates), best]
    is_used = way == best[update]
    sizes = sizes[code_of_step[is_used]]
    positions = np.arange(num_updates * size).reshape(num_updates, size)[num_steps > 0]
    return UpdateCuts(Batches(positions.ravel(), offsets_of(sizes.ravel())), num_steps)


def _largest_sizes(longest: IntArray, budget: Budget) -> IntArray | None:
    """Returns the most samples of a batch with each longest sample, at least 1; None: the budget looks at more."""
    greatest = int(longest.max())
    if greatest <= TABLE:
        occurs = np.zeros(greatest + 1, np.bool_)
        occurs[longest] = True
        lengths = np.flatnonzero(occurs)
        place_in_lengths = (np.cumsum(occurs) - 1)[longest]
    else:
        lengths, place_in_lengths = np.unique(longest, return_inverse=True)
    largest = budget.largest(lengths)
    if largest is None:
        return None
    return np.maximum(largest, 1)[place_in_lengths].reshape(longest.shape)


# Shortest path through the places where steps may begin, by dynamic programming: the least time to a place is that to
# an earlier place, and of one step between them. For all updates at once; O(places**2) operations on arrays with an
# entry for each update and way.
def _cheapest_steps(
    work: NDArray[np.float64],
    largest: IntArray,
    num_ranks: int,
    per_step: float,
    ways: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Returns at which samples the steps of least total time begin: bool (updates, ways, samples).

    No step begins in an update that cannot be cut so, or whose batches are so small that more places are needed. On
    one rank, and with all places, the cut is exact; else a step's time is estimated.
    """
    num_updates, size = work.shape
    stride = -(-size // (MOST_PLACES if num_ranks == 1 else MOST_PLACES // 2))
    places = np.arange(0, size - stride + 1, stride)
    is_far = (places >= num_ranks) & (size - places >= num_ranks)  # each rank needs a sample
    places = np.concatenate([[0], places[is_far], [size]])
    num_places = len(places) - 1
    reach = _reach(largest, places[:-1], num_ranks)
    furthest = (reach - places[:-1, None]).max()
    time_of_steps = StepTimes(work, places, num_ranks, ways)
    least = np.full((num_places + 1, len(ways), num_updates), np.inf)
    least[0] = 0.0
    came_from = np.zeros(least.shape, np.int64)
    for stop in range(1, num_places + 1):
        end = int(places[stop])
        first = min(int(np.searchsorted(places, end - furthest)), stop - 1)
        last = int(np.searchsorted(places, end - num_ranks, side="right"))
        if first >= last:
            continue
        starts = slice(first, last)
        time = time_of_steps(starts, stop)
        time += least[starts]
        np.copyto(time, np.inf, where=(reach[starts] < end)[:, None])
        came_from[stop] = first + time.argmin(axis=0)
        least[stop] = per_step + time.min(axis=0)

    is_cut = np.isfinite(least[-1])
    if stride > num_ranks:
        is_cut &= reach[0] >= FEWEST_PLACES * stride
    begins = np.zeros((num_updates, len(ways), size), np.bool_)
    way, update = np.nonzero(is_cut)
    place = np.full(len(way), num_places)
    while len(place):
        place = came_from[place, way, update]
        begins[update, way, places[place]] = True
        is_running = place > 0
        place = place[is_running]
        way = way[is_running]
        update = update[is_running]
    return begins


class StepTimes:
    """Predicts the time of steps of many updates.

    Args:
        work: float64 (updates, samples), predicted time of each sample alone, falling.
        places: int64, positions where steps may begin, and the end.
        ways: float64 (ways, 2), of ``WAYS``.
    """

    def __init__(
        self,
        work: NDArray[np.float64],
        places: IntArray,
        num_ranks: int,
        ways: NDArray[np.float64],
    ) -> None:
        num_updates, size = work.shape
        self._work = work.T.copy()
        self._places = places
        self._longest = self._work[places[:-1]]
        sums = np.zeros((num_updates, size + 1))
        np.cumsum(work, axis=1, out=sums[:, 1:])
        self._sums = sums[:, places].T.copy()
        self._num_ranks = num_ranks
        self._ways = ways

    def __call__(self, starts: slice, stop: int) -> NDArray[np.float64]:
        """Returns the work of the most expensive batch of steps from these places to that one: (starts, ways, updates).

        Exact for one rank. Else it is estimated as the largest of three bounds: the longest sample alone; as many of
        the shortest samples as some rank must take; and an equal part of all samples, with their padding. A run of n
        samples pads about (n - 1) / 2 times the difference of its ends. What remains is that a rank takes whole
        samples: this costs a share of the shortest sample, or of the longest one.
        """
        end = self._places[stop]
        num_samples = end - self._places[starts]
        longest = self._longest[starts]
        if self._num_ranks == 1:
            return (num_samples[:, None] * longest)[:, None]
        shortest = self._work[end - 1]
        fewest = -(-num_samples // self._num_ranks)
        bound = np.maximum(longest, fewest[:, None] * self._work[end - fewest])
        padding = 0.5 * (num_samples / self._num_ranks - 1) / self._num_ranks
        part = (self._sums[stop] - self._sums[starts]) / self._num_ranks
        part += padding[:, None] * (longest - shortest)
        share = self._ways * (num_samples > self._num_ranks)[:, None, None]
        times = part[:, None] + share[:, :, :1] * shortest
        times += share[:, :, 1:] * longest[:, None]
        return np.maximum(times, bound[:, None], out=times)


def _reach(largest: IntArray, places: IntArray, num_ranks: int) -> IntArray:
    """Returns where the longest step ends that begins at each place, by the budget alone: int64 (places, updates)."""
    num_updates, size = largest.shape
    ends = np.full((num_updates, size + 1), size)
    ends[:, :-1] = np.minimum(np.arange(size) + largest, size)
    first_cells = np.arange(num_updates) * (size + 1)
    ends += first_cells[:, None]
    cells = first_cells + places[:, None]
    for _ in range(num_ranks):
        cells = ends.take(cells)
    return cells - first_cells
