"""Runs dynagroup's steps with Lightning: a loader that is also a callback, which tells Lightning where updates end."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from dynagroup.attention import AttentionBackends, attention_kernels, check_attention_backends
from dynagroup.distributed import rank_and_size
from dynagroup.errors import ConfigError, StateError
from dynagroup.online.datasets import is_stream
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_check import check_loader, pieces_of_batch
from dynagroup.update.step import Step

NEVER = 1 << 20
"""A number of batches that no epoch has: while Lightning accumulates so many, it does not run the optimizer."""


Batch: TypeAlias = Any  # what the user's collate function makes
State: TypeAlias = Mapping[str, Any]


class LightningStep(NamedTuple):
    """A :class:`~dynagroup.Step` as a tuple, because Lightning cannot move or convert a frozen dataclass."""

    batch: Batch
    indices: list[int]
    num_samples: int  # 0 in an idle step
    loss_scale: float
    ends_update: bool
    idle: bool
    kind: Any

    @classmethod
    def of(cls, step: Step[Batch]) -> "LightningStep":
        return cls(
            batch=step.batch,
            indices=list(step.indices),
            num_samples=int(step.samples.local),
            loss_scale=step.loss_scale,
            ends_update=step.ends_update,
            idle=step.idle,
            kind=step.kind,
        )


class Used(NamedTuple):
    """The place after an update."""

    state: State  # this rank's
    num_due: int  # epochs that follow the loader's in the epoch that Lightning counts


class LightningSteps(Callback):
    """The ``train_dataloader`` for Lightning, which yields steps. It is also a callback of the same Trainer, and makes
    Lightning run its optimizers where updates end: ``Trainer(callbacks=[steps]).fit(module, steps)``.

    The object is no ``DataLoader``, so Lightning adds no sampler; and has no ``len()``, because an epoch is as long as
    its samples need. Its state is saved in every checkpoint, and counts what training has used, not what Lightning has
    fetched. Every ``log_every_n_steps`` updates, the Trainer's loggers get the padding and other figures of all ranks
    (:meth:`LoaderStats.figures`). With automatic optimization, return ``update_loss(self, step, loss)`` from
    ``training_step``.

    ``attention_backends``: which kernels attention may use in a training step, as in :class:`DynagroupConfig`.

    Raises ConfigError if the object is not a callback of the Trainer, or the Trainer accumulates or limits batches;
    StateError if Lightning read batches before it restored a checkpoint."""

    def __init__(
        self, loader: StepLoader[Batch], *, attention_backends: AttentionBackends = "auto"
    ) -> None:
        self.loader = loader
        self._attention_backends: AttentionBackends = check_attention_backends(attention_backends)
        self._kernels = ExitStack()  # of the running batch
        self.dataset = loader.dataset
        self.sampler = SimpleNamespace(set_epoch=self._set_epoch)
        self.begun_epoch: int | None = None  # that has begun, until its first update is used
        self._epochs_apart = 0  # from Lightning's number of an epoch to the loader's
        self._ahead: deque[Used] = deque()  # of updates that Lightning fetched, but has not used
        self._state: State | None = None  # this rank's, after the last update that training used
        self._num_due = 0  # 1 if Lightning ended an epoch early (max_steps), as in `Used`
        self._is_cut = False  # whether Lightning has ended the epoch before its last batch
        self._restored: Sequence[State] | None = None  # of all ranks, until the first update
        self._is_inside = False  # an epoch
        self._listens = False  # as a callback
        self._begins_update = True
        self._is_tested = False  # whether the module's loss is known to add up
        self._stats_logged = loader.stats.copy()
        self._logged_at = 0.0

    # Lightning reads from a run's first epoch before it calls set_epoch, and may pass a wrong number after a resume.
    def _set_epoch(self, epoch: int) -> None:
        if self.begun_epoch is None:
            self.loader.set_epoch(epoch + self._epochs_apart)
        else:
            self._epochs_apart = self.begun_epoch - epoch

    def __iter__(self) -> Iterator[LightningStep]:
        if not self._listens:
            raise ConfigError(
                "LightningSteps must also be a callback; make the Trainer with callbacks=[steps]"
            )
        # Lightning would try for ever
        if self.loader.sizes is not None and not self.loader.num_updates:
            raise ConfigError(
                f"{self.loader.num_samples} samples are too few for one update; use smaller updates, or drop_last=False"
            )
        self._begin_epoch()
        for num_due in range(self._num_due, -1, -1):
            for update in self.loader.updates():
                self._ahead.append(Used(self.loader.state_dict(), num_due))
                for step in update:
                    yield LightningStep.of(step)
            self._end_epoch(num_due)
        self._is_inside = False

    def _begin_epoch(self) -> None:
        self._ahead.clear()
        # a further fit of a Trainer begins its first epoch twice
        if self._is_inside and self.begun_epoch is not None:
            if self._restored is None:
                self.loader.set_epoch(self.begun_epoch)
            else:
                self.loader.load_state_dict(self._restored)
        self.begun_epoch = self.loader.epoch + self._num_due
        self._is_inside = True
        self._is_cut = False
        self._begins_update = True
        if not self._state and not self._restored:
            self._state = self.loader.state_dict()  # for a checkpoint before the first update

    def _end_epoch(self, num_due: int) -> None:
        """Notes that the next epoch comes after the last update, which training may not have used yet."""
        after = Used(self.loader.state_dict(), max(num_due - 1, 0))
        if self._ahead:
            self._ahead[-1] = after
        elif self._state is not None or not num_due:
            self._state = after.state
            self._num_due = after.num_due

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks. Lightning calls it on every rank, but saves only the result of rank 0."""
        states = self._restored  # as long as nothing was trained since
        if self._state is not None or states is None:
            own = self._state or self.loader.state_dict()
            _, num_ranks = rank_and_size()
            states = [own] * num_ranks
            if num_ranks > 1:
                dist.all_gather_object(states, own)
        return {"ranks": states, "due": self._num_due + int(self._is_cut)}

    # Lightning restores callbacks before it makes a loader, and loaders only in mid-epoch; both get this same state.
    def load_state_dict(self, state_dict: State) -> None:
        states = state_dict["ranks"]
        if states == self._restored:
            return
        if self.begun_epoch is not None:
            raise StateError(
                "Lightning read batches before it restored the checkpoint, and would repeat them "
                "(pytorch-lightning#20550); use `max_steps` or `loader.num_updates`, not `estimated_stepping_batches`"
            )
        self.loader.load_state_dict(states)
        self._restored = states
        self._state = None
        self._num_due = state_dict.get("due", 0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: Any = trainer
        others = [callback for callback in callbacks.callbacks if callback is not self]
        callbacks.callbacks = [self, *others]  # others may save its new state
        if stage != "fit":
            return
        # goes on where the Trainer's last fit ended, also inside an epoch
        is_inside = self._is_cut or self.begun_epoch is not None
        left = self.state_dict() if trainer.current_epoch and is_inside else None
        self._restored = None
        self._state = None
        self.begun_epoch = None
        self._listens = True
        self._begins_update = True
        self._num_due = 0
        self._is_cut = False
        if left is not None:
            self.load_state_dict(left)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_tested = False
        self._stats_logged = self.loader.stats.copy()
        self._logged_at = time.perf_counter()
        for schedule in trainer.lr_scheduler_configs:
            if schedule.interval == "step" and schedule.frequency > 1:
                raise ConfigError(
                    "a scheduler's `frequency` in steps must be 1, as Lightning counts batches; let the scheduler wait"
                )
        callbacks: Any = trainer
        is_scheduled = any(
            isinstance(callback, GradientAccumulationScheduler) for callback in callbacks.callbacks
        )
        if trainer.accumulate_grad_batches != 1 or is_scheduled:
            raise ConfigError(
                "`accumulate_grad_batches` must be 1, without a scheduler; set `samples_per_update`"
            )
        limit: Any = trainer.limit_train_batches
        if not callbacks.fast_dev_run and (isinstance(limit, int) or limit != 1.0):
            raise ConfigError(
                f"`limit_train_batches` must be 1.0, as {limit} may end inside an update; use max_steps"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: LightningStep, batch_idx: int
    ) -> None:
        has_few_shapes = self.loader.budget.ladder is not None
        self._kernels.enter_context(
            attention_kernels(self._attention_backends, varies=not has_few_shapes)
        )
        if not pl_module.automatic_optimization:
            return
        if not self._is_tested:
            self._is_tested = True
            self._check_loss(trainer, pl_module, batch)
        # Lightning runs optimizers when (batch_idx + 1) % n == 0, and clears gradients when batch_idx % n == 0.
        if not batch.ends_update:
            trainer.accumulate_grad_batches = NEVER
        else:
            trainer.accumulate_grad_batches = 1 if self._begins_update else batch_idx + 1
        if self._begins_update:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def _check_loss(self, trainer: Trainer, module: Any, first: LightningStep) -> None:
        """Tests how the loss of ``training_step`` adds up, before the first update; nothing is logged."""
        strategy = trainer.strategy
        model: Any = trainer.model
        pieces = None
        if is_stream(self.loader.dataset):
            pieces = pieces_of_batch(first.batch, first.num_samples)
            if pieces is None:
                return

        def loss_of(step: Step[Batch]) -> Any:
            on_device = step.map(strategy.batch_to_device)
            alone = LightningStep.of(on_device)._replace(indices=[])
            with strategy.precision_plugin.train_step_context():
                output = module.training_step(alone, 0)
            return output["loss"] if isinstance(output, Mapping) else output

        def log_nothing(*args: object, **kwargs: object) -> None: ...

        trainer.accumulate_grad_batches = 1
        module.log = log_nothing
        try:
            is_half = "16" in str(trainer.precision)
            rule = check_loader(model, loss_of, self.loader, pieces=pieces, is_half=is_half)
        finally:
            del module.log
        if rule == "sum":
            raise ConfigError(
                "the loss of `training_step` is a sum over samples or tokens, but `update_loss` weighs means; "
                "divide the loss by the number of samples or label tokens of its batch"
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: LightningStep,
        batch_idx: int,
    ) -> None:
        self._kernels.close()
        self._begins_update = batch.ends_update
        if batch.ends_update:
            used = self._ahead.popleft()
            self._state = used.state
            self._num_due = used.num_due
            self.begun_epoch = None
            self._restored = None
            settings: Any = trainer
            if trainer.loggers and trainer.global_step % settings.log_every_n_steps == 0:
                self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        """Gives the figures of all ranks since the last log to the Trainer's loggers."""
        loader = self.loader
        stats = (loader.stats - self._stats_logged).merged(loader.world)
        now = time.perf_counter()
        for logger in trainer.loggers:
            logger.log_metrics(stats.figures(now - self._logged_at), step=trainer.global_step)
        self._stats_logged = loader.stats.copy()
        self._logged_at = now

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After a resume at an epoch's last batch, Lightning ends that epoch, while the next one is already open.
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._is_cut = self._is_inside and not is_last
        if self._is_cut:
            self.begun_epoch = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._kernels.close()
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
