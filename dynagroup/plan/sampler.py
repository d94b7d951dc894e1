"""The length-aware batch sampler, which gives a plan's batches to a plain ``DataLoader``."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import Sampler

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import rank_and_size, warn_if_launched
from dynagroup.errors import ConfigError, StateError
from dynagroup.plan.batches import RoundBatch
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import MOST_RANKS, Cursor
from dynagroup.plan.inputs import OneKind, Oversize, PlanConfig, Uneven
from dynagroup.plan.order import OrderSource, check_alike
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Planner
from dynagroup.shapes import IntArray
from dynagroup.state import agreed, listed, opened, sealed
from dynagroup.validation import check_identity, check_int, warn_user

KIND = "LengthAwareBatchSampler"
PlanKey: TypeAlias = "tuple[int, int, Cursor | None]"  # epoch, ranks, where the plan begins


@dataclass
class _Run:
    """One iteration: the borders of windows that it has passed, from its start, and how many steps it has yielded."""

    borders: list[Cursor]
    steps: int  # steps of the epoch that were yielded, including those before a resume
    ranks: int
    limit: float | None
    has_ended: bool = False

    def place(self, steps: int) -> Cursor:
        """Returns the place after this many steps of the epoch."""
        borders = bisect_right(self.borders, steps, key=lambda cursor: cursor.steps)
        before = self.borders[borders - 1]
        return before.after_rows(steps - before.steps, self.ranks, self.limit)


class _Batches(Iterator[list[int]]):
    """The iterator of a sampler. torchdata's ``StatefulDataLoader`` saves its state beside the sampler's, which is the place
    after the batches that were taken."""

    def __init__(self, sampler: "LengthAwareBatchSampler") -> None:
        self._sampler = sampler
        self._batches = sampler._iterate()
        self._has_begun = False

    def __next__(self) -> list[int]:
        self._has_begun = True
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {"has_begun": self._has_begun}

    # torchdata loads the sampler's state, makes an iterator and loads this state. At the end of an epoch it throws that
    # iterator away, after reading it or not, and makes another one for the next epoch.
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes this iterator the rest of the loaded epoch, even if nothing of that epoch remained."""
        self._has_begun = state_dict["has_begun"]
        if self._has_begun and self._sampler._is_used_up:
            self._batches = iter(())


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
        grouping: int: the samples of this many updates are sorted by length and dealt anew into updates of the same
            size, each with chunks of short, middle and long samples. A batch then needs little padding, and an update
            is like a random one (:mod:`dynagroup.plan.strata`). None: updates as drawn.
        strata: int, chunks of each update; 1 pads as little, but updates of one length lose quality. None: 4 or more.
        kinds: label of each sample (N,), hashable, such as "image" or None.
        one_kind: with ``kinds``: "step": all batches of a step, on all ranks, have one kind; "batch": each batch has.
        order: dataset indices, the same on every rank: a list, or a sampler, which is read once per epoch. To resume in
            a later epoch, it must have ``set_epoch``, or begin anew like a list. None: a random order, seeded by (seed,
            epoch). With ``order``, ``shuffle`` only shuffles steps.
        oversize: a sample that does not fit even alone: "alone" (a batch of its own, one warning), "error", or "drop".
        uneven: if the last step has too few samples for all ranks: "repeat" the smallest (one warning), or "drop" them.
        identity: a text, or another value for JSON, that a saved state must have in common with the run that loads it,
            for example the version of your code and data. Settings and lengths are compared without it.
        rank, world_size: int; None: those of ``torch.distributed``, read when an epoch starts. With ``world_size``
            alone, the batches of all ranks are yielded step by step, for accelerate, which shards them.

    An iteration that ended was one epoch, and the next iteration is the next epoch. An iteration that was left early
    counts as no epoch: the next one begins the same epoch again. ``set_epoch`` chooses another epoch.

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
        strata: int | None = None,
        kinds: Iterable[Any] | None = None,
        one_kind: OneKind = "step",
        order: Iterable[int] | None = None,
        oversize: Oversize = "alone",
        uneven: Uneven = "repeat",
        identity: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        config = PlanConfig(
            shuffle=shuffle,
            window=window,
            seed=seed,
            hardest_first=hardest_first,
            round_batch=round_batch,
            work=check_work(work),
            samples_per_update=samples_per_update,
            grouping=grouping,
            strata=strata,
            oversize=oversize,
            uneven=uneven,
            one_kind=one_kind,
        )
        self._planner = Planner.of(lengths, budget, config, kinds)
        self._identity_given = check_identity(identity)
        self._order = None
        if order is not None:
            self._order = OrderSource(order, self._planner.num_samples, "order")
            if samples_per_update is not None:
                self._order.check_update(samples_per_update)
            self._planner.take_sources(self._order)
        if world_size is not None:
            world_size = check_int("world_size", world_size, most=MOST_RANKS)
        elif rank is not None:
            raise ConfigError(f"`rank` ({rank}) needs `world_size`; pass both, or none")
        if rank is not None and world_size is not None:
            last = world_size - 1
            rank = check_int("rank", rank, least=0, most=last, where=" (of `world_size`)")
        self._rank = rank
        self._world_size = world_size
        # The epoch of the running or last iteration, or of a loaded state; and that of the next iteration.
        self._epoch = 0
        self._next = 0
        # After a state was loaded: the first epoch that is not used up.
        self._least: int | None = None
        # Where the running or next iteration begins; None: at the epoch's beginning.
        self._start: Cursor | None = None
        self._run: _Run | None = None  # the latest iteration of this epoch
        self._plans: dict[PlanKey, BatchPlan] = {}  # at most two: a whole epoch, and its rest
        self._said_repeats = False
        # Accelerate and Lightning call `batch_sampler.sampler.set_epoch`.
        self.sampler = SimpleNamespace(set_epoch=self._host_sets_epoch)
        self._planner.warn_of_oversize()

    @property
    def epoch(self) -> int:
        """The epoch of the running or last iteration; after a state was loaded, that of the next iteration."""
        return self._next if self._run is None else self._epoch

    @property
    def batch_size(self) -> int:
        """Stops a framework that would shard the batches again: frameworks read this property first. AttributeError
        tells them that batches have no fixed size, so they shard them; ConfigError stops them."""
        rank, size = self._rank_and_size()
        if rank is None or size == 1:
            raise AttributeError("batches of LengthAwareBatchSampler have no fixed size")
        raise ConfigError(
            f"this sampler yields only the batches of rank {rank} of {size}, and sharding them again "
            f"would lose samples; make it with world_size={size} and rank=None, or keep the loader away "
            "from accelerator.prepare (Lightning: use_distributed_sampler=False)"
        )

    @property
    def plan(self) -> BatchPlan:
        """The steps of :attr:`epoch` on all ranks; after resuming, the steps that remained."""
        self._here()
        start = self._start if self.epoch == self._epoch else None
        return self._planned(self.epoch, start)

    def plan_of(self, epoch: int) -> BatchPlan:
        """Returns the plan of a whole epoch, even if a part of it was used."""
        return self._planned(check_int("epoch", epoch, least=0), None)

    def __len__(self) -> int:
        """Returns the number of batches in the whole :attr:`epoch`, on this rank (or on all, if it yields all). A resume
        does not change it, because trainers skip by themselves. The first call plans the epoch."""
        rank, size = self._rank_and_size()
        num_steps = self.plan_of(self.epoch).num_steps
        return num_steps * size if rank is None else num_steps

    def _planned(self, epoch: int, start: Cursor | None) -> BatchPlan:
        world_size = self._rank_and_size()[1]
        key = (epoch, world_size, start)
        if key not in self._plans:
            plan = self._planner.plan(epoch, world_size, start, self._order_of(epoch))
            latest = list(self._plans.items())[-1:]
            self._plans = dict(latest)
            self._plans[key] = plan
        return self._plans[key]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration. Choosing the current epoch changes nothing. After a state was loaded,
        earlier epochs do not come again: a framework that counts its epochs from 0 anew gets the next epoch."""
        epoch = check_int("epoch", epoch, least=0)
        self._settle()
        if self._least is not None and epoch < self._least:
            epoch = self._next
        self._choose(epoch)

    def _host_sets_epoch(self, epoch: int) -> None:
        """Chooses the epoch for a framework. After a restart frameworks count from 0 and iterate at once, so an epoch of
        which nothing remains is the next one; a loop of the user's own passes over it."""
        self._settle()
        if self._least is not None:
            epoch = max(epoch, self._next)
        self.set_epoch(epoch)

    def _choose(self, epoch: int) -> None:
        if epoch != self._epoch:
            # On several ranks the user applies what was learned, because that is an exchange, see LearningBudget.
            is_alone = self._rank_and_size()[1] == 1
            planner = self._planner.renewed(apply=is_alone)
            self._start = None  # not before: making a planner may fail
            self._run = None
            self._epoch = epoch
            if planner is not self._planner:
                self._replace(planner)
                planner.warn_of_oversize()
        self._next = epoch

    def _replace(self, planner: Planner) -> None:
        self._planner = planner
        self._plans.clear()

    @property
    def _is_used_up(self) -> bool:
        """Whether nothing remains of the current epoch."""
        return self._next > self._epoch

    def __iter__(self) -> Iterator[list[int]]:
        return _Batches(self)

    def _iterate(self) -> Iterator[list[int]]:
        rank, size = self._rank_and_size()
        if self._world_size is None:
            warn_if_launched()
        self._settle()
        self._choose(self._next)
        order = self._order_of(self._epoch)
        if self._order is not None and self._world_size is None and size > 1:
            check_alike(self._order, self._epoch)
        if self._run is not None and self._run.has_ended:
            self._start = None  # chosen once more, an epoch starts at its beginning
        self._run = None
        start = self._here()
        run = _Run([start], start.steps, size, self._planner.limit)
        self._run = run
        for planned in self._planner.steps_from(start, size, order):
            self._warn_of_repeats(planned)
            run.borders += planned.window_ends
            for row in planned.table.tolist():
                run.steps += 1
                batches = row if rank is None else [row[rank]]
                for batch in batches:
                    yield planned.batches[batch].tolist()
        self._end(run)

    def _warn_of_repeats(self, planned: BatchPlan) -> None:
        if not len(planned.repeated) or self._said_repeats:
            return
        self._said_repeats = True
        warn_user(
            "there are too few samples for the same number of steps on all ranks, so samples "
            f"{planned.repeated.tolist()!s:.200} are repeated, with weight 0 in plan.loss_scale; "
            "uneven='drop' leaves samples out instead"
        )

    def _settle(self) -> None:
        """Ends the running iteration if its last batch was taken, even if nobody asked for one more."""
        run = self._run
        if run is None or run.has_ended:
            return
        order = self._order_of(self._epoch)
        if self._planner.is_done(run.place(run.steps), run.ranks, order):
            self._end(run)

    def _end(self, run: _Run) -> None:
        run.has_ended = True
        if run is self._run:
            self._next = self._epoch + 1
            if self._least is not None:
                self._least = self._next

    def _here(self) -> Cursor:
        """Returns where the next iteration begins, or where the running one began."""
        if self._start is None:
            return self._planner.start_of(self._epoch, self._rank_and_size()[1])
        if self._run is None:
            planner = self._planner.in_mid_epoch()
            if planner is not self._planner:
                self._replace(planner)
        return self._start

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        """Returns the place after the batches that were taken, as integers that JSON can store, the same on every rank.

        Args:
            num_steps: int, steps of the epoch that training has used, including those before a resume. None: all steps
                that were taken from the sampler. The workers of a plain ``DataLoader`` take more than training has used;
                ``StatefulDataLoader`` counts what was used by itself.

        Raises StateError if the iteration did not yield ``num_steps`` steps."""
        run = self._run
        if run is None:
            here = self._here()
            run = _Run([here], here.steps, 1, None)
        if num_steps is None:
            num_steps = run.steps
        num_steps = check_int("num_steps", num_steps, least=0)
        first = run.borders[0].steps
        if not first <= num_steps <= run.steps:
            raise StateError(
                f"`num_steps` must be from {first} to {run.steps}, the steps of this epoch that were "
                f"yielded, but is {num_steps}; count from the epoch's beginning, with the steps before a resume"
            )
        state = {
            "cursor": run.place(num_steps).state(),
            "order": self._order_print(self._epoch),
            "learned": LearningBudget.saved(self._planner.budget),
            "left_out": self._planner.left_print,
        }
        return sealed(KIND, self._compared(), state)

    def _compared(self) -> dict[str, Any]:
        return {**self._planner.identity, "identity": self._identity_given}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resumes from a saved state, on any number of ranks: the rest of its epoch comes next, or if nothing remained, the next
        epoch. The state of one rank is enough; if those of all ranks are given, they must be equal. On the same number of ranks
        the remaining batches are the same. On another number, the remaining samples of the current window are cut into new
        batches. Raises StateError if the state is damaged, or was saved with other lengths, another budget or other settings."""
        state = agreed(opened(listed(state_dict), KIND, self._compared()))
        cursor = Cursor.of(state["cursor"])
        if state["order"] != self._order_print(cursor.epoch):
            raise StateError(
                f"`order` must yield the same indices in epoch {cursor.epoch} as when the state was saved "
                "(or none, as then); give a list, or a sampler that has set_epoch"
            )
        with LearningBudget.taken_up(self._planner.budget, state):
            planner = self._planner.rebuilt()
            planner.check_left_out(state)
        done = planner.is_done(cursor, self._rank_and_size()[1], self._order_of(cursor.epoch))
        self._replace(planner)
        self._epoch = cursor.epoch
        self._next = cursor.epoch + 1 if done else cursor.epoch
        self._least = cursor.epoch
        self._run = None
        self._start = cursor if cursor.windows_done or cursor.segments else None

    def _rank_and_size(self) -> tuple[int | None, int]:
        if self._world_size is None:
            return rank_and_size()
        return self._rank, self._world_size

    def _order_of(self, epoch: int) -> IntArray | None:
        """Returns the indices of the user's sampler in an epoch; None: there is no sampler."""
        return None if self._order is None else self._order.of_epoch(epoch)

    def _order_print(self, epoch: int) -> int | None:
        """Returns a checksum of :meth:`_order_of`."""
        return None if self._order is None else self._order.checksum(epoch)
