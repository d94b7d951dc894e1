"""Runs a Trainer's updates step by step, with exact weights, and counts progress in samples."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import has_length

from dynagroup.attention import attention_kernels
from dynagroup.distributed import World, current_world
from dynagroup.errors import ConfigError
from dynagroup.integrations.banner import banner
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf_data import UpdateItems
from dynagroup.integrations.trl import FigureMeans, trl_figures
from dynagroup.online.datasets import is_stream
from dynagroup.oom.preflight import preflight
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_check import (
    MEANS,
    Chosen,
    LossOf,
    Pieces,
    check_losses,
    pieces_of_batch,
    pieces_of_loader,
    split_test,
    sum_of,
    untested,
)
from dynagroup.update.loss_weight import weigher
from dynagroup.update.step import LoaderStats, Step, loss_scales

_log = logging.getLogger(__name__)

Batch: TypeAlias = Any  # what the user's collate function makes; usually a dict of tensors
Model: TypeAlias = Any  # as the Trainer wraps it
Items: TypeAlias = Any  # number of label tokens of an update: an int, a tensor, or None
Rule: TypeAlias = Any  # how losses of batches add up: "sum", or a `weigh`; None: not known yet
Scale: TypeAlias = (
    Any  # factor of a loss; a dict for several losses; None: losses are added as they are
)


class TrainerSteps(Trainer if TYPE_CHECKING else object):
    """Replaces ``Trainer.training_step``: several micro-batches make one optimizer step. An epoch ends when its samples
    are used, not after a given number of optimizer steps."""

    dynagroup: DynagroupConfig
    update_loader: Any  # the running training's StepLoader; None before training
    guard: OomSafeBackward | None
    figure_means: FigureMeans  # TRL's figures of this run
    layout_line: str | None = None  # which layout batches have, and why; None: as the budget says
    packs_unasked = (
        False  # whether training packs, and evaluation pads, because results are the same
    )
    accumulation = 1  # while it trains, the arguments say 1, and this is what they said before
    just_resumed = False
    changes_known = 0
    _begun = 0  # number of the last update that began, from 1
    _before: dict[str, Any] | None = None  # with JIT checkpoints, the state before that update
    _num_epochs: int | None = None  # of the run, as known at its start
    _logged_at = 0.0
    _stats_logged: LoaderStats
    _ooms_logged = 0
    _rule: Rule = None
    _num_tests = 0  # split tests whose samples could not show the rule
    _scale: Scale = None  # of the running step
    _loss: float | None = None  # of the running step, before this factor
    _compute: Any = None  # with several losses, the function that returns them
    _num_unchecked = 4  # weighed steps, or sums of several losses, that are still checked

    @property
    def samples_per_update(self) -> int:
        """Samples per update over all ranks; with a schedule, those of the first update."""
        wanted = self.dynagroup.samples_per_update
        if wanted is None:
            return super().get_total_train_batch_size(self.args) * self.accumulation
        return wanted(0, None) if callable(wanted) else wanted

    # The Trainer passes only its training loader; a callback that reads the data makes a loader of its own.
    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: object
    ) -> tuple[Any, ...]:
        if not isinstance(dataloader, UpdateItems):
            raise ConfigError(
                f"get_train_dataloader of {type(self).__name__} must return what super().get_train_dataloader() "
                "returns; choose samples in _get_train_sampler or train_dataset"
            )
        loader = dataloader.loader
        self.update_loader = loader
        self.guard = None  # anew, because the model may be new
        self._rule = None
        self._stats_logged = loader.stats.copy()
        self.changes_known = loader.num_changes
        self._logged_at = time.perf_counter()
        self._num_epochs = None
        self._begun = 0
        if loader.num_samples is None or not has_length(dataloader):
            return super().set_initial_training_values(args, dataloader)  # type: ignore[arg-type]
        num_samples = loader.num_samples
        max_steps = self.updates_of_run(loader)
        most_updates = max(num_samples, len(dataloader), 1)  # an epoch ends with its loader
        # If updates grow, later epochs have fewer of them, so a given number of updates takes more epochs.
        num_epochs = sys.maxsize if args.max_steps > 0 else math.ceil(args.num_train_epochs)
        train_samples = loader.samples_after(max_steps)
        self._num_epochs = math.ceil(train_samples / max(num_samples, 1))
        return (
            num_epochs,
            most_updates,
            num_samples,
            train_samples,
            self.samples_per_update,
            most_updates,
            max_steps,
        )

    def updates_of_run(self, loader: StepLoader[Batch]) -> int:
        """Returns the number of updates in the whole run, earlier epochs included."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        num_updates = loader.updates_in(self.args.num_train_epochs)
        if not num_updates:
            raise ConfigError(
                f"{loader.num_samples} samples are too few for one update of {self.samples_per_update}; "
                "use smaller updates, or dataloader_drop_last=False"
            )
        return num_updates

    # This exchanges data. For "loss" and "learning_rate" the Trainer itself calls it on all ranks.
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        loader = self.update_loader
        if loader is not None and {"loss", "learning_rate"} <= logs.keys():
            stats = (loader.stats - self._stats_logged).merged(loader.world)
            if stats.updates:
                self._log_stats(logs, stats)
                self._stats_logged = loader.stats.copy()
        super().log(logs, start_time)

    def _log_stats(self, logs: dict[str, float], stats: LoaderStats) -> None:
        now = time.perf_counter()
        logs.update(stats.figures(now - self._logged_at))
        self._logged_at = now
        mixture = self.dynagroup.mixture
        if mixture is not None and mixture.samples_per_update is not None:
            loader = self.update_loader
            stop = loader.cursor.samples_seen
            num_samples = stats.update_samples // loader.world.size  # each rank counts all of them
            counts = mixture.counts_between(stop - num_samples, stop)
            for name, count in counts.items():
                logs[f"share_{name}"] = round(count / max(sum(counts.values()), 1), 4)
        if self.guard is not None:
            num_ooms = self.guard.learned.report.num_ooms
            logs["oom_retries"] = num_ooms - self._ooms_logged
            self._ooms_logged = num_ooms

    @property
    def _weigh(self) -> Any:
        """The weight of a batch by which the loader weighs losses; where it cannot be known yet, samples."""
        weigh = self._chosen_weigh
        return "samples" if weigh is None or isinstance(weigh, Mapping) else weigh

    @property
    def _chosen_weigh(self) -> Chosen:
        """The user's ``weigh``; None: the split test finds it."""
        weigh: Any = self.dynagroup.weigh
        return None if weigh == "auto" else weigh

    @property
    def has_own_loss(self) -> bool:
        """Whether a loss of the user's or of a library's class is computed, not the model's own."""
        return (
            defines_compute_loss(type(self))
            or "compute_loss" in vars(self)
            or self.compute_loss_func is not None
        )

    @property
    def _pad(self) -> dict[str, int] | None:
        """Padding values by field, for batches that are padded to few shapes; None: the tokenizer has no padding id."""
        ids = getattr(self.processing_class, "pad_token_id", None)
        return None if ids is None else dict.fromkeys(("input_ids", "decoder_input_ids"), ids)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Items]:
        self._before = None
        if self.args.enable_jit_checkpoint:
            self._before = self.update_loader.state_dict()
        is_finished = 0 < self.state.max_steps <= self.state.global_step  # of a resumed run
        update = None if is_finished else next(epoch_iterator, None)
        if update is None:
            self.control.should_epoch_stop = True
            return [], None
        self.just_resumed = False
        self._begun = self.state.global_step + 1
        batches = _counted(update)
        _, items = super().get_batch_samples(iter(batches), len(batches), device)
        # 0 would make the gradients of idle steps nan
        return [update], items if items is None else torch.as_tensor(items).clamp(min=1)

    def training_step(
        self, model: Model, inputs: Batch, num_items_in_batch: Items = None
    ) -> torch.Tensor:
        if not isinstance(inputs, list):
            return super().training_step(model, inputs, num_items_in_batch)
        varies = self.update_loader.budget.ladder is None
        with self.attention_kernels(varies=varies):
            return self._run_update(model, inputs, num_items_in_batch)

    def attention_kernels(self, *, varies: bool) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for a batch, forward and backward: the kernels that its attention may use."""
        return attention_kernels(self.dynagroup.attention_backends, varies=varies)

    def _run_update(
        self, model: Model, inputs: list[Step[Batch]], num_items_in_batch: Items
    ) -> torch.Tensor:
        """Runs the batches of an update. Returns their weighed loss."""
        if self._rule is None:
            self._rule = self._find_rule(model, inputs)
            self._tell_of_sums(num_items_in_batch)
        rule = self._unknown_rule(num_items_in_batch) if self._rule is None else self._rule
        scales = self._scales(inputs, rule)
        items = num_items_in_batch if rule == "sum" else None
        total: Any = 0.0
        for number, step in enumerate(inputs):
            if number:
                self.control = self.callback_handler.on_substep_end(
                    self.args, self.state, self.control
                )
            if self.dynagroup.out_of_memory is not None:
                total = total + self._run_protected(model, step, rule, scales[number], items)
                continue
            weighed = self._weighed(step, scales[number], len(inputs))
            figures = trl_figures(self, step.batch, idle=step.idle)
            with self._local_gradients(model, step), weighed, figures:
                loss = super().training_step(model, step.batch, items)
                self._check_step(loss, scales[number])
                total = total + loss
        return total

    def _check_step(self, loss: torch.Tensor, scale: Scale) -> None:
        """Checks that the ``training_step`` of the Trainer's class weighs the loss, as transformers' does."""
        if self._loss is None or not isinstance(scale, float) or math.isclose(scale, 1.0):
            return
        self._num_unchecked -= 1
        if not math.isclose(float(loss), self._loss * scale, rel_tol=1e-2, abs_tol=1e-6):
            raise ConfigError(
                f"training_step of {type(self).__name__} must weigh the loss: call "
                "super().training_step, or divide it by self.current_gradient_accumulation_steps"
            )

    def _scales(self, update: list[Step[Batch]], rule: Rule) -> list[Scale]:
        """Returns the factor of each step's loss."""
        if rule == "sum":
            return [None] * len(update)
        world = self.update_loader.world
        if isinstance(rule, Mapping):
            return loss_scales(update, rule, world)
        if rule is self._weigh or rule == self._weigh:
            return [step.loss_scale for step in update]
        return [scale["loss"] for scale in loss_scales(update, {"loss": rule}, world)]

    def _tell_of_sums(self, items: Items) -> None:
        """Says that the plain Trainer would log a larger loss: it adds up means of models that ignore the items."""
        batches = self.accumulation
        adds_up = items is not None and self.model_accepts_loss_kwargs and self._rule in MEANS
        if adds_up and batches > 1 and self.state.is_world_process_zero:
            _log.warning(
                "dynagroup: this model's loss is a mean that ignores num_items_in_batch. The plain "
                "Trainer adds up the means of the %s batches of an update, so it logs a loss %s times "
                "as large, and clips a gradient %s times as large: to clip as before, divide "
                "max_grad_norm by %s",
                *[batches] * 4,
            )

    def _unknown_rule(self, items: Items) -> Rule:
        """Returns how losses are weighed as long as no sample has shown it."""
        if self._chosen_weigh is not None:
            return self._chosen_weigh
        return "samples" if items is None else "sum"

    def _find_rule(self, model: Model, update: list[Step[Batch]]) -> Rule:
        """Tests how the loss adds up, on a few samples of the training data. None: they cannot show it."""
        loader = self.update_loader
        self._num_tests += 1
        plugin: Any = self.accelerator.state.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 3:
            reason = "DeepSpeed ZeRO-3 gives no gradients of single batches"
            return untested(reason, self._chosen_weigh)
        if is_stream(loader.dataset):
            largest = max(update, key=lambda step: len(step.indices))
            return self._tested(model, pieces_of_batch(largest.batch, len(largest.indices)))
        return self._tested(model, pieces_of_loader(loader, skip=self._num_tests - 1))

    def _tested(self, model: Model, pieces: Pieces | None) -> Rule:
        """Runs the split test on the Trainer's own loss."""
        args = self.args
        average = args.average_tokens_across_devices
        args.average_tokens_across_devices = False  # each rank counts its own items
        self.current_gradient_accumulation_steps = 1
        try:
            losses = self._losses_by_rule(model, pieces)
            with trl_figures(self, probe=True):
                return split_test(
                    model,
                    losses,
                    pieces,
                    self._chosen_weigh,
                    world=self.data_world,
                    is_half=args.bf16 or args.fp16,
                )
        finally:
            args.average_tokens_across_devices = average

    def _losses_by_rule(self, model: Model, pieces: Pieces | None) -> dict[str, LossOf]:
        """Returns how the Trainer computes a batch's loss for each rule: a sum is divided by the update's items, if the
        Trainer counts them; a mean is not."""

        def mean_loss(step: Step[Batch]) -> Any:
            return self._plain_loss(model, step.batch, None)

        if isinstance(self.dynagroup.weigh, Mapping):
            return {"weigh": mean_loss}
        items = None
        if pieces is not None:
            _, items = super().get_batch_samples(iter([pieces.together]), 1, self.args.device)
        if items is not None:
            items = torch.as_tensor(items).clamp(min=1)

        def items_loss(step: Step[Batch]) -> Any:
            return self._plain_loss(model, step.batch, items)

        means = MEANS if self._chosen_weigh is None else ("weigh",)
        return {"sum": items_loss, **dict.fromkeys(means, mean_loss)}

    def _plain_loss(self, model: Model, batch: Batch, items: Items) -> Any:
        """Returns a batch's loss, or its losses, without a factor."""
        inputs: Any = self._prepare_inputs(batch)
        with self.compute_loss_context_manager():
            if isinstance(self.dynagroup.weigh, Mapping):
                return self._losses_of(model, inputs, items)
            return self.compute_loss(model, {**inputs}, num_items_in_batch=items)

    @property
    def data_world(self) -> World:
        """The ranks that share the data."""
        if self.update_loader is not None:
            return self.update_loader.world
        return self.dynagroup.world or current_world()

    def _losses_of(self, model: Model, inputs: Batch, items: Items) -> Any:
        """Returns the losses that the model, or the Trainer's ``compute_loss``, returns as ``losses``."""
        compute = self._compute or self.compute_loss
        loss, outputs = compute(model, {**inputs}, return_outputs=True, num_items_in_batch=items)
        losses = outputs.get("losses") if isinstance(outputs, Mapping) else None
        weigh: Any = self.dynagroup.weigh
        is_checked = self._num_unchecked > 0  # reading the loss waits for the device
        self._num_unchecked -= int(is_checked)
        check_losses(losses, weigh, loss if is_checked else None)
        return losses

    @contextlib.contextmanager
    def _weighed(self, step: Step[Batch], scale: Scale, num_steps: int) -> Iterator[None]:
        """Multiplies the step's loss by its scale, if it is a mean. The Trainer only divides, by the number of batches of
        an update: so 1 / scale takes that number's place. Sums, and several losses, are not divided."""
        if step.idle:
            scale = 0.0
        is_mean = isinstance(scale, float)
        divisor = num_steps
        if is_mean:
            divisor = math.inf if scale == 0.0 else 1.0 / scale
        before = self.loss_is_scaled_for_ga
        self.loss_is_scaled_for_ga = not is_mean
        self.current_gradient_accumulation_steps = divisor
        self._scale = scale
        self._loss = None
        try:
            with self._several_losses(scale):
                yield
        finally:
            self._scale = None
            self.loss_is_scaled_for_ga = before

    @contextlib.contextmanager
    def _several_losses(self, scale: Scale) -> Iterator[None]:
        """Computes the sum of several losses, each with its own scale, instead of the loss; only if there are several."""
        if not isinstance(scale, Mapping):
            yield
            return
        attributes = vars(self)
        own = attributes.get("compute_loss")
        self._compute = self.compute_loss

        def compute_loss(
            model: Model, inputs: Batch, *_: object, num_items_in_batch: Items = None
        ) -> Any:
            return sum_of(self._losses_of(model, inputs, num_items_in_batch), scale)

        attributes["compute_loss"] = compute_loss
        try:
            yield
        finally:
            self._compute = None
            del attributes["compute_loss"]
            if own is not None:
                attributes["compute_loss"] = own

    def compute_loss(
        self,
        model: Model,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Items = None,
    ) -> Any:
        result: Any = super().compute_loss(
            model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
        )
        if self._scale is None:
            return result
        loss = result[0] if return_outputs else result
        is_last = type(self).compute_loss is TrainerSteps.compute_loss
        if self._scale == 0.0:
            loss = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # keeps the graph, for collectives
        elif is_last and self._num_unchecked:
            self._loss = float(loss.detach())
        return (loss, result[1]) if return_outputs else loss

    def _run_protected(
        self, model: Model, step: Step[Batch], rule: Rule, scale: Scale, items: Items
    ) -> torch.Tensor:
        if self.guard is None:
            self.guard = self._new_guard(model)
            self._ooms_logged = self.guard.learned.report.num_ooms
        self.guard.weigh = None if rule == "sum" else weigher(rule)
        model.train()

        def loss_of(batch: Batch) -> torch.Tensor:
            with self.compute_loss_context_manager(), trl_figures(self, batch):
                return self.compute_loss(model, {**batch}, num_items_in_batch=items)

        own = replace(step.map(self._prepare_inputs), loss_scale=1.0 if scale is None else scale)
        return self.guard.step(loss_of, own).loss * own.loss_scale

    def _new_guard(self, model: Model) -> OomSafeBackward:
        config = self.dynagroup
        loader = self.update_loader
        if defines_compute_loss(type(self)) and loader.world.size > 1:
            raise ConfigError(
                f"`out_of_memory` ({config.out_of_memory!r}) must be None, as retries run on one rank alone, "
                f"and {type(self).__name__}'s compute_loss may exchange data with others"
            )
        return OomSafeBackward(
            model,
            splitter=config.splitter,
            min_samples=config.min_samples,
            world=loader.world,
            learned=loader.budget.learner,
            backward=self.accelerator.backward,
            weigh="sum",
        )

    def _local_gradients(
        self, model: Model, step: Step[Batch]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which ranks exchange gradients only in an update's last step."""
        accelerator = self.accelerator
        accelerator.sync_gradients = step.ends_update  # if so, DeepSpeed's backward pass steps
        always = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        if step.ends_update or always or is_deepspeed:
            return contextlib.nullcontext()
        return accelerator.no_sync(model)

    def floating_point_ops(self, inputs: Batch) -> int:
        return sum(map(super().floating_point_ops, _counted(inputs)))

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        for batch in _counted(inputs):
            super()._track_num_input_tokens(batch)


class DynagroupCallback(TrainerCallback):
    """Updates a Trainer's progress, before all other callbacks, so that these read the right ``state.epoch``."""

    def __init__(self, trainer: TrainerSteps) -> None:
        self.trainer = trainer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        trainer = self.trainer
        if trainer.update_loader is None:
            return
        _refuse_unwrapped(trainer)
        if state.is_world_process_zero:
            for line in banner(trainer, trainer.update_loader):
                _log.warning("dynagroup: %s", line)
        if trainer.dynagroup.preflight:
            model: Model = trainer.model_wrapped
            model.train()
            varies = trainer.update_loader.budget.ladder is None
            with trainer.attention_kernels(varies=varies):
                preflight(model, trainer.update_loader, self._loss_of)

    def _loss_of(self, model: Model, batch: Batch) -> torch.Tensor:
        trainer = self.trainer
        inputs: Any = trainer._prepare_inputs(batch)
        one = torch.tensor(1, device=trainer.args.device)
        with trl_figures(trainer, probe=True), trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, {**inputs}, num_items_in_batch=one)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        trainer = self.trainer
        loader = trainer.update_loader
        if loader is None:
            return
        if loader.num_samples is not None:
            share = loader.cursor.samples_used / max(loader.num_samples, 1)
            state.epoch = loader.cursor.epoch + share
        if loader.num_changes != trainer.changes_known:  # the run may have become longer
            trainer.changes_known = loader.num_changes
            state.max_steps = trainer.updates_of_run(loader)

    # If nothing remained of a resumed epoch, which may be found only here, the Trainer would end training (step < 0).
    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        trainer: Any = self.trainer
        # `train_loss` would get this rank's part
        trainer._tr_loss = trainer.accelerator.gather(trainer._tr_loss).mean()
        if trainer.just_resumed:
            trainer.just_resumed = False
            control.should_training_stop = state.global_step >= state.max_steps


