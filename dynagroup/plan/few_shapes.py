"""Chooses a few batch shapes, for models that are compiled once per shape."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynagroup.budget.base import BoolArray, Budget, FloatArray, Wrapper, is_packed
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.lengths import as_streams
from dynagroup.memory.phases import Layout
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.padded import OrderedWindow, in_order
from dynagroup.plan.rules import CutRules
from dynagroup.plan.strata import dealt, strata_of
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within, round_up
from dynagroup.validation import check_int

BATCHES_OF_A_WINDOW = 100
MOST_SAMPLES = 4096  # drawn to choose shapes for
MOST_WINDOWS = 256  # drawn to choose shapes for
MOST_CANDIDATES = 600  # distinct batches to choose shapes from
ROUNDS = 3  # passes of the search: the first adds shapes, each later one chooses every shape again
CUT_AGAIN = 4.0  # factor of the time of a batch that is larger than all shapes, but can be cut
NOT_HELD = 1e30  # time of a sample that is longer than all shapes


class ShapeLadder(Wrapper):
    """A budget of a few batch shapes (samples, tokens), chosen to make a dataset's batches take the least predicted time.
    A batch fits if one of the shapes is large enough. Loaders pad it to the cheapest such shape; added rows weigh 0.

    Args:
        lengths: int (N,), tokens of each sample, or a dict with one stream.
        budget: limit of a batch; an int means that many tokens. Shapes above a limit learned later are not used.
        num_shapes: int, largest number of shapes. One of them is for samples that do not fit even alone.
        window: int, samples planned together: those of an update, or a sampler's window. None: about a hundred batches.
        grouping: int: so many windows of samples are sorted together, then dealt into stratified windows again.
        strata: int, chunks of such a window, see :class:`~dynagroup.LengthAwareBatchSampler`.
        work: predicted time of a batch.

    Raises ConfigError if there are no lengths or several streams; or if ``num_shapes`` is 1, and some samples do not
    fit even alone.

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
        strata: int | None = None,
        work: Work | None = None,
    ) -> None:
        num_shapes = check_int("num_shapes", num_shapes, most=MOST_CANDIDATES)
        grouping = check_int("grouping", grouping)
        if window is not None:
            window = check_int("window", window)
        work = check_work(work)
        streams = as_streams(lengths)
        self.stream = _only_stream(streams)
        self.base = as_budget(budget).bind(streams)
        if is_packed(self.base, streams):
            raise ConfigError(
                f"a ShapeLadder needs a padded budget, but got {self.base.fingerprint}; "
                "for packed batches pass `shapes` to a loader"
            )
        tokens = streams[self.stream].astype(np.int64)
        padded = np.maximum(round_up(tokens, self.pad_to_multiple_of), 1)
        fitting = padded[self._most_samples(padded) > 0]
        num_reserved = _num_reserved(num_shapes, len(fitting), len(padded))
        shapes = np.zeros((0, 2), np.int64)
        if len(fitting):
            drawn = self._drawn(fitting, window, grouping, strata)
            shapes = self._chosen(fitting, drawn, num_shapes - num_reserved, work)
            shapes = shapes[np.argsort(self._time(shapes, work), kind="stable")]
        if num_reserved:
            shapes = np.append(shapes, [[1, padded.max()]], axis=0)
        # The shapes, by predicted time; the one for samples that do not fit even alone is last.
        self._samples = shapes[:, 0]
        self._tokens = shapes[:, 1]
        self._work = self._time(shapes, work)

    @property
    def ladder(self) -> "ShapeLadder":
        return self

    def _drawn(
        self, tokens: IntArray, size: int | None, grouping: int, strata: int | None
    ) -> Iterator[IntArray]:
        """Yields the padded lengths of random windows of ``size`` samples, which are cut to find good shapes."""
        num = len(tokens)
        some = tokens[:: max(num // MOST_SAMPLES, 1)]
        if size is None:
            share_of_a_batch = 1.0 / self._most_samples(some)
            size = int(BATCHES_OF_A_WINDOW / share_of_a_batch.mean())
        size = min(size, num)
        pool = size * grouping
        num_pools = max(min(MOST_SAMPLES // pool, MOST_WINDOWS), 1)
        strata_of_window = strata_of(strata, some, size, grouping)
        rng = np.random.default_rng(0)
        for places in rng.integers(0, num, (num_pools, pool)):
            longest_first = places[np.argsort(-tokens[places], kind="stable")]
            for window in dealt(longest_first, strata_of_window, rng.permutation(grouping)):
                yield tokens[window]

    # Greedy facility location (Cornuejols, Fisher and Nemhauser 1977), improved by exchange. Drawn windows are cut as
    # if all shapes were allowed; the shapes of their batches are candidates. The one that reduces total time most is
    # added next. A batch with more samples than a shape counts as several. O(num * batches**2).
    def _chosen(
        self, tokens: IntArray, windows: Iterator[IntArray], num_shapes: int, work: Work
    ) -> IntArray:
        """Returns chosen shapes (samples, tokens): int64 (K, 2). ``tokens``: padded lengths of samples that fit."""
        longest = int(tokens.max())
        cuts = np.concatenate([self._cut(window, work) for window in windows])
        batches, counts = np.unique(cuts, axis=0, return_counts=True)
        every = -(-len(batches) // MOST_CANDIDATES)
        # Some shape must be large enough for the longest sample.
        batches = np.concatenate([np.array([[1, longest]]), batches[::every]])
        counts = np.append(1.0, counts[::every])
        most = self._most_samples(np.array([longest]))
        candidates = np.append(batches, [[most[0], longest]], axis=0)
        time = self._times(batches, candidates, work) * counts[:, None]
        chosen: list[int] = []
        for turn in range(ROUNDS * num_shapes):
            if turn >= num_shapes:
                del chosen[0]
            least = time[:, chosen].min(axis=1, initial=np.inf, keepdims=True)
            total = np.minimum(time, least).sum(axis=0)
            chosen.append(int(total.argmin()))
        return np.unique(candidates[chosen], axis=0)

    def _times(self, batches: IntArray, candidates: IntArray, work: Work) -> FloatArray:
        """Returns the predicted time of each batch if it is padded to each candidate: float64 (batches, candidates)."""
        num_parts = np.maximum(batches[:, :1] / candidates[:, 0], 1.0)
        padded = num_parts * (self._time(candidates, work) + work.per_step)
        cut_again = CUT_AGAIN * (self._time(batches, work) + work.per_step)
        missed = np.where(batches[:, 0] > 1, cut_again, NOT_HELD)
        is_held = batches[:, 1:] <= candidates[:, 1]
        return np.where(is_held, padded, missed[:, None])

    def _cut(self, tokens: IntArray, work: Work) -> IntArray:
        """Cuts a window as if all shapes were allowed; returns its batches' shapes (samples, tokens): int64 (B, 2)."""
        lengths: Any = {self.stream: tokens}
        order, window = in_order(lengths, CutRules(self.base, work))
        shape = shapes_of(Batches(order, window.least_time(work.per_step)), lengths)
        return np.stack([shape.num_samples, shape.longest[self.stream]], axis=1)

    def _time(self, shapes: IntArray, work: Work) -> FloatArray:
        return shapes[:, 0] * work.price(self.stream).of(shapes[:, 1])

    def _shape_of(self, samples: IntArray, tokens: IntArray) -> BatchShape:
        return BatchShape.of(samples, {self.stream: tokens})

    def _most_samples(self, tokens: IntArray) -> IntArray:
        """Returns how many samples of each length fit a batch; 0: not even one."""
        return largest_within(
            lambda count: self.base.fits(self._shape_of(count, tokens)), len(tokens)
        )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes (samples, tokens), shortest first."""
        shapes = zip(self._samples.tolist(), self._tokens.tolist(), strict=True)
        return sorted(shapes, key=lambda shape: (shape[1], shape[0]))

    def shape_for(self, num_samples: int, longest: int) -> tuple[int, int]:
        """Returns the shape to which a batch of ``num_samples`` samples is padded. ``longest``: tokens of its longest
        sample. ConfigError: no shape is large enough."""
        batch = BatchShape.of(num_samples, {self.stream: longest})
        if not self.holds(batch).any():
            raise ConfigError(
                f"a batch of {num_samples} samples of {longest} tokens is larger than all shapes, "
                f"which are {self.shapes} (samples, tokens); use others or smaller batches"
            )
        run = self.as_run(batch)
        return int(run.num_samples[0]), int(run.longest[self.stream][0])

    @property
    def fingerprint(self) -> str:
        return f"ShapeLadder({described(self.shapes)}, {self.base.fingerprint})"

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return self.base.cost(self.as_run(shape))

    def holds(self, shape: BatchShape) -> BoolArray:
        """Returns which shapes are large enough for each batch: bool (batches, shapes)."""
        has_rows = shape.num_samples[:, None] <= self._samples
        is_wide = shape.longest[self.stream][:, None] <= self._tokens
        return has_rows & is_wide

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        holds = self.holds(shape)
        is_held = holds.any(axis=1)
        cheapest = holds.argmax(axis=1)
        longest = shape.longest[self.stream]
        padded = np.where(is_held, self._tokens[cheapest], longest)
        samples = np.where(is_held, self._samples[cheapest], shape.num_samples)
        return BatchShape(samples, {**shape.longest, self.stream: padded}, shape.total)

    @property
    def _fitting(self) -> BoolArray:
        """Which shapes fit the budget itself, with its learned limit: bool (shapes,)."""
        return self.base.fits(self._shape_of(self._samples, self._tokens))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return (self.holds(shape) & self._fitting).any(axis=1) & self.base.fits(shape)

    def largest(self, longest: IntArray, /) -> IntArray:
        usable = (longest[:, None] <= self._tokens) & self._fitting
        return np.where(usable, self._samples, 0).max(axis=1)

    def window(self, lengths: Streams, work: FloatArray, most: IntArray) -> OrderedWindow:
        """Returns a sorted window in which a batch costs as much as the shape to which it is padded. ``work``:
        predicted time of each sample; ``most``: largest batch size from each position."""
        num = len(work)
        positions = np.arange(num)[:, None]
        is_held = lengths[self.stream][:, None] <= self._tokens
        # Of each position and shape: the first later sample that is too long for the shape.
        too_long = np.where(is_held, num, positions)
        too_long = np.minimum.accumulate(too_long[::-1], axis=0)[::-1]
        reach = np.minimum(too_long - positions, self._samples)
        reach = np.minimum(reach, most[:, None])
        # A shape that does not fit the budget is only for samples that no fitting shape holds.
        fitting = self._fitting
        has_fitting = (reach[:, fitting] > 0).any(axis=1, keepdims=True)
        reach[:, ~fitting] = np.where(has_fitting, 0, reach[:, ~fitting])
        order = np.argsort(self._work, kind="stable")
        reach = np.maximum.accumulate(reach[:, order], axis=1)
        # A sample that is too long for all shapes is a batch of its own.
        alone = np.maximum(reach[:, -1:], 1)
        reach = np.append(reach, alone, axis=1)
        costs = np.append(self._work[order], self._work.max() + work.max())
        return ShapeWindow(work, reach[:, -1], reach=reach, limits=costs)


@dataclass(frozen=True, kw_only=True)
class ShapeWindow(OrderedWindow):
    """A sorted window whose batches are padded to shapes: each has the work of the cheapest shape that is large enough.
    ``limits``: the work of each shape, ascending."""

    reach: IntArray  # int64 (N, shapes), most samples from each position in this or a cheaper shape

    def work_of(self, starts: IntArray | int, sizes: IntArray | int) -> FloatArray:
        is_held = self.reach[starts] >= np.asarray(sizes)[..., None]
        return self.limits[is_held.argmax(axis=-1)]

    def sizes_within(self, starts: IntArray, limits: FloatArray) -> IntArray:
        alone = np.ones((len(self), 1), np.int64)
        reach = np.append(alone, self.reach, axis=1)
        num_allowed = self.limits.searchsorted(limits, side="right")
        return np.maximum(reach[starts, num_allowed], 1)

    # Dynamic programming from the last position to the first. Each batch is as large as its shape allows, because a
    # later start of the next batch never costs more. O(positions * shapes).
    def least_time(self, per_step: float) -> IntArray:
        num = len(self)
        stops = self.reach + np.arange(num)[:, None]
        best = np.full(num + 1, np.inf)  # so that an empty batch is never chosen
        best[num] = 0.0
        next_start = [0] * num
        for start in range(num - 1, -1, -1):
            time = self.limits + best[stops[start]]
            shape = int(time.argmin())
            best[start] = time[shape] + per_step
            next_start[start] = int(stops[start, shape])
        offsets = [0]
        while offsets[-1] < num:
            offsets.append(next_start[offsets[-1]])
        return np.asarray(offsets, np.int64)


class PackedTotals(Wrapper):
    """A budget for packed batches, which are filled up to one of a few totals of tokens: multiples of the largest
    total that fits.

    All batches also have the same number of samples and the same longest sample, because attention kernels are compiled
    for both. The filling is samples of weight 0, then samples without tokens.

    Args:
        lengths: int (N,), tokens of each sample, or a dict with one stream.
        budget: limit of a batch.
        num_shapes: int, number of totals. One of them is for samples that do not fit even alone.

    Raises ConfigError as :class:`ShapeLadder` does.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> ladder = PackedTotals([3, 4, 5, 6, 7, 8], TokenBudget(12, layout="packed"), 2)
    >>> ladder.shapes, ladder.shape_for(2, 9)
    ([(4, 6), (4, 12)], (4, 12))
    """

    def __init__(self, lengths: Any, budget: Budget, num_shapes: int) -> None:
        streams = as_streams(lengths)
        self.stream = _only_stream(streams)
        self.base = budget.bind(streams)
        tokens = np.maximum(streams[self.stream].astype(np.int64), 1)
        self.longest = int(tokens.max())
        fitting = tokens[self.base.fits(BatchShape.of(1, {self.stream: tokens}))]
        num_reserved = _num_reserved(num_shapes, len(fitting), len(tokens))
        self._most = self._largest_total(fitting)
        num_free = num_shapes - num_reserved
        totals = -(-self._most * np.arange(1, num_free + 1) // max(num_free, 1))
        if num_reserved:
            totals = np.append(totals, self.longest)
        self._totals = np.unique(round_up(totals, self.pad_to_multiple_of))
        tokens_of_shortest = np.cumsum(np.sort(streams[self.stream], kind="stable"), dtype=np.int64)
        self._room = int(np.searchsorted(tokens_of_shortest, self._totals[-1], side="right"))
        largest_gap = int(np.diff(self._totals, prepend=0).max())
        self.num_samples = self._room + -(-largest_gap // self.longest)

    def _largest_total(self, tokens: IntArray) -> int:
        """Returns the largest total of a batch that fits, beside the longest of these samples; 0: there are none."""
        if not len(tokens):
            return 0
        longest = int(tokens.max())

        def fits(total: IntArray) -> BoolArray:
            shape = BatchShape.of(1, {self.stream: longest}, {self.stream: total})
            return self.base.fits(shape)

        return max(int(largest_within(fits, 1, int(tokens.sum()))[0]), longest)

    @property
    def layout(self) -> Layout:
        return "packed"

    @property
    def ladder(self) -> "PackedTotals":
        return self

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
        return f"PackedTotals({described(self.shapes)}, {self.base.fingerprint})"

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        total = shape.total[self.stream]
        return self._with_total(shape, np.maximum(self._filled(total), total))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        total = shape.total[self.stream]
        is_held = (total <= self._most) & (shape.num_samples <= self._room)
        # The largest total is asked about as it is, because the budget itself rounds up, or does not.
        filled = np.maximum(np.minimum(self._filled(total), self._most), total)
        return is_held & self.base.fits(self._with_total(shape, filled))

    def _filled(self, total: IntArray) -> IntArray:
        """Returns the total to which batches of these totals are filled; the largest, if none is large enough."""
        place = np.searchsorted(self._totals, total)
        return self._totals[np.minimum(place, len(self._totals) - 1)]

    def _with_total(self, shape: BatchShape, total: IntArray) -> BatchShape:
        return BatchShape(shape.num_samples, shape.longest, {self.stream: total})


def _only_stream(lengths: Streams) -> str:
    """Returns the name of the stream. ConfigError: there are several, or no lengths."""
    if len(lengths) > 1:
        raise ConfigError(
            f"few shapes need lengths in one stream, but `lengths` has {[*lengths]}; leave `shapes` "
            "out, or give one of them and let `collate_fn` pad the others to a fixed length"
        )
    (name,) = lengths
    if not len(lengths[name]):
        raise ConfigError(
            "a ShapeLadder needs at least one length, to choose shapes for, but `lengths` is empty"
        )
    return name


def _num_reserved(num_shapes: int, num_fitting: int, num_samples: int) -> int:
    """Returns how many shapes are for samples that do not fit even alone: 1 or 0. ConfigError: none is left for others."""
    if num_fitting == num_samples:
        return 0
    if num_fitting and num_shapes == 1:
        raise ConfigError(
            "`shapes` (`num_shapes`) must be at least 2: samples that do not fit even alone need one"
        )
    return 1


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
    budget = as_budget(budget)
    if shapes is None:
        return budget
    shapes = check_int("shapes", shapes, most=MOST_CANDIDATES)
    if is_packed(budget, as_streams(lengths)):
        return PackedTotals(lengths, budget, shapes)
    size: Any = samples_per_update
    if callable(samples_per_update):  # a schedule
        size = samples_per_update(0, None)
    return ShapeLadder(
        lengths,
        budget,
        shapes,
        window=size or window,
        grouping=grouping or 1,
        strata=strata,
        work=work,
    )
