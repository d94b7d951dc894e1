"""Gives Hugging Face's ``Trainer`` batches that fit. One item of the loader is one update with any number of batches,
so the loader's length, ``max_steps``, schedulers, logs and checkpoints stay exact."""

import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, TypeAlias

try:
    from accelerate.data_loader import IterableDatasetShard
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dynagroup.integrations.hf needs {error.name}: pip install 'dynagroup[hf]'"
    ) from error

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import SingleProcess, current_world
from dynagroup.errors import ConfigError, StateError
from dynagroup.integrations import hf_data
from dynagroup.integrations.config import DynagroupConfig, refuse_unsupported
from dynagroup.integrations.hf_evaluate import Evaluator
from dynagroup.integrations.hf_step import DynagroupCallback, TrainerSteps
from dynagroup.integrations.packing import check_packed_training
from dynagroup.online.datasets import is_stream
from dynagroup.online.loader import OnlineDataLoader
from dynagroup.update.loader import StepLoader
from dynagroup.update.planned import PlannedDataLoader

__all__ = [
    "DynagroupConfig",
    "DynagroupTrainer",
    "DynagroupTrainerMixin",
    "attach",
    "dynagroup_trainer",
]
OURS = ("training_step", "get_batch_samples", "prediction_step", "get_train_dataloader")
"""Methods that a class derived from dynagroup's must not replace, because they form and weigh batches."""
Settings: TypeAlias = Budget | int | Literal["auto"] | DynagroupConfig


