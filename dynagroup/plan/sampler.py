"""The length-aware batch sampler, which gives a plan's batches to a plain ``DataLoader``."""

import multiprocessing
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_stack
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
from dynagroup.validation import check_identity, check_int, warn_user

KIND = "LengthAwareBatchSampler"


def _by_torchdata() -> bool:
    """Returns whether torchdata called the calling method."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torchdata.")


@dataclass
class _Run:
    """One iteration: the borders of windows that it has passed, from its start, and how many steps it has yielded."""

    borders: list[Cursor]
    steps: int  # steps of the epoch that were yielded, including those before a resume
    ranks: int
    limit: float | None
    ended: bool = False


class EpochHandle:
    """The object ``batch_sampler.sampler``, on which accelerate and Lightning call ``set_epoch``. After a state was
    loaded, accelerate counts epochs from 0 again, so its first call is taken as the epoch of the state; or its last one,
    if torchdata loads the state, because torchdata does so when accelerate has begun the epoch."""

    def __init__(self, sampler: "LengthAwareBatchSampler") -> None:
        self._sampler, self._ahead = sampler, 0
        self._expected: int | None = None  # the epoch that a loaded state resumes
        self._called: int | None = None  # the last epoch that was set

    def set_epoch(self, epoch: int) -> None:
        if self._expected is not None:
            self._ahead, self._expected = self._expected - epoch, None
        self._called = epoch
        self._sampler.set_epoch(epoch + self._ahead)

    def resume(self, epoch: int, *, begun: bool) -> None:
        """Notes the epoch of a loaded state; ``begun``: the host has set the number of this epoch already."""
        self._expected = epoch
        if begun and self._called is not None:
            self._ahead, self._expected = epoch - self._called, None


class LengthAwareBatchSampler(Sampler[list[int]]):
    """Yields batches of samples of similar length that fill a budget: each sample once per epoch, equal steps on ranks.

    Args:
        lengths: int (N,), tokens of each sample; or a dict by stream, whose primary stream is ``tokens`` or the first
            (``{"nodes": ..., "edges": ...}``); or the path of a ``.npy`` or ``.npz`` file with these.
        budget: limit of a batch, e.g. ``TokenBudget(16384)``; an int means that many tokens.
        shuffle: True forms new batches in every epoch. False: longest batches first, for inference and evaluation.
        window: int, samples planned together. None: all, or with ``shuffle`` enough for about a hundred batches.
        seed: int, seed of the shuffle, the same on every rank.
        hardest_first: int, steps with a window's longest samples that begin an epoch; not with ``samples_per_update``.
        round_batch: function from a batch size to an allowed one: ``multiple_of(8)``, ``friendly_size``, or your own.
        work: predicted time of a batch, e.g. ``Work.of(model)``. None: that of a small decoder on this device.
        samples_per_update: int: each update has exactly this many samples over all ranks, the same ones as with fixed
            batches in the same order. ``plan.update_ends`` says after which steps an update ends.
        grouping: int: the samples of this many updates are sorted by length and divided into updates of the same size.
            Samples of one update then have similar lengths and need little padding. None: updates as drawn.
        kinds: label of each sample (N,), hashable, such as "image" or None.
        one_kind: with ``kinds``: "step": all batches of a step, on all ranks, have one kind; "batch": each batch has.
        order: sampler of dataset indices, read once per epoch, with the same order on every rank. None: a random order,
            seeded by (seed, epoch). With ``order``, ``shuffle`` only shuffles steps.
        oversize: a sample that does not fit even alone: "alone" (a batch of its own, one warning), "error", or "drop".
        uneven: if the last step has too few samples for all ranks: "repeat" the smallest (one warning), or "drop" them.
        identity: a text, or another value for JSON, that a saved state must have in common with the run that loads it,
            for example the version of your code and data. Settings and lengths are compared without it.
        rank, world_size: int; None: those of ``torch.distributed``, read when an epoch starts. With ``world_size``
            alone, the batches of all ranks are yielded step by step, for accelerate, which shards them.

    Each new iteration is the next epoch, unless ``set_epoch`` chooses another.

    Raises ConfigError if an argument is wrong; BudgetError if a sample does not fit and ``oversize="error"``.

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
        samples_per_update: int | None = None,
        grouping: int | None = None,
        kinds: Iterable[Any] | None = None,
        one_kind: OneKind = "step",
        order: Iterable[int] | None = None,
        oversize: Oversize = "alone",
        uneven: Uneven = "repeat",
        identity: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        how: dict[str, Any] = {
            "shuffle": shuffle,
            "window": window,
            "seed": seed,
            "hardest_first": hardest_first,
        }
        how |= {
            "samples_per_update": samples_per_update,
            "grouping": grouping,
            "round_batch": round_batch,
        }
        config = PlanConfig(
            **how, work=check_work(work), oversize=oversize, uneven=uneven, one_kind=one_kind
        )
        self._planner = Planner.of(lengths, budget, config, kinds)
        self._identity_given = check_identity(identity)
        self._order = None if order is None else OrderSource(order, self._planner.num_samples)
        if world_size is not None:
            world_size = check_int("world_size", world_size, most=MOST_RANKS)
            rank = (
                None
                if rank is None
                else check_int(
                    "rank", rank, least=0, most=world_size - 1, where=" (of `world_size`)"
                )
            )
        elif rank is not None:
            raise ConfigError(f"`rank` ({rank}) needs `world_size`; pass both, or none")
        self._rank, self._world_size = rank, world_size
        self._epoch = 0
        self._advance = (
            0  # epochs to add when the next iteration begins, unless set_epoch chose one
        )
        self._start: Cursor | None = (
            None  # where the running or next iteration begins; None: at the epoch's beginning
        )
        self._run: _Run | None = None  # the latest iteration of this epoch
        self._plans: dict[
            tuple[int, int, Cursor | None], BatchPlan
        ] = {}  # at most two: a whole epoch, and its rest
        self._said_repeats = False
        self.sampler = EpochHandle(
            self
        )  # only for frameworks that set the epoch, see :class:`EpochHandle`
        self._planner.warn_of_oversize()

    @property
    def epoch(self) -> int:
        """The epoch of the running or last iteration; after a state was loaded, that of the next iteration."""
        return self._epoch if self._run is not None else self._epoch + self._advance

    @property
    def batch_size(self) -> int:
        """Stops a framework that would shard the batches again: frameworks read this property first. AttributeError
        tells them that batches have no fixed size, so they shard them; ConfigError stops them."""
        rank, size = self._rank_and_size()
        if rank is None or size == 1:
            raise AttributeError("batches of LengthAwareBatchSampler have no fixed size")
        away = "keep the loader away from accelerator.prepare (Lightning: use_distributed_sampler=False)"
        again = (
            f"sharding them again would lose samples; make it with world_size={size} and rank=None"
        )
        raise ConfigError(
            f"this sampler yields only the batches of rank {rank} of {size}, and {again}, or {away}"
        )

    @property
    def plan(self) -> BatchPlan:
        """The steps of :attr:`epoch` on all ranks; after resuming, the steps that remained."""
        self._here()
        return self._planned(self.epoch, self._start if self.epoch == self._epoch else None)

    def plan_of(self, epoch: int) -> BatchPlan:
        """Returns the plan of a whole epoch, even if a part of it was used."""
        return self._planned(check_int("epoch", epoch, least=0), None)

    def __len__(self) -> int:
        """Returns the number of batches in the whole :attr:`epoch`, on this rank (or on all, if it yields all). A resume
        does not change it, because trainers skip by themselves. The first call plans the epoch."""
        rank, size = self._rank_and_size()
        return self.plan_of(self.epoch).num_steps * (1 if rank is not None else size)

    def _planned(self, epoch: int, start: Cursor | None) -> BatchPlan:
        key = (epoch, self._rank_and_size()[1], start)
        if key not in self._plans:
            self._plans = dict([*self._plans.items()][-1:])
            self._plans[key] = self._planner.plan(epoch, key[1], start, self._order_of(epoch))
        return self._plans[key]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration. Choosing the current epoch changes nothing."""
        epoch = check_int("epoch", epoch, least=0)
        if epoch == self._epoch:
            self._advance = 0
            return
        # On several ranks the user applies what was learned, because that is an exchange, see LearningBudget.
        planner, before = self._planner.renewed(apply=self._rank_and_size()[1] == 1), self._planner
        self._start, self._run, self._epoch, self._advance = (
            None,
            None,
            epoch,
            0,
        )  # not before: making a planner may fail
        if planner is not before:
            self._replace(planner)
            planner.warn_of_oversize()

    def _replace(self, planner: Planner) -> None:
        self._planner = planner
        self._plans.clear()

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._rank_and_size()
        if self._world_size is None:
            warn_if_launched()
        callers = (type(frame.f_locals.get("self")).__name__ for frame, _ in walk_stack(None))
        if rank is None and size > 1 and "DataLoaderDispatcher" in callers:  # of accelerate
            raise ConfigError(
                "dispatch_batches=True divides all ranks' batches anew, which would lose samples; leave it out"
            )
        self.set_epoch(self._epoch + self._advance)
        self._advance = 1
        order = self._order_of(self._epoch)
        if self._order is not None and self._world_size is None and size > 1:
            check_alike(self._order, self._epoch)
        if self._run is not None:
            self._start = None  # a second iteration starts at the epoch's beginning
        self._run, start = None, self._here()
        run = self._run = _Run([start], start.steps, size, self._planner.limit)
        for planned in self._planner.steps_from(start, size, order):
            if len(planned.repeated) and not self._said_repeats:
                self._said_repeats = True
                told = f"samples {planned.repeated.tolist()!s:.200} are repeated, with weight 0 in plan.loss_scale"
                few = "there are too few samples for the same number of steps on all ranks"
                warn_user(f"{few}, so {told}; uneven='drop' leaves samples out instead")
            run.borders.append(planned.end)
            for row in planned.table.tolist():
                run.steps += 1
                for number in row if rank is None else row[rank : rank + 1]:
                    yield planned.batches[number].tolist()
        run.ended = True

    def _here(self) -> Cursor:
        """Returns where the next iteration begins, or where the running one began."""
        if (
            self._start
            and self._run is None
            and (planner := self._planner.in_mid_epoch()) is not self._planner
        ):
            self._replace(planner)
        return self._start or self._planner.start_of(self._epoch, self._rank_and_size()[1])

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        """Returns the point in the epoch as a few integers that JSON can store, the same on every rank.

        Args:
            num_steps: int, steps of the epoch that training has used, including those before a resume; needed with a
                plain ``DataLoader`` whose workers prefetch. None: all yielded steps (right for ``StatefulDataLoader``).

        Raises StateError if the iteration did not yield ``num_steps`` steps, or it is missing while workers run."""
        run, by_itself = self._run, _by_torchdata()  # torchdata counts used steps
        if num_steps is not None:
            num_steps = check_int("num_steps", num_steps, least=0)
        elif run is not None and run.steps and not run.ended and not by_itself:
            if any(child.daemon for child in multiprocessing.active_children()):
                way_out = "call state_dict(num_steps=number of used steps)"
                raise StateError(
                    f"worker processes fetch batches before training uses them; {way_out}"
                )
        run = run or _Run([here := self._here()], here.steps, 1, None)
        first, used = run.borders[0].steps, run.steps if num_steps is None else num_steps
        if not first <= used <= run.steps:
            must = f"must be from {first} to {run.steps}, the steps of this epoch that were yielded, but is {used}"
            raise StateError(
                f"`num_steps` {must}; count from the epoch's beginning, with the steps before a resume"
            )
        before = run.borders[bisect_right(run.borders, used, key=lambda cursor: cursor.steps) - 1]
        cursor = before.after_rows(used - before.steps, run.ranks, run.limit).state()
        order = None if self._order is None else self._order.checksum(self._epoch)
        fields = {
            "learned": LearningBudget.saved(self._planner.budget),
            "left_out": self._planner.left_print,
        }
        return sealed(KIND, self._compared(), {"cursor": cursor, "order": order, **fields})

    def _compared(self) -> dict[str, Any]:
        return {**self._planner.identity, "identity": self._identity_given}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resumes from a saved state, on any number of ranks: the rest of its epoch comes next, or if nothing remained, the next
        epoch. The state of one rank is enough; if those of all ranks are given, they must be equal. On the same number of ranks
        the remaining batches are the same. On another number, the remaining samples of the current window are cut into new
        batches. Raises StateError if the state is damaged, or was saved with other lengths, another budget or other settings."""
        state = agreed(opened(listed(state_dict), KIND, self._compared()))
        cursor = Cursor.of(state["cursor"])
        if state["order"] != (None if self._order is None else self._order.checksum(cursor.epoch)):
            must = f"must yield the same indices in epoch {cursor.epoch} as when the state was saved (or none, as then)"
            raise StateError(f"`order` {must}; seed its generator the same, or give it a set_epoch")
        with LearningBudget.taken_up(self._planner.budget, state):
            planner = self._planner.rebuilt()
            planner.check_left_out(state)
        done = planner.is_done(cursor, self._rank_and_size()[1], self._order_of(cursor.epoch))
        self._replace(planner)
        self._epoch, self._run, self._advance = cursor.epoch, None, int(done)
        self._start = cursor if cursor.windows_done or cursor.segments else None
        self.sampler.resume(self.epoch, begun=_by_torchdata())

    def _rank_and_size(self) -> tuple[int | None, int]:
        return rank_and_size() if self._world_size is None else (self._rank, self._world_size)

    def _order_of(self, epoch: int) -> IntArray | None:
        return None if self._order is None else self._order.of_epoch(epoch)
