"""The loader for known lengths: plans every update, loads it with a ``DataLoader``, weighs it over all ranks."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cost import check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import OrderSource
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import PlanConfig, Planner
from dynagroup.plan.static_shapes import few_shapes
from dynagroup.shapes import Streams
from dynagroup.state import agreed
from dynagroup.update.filling import FillingCollator, Pad
from dynagroup.update.loader import ENDED_EARLY, Inner, StepLoader, check_updates, seed_of
from dynagroup.update.loss_weight import Share, Weigh, loss_scale, weigher
from dynagroup.update.schedule import LARGEST_UPDATE, BatchSizeSchedule
from dynagroup.update.step import B, LoaderStats, Step, unplanned
from dynagroup.update.updates import FreeUpdates, PlannedUpdate, PreservedUpdates, Updates, compare_ranks
from dynagroup.validation import check_int, warn_user

OURS = {"shuffle", "seed", "samples_per_update", "grouping", "uneven"}  # plan settings that this loader sets itself


class PlannedDataLoader(StepLoader[B]):
    """Steps planned from known lengths: batches that fit, of similar length, with exact loss weights.

    ``len(loader)`` is the number of steps of an epoch, ``loader.num_updates`` that of its updates.
    ``loader.plan.report()`` shows the epoch before anything runs, ``print(loader.stats)`` what was done.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        lengths: tokens of each sample, or a dict of named streams, the primary ``tokens`` or first; or a file.
        budget: limit of a batch; a number means that many tokens.
        samples_per_update: samples of every update over all ranks: an int, or a schedule ``(update, current) -> int``.
            None: free-running, an update is ``accumulation`` rows of batches that are as large as fit.
        grouping: the samples of this many updates are sorted by length and dealt into as many updates of the same size.
            Samples of an update are then similar: little padding even in small ones. None: updates as drawn.
        kinds: a label for each sample (N,), anything that can be hashed: all batches of a step, on all ranks, are then
            of one kind, ``step.kind``; with ``one_kind="batch"`` each batch is, by itself.
        accumulation: rows per update, only without ``samples_per_update``.
        shuffle: with ``samples_per_update``: draw samples in an order seeded by (seed, epoch); False: in dataset order.
            Without it: form other batches in every epoch; False: longest first, the same batches in every epoch.
        sampler: a sampler of dataset indices, the same on every rank; only with ``samples_per_update``.
        seed: seed of the order, and of the random numbers in workers.
        weigh: what the loss is a mean of, for the weight of a batch: "tokens" (labels that a causal model predicts),
            "samples", or a function from a batch to a number.
        drop_last: leave out an epoch's last update if it is smaller than asked; only with ``samples_per_update``.
        shapes: most shapes (samples, tokens) that a compiled model sees: each batch is filled to a shape of a
            :class:`~dynagroup.ShapeLadder`, with padding and with rows of weight 0 after its own.
        pad: field -> its padding value, for fields not of transformers; or a function, see :class:`FillingCollator`.
        world: ranks that share the data; default: all of ``torch.distributed``.
        further: settings of :class:`~dynagroup.LengthAwareBatchSampler` (``window``, ``oversize``, ``work`` ...) and of
            the inner ``DataLoader``: ``collate_fn``, ``num_workers``, ``pin_memory`` and so on.

    Raises:
        ConfigError: an argument is wrong. BudgetError: a sample does not fit and ``oversize="error"``.
        AlignmentError: while iterating, ranks differ in data, seed or settings, or one of them failed.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> loader = PlannedDataLoader(range(6), [9, 2, 8, 3, 9, 3], TokenBudget(18), samples_per_update=3, weigh="samples")
    >>> [sum(step.samples.local for step in update) for update in loader.updates()]
    [3, 3]
    >>> len(loader), loader.num_updates
    (4, 2)
    """

    KIND = "PlannedDataLoader"
    _said_unplanned = False

    def __init__(
        self, dataset: Any, lengths: Any, budget: Budget | int, *,
        samples_per_update: int | BatchSizeSchedule | None = None, grouping: int | None = None,
        kinds: Iterable[Any] | None = None, accumulation: int = 1, shuffle: bool = True,
        sampler: Iterable[int] | None = None, seed: int = 0, weigh: Weigh = "tokens", drop_last: bool = False,
        shapes: int | None = None, pad: Pad | None = None, world: World | None = None, **further: Any,
    ) -> None:  # fmt: skip
        super().__init__(dataset, world=world)
        free, how, self._weigh = samples_per_update is None, {"seed": seed, "shuffle": shuffle}, weigh
        of_set_sizes = {"sampler": sampler is not None, "drop_last": drop_last, "grouping": grouping is not None}
        accumulation = check_updates(samples_per_update, accumulation, **of_set_sizes)
        settings = {name: further.pop(name) for name in ({f.name for f in fields(PlanConfig)} - OURS) & further.keys()}
        settings["work"] = check_work(settings.get("work"))
        how |= {} if free else {"samples_per_update": LARGEST_UPDATE, "grouping": grouping}
        if shapes is not None:
            window = settings.get("window")
            budget = few_shapes(shapes, lengths, budget, samples_per_update, window, grouping, settings["work"])
        planner = Planner.of(lengths, budget, PlanConfig(**how, **settings), kinds)
        if planner.num_samples != len(dataset):
            raise ConfigError(f"`lengths` has {planner.num_samples} entries, but the dataset has {len(dataset)}")
        if samples_per_update is None:
            self._plan: Updates = FreeUpdates(planner, accumulation=accumulation)
        else:
            order = None if sampler is None else OrderSource(sampler, planner.num_samples)
            self._plan = self.sizes = PreservedUpdates(planner, samples_per_update, order, drop_last=drop_last)
        if planner.budget.ladder is not None:
            further["collate_fn"] = FillingCollator(further.get("collate_fn"), planner.budget.ladder, pad)
        self._feed = _Feed(dataset, planner.config.seed, weigh, self.stats, further)
        self._place = Cursor()  # the place after the steps that were handed out
        self._resumed: Cursor | None = None  # a loaded place; while it is `_place`, the next iteration continues there
        planner.warn_of_oversize()

    @property
    def budget(self) -> Budget:
        """The budget, with its limits taken from the lengths."""
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
        """The steps of :attr:`epoch` on all ranks; after a state was loaded, the steps that remained of it."""
        if self._resumed is None or self._resumed.epoch != self.epoch:
            return self.plan_of(self.epoch)
        return self._walk().plan(self._resumed)

    def plan_of(self, epoch: int) -> BatchPlan:
        """The steps of a whole epoch on all ranks."""
        walk = self._walk()
        return walk.plan(walk.start_of(check_int("epoch", epoch, least=0), Cursor()))

    def __len__(self) -> int:
        """Steps of the whole :attr:`epoch`, also after a resume. The first call plans the epoch."""
        return self.plan_of(self.epoch).num_steps

    def _asked(self) -> Cursor:
        return self._feed.asked[-1].after if self._live is not None and self._feed.asked else self.cursor

    def examples(self) -> tuple[Streams, Callable[[int], Any], Callable[..., Any]]:
        collate: Any = self._feed.kwargs.get("collate_fn")
        made = FillingCollator(collate, None) if self.budget.ladder is None else collate
        return self._plan.planner.lengths, self.dataset.__getitem__, made

    def _forget(self) -> None:
        self._plan.on_ranks(self._rank_and_size()[1])
        self._stand(self._plan.start_of(self._next, self._place))

    def _run(self) -> Iterator[Step[B]]:
        world, plan = self.world, self._walk()
        if self._place is not self._resumed:
            planner = plan.planner.renewed(world)
            if planner is not plan.planner:  # by what was learned, some samples may no longer fit
                planner.warn_of_oversize()
            plan.renew(planner)
            self._stand(plan.start_of(self._epoch, self._place))
        compare_ranks(world, plan, {**self._identity(), "limit": plan.planner.limit}, self._place)
        feed = self._feed.open(plan.updates(self._place, world.rank), self._epoch, world)
        for update, batches, weights, summed in feed:
            for number, batch in enumerate(batches):
                self._look(update, number, batch)
                self._place = update.behind(number, summed[number + 1])
                step, weight = update.steps[number], Share(weights[number], summed[-1])
                samples = Share(0 if step.idle else len(step.indices), update.num_samples)
                scale, ends = loss_scale(weight, world.size), number == len(batches) - 1
                yield Step(batch, step.indices, samples, weight, scale, ends, step.idle, step.kind)

    def _look(self, update: PlannedUpdate, number: int, batch: Any) -> None:
        """Count a step as used, and warn once if a batch differs from the plan."""
        step, stats = update.steps[number], self.stats
        stats.count_step(len(step.indices), *step.tokens, idle=step.idle)
        if number == len(update.steps) - 1:
            stats.count_update(update.num_samples)
        if step.idle:
            return
        stats.oversize += len(step.indices) == 1 and bool(self._plan.planner.unfit(step.indices[:1])[0])
        if self._said_unplanned:
            return
        shape = shapes_of(Batches.of([np.asarray(step.indices)]), self._plan.planner.lengths)
        differs = unplanned(batch, shape, self.budget)
        if differs is not None:
            self._said_unplanned = True
            warn_user(
                f"a batch is not what was planned: {differs}. `lengths` are in another order than the dataset, or were not "
                "measured as samples are processed and collated, so batches may not fit; OnlineDataLoader measures them itself"
            )

    def _identity(self) -> dict[str, Any]:
        return {**self._plan.identity, "budget": self.budget.fingerprint, "weigh": described(self._weigh)}

    def _state(self) -> dict[str, Any]:
        changes, order = list(map(list, self._plan.changes)), self._plan.order_print(self._place.epoch)
        left_out = self._plan.planner.left_print
        return {"cursor": self._place.state(), "changes": changes, "order": order, "left_out": left_out}

    def _checked(self, states: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Any rank's state is complete; the states of several ranks must agree."""
        state = agreed(states)
        epoch = state["cursor"]["epoch"]
        if state["order"] != self._plan.order_print(epoch):
            raise StateError(f"`sampler` gives other indices in epoch {epoch} than in the saved run; seed both alike")
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


