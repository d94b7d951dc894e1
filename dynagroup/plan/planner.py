"""Plan an epoch: a rectangle ``rows[step][rank]`` of batches that fit, every sample exactly once.

A plan is a pure function of (lengths, budget, settings, epoch, world size). It is made window by window, so that the
first batch of any dataset is there at once and a run resumes, also on another number of ranks, from a few integers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.checks import check_choice, check_int
from dynagroup.errors import BudgetError, ConfigError, StateError
from dynagroup.fingerprint import described, hashed
from dynagroup.plan.batches import longest_first
from dynagroup.plan.cut import DEFAULT_WORK, OBJECTIVES, Objective, cut
from dynagroup.plan.order import EpochOrder, epoch_order
from dynagroup.plan.plan import BatchPlan, PlannedWindow
from dynagroup.plan.rounding import RoundBatch
from dynagroup.plan.rows import Rows, Uneven, arrange, cut_rows, num_fewest, prove
from dynagroup.plan.work import Work
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams
from dynagroup.world import World

__all__ = ["BatchPlan", "PlanConfig", "Planner", "Position", "epoch_order"]

Oversize: TypeAlias = Literal["alone", "error", "drop"]
Segment: TypeAlias = tuple[int, int]
"""(world size, rows emitted at that world size): how far a window was used, and by how many ranks."""

BATCHES_PER_WINDOW = 100


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
    work: Work = DEFAULT_WORK
    """Predicted time of a batch, which cutting makes least and row mates share."""
    objective: Objective = "time"
    """What cutting makes least: "time", or with "fewest" the number of batches."""
    oversize: Oversize = "alone"
    """A sample that does not fit even alone: "alone", "error" or "drop"."""
    uneven: Uneven = "repeat"
    """Where halving cannot fill the last row: "repeat" the smallest samples, or "drop" the row's samples."""

    def __post_init__(self) -> None:
        for name in ("window", "samples_per_update"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_int(name, getattr(self, name), where=" (or None)"))
        for name in ("seed", "hardest_first"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least=0))
        if self.window is not None and self.samples_per_update is not None:
            raise ConfigError(
                "`window` and `samples_per_update` exclude each other: an update's samples are the window"
            )
        check_choice("oversize", self.oversize, ("alone", "error", "drop"))
        check_choice("uneven", self.uneven, ("repeat", "drop"))
        check_choice("objective", self.objective, OBJECTIVES)
        if not isinstance(self.work, Work):
            raise ConfigError(f"`work` must be a Work, such as Work.of(model), but is {self.work!r}")
        if self.round_batch is not None and not callable(self.round_batch):
            raise ConfigError(f"`round_batch` must be a function from int to int, but is {self.round_batch!r}")


