"""Parts of a batch, forward and backward, on one rank: run, cut where memory runs out, run again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import PeakWatch
from dynagroup.errors import ConfigError
from dynagroup.oom.fields import describe, longest_of, shape_of
from dynagroup.oom.gradients import GradientExchange, RngState, local_gradients
from dynagroup.oom.parts import Part, Update, Verdict
from dynagroup.oom.retry import attempt, halves
from dynagroup.oom.split import Splitter
from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    import torch

__all__ = ["PartRunner"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PartRunner:
    """Runs the parts of an update's batches.

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

    # Gradients under out-of-memory. A backward pass that fails has added to some gradients and not to others, and no copy
    # of them is kept. So all gradients of the update are dropped, and everything that gave them runs again, each part from
    # the random state that it first began with: the same sums in the same order, the same gradients bit for bit. A failure
    # in a forward pass has added nothing, and only its own batch is cut. Cost: the inputs of an update's batches are held
    # until it ends, and a failure in backward repeats what the update has done so far.
    def run_waiting(self, update: Update, *, last: bool) -> None:
        """Run what waits, cutting what fails. Leaves a verdict in ``update`` where nothing helps.

        Args:
            last: the update ends with it, so that its last pass may already send gradients to the other ranks.
        """
        while update.waiting and update.verdict is None:
            part = update.waiting.pop(0)
            if part.rng is None and not self._may_fit(update, part):  # what has begun before is repeated as it was
                update.waiting = self._cut(part) + update.waiting
                continue
            exchange = self._exchange(update) if last and not update.waiting else None
            if self.attempt(update, part, exchange):
                update.done.append(part)
                continue
            if self._is_smallest(part):
                update.verdict = Verdict(part.first_index, part.num_samples, longest_of(self._samples(part)))
            else:
                update.waiting = self._cut(part) + update.waiting
            if exchange is not None and exchange.num_started:
                exchange.spoiled = True
                return  # the other ranks wait for our share of the exchange: that first, then all repeat the update
            if self.began and update.verdict is None:
                update.undo()

    def attempt(self, update: Update, part: Part, exchange: GradientExchange | None = None) -> bool:
        """Whether the part fitted. What failed leaves nothing behind but gradients, see ``began``."""
        if part.rng is None:
            part.rng = RngState.capture(update.device)
        else:
            part.rng.restore()
        self.began = False
        started = time.perf_counter()
        outcome = attempt(lambda: self._run(part, exchange))
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

    def _run(self, part: Part, exchange: GradientExchange | None) -> torch.Tensor:
        with local_gradients(self.ddp):
            loss = part.compute_loss(self._samples(part))
            if loss.ndim:
                raise ConfigError(f"`compute_loss` must return a scalar, but returned shape {tuple(loss.shape)}")
            self.began = True
            with nullcontext() if exchange is None else exchange.during_backward():
                self.backward(loss * (part.loss_scale * part.share))
        return loss.detach()

    def _exchange(self, update: Update) -> GradientExchange | None:
        """The exchange that a last backward pass may begin; None where gradients are not yet what is to be exchanged."""
        if self.ddp is None or any(g is not None for g in update.before):
            return None
        if update.exchange is None:
            update.exchange = GradientExchange(update.parameters, self.ddp.process_group)
        return update.exchange

    def _is_smallest(self, part: Part) -> bool:
        return part.num_samples < 2 * self.min_samples

    def _cut(self, part: Part) -> list[Part]:
        """Two halves that weigh together what the part weighs."""
        parts = [
            replace(part, start=start, stop=stop, rng=None, loss=None) for start, stop in halves(part.start, part.stop)
        ]
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
