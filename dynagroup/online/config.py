"""What an online loader is told: its knobs, checked once, and the facts of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.errors import ConfigError
from dynagroup.online.align import Uneven
from dynagroup.online.collate import RefinementCollator
from dynagroup.online.requests import Rank
from dynagroup.plan.order import EpochOrder
from dynagroup.shapes import IntArray
from dynagroup.update.schedule import BatchSizeSchedule, checked_samples
from dynagroup.update.stats import LoaderStats
from dynagroup.update.weigh import Weigh
from dynagroup.world import World

__all__ = ["Facts", "OnlineConfig", "as_hint", "checked_kwargs"]

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

    def __post_init__(self) -> None:
        for name in ("window", "accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ConfigError(f"`{name}` must be an int of at least 1, but is {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)) or self.seed < 0:
            raise ConfigError(f"`seed` must be an int of at least 0, but is {self.seed!r}")
        if self.uneven not in ("idle", "stop"):
            raise ConfigError(f"`uneven` must be 'idle' or 'stop', but is {self.uneven!r}")
        if self.samples_per_update is not None:
            if self.accumulation != 1:
                raise ConfigError(
                    f"`accumulation` ({self.accumulation}) and `samples_per_update` exclude each other: an update takes "
                    "as many steps as its samples need"
                )
            if not callable(self.samples_per_update):
                checked_samples(self.samples_per_update)
        elif self.drop_last:
            raise ConfigError("`drop_last` needs `samples_per_update`: without it no update is smaller than asked")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What an epoch of a loader works with."""

    world: World
    epoch: int
    indices: IntArray | EpochOrder | None
    budget: Budget
    config: Any
    collator: RefinementCollator
    stats: LoaderStats
    identity: Mapping[str, Any]
    num_workers: int
    prefetch_factor: int

    @property
    def rank(self) -> Rank:
        return Rank(self.world.rank, self.world.size, self.config.seed, self.epoch)

    @property
    def depth(self) -> int:
        """Windows that workers fetch ahead."""
        return self.num_workers * self.prefetch_factor


def checked_kwargs(kwargs: Mapping[str, Any], streams: bool) -> dict[str, Any]:
    for name in OURS:
        if name in kwargs:
            raise ConfigError(f"`{name}` is not an argument of OnlineDataLoader: the budget decides what a batch is")
    checked = dict(kwargs)
    if checked.get("num_workers", 0) > 0:
        checked.setdefault("prefetch_factor", 1)  # windows: a worker prepares one while another is used
    return checked


def as_hint(hint: Any, num_samples: int) -> np.ndarray:
    values = [hint(i) for i in range(num_samples)] if callable(hint) else hint
    array = np.asarray(values)
    if array.shape != (num_samples,) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise ConfigError(
            f"`length_hint` must be one finite number for each of the {num_samples} samples, or a function from index to "
            f"number, but is an array of {array.dtype} {array.shape}"
        )
    if array.dtype.kind == "f":
        top = float(np.abs(array).max(initial=1.0)) or 1.0
        array = array * (2**40 / top)
    return array.astype(np.int64)
