"""Main process of the online half: a loader whose batches fit after processing, in equal steps on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch.utils.data import DataLoader

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.checks import Check
from dynagroup.errors import ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.online.align import Uneven
from dynagroup.online.collate import LengthOf, Oversize, RefinementCollator
from dynagroup.online.config import WINDOW_BYTES, OnlineConfig, as_hint, check_budget, check_sources, checked_kwargs
from dynagroup.online.datasets import is_stream
from dynagroup.online.epoch import EpochRun, Known
from dynagroup.online.exchange import Exchange
from dynagroup.online.feeds import Source
from dynagroup.online.learned import LearnedLengths
from dynagroup.online.records import Refined, Take
from dynagroup.online.requests import EpochOrders, UpdateMark
from dynagroup.online.saved import SCHEMA, checked_states
from dynagroup.online.takeover import taken_over
from dynagroup.online.windows import Workers
from dynagroup.update.loader import StepLoader
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.update.sizes import Cursor, UpdateSizes, Walk
from dynagroup.update.step import Step, loss_scale
from dynagroup.update.weigh import Weigh
from dynagroup.world import World

__all__ = ["OnlineDataLoader"]


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


class OnlineDataLoader(StepLoader[Any]):
    """A loader that cuts batches where true lengths are known, after processing, and keeps ranks in step.

    Workers process a window of samples, measure it, and cut it into batches that fit; ranks agree on the number of steps
    with one small all-reduce pair for several steps. Every sample is emitted exactly once an epoch over all ranks.

    How many steps an epoch takes is not known beforehand, so there is no ``len()``. With ``samples_per_update`` every update has
    exactly that many samples, and ``num_updates`` is exact; an update takes one step or more.

    Args:
        dataset: map-style (``__getitems__`` is used where there is one), or iterable, sharded over ranks by itself.
        budget: what fits, e.g. ``TokenBudget(16384)``; a number means so many tokens. A MemoryBudget needs its ``longest``.
        collate_fn: processed samples -> batch; default: torch's ``default_collate``.
        length_of: processed sample -> tokens, or -> {stream: units}; default: length of its ``input_ids``.
        batch_sampler: this rank's batches of indices; each is refined instead of windows that the loader forms.
        sampler: the order of all ranks' indices, the same on every rank.
        shuffle: a permutation seeded by (``seed``, epoch).
        length_hint: a number a sample, or index -> number, in any unit that grows with length: similar samples then
            meet in a window in the first epoch already. Later epochs are planned by the lengths that were seen.
        window: samples sorted and grouped together on one rank.
        samples_per_update: samples of every update over all ranks: an int, or a schedule ``(update, current) -> int``, see
            :mod:`dynagroup.update.schedule`. A rank without samples of an update idles in it.
        drop_last: leave out an epoch's last update where it is smaller than asked.
        accumulation: steps of an update where ``samples_per_update`` is None.
        seed: of the order.
        weigh: loss weight of a batch: "tokens" (labels predicted by a causal model), "samples", or batch -> number.
        uneven: "idle" or "stop".
        window_bytes: a worker hands over about so many bytes of processed samples at a time, and asks for the rest of its
            window after that: what waits in shared memory is bounded, also for images. None: whole windows. The share of
            an update (``samples_per_update``) always comes whole, because ranks agree on all its steps at once.
        world: the ranks; default: all of ``torch.distributed``, once it is initialised.
        **dataloader_kwargs: to torch's ``DataLoader``: ``num_workers``, ``pin_memory``, ``prefetch_factor`` (windows) ...

    Raises:
        ConfigError: an argument is wrong, or two of them exclude each other.
        AlignmentError: ranks differ in data, seed or settings, or a rank failed or is gone; while iterating.

    >>> from dynagroup import OnlineDataLoader, TokenBudget
    >>> data = [{"input_ids": [1] * n} for n in (3, 9, 2, 8)]
    >>> loader = OnlineDataLoader(data, TokenBudget(18), collate_fn=list, weigh="samples")
    >>> sorted(sorted(step.indices) for step in loader)
    [[0, 2], [1, 3]]
    """

    KIND = "OnlineDataLoader"

    def __init__(
        self,
        dataset: Any,
        budget: Budget | int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        length_of: LengthOf | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        sampler: Iterable[int] | None = None,
        shuffle: bool = False,
        length_hint: Any = None,
        window: int = 1024,
        window_bytes: int | None = WINDOW_BYTES,
        samples_per_update: int | BatchSizeSchedule | None = None,
        drop_last: bool = False,
        accumulation: int = 1,
        seed: int = 0,
        weigh: Weigh = "tokens",
        uneven: Uneven = "idle",
        oversize: Oversize = "alone",
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        super().__init__(dataset, world=world)
        config = self.config = OnlineConfig(
            window=window,
            window_bytes=window_bytes,
            samples_per_update=samples_per_update,
            drop_last=drop_last,
            accumulation=accumulation,
            seed=seed,
            shuffle=shuffle,
            weigh=weigh,
            uneven=uneven,
        )
        self._stream = stream = is_stream(dataset)
        kwargs = checked_kwargs(dataloader_kwargs)
        check_sources(
            streams=stream,
            per_update=samples_per_update is not None,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
        )
        self._budget = budget = as_budget(budget)
        check_budget(budget)
        self._collator = RefinementCollator(collate_fn, budget, length_of, weigh=weigh, oversize=oversize)
        self._orders = EpochOrders(dataset, config, stream=stream, sampler=sampler, batch_sampler=batch_sampler)
        self._workers = Workers(dataset, self._collator, kwargs, window=config.window, max_bytes=config.window_bytes)
        self.sizes: UpdateSizes | None = None
        """How many samples each update holds; None without ``samples_per_update``."""
        if samples_per_update is not None:
            self.sizes = UpdateSizes(config.samples_per_update or 1, self._orders.num_ordered, drop_last=drop_last)
        hint = None if length_hint is None else as_hint(length_hint, len(dataset))
        self._known = Known(None if stream or batch_sampler is not None else LearnedLengths(len(dataset)), hint)
        self._settings = _settings(self, hint)
        self._course: EpochRun | None = None
        """The epoch that was begun last, until another one is chosen."""
        self._resume: list[Mapping[str, Any]] | None = None
        self._done, self._within_update = Cursor(), False
        self._merge_due = False
        self._spare = _Spare()
        learner = LearningBudget.within(budget)
        if learner is not None and self._workers.persistent:
            learner.share_memory()

    @classmethod
    def from_dataloader(cls, loader: DataLoader[Any], budget: Budget | int, **options: Any) -> OnlineDataLoader:
        """Take over an existing loader's dataset, order, workers and collate function; it is not changed.

        A ``RandomSampler`` without replacement becomes ``shuffle=True`` with a seed of its own, so that all ranks agree
        and runs resume. ``drop_last`` is not taken over: nothing is dropped.

        Args:
            loader: a plain DataLoader.
            options: any argument of OnlineDataLoader; it goes before the loader's.
        """
        return cls(**{**taken_over(loader), **options, "budget": budget})

    def __len__(self) -> int:
        raise TypeError(
            "an OnlineDataLoader has no len(): how many steps an epoch takes is known at its end; with `samples_per_update`, "
            "`num_updates` is exact"
        )

    @property
    def budget(self) -> Budget:
        """What a batch may be."""
        return self._budget

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks; None for a stream, and where each rank brings its own batches."""
        return self._orders.num_samples

    @property
    def num_changes(self) -> int:
        """How often the size of updates was changed at run time."""
        return 0 if self.sizes is None else len(self.sizes.changes)

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end, the one under way included."""
        if self.sizes is None:
            return self._done
        if self._resume is not None:
            return UpdateMark(*self._resume[0]["progress"]["feed"]["next"]).passed.cursor(self.sizes)
        return self.sizes.start(self.epoch) if self._course is None or self._begun_anew else self._course.cursor

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from now on; call it on every rank after the same step. It is part of the state.

        Updates that workers may already prefetch keep their size: with ``num_workers=0`` the next update is the first one
        of the new size; otherwise ``num_workers * prefetch_factor`` updates come in between. An epoch's last ones only
        delay it to the next epoch's first.

        Returns:
            The number (from 0) of the first update that holds ``samples`` samples.

        Raises:
            ConfigError: the loader was not made with ``samples_per_update``, or is allowed to mix windows
                (``in_order=False``) while ranks must agree on what was prefetched.
        """
        if self.sizes is None:
            raise ConfigError("set_samples_per_update needs a loader with samples_per_update: this one is free-running")
        if not self._workers.in_order and self._rank_and_size()[1] > 1:
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
            progress = {**progress, "order": self._orders.fingerprint(self._epoch)}
        ended = begun is not None and progress is None
        cursor = asdict(self._done)
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
        num_ordered = None if self._orders.num_samples is None else self._orders.num_ordered()
        own, needed = checked_states(states, rank=rank, size=size, num_ordered=num_ordered)
        progress, known = own["progress"], self._known.learned
        if progress is not None and progress["order"] != self._orders.fingerprint(own["epoch"]):
            raise StateError(
                f"`{self._orders.decided_by}` gives other indices in epoch {own['epoch']} than when the state was taken: seed "
                "its generator alike, or give it a set_epoch"
            )
        if known is not None and own["lengths"] is not None:
            known = known.restored(own["lengths"], [s["lengths"] for s in needed[1:]])
        return own, needed, Known(known, self._known.hint)

    def _restore(self, found: tuple[Mapping[str, Any], list[Mapping[str, Any]], Known]) -> None:
        own, needed, self._known = found
        if self.sizes is not None:
            self.sizes.restore(own["changes"])
        self._epoch = self._next = own["epoch"]
        self._done, self._merge_due = Cursor(**own["cursor"]), own["merge_due"]
        self._course = None
        self._resume = None if own["progress"] is None else needed
        self._workers.restart()

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
        self._workers.seed(
            self.config.seed, epoch, world.rank, resume[0]["progress"]["runner"]["steps"] if resume else 0
        )
        if resume is None:
            self._done = replace(self._done, epoch=epoch, samples_used=0)
        source = Source(
            dataset=self.dataset,
            world=world,
            epoch=epoch,
            budget=self.budget,
            config=self.config,
            collator=self._collator,
            stats=self.stats,
            workers=self._workers,
            order=self._orders.of_epoch(epoch),
            sizes=self.sizes,
            batches=self._orders.batches(epoch),
        )
        shared = self._orders.fingerprint(epoch) if self._orders.num_samples is not None else None
        identity = {**self._identity(), "order": [self._orders.decided_by, shared]}
        if callable(self.config.weigh):
            del identity["weigh"]  # may read what differs by rank, such as a device
        course = EpochRun(source, self._known, stream=self._stream, identity=identity, resume=resume)
        self._within_update = resume is not None and resume[0]["progress"]["runner"]["offset"] > 0
        return course

    def _step(self, take: Take, course: EpochRun) -> Step[Any]:
        if not self._within_update:
            samples = round(take.samples.total)
            used, seen = self._done.samples_used + samples, self._done.samples_seen + samples
            self._done = replace(
                self._done, update=self._done.update + 1, samples_used=used, samples_seen=seen, current=samples
            )
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
        return Step(
            batch=batch,
            indices=indices,
            samples=take.samples,
            weight=take.weight,
            loss_scale=loss_scale(take.weight, self.world.size),
            ends_update=take.ends_update,
            idle=take.queued is None,
        )

    def _identity(self) -> dict[str, Any]:
        return {**self._settings, "budget": self.budget.fingerprint}


def _settings(loader: OnlineDataLoader, hint: Any) -> dict[str, Any]:
    """What saved states are compared by, besides the budget, which may learn."""
    config, stream = loader.config, loader._stream
    per_update = config.samples_per_update
    return {
        "num_samples": None if stream else len(loader.dataset),
        "window": config.window,
        "window_bytes": config.window_bytes,
        "samples_per_update": described(per_update) if callable(per_update) else per_update,
        "drop_last": config.drop_last,
        "accumulation": config.accumulation,
        "seed": config.seed,
        "shuffle": config.shuffle,
        "order": loader._orders.decided_by,
        "length_hint": None if hint is None else described(hint),
        "uneven": config.uneven,
        "oversize": loader._collator.oversize,
        "weigh": described(config.weigh),
        "num_workers": loader._workers.num_workers if stream else None,
    }
