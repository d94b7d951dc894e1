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
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described, hashed
from dynagroup.plan.batches import Batches, longest_first
from dynagroup.plan.config import PlanConfig, oversize_mask, refuse_oversize, warn_of_oversize
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochOrder, Windows
from dynagroup.plan.padded import cut
from dynagroup.plan.plan import BatchPlan, PlannedWindow
from dynagroup.plan.ranks import Rows, arrange, cut_rows, prove
from dynagroup.shapes import TOKENS, IntArray, Streams
from dynagroup.validation import warn_user

__all__ = ["JUDGED", "PlanNotices", "Planner"]

BATCHES_PER_WINDOW = 100
SAMPLED = 4096
"""Lengths from which a window is chosen."""
JUDGED = 1000
"""Samples after which a plan's padding says something."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Samples that are cut together."""

    indices: IntArray
    """Dataset indices; samples that windows before could not place come first."""
    cursor: Cursor
    """Where the window stands."""
    is_last: bool
    """Nothing follows that could take what fills no row."""


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
        self._oversize = oversize_mask(lengths, self.budget)
        self.oversize = np.flatnonzero(self._oversize)
        if config.oversize == "error":
            refuse_oversize(lengths, self.oversize)
        self.left_out = self.oversize if config.oversize == "drop" else np.zeros(0, np.int64)
        """Dataset indices of the samples that take no part."""

    def warn_of_oversize(self) -> None:
        """Say which samples do not fit even alone, if any."""
        warn_of_oversize(self.lengths, self.oversize, self.config.oversize)

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

    @property
    def num_planned(self) -> int:
        """Samples of an epoch: all but those that are left out."""
        return self.num_samples - len(self.left_out)

    @property
    def _has_updates(self) -> bool:
        return self.config.samples_per_update is not None

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
        size = config.window or max(self.num_samples, 1)
        if config.window is None and config.shuffle:
            wanted = max(BATCHES_PER_WINDOW, 25 * world_size) * self._batch_size
            size = int(max(1, min(wanted, self.num_samples / 2)))
        return -(-size // world_size) * world_size

    @cached_property
    def _batch_size(self) -> float:
        """Samples that a batch has when it is as large as fits and everything is sorted together; an estimate."""
        some = {name: values[:: max(1, self.num_samples // SAMPLED)] for name, values in self.lengths.items()}
        return len(some[TOKENS]) / max(len(cut(some, self.budget, objective="fewest")), 1)

    def start_of(self, epoch: int, world_size: int = 1, order: IntArray | None = None) -> Cursor:
        """The beginning of an epoch."""
        return Cursor(epoch=epoch, window_size=self.window_size(world_size))

    def is_done(self, cursor: Cursor, order: IntArray | None = None) -> bool:
        """Whether nothing of the cursor's epoch remains."""
        return cursor.windows_done >= len(self._windows(cursor, order))

    def _windows(self, cursor: Cursor, order: IntArray | None) -> Windows:
        """The windows of the cursor's epoch. ``order``: dataset indices; None: shuffled, or the dataset's."""
        config, kept = self.config, None
        if len(self.left_out):
            kept = np.flatnonzero(~self._oversize)
            order = None if order is None else order[~self._oversize[order]]
        if order is not None:
            given, kept = order, None
        elif config.shuffle or self._has_updates:
            given = EpochOrder(self.num_planned, seed=config.seed, epoch=cursor.epoch)
        else:
            given, kept = np.arange(self.num_samples) if kept is None else kept, None

        def longest() -> int:
            names = padded_streams(self.budget, self.lengths)
            tokens = np.add.reduce([self.lengths[name] for name in names], axis=0, dtype=np.int64)
            return _longest(given, tokens if kept is None else tokens[kept])

        leads = config.hardest_first and not self._has_updates
        size = cursor.window_size or self.window_size(1)
        return Windows(given, size, kept=kept, keep_order=self._has_updates, longest=longest if leads else None)

    def steps_from(self, cursor: Cursor, world_size: int = 1, order: IntArray | None = None) -> Iterator[PlannedWindow]:
        """What remains of the cursor's epoch, a window at a time, planned when asked for."""
        if not cursor.window_size:
            cursor = replace(cursor, window_size=self.window_size(world_size))
        windows = self._windows(cursor, order)
        while cursor.windows_done < len(windows):
            indices = windows[cursor.windows_done]
            if cursor.carried:
                indices = np.append(np.asarray(cursor.carried, np.int64), indices)
            is_last = self._has_updates or cursor.windows_done + 1 == len(windows)
            window = _Window(indices, cursor, is_last)
            planned = self._finish(window, self._rest(window, world_size))
            yield planned
            cursor = planned.end

    # While the number of ranks stays the same, what remains of a window are its own rows. After a change the samples that remain
    # are cut again. A repeat that fills a row is not used by it: its own place may still be to come.
    def _rest(self, window: _Window, world_size: int) -> Rows:
        """The rows of a window behind its cursor."""
        segments = (*window.cursor.segments, (world_size, 0))
        remaining, ranks = np.arange(len(window.indices)), segments[0][0]
        rows = self._cut(window, remaining, ranks)
        for size, done in segments:
            if size != ranks:
                rows, ranks = self._cut(window, remaining, size), size
            used = rows.table[:done].ravel()
            used = used[used < len(rows.batches) - len(rows.repeated)]
            remaining = np.setdiff1d(remaining, rows.batches.take(used).order) if done else remaining
            rows = replace(rows, table=rows.table[done:])
        return rows if not window.cursor.segments else _without_used(rows)

    def _cut(self, window: _Window, positions: IntArray, world_size: int) -> Rows:
        config, cursor = self.config, window.cursor
        indices = window.indices[positions]
        lengths = {name: values[indices] for name, values in self.lengths.items()}
        how = {name: getattr(config, name) for name in ("work", "objective", "round_batch")}
        batches = cut_rows(lengths, self.budget, world_size, **how)
        prove(batches, len(indices), lengths, self.budget, self._oversize[indices])
        smallest = batches.order
        if len(batches) % world_size:
            smallest = longest_first(lengths, padded_streams(self.budget, lengths))[::-1]
        rows = arrange(batches, world_size, config.uneven if window.is_last else "drop", smallest)
        if config.shuffle and not self._has_updates:
            rng = np.random.default_rng((config.seed, cursor.epoch, cursor.windows_done, len(positions)))
            leading = config.hardest_first if not cursor.windows_done else 0
            rows = replace(rows, table=_shuffle_rows(rows.table, leading, rng))
        if len(positions) == len(window.indices):  # all of them
            return rows
        return Rows(rows.batches.map(positions), rows.table, positions[rows.repeated], positions[rows.dropped])

    def _finish(self, window: _Window, rows: Rows) -> PlannedWindow:
        """A window's steps as dataset indices, with what each batch weighs in its update."""
        counts = rows.batches.sizes[rows.table]
        if len(rows.repeated):
            fillers = rows.table >= len(rows.batches) - len(rows.repeated)
            counts = np.where(fillers, 0, counts)
        ends = np.ones(len(counts), np.bool_)
        total = counts.sum(axis=1)
        if self._has_updates:
            ends[:-1] = False
            total = np.full(len(counts), len(window.indices) - len(rows.dropped))
        left = window.indices[rows.dropped]
        nothing = left[:0]
        behind = window.cursor.after_rows(len(rows.table), rows.table.shape[1])
        return PlannedWindow(
            batches=rows.batches.map(window.indices),
            table=rows.table,
            update_ends=ends,
            loss_scale=counts * counts.shape[1] / np.maximum(total, 1)[:, None],
            repeated=window.indices[rows.repeated],
            dropped=left if window.is_last else nothing,
            start=window.cursor,
            end=behind.after_window((nothing if window.is_last else left).tolist()),
        )

    def plan(
        self, epoch: int = 0, world_size: int = 1, cursor: Cursor | None = None, order: IntArray | None = None
    ) -> BatchPlan:
        """A whole epoch; or what remains of one, from ``cursor`` on."""
        cursor = cursor or self.start_of(epoch, world_size, order)
        return self.joined(list(self.steps_from(cursor, world_size, order)), cursor.epoch, world_size)

    def joined(self, parts: Sequence[PlannedWindow], epoch: int, world_size: int) -> BatchPlan:
        """Windows as one plan."""
        none, first = np.zeros(0, np.int64), np.cumsum([0, *(len(part.batches) for part in parts)])
        tables = (part.table + number for part, number in zip(parts, first, strict=False))
        return BatchPlan(
            batches=Batches.concatenate([part.batches for part in parts]),
            table=np.concatenate([np.zeros((0, world_size), np.int64), *tables]),
            update_ends=np.concatenate([np.zeros(0, np.bool_), *(part.update_ends for part in parts)]),
            loss_scale=np.concatenate([np.zeros((0, world_size)), *(part.loss_scale for part in parts)]),
            lengths=self.lengths,
            budget=self.budget,
            epoch=epoch,
            world_size=world_size,
            oversize=self.oversize,
            repeated=np.concatenate([none, *(part.repeated for part in parts)]),
            dropped=np.concatenate([self.left_out, *(part.dropped for part in parts)]),
            work=self.config.work,
            window=None if self._has_updates else self.window_size(world_size),
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a plan depends on, besides epoch and world size; states are compared by it. JSON-able."""
        config = self.config
        plain = ("seed", "shuffle", "window", "samples_per_update", "hardest_first", "objective", "oversize", "uneven")
        return {
            "num_samples": self.num_samples,
            "lengths": {name: zlib.crc32(np.ascontiguousarray(v).data) for name, v in self.lengths.items()},
            "budget": self.budget.fingerprint,
            **{name: getattr(config, name) for name in plain},
            "round_batch": described(config.round_batch),
            "work": described(config.work),
        }

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of :attr:`identity`."""
        return hashed(json.dumps(self.identity, sort_keys=True))


def _longest(order: IntArray | EpochOrder, tokens: IntArray) -> int:
    """The position at which the sample of most tokens stands."""
    if isinstance(order, EpochOrder):
        return int(order.position_of(np.asarray([np.argmax(tokens)], np.int64))[0])
    return int(np.argmax(tokens[order]))


def _shuffle_rows(table: IntArray, lead: int, rng: np.random.Generator) -> IntArray:
    head, tail = table[:lead], table[lead:]
    return np.concatenate([head, rng.permuted(rng.permutation(tail), axis=1)]) if len(tail) else table


def _without_used(rows: Rows) -> Rows:
    """The same rows; batches that no row holds are gone."""
    numbers = np.unique(rows.table)
    fillers = numbers >= len(rows.batches) - len(rows.repeated)
    batches = rows.batches.take(numbers)
    repeated = batches.order[len(batches.order) - int(fillers.sum()) :]
    return Rows(batches, np.searchsorted(numbers, rows.table), repeated, rows.dropped)


class PlanNotices:
    """Looks at windows as they are handed out, and warns of repeats and of padding, each once in its life."""

    def __init__(self) -> None:
        self._said_repeats = self._said_padding = False
        self._first: list[PlannedWindow] = []
        self._samples = 0

    def begin(self) -> None:
        """Windows of another epoch follow."""
        self._first, self._samples = [], 0

    def of_repeats(self, planned: PlannedWindow) -> None:
        """Say which samples of a window fill its last row."""
        if len(planned.repeated) and not self._said_repeats:
            self._said_repeats = True
            warn_user(
                f"too few samples for an equal number of steps on all ranks: samples {planned.repeated.tolist()} stand in a "
                "row a second time with weight 0 in plan.loss_scale; uneven='drop' leaves out samples instead"
            )

    def of_padding(self, planner: Planner, planned: PlannedWindow, epoch: int, world_size: int) -> None:
        """After the first windows of a thousand samples, say what keeps the plan from saving more."""
        if self._said_padding:
            return
        self._first.append(planned)
        self._samples += len(planned.batches.order)
        if self._samples >= JUDGED:
            self._said_padding = True
            said = planner.joined(self._first, epoch, world_size).advice()
            self.begin()
            if said is not None:
                warn_user(said)
