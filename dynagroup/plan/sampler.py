"""The length-aware batch sampler: a plan, handed to a plain ``DataLoader``."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.checks import (
    Check,
    a_list,
    a_text,
    an_int,
    anything,
    check_int,
    check_seal,
    check_state,
    either,
    nothing,
    seal_of,
)
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.lengths import as_streams
from dynagroup.plan.cut import Objective
from dynagroup.plan.planner import BatchPlan, Oversize, PlanConfig, PlannedWindow, Planner, Position, Uneven
from dynagroup.plan.rounding import RoundBatch
from dynagroup.plan.work import Work
from dynagroup.shapes import IntArray
from dynagroup.world import current_world, rank_and_size

__all__ = ["LengthAwareBatchSampler", "OrderSource", "Trail"]

KIND = "LengthAwareBatchSampler"
STATE_VERSION = 1
MOST_RANKS = 1 << 20
JUDGED = 1000
"""Samples after which a plan's padding says something."""


class EpochHandle:
    """What frameworks find as ``batch_sampler.sampler`` and tell the epoch: accelerate and Lightning look only there.

    After a state was loaded, a framework may count its own epochs from 0 again (accelerate does); the first number it
    says is then taken for the epoch that the state resumes.
    """

    def __init__(self, sampler: LengthAwareBatchSampler) -> None:
        self._sampler = sampler
        self._ahead = 0
        self._expected: int | None = None

    def resume_at(self, epoch: int) -> None:
        self._expected = epoch

    def set_epoch(self, epoch: int) -> None:
        if self._expected is not None:
            self._ahead, self._expected = self._expected - epoch, None
        self._sampler.set_epoch(epoch + self._ahead)


class Trail:
    """What one iteration has handed out.

    Args:
        start: where it began.
        world_size: its ranks.
        steps_before: steps of the epoch that were used before it, in iterations that it resumes.
    """

    def __init__(self, start: Position, world_size: int, steps_before: int = 0) -> None:
        self.start = start
        self.world_size = world_size
        self.steps_before = steps_before
        self.steps = 0
        self.ended = False
        self._rows_before = [0]
        self._windows_before = [start.windows_done]

    def open(self, num_rows: int, num_windows: int) -> None:
        """So many rows, made of so many windows, are about to be handed out."""
        self._rows_before.append(self._rows_before[-1] + num_rows)
        self._windows_before.append(self._windows_before[-1] + num_windows)

    def position(self, steps: int | None) -> Position:
        """Where the epoch stands after so many steps of this iteration; None: all that were handed out."""
        steps = self.steps if steps is None else steps
        if not 0 <= steps <= self.steps:
            raise StateError(f"`num_steps` must be from 0 to the {self.steps} steps handed out, but is {steps}")
        window = bisect_right(self._rows_before, steps) - 1
        rows = steps - self._rows_before[window]
        used = self.start.segments if window == 0 else ()
        if rows and used and used[-1][0] == self.world_size:
            used = (*used[:-1], (self.world_size, used[-1][1] + rows))
        elif rows:
            used = (*used, (self.world_size, rows))
        return replace(self.start, windows_done=self._windows_before[window], segments=used)


