"""The loader whose batches fit after processing, in equal steps on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.online.collator import LengthOf, Oversize, RefinementCollator
from dynagroup.online.datasets import is_stream
from dynagroup.online.plans import WINDOW_BYTES, EpochOrders, OnlineConfig
from dynagroup.online.protocol import Uneven
from dynagroup.online.steps import OnlineSteps
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.shapes import TOKENS, IntArray
from dynagroup.update.loader import checked_kwargs
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import BatchSizeSchedule

__all__ = ["OnlineDataLoader"]


class OnlineDataLoader(OnlineSteps):
    """A loader that cuts batches where true lengths are known, after processing, and keeps ranks in step.

    Workers process a window of samples, measure it, and cut it into batches that fit; ranks agree on the number of steps
    with one small all-reduce pair for several steps. Every sample is emitted exactly once an epoch over all ranks.

    How many steps an epoch takes is not known beforehand, so there is no ``len()``. With ``samples_per_update`` every update has
    exactly that many samples, and ``num_updates`` is exact; an update takes one step or more.

    Args:
        dataset: map-style (``__getitems__`` is used where there is one); or iterable, which divides itself among ranks and
            workers.
        budget: what fits, e.g. ``TokenBudget(16384)``; a number means so many tokens. A MemoryBudget needs its ``longest``.
        collate_fn: processed samples -> batch; default: torch's ``default_collate``.
        length_of: processed sample -> tokens, or -> {stream: units}; default: length of its ``input_ids``, or where the collate
            function changes that, or makes the ids, what it makes of the sample alone.
        batch_sampler: this rank's batches of dataset indices; each is cut to fit, in place of windows that the loader forms.
        sampler: dataset indices of all ranks together, in their order, the same on every rank. Default: 0, 1, 2 ...
        shuffle: draw them in an order that follows from ``seed`` and the epoch.
        length_hint: a number a sample, or index -> number, in any unit that grows with length: similar samples then
            meet in a window in the first epoch already. Later epochs are planned by the lengths that were seen.
        window: samples that are sorted and grouped together on one rank; so many wait in memory, processed, for each worker.
            With ``samples_per_update`` the window is this rank's share of an update, whatever stands here.
        samples_per_update: samples of every update over all ranks: an int, or a schedule ``(update, current) -> int``, see
            :mod:`dynagroup.update.schedule`. A rank without samples of an update idles in it.
        drop_last: leave out an epoch's last update where it is smaller than asked.
        accumulation: steps of an update where ``samples_per_update`` is None.
        seed: an int from 0; of the order and of what workers draw at random.
        weigh: what a batch weighs against the others; say what the loss is a mean of: "tokens" (labels that a causal model
            predicts, -100 left out), "samples", or a function from a batch to a number.
        uneven: where one rank has no samples left: "idle" (it repeats a small batch with weight 0 until all have ended) or
            "stop" (the epoch ends for all; what the others still had is not used; not with ``samples_per_update``).
        oversize: a sample that does not fit even alone: "alone" (emitted by itself, warned of once, counted in
            ``stats.oversize``) or "error".
        work: predicted time of a batch; ``Work.of(model)`` knows better than the default.
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
        work: Work = DEFAULT_WORK,
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        knobs = {"work": work, "weigh": weigh}
        sized = {"samples_per_update": samples_per_update, "drop_last": drop_last, "accumulation": accumulation}
        config = OnlineConfig(
            window=window, window_bytes=window_bytes, seed=seed, shuffle=shuffle, uneven=uneven, **knobs, **sized
        )
        collator = RefinementCollator(collate_fn, as_budget(budget), length_of, oversize=oversize, **knobs)
        iterable, kwargs = is_stream(dataset), worker_kwargs(dataloader_kwargs)
        sources = {"batch_sampler": batch_sampler, "sampler": sampler}
        check_sources(sources, iterable=iterable, per_update=samples_per_update is not None, shuffle=config.shuffle)
        check_budget(collator.budget)
        orders = EpochOrders(None if iterable else len(dataset), config, **sources)
        learns = not iterable and batch_sampler is None
        hint = None if length_hint is None else as_hint(length_hint, len(dataset))
        super().__init__(dataset, config, collator, orders, hint=hint, kwargs=kwargs, learns=learns, world=world)

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


OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn", "dataset")


def worker_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What goes on to torch's ``DataLoader``, checked."""
    for name in OURS:
        if name in kwargs:
            raise ConfigError(f"`{name}` is not an argument of OnlineDataLoader: the budget decides what a batch is")
    checked = checked_kwargs(kwargs)
    if checked.get("num_workers", 0) > 0:
        checked.setdefault("prefetch_factor", 1)  # windows: a worker prepares one while another is used
    return checked


def check_budget(budget: Budget) -> None:
    """Refuse a budget whose limit is taken from the lengths of a whole dataset: nobody knows them beforehand."""
    if budget.bind({TOKENS: np.ones(1, np.int32)}).fingerprint != budget.fingerprint:
        raise ConfigError(
            "`budget` takes its limit from the lengths of the whole dataset, which an OnlineDataLoader does not know "
            "beforehand; give MemoryBudget(..., longest=tokens of the longest sample), MemoryBudget.from_bytes or a TokenBudget"
        )


def check_sources(sources: Mapping[str, Any], *, iterable: bool, per_update: bool, shuffle: bool) -> None:
    """Refuse two orders at once, and orders that the dataset or the ranks cannot follow."""
    given = [name for name, source in sources.items() if source is not None] + ["shuffle"] * shuffle
    if len(given) > 1:
        raise ConfigError(f"`{given[0]}` and `{given[1]}` exclude each other: both decide the order of samples")
    if iterable and given:
        raise ConfigError(f"`{given[0]}` needs a map-style dataset; an iterable one brings its own order")
    if per_update and (iterable or sources["batch_sampler"] is not None):
        raise ConfigError(
            "`samples_per_update` needs a map-style dataset and no `batch_sampler`: an update's samples are drawn "
            "from one order over all ranks; of an iterable dataset set `accumulation`"
        )
    for name, source in sources.items():
        if isinstance(source, Iterator):
            raise ConfigError(
                f"`{name}` is a {type(source).__name__}, which is used up after one epoch; give a list, or a Sampler"
            )
        try:
            iter(() if source is None else source)
        except TypeError:  # also of what has __getitem__ or __iter__ and holds a single number
            raise ConfigError(f"`{name}` must be an iterable, but is {source!r}") from None
    ranks = getattr(sources["sampler"], "num_replicas", 1)
    if isinstance(ranks, int) and ranks > 1:
        raise ConfigError(
            f"`sampler` divides its indices among {ranks} ranks already ({type(sources['sampler']).__name__}); give the "
            "undivided one: the loader hands out samples to ranks itself"
        )


def as_hint(hint: Any, num_samples: int) -> IntArray:
    values = [hint(i) for i in range(num_samples)] if callable(hint) else hint
    array = np.asarray(values)
    if array.shape != (num_samples,) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise ConfigError(
            f"`length_hint` must be one finite number for each of the {num_samples} samples, or a function from index to "
            f"number, but is an array of {array.dtype} {array.shape}"
        )
    if array.dtype.kind == "f":
        wide = array.astype(np.float64)  # 2**40 is beyond float16
        array = wide * (2**40 / (float(np.abs(wide).max(initial=1.0)) or 1.0))
    return array.astype(np.int64)


CARRIED = {
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
"""Taken over where they are not torch's defaults."""


def taken_over(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments of an OnlineDataLoader that does what this loader did. The loader is not changed."""
    taken = {name: getattr(loader, name) for name in ("dataset", "collate_fn", "num_workers", "pin_memory")}
    values = {name: getattr(loader, name, default) for name, default in CARRIED.items()}
    taken |= {name: value for name, value in values.items() if value is not None and value != CARRIED[name]}
    if isinstance(loader.dataset, IterableDataset):
        return taken
    if loader.drop_last:
        warnings.warn("drop_last=True is not taken over: every sample is used once an epoch", stacklevel=3)
    sampler = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return {**taken, "batch_sampler": loader.batch_sampler}
    if isinstance(sampler, SequentialSampler):
        return taken
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return {**taken, "shuffle": True}
    return {**taken, "sampler": sampler}
