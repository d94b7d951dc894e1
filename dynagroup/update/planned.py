"""The loader for known lengths: plans all updates, loads batches with a ``DataLoader``, and weighs them over ranks."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cost import check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import OrderSource
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Planner
from dynagroup.shapes import Streams
from dynagroup.state import agreed
from dynagroup.update.filling import FillingCollator, Pad
from dynagroup.update.loader import ENDED_EARLY, Inner, StepLoader, check_updates, seed_of
from dynagroup.update.loss_weight import Share, Weigh, loss_scale, weigher
from dynagroup.update.schedule import LARGEST_UPDATE, BatchSizeSchedule
from dynagroup.update.step import B, LoaderStats, Step, unplanned
from dynagroup.update.updates import (
    FreeUpdates,
    PlannedUpdate,
    PreservedUpdates,
    Updates,
    compare_ranks,
)
from dynagroup.validation import (
    check_collating,
    check_int,
    fetch,
    sendable,
    set_epoch,
    shorten,
    warn_user,
)

OURS = {
    "shuffle",
    "seed",
    "samples_per_update",
    "grouping",
    "strata",
    "uneven",
}  # plan settings with another meaning or default


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
        further: ``window``, ``hardest_first``, ``round_batch``, ``work``, ``oversize`` and ``one_kind``, as in
            :class:`~dynagroup.LengthAwareBatchSampler`; and arguments of ``DataLoader`` (``collate_fn``, ...).

    Raises ConfigError if an argument is wrong; BudgetError if a sample does not fit and ``oversize="error"``; during
    iteration AlignmentError if ranks have different data, seeds or settings, or one of them failed.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> loader = PlannedDataLoader(range(6), [9, 2, 8, 3, 9, 3], TokenBudget(18), samples_per_update=3, weigh="samples")
    >>> [sum(step.samples.local for step in update) for update in loader.updates()]
    [3, 3]
    >>> len(loader), loader.num_updates
    (4, 2)
    """

    KIND, _said_unplanned = "PlannedDataLoader", False

    def __init__(
        self,
        dataset: Any,
        lengths: Any,
        budget: Budget | int,
        *,
        samples_per_update: int | BatchSizeSchedule | None = None,
        grouping: int | None = None,
        strata: int | None = None,
        kinds: Iterable[Any] | None = None,
        accumulation: int = 1,
        shuffle: bool = True,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        weigh: Weigh = "tokens",
        drop_last: bool = False,
        shapes: int | None = None,
        pad: Pad | None = None,
        identity: Any = None,
        world: World | None = None,
        **further: Any,
    ) -> None:
        super().__init__(dataset, world=world, identity=identity)
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            found = f"is a {type(dataset).__name__}; for a stream use OnlineDataLoader"
            raise ConfigError(f"`dataset` must have __getitem__ and __len__, but {found}")
        free, how = samples_per_update is None, {"seed": seed, "shuffle": shuffle}
        self.weigh = weigh
        of_set_sizes = {
            "sampler": sampler is not None,
            "drop_last": drop_last,
            "grouping": grouping is not None,
            "strata": strata is not None,
        }
        accumulation = check_updates(samples_per_update, accumulation, **of_set_sizes)
        settings = {
            name: further.pop(name)
            for name in ({f.name for f in fields(PlanConfig)} - OURS) & further.keys()
        }
        settings["work"] = check_work(settings.get("work"))
        if not free:
            how |= {"samples_per_update": LARGEST_UPDATE, "grouping": grouping, "strata": strata}
        if shapes is not None:
            window = settings.get("window")
            budget = few_shapes(
                shapes,
                lengths,
                budget,
                samples_per_update,
                window,
                grouping,
                settings["work"],
                strata,
            )
        planner = Planner.of(lengths, budget, PlanConfig(**how, **settings), kinds)
        self._check_size(planner)
        if samples_per_update is None:
            self._plan: Updates = FreeUpdates(planner, accumulation=accumulation)
        else:
            order = None if sampler is None else OrderSource(sampler, planner.num_samples)
            self._plan = self.sizes = PreservedUpdates(
                planner, samples_per_update, order, drop_last=drop_last
            )
        check_collating(collate := further.pop("collate_fn", None), pad)
        filling, weight_of = FillingCollator(collate, planner.budget.ladder, pad), weigher(weigh)
        seeded = _SeededDataset(dataset, filling, None if filling.ladder is None else weight_of)
        self._feed = _Feed(seeded, planner.config.seed, weight_of, self.stats, further)
        self._place = Cursor()  # the point in the run after all yielded steps
        self._resumed: Cursor | None = (
            None  # a loaded resume point; iteration resumes while `_place` is this object
        )
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
        return next(self._walk().updates(place, 0)).after if place.begun_rows else place

    def _walk(self) -> Updates:
        self._plan.on_ranks(self._rank_and_size()[1])
        if self._place is self._resumed:
            self._plan.renew(self._plan.planner.in_mid_epoch())
        return self._plan

    def _stand(self, place: Cursor, *, resumed: bool = False) -> None:
        self._place, self._resumed = place, place if resumed else None
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
        return (
            self._feed.asked[-1].after
            if self._live is not None and self._feed.asked
            else self.cursor
        )

    def examples(self) -> tuple[Streams, Callable[[int], Any], Callable[..., Any]]:
        return self._plan.planner.lengths, self.dataset.__getitem__, self._feed.dataset.filling

    def kind_of_example(self, number: int, sample: Any) -> Any:
        return int(self._plan.planner.kinds.codes[number])

    def _forget(self) -> None:
        self._plan.on_ranks(self._rank_and_size()[1])
        self._stand(self._plan.start_of(self._next, self._place))

    def _run(self, send: Callable[[B], Any] | None) -> Iterator[Step[Any]]:
        world, plan = self.world, self._walk()
        self._check_size(plan.planner)
        if self._place is not self._resumed:
            planner = plan.planner.renewed(world)
            if (
                planner is not plan.planner
            ):  # with the newly learned limits, some samples may no longer fit
                planner.warn_of_oversize()
            plan.renew(planner)
            self._stand(plan.start_of(self._epoch, self._place))
        compare_ranks(
            world,
            plan,
            {**self._identity(), "limit": plan.planner.limit},
            self._place,
            self.dataset,
        )
        feed = self._feed.open(plan.updates(self._place, world.rank), self._epoch, world)
        for update, batches, weights, summed in feed:
            self._compare(update, batches)
            for number, batch in enumerate(batches):
                step, weight = update.steps[number], Share(weights[number], summed[-1])
                samples = Share(0 if step.idle else len(step.indices), update.num_samples)
                scale, ends = loss_scale(weight, world.size), number == len(batches) - 1
                filled = self.budget.ladder is not None
                sent = batch if send is None else send(batch)
                made = Step(
                    sent, step.indices, samples, weight, scale, ends, step.idle, step.kind, filled
                )
                self._count(update, number)
                self._place = update.behind(number, summed[number + 1])
                yield made

    def _count(self, update: PlannedUpdate, number: int) -> None:
        step, stats = update.steps[number], self.stats
        stats.count_step(len(step.indices), *step.tokens, idle=step.idle)
        if number == len(update.steps) - 1:
            stats.count_update(update.num_samples)
        stats.oversize += bool(
            len(step.indices) == 1
            and not step.idle
            and self._plan.planner.unfit(step.indices[:1])[0]
        )

    def _compare(self, update: PlannedUpdate, batches: list[Any]) -> None:
        """Warns once if a collated batch does not have its planned shape, before any of its update is used."""
        way_out = "Give `lengths` in dataset order, measured as samples are processed and collated; or use OnlineDataLoader"
        for step, batch in zip(update.steps, batches, strict=True):
            if step.idle or self._said_unplanned:
                continue
            shape = shapes_of(Batches.of([np.asarray(step.indices)]), self._plan.planner.lengths)
            if (differs := unplanned(batch, shape, self.budget)) is not None:
                self._said_unplanned = True
                warn_user(
                    f"a batch does not have its planned shape: {differs}. {way_out}, which measures them itself"
                )

    def _identity(self) -> dict[str, Any]:
        return {
            **self._plan.identity,
            "budget": self.budget.fingerprint,
            "weigh": described(self.weigh),
        }

    def _state(self) -> dict[str, Any]:
        changes, order = (
            list(map(list, self._plan.changes)),
            self._plan.order_print(self._place.epoch),
        )
        return {
            "cursor": self._place.state(),
            "changes": changes,
            "order": order,
            "left_out": self._plan.planner.left_print,
        }

    def _checked(self, states: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the state of any rank, which is complete, after comparing the states of all ranks."""
        state = agreed(states)
        epoch = state["cursor"]["epoch"]
        if state["order"] != self._plan.order_print(epoch):
            raise StateError(
                f"`sampler` must give the indices of the saved run in epoch {epoch}; seed both alike"
            )
        return state

    def _restore(self, found: Mapping[str, Any]) -> None:
        place, walk = Cursor.of(found["cursor"]), self._plan
        planner = walk.planner.rebuilt()
        planner.check_left_out(found)
        walk.on_ranks(self._rank_and_size()[1])
        walk.renew(planner)
        if self.sizes is not None:
            self.sizes.restore(found["changes"])
        self._stand(place, resumed=True)
        is_over = not place.begun_rows and next(walk.cursors(place), None) is None
        self._epoch, self._next = place.epoch, place.epoch + is_over


# When an update's batches are loaded and weighed, one sum over ranks gives every rank the total weight of each step. So
# loss scales are exact, and any rank can save a resume point inside the update. Plans are equal on all ranks without
# any exchange. A rank that fails sends NaN. Cost: an all-reduce of one float per step, and memory for the batches.
class _Feed(Inner):
    """Loads planned updates with the user's workers and collate function, and computes their weights over all ranks."""

    def __init__(
        self, dataset: Any, seed: int, weight_of: Any, stats: LoaderStats, kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(kwargs)
        self._seed, self._weight_of, self._stats, self.dataset = seed, weight_of, stats, dataset
        self.asked: deque[PlannedUpdate] = (
            deque()
        )  # updates that workers are loading or have loaded

    def _requests(
        self, updates: Iterator[PlannedUpdate], rank: int
    ) -> Iterator[tuple[int, int, list[int]]]:
        for update in updates:
            self.asked.append(update)
            for row, step in enumerate(update.steps, start=update.before.steps):
                yield (
                    update.before.epoch,
                    seed_of(self._seed, update.before.epoch, row, rank),
                    step.indices,
                )

    def open(
        self, updates: Iterator[PlannedUpdate], epoch: int, world: World
    ) -> Iterator[tuple[PlannedUpdate, list[Any], list[float], list[float]]]:
        """Yields (update, its batches on this rank, their weights, sums); ``sums[k]`` is the weight of the update's
        first k steps on all ranks, including any steps taken before a resume. All ranks must call it."""
        self.asked.clear()
        self.queue.pull = partial(next, self._requests(updates, world.rank), None)
        self.seed(self._seed, epoch)
        if self.loader is None:
            how: Any = {"batch_sampler": self.queue, "collate_fn": itemgetter(0), **self.kwargs}
            self.loader = DataLoader(self.dataset, **how)
        batches = (
            batch for loader in [self.loader] for batch in loader
        )  # starts it in `_loaded`, which tells of errors
        try:
            while (loaded := self._loaded(batches, world)) is not None:
                update, collected, weights = loaded
                found = weights if world.size == 1 else world.all_sum(weights)
                if any(map(math.isnan, found)):
                    at = update.before.update
                    raise AlignmentError(
                        f"another rank failed while it loaded or weighed update {at}; see its error"
                    )
                # Adds from left to right, step by step, so that a run resumed inside the update gets identical sums.
                yield (
                    update,
                    collected,
                    weights,
                    list(accumulate(found, initial=update.before.begun_weight)),
                )
        finally:
            self.queue.pull = None

    def _loaded(
        self, batches: Iterator[Any], world: World
    ) -> tuple[PlannedUpdate, list[Any], list[float]] | None:
        """Loads the next update and computes the weights of its batches. If this rank fails, the other ranks are told."""
        began = time.perf_counter()
        try:
            collected = [*islice(batches, 1)]  # makes the DataLoader request the update
            if not self.asked:
                return None
            update = self.asked[0]
            collected += islice(batches, len(update.steps) - 1)
            if len(collected) < len(update.steps):
                raise RuntimeError(ENDED_EARLY)
            of, pairs = self._weight_of, zip(update.steps, collected, strict=True)
            weights = [
                0.0 if s.idle else of(b, len(s.indices)) if known is None else known
                for s, (known, b) in pairs
            ]
            return self.asked.popleft(), [batch for _, batch in collected], weights
        except Exception:
            self.loader = None  # its workers may be dead
            if self.asked or (self.queue.pull and self.queue.pull()):
                with suppress(AlignmentError):  # this rank's own error is more useful
                    world.all_sum([math.nan] * len(self.asked[0].steps))
            raise
        finally:
            self._stats.wait_s += time.perf_counter() - began


class _SeededDataset(Dataset):
    """The user's collated samples, behind their weight before rows are added to them (None: none are added).
    In a worker, each batch sets its own random seed, so that a resumed run repeats it."""

    def __init__(
        self, dataset: Any, filling: FillingCollator, weight_of: Callable[[Any, int], float] | None
    ) -> None:
        self.dataset, self.filling, self.weight_of, self._epoch = dataset, filling, weight_of, -1

    def __getitems__(self, request: tuple[int, int, list[int]]) -> list[Any]:
        epoch, seed, indices = request
        if epoch != self._epoch:
            self._epoch = epoch
            with sendable(lambda: "the dataset's set_epoch failed"):
                set_epoch(self.dataset, epoch)
        if get_worker_info() is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        samples = fetch(self.dataset, indices)
        with sendable(lambda: f"collate_fn failed on dataset samples {shorten(indices)}"):
            batch = (self.filling.collate_fn or default_collate)(samples)
            if self.weight_of is None:
                return [(None, batch)]
            return [(self.weight_of(batch, len(indices)), self.filling.fill(batch, len(indices)))]

    def __len__(self) -> int:
        return len(self.dataset)
