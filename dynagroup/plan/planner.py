"""Plan an epoch: a rectangle ``rows[step][rank]`` of batches that fit, every sample exactly once.

A plan is a pure function of (lengths, budget, settings, epoch, world size). It is made window by window, so that the
first batch of any dataset is there at once and a run resumes, also on another number of ranks, from a few integers.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, fits_of, largest_of, padded_streams
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.fingerprint import described, hashed
from dynagroup.plan.batches import Batches, RoundBatch
from dynagroup.plan.cost import DEFAULT_WORK, Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochOrder, GroupedOrder, windows_of
from dynagroup.plan.padded import FEWEST
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.ranks import cut, prove
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, units_of
from dynagroup.validation import check_choice, check_flag, check_function, check_int, warn_user

Oversize: TypeAlias = Literal["alone", "error", "drop"]
Uneven: TypeAlias = Literal["repeat", "drop"]
Rows: TypeAlias = tuple[Batches, NDArray[np.bool_]]  # row after row, and which only fill theirs: bool (steps, ranks)

BATCHES_PER_WINDOW = 100
SAMPLED = 4096  # lengths from which a window is chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How an epoch is cut into batches: the settings of :class:`~dynagroup.LengthAwareBatchSampler`, which says what each means.
    Knows no ranks, lengths or budget."""

    shuffle: bool = False
    window: int | None = None
    seed: int = 0
    hardest_first: int = 1
    round_batch: RoundBatch | None = None
    samples_per_update: int | None = None
    grouping: int | None = None
    work: Work = DEFAULT_WORK
    oversize: Oversize = "alone"
    uneven: Uneven = "repeat"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffle", check_flag("shuffle", self.shuffle))
        for name in ("window", "samples_per_update", "grouping"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_int(name, getattr(self, name), where=" (or None)"))
        for name in ("seed", "hardest_first"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least=0))
        if self.window is not None and self.samples_per_update is not None:
            raise ConfigError("`window` and `samples_per_update` exclude each other: an update is the window")
        if self.grouping is not None and self.samples_per_update is None:
            raise ConfigError("`grouping` needs `samples_per_update`: free batches are grouped in a `window`")
        check_choice("oversize", self.oversize, ("alone", "error", "drop"))
        check_choice("uneven", self.uneven, ("repeat", "drop"))
        object.__setattr__(self, "work", check_work(self.work))
        if self.round_batch is not None:
            check_function("round_batch", self.round_batch, "from int to int")


def tokens_of(lengths: Streams, budget: Budget) -> NDArray[Any]:
    """Tokens of each sample, of all its padded streams: int (N,)."""
    first, *others = (lengths[name] for name in padded_streams(budget, lengths))
    return np.add.reduce([first, *others], axis=0, dtype=np.int64) if others else first


def oversize_mask(lengths: Streams, budget: Budget) -> NDArray[np.bool_]:
    """Which samples do not fit even alone: bool (N,). Checks once what a budget of the user's own answers."""
    tokens = lengths[TOKENS]
    if len(lengths) == 1 and len(tokens) and largest_of(budget, tokens[:1].astype(np.int64)) is not None:
        unfit = lambda length: budget.largest(np.asarray([length]))[0] < 1  # type: ignore[index]  # noqa: E731
        return tokens >= bisect_left(range(int(tokens.max()) + 1), True, key=unfit)
    wide = {name: values.astype(np.int64) for name, values in lengths.items()}
    return ~fits_of(budget, BatchShape(np.ones(len(tokens), np.int64), wide, wide))


