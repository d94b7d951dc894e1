"""Forms steps: one batch for each rank, of about equal work.

A step takes a fixed time plus the time of its most expensive batch."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.batches import Batches, offsets_of
from dynagroup.plan.padded import FEWEST, TINY, OrderedWindow, split_dearest
from dynagroup.shapes import IntArray

FEW_STEPS = 20
"""With more steps, sorting batches by work is enough: cutting step by step gains 0.3 % at most."""
LIMITS = (12, 48)
"""Fewest and most limits of work that are tried for a step."""
TABLE = 1 << 17
"""Most entries in a table of limits, unless the fewest limits need more."""
BISECTIONS = 10
TRIED = 64
"""Limits of work that are tried at once, over all steps of a window: a call of numpy takes longer than a few of them."""
EQUAL = 0.05
"""Batches whose work differs by at most about this share count as equal."""
CLOSE = 1 - 1 / 256
"""Limits of work that differ by a smaller factor count as equal."""


def cut_into_steps(window: OrderedWindow, num_ranks: int, per_step: float) -> IntArray:
    """Returns a cut of little time into a multiple of ``num_ranks`` batches, if there are enough samples."""
    if num_ranks == 1:
        return window.least_time(per_step)
    if window.fewest_batches > FEW_STEPS * num_ranks:
        offsets = window.least_time(per_step)
    else:
        offsets = steps_of_least_time(window, num_ranks, per_step)
    offsets = _full_steps(window, offsets, num_ranks)
    if (len(offsets) - 1) % num_ranks:
        fewest_steps = steps_of_least_time(window, num_ranks, FEWEST)
        return _full_steps(window, fewest_steps, num_ranks)
    return offsets


def _full_steps(window: OrderedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """Splits batches until their number is a multiple of the ranks.

    Uses sizes that are not allowed only if necessary.
    """
    num_batches = -(-(len(offsets) - 1) // num_ranks) * num_ranks
    offsets = split_dearest(window, offsets, num_batches)
    if window.allowed is None:
        return offsets
    return split_dearest(replace(window, allowed=None), offsets, num_batches)


# Dynamic programming over the starts of steps. If the work of a batch is limited, a step is filled greedily, so start
# and limit decide where it ends and what its most expensive batch is. Each step then gets the limit of least total
# time. A step has a sample per rank or more, so many starts are computed at once.
# O(N * limits * log ranks) time, O(N * limits) memory.
def steps_of_least_time(window: OrderedWindow, num_ranks: int, per_step: float) -> IntArray:
    """Returns a cut of little total time; its last step may have fewer batches than ranks."""
    num_samples = len(window)
    limits = _limits(window, num_ranks, per_step)
    ends, dearest = _ends_of_steps(window, limits, num_ranks)
    least = np.zeros(num_samples + 1)
    choice = np.zeros(num_samples + 1, np.int64)
    for stop in range(num_samples, 0, -num_ranks):
        starts = slice(max(stop - num_ranks, 0), stop)
        time = dearest[starts] + least[ends[starts]]
        choice[starts] = time.argmin(axis=1)
        least[starts] = per_step + time.min(axis=1)
        if stop == num_samples:  # too few samples for a step begin behind the first of these starts
            least[starts][1:] = np.inf
    firsts = []
    start = 0
    while start < num_samples:
        firsts.append(start)
        start = int(ends[start, choice[start]])
    first = np.asarray(firsts)
    steps = Steps(window, first, np.append(first[1:], num_samples), num_ranks)
    chosen = choice[first]
    low = np.where(chosen > 0, limits[chosen - 1], 0.0)  # within it, these steps would end earlier
    low = np.maximum(low, steps.least())
    sizes = divide(steps, low, limits[chosen], max(TRIED // len(first), 1))
    return np.unique(np.append(0, np.cumsum(sizes)))


def _limits(window: OrderedWindow, num_ranks: int, per_step: float) -> NDArray[np.float64]:
    """Returns limits of a batch's work to try: from far below a step's fixed cost up to what a single step needs."""
    if len(window.limits):
        return window.limits
    fewest, most = LIMITS
    mean = float(window.work.sum()) / num_ranks
    dearest = float(window.work_of(np.arange(len(window)), window.largest).max())
    dearest_sample = float(sum(work.max() for work in window.streams or (window.work,)))
    high = min(dearest, 2 * mean + dearest_sample)
    low = max(min(per_step / 8, mean), float(window.work.min()), high / 1e6)
    if not TINY < low < high:
        return np.asarray([high])
    num_limits = max(min(TABLE // len(window), most), fewest)
    return low * (high / low) ** (np.arange(num_limits) / (num_limits - 1))


def _ends_of_steps(
    window: OrderedWindow, limits: NDArray[np.float64], num_ranks: int
) -> tuple[IntArray, NDArray[np.float64]]:
    """Returns where steps end, and the work of their most expensive batch, by start and limit: both (N + 1, limits)."""
    num_samples = len(window)
    num_limits = len(limits)
    starts = np.arange(num_samples)[:, None]
    sizes = window.sizes_within(starts, limits)
    ends = np.full((num_samples + 1, num_limits), num_samples)
    ends[:-1] = starts + sizes
    work = np.zeros(ends.shape)
    work[:-1] = window.work_of(np.broadcast_to(starts, sizes.shape), sizes)
    next_cell = ends * num_limits + np.arange(num_limits)
    last_cell, dearest = after_batches(next_cell.ravel(), work.ravel(), num_ranks)
    return (last_cell // num_limits).reshape(ends.shape), dearest.reshape(ends.shape)


def after_batches(
    next_place: IntArray, work: NDArray[np.float64], num_batches: int
) -> tuple[IntArray, NDArray[np.float64]]:
    """Returns where so many batches from each place end, and the work of the most expensive one.

    Binary lifting: two batches further is one batch further, twice. O(places * log batches).

    Args:
        next_place, work: (places,), of the one batch that starts at each place: where it ends, and its work.
    """
    place = np.arange(len(next_place))
    dearest = np.zeros(len(next_place))
    while num_batches:
        if num_batches & 1:
            dearest = np.maximum(dearest, work.take(place))
            place = next_place.take(place)
        num_batches >>= 1
        if num_batches:
            work = np.maximum(work, work.take(next_place))
            next_place = next_place.take(next_place)
    return place, dearest


@dataclass(frozen=True)
class Steps:
    """Steps of a sorted window, whose samples are to be divided over the ranks.

    Args:
        firsts, ends: int64 (steps,), positions of the first sample of each step, and after its last one.
    """

    window: OrderedWindow
    firsts: IntArray
    ends: IntArray
    num_ranks: int

    def greedy(self, limits: NDArray[np.float64]) -> tuple[IntArray, NDArray[np.bool_]]:
        """Returns the sizes of batches that are each as large as each step's limit of work allows.

        Also returns whether these batches have all samples of the step.
        """
        sizes = np.zeros((self.num_ranks, len(self.firsts)), np.int64)
        place = self.firsts
        for rank in range(self.num_ranks):
            num_left = self.ends - place
            within = self.window.sizes_within(self._inside(place), limits)
            if self.window.allowed is None:  # each later rank needs a sample
                within = np.minimum(within, num_left - (self.num_ranks - 1 - rank))
            else:
                within = self.window.rounded(np.clip(num_left, 1, within))
            sizes[rank] = np.minimum(np.maximum(within, 1), num_left)
            place = place + sizes[rank]
        return sizes.T, place >= self.ends

    def dearest(self, sizes: IntArray) -> NDArray[np.float64]:
        """Returns the work of the most expensive batch of each step."""
        before = np.cumsum(sizes, axis=1) - sizes
        starts = self._inside(self.firsts[:, None] + before)
        work = self.window.work_of(starts, np.maximum(sizes, 1))
        return np.where(sizes > 0, work, 0.0).max(axis=1)

    def least(self) -> NDArray[np.float64]:
        """Returns a lower bound of this work: that of the first sample, or an equal part of all samples."""
        # Each step is summed by itself: rounding must not depend on which steps are divided at once.
        borders = np.stack([self.firsts, self.ends], axis=1).ravel()
        sums = np.add.reduceat(np.append(self.window.work, 0.0), borders)[::2]
        return np.maximum(self.window.work[self.firsts], sums / self.num_ranks)

    def _inside(self, positions: IntArray) -> IntArray:
        return np.minimum(positions, len(self.window) - 1)


# Parametric search: batches that are each as large as a limit of work allows are the fewest within the limit, so
# "as many batches as ranks suffice" is monotone in it. Each round tries several limits of all steps at once, and keeps
# the gap between the largest that does not suffice and the least that does.
# O(ranks * rounds) operations on arrays with an entry for each step and limit.
def divide(
    steps: Steps, low: NDArray[np.float64], high: NDArray[np.float64], num_tried: int = 1
) -> IntArray:
    """Divides steps over the ranks, so that the most expensive batch is as cheap as possible.

    Args:
        low, high: float64 (steps,), limits of a batch's work; greedy batches suffice within ``high``, not below ``low``.
        num_tried: limits of a step that a round tries. 1: bisection, with the fewest entries; more: fewer rounds.

    Returns sizes of batches, int64 (steps, ranks); 0 only if a step has fewer samples than ranks, or sizes are rounded.
    """
    if steps.num_ranks == 1:
        return (steps.ends - steps.firsts)[:, None]
    best, _ = steps.greedy(high)
    high = steps.dearest(best)
    num_steps = len(high)
    firsts = np.tile(steps.firsts, num_tried)
    ends = np.tile(steps.ends, num_tried)
    several = replace(steps, firsts=firsts, ends=ends)
    every_step = np.arange(num_steps)
    shares = np.arange(1, num_tried + 1)[:, None] / (num_tried + 1)
    tried = low + shares * (high - low)
    tried[0] = low * (1 + 1 / 64)  # often nearly equal parts are possible
    is_open = np.ones(num_steps, np.bool_)
    for _ in range(BISECTIONS):
        tried = np.sort(tried, axis=0)
        sizes, suffices = several.greedy(tried.ravel())
        suffices = suffices.reshape(tried.shape)
        first = np.where(suffices.any(axis=0), suffices.argmax(axis=0), num_tried)
        limits = np.concatenate([low[None], tried, high[None]])
        low = np.where(is_open, limits[first, every_step], low)
        high = np.where(is_open, limits[first + 1, every_step], high)
        is_lower = is_open & (first < num_tried)
        best[is_lower] = sizes[(first * num_steps + every_step)[is_lower]]
        # Each step ends by itself: its division must not depend on which steps are divided at once.
        is_open &= low < high * CLOSE
        if not is_open.any():
            break
        tried = low + shares * (high - low)
    return best


# By an exchange argument, no division of a step's samples has a cheaper most expensive batch than runs of the sorted
# samples, and `divide` finds the best runs. All uneven steps are divided at once.
def levelled(window: OrderedWindow, batches: Batches, num_ranks: int) -> Batches:
    """Divides the samples of uneven steps over the ranks again, for windows of one padded stream. A step that would not
    become cheaper stays as it is.

    Args:
        batches: positions in the window, step after step, the most expensive batch of a step first. The last step may
            lack some.
    """
    uneven, dearest = _uneven_steps(window, batches, num_ranks)
    if not len(uneven):
        return batches
    step_of_sample = np.repeat(np.arange(len(batches)) // num_ranks, batches.sizes)
    slots = np.flatnonzero(np.isin(step_of_sample, uneven))  # where their samples are in `order`
    places = batches.order[slots]
    places = places[np.lexsort([places, step_of_sample[slots]])]  # sorted in each step
    num_samples = np.bincount(step_of_sample)[uneven]

    steps = _steps_of(window, places, num_samples, num_ranks)
    high = dearest * (1 + TINY)
    sizes = divide(steps, steps.least(), high, max(TRIED // len(uneven), 1))
    is_divided = (sizes > 0).all(axis=1) & (sizes.sum(axis=1) == num_samples)
    is_better = is_divided & (steps.dearest(sizes) < dearest)

    order = batches.order.copy()
    of_better = np.repeat(is_better, num_samples)
    order[slots[of_better]] = places[of_better]
    new_sizes = batches.sizes.copy()
    in_better = uneven[is_better, None] * num_ranks + np.arange(num_ranks)
    new_sizes[in_better] = sizes[is_better]
    return _dearest_first_in_steps(window, Batches(order, offsets_of(new_sizes)), num_ranks)


def _uneven_steps(
    window: OrderedWindow, batches: Batches, num_ranks: int
) -> tuple[IntArray, NDArray[np.float64]]:
    """Returns which steps have batches that differ in work, and the work of their most expensive batches. A batch of
    one sample cannot be divided."""
    num_steps = len(batches) // num_ranks  # without a last step that lacks batches
    num_batches = num_steps * num_ranks
    work = window.work_of(batches.order[batches.offsets[:-1]], batches.sizes)
    by_step = work[:num_batches].reshape(num_steps, num_ranks)
    is_uneven = np.ptp(by_step, axis=1) > EQUAL * by_step.mean(axis=1)
    can_be_divided = batches.sizes[:num_batches:num_ranks] > 1
    uneven = np.flatnonzero(is_uneven & can_be_divided)
    return uneven, by_step[uneven].max(axis=1)


def _steps_of(
    window: OrderedWindow, places: IntArray, num_samples: IntArray, num_ranks: int
) -> Steps:
    """Returns steps of ``num_samples`` consecutive ones of these places each, whose batches stay in their step."""
    ends = np.cumsum(num_samples)
    num_left_in_step = np.repeat(ends, num_samples) - np.arange(len(places))
    largest = np.minimum(window.largest[places], num_left_in_step)
    part = OrderedWindow(window.work[places], largest, window.allowed)
    return Steps(part, ends - num_samples, ends, num_ranks)


def _dearest_first_in_steps(window: OrderedWindow, batches: Batches, num_ranks: int) -> Batches:
    work = window.work_of(batches.order[batches.offsets[:-1]], batches.sizes)
    return batches.take(np.lexsort([-work, np.arange(len(batches)) // num_ranks]))


def complete(
    batches: Batches, tokens: IntArray, num_ranks: int, *, repeats: bool
) -> tuple[Batches, NDArray[np.bool_]]:
    """Returns the batches of all complete steps, and which of them only fill the last step: bool (steps, ranks).

    Args:
        batches: given step after step; the last step may lack some.
        tokens: of each sample.
        repeats: True completes the last step with copies of the smallest samples; False leaves it out.
    """
    num_batches = len(batches)
    num_missing = -num_batches % num_ranks
    if num_missing and repeats:
        samples = np.sort(batches.order)
        smallest = samples[np.argsort(tokens[samples], kind="stable")]
        copies = Batches(np.resize(smallest, num_missing), np.arange(num_missing + 1))
        batches = Batches.concatenate([batches, copies])
    num_steps = len(batches) // num_ranks
    taken = np.arange(num_steps * num_ranks)
    return batches.take(taken), (taken >= num_batches).reshape(num_steps, num_ranks)
