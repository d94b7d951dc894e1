"""The loader that forms batches after processing, when true lengths are known, with equal steps on all ranks."""

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import PARTS, World, on_all_ranks
from dynagroup.errors import ConfigError, StateError
from dynagroup.fingerprint import described, ends_of
from dynagroup.lengths import LONGEST
from dynagroup.online.collator import LengthOf, Oversize, RefinementCollator
from dynagroup.online.engine import FreeRunner, Runner, UpdateRunner
from dynagroup.online.feeds import Workers, joined, resumed
from dynagroup.online.protocol import Exchange, print_of
from dynagroup.online.requests import WINDOW_BYTES, EpochOrders, OnlineConfig, Source, handed_out
from dynagroup.online.state import LearnedLengths, State, standing, together
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.plan.inputs import OneKind
from dynagroup.shapes import TOKENS, BatchShape, Streams, largest_within
from dynagroup.update.filling import Pad
from dynagroup.update.loader import StepLoader, check_options
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import BatchSizeSchedule, Walk, begun
from dynagroup.update.step import Step

EXAMPLES = 256  # samples, evenly spread over the dataset, from which lengths are learned
CARRIED = (
    "dataset",
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
)


class OnlineDataLoader(StepLoader[Any]):
    """Forms batches after processing, when true lengths are known; all ranks take the same number of steps.

    Workers process a window of samples, measure them, and cut the window into batches that fit; ranks agree on steps.
    Over all ranks every sample is used exactly once per epoch; a rank without samples repeats a small batch with weight
    0. The loader has no ``len()``, but with ``samples_per_update`` an exact ``num_updates``.

    Args:
        dataset: map-style (with ``__getitems__``, if defined); or iterable, sharded over ranks and workers by itself.
        budget: limit of a batch, such as ``TokenBudget(16384)`` or just 16384. A MemoryBudget needs ``longest``.
        collate_fn: function from processed samples to a batch. None: torch's ``default_collate``.
        length_of: function from a processed sample to its tokens, or to a dict by stream. None: length of
            ``input_ids``. If ``collate_fn`` makes the tokens: ``collated_length(collate_fn)``. A collated batch that does
            not fit is cut and collated again, so ``collate_fn`` must not change a sample's lists or tensors in place.
        batch_sampler: this rank's batches of dataset indices, which are cut to fit. The loader then forms no windows.
        sampler: dataset indices for all ranks together, the same on every rank. None: dataset order.
        shuffle: True draws samples in random order, seeded by ``seed`` and the epoch.
        length_hint: a number per sample (or a file's path), or a function from index to number, in any unit that grows
            with length. Ranks then get samples of similar length from the first epoch on; without, from the second.
        window: int, samples planned together on one rank; each worker has this many processed samples in memory. With
            ``samples_per_update`` the window is this rank's part of an update.
        samples_per_update: samples of each update over all ranks: int, or a schedule ``(update, current) -> int``, see
            :mod:`dynagroup.update.schedule`. A rank that gets no samples of an update is idle in it.
        grouping: int: each rank requests its part of this many updates together. A worker sorts it by true length and
            deals it anew into updates of the same size, each with chunks of short, middle and long samples, so that
            batches need little padding (:mod:`dynagroup.plan.strata`). A worker then has ``grouping`` windows in memory.
        strata: int, chunks of each update; None: 4 or more. Only with ``grouping``.
        drop_last: True leaves out an epoch's last update if it is too small.
        accumulation: int, steps per update, if ``samples_per_update`` is None.
        seed: int of at least 0, for the order and for random numbers in workers.
        weigh: weight of a batch: "tokens" (labels that a causal model predicts), "labels" (all), "samples", or a function.
        oversize: a sample that does not fit even alone: "alone" (a batch of its own, one warning) or "error".
        work: predicted time of a batch, e.g. ``Work.of(model)``; None: that of a small decoder on this device.
        kind_of: function from a processed sample to a hashable label, such as "image". All batches of a step, on all
            ranks, then have samples of one kind (``step.kind``); a rank without such samples runs an idle batch.
        kinds: the label of each sample of the dataset, instead of ``kind_of``.
        one_kind: "batch": only each batch has one kind; batches of one step may have different kinds.
        window_bytes: int, about how many bytes of processed samples a worker returns at a time, which limits shared
            memory. None: whole windows. With ``samples_per_update`` windows are always whole.
        shapes: int, largest number of batch shapes (samples, tokens) that a compiled model sees; they are chosen from
            ``length_hint``, in tokens. Or pass a ``ShapeLadder`` as ``budget``. See :class:`PlannedDataLoader`.
        pad: dict from field to padding value, for fields that transformers does not have; or a function.
        identity: a text, or another value for JSON, that a saved state must have in common with the run that loads it,
            for example the version of your code and data. Settings and lengths are compared without it.
        world: ranks that share the data; None: all of ``torch.distributed``, if initialised.
        **dataloader_kwargs: for torch's ``DataLoader``: ``num_workers``, ``pin_memory``, ``prefetch_factor`` (windows).

    Raises ConfigError if an argument is wrong, or contradicts another; during iteration AlignmentError if ranks have
    different data, seeds or settings, or one failed or stopped.

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
        grouping: int | None = None,
        strata: int | None = None,
        drop_last: bool = False,
        accumulation: int = 1,
        seed: int = 0,
        weigh: Weigh = "tokens",
        oversize: Oversize = "alone",
        work: Work | None = None,
        shapes: int | None = None,
        pad: Pad | None = None,
        kind_of: Callable[[Any], Hashable] | None = None,
        kinds: Iterable[Hashable] | None = None,
        one_kind: OneKind = "step",
        identity: Any = None,
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        check_options(OnlineDataLoader, dataloader_kwargs)
        super().__init__(dataset, world=world, identity=identity)
        self.config = config = OnlineConfig(
            window=window,
            samples_per_update=samples_per_update,
            grouping=grouping,
            strata=strata,
            drop_last=drop_last,
            accumulation=accumulation,
            seed=seed,
            shuffle=shuffle,
            weigh=weigh,
            window_bytes=window_bytes,
            work=check_work(work),
            one_kind=one_kind,
        )
        self.weigh = weigh
        self._orders = EpochOrders(dataset, config, batch_sampler, sampler, length_hint, kinds)
        self.sizes = self._orders.sizes
        collator = RefinementCollator(
            collate_fn,
            _bound(shapes, as_budget(budget), self._orders.hint, config),
            length_of,
            weigh=weigh,
            oversize=oversize,
            work=config.work,
            pad=pad,
            kind_of=kind_of,
            kinds=self._orders.kinds,
            one_kind=one_kind,
        )
        self._workers = Workers(dataset, collator, config, dataloader_kwargs)
        self._learned: LearnedLengths | None = None
        if batch_sampler is None and not self._workers.iterable:
            self._learned = LearnedLengths(len(dataset))
        # Runner of the epoch that began last, unless another epoch was chosen since.
        self._run_of: Runner | None = None
        # Loaded states, until used; None: their epoch is used up.
        self._resume: list[State] | None = []
        # The point where the last epoch ended, or the loaded resume point.
        self._cursor = Cursor()
        learner = collator.budget.learner
        if learner is not None and self._workers.persistent:
            learner.share_memory()

    @classmethod
    def from_dataloader(
        cls, loader: DataLoader[Any], budget: Budget | int, **options: Any
    ) -> "OnlineDataLoader":
        """Makes an online loader with a ``DataLoader``'s dataset, order, workers and collate function; ``options`` override
        these. A ``RandomSampler`` becomes ``shuffle=True``; ``drop_last`` is ignored. ConfigError: accelerate prepared it."""
        if type(loader).__module__.startswith("accelerate."):
            raise ConfigError(
                "`loader` was prepared by accelerate, which divides its batches; give the one before prepare()"
            )
        settings = {name: getattr(loader, name) for name in CARRIED} | _order_of(loader)
        return cls(**(settings | options), budget=budget)

    @property
    def budget(self) -> Budget:
        return self._workers.collator.budget

    @property
    def num_samples(self) -> int | None:
        return self._orders.num_samples

    @property
    def cursor(self) -> Cursor:
        return self._cursor if self._run_of is None else self._run_of.cursor

    def _asked(self) -> Cursor:
        """Returns the point in the run after the updates that workers prefetch."""
        ahead = 0
        if self._run_of is not None:
            ahead = (self._workers.depth + 1) * self.config.pooled_updates - 1
        asked = self.cursor
        for cursor in islice(self._walk().cursors(self.cursor), ahead):
            asked = cursor
        return asked

    def examples(self) -> tuple[Streams, Callable[[int], Any], Callable[..., Any]]:
        if self._workers.iterable:
            raise ConfigError(
                "preflight cannot try an iterable dataset, which gives a sample only once; leave it out"
            )
        samples, measured = on_all_ranks(
            self.world, self._measured_examples, "read and measure a few samples"
        )
        lengths = {
            # Ranks take the largest, because processing may be random.
            name: np.asarray(self.world.all_max(units.tolist()), np.int32)
            for name, units in measured.items()
        }
        return lengths, samples.__getitem__, self._workers.collator.filling

    def _measured_examples(self) -> tuple[list[Any], Streams]:
        places = self._example_places()
        samples = [self.dataset[place] for place in places]
        return samples, self._workers.collator.measure(samples, places)

    def _example_places(self) -> list[int]:
        places = np.linspace(0, len(self.dataset) - 1, EXAMPLES).astype(np.int64)
        return np.unique(places).tolist()

    def kind_of_example(self, number: int, sample: Any) -> Any:
        place = self._example_places()[number]
        return self._workers.collator.labels([sample], [place])[0]

    def _identity(self) -> dict[str, Any]:
        return {**self.config.identity(), **self._orders.identity, **self._workers.identity}

    def _state(self) -> dict[str, Any]:
        rank, size = self._rank_and_size()
        if self._resume:
            if len(self._resume) > 1 or self._resume[0]["world_size"] != size:
                raise StateError(
                    "a state was just loaded on another number of ranks; run one step before saving again"
                )
            return {**self._resume[0], "changes": self._changes}
        run = self._run_of
        running = None if run is None else run.state()
        if running is not None:
            running["order"] = self._orders.fingerprint(self._epoch)
        epoch = self._epoch
        is_used_up = self._resume is None if run is None else running is None
        if is_used_up:
            epoch += 1
        return {
            "world_size": size,
            "rank": rank,
            "epoch": epoch,
            "running": running,
            "cursor": (self._cursor if run is None else run.stands).state(),
            "changes": self._changes,
            "lengths": None if self._learned is None else self._learned.state(),
        }

    @property
    def _changes(self) -> list[list[int]]:
        return [] if self.sizes is None else [list(change) for change in self.sizes.changes]

    def _place_to_begin(self) -> tuple[Cursor, list[State] | None]:
        return self.cursor, self._resume

    def _go_back(self, place: tuple[Cursor, list[State] | None]) -> None:
        self._cursor, self._resume = place
        self._run_of = None

    def _checked(self, states: list[State]) -> tuple[list[State], LearnedLengths | None]:
        needed = together(states, *self._rank_and_size())
        running = needed[0]["running"]
        epoch = needed[0]["epoch"]
        if running is not None and running["order"] != self._orders.fingerprint(epoch):
            raise StateError(
                f"`{self._orders.decided_by}` must give the same indices in epoch {epoch} as in the saved "
                "run; seed its generator the same, or give it a set_epoch"
            )
        if self._learned is None:
            return needed, None
        return needed, self._learned.restored([state["lengths"] for state in needed])

    def _restore(self, found: tuple[list[State], LearnedLengths | None]) -> None:
        states, self._learned = found
        state = states[0]
        running = state["running"]
        if self.sizes is not None:
            self.sizes.restore(state["changes"])
        cursor = Cursor.of(state["cursor"])
        self._run_of = None
        self._epoch = cursor.epoch
        self._next = state["epoch"]
        self._workers.loader = None
        if running:
            self._resume = states
            self._cursor = handed_out(cursor, running["under_way"], self.sizes)
        else:
            self._resume = [] if cursor.epoch == state["epoch"] else None
            self._cursor = cursor

    def _start(self, done: Cursor) -> Cursor:
        return begun(self._next, done) if self.sizes is None else self.sizes.start(self._next)

    def _forget(self) -> None:
        self._cursor = self._start(self.cursor)
        self._run_of = None
        self._resume = []

    def _walk(self) -> Walk:
        if self.sizes is None:
            raise ConfigError(
                "the number of updates is known in advance only with `samples_per_update`, and for a sized dataset"
            )
        return self.sizes

    def _run(self, send: Callable[[Any], Any] | None) -> Generator[Step[Any]]:
        if self._resume is None:
            return
        run = self._begin(send)
        try:
            for step in run:
                # Not before: until then, a state is that of before the epoch.
                self._run_of = run
                self._resume = []
                yield step
            self._run_of = run
            self._resume = []
        except Exception:
            self._workers.loader = None  # its workers may be dead
            raise
        finally:
            run.close()

    def _begin(self, send: Callable[[Any], Any] | None) -> Runner:
        world = self.world
        epoch = self._epoch
        workers = self._workers
        size = self._orders.size
        if size is not None and size != len(self.dataset):
            raise ConfigError(
                f"the dataset has {len(self.dataset)} samples, but had {size} before; make a new loader"
            )
        states = self._resume or []
        if states:  # they may be those that one rank loaded for all
            states = together(states, world.rank, world.size)
        self._resume = states
        cursor = joined(states, world.rank, world.size) if states else self._cursor
        if not states:
            self._learn(cursor)
        workers.seed(self.config.seed, epoch, world.rank, cursor.steps)
        running = states[0]["running"] if states else {"limit": self.budget.applied, "under_way": 0}
        source = Source(
            world=world,
            config=self.config,
            budget=self.budget,
            iterable=workers.iterable,
            epoch=epoch,
            order=self._orders.of_epoch(epoch),
            sizes=self.sizes,
            groups=self._orders.groups(epoch),
            # Plans use one limit for a whole epoch; workers split batches that later turn out not to fit.
            limit=running["limit"],
        )
        source, place = resumed(source, states, self._learned, self._orders)
        identity: dict[str, Any] = {}
        if world.size > 1:
            saved = [standing(state) for state in states[:1]]
            identity = self._of_ranks(source)
            identity["point of the saved states"] = [cursor.steps, *saved]
        make = FreeRunner if self.sizes is None else UpdateRunner
        return make(
            source=source,
            workers=workers,
            stands=cursor,
            place=place,
            under_way=running["under_way"],
            identity=identity,
            stats=self.stats,
            learned=self._learned,
            send=send,
        )

    def _learn(self, cursor: Cursor) -> None:
        """Combines what all ranks have learned in earlier epochs: lengths, and limits of the budget."""
        learner = self.budget.learner
        has_learned = self._learned is not None and cursor.samples_seen > 0
        if has_learned or learner is not None:
            # Raises if ranks are at different points of the run.
            Exchange(self.world, self._epoch).highest([])
        if self._learned is not None and has_learned:
            self._learned.merge(self.world)
        if learner is not None:
            learner.apply(self.world)

    def _of_ranks(self, source: Source) -> dict[str, Any]:
        """Returns what must be equal on all ranks, without functions, which may depend on a rank's device."""
        orders = self._orders
        sizes = self.sizes
        base = source.order.base
        has_order = orders.num_samples is not None
        has_parts = orders.size and orders.decided_by != "batch_sampler"
        stops = None
        if sizes is not None and not sizes.is_constant:
            stops = [stop for _, stop, _ in sizes.spans(sizes.start(source.epoch))]
        values = self._identity()
        del values["kind_of"]
        if callable(self.config.weigh):
            del values["weigh"]
        # What belongs together is one value: all values of usual runs are compared in one exchange.
        dealing = [values.pop(name) for name in ("grouping", "strata")]
        updates = [values.pop(name) for name in ("samples_per_update", "accumulation", "drop_last")]
        return {
            **values,
            "grouping and strata": dealing,
            "order": [
                orders.decided_by,
                orders.fingerprint(source.epoch) if has_order else None,
                None if base is None else print_of(base.tolist()),
            ],
            "epoch": source.epoch,
            PARTS: ends_of(self.dataset) if has_parts else "",
            "lengths of earlier epochs": self._learned and described(self._learned.seen),
            "num_workers": [self._workers.num_workers, self._workers.depth],
            "sizes of updates": [*updates, stops],
        }


