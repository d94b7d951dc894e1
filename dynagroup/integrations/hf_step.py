"""One update of a Trainer: the steps of a loader, run one after the other and weighed exactly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, gather_object
from transformers import Trainer

from dynagroup.device import is_out_of_memory
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.integrations.config import trl_classes
from dynagroup.integrations.hf_progress import Progress
from dynagroup.oom.jobs import evaluating
from dynagroup.oom.split import BatchSplitter
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import mean_items, predicts_next_token
from dynagroup.update.step import Step


# What: while its loss is computed, TRL gathers values of all ranks' batches as tensors of one shape, notes a mean of them, and
#   logs the mean of what it noted. Batches that fit differ in size: each rank gives what it has, an idle one nothing, and a mean
#   is noted once for each value that it is a mean of.
@contextlib.contextmanager
def trl_figures(trainer: Any, *, idle: bool = False, probe: bool = False) -> Iterator[None]:
    """Around the loss of a batch. ``probe``: of this rank alone, and nothing is noted. Other Trainers are left alone."""
    if not (trl_classes(trainer) and hasattr(trainer, "_metrics")):
        yield
        return
    accelerator, counts = trainer.accelerator, [1]
    noted = {mode: {key: len(values) for key, values in found.items()} for mode, found in trainer._metrics.items()}

    def gather(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = [] if idle else tensor.flatten().tolist()
        counts.append(len(found := own if probe else gather_object(own)))
        return tensor.new_tensor(found)

    accelerator.gather = accelerator.gather_for_metrics = gather
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics
    for mode, figures in trainer._metrics.items():
        for key, values in [*figures.items()]:
            before = noted[mode].get(key, 0)
            values[before:] = [] if probe else values[before:] * max(counts)
            if not values:
                del figures[key]


class UpdateRunner(Progress):
    """The part of :class:`~dynagroup.integrations.hf.DynagroupTrainerMixin` that runs updates."""

    _idle_step = False
    _found_mean: bool | None = None  # what the loss has answered to whether it is a mean

    @property
    def _weigh(self) -> Any:
        """What a batch weighs when its loss is a mean: with "auto" its predicted label tokens, else its samples."""
        shifted = self._loss_shifts_labels or predicts_next_token(self.accelerator.unwrap_model(self.model))
        return partial(mean_items, shifted=bool(shifted)) if self.dynagroup.weigh == "auto" else self.dynagroup.weigh

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        update = next(epoch_iterator, None)
        if update is None:
            self.control.should_epoch_stop = True
            return [], None
        self.just_resumed = False
        return [update], self._get_num_items_in_batch(_counted(update), device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not isinstance(inputs, list):
            return super().training_step(model, inputs, num_items_in_batch)
        total: Any = 0.0
        mean = self._loss_is_a_mean(model, inputs, num_items_in_batch)
        items = None if mean else num_items_in_batch
        loader = cast("StepLoader[Any]", self.update_loader)
        for number, step in enumerate(inputs):
            if number:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            if self.dynagroup.out_of_memory is not None:
                with loader.timed(step):
                    total = total + self._run_protected(model, step, mean, items)
                continue
            weighed, figures = self._weighed(step, mean, len(inputs)), trl_figures(self, idle=step.idle)
            with self._local_gradients(model, step), loader.timed(step), weighed, figures:
                total = total + super().training_step(model, step.batch, items)
        return total

    def _loss_is_a_mean(self, model: Any, update: list[Step[Any]], num_items_in_batch: Any) -> bool:
        """The loss is a mean over its batch, not a sum divided by the whole update's items."""
        if self.loss_is_scaled_for_ga is not None:
            return not self.loss_is_scaled_for_ga
        if num_items_in_batch is None:
            return True
        if self.label_smoother is not None and self.compute_loss_func is None and not _defines_compute_loss(type(self)):
            return False
        config, loader = self.dynagroup, cast("StepLoader[Any]", self.update_loader)
        splitter = config.splitter or BatchSplitter()
        for step in update:
            if self._found_mean is None:  # one sample fits where a batch may not
                batch = step.batch if config.out_of_memory is None else splitter.take(step.batch, 0, 1)
                self._found_mean = is_a_mean(self, model, batch, loader.world)
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

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
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
            with self.compute_loss_context_manager(), trl_figures(self):
                return self.compute_loss(model, {**batch}, num_items_in_batch=items)

        scale, batch = step.loss_scale if mean else 1.0, self._prepare_inputs(step.batch)
        how: Any = {"ends_update": step.ends_update, "indices": step.indices, "idle": step.idle}
        return self.guard(loss_of, batch, loss_scale=scale, **how).loss * scale

    def _new_guard(self, model: Any, mean: bool) -> OomSafeBackward:
        config, loader = self.dynagroup, cast("StepLoader[Any]", self.update_loader)
        if _defines_compute_loss(type(self)) and loader.world.size > 1:
            raise ConfigError(
                f"`out_of_memory` ({config.out_of_memory!r}) repeats batches on one rank alone, but the compute_loss of "
                f"{type(self).__name__} may exchange data between ranks; leave it None"
            )
        return OomSafeBackward(
            model, weigh=self._weigh if mean else "sum", splitter=config.splitter,
            world=loader.world, learned=loader.budget.learner, backward=self.accelerator.backward,
        )  # fmt: skip

    def _local_gradients(self, model: Any, step: Step[Any]) -> Any:
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if step.ends_update or always or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(map(super().floating_point_ops, _counted(inputs)))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in _counted(inputs):
            super()._track_num_input_tokens(batch)


