"""Main process of the online half: a loader whose batches fit after processing, in equal steps on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError, StateError
from dynagroup.online.align import Uneven
from dynagroup.online.collate import LengthOf, Oversize, Refined, RefinementCollator
from dynagroup.online.config import Facts, OnlineConfig, as_hint, check_budget, check_sources, checked_kwargs
from dynagroup.online.engine import Queued, Take
from dynagroup.online.epoch import EpochRun
from dynagroup.online.exchange import Exchange, fingerprint
from dynagroup.online.learned import LearnedLengths
from dynagroup.online.requests import UpdateMark
from dynagroup.online.state import STATE_VERSION, check_state, checked_set
from dynagroup.online.windows import IndexedDataset, RequestQueue, StreamDataset
from dynagroup.plan.order import EpochOrder
from dynagroup.plan.sampler import OrderSource
from dynagroup.update.schedule import BatchSizeSchedule, described
from dynagroup.update.sizes import Cursor, UpdateSizes
from dynagroup.update.stats import LoaderStats
from dynagroup.update.step import Step, loss_scale
from dynagroup.update.weigh import Weigh
from dynagroup.world import World, current_world, rank_and_size

__all__ = ["OnlineDataLoader"]

KIND = "OnlineDataLoader"


class OnlineDataLoader:
    """A loader that cuts batches where true lengths are known, after processing, and keeps ranks in step.

    Workers process a window of samples, measure it, and cut it into batches that fit; ranks agree on the number of steps
    with one small all-reduce pair for several steps. Every sample is emitted exactly once an epoch over all ranks.

    Without ``samples_per_update`` the number of steps is not known beforehand and there is no ``len()``. With it every
    update has exactly that many samples, and ``len()`` is the number of updates; an update takes one step or more.

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
        self.config = OnlineConfig(
            window=window,
            samples_per_update=samples_per_update,
            drop_last=drop_last,
            accumulation=accumulation,
            seed=seed,
            shuffle=shuffle,
            weigh=weigh,
            uneven=uneven,
        )
        self.dataset, self.budget = dataset, (budget := as_budget(budget))
        self.batch_sampler, self.sampler = batch_sampler, sampler
        self.stats = LoaderStats()
        self._collator = RefinementCollator(collate_fn, budget, length_of, weigh=weigh, oversize=oversize)
        self._world = world
        self._streams = is_stream(dataset)
        self._kwargs = checked_kwargs(dataloader_kwargs, self._streams)
        check_sources(
            streams=self._streams,
            per_update=samples_per_update is not None,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
        )
        check_budget(budget)
        self.sizes: UpdateSizes | None = None
        """How many samples each update holds; None without ``samples_per_update``."""
        if samples_per_update is not None:
            self.sizes = UpdateSizes(samples_per_update, self._num_ordered, drop_last=drop_last)
        self._hint = None if length_hint is None else as_hint(length_hint, len(dataset))
        self._learned = None if self._streams or batch_sampler is not None else LearnedLengths(len(dataset))
        self._order_source = None if sampler is None else OrderSource(sampler, len(dataset))
        self._epoch, self._advance = 0, 0
        self._run: EpochRun | None = None
        self._resume: list[Mapping[str, Any]] | None = None
        self._queue = RequestQueue()
        self._loader: DataLoader[Any] | None = None
        # Its own, unless there is one: a DataLoader would draw its workers' seed from torch's, and shift that on resuming.
        self._generator = None
        if self._kwargs.get("generator") is None:
            self._generator = self._kwargs["generator"] = torch.Generator()
        self._smallest: Refined | None = None
        self._merge_due = False
        learner = LearningBudget.within(budget)
        if learner is not None and self._kwargs.get("persistent_workers"):
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
        from dynagroup.online.takeover import taken_over

        return cls(**{**taken_over(loader), **options, "budget": budget})

    @property
    def num_updates(self) -> int:
        """Updates of the epoch that is running or was last: exact, unless ``set_samples_per_update`` is called before it ends.

        Raises:
            ConfigError: without ``samples_per_update`` it is not known beforehand.
        """
        if self.sizes is None:
            raise ConfigError("the number of updates is known beforehand only with `samples_per_update`")
        return self.sizes.num_updates(self._epoch)

    def __len__(self) -> int:
        if self.sizes is None:
            raise TypeError(f"this {KIND} has no len(): the number of steps is known only with `samples_per_update`")
        return self.num_updates

    @property
    def epoch(self) -> int:
        """The epoch that is running, or comes next."""
        return self._epoch + self._advance

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the same number again changes nothing, a resumed place included."""
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or epoch < 0:
            raise ConfigError(f"`epoch` must be an int of at least 0, but is {epoch!r}")
        if epoch != self._epoch:
            self._resume = None
        self._epoch, self._advance = int(epoch), 0

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end, the one under way included. Needs ``samples_per_update``."""
        if self.sizes is None:
            raise ConfigError("updates are counted only with `samples_per_update`")
        if self._resume is not None:
            return UpdateMark(*self._resume[0]["progress"]["next"]).passed.cursor(self.sizes)
        if self._run is not None and self._advance:
            return self._run.cursor
        return self.sizes.start(self.epoch)

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
        if self._kwargs.get("in_order") is False and self._rank_and_size()[1] > 1:
            raise ConfigError("set_samples_per_update needs in_order=True: ranks would differ in what they prefetched")
        if self._run is not None and self._advance and self._resume is None:
            return self._run.set_samples_per_update(samples)
        return self.sizes.change(self.cursor, samples)

    def __iter__(self) -> Iterator[Step[Any]]:
        self._epoch, self._advance = self._epoch + self._advance, 1
        run = self._run = self._start()
        try:
            for take in run:
                yield self._step(take)
            run.finish()
        finally:
            run.close()

    def updates(self) -> Iterator[list[Step[Any]]]:
        """The same steps, an update at a time."""
        steps: list[Step[Any]] = []
        for step in self:
            steps.append(step)
            if step.ends_update:
                yield steps
                steps = []

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: JSON-able, a few KB, besides lengths seen (a few bytes a sample).

        Steps count as used once the loop has received them. Save every rank's state: they differ.
        """
        rank, size = self._rank_and_size()
        state = {"version": STATE_VERSION, "kind": KIND, "identity": self._identity(), "world_size": size, "rank": rank}
        if self._resume is not None:
            if len(self._resume) > 1 or self._resume[0]["world_size"] != size:
                raise StateError(
                    "the state was just loaded on another number of ranks: take a step before saving it again"
                )
            return dict(self._resume[0])
        running = self._run is not None and self._advance
        progress = self._run.state() if self._run is not None and running else None
        epoch = self._epoch + (1 if running and progress is None else 0)
        changes = [] if self.sizes is None else [list(change) for change in self.sizes.changes]
        learned = None if self._learned is None else self._learned.state()
        merge_due = bool(running and progress is None) or (self._merge_due and not running)
        own = {"epoch": epoch, "progress": progress, "changes": changes, "lengths": learned}
        return {**state, **own, "merge_due": merge_due, "learned": LearningBudget.saved(self.budget)}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where states were taken: exactly what remained of the epoch comes next.

        Args:
            state_dict: this rank's state on as many ranks as before; or a list of all ranks' states, on any number.

        Raises:
            StateError: damaged, of other data or settings, taken after different steps, or ranks are missing.
        """
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if not states:
            raise StateError("no state was given")
        rank, size = self._rank_and_size()
        known = states[rank] if len(states) == size else states[0]
        LearningBudget.restore(self.budget, known.get("learned"))
        for state in states:
            check_state(state, self._identity(), KIND)
        if len(states) > 1:
            states = checked_set(states)
        if len(states) != states[0]["world_size"] and (len(states) > 1 or states[0]["world_size"] != size):
            raise StateError(
                f"the state was taken on {states[0]['world_size']} ranks, this run has {size}: "
                "give load_state_dict the list of all ranks' states"
            )
        own = states[rank] if len(states) == size else states[0]
        if self._learned is not None and own["lengths"] is not None:
            self._learned.load(own["lengths"], [s["lengths"] for s in states] if len(states) != size else ())
        if self.sizes is not None:
            self.sizes.restore(own["changes"])
        self._epoch, self._advance = own["epoch"], 0
        self._run, self._loader, self._merge_due = None, None, own["merge_due"]
        self._resume = None if own["progress"] is None else ([own] if own["world_size"] == size else states)

    def _start(self) -> EpochRun:
        world = self._world = self._world or current_world()
        resume, self._resume = self._resume, None
        if self._merge_due and self._learned is not None:
            Exchange(world, self._epoch).highest([])  # ranks that are elsewhere are told so, before vectors differ
            self._learned.merge(world)
        self._merge_due = True
        learner = LearningBudget.within(self.budget)
        if learner is not None and resume is None:
            Exchange(world, self._epoch).highest([])
            learner.apply(world)
        self._seed_workers(world.rank, resume)
        indices = self._indices()
        facts = Facts(
            world=world,
            epoch=self._epoch,
            indices=None if self._streams else indices,
            budget=self.budget,
            config=self.config,
            collator=self._collator,
            stats=self.stats,
            identity={**self._identity(), "order": self._order_print(indices)},
            num_workers=self._kwargs.get("num_workers", 0),
            prefetch_factor=self._kwargs.get("prefetch_factor") or 1,
        )
        return EpochRun(
            facts,
            open_stream=self._open_stream,
            open_map=self._open_map,
            queue=self._queue,
            sizes=self.sizes,
            batch_sampler=self.batch_sampler,
            learned=self._learned,
            hint=self._hint,
            resume=resume,
        )

    def _seed_workers(self, rank: int, resume: Sequence[Mapping[str, Any]] | None) -> None:
        if self._generator is not None:
            place = resume[0]["progress"]["steps"] if resume else 0
            key = np.random.SeedSequence((self.config.seed, self._epoch, rank, place))
            self._generator.manual_seed(int(key.generate_state(1)[0]))

    def _open_map(self) -> Iterator[Any]:
        if self._loader is None or not self._kwargs.get("persistent_workers"):
            data = IndexedDataset(self.dataset)
            self._loader = DataLoader(data, batch_sampler=self._queue, collate_fn=self._collator, **self._kwargs)  # type: ignore[arg-type]
        return iter(self._loader)

    def _open_stream(self, resume: Mapping[str, Any] | None) -> Iterator[Any]:
        if self._loader is None or not self._kwargs.get("persistent_workers") or resume is not None:
            rank, size = self._rank_and_size()
            data = StreamDataset(self.dataset, self.config.window, rank=rank, size=size)
            self._loader = DataLoader(data, batch_size=None, collate_fn=self._collator, **self._kwargs)
        assert isinstance(self._loader.dataset, StreamDataset)
        self._loader.dataset.start(self._epoch, resume)
        return iter(self._loader)

    def _step(self, take: Take) -> Step[Any]:
        assert self._world is not None
        assert self._run is not None
        if take.queued is None:
            spare = self._idle_batch()
            batch, indices = copy.deepcopy(spare.batch), list(spare.indices)
        else:
            self._note(take.queued)
            batch, indices = take.queued.refined.batch, list(take.queued.refined.indices)
        return Step(
            batch=batch,
            indices=indices,
            samples=take.samples,
            weight=take.weight,
            loss_scale=loss_scale(take.weight, self._world.size),
            ends_update=take.ends_update,
            idle=take.queued is None,
        )

    def _note(self, queued: Queued) -> None:
        refined = queued.refined
        if self._learned is not None:
            self._learned.observe(refined.indices, refined.lengths)
        smallest = self._smallest
        better = smallest is None or (refined.weight > 0, -refined.padded) > (smallest.weight > 0, -smallest.padded)
        if better and self._world is not None and self._world.size > 1:
            try:
                self._smallest = replace(refined, batch=copy.deepcopy(refined.batch), samples=None)
            except Exception:  # noqa: BLE001 - a batch that cannot be copied is shared
                self._smallest = replace(refined, samples=None)

    def _idle_batch(self) -> Refined:
        """What a rank without samples runs; one sample of the dataset where it never had any."""
        if self._smallest is None:
            assert self._run is not None
            self._smallest = self._run.any_batch(self.dataset, self._collator)
        return self._smallest

    def _indices(self) -> np.ndarray | EpochOrder | None:
        if self._streams or self.batch_sampler is not None:
            return None
        if self._order_source is not None:
            return self._order_source.of_epoch(self._epoch)
        if self.config.shuffle:
            return EpochOrder(len(self.dataset), seed=self.config.seed, epoch=self._epoch)
        return np.arange(len(self.dataset))

    def _num_ordered(self) -> int:
        return len(self.dataset) if self._order_source is None else len(self._order_source)

    def _order_print(self, indices: np.ndarray | EpochOrder | None) -> int:
        return fingerprint(indices.tolist()) if isinstance(indices, np.ndarray) and self._order_source else 0

    def _identity(self) -> dict[str, Any]:
        config = self.config
        per_update = config.samples_per_update
        return {
            "num_samples": None if self._streams else len(self.dataset),
            "budget": self.budget.fingerprint,
            "window": config.window,
            "samples_per_update": described(per_update) if callable(per_update) else per_update,
            "drop_last": config.drop_last,
            "accumulation": config.accumulation,
            "seed": config.seed,
            "shuffle": config.shuffle,
            "uneven": config.uneven,
            "weigh": config.weigh if isinstance(config.weigh, str) else "function",
            "num_workers": self._kwargs.get("num_workers", 0) if self._streams else None,
        }

    def _rank_and_size(self) -> tuple[int, int]:
        return (self._world.rank, self._world.size) if self._world is not None else rank_and_size()


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable-style."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise ConfigError(f"`dataset` must have __getitem__ and __len__, or __iter__, but is a {type(dataset).__name__}")
