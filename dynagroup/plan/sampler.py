"""The length-aware batch sampler: a plan, handed to a plain ``DataLoader``."""

from __future__ import annotations

import warnings
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError, StateError
from dynagroup.lengths import as_streams
from dynagroup.plan.cut import Objective
from dynagroup.plan.planner import BatchPlan, Oversize, PlanConfig, PlannedWindow, Planner, Position, Uneven
from dynagroup.plan.rounding import RoundBatch
from dynagroup.plan.work import Work
from dynagroup.shapes import IntArray
from dynagroup.world import rank_and_size

__all__ = ["LengthAwareBatchSampler", "OrderSource", "Trail"]

STATE_VERSION = 1


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
    """What one iteration has handed out."""

    def __init__(self, start: Position, world_size: int) -> None:
        self.start = start
        self.world_size = world_size
        self.steps = 0
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
        return Position(self.start.window_size, self._windows_before[window], used)


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
        self._plans: dict[tuple[int, int, Position | None], BatchPlan] = {}
        self._handle = EpochHandle(self)
        self._warned_of_repeats = False
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
        """This epoch's plan on all ranks; after resuming on another number of ranks, what remained of the epoch."""
        size = self._rank_and_size()[1]
        position = self._start or (self._trail.start if self._trail is not None else None)
        recut = position is not None and any(ranks != size for ranks, _ in position.segments)
        return self._plan_from(position if recut else None)

    def __len__(self) -> int:
        """Batches of a full epoch on this rank (of all ranks, where it emits all)."""
        rank, size = self._rank_and_size()
        steps = self._plan_from(None).num_steps
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
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or epoch < 0:
            raise ConfigError(f"`epoch` must be an int of at least 0, but is {epoch!r}")
        if epoch != self._epoch:
            self._start = self._trail = None
            self._apply_learned()
        self._epoch = int(epoch)
        self._advance = 0

    def _apply_learned(self) -> None:
        """An epoch begins: plan it by what the budget has learned. On several ranks that needs an exchange, see there."""
        if self._rank_and_size()[1] > 1:
            return
        planner = self._planner.renewed()
        if planner is not self._planner:
            self._planner = planner
            self._plans.clear()
            self._warn_of_oversize()

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._rank_and_size()
        if self._advance:
            self.set_epoch(self._epoch + self._advance)
        self._advance = 1
        start, self._start = self._start or self._planner.start(size), None
        self._trail = trail = Trail(start, size)
        epoch, planner = self._epoch, self._planner
        for planned in planner.steps(epoch, size, start, self._epoch_order()):
            self._warn_of_repeats(planned)
            trail.open(len(planned.table), planned.num_windows)
            for row in planned.table.tolist():
                trail.steps += 1
                for number in row if rank is None else row[rank : rank + 1]:
                    yield planned.batches[number].tolist()

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        """Where this epoch stands: a few integers, JSON-able, the same on every rank.

        Args:
            num_steps: steps of this iteration that training has used. Needed with a plain ``DataLoader`` that has
                workers: they fetch ahead, so this sampler has handed out more than was used. None: all handed out,
                right without workers; torchdata's ``StatefulDataLoader`` does the counting itself.

        Raises:
            StateError: ``num_steps`` is more than was handed out.
        """
        if self._start is not None:
            position = self._start
        elif self._trail is not None:
            position = self._trail.position(num_steps)
        else:
            position = self._planner.start(self._rank_and_size()[1])
        return {
            "version": STATE_VERSION,
            "fingerprint": self._planner.fingerprint,
            "identity": self._planner.identity,
            "epoch": self._epoch,
            "window_size": position.window_size,
            "windows_done": position.windows_done,
            "segments": [list(segment) for segment in position.segments],
            "learned": LearningBudget.saved(self._planner.budget),
            "order": None if self._order is None else self._order.checksum(self._epoch),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a state was taken, on any number of ranks: exactly what remained of its epoch comes next.

        One rank's state says everything; a list of all ranks' states is accepted too, if they agree.

        On as many ranks as before the remaining batches are the same; on another number the current window's remaining
        samples are cut again. A state taken at the end of an epoch continues with the next one.

        Raises:
            StateError: the state is damaged, or belongs to other lengths, another budget or other settings.
        """
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if any({**other, "learned": None} != {**states[0], "learned": None} for other in states[1:]):
            raise StateError("the ranks' states differ: they were not taken after the same step")
        LearningBudget.restore(self._planner.budget, states[0].get("learned") if states else None)
        self._planner = self._planner.rebuilt()
        state = _checked_state(states[0] if states else {}, self._planner)
        self._epoch, self._advance = state["epoch"], 0
        if self._order is not None and self._order.checksum(self._epoch) != state["order"]:
            raise StateError(
                f"`order` gives other indices in epoch {self._epoch} than when the state was taken; "
                "seed its generator alike, or give it a set_epoch"
            )
        segments = tuple((int(ranks), int(rows)) for ranks, rows in state["segments"])
        self._start = Position(state["window_size"], state["windows_done"], segments)
        self._trail = None
        self._plans.clear()
        if self._planner.is_over(self._start, self._epoch, self._epoch_order()):
            self._advance = 1  # the epoch was used up
        self._handle.resume_at(self._epoch + self._advance)

    def _rank_and_size(self) -> tuple[int | None, int]:
        if self._world_size is not None:
            return self._rank, self._world_size
        return rank_and_size()

    def _epoch_order(self) -> IntArray | None:
        return None if self._order is None else self._order.of_epoch(self._epoch)

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
    """Reads a user's sampler of indices once an epoch and keeps the epoch that is running."""

    def __init__(self, source: Iterable[int], num_samples: int) -> None:
        if not isinstance(source, Iterable):
            raise ConfigError(f"`order` must be an iterable of dataset indices, but is {source!r}")
        self._source = source
        self._num_samples = num_samples
        self._epoch = -1
        self._indices: IntArray = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Indices an epoch draws, without drawing them where the source can say."""
        return len(self._source) if isinstance(self._source, Sized) else len(self.of_epoch(max(self._epoch, 0)))

    def of_epoch(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            set_epoch = getattr(self._source, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            for _ in range(1 if set_epoch is not None else max(1, epoch - self._epoch)):
                self._indices = self._checked(
                    list(self._source)
                )  # a seeded sampler reaches an epoch by drawing each before
            self._epoch = epoch
        return self._indices

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
    if isinstance(world_size, bool) or not isinstance(world_size, (int, np.integer)) or world_size < 1:
        raise ConfigError(f"`world_size` must be an int of at least 1, but is {world_size!r}")
    if rank is not None and not (isinstance(rank, (int, np.integer)) and 0 <= rank < world_size):
        raise ConfigError(f"`rank` must be from 0 to `world_size` - 1 ({world_size - 1}), but is {rank!r}")
    return rank, int(world_size)


def checked_state(state: Mapping[str, Any], keys: Sequence[str], kind: str, planner: Planner) -> None:
    """Refuse a state that is damaged, of another version, or of another plan.

    Args:
        keys: what a state of this ``kind`` holds besides version, fingerprint, identity and order.

    Raises:
        StateError: names what is missing, or what differs.
    """
    needed = ("version", "fingerprint", "identity", *keys, "order")
    missing = [key for key in needed if key not in state] if isinstance(state, Mapping) else list(needed)
    if missing:
        raise StateError(f"this is no state of {kind}: {missing} missing")
    if state["version"] != STATE_VERSION:
        raise StateError(f"the state has version {state['version']}, this dynagroup reads version {STATE_VERSION}")
    if state["fingerprint"] != planner.fingerprint:
        theirs, ours = state["identity"], planner.identity
        differing = [f"{k}: {theirs.get(k)!r} then, {v!r} now" for k, v in ours.items() if theirs.get(k) != v]
        raise StateError(
            f"the state belongs to plan {state['fingerprint']}, this run has {planner.fingerprint}; {'; '.join(differing)}"
        )


def _checked_state(state: Mapping[str, Any], planner: Planner) -> Mapping[str, Any]:
    checked_state(
        state, ("epoch", "window_size", "windows_done", "segments", "learned"), "a LengthAwareBatchSampler", planner
    )
    numbers = [
        state["epoch"],
        state["windows_done"],
        state["window_size"] - 1,
        *(n for s in state["segments"] for n in s),
    ]
    if any(not isinstance(n, int) or n < 0 for n in numbers):
        raise StateError(f"the state is damaged: {numbers} must all be integers of at least 0")
    return state
