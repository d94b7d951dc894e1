"""Cuts many updates of one size at once, for padded batches of one stream of lengths.

An update is sorted, longest sample first, and cut into steps of consecutive samples. A step is divided over the ranks
into runs of neighbours, so that its most expensive batch is as cheap as possible. All updates are cut by the same few
operations on arrays, because a call of numpy takes longer than the work of one small update."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.plan.batches import Batches, offsets_of
from dynagroup.shapes import IntArray

MOST_PLACES = 64  # places of an update where a step may begin; half as many on several ranks
FINE = 8  # if there are fewer places: at least so many must be within the reach of the first step
BISECTIONS = 10  # of the limit of work in a step
TINY = 1e-9  # replaces the work of an empty sample, to avoid a division by 0
WAYS = np.array([[0.5, 0.0], [0.25, 0.25]])  # two estimates of what whole samples cost a step
TABLE = 1 << 16  # lengths up to this are looked up in a table


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
    most = _most_samples(tokens, budget)
    if most is None:
        return None
    # Each update stands in the arrays once for each way to estimate the time of a step; the better cut is used.
    num_ways = 1 if num_ranks == 1 else len(WAYS)
    ways = np.tile(WAYS[:num_ways], (num_updates, 1))
    work = np.repeat(work, num_ways, axis=0)
    most = np.repeat(most, num_ways, axis=0)
    begins = _cheapest_steps(work, most, num_ranks, per_step, ways)
    num_steps = begins.sum(axis=1)
    firsts = np.flatnonzero(begins.ravel())
    if not len(firsts):
        return UpdateCuts(Batches.concatenate([]), np.zeros(num_updates, np.int64))
    of_step = firsts // size
    ends = np.append(firsts[1:], 0)
    is_last = np.append(of_step[1:] != of_step[:-1], True)
    ends[is_last] = size * (of_step[is_last] + 1)
    sizes = _divide(work.ravel(), most.ravel(), firsts, ends, num_ranks)
    times = np.bincount(
        of_step, per_step + _dearest(work.ravel(), firsts, sizes), minlength=len(work)
    )
    times[num_steps == 0] = np.inf
    best = num_ways * np.arange(num_updates) + times.reshape(num_updates, num_ways).argmin(axis=1)
    is_used = np.zeros(len(work), np.bool_)
    is_used[best] = True
    num_steps = num_steps[best]
    positions = np.arange(num_updates * size).reshape(num_updates, size)[num_steps > 0]
    offsets = offsets_of(sizes[is_used[of_step]].ravel())
    return UpdateCuts(Batches(positions.ravel(), offsets), num_steps)


def _dearest(work: NDArray[np.float64], firsts: IntArray, sizes: IntArray) -> NDArray[np.float64]:
    """Returns the work of the most expensive batch of each step."""
    starts = firsts[:, None] + np.cumsum(sizes, axis=1) - sizes
    return (sizes * work[starts]).max(axis=1)


def _most_samples(longest: IntArray, budget: Budget) -> IntArray | None:
    """Returns the most samples of a batch with each longest sample, at least 1; None: the budget looks at more."""
    greatest = int(longest.max())
    if greatest <= TABLE:
        is_there = np.zeros(greatest + 1, np.bool_)
        is_there[longest] = True
        lengths = np.flatnonzero(is_there)
        number = (np.cumsum(is_there) - 1)[longest]
    else:
        lengths, number = np.unique(longest, return_inverse=True)
    most = budget.largest(lengths)
    if most is None:
        return None
    return np.maximum(most, 1)[number].reshape(longest.shape)


# Dynamic programming: the least time to a place is that to an earlier place, and of one step between them. For all
# updates at once; O(places**2) operations on arrays with an entry for each update.
def _cheapest_steps(
    work: NDArray[np.float64],
    most: IntArray,
    num_ranks: int,
    per_step: float,
    ways: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Returns at which samples the steps of least total time begin: bool (updates, samples).

    No step begins in an update that cannot be cut so, or whose batches are so small that more places are needed. On
    one rank, and with all places, the cut is exact; else a step's time is estimated.

    Args:
        ways: float64 (updates, 2), see :func:`_time_of_steps`.
    """
    num_updates, size = work.shape
    stride = -(-size // (MOST_PLACES if num_ranks == 1 else MOST_PLACES // 2))
    places = np.append(np.arange(0, size - stride + 1, stride), size)
    num_places = len(places) - 1
    reach = _reach(most, num_ranks)[:, places[:-1]].T.copy()
    work = work.T.copy()
    at_place = work[places[:-1]]
    sums = np.zeros((size + 1, num_updates))
    np.cumsum(work, axis=0, out=sums[1:])
    every = np.arange(num_updates)
    least = np.full((num_places + 1, num_updates), np.inf)
    least[0] = 0.0
    came_from = np.zeros((num_places + 1, num_updates), np.int64)
    furthest = (reach - places[:-1, None]).max()
    for stop in range(1, num_places + 1):
        end = int(places[stop])
        first = min(int(np.searchsorted(places, end - furthest)), stop - 1)
        last = int(np.searchsorted(places, end - num_ranks, side="right"))
        if first >= last:
            continue
        starts = slice(first, last)
        num_samples = (end - places[starts])[:, None]
        if num_ranks == 1:
            time = num_samples * at_place[starts]
        else:
            time = _time_of_steps(
                work, at_place[starts], sums, places[starts], end, num_ranks, ways.T
            )
        time += least[starts]
        time[reach[starts] < end] = np.inf
        best = time.argmin(axis=0)
        came_from[stop] = first + best
        least[stop] = per_step + time[best, every]
    begins = np.zeros((num_updates, size), np.bool_)
    is_cut = np.isfinite(least[-1])
    if stride > num_ranks:
        is_cut &= reach[0] >= FINE * stride
    place = np.where(is_cut, num_places, 0)
    while place.any():
        running = place > 0
        place = came_from[place, every]
        begins[every[running], places[place[running]]] = True
    return begins


def _time_of_steps(
    work: NDArray[np.float64],
    longest: NDArray[np.float64],
    sums: NDArray[np.float64],
    starts: IntArray,
    end: int,
    num_ranks: int,
    ways: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Estimates the most expensive batch of steps that end at ``end``, without their fixed time: (starts, updates).

    It is the largest of three bounds: the longest sample alone; as many of the shortest samples as some rank must take;
    and an equal part of all samples, with their padding. A run of n samples pads about (n - 1) / 2 times the
    difference of its ends. What remains is that a rank takes whole samples: this costs a share of the shortest sample,
    and of the difference between the longest and the shortest.

    Args:
        work, sums: (samples, updates) and (samples + 1, updates), the work of single samples and its cumulative sum.
        longest: (starts, updates), the work of the first samples.
        ways: (2, updates), these two shares.
    """
    num_samples = end - starts
    fewest = -(-num_samples // num_ranks)
    shortest = work[end - 1]
    of_shortest, of_difference = ways
    pads = 0.5 * (num_samples / num_ranks - 1) / num_ranks
    several = (num_samples > num_ranks)[:, None]
    time = (sums[end] - sums[starts]) / num_ranks
    time += (pads[:, None] + several * of_difference) * (longest - shortest)
    time += several * (of_shortest * shortest)
    np.maximum(time, longest, out=time)
    return np.maximum(time, fewest[:, None] * work[end - fewest], out=time)


def _reach(most: IntArray, num_ranks: int) -> IntArray:
    """Returns where the longest step ends that begins at each sample, by the budget alone: int64 (updates, samples).

    Binary lifting: two batches further is one batch further, twice.
    """
    num_updates, size = most.shape
    step = np.empty((num_updates, size + 1), np.int64)
    step[:, :size] = np.minimum(np.arange(size) + most, size)
    step[:, size] = size
    reach = np.broadcast_to(np.arange(size + 1), step.shape)
    num_batches = num_ranks
    while num_batches:
        if num_batches & 1:
            reach = np.take_along_axis(step, reach, axis=1)
        num_batches >>= 1
        if num_batches:
            step = np.take_along_axis(step, step, axis=1)
    return reach[:, :size]


# Parametric search: batches that are each as large as a limit of work allows are the fewest within the limit, so
# "as many batches as ranks suffice" is monotone in it, and bisection finds the least, for all steps at once.
def _divide(
    work: NDArray[np.float64], most: IntArray, firsts: IntArray, ends: IntArray, num_ranks: int
) -> IntArray:
    """Divides steps over the ranks, so that the most expensive batch is as cheap as possible: sizes, int64 (steps, ranks).

    Args:
        work, most: (N,), of each sample: predicted time, and samples of the largest batch that it begins.
        firsts, ends: int64 (steps,), positions of the first sample of each step, and after its last one.
    """
    if num_ranks == 1:
        return (ends - firsts)[:, None]

    def within(limit: NDArray[np.float64]) -> tuple[IntArray, NDArray[np.bool_]]:
        """Returns the sizes of batches within each step's limit, and whether all its samples find a place."""
        sizes = np.zeros((num_ranks, len(firsts)), np.int64)
        place = firsts.copy()
        for rank in range(num_ranks):
            of_limit = np.minimum(limit / loads[place], size_limit).astype(np.int64)
            for_others = num_ranks - 1 - rank
            fit = np.minimum(np.minimum(of_limit, most[place]), ends - place - for_others)
            np.maximum(fit, 1, out=sizes[rank])
            place = place + sizes[rank]
        return sizes.T, place >= ends

    size_limit = float((ends - firsts).max(initial=1))
    loads = np.append(np.maximum(work, TINY), TINY)
    most = np.append(most, 1)
    best, _ = within(np.full(len(firsts), np.inf))
    starts = firsts[:, None] + np.cumsum(best, axis=1) - best
    high = (best * loads[starts]).max(axis=1)
    # Each step is summed by itself: rounding must not depend on which updates are cut at once.
    borders = np.stack([firsts, ends], axis=1).ravel()
    sums = np.add.reduceat(np.append(work, 0.0), borders)[::2]
    low = np.maximum(work[firsts], sums / num_ranks)
    tried = low * (1 + 1 / 64)  # often nearly equal parts are possible
    for _ in range(BISECTIONS):
        sizes, suffices = within(tried)
        best[suffices] = sizes[suffices]
        high = np.where(suffices, tried, high)
        low = np.where(suffices, low, tried)
        tried = (low + high) / 2
    return best
