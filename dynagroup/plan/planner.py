"""Plan an epoch: a rectangle ``rows[step][rank]`` of batches that fit, every sample exactly once.

A plan is a pure function of (lengths, budget, settings, epoch, world size). It is made window by window, so that the
first batch of any dataset is there at once and a run resumes, also on another number of ranks, from a few integers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.fingerprint import described, hashed
from dynagroup.plan.batches import longest_first
from dynagroup.plan.config import PlanConfig
from dynagroup.plan.oversize import oversize_mask, refuse_oversize, warn_of_oversize
from dynagroup.plan.plan import BatchPlan, PlannedWindow
from dynagroup.plan.position import Position, Segment
from dynagroup.plan.ranks import Rows, arrange, cut_rows, prove
from dynagroup.plan.windows import EpochWindows, Window
from dynagroup.shapes import TOKENS, IntArray, Streams

__all__ = ["Planner"]


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
        self._windows = EpochWindows(lengths, self.budget, config, self._oversize if len(self.left_out) else None)

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
    def batch_size(self) -> float:
        """Samples that a batch has on average when everything is sorted together; an estimate."""
        return self._windows.batch_size

    def window_size(self, world_size: int) -> int:
        """Samples a window, a multiple of ``world_size`` unless it is an update."""
        return self._windows.size(world_size)

    def start(self, world_size: int, epoch: int = 0, order: IntArray | None = None) -> Position:
        """The beginning of an epoch."""
        return self._windows.start(world_size, epoch, order)

    def is_over(self, position: Position, epoch: int, order: IntArray | None = None) -> bool:
        """Whether nothing of the epoch remains."""
        return self._windows.is_over(position, epoch, order)

    def check_position(self, position: Position, epoch: int, order: IntArray | None = None) -> None:
        """Refuse a place that no run of an epoch comes by, with a :class:`~dynagroup.errors.StateError`."""
        self._windows.check_position(position, epoch, order)

    def windows(self, epoch: int, position: Position, order: IntArray | None = None) -> Iterator[Window]:
        """The windows from ``position`` on, in the order in which they are used."""
        return self._windows.walk(epoch, position, order)

    def steps(
        self, epoch: int, world_size: int, position: Position | None = None, order: IntArray | None = None
    ) -> Iterator[PlannedWindow]:
        """The epoch's steps from ``position`` on, a window at a time, planned when asked for."""
        position = position or self.start(world_size, epoch, order)
        windows = self.windows(epoch, position, order)
        if position.segments:
            yield from self._rest(windows, epoch, world_size, position.segments)
        for window in windows:
            window = self._windows.filled(window, windows, world_size)
            yield self._finish(window, self._cut(window, np.arange(len(window.indices)), epoch, world_size))

    def num_steps(self, epoch: int, world_size: int, order: IntArray | None = None) -> int:
        """Steps of a whole epoch, in a third of the time that planning it takes, or less."""
        windows = self.windows(epoch, self.start(world_size, epoch, order), order)
        filled = (self._windows.filled(window, windows, world_size) for window in windows)
        return sum(self.num_steps_of((window.indices for window in filled), world_size))

    def num_steps_of(self, windows: Iterable[IntArray], world_size: int) -> Iterator[int]:
        """Steps of each window, or update, of these samples."""
        lengths = ({name: values[indices] for name, values in self.lengths.items()} for indices in windows)
        for window in lengths:
            batches = len(cut_rows(window, self.budget, world_size, **self._how))
            yield batches // world_size if self.config.uneven == "drop" else -(-batches // world_size)

    @property
    def _how(self) -> dict[str, Any]:
        config = self.config
        return {"work": config.work, "objective": config.objective, "round_batch": config.round_batch}

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
        window = self._windows.filled(window, windows, ranks)
        remaining = np.arange(len(window.indices))
        rows = self._cut(window, remaining, epoch, ranks)
        for size, done in (*segments, (world_size, 0)):
            if size != ranks:
                window, remaining = self._windows.with_more(window, remaining, windows, size)
                rows = self._cut(window, remaining, epoch, size)
                ranks = size
            used = np.zeros(len(window.indices), np.bool_)
            taken = rows.table[:done].ravel()
            taken = taken[taken < len(rows.batches) - len(rows.repeated)]  # a repeat's own place may still be to come
            used[rows.batches.take(taken).order] = True
            remaining = remaining[~used[remaining]]
            rows = replace(rows, table=rows.table[done:])
        yield self._finish(window, rows)

    def _cut(self, window: Window, positions: IntArray, epoch: int, world_size: int) -> Rows:
        config = self.config
        indices = window.indices[positions]
        lengths = {name: values[indices] for name, values in self.lengths.items()}
        batches = cut_rows(lengths, self.budget, world_size, **self._how)
        prove(batches, len(indices), lengths, self.budget, self._oversize[indices])
        smallest = batches.order
        if len(batches) % world_size:
            smallest = longest_first(lengths, padded_streams(self.budget, lengths))[::-1]
        rows = arrange(batches, world_size, config.uneven, smallest)
        table = rows.table
        if config.shuffle and config.samples_per_update is None:
            rng = np.random.default_rng((config.seed, epoch, window.number, len(positions)))
            table = _shuffle_rows(table, config.hardest_first if window.leads else 0, rng)
        if len(positions) == len(window.indices):  # all of them
            return replace(rows, table=table)
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
            left_out=self.left_out,
            work=self.config.work,
            window=None if self.config.samples_per_update is not None else self.window_size(world_size),
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
