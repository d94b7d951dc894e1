"""A training step that survives running out of memory, with the gradients it would have had."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dynagroup.budget.learning import COST_UNIT, NO_COST, LearningBudget
from dynagroup.device import PeakWatch
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.oom.gradients import GradientExchange, RngState, broadcast_buffers, find_ddp, local_gradients
from dynagroup.oom.retry import attempt, check_min_samples, halves
from dynagroup.oom.split import BatchSplitter, Splitter, describe, longest_of
from dynagroup.shapes import BatchShape
from dynagroup.update.step import Step
from dynagroup.update.weigh import Weigh, predicts_next_token, weigher
from dynagroup.world import DistributedWorld, SingleProcess, World

if TYPE_CHECKING:
    import torch

__all__ = ["BackwardResult", "OomMode", "OomSafeBackward"]

OomMode: TypeAlias = Literal["retry", "skip"] | None
ComputeLoss: TypeAlias = "Callable[[Any], torch.Tensor]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """What became of one batch.

    Args:
        loss: the batch's loss as ``compute_loss`` gives it for the whole batch, detached; NaN if it was skipped.
        num_parts: parts it was run in; 1 if it fitted, 0 if it was skipped.
        num_ooms: attempts that failed on this rank.
        skipped: it was left out, on all ranks alike.
    """

    loss: torch.Tensor
    num_parts: int
    num_ooms: int
    skipped: bool


@dataclass(slots=True)
class _Part:
    """Samples ``start`` to ``stop - 1`` of a batch, with all that is needed to run it again exactly."""

    call: int
    batch: Any
    compute_loss: ComputeLoss
    loss_scale: float
    start: int
    stop: int
    share: float = 1.0
    rng: RngState | None = None
    loss: Any = None


@dataclass(slots=True)
class _Update:
    """The update in progress: what ran, what was in ``.grad`` before it, what its ranks must still agree on."""

    device: torch.device
    parameters: list[torch.nn.Parameter]
    before: list[torch.Tensor | None]
    done: list[_Part] = field(default_factory=list)
    waiting: list[_Part] = field(default_factory=list)
    num_calls: int = 0
    num_ooms: int = 0
    failed_cost: float = math.inf
    verdict: _Verdict | None = None
    exchange: GradientExchange | None = None

    def undo(self) -> None:
        """Forget all gradients of the update; everything that gave them is to run again."""
        _clear(self.parameters)
        self.waiting, self.done = self.done + self.waiting, []

    def put_back(self) -> None:
        """Add what was there before the update, in the very tensors that held it."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self.before = [None] * len(self.before)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What cannot be helped: the first sample's index, how many there are, and their longest."""

    index: int
    num_samples: int
    longest: int


