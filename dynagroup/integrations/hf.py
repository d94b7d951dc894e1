"""Hugging Face ``Trainer`` with batches that fit: one loader item is one optimizer update.

The Trainer then counts updates, whatever number of batches the memory needs: its length, ``max_steps``, schedulers, logs and
checkpoints stay exact, and nothing is left over at an epoch's end.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from dynagroup.budget import Budget
from dynagroup.errors import ConfigError, StateError
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.host import (
    data_parallel_world,
    host_order,
    ignores_num_items,
    is_stream,
    loader_kwargs,
    mean_weight,
    read_states,
    refuse_unsupported,
    train_lengths,
    unsharded,
    write_state,
)
from dynagroup.integrations.online import OnlineUpdates
from dynagroup.loader import OnlineDataLoader
from dynagroup.schedule import scale_learning_rate
from dynagroup.step import Step
from dynagroup.update_plan import UpdateStats
from dynagroup.updates import UpdateLoader

if TYPE_CHECKING:
    import torch

    _Base = Trainer
else:
    _Base = object

__all__ = [
    "DynagroupCallback",
    "DynagroupConfig",
    "DynagroupTrainer",
    "DynagroupTrainerMixin",
    "MemoryCleanupCallback",
    "dynagroup_trainer",
]


class DynagroupCallback(TrainerCallback, ExportableState):
    """Keeps the Trainer's books by samples, and the loader's state in its checkpoints. Added by the mixin."""

    def __init__(self) -> None:
        self.trainer: DynagroupTrainerMixin | None = None
        self.loader_state: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        loader = self.trainer.update_loader if self.trainer is not None else None
        saved = loader.state_dict() if isinstance(loader, UpdateLoader) else self.loader_state
        return {"args": {}, "attributes": {"loader_state": saved}}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = self.trainer.update_loader if self.trainer is not None else None
        if isinstance(loader, OnlineUpdates):
            folder = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_state(folder, loader.world.rank, loader.state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer._keep_books(state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer._scale_learning_rate(1.0)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer._restore_learning_rate()


class MemoryCleanupCallback(TrainerCallback):
    """Returns cached device memory after evaluation, prediction and epochs, whose shapes differ from training's."""

    def _clean(self, *args: Any, **kwargs: Any) -> None:
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    on_evaluate = on_predict = on_epoch_end = _clean


