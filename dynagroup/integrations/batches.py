"""An update's batches, as the Trainer counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynagroup.update.step import Step

__all__ = ["counted", "flattened", "is_update"]


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
