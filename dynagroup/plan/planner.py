"""Plans an epoch as steps of batches that fit, ``rows[step][rank]``, with every sample exactly once.

A plan depends only on lengths, budget, settings, epoch and number of ranks. It is made window by window, so that the
first batch of any dataset comes at once, and a run can resume from a few integers, also on another number of ranks."""

import copy
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, is_packed
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import BudgetError, ConfigError, StateError
from dynagroup.fingerprint import described, hashed
from dynagroup.lengths import Kinds, as_streams
from dynagroup.plan.batches import Batches, RoundBatch, longest_of, oversize_of, scanned, tokens_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.cut import cut, cut_kinds, filled, prove
from dynagroup.plan.epoch import NONE, EpochOrder, Windows, windows_of_kinds
from dynagroup.plan.padded import FEWEST
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.strata import StratifiedOrder, number_of_strata
from dynagroup.plan.update_cuts import MOST_PLACES, cut_updates
from dynagroup.shapes import IntArray, Streams, primary, round_up, units_of
from dynagroup.validation import check_choice, check_flag, check_function, check_int, warn_user

Oversize: TypeAlias = Literal["alone", "error", "drop"]
Uneven: TypeAlias = Literal["repeat", "drop"]
Order: TypeAlias = "IntArray | EpochOrder | StratifiedOrder"
OneKind: TypeAlias = Literal["step", "batch"]
Drawn: TypeAlias = "IntArray | None"  # dataset indices in the order of the user's sampler
Rows: TypeAlias = tuple[
    Batches, NDArray[np.bool_]
]  # batches by step; whether each only fills a step

