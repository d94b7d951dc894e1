"""Callbacks of the Trainer adapter."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dynagroup.integrations.host import write_state
from dynagroup.integrations.online import OnlineUpdates, PlannedUpdates

if TYPE_CHECKING:
    from dynagroup.integrations.books import Books

__all__ = ["DynagroupCallback", "MemoryCleanupCallback"]


class DynagroupCallback(TrainerCallback, ExportableState):
    """Keeps the Trainer's books by samples, and the loader's state in its checkpoints. Added by the mixin."""

    def __init__(self) -> None:
        self.trainer: Books | None = None
        self.loader_state: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        loader = self.trainer.update_loader if self.trainer is not None else None
        saved = loader.state_dict() if isinstance(loader, PlannedUpdates) else self.loader_state
        return {"args": {}, "attributes": {"loader_state": saved}}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = self.trainer.update_loader if self.trainer is not None else None
        if isinstance(loader, OnlineUpdates):
            folder = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_state(folder, loader.world.rank, loader.state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer.keep_books(state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer.scale_learning_rate()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer.restore_learning_rate()


class MemoryCleanupCallback(TrainerCallback):
    """Returns cached device memory after evaluation, prediction and epochs, whose shapes differ from training's."""

    def _clean(self, *args: Any, **kwargs: Any) -> None:
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    on_evaluate = on_predict = on_epoch_end = _clean
