"""Read an existing DataLoader's parts, for :meth:`OnlineDataLoader.from_dataloader`."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

__all__ = ["taken_over"]

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