LEFT_OUT = "learned limits leave out other samples than before (oversize='drop'); call set_epoch with the next epoch"
BATCHES_PER_WINDOW = 100
FEW_STEPS = 4  # samples of an exact update for each rank, up to which updates are cut at once
BLOCK = 1 << 16  # samples of updates that are cut at once
SAMPLED = 4096  # lengths from which the size of a window is estimated
SPREAD = 1 << 14  # lengths from which the number of strata is decided
LEAST_SHARE = (
    8  # a rare kind's windows have at least 1/8 of the usual size, so that its batches vary as well
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Settings of how an epoch is cut into batches, explained in :class:`~dynagroup.LengthAwareBatchSampler`."""

    shuffle: bool = False
    window: int | None = None
    seed: int = 0
    hardest_first: int = 1
    round_batch: RoundBatch | None = None
    samples_per_update: int | None = None
    grouping: int | None = None
    strata: int | None = None
    work: Work = field(default_factory=check_work)
    oversize: Oversize = "alone"
    uneven: Uneven = "repeat"
    one_kind: OneKind = "step"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffle", check_flag("shuffle", self.shuffle))
        for name in ("window", "samples_per_update", "grouping", "strata"):
            if getattr(self, name) is not None:
                object.__setattr__(
                    self, name, check_int(name, getattr(self, name), where=" (or None)")
                )
        for name in ("seed", "hardest_first"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least=0))
        if self.window is not None and self.samples_per_update is not None:
            raise ConfigError(
                "pass `window` or `samples_per_update`, not both, because an update is a window"
            )
        if self.strata is not None and self.grouping is None:
            raise ConfigError(
                "`strata` needs `grouping`, the number of updates that are dealt together"
            )
        if self.grouping is not None and self.samples_per_update is None:
            raise ConfigError(
                "`grouping` needs `samples_per_update`; without it, raise `window` to sort more samples"
            )
        for name, choices in (("oversize", Oversize), ("uneven", Uneven), ("one_kind", OneKind)):
            check_choice(name, getattr(self, name), get_args(choices))
        object.__setattr__(self, "work", check_work(self.work))
        check_function("round_batch", self.round_batch, "from int to int")


class Planner:
    """Makes plans from lengths, kinds, a budget bound to the lengths, and settings. Keeps no state of a run."""

    def __init__(
        self,
        lengths: Streams,
        budget: Budget | int,
        config: PlanConfig,
        kinds: Kinds | None = None,
        read: Mapping[str, tuple[IntArray, int]] | None = None,
    ) -> None:
        self.lengths, self.kinds = (
            lengths,
            kinds or Kinds.read(None, len(lengths[primary(lengths)])),
        )
        bound = as_budget(budget).bind(lengths)
        self.limit = bound.applied
        self.budget = bound.held(
            self.limit
        )  # a fixed limit, so that a plan does not change while it is used
        self.config = config
        self.num_samples = len(lengths[primary(lengths)])
        self._read = read or {name: scanned(values) for name, values in lengths.items()}
        self.maxima = {name: maxima for name, (maxima, _) in self._read.items()}
        self.oversize = oversize_of(lengths, self.budget, self.maxima)
        """Sorted dataset indices of samples that do not fit even alone."""
        self.left_out = self.oversize if config.oversize == "drop" else NONE
        """Sorted dataset indices of samples that are not planned."""
        self.left_print = zlib.crc32(self.left_out.astype(np.int64).data)
        if config.oversize == "error":
            self.warn_of_oversize()

    def unfit(self, indices: Sequence[int] | IntArray) -> NDArray[np.bool_]:
        """Returns which of these samples do not fit even alone."""
        left, right = (
            np.searchsorted(self.oversize, indices, side=side) for side in ("left", "right")
        )
        return left < right

    def tokens_of(self, indices: IntArray | slice) -> NDArray[Any]:
        """Returns the tokens of these samples, summed over padded streams."""
        return tokens_of(
            {name: values[indices] for name, values in self.lengths.items()}, self.budget
        )

    @cached_property
    def _longest(self) -> int:
        return longest_of(self.lengths, self.budget, self.left_out, self.maxima)

    @classmethod
    def of(
        cls, lengths: Any, budget: Budget | int, config: PlanConfig, kinds: Any = None
    ) -> "Planner":
        """Makes a planner from lengths and kinds as users give them."""
        if kinds is None and config.one_kind != "step":
            raise ConfigError(
                f"`one_kind` ({config.one_kind!r}) needs a label for each sample; pass `kinds`"
            )
        streams = as_streams(lengths)
        config = replace(config, work=config.work.for_plan(streams, as_budget(budget)))
        return cls(streams, budget, config, Kinds.read(kinds, len(streams[primary(streams)])))

    def warn_of_oversize(self) -> None:
        """Warns about samples that do not fit even alone, and says what happens to them; "error" raises BudgetError."""
        if not len(self.oversize):
            return
        first, done, others = int(self.oversize[0]), self.config.oversize, len(self.oversize) - 1
        units = units_of(self.lengths, first)
        if done == "error":
            way_out = (
                "truncate or filter them, raise the budget, or pass oversize='alone' or 'drop'"
            )
            raise BudgetError(
                f"sample {first} ({units}) does not fit even alone, nor do {others} others; {way_out}"
            )
        kept = "left out" if done == "drop" else "each a batch of its own"
        told = f"{others + 1} samples do not fit the budget even alone and are {kept}; the first is sample {first} with {units}"
        warn_user(f"{told}; truncate them, raise the budget, or pass oversize='error'")

    def renewed(self, world: World | None = None, *, apply: bool = True) -> "Planner":
        """Returns the planner of the next epoch: a new one if the budget has learned another limit, else this one.
        ``apply``: first combines the limits of all ranks, so all ranks must call it."""
        learner = self.budget.learner
        if learner is not None and apply:
            learner.apply(world)
        return self if self.budget.applied == self.limit else self.rebuilt()

    def in_mid_epoch(self) -> "Planner":
        """Returns a planner for the rest of an epoch, with the limit that the budget now applies; or this one if the
        limit is the same. StateError: the limit would change which samples are planned."""
        after = self.by(self.budget.applied)
        if self.config.oversize == "drop" and not np.array_equal(after.oversize, self.oversize):
            raise StateError(LEFT_OUT)
        return after

    def check_left_out(self, state: Mapping[str, Any]) -> None:
        """Raises StateError if a state in mid-epoch left out other samples than this planner does."""
        if state["cursor"]["steps"] and state["left_out"] != self.left_print:
            raise StateError(LEFT_OUT)

    def by(self, limit: float | None) -> "Planner":
        """Returns this planner with the given learned limit."""
        if limit == self.limit:
            return self
        other = copy.copy(self)
        vars(other).pop("_batch_size", None)
        other.limit, other.budget = limit, self.budget.held(limit)
        other.oversize = oversize_of(self.lengths, other.budget, self.maxima)
        return other

    def rebuilt(self) -> "Planner":
        """Returns a new planner with the same lengths and settings, and the budget's current limit."""
        return Planner(self.lengths, self.budget, self.config, self.kinds, self._read)

    @property
    def num_planned(self) -> int:
        """Number of samples in an epoch, without those that are left out."""
        return self.num_samples - len(self.left_out)

    @property
    def has_updates(self) -> bool:
        """Whether each window is one update, of ``samples_per_update`` samples."""
        return self.config.samples_per_update is not None

    def window_size(self, world_size: int) -> int:
        """Returns the samples per window: a multiple of ``world_size``, unless the window is an update."""
        config = self.config
        if config.samples_per_update is not None:
            if config.samples_per_update < world_size:
                said = f"`samples_per_update` ({config.samples_per_update})"
                raise ConfigError(
                    f"{said} must be at least the number of ranks ({world_size}); each needs a sample"
                )
            return config.samples_per_update
        size = config.window or max(self.num_samples, 1)
        if config.window is None and config.shuffle:
            size = int(
                max(
                    1,
                    min(
                        max(BATCHES_PER_WINDOW, 25 * world_size) * self._batch_size,
                        self.num_samples / 2,
                    ),
                )
            )
        return -(-size // world_size) * world_size

    @cached_property
    def _batch_size(self) -> float:
        """Estimated samples of a batch that is as large as fits, if all samples are sorted together."""
        some = {
            name: values[:: max(1, self.num_samples // SAMPLED)]
            for name, values in self.lengths.items()
        }
        return len(some[primary(some)]) / max(
            len(cut(some, self.budget, work=Work(per_step=FEWEST))), 1
        )

    def _num_strata(self, size: int) -> int:
        """Returns the strata of an update of ``size`` samples, judged by lengths spread over the data set."""
        if not self.num_samples:
            return 1
        config = self.config
        tokens = self.tokens_of(slice(None, None, max(1, self.num_samples // SPREAD)))
        return number_of_strata(config.strata, tokens, size, config.grouping or 1)

    def start_of(self, epoch: int, world_size: int = 1) -> Cursor:
        return Cursor(epoch=epoch, window_size=self.window_size(world_size))

    def is_done(self, cursor: Cursor, world_size: int = 1, order: IntArray | None = None) -> bool:
        if cursor.windows_done >= len(self._windows(cursor, order)[1]):
            return True
        too_few = self.config.uneven == "drop"  # so a window may have too few samples for a step
        return too_few and not any(
            part.num_steps for part in self.steps_from(cursor, world_size, order)
        )

    def order_of(
        self, epoch: int, given: IntArray | None = None, *, shuffle: bool, size: int = 1
    ) -> Order:
        """Returns the epoch's dataset indices in order, without those left out; ``size``: samples per update.
        ``given``: the order of the user's sampler; None: shuffled, or dataset order."""
        config, how = self.config, {"seed": self.config.seed, "epoch": epoch}
        if given is not None:
            order: Any = given[~self.unfit(given)] if len(self.left_out) else given
        else:
            order = EpochOrder(self.num_planned, shuffle=shuffle, left_out=self.left_out, **how)
        if config.grouping is None:
            return order
        return StratifiedOrder(
            order,
            self.tokens_of,
            size=size,
            pool=config.grouping,
            strata=self._num_strata(size),
            seed=config.seed,
            epoch=epoch,
        )

    def _windows(
        self, cursor: Cursor, given: Drawn
    ) -> tuple[Order, Windows | list[tuple[int, int]], IntArray]:
        """Returns the order of the cursor's epoch, (start, stop) of its windows, and the last window of each kind."""
        config, size = self.config, cursor.window_size or self.window_size(1)
        order = self.order_of(
            cursor.epoch, given, shuffle=config.shuffle or self.has_updates, size=size
        )
        if self.has_updates:
            return order, Windows(len(order), size), np.zeros(len(self.kinds.labels), np.int64)
        if len(self.kinds.labels) > 1:
            least = -(-size // LEAST_SHARE) if config.shuffle and config.window is None else size
            rng = np.random.default_rng((config.seed, cursor.epoch)) if config.shuffle else None
            tokens = self.tokens_of(slice(None)) if config.hardest_first else None
            how: dict[str, Any] = {"least": least, "rng": rng, "tokens": tokens}
            ordered, found, last = windows_of_kinds(order[:], self.kinds.codes, size, **how)
            return (
                ordered,
                found,
                np.full_like(last, len(found) - 1) if config.one_kind == "batch" else last,
            )
        first = 0
        if config.hardest_first and len(order) >= 2 * size:
            computed = isinstance(order, EpochOrder)
            first = (
                order.position_of(self._longest)
                if computed
                else int(self.tokens_of(order[:]).argmax())
            )
        windows = Windows(len(order), size, first // size)
        return order, windows, np.asarray([len(windows) - 1])

    def steps_from(
        self, cursor: Cursor, world_size: int = 1, order: IntArray | None = None
    ) -> Iterator[BatchPlan]:
        """Yields the rest of the cursor's epoch: one plan per window, each made when it is needed."""
        size = self.window_size(
            world_size
        )  # refused, if an update has too few samples for so many ranks
        cursor = replace(cursor, window_size=cursor.window_size or size)
        ordered, windows, last = self._windows(cursor, order)
        while cursor.windows_done < len(windows):
            if self.has_updates and not cursor.segments:
                updates = self.update_block(ordered, cursor.windows_done * size, size, world_size)
                if updates is not None:
                    planned = updates.plan(slice(0, updates.num_leading), cursor)
                    yield planned
                    cursor = planned.end
                    continue
            indices = ordered[slice(*windows[cursor.windows_done])]
            if cursor.carried:
                indices = np.append(np.asarray(cursor.carried, np.int64), indices)
            planned = _Window(self, indices, cursor, last <= cursor.windows_done).rest(world_size)
            yield planned
            cursor = planned.end

    def cuts_many(self, world_size: int, size: int) -> bool:
        """Whether updates of this size can be cut many at once."""
        config = self.config
        one_stream = len(self.lengths) == 1 and not is_packed(self.budget, self.lengths)
        free = config.round_batch is None and self.budget.ladder is None
        if not (self.has_updates and one_stream and free and len(self.kinds.labels) <= 1):
            return False
        if config.grouping is not None:
            return True
        # Samples of a step differ more in exact updates: this cut is as good as the other only in few steps.
        return size <= MOST_PLACES and (world_size == 1 or size <= FEW_STEPS * world_size)

    def update_block(
        self, order: Any, start: int, size: int, world_size: int, most: int = BLOCK
    ) -> "UpdateBlock | None":
        """Returns whole updates that are cut at once, from position ``start`` of the order on, of at most ``most`` samples;
        None: the first one must be cut by itself."""
        if not self.cuts_many(world_size, size):
            return None
        number = min(max(most // size, 1), (len(order) - start) // size)
        if not number:
            return None
        indices = order[start : start + number * size].reshape(number, size)
        block = UpdateBlock.of(self, indices, world_size)
        return None if block is None or not block.num_leading else block

    def update_of(self, indices: IntArray, cursor: Cursor, world_size: int) -> BatchPlan:
        """Returns the plan of the rest of the update that consists of these samples."""
        return _Window(self, indices, cursor, np.ones(len(self.kinds.labels), np.bool_)).rest(
            world_size
        )

    def planned(self, batches: Batches, loss_scale: NDArray[np.float64], **more: Any) -> BatchPlan:
        """Returns a plan of these batches, which must be given step after step."""
        more |= {name: getattr(self, name) for name in ("lengths", "budget", "oversize")}
        more |= {"sample_kinds": self.kinds, "work": self.config.work}
        return BatchPlan(
            batches,
            np.arange(len(batches)).reshape(loss_scale.shape),
            loss_scale=loss_scale,
            **more,
        )

    def plan(
        self, epoch: int = 0, world_size: int = 1, cursor: Cursor | None = None, order: Drawn = None
    ) -> BatchPlan:
        """Returns a plan of a whole epoch, or of what remains of one from ``cursor`` on."""
        cursor = cursor or self.start_of(epoch, world_size)
        return self.joined(
            list(self.steps_from(cursor, world_size, order)), cursor, world_size, order
        )

    def joined(
        self, parts: list[BatchPlan], cursor: Cursor, world_size: int, order: Drawn = None
    ) -> BatchPlan:
        """Returns one plan of several windows; the first begins at ``cursor``. ``order``: of the user's sampler."""
        drawn = self.left_out if order is None else order[np.isin(order, self.left_out)]
        batches, none = Batches.concatenate([part.batches for part in parts]), np.zeros(0, np.int64)
        return self.planned(
            batches,
            np.concatenate([np.zeros((0, world_size)), *(part.loss_scale for part in parts)]),
            update_ends=np.concatenate(
                [np.zeros(0, np.bool_), *(part.update_ends for part in parts)]
            ),
            repeated=np.concatenate([none, *(part.repeated for part in parts)]),
            dropped=np.concatenate([drawn, *(part.dropped for part in parts)]),
            start=cursor,
            end=parts[-1].end if parts else cursor,
            windows=np.asarray([part.num_steps for part in parts], np.int64),
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that a plan depends on, except epoch and number of ranks, as JSON values, for saved states."""
        knobs = {knob.name: getattr(self.config, knob.name) for knob in fields(self.config)}
        knobs |= {name: described(knobs[name]) for name in ("round_batch", "work")}
        codes = self.kinds.codes if len(self.kinds.labels) > 1 else NONE
        lengths = {name: crc for name, (_, crc) in self._read.items()}
        data = {"lengths": lengths, "kinds": [scanned(codes)[1], described(self.kinds.labels)]}
        return {"num_samples": self.num_samples, **data, "budget": self.budget.fingerprint, **knobs}

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits, a hash of :attr:`identity`."""
        return hashed(json.dumps(self.identity, sort_keys=True))


@dataclass(frozen=True)
class UpdateBlock:
    """Consecutive updates of one size, cut at once.

    Args:
        indices: int64 (updates, samples), the updates' dataset indices.
        batches: positions in all of ``indices``, update after update, step after step.
        num_steps: int64 (updates,), steps of each update. 0: it must be cut by itself, and has no batches here.
    """

    planner: Planner
    indices: IntArray
    batches: Batches
    num_steps: IntArray
    world_size: int

    @classmethod
    def of(cls, planner: Planner, indices: IntArray, world_size: int) -> "UpdateBlock | None":
        """Cuts these updates; None: they must be cut one by one. ``indices``: dataset indices (updates, samples)."""
        (name,) = planner.lengths
        tokens = planner.lengths[name][indices].astype(np.int64)
        positions = np.arange(indices.size).reshape(indices.shape)
        if (np.diff(tokens, axis=1) > 0).any():
            longest_first = np.argsort(-tokens, axis=1, kind="stable")
            positions = np.take_along_axis(positions, longest_first, axis=1)
            tokens = np.take_along_axis(tokens, longest_first, axis=1)
        padded = round_up(tokens, planner.budget.pad_to_multiple_of)
        work = planner.config.work
        cuts = cut_updates(
            tokens, planner.budget, world_size, work.price(name).of(padded), work.per_step
        )
        if cuts is None:
            return None
        chosen = cuts.batches.order
        num_chosen = len(chosen)
        batches = cuts.batches.map(positions.ravel())
        prove(
            Batches(np.arange(num_chosen), batches.offsets),
            num_chosen,
            {name: tokens.ravel()[chosen].astype(np.int32)},
            planner.budget,
            planner.unfit(indices.ravel()[batches.order]),
        )
        return cls(planner, indices, batches, cuts.num_steps, world_size)

    @property
    def num_leading(self) -> int:
        """Number of updates up to the first that must be cut by itself."""
        uncut = np.flatnonzero(self.num_steps == 0)
        return int(uncut[0]) if len(uncut) else len(self.num_steps)

    def plan(self, numbers: slice, start: Cursor) -> BatchPlan:
        """Returns the plan of some of the updates. ``start``: the point in the epoch before them."""
        ranks, num_steps = self.world_size, self.num_steps[numbers]
        first = int(self.num_steps[: numbers.start].sum()) * ranks
        stop = first + int(num_steps.sum()) * ranks
        offsets = self.batches.offsets[first : stop + 1]
        positions = self.batches.order[offsets[0] : offsets[-1]]
        batches = Batches(self.indices.ravel()[positions], offsets - offsets[0])
        counts = batches.sizes.reshape(-1, ranks)
        update_ends = np.zeros(len(counts), np.bool_)
        update_ends[np.cumsum(num_steps) - 1] = True
        end = replace(
            start,
            steps=start.steps + len(counts),
            windows_done=start.windows_done + len(num_steps),
            segments=(),
        )
        return self.planner.planned(
            batches,
            counts * ranks / self.indices.shape[1],
            update_ends=update_ends,
            repeated=NONE,
            dropped=NONE,
            start=start,
            end=end,
            windows=num_steps,
        )


class UpdatePlans:
    """Plans the updates of an order one by one; while they keep their size, it cuts more and more of them in advance."""

    def __init__(self, planner: Planner, order: Any, world_size: int) -> None:
        self._planner = planner
        self._order = order
        self._world_size = world_size
        self._block: UpdateBlock | None = None
        self._block_start = self._block_stop = 0  # positions in the order
        self._size = 0
        self._num_updates = 0  # updates in the block, or that would be in it

    def plan(self, start: int, stop: int, cursor: Cursor) -> BatchPlan:
        """Returns the plan of the update from ``start`` to ``stop`` of the order; ``cursor``: the point in the epoch."""
        if cursor.segments:
            return self._planner.update_of(self._order[start:stop], cursor, self._world_size)
        size = stop - start
        if size != self._size or not self._block_start <= start < self._block_stop:
            self._cut(start, size)
        if self._block is None:
            return self._planner.update_of(self._order[start:stop], cursor, self._world_size)
        number = (start - self._block_start) // size
        return self._block.plan(slice(number, number + 1), cursor)

    def _cut(self, start: int, size: int) -> None:
        self._num_updates = 2 * self._num_updates if size == self._size else 1
        most = min(self._num_updates * size, BLOCK)
        self._size = size
        self._block = self._planner.update_block(self._order, start, size, self._world_size, most)
        cut = 1 if self._block is None else self._block.num_leading
        self._block_start, self._block_stop = start, start + cut * size


@dataclass(frozen=True)
class _Window:
    """Samples that are planned together, each kind by itself, and how far a run has come in them."""

    planner: Planner
    indices: IntArray  # dataset indices
    cursor: Cursor
    is_last: NDArray[
        np.bool_
    ]  # by kind: no later window has the kind, so samples left over cannot wait for one

    # While the number of ranks and the learned limit stay the same, a window's own remaining steps are used; after a
    # change, its remaining samples are cut again. A sample that was only repeated to fill a step still remains.
    def rest(self, world_size: int) -> BatchPlan:
        """Plans the steps after the cursor. Here a run resumes, also on another number of ranks."""
        segments = (*self.cursor.segments, (world_size, 0, self.planner.limit))
        left, ranks, by = np.ones(len(self.indices), np.bool_), segments[0][0], segments[0][2]
        batches, fills = self._cut(left, ranks, self.planner.by(by))
        for size, done, limit in segments:
            if (size, limit) != (ranks, by):
                (batches, fills), ranks, by = (
                    self._cut(left, size, self.planner.by(limit)),
                    size,
                    limit,
                )
            used = done * ranks
            left[batches.take(np.flatnonzero(~fills[:done].ravel())).order] = False
            batches, fills = batches.take(np.arange(used, len(batches))), fills[done:]
        return self._made(left, (batches, fills))

    def _cut(self, left: NDArray[np.bool_], world_size: int, planner: Planner) -> Rows:
        """Cuts the samples that are left into batches, step after step; returns positions in the window."""
        cursor, positions = self.cursor, np.flatnonzero(left)
        config, chosen = planner.config, self.indices[positions]
        if planner.cuts_many(world_size, len(chosen)):
            block = UpdateBlock.of(planner, chosen[None], world_size)
            if block is not None and block.num_leading:
                rows = block.batches.map(positions)
                return rows, np.zeros((len(rows) // world_size, world_size), np.bool_)
        lengths = {name: values[chosen] for name, values in planner.lengths.items()}
        kinds, together = planner.kinds.codes[chosen], config.one_kind == "batch"
        how: dict[str, Any] = {
            "work": config.work,
            "round_batch": config.round_batch,
            "together": together,
        }
        cuts = cut_kinds(lengths, kinds, planner.budget, world_size, **how)
        prove(
            Batches.concatenate(cuts), len(chosen), lengths, planner.budget, planner.unfit(chosen)
        )
        tokens = tokens_of(lengths, planner.budget)
        ends = self.is_last[kinds] & (config.uneven == "repeat")
        made = [filled(part, tokens, world_size, bool(ends[part.order[:1]].all())) for part in cuts]
        batches, fills = (
            Batches.concatenate([part for part, _ in made]),
            np.concatenate([fill for _, fill in made]),
        )
        rows = np.arange(len(batches)).reshape(-1, world_size)
        if len(rows) and not planner.has_updates:
            longest = np.maximum.reduceat(tokens[batches.order], batches.offsets[:-1][::world_size])
            rows = rows[np.argsort(-longest, kind="stable")]
        if config.shuffle and not planner.has_updates:
            rng = np.random.default_rng(
                (config.seed, cursor.epoch, cursor.windows_done, len(positions))
            )
            lead = 0 if cursor.windows_done else config.hardest_first
            rows[lead:] = rng.permuted(rng.permutation(rows[lead:]), axis=1)
        return batches.take(rows.ravel()).map(positions), fills.ravel()[rows]

    def _made(self, left: NDArray[np.bool_], rows: Rows) -> BatchPlan:
        """Makes a plan of these batches, with loss scales. ``left``: the window's samples that are not used yet."""
        (batches, fills), planner, indices = rows, self.planner, self.indices
        num_steps, ranks = fills.shape
        behind = self.cursor.after_rows(num_steps, ranks, planner.limit)
        left[batches.order] = False
        unused = indices[left]
        gone = self.is_last[planner.kinds.codes[unused]]
        counts = np.where(fills, 0, batches.sizes.reshape(fills.shape))
        total, ends = counts.sum(axis=1, keepdims=True), np.ones(num_steps, np.bool_)
        if planner.has_updates:
            total, ends[:-1] = len(indices) - len(unused), False
        batches = batches.map(indices)
        more: Any = {
            "dropped": unused[gone],
            "repeated": batches.order[np.repeat(fills.ravel(), batches.sizes)],
        }
        more |= {
            "windows": np.asarray([num_steps]),
            "end": behind.after_window(unused[~gone].tolist()),
        }
        return planner.planned(
            batches,
            counts * ranks / np.maximum(total, 1),
            update_ends=ends,
            start=self.cursor,
            **more,
        )
