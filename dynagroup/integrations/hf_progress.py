"""Progress of a Trainer, counted by samples: how long a run is, where it stands, its learning rate and its figures."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from dynagroup.errors import ConfigError
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf_data import UpdateItems
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.loader import StepLoader
from dynagroup.update.schedule import scale_learning_rate
from dynagroup.update.step import LoaderStats

__all__ = ["DynagroupCallback", "Progress"]

FIGURES = ("samples_per_update", "smallest_batch", "largest_batch", "idle_steps")


class Progress(Trainer if TYPE_CHECKING else object):
    """The part of :class:`~dynagroup.integrations.hf.DynagroupTrainerMixin` that counts. An epoch ends when its samples
    are used, however many updates that takes."""

    dynagroup: DynagroupConfig
    update_loader: StepLoader[Any] | None
    guard: OomSafeBackward | None
    just_resumed = False
    _num_epochs = 0
    """That the run begins, as far as that is known when it begins."""
    fixed_samples: int
    changes_known = 0
    _since_log = 0.0
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
        loader = dataloader.loader if isinstance(dataloader, UpdateItems) else None
        if loader is not None:
            self.update_loader, self.guard = loader, None  # the model may be new, too
            self._stats_logged, self.changes_known = loader.stats.copy(), loader.num_changes
            self._since_log, self._num_epochs = time.perf_counter(), 0
        if loader is None or loader.num_samples is None or not has_length(dataloader):
            return super().set_initial_training_values(args, items)
        num_samples, max_steps = loader.num_samples, self.updates_of_run(loader)
        most_updates = max(num_samples, len(dataloader), 1)  # a bound; the loader's end ends the epoch
        counted = args.max_steps > 0 or self.dynagroup.max_samples  # then updates that grow make the epochs more
        num_epochs = sys.maxsize if counted else math.ceil(args.num_train_epochs)
        train_samples = loader.samples_after(max_steps)
        self._num_epochs = math.ceil(train_samples / max(num_samples, 1))
        return num_epochs, most_updates, num_samples, train_samples, self.samples_per_update, most_updates, max_steps

    def updates_of_run(self, loader: StepLoader[Any]) -> int:
        """Of the whole run, its epochs before this one included."""
        num_epochs, most_samples = self.args.num_train_epochs, self.dynagroup.max_samples
        if self.args.max_steps > 0:
            return self.args.max_steps
        if most_samples is not None:
            return loader.updates_until(most_samples)
        *before, last = [loader.num_updates_in(epoch) for epoch in range(max(math.ceil(num_epochs), 1))]
        if not all((*before, last)):
            raise ConfigError(
                f"no update of {self.samples_per_update} samples can be made of {loader.num_samples}; "
                "use smaller updates or dataloader_drop_last=False"
            )
        # As the Trainer counts: 2.1 * 10 is 21 updates, (2.1 - 2) * 10 would be two more than 20.
        return sum(before) + math.ceil(num_epochs * last) - len(before) * last

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.dynagroup.learning_rate_schedule == "updates":
            return super().create_scheduler(num_training_steps, optimizer)
        loader, needed = self.update_loader, "learning_rate_schedule='samples' needs"
        if self.lr_scheduler is not None or loader is None:
            raise ConfigError(f"{needed} the Trainer's own scheduler; pass no `optimizers`")
        scheduler = super().create_scheduler(loader.samples_after(num_training_steps), optimizer)
        if not isinstance(scheduler, LambdaLR):
            raise ConfigError(
                f"{needed} a scheduler that is a function of progress, but {type(scheduler).__name__} is not; choose another "
                "`lr_scheduler_type`"
            )
        scheduler.lr_lambdas = [partial(_by_samples, function, loader) for function in scheduler.lr_lambdas]
        return scheduler

    # Collective: with "loss" and "learning_rate" the Trainer itself calls it, on all ranks.
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        loader = self.update_loader
        if loader is not None and {"loss", "learning_rate"} <= logs.keys():
            stats = (loader.stats - self._stats_logged).merged(loader.world)
            if stats.updates:
                logs.update(self._figures(stats, loader))
                self._stats_logged = loader.stats.copy()
        super().log(logs, *args, **kwargs)

    def _figures(self, stats: LoaderStats, loader: StepLoader[Any]) -> dict[str, float]:
        """Of all ranks together: each of them has counted every update, and its samples on all ranks."""
        since, self._since_log = self._since_log, time.perf_counter()
        figures = {name: getattr(stats, name) for name in FIGURES}
        figures["padding"] = round(stats.padding, 4)
        figures["tokens_per_s"] = round(stats.real_tokens / max(self._since_log - since, 1e-9), 1)
        if self.guard is not None:
            ooms = self.guard.learned.report.num_ooms
            figures["oom_retries"], self._ooms_logged = ooms - self._ooms_logged, ooms
        if loader.num_samples is not None:
            figures["train_coverage"] = loader.cursor.samples_used / max(loader.num_samples, 1)
        return figures


def _by_samples(function: Callable[[int], float], loader: StepLoader[Any], update: int) -> float:
    return function(loader.cursor.samples_seen if update else 0)


class DynagroupCallback(TrainerCallback):
    """Keeps the books of a :class:`Progress`, before all other callbacks, so that they read ``state.epoch`` as it is."""

    def __init__(self, trainer: Progress) -> None:
        self.trainer = trainer
        self.rates: list[Any] = []
        """The learning rates before they were multiplied; none between steps."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        trainer, loader, config = self.trainer, self.trainer.update_loader, self.trainer.dynagroup
        if loader is None:
            return
        coupled = getattr(config.samples_per_update, "learning_rate_factor", None)
        factor = scale_learning_rate(
            1.0 if coupled is None else coupled(loader.cursor.update - 1),
            samples_per_update=loader.cursor.current or trainer.samples_per_update,
            base_samples_per_update=config.base_samples_per_update or trainer.fixed_samples,
            rule=config.learning_rate_scaling,
        )
        if factor != 1.0:
            self.rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        rates, self.rates = self.rates, []
        for group, rate in zip(optimizer.param_groups, rates, strict=bool(rates)):
            group["lr"] = rate

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

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One line, where the training was long enough to tell: ``Work`` for the next run's ``plan={"work": ...}``."""
        loader = self.trainer.update_loader
        if loader is not None and (work := loader.stats.work) is not None:
            self.trainer.log({"work_per_step": round(work.per_step, 1), "work_crossover": round(work.crossover, 1)})
