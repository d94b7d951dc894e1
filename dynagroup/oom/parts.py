"""What is remembered of an update while it is in progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from dynagroup.oom.gradients import GradientExchange, RngState

if TYPE_CHECKING:
    import torch

__all__ = ["ComputeLoss", "Part", "Update", "Verdict"]

ComputeLoss: TypeAlias = "Callable[[Any], torch.Tensor]"


@dataclass(slots=True)
class Part:
    """Samples ``start`` to ``stop - 1`` of a batch, with all that is needed to run it again exactly."""

    call: int
    batch: Any
    indices: Sequence[int]
    compute_loss: ComputeLoss
    loss_scale: float
    start: int
    stop: int
    share: float = 1.0
    rng: RngState | None = None
    loss: Any = None

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def first_index(self) -> int:
        """Of the dataset, if the caller has said which samples these are; else of the batch."""
        return int(self.indices[self.start] if len(self.indices) > self.start else self.start)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What cannot be helped: the first sample's index, how many there are, and their longest."""

    index: int
    num_samples: int
    longest: int


@dataclass(slots=True)
class Update:
    """The update in progress: what ran, what was in ``.grad`` before it, what its ranks must still agree on."""

    device: torch.device
    parameters: list[torch.nn.Parameter]
    before: list[torch.Tensor | None]
    done: list[Part] = field(default_factory=list)
    waiting: list[Part] = field(default_factory=list)
    num_calls: int = 0
    num_ooms: int = 0
    failed_cost: float = math.inf
    verdict: Verdict | None = None
    exchange: GradientExchange | None = None

    @classmethod
    def begin(cls, model: torch.nn.Module) -> Update:
        """Keep what is in ``.grad``, and clear it."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        update = cls(next(model.parameters()).device, parameters, [p.grad for p in parameters])
        update.clear()
        return update

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def undo(self) -> None:
        """Forget all gradients of the update; everything that gave them is to run again."""
        self.clear()
        self.waiting, self.done = self.done + self.waiting, []

    def add_to_before(self) -> None:
        """Add to what was there before the update, in the very tensors that held it."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def add_before(self) -> None:
        """The sums with what was there before, to be averaged over ranks; what was there stays, in case all is undone."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if before is not None:
                parameter.grad = before.clone() if parameter.grad is None else before + parameter.grad

    def put_into_before(self) -> None:
        """The averages of these sums, in the very tensors that held what was there before."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if before is not None and parameter.grad is not None:
                parameter.grad = before.copy_(parameter.grad)

    def abandon(self) -> None:
        """Leave in ``.grad`` what was there before the update."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            parameter.grad = before

    def loss_of_call(self) -> tuple[int, Any]:
        """(parts, loss) of the latest batch: the loss of all its parts together, 0 if nothing of it was run."""
        import torch

        parts = [part for part in self.done if part.call == self.num_calls]
        if len(parts) == 1 and parts[0].share == 1:
            return 1, parts[0].loss
        whole: Any = sum(p.loss * p.share for p in parts)
        return len(parts), whole if parts else torch.zeros((), device=self.device)