class DynagroupTrainerMixin(_Base):
    """Put it before a Trainer class: ``class MyTrainer(DynagroupTrainerMixin, Seq2SeqTrainer): ...``.

    The Trainer takes one more argument, ``dynagroup``: a budget, or a :class:`DynagroupConfig`. Its
    ``per_device_train_batch_size * gradient_accumulation_steps * ranks`` is the number of samples of an update, as ever;
    ``trainer.args`` is a copy in which ``gradient_accumulation_steps`` is 1, because the loader's items are updates.
    """

    def __init__(self, *args: Any, dynagroup: Budget | DynagroupConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = dynagroup if isinstance(dynagroup, DynagroupConfig) else DynagroupConfig(budget=dynagroup)
        refuse_unsupported(self, config.world)
        self.dynagroup = config
        self.update_loader: UpdateLoader[Any] | OnlineUpdates | None = None
        self.accumulation = int(self.args.gradient_accumulation_steps)
        self._fixed_samples = super().get_total_train_batch_size(self.args)
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self._idle_step = False
        self._ignores_num_items: bool | None = None
        self._rates_before: list[Any] | None = None
        self._since_log = time.perf_counter()
        self._changes_known = 0
        self.add_callback(DynagroupCallback())

    @property
    def samples_per_update(self) -> int:
        """Samples of an update, over all ranks; of the first one, where a schedule changes it."""
        wanted = self.dynagroup.samples_per_update
        return self._fixed_samples if wanted is None else wanted(0, None) if callable(wanted) else wanted

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.samples_per_update

    def get_train_dataloader(self) -> Any:
        """Our loader, made from the host's: its dataset, columns, collator, workers and sampler are kept."""
        host = super().get_train_dataloader()
        online = self.dynagroup.mode == "online"
        self.update_loader = self._online_updates(host) if online else self._offline_updates(host)
        return self.update_loader

    def _offline_updates(self, host: Any) -> UpdateLoader[Any]:
        config = self.dynagroup
        free = config.updates == "free"
        return UpdateLoader(
            host.dataset,
            train_lengths(self) if config.lengths is None else config.lengths,
            config.budget,
            samples_per_update=None if free else config.samples_per_update or self._fixed_samples,
            accumulation=self.accumulation if free else 1,
            order=None if free else host_order(host),
            seed=self._data_seed,
            weigh=self._weigh,
            drop_last=self.args.dataloader_drop_last and not free,
            plan=config.plan,
            world=data_parallel_world(self, config.world),
            **loader_kwargs(host),
        )

    def _online_updates(self, host: Any) -> OnlineUpdates:
        config = self.dynagroup
        free = config.updates == "free"
        world = data_parallel_world(self, config.world)
        dataset = unsharded(host.dataset)
        loader = OnlineDataLoader(
            dataset,
            config.budget,
            sampler=None if is_stream(dataset) else host_order(host),
            length_of=config.length_of,
            length_hint=config.lengths,
            samples_per_update=None if free else config.samples_per_update or self._fixed_samples,
            accumulation=self.accumulation if free else 1,
            seed=self._data_seed,
            weigh=self._weigh,
            world=world,
            **{**config.plan, **loader_kwargs(host)},
        )
        return OnlineUpdates(loader, world)

    @property
    def _data_seed(self) -> int:
        return self.args.data_seed if self.args.data_seed is not None else self.args.seed

    @property
    def _weigh(self) -> Any:
        wanted = self.dynagroup.weigh
        if wanted != "auto":
            return wanted
        return "samples" if self.compute_loss_func is not None else mean_weight(self)

    # How long: an epoch ends when its samples are used, however many updates that takes.

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        if dataloader is not self.update_loader or not has_length(dataloader):
            return super().set_initial_training_values(args, dataloader)
        num_samples = dataloader.num_samples
        max_steps, num_epochs = self._training_length(dataloader)
        most_updates = max(num_samples, len(dataloader), 1)  # a bound; the loader's end ends the epoch
        if args.max_steps > 0 or self.dynagroup.max_samples:
            train_samples: float = max_steps * self.samples_per_update
        else:
            train_samples = num_samples * args.num_train_epochs
        return num_epochs, most_updates, num_samples, train_samples, self.samples_per_update, most_updates, max_steps

    def _training_length(self, loader: UpdateLoader[Any] | OnlineUpdates) -> tuple[int, int]:
        """(updates, epochs begun) of the whole run."""
        args, most_samples = self.args, self.dynagroup.max_samples
        updates, samples, epoch = 0, 0, 0
        while True:
            count = loader.num_updates(epoch)
            if count == 0:
                raise ConfigError(
                    f"no update of {self.samples_per_update} samples can be made of {loader.num_samples}; "
                    "use smaller updates or dataloader_drop_last=False"
                )
            if args.max_steps > 0 and updates + count >= args.max_steps:
                return args.max_steps, epoch + 1
            if most_samples is not None and samples + loader.num_samples >= most_samples:
                return loader.updates_until(most_samples), epoch + 1
            if args.max_steps <= 0 and most_samples is None and epoch + 1 >= args.num_train_epochs:
                return updates + math.ceil((args.num_train_epochs - epoch) * count), epoch + 1
            updates, samples, epoch = updates + count, samples + loader.num_samples, epoch + 1

    # transformers has no public way to say where a run resumes (accelerate#4199 is open): these two arguments of
    # `_run_epoch` come from here alone.
    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        resumed = super()._init_training_state(*args, **kwargs)
        checkpoint = kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None)
        loader = self.update_loader
        if loader is None:
            return resumed
        callback = next(c for c in self.callback_handler.callbacks if isinstance(c, DynagroupCallback))
        callback.trainer = self
        saved = self.state.stateful_callbacks.setdefault(DynagroupCallback.__name__, {"args": {}, "attributes": {}})
        if checkpoint is None or not self.state.global_step:
            return resumed
        state = saved["attributes"].get("loader_state")
        if isinstance(loader, OnlineUpdates):
            state = read_states(checkpoint)
        if state is not None:
            loader.load_state_dict(state)
        else:
            self._continue_fixed_batches(loader)
        if self.args.ignore_data_skip:
            loader.restart_epoch()
        return loader.next_epoch, 0

    def _continue_fixed_batches(self, loader: UpdateLoader[Any] | OnlineUpdates) -> None:
        per_epoch = loader.num_updates(0)
        epoch, updates = divmod(self.state.global_step, per_epoch)
        if loader.num_updates(epoch) != per_epoch or callable(self.dynagroup.samples_per_update):
            raise StateError(
                "this checkpoint was saved by a Trainer without dynagroup: it can be continued only with a fixed "
                "samples_per_update, the one it had"
            )
        warnings.warn(
            f"the checkpoint was saved without dynagroup; continuing after {updates} updates of {self.samples_per_update} "
            f"samples in epoch {epoch}",
            stacklevel=2,
        )
        loader.skip_to(epoch, updates * self.samples_per_update, self.state.global_step)

    # One update.

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        update = next(epoch_iterator, None)
        if update is None:
            self.control.should_epoch_stop = True
            return [], None
        if not _is_update(update):
            return [update], self._get_num_items_in_batch([update], device)
        return [update], self._get_num_items_in_batch([_counted(step) for step in update], device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not _is_update(inputs):
            return super().training_step(model, inputs, num_items_in_batch)
        total: Any = 0.0
        for number, step in enumerate(inputs):
            if number:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            with self._local_gradients(model, step):
                total = total + self._run_step(model, step, len(inputs), num_items_in_batch)
        return total

    def _run_step(self, model: Any, step: Step[Any], num_steps: int, num_items_in_batch: Any) -> torch.Tensor:
        mean = self._loss_is_a_mean(step.batch, num_items_in_batch)
        if mean:
            num_items_in_batch = None
        # The Trainer divides a loss that is a mean by this number; dividing by 1 / scale weighs it exactly.
        self.current_gradient_accumulation_steps = 1.0 / step.loss_scale if mean and step.loss_scale else num_steps
        self._idle_step = step.idle or (mean and step.loss_scale == 0.0)
        try:
            return super().training_step(model, step.batch, num_items_in_batch)
        finally:
            self._idle_step = False

    def _loss_is_a_mean(self, batch: Any, num_items_in_batch: Any) -> bool:
        """The loss is a mean over its batch, not a sum divided by the whole update's items."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return not scaled
        if self.compute_loss_func is not None or num_items_in_batch is None:
            return self.compute_loss_func is None
        if self.label_smoother is not None or _defines_compute_loss(type(self)):
            return False
        if self._ignores_num_items is None:
            self._ignores_num_items = ignores_num_items(self, batch)
        return self._ignores_num_items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if not self._idle_step:
            return found
        loss = found[0] if return_outputs else found
        nothing = loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # keeps the collectives of a backward pass matched
        return (nothing, found[1]) if return_outputs else nothing

    def _local_gradients(self, model: Any, step: Step[Any]) -> Any:
        from accelerate.utils import DistributedType

        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if step.ends_update or always or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def floating_point_ops(self, inputs: Any) -> int:
        if not _is_update(inputs):
            return super().floating_point_ops(inputs)
        return sum(super(DynagroupTrainerMixin, self).floating_point_ops(s.batch) for s in inputs if not s.idle)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if _is_update(inputs):
            inputs = _flattened(inputs)
        super()._track_num_input_tokens(inputs)

    # Books: samples, not updates, say how far an epoch is.

    def _keep_books(self, state: Any) -> None:
        loader = self.update_loader
        if loader is None:
            return
        cursor = loader.cursor
        state.epoch = cursor.epoch + cursor.samples_used / max(loader.num_samples, 1)
        if loader.num_changes != self._changes_known:
            self._changes_known = loader.num_changes
            if self.args.max_steps <= 0:
                state.max_steps = self._training_length(loader)[0]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.dynagroup.learning_rate_schedule == "updates":
            return super().create_scheduler(num_training_steps, optimizer)
        from torch.optim.lr_scheduler import LambdaLR

        loader = self.update_loader
        if self.lr_scheduler is not None or loader is None:
            raise ConfigError(
                "learning_rate_schedule='samples' needs the Trainer's own scheduler; pass no `optimizers`"
            )
        samples = loader.samples_after(num_training_steps)
        scheduler = super().create_scheduler(samples, optimizer)
        if not isinstance(scheduler, LambdaLR):
            raise ConfigError(
                f"learning_rate_schedule='samples' needs a scheduler that is a function of progress, but "
                f"{type(scheduler).__name__} is not; choose another `lr_scheduler_type`"
            )
        scheduler.lr_lambdas = [_by_samples(function, loader) for function in scheduler.lr_lambdas]
        return scheduler

    def _learning_rate_factor(self) -> float:
        loader, config = self.update_loader, self.dynagroup
        if loader is None:
            return 1.0
        coupled = getattr(config.samples_per_update, "learning_rate_factor", None)
        factor = coupled(loader.cursor.update - 1) if coupled is not None else 1.0
        return factor * scale_learning_rate(
            1.0,
            samples_per_update=loader.cursor.current or self.samples_per_update,
            base_samples_per_update=config.base_samples_per_update or self._fixed_samples,
            rule=config.learning_rate_scaling,
        )

    def _scale_learning_rate(self, factor: float) -> None:
        factor *= self._learning_rate_factor()
        if factor != 1.0:
            groups = self.optimizer.param_groups
            self._rates_before = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * factor

    def _restore_learning_rate(self) -> None:
        if self._rates_before is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates_before, strict=True):
                group["lr"] = rate
            self._rates_before = None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        loader = self.update_loader
        if loader is not None and "loss" in logs and loader.recent.updates:
            now = time.perf_counter()
            logs.update(_figures(loader.recent, now - self._since_log))
            logs["train_coverage"] = loader.cursor.samples_used / max(loader.num_samples, 1)
            loader.recent, self._since_log = UpdateStats(), now
        super().log(logs, *args, **kwargs)


def _figures(stats: UpdateStats, seconds: float) -> dict[str, float]:
    return {
        "padding": round(stats.padding, 4),
        "tokens_per_s": round(stats.real_tokens / max(seconds, 1e-9), 1),
        "samples_per_update": stats.samples / stats.updates,
        "smallest_batch": stats.smallest_batch,
        "largest_batch": stats.largest_batch,
        "idle_steps": stats.idle_steps,
    }


def _by_samples(function: Callable[[int], float], loader: UpdateLoader[Any] | OnlineUpdates) -> Callable[[int], float]:
    def of_samples(update: int) -> float:
        return function(loader.cursor.samples_seen if update else 0)

    return of_samples


def _defines_compute_loss(trainer_class: type) -> bool:
    """Whether a class between ours and the Trainer's computes the loss itself."""
    owners = [c for c in trainer_class.__mro__ if "compute_loss" in vars(c) and c is not DynagroupTrainerMixin]
    return owners[0] is not Trainer


def _is_update(inputs: Any) -> bool:
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], Step)


