"""Updates as a Trainer takes them, one loader item each, and their batches as it counts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynagroup.errors import ConfigError
from dynagroup.update.loader import StepLoader
from dynagroup.update.step import Step

__all__ = ["UpdateItems", "counted", "flattened", "is_update"]


class UpdateItems:
    """A loader for a host that counts its items: one item is one update, a list of steps."""

    def __init__(self, loader: StepLoader[Any]) -> None:
        self.loader = loader

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __len__(self) -> int:
        """Updates of the first epoch."""
        try:
            return self.loader.num_updates_in(0)
        except ConfigError as error:  # what has no length says so by a TypeError
            raise TypeError(str(error)) from error

    def __iter__(self) -> Iterator[list[Step[Any]]]:
        return self.loader.updates()

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def set_samples_per_update(self, samples: int) -> int:
        """For callbacks of the Trainer, which find this object as ``train_dataloader``: see
        :meth:`StepLoader.set_samples_per_update`."""
        return self.loader.set_samples_per_update(samples)


def is_update(inputs: Any) -> bool:
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], Step)


def counted(step: Step[Any]) -> Any:
    """The batch as its labels are counted: an idle one has none."""
    if not step.idle or not isinstance(step.batch, Mapping):
        return step.batch
    import torch

    labels = {k: torch.full_like(v, -100) for k, v in step.batch.items() if k in ("labels", "shift_labels")}
    return {**step.batch, **labels}


def flattened(update: Sequence[Step[Any]]) -> dict[str, Any]:
    """All batches' tensors as flat ones, enough to count elements; idle batches count nothing."""
    import torch

    parts = [{k: v.flatten() for k, v in s.batch.items() if isinstance(v, torch.Tensor)} for s in update]
    used = [
        part if not step.idle else {k: v[:0] for k, v in part.items()} for part, step in zip(parts, update, strict=True)
    ]
    return {name: torch.cat([part[name] for part in used]) for name in used[0] if all(name in part for part in used)}
