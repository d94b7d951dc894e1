"""What a training loop receives: one batch, and exactly what it weighs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

from dynagroup.update.loss_weight import Share

__all__ = ["Step", "pin"]

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Step(Generic[B]):
    """One batch on this rank, while every other rank has one too.

    Args:
        batch: what the user's ``collate_fn`` returned; untouched.
        indices: dataset indices (or arrival numbers for iterable datasets) of the samples in ``batch``.
        samples: number of samples here, and over the whole update on all ranks.
        weight: loss weight here (label tokens by default), and over the whole update on all ranks.
        loss_scale: factor for the batch's *mean* loss, see :func:`dynagroup.update.loss_weight.loss_scale`; 0.0 on an idle step.
        ends_update: the optimizer steps after this batch; before that, gradients stay local (``no_sync``).
        idle: this rank had no samples left; the batch only keeps the collectives matched.

    >>> from dynagroup import PlannedDataLoader, TokenBudget
    >>> loader = PlannedDataLoader("abcd", [3, 9, 2, 8], TokenBudget(18), shuffle=False, weigh="samples", collate_fn=list)
    >>> step = next(iter(loader))
    >>> step.batch, list(step.indices), step.loss_scale, step.ends_update
    (['b', 'd'], [1, 3], 1.0, True)
    """

    batch: B
    indices: Sequence[int]
    samples: Share
    weight: Share
    loss_scale: float
    ends_update: bool
    idle: bool = False

    def pin_memory(self) -> Step[B]:
        """The same step with its tensors in pinned memory."""
        return replace(self, batch=pin(self.batch))

    def map(self, fn: Callable[[B], Any]) -> Step[Any]:
        """The same step with ``fn`` applied to its batch, e.g. to move it to a device."""
        return replace(self, batch=fn(self.batch))


def pin(batch: Any) -> Any:
    """A batch with its tensors in pinned memory: tensors, objects with a ``pin_memory`` method, and containers of them.

    Containers keep their type: mappings (BatchEncoding among them), named tuples, sequences, dataclasses. The batch itself
    is not changed. Anything else is passed on as it is.

    >>> pin({"text": "not a tensor"})
    {'text': 'not a tensor'}
    """
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, MutableMapping):
        pinned = copy.copy(batch)
        pinned.update({key: pin(value) for key, value in batch.items()})
        return pinned
    if isinstance(batch, Mapping):
        return {key: pin(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [pin(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, MutableSequence):
        pinned = copy.copy(batch)
        for place, value in enumerate(batch):
            pinned[place] = pin(value)
        return pinned
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: pin(getattr(batch, f.name)) for f in fields(batch) if f.init})
    return batch
