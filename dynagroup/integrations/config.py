"""The one argument of the adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynagroup.budget.base import Budget
from dynagroup.errors import ConfigError
from dynagroup.oom.split import Splitter
from dynagroup.oom.train import OomMode
from dynagroup.update.schedule import BatchSizeSchedule, ScalingRule, checked_samples
from dynagroup.world import World

__all__ = ["DynagroupConfig"]


@dataclass(frozen=True, kw_only=True)
class DynagroupConfig:
    """How a Trainer forms its batches.

    >>> from dynagroup import TokenBudget
    >>> DynagroupConfig(budget=TokenBudget(4096)).updates
    'preserved'
    """

    budget: Budget
    """What a batch may be."""
    mode: Literal["offline", "online"] = "offline"
    """"offline": lengths are known beforehand and every update is planned. "online": samples are measured after
    processing, in the workers; ``lengths`` may then be approximate, and stochastic or streamed data is welcome."""
    updates: Literal["preserved", "free"] = "preserved"
    """"preserved": every update holds the samples that fixed batches would give it, the host's sampler deciding.
    "free": an update is ``gradient_accumulation_steps`` rows of batches as large as fit."""
    samples_per_update: int | BatchSizeSchedule | None = None
    """An int or a schedule. None: per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks."""
    lengths: Any = None
    """Tokens of each training sample, or a dict of streams. None: the length column, else measured from ``input_ids``."""
    length_of: Callable[[Any], Any] | None = None
    """Online: processed sample -> tokens, or -> {stream: units}. None: the length of its ``input_ids``."""
    weigh: Literal["auto", "samples"] | Callable[[Any], float] = "auto"
    """What a loss that is a mean is a mean of. "auto": label tokens if labels have a token dimension, else samples.
    Losses that are divided by ``num_items_in_batch`` need no weight."""
    max_samples: int | None = None
    """Stop after the update that reaches so many samples; overrides epochs."""
    learning_rate_schedule: Literal["updates", "samples"] = "updates"
    """What the learning-rate scheduler counts. With "samples" its warm-up steps are samples too."""
    learning_rate_scaling: ScalingRule = "none"
    """Scale each update's learning rate by its number of samples, relative to ``base_samples_per_update``."""
    base_samples_per_update: int | None = None
    """What the learning rate was tuned for. None: per_device_train_batch_size x accumulation x ranks."""
    out_of_memory: OomMode = None
    """"retry" a batch that runs out of memory in parts, or "skip" it; see :class:`~dynagroup.oom.OomSafeBackward`."""
    splitter: Splitter[Any] | None = None
    """How such a batch is cut; names the batch dimension of inputs that are not text."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the plan: ``window`` (free), ``oversize``, ``round_batch``."""
    world: World | None = None
    """The data-parallel ranks, where they are not all ranks. Needed with tensor, context or sequence parallelism."""

    def __post_init__(self) -> None:
        choices = {
            "out_of_memory": ("retry", "skip", None),
            "mode": ("offline", "online"),
            "updates": ("preserved", "free"),
            "learning_rate_schedule": ("updates", "samples"),
            "learning_rate_scaling": ("linear", "sqrt", "none"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"`{name}` must be one of {allowed}, but is {getattr(self, name)!r}")
        if self.updates == "free" and self.samples_per_update is not None:
            raise ConfigError("`samples_per_update` needs updates='preserved': free updates are as large as they come")
        for name in ("max_samples", "base_samples_per_update"):
            if getattr(self, name) is not None:
                checked_samples(getattr(self, name), name=name)