class OomSafeBackward:
    """``loss.backward()`` that goes on in parts when memory runs out, with exact weights.

    Call it once per batch; with ``ends_update=True`` on the last batch before ``optimizer.step()``. Gradients stay on
    their rank during the update and are averaged with its last backward pass, so a rank that runs out of memory repeats
    its own work and no other rank needs to know. Only if memory runs out while that last pass is already sending do all
    ranks repeat the update. They vote once an update (one small all-reduce): a sample that does not fit even alone raises
    the same error on every rank.

    What failed is undone exactly: gradients of an update's earlier batches are computed again from their recorded random
    state (an update's batches are held until it ends; no copy of the gradients is ever made). The parts of a split batch
    draw dropout masks that an unsplit one would not have drawn. Optimizer, gradient scaler and schedule are untouched.

    ``compute_loss`` must not exchange data between ranks itself, and its loss must be a mean or sum over its batch
    (no statistics over the batch, as in batch normalisation or contrastive losses, survive splitting).

    Args:
        model: the model, plain or in ``DistributedDataParallel``. FSDP and DeepSpeed are refused.
        mode: "retry" in parts; "skip" the batch, on all ranks alike; None: no protection, DDP as usual.
        weigh: what the loss is a mean of: "tokens" (labels other than -100), "samples", a function of a batch; or "sum":
            the loss is already divided by a number that does not depend on the part.
        splitter: how to count and cut a batch; default: right padding is trimmed, since left trimming moves positions.
        min_samples: a part of fewer than twice as many samples is not cut any more.
        world: ranks that train together; default: those of the ``DistributedDataParallel`` in ``model``.
        learned: a budget to teach; batches that it has learned not to fit are split before they fail.
        backward: runs the backward pass of a scaled loss, e.g. ``accelerator.backward``; default: ``Tensor.backward``.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> backward = OomSafeBackward(model, weigh="samples")
    >>> backward(lambda x: model(x).mean(), torch.ones(4, 2)).num_parts
    1
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        mode: OomMode = "retry",
        weigh: Weigh | Literal["sum"] = "tokens",
        splitter: Splitter[Any] | None = None,
        min_samples: int = 1,
        world: World | None = None,
        learned: LearningBudget | None = None,
        backward: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        if mode not in ("retry", "skip", None):
            raise ConfigError(f"`mode` must be 'retry', 'skip' or None, but is {mode!r}")
        check_min_samples(min_samples)
        self._model, self._mode, self._min_samples = model, mode, min_samples
        self._splitter = splitter if splitter is not None else BatchSplitter(trim="right")
        self._weigh = None if weigh == "sum" else weigher(weigh, shifted=predicts_next_token(model))
        self._ddp = None if mode is None else find_ddp(model)
        self._world = world if world is not None else _world_of(self._ddp)
        self._learned = learned if learned is not None else LearningBudget()
        self._backward = backward if backward is not None else lambda loss: loss.backward()
        self._update: _Update | None = None
        self._began = False
        self._peak = PeakWatch(_device_of(model))
        self.skipped_indices: list[int] = []

    @property
    def learned(self) -> LearningBudget:
        """What running out of memory has taught so far, with its report."""
        return self._learned

    def step(self, compute_loss: ComputeLoss, step: Step[Any]) -> BackwardResult:
        """Run a :class:`~dynagroup.Step` of a loader, with its loss scale. An idle step costs nothing."""
        return self(
            compute_loss, step.batch, loss_scale=step.loss_scale, ends_update=step.ends_update, indices=step.indices,
            idle=step.idle,
        )  # fmt: skip

    def __call__(
        self,
        compute_loss: ComputeLoss,
        batch: Any,
        *,
        loss_scale: float = 1.0,
        ends_update: bool = True,
        indices: Sequence[int] = (),
        idle: bool = False,
    ) -> BackwardResult:
        """Forward and backward of one batch, ``backward(compute_loss(batch) * loss_scale)``, in parts if need be.

        Args:
            indices: dataset indices of the samples, to name them in messages.
            idle: a batch that only keeps ranks in step: nothing is run.

        Raises:
            BudgetError: samples that cannot be cut further do not fit; on every rank alike, when the update ends.
            AlignmentError: a rank has gone.
        """
        if self._mode is None:
            return self._unprotected(compute_loss, batch, loss_scale, ends_update)
        self._update = update = self._update or _begin(self._model)
        update.num_calls += 1
        update.num_ooms = 0
        skipped = False
        if not idle:
            whole = _Part(update.num_calls, batch, compute_loss, loss_scale, 0, self._splitter.num_samples(batch))
            update.waiting = self._cut_beforehand(whole) if self._mode == "retry" else [whole]
        if self._mode == "skip":
            skipped = self._whole_or_nothing(update, indices)
        else:
            self._run_waiting(update, indices, ends_update)
        if ends_update or (update.verdict is not None and self._world.size == 1):
            self._finish(update, indices)
        parts = [part for part in update.done if part.call == update.num_calls]
        loss = _whole_loss(parts, update.device, math.nan if update.verdict is not None or skipped else 0.0)
        return BackwardResult(loss, len(parts), update.num_ooms, skipped)

    def _run_waiting(self, update: _Update, indices: Sequence[int], last: bool) -> None:
        """Run parts on this rank alone, cutting what fails. Leaves a verdict in ``update`` where nothing helps."""
        while update.waiting and update.verdict is None:
            part = update.waiting.pop(0)
            exchange = self._exchange(update) if last and not update.waiting else None
            if self._attempt(update, part, exchange):
                update.done.append(part)
                continue
            if part.stop - part.start < 2 * self._min_samples:
                update.verdict = self._verdict(part, indices)
            else:
                update.waiting = self._cut(part) + update.waiting
            if exchange is not None and exchange.num_started:
                exchange.spoiled = True
                return  # the other ranks wait for our share of the exchange: that first, see _finish
            if self._began and update.verdict is None:  # it may have added to some gradients
                update.undo()

    def _exchange(self, update: _Update) -> GradientExchange | None:
        """The exchange that a last backward pass may begin; None where gradients are not yet what is to be exchanged."""
        if self._ddp is None or any(g is not None for g in update.before):
            return None
        if update.exchange is None:
            update.exchange = GradientExchange(update.parameters, self._ddp.process_group)
        return update.exchange

    def _whole_or_nothing(self, update: _Update, indices: Sequence[int]) -> bool:
        """Mode "skip": if a batch fails on any rank, no rank counts its batch of this step."""
        whole = update.waiting.pop() if update.waiting else None
        failed = whole is not None and not self._attempt(update, whole)
        skip = bool(self._world.all_max([int(failed)])[0])
        if whole is None:
            return skip
        if not skip:
            update.done.append(whole)
            return False
        if not failed or self._began:
            update.undo()
            self._run_waiting(update, (), last=False)
        assert whole.rng is not None
        whole.rng.restore()
        self.skipped_indices += list(indices)
        self._learned.record_waste(num_skipped=whole.stop)
        _log.warning("skipped a batch of %d samples on this rank: %s", whole.stop, list(indices) or "indices not given")
        return True

    def _unprotected(
        self, compute_loss: ComputeLoss, batch: Any, loss_scale: float, ends_update: bool
    ) -> BackwardResult:
        no_sync = None if ends_update else getattr(self._model, "no_sync", None)
        with nullcontext() if no_sync is None else no_sync():
            loss = compute_loss(batch)
            self._backward(loss * loss_scale)
        return BackwardResult(loss.detach(), 1, 0, False)

    def _attempt(self, update: _Update, part: _Part, exchange: GradientExchange | None = None) -> bool:
        if part.rng is None:
            part.rng = RngState.capture(update.device)
        else:
            part.rng.restore()
        self._began = False
        started = time.perf_counter()
        outcome = attempt(lambda: self._run(part, exchange))
        if outcome.error is None:
            part.loss = outcome.value
            peak, size = self._peak.new_peak()
            if self._learned.has_learned or peak is not None:
                self._learned.record_pass(self._shape(part), peak_bytes=peak, device_bytes=size)
            return True
        self._note(update, part, outcome.error, time.perf_counter() - started)
        return False

    def _run(self, part: _Part, exchange: GradientExchange | None) -> torch.Tensor:
        with local_gradients(self._ddp):
            loss = part.compute_loss(self._samples(part))
            if loss.ndim:
                raise ConfigError(f"`compute_loss` must return a scalar, but returned shape {tuple(loss.shape)}")
            self._began = True
            with nullcontext() if exchange is None else exchange.during_backward():
                self._backward(loss * (part.loss_scale * part.share))
        return loss.detach()

    def _samples(self, part: _Part) -> Any:
        if part.start == 0 and part.stop == self._splitter.num_samples(part.batch):
            return part.batch
        return self._splitter.take(part.batch, part.start, part.stop)

    def _shape(self, part: _Part) -> BatchShape:
        return BatchShape.of(part.stop - part.start, longest_of(self._samples(part)))

    def _cut_beforehand(self, whole: _Part) -> list[_Part]:
        if not self._learned.has_learned:
            return [whole]
        waiting, ready = [whole], []
        while waiting:
            part = waiting.pop(0)
            if part.stop - part.start < 2 * self._min_samples or self._learned.allows(self._shape(part))[0]:
                ready.append(part)
            else:
                waiting = self._cut(part) + waiting
        return ready

    def _cut(self, part: _Part) -> list[_Part]:
        """Two halves that weigh together what the part weighs."""
        parts = [
            replace(part, start=start, stop=stop, rng=None, loss=None) for start, stop in halves(part.start, part.stop)
        ]
        if self._weigh is not None:
            weights = [self._weigh(self._samples(p), p.stop - p.start) for p in parts]
            for half, weight in zip(parts, weights, strict=True):
                half.share = part.share * weight / sum(weights) if weight else 0.0
            # The mean over no labels is 0 / 0: such a half adds nothing to the whole's mean, but would spoil it.
            parts = [half for half in parts if half.share]
        if parts:
            parts[0].rng = part.rng
        return parts

    def _note(self, update: _Update, part: _Part, error: str, seconds: float) -> None:
        shape = self._shape(part)
        update.num_ooms += 1
        _log.warning("out of memory at %s; going on in parts or without it. %s", describe(self._samples(part)), error)
        self._learned.record_waste(num_ooms=1, num_retries=2 if self._mode == "retry" else 0, wasted_s=seconds)
        cost = float(self._learned.cost(shape)[0])
        if self._world.size == 1:
            self._learned.record_failed_cost(cost)
        else:  # ranks must plan alike, so all of them learn it together, at the vote
            update.failed_cost = min(update.failed_cost, cost)

    def _verdict(self, part: _Part, indices: Sequence[int]) -> _Verdict:
        index = indices[part.start] if len(indices) > part.start else part.start
        return _Verdict(int(index), part.stop - part.start, longest_of(self._samples(part)))

    def _finish(self, update: _Update, indices: Sequence[int]) -> None:
        """End the update: all ranks raise alike, or all hold the mean of their gradients."""
        self._update = None
        while True:
            spoiled, fatal, present = self._exchange_and_vote(update)
            if fatal:
                _clear(update.parameters)
                update.put_back()
                raise BudgetError(self._agreed_verdict(update.verdict))
            if not spoiled:
                break
            update.undo()
            update.exchange = None
            self._run_waiting(update, indices, last=False)
        if self._ddp is not None:
            for parameter, anywhere in zip(update.parameters, present, strict=True):
                if not anywhere:
                    parameter.grad = None
            broadcast_buffers(self._ddp)
        else:
            update.put_back()

    def _exchange_and_vote(self, update: _Update) -> tuple[bool, bool, list[int]]:
        if self._ddp is not None:
            update.put_back()
        present = [int(p.grad is not None) for p in update.parameters]
        if self._ddp is not None:
            exchange = update.exchange or GradientExchange(update.parameters, self._ddp.process_group)
            exchange.finish()
        spoiled = update.exchange is not None and update.exchange.spoiled
        cost = -NO_COST if math.isinf(update.failed_cost) else -int(update.failed_cost * COST_UNIT)
        spoiled, fatal, cost, *present = self._world.all_max([spoiled, update.verdict is not None, cost, *present])
        if cost != -NO_COST and self._world.size > 1:
            self._learned.record_failed_cost(-cost / COST_UNIT)
            update.failed_cost = math.inf
        return bool(spoiled), bool(fatal), present

    def _agreed_verdict(self, verdict: _Verdict | None) -> str:
        rank = self._world.all_max([self._world.rank if verdict is not None else -1])[0]
        own = verdict if verdict is not None and self._world.rank == rank else _Verdict(-1, -1, -1)
        index, num_samples, longest = self._world.all_max([own.index, own.num_samples, own.longest])
        what = f"sample {index} does" if num_samples == 1 else f"{num_samples} samples from sample {index} on do"
        return (
            f"{what} not fit on rank {rank} even alone (longest: {longest} tokens, min_samples={self._min_samples}); "
            "truncate or filter out such samples, or free memory on the device"
        )


def _begin(model: torch.nn.Module) -> _Update:
    parameters = [p for p in model.parameters() if p.requires_grad]
    update = _Update(_device_of(model), parameters, [p.grad for p in parameters])
    _clear(parameters)
    return update


def _clear(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _whole_loss(parts: Sequence[_Part], device: torch.device, otherwise: float) -> torch.Tensor:
    """The loss of all parts together; ``otherwise`` if nothing was run."""
    import torch

    if not parts or math.isnan(otherwise):
        return torch.full((), otherwise, device=device)
    return parts[0].loss if len(parts) == 1 and parts[0].share == 1 else sum(p.loss * p.share for p in parts)  # type: ignore[return-value]


def _world_of(ddp: Any) -> World:
    return SingleProcess() if ddp is None else DistributedWorld(ddp.process_group)
