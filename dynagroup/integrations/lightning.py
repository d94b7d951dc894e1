"""Runs dynagroup's steps with Lightning: a loader that is also a callback, which tells Lightning where updates end."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from dynagroup.distributed import rank_and_size
from dynagroup.errors import ConfigError, StateError
from dynagroup.online.datasets import is_stream
from dynagroup.update.loader import StepLoader
from dynagroup.update.split_test import check_loader, pieces_of_batch
from dynagroup.update.step import Step

NEVER = (
    1 << 20
)  # a number of batches that no epoch has: while Lightning accumulates so many, it does not run the optimizer


class LightningStep(NamedTuple):
    """A :class:`~dynagroup.Step` as a tuple, because Lightning cannot move or convert a frozen dataclass."""

    batch: Any
    indices: list[int]
    num_samples: int  # 0 in an idle step
    loss_scale: float
    ends_update: bool
    idle: bool
    kind: Any


class LightningSteps(Callback):
    """The ``train_dataloader`` for Lightning, which yields steps. It is also a callback of the same Trainer, and makes
    Lightning run its optimizers where updates end: ``Trainer(callbacks=[steps]).fit(module, steps)``.

    The object is no ``DataLoader``, so Lightning adds no sampler; and has no ``len()``, because an epoch is as long as
    its samples need. Its state is saved in every checkpoint, and counts what training has used, not what Lightning has
    fetched. With automatic optimization, return ``update_loss(self, step, loss)`` from ``training_step``.

    Raises ConfigError if the object is not a callback of the Trainer, or the Trainer accumulates or limits batches;
    StateError if Lightning read batches before it restored a checkpoint."""

    def __init__(self, loader: StepLoader[Any]) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self.sampler, self._offset = SimpleNamespace(set_epoch=self._set_epoch), 0
        self.begun_epoch: int | None = (
            None  # number of an epoch that has begun, until its first update is used; else None
        )
        self._ahead: deque[tuple[dict[str, Any], int]] = deque()
        self._state: dict[str, Any] | None = (
            None  # this rank's state after the last update that training has used
        )
        self._due, self._cut = 0, 0
        """Epochs that follow the loader's in the epoch that Lightning counts; 1 if Lightning ended one early (max_steps)."""
        self._restored: Sequence[Mapping[str, Any]] | None = None
        self._inside, self._listens, self._first = False, False, True
        self._is_tested = False  # whether the module's loss is known to add up

    # Lightning reads from a run's first epoch before it calls set_epoch, and may pass a wrong number after a resume.
    def _set_epoch(self, epoch: int) -> None:
        if self.begun_epoch is not None:
            self._offset = self.begun_epoch - epoch
        else:
            self.loader.set_epoch(epoch + self._offset)

    def __iter__(self) -> Iterator[LightningStep]:
        if not self._listens:
            raise ConfigError(
                "LightningSteps must also be a callback; make the Trainer with callbacks=[steps]"
            )
        self._ahead.clear()
        if (
            self._inside and self.begun_epoch is not None
        ):  # a further fit of a Trainer begins its first epoch twice
            if self._restored is None:
                self.loader.set_epoch(self.begun_epoch)
            else:
                self.loader.load_state_dict(self._restored)
        if (
            self.loader.sizes is not None and not self.loader.num_updates
        ):  # Lightning would try for ever
            few = f"{self.loader.num_samples} samples are too few for one update"
            raise ConfigError(f"{few}; use smaller updates, or drop_last=False")
        self.begun_epoch, self._inside, self._cut, self._first = (
            self.loader.epoch + self._due,
            True,
            0,
            True,
        )
        self._state = self._state or (
            None if self._restored else self.loader.state_dict()
        )  # for the first update
        for due in range(self._due, -1, -1):
            for update in self.loader.updates():
                self._ahead.append((self.loader.state_dict(), due))
                for step in update:
                    weighed = step.loss_scale, step.ends_update, step.idle, step.kind
                    yield LightningStep(
                        step.batch, list(step.indices), int(step.samples.local), *weighed
                    )
            if (
                self._ahead
            ):  # training has not used the last update yet; the next epoch comes after it
                self._ahead[-1] = self.loader.state_dict(), max(due - 1, 0)
            elif self._state is not None or not due:
                self._state, self._due = self.loader.state_dict(), max(due - 1, 0)
        self._inside = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks. Lightning calls it on every rank, but saves only the result of rank 0."""
        states = self._restored  # as long as nothing was trained since
        if self._state is not None or states is None:
            states = [self._state or self.loader.state_dict()] * rank_and_size()[1]
            if len(states) > 1:
                dist.all_gather_object(states, states[0])
        return {"ranks": states, "due": self._due + self._cut}

    # Lightning restores callbacks before it makes a loader, and loaders only in mid-epoch; both get this same state.
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        states = state_dict["ranks"]
        if states == self._restored:
            return
        if self.begun_epoch is not None:
            early = "Lightning read batches before it restored the checkpoint, and would repeat them (pytorch-lightning#20550)"
            raise StateError(
                f"{early}; use `max_steps` or `loader.num_updates`, not `estimated_stepping_batches`"
            )
        self.loader.load_state_dict(states)
        self._restored, self._state, self._due = states, None, state_dict.get("due", 0)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        trainer.callbacks = [
            self,
            *(one for one in trainer.callbacks if one is not self),
        ]  # others may save its new state
        if stage == "fit":  # goes on where the Trainer's last fit ended, also inside an epoch
            left = (
                self.state_dict()
                if trainer.current_epoch and (self._cut or self.begun_epoch is not None)
                else None
            )
            self._restored, self._state, self.begun_epoch, self._listens, self._first = (
                None,
                None,
                None,
                True,
                True,
            )
            self._due = self._cut = 0
            if left is not None:
                self.load_state_dict(left)

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self._is_tested = False
        limit, schedules = trainer.limit_train_batches, trainer.lr_scheduler_configs
        if any(schedule.interval == "step" and schedule.frequency > 1 for schedule in schedules):
            raise ConfigError(
                "a scheduler's `frequency` in steps must be 1, as Lightning counts batches; let the scheduler wait"
            )
        scheduled = any(
            isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks
        )
        if trainer.accumulate_grad_batches != 1 or scheduled:
            raise ConfigError(
                "`accumulate_grad_batches` must be 1, without a scheduler; set `samples_per_update`"
            )
        if not trainer.fast_dev_run and (isinstance(limit, int) or limit != 1.0):
            raise ConfigError(
                f"`limit_train_batches` must be 1.0, as {limit} may end inside an update; use max_steps"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.automatic_optimization:
            return
        if not self._is_tested:
            self._is_tested = True
            self._check_loss(trainer, pl_module, batch)
        # Lightning runs optimizers when (batch_idx + 1) % n == 0, and clears gradients when batch_idx % n == 0.
        trainer.accumulate_grad_batches = (
            (1 if self._first else batch_idx + 1) if batch.ends_update else NEVER
        )
        for optimizer in trainer.optimizers if self._first else ():
            optimizer.zero_grad()

    def _check_loss(self, trainer: Any, module: Any, first: LightningStep) -> None:
        """Tests how the loss of ``training_step`` adds up, before the first update; nothing is logged."""
        precision = trainer.strategy.precision_plugin
        pieces = None
        if is_stream(self.loader.dataset):
            pieces = pieces_of_batch(first.batch, first.num_samples)
            if pieces is None:
                return

        def loss_of(step: Step[Any]) -> Any:
            batch = trainer.strategy.batch_to_device(step.batch)
            alone = LightningStep(batch, [], int(step.samples.local), 1.0, True, False, None)
            with precision.train_step_context():
                found = module.training_step(alone, 0)
            return found["loss"] if isinstance(found, Mapping) else found

        trainer.accumulate_grad_batches = 1
        module.log = lambda *args, **kwargs: None
        try:
            is_half = "16" in str(trainer.precision)
            check_loader(trainer.model, loss_of, self.loader, pieces=pieces, is_half=is_half)
        finally:
            del module.log

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._first = batch.ends_update
        if batch.ends_update:
            self._state, self._due = self._ahead.popleft()
            self.begun_epoch = self._restored = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After a resume at an epoch's last batch, Lightning ends that epoch, while the next one is already open.
        self._cut = int(
            self._inside and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        )
        self.begun_epoch = None if self._cut else self.begun_epoch

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = 1
        self._listens = False

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.on_fit_end(trainer, pl_module)


def update_loss(
    module: LightningModule, step: LightningStep, mean_loss: torch.Tensor
) -> torch.Tensor:
    """Returns the loss for ``training_step`` with automatic optimization, weighed within its update. It is multiplied
    by ``trainer.accumulate_grad_batches``, because Lightning divides it by that number."""
    return mean_loss * (step.loss_scale * module.trainer.accumulate_grad_batches)
