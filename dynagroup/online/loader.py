"""The loader that forms batches after processing, when true lengths are known, with equal steps on all ranks."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
from dynagroup.distributed import PARTS, World
from dynagroup.errors import ConfigError, StateError
from dynagroup.fingerprint import described, ends_of
from dynagroup.lengths import LONGEST
from dynagroup.online.collator import LengthOf, Oversize, RefinementCollator
from dynagroup.online.engine import FreeRunner, Runner, UpdateRunner
from dynagroup.online.feeds import Workers, resumed
from dynagroup.online.protocol import Exchange, print_of
from dynagroup.online.requests import WINDOW_BYTES, EpochOrders, OnlineConfig, Source, handed_out
from dynagroup.online.state import LearnedLengths, standing, together
from dynagroup.plan.cost import Work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.plan.inputs import OneKind
from dynagroup.shapes import TOKENS, BatchShape, Streams, largest_within
from dynagroup.update.filling import Pad
from dynagroup.update.loader import StepLoader
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
        super().__init__(dataset, world=world, identity=identity)
        knobs: dict[str, Any] = {"work": work, "weigh": weigh, "one_kind": one_kind}
        how: dict[str, Any] = {
            "seed": seed,
            "shuffle": shuffle,
            "window": window,
            "window_bytes": window_bytes,
        }
        how |= {
            "samples_per_update": samples_per_update,
            "drop_last": drop_last,
            "accumulation": accumulation,
        }
        self.config = config = OnlineConfig(**knobs, **how)
        self.weigh = weigh
        self._orders = orders = EpochOrders(
            dataset, config, batch_sampler, sampler, length_hint, kinds
        )
        self.sizes, budget = orders.sizes, _bound(shapes, as_budget(budget), orders.hint, config)
        knobs |= {"oversize": oversize, "pad": pad, "kind_of": kind_of, "kinds": orders.kinds}
        collator = RefinementCollator(collate_fn, budget, length_of, **knobs)
        self._workers = Workers(dataset, collator, config, dataloader_kwargs)
        self._learned = (
            LearnedLengths(len(dataset))
            if batch_sampler is None and not self._workers.iterable
            else None
        )
        self._run_of: Runner | None = (
            None  # runner of the epoch that began last, unless another epoch was chosen since
        )
        self._resume: (
            list[Mapping[str, Any]] | None
        ) = []  # loaded states, until used; None: their epoch is used up
        self._cursor = Cursor()  # the point where the last epoch ended, or the loaded resume point
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
        taken, batches = {name: getattr(loader, name) for name in CARRIED}, loader.batch_sampler
        sampler: Any = batches.sampler if type(batches) is BatchSampler else loader.sampler
        every = lambda: len(sampler) == len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type]  # noqa: E731
        if type(batches) not in (BatchSampler, type(None)):
            taken["batch_sampler"] = batches
        elif type(sampler) is RandomSampler and not sampler.replacement and every():
            taken["shuffle"] = True
        elif not isinstance(loader.dataset, IterableDataset) and not (
            type(sampler) is SequentialSampler and every()
        ):
            taken["sampler"] = sampler
        return cls(**{**taken, **options, "budget": budget})

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
        ahead = 0 if self._run_of is None else self._workers.depth
        return [self.cursor, *islice(self._walk().cursors(self.cursor), ahead)][-1]

    def examples(self) -> tuple[Streams, Callable[[int], Any], Callable[..., Any]]:
        if self._workers.iterable:
            raise ConfigError(
                "preflight cannot try an iterable dataset, which gives a sample only once; leave it out"
            )
        places = self._example_places()
        samples, collator = [self.dataset[place] for place in places], self._workers.collator
        measured = collator.measure(
            samples, places
        ).items()  # compared over ranks, because processing may be random
        lengths = {
            name: np.asarray(self.world.all_max(units.tolist()), np.int32)
            for name, units in measured
        }
        return lengths, samples.__getitem__, collator.filling

    def _example_places(self) -> list[int]:
        return np.unique(np.linspace(0, len(self.dataset) - 1, EXAMPLES).astype(np.int64)).tolist()

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
        run, learned = self._run_of, self._learned
        running = None if run is None else run.state()
        if running is not None:
            running["order"] = self._orders.fingerprint(self._epoch)
        used_up = self._resume is None if run is None else running is None
        place = {
            "world_size": size,
            "rank": rank,
            "epoch": self._epoch + used_up,
            "running": running,
        }
        place["cursor"] = (self._cursor if run is None else run.stands).state()
        return {
            **place,
            "changes": self._changes,
            "lengths": None if learned is None else learned.state(),
        }

    @property
    def _changes(self) -> list[list[int]]:
        return [] if self.sizes is None else [list(change) for change in self.sizes.changes]

    def _checked(
        self, states: list[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], LearnedLengths | None]:
        needed = together(states, *self._rank_and_size())
        running, epoch, learned = needed[0]["running"], needed[0]["epoch"], self._learned
        if running is not None and running["order"] != self._orders.fingerprint(epoch):
            must = f"must give the same indices in epoch {epoch} as in the saved run"
            raise StateError(
                f"`{self._orders.decided_by}` {must}; seed its generator the same, or give it a set_epoch"
            )
        return needed, None if learned is None else learned.restored(
            [state["lengths"] for state in needed]
        )

    def _restore(self, found: tuple[list[Mapping[str, Any]], LearnedLengths | None]) -> None:
        needed, self._learned = found
        own = needed[0]
        if self.sizes is not None:
            self.sizes.restore(own["changes"])
        cursor, running, self._run_of = Cursor.of(own["cursor"]), own["running"], None
        self._epoch, self._next = cursor.epoch, own["epoch"]
        self._resume = needed if running else [] if cursor.epoch == own["epoch"] else None
        self._cursor = handed_out(cursor, running["under_way"], self.sizes) if running else cursor
        self._workers.loader = None

    def _start(self, done: Cursor) -> Cursor:
        return begun(self._next, done) if self.sizes is None else self.sizes.start(self._next)

    def _forget(self) -> None:
        self._cursor, self._run_of, self._resume = self._start(self.cursor), None, []

    def _walk(self) -> Walk:
        if self.sizes is None:
            raise ConfigError(
                "the number of updates is known in advance only with `samples_per_update`, and for a sized dataset"
            )
        return self.sizes

    def _run(self, send: Callable[[Any], Any] | None) -> Iterator[Step[Any]]:
        if self._resume is None:
            return
        run = self._begin(send)
        try:
            for step in run:
                self._run_of, self._resume = (
                    run,
                    [],
                )  # not before: until then, a state is that of before the epoch
                yield step
            self._run_of, self._resume = run, []
        except Exception:
            self._workers.loader = None  # its workers may be dead
            raise
        finally:
            run.close()

    def _begin(self, send: Callable[[Any], Any] | None) -> Runner:
        world, epoch, workers = self.world, self._epoch, self._workers
        if (size := self._orders.size) is not None and size != len(self.dataset):
            raise ConfigError(
                f"the dataset has {len(self.dataset)} samples, but had {size} before; make a new loader"
            )
        states = (
            together(self._resume, world.rank, world.size) if self._resume else []
        )  # loaded by one rank
        cursor, self._resume = Cursor.of(states[0]["cursor"]) if states else self._cursor, states
        learner = None if states else self.budget.learner
        learned = self._learned if cursor.samples_seen and not states else None
        if learned is not None or learner is not None:
            Exchange(world, epoch).highest([])  # raises if ranks are at different points of the run
        if learned is not None:
            learned.merge(world)
        if learner is not None:
            learner.apply(world)
        workers.seed(self.config.seed, epoch, world.rank, cursor.steps)
        order, groups = self._orders.of_epoch(epoch), self._orders.groups(epoch)
        # Plans use one limit for a whole epoch; workers split batches that later turn out not to fit.
        limit, under_way = (
            map(states[0]["running"].get, ("limit", "under_way"))
            if states
            else (self.budget.applied, 0)
        )
        source = Source(
            world,
            self.config,
            self.budget,
            workers.iterable,
            cursor,
            order,
            self.sizes,
            groups,
            limit,
        )
        source, place, joined = resumed(source, states, self._learned, self._orders)
        stands = [joined.steps, *(standing(state) for state in states[:1])]
        identity = (
            {**self._of_ranks(source), "point of the saved states": stands}
            if world.size > 1
            else {}
        )
        make = FreeRunner if self.sizes is None else UpdateRunner
        return make(
            source, workers, joined, place, under_way, identity, self.stats, self._learned, send
        )

    def _of_ranks(self, source: Source) -> dict[str, Any]:
        orders, sizes, base, epoch = (
            self._orders,
            self.sizes,
            source.order.base,
            source.cursor.epoch,
        )
        varying = None if sizes is None or sizes.is_constant else sizes.spans(sizes.start(epoch))
        order = [
            orders.decided_by,
            None if orders.num_samples is None else orders.fingerprint(epoch),
        ]
        told: dict[str, Any] = {
            "order": [*order, None if base is None else print_of(base.tolist())],
            "epoch": epoch,
        }
        told[PARTS] = (
            ends_of(self.dataset) if orders.size and orders.decided_by != "batch_sampler" else ""
        )
        told["lengths of earlier epochs"] = (
            None if self._learned is None else described(self._learned.seen)
        )
        told["num_workers"] = [self._workers.num_workers, self._workers.depth]
        told["sizes of updates"] = varying and [stop for _, stop, _ in varying]
        own = {
            "kind_of",
            *["weigh"] * callable(self.config.weigh),
        }  # functions may depend on the rank's device
        return {
            name: value for name, value in {**self._identity(), **told}.items() if name not in own
        }


def _bound(shapes: int | None, budget: Budget, hint: Any, config: OnlineConfig) -> Budget:
    """Returns the budget; or with ``shapes``, a budget of so many shapes for lengths like ``hint``, and the longest."""
    bound = budget.bind({TOKENS: np.ones(1, np.int32)})
    if bound is not budget and bound.fingerprint != budget.fingerprint:
        way_out = "give MemoryBudget(..., longest=tokens of the longest sample), one .from_bytes, or a TokenBudget"
        raise ConfigError(
            f"`budget` needs all lengths, which an OnlineDataLoader does not know in advance; {way_out}"
        )
    if shapes is None:
        return budget
    if hint is None:
        raise ConfigError(
            "`shapes` needs `length_hint` (a Trainer's `lengths`): about the tokens of each sample"
        )
    tokens = np.ceil(hint).clip(0, LONGEST).astype(np.int64)
    longest = largest_within(lambda count: budget.fits(BatchShape.of(1, count)), 1, LONGEST)
    how = {
        "samples_per_update": config.samples_per_update,
        "window": config.window,
        "work": config.work,
    }
    return few_shapes(shapes, np.append(tokens, longest), budget, **how)
