"""Settings of a Trainer with batches that fit, and the Trainer's own settings that cannot be combined with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.split import Splitter
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.validation import check_choice, check_flag

COUPLED = {
    "KTOTrainer": "its loss compares the samples of a batch with each other; keep TRL's own batches",
    "GRPOTrainer": "it generates its samples by group; divide them with shard_micro_batches",
    "RLOOTrainer": "it generates its samples by group; divide them with shard_micro_batches",
    "DistillationTrainer": "it makes its batches from what the teacher says; keep TRL's own",
}
"""Trainers of TRL whose losses need the batches that TRL makes."""


@dataclass(frozen=True, kw_only=True)
class DynagroupConfig:
    """How a Trainer forms its batches.

    Args:
        budget: limit of a batch: tokens, padding counted (an int, or ``TokenBudget(16_384)``), or any other budget.
        mode: "offline": lengths are known beforehand. "online": samples are measured after processing, in the workers;
            ``lengths`` may then be approximate, and data may be random or streamed.
        updates: "preserved": every update holds the samples that fixed batches would give it, by the host's sampler.
            "free": an update is gradient_accumulation_steps batches on every rank, each as large as fits.
        samples_per_update: samples of an update over all ranks: an int, or a schedule ``(update, current) -> int``.
            None: per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks. Not with "free".
        grouping: the samples of this many updates are sorted by length and dealt into as many updates of the same size,
            so that even small updates have little padding. Only with mode="offline" and updates="preserved".
        kinds: the name of the column with labels, also for evaluation; or a label for each training sample.
        kind_of: with mode="online", instead of ``kinds``: processed sample -> label.
        one_kind: with either, all batches of a "step", on all ranks, are of one kind; or each "batch" is.
        shapes: most shapes (samples, tokens) that a compiled model sees in training: batches are filled to them with
            padding and with rows of weight 0. Evaluation has other shapes. Needs ``lengths``, measured or given.
        lengths: tokens of each training sample (int, shape (num_samples,)), or a dict of streams such as
            ``{"tokens": ..., "target": ...}``. None: the length column, else counted from the model's first input;
            encoder-decoders' labels are counted as ``target``.
        length_of: with mode="online": processed sample -> tokens, or -> {stream: units}. None: that of ``input_ids``.
        weigh: what the loss is a mean of, if it is a mean: "auto" (labels that are predicted, if labels have a token
            dimension, else samples), "samples", or a function from a batch to a number.
        out_of_memory: "retry": a batch that runs out of memory is run in parts, with the same gradient; None: an error.
        preflight: before the first update run the largest batches, as :func:`~dynagroup.preflight` does: at most four, or
            one of each of ``shapes``. Running out of memory then shows in the first seconds, on all ranks.
        splitter: how such a batch is cut; it knows the batch dimension of inputs that are not text.
        plan: further settings of the loader, e.g. ``{"oversize": "error"}`` (refuse samples that do not fit even
            alone); ``{"work": Work(...)}``: predicted time of a batch, otherwise ``Work.of`` the Trainer's model on its
            device.
        world: the data-parallel ranks, if these are not all ranks; needed with tensor, context or sequence parallelism.

    Raises:
        ConfigError: a value is invalid, or two exclude each other.

    >>> from dynagroup import TokenBudget
    >>> DynagroupConfig(budget=TokenBudget(4096)).updates
    'preserved'
    """

    budget: Budget
    mode: Literal["offline", "online"] = "offline"
    updates: Literal["preserved", "free"] = "preserved"
    samples_per_update: int | BatchSizeSchedule | None = None
    grouping: int | None = None
    kinds: Any = None
    kind_of: Callable[[Any], Any] | None = None
    one_kind: Literal["step", "batch"] = "step"
    shapes: int | None = None
    lengths: Any = None
    length_of: Callable[[Any], Any] | None = None
    weigh: Literal["auto", "samples"] | Callable[[Any], float] = "auto"
    out_of_memory: Literal["retry"] | None = None
    preflight: bool = False
    splitter: Splitter[Any] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    world: World | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", as_budget(self.budget))
        check_choice("mode", self.mode, ("offline", "online"))
        check_choice("updates", self.updates, ("preserved", "free"))
        check_choice("out_of_memory", self.out_of_memory, ("retry", None))
        check_flag("preflight", self.preflight)
        if self.updates == "free" and self.samples_per_update is not None:
            raise ConfigError("`samples_per_update` needs updates='preserved': the size of free updates is not fixed")
        if self.kind_of is not None and self.mode == "offline":
            raise ConfigError("`kind_of` needs mode='online': with mode='offline' pass the labels as `kinds`")
        if self.grouping is not None and (self.mode, self.updates) != ("offline", "preserved"):
            known = "lengths and updates known beforehand"
            raise ConfigError(f"`grouping` needs mode='offline' and updates='preserved': {known}")


def trl_classes(trainer: Any) -> set[str]:
    """Names of the TRL classes that a Trainer is an instance of; TRL is not imported."""
    return {c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")}


def refuse_unsupported(trainer: Any, config: DynagroupConfig) -> None:
    """Raise ConfigError for settings that would lose samples or weigh them wrongly; it says what to do instead."""
    args, accelerator, ours = trainer.args, trainer.accelerator, trl_classes(trainer)
    shards, plugin = accelerator.dataloader_config, getattr(accelerator.state, "deepspeed_plugin", None)
    sharing = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    sorting = {"aot", "aot_unpaired"} & set(getattr(trainer, "loss_types", ())) if "DPOTrainer" in ours else ()
    own = "every rank loads its own batches; set it to False"
    wrong = {f"TRL's {name}": (name in ours, instead) for name, instead in COUPLED.items()}
    wrong |= {
        f"DPO with loss_type={min(sorting, default='')!r}": (
            sorting,
            "it sorts the pairs of a batch against each other; choose a loss of single pairs, e.g. 'sigmoid'"),
        "auto_find_batch_size=True": (args.auto_find_batch_size, "the budget keeps batches within memory"),
        "dispatch_batches=True": (shards.dispatch_batches, own),
        "split_batches=True": (shards.split_batches, own),
        "dataloader_in_order=False": (not args.dataloader_in_order, "updates need their batches in order; leave it True"),
        "DeepSpeed ZeRO-3 with mode='online'": (
            plugin is not None and plugin.zero_stage == 3 and config.mode == "online",
            "its parameters are gathered in step on all ranks; use mode='offline'"),
        "DeepSpeed with preflight=True": (plugin is not None and config.preflight, "it keeps gradients apart; leave it False"),
        "nn.DataParallel": (args.n_gpu > 1, "launch one process a device, with torchrun or accelerate launch"),
        "train_sampling_strategy='batch_rebalance'": (
            str(args.train_sampling_strategy) == "batch_rebalance",
            "it forms batches itself, without a limit; leave it 'random': batches that fit are balanced over ranks as well"),
        "average_tokens_across_devices=False": (
            args.world_size > 1 and not args.average_tokens_across_devices,
            "ranks hold batches of different size, so tokens must be counted over all of them"),
        f"tensor, context or sequence parallelism ({sharing} ranks share a sample)": (
            sharing > 1 and config.world is None,
            "pass DynagroupConfig(world=DistributedWorld(mesh.get_group('dp'))) with the mesh's data-parallel group"),
    }  # fmt: skip
    for what, (is_set, instead) in wrong.items():
        if is_set:
            raise ConfigError(f"{what} cannot be combined with dynagroup: {instead}")