@dataclass(frozen=True, slots=True)
class Position:
    """How far an epoch was used: whole windows, then part of one."""

    window_size: int
    windows_done: int = 0
    segments: tuple[Segment, ...] = ()
    tail: int = 1
    """Windows at the end that are one, so that their rows can be filled; fixed when the epoch starts."""


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that are sorted and grouped together: dataset indices, int64 (n,)."""

    number: int
    indices: IntArray
    leads: bool
    num_windows: int = 1
    """As many as are counted for it."""

    def with_next(self, following: Window) -> Window:
        indices = np.append(self.indices, following.indices)
        return replace(self, indices=indices, num_windows=self.num_windows + following.num_windows)


class Planner:
    """Makes plans: holds the facts (lengths, bound budget) and the knobs, and no state.

    Args:
        lengths: stream -> int32 (N,), checked.
        budget: what fits; bound to these lengths here.
        config: how to cut.

    Raises:
        BudgetError: a sample does not fit even alone and ``oversize="error"``.
    """

    def __init__(self, lengths: Streams, budget: Budget | int, config: PlanConfig) -> None:
        self.lengths = lengths
        self.budget = as_budget(budget).bind(lengths)
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

    def renewed(self, world: World | None = None) -> Planner:
        """Itself; or a planner that follows what its budget has learned, if that changes anything. Collective over ``world``."""
        learner = LearningBudget.within(self.budget)
        if learner is None:
            return self
        learner.apply(world)
        after = self.rebuilt()
        return self if after.fingerprint == self.fingerprint else after

    def rebuilt(self) -> Planner:
        """A planner of the same facts and knobs, whose budget may have changed."""
        return Planner(self.lengths, self.budget, self.config)

    @cached_property
    def batch_size(self) -> float:
        """Samples that a batch has on average when everything is sorted together; an estimate."""
        if not self.num_samples:
            return 1.0
        sample = {k: v[:: max(1, self.num_samples // 4096)] for k, v in self.lengths.items()}
        count = len(sample[TOKENS])
        longest, where = np.unique(sample[TOKENS].astype(np.int64), return_inverse=True)
        table = self.budget.largest(longest) if len(self.lengths) == 1 else None
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
            size = int(max(1, min(wanted, self.num_samples / 2)))
        else:
            size = max(self.num_samples, 1)
        return -(-size // world_size) * world_size

    def start(self, world_size: int, epoch: int = 0, order: IntArray | None = None) -> Position:
        """The beginning of an epoch."""
        size = self.window_size(world_size)
        return Position(size, tail=self._tail(self._epoch_samples(epoch, order), size, world_size))

    def _tail(self, ordered: _EpochSamples, size: int, world_size: int) -> int:
        """Windows, counted from the end, that must be cut together: a short last one alone might not fill its rows.

        Every other window holds a multiple of the ranks. The fewest at the end are taken whose batches, put together as far
        as they fit, are few enough to be divided again into full rows; one where even all of them do not help.
        """
        count = -(-len(ordered) // size)
        over = len(ordered) % world_size
        if not over or count <= 1 or self.config.samples_per_update is not None:
            return 1
        saved = 0
        for tail in range(1, count + 1):
            place = count - tail
            saved += self._can_save(ordered[place * size : (place + 1) * size])
            if saved >= over:
                return tail
        return 1

    def _can_save(self, indices: IntArray) -> int:
        """By how much the batches of these samples can be fewer than the samples."""
        lengths = {name: values[indices] for name, values in self.lengths.items()}
        return len(indices) - num_fewest(lengths, self.budget, self.config.round_batch)

    def is_over(self, position: Position, epoch: int, order: IntArray | None = None) -> bool:
        """Whether nothing of the epoch remains."""
        return position.windows_done * position.window_size >= len(self._epoch_samples(epoch, order))

    def check_position(self, position: Position, epoch: int, order: IntArray | None = None) -> None:
        """Refuse a place that no run of an epoch comes by.

        Raises:
            StateError: it claims other windows, or more than there are.
        """
        ordered = self._epoch_samples(epoch, order)
        count = -(-len(ordered) // position.window_size)
        size = position.window_size
        config = self.config
        asked = config.samples_per_update or config.window
        rows = sum(ranks * done for ranks, done in position.segments)
        sound = (
            position.windows_done <= count
            and 1 <= position.tail <= max(count, 1)
            and (size == asked if config.samples_per_update else size >= (asked or 1))
            and size <= 2 * max(len(ordered), asked or 1) + (1 << 20)
            and rows <= len(ordered) + sum(ranks for ranks, _ in position.segments)
            and not (position.segments and position.windows_done == count)
        )
        if not sound:
            raise StateError(f"the state is damaged: no epoch of {len(ordered)} samples comes by {position}")

    def windows(self, epoch: int, position: Position, order: IntArray | None = None) -> Iterator[Window]:
        """The windows from ``position`` on, in the order in which they are used."""
        ordered = self._epoch_samples(epoch, order)
        size, updates = position.window_size, self.config.samples_per_update is not None
        count = -(-len(ordered) // size)
        last = max(count - position.tail, 0)
        lead = 0 if updates else min(self._leading_window(ordered, size), last)
        number = 0
        for turn in range(last + 1 if count else 0):
            place = lead if turn == 0 else turn - (turn <= lead)
            whole = place == last
            if number >= position.windows_done:
                indices = ordered[place * size : len(ordered) if whole else (place + 1) * size]
                yield Window(number, indices, turn == 0 and not updates, count - last if whole else 1)
            number += count - last if whole else 1

    def _epoch_samples(self, epoch: int, order: IntArray | None) -> _EpochSamples:
        kept = np.flatnonzero(~self._oversize) if self._drops else None
        if order is not None and self._drops:
            order = order[~self._oversize[order]]
        return _EpochSamples(self.num_samples if kept is None else len(kept), epoch, self.config, order, kept)

    def _leading_window(self, ordered: _EpochSamples, size: int) -> int:
        if not self.config.hardest_first or len(ordered) <= size:
            return 0
        return ordered.position_of_longest(self.lengths[TOKENS]) // size

    def steps(
        self, epoch: int, world_size: int, position: Position | None = None, order: IntArray | None = None
    ) -> Iterator[PlannedWindow]:
        """The epoch's steps from ``position`` on, a window at a time, planned when asked for."""
        position = position or self.start(world_size, epoch, order)
        windows = self.windows(epoch, position, order)
        if position.segments:
            yield from self._rest(windows, epoch, world_size, position.segments)
        for window in windows:
            window = self._filled(window, windows, world_size)
            yield self._finish(window, self._cut(window, np.arange(len(window.indices)), epoch, world_size))

    def _filled(self, window: Window, following: Iterator[Window], world_size: int) -> Window:
        """The window, with those after it that it needs to fill its rows on a number of ranks the epoch did not start with."""
        while self.config.samples_per_update is None:
            over = len(window.indices) % world_size
            further = next(following, None) if over and self._can_save(window.indices) < over else None
            if further is None:
                break
            window = window.with_next(further)
        return window

    def _rest(
        self, windows: Iterator[Window], epoch: int, world_size: int, segments: Sequence[Segment]
    ) -> Iterator[PlannedWindow]:
        """What remains of a window of which ``segments`` were used.

        While the number of ranks stays the same, these are the window's own rows. After a change the samples that
        remain are cut again, together with the next window's (except across updates), so that rows can be filled.
        """
        window = next(windows, None)
        if window is None:
            return
        ranks = segments[0][0]
        window = self._filled(window, windows, ranks)
        remaining = np.arange(len(window.indices))
        rows = self._cut(window, remaining, epoch, ranks)
        for size, done in (*segments, (world_size, 0)):
            if size != ranks:
                window, remaining = self._with_more(window, remaining, windows, size)
                rows = self._cut(window, remaining, epoch, size)
                ranks = size
            used = np.zeros(len(window.indices), np.bool_)
            used[rows.batches.take(rows.table[:done].ravel()).order] = True
            remaining = remaining[~used[remaining]]
            rows = replace(rows, table=rows.table[done:])
        yield self._finish(window, rows)

    def _with_more(
        self, window: Window, remaining: IntArray, following: Iterator[Window], world_size: int
    ) -> tuple[Window, IntArray]:
        """The rest of a window together with the next one, and with as many more as it takes to fill rows."""
        short = self.config.samples_per_update is None
        while short and (further := next(following, None)) is not None:
            remaining = np.append(remaining, len(window.indices) + np.arange(len(further.indices)))
            window = window.with_next(further)
            over = len(remaining) % world_size
            short = over > 0 and self._can_save(window.indices[remaining]) < over
        return window, remaining

    def _cut(self, window: Window, positions: IntArray, epoch: int, world_size: int) -> Rows:
        config = self.config
        indices = window.indices[positions]
        lengths = {name: values[indices] for name, values in self.lengths.items()}
        how = {"work": config.work, "objective": config.objective, "round_batch": config.round_batch}
        batches = cut_rows(lengths, self.budget, world_size, **how)
        prove(batches, len(indices), lengths, self.budget, self._oversize[indices])
        smallest = longest_first(lengths)[::-1] if len(batches) % world_size else batches.order
        rows = arrange(batches, world_size, config.uneven, smallest)
        table = rows.table
        if config.shuffle and config.samples_per_update is None:
            rng = np.random.default_rng((config.seed, epoch, window.number, len(positions)))
            table = _shuffle_rows(table, config.hardest_first if window.leads else 0, rng)
        return Rows(rows.batches.map(positions), table, positions[rows.repeated], positions[rows.dropped])

    def plan(
        self,
        epoch: int = 0,
        world_size: int = 1,
        position: Position | None = None,
        order: IntArray | None = None,
    ) -> BatchPlan:
        """The whole epoch, or what remains of it from ``position`` on."""
        return self.joined(list(self.steps(epoch, world_size, position, order)), epoch, world_size)

    def joined(self, parts: Sequence[PlannedWindow], epoch: int, world_size: int) -> BatchPlan:
        """Windows as one plan."""
        return BatchPlan.join(
            parts,
            lengths=self.lengths,
            budget=self.budget,
            epoch=epoch,
            world_size=world_size,
            oversize=self.oversize,
            left_out=self.oversize if self._drops else np.zeros(0, np.int64),
            work=self.config.work,
        )

    def _finish(self, window: Window, rows: Rows) -> PlannedWindow:
        """A window's steps as dataset indices, with what each batch weighs in its update."""
        counts = rows.batches.sizes[rows.table]
        if len(rows.repeated):
            fillers = rows.table >= len(rows.batches) - len(rows.repeated)
            counts = np.where(fillers, 0, counts)
        ends = np.ones(len(counts), np.bool_)
        total = counts.sum(axis=1)
        if self.config.samples_per_update is not None:
            ends[:-1] = False
            total = np.full(len(counts), len(window.indices) - len(rows.dropped))
        return PlannedWindow(
            batches=rows.batches.map(window.indices),
            table=rows.table,
            update_ends=ends,
            loss_scale=counts * counts.shape[1] / np.maximum(total, 1)[:, None],
            repeated=window.indices[rows.repeated],
            dropped=window.indices[rows.dropped],
            num_windows=window.num_windows,
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
            "round_batch": described(config.round_batch),
            "work": described(config.work),
            "objective": config.objective,
            "oversize": config.oversize,
            "uneven": config.uneven,
        }

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of :attr:`identity`."""
        return hashed(json.dumps(self.identity, sort_keys=True))


def _shuffle_rows(table: IntArray, lead: int, rng: np.random.Generator) -> IntArray:
    head, tail = table[:lead], table[lead:]
    return np.concatenate([head, rng.permuted(rng.permutation(tail), axis=1)]) if len(tail) else table


def _oversize_mask(lengths: Streams, budget: Budget) -> NDArray[np.bool_]:
    tokens = lengths[TOKENS]
    if not len(tokens):
        return np.zeros(0, np.bool_)
    if len(lengths) == 1 and budget.largest(np.asarray([tokens.max()], np.int64)) is not None:
        low, high = -1, int(tokens.max())  # the largest length that fits alone, by bisection
        while low < high:
            middle = (low + high + 1) // 2
            table = budget.largest(np.asarray([middle], np.int64))
            low, high = (middle, high) if table is not None and table[0] >= 1 else (low, middle - 1)
        return tokens > low
    wide = {name: values.astype(np.int64) for name, values in lengths.items()}
    return ~budget.fits(BatchShape(np.ones(len(tokens), np.int64), wide, wide))


class _EpochSamples:
    """Dataset indices in an epoch's order, read by slice. ``kept`` are the samples that take part, ascending."""

    def __init__(
        self, num_samples: int, epoch: int, config: PlanConfig, order: IntArray | None, kept: IntArray | None
    ) -> None:
        self._given = order
        self._kept = kept
        self._count = num_samples if order is None else len(order)
        shuffled = config.shuffle or config.samples_per_update is not None
        self._drawn = EpochOrder(num_samples, seed=config.seed, epoch=epoch) if shuffled else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> IntArray:
        if self._given is not None:
            return self._given[where]
        start, stop, _ = where.indices(self._count)
        drawn = np.arange(start, stop, dtype=np.int64) if self._drawn is None else self._drawn[start:stop]
        return drawn if self._kept is None else self._kept[drawn]

    def position_of_longest(self, tokens: NDArray[np.int32]) -> int:
        if self._given is not None:
            return int(np.argmax(tokens[self._given]))
        longest = np.asarray([np.argmax(tokens if self._kept is None else tokens[self._kept])], np.int64)
        return int((longest if self._drawn is None else self._drawn.position_of(longest))[0])
