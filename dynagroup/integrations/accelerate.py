"""Runs dynagroup's steps with Accelerate, in a training loop that you write yourself."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch.utils.data import DataLoader

from dynagroup.errors import ConfigError
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_check import LossOf, check_loader
from dynagroup.update.step import Step
from dynagroup.validation import warn_user

Batch: TypeAlias = Any  # what the user's collate function makes


class AcceleratedSteps:
    """Yields a loader's steps with batches on the accelerator's device. Made, and saved, by :func:`prepare`."""

    def __init__(self, accelerator: Accelerator, loader: StepLoader[Batch]) -> None:
        self.accelerator = accelerator
        self.loader = loader
        self.dataset = loader.dataset
        self.set_epoch = loader.set_epoch

    @property
    def num_updates(self) -> int:
        """Number of updates in an epoch, as learning-rate schedulers need it. ConfigError: not known in advance."""
        return self.loader.num_updates

    def __iter__(self) -> Iterator[Step[Batch]]:
        send = partial(
            send_to_device,
            device=self.accelerator.device,
            non_blocking=self.accelerator.non_blocking,
        )
        return self.loader.mapped(send)

    def local_until_update(
        self, model: torch.nn.Module, step: Step[Batch]
    ) -> contextlib.AbstractContextManager[object]:
        """Returns a context for forward and backward pass in which ranks exchange gradients only at an update's end."""
        self.accelerator.sync_gradients = step.ends_update  # if so, DeepSpeed's backward pass steps
        if step.ends_update:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def state_dict(self) -> dict[str, object]:
        """Returns the states of all ranks; all ranks must call it, because one rank writes the checkpoint."""
        return {"ranks": gather_object([self.loader.state_dict()])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from a saved state, on any number of ranks."""
        self.loader.load_state_dict(state_dict["ranks"])


def prepare(
    accelerator: Accelerator,
    loader: StepLoader[Batch] | DataLoader[Any],
    model: Any = None,
    loss_of: LossOf | None = None,
) -> Any:
    """Prepares a loader for your own training loop with Accelerate. A loader of dynagroup becomes
    :class:`AcceleratedSteps`, which ``accelerator.save_state`` saves. A ``DataLoader`` with a
    :class:`LengthAwareBatchSampler` is passed to ``accelerator.prepare``, after a check that no sample would be lost.

    With ``model`` (as prepared) and ``loss_of``, the function from a step to its loss, it is tested how losses add up, see
    :func:`~dynagroup.check_loss`.

    Raises ConfigError if the loss does not add up, or the accelerator or sampler shards, splits or scales, too."""
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            "Accelerator's `gradient_accumulation_steps` must be 1, because `loss_scale` weighs losses"
        )
    if isinstance(loader, StepLoader):
        steps = AcceleratedSteps(accelerator, loader)
        accelerator.register_for_checkpointing(steps)
        if loss_of is not None:
            _check_loss(accelerator, loader, model, loss_of)
        return steps
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, LengthAwareBatchSampler):
        raise ConfigError(
            f"`loader` must be dynagroup's, or have a LengthAwareBatchSampler, but is {loader!r}"
        )
    config = accelerator.dataloader_config
    if config.split_batches or config.dispatch_batches:
        raise ConfigError(
            f"`split_batches` ({config.split_batches}) and `dispatch_batches` ({config.dispatch_batches}) must be False, "
            "because True needs batches of one fixed size"
        )
    num_ranks = accelerator.num_processes
    if len(sampler) % num_ranks:
        raise ConfigError(
            f"{len(sampler)} batches cannot be divided evenly over {num_ranks} ranks; "
            f"make the sampler with world_size={num_ranks}, rank=None"
        )
    return accelerator.prepare(loader)


def _check_loss(
    accelerator: Accelerator, loader: StepLoader[Batch], model: torch.nn.Module, loss_of: LossOf
) -> None:
    send = partial(send_to_device, device=accelerator.device)
    is_half = accelerator.mixed_precision != "no"
    rule = check_loader(model, lambda step: loss_of(step.map(send)), loader, is_half=is_half)
    if rule == "sum":
        warn_user(
            "`loss_of` returns a loss that is a sum, not a mean: leave `step.loss_scale` out of the "
            "loop, and multiply the loss by the number of ranks"
        )
