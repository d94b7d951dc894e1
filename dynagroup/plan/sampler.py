"""The length-aware batch sampler: a plan, handed to a plain ``DataLoader``."""

import multiprocessing
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import rank_and_size, warn_if_launched
from dynagroup.errors import ConfigError, StateError
from dynagroup.plan.batches import RoundBatch
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import MOST_RANKS, Cursor
from dynagroup.plan.epoch import OrderSource, check_alike
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import OneKind, Oversize, PlanConfig, Planner, Uneven
from dynagroup.shapes import IntArray
from dynagroup.state import agreed, listed, opened, sealed
from dynagroup.validation import check_int, warn_user

KIND = "LengthAwareBatchSampler"


@dataclass
class _Run:
    """An iteration: the places between windows that it came by, the first where it began; and what it has handed out."""

    borders: list[Cursor]
    steps: int  # of the epoch that were handed out, those before a resume included
    ranks: int
    limit: float | None
    ended: bool = False


class EpochHandle:
    """``batch_sampler.sampler``, where accelerate and Lightning look for ``set_epoch``. After a state was loaded accelerate
    counts from 0 again: the first number it says is the epoch that the state resumes."""

    def __init__(self, sampler: "LengthAwareBatchSampler") -> None:
        self._sampler, self._ahead = sampler, 0
        self.expected: int | None = None  # the epoch that a state resumes

    def set_epoch(self, epoch: int) -> None:
        if self.expected is not None:
            self._ahead, self.expected = self.expected - epoch, None
        self._sampler.set_epoch(epoch + self._ahead)