def _counted(inputs: Any) -> list[Any]:
    """The batches of an update, or the one batch, as tokens and labels are counted: an idle one has no samples."""
    if not isinstance(inputs, list):
        return [inputs]
    return [
        {name: value[:0] if getattr(value, "ndim", 0) else value for name, value in step.batch.items()}
        if step.idle and isinstance(step.batch, Mapping) else step.batch
        for step in inputs
    ]  # fmt: skip


def _defines_compute_loss(trainer_class: type) -> bool:
    """Whether a class of the user's or of a library's computes the loss itself."""
    return any("compute_loss" in vars(c) and c not in (UpdateRunner, Trainer) for c in trainer_class.__mro__)


# What: the loss for one item, and for two, on the same batch without gradients, dropout or other randomness.
# Why right: a sum divided by the number of items halves, a mean stays; auxiliary terms are small beside a sum over one item.
#   Heads that take ``**kwargs`` and drop the number (transformers#47688, open), and ``compute_loss`` of a subclass that
#   returns a mean, look alike from outside: the Trainer takes both for sums, and they would count once a batch.
# Cost: two forward passes, once a run. Collective: all ranks take the same answer, or raise alike.
def is_a_mean(trainer: Any, model: Any, batch: Any, world: World) -> bool | None:
    """Whether the loss stays a mean over its batch although it is told the number of items; None if this batch cannot tell."""
    error: Exception | None = None
    ratio = math.nan
    try:
        with evaluating(model), trl_figures(trainer, probe=True):
            inputs = trainer._prepare_inputs(batch)
            one, two = (_loss(trainer, model, inputs, count) for count in (1, 2))
        ratio = one / two if two else math.nan
    except Exception as caught:  # noqa: BLE001 - the other ranks must hear of it before it is raised
        error = caught
    here = 1.5 < ratio < math.inf, abs(ratio - 1.0) < 0.1
    unclear = not any(here) and 0 < abs(ratio) < math.inf
    halves, stays, unclear, failed = map(bool, world.all_max([*here, unclear, error is not None]))
    if error is not None and is_out_of_memory(error):
        raise error
    if failed or (unclear and not halves):
        raise ConfigError(
            f"{type(trainer).__name__} does not show whether its loss is a mean ({error or 'it neither halves nor stays'}); set "
            "`loss_is_scaled_for_ga` to False (a mean over its batch) or True (divided by num_items_in_batch)"
        ) from error
    return not halves if halves or stays else None


def _loss(trainer: Any, model: Any, inputs: Any, count: int) -> float:
    # Both losses draw the same random numbers, and training draws those it would have drawn.
    device = trainer.args.device
    same_numbers = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with same_numbers, torch.no_grad(), trainer.compute_loss_context_manager():
        return float(trainer.compute_loss(model, {**inputs}, num_items_in_batch=torch.tensor(count, device=device)))
