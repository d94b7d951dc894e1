"""Steps under Accelerate: ``prepare`` a loader of dynagroup, and write the training loop by hand."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device

from dynagroup.errors import ConfigError
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.update.loader import StepLoader
from dynagroup.update.step import Step


class AcceleratedSteps:
    """A loader's steps on the accelerator's device, made by :func:`prepare`. Its state is part of ``accelerator.save_state``."""

    def __init__(self, accelerator: Accelerator, loader: StepLoader[Any]) -> None:
        self.accelerator, self.loader, self.dataset = accelerator, loader, loader.dataset
        self.set_epoch = loader.set_epoch

    @property
    def num_updates(self) -> int:
        """Updates of an epoch, if known before it runs: the unit of a learning-rate scheduler."""
        return self.loader.num_updates

    def __iter__(self) -> Iterator[Step[Any]]:
        device, non_blocking = self.accelerator.device, self.accelerator.non_blocking
        for step in self.loader:
            yield step.map(lambda batch: send_to_device(batch, device, non_blocking=non_blocking))

    def local_until_update(self, model: Any, step: Step[Any]) -> contextlib.AbstractContextManager[Any]:
        """Context for forward and backward: ranks exchange gradients only on an update's last step."""
        return contextlib.nullcontext() if step.ends_update else self.accelerator.no_sync(model)

    def state_dict(self) -> dict[str, Any]:
        """State of all ranks. Collective: each rank has its own state, and one rank writes the checkpoint."""
        return {"ranks": gather_object([self.loader.state_dict()])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, on any number of ranks."""
        self.loader.load_state_dict(state_dict["ranks"])


def prepare(accelerator: Accelerator, loader: Any) -> Any:
    """Prepare a loader for a training loop of your own. A loader of dynagroup becomes :class:`AcceleratedSteps`,
    registered for checkpointing. A ``DataLoader`` with a :class:`LengthAwareBatchSampler` goes through
    ``accelerator.prepare``, after a check that this loses no sample.

    Raises:
        ConfigError: the accelerator or the sampler would shard, split or scale a second time.
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError("leave Accelerator's `gradient_accumulation_steps` at 1: `loss_scale` already weighs losses")
    if isinstance(loader, StepLoader):
        steps = AcceleratedSteps(accelerator, loader)
        accelerator.register_for_checkpointing(steps)
        return steps
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, LengthAwareBatchSampler):
        raise ConfigError(f"`loader` must be of dynagroup, or have a LengthAwareBatchSampler, but is {loader!r}")
    for setting in ("split_batches", "dispatch_batches"):
        if getattr(accelerator.dataloader_config, setting):
            raise ConfigError(f"{setting}=True cuts batches of one fixed size; set it to False")
    if len(sampler) % (size := accelerator.num_processes):
        way_out = f"build the sampler with world_size={size}, rank=None"
        raise ConfigError(f"{len(sampler)} batches for {size} ranks: {way_out}")
    return accelerator.prepare(loader)
