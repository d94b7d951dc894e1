"""Callbacks of the Trainer adapter."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from dynagroup.integrations.books import Books

__all__ = ["DynagroupCallback", "MemoryCleanupCallback", "StateCallback"]


class StateCallback(TrainerCallback):
    """Counts ``state.epoch`` by samples, before other callbacks read it: it stands first. Added by the mixin."""

    def __init__(self) -> None:
        self.trainer: Books | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer.keep_books(state)


class DynagroupCallback(TrainerCallback):
    """Learning rates and logged figures by samples; what other callbacks ask for is known to it. Added by the mixin."""

    def __init__(self) -> None:
        self.trainer: Books | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None and control.should_log:
            self.trainer.gather_figures()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            if control.should_log:
                self.trainer.gather_figures()
            if self.trainer.take_empty_epoch():
                control.should_training_stop = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer.log_suggested_work()

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
