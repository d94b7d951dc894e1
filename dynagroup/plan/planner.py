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

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import BudgetError, ConfigError, StateError
from dynagroup.fingerprint import described, hashed
from dynagroup.lengths import Kinds, as_streams
from dynagroup.plan.batches import Batches, RoundBatch, longest_of, oversize_of, scanned, tokens_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import NONE, EpochOrder, GroupedOrder, Windows, windows_of_kinds
from dynagroup.plan.padded import FEWEST
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.ranks import cut, cut_kinds, filled, prove
from dynagroup.shapes import IntArray, Streams, primary, units_of
from dynagroup.validation import check_choice, check_flag, check_function, check_int, warn_user

Oversize: TypeAlias = Literal["alone", "error", "drop"]
Uneven: TypeAlias = Literal["repeat", "drop"]
Order: TypeAlias = "IntArray | EpochOrder | GroupedOrder"
OneKind: TypeAlias = Literal["step", "batch"]
Drawn: TypeAlias = "IntArray | None"  # dataset indices in the order of the user's sampler
Rows: TypeAlias = tuple[
    Batches, NDArray[np.bool_]
]  # batches by step; whether each only fills a step

LEFT_OUT = "learned limits leave out other samples than before (oversize='drop'); call set_epoch with the next epoch"
BATCHES_PER_WINDOW = 100
SAMPLED = 4096  # lengths from which the size of a window is estimated
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
    work: Work = field(default_factory=check_work)
    oversize: Oversize = "alone"
    uneven: Uneven = "repeat"
    one_kind: OneKind = "step"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffle", check_flag("shuffle", self.shuffle))
        for name in ("window", "samples_per_update", "grouping"):
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
        return (
            order
            if config.grouping is None
            else GroupedOrder(order, self.tokens_of, size=size, pool=config.grouping, **how)
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
            indices = ordered[slice(*windows[cursor.windows_done])]
            if cursor.carried:
                indices = np.append(np.asarray(cursor.carried, np.int64), indices)
            planned = _Window(self, indices, cursor, last <= cursor.windows_done).rest(world_size)
            yield planned
            cursor = planned.end

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