class DynagroupTrainerMixin(Evaluator):
    """Gives a Trainer class batches that fit: ``class MyTrainer(DynagroupTrainerMixin, Seq2SeqTrainer): ...``.
    Arguments: those of :func:`dynagroup_trainer`. While it trains, its copy of the arguments has
    ``gradient_accumulation_steps=1``."""

    def __init__(
        self,
        *args: Any,
        dynagroup: Settings,
        dynagroup_eval: Budget | int | bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._take_over(dynagroup, dynagroup_eval)

    def _take_over(self, dynagroup: Settings, dynagroup_eval: Budget | int | bool) -> None:
        """Sets up a Trainer for batches that fit. If a setting is refused, the Trainer stays unchanged."""
        config = (
            dynagroup
            if isinstance(dynagroup, DynagroupConfig)
            else DynagroupConfig(budget=dynagroup)  # type: ignore[arg-type] - an int becomes a TokenBudget
        )
        evaluation = (
            dynagroup_eval if isinstance(dynagroup_eval, bool) else as_budget(dynagroup_eval)
        )
        self._refuse_overridden(config)
        refuse_unsupported(self, config)
        config = hf_data.with_budget(self, config)
        budget: Any = config.budget
        config = replace(
            config, budget=budget.with_memory(partial(hf_data.memory_of, self, "train"))
        )
        if isinstance(evaluation, Budget):
            evaluation = evaluation.with_memory(partial(hf_data.memory_of, self, "forward"))
        if config.out_of_memory is not None and config.budget.learner is None:
            config = replace(config, budget=LearningBudget(config.budget))
        self.dynagroup, self.dynagroup_eval = config, evaluation
        self.update_loader, self.guard, self._planned_rows = None, None, {}
        self.ratios = {}
        self.args = copy.copy(self.args)
        self.args.average_tokens_across_devices = True  # batches of ranks have different sizes
        self.callback_handler.callbacks.insert(0, DynagroupCallback(self))

    def _refuse_overridden(self, config: DynagroupConfig) -> None:
        for name in OURS:
            if getattr(type(self), name) is getattr(DynagroupTrainerMixin, name):
                continue
            raise ConfigError(
                f"{name} of {type(self).__name__} must not replace dynagroup's: define it in a class "
                "without dynagroup, and pass that to dynagroup_trainer"
            )
        step = super(TrainerSteps, self).training_step
        if config.out_of_memory is not None and step.__func__ is not Trainer.training_step:
            raise ConfigError(
                f"out_of_memory='retry' with a training_step of {type(self).__name__} cannot be "
                "combined with dynagroup: a batch that runs in parts would not pass through it; "
                "leave one of them out"
            )

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.samples_per_update

    def get_train_dataloader(self) -> Any:
        """Returns dynagroup's loader, for the dataset and the order of samples of the Trainer's own loader."""
        args, before, steps = self.args, self.args.gradient_accumulation_steps, self.accumulation
        args.gradient_accumulation_steps, self.accumulation = before * steps, 1
        try:
            return hf_data.UpdateItems(self._loader_of(super().get_train_dataloader()))
        finally:
            args.gradient_accumulation_steps, self.accumulation = before, steps

    # A search for hyperparameters, or the user, may change the arguments until training begins.
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.accumulation = int(self.args.gradient_accumulation_steps)
        self.args.gradient_accumulation_steps = 1  # one item of the loader is one update
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self.args.gradient_accumulation_steps, self.accumulation = self.accumulation, 1

    def _loader_of(self, host: Any) -> StepLoader[Any]:
        config, args, dataset = self.dynagroup, self.args, host.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = vars(dataset)["dataset"]  # users divide an iterable dataset themselves
        elif (
            args.world_size > 1
            and self.accelerator.dispatch_batches is False
            and is_stream(dataset)
        ):
            raise ConfigError(
                "dispatch_batches=False divides a stream once more; leave it out, and divide the stream yourself"
            )
        free, stream = config.updates == "free", is_stream(dataset)
        if stream and not (free and config.mode == "online"):
            way_out = "pass DynagroupConfig(mode='online', updates='free'), and max_steps in the TrainingArguments"
            raise ConfigError(
                f"lengths and order of an iterable dataset are not known in advance; {way_out}"
            )
        settings: dict[str, Any] = {
            "one_kind": config.one_kind,
            "shapes": config.shapes,
            "pad": self._pad,
            "weigh": self._weigh,
        }
        settings["kinds"] = (
            config.kinds if stream else hf_data.sample_kinds(self.train_dataset, config.kinds)
        )
        settings["samples_per_update"] = (
            None if free else config.samples_per_update or self.samples_per_update
        )
        settings |= {
            "accumulation": args.gradient_accumulation_steps if free else 1,
            "drop_last": args.dataloader_drop_last and not free,
        }
        settings["seed"] = args.data_seed if args.data_seed is not None else args.seed
        settings["world"] = config.world or (
            current_world() if args.world_size > 1 else SingleProcess()
        )
        settings |= {**hf_data.loader_kwargs(host), **config.plan, "work": hf_data.work_of(self)}
        if config.mode == "online":
            measured = {
                "length_of": config.length_of,
                "length_hint": config.lengths,
                "kind_of": config.kind_of,
            }
            order = None if stream else hf_data.host_order(host)
            return OnlineDataLoader(dataset, config.budget, sampler=order, **settings, **measured)
        lengths, order = config.lengths, hf_data.host_order(host)
        if free and (
            type(order).__name__ not in hf_data.SHUFFLES
            or vars(order).get("replacement")
            or len(order) < len(dataset)
        ):
            ignored = f"updates='free' draws its own order, so the Trainer's {type(order).__name__} would be ignored"
            raise ConfigError(f"{ignored}; leave `updates` out, or set mode='online'")
        if lengths is None:
            lengths = hf_data.sample_lengths(self, self.train_dataset, name="train_dataset")
        settings.setdefault("grouping", config.grouping)
        return PlannedDataLoader(
            dataset, lengths, config.budget, sampler=None if free else order, **settings
        )

    # The Trainer has no public way to tell a loader where to resume (transformers#26289 is open), so it is done here.
    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        resumed = super()._init_training_state(*args, **kwargs)
        checkpoint = kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None)
        loader = self.update_loader
        if loader is None:
            return resumed
        self.state.num_train_epochs = self._num_epochs or self.state.num_train_epochs
        if loader.budget.layout == "packed":
            check_packed_training(self)
        if checkpoint is None or not self.state.global_step:
            return resumed
        states, anew = hf_data.read_states(checkpoint), self.args.ignore_data_skip
        if states:
            loader.load_state_dict(states)
            self.state.max_steps = self.updates_of_run(
                loader
            )  # with updates="free" their number depends on the ranks
        elif anew:
            loader.set_epoch(self.state.global_step // loader.num_updates)
        else:
            way_out = "TrainingArguments(ignore_data_skip=True) resumes with its model, at the beginning of the epoch"
            unsaid = (
                "saved by a Trainer without dynagroup, so it does not say which samples were used"
            )
            raise StateError(f"{checkpoint} was {unsaid}; {way_out}")
        if anew:
            loader.restart_epoch()
        self.just_resumed = True
        return loader.epoch, 0

    # Called on every rank before the file that completes a checkpoint is written; callbacks do not get the checkpoint's folder.
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if (loader := self.update_loader) is not None:
            state = loader.state_dict() if self.state.global_step >= self._begun else self._before
            if state is None:
                raise StateError(
                    f"{output_dir} is inside an update; save later, or set enable_jit_checkpoint=True"
                )
            hf_data.write_states(output_dir, loader.world, state)


@cache
def dynagroup_trainer(trainer_class: type) -> type:
    """Makes a Trainer class with batches that fit from yours, transformers' or TRL's (SFT, DPO, ...). New arguments:

    * ``dynagroup``: limit of a batch: tokens with padding (int, or ``TokenBudget(16_384)``), any other budget, or a
      :class:`DynagroupConfig` with more settings. Required.
    * ``dynagroup_eval``: the limit for ``evaluate()`` and ``predict()``: a budget, True (default) for that of training,
      or False for the Trainer's own batches of ``per_device_eval_batch_size`` samples.

    An update has ``per_device_train_batch_size * gradient_accumulation_steps * ranks`` samples, as before; the budget
    decides into how many batches they are divided. ``trainer.update_loader`` is the running loader, with its ``stats``.

    ConfigError: not a Trainer's class; later, if the ``TrainingArguments``, or a TRL trainer, need batches of their own.

    >>> from transformers import Seq2SeqTrainer
    >>> dynagroup_trainer(Seq2SeqTrainer).__name__
    'DynagroupSeq2SeqTrainer'
    """
    if {Trainer, DynagroupTrainerMixin} & {*getattr(trainer_class, "__mro__", ())} != {Trainer}:
        raise ConfigError(
            f"{trainer_class!r} must be a Trainer without dynagroup: a subclass of transformers.Trainer"
        )
    return type(f"Dynagroup{trainer_class.__name__}", (DynagroupTrainerMixin, trainer_class), {})


def attach(trainer: Any, budget: Settings, *, dynagroup_eval: Budget | int | bool = True) -> None:
    """Gives an existing Trainer batches that fit, before it trains: ``attach(trainer, 16_384)``. Its class becomes
    ``dynagroup_trainer(type(trainer))``, with the same arguments. After a ConfigError the Trainer is unchanged."""
    original, made = type(trainer), dynagroup_trainer(type(trainer))
    if trainer.is_in_train or trainer.state.global_step:
        raise ConfigError(
            f"`trainer` has made {trainer.state.global_step} updates already; attach before training"
        )
    trainer.__class__ = made
    try:
        trainer._take_over(budget, dynagroup_eval)
    except BaseException:
        trainer.__class__ = original
        raise


class DynagroupTrainer(DynagroupTrainerMixin, Trainer):
    """``transformers.Trainer`` with the arguments of :func:`dynagroup_trainer`."""
