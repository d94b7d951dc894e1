"""The loader for known lengths: plans all updates, loads batches with a ``DataLoader``, and weighs them over ranks."""

import math
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dynagroup.budget.base import Budget
from dynagroup.distributed import World, differing
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.plan.batches import Batches, RoundBatch, shapes_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.plan.inputs import OneKind, Oversize, PlanConfig
from dynagroup.plan.order import OrderSource
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Planner
from dynagroup.shapes import Streams
from dynagroup.state import agreed
from dynagroup.update.blocks import reduced
from dynagroup.update.filling import FillingCollator, Pad
from dynagroup.update.loader import (
    ENDED_EARLY,
    Inner,
    State,
    StepLoader,
    check_options,
    check_updates,
    seed_of,
)
from dynagroup.update.loss_weight import Share, Weigh, WeightOf, loss_scale, weigher
from dynagroup.update.schedule import LARGEST_UPDATE, BatchSizeSchedule
from dynagroup.update.step import B, LoaderStats, Step, unplanned
from dynagroup.update.updates import (
    FreeUpdates,
    PlannedStep,
    PlannedUpdate,
    PreservedUpdates,
    Updates,
    compare_ranks,
)
from dynagroup.validation import (
    called,
    check_collating,
    check_int,
    fetch,
    sendable,
    set_epoch,
    shorten,
    warn_user,
)


