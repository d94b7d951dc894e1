"""One update of a Trainer: the steps of a loader, run one after the other and weighed exactly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError
from dynagroup.integrations.batches import counted, flattened, is_update
from dynagroup.integrations.books import Books
from dynagroup.integrations.figures import LossFigures
from dynagroup.integrations.host import mean_weight
from dynagroup.integrations.losses import is_a_mean
from dynagroup.oom.split import BatchSplitter
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.step import Step

if TYPE_CHECKING:
    import torch

__all__ = ["Updating"]


class Updating(Books):
    """The part of :class:`~dynagroup.integrations.hf.DynagroupTrainerMixin` that runs updates."""

    figures: LossFigures
    _idle_step = False
    _found_mean: bool | None = None
    """What the loss has answered to whether it is a mean; None before it was asked."""

    @property
    def _weigh(self) -> Any:
        return mean_weight(self) if self.dynagroup.weigh == "auto" else self.dynagroup.weigh

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        update = next(epoch_iterator, None)
        if update is None:
            self.control.should_epoch_stop = True
            return [], None
        self._just_resumed = False
        if not is_update(update):
            return [update], self._get_num_items_in_batch([update], device)
        return [update], self._get_num_items_in_batch([counted(step) for step in update], device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not is_update(inputs):
            return super().training_step(model, inputs, num_items_in_batch)
        total: Any = 0.0
        for number, step in enumerate(inputs):
            if number:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            mean = self._loss_is_a_mean(model, step.batch, num_items_in_batch)
            items = None if mean else num_items_in_batch
            if self.dynagroup.out_of_memory is not None:
                total = total + self._run_protected(model, step, mean, items)
                continue
            with (
                self._local_gradients(model, step),
                self._weighed(step, mean, len(inputs)),
                self.figures.of_batch("train", step.batch, counts=not step.idle),
            ):
                total = total + super().training_step(model, step.batch, items)
        self.figures.add_up("train")
        return total

    def _loss_is_a_mean(self, model: Any, batch: Any, num_items_in_batch: Any) -> bool:
        """The loss is a mean over its batch, not a sum divided by the whole update's items."""
        if self.loss_is_scaled_for_ga is not None:
            return not self.loss_is_scaled_for_ga
        if num_items_in_batch is None:
            return True
        if self.label_smoother is not None and self.compute_loss_func is None and not _defines_compute_loss(type(self)):
            return False
        if self._found_mean is None:
            config = self.dynagroup
            splitter = None if config.out_of_memory is None else config.splitter or BatchSplitter(trim="right")
            assert self.update_loader is not None
            self._found_mean = is_a_mean(self, model, batch, self.update_loader.world, splitter)
        return bool(self._found_mean)

    @contextlib.contextmanager
    def _weighed(self, step: Step[Any], mean: bool, num_steps: int) -> Iterator[None]:
        """The Trainer divides a loss that is a mean by the number of accumulated batches; dividing by 1 / scale weighs it."""
        stated, scale = self.loss_is_scaled_for_ga, step.loss_scale if mean else 1.0
        nothing = step.idle or scale == 0.0
        self._idle_step = nothing
        self.loss_is_scaled_for_ga = not mean and not nothing
        self.current_gradient_accumulation_steps = math.inf if nothing else 1.0 / scale if mean else num_steps
        try:
            yield
        finally:
            self._idle_step, self.loss_is_scaled_for_ga = False, stated

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if not self._idle_step:
            return found
        loss = found[0] if return_outputs else found
        nothing = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # keeps the collectives of a backward pass matched
        return (nothing, found[1]) if return_outputs else nothing

    def _run_protected(self, model: Any, step: Step[Any], mean: bool, items: Any) -> torch.Tensor:
        if self.guard is None:
            self.guard = self._new_guard(model, mean)
            self._ooms_logged = self.guard.learned.report.num_ooms
        model.train()

        def loss_of(batch: Any) -> torch.Tensor:
            with self.compute_loss_context_manager(), self.figures.of_batch("train", batch, counts=True):
                return self.compute_loss(model, {**batch}, num_items_in_batch=items)

        scale = step.loss_scale if mean else 1.0
        result = self.guard(
            loss_of, self._prepare_inputs(step.batch), loss_scale=scale, ends_update=step.ends_update, indices=step.indices,
            idle=step.idle,
        )  # fmt: skip
        return result.loss * scale

    def _new_guard(self, model: Any, mean: bool) -> OomSafeBackward:
        config, loader = self.dynagroup, self.update_loader
        assert loader is not None
        if _defines_compute_loss(type(self)) and loader.world.size > 1:
            raise ConfigError(
                f"out_of_memory={config.out_of_memory!r} repeats batches on one rank alone, but the compute_loss of "
                f"{type(self).__name__} may exchange data between ranks; leave it None"
            )
        learned = LearningBudget.within(loader.budget)
        weigh = self._weigh if mean else "sum"
        return OomSafeBackward(
            model, mode=config.out_of_memory, weigh=weigh, splitter=config.splitter, world=loader.world,
            learned=learned if isinstance(learned, LearningBudget) else None, backward=self.accelerator.backward,
        )  # fmt: skip

    def _local_gradients(self, model: Any, step: Step[Any]) -> Any:
        from accelerate.utils import DistributedType

        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if step.ends_update or always or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def floating_point_ops(self, inputs: Any) -> int:
        if not is_update(inputs):
            return super().floating_point_ops(inputs)
        return sum(super(Updating, self).floating_point_ops(s.batch) for s in inputs if not s.idle)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if is_update(inputs):
            inputs = flattened(inputs)
        super()._track_num_input_tokens(inputs)


def _defines_compute_loss(trainer_class: type) -> bool:
    """Whether a class of the user's or of a library's computes the loss itself."""
    return any("compute_loss" in vars(c) and c not in (Updating, Trainer) for c in trainer_class.__mro__)
