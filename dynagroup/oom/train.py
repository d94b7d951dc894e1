"""A training step that survives running out of memory, with the gradients it would have had."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dynagroup.budget.learning import COST_UNIT, NO_COST, LearningBudget
from dynagroup.device import PeakWatch
from dynagroup.distributed import DistributedWorld, SingleProcess, World
from dynagroup.errors import BudgetError
from dynagroup.oom.gradients import average_gradients, broadcast_buffers, find_ddp
from dynagroup.oom.parts import ComputeLoss, Part, PartRunner, Update, Verdict
from dynagroup.oom.split import BatchSplitter, Splitter
from dynagroup.update.loss_weight import Weigh, predicts_next_token, weigher
from dynagroup.update.step import Step
from dynagroup.validation import check_choice, check_int

if TYPE_CHECKING:
    import torch

__all__ = ["BackwardResult", "OomMode", "OomSafeBackward"]

OomMode: TypeAlias = Literal["retry", "skip"] | None

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


class OomSafeBackward:
    """``loss.backward()`` that goes on in parts when memory runs out, with exact weights.

    Call it once per batch; with ``ends_update=True`` on the last batch before ``optimizer.step()``. Gradients stay on
    their rank during the update and are averaged when all of its parts have run, so a rank that runs out of memory repeats
    its own work and no other rank needs to know. Ranks vote once an update (one small all-reduce): a sample that does not
    fit even alone raises the same error on every rank.

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

    Raises:
        BudgetError: a sample does not fit even alone; on all ranks. AlignmentError: a rank is gone.
        ConfigError: an argument is wrong, or the model is one that cannot repeat a step by itself.

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
        check_choice("mode", mode, ("retry", "skip", None))
        ddp = None if mode is None else find_ddp(model)
        if world is None:
            world = SingleProcess() if ddp is None else DistributedWorld(ddp.process_group)
        self._model, self._ddp, self._world, self._mode = model, ddp, world, mode
        self._learned = learned if learned is not None else LearningBudget()
        self._runner = PartRunner(
            ddp=ddp,
            splitter=splitter if splitter is not None else BatchSplitter(trim="right"),
            weigh=None if weigh == "sum" else weigher(weigh, shifted=predicts_next_token(model)),
            min_samples=check_int("min_samples", min_samples),
            learned=self._learned,
            backward=backward if backward is not None else lambda loss: loss.backward(),
            peak=PeakWatch(next(model.parameters()).device),
            learns_alone=world.size == 1,
            num_retries=2 if mode == "retry" else 0,
        )
        self._update: Update | None = None
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

        Any other error passes through and ends the update: the next call begins one. ``.grad`` then holds what a plain loop
        would have left there.
        """
        if self._mode is None:
            return self._unprotected(compute_loss, batch, loss_scale, ends_update)
        stop = 0 if idle else self._runner.splitter.num_samples(batch)
        self._update = update = self._update or Update.begin(self._model)
        update.num_calls, update.num_ooms = update.num_calls + 1, 0
        whole = None if idle else Part(update.num_calls, batch, indices, compute_loss, loss_scale, 0, stop)
        with self._errors_end(update):
            skipped = self._mode == "skip" and self._skipped(update, whole)
            if self._mode == "retry" and whole is not None:
                update.waiting.append(whole)
                self._runner.run_waiting(update)
        if ends_update or (update.verdict is not None and self._world.size == 1):
            self._update = None
            self._finish(update)
        num_parts, loss = update.loss_of_call()
        if skipped or update.verdict is not None:
            loss = loss.new_full((), math.nan)
        return BackwardResult(loss, num_parts, update.num_ooms, skipped)

    @contextmanager
    def _errors_end(self, update: Update) -> Iterator[None]:
        """What passes through leaves in ``.grad`` what a plain loop would have there, and nothing to run again: a user who
        clears gradients and goes on, or begins anew, begins an update."""
        try:
            yield
        except BaseException:
            self._update = None
            update.add_to_before()
            raise

    def _skipped(self, update: Update, whole: Part | None) -> bool:
        """Mode "skip": if a batch fails on any rank, no rank counts its batch of this step."""
        runner = self._runner
        failed = whole is not None and not runner.attempt(update, whole)
        skip = bool(self._world.all_max([int(failed)])[0])
        if whole is None:
            return skip
        if not skip:
            update.done.append(whole)
            return False
        if not failed or runner.began:
            update.undo()
            runner.run_waiting(update)
        if whole.rng is not None:
            whole.rng.restore()
        self.skipped_indices += list(whole.indices)
        self._learned.record_waste(num_skipped=whole.num_samples)
        named = list(whole.indices) or "indices not given"
        _log.warning("skipped a batch of %d samples on this rank: %s", whole.num_samples, named)
        return True

    def _unprotected(
        self, compute_loss: ComputeLoss, batch: Any, loss_scale: float, ends_update: bool
    ) -> BackwardResult:
        no_sync = None if ends_update else getattr(self._model, "no_sync", None)
        with nullcontext() if no_sync is None else no_sync():
            loss = compute_loss(batch)
            self._runner.backward(loss * loss_scale)
        return BackwardResult(loss.detach(), 1, 0, False)

    # Every rank votes, whatever has happened to it, so no rank waits for one that will not come. Gradients are exchanged only
    # when all ranks have theirs: nothing can fail then but the exchange itself. Cost: an exchange of gradients as in DDP, one
    # small all-reduce.
    def _finish(self, update: Update) -> None:
        """The end of an update: all ranks raise alike, or all hold the mean of their gradients.

        Raises:
            BudgetError: samples of some rank do not fit; gradients are then what they were before the update.
        """
        present = [
            int(p.grad is not None or b is not None) for p, b in zip(update.parameters, update.before, strict=True)
        ]
        cost = -NO_COST if math.isinf(update.failed_cost) else -int(update.failed_cost * COST_UNIT)
        fatal, cost, *present = self._world.all_max([int(update.verdict is not None), cost, *present])
        if cost != -NO_COST and self._world.size > 1:
            self._learned.record_failed_cost(-cost / COST_UNIT)
        if fatal:
            update.abandon()
            raise BudgetError(self._agreed_verdict(update.verdict))
        update.add_to_before()
        if self._ddp is not None:
            used = [p for p, anywhere in zip(update.parameters, present, strict=True) if anywhere]
            average_gradients(used, self._ddp.process_group)
            broadcast_buffers(self._ddp)

    def _agreed_verdict(self, verdict: Verdict | None) -> str:
        rank = self._world.all_max([self._world.rank if verdict is not None else -1])[0]
        own = verdict if verdict is not None and self._world.rank == rank else Verdict(-1, -1, -1)
        index, num_samples, longest = self._world.all_max([own.index, own.num_samples, own.longest])
        what = f"sample {index} does" if num_samples == 1 else f"{num_samples} samples from sample {index} on do"
        return (
            f"{what} not fit on rank {rank} even alone (longest: {longest} tokens, min_samples={self._runner.min_samples}); "
            "truncate or filter out such samples, or free memory on the device"
        )
