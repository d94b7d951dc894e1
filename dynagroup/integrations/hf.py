"""Hugging Face ``Trainer`` with batches that fit: one loader item is one optimizer update.

The Trainer then counts updates, whatever number of batches the memory needs: its length, ``max_steps``, schedulers, logs and
checkpoints stay exact, and nothing is left over at an epoch's end.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from dynagroup.budget.base import Budget
from dynagroup.budget.learner import learner_of
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError, StateError
from dynagroup.integrations.batches import counted, flattened, is_update
from dynagroup.integrations.books import Books, Updates
from dynagroup.integrations.callbacks import DynagroupCallback, MemoryCleanupCallback
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
)
from dynagroup.integrations.online import OnlineUpdates
from dynagroup.online.loader import OnlineDataLoader
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.loader import UpdateLoader
from dynagroup.update.step import Step

if TYPE_CHECKING:
    import torch

__all__ = [
    "DynagroupCallback",
    "DynagroupConfig",
    "DynagroupTrainer",
    "DynagroupTrainerMixin",
    "MemoryCleanupCallback",
    "dynagroup_trainer",
]


class DynagroupTrainerMixin(Books):
    """Put it before a Trainer class: ``class MyTrainer(DynagroupTrainerMixin, Seq2SeqTrainer): ...``.

    The Trainer takes one more argument, ``dynagroup``: a budget, or a :class:`DynagroupConfig`. Its
    ``per_device_train_batch_size * gradient_accumulation_steps * ranks`` is the number of samples of an update, as ever;
    ``trainer.args`` is a copy in which ``gradient_accumulation_steps`` is 1, because the loader's items are updates.
    """

    def __init__(self, *args: Any, dynagroup: Budget | DynagroupConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = dynagroup if isinstance(dynagroup, DynagroupConfig) else DynagroupConfig(budget=dynagroup)
        refuse_unsupported(self, config)
        if config.out_of_memory is not None and learner_of(config.budget) is None:
            config = replace(config, budget=LearningBudget(config.budget))
        self.dynagroup = config
        self.update_loader: Updates | None = None
        self.accumulation = int(self.args.gradient_accumulation_steps)
        self._fixed_samples = super().get_total_train_batch_size(self.args)
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self._idle_step = False
        self._ignores_num_items: bool | None = None
        self.guard: OomSafeBackward | None = None
        self._since_log = time.perf_counter()
        self.add_callback(DynagroupCallback())

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
            drop_last=self.args.dataloader_drop_last and not free,
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

    # transformers has no public way to say where a loader resumes (transformers#26289 is open): these two arguments of
    # `_run_epoch` come from here alone.
    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        resumed = super()._init_training_state(*args, **kwargs)
        checkpoint = kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None)
        loader = self.update_loader
        if loader is None:
            return resumed
        callback = next(c for c in self.callback_handler.callbacks if isinstance(c, DynagroupCallback))
        callback.trainer = self
        callbacks: Any = self.state.stateful_callbacks
        saved = callbacks.setdefault(DynagroupCallback.__name__, {"args": {}, "attributes": {}})
        if checkpoint is None or not self.state.global_step:
            return resumed
        state = saved["attributes"].get("loader_state")
        states = read_states(checkpoint) if isinstance(loader, OnlineUpdates) else None
        if isinstance(loader, OnlineUpdates) and states is not None:
            loader.load_state_dict(states)
        elif isinstance(loader, UpdateLoader) and state is not None:
            loader.load_state_dict(state)
        elif self.args.ignore_data_skip:
            loader.set_epoch(self.state.global_step // loader.num_updates(0))
        else:
            self._continue_fixed_batches(loader)
        if self.args.ignore_data_skip:
            loader.restart_epoch()
        return loader.next_epoch, 0

    def _continue_fixed_batches(self, loader: Updates) -> None:
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
            if self.dynagroup.out_of_memory is not None:
                total = total + self._run_protected(model, step, num_items_in_batch)
                continue
            with self._local_gradients(model, step):
                total = total + self._run_step(model, step, len(inputs), num_items_in_batch)
        return total

    def _run_protected(self, model: Any, step: Step[Any], num_items_in_batch: Any) -> torch.Tensor:
        mean = self._loss_is_a_mean(step.batch, num_items_in_batch)
        items = None if mean else num_items_in_batch
        if self.guard is None:
            self.guard = self._new_guard(model, mean)
            self._ooms_logged = self.guard.learned.report.num_ooms
        model.train()

        def loss_of(batch: Any) -> torch.Tensor:
            with self.compute_loss_context_manager():
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
        learned = learner_of(loader.budget)
        weigh = (self._weigh if mean else "sum") if config.weigh == "auto" else config.weigh
        return OomSafeBackward(
            model, mode=config.out_of_memory, weigh=weigh, splitter=config.splitter, world=loader.world,
            learned=learned if isinstance(learned, LearningBudget) else None, backward=self.accelerator.backward,
        )  # fmt: skip

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
        found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
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
        if not is_update(inputs):
            return super().floating_point_ops(inputs)
        return sum(super(DynagroupTrainerMixin, self).floating_point_ops(s.batch) for s in inputs if not s.idle)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if is_update(inputs):
            inputs = flattened(inputs)
        super()._track_num_input_tokens(inputs)


def _defines_compute_loss(trainer_class: type) -> bool:
    """Whether a class between ours and the Trainer's computes the loss itself."""
    owners = [c for c in trainer_class.__mro__ if "compute_loss" in vars(c) and c is not DynagroupTrainerMixin]
    return owners[0] is not Trainer


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
