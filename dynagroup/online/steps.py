"""How an online loader runs: epochs begun, steps weighed, places saved. Its door, with all arguments, is in ``loader``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.online.config import OnlineConfig, as_hint, check_budget, check_sources, worker_kwargs
from dynagroup.online.datasets import is_stream
from dynagroup.online.epoch import EpochRun, Known
from dynagroup.online.exchange import Exchange
from dynagroup.online.feeds.base import Source
from dynagroup.online.learned import LearnedLengths
from dynagroup.online.records import Refined, Take
from dynagroup.online.refine import RefinementCollator
from dynagroup.online.requests import EpochOrders, UpdateMark
from dynagroup.online.saving import SCHEMA, checked_states
from dynagroup.online.workers import Workers
from dynagroup.plan.cursor import Cursor
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import loss_scale
from dynagroup.update.notice import PaddingNotice
from dynagroup.update.schedule import UpdateSizes, Walk
from dynagroup.update.stats import LoaderStats
from dynagroup.update.step import Step
from dynagroup.validation import Check

__all__ = ["OnlineSteps", "Parts"]


class _Spare:
    """What a rank without samples runs: a copy of the smallest batch that it had, or one sample of the dataset."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What an online loader is made of, checked."""

    dataset: Any
    stream: bool
    budget: Budget
    config: OnlineConfig
    collator: RefinementCollator
    orders: EpochOrders
    workers: Workers
    known: Known

    @classmethod
    def of(
        cls,
        dataset: Any,
        config: OnlineConfig,
        collator: RefinementCollator,
        dataloader_kwargs: Mapping[str, Any],
        *,
        sampler: Iterable[int] | None,
        batch_sampler: Iterable[Sequence[int]] | None,
        length_hint: Any,
    ) -> Parts:
        """What these make together.

        Raises:
            ConfigError: two of them exclude each other.
        """
        stream, kwargs = is_stream(dataset), worker_kwargs(dataloader_kwargs)
        check_sources(
            streams=stream,
            per_update=config.samples_per_update is not None,
            shuffle=config.shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
        )
        check_budget(collator.budget)
        learned = None if stream or batch_sampler is not None else LearnedLengths(len(dataset))
        return cls(
            dataset=dataset,
            stream=stream,
            budget=collator.budget,
            config=config,
            collator=collator,
            orders=EpochOrders(dataset, config, stream=stream, sampler=sampler, batch_sampler=batch_sampler),
            workers=Workers(dataset, collator, kwargs, window=config.window, max_bytes=config.window_bytes),
            known=Known(learned, None if length_hint is None else as_hint(length_hint, len(dataset)), collator.budget),
        )

    def sizes(self) -> UpdateSizes | None:
        """How many samples each update holds; None without ``samples_per_update``."""
        per_update = self.config.samples_per_update
        if per_update is None:
            return None
        return UpdateSizes(per_update, self.orders.num_ordered, drop_last=self.config.drop_last)

    def source(self, world: World, epoch: int, sizes: UpdateSizes | None, stats: LoaderStats) -> Source:
        """What an epoch's feed draws on."""
        return Source(
            dataset=self.dataset,
            world=world,
            epoch=epoch,
            budget=self.budget,
            config=self.config,
            collator=self.collator,
            stats=stats,
            workers=self.workers,
            order=self.orders.of_epoch(epoch),
            sizes=sizes,
            batches=self.orders.batches(epoch),
        )

    def settings(self) -> dict[str, Any]:
        """What saved states are compared by, besides the budget, which may learn."""
        config, hint, per_update = self.config, self.known.hint, self.config.samples_per_update
        return {
            "num_samples": None if self.stream else len(self.dataset),
            "window": config.window,
            "window_bytes": config.window_bytes,
            "work": described(config.work),
            "objective": config.objective,
            "samples_per_update": described(per_update) if callable(per_update) else per_update,
            "drop_last": config.drop_last,
            "accumulation": config.accumulation,
            "seed": config.seed,
            "shuffle": config.shuffle,
            "order": self.orders.decided_by,
            "length_hint": None if hint is None else described(hint),
            "uneven": config.uneven,
            "oversize": self.collator.oversize,
            "weigh": described(config.weigh),
            "num_workers": self.workers.num_workers if self.stream else None,
        }