# The batches of an update are loaded and weighed. One sum over ranks then tells every rank the total weight of each
# step: loss scales are exact, and any rank can save a place inside the update. Plans are equal on all ranks, so no more
# is exchanged; a rank that fails sends NaN. Cost: an all-reduce of one float per step; an update's batches are held.
class _Feed(Inner):
    """Loads planned updates with the user's workers and collate function, and weighs them over all ranks. It is the
    batch sampler of its DataLoader: it hands out indices, and remembers to which update they belong."""

    def __init__(self, dataset: Any, seed: int, weigh: Weigh, stats: LoaderStats, kwargs: Mapping[str, Any]) -> None:
        super().__init__(kwargs)
        self._weight_of, self._seed, self._stats, self._dataset = weigher(weigh), seed, stats, _SeededDataset(dataset)
        self.asked: deque[PlannedUpdate] = deque()  # updates asked of workers, and not collected yet
        self._source: Iterator[PlannedUpdate] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_source": iter(())}

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for update in self._source:
            self.asked.append(update)
            before = update.before
            for row, step in enumerate(update.steps, start=before.steps):
                yield seed_of(self._seed, before.epoch, row), step.indices

    def open(
        self, updates: Iterator[PlannedUpdate], epoch: int, world: World
    ) -> Iterator[tuple[PlannedUpdate, list[Any], list[float], list[float]]]:
        """Yield (update, its batches on this rank, their weights, sums). ``sums[k]``: the weight of the first k steps
        on all ranks, plus that of what was taken of the update before. Collective."""
        self.asked.clear()
        self._source = updates
        self.seed(self._seed, epoch)
        if self.loader is None:
            self.loader = DataLoader(self._dataset, batch_sampler=self, **self.kwargs)  # type: ignore[arg-type]
        batches = iter(self.loader)
        while (loaded := self._loaded(batches, world)) is not None:
            update, collected, weights = loaded
            found = weights if world.size == 1 else world.all_sum(weights)
            if any(map(math.isnan, found)):
                number = update.before.update
                raise AlignmentError(f"another rank failed while it loaded or weighed update {number}; see its error")
            # Summed from the left, step by step, so that a run resumed in between gets the same bits.
            summed = accumulate(found, initial=update.before.begun_weight)
            yield update, collected, weights, list(summed)

    def _loaded(self, batches: Iterator[Any], world: World) -> tuple[PlannedUpdate, list[Any], list[float]] | None:
        """Load the next update, and weigh each of its batches. If this rank fails, it tells the other ranks."""
        began = time.perf_counter()
        try:
            collected = [*islice(batches, 1)]  # asks for the update
            if not self.asked:
                return None
            update = self.asked[0]
            collected += islice(batches, len(update.steps) - len(collected))
            if len(collected) < len(update.steps):
                raise RuntimeError(ENDED_EARLY)
            pairs = zip(update.steps, collected, strict=True)
            weights = [0.0 if step.idle else self._weight_of(batch, len(step.indices)) for step, batch in pairs]
            return self.asked.popleft(), collected, weights
        except Exception:
            if self.asked:
                with suppress(AlignmentError):  # this rank's own error says more
                    world.all_sum([math.nan] * len(self.asked[0].steps))
            raise
        finally:
            self._stats.wait_s += time.perf_counter() - began


class _SeededDataset(Dataset):
    """The user's dataset. In a worker every batch has its own seed, so that a resumed run repeats it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, request: tuple[int, list[int]]) -> list[Any]:
        seed, indices = request
        if get_worker_info() is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        together = getattr(self.dataset, "__getitems__", None)
        return together(indices) if together is not None else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)
