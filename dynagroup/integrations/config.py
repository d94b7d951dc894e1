"""The one argument of the adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.split import Splitter
from dynagroup.oom.train import OomMode
from dynagroup.update.schedule import BatchSizeSchedule, ScalingRule, checked_samples

__all__ = ["DynagroupConfig"]


@dataclass(frozen=True, kw_only=True)
class DynagroupConfig:
    """How a Trainer forms its batches.

    Args:
        budget: what a batch may be: tokens, padding counted (an int, or ``TokenBudget(16_384)``), or any other budget.
        mode: "offline": lengths are known beforehand and every update is planned. "online": samples are measured after
            processing, in the workers; ``lengths`` may then be approximate, and stochastic or streamed data is welcome.
        updates: "preserved": every update holds the samples that fixed batches would give it, the host's sampler deciding.
            "free": an update is ``accumulation`` batches on every rank, each as large as fits.
        samples_per_update: samples of an update over all ranks: an int, or a schedule ``(update, current) -> int``. None:
            per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks. Not with updates="free".
        accumulation: with updates="free": batches of an update on one rank. None: gradient_accumulation_steps.
        lengths: tokens of each training sample (int, shape (num_samples,)), or a dict of streams such as
            ``{"tokens": ..., "target": ...}``. None: the length column, else counted from the model's first input;
            encoder-decoders' labels are counted as ``target``.
        length_of: with mode="online": processed sample -> tokens, or -> {stream: units}. None: the length of its ``input_ids``.
        weigh: what a loss that is a mean is a mean of: "auto" (labels that are predicted, if labels have a token dimension,
            else samples), "samples", or a function from a batch to a number. Losses divided by ``num_items_in_batch`` need none.
        max_samples: stop after the update that reaches so many samples, counted over all ranks and epochs; overrides epochs.
        learning_rate_schedule: what the scheduler counts: "updates", or "samples" (``warmup_steps`` then are samples, too).
        learning_rate_scaling: multiply each update's learning rate by (its samples / ``base_samples_per_update``):
            "linear", by the root of that: "sqrt", or "none".
        base_samples_per_update: samples of an update that the learning rate was tuned for. None: those of fixed batches.
        out_of_memory: a batch that runs out of memory is run in parts ("retry", the same gradient), left out ("skip"), or an
            error (None).
        splitter: how such a batch is cut; names the batch dimension of inputs that are not text.
        plan: further settings of the loader, e.g. ``{"oversize": "error"}`` (refuse samples that do not fit even alone),
            ``{"window": 4096}`` (samples sorted together) with updates="free"; ``{"work": Work(...)}``: predicted time of a
            batch, otherwise ``Work.of`` the Trainer's model on its device.
        world: the data-parallel ranks, where they are not all ranks; needed with tensor, context or sequence parallelism.

    Raises:
        ConfigError: a value is not one of those, or two exclude each other.

    >>> from dynagroup import TokenBudget
    >>> DynagroupConfig(budget=TokenBudget(4096)).updates
    'preserved'
    """

    budget: Budget
    mode: Literal["offline", "online"] = "offline"
    updates: Literal["preserved", "free"] = "preserved"
    samples_per_update: int | BatchSizeSchedule | None = None
    accumulation: int | None = None
    lengths: Any = None
    length_of: Callable[[Any], Any] | None = None
    weigh: Literal["auto", "samples"] | Callable[[Any], float] = "auto"
    max_samples: int | None = None
    learning_rate_schedule: Literal["updates", "samples"] = "updates"
    learning_rate_scaling: ScalingRule = "none"
    base_samples_per_update: int | None = None
    out_of_memory: OomMode = None
    splitter: Splitter[Any] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    world: World | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", as_budget(self.budget))
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
        if self.updates == "preserved" and self.accumulation is not None:
            raise ConfigError(
                f"`accumulation` ({self.accumulation!r}) needs updates='free': a preserved update takes as many steps as its "
                "samples need; set `samples_per_update`, or gradient_accumulation_steps as with fixed batches"
            )
        for name in ("max_samples", "base_samples_per_update", "accumulation"):
            if getattr(self, name) is not None:
                checked_samples(getattr(self, name), name=name)