class LengthAwareBatchSampler(Sampler[list[int]]):
    """Batches of similar length that fill a budget: every sample once an epoch, equally many steps on every rank.

    Args:
        lengths: tokens of each sample, integers (N,), or a dict of named streams with ``tokens`` among them.
        budget: what fits, e.g. ``TokenBudget(16384)``; a number means so many tokens.
        shuffle: other batches every epoch. False sorts everything once, longest first: for inference and evaluation.
        window: samples sorted together. None: all of them, or with ``shuffle`` a hundred batches or so.
        seed: of the shuffle; the same on every rank.
        hardest_first: so many steps with the longest samples lead each epoch (not with ``samples_per_update``).
        round_batch: batch sizes are chosen among its values: ``multiple_of(8)``, ``friendly_size`` or your own.
        work: predicted time of a batch, e.g. ``Work.of(model)``; default: a small decoder on a fast GPU.
        objective: batches are cut for least predicted "time", or for the "fewest" batches.
        samples_per_update: each optimizer update consists of exactly so many samples over all ranks, the ones that
            fixed batches drawn in the same order would hold. ``plan.update_ends`` says after which steps to update.
        order: any sampler of dataset indices, read once an epoch; default: a permutation seeded by (seed, epoch).
            It must give the same order on every rank. With it, ``shuffle`` only decides whether steps are shuffled.
        oversize: a sample that does not fit even alone is emitted "alone" (warned once), an "error", or "drop"ped.
        uneven: a last row that halving cannot fill "repeat"s the smallest samples (warned once) or is "drop"ped.
        rank, world_size: by default this process's, from ``torch.distributed``, looked up whenever an epoch starts.
            ``world_size=W`` with ``rank=None`` emits the batches of all ranks row by row, for a framework that gives
            batch ``k`` to rank ``k % W`` itself, as accelerate does.

    Without ``set_epoch`` each new iteration is the next epoch.

    Raises:
        ConfigError: an argument is wrong. BudgetError: a sample does not fit and ``oversize="error"``.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> list(LengthAwareBatchSampler([3, 9, 2, 8], TokenBudget(18), rank=0, world_size=1))
    [[1, 3], [0, 2]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray | Mapping[str, Any],
        budget: Budget | int,
        *,
        shuffle: bool = False,
        window: int | None = None,
        seed: int = 0,
        hardest_first: int = 1,
        round_batch: RoundBatch | None = None,
        work: Work | None = None,
        objective: Objective = "time",
        samples_per_update: int | None = None,
        order: Iterable[int] | None = None,
        oversize: Oversize = "alone",
        uneven: Uneven = "repeat",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        config = PlanConfig(
            shuffle=shuffle,
            window=window,
            seed=seed,
            hardest_first=hardest_first,
            round_batch=round_batch,
            work=work or Work(),
            objective=objective,
            samples_per_update=samples_per_update,
            oversize=oversize,
            uneven=uneven,
        )
        self._planner = Planner(as_streams(lengths), budget, config)
        self._order = None if order is None else OrderSource(order, self._planner.num_samples)
        self._rank, self._world_size = _checked_rank(rank, world_size)
        self._epoch = 0
        self._advance = 0  # epochs to move on when the next iteration begins, unless told the epoch
        self._start: Position | None = None  # where the next iteration begins, if a state was loaded
        self._trail: Trail | None = None
        self._steps_before = 0  # of the epoch, where the next iteration resumes it
        self._lengths: dict[tuple[int, int], int] = {}
        self._read_late = False  # the plan, after its epoch was handed out
        self._plans: dict[tuple[int, int, Position | None], BatchPlan] = {}
        self._handle = EpochHandle(self)
        self._warned_of_repeats = False
        self._warned_of_padding = False
        self._warn_of_oversize()

    @property
    def epoch(self) -> int:
        """The epoch that is running, or was last."""
        return self._epoch

    @property
    def sampler(self) -> EpochHandle:
        """Only there to be told the epoch, see :class:`EpochHandle`."""
        return self._handle

    @property
    def batch_size(self) -> int:
        """Refuses to be sharded twice: asked by frameworks that shard batch samplers, before they do.

        A property that raises AttributeError looks absent, as it must where batches vary in size; one that raises
        anything else stops the framework.
        """
        rank, size = self._rank_and_size()
        if rank is None or size == 1:
            raise AttributeError("batches of LengthAwareBatchSampler vary in size")
        raise ConfigError(
            f"this LengthAwareBatchSampler already gives each rank its own batches (rank {rank} of {size}); a framework "
            f"that shards batch samplers itself would shard it a second time and lose samples. Build it with "
            f"world_size={size} and rank=None, so that the framework does the sharding, or keep the loader away from "
            "accelerator.prepare (Lightning: use_distributed_sampler=False)"
        )

    @property
    def plan(self) -> BatchPlan:
        """The steps of this epoch on all ranks; after a resume those that remained, from the first that is emitted.

        Without ``set_epoch`` the epoch is the one whose iteration began last: call it before reading the next one's plan.
        """
        self._read_late = self._trail is not None and self._trail.ended
        position = self._start or (self._trail.start if self._trail is not None else None)
        resumed = position is not None and bool(position.windows_done or position.segments)
        return self._plan_from(position if resumed else None)

    def __len__(self) -> int:
        """Batches of a full epoch on this rank (of all ranks, where it emits all)."""
        rank, size = self._rank_and_size()
        if (self._epoch, size) not in self._lengths:
            self._lengths[self._epoch, size] = self._plan_from(None).num_steps
        steps = self._lengths[self._epoch, size]
        return steps if rank is not None else steps * size

    def _plan_from(self, position: Position | None) -> BatchPlan:
        size = self._rank_and_size()[1]
        key = (self._epoch, size, position)
        if key not in self._plans:
            self._plans.clear()
            self._plans[key] = self._planner.plan(self._epoch, size, position, self._epoch_order())
        return self._plans[key]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Calling it again with the same number changes nothing."""
        epoch = check_int("epoch", epoch, least=0)
        if epoch != self._epoch:
            self._start = self._trail = None
            self._steps_before = 0
            self._apply_learned()
        self._epoch = epoch
        self._read_late = False
        self._advance = 0

    def _apply_learned(self) -> None:
        """An epoch begins: plan it by what the budget has learned. On several ranks that needs an exchange, see there."""
        if self._rank_and_size()[1] > 1:
            return
        planner = self._planner.renewed()
        if planner is not self._planner:
            self._planner = planner
            self._plans.clear()
            self._lengths.clear()
            self._warn_of_oversize()

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._rank_and_size()
        if self._advance:
            self._warn_of_a_plan_read_late()
            self.set_epoch(self._epoch + self._advance)
        self._advance = 1
        order = self._epoch_order()
        self._check_alike(size)
        start, self._start = self._start or self._planner.start(size, self._epoch, order), None
        self._trail = trail = Trail(start, size, self._steps_before)
        self._steps_before = 0
        epoch, planner = self._epoch, self._planner
        first: list[PlannedWindow] = []
        for planned in planner.steps(epoch, size, start, order):
            self._warn_of_repeats(planned)
            self._warn_of_padding(planner, first, planned, size)
            trail.open(len(planned.table), planned.num_windows)
            for row in planned.table.tolist():
                trail.steps += 1
                for number in row if rank is None else row[rank : rank + 1]:
                    yield planned.batches[number].tolist()
        trail.ended = True

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        """Where this epoch stands: a few integers, JSON-able, the same on every rank.

        Args:
            num_steps: steps of this epoch that training has used, those before a resume included. Needed with a plain
                ``DataLoader`` that has workers: they fetch ahead, so this sampler has handed out more than was used.
                None: all handed out; torchdata's ``StatefulDataLoader`` does the counting itself.

        Raises:
            StateError: ``num_steps`` is no number of steps that this iteration has come by; or it is None in the middle of
                an epoch while worker processes run.
        """
        position, steps = self._position(num_steps)
        state = {
            "kind": KIND,
            "version": STATE_VERSION,
            "identity": self._planner.identity,
            "epoch": self._epoch,
            "steps": steps,
            "window_size": position.window_size,
            "windows_done": position.windows_done,
            "segments": [list(segment) for segment in position.segments],
            "tail": position.tail,
            "learned": LearningBudget.saved(self._planner.budget),
            "order": None if self._order is None else self._order.checksum(self._epoch),
            "seal": "",
        }
        return {**state, "seal": seal_of(state)}

    def _position(self, num_steps: int | None) -> tuple[Position, int]:
        """Where the epoch stands, and how many of its steps lie before."""
        before = self._steps_before if self._trail is None else self._trail.steps_before
        if num_steps is not None:
            num_steps = check_int("num_steps", num_steps, least=0)
        if self._trail is None:
            if num_steps not in (None, before):
                raise StateError(
                    f"`num_steps` is {num_steps}, but this epoch stands at step {before}: nothing was iterated"
                )
            size = self._rank_and_size()[1]
            return self._start or self._planner.start(size, self._epoch, self._epoch_order()), before
        if num_steps is None and not self._trail.ended and self._trail.steps and _workers_fetch_ahead(sys._getframe(2)):
            raise StateError(
                "worker processes fetch batches ahead of training, so this sampler cannot know how many were used; pass "
                "state_dict(num_steps=steps of this epoch that training has used)"
            )
        last = before + self._trail.steps
        used = last if num_steps is None else num_steps
        if not before <= used <= last:
            raise StateError(
                f"`num_steps` must be from {before} to {last}, the steps of this epoch that were handed out since it was "
                f"begun or resumed, but is {used}; count from the beginning of the epoch, across resumes"
            )
        return self._trail.position(used - before), used

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a state was taken, on any number of ranks: exactly what remained of its epoch comes next.

        One rank's state says everything; a list of all ranks' states is accepted too, if they agree.

        On as many ranks as before the remaining batches are the same; on another number the current window's remaining
        samples are cut again. A state taken at the end of an epoch continues with the next one.

        Raises:
            StateError: the state is damaged, or belongs to other lengths, another budget or other settings.
        """
        states = [state_dict] if isinstance(state_dict, Mapping) else state_dict
        if not isinstance(states, (list, tuple)) or not states:
            raise StateError(
                f"a state, or the list of all ranks' states, was expected, but {state_dict!r:.80} was given"
            )
        with _unless_refused(self._planner.budget):
            planner, state = self._checked(states)
        self._planner = planner
        self._epoch, self._advance = state["epoch"], 0
        position = _position_of(state)
        unused = not position.windows_done and not position.segments
        self._start, self._steps_before = None if unused else position, state["steps"]
        self._trail = None
        self._plans.clear()
        self._lengths.clear()
        if planner.is_over(position, self._epoch, self._epoch_order()):
            self._advance = 1  # the epoch was used up
        self._handle.resume_at(self._epoch + self._advance)

    def _checked(self, states: Sequence[Any]) -> tuple[Planner, Mapping[str, Any]]:
        """The first of the states, if all are whole, of this run and of one step; and the planner to go on with.

        What the budget has learned is taken over first, because fingerprints show it.
        """
        learned = states[0].get("learned") if isinstance(states[0], Mapping) else None
        LearningBudget.restore(self._planner.budget, learned)
        planner = self._planner.rebuilt()
        for state in states:
            check_state(state, KIND, STATE_VERSION, SCHEMA, planner.identity)
            check_seal(state)
        own = {"learned": None, "seal": None}
        if any({**other, **own} != {**states[0], **own} for other in states[1:]):
            raise StateError("the ranks' states differ: they were not taken after the same step")
        state, position = states[0], _position_of(states[0])
        if self._order is not None and self._order.checksum(state["epoch"]) != state["order"]:
            raise StateError(
                f"`order` gives other indices in epoch {state['epoch']} than when the state was taken; "
                "seed its generator alike, or give it a set_epoch"
            )
        planner.check_position(
            position, state["epoch"], None if self._order is None else self._order.of_epoch(state["epoch"])
        )
        return planner, state

    def _rank_and_size(self) -> tuple[int | None, int]:
        if self._world_size is not None:
            return self._rank, self._world_size
        return rank_and_size()

    def _epoch_order(self) -> IntArray | None:
        return None if self._order is None else self._order.of_epoch(self._epoch)

    def _check_alike(self, world_size: int) -> None:
        """Refuse an `order` that differs between the ranks of this job. Collective, once an epoch."""
        if self._order is None or world_size == 1 or self._rank is not None or self._world_size is not None:
            return
        crc = self._order.checksum(self._epoch)
        world = current_world()
        highest, lowest = world.all_max([crc, -crc])
        if highest != -lowest:
            raise AlignmentError(
                f"`order` gives other indices on other ranks in epoch {self._epoch}, so samples would be lost and repeated; "
                "seed it alike on all ranks, e.g. RandomSampler(data, generator=torch.Generator().manual_seed(0))"
            )

    def _warn_of_a_plan_read_late(self) -> None:
        if self._read_late:
            warnings.warn(
                f"sampler.plan was read after epoch {self._epoch} and is its plan, but epoch {self._epoch + self._advance} "
                "begins now, with other steps; call set_epoch(epoch) before reading the plan of an epoch",
                stacklevel=3,
            )

    def _warn_of_padding(
        self, planner: Planner, first: list[PlannedWindow], planned: PlannedWindow, world_size: int
    ) -> None:
        """Say once, after the first windows with a thousand samples, what keeps the plan from saving more."""
        if self._warned_of_padding:
            return
        first.append(planned)
        if sum(len(window.batches.order) for window in first) >= JUDGED:
            self._warned_of_padding = True
            said = planner.joined(first, self._epoch, world_size).advice()
            if said is not None:
                warnings.warn(said, stacklevel=3)

    def _warn_of_oversize(self) -> None:
        oversize = self._planner.oversize
        if len(oversize):
            done = "left out" if self._planner.config.oversize == "drop" else "emitted alone"
            warnings.warn(
                f"{len(oversize)} samples do not fit the budget even alone and are {done}; the first is sample "
                f"{oversize[0]} with {self._planner.lengths['tokens'][oversize[0]]} tokens",
                stacklevel=3,
            )

    def _warn_of_repeats(self, planned: PlannedWindow) -> None:
        if len(planned.repeated) and not self._warned_of_repeats:
            self._warned_of_repeats = True
            warnings.warn(
                f"too few samples for an equal number of steps on all ranks: samples {planned.repeated.tolist()} stand in a "
                "row a second time with weight 0 in plan.loss_scale; uneven='drop' leaves out samples instead",
                stacklevel=3,
            )


class OrderSource:
    """Reads a user's sampler of indices once an epoch and keeps the epoch that is running.

    A sampler with ``set_epoch`` is told the epoch. One with a ``generator`` reaches an epoch by drawing all before it, from
    where its generator stood at first: an epoch has the same order whenever it is asked for. Any other is read once for each
    epoch, as it comes.

    Raises:
        ConfigError: it is no iterable, can be read only once, or gives what is no index.
    """

    def __init__(self, source: Iterable[int], num_samples: int) -> None:
        if not isinstance(source, Iterable):
            raise ConfigError(f"`order` must be an iterable of dataset indices, but is {source!r}")
        if isinstance(source, Iterator):
            raise ConfigError(
                f"`order` must give indices anew every epoch, but {type(source).__name__} can be read only once; "
                "pass a list or a sampler"
            )
        self._source = source
        self._num_samples = num_samples
        self._epoch = -1
        self._indices: IntArray = np.zeros(0, np.int64)
        generator = getattr(source, "generator", None)
        self._generator = generator if hasattr(generator, "get_state") else None
        self._before: dict[int, Any] = {0: self._generator.get_state()} if self._generator is not None else {}

    def __len__(self) -> int:
        """Indices an epoch draws, without drawing them where the source can say."""
        return len(self._source) if isinstance(self._source, Sized) else len(self.of_epoch(max(self._epoch, 0)))

    def of_epoch(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            set_epoch = getattr(self._source, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
                self._indices = self._checked(list(self._source))
            elif self._generator is not None:
                self._indices = self._drawn(epoch)
            else:
                for _ in range(max(1, epoch - self._epoch)):  # it may be seeded in a way that cannot be seen
                    self._indices = self._checked(list(self._source))
            self._epoch = epoch
        return self._indices

    def _drawn(self, epoch: int) -> IntArray:
        assert self._generator is not None
        known = max(e for e in self._before if e <= epoch)
        self._generator.set_state(self._before[known])
        indices: list[int] = []
        for drawn in range(known, epoch + 1):
            self._before[drawn] = self._generator.get_state()
            indices = list(self._source)
        self._before = {e: state for e, state in self._before.items() if e in (0, epoch)}
        return self._checked(indices)

    def checksum(self, epoch: int) -> int:
        return zlib.crc32(self.of_epoch(epoch).data)

    def _checked(self, indices: list[int]) -> IntArray:
        array = np.asarray(indices)
        if len(array) and not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(f"`order` must give integer indices, but gives {array.dtype}")
        outside = np.flatnonzero((array < 0) | (array >= self._num_samples))
        if len(outside):
            raise ConfigError(
                f"`order` gives index {array[outside[0]]}, but there are lengths for {self._num_samples} samples"
            )
        return array.astype(np.int64)


def _checked_rank(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    if world_size is None:
        if rank is not None:
            raise ConfigError(f"`rank` ({rank}) needs `world_size` beside it")
        return None, None
    world_size = check_int("world_size", world_size, most=MOST_RANKS)
    if rank is not None and not (isinstance(rank, (int, np.integer)) and 0 <= rank < world_size):
        raise ConfigError(f"`rank` must be from 0 to `world_size` - 1 ({world_size - 1}), but is {rank!r}")
    return None if rank is None else int(rank), world_size


def _position_of(state: Mapping[str, Any]) -> Position:
    segments = tuple((ranks, rows) for ranks, rows in state["segments"])
    return Position(state["window_size"], state["windows_done"], segments, state["tail"])


@contextmanager
def _unless_refused(budget: Budget) -> Iterator[None]:
    """Undoes what a refused state has taught the budget."""
    before = LearningBudget.saved(budget)
    try:
        yield
    except BaseException:
        LearningBudget.restore(budget, before)
        raise


def _workers_fetch_ahead(caller: FrameType) -> bool:
    """Whether a state must be told its steps: worker processes live, and the caller is no loader that counts itself."""
    counts_itself = str(caller.f_globals.get("__name__", "")).startswith("torchdata.")
    return not counts_itself and any(child.daemon for child in multiprocessing.active_children())


def _segment(value: Any, place: str) -> None:
    a_list(an_int(1), length=2)(value, place)
    an_int(1, MOST_RANKS)(value[0], f"{place}[0]")


SCHEMA: Mapping[str, Check] = {
    "epoch": an_int(),
    "steps": an_int(),
    "window_size": an_int(1),
    "windows_done": an_int(),
    "segments": a_list(_segment, most=4096),
    "tail": an_int(1),
    "learned": anything(),
    "order": either(nothing(), an_int()),
    "seal": a_text(),
}
"""What the fields of a saved state must be."""
