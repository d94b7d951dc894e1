"""Runs a Trainer's updates step by step, with exact weights, and counts progress in samples."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from dynagroup.distributed import World, current_world
from dynagroup.errors import ConfigError
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf_data import UpdateItems, banner
from dynagroup.online.datasets import is_stream
from dynagroup.oom.preflight import preflight
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import weigher
from dynagroup.update.split_test import (
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
from dynagroup.update.step import LoaderStats, Step, loss_scales

_log = logging.getLogger(__name__)


# While TRL computes a loss, it gathers figures of all ranks' batches as tensors of one shape, appends their mean to
# lists, and logs the means of the lists. Batches that fit have different sizes. So here each rank gives as many figures
# as it has (an idle rank none), and a mean is appended once per figure.
@contextlib.contextmanager
def trl_figures(trainer: Any, *, idle: bool = False, probe: bool = False) -> Iterator[None]:
    """Context manager for computing the loss of a TRL trainer. ``probe``: uses this rank's values only, no logs."""
    kept = next(
        (vars(trainer)[name] for name in ("_metrics", "_stored_metrics") if name in vars(trainer)),
        None,
    )
    if kept is None:
        yield
        return
    accelerator, counts = trainer.accelerator, [1]
    sums: list[float] = []  # of single numbers, in the order in which TRL gathers them
    means: list[float] = []  # of numbers of samples
    counted = {
        name: n for name, n in vars(trainer).items() if name == "_total_train_tokens" and probe
    }
    noted = {
        (mode, key): len(values)
        for mode, figures in kept.items()
        for key, values in figures.items()
    }

    def gather(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = [] if idle else tensor.flatten().tolist()
        found = own if probe else gather_object(own)
        counts.append(len(found))
        if tensor.ndim == 0:
            sums.append(float(sum(found)))
        elif found:
            means.append(math.fsum(found) / len(found))
        return tensor.new_tensor(found)

    accelerator.gather = accelerator.gather_for_metrics = gather
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics
        vars(trainer).update(counted)
    for mode, figures in kept.items():
        for key, values in [*figures.items()]:
            before = noted.get((mode, key), 0)
            if probe:
                values[before:] = []
            elif values[before:]:
                ratio = trainer.ratios.setdefault((mode, key), Ratio())
                ratio.find(values[before:], sums, means)
                values[:] = ratio.added(values, before, sums, max(counts))
            if not values:
                del figures[key]


@dataclass
class Ratio:
    """A figure that TRL computes as one sum of a batch divided by another, such as the accuracy of tokens. TRL logs the mean
    of all batches' figures; here it is the ratio of the sums of all batches, however they are cut."""

    pair: tuple[int, int] | None = None  # places of the two sums among those that TRL gathers
    above: float = 0.0
    below: float = 0.0

    def find(self, new: list[Any], sums: list[float], means: list[float]) -> None:
        """Finds the two sums whose ratio is the new figure, unless it is a mean over samples."""
        if self.pair is not None or len(new) != 1 or not new[0]:
            return
        if any(math.isclose(mean, new[0], rel_tol=1e-5) for mean in means):
            return
        for above, below in permutations(range(len(sums)), 2):
            if sums[below] and math.isclose(sums[above] / sums[below], new[0], rel_tol=1e-6):
                self.pair = above, below
                return

    def added(self, values: list[Any], before: int, sums: list[float], count: int) -> list[Any]:
        """Returns the values to log, the last of which are new; ``count``: figures of a batch that is no ratio."""
        new = values[before:]
        if before == 0:
            self.above = self.below = 0.0  # the earlier ones were logged
        if self.pair is None:
            return values[:before] + new * count
        self.above += sums[self.pair[0]]
        self.below += sums[self.pair[1]]
        return [self.above / self.below if self.below else 0.0]


class TrainerSteps(Trainer if TYPE_CHECKING else object):
    """Replaces ``Trainer.training_step``: several micro-batches make one optimizer step. An epoch ends when its samples
    are used, not after a given number of optimizer steps."""

    dynagroup: DynagroupConfig
    update_loader: Any  # the running training's StepLoader; None before training
    guard: OomSafeBackward | None
    accumulation = 1  # while it trains, the arguments say 1, and this is what they said before
    just_resumed, changes_known = False, 0
    _begun, _before = (
        0,
        None,
    )  # number of the last update that began, from 1; with JIT checkpoints, the state before it
    _num_epochs, _logged_at = 0, 0.0  # number of epochs in the run, as known at its start
    _stats_logged: LoaderStats
    _ooms_logged = 0
    _rule: Any = None  # how losses of batches add up: "sum", or a `weigh`; None: not known yet
    _num_tests = 0  # split tests whose samples could not show it
    _scale: Any = None  # factor of the running step's loss, a dict for several losses
    _loss: Any = None  # of the running step, before this factor
    ratios: dict[tuple[str, str], Ratio]  # TRL's figures of this run
    _compute: Any = None  # with several losses, the function that returns them
    _num_unchecked = 4  # weighed steps whose `training_step` is still checked

    @property
    def samples_per_update(self) -> int:
        """Samples per update over all ranks; with a schedule, those of the first update."""
        wanted = self.dynagroup.samples_per_update
        fixed = super().get_total_train_batch_size(self.args) * self.accumulation
        return fixed if wanted is None else wanted(0, None) if callable(wanted) else wanted

    # The Trainer passes only its training loader; a callback that reads the data makes a loader of its own.
    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        if not isinstance(dataloader, UpdateItems):
            how = "must return what super().get_train_dataloader() returns; choose samples in _get_train_sampler or train_dataset"
            raise ConfigError(f"get_train_dataloader of {type(self).__name__} {how}")
        self.update_loader = loader = dataloader.loader
        self.guard, self._rule = None, None  # anew, because the model may be new
        self._stats_logged, self.changes_known = loader.stats.copy(), loader.num_changes
        self._logged_at, self._num_epochs, self._begun = time.perf_counter(), 0, 0
        if loader.num_samples is None or not has_length(dataloader):
            return super().set_initial_training_values(args, dataloader)  # type: ignore[arg-type]
        num_samples, max_steps = loader.num_samples, self.updates_of_run(loader)
        most_updates = max(
            num_samples, len(dataloader), 1
        )  # an upper bound; an epoch ends with its loader
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

    def updates_of_run(self, loader: StepLoader[Any]) -> int:
        """Returns the number of updates in the whole run, earlier epochs included."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        if not (updates := loader.updates_in(self.args.num_train_epochs)):
            few = f"{loader.num_samples} samples are too few for one update of {self.samples_per_update}"
            raise ConfigError(f"{few}; use smaller updates, or dataloader_drop_last=False")
        return updates

    # This exchanges data. For "loss" and "learning_rate" the Trainer itself calls it on all ranks.
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        loader = self.update_loader
        if loader is not None and {"loss", "learning_rate"} <= logs.keys():
            stats = (loader.stats - self._stats_logged).merged(loader.world)
            if stats.updates:
                now = time.perf_counter()
                logs["samples_per_update"] = stats.update_samples / stats.updates
                logs["padding"] = round(stats.padding, 4)
                logs["tokens_per_s"] = round(
                    stats.real_tokens / max(now - self._logged_at, 1e-9), 1
                )
                if self.guard is not None:
                    ooms = self.guard.learned.report.num_ooms
                    logs["oom_retries"], self._ooms_logged = ooms - self._ooms_logged, ooms
                self._logged_at, self._stats_logged = now, loader.stats.copy()
        super().log(logs, *args, **kwargs)

    @property
    def _weigh(self) -> Any:
        """The weight of a batch by which the loader weighs losses; where it cannot be known yet, samples."""
        weigh = self.dynagroup.weigh
        return "samples" if isinstance(weigh, Mapping) or weigh == "auto" else weigh

    @property
    def _has_own_loss(self) -> bool:
        return (
            defines_compute_loss(type(self))
            or "compute_loss" in vars(self)
            or self.compute_loss_func is not None
        )

    @property
    def _pad(self) -> dict[str, Any] | None:
        """Padding values by field, for batches that are padded to few shapes; None: the tokenizer has no padding id."""
        ids = getattr(self.processing_class, "pad_token_id", None)
        return None if ids is None else dict.fromkeys(("input_ids", "decoder_input_ids"), ids)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        self._before = (
            self.update_loader.state_dict()
            if getattr(self.args, "enable_jit_checkpoint", False)
            else None
        )
        if (
            0 < self.state.max_steps <= self.state.global_step
            or (update := next(epoch_iterator, None)) is None
        ):
            self.control.should_epoch_stop = True  # also where a finished run is resumed
            return [], None
        self.just_resumed, self._begun = False, self.state.global_step + 1
        batches = _counted(update)
        _, items = super().get_batch_samples(iter(batches), len(batches), device)
        # 0 would make the gradients of idle steps nan
        return [update], items if items is None else torch.as_tensor(items).clamp(min=1)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if not isinstance(inputs, list):
            return super().training_step(model, inputs, num_items_in_batch)
        if self._rule is None:
            self._rule = self._find_rule(model, inputs, num_items_in_batch)
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
            figures = trl_figures(self, idle=step.idle)
            with self._local_gradients(model, step), weighed, figures:
                loss = super().training_step(model, step.batch, items)
                self._check_step(loss, scales[number])
                total = total + loss
        return total

    def _check_step(self, loss: torch.Tensor, scale: Any) -> None:
        """Checks that the ``training_step`` of the Trainer's class weighs the loss, as transformers' does."""
        if self._loss is None or not isinstance(scale, float) or math.isclose(scale, 1.0):
            return
        self._num_unchecked -= 1
        if not math.isclose(float(loss), self._loss * scale, rel_tol=1e-2, abs_tol=1e-6):
            raise ConfigError(
                f"training_step of {type(self).__name__} must weigh the loss: call "
                "super().training_step, or divide it by self.current_gradient_accumulation_steps"
            )

    def _scales(self, update: list[Step[Any]], rule: Any) -> list[Any]:
        """Returns the factor of each step's loss; None: losses are added as they are."""
        if rule == "sum":
            return [None] * len(update)
        if isinstance(rule, Mapping):
            return loss_scales(update, rule, self.update_loader.world)
        if rule is self._weigh or rule == self._weigh:
            return [step.loss_scale for step in update]
        found = loss_scales(update, {"loss": rule}, self.update_loader.world)
        return [scale["loss"] for scale in found]

    def _unknown_rule(self, items: Any) -> Any:
        """Returns how losses are weighed as long as no sample has shown it."""
        if self.dynagroup.weigh != "auto":
            return self.dynagroup.weigh
        return "samples" if items is None else "sum"

    def _find_rule(self, model: Any, update: list[Step[Any]], items: Any) -> Any:
        """Tests how the loss adds up, on a few samples of the training data. None: they cannot show it."""
        loader = self.update_loader
        self._num_tests += 1
        plugin: Any = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            reason = "DeepSpeed ZeRO-3 gives no gradients of single batches"
            return untested(reason, self._chosen_weigh)
        if is_stream(loader.dataset):
            [first, *_] = sorted(update, key=lambda step: -len(step.indices))
            return self._tested(model, pieces_of_batch(first.batch, len(first.indices)))
        return self._tested(model, pieces_of_loader(loader, skip=self._num_tests - 1))

    @property
    def _chosen_weigh(self) -> Chosen:
        """The user's ``weigh``; None: the split test finds it."""
        weigh: Any = self.dynagroup.weigh
        return None if weigh == "auto" else weigh

    def _tested(self, model: Any, pieces: Pieces | None) -> Any:
        """Runs the split test on the Trainer's own loss."""
        args = self.args
        weigh = self._chosen_weigh
        average = args.average_tokens_across_devices
        args.average_tokens_across_devices = False  # each rank counts its own items
        self.current_gradient_accumulation_steps = 1

        def loss_with(items: Any) -> LossOf:
            def loss_of(step: Step[Any]) -> Any:
                inputs = self._prepare_inputs(step.batch)
                with self.compute_loss_context_manager():
                    if isinstance(weigh, Mapping):
                        return self._losses_of(model, inputs, items)
                    return self.compute_loss(model, {**inputs}, num_items_in_batch=items)

            return loss_of

        try:
            items = None
            if pieces is not None:
                batches = iter([pieces.together])
                _, items = super().get_batch_samples(batches, 1, args.device)
            mean_loss = loss_with(None)
            losses = dict.fromkeys(MEANS if weigh is None else ["weigh"], mean_loss)
            if not isinstance(weigh, Mapping):
                items_loss = mean_loss
                if items is not None:
                    items_loss = loss_with(torch.as_tensor(items).clamp(min=1))
                losses = {"sum": items_loss, **losses}
            is_half = args.bf16 or args.fp16
            with trl_figures(self, probe=True):
                return split_test(
                    model, losses, pieces, weigh, world=self._data_world, is_half=is_half
                )
        finally:
            args.average_tokens_across_devices = average

    @property
    def _data_world(self) -> World:
        if self.update_loader is not None:
            return self.update_loader.world
        return self.dynagroup.world or current_world()

    def _losses_of(self, model: Any, inputs: Any, items: Any) -> Any:
        """Returns the losses that the model, or the Trainer's ``compute_loss``, returns as ``losses``."""
        compute = self._compute or self.compute_loss
        _, outputs = compute(model, {**inputs}, return_outputs=True, num_items_in_batch=items)
        losses = outputs.get("losses") if isinstance(outputs, Mapping) else None
        weigh: Any = self.dynagroup.weigh
        check_losses(losses, weigh)
        return losses

    @contextlib.contextmanager
    def _weighed(self, step: Step[Any], scale: Any, num_steps: int) -> Iterator[None]:
        """Weighs a mean loss. The Trainer divides losses by a number of batches, so that number is set to 1 / scale."""
        stated = self.loss_is_scaled_for_ga
        self._scale, self._loss = (0.0 if step.idle else scale), None
        is_nothing = self._scale == 0.0
        is_mean = isinstance(scale, float) and not is_nothing
        self.loss_is_scaled_for_ga = not is_mean and not is_nothing
        self.current_gradient_accumulation_steps = num_steps
        if is_mean:
            self.current_gradient_accumulation_steps = 1.0 / scale
        elif is_nothing:
            self.current_gradient_accumulation_steps = math.inf
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "loss_is_scaled_for_ga", stated)
            stack.callback(setattr, self, "_scale", None)
            if isinstance(self._scale, Mapping):
                stack.enter_context(self._several_losses())
            yield

    @contextlib.contextmanager
    def _several_losses(self) -> Iterator[None]:
        """Computes the sum of several losses, each with its own scale, instead of the loss."""
        own = vars(self).get("compute_loss")
        self._compute = self.compute_loss

        def compute_loss(model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
            return sum_of(self._losses_of(model, inputs, num_items_in_batch), self._scale)

        vars(self)["compute_loss"] = compute_loss
        try:
            yield
        finally:
            self._compute = None
            del self.compute_loss
            if own is not None:
                self.compute_loss = own

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
    ) -> Any:
        found: Any = super().compute_loss(
            model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
        )
        if self._scale is None:
            return found
        loss, outputs = found if return_outputs else (found, None)
        is_last = type(self).compute_loss is TrainerSteps.compute_loss
        if self._scale == 0.0:
            loss = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # keeps the graph, for collectives
        elif is_last and self._num_unchecked:
            self._loss = float(loss.detach())
        return (loss, outputs) if return_outputs else loss

    def _run_protected(
        self, model: Any, step: Step[Any], rule: Any, scale: Any, items: Any
    ) -> torch.Tensor:
        config, loader = self.dynagroup, self.update_loader
        if self.guard is None:
            if defines_compute_loss(type(self)) and loader.world.size > 1:
                alone = f"`out_of_memory` ({config.out_of_memory!r}) must be None, as retries run on one rank alone"
                raise ConfigError(
                    f"{alone}, and {type(self).__name__}'s compute_loss may exchange data with others"
                )
            self.guard = OomSafeBackward(
                model,
                splitter=config.splitter,
                min_samples=config.min_samples,
                world=loader.world,
                learned=loader.budget.learner,
                backward=self.accelerator.backward,
                weigh="sum",
            )
            self._ooms_logged = self.guard.learned.report.num_ooms
        self.guard.weigh = None if rule == "sum" else weigher(rule)
        model.train()

        def loss_of(batch: Any) -> torch.Tensor:
            with self.compute_loss_context_manager(), trl_figures(self):
                return self.compute_loss(model, {**batch}, num_items_in_batch=items)

        own = replace(step.map(self._prepare_inputs), loss_scale=1.0 if scale is None else scale)
        return self.guard.step(loss_of, own).loss * own.loss_scale

    def _local_gradients(self, model: Any, step: Step[Any]) -> Any:
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        self.accelerator.sync_gradients = step.ends_update  # if so, DeepSpeed's backward pass steps
        if (
            step.ends_update
            or always
            or self.accelerator.distributed_type == DistributedType.DEEPSPEED
        ):
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(map(super().floating_point_ops, _counted(inputs)))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in _counted(inputs):
            super()._track_num_input_tokens(batch)