class OnlineSteps(StepLoader[Any]):
    """The steps of an online loader, epoch after epoch: how it runs, and what it saves.

    Args:
        parts: see :class:`Parts`; what is learned of lengths is replaced when a state is loaded.
    """

    KIND = "OnlineDataLoader"

    def __init__(self, parts: Parts, *, world: World | None) -> None:
        super().__init__(parts.dataset, world=world)
        self._parts, self.config = parts, parts.config
        self.sizes = parts.sizes()
        """How many samples each update holds; None without ``samples_per_update``."""
        self._known = parts.known
        self._settings = parts.settings()
        self._course: EpochRun | None = None
        """The epoch that was begun last, until another one is chosen."""
        self._resume: list[Mapping[str, Any]] | None = None
        self._done, self._within_update = Cursor(), False
        self._merge_due = False
        self._spare = _Spare()
        self._notice = PaddingNotice(per_update=self.sizes is not None, window=self.config.window)
        learner = LearningBudget.within(parts.budget)
        if learner is not None and parts.workers.persistent:
            learner.share_memory()

    @property
    def budget(self) -> Budget:
        """What a batch may be."""
        return self._parts.budget

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks; None for a stream, and where each rank brings its own batches."""
        return self._parts.orders.num_samples

    @property
    def num_changes(self) -> int:
        """How often the size of updates was changed at run time."""
        return 0 if self.sizes is None else len(self.sizes.changes)

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end, the one under way included."""
        if self.sizes is None:
            return self._books
        if self._resume is not None:
            return UpdateMark(*self._resume[0]["progress"]["feed"]["next"]).passed.cursor(self.sizes)
        return self.sizes.start(self.epoch) if self._course is None or self._begun_anew else self._course.cursor

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
            raise ConfigError("set_samples_per_update needs a loader with samples_per_update: this one is free-running")
        if not self._parts.workers.in_order and self._rank_and_size()[1] > 1:
            raise ConfigError("set_samples_per_update needs in_order=True: ranks would differ in what they prefetched")
        if self._course is not None and not self._begun_anew and self._resume is None:
            return self._course.set_samples_per_update(samples)
        return self.sizes.change(self.cursor, samples)

    def skip_to(self, epoch: int, samples_used: int, update: int) -> None:
        """Refuses: only its own state says which samples an online loader has used.

        Raises:
            StateError: always.
        """
        raise StateError(
            "an OnlineDataLoader cannot skip to a place that another loader has saved: load a state of its own, begin the "
            "epoch anew (restart_epoch), or go on with known lengths (PlannedDataLoader)"
        )

    def _schema(self) -> Mapping[str, Check]:
        return SCHEMA

    def _state(self) -> dict[str, Any]:
        """This rank's: a few KB, besides lengths seen (a few bytes a sample)."""
        rank, size = self._rank_and_size()
        if self._resume is not None:
            if len(self._resume) > 1 or self._resume[0]["world_size"] != size:
                raise StateError(
                    "the state was just loaded on another number of ranks: take a step before saving it again"
                )
            return {name: self._resume[0][name] for name in SCHEMA}
        begun = None if self._begun_anew else self._course
        progress = None if begun is None else begun.state()
        if progress is not None:
            progress = {**progress, "order": self._parts.orders.fingerprint(self._epoch)}
        ended = begun is not None and progress is None
        cursor = asdict(self._books)
        return dict(
            world_size=size,
            rank=rank,
            epoch=self.epoch if begun is None else self._epoch + ended,
            progress=progress,
            changes=[] if self.sizes is None else [list(change) for change in self.sizes.changes],
            cursor={name: cursor[name] for name in ("epoch", "update", "samples_used", "samples_seen", "current")},
            lengths=None if self._known.learned is None else self._known.learned.state(),
            merge_due=ended or (self._merge_due and begun is None),
        )

    def _checked(self, states: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], Known]:
        rank, size = self._rank_and_size()
        own, needed = checked_states(
            states, rank=rank, size=size, num_in=self._parts.orders.num_in, accumulation=self.config.accumulation
        )
        progress, known = own["progress"], self._known.learned
        if progress is not None and progress["order"] != self._parts.orders.fingerprint(own["epoch"]):
            raise StateError(
                f"`{self._parts.orders.decided_by}` gives other indices in epoch {own['epoch']} than when the state was taken: "
                "seed its generator alike, or give it a set_epoch"
            )
        if known is not None and own["lengths"] is not None:
            known = known.restored(own["lengths"], [s["lengths"] for s in needed[1:]])
        return own, needed, Known(known, self._known.hint, self._known.budget)

    def _restore(self, found: tuple[Mapping[str, Any], list[Mapping[str, Any]], Known]) -> None:
        own, needed, self._known = found
        if self.sizes is not None:
            self.sizes.restore(own["changes"])
        self._epoch = self._next = own["epoch"]
        self._done, self._merge_due = Cursor(**own["cursor"]), own["merge_due"]
        self._course = None
        self._resume = None if own["progress"] is None else needed
        self._parts.workers.restart()

    @property
    def _books(self) -> Cursor:
        """Counts of what was handed out; of an epoch that begins anew nothing is used."""
        begins = self._resume is None and (self._course is None or self._begun_anew)
        return replace(self._done, samples_used=0) if begins and self._done.epoch == self.epoch else self._done

    @property
    def _begun_anew(self) -> bool:
        """Another epoch was chosen than the one that was begun last."""
        return self._live is None and self._next != self._epoch + 1

    def _forget(self) -> None:
        self._course = self._resume = None

    def _walk(self) -> Walk:
        if self.sizes is None:
            raise ConfigError("the number of updates is known beforehand only with `samples_per_update`")
        return self.sizes

    def _run(self) -> Iterator[Step[Any]]:
        course = self._course = self._begin()
        try:
            for take in course:
                yield self._step(take, course)
                if take.ends_update:
                    self._notice.look(self.stats)
            course.finish()
        finally:
            course.close()

    def _begin(self) -> EpochRun:
        """The epoch that is due; learned lengths and limits are told to all ranks before it."""
        world, epoch = self.world, self._epoch
        resume, self._resume = self._resume, None
        if self._merge_due and self._known.learned is not None:
            Exchange(world, epoch).highest([])  # ranks that are elsewhere are told so, before vectors differ
            self._known.learned.merge(world)
        self._merge_due = True
        learner = LearningBudget.within(self.budget)
        if learner is not None and resume is None:
            Exchange(world, epoch).highest([])
            learner.apply(world)
        self._parts.workers.seed(
            self.config.seed, epoch, world.rank, resume[0]["progress"]["runner"]["steps"] if resume else 0
        )
        if resume is None:
            self._done = replace(self._done, epoch=epoch, samples_used=0)
        source = self._parts.source(world, epoch, self.sizes, self.stats)
        shared = self._parts.orders.fingerprint(epoch) if self._parts.orders.num_samples is not None else None
        identity = {**self._identity(), "order": [self._parts.orders.decided_by, shared]}
        if callable(self.config.weigh):
            del identity["weigh"]  # may read what differs by rank, such as a device
        course = EpochRun(source, self._known, stream=self._parts.stream, identity=identity, resume=resume)
        self._within_update = resume is not None and resume[0]["progress"]["runner"]["offset"] > 0
        return course

    def _step(self, take: Take, course: EpochRun) -> Step[Any]:
        if not self._within_update:
            self._done = _behind(self._done, round(take.samples.total))
        self._within_update = not take.ends_update
        if take.queued is None:
            batch, indices = self._spare.batch(course.spare)
        else:
            refined = take.queued.refined
            batch, indices = refined.batch, list(refined.indices)
            if self._known.learned is not None:
                self._known.learned.observe(refined.indices, refined.lengths)
            if self.world.size > 1:
                self._spare.note(refined)
        return _as_step(take, batch, indices, self.world.size)

    def _identity(self) -> dict[str, Any]:
        return {**self._settings, "budget": self.budget.fingerprint}


def _behind(cursor: Cursor, samples: int) -> Cursor:
    """Where a run stands behind its next update, of so many samples."""
    used, seen = cursor.samples_used + samples, cursor.samples_seen + samples
    return replace(cursor, update=cursor.update + 1, samples_used=used, samples_seen=seen, current=samples)


def _as_step(take: Take, batch: Any, indices: list[int], world_size: int) -> Step[Any]:
    return Step(
        batch=batch,
        indices=indices,
        samples=take.samples,
        weight=take.weight,
        loss_scale=loss_scale(take.weight, world_size),
        ends_update=take.ends_update,
        idle=take.queued is None,
    )
