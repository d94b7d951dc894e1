"""How an online loader runs: epochs begun, steps weighed, places saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.config import (
    OnlineConfig,
    as_hint,
)
from dynagroup.online.datasets import is_stream
from dynagroup.online.engine import Take
from dynagroup.online.epoch import EpochRun, Known, handed_out
from dynagroup.online.feeds import FREE_RUNNING, Source
from dynagroup.online.messages import Refined
from dynagroup.online.plans import EpochOrders
from dynagroup.online.protocol import Exchange
from dynagroup.online.state import LearnedLengths, together
from dynagroup.online.workers import Workers
from dynagroup.plan.cursor import Cursor
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import loss_scale
from dynagroup.update.schedule import UpdateSizes, Walk
from dynagroup.update.step import Step

__all__ = ["OnlineSteps"]


def _described(
    config: OnlineConfig, oversize: str, orders: EpochOrders, hint: Any, streamed: int | None
) -> dict[str, Any]:
    """What saved states are compared by, besides the budget, which may learn. ``streamed``: workers of an iterable dataset."""
    per_update = config.samples_per_update
    plain = ("window", "window_bytes", "objective", "drop_last", "accumulation", "seed", "shuffle", "uneven")
    return {
        **{name: getattr(config, name) for name in plain},
        "num_samples": orders.size,
        "work": described(config.work),
        "samples_per_update": described(per_update) if callable(per_update) else per_update,
        "order": orders.decided_by,
        "length_hint": None if hint is None else described(hint),
        "oversize": oversize,
        "weigh": described(config.weigh),
        "num_workers": streamed,
    }


def _check_order(state: Mapping[str, Any], orders: EpochOrders) -> None:
    running, epoch = state["running"], state["epoch"]
    if running is not None and running["order"] != orders.fingerprint(epoch):
        raise StateError(
            f"`{orders.decided_by}` gives other indices in epoch {epoch} than when the state was taken: "
            "seed its generator alike, or give it a set_epoch"
        )


class _Spare:
    """What a rank without samples runs: a copy of the smallest batch that it had, or what its feed has to spare."""

    def __init__(self) -> None:
        self._smallest: Refined | None = None

    def note(self, refined: Refined) -> None:
        smallest = self._smallest
        if smallest is None or (refined.weight > 0, -refined.padded) > (smallest.weight > 0, -smallest.padded):
            try:
                self._smallest = replace(refined, batch=copy.deepcopy(refined.batch), samples=None)
            except Exception:  # noqa: BLE001 - a batch that cannot be copied is shared
                self._smallest = replace(refined, samples=None)

    def batch(self, otherwise: Callable[[], Refined]) -> tuple[Any, list[int]]:
        if self._smallest is None:
            self._smallest = otherwise()
        return copy.deepcopy(self._smallest.batch), list(self._smallest.indices)


class OnlineSteps(StepLoader[Any]):
    """How an online loader runs: epochs begun, steps weighed, places saved. Its door, with all arguments, is in ``loader``."""

    KIND = "OnlineDataLoader"

    def __init__(
        self,
        dataset: Any,
        config: OnlineConfig,
        collator: RefinementCollator,
        orders: EpochOrders,
        *,
        hint: Any,
        kwargs: Mapping[str, Any],
        learns: bool,
        world: World | None,
    ) -> None:
        super().__init__(dataset, world=world)
        self.config, self._collator, self._orders, self._iterable = config, collator, orders, is_stream(dataset)
        self._workers = Workers(dataset, collator, kwargs, window=config.window, max_bytes=config.window_bytes)
        self.sizes: UpdateSizes | None = None
        """How many samples each update holds; None without ``samples_per_update``."""
        if config.samples_per_update is not None:
            self.sizes = UpdateSizes(config.samples_per_update, orders.num_ordered, drop_last=config.drop_last)
        learned = LearnedLengths(len(dataset)) if learns else None
        self._known = Known(learned, None if hint is None else as_hint(hint, len(dataset)), collator.budget)
        streamed = self._workers.num_workers if self._iterable else None
        self._settings = _described(config, collator.oversize, orders, self._known.hint, streamed)
        self._run_of: EpochRun | None = None  # the epoch that was begun last, until another one is chosen
        self._resume: list[Mapping[str, Any]] = []
        """States of a place that was loaded, until it is gone on from."""
        self._cursor = Cursor()
        """Where the last run of an epoch ended, or the loaded place."""
        self._merge_due = False
        self._spare = _Spare()
        learner = LearningBudget.within(collator.budget)
        if learner is not None and self._workers.persistent:
            learner.share_memory()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no iteration: it begins where this loader's next one would, or where it stands in an epoch."""
        own: dict = {"_live": None, "_run_of": None, "_cursor": self._cursor if self._resume else self._reached}
        if self._run_of is not None and not self._resume:
            place = self._state()
            own["_merge_due"] = place["merge_due"]
            if place["running"] is not None:
                epoch = self.epoch
                own |= {"_resume": [place], "_cursor": Cursor.of(place["cursor"]), "_epoch": epoch, "_next": epoch}
        return {**vars(self), **own}

    @property
    def budget(self) -> Budget:
        """What a batch may be."""
        return self._collator.budget

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks; None of an iterable dataset, and where each rank brings its own batches."""
        return self._orders.num_samples

    @property
    def num_changes(self) -> int:
        """How often the size of updates was changed at run time."""
        return 0 if self.sizes is None else len(self.sizes.changes)

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end, the one under way included."""
        stands = self._resume or (self._run_of is not None and not self._begun_anew)
        return self._reached if stands else self._start()

    @property
    def _reached(self) -> Cursor:
        """The same of the place that was loaded, or else of the epoch that was begun last."""
        if self._resume:
            return handed_out(self._cursor, self._resume[0]["running"]["runner"]["update_samples"], self.sizes)
        return self._cursor if self._run_of is None else self._run_of.cursor

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from now on; call it on every rank after the same step. It is part of the state.

        Updates that workers may already prefetch keep their size: with ``num_workers=0`` the next update is the first one
        of the new size; otherwise ``num_workers * prefetch_factor`` updates come in between, also across an epoch's end.

        Returns:
            The number (from 0) of the first update that holds ``samples`` samples.

        Raises:
            ConfigError: the loader was not made with ``samples_per_update``, or is allowed to mix windows
                (``in_order=False``) while ranks must agree on what was prefetched.
        """
        if self.sizes is None:
            raise ConfigError(FREE_RUNNING)
        if not self._workers.in_order and self._rank_and_size()[1] > 1:
            raise ConfigError("set_samples_per_update needs in_order=True: ranks would differ in what they prefetched")
        if self._run_of is not None and not self._begun_anew and not self._resume:
            return self._run_of.feed.set_samples_per_update(samples)  # type: ignore[union-attr]
        return self.sizes.change(self.cursor, samples)

    def _identity(self) -> dict[str, Any]:
        return {**self._settings, "budget": self.budget.fingerprint}

    def _state(self) -> dict[str, Any]:
        """This rank's: a few KB, besides lengths seen (a few bytes a sample)."""
        rank, size = self._rank_and_size()
        if self._resume:
            if len(self._resume) > 1 or self._resume[0]["world_size"] != size:
                raise StateError(
                    "the state was just loaded on another number of ranks: take a step before saving it again"
                )
            return {name: self._resume[0][name] for name in FIELDS}
        begun = None if self._begun_anew else self._run_of
        running = None if begun is None else begun.state()
        if running is not None:
            running["order"] = self._orders.fingerprint(self._epoch)
        ended = begun is not None and running is None
        cursor = self._start() if begun is None else begun.runner.cursor
        return dict(
            world_size=size,
            rank=rank,
            epoch=self.epoch if begun is None else self._epoch + ended,
            running=running,
            changes=[] if self.sizes is None else [list(change) for change in self.sizes.changes],
            cursor=cursor.state(),
            lengths=None if self._known.learned is None else self._known.learned.state(),
            merge_due=ended or (self._merge_due and begun is None),
        )

    def _checked(self, states: list[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], Known]:
        rank, size = self._rank_and_size()
        needed = together(states, rank, size)
        own, learned = needed[0], self._known.learned
        _check_order(own, self._orders)
        if learned is not None:
            learned = learned.restored([state["lengths"] for state in needed])
        return needed, replace(self._known, learned=learned)

    def _restore(self, found: tuple[list[Mapping[str, Any]], Known]) -> None:
        needed, self._known = found
        own = needed[0]
        if self.sizes is not None:
            self.sizes.restore(own["changes"])
        self._epoch = self._next = own["epoch"]
        self._cursor, self._merge_due = Cursor.of(own["cursor"]), own["merge_due"]
        self._run_of = None
        self._resume = [] if own["running"] is None else needed
        self._workers.restart()

    def _start(self) -> Cursor:
        """The beginning of the epoch that comes."""
        if self.sizes is not None:
            return self.sizes.start(self.epoch)
        done = self._reached
        return Cursor(self.epoch, update=done.update, samples_seen=done.samples_seen, current=done.current)

    @property
    def _begun_anew(self) -> bool:
        """Another epoch was chosen than the one that was begun last."""
        return self._live is None and self._next != self._epoch + 1

    def _forget(self) -> None:
        self._cursor = self._reached
        self._run_of, self._resume = None, []

    def _walk(self) -> Walk:
        if self.sizes is None:
            raise ConfigError("the number of updates is known beforehand only with `samples_per_update`")
        return self.sizes

    def _run(self) -> Iterator[Step[Any]]:
        run = self._run_of = self._begin()
        try:
            for take in run:
                yield self._step(take, run)
        finally:
            run.close()

    def _begin(self) -> EpochRun:
        """The epoch that is due; learned lengths and limits are told to all ranks before it."""
        world, epoch = self.world, self._epoch
        cursor = self._cursor if self._resume else self._start()
        states, self._resume = self._resume, []
        if self._merge_due and self._known.learned is not None:
            Exchange(world, epoch).highest([])  # ranks that are elsewhere are told so, before vectors differ
            self._known.learned.merge(world)
        self._merge_due = True
        learner = None if states else LearningBudget.within(self.budget)
        if learner is not None:
            Exchange(world, epoch).highest([])
            learner.apply(world)
        self._workers.seed(self.config.seed, epoch, world.rank, cursor.steps)
        orders = {"order": self._orders.of_epoch(epoch), "batches": self._orders.batches(epoch), "sizes": self.sizes}
        where = {"world": world, "cursor": cursor, "config": self.config, **orders}
        source = Source(
            dataset=self.dataset, iterable=self._iterable, collator=self._collator, workers=self._workers, **where
        )
        shared = self._orders.fingerprint(epoch) if self._orders.num_samples is not None else None
        identity = {**self._identity(), "order": [self._orders.decided_by, shared]}
        if callable(self.config.weigh):
            del identity["weigh"]  # may read what differs by rank, such as a device
        return EpochRun(source, self._known, stats=self.stats, identity=identity, states=states)

    def _step(self, take: Take, run: EpochRun) -> Step[Any]:
        refined = take.batch
        if refined is None:
            batch, indices = self._spare.batch(run.feed.spare)
        else:
            batch, indices = refined.batch, list(refined.indices)
            if self._known.learned is not None:
                self._known.learned.observe(refined.indices, refined.lengths)
            if self.world.size > 1:
                self._spare.note(refined)
        scale = loss_scale(take.weight, self.world.size)
        return Step(batch, indices, take.samples, take.weight, scale, take.ends_update, idle=refined is None)


FIELDS = ("world_size", "rank", "epoch", "running", "changes", "cursor", "lengths", "merge_due")
