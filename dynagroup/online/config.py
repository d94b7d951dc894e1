"""What an online loader is told, checked once; or read from an existing ``DataLoader``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from dynagroup.budget.base import Budget
from dynagroup.errors import ConfigError
from dynagroup.online.protocol import Uneven
from dynagroup.plan.cost import DEFAULT_WORK, Work, check_work
from dynagroup.plan.padded import OBJECTIVES, Objective
from dynagroup.shapes import TOKENS
from dynagroup.update.loader import checked_kwargs
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import BatchSizeSchedule, checked_samples
from dynagroup.validation import check_choice, check_flag, check_int

__all__ = ["OnlineConfig", "as_hint", "check_budget", "check_sources", "taken_over", "worker_kwargs"]

WINDOW_BYTES = 1 << 28
OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn", "dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    """How a loader forms steps. Knows no data and no ranks."""

    window: int = 1024
    """Samples sorted and grouped together on one rank."""
    samples_per_update: int | BatchSizeSchedule | None = None
    """Samples of an update over all ranks; None: no update boundaries but ``accumulation``."""
    drop_last: bool = False
    """Leave out an epoch's last update if it is smaller than asked."""
    accumulation: int = 1
    """Steps of an update where ``samples_per_update`` is None."""
    seed: int = 0
    shuffle: bool = False
    weigh: Weigh = "tokens"
    uneven: Uneven = "idle"
    """When a rank runs out: the others go on while it idles, or "stop" ends the epoch for all and counts what was left."""
    window_bytes: int | None = WINDOW_BYTES
    """A worker hands over about so many bytes of processed samples at a time; None: whole windows."""
    work: Work = DEFAULT_WORK
    """Predicted time of a batch."""
    objective: Objective = "time"
    """What cutting makes least: predicted time, or the number of batches."""

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("accumulation", 1), ("seed", 0)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least=least))
        check_choice("uneven", self.uneven, ("idle", "stop"))
        check_choice("objective", self.objective, OBJECTIVES)
        for name in ("shuffle", "drop_last"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        object.__setattr__(self, "work", check_work(self.work))
        if self.window_bytes is not None:
            object.__setattr__(self, "window_bytes", check_int("window_bytes", self.window_bytes))
        if self.samples_per_update is not None:
            if self.accumulation != 1:
                raise ConfigError(
                    f"`accumulation` ({self.accumulation}) and `samples_per_update` exclude each other: an update takes "
                    "as many steps as its samples need"
                )
            if self.uneven == "stop":
                raise ConfigError(
                    "`uneven='stop'` and `samples_per_update` exclude each other: an update is whole on all ranks; to leave out "
                    "the epoch's last one where it is smaller, pass `drop_last=True`"
                )
            if not callable(self.samples_per_update):
                object.__setattr__(self, "samples_per_update", checked_samples(self.samples_per_update))
        elif self.drop_last:
            raise ConfigError("`drop_last` needs `samples_per_update`: without it no update is smaller than asked")


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
    """Refuse a budget whose limit is taken from the lengths of a whole dataset: nobody knows them beforehand.

    Raises:
        ConfigError: names what to give instead.
    """
    if budget.bind({TOKENS: np.ones(1, np.int32)}).fingerprint != budget.fingerprint:
        raise ConfigError(
            "`budget` takes its limit from the lengths of the whole dataset, which an OnlineDataLoader does not know "
            "beforehand; give MemoryBudget(..., longest=tokens of the longest sample), MemoryBudget.from_bytes or a TokenBudget"
        )


def check_sources(
    *,
    iterable: bool,
    per_update: bool,
    shuffle: bool,
    sampler: Iterable[int] | None,
    batch_sampler: Iterable[Any] | None,
) -> None:
    """Refuse two orders at once, and orders that the dataset or the ranks cannot follow.

    Raises:
        ConfigError: names the arguments and the way out.
    """
    sources = {"batch_sampler": batch_sampler, "sampler": sampler}
    given = [name for name, source in sources.items() if source is not None] + ["shuffle"] * shuffle
    if len(given) > 1:
        raise ConfigError(f"`{given[0]}` and `{given[1]}` exclude each other: both decide the order of samples")
    if iterable and given:
        raise ConfigError(f"`{given[0]}` needs a map-style dataset; an iterable one brings its own order")
    if per_update and (iterable or batch_sampler is not None):
        raise ConfigError(
            "`samples_per_update` needs a map-style dataset and no `batch_sampler`: an update's samples are drawn "
            "from one order over all ranks; of an iterable dataset set `accumulation`"
        )
    for name, source in sources.items():
        if isinstance(source, Iterator):
            raise ConfigError(
                f"`{name}` is a {type(source).__name__}, which is used up after one epoch; give a list, or a Sampler"
            )
        if source is not None and not _can_be_read(source):
            raise ConfigError(f"`{name}` must be an iterable, but is {source!r}")
    ranks = getattr(sampler, "num_replicas", 1)
    if isinstance(ranks, int) and ranks > 1:
        raise ConfigError(
            f"`sampler` divides its indices among {ranks} ranks already ({type(sampler).__name__}); give the "
            "undivided one: the loader hands out samples to ranks itself"
        )


def _can_be_read(source: Any) -> bool:
    try:
        iter(source)
    except TypeError:  # also of what has __getitem__ or __iter__ and holds a single number
        return False
    return True


def as_hint(hint: Any, num_samples: int) -> np.ndarray:
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


CARRIED = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def taken_over(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments of an OnlineDataLoader that does what this loader did. The loader is not changed."""
    taken: dict[str, Any] = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    defaults = {"pin_memory_device": "", "in_order": True, "timeout": 0, "persistent_workers": False}
    for name in CARRIED:
        value = getattr(loader, name, None)
        if value is not None and value != defaults.get(name, value if name in ("num_workers", "pin_memory") else None):
            taken[name] = value
    for name in ("num_workers", "pin_memory"):
        taken[name] = getattr(loader, name)
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
