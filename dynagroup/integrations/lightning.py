"""Steps under Lightning: a loader that it leaves alone, and a callback that tells it where updates end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.callbacks import Callback

from dynagroup.errors import ConfigError, StateError
from dynagroup.online.loader import OnlineDataLoader
from dynagroup.update.planned import PlannedDataLoader
from dynagroup.update.step import Step
from dynagroup.world import rank_and_size

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["LightningStep", "LightningSteps", "UpdateCallback", "update_loss"]

NEVER = 1 << 20
"""An accumulation that no epoch's batch count divides by: the update goes on."""


class LightningStep(NamedTuple):
    """A :class:`~dynagroup.Step` of plain parts: Lightning moves and converts no frozen dataclass."""

    batch: Any
    indices: list[int]
    num_samples: int
    """Samples here; 0 on an idle step."""
    loss_scale: float
    ends_update: bool
    idle: bool

    @classmethod
    def of(cls, step: Step[Any]) -> LightningStep:
        return cls(
            step.batch, list(step.indices), int(step.samples.local), step.loss_scale, step.ends_update, step.idle
        )


class _EpochHandle:
    def __init__(self, steps: LightningSteps) -> None:
        self._steps = steps
        self._offset = 0

    def set_epoch(self, epoch: int) -> None:
        # Lightning fetches from a run's first epoch before it names it, and may name it wrongly after resuming.
        if self._steps.begun_epoch is not None:
            self._offset = self._steps.begun_epoch - epoch
        else:
            self._steps.loader.set_epoch(epoch + self._offset)


class _Handover:
    """A checkpoint's loader state, from the callback that reads it to the next loader that begins: Lightning makes the loader
    known only after it has fetched from it, and gives it no state at all where an epoch had ended."""

    state: Mapping[str, Any] | None = None

    def take(self) -> Mapping[str, Any] | None:
        state, self.state = self.state, None
        return state


_HANDOVER = _Handover()
STATE_KEY = "dynagroup_steps"


class LightningSteps:
    """What ``train_dataloader`` returns: one item is one step. Needs :class:`UpdateCallback` beside it.

    It is no ``DataLoader``, so Lightning injects no sampler, and it has no ``len()``, so Lightning does not fix the number
    of batches before training: the epoch is as long as its samples need. It counts what training has used, not what
    Lightning has fetched ahead, so that its state, a part of every checkpoint, is exact.

    Args:
        loader: a :class:`PlannedDataLoader` or :class:`OnlineDataLoader`.
    """

    def __init__(self, loader: PlannedDataLoader[Any] | OnlineDataLoader) -> None:
        if not isinstance(loader, (PlannedDataLoader, OnlineDataLoader)):
            raise ConfigError(f"`loader` must be a PlannedDataLoader or an OnlineDataLoader, but is {loader!r}")
        self.loader = loader
        self.sampler = _EpochHandle(self)
        self._ahead: deque[dict[str, Any]] = deque()
        self._state: dict[str, Any] | None = None
        self.is_restored = False
        self.begun_epoch: int | None = None
        """An epoch that was begun, and none of its updates used yet."""

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __iter__(self) -> Iterator[LightningStep]:
        self._ahead.clear()
        saved = _HANDOVER.take()
        if saved is not None:
            self.load_state_dict(saved)
        self.begun_epoch = self.loader.epoch
        for update in self.loader.updates():
            self._ahead.append(self._current())
            yield from map(LightningStep.of, update)
        if self._ahead:  # training has yet to use the last update: after it comes the next epoch
            self._ahead[-1] = self._current()
        else:
            self._state = self._current()

    def update_is_done(self) -> None:
        """Training has used the oldest update that was fetched."""
        self._state = self._ahead.popleft()
        self.begun_epoch = None

    def _current(self) -> dict[str, Any]:
        return {"ranks": [self.loader.state_dict()]}

    def state_dict(self) -> dict[str, Any]:
        """Where training stands. Lightning asks on all ranks and saves rank 0's answer, so it holds all ranks' states."""
        state = self._state if self._state is not None else self._current()
        size = rank_and_size()[1]
        if isinstance(self.loader, PlannedDataLoader) or size == 1:
            return state
        import torch.distributed as dist

        states: list[Any] = [None] * size
        dist.all_gather_object(states, state["ranks"][0])
        return {"ranks": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.is_restored = True
        states = state_dict["ranks"]
        self.loader.load_state_dict(states[0] if isinstance(self.loader, PlannedDataLoader) else states)
        rank = rank_and_size()[0]
        self._state = {"ranks": [states[rank if rank < len(states) else 0]]}


class UpdateCallback(Callback):
    """Makes Lightning step its optimizers where updates end. Also carries this rank's place in checkpoints.

    With automatic optimization, return ``update_loss(self, step, loss)`` from ``training_step``.

    Raises:
        StateError: a run resumed within an epoch would read that epoch from its beginning.
    """

    def __init__(self) -> None:
        self._first = True
        self._num_batches = 0
        """Batches used in this epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self._num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_batches = state_dict["num_batches"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _HANDOVER.take()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if isinstance(trainer.train_dataloader, LightningSteps):
            checkpoint[STATE_KEY] = trainer.train_dataloader.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            _HANDOVER.state = checkpoint.get(STATE_KEY)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        if self._num_batches and isinstance(loader, LightningSteps) and not loader.is_restored:
            raise StateError(
                f"the checkpoint was saved after {self._num_batches} batches of an epoch, but Lightning began to read the loader "
                "before it restored its place, as `trainer.estimated_stepping_batches` can make it do (pytorch-lightning#20550): "
                "those batches would come again. Count steps by `trainer.max_steps` or `loader.num_updates * trainer.max_epochs`"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_batches = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): an update takes as many batches as its "
                "samples need; leave it 1 and set samples_per_update of the loader"
            )
        self._first = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not isinstance(batch, LightningStep):
            raise ConfigError("UpdateCallback needs LightningSteps(loader) as train_dataloader")
        if not pl_module.automatic_optimization:
            return
        # Lightning steps when (batch_idx + 1) % n == 0 and clears gradients when batch_idx % n == 0.
        if batch.ends_update:
            trainer.accumulate_grad_batches = 1 if self._first else batch_idx + 1
        else:
            trainer.accumulate_grad_batches = NEVER
        if self._first:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._first = batch.ends_update
        self._num_batches += 1
        if batch.ends_update:
            loader = trainer.train_dataloader
            if isinstance(loader, LightningSteps):
                loader.update_is_done()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = 1


def update_loss(module: LightningModule, step: LightningStep, mean_loss: torch.Tensor) -> torch.Tensor:
    """The loss to return from ``training_step`` under automatic optimization: weighed within its update.

    Lightning divides it by ``trainer.accumulate_grad_batches``; this multiplies by it beforehand.
    """
    return mean_loss * (step.loss_scale * module.trainer.accumulate_grad_batches)
