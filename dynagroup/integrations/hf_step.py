"""Runs a Trainer's updates step by step, with exact weights, and counts progress in samples."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from dynagroup.device import is_out_of_memory
from dynagroup.distributed import World, current_world
from dynagroup.errors import ConfigError
from dynagroup.integrations.config import DynagroupConfig, trl_classes
from dynagroup.integrations.hf_data import UpdateItems
from dynagroup.oom.jobs import evaluating
from dynagroup.oom.preflight import preflight
from dynagroup.oom.split import BatchSplitter
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.filling import LABELS
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import IGNORED, mean_items, predicts_next_token, weigher
from dynagroup.update.step import LoaderStats, Step


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
    if kept is None or not trl_classes(trainer):
        yield
        return
    accelerator, counts = trainer.accelerator, [1]
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
        counts.append(len(found := own if probe else gather_object(own)))
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
            values[before:] = [] if probe else values[before:] * max(counts)
            if not values:
                del figures[key]


class TrainerSteps(Trainer if TYPE_CHECKING else object):
    """Replaces ``Trainer.training_step``: several micro-batches make one optimizer step. An epoch ends when its samples
    are used, not after a given number of optimizer steps."""

    dynagroup: DynagroupConfig
    update_loader: Any  # the running training's StepLoader; None before training
    guard: OomSafeBackward | None
    accumulation: int  # as the arguments say; those of the running Trainer say 1
    just_resumed, changes_known = False, 0
    _begun, _before = (
        0,
        None,
    )  # number of the last update that began, from 1; with JIT checkpoints, the state before it
    _num_epochs, _logged_at = 0, 0.0  # number of epochs in the run, as known at its start
    _stats_logged: LoaderStats
    _ooms_logged, _idle_step, _filling_tried = 0, False, False
    _found_mean: Mapping[
        bool, bool | None
    ] = {}  # whether the loss is a mean, as far as tested: {training: it is}

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
        self.guard = None  # a new one, because the model may be new
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
        """The weight of a batch whose loss is a mean: with "auto" its predicted labels, else its samples."""
        shifted, weigh = (
            predicts_next_token(self.accelerator.unwrap_model(self.model)),
            self.dynagroup.weigh,
        )
        return partial(mean_items, shifted=shifted) if weigh in ("auto", "tokens") else weigh

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
        items = self._get_num_items_in_batch(
            _counted(update), device
        )  # 0 would make the gradients of idle steps nan
        return [update], items if items is None else torch.as_tensor(items).clamp(min=1)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if not isinstance(inputs, list):
            return super().training_step(model, inputs, num_items_in_batch)
        total: Any = 0.0
        mean = self._loss_is_a_mean(model, [step.batch for step in inputs], num_items_in_batch)
        if inputs[0].filled and not LABELS & {*inputs[0].batch}:
            raise ConfigError(
                "`shapes` adds rows whose labels are -100, but these batches have no `labels`; leave `shapes` out"
            )
        if inputs[0].filled and not self._filling_tried:
            counts = self._has_own_loss and mean and self.update_loader.budget.layout != "packed"
            self._filling_tried = not counts or self._filling_is_ignored(model, inputs[0].batch)
        items = None if mean else num_items_in_batch
        for number, step in enumerate(inputs):
            if number:
                self.control = self.callback_handler.on_substep_end(
                    self.args, self.state, self.control
                )
            if self.dynagroup.out_of_memory is not None:
                total = total + self._run_protected(model, step, mean, items)
                continue
            weighed, figures = (
                self._weighed(step, mean, len(inputs)),
                trl_figures(self, idle=step.idle),
            )
            with self._local_gradients(model, step), weighed, figures:
                total = total + super().training_step(model, step.batch, items)
        return total

    def _loss_is_a_mean(
        self, model: Any, batches: list[Any], num_items_in_batch: Any, training: bool = True
    ) -> bool:
        """Returns whether the loss is a mean over its batch, and not a sum divided by the items of the whole update."""
        if self.loss_is_scaled_for_ga is not None:
            return not self.loss_is_scaled_for_ga
        if num_items_in_batch is None:
            return True
        if not self._has_own_loss:
            if self.label_smoother is not None:
                return False
            config = getattr(self.accelerator.unwrap_model(self.model), "config", None)
            if getattr(
                getattr(config, "get_text_config", lambda: config)(), "output_router_logits", False
            ):
                return True  # without a count of items, both the loss and the balancing loss of experts are means
        for batch in batches:
            if self._found_mean.get(training) is None:
                found = is_a_mean(
                    self,
                    model,
                    self._probe(batch),
                    self.dynagroup.world or current_world(),
                    training,
                )
                self._found_mean = {**self._found_mean, training: found}
        return self._found_mean.get(training) is not False

    def _probe(self, batch: Any) -> Any:
        """Returns the batch for tests of the loss: with retries its sample of most labels, which needs less memory."""
        if self.dynagroup.out_of_memory is None:
            return batch
        splitter, weigh = self.dynagroup.splitter or BatchSplitter(), weigher(self._weigh)
        return max(
            (splitter.take(batch, k, k + 1) for k in range(splitter.num_samples(batch))),
            key=lambda one: weigh(one, 1),
        )

    def _filling_is_ignored(self, model: Any, batch: Any) -> bool:
        """Tests that rows of weight 0 leave a mean loss as it is. False: this batch cannot show. All ranks must call it."""
        twice = {
            n: value[[0, 0]]
            for n, value in batch.items()
            if isinstance(value, torch.Tensor) and value.ndim
        }
        ignored = {
            n: torch.cat([twice[n][:1], torch.full_like(twice[n][:1], IGNORED)])
            for n in LABELS & twice.keys()
        }
        with evaluating(model), trl_figures(self, probe=True):
            model.training = self.accelerator.unwrap_model(model).training = True
            both = {**batch, **twice}, {**batch, **twice, **ignored}
            same, filled = (_loss(self, model, self._prepare_inputs(rows), 1) for rows in both)
        counts = not math.isnan(same) and not math.isclose(same, filled, rel_tol=0.1)
        shows, counts = map(bool, self.update_loader.world.all_max([not math.isnan(same), counts]))
        if counts:
            way_out = (
                "average it over the rows that have a label other than -100, or leave `shapes` out"
            )
            raise ConfigError(f"the loss counts the rows of weight 0 that `shapes` adds; {way_out}")
        return shows

    @contextlib.contextmanager
    def _weighed(self, step: Step[Any], mean: bool, num_steps: int) -> Iterator[None]:
        """Weighs a mean loss. The Trainer divides losses by a number of batches, so that number is set to 1 / scale."""
        stated, scale = self.loss_is_scaled_for_ga, step.loss_scale if mean else 1.0
        self._idle_step = nothing = step.idle or scale == 0.0
        self.loss_is_scaled_for_ga = not mean and not nothing
        self.current_gradient_accumulation_steps = (
            math.inf if nothing else 1.0 / scale if mean else num_steps
        )
        try:
            yield
        finally:
            self._idle_step, self.loss_is_scaled_for_ga = False, stated

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
    ) -> Any:
        found: Any = super().compute_loss(
            model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
        )
        if not self._idle_step:
            return found
        loss = found[0] if return_outputs else found
        nothing = (
            loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        )  # keeps the graph, whose backward pass runs collectives
        return (nothing, found[1]) if return_outputs else nothing

    def _run_protected(self, model: Any, step: Step[Any], mean: bool, items: Any) -> torch.Tensor:
        config, loader = self.dynagroup, self.update_loader
        if self.guard is None:
            if defines_compute_loss(type(self)) and loader.world.size > 1:
                alone = f"`out_of_memory` ({config.out_of_memory!r}) must be None, as retries run on one rank alone"
                raise ConfigError(
                    f"{alone}, and {type(self).__name__}'s compute_loss may exchange data with others"
                )
            how: Any = {
                "splitter": config.splitter,
                "min_samples": config.min_samples,
                "world": loader.world,
            }
            how |= {
                "learned": loader.budget.learner,
                "backward": self.accelerator.backward,
                "weigh": "sum",
            }
            self.guard = OomSafeBackward(model, **how)
            self._ooms_logged = self.guard.learned.report.num_ooms
        if mean != (
            self.guard.weigh is not None
        ):  # a test of the loss can show it later than the first batch
            self.guard.weigh = weigher(self._weigh) if mean else None
        model.train()

        def loss_of(batch: Any) -> torch.Tensor:
            with self.compute_loss_context_manager(), trl_figures(self):
                return self.compute_loss(model, {**batch}, num_items_in_batch=items)

        own = replace(step.map(self._prepare_inputs), loss_scale=step.loss_scale if mean else 1.0)
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


# Computes the loss with an item count of one and of two, on one batch, without gradients, dropout or randomness. A sum
# divided by the count is halved, a mean is not; auxiliary terms are small beside a sum divided by one. The Trainer
# cannot tell them apart: to it, heads that ignore the count (transformers#47688, open) and subclasses whose
# ``compute_loss`` returns a mean look like sums, so their losses would be added up. Cost: two forward passes, once per
# run. All ranks must call it; all return the same result, or all raise.
def is_a_mean(
    trainer: Any, model: Any, batch: Any, world: World, training: bool = True
) -> bool | None:
    """Returns whether the loss is a mean over its batch, whatever item count it gets; None: this batch cannot show."""
    error, ratio = None, math.nan
    try:
        with evaluating(model), trl_figures(trainer, probe=True):
            model.training = trainer.model.training = (
                training  # all that a loss may ask; no part drops anything out
            )
            one, two = (
                _loss(trainer, model, trainer._prepare_inputs(batch), count) for count in (1, 2)
            )
        ratio = one / two if two and weigher(trainer._weigh)(batch, 1) else math.nan
    except Exception as caught:
        error = caught
    here = 1.5 < ratio < math.inf, abs(ratio - 1.0) < 0.1
    neither = not any(here) and 0 < abs(ratio) < math.inf
    halves, stays, neither, failed = map(bool, world.all_max([*here, neither, error is not None]))
    if error is not None and is_out_of_memory(error):
        raise error
    if failed or (neither and not halves):
        fails = f"fails in a test of its loss ({error or 'on another rank'})"
        unclear = (
            fails
            if failed
            else "returns a loss that is neither a mean nor a sum (by a test with twice the items)"
        )
        way_out = "`loss_is_scaled_for_ga` to False (a mean over its batch) or True (divided by num_items_in_batch)"
        raise ConfigError(
            f"{type(trainer).__name__} {unclear}; {'correct it, or ' * failed}set {way_out}"
        ) from error
    return not halves if halves or stays else None


def _loss(trainer: Any, model: Any, inputs: Any, count: int) -> float:
    # Both losses use the same random numbers, and training later continues with its own.
    device = trainer.args.device
    same_numbers = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with same_numbers, torch.no_grad(), trainer.compute_loss_context_manager():
        return float(
            trainer.compute_loss(
                model, {**inputs}, num_items_in_batch=torch.tensor(count, device=device)
            )
        )
