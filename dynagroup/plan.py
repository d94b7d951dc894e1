"""Plan an epoch: a rectangle ``rows[step][rank]`` of batches that fit, every sample exactly once.

A plan is a pure function of (lengths, budget, settings, epoch, world size). It is made window by window, so that the
first batch of any dataset is there at once and a run resumes, also on another number of ranks, from a few integers.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget import Budget, TokenBudget, padded_tokens
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.order import EpochOrder, epoch_order
from dynagroup.partition import Batches, RoundBatch, cut, longest_first, shapes_of
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams

__all__ = ["BatchPlan", "PlanConfig", "Planner", "Position", "Rows", "cut_evenly", "epoch_order", "even_out"]

Oversize: TypeAlias = Literal["alone", "error", "drop"]
Uneven: TypeAlias = Literal["repeat", "drop"]
Segment: TypeAlias = tuple[int, int]
"""(world size, rows emitted at that world size): how far a window was used, and by how many ranks."""

BATCHES_PER_WINDOW = 100
OPTIMAL_UP_TO = 1024  # samples; the dynamic programme costs about 5 us a sample and pays off in small windows
BALANCE_UP_TO = 8  # rows; with more of them a few halved batches cost next to nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How an epoch is cut into batches. Knows no ranks, lengths or budget."""

    shuffle: bool = False
    """Draw windows in a random order and shuffle the steps inside each."""
    window: int | None = None
    """Samples sorted together. None: all of them, or with ``shuffle`` a hundred batches or so."""
    seed: int = 0
    hardest_first: int = 1
    """Steps with the longest samples that lead an epoch, so that running out of memory shows at once."""
    round_batch: RoundBatch | None = None
    """Batch sizes are chosen among this function's values, before the fit check."""
    samples_per_update: int | None = None
    """Every update consists of exactly so many samples over all ranks, drawn as fixed batches would draw them."""
    oversize: Oversize = "alone"
    """A sample that does not fit even alone: "alone", "error" or "drop"."""
    uneven: Uneven = "repeat"
    """Where halving cannot fill the last row: "repeat" the smallest samples, or "drop" the row's samples."""

    def __post_init__(self) -> None:
        for name in ("window", "samples_per_update"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigError(f"`{name}` must be an int of at least 1, or None, but is {value!r}")
        for name in ("seed", "hardest_first"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 0:
                raise ConfigError(f"`{name}` must be an int of at least 0, but is {getattr(self, name)!r}")
        if self.window is not None and self.samples_per_update is not None:
            raise ConfigError(
                "`window` and `samples_per_update` exclude each other: an update's samples are the window"
            )
        for name, choices in (("oversize", ("alone", "error", "drop")), ("uneven", ("repeat", "drop"))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"`{name}` must be one of {choices}, but is {getattr(self, name)!r}")
        if self.round_batch is not None and not callable(self.round_batch):
            raise ConfigError(f"`round_batch` must be a function from int to int, but is {self.round_batch!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def even_out(batches: Batches, multiple: int) -> Batches:
    """Halve the largest batches until their number divides by ``multiple``, or all hold a single sample.

    Nothing is dropped or repeated: a half of a batch that fits also fits.

    >>> even_out(Batches(np.arange(6), np.array([0, 1, 6])), 4).sizes.tolist()
    [1, 2, 1, 2]
    """
    sizes = batches.sizes
    missing = -len(sizes) % multiple
    heap = [(-int(size), -number, int(batches.offsets[number])) for number, size in enumerate(sizes)]
    heapq.heapify(heap)
    new_offsets: list[int] = []
    while len(new_offsets) < missing and heap and heap[0][0] < -1:
        size, number, start = heapq.heappop(heap)
        half = -size - (-size) // 2
        new_offsets.append(start + half)
        heapq.heappush(heap, (-half, number, start))
        heapq.heappush(heap, (size + half, number, start + half))
    return Batches(batches.order, np.sort(np.append(batches.offsets, np.asarray(new_offsets, np.int64))))


def cut_evenly(lengths: Streams, budget: Budget, multiple: int, *, round_batch: RoundBatch | None = None) -> Batches:
    """Cut a window into batches that fit, in a number that divides by ``multiple`` wherever its samples allow that.

    A window of few rows is cut again under the tightest cost that still needs no further row, so that its batches cost
    about the same and no rank waits; what is then missing to a full row comes from halving.

    >>> window = {"tokens": np.full(10, 5, np.int32)}
    >>> cut_evenly(window, TokenBudget(20), 4).sizes.tolist()
    [3, 3, 3, 1]
    """
    method = "optimal" if len(lengths[TOKENS]) <= OPTIMAL_UP_TO else "greedy"
    batches = cut(lengths, budget, method=method, round_batch=round_batch)
    rows = -(-len(batches) // multiple)
    if multiple > 1 and 0 < rows <= BALANCE_UP_TO and len(batches) > 0:
        batches = _cut_tightly(lengths, budget, rows * multiple, batches, round_batch)
    return even_out(batches, multiple)


def _cut_tightly(
    lengths: Streams, budget: Budget, most: int, batches: Batches, round_batch: RoundBatch | None
) -> Batches:
    """The cut under the smallest cost a batch that makes at most ``most`` batches."""
    low, high = 0, int(padded_tokens(shapes_of(batches, lengths), budget).max())
    while low + 1 < high:
        middle = (low + high) // 2
        tighter = budget & TokenBudget(middle, pad_to_multiple_of=budget.pad_to_multiple_of, layout=budget.layout)
        candidate = cut(lengths, tighter, round_batch=round_batch)
        if len(candidate) <= most:
            high, batches = middle, candidate
        else:
            low = middle
    return batches


@dataclass(frozen=True, slots=True)
class Rows:
    """The steps of one window. ``batches`` hold positions in the window; ``table`` numbers them, int64 (steps, ranks)."""

    batches: Batches
    table: IntArray
    repeated: IntArray
    """Positions of samples that stand in a row a second time to fill it; the last batches hold one each."""
    dropped: IntArray
    """Positions of samples left out because they cannot fill a row."""


def arrange(batches: Batches, world_size: int, uneven: Uneven, smallest: IntArray) -> Rows:
    """Batches in rows of one for each rank, in their order; ``smallest`` lists positions that may fill the last row."""
    none = np.zeros(0, np.int64)
    over = len(batches) % world_size
    if not over:
        table = np.arange(len(batches)).reshape(-1, world_size)
        return Rows(batches, table, none, none)
    if uneven == "drop":
        keep = len(batches) - over
        dropped = batches.order[batches.offsets[keep] :]
        kept = Batches(batches.order[: batches.offsets[keep]], batches.offsets[: keep + 1])
        return Rows(kept, np.arange(keep).reshape(-1, world_size), none, dropped)
    repeated = np.resize(smallest, world_size - over)
    fillers = Batches(repeated, np.arange(len(repeated) + 1))
    filled = Batches.concatenate([batches, fillers])
    return Rows(filled, np.arange(len(filled)).reshape(-1, world_size), repeated, none)


def prove(batches: Batches, num_samples: int, lengths: Streams, budget: Budget, oversize: NDArray[np.bool_]) -> None:
    """Every sample once, every batch fits or is a single oversize sample; runs on every window of every plan."""
    seen = np.zeros(num_samples, np.bool_)
    seen[batches.order] = True
    assert len(batches.order) == num_samples == seen.sum(), "a plan lost or repeated a sample"
    if not num_samples:
        return
    fits = budget.fits(shapes_of(batches, lengths))
    bad = np.flatnonzero(~fits & ~((batches.sizes == 1) & oversize[batches.order[batches.offsets[:-1]]]))
    if len(bad):
        batch = batches[int(bad[0])]
        raise BudgetError(
            f"a batch of {len(batch)} samples, longest {lengths[TOKENS][batch].max()} tokens, does not fit {budget.fingerprint}, "
            "although it is part of one that does; a budget must never refuse a smaller batch: check it with "
            "dynagroup.testing.assert_budget_law"
        )


@dataclass(frozen=True, slots=True)
class Position:
    """How far an epoch was used: whole windows, then part of one."""

    window_size: int
    windows_done: int = 0
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that are sorted and grouped together: dataset indices, int64 (n,)."""

    number: int
    indices: IntArray
    leads: bool


class Planner:
    """Makes plans: holds the facts (lengths, bound budget) and the knobs, and no state.

    Args:
        lengths: stream -> int32 (N,), checked.
        budget: what fits; bound to these lengths here.
        config: how to cut.

    Raises:
        BudgetError: a sample does not fit even alone and ``oversize="error"``.
    """

    def __init__(self, lengths: Streams, budget: Budget, config: PlanConfig) -> None:
        self.lengths = lengths
        self.budget = budget.bind(lengths)
        self.config = config
        self.num_samples = len(lengths[TOKENS])
        self._oversize = _oversize_mask(lengths, self.budget)
        self.oversize = np.flatnonzero(self._oversize)
        if config.oversize == "error" and len(self.oversize):
            index = int(self.oversize[0])
            units = ", ".join(f"{values[index]} {name}" for name, values in lengths.items())
            raise BudgetError(
                f"sample {index} ({units}) does not fit even alone, nor do {len(self.oversize) - 1} others; "
                "truncate or filter them, raise the budget, or pass oversize='alone' or 'drop'"
            )
        self._drops = config.oversize == "drop" and len(self.oversize) > 0

    @cached_property
    def batch_size(self) -> float:
        """Samples that a batch has on average when everything is sorted together; an estimate."""
        if not self.num_samples:
            return 1.0
        sample = {k: v[:: max(1, self.num_samples // 4096)] for k, v in self.lengths.items()}
        count = len(sample[TOKENS])
        longest, where = np.unique(sample[TOKENS].astype(np.int64), return_inverse=True)
        table = self.budget.largest(longest)
        batches = (1.0 / np.maximum(table, 1))[where].sum() if table is not None else len(cut(sample, self.budget))
        return max(1.0, count / max(float(batches), 1.0))

    def window_size(self, world_size: int) -> int:
        """Samples a window, a multiple of ``world_size`` unless it is an update."""
        config = self.config
        if config.samples_per_update is not None:
            if config.samples_per_update < world_size:
                raise ConfigError(
                    f"`samples_per_update` ({config.samples_per_update}) must be at least the number of ranks "
                    f"({world_size}), so that every rank has a sample in every update"
                )
            return config.samples_per_update
        if config.window is not None:
            size = config.window
        elif config.shuffle:
            wanted = max(BATCHES_PER_WINDOW, 25 * world_size) * self.batch_size
            size = int(max(1, min(wanted, self.num_samples / 4)))
        else:
            size = max(self.num_samples, 1)
        return -(-size // world_size) * world_size

    def start(self, world_size: int) -> Position:
        """The beginning of an epoch."""
        return Position(self.window_size(world_size))

    def windows(self, epoch: int, position: Position, order: Sequence[int] | None = None) -> Iterator[Window]:
        """The windows from ``position`` on, in the order in which they are used."""
        ordered = _EpochSamples(self.num_samples, epoch, self.config, order)
        size = position.window_size
        count = -(-len(ordered) // size) if len(ordered) else 0
        lead = self._leading_window(ordered, size) if self.config.samples_per_update is None else 0
        for number in range(position.windows_done, count):
            place = lead if number == 0 else number - (number <= lead)
            indices = ordered[place * size : (place + 1) * size]
            if self._drops:
                indices = indices[~self._oversize[indices]]
            yield Window(number, indices, leads=number == 0 and self.config.samples_per_update is None)

    def _leading_window(self, ordered: _EpochSamples, size: int) -> int:
        if not self.config.hardest_first or len(ordered) <= size:
            return 0
        return ordered.position_of_longest(self.lengths[TOKENS]) // size

    def rows(self, window: Window, epoch: int, world_size: int, segments: Sequence[Segment] = ()) -> Rows:
        """The steps of a window that remain after ``segments`` of it were used.

        While the number of ranks stays the same, these are the window's own rows; after a change, the samples that
        remained are cut again. Positions count in the whole window.
        """
        remaining = np.arange(len(window.indices))
        for number, (size, done) in enumerate(segments, start=1):
            rows = self._cut(window, remaining, epoch, size)
            if number == len(segments) and size == world_size:
                return replace(rows, table=rows.table[done:])
            emitted = np.zeros(len(window.indices), np.bool_)
            emitted[rows.batches.take(rows.table[:done].ravel()).order] = True
            emitted[rows.dropped] = True
            remaining = remaining[~emitted[remaining]]
        return self._cut(window, remaining, epoch, world_size)

    def _cut(self, window: Window, positions: IntArray, epoch: int, world_size: int) -> Rows:
        indices = window.indices[positions]
        lengths = {name: values[indices] for name, values in self.lengths.items()}
        batches = cut_evenly(lengths, self.budget, world_size, round_batch=self.config.round_batch)
        prove(batches, len(indices), lengths, self.budget, self._oversize[indices])
        smallest = longest_first(lengths)[::-1] if len(batches) % world_size else batches.order
        rows = arrange(batches, world_size, self.config.uneven, smallest)
        table = rows.table
        if self.config.shuffle and self.config.samples_per_update is None:
            rng = np.random.default_rng((self.config.seed, epoch, window.number, len(positions)))
            table = _shuffle_rows(table, self.config.hardest_first if window.leads else 0, rng)
        return Rows(rows.batches.map(positions), table, positions[rows.repeated], positions[rows.dropped])

    def plan(
        self,
        epoch: int = 0,
        world_size: int = 1,
        position: Position | None = None,
        order: Sequence[int] | None = None,
    ) -> BatchPlan:
        """The whole epoch, or what remains of it from ``position`` on."""
        position = position or self.start(world_size)
        parts = [
            self.finish(window, self.rows(window, epoch, world_size, segments))
            for window, segments in with_segments(self.windows(epoch, position, order), position)
        ]
        return BatchPlan.join(parts, self, epoch, world_size)

    def finish(self, window: Window, rows: Rows) -> PlannedWindow:
        """A window's steps as dataset indices, with what each batch weighs in its update."""
        counts = rows.batches.sizes[rows.table]
        if len(rows.repeated):
            fillers = rows.table >= len(rows.batches) - len(rows.repeated)
            counts = np.where(fillers, 0, counts)
        whole = self.config.samples_per_update is not None
        total = np.full(len(counts), len(window.indices)) if whole else counts.sum(axis=1)
        ends = np.ones(len(counts), np.bool_)
        if whole:
            ends[:-1] = False
        scale = counts * counts.shape[1] / np.maximum(total, 1)[:, None]
        return PlannedWindow(
            rows.batches.map(window.indices),
            rows.table,
            ends,
            scale,
            window.indices[rows.repeated],
            window.indices[rows.dropped],
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a plan depends on, besides epoch and world size; states are compared by it. JSON-able."""
        config = self.config
        return {
            "num_samples": self.num_samples,
            "lengths": {name: zlib.crc32(np.ascontiguousarray(v).data) for name, v in self.lengths.items()},
            "budget": self.budget.fingerprint,
            "seed": config.seed,
            "shuffle": config.shuffle,
            "window": config.window,
            "samples_per_update": config.samples_per_update,
            "hardest_first": config.hardest_first,
            "round_batch": None if config.round_batch is None else _name(config.round_batch),
            "oversize": config.oversize,
            "uneven": config.uneven,
        }

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of :attr:`identity`."""
        return hashlib.blake2b(json.dumps(self.identity, sort_keys=True).encode(), digest_size=8).hexdigest()


def with_segments(windows: Iterator[Window], position: Position) -> Iterator[tuple[Window, tuple[Segment, ...]]]:
    """Pair each window with what was used of it: only the first can have been."""
    segments = position.segments
    for window in windows:
        yield window, segments
        segments = ()


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _shuffle_rows(table: IntArray, lead: int, rng: np.random.Generator) -> IntArray:
    head, tail = table[:lead], table[lead:]
    return np.concatenate([head, rng.permuted(rng.permutation(tail), axis=1)]) if len(tail) else table


def _oversize_mask(lengths: Streams, budget: Budget) -> NDArray[np.bool_]:
    tokens = lengths[TOKENS]
    if not len(tokens):
        return np.zeros(0, np.bool_)
    if budget.largest(np.asarray([tokens.max()], np.int64)) is not None:
        low, high = -1, int(tokens.max())  # the largest length that fits alone, by bisection
        while low < high:
            middle = (low + high + 1) // 2
            table = budget.largest(np.asarray([middle], np.int64))
            low, high = (middle, high) if table is not None and table[0] >= 1 else (low, middle - 1)
        return tokens > low
    wide = {name: values.astype(np.int64) for name, values in lengths.items()}
    return ~budget.fits(BatchShape(np.ones(len(tokens), np.int64), wide, wide))


class _EpochSamples:
    """Dataset indices in an epoch's order, read by slice."""

    def __init__(self, num_samples: int, epoch: int, config: PlanConfig, order: Sequence[int] | None) -> None:
        self._given = None if order is None else np.asarray(order, np.int64)
        self._count = num_samples if self._given is None else len(self._given)
        shuffled = config.shuffle or config.samples_per_update is not None
        self._drawn = EpochOrder(num_samples, seed=config.seed, epoch=epoch) if shuffled else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> IntArray:
        if self._given is not None:
            return self._given[where]
        if self._drawn is not None:
            return self._drawn[where]
        return np.arange(*where.indices(self._count), dtype=np.int64)

    def position_of_longest(self, tokens: NDArray[np.int32]) -> int:
        if self._given is not None:
            return int(np.argmax(tokens[self._given]))
        longest = np.asarray([np.argmax(tokens)], np.int64)
        return int((longest if self._drawn is None else self._drawn.position_of(longest))[0])


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window's steps, ready to be emitted; ``batches`` hold dataset indices."""

    batches: Batches
    table: IntArray
    update_ends: NDArray[np.bool_]
    loss_scale: NDArray[np.float64]
    repeated: IntArray
    dropped: IntArray


class PlanRows(Sequence[list[list[int]]]):
    """``rows[step][rank]``: the dataset indices of one batch."""

    __slots__ = ("_batches", "_table")

    def __init__(self, batches: Batches, table: IntArray) -> None:
        self._batches, self._table = batches, table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> list[list[int]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[list[int]]]: ...
    def __getitem__(self, index: int | slice) -> list[list[int]] | list[list[list[int]]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return [self._batches[int(number)].tolist() for number in self._table[index]]


@dataclass(frozen=True)
class BatchPlan:
    """One epoch's batches on all ranks, with their figures.

    Args:
        batches: all batches, dataset indices; ``table`` says which one a rank gets at a step.
        table: int64 (num_steps, world_size), batch numbers.
        update_ends: bool (num_steps,), the optimizer steps after this row.
        loss_scale: float64 (num_steps, world_size), factor for a batch's mean per-sample loss, see ``step.loss_scale``.
        lengths: the dataset's lengths, stream -> int32 (N,).
        budget: what the batches were made to fit.
        epoch, world_size: what the plan was made for.
        oversize: dataset indices of samples that do not fit even alone.
        repeated: dataset indices of samples that stand in a row a second time, to fill it; their weight is 0.
        dropped: dataset indices that were left out, by ``oversize="drop"`` or ``uneven="drop"``.
    """

    batches: Batches
    table: IntArray
    update_ends: NDArray[np.bool_]
    loss_scale: NDArray[np.float64]
    lengths: Streams = field(repr=False)
    budget: Budget
    epoch: int
    world_size: int
    oversize: IntArray
    repeated: IntArray
    dropped: IntArray

    @classmethod
    def join(cls, parts: Sequence[PlannedWindow], planner: Planner, epoch: int, world_size: int) -> BatchPlan:
        """One plan from its windows, in order."""
        first = np.concatenate([[0], np.cumsum([len(p.batches) for p in parts])]).astype(np.int64)
        none = np.zeros(0, np.int64)
        oversize_dropped = planner.oversize if planner.config.oversize == "drop" else none
        tables = [p.table + start for p, start in zip(parts, first[:-1], strict=True)]
        return cls(
            batches=Batches.concatenate([p.batches for p in parts]),
            table=np.concatenate([np.zeros((0, world_size), np.int64), *tables]),
            update_ends=np.concatenate([np.zeros(0, np.bool_), *(p.update_ends for p in parts)]),
            loss_scale=np.concatenate([np.zeros((0, world_size)), *(p.loss_scale for p in parts)]),
            lengths=planner.lengths,
            budget=planner.budget,
            epoch=epoch,
            world_size=world_size,
            oversize=planner.oversize,
            repeated=np.concatenate([none, *(p.repeated for p in parts)]),
            dropped=np.concatenate([oversize_dropped, *(p.dropped for p in parts)]),
        )

    @property
    def rows(self) -> PlanRows:
        """``rows[step][rank]``: dataset indices of that batch."""
        return PlanRows(self.batches, self.table)

    @property
    def num_steps(self) -> int:
        return len(self.table)

    @property
    def num_updates(self) -> int:
        return int(self.update_ends.sum())

    @cached_property
    def shapes(self) -> BatchShape:
        """The true shape of every batch, in the order of ``batches``."""
        return shapes_of(self.batches, self.lengths)

    @cached_property
    def padded(self) -> IntArray:
        """Tokens that a device multiplies for every batch, padding included: int64 (B,)."""
        return padded_tokens(self.shapes, self.budget)

    @cached_property
    def statistics(self) -> Mapping[str, float]:
        """The figures of the plan by name: counts, tokens, ``efficiency`` (real over padded tokens), row imbalance.

        ``row_imbalance`` is how much longer all rows take than with perfectly equal row mates: sum of the rows' maxima
        over the sum of their means, 1.0 at best, with padded tokens for time.
        """
        sizes, padded = self.batches.sizes, self.padded
        by_row = padded[self.table].reshape(-1, self.world_size)
        real = int(self.shapes.total[TOKENS].sum())
        quantiles = np.quantile(sizes, [0.0, 0.5, 1.0]) if len(sizes) else np.zeros(3)
        return {
            "num_samples": len(self.batches.order) - len(self.repeated),
            "num_batches": len(sizes),
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "real_tokens": real,
            "padded_tokens": int(padded.sum()),
            "efficiency": real / max(int(padded.sum()), 1),
            "padding": 1.0 - real / max(int(padded.sum()), 1),
            "smallest_batch": int(quantiles[0]),
            "median_batch": float(quantiles[1]),
            "largest_batch": int(quantiles[2]),
            "row_imbalance": float(by_row.max(axis=1, initial=0).sum() / max(by_row.mean(axis=1).sum(), 1e-9))
            if len(by_row)
            else 1.0,
            "num_oversize": len(self.oversize),
            "num_repeated": len(self.repeated),
            "num_dropped": len(self.dropped),
        }

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change with any batch, its rank, or its place."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.batches.order, self.batches.offsets, self.table, self.update_ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def report(self) -> str:
        """The plan as a readable table."""
        from dynagroup.report import report_plan

        return report_plan(self)

    def plot(self) -> Any:
        """The plan as a matplotlib figure: lengths, padding and batch sizes."""
        from dynagroup.report import plot_plan

        return plot_plan(self)