class PlannedDataLoader(StepLoader[B]):
    """Plans batches that fit, of samples of similar length, from known lengths; yields them with exact loss weights.

    ``len(loader)`` is the number of steps in an epoch, ``loader.num_updates`` the number of updates.
    ``loader.plan.report()`` describes the planned epoch, ``print(loader.stats)`` what was run.

    Args:
        dataset: any object with ``__getitem__`` and ``__len__``. If it has ``set_epoch``, workers tell it the epoch.
        lengths: int (N,), tokens of each sample; or a dict by stream; or the path of a .npy or .npz file.
        budget: limit of a batch; an int means that many tokens.
        samples_per_update: samples of each update over all ranks: int, or a schedule ``(update, current) -> int``.
            None: an update is ``accumulation`` steps, and batches are as large as the budget allows.
        grouping: int: the samples of this many updates are sorted by length and dealt anew into updates of the same
            size, each with chunks of short, middle and long samples. A batch then needs little padding, and an update
            is like a random one (:mod:`dynagroup.plan.strata`). None: updates as drawn.
        strata: int, chunks of each update; 1 pads as little, but updates of one length lose quality. None: 4 or more.
        kinds: label of each sample (N,), hashable: all batches of a step, on all ranks, have samples of one kind,
            ``step.kind``. With ``one_kind="batch"`` only each batch has one kind.
        accumulation: int, steps per update; only without ``samples_per_update``.
        shuffle: True with ``samples_per_update``: samples are drawn in random order, seeded by (seed, epoch); without:
            batches are new in each epoch. False: dataset order; without ``samples_per_update`` longest batches first.
        sampler: sampler of dataset indices, the same on every rank; only with ``samples_per_update``.
        seed: int, seed of the order and of random numbers in workers.
        weigh: weight of a batch: "tokens" (labels that a causal model predicts), "labels" (all), "samples", or a function.
        drop_last: True leaves out an epoch's last update if it is too small; only with ``samples_per_update``.
        shapes: int, largest number of batch shapes (samples, tokens) that a compiled model sees: batches are padded to
            a shape of a :class:`~dynagroup.ShapeLadder`, also with rows of weight 0, which means over rows must leave out.
        pad: dict from field to padding value, for fields that transformers does not have; see :class:`FillingCollator`.
        identity: a text, or another value for JSON, that a saved state must have in common with the run that loads it,
            for example the version of your code and data. Settings and lengths are compared without it.
        world: ranks that share the data; None: all of ``torch.distributed``.
        window: int, samples planned together, as in :class:`~dynagroup.LengthAwareBatchSampler`; None: it chooses.
        hardest_first: int, batches that come first in an epoch because they need the most memory.
        round_batch: function from a number of samples to a smaller one, to which batches are cut; None: any number.
        work: predicted time of a batch, e.g. ``Work.of(model)``; None: that of a small decoder on this device.
        oversize: a sample that does not fit even alone: "alone" (a batch of its own, one warning), "error" or "drop".
        one_kind: "batch": only each batch has one kind; batches of one step may have different kinds.
        collate_fn: function from a list of samples to a batch. None: torch's ``default_collate``.
        dataloader_kwargs: for torch's ``DataLoader``: ``num_workers``, ``pin_memory``, ``prefetch_factor``, ...

    Raises ConfigError if an argument is wrong; BudgetError if a sample does not fit and ``oversize="error"``; during
    iteration AlignmentError if ranks have different data, seeds or settings, or one of them failed.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> loader = PlannedDataLoader(range(6), [9, 2, 8, 3, 9, 3], TokenBudget(18), samples_per_update=3, weigh="samples")
    >>> [sum(step.samples.local for step in update) for update in loader.updates()]
    [3, 3]
    >>> len(loader), loader.num_updates
    (4, 2)
    """

    KIND = "PlannedDataLoader"

    def __init__(
        self,
        dataset: Any,
        lengths: Any,
        budget: Budget | int,
        *,
        samples_per_update: int | BatchSizeSchedule | None = None,
        grouping: int | None = None,
        strata: int | None = None,
        kinds: Iterable[Hashable] | None = None,
        accumulation: int = 1,
        shuffle: bool = True,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        weigh: Weigh = "tokens",
        drop_last: bool = False,
        shapes: int | None = None,
        pad: Pad | None = None,
        window: int | None = None,
        hardest_first: int = 1,
        round_batch: RoundBatch | None = None,
        work: Work | None = None,
        oversize: Oversize = "alone",
        one_kind: OneKind = "step",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        identity: object = None,
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        check_options(PlannedDataLoader, dataloader_kwargs)
        super().__init__(dataset, world=world, identity=identity)
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ConfigError(
                "`dataset` must have __getitem__ and __len__, but is a "
                f"{type(dataset).__name__}; for a stream use OnlineDataLoader"
            )
        self.weigh = weigh
        accumulation = check_updates(
            samples_per_update,
            accumulation,
            sampler=sampler is not None,
            drop_last=drop_last,
        )
        config = PlanConfig(
            seed=seed,
            shuffle=shuffle,
            samples_per_update=None if samples_per_update is None else LARGEST_UPDATE,
            grouping=grouping,
            strata=strata,
            window=window,
            hardest_first=hardest_first,
            round_batch=round_batch,
            work=check_work(work),
            oversize=oversize,
            one_kind=one_kind,
        )
        budget = few_shapes(
            shapes,
            lengths,
            budget,
            samples_per_update=samples_per_update,
            window=config.window,
            grouping=grouping,
            work=config.work,
            strata=strata,
        )
        planner = Planner.of(lengths, budget, config, kinds)
        self._check_size(planner)
        if samples_per_update is None:
            self._plan: Updates = FreeUpdates(planner, accumulation=accumulation)
        else:
            order = None if sampler is None else OrderSource(sampler, planner.num_samples)
            self.sizes = PreservedUpdates(planner, samples_per_update, order, drop_last=drop_last)
            self._plan = self.sizes
            if order is not None:
                planner.take_sources(order)
            if self._plan.mixture is not None:
                self._plan.mixture.bind(self._set_shares)
        check_collating(collate_fn, pad)
        filling = FillingCollator(collate_fn, planner.budget.ladder, pad)
        weight_of = weigher(weigh)
        is_filled = filling.ladder is not None
        collated = _CollatedDataset(dataset, filling, weight_of if is_filled else None)
        self._feed = _Feed(collated, config.seed, weight_of, self.stats, dataloader_kwargs)
        self._place = Cursor()  # the point in the run after all yielded steps
        # a loaded resume point; iteration resumes while `_place` is this object
        self._resumed: Cursor | None = None
        self._warned_of: set[bool] = set()  # whether batches of another shape than planned fit
        planner.warn_of_oversize()

    def _check_size(self, planner: Planner) -> None:
        if planner.num_samples != len(self.dataset):
            raise ConfigError(
                f"`lengths` has {planner.num_samples} entries, but the dataset has {len(self.dataset)}"
            )

    @property
    def budget(self) -> Budget:
        """The budget, with limits taken from the lengths."""
        return self._plan.planner.budget

    @property
    def num_samples(self) -> int:
        return self._plan.num_samples

    @property
    def num_changes(self) -> int:
        return super().num_changes + self._plan.num_renewed

    @property
    def cursor(self) -> Cursor:
        place = self._place
        if not place.begun_rows:
            return place
        current = next(self._walk().updates(place, 0))
        return current.after

    def _walk(self) -> Updates:
        _, world_size = self._rank_and_size()
        self._plan.on_ranks(world_size)
        if self._place is self._resumed:
            self._plan.renew(self._plan.planner.in_mid_epoch())
        return self._plan

    def _stand(self, place: Cursor, *, resumed: bool = False) -> None:
        self._place = place
        self._resumed = place if resumed else None
        self._plan.stand(place)

    @property
    def plan(self) -> BatchPlan:
        """The steps of :attr:`epoch` on all ranks; after loading a state, only the steps that remained."""
        if self._resumed is None or self._resumed.epoch != self.epoch:
            return self.plan_of(self.epoch)
        return self._walk().plan(self._resumed)

    def plan_of(self, epoch: int) -> BatchPlan:
        """Returns the plan of all steps of an epoch on all ranks."""
        walk = self._walk()
        return walk.plan(walk.start_of(check_int("epoch", epoch, least=0), Cursor()))

    def __len__(self) -> int:
        """Returns the number of steps in the whole :attr:`epoch`, also after resuming. The first call plans it."""
        return self.plan_of(self.epoch).num_steps

    def _asked(self) -> Cursor:
        if self._live is None or not self._feed.asked:
            return self.cursor
        return self._feed.asked[-1].after

    def _set_shares(self, shares: dict[str, float]) -> int:
        """Sets the shares of a mixture after the updates that workers were asked for; all ranks must call it."""
        assert isinstance(self._plan, PreservedUpdates)
        if differing(self.world, {"shares": shares}):
            raise AlignmentError(
                f"ranks set different shares of a Mixture, this one {shares}; give all ranks the same, "
                "e.g. by a metric that was reduced over ranks"
            )
        return self._plan.change_shares(self._asked(), shares)

    def examples(self) -> tuple[Streams, Callable[[int], object], Callable[..., Any]]:
        return self._plan.planner.lengths, self.dataset.__getitem__, self._feed.dataset.filling

    def kind_of_example(self, number: int, sample: object) -> int:
        return int(self._plan.planner.kinds.codes[number])

    def _forget(self) -> None:
        _, world_size = self._rank_and_size()
        self._plan.on_ranks(world_size)
        self._stand(self._plan.start_of(self._next, self._place))

    def _run(self, send: Callable[[B], Any] | None) -> Generator[Step[Any]]:
        world = self.world
        plan = self._walk()
        self._check_size(plan.planner)
        if self._place is not self._resumed:
            self._begin_epoch(plan, world)
        settings = {**self._identity(), "limit": plan.planner.limit}
        compare_ranks(world, plan, settings, self._place, self.dataset)
        plan.begin_sharing(self._place)
        plan.share(world, self._place)
        updates = plan.updates(self._place, world.rank)
        for loaded in self._feed.open(updates, self._epoch, world):
            plan.share(world, loaded.update.after)
            self._compare_shapes(loaded)
            for place in range(len(loaded.batches)):
                step = self._step(loaded, place, send)
                self._count(loaded.update, place)
                self._place = loaded.update.behind(place, loaded.sums[place + 1])
                yield step

    def _begin_epoch(self, plan: Updates, world: World) -> None:
        """Plans with the limits that were learned since the last epoch."""
        planner = plan.planner.renewed(world)
        if planner is not plan.planner:  # some samples may no longer fit
            planner.warn_of_oversize()
        plan.renew(planner)
        self._stand(plan.start_of(self._epoch, self._place))

    def _step(
        self, loaded: "_LoadedUpdate", place: int, send: Callable[[B], Any] | None
    ) -> Step[Any]:
        planned = loaded.update.steps[place]
        batch = loaded.batches[place]
        weight = Share(loaded.weights[place], loaded.sums[-1])
        num_samples = 0 if planned.idle else len(planned.indices)
        if send is not None:
            batch = send(batch)
        return Step(
            batch=batch,
            indices=planned.indices,
            samples=Share(num_samples, loaded.update.num_samples),
            weight=weight,
            loss_scale=loss_scale(weight, self.world.size),
            ends_update=place == len(loaded.batches) - 1,
            idle=planned.idle,
            kind=planned.kind,
            filled=self.budget.ladder is not None,
        )

    def _count(self, update: PlannedUpdate, place: int) -> None:
        step = update.steps[place]
        real_tokens, padded_tokens = step.tokens
        self.stats.count_step(len(step.indices), real_tokens, padded_tokens, idle=step.idle)
        self.stats.count_memory(step.memory)
        if place == len(update.steps) - 1:
            self.stats.count_update(update.num_samples)
        if len(step.indices) == 1 and not step.idle:
            self.stats.oversize += int(self._plan.planner.unfit(step.indices)[0])

    def _compare_shapes(self, loaded: "_LoadedUpdate") -> None:
        """Warns once if a collated batch does not have its planned shape, and once if it does not fit either, before any of
        its update is used."""
        for step, batch in zip(loaded.update.steps, loaded.batches, strict=True):
            if step.idle or False in self._warned_of:
                continue
            shape = shapes_of(Batches.of([np.asarray(step.indices)]), self._plan.planner.lengths)
            difference = unplanned(batch, shape, self.budget)
            if difference is None or difference.fits in self._warned_of:
                continue
            self._warned_of.add(difference.fits)
            excess = "" if difference.fits else ", and does not fit the budget"
            warn_user(
                f"a batch does not have its planned shape{excess}: {difference.text}. Give `lengths` "
                "in dataset order, measured as samples are processed and collated (all rows of a "
                "sample, padded to the budget's `pad_to_multiple_of`); or use OnlineDataLoader, which "
                "measures samples itself. layout='packed' needs a packing collator. Where rows are left "
                "out or added on purpose, weigh='samples' is wrong: pass `weigh`, a function of a batch"
            )

    def _identity(self) -> dict[str, object]:
        return {
            **self._plan.identity,
            "budget": self.budget.fingerprint,
            "weigh": described(self.weigh),
        }

    def _state(self) -> dict[str, Any]:
        return {
            "cursor": self._place.state(),
            "changes": [list(change) for change in self._plan.changes],
            "shares": [list(change) for change in self._plan.shares],
            "order": self._plan.order_print(self._place.epoch),
            "left_out": self._plan.planner.left_print,
        }

    def _place_to_begin(self) -> tuple[Cursor, bool]:
        return self._place, self._place is self._resumed

    def _go_back(self, place: tuple[Cursor, bool]) -> None:
        cursor, is_resumed = place
        self._stand(cursor, resumed=is_resumed)

    def _checked(self, states: list[State]) -> State:
        """Returns the state of any rank, which is complete, after comparing the states of all ranks."""
        state = agreed(states)
        epoch = state["cursor"]["epoch"]
        order_print = self._plan.order_print(epoch)
        remedy = "give it a method set_epoch that seeds it by the epoch, the same in both runs"
        if self._plan.mixture is not None:
            remedy = "give the Mixture the same sources, `shares`, `seed`, `num_samples` and `samples_per_update`"
            saved = self._plan.mixture.with_changes(state["shares"])
            order_print = zlib.crc32(saved.of_epoch(epoch).data)
        if state["order"] != order_print:
            raise StateError(
                f"`sampler` must give the indices of the saved run in epoch {epoch}; {remedy}"
            )
        return state

    def _restore(self, checked: State) -> None:
        place = Cursor.of(checked["cursor"])
        plan = self._plan
        planner = plan.planner.rebuilt()
        planner.check_left_out(checked)
        _, world_size = self._rank_and_size()
        plan.on_ranks(world_size)
        plan.renew(planner)
        if self.sizes is not None:
            self.sizes.restore(checked["changes"])
            plan.restore_shares(checked["shares"])
        self._stand(place, resumed=True)
        self._epoch = place.epoch
        self._next = place.epoch
        if not place.begun_rows and next(plan.cursors(place), None) is None:
            self._next += 1


@dataclass(frozen=True, slots=True)
class _LoadedUpdate:
    """An update with its batches on this rank."""

    update: PlannedUpdate
    batches: list[Any]
    weights: list[float]
    sums: list[float]  # at place k: the weight of the update's first k steps on all ranks


# When an update's batches are loaded and weighed, one sum over ranks gives every rank the total weight of each step. So
# loss scales are exact, and any rank can save a resume point inside the update. A rank that fails sends NaN. Cost: an
# all-reduce of one float per step, and memory for the batches.
class _Feed(Inner):
    """Loads planned updates with the user's workers and collate function, and computes their weights over all ranks."""

    def __init__(
        self,
        dataset: "_CollatedDataset",
        seed: int,
        weight_of: WeightOf,
        stats: LoaderStats,
        dataloader_kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(dataloader_kwargs)
        self.dataset = dataset
        self._seed = seed
        self._weight_of = weight_of
        self._stats = stats
        self.asked: deque[PlannedUpdate] = deque()  # those that workers are loading or have loaded

    def open(
        self, updates: Iterator[PlannedUpdate], epoch: int, world: World
    ) -> Iterator[_LoadedUpdate]:
        """Yields loaded updates. All ranks must call it."""
        self.asked.clear()
        self.queue.pull = partial(next, self._requests(updates, world.rank), None)
        self.seed(self._seed, epoch)
        if self.loader is None:
            self.loader = DataLoader(
                self.dataset, batch_sampler=self.queue, collate_fn=itemgetter(0), **self.kwargs
            )
        # starts the DataLoader in `_load`, which tells other ranks of errors
        batches = chain.from_iterable([self.loader])
        try:
            while True:
                loaded = self._load(batches, world)
                if loaded is None:
                    return
                yield loaded
        finally:
            self.queue.pull = None

    def _requests(self, updates: Iterator[PlannedUpdate], rank: int) -> Iterator["_Request"]:
        for update in updates:
            self.asked.append(update)
            epoch = update.before.epoch
            for row, step in enumerate(update.steps, start=update.before.steps):
                yield _Request(epoch, (self._seed, epoch, row, rank), step.indices)

    def _load(self, batches: Iterator["_Collated"], world: World) -> _LoadedUpdate | None:
        """Loads the next update, and adds its weights over all ranks. None: the epoch is over."""
        began = time.perf_counter()
        try:
            update, collated = self._next_update(batches)
            if update is None:
                return None
            pairs = zip(update.steps, collated, strict=True)
            weights = [self._weight(step, one) for step, one in pairs]
        except Exception:
            self._tell_other_ranks(world)
            raise
        finally:
            self._stats.wait_s += time.perf_counter() - began
        self.asked.popleft()
        row_weights = weights if world.size == 1 else world.all_sum(weights)
        if any(map(math.isnan, row_weights)):
            raise AlignmentError(
                "another rank failed while it loaded or weighed update "
                f"{update.before.update}; see its error"
            )
        # Adds from left to right, step by step, so that a run resumed inside the update gets identical sums.
        sums = list(accumulate(row_weights, initial=update.before.begun_weight))
        return _LoadedUpdate(update, [one.batch for one in collated], weights, sums)

    def _next_update(
        self, batches: Iterator["_Collated"]
    ) -> tuple[PlannedUpdate | None, list["_Collated"]]:
        collated = list(islice(batches, 1))  # makes the DataLoader request the update
        if not self.asked:
            return None, []
        update = self.asked[0]
        collated += islice(batches, len(update.steps) - 1)
        if len(collated) < len(update.steps):
            raise RuntimeError(ENDED_EARLY)
        return update, collated

    def _weight(self, step: PlannedStep, collated: "_Collated") -> float:
        if step.idle:
            return 0.0
        if collated.weight is not None:
            return collated.weight
        num_samples = len(step.indices)
        return called("weigh", self._weight_of, collated.batch, num_samples, of=step.indices)

    def _tell_other_ranks(self, world: World) -> None:
        self.loader = None  # its workers may be dead
        if not self.asked and self.queue.pull is not None:
            self.queue.pull()  # asks for the next update, if there is one
        if self.asked:
            with suppress(AlignmentError):  # this rank's own error is more useful
                world.all_sum([math.nan] * len(self.asked[0].steps))


class _Request(NamedTuple):
    """What a worker is asked for: one batch."""

    epoch: int
    seed_place: tuple[int, ...]  # see :func:`seed_of`, which only workers need
    indices: list[int]


class _Collated(NamedTuple):
    """A collated batch, and its weight before rows were added to it; None: no rows were. (torch pins memory in tuples.)"""

    batch: Any
    weight: float | None

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(_Collated, tuple(self))


class _CollatedDataset(Dataset[Any]):
    """The user's samples, collated, and padded to few shapes. In a worker, each batch sets its own random seed, so that a
    resumed run repeats it.

    Args:
        weight_of: weight of a batch that is then padded; None: batches are not padded."""

    def __init__(self, dataset: Any, filling: FillingCollator, weight_of: WeightOf | None) -> None:
        self.dataset = dataset
        self.filling = filling
        self.weight_of = weight_of
        self._epoch = -1

    def __getitems__(self, request: _Request) -> list[_Collated]:
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            with sendable(lambda: "the dataset's set_epoch failed"):
                set_epoch(self.dataset, request.epoch)
        if get_worker_info() is not None:
            seed = seed_of(*request.seed_place)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        indices = request.indices
        samples = fetch(self.dataset, indices)
        with sendable(lambda: f"collate_fn failed on dataset samples {shorten(indices)}"):
            batch = self.filling.collated(samples)
        if self.weight_of is None:
            return [_Collated(batch, None)]
        weight = called("weigh", self.weight_of, batch, len(indices), of=indices)
        return [_Collated(self.filling.fill(batch, len(indices)), weight)]

    def __len__(self) -> int:
        return len(self.dataset)