def _order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the arguments that make an online loader use a ``DataLoader``'s order."""
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return {"batch_sampler": batches}
    if isinstance(loader.dataset, IterableDataset):
        return {}
    sampler: Any = loader.sampler if batches is None else batches.sampler
    is_known = type(sampler) in (RandomSampler, SequentialSampler)
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if not is_known or not len(sampler) == len(sampler.data_source) == num_samples:
        return {"sampler": sampler}
    if type(sampler) is SequentialSampler:
        return {}
    return {"sampler": sampler} if sampler.replacement else {"shuffle": True}


def _bound(shapes: int | None, budget: Budget, hint: Any, config: OnlineConfig) -> Budget:
    """Returns the budget; or with ``shapes``, a budget of so many shapes for lengths like ``hint``, and the longest."""
    bound = budget.bind({TOKENS: np.ones(1, np.int32)})
    if bound is not budget and bound.fingerprint != budget.fingerprint:
        raise ConfigError(
            "`budget` needs all lengths, which an OnlineDataLoader does not know in advance; give "
            "MemoryBudget(..., longest=tokens of the longest sample), one .from_bytes, or a TokenBudget"
        )
    if shapes is None:
        return budget
    if hint is None:
        raise ConfigError(
            "`shapes` needs `length_hint` (a Trainer's `lengths`): about the tokens of each sample"
        )
    tokens = np.ceil(hint).clip(0, LONGEST).astype(np.int64)
    longest = largest_within(lambda count: budget.fits(BatchShape.of(1, count)), 1, LONGEST)
    return few_shapes(
        shapes,
        np.append(tokens, longest),
        budget,
        samples_per_update=config.samples_per_update,
        window=config.window,
        grouping=config.grouping,
        work=config.work,
        strata=config.strata,
    )
