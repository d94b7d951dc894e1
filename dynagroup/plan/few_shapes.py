"""Chooses a few batch shapes, for models that are compiled once per shape."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynagroup.budget.base import BoolArray, Budget, FloatArray, Wrapper, is_packed, padded_streams
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.lengths import as_streams
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.packed import pack
from dynagroup.plan.padded import OrderedWindow, in_order
from dynagroup.plan.strata import dealt, number_of_strata
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within, primary, round_up
from dynagroup.validation import check_int

BATCHES_OF_A_WINDOW = 100
SAMPLES, WINDOWS, TRIED = (
    4096,
    256,
    600,
)  # most samples and windows to draw, most distinct batches to choose from
ROUNDS = 3  # passes of the search: the first adds shapes, each later one chooses every shape again
AGAIN, NOT_HELD = (
    4,
    1e30,
)  # time of a batch larger than all shapes: a factor if it can be cut again, else this much


class ShapeLadder(Wrapper):
    """A budget of a few batch shapes (samples, tokens), chosen to make a dataset's batches take the least predicted time.
    A batch fits if one of the shapes is large enough. Loaders pad it to the cheapest such shape; added rows weigh 0.

    Args:
        lengths: int (N,), tokens of each sample, or a dict by stream.
        budget: limit of a batch; an int means that many tokens. Shapes above a limit learned later are not used.
        num_shapes: int, largest number of shapes. One of them is for samples that do not fit even alone.
        window: int, samples planned together: those of an update, or a sampler's window. None: about a hundred batches.
        grouping: int: so many windows of samples are sorted together, then dealt into stratified windows again.
        strata: int, chunks of such a window, see :class:`~dynagroup.LengthAwareBatchSampler`.
        work: predicted time of a batch.

    Raises ConfigError if there are no lengths; or if ``num_shapes`` is 1, and some samples do not fit even alone.

    >>> ladder = ShapeLadder([10, 11, 12, 50, 100], 200, num_shapes=2, work=Work())
    >>> ladder.shapes
    [(4, 50), (2, 100)]
    >>> ladder.shape_for(2, 40)
    (4, 50)
    """

    ladder: Any = property(lambda self: self)

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray | Mapping[str, Any],
        budget: Budget | int,
        num_shapes: int = 8,
        *,
        window: int | None = None,
        grouping: int = 1,
        strata: int | None = None,
        work: Work | None = None,
    ) -> None:
        streams, num_shapes = as_streams(lengths), check_int("num_shapes", num_shapes, most=TRIED)
        grouping = check_int("grouping", grouping)
        self.base, work = as_budget(budget).bind(streams), check_work(work)
        if not len(streams[primary(streams)]):
            raise ConfigError(
                "a ShapeLadder needs at least one length, to choose shapes for, but `lengths` is empty"
            )
        if is_packed(self.base, streams):
            way_out = "for packed batches pass `shapes` to a loader"
            raise ConfigError(
                f"a ShapeLadder needs a padded budget, but got {self.base.fingerprint}; {way_out}"
            )
        self._names, self._capped = padded_streams(self.base, streams), [*streams]
        units = np.stack([streams[name].astype(np.int64) for name in self._names])
        units = np.maximum(round_up(units, self.pad_to_multiple_of), 1)
        fit = self._most(units) > 0
        oversize = int(not fit.all())
        if num_shapes == oversize and fit.any():
            raise ConfigError(
                "`shapes` (`num_shapes`) must be at least 2: samples that do not fit even alone need one"
            )
        rungs = np.array(
            [[1, *units.max(axis=1)]]
        )  # the shape for samples that do not fit even alone
        if fit.any():
            window = None if window is None else check_int("window", window)
            windows = self._drawn(units[:, fit], window, grouping, strata)
            found = self._chosen(units[:, fit], windows, num_shapes - oversize, work)
            rungs = np.append(found, rungs[:oversize], axis=0)
        rungs = rungs[
            np.lexsort([self._time(rungs, work), np.arange(len(rungs)) >= len(rungs) - oversize])
        ]
        self._samples, self._widths = rungs[:, 0], rungs[:, 1:].T
        self._work = self._time(rungs, work)

    def _drawn(
        self, units: IntArray, window: int | None, pool: int, strata: int | None
    ) -> Iterator[IntArray]:
        """Yields random windows of samples, as padded lengths (streams, N), that are cut to find good shapes."""
        num = units.shape[1]
        if window is None:
            window = int(
                BATCHES_OF_A_WINDOW / (1.0 / self._most(units[:, :: max(num // SAMPLES, 1)])).mean()
            )
        window = min(window, num)
        count = max(min(SAMPLES // (window * pool), WINDOWS), 1)
        tokens = units.sum(axis=0)
        num_strata = number_of_strata(strata, tokens[:: max(num // SAMPLES, 1)], window, pool)
        rng = np.random.default_rng(0)
        for places in rng.integers(0, num, (count, window * pool)):
            longest_first = places[np.argsort(-tokens[places], kind="stable")]
            for update in dealt(longest_first, pool, num_strata, rng):
                yield units[:, update]

    def _boxes(self, hardest: IntArray, most: IntArray) -> Iterator[IntArray]:
        """Yields candidate shapes (K, 1 + streams): samples ``hardest`` (streams, K), one stream as long as fits."""
        one, num = np.ones_like(hardest[0]), hardest.shape[1]
        for stream, longest in enumerate(most):
            grown = lambda width, n=stream: np.insert(  # noqa: E731
                np.delete(hardest, n, axis=0), n, width, axis=0
            )
            wide = grown(
                largest_within(
                    lambda width, g=grown: self.base.fits(self._of(one, g(width))), num, longest
                )
            )
            yield np.stack([self._most(wide), *wide], axis=1)

    # Greedy facility location (Cornuejols, Fisher and Nemhauser 1977), improved by exchange. Drawn windows are cut as
    # if all shapes were allowed; the shapes of their batches are candidates. The one that reduces total time most is
    # added next. A batch with more samples than a shape counts as several. O(num * batches**2) for up to TRIED batches.
    def _chosen(
        self, units: IntArray, windows: Iterator[IntArray], num: int, work: Work
    ) -> IntArray:
        """Returns chosen shapes (K, 1 + streams), samples first. ``units``: padded lengths (streams, N) that fit."""
        hardest = _exceeded_by_none(units)
        cuts = np.concatenate([self._cut(window, work) for window in windows])
        cut, counts = (
            found[:: -(-len(found) // TRIED)]
            for found in np.unique(cuts, axis=0, return_counts=True)
        )
        cut = np.append(
            np.insert(hardest, 0, 1, axis=0).T, cut, axis=0
        )  # each of these needs a shape to hold it
        counts = np.append(np.ones(hardest.shape[1]), counts)
        tried = np.concatenate([cut, *self._boxes(hardest, units.max(axis=1))])
        held = (cut[:, None, 1:] <= tried[:, 1:]).all(axis=2)
        parts = np.maximum(cut[:, :1] / tried[:, 0], 1.0) * counts[:, None]
        missed = np.where(
            cut[:, 0] > 1, AGAIN * (self._time(cut, work) + work.per_step) * counts, NOT_HELD
        )
        time = np.where(held, parts * (self._time(tried, work) + work.per_step), missed[:, None])
        chosen: list[int] = []
        for turn in range(ROUNDS * num):
            del chosen[: turn >= num]
            least = time[:, chosen].min(axis=1, initial=np.inf, keepdims=True)
            chosen.append(int(np.minimum(time, least).sum(axis=0).argmin()))
        rungs = np.unique(tried[chosen], axis=0)
        if not (hardest.T[:, None] <= rungs[:, 1:]).all(axis=2).any(axis=1).all():
            raise ConfigError(
                f"`shapes` (`num_shapes`) is too small: {num} cannot hold all samples that fit; raise it"
            )
        return rungs

    def _cut(self, units: IntArray, work: Work) -> IntArray:
        """Cuts a window as if all shapes were allowed; returns its batches' shapes (B, 1 + streams), samples first."""
        lengths = {
            **dict.fromkeys(self._capped, np.zeros_like(units[0])),
            **dict(zip(self._names, units, strict=True)),
        }
        order, window = in_order(lengths, self.base, work, None)
        shape = shapes_of(Batches(order, window.least_time(work.per_step)), lengths)
        return np.stack([shape.num_samples, *(shape.longest[name] for name in self._names)], axis=1)

    def _time(self, rungs: IntArray, work: Work) -> FloatArray:
        return rungs[:, 0] * work.of_lengths(dict(zip(self._names, rungs[:, 1:].T, strict=True)))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the padded streams, in the order of the numbers in a shape."""
        return self._names

    def _of(self, samples: IntArray, widths: IntArray) -> BatchShape:
        return BatchShape.of(
            samples,
            {**dict.fromkeys(self._capped, 0), **dict(zip(self._names, widths, strict=True))},
        )

    def _most(self, widths: IntArray) -> IntArray:
        return largest_within(
            lambda count: self.base.fits(self._of(count, widths)), widths.shape[1]
        )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes, shortest first: (samples, tokens), with one number of tokens for each padded stream."""
        return sorted(
            zip(self._samples.tolist(), *self._widths.tolist(), strict=True),
            key=lambda rung: (*rung[1:], rung[0]),
        )

    def shape_for(self, num_samples: int, *longest: int) -> tuple[int, ...]:
        """Returns the shape to which a batch of ``num_samples`` samples is padded. ``longest``: tokens of its longest
        sample, one number per padded stream. ConfigError: no shape is large enough."""
        asked = BatchShape.of(num_samples, dict(zip(self._names, longest, strict=True)))
        if not self.holds(asked).any():
            told = f"a batch of {num_samples} samples of {longest} tokens is larger than all shapes"
            raise ConfigError(
                f"{told}, which are {self.shapes} (samples, tokens); use others or smaller batches"
            )
        run = self.as_run(asked)
        return (int(run.num_samples[0]), *(int(run.longest[name][0]) for name in self._names))

    @property
    def fingerprint(self) -> str:
        return f"ShapeLadder({described(self.shapes)}, {self.base.fingerprint})"

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return self.base.cost(self.as_run(shape))

    def holds(self, shape: BatchShape) -> BoolArray:
        """Returns which shapes are large enough for each batch: bool (batches, shapes)."""
        wide = [
            shape.longest[name][:, None] <= widths
            for name, widths in zip(self._names, self._widths, strict=True)
        ]
        return np.logical_and.reduce([shape.num_samples[:, None] <= self._samples, *wide])

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        holds = self.holds(shape)
        at, held = holds.argmax(axis=1), holds.any(axis=1)
        wide = {
            n: np.where(held, w[at], shape.longest[n])
            for n, w in zip(self._names, self._widths, strict=True)
        }
        return BatchShape(
            np.where(held, self._samples[at], shape.num_samples),
            {**shape.longest, **wide},
            shape.total,
        )

    @property
    def _fitting(self) -> BoolArray:
        return self.base.fits(self._of(self._samples, self._widths))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return (self.holds(shape) & self._fitting).any(axis=1) & self.base.fits(shape)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if len(self._capped) > 1:
            return None
        return np.where(
            (longest[:, None] <= self._widths[0]) & self._fitting, self._samples, 0
        ).max(axis=1)

    def window(self, lengths: Streams, work: FloatArray, most: IntArray) -> OrderedWindow:
        """Returns a sorted window in which a batch costs as much as the shape to which it is padded. ``work``:
        predicted time of each sample; ``most``: largest batch size from each position."""
        wide = zip(self._names, self._widths, strict=True)
        holds = np.logical_and.reduce([lengths[name][:, None] <= widths for name, widths in wide])
        places = np.arange(len(work))[:, None]
        beyond = np.where(holds, len(work), places)[::-1]
        held = np.minimum.accumulate(beyond, axis=0)[
            ::-1
        ]  # first later sample that is too long for the shape
        reach = np.minimum(held - places, np.minimum(self._samples, most[:, None]))
        fitting = self._fitting
        reach[:, ~fitting] *= ~(reach[:, fitting] > 0).any(axis=1, keepdims=True)
        order = np.argsort(self._work, kind="stable")
        reach = np.maximum.accumulate(reach[:, order], axis=1)
        reach = np.append(
            reach, np.maximum(reach[:, -1:], 1), axis=1
        )  # a sample too long for all shapes: alone
        costs = np.append(self._work[order], self._work.max() + work.max())
        return RungWindow(work, np.maximum(reach[:, -1], 1), reach=reach, limits=costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RungWindow(OrderedWindow):
    """A sorted window whose batches are padded to shapes: each has the work of the cheapest shape that is large enough."""

    reach: IntArray  # int64 (N, shapes), most samples from each position in this or a cheaper shape

    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> FloatArray:
        return self.limits[(self.reach[starts] >= np.asarray(sizes)[..., None]).argmax(axis=-1)]

    def sizes_under(self, limits: FloatArray) -> IntArray:
        under = np.append(np.ones((len(self), 1), np.int64), self.reach, axis=1)
        return np.maximum(under[:, self.limits.searchsorted(limits, side="right")], 1)

    def greedy(self, start: int, stop: int, most_runs: int) -> Callable[[float], list[int]]:
        def under(limit: float) -> list[int]:
            rung, offsets = int(self.limits.searchsorted(limit, side="right")) - 1, [start]
            while offsets[-1] < stop and len(offsets) <= most_runs:
                offsets.append(
                    min(
                        offsets[-1]
                        + max(int(self.reach[offsets[-1], rung]) if rung >= 0 else 1, 1),
                        stop,
                    )
                )
            return offsets

        return under

    # Dynamic programming from the last position to the first. Each batch is as large as its shape allows, because a
    # later start of the next batch never costs more. O(positions * shapes).
    def least_time(self, price: float) -> IntArray:
        num, best = len(self), np.full(len(self) + 1, np.inf)
        stops, came_to, best[num] = self.reach + np.arange(num)[:, None], [0] * num, 0.0
        for place in range(num - 1, -1, -1):
            time = self.limits + best[stops[place]]
            rung = int(time.argmin())
            best[place], came_to[place] = time[rung] + price, int(stops[place, rung])
        offsets = [0]
        while offsets[-1] < num:
            offsets.append(came_to[offsets[-1]])
        return np.asarray(offsets, np.int64)


def _exceeded_by_none(units: IntArray) -> IntArray:
    """Returns the Pareto front of samples (streams, K), which no other exceeds: shapes that hold them hold all samples."""
    found = []
    while units.size:
        found.append(units[:, [units.sum(axis=0).argmax()]])
        units = units[:, (units > found[-1]).any(axis=0)]
    return np.concatenate(found, axis=1)


class PackedLadder(Wrapper):
    """A budget for packed batches, which are filled up to one of a few numbers of tokens: quantiles of usual batches.

    All batches also have the same number of samples and the same longest sample, because attention kernels are compiled
    for both. The filling is samples of weight 0, then samples without tokens. Arguments and errors are those of
    :class:`ShapeLadder`, but only one stream is allowed.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> ladder = PackedLadder([3, 4, 5, 6, 7, 8], TokenBudget(12, layout="packed"), 2, window=3, grouping=1, work=None)
    >>> ladder.shapes, ladder.shape_for(2, 9)
    ([(4, 8), (4, 12)], (4, 12))
    """

    layout: Any = "packed"
    ladder: Any = property(lambda self: self)

    def __init__(
        self,
        lengths: Any,
        budget: Budget,
        num_shapes: int,
        *,
        window: int | None,
        grouping: int,
        work: Work | None,
    ) -> None:
        streams = as_streams(lengths)
        (name, given), *others = streams.items()
        if others or not len(given):
            has = f"{len(given)} lengths in the streams {[*streams]}"
            raise ConfigError(
                f"few shapes for packed batches need lengths in one stream, but got {has}"
            )
        self.base, self.streams = budget.bind(streams), (name,)
        tokens, multiple, rng = (
            np.maximum(given.astype(np.int64), 1),
            self.pad_to_multiple_of,
            np.random.default_rng(0),
        )
        self.longest, fit = int(tokens.max()), self.base.fits(BatchShape.of(1, {name: tokens}))
        beyond, rest = int(not fit.all()), tokens[fit]
        number = (
            check_int("num_shapes", num_shapes, least=1 + (beyond and len(rest) > 0)) - beyond
            if len(rest)
            else 0
        )
        found, size = [int(rest.max(initial=0))], min((window or SAMPLES) * grouping, len(rest))
        for _ in range(max(SAMPLES // size, 1) if size else 0):
            drawn = {name: rng.choice(rest, size)}
            found += (
                shapes_of(pack(drawn, self.base, work=check_work(work)), drawn).total[name].tolist()
            )
        quantiles = np.quantile(found, np.arange(1, number + 1) / max(number, 1), method="higher")
        self._full = np.unique(np.append(quantiles, [self.longest] * beyond)).astype(
            np.int64
        )  # tokens of samples
        self._totals = round_up(self._full, multiple)
        self._most = int(self._totals[-1 - beyond]) if len(rest) else 0
        self._room = int(np.searchsorted(np.cumsum(np.sort(given)), self._totals[-1], side="right"))
        self.num_samples = self._room + -(
            -int(np.diff(self._totals, prepend=0).max()) // self.longest
        )  # longest tail

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes (samples, tokens), smallest first. All have equally many samples, filling included."""
        return [(self.num_samples, total) for total in self._totals.tolist()]

    def shape_for(self, num_samples: int, total: int) -> tuple[int, int]:
        """Returns the shape to which a batch of ``total`` tokens is filled. ConfigError: all shapes have fewer tokens."""
        place = int(np.searchsorted(self._totals, total))
        if place == len(self._totals):
            raise ConfigError(
                f"{num_samples} packed samples of {total} tokens exceed {self.shapes}; pack fewer"
            )
        return self.shapes[place]

    @property
    def fingerprint(self) -> str:
        return f"PackedLadder({described(self.shapes)}, {self.base.fingerprint})"

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        return self._filled(shape, self._totals)

    def _filled(self, shape: BatchShape, totals: IntArray) -> BatchShape:
        total = shape.total[self.streams[0]]
        place = np.searchsorted(self._totals, total).clip(max=len(totals) - 1)
        return BatchShape(
            shape.num_samples, shape.longest, {self.streams[0]: np.maximum(totals[place], total)}
        )

    def fits(self, shape: BatchShape, /) -> BoolArray:
        known = (shape.total[self.streams[0]] <= self._most) & (shape.num_samples <= self._room)
        return known & self.base.fits(
            self._filled(shape, self._full)
        )  # the budget itself rounds up, or does not


def few_shapes(
    shapes: int | None,
    lengths: Any,
    budget: Budget | int,
    samples_per_update: Any = None,
    window: int | None = None,
    grouping: int | None = None,
    work: Work | None = None,
    strata: int | None = None,
) -> Budget:
    """Returns the budget; or if ``shapes`` is given, one that allows at most so many batch shapes, chosen by lengths."""
    if shapes is None:
        return as_budget(budget)
    shapes = check_int("shapes", shapes, most=TRIED)
    size: Any = samples_per_update(0, None) if callable(samples_per_update) else samples_per_update
    how: dict[str, Any] = {"window": size or window, "grouping": grouping or 1, "work": work}
    if is_packed(as_budget(budget), as_streams(lengths)):
        return PackedLadder(lengths, as_budget(budget), shapes, **how)
    return ShapeLadder(lengths, as_budget(budget), shapes, strata=strata, **how)