class Planner:
    """Makes plans: holds the facts (lengths, the budget bound to them) and the knobs, and no state."""

    def __init__(self, lengths: Streams, budget: Budget | int, config: PlanConfig) -> None:
        self.lengths = lengths
        self.budget = as_budget(budget).bind(lengths)
        self.config = config
        self.num_samples = len(lengths[TOKENS])
        self.unfit = oversize_mask(lengths, self.budget)
        self.oversize = np.flatnonzero(self.unfit)
        self.left_out = self.oversize if config.oversize == "drop" else np.zeros(0, np.int64)
        """Dataset indices of the samples that take no part."""
        if config.oversize == "error":
            self.warn_of_oversize()

    def warn_of_oversize(self) -> None:
        """Say which samples do not fit even alone, if any, and what is done with them: a warning, or a :class:`BudgetError`."""
        if not len(self.oversize):
            return
        first, done, others = self.oversize[0], self.config.oversize, len(self.oversize) - 1
        units = units_of(self.lengths, int(first))
        if done == "error":
            way_out = "truncate or filter them, raise the budget, or pass oversize='alone' or 'drop'"
            raise BudgetError(f"sample {first} ({units}) does not fit even alone, nor do {others} others; {way_out}")
        kept = "left out" if done == "drop" else "emitted alone"
        warn_user(
            f"{others + 1} samples do not fit the budget even alone and are {kept}; the first is sample {first} with {units}; "
            "truncate them, raise the budget, or pass oversize='error'"
        )

    def renewed(self, world: World | None = None) -> Planner:
        """Itself; or a planner that follows what its budget has learned, if that changes anything. Collective over ``world``."""
        learner = self.budget.learner
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
                said = f"`samples_per_update` ({config.samples_per_update})"
                raise ConfigError(f"{said} must be at least the number of ranks ({world_size}): each needs a sample")
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
        return len(some[TOKENS]) / max(len(cut(some, self.budget, work=Work(per_step=FEWEST))), 1)

    def start_of(self, epoch: int, world_size: int = 1) -> Cursor:
        return Cursor(epoch=epoch, window_size=self.window_size(world_size))

    def is_done(self, cursor: Cursor, world_size: int = 1, order: IntArray | None = None) -> bool:
        if cursor.windows_done >= len(self._windows(cursor, order)[0]):
            return True
        too_few = self.config.uneven == "drop"  # a window may then make no row
        return too_few and not any(part.num_steps for part in self.steps_from(cursor, world_size, order))

    def _windows(
        self, cursor: Cursor, order: IntArray | None
    ) -> tuple[list[tuple[int, int]], Callable[[slice], IntArray]]:
        """Where the windows of the cursor's epoch start and stop in its order, and how to read that.

        ``order``: dataset indices; None: shuffled, or the dataset's."""
        config, kept = self.config, None
        if order is not None:
            given = order[~self.unfit[order]] if len(self.left_out) else order
        elif config.shuffle or self._has_updates:
            given = EpochOrder(self.num_planned, seed=config.seed, epoch=cursor.epoch)
            kept = np.flatnonzero(~self.unfit) if len(self.left_out) else None
        else:
            given = np.flatnonzero(~self.unfit) if len(self.left_out) else np.arange(self.num_samples)

        tokens = lambda: tokens_of({n: v if kept is None else v[kept] for n, v in self.lengths.items()}, self.budget)  # noqa: E731
        if config.grouping is not None:
            how = {"size": self.window_size(1), "pool": config.grouping, "seed": config.seed, "epoch": cursor.epoch}
            given = GroupedOrder(given, tokens(), **how)

        def longest() -> int:
            at = int(np.argmax(tokens() if isinstance(given, EpochOrder) else tokens()[given[:]]))
            return given.position_of(at) if isinstance(given, EpochOrder) else at

        leads, size = config.hardest_first and not self._has_updates, cursor.window_size or self.window_size(1)
        found = windows_of(len(given), size, keep_order=self._has_updates, longest=longest if leads else None)
        return found, lambda where: given[where] if kept is None else kept[given[where]]

    def steps_from(self, cursor: Cursor, world_size: int = 1, order: IntArray | None = None) -> Iterator[BatchPlan]:
        """What remains of the cursor's epoch, a window at a time, planned when asked for."""
        if not cursor.window_size:
            cursor = replace(cursor, window_size=self.window_size(world_size))
        windows, read = self._windows(cursor, order)
        while cursor.windows_done < len(windows):
            indices = read(slice(*windows[cursor.windows_done]))
            if cursor.carried:
                indices = np.append(np.asarray(cursor.carried, np.int64), indices)
            is_last = self._has_updates or cursor.windows_done + 1 == len(windows)
            planned = self._rest(indices, cursor, world_size, is_last)
            yield planned
            cursor = planned.end

    # While the number of ranks stays the same, what remains of a window are its own rows. After a change the samples that remain
    # are cut again. A repeat that fills a row is not used by it: its own place may still be to come.
    def _rest(self, indices: IntArray, cursor: Cursor, world_size: int, is_last: bool) -> BatchPlan:
        """The rows of a window behind its cursor. ``is_last``: nothing follows that could take what fills no row."""
        segments = (*cursor.segments, (world_size, 0))
        left, ranks = np.ones(len(indices), np.bool_), segments[0][0]
        batches, fills = self._cut(indices, cursor, left, ranks, is_last)
        for size, done in segments:
            if size != ranks:
                (batches, fills), ranks = self._cut(indices, cursor, left, size, is_last), size
            used = done * ranks
            left[batches.take(np.flatnonzero(~fills[:done].ravel())).order] = False
            batches, fills = batches.take(np.arange(used, len(batches))), fills[done:]
        return self._made(indices, left, (batches, fills), cursor, is_last)

    def _cut(self, indices: IntArray, cursor: Cursor, left: NDArray[np.bool_], world_size: int, is_last: bool) -> Rows:
        """Rows of the samples of a window that are left, as positions in it."""
        config, positions = self.config, np.flatnonzero(left)
        chosen = indices[positions]
        lengths = {name: values[chosen] for name, values in self.lengths.items()}
        batches = cut(lengths, self.budget, world_size, work=config.work, round_batch=config.round_batch)
        prove(batches, len(chosen), lengths, self.budget, self.unfit[chosen])
        num, missing = len(batches), -len(batches) % world_size
        if missing and is_last and config.uneven == "repeat":
            smallest = np.argsort(tokens_of(lengths, self.budget), kind="stable")
            filled = Batches(np.resize(smallest, missing), np.arange(missing + 1))
            batches = Batches.concatenate([batches, filled])
        rows = np.arange(len(batches) - len(batches) % world_size).reshape(-1, world_size)
        if config.shuffle and not self._has_updates:
            rng = np.random.default_rng((config.seed, cursor.epoch, cursor.windows_done, len(positions)))
            lead = 0 if cursor.windows_done else config.hardest_first
            rows[lead:] = rng.permuted(rng.permutation(rows[lead:]), axis=1)
        return batches.take(rows.ravel()).map(positions), rows >= num

    def _made(self, indices: IntArray, left: NDArray[np.bool_], rows: Rows, cursor: Cursor, is_last: bool) -> BatchPlan:
        """A window's rows as dataset indices, with what each batch weighs in its update. ``left``: what they may hold."""
        batches, fills = rows
        (num_steps, ranks), behind = fills.shape, cursor.after_rows(*fills.shape)
        left[batches.order] = False
        unused, nothing = indices[left], indices[:0]
        counts = np.where(fills, 0, batches.sizes.reshape(fills.shape))
        total, ends = counts.sum(axis=1, keepdims=True), np.ones(num_steps, np.bool_)
        if self._has_updates:
            total, ends[:-1] = len(indices) - len(unused), False
        batches = batches.map(indices)
        return BatchPlan(
            batches=batches,
            table=np.arange(len(batches)).reshape(fills.shape),
            update_ends=ends,
            loss_scale=counts * ranks / np.maximum(total, 1),
            repeated=batches.order[np.repeat(fills.ravel(), batches.sizes)],
            dropped=unused if is_last else nothing,
            start=cursor,
            end=behind.after_window((nothing if is_last else unused).tolist()),
            **self._facts(),
        )

    def _facts(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("lengths", "budget", "oversize")}
        return {**told, "work": self.config.work}

    def plan(
        self, epoch: int = 0, world_size: int = 1, cursor: Cursor | None = None, order: IntArray | None = None
    ) -> BatchPlan:
        """A whole epoch; or what remains of one, from ``cursor`` on."""
        cursor = cursor or self.start_of(epoch, world_size)
        return self.joined(list(self.steps_from(cursor, world_size, order)), cursor, world_size)

    def joined(self, parts: Sequence[BatchPlan], cursor: Cursor, world_size: int) -> BatchPlan:
        """Windows, the first of which begins at ``cursor``, as one plan."""
        batches, none = Batches.concatenate([part.batches for part in parts]), np.zeros(0, np.int64)
        return BatchPlan(
            batches=batches,
            table=np.arange(len(batches)).reshape(-1, world_size),
            update_ends=np.concatenate([np.zeros(0, np.bool_), *(part.update_ends for part in parts)]),
            loss_scale=np.concatenate([np.zeros((0, world_size)), *(part.loss_scale for part in parts)]),
            repeated=np.concatenate([none, *(part.repeated for part in parts)]),
            dropped=np.concatenate([self.left_out, *(part.dropped for part in parts)]),
            start=cursor,
            end=parts[-1].end if parts else cursor,
            **self._facts(),
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a plan depends on, besides epoch and world size; states are compared by it. JSON-able."""
        knobs = {knob.name: getattr(self.config, knob.name) for knob in fields(self.config)}
        knobs |= {name: described(knobs[name]) for name in ("round_batch", "work")}
        lengths = {name: zlib.crc32(np.ascontiguousarray(v).data) for name, v in self.lengths.items()}
        return {"num_samples": self.num_samples, "lengths": lengths, "budget": self.budget.fingerprint, **knobs}

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of :attr:`identity`."""
        return hashed(json.dumps(self.identity, sort_keys=True))
