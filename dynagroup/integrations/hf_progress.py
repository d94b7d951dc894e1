"""Progress of a Trainer, counted by samples: how long a run is, where it stands, and what it logs."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from dynagroup.errors import ConfigError
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf_data import UpdateItems
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.loader import StepLoader
from dynagroup.update.step import LoaderStats


class Progress(Trainer if TYPE_CHECKING else object):
    """The part of :class:`~dynagroup.integrations.hf.DynagroupTrainerMixin` that counts. An epoch ends when its samples
    are used, however many updates that takes."""

    dynagroup: DynagroupConfig
    update_loader: StepLoader[Any] | None
    guard: OomSafeBackward | None
    fixed_samples: int
    just_resumed = False
    changes_known = 0
    _num_epochs = 0  # that the run begins, as far as that is known when it begins
    _logged_at = 0.0
    _stats_logged: LoaderStats
    _ooms_logged = 0

    @property
    def samples_per_update(self) -> int:
        """Samples of an update, over all ranks; of the first one, where a schedule changes it."""
        wanted = self.dynagroup.samples_per_update
        return self.fixed_samples if wanted is None else wanted(0, None) if callable(wanted) else wanted

    # Only the loader of a training that begins passes here; a callback that looks at the data has one of its own.
    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        items: Any = dataloader
        loader = items.loader if isinstance(items, UpdateItems) else None
        if loader is not None:
            self.update_loader, self.guard = loader, None  # the model may be new, too
            self._stats_logged, self.changes_known = loader.stats.copy(), loader.num_changes
            self._logged_at, self._num_epochs = time.perf_counter(), 0
        if loader is None or loader.num_samples is None or not has_length(dataloader):
            return super().set_initial_training_values(args, dataloader)
        num_samples, max_steps = loader.num_samples, self.updates_of_run(loader)
        most_updates = max(num_samples, len(dataloader), 1)  # a bound; the loader's end ends the epoch
        # Updates that grow make the epochs of so many steps more.
        num_epochs = sys.maxsize if args.max_steps > 0 else math.ceil(args.num_train_epochs)
        train_samples = loader.samples_after(max_steps)
        self._num_epochs = math.ceil(train_samples / max(num_samples, 1))
        return num_epochs, most_updates, num_samples, train_samples, self.samples_per_update, most_updates, max_steps

    def updates_of_run(self, loader: StepLoader[Any]) -> int:
        """Of the whole run, its epochs before this one included."""
        num_epochs = self.args.num_train_epochs
        if self.args.max_steps > 0:
            return self.args.max_steps
        if not (updates := loader.updates_in(num_epochs)):
            raise ConfigError(
                f"no update of {self.samples_per_update} samples can be made of {loader.num_samples}; "
                "use smaller updates or dataloader_drop_last=False"
            )
        return updates

    # Collective: with "loss" and "learning_rate" the Trainer itself calls it, on all ranks.
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        loader = self.update_loader
        if loader is not None and {"loss", "learning_rate"} <= logs.keys():
            stats = (loader.stats - self._stats_logged).merged(loader.world)
            if stats.updates:
                now = time.perf_counter()
                logs["samples_per_update"] = stats.samples_per_update
                logs["padding"] = round(stats.padding, 4)
                logs["tokens_per_s"] = round(stats.real_tokens / max(now - self._logged_at, 1e-9), 1)
                if self.guard is not None:
                    ooms = self.guard.learned.report.num_ooms
                    logs["oom_retries"], self._ooms_logged = ooms - self._ooms_logged, ooms
                self._logged_at, self._stats_logged = now, loader.stats.copy()
        super().log(logs, *args, **kwargs)


class DynagroupCallback(TrainerCallback):
    """Keeps the books of a :class:`Progress`, before all other callbacks, so that they read ``state.epoch`` as it is."""

    def __init__(self, trainer: Progress) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, loader = self.trainer, self.trainer.update_loader
        if loader is not None and loader.num_samples is not None:
            state.epoch = loader.cursor.epoch + loader.cursor.samples_used / max(loader.num_samples, 1)
        if loader is not None and loader.num_changes != trainer.changes_known:  # the run's length may have changed
            trainer.changes_known = loader.num_changes
            state.max_steps = trainer.updates_of_run(loader)

    # A free-running loader finds out only now that nothing remained of the epoch that it was resumed into, and the Trainer would
    # end the training (as ``step < 0``).
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.just_resumed:
            self.trainer.just_resumed = False
            control.should_training_stop = False
