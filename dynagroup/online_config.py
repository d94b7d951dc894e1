"""The knobs of an online loader, checked once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynagroup.align import Uneven
from dynagroup.errors import ConfigError
from dynagroup.planned import SamplesPerUpdate, Schedule
from dynagroup.weights import Weigh

__all__ = ["OnlineConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    """How a loader forms steps. Knows no data and no ranks."""

    window: int = 1024
    """Samples sorted and grouped together on one rank."""
    samples_per_update: SamplesPerUpdate | None = None
    """Samples of an update over all ranks; None: no update boundaries but ``accumulation``."""
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
                Schedule(self.samples_per_update).size(0, 0)
