"""The loader for known lengths: every update is planned before its samples are loaded."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.lengths import as_streams
from dynagroup.plan.planner import PlanConfig, Planner, Position
from dynagroup.plan.sampler import STATE_VERSION, OrderSource, checked_state
from dynagroup.update.loader import StepLoader
from dynagroup.update.plans import FreeUpdates, PlannedUpdate, PreservedUpdates, UpdateStats
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.update.sizes import Cursor, Walk
from dynagroup.update.step import Share, Step, loss_scale
from dynagroup.update.weigh import Weigh, weigher
from dynagroup.world import World

__all__ = ["PlannedDataLoader"]

B = TypeVar("B")
LARGEST_UPDATE = 1 << 40
WEIGHT_UNIT = 1 << 20
"""Weights travel between ranks as integers of 2**-20: exact for whole numbers."""


class SeededIndices(list[int]):
    """Dataset indices with the seed under which a worker processes them, so that a resumed run processes them alike."""

    seed: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded_indices, (list(self), self.seed)


def _seeded_indices(indices: list[int], seed: int) -> SeededIndices:
    seeded = SeededIndices(indices)
    seeded.seed = seed
    return seeded


class _SeededDataset(Dataset):
    """The user's dataset; in a worker process every batch begins with its own seed. In the main process nothing changes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if isinstance(indices, SeededIndices) and get_worker_info() is not None:
            torch.manual_seed(indices.seed)
            random.seed(indices.seed)
            np.random.seed(indices.seed % 2**32)
        together = getattr(self.dataset, "__getitems__", None)
        return together(list(indices)) if together is not None else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


