"""The loader whose batches fit after processing, in equal steps on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.online.collator import LengthOf, Oversize, RefinementCollator
from dynagroup.online.config import (
    WINDOW_BYTES,
    OnlineConfig,
    check_budget,
    check_sources,
    taken_over,
    worker_kwargs,
)
from dynagroup.online.datasets import is_stream
from dynagroup.online.plans import EpochOrders
from dynagroup.online.protocol import Uneven
from dynagroup.online.steps import OnlineSteps
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.plan.padded import Objective
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
        objective: batches are cut for least predicted "time", or for the "fewest" batches.
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
        objective: Objective = "time",
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        config = OnlineConfig(
            window=window,
            window_bytes=window_bytes,
            samples_per_update=samples_per_update,
            drop_last=drop_last,
            accumulation=accumulation,
            seed=seed,
            shuffle=shuffle,
            weigh=weigh,
            uneven=uneven,
            work=work,
            objective=objective,
        )
        cutting = {"weigh": weigh, "oversize": oversize, "work": work, "objective": objective}
        collator = RefinementCollator(collate_fn, as_budget(budget), length_of, **cutting)
        iterable, kwargs = is_stream(dataset), worker_kwargs(dataloader_kwargs)
        sources = {"sampler": sampler, "batch_sampler": batch_sampler}
        check_sources(iterable=iterable, per_update=samples_per_update is not None, shuffle=config.shuffle, **sources)
        check_budget(collator.budget)
        orders = EpochOrders(None if iterable else len(dataset), config, **sources)
        learns = not iterable and batch_sampler is None
        super().__init__(dataset, config, collator, orders, hint=length_hint, kwargs=kwargs, learns=learns, world=world)

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