def _refuse_unwrapped(trainer: TrainerSteps) -> None:
    """Raises ConfigError if ranks would train apart, because nothing exchanges the model's gradients."""
    kind = trainer.accelerator.distributed_type.value
    if trainer.args.world_size == 1 or not kind.startswith("MULTI_") or trainer.dynagroup.world:
        return
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return
    model: Model = trainer.model_wrapped
    if not any(isinstance(one, DistributedDataParallel) for one in model.modules()):
        raise ConfigError(
            "ranks would train apart: after evaluate() or predict(), transformers does not wrap the model in "
            "DistributedDataParallel; call train() first, or use eval_on_start=True"
        )


def _counted(inputs: Batch) -> list[Batch]:
    """Returns the batches of an update, or the one batch, as the Trainer counts them; idle ones are empty."""
    if not isinstance(inputs, list):
        return [inputs]
    batches = []
    for step in inputs:
        batch = step.batch
        if step.idle and isinstance(batch, Mapping):
            batch = {name: _emptied(value) for name, value in batch.items()}
        batches.append(batch)
    return batches


def _emptied(value: object) -> object:
    return value[:0] if isinstance(value, torch.Tensor) and value.ndim else value


def defines_compute_loss(trainer_class: type) -> bool:
    """Returns whether a class of the user or of a library computes the loss itself."""
    for one in trainer_class.__mro__:
        if "compute_loss" in vars(one) and one not in (TrainerSteps, Trainer):
            return True
    return False
