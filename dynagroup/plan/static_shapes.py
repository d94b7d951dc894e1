"""Few shapes of batches, for models that are compiled for each shape they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import BoolArray, Budget, FloatArray, Wrapper, is_packed, padded_streams
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.lengths import as_streams
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.multistream import alike_order
from dynagroup.plan.padded import OrderedWindow
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within, primary, round_up
from dynagroup.validation import check_int

# Work of samples by their lengths (streams, K), and of a step.
Costs: TypeAlias = tuple[Callable[[IntArray], NDArray[np.float64]], float]
Most: TypeAlias = Callable[[IntArray], IntArray]  # lengths (streams, K) -> samples that fit (K,)
BATCHES_OF_A_WINDOW = 100
PLACES = 64  # of a window where a run may begin, about
TRIED = 4096  # samples of all windows in which rungs are tried
QUANTILES, RATIOS = 300, 200  # lengths that rungs may have: so many quantiles, and so many in equal ratios


class ShapeLadder(Wrapper):
    """A few shapes (samples, tokens) that fit a budget, chosen for least predicted work over a dataset's lengths; itself the
    budget to plan with: a batch fits if one of the shapes, the *rungs*, holds it. Loaders pad every batch to the cheapest
    that does, with rows of weight 0.

    Args:
        lengths: tokens of each sample, or a dict of named streams.
        budget: what fits; a number means so many tokens. What it learns from running out of memory rules rungs out.
        num_shapes: most shapes. Samples that do not fit even alone have one of their own.
        window: samples that are cut together: those of an update, or a sampler's window. None: a hundred batches or so.
        grouping: so many windows' samples are sorted and dealt into as many windows.
        work: predicted time of a batch.

    Raises:
        ConfigError: there are no lengths; or one shape is asked for, and some samples do not fit even alone.

    >>> ladder = ShapeLadder([10, 11, 12, 50, 100], 200, num_shapes=2, work=Work())
    >>> ladder.shapes
    [(4, 50), (2, 100)]
    >>> ladder.shape_for(2, 40)
    (4, 50)
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray | Mapping[str, Any],
        budget: Budget | int,
        num_shapes: int = 8,
        *,
        window: int | None = None,
        grouping: int = 1,
        work: Work | None = None,
    ) -> None:
        streams, num_shapes = as_streams(lengths), check_int("num_shapes", num_shapes)
        self.base, work = as_budget(budget).bind(streams), check_work(work)
        if not len(streams[primary(streams)]):
            raise ConfigError("a ShapeLadder needs lengths to be fitted to, but there are none")
        if is_packed(self.base, streams):
            raise ConfigError(f"a ShapeLadder needs a padded budget, but has {self.base.fingerprint}")
        self._names, self._capped = padded_streams(self.base, streams), [*streams]
        units = np.stack([streams[name].astype(np.int64) for name in self._names])
        units = np.maximum(round_up(units, self.pad_to_multiple_of), 1)
        fit = self._most(units) > 0
        each = lambda widths: work.of_lengths(dict(zip(self._names, widths, strict=True)))  # noqa: E731
        price = each, work.per_step
        oversize = int(not fit.all())
        if num_shapes == oversize and fit.any():
            raise ConfigError("`num_shapes` must be at least 2, since some samples do not fit even alone")
        rungs = np.array([[1, *units.max(axis=1)]])  # of those that do not fit even alone; last, to hold nothing else
        if fit.any():
            how = None if window is None else check_int("window", window), grouping
            rungs = np.append(_chosen(units[:, fit], self._most, num_shapes - oversize, how, price), rungs, axis=0)
            rungs = rungs if oversize else rungs[:-1]
        costs = rungs[:, 0] * each(rungs[:, 1:].T)
        rungs = rungs[np.lexsort([costs, np.arange(len(rungs)) >= len(rungs) - oversize])]
        self._samples, self._widths = rungs[:, 0], rungs[:, 1:].T
        self._work = self._samples * each(self._widths)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the padded streams, in the order of a shape's numbers."""
        return self._names

    def _of(self, samples: IntArray, widths: IntArray) -> BatchShape:
        """Batches of so many samples that are as wide; what is not padded has no units."""
        return BatchShape.of(samples, {**dict.fromkeys(self._capped, 0), **dict(zip(self._names, widths, strict=True))})

    def _most(self, widths: IntArray) -> IntArray:
        return largest_within(lambda count: self.base.fits(self._of(count, widths)), widths.shape[1])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """(samples, tokens) of each rung, with further padded streams (samples, tokens, target): shortest first."""
        return sorted(
            zip(self._samples.tolist(), *self._widths.tolist(), strict=True), key=lambda rung: (*rung[1:], rung[0])
        )

    def shape_for(self, num_samples: int, *longest: int) -> tuple[int, ...]:
        """The rung that a batch of so many samples is padded to, whose longest sample has so many tokens (in each padded
        stream). ConfigError: no rung holds it."""
        asked = BatchShape.of(num_samples, dict(zip(self._names, longest, strict=True)))
        if not self.holds(asked).any():
            raise ConfigError(f"none of the shapes {self.shapes} holds {num_samples} samples of {longest} tokens")
        run = self.as_run(asked)
        return (int(run.num_samples[0]), *(int(run.longest[name][0]) for name in self._names))

    @property
    def ladder(self) -> ShapeLadder:
        return self

    @property
    def fingerprint(self) -> str:
        return f"ShapeLadder({described(self.shapes)}, {self.base.fingerprint})"

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return self.base.cost(self.as_run(shape))

    def holds(self, shape: BatchShape) -> BoolArray:
        """Which rungs hold each of K batches: bool (K, rungs)."""
        wide = [shape.longest[name][:, None] <= widths for name, widths in zip(self._names, self._widths, strict=True)]
        return np.logical_and.reduce([shape.num_samples[:, None] <= self._samples, *wide])

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        holds = self.holds(shape)
        at, held = holds.argmax(axis=1), holds.any(axis=1)
        filled = {n: np.where(held, w[at], shape.longest[n]) for n, w in zip(self._names, self._widths, strict=True)}
        return BatchShape(
            np.where(held, self._samples[at], shape.num_samples), {**shape.longest, **filled}, shape.total
        )

    @property
    def _fitting(self) -> BoolArray:
        return self.base.fits(self._of(self._samples, self._widths))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return (self.holds(shape) & self._fitting).any(axis=1) & self.base.fits(shape)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if len(self._capped) > 1:
            return None
        return np.where((longest[:, None] <= self._widths[0]) & self._fitting, self._samples, 0).max(axis=1)

    def window(self, lengths: Streams, work: NDArray[np.float64], most: IntArray) -> OrderedWindow:
        """A window in the order in which it is cut, whose runs cost what their rungs do. ``work`` and ``most``: as there."""
        wide = zip(self._names, self._widths, strict=True)
        held = _held_until(np.logical_and.reduce([lengths[name][:, None] <= widths for name, widths in wide]))
        reach = np.minimum(held - np.arange(len(work))[:, None], np.minimum(self._samples, most[:, None]))
        fitting = self._fitting
        reach[:, ~fitting] *= ~(reach[:, fitting] > 0).any(axis=1, keepdims=True)
        order = np.argsort(self._work, kind="stable")
        reach = np.maximum.accumulate(reach[:, order], axis=1)
        reach = np.append(reach, np.maximum(reach[:, -1:], 1), axis=1)  # what no rung holds is alone, and dear
        costs = np.append(self._work[order], self._work.max() + work.max())
        return RungWindow(work, np.maximum(reach[:, -1], 1), reach=reach, costs=costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RungWindow(OrderedWindow):
    """A window whose runs are padded to rungs: a run is as much work as the cheapest rung that holds it."""

    reach: IntArray  # samples of the longest run from each position that a rung or a cheaper one holds: (N, rungs)
    costs: NDArray[np.float64]  # of the rungs, growing

    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray[np.float64]:
        return self.costs[(self.reach[starts] >= np.asarray(sizes)[..., None]).argmax(axis=-1)]

    @property
    def limits(self) -> NDArray[np.float64]:
        return self.costs

    def sizes_under(self, limits: NDArray[np.float64]) -> IntArray:
        under = np.append(np.ones((len(self), 1), np.int64), self.reach, axis=1)
        return np.maximum(under[:, self.costs.searchsorted(limits, side="right")], 1)

    def greedy(self, start: int, stop: int, most_runs: int) -> Callable[[float], list[int]]:
        def under(limit: float) -> list[int]:
            sizes = self.sizes_under(np.asarray([limit]))[:, 0].tolist()
            offsets = [start]
            while offsets[-1] < stop and len(offsets) <= most_runs:
                offsets.append(min(offsets[-1] + sizes[offsets[-1]], stop))
            return offsets

        return under

    def least_time(self, price: float) -> IntArray:
        stops = self.reach + np.arange(len(self))[:, None]
        choice = _cheapest(np.broadcast_to(self.costs + price, stops.shape), stops[:, :, None], np.zeros(1, np.int64))[
            1
        ]
        came_to, offsets = np.take_along_axis(stops, choice, axis=1)[:, 0].tolist(), [0]
        while offsets[-1] < len(self):
            offsets.append(came_to[offsets[-1]])
        return np.asarray(offsets, np.int64)


def _held_until(holds: BoolArray) -> IntArray:
    """From each place on (first axis) the first that is not held."""
    places = np.arange(len(holds)).reshape(-1, *[1] * (holds.ndim - 1))
    return np.minimum.accumulate(np.where(holds, len(holds), places)[::-1], axis=0)[::-1]


# Dynamic programming from the last place to the first: a run goes as far as its rung holds, for what starts later never costs
# more. O(places * rungs * windows).
def _cheapest(
    costs: NDArray[np.float64], stops: IntArray, windows: IntArray, without: IntArray | None = None
) -> tuple[NDArray[np.float64], IntArray]:
    """The least time of these windows, and which rung a run from each place takes. ``costs`` (places, rungs) and ``stops``
    (places, rungs, windows) of runs: one that cannot begin stops where it is. ``without``: a rung that each window has not."""
    rows, choice = np.arange(len(windows)), np.zeros((len(costs), len(windows)), np.int64)
    best = np.full((len(costs) + 1, len(windows)), np.inf)
    best[-1] = 0.0
    for place in range(len(costs) - 1, -1, -1):
        time = costs[place][:, None] + best[stops[place][:, windows], rows]
        if without is not None:
            time[without, rows] = np.inf
        choice[place] = time.argmin(axis=0)
        best[place] = time[choice[place], rows]
    return best[0], choice


def few_shapes(
    shapes: int | None,
    lengths: Any,
    budget: Budget | int,
    samples_per_update: Any = None,
    window: int | None = None,
    grouping: int | None = None,
    work: Work | None = None,
) -> Budget:
    """The budget; where so many ``shapes`` are asked for, a ladder of it for what is cut together: an update, or a window."""
    if shapes is None:
        return as_budget(budget)
    size: Any = samples_per_update(0, None) if callable(samples_per_update) else samples_per_update
    return ShapeLadder(lengths, budget, shapes, window=size or window, grouping=grouping or 1, work=work)


# What: lengths by dynamic programming over the histogram, as if every batch were full; of each length the most samples that fit
#   and halves of it; then backward elimination: windows of the dataset are cut with all candidates, and the rungs go one after
#   another (a few at once while they are many) whose loss costs least, until few enough are left.
# Why: the exact choice is a k-median problem. Sizes matter because an update's last batches are rarely full.
# Cost: half a second to two, for any number of lengths.
def _chosen(units: IntArray, most: Most, num: int, cut: tuple[int | None, int], price: Costs) -> IntArray:
    """The rungs (K, 1 + streams), samples first. ``units``: padded lengths (streams, N) of samples that fit alone. ``cut``:
    samples of a window, and windows that are sorted together."""
    window, pool = cut
    some = units[:, :: max(units.shape[1] // TRIED, 1)]
    if window is None:
        window = int(BATCHES_OF_A_WINDOW / (1.0 / most(some)).mean())
    window = min(window, units.shape[1])
    levels = [_levels(units, name, most, num, window, price) for name in range(len(units))]
    widths = np.array([*product(*levels)]).T
    sizes = np.minimum(most(widths), window)
    halves = sizes >> np.arange(64)[:, None].clip(max=62)
    found = np.array([(n, *w) for row in halves for n, w in zip(row.tolist(), widths.T.tolist(), strict=True) if n])
    found = np.unique(found, axis=0)
    must = units[
        :, units.argmax(axis=1)
    ]  # samples that some rung holds: of several streams more are found to be needed
    for _ in range(2 * num):
        windows = _drawn(units, must, window, pool)
        flat = windows.reshape(len(units), -1)
        alone = flat[:, ~_held(flat, found)]
        own = np.concatenate([np.minimum(most(alone), window)[None], alone]).T
        trial = _Trial(windows, np.unique(np.append(found, own, axis=0), axis=0), price)
        while len(trial.rungs) > num:
            loss, excess = trial.losses(), len(trial.rungs) - num
            unused = np.flatnonzero(loss <= 0)
            trial.without(unused[:excess] if len(unused) else np.argsort(loss)[: max(excess // 8, 1)])
        missed = units[:, ~_held(units, trial.rungs)]
        if not missed.size:
            return trial.rungs
        must = np.append(must, missed[:, [missed.sum(axis=0).argmax()]], axis=1)
    raise ConfigError(
        f"`num_shapes` is too small: {num} shapes that fit hold not every sample in all its lengths; allow more"
    )


def _held(units: IntArray, rungs: IntArray) -> BoolArray:
    """Which samples (streams, N) some rung holds: bool (N,)."""
    return np.logical_and.reduce([row[:, None] <= rungs[:, 1 + s] for s, row in enumerate(units)]).any(axis=1)


def _levels(units: IntArray, stream: int, most: Most, num: int, window: int, price: Costs) -> IntArray:
    """Lengths of one stream to which it is padded up with least work, exact for the lengths that are looked at; of several
    streams few each, because rungs are made of all combinations. O(num * 500**2)."""
    values = np.sort(units[stream])
    few = num if len(units) == 1 else min(int(num ** (1 / len(units))) + 1, 6)
    at_ratios = np.searchsorted(values, np.geomspace(values[0], values[-1], RATIOS)).clip(max=len(values) - 1)
    tried = np.append(np.quantile(values, np.linspace(0, 1, QUANTILES), method="higher"), values[at_ratios])
    grid = np.unique(np.append(tried, values[-1]))
    if len(grid) <= few:
        return grid
    wide = np.repeat(np.median(units, axis=1).astype(np.int64)[:, None], len(grid), axis=1)
    wide[stream] = grid
    each = np.append(0.0, price[0](wide) + price[1] / np.clip(most(wide), 1, window))
    below = np.append(0, np.searchsorted(values, grid, side="right"))
    time = np.where(np.triu(np.ones((len(below), len(below)), bool), 1), (below - below[:, None]) * each, np.inf)
    best, came_from = time[0], []
    for _ in range(few - 1):
        through = best[:, None] + time
        came_from.append(through.argmin(axis=0))
        best = through.min(axis=0)
    at, levels = len(grid), []
    for step in came_from[::-1]:
        levels.append(at)
        at = int(step[at])
    return grid[np.asarray([*levels, at]) - 1]


def _drawn(units: IntArray, must: IntArray, window: int, pool: int) -> IntArray:
    """Windows of samples drawn at random, each in the order in which it is cut; those that ``must`` be held among them."""
    rng, count = np.random.default_rng(0), max(TRIED // (window * pool), 1 if pool > 1 else 8)
    drawn = units[:, rng.integers(0, units.shape[1], (count, window * pool))]
    numbers = np.arange(must.shape[1]) % (count * window * pool)
    drawn[:, numbers % count, numbers // count] = must
    if pool > 1:
        ranked = np.argsort(-drawn.sum(axis=0), axis=1, kind="stable")
        drawn = np.take_along_axis(drawn, ranked[None], axis=2).reshape(len(units), -1, window)
    if len(units) == 1:
        return -np.sort(-drawn, axis=2)
    return np.stack([rows[:, alike_order(list(rows))] for rows in drawn.swapaxes(0, 1)], axis=1)


class _Trial:
    """Windows that are cut with candidates for rungs. In large ones runs begin at some places only, densest among the longest
    samples, and a run that ends between two places counts for what it holds."""

    def __init__(self, windows: IntArray, rungs: IntArray, price: Costs) -> None:
        size, places = windows.shape[2], [0]
        while (step := places[-1] + max(1, min(places[-1] // 8, size // PLACES))) < size:
            places.append(step)
        ends = np.asarray([*places, size])
        self.rungs, samples, begin = rungs, rungs[:, 0], ends[:-1, None]
        reach = np.searchsorted(ends, begin + samples, side="right") - 1
        reach = np.maximum(reach, np.arange(1, len(ends))[:, None])
        held = np.where(begin + samples < size, (ends[reach] - begin) / samples, 1.0)
        self._costs = (samples * price[0](rungs[:, 1:].T) + price[1]) * held
        longest = np.maximum.reduceat(windows, places, axis=2)  # (streams, windows, places)
        holds = np.logical_and.reduce([longest[s].T[:, None] <= rungs[:, 1 + s, None] for s in range(len(longest))])
        self._stops = np.minimum(reach[:, :, None], _held_until(holds))

    def without(self, rungs: IntArray) -> None:
        self.rungs, self._costs = np.delete(self.rungs, rungs, axis=0), np.delete(self._costs, rungs, axis=1)
        self._stops = np.delete(self._stops, rungs, axis=1)

    def losses(self) -> NDArray[np.float64]:
        """What the windows take longer without each rung: only those that use it are cut again."""
        windows = np.arange(self._stops.shape[2])
        time, choice = _cheapest(self._costs, self._stops, windows)
        used, at = np.zeros((len(windows), len(self.rungs)), np.bool_), np.zeros(len(windows), np.int64)
        while (live := np.flatnonzero(at < len(choice))).size:
            rung = choice[at[live], live]
            used[live, rung] = True
            stops = self._stops[at[live], rung, live]
            at[live] = np.where(stops > at[live], stops, len(choice))  # no rung holds what begins here
        again, rung = np.nonzero(used)
        worse = np.minimum(_cheapest(self._costs, self._stops, again, rung)[0], 1e300) - time[again]
        return np.bincount(rung, weights=worse, minlength=len(self.rungs)).astype(np.float64)