class DynagroupCallback(TrainerCallback):
    """Updates a Trainer's progress, before all other callbacks, so that these read the right ``state.epoch``."""

    def __init__(self, trainer: TrainerSteps) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = self.trainer
        if trainer.update_loader is None:
            return
        parallel = args.world_size > 1 and trainer.accelerator.distributed_type.value.startswith(
            "MULTI_"
        )
        sharded = trainer.dynagroup.world or getattr(
            trainer, "is_distributed_loading_by_transformers", False
        )
        modules = trainer.model_wrapped.modules()
        if (
            parallel
            and not sharded
            and not any(isinstance(one, DistributedDataParallel) for one in modules)
        ):
            why = "after evaluate() or predict(), transformers does not wrap the model in DistributedDataParallel"
            raise ConfigError(
                f"ranks would train apart: {why}; call train() first, or use eval_on_start=True"
            )
        if state.is_world_process_zero:
            for line in banner(trainer, trainer.update_loader):
                _log.warning("dynagroup: %s", line)
        if not trainer.dynagroup.preflight:
            return

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            inputs, one = trainer._prepare_inputs(batch), torch.tensor(1, device=args.device)
            with trl_figures(trainer, probe=True), trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, {**inputs}, num_items_in_batch=one)

        trainer.model_wrapped.train()
        preflight(trainer.model_wrapped, trainer.update_loader, loss_of)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, loader = self.trainer, self.trainer.update_loader
        if loader is not None and loader.num_samples is not None:
            state.epoch = loader.cursor.epoch + loader.cursor.samples_used / max(
                loader.num_samples, 1
            )
        if (
            loader is not None and loader.num_changes != trainer.changes_known
        ):  # the run may have become longer
            trainer.changes_known = loader.num_changes
            state.max_steps = trainer.updates_of_run(loader)

    # If nothing remained of a resumed epoch, which may be found only here, the Trainer would end training (step < 0).
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = self.trainer
        trainer._tr_loss = trainer.accelerator.gather(
            trainer._tr_loss
        ).mean()  # `train_loss` would get this rank's part
        if trainer.just_resumed:
            trainer.just_resumed = False
            control.should_training_stop = state.global_step >= state.max_steps


def _counted(inputs: Any) -> list[Any]:
    """Returns the batches of an update, or the one batch, as the Trainer counts them; idle ones are empty."""
    if not isinstance(inputs, list):
        return [inputs]
    return [
        {
            name: value[:0] if getattr(value, "ndim", 0) else value
            for name, value in step.batch.items()
        }
        if step.idle and isinstance(step.batch, Mapping)
        else step.batch
        for step in inputs
    ]


def defines_compute_loss(trainer_class: type) -> bool:
    """Returns whether a class of the user or of a library computes the loss itself."""
    return any(
        "compute_loss" in vars(c) and c not in (TrainerSteps, Trainer)
        for c in trainer_class.__mro__
    )