def _counted(step: Step[Any]) -> Any:
    """The batch as its labels are counted: an idle one has none."""
    if not step.idle or not isinstance(step.batch, Mapping):
        return step.batch
    import torch

    labels = {k: torch.full_like(v, -100) for k, v in step.batch.items() if k in ("labels", "shift_labels")}
    return {**step.batch, **labels}


def _flattened(update: Sequence[Step[Any]]) -> dict[str, Any]:
    """All batches' tensors as flat ones, enough to count elements; idle batches count nothing."""
    import torch

    parts = [{k: v.flatten() for k, v in s.batch.items() if isinstance(v, torch.Tensor)} for s in update]
    used = [
        part if not step.idle else {k: v[:0] for k, v in part.items()} for part, step in zip(parts, update, strict=True)
    ]
    return {name: torch.cat([part[name] for part in used]) for name in used[0] if all(name in part for part in used)}


@cache
def dynagroup_trainer(trainer_class: type) -> type:
    """A Trainer class of yours, of transformers or of TRL, with the argument ``dynagroup``.

    >>> from transformers import Seq2SeqTrainer
    >>> dynagroup_trainer(Seq2SeqTrainer).__name__
    'DynagroupSeq2SeqTrainer'
    """
    return type(f"Dynagroup{trainer_class.__name__}", (DynagroupTrainerMixin, trainer_class), {})


class DynagroupTrainer(DynagroupTrainerMixin, Trainer):
    """``transformers.Trainer`` with the argument ``dynagroup``."""
