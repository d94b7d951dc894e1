"""Parts of an update's batches, forward and backward, on one rank: run, cut where memory runs out, run again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import PeakWatch
from dynagroup.errors import ConfigError
from dynagroup.oom.fields import describe, longest_of, shape_of
from dynagroup.oom.gradients import local_gradients
from dynagroup.oom.retry import attempt, halves
from dynagroup.oom.split import Splitter
from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    import torch

__all__ = ["ComputeLoss", "Part", "PartRunner", "Update", "Verdict"]

ComputeLoss: TypeAlias = "Callable[[Any], torch.Tensor]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RngState:
    """torch's random states on the CPU and on one device: what dropout draws from."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    device_type: str

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        import torch

        backend = None if device.type == "cpu" else getattr(torch, device.type, None)
        on_device = None if backend is None else backend.get_rng_state()
        return cls(torch.get_rng_state(), on_device, device.type)

    def restore(self) -> None:
        import torch

        torch.set_rng_state(self.cpu)
        if self.device is not None:
            getattr(torch, self.device_type).set_rng_state(self.device)


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

    @classmethod
    def begin(cls, model: torch.nn.Module) -> Update:
        """Keep what is in ``.grad``, and clear it."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        update = cls(next(model.parameters()).device, parameters, [p.grad for p in parameters])
        update.undo()
        return update

    def undo(self) -> None:
        """Forget all gradients of the update; everything that gave them is to run again."""
        for parameter in self.parameters:
            parameter.grad = None
        self.waiting, self.done = self.done + self.waiting, []

    def add_to_before(self) -> None:
        """Add to what was there before the update, in the very tensors that held it."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

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


# Gradients under out-of-memory. A backward pass that fails has added to some gradients and not to others, and no copy of them
# is kept. So all gradients of the update are dropped, and everything that gave them runs again, each part from the random state
# that it first began with: the same sums in the same order, the same gradients bit for bit. A failure in a forward pass has
# added nothing, and only its own batch is cut. Cost: the inputs of an update's batches are held until it ends, and a failure
# in backward repeats what the update has done so far.
@dataclass(kw_only=True)
class PartRunner:
    """Parts of batches, forward and backward, on one rank: run, cut where memory runs out, run again.

    Args:
        ddp: the ``DistributedDataParallel`` that the model is in, if any; its own exchange is kept silent.
        weigh: (part, its number of samples) -> its weight in the loss; None: the loss is a sum.
        learns_alone: failures are learned at once, not at the ranks' vote.
        num_retries: parts that take the place of one that failed.
    """

    ddp: Any
    splitter: Splitter[Any]
    weigh: Callable[[Any, int], float] | None
    min_samples: int
    learned: LearningBudget
    backward: Callable[[torch.Tensor], None]
    peak: PeakWatch
    learns_alone: bool
    num_retries: int
    began: bool = False
    """Whether the latest attempt reached its backward pass: then it may have added to some gradients."""

    def run_waiting(self, update: Update) -> None:
        """Run what waits, cutting what fails. Leaves a verdict in ``update`` where nothing helps."""
        while update.waiting and update.verdict is None:
            part = update.waiting.pop(0)
            may_fit = part.rng is not None or self._may_fit(update, part)  # what has begun before is repeated as it was
            if may_fit and self.attempt(update, part):
                update.done.append(part)
                continue
            if self._is_smallest(part):
                update.verdict = Verdict(part.first_index, part.num_samples, longest_of(self._samples(part)))
            else:
                update.waiting[:0] = self._cut(part)
            if may_fit and self.began and update.verdict is None:
                update.undo()

    def attempt(self, update: Update, part: Part) -> bool:
        """Whether the part fitted. What failed leaves nothing behind but gradients, see ``began``."""
        if part.rng is None:
            part.rng = RngState.capture(update.device)
        else:
            part.rng.restore()
        self.began = False
        started = time.perf_counter()
        outcome = attempt(lambda: self._run(part))
        if outcome.error is not None:
            self._note(update, part, outcome.error, time.perf_counter() - started)
            return False
        part.loss = outcome.value
        peak, size = self.peak.new_peak()
        if self.learned.has_learned or peak is not None:
            self.learned.record_pass(self._shape(part), peak_bytes=peak, device_bytes=size)
        return True

    def _may_fit(self, update: Update, part: Part) -> bool:
        """Nothing speaks against it, neither what was learned nor what has failed in this update; or it cannot be cut."""
        if self._is_smallest(part) or not (self.learned.has_learned or math.isfinite(update.failed_cost)):
            return True
        shape = self._shape(part)
        return bool(self.learned.allows(shape)[0]) and float(self.learned.cost(shape)[0]) < update.failed_cost

    def _run(self, part: Part) -> torch.Tensor:
        with local_gradients(self.ddp):
            loss = part.compute_loss(self._samples(part))
            if loss.ndim:
                raise ConfigError(f"`compute_loss` must return a scalar, but returned shape {tuple(loss.shape)}")
            self.began = True
            self.backward(loss * (part.loss_scale * part.share))
        return loss.detach()

    def _is_smallest(self, part: Part) -> bool:
        return part.num_samples < 2 * self.min_samples

    def _cut(self, part: Part) -> list[Part]:
        """Two halves that weigh together what the part weighs."""
        parts = [replace(part, start=a, stop=b, rng=None, loss=None) for a, b in halves(part.start, part.stop)]
        if self.weigh is not None:
            weights = [self.weigh(self._samples(p), p.num_samples) for p in parts]
            for half, weight in zip(parts, weights, strict=True):
                half.share = part.share * weight / sum(weights) if weight else 0.0
            # The mean over no labels is 0 / 0: such a half adds nothing to the whole's mean, but would spoil it.
            parts = [half for half in parts if half.share]
        if parts:
            parts[0].rng = part.rng
        return parts

    def _samples(self, part: Part) -> Any:
        if part.start == 0 and part.stop == self.splitter.num_samples(part.batch):
            return part.batch
        return self.splitter.take(part.batch, part.start, part.stop)

    def _shape(self, part: Part) -> BatchShape:
        return shape_of(self._samples(part), part.num_samples)

    def _note(self, update: Update, part: Part, error: str, seconds: float) -> None:
        update.num_ooms += 1
        _log.warning("out of memory at %s; going on in parts or without it. %s", describe(self._samples(part)), error)
        self.learned.record_waste(num_ooms=1, num_retries=self.num_retries, wasted_s=seconds)
        cost = float(self.learned.cost(self._shape(part))[0])
        if self.learns_alone:
            self.learned.record_failed_cost(cost)
        else:  # ranks must plan alike, so all of them learn it together, at the vote
            update.failed_cost = min(update.failed_cost, cost)