class LengthAwareBatchSampler(Sampler[list[int]]):
    """Batches of similar length that fill a budget: every sample once an epoch, equally many steps on every rank.

    Args:
        lengths: tokens of each sample, integers (N,), or a dict of named streams, of which ``tokens`` or the
            first is primary: ``{"nodes": ..., "edges": ...}``; or the path of a ``.npy`` or ``.npz`` file of these.
        budget: what fits, e.g. ``TokenBudget(16384)``; a number means so many tokens.
        shuffle: other batches every epoch. False sorts everything once, longest first: for inference and evaluation.
        window: samples sorted together. None: all of them, or with ``shuffle`` a hundred batches or so.
        seed: of the shuffle; the same on every rank.
        hardest_first: so many steps with the longest samples lead each epoch (not with ``samples_per_update``).
        round_batch: padded batch sizes are chosen among its values: ``multiple_of(8)``, ``friendly_size`` or your own.
        work: predicted time of a batch, e.g. ``Work.of(model)``; default: a small decoder on a fast GPU, or a CPU where
            torch has no accelerator.
        samples_per_update: each optimizer update consists of exactly so many samples over all ranks, the ones that
            fixed batches drawn in the same order would hold. ``plan.update_ends`` says after which steps to update.
        grouping: so many updates' samples are sorted by length and dealt into as many updates of the same size: updates of
            similar samples, hardly any padding even where updates are small. None: updates as they are drawn.
        kinds: a label of each sample (N,), anything that can be hashed, such as "image" or None.
        one_kind: with ``kinds``, all batches of a "step", on all ranks, are of one kind; or each "batch" is by itself.
        order: any sampler of dataset indices, read once an epoch; default: a permutation seeded by (seed, epoch).
            It must give the same order on every rank. With it, ``shuffle`` only decides whether steps are shuffled.
        oversize: a sample that does not fit even alone is emitted "alone" (warned once), an "error", or "drop"ped.
        uneven: a last row that halving cannot fill "repeat"s the smallest samples (warned once) or is "drop"ped.
        rank, world_size: by default this process's, from ``torch.distributed``, looked up whenever an epoch starts. A
            ``world_size`` alone emits all ranks' batches row by row, for a framework that deals them out, as accelerate does.

    Without ``set_epoch`` each new iteration is the next epoch.

    Raises:
        ConfigError: an argument is wrong. BudgetError: a sample does not fit and ``oversize="error"``.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> list(LengthAwareBatchSampler([3, 9, 2, 8], TokenBudget(18), rank=0, world_size=1))
    [[1, 3], [0, 2]]
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray | Mapping[str, Any], budget: Budget | int, *,
        shuffle: bool = False, window: int | None = None, seed: int = 0, hardest_first: int = 1,
        round_batch: RoundBatch | None = None, work: Work | None = None,
        samples_per_update: int | None = None, grouping: int | None = None,
        kinds: Iterable[Any] | None = None, one_kind: OneKind = "step", order: Iterable[int] | None = None,
        oversize: Oversize = "alone", uneven: Uneven = "repeat",
        rank: int | None = None, world_size: int | None = None,
    ) -> None:  # fmt: skip
        how: dict[str, Any] = {"shuffle": shuffle, "window": window, "seed": seed, "hardest_first": hardest_first}
        how |= {"samples_per_update": samples_per_update, "grouping": grouping, "round_batch": round_batch}
        config = PlanConfig(**how, work=check_work(work), oversize=oversize, uneven=uneven, one_kind=one_kind)
        self._planner = Planner.of(lengths, budget, config, kinds)
        self._order = None if order is None else OrderSource(order, self._planner.num_samples)
        self._rank, self._world_size = _checked_rank(rank, world_size)
        self._epoch = 0
        self._advance = 0  # epochs to move on when the next iteration begins, unless told the epoch
        self._start: Cursor | None = None  # of the iteration that runs, or comes next; None: the epoch's beginning
        self._run: _Run | None = None  # the iteration that began last, in this epoch
        self._plans: dict[tuple[int, int, Cursor | None], BatchPlan] = {}  # the last two: a whole epoch, and its rest
        self._said_repeats = False
        self.sampler = EpochHandle(self)  # only there to be told the epoch, see :class:`EpochHandle`
        self._planner.warn_of_oversize()

    @property
    def epoch(self) -> int:
        """The epoch that is running, or was last; after a state was loaded, the one that the next iteration is in."""
        return self._epoch if self._run is not None else self._epoch + self._advance

    @property
    def batch_size(self) -> int:
        """Refuses to be sharded twice: asked by frameworks that shard batch samplers, before they do. A property that raises
        AttributeError looks absent, as it must where batches vary in size; one that raises anything else stops the framework."""
        rank, size = self._rank_and_size()
        if rank is None or size == 1:
            raise AttributeError("batches of LengthAwareBatchSampler vary in size")
        raise ConfigError(
            f"this LengthAwareBatchSampler already gives rank {rank} of {size} its own batches; a framework that shards batch "
            f"samplers would shard it a second time and lose samples: build it with world_size={size} and rank=None, or keep the "
            "loader away from accelerator.prepare (Lightning: use_distributed_sampler=False)"
        )

    @property
    def plan(self) -> BatchPlan:
        """The steps of :attr:`epoch` on all ranks; after a resume those that remained of it, from the first that is emitted."""
        self._here()
        return self._planned(self.epoch, self._start if self.epoch == self._epoch else None)

    def plan_of(self, epoch: int) -> BatchPlan:
        """The steps of a whole epoch, also where a part of it was used."""
        return self._planned(check_int("epoch", epoch, least=0), None)

    def __len__(self) -> int:
        """Batches of the whole :attr:`epoch` on this rank (of all ranks, where it emits all), also after a resume: trainers ask
        for it and skip by themselves. The first call in an epoch plans all of it: about 1 ms an update, 3 ms on eight ranks."""
        rank, size = self._rank_and_size()
        return self.plan_of(self.epoch).num_steps * (1 if rank is not None else size)

    def _planned(self, epoch: int, start: Cursor | None) -> BatchPlan:
        key = (epoch, self._rank_and_size()[1], start)
        if key not in self._plans:
            self._plans = dict([*self._plans.items()][-1:])
            self._plans[key] = self._planner.plan(epoch, key[1], start, self._order_of(epoch))
        return self._plans[key]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Calling it again with the same number changes nothing."""
        epoch = check_int("epoch", epoch, least=0)
        if epoch != self._epoch:
            self._start = self._run = None
            # On several ranks what was learned is applied by an exchange, which is the user's, see LearningBudget.
            planner = self._planner.renewed(apply=self._rank_and_size()[1] == 1)
            if planner is not self._planner:
                self._replace(planner)
                planner.warn_of_oversize()
        self._epoch, self._advance = epoch, 0

    def _replace(self, planner: Planner) -> None:
        self._planner = planner
        self._plans.clear()

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._rank_and_size()
        if self._world_size is None:
            warn_if_launched()
        self.set_epoch(self._epoch + self._advance)
        self._advance = 1
        order = self._order_of(self._epoch)
        if self._order is not None and self._world_size is None and size > 1:
            check_alike(self._order, self._epoch)
        if self._run is not None:
            self._start = None  # iterated again
        self._run, start = None, self._here()
        run = self._run = _Run([start], start.steps, size, self._planner.limit)
        for planned in self._planner.steps_from(start, size, order):
            self._tell_of_repeats(planned)
            run.borders.append(planned.end)
            for row in planned.table.tolist():
                run.steps += 1
                for number in row if rank is None else row[rank : rank + 1]:
                    yield planned.batches[number].tolist()
        run.ended = True

    def _tell_of_repeats(self, planned: BatchPlan) -> None:
        if len(planned.repeated) and not self._said_repeats:
            self._said_repeats = True
            warn_user(
                f"too few samples for an equal number of steps on all ranks: samples {planned.repeated.tolist()!s:.200} stand "
                "in a row a second time with weight 0 in plan.loss_scale; uneven='drop' leaves out samples instead"
            )

    def _here(self) -> Cursor:
        """Where the next iteration begins, or the one that runs began."""
        if self._start and self._run is None and (planner := self._planner.in_mid_epoch()) is not self._planner:
            self._replace(planner)
        return self._start or self._planner.start_of(self._epoch, self._rank_and_size()[1])

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        """Where this epoch stands: a few integers, JSON-able, the same on every rank.

        Args:
            num_steps: steps of this epoch that training has used, those before a resume included; None: all handed out. Needed
                with a plain ``DataLoader`` whose workers fetch ahead; torchdata's ``StatefulDataLoader`` counts itself.

        Raises:
            StateError: ``num_steps`` is none that this iteration has come by, or missing while worker processes run.
        """
        run = self._run
        if num_steps is not None:
            num_steps = check_int("num_steps", num_steps, least=0)
        elif run is not None and run.steps and not run.ended and _workers_fetch_ahead(sys._getframe(1)):
            said = "worker processes fetch batches ahead of training"
            raise StateError(f"{said}; say state_dict(num_steps=steps that were used)")
        if run is None:
            here = self._here()
            run = _Run([here], here.steps, 1, None)
        first, used = run.borders[0].steps, run.steps if num_steps is None else num_steps
        if not first <= used <= run.steps:
            raise StateError(
                f"`num_steps` must be from {first} to {run.steps}, the steps that were handed out since the epoch was begun or "
                f"resumed, but is {used}; count from the beginning of the epoch, across resumes"
            )
        before = run.borders[bisect_right(run.borders, used, key=lambda cursor: cursor.steps) - 1]
        fields = {
            "cursor": before.after_rows(used - before.steps, run.ranks, run.limit).state(),
            "learned": LearningBudget.saved(self._planner.budget),
            "left_out": self._planner.left_print,
            "order": None if self._order is None else self._order.checksum(self._epoch),
        }
        return sealed(KIND, self._planner.identity, fields)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a state was taken, on any number of ranks: exactly what remained of its epoch comes next, or after its
        end the next epoch. One rank's state says everything; a list of all ranks' states is accepted too, if they agree.

        On as many ranks as before the remaining batches are the same; on another number the current window's remaining
        samples are cut again.

        Raises:
            StateError: the state is damaged, or belongs to other lengths, another budget or other settings.
        """
        states = listed(state_dict)
        state = agreed(opened(states, KIND, self._planner.identity))
        cursor = Cursor.of(state["cursor"])
        if self._order is not None and self._order.checksum(cursor.epoch) != state["order"]:
            said = f"`order` gives other indices in epoch {cursor.epoch} than when the state was taken"
            raise StateError(f"{said}; seed its generator alike, or give it a set_epoch")
        with LearningBudget.taken_up(self._planner.budget, state):
            planner = self._planner.rebuilt()
            planner.check_left_out(state)
        self._replace(planner)
        self._epoch, self._run = cursor.epoch, None
        self._start = cursor if cursor.windows_done or cursor.segments else None
        self._advance = int(planner.is_done(cursor, self._rank_and_size()[1], self._order_of(cursor.epoch)))
        self.sampler.expected = self.epoch

    def _rank_and_size(self) -> tuple[int | None, int]:
        return rank_and_size() if self._world_size is None else (self._rank, self._world_size)

    def _order_of(self, epoch: int) -> IntArray | None:
        return None if self._order is None else self._order.of_epoch(epoch)


def _checked_rank(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    if world_size is None:
        if rank is not None:
            raise ConfigError(f"`rank` ({rank}) needs `world_size` beside it")
        return None, None
    world_size = check_int("world_size", world_size, most=MOST_RANKS)
    rank = None if rank is None else check_int("rank", rank, least=0, most=world_size - 1, where=" (of `world_size`)")
    return rank, world_size


def _workers_fetch_ahead(caller: FrameType) -> bool:
    """Whether a state must be told its steps: worker processes live, and the caller is no loader that counts itself."""
    counts_itself = str(caller.f_globals.get("__name__", "")).startswith("torchdata.")
    return not counts_itself and any(child.daemon for child in multiprocessing.active_children())
