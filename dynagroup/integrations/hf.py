"""Gives Hugging Face's ``Trainer`` batches that fit. One item of the loader is one update with any number of batches,
so the loader's length, ``max_steps``, schedulers, logs and checkpoints stay exact."""

import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, TypeAlias

try:
    from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dynagroup.integrations.hf needs {error.name}: pip install 'dynagroup[hf]'"
    ) from error

import torch
from torch.utils.data import RandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import SingleProcess, current_world
from dynagroup.errors import ConfigError, StateError
from dynagroup.integrations import hf_data
from dynagroup.integrations.config import DynagroupConfig, refuse_unsupported
from dynagroup.integrations.hf_data import Dataset
from dynagroup.integrations.hf_evaluate import Evaluator, Loader
from dynagroup.integrations.hf_step import Batch, DynagroupCallback, TrainerSteps
from dynagroup.integrations.layout import packed_instead
from dynagroup.integrations.packing import check_packed_training
from dynagroup.integrations.trl import FigureMeans
from dynagroup.lengths import as_streams
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
SHUFFLES = (RandomSampler, SeedableRandomSampler, LengthGroupedSampler)
"""Samplers that draw each sample once in an order of their own, for which another random order is as good."""
Order: TypeAlias = Any  # the Trainer's sampler of indices; None: of a stream
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
        config: Any = dynagroup
        if not isinstance(dynagroup, DynagroupConfig):
            config = DynagroupConfig(budget=dynagroup)
        evaluation: Any = dynagroup_eval
        if not isinstance(dynagroup_eval, bool):
            evaluation = as_budget(dynagroup_eval)
        self._refuse_overridden(config)
        refuse_unsupported(self, config)
        config = hf_data.with_budget(self, config)
        budget: Budget = config.budget.with_memory(partial(hf_data.memory_of, self, "train"))
        if isinstance(evaluation, Budget):
            evaluation = evaluation.with_memory(partial(hf_data.memory_of, self, "forward"))
        if config.out_of_memory is not None and budget.learner is None:
            budget = LearningBudget(budget)
        self.dynagroup = replace(config, budget=budget)
        self.dynagroup_eval = evaluation
        self.update_loader = None
        self.guard = None
        self._planned_rows = {}
        self.figure_means = FigureMeans()
        self.args = copy.copy(self.args)
        self.args.average_tokens_across_devices = True  # batches of ranks have different sizes
        self.callback_handler.callbacks.insert(0, DynagroupCallback(self))

    def _refuse_overridden(self, config: DynagroupConfig) -> None:
        for name in OURS:
            if getattr(type(self), name) is not getattr(DynagroupTrainerMixin, name):
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

    def get_total_train_batch_size(self, args: object) -> int:
        return self.samples_per_update

    def get_train_dataloader(self) -> Any:
        """Returns dynagroup's loader, for the dataset and the order of samples of the Trainer's own loader."""
        args = self.args
        before = args.gradient_accumulation_steps
        accumulation = self.accumulation
        args.gradient_accumulation_steps = before * accumulation
        self.accumulation = 1
        try:
            return hf_data.UpdateItems(self._loader_of(super().get_train_dataloader()))
        finally:
            args.gradient_accumulation_steps = before
            self.accumulation = accumulation

    # A search for hyperparameters, or the user, may change the arguments until training begins.
    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        self.accumulation = int(self.args.gradient_accumulation_steps)
        self.args.gradient_accumulation_steps = 1  # one item of the loader is one update
        try:
            return super()._inner_training_loop(
                batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
            )
        finally:
            self.args.gradient_accumulation_steps = self.accumulation
            self.accumulation = 1

    def _loader_of(self, host: Loader) -> StepLoader[Batch]:
        config = self.dynagroup
        dataset: Dataset = host.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = vars(dataset)["dataset"]  # users divide an iterable dataset themselves
        elif (
            self.args.world_size > 1
            and self.accelerator.dispatch_batches is False
            and is_stream(dataset)
        ):
            raise ConfigError(
                "dispatch_batches=False divides a stream once more, and samples would be lost; "
                "leave it out, and divide the stream yourself"
            )
        if not is_stream(dataset):
            order = config.mixture
            if order is None:
                order = hf_data.host_order(host)
            if config.mode == "online":
                return self._online_loader(host, dataset, order)
            return self._planned_loader(host, dataset, order)
        if config.mode == "offline" or config.updates == "preserved":
            raise ConfigError(
                "lengths and order of an iterable dataset are not known in advance; pass "
                "DynagroupConfig(mode='online', updates='free'), and max_steps in the TrainingArguments"
            )
        return self._online_loader(host, dataset, None)

    def _loader_settings(self, host: Loader, kinds: hf_data.Labels) -> dict[str, Any]:
        """Returns the arguments that both loaders take."""
        config = self.dynagroup
        args = self.args
        is_free = config.updates == "free"
        world = config.world
        if world is None:
            world = current_world() if args.world_size > 1 else SingleProcess()
        num_samples: Any = None
        if not is_free:
            num_samples = config.samples_per_update or self.samples_per_update
        settings: dict[str, Any] = dict(
            collate_fn=host.collate_fn,
            num_workers=host.num_workers,
            persistent_workers=host.persistent_workers,
            prefetch_factor=host.prefetch_factor,
            multiprocessing_context=host.multiprocessing_context,
            worker_init_fn=host.worker_init_fn,
            timeout=host.timeout,
            pin_memory=host.pin_memory and torch.cuda.is_available(),
        )
        settings.update(
            kinds=kinds,
            one_kind=config.one_kind,
            shapes=config.shapes,
            pad=self._pad,
            weigh=self._weigh,
            identity=config.identity,
            world=world,
            seed=args.seed if args.data_seed is None else args.data_seed,
            accumulation=args.gradient_accumulation_steps if is_free else 1,
            samples_per_update=num_samples,
            drop_last=args.dataloader_drop_last and not is_free,
            grouping=config.grouping,
        )
        settings.update(config.plan)
        settings["work"] = hf_data.work_of(self)
        return settings

    def _online_loader(self, host: Loader, dataset: Dataset, order: Order) -> StepLoader[Batch]:
        config = self.dynagroup
        kinds = config.kinds
        if order is not None:
            kinds = hf_data.sample_kinds(self.train_dataset, kinds)
        return OnlineDataLoader(
            dataset,
            config.budget,
            sampler=order,
            length_of=config.length_of,
            length_hint=config.lengths,
            kind_of=config.kind_of,
            **self._loader_settings(host, kinds),
        )

    def _planned_loader(self, host: Loader, dataset: Dataset, order: Order) -> StepLoader[Batch]:
        config = self.dynagroup
        is_free = config.updates == "free"
        if is_free:
            _check_shuffles(order, len(dataset))
        lengths = config.lengths
        if lengths is None:
            lengths = hf_data.sample_lengths(self, self.train_dataset, name="train_dataset")
        kinds = hf_data.sample_kinds(self.train_dataset, config.kinds)
        settings = self._loader_settings(host, kinds)
        budget: Any = config.budget
        own: Any = host.collate_fn
        collate = packed_instead(self, dataset, as_streams(lengths), own)
        self.packs_unasked = collate is not None
        if collate is not None:
            budget = replace(budget, layout="packed")
            settings["collate_fn"] = collate
        sampler = None if is_free else order
        return PlannedDataLoader(dataset, lengths, budget, sampler=sampler, **settings)

    # The Trainer has no public way to tell a loader where to resume (transformers#26289 is open), so it is done here.
    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        resumed = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        loader = self.update_loader
        if loader is None:
            return resumed
        if self._num_epochs is not None:
            self.state.num_train_epochs = self._num_epochs
        if self.dynagroup.budget.layout == "packed":
            check_packed_training(self)
        checkpoint = resume_from_checkpoint
        if checkpoint is None or not self.state.global_step:
            return resumed
        begins_anew = self.args.ignore_data_skip
        states = hf_data.read_states(checkpoint)
        if states:
            loader.load_state_dict(states)
            # with updates="free" their number depends on the ranks
            self.state.max_steps = self.updates_of_run(loader)
        elif begins_anew:
            loader.set_epoch(self.state.global_step // loader.num_updates)
        else:
            raise StateError(
                f"{checkpoint} was saved by a Trainer without dynagroup, so it does not say which samples were "
                "used; TrainingArguments(ignore_data_skip=True) resumes with its model, at the beginning of the epoch"
            )
        if begins_anew:
            loader.restart_epoch()
        self.just_resumed = True
        return loader.epoch, 0

    # Called on every rank before the file that completes a checkpoint is written; callbacks do not get the checkpoint's folder.
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        loader = self.update_loader
        if loader is None:
            return
        is_inside_an_update = self.state.global_step < self._begun
        state = self._before if is_inside_an_update else loader.state_dict()
        if state is None:
            raise StateError(
                f"{output_dir} is inside an update; save later, or set enable_jit_checkpoint=True"
            )
        hf_data.write_states(output_dir, loader.world, state)


def _check_shuffles(order: Order, num_samples: int) -> None:
    """Raises ConfigError if the Trainer's sampler draws other samples than each one once, in a random order."""
    is_random_order = type(order) in SHUFFLES and not vars(order).get("replacement")
    if not is_random_order or len(order) < num_samples:
        raise ConfigError(
            f"updates='free' draws its own order, so the Trainer's {type(order).__name__} would be ignored; "
            "leave `updates` out, or set mode='online'"
        )


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
    is_trainer = isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)
    if not is_trainer or issubclass(trainer_class, DynagroupTrainerMixin):
        raise ConfigError(
            f"{trainer_class!r} must be a Trainer without dynagroup: a subclass of transformers.Trainer"
        )
    return type(f"Dynagroup{trainer_class.__name__}", (DynagroupTrainerMixin, trainer_class), {})


def attach(trainer: Any, budget: Settings, *, dynagroup_eval: Budget | int | bool = True) -> None:
    """Gives an existing Trainer batches that fit, before it trains: ``attach(trainer, 16_384)``. Its class becomes
    ``dynagroup_trainer(type(trainer))``, with the same arguments. After a ConfigError the Trainer is unchanged."""
    before = type(trainer)
    with_dynagroup = dynagroup_trainer(before)
    if trainer.is_in_train or trainer.state.global_step:
        raise ConfigError(
            f"`trainer` has made {trainer.state.global_step} updates already; attach before training"
        )
    trainer.__class__ = with_dynagroup
    try:
        trainer._take_over(budget, dynagroup_eval)
    except BaseException:
        trainer.__class__ = before
        raise


class DynagroupTrainer(DynagroupTrainerMixin, Trainer):
    """``transformers.Trainer`` with the arguments of :func:`dynagroup_trainer`."""