class _Feed:
    """The batch sampler of the inner DataLoader: hands out indices and remembers, in order, what they belong to."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.planned: deque[PlannedUpdate] = deque()
        self.source: Iterator[PlannedUpdate] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        for update in self.source:
            self.planned.append(update)
            for step, indices in enumerate(update.batches):
                key = (self.seed, update.after.epoch, update.after.update, step)
                yield _seeded_indices(indices, int(np.random.SeedSequence(key).generate_state(1)[0]))


class PlannedDataLoader(StepLoader[B]):
    """Steps planned from known lengths: batches that fit, of similar length, weighed so that gradients add up exactly.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        lengths: tokens of each sample, or a dict of named streams.
        budget: what a batch may be; a number means so many tokens.
        samples_per_update: samples of every update over all ranks: an int, or a schedule ``(update, current) -> int``.
            None: free-running, every ``accumulation`` rows of batches as large as fit are an update.
        accumulation: rows an update, only without ``samples_per_update``.
        sampler: of dataset indices, the same on every rank; only with ``samples_per_update``.
            Default: a permutation seeded by (seed, epoch).
        seed: of order and processing.
        weigh: what a batch weighs against the others; say what the loss is a mean of: "tokens" (labels that a causal model
            predicts), "samples", or a function from a batch to a number.
        drop_last: leave out an epoch's last update where it is smaller than asked.
        plan: settings of :class:`~dynagroup.LengthAwareBatchSampler`: ``window``, ``oversize``, ``round_batch``.
        world: the ranks that share the data; default: all of ``torch.distributed``.
        dataloader_kwargs: for the inner ``DataLoader``: ``collate_fn``, ``num_workers``, ``pin_memory`` and so on.

    Raises:
        ConfigError: an argument is wrong. BudgetError: a sample does not fit and ``oversize="error"``.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> loader = PlannedDataLoader(range(6), [9, 2, 8, 3, 9, 3], TokenBudget(18), samples_per_update=3, weigh="samples")
    >>> [sum(step.samples.local for step in update) for update in loader.updates()]
    [3, 3]
    >>> len(loader), loader.num_updates
    (4, 2)
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Any,
        budget: Budget | int,
        *,
        samples_per_update: int | BatchSizeSchedule | None = None,
        accumulation: int = 1,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        weigh: Weigh = "tokens",
        drop_last: bool = False,
        plan: Mapping[str, Any] | None = None,
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        super().__init__(dataset, world=world)
        self.stats = UpdateStats()
        self._weigh = weigher(weigh)
        self._plan = _update_plan(
            as_streams(lengths), budget, samples_per_update, accumulation, sampler, seed, drop_last, plan or {}
        )
        if self._plan.planner.num_samples != len(dataset):
            raise ConfigError(
                f"`lengths` has {self._plan.planner.num_samples} entries, but the dataset has {len(dataset)} samples"
            )
        self._feed = _Feed(seed)
        self._loader = _inner_loader(dataset, self._feed, dataloader_kwargs)
        self._start: Cursor | None = None
        """Where the next iteration begins, if a state was loaded."""
        self._cursor: Cursor | None = None
        self._length: tuple[Any, int] | None = None

    @property
    def budget(self) -> Budget:
        """The budget, with its limits taken from the lengths."""
        return self._plan.planner.budget

    @property
    def num_samples(self) -> int:
        """Samples that an epoch draws."""
        return (
            self._plan.sizes.num_ordered()
            if isinstance(self._plan, PreservedUpdates)
            else self._plan.planner.num_samples
        )

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end."""
        return self._start or self._cursor or self._plan.start(self._epoch, self.world.size)

    def __len__(self) -> int:
        """Steps of :attr:`epoch`: planned, so exact. The optimizer steps :attr:`num_updates` times."""
        key = (self.epoch, self.world.size, self.num_changes)
        if self._length is None or self._length[0] != key:
            start = self._plan.start(self.epoch, self.world.size)
            self._length = key, sum(len(u.batches) for u in self._plan.updates(start, 0, self.world.size))
        return self._length[1]

    def _walk(self) -> Walk:
        return self._plan

    @property
    def num_changes(self) -> int:
        """Grows whenever the number of updates changes at run time: by their size, or by what the budget has learned."""
        return len(self._plan.sizes.changes) if isinstance(self._plan, PreservedUpdates) else len(self._plan.past)

    def _forget(self) -> None:
        self._start = self._cursor = None

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from now on; call it on every rank after the same update.

        Updates that workers already prefetch keep their size: with ``num_workers=0`` the next update is the first one of
        the new size; otherwise the delay is at most ``num_workers * prefetch_factor`` batches.

        Returns:
            The number (from 0) of the first update that holds ``samples`` samples.
        """
        if not isinstance(self._plan, PreservedUpdates):
            raise ConfigError("set_samples_per_update needs a loader with samples_per_update: this one is free-running")
        planned = self._feed.planned[-1].after if self._feed.planned else self.cursor
        return self._plan.sizes.change(planned, samples, self.world.size)

    def _run(self) -> Iterator[Step[B]]:
        if self._start is None:
            self._apply_learned()
        cursor = self._start or self._plan.start(self._epoch, self.world.size)
        self._start, self._cursor = None, cursor
        self._compare_ranks(cursor)
        feed = self._feed
        feed.planned.clear()
        feed.source = self._plan.updates(cursor, self.world.rank, self.world.size)
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(int(np.random.SeedSequence((feed.seed, self._epoch)).generate_state(1)[0]))
        batches = iter(self._loader)
        for batch in batches:
            update = feed.planned[0]
            collected = [batch, *(next(batches) for _ in update.batches[1:])]
            feed.planned.popleft()
            steps = self._weighed(update, collected)
            self._cursor = update.after
            self.stats.add(update.stats)
            yield from steps

    def _apply_learned(self) -> None:
        """An epoch begins: plan it by what the budget has learned."""
        self._plan.start(self._epoch, self.world.size)  # counts the epochs before by the limits they had
        planner = self._plan.planner.renewed(self.world)
        if planner is not self._plan.planner:
            self._plan.replan(planner, self._epoch, self.world.size)

    def _weighed(self, update: PlannedUpdate, batches: Sequence[B]) -> list[Step[B]]:
        counts = [0 if idle else len(b) for b, idle in zip(update.batches, update.idle, strict=True)]
        weights = [
            0.0 if idle else float(self._weigh(b, n)) for b, n, idle in zip(batches, counts, update.idle, strict=True)
        ]
        total = self.world.all_sum([round(sum(weights) * WEIGHT_UNIT)])[0] / WEIGHT_UNIT
        last = len(batches) - 1
        return [
            Step(
                batch=batch,
                indices=indices,
                samples=Share(count, update.num_samples),
                weight=Share(weight, total),
                loss_scale=loss_scale(Share(weight, total), self.world.size),
                ends_update=number == last,
                idle=idle,
            )
            for number, (batch, indices, count, weight, idle) in enumerate(
                zip(batches, update.batches, counts, weights, update.idle, strict=True)
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        """Where training stands after the updates handed out: a few integers, JSON-able, the same on every rank."""
        cursor = self.cursor
        plan = self._plan
        preserved = isinstance(plan, PreservedUpdates)
        return {
            "version": STATE_VERSION,
            "fingerprint": plan.planner.fingerprint,
            "identity": plan.planner.identity,
            "cursor": asdict(cursor),
            "changes": [list(change) for change in plan.sizes.changes] if preserved else [],
            "past": [] if isinstance(plan, PreservedUpdates) else [list(counts) for counts in plan.past],
            "learned": LearningBudget.saved(self.budget),
            "order": plan.order.checksum(cursor.epoch) if preserved and plan.order is not None else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if not states:
            raise StateError("no state was given")
        state_dict = states[0]
        plan = self._plan
        LearningBudget.restore(self.budget, state_dict.get("learned"))
        plan.planner = plan.planner.rebuilt()
        cursor = _checked_state(state_dict, plan.planner)
        if isinstance(plan, FreeUpdates):
            plan.past = [(updates, samples) for updates, samples in state_dict["past"]]
        if isinstance(plan, PreservedUpdates):
            plan.sizes.restore(state_dict["changes"])
            if plan.order is not None and plan.order.checksum(cursor.epoch) != state_dict["order"]:
                raise StateError(
                    f"`sampler` gives other indices in epoch {cursor.epoch} than when the state was taken; "
                    "use the same seed and sampler"
                )
        self._epoch, self._start, self._cursor = cursor.epoch, cursor, None
        self._next = cursor.epoch + (next(plan.updates(cursor, 0, self.world.size), None) is None)

    def skip_to(self, epoch: int, samples_used: int, update: int) -> None:
        """Continue an epoch after its first ``samples_used`` samples, for checkpoints of fixed-batch runs."""
        if not isinstance(self._plan, PreservedUpdates):
            raise StateError("only updates with samples_per_update continue a fixed-batch run: its samples are known")
        seen = epoch * self.num_samples + samples_used
        self._epoch, self._next, self._cursor = epoch, epoch, None
        self._start = Cursor(epoch=epoch, update=update, samples_used=samples_used, samples_seen=seen)

    def _compare_ranks(self, cursor: Cursor) -> None:
        """All ranks must be about to plan the same updates of the same samples."""
        if self.world.size == 1:
            return
        plan = self._plan
        facts = [plan.planner.fingerprint.encode(), repr(cursor).encode()]
        if isinstance(plan, PreservedUpdates):
            sizes = [stop for _, stop, _ in plan.sizes.spans(cursor, self.world.size)]
            facts += [plan.order_of(cursor.epoch).tobytes(), repr(sizes).encode()]
        marks = [zlib.crc32(fact) for fact in facts]
        found = self.world.all_max([*marks, *(-mark for mark in marks)])
        names = ["lengths, budget or settings", "place in the epoch", "order of samples", "samples_per_update"]
        differing = [names[i] for i in range(len(marks)) if found[i] != -found[i + len(marks)]]
        if differing:
            raise AlignmentError(
                f"ranks differ in {', '.join(differing)} at the start of epoch {cursor.epoch}: "
                "seed samplers and schedules alike on every rank, and load the same state everywhere"
            )


PLAN_SETTINGS = ("window", "oversize", "round_batch", "hardest_first")


def _update_plan(
    lengths: Any,
    budget: Budget | int,
    samples_per_update: int | BatchSizeSchedule | None,
    accumulation: int,
    order: Iterable[int] | None,
    seed: int,
    drop_last: bool,
    settings: Mapping[str, Any],
) -> PreservedUpdates | FreeUpdates:
    unknown = sorted(set(settings) - set(PLAN_SETTINGS))
    if unknown:
        raise ConfigError(f"`plan` knows the settings {PLAN_SETTINGS}, but has {unknown}")
    if samples_per_update is None:
        if order is not None:
            raise ConfigError("`sampler` needs `samples_per_update`: free-running updates group samples across windows")
        planner = Planner(lengths, budget, PlanConfig(shuffle=True, seed=seed, **settings))
        return FreeUpdates(planner, accumulation=accumulation)
    if accumulation != 1:
        raise ConfigError(f"`accumulation` ({accumulation}) is whatever the memory needs with `samples_per_update`")
    planner = Planner(lengths, budget, PlanConfig(samples_per_update=LARGEST_UPDATE, seed=seed, **settings))
    source = None if order is None else OrderSource(order, planner.num_samples)
    return PreservedUpdates(planner, samples_per_update, source, drop_last=drop_last)


def _inner_loader(dataset: Any, feed: _Feed, kwargs: Mapping[str, Any]) -> DataLoader[Any]:
    taken = sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"} & set(kwargs))
    if taken:
        raise ConfigError(f"{taken} are decided by PlannedDataLoader: pass `sampler`, `seed` and `drop_last` instead")
    if kwargs.get("in_order") is False:
        raise ConfigError("`in_order=False` lets batches of different updates mix; leave it True")
    # A generator of its own: the DataLoader would draw its seed from torch's global one, and shift it on resuming.
    return DataLoader(_SeededDataset(dataset), batch_sampler=feed, generator=torch.Generator(), **kwargs)  # type: ignore[arg-type]


def _checked_state(state: Mapping[str, Any], planner: Planner) -> Cursor:
    checked_state(state, ("cursor", "changes", "past", "learned"), "a PlannedDataLoader", planner)
    try:
        cursor = Cursor(**state["cursor"])
    except TypeError as error:
        raise StateError(f"the state is damaged: cursor {state['cursor']!r}") from error
    if state["cursor"]["position"] is not None:
        where = dict(state["cursor"]["position"])
        where["segments"] = tuple((int(ranks), int(rows)) for ranks, rows in where["segments"])
        cursor = replace(cursor, position=Position(**where))
    return cursor
