"""The Trainer's books, kept by samples: how long a run is, where it is, its learning rate and its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import has_length

from dynagroup.errors import ConfigError
from dynagroup.integrations.batches import UpdateItems
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.oom.train import OomSafeBackward
from dynagroup.update.loader import StepLoader
from dynagroup.update.schedule import scale_learning_rate
from dynagroup.update.stats import LoaderStats

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["Books"]


class Books(_Base):
    """The half of :class:`~dynagroup.integrations.hf.DynagroupTrainerMixin` that counts. An epoch ends when its samples
    are used, however many updates that takes."""

    dynagroup: DynagroupConfig
    update_loader: StepLoader[Any] | None
    guard: OomSafeBackward | None
    _fixed_samples: int
    _rates_before: list[Any] | None = None
    _changes_known = 0
    _since_log = 0.0
    _stats_logged: LoaderStats
    _stats_to_log: LoaderStats | None = None
    _ooms_logged = 0
    _just_resumed = False

    @property
    def samples_per_update(self) -> int:
        """Samples of an update, over all ranks; of the first one, where a schedule changes it."""
        wanted = self.dynagroup.samples_per_update
        return self._fixed_samples if wanted is None else wanted(0, None) if callable(wanted) else wanted

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        loader = _loader_in(dataloader)
        if loader is not None:
            self._begin_training(loader)
        if loader is None or loader.num_samples is None or not _is_sized(dataloader):
            return super().set_initial_training_values(args, dataloader)
        num_samples = loader.num_samples
        max_steps, num_epochs = self._training_length(loader)
        most_updates = max(num_samples, len(dataloader), 1)  # a bound; the loader's end ends the epoch
        if args.max_steps > 0 or self.dynagroup.max_samples:
            train_samples: float = max_steps * self.samples_per_update
        else:
            train_samples = num_samples * args.num_train_epochs
        return num_epochs, most_updates, num_samples, train_samples, self.samples_per_update, most_updates, max_steps

    def _begin_training(self, loader: StepLoader[Any]) -> None:
        """With this loader, whoever asked for others (a callback that looks at the data), and with a model that may be new."""
        self.update_loader, self.guard = loader, None
        self._stats_logged, self._changes_known = loader.stats.copy(), loader.num_changes

    def _training_length(self, loader: StepLoader[Any]) -> tuple[int, int]:
        """(updates, epochs begun) of the whole run."""
        args, most_samples = self.args, self.dynagroup.max_samples
        updates, samples, epoch = 0, 0, 0
        num_samples = loader.num_samples or 0
        while True:
            count = loader.num_updates_in(epoch)
            if count == 0:
                raise ConfigError(
                    f"no update of {self.samples_per_update} samples can be made of {num_samples}; "
                    "use smaller updates or dataloader_drop_last=False"
                )
            if args.max_steps > 0 and updates + count >= args.max_steps:
                return args.max_steps, epoch + 1
            if most_samples is not None and samples + num_samples >= most_samples:
                return loader.updates_until(most_samples), epoch + 1
            if args.max_steps <= 0 and most_samples is None and epoch + 1 >= args.num_train_epochs:
                # As the Trainer counts epochs of equal length: 2.1 * 10 is 21 updates, (2.1 - 2) * 10 would be two more than 20.
                return updates + math.ceil(args.num_train_epochs * count) - epoch * count, epoch + 1
            updates, samples, epoch = updates + count, samples + num_samples, epoch + 1

    def keep_books(self, state: Any) -> None:
        loader = self.update_loader
        if loader is None:
            return
        if loader.num_samples is not None:
            state.epoch = loader.cursor.epoch + loader.cursor.samples_used / max(loader.num_samples, 1)
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

    def scale_learning_rate(self) -> None:
        factor = self._learning_rate_factor()
        if factor != 1.0:
            groups = self._param_groups()
            self._rates_before = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * factor

    def _param_groups(self) -> list[dict[str, Any]]:
        optimizer: Any = self.optimizer
        return optimizer.param_groups

    def restore_learning_rate(self) -> None:
        if self._rates_before is not None:
            for group, rate in zip(self._param_groups(), self._rates_before, strict=True):
                group["lr"] = rate
            self._rates_before = None

    def take_empty_epoch(self) -> bool:
        """Whether the epoch that has ended is the one resumed into, and nothing remained of it. A free-running loader finds that
        out only now, and the Trainer would end the training (as ``step < 0``)."""
        empty, self._just_resumed = self._just_resumed, False
        return empty

    def gather_figures(self) -> None:
        """Add up what all ranks did since the last log. Collective: called where the Trainer is about to log, on all ranks."""
        loader = self.update_loader
        if loader is not None:
            self._stats_to_log = (loader.stats - self._stats_logged).merged(loader.world)
            self._stats_logged = loader.stats.copy()

    def log_suggested_work(self) -> None:
        """One line at a training's end, where it was long enough to tell: ``Work`` for the next run's ``plan={"work": ...}``."""
        work = self.update_loader.stats.work if self.update_loader is not None else None
        if work is not None:
            self.log({"work_per_step": round(work.per_step, 1), "work_crossover": round(work.crossover, 1)})

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        loader, stats = self.update_loader, self._stats_to_log
        if loader is not None and "loss" in logs and stats is not None and stats.updates:
            now = time.perf_counter()
            logs.update(_figures(stats, now - self._since_log))
            if self.guard is not None:
                ooms = self.guard.learned.report.num_ooms
                logs["oom_retries"], self._ooms_logged = ooms - self._ooms_logged, ooms
            if loader.num_samples is not None:
                logs["train_coverage"] = loader.cursor.samples_used / max(loader.num_samples, 1)
            self._stats_to_log, self._since_log = None, now
        super().log(logs, *args, **kwargs)


def _loader_in(items: Any) -> StepLoader[Any] | None:
    return items.loader if isinstance(items, UpdateItems) else None


def _is_sized(loader: Any) -> bool:
    return has_length(loader)


def _figures(stats: LoaderStats, seconds: float) -> dict[str, float]:
    """Of all ranks together: each of them has counted every update, and its samples on all ranks."""
    return {
        "padding": round(stats.padding, 4),
        "tokens_per_s": round(stats.real_tokens / max(seconds, 1e-9), 1),
        "samples_per_update": stats.samples_per_update,
        "smallest_batch": stats.smallest_batch,
        "largest_batch": stats.largest_batch,
        "idle_steps": stats.idle_steps,
    }


def _by_samples(function: Callable[[int], float], loader: StepLoader[Any]) -> Callable[[int], float]:
    def of_samples(update: int) -> float:
        return function(loader.cursor.samples_seen if update else 0)

    return of_samples
