"""Settings for a Trainer with batches that fit, and checks of Trainer settings that cannot be combined with them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.split import Splitter
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.validation import check_choice, check_flag, check_int, warn_user

COUPLED = {
    "KTOTrainer": "its loss compares the samples of a batch with each other; use TRL's own batches",
    **dict.fromkeys(
        ["GRPOTrainer", "RLOOTrainer"],
        "it generates samples in groups; divide these with shard_micro_batches",
    ),
    "DistillationTrainer": "it forms batches from the teacher's output; use TRL's own",
}
"""TRL trainers whose losses need TRL's own batches, and what to do instead."""
FITTING = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "CPOTrainer", "ORPOTrainer", "TPOTrainer")
"""TRL trainers that were tested; the others are refused."""
UNCLEAR = (
    "CTC",
    "RNNT",
    "PreTraining",
    "Segmentation",
    "Detection",
    "Estimation",
    "MaskedImageModeling",
    "Matting",
)
"""Ends of the names of models of transformers whose loss is not a mean over labels that are not -100, or samples."""


@dataclass(frozen=True, kw_only=True)
class DynagroupConfig:
    """Settings for how a Trainer forms its batches.

    Args:
        budget: limit of a batch: tokens with padding (int, or ``TokenBudget(16_384)``), or any other budget.
        mode: "offline": lengths are known before training. "online": workers measure samples after processing, so
            ``lengths`` may be approximate, and data may be random or streamed.
        updates: "preserved": every update has the samples that fixed batches would have, in the order of the Trainer's
            sampler. "free": an update is gradient_accumulation_steps steps, with batches as large as fit.
        samples_per_update: samples of each update over all ranks: int, or a schedule ``(update, current) -> int``.
            None: per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks.
        grouping: int: the samples of this many updates are sorted by length and divided into updates of the same size,
            so that small updates need little padding. Only with mode="offline" and updates="preserved".
        kinds: name of a column of labels, used in evaluation as well; or a label for each training sample.
        kind_of: function from a processed sample to its label, instead of ``kinds``, with mode="online".
        one_kind: with labels: "step": all batches of a step, on all ranks, have one kind; "batch": each batch has.
        shapes: int, largest number of batch shapes (samples, tokens) that a compiled model sees: batches of training and
            padded batches of evaluation are filled to these, also with rows of weight 0. Needs ``lengths``.
        lengths: tokens of each training sample, int (num_samples,), or a dict by stream, such as
            ``{"tokens": ..., "target": ...}``. None: from the length column, else counted from the model's first input
            (with ``target`` from the labels of encoder-decoder models).
        length_of: function from a processed sample to its tokens (None: counts ``input_ids``), with mode="online".
        weigh: the weight of a batch, if its loss is a mean: "auto" or "tokens" (predicted labels, if labels have a token
            dimension, else samples), "labels" (all), "samples", or a function from a batch to a number.
        out_of_memory: "retry": a batch that runs out of memory is run in parts, with the same gradient; None: an error.
        min_samples: with out_of_memory="retry", a part with fewer than twice this many samples is not split.
        preflight: True runs the largest batches before the first update, like :func:`~dynagroup.preflight`, so that an
            out-of-memory error comes in the first seconds, on all ranks.
        splitter: how to split a batch that runs out of memory; needed if inputs are not text.
        plan: dict of further settings of the loader, e.g. ``{"oversize": "error"}`` (refuse samples that do not fit
            even alone) or ``{"work": Work(...)}`` (predicted time of a batch).
        world: the data-parallel ranks; needed with tensor, context or sequence parallelism. None: all ranks.

    Raises ConfigError if a value is invalid, or contradicts another.

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
    weigh: Literal["auto", "tokens", "labels", "samples"] | Callable[[Any], float] = "auto"
    out_of_memory: Literal["retry"] | None = None
    min_samples: int = 1
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
        check_int("min_samples", self.min_samples)
        if self.min_samples > 1 and self.out_of_memory is None:
            raise ConfigError(
                "`min_samples` needs out_of_memory='retry': only then a batch is run in parts; set it"
            )
        if self.updates == "free" and self.samples_per_update is not None:
            raise ConfigError(
                "`samples_per_update` needs updates='preserved', because 'free' updates have no set size"
            )
        if self.kind_of is not None and self.mode == "offline":
            raise ConfigError(
                "`kind_of` needs mode='online'; with mode='offline' pass the labels as `kinds`"
            )
        if self.mode == "online" and isinstance(self.lengths, Mapping):
            raise ConfigError(
                f"`lengths` must be one array with mode='online', but is a dict of {[*self.lengths]}"
            )
        if self.grouping is not None and (self.mode, self.updates) != ("offline", "preserved"):
            known = "which know lengths and updates in advance"
            raise ConfigError(
                f"`grouping` needs mode='offline' and updates='preserved', {known}; set these"
            )


def trl_classes(trainer: Any) -> list[str]:
    """Returns the names of the TRL classes of a Trainer, subclasses first, without importing TRL."""
    return [c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")]


def refuse_unsupported(trainer: Any, config: DynagroupConfig) -> None:
    """Raises ConfigError for settings that would lose samples or weigh them wrongly, and says what to do instead."""
    args, accelerator, ours = trainer.args, trainer.accelerator, trl_classes(trainer)
    shards, plugin = (
        accelerator.dataloader_config,
        getattr(accelerator.state, "deepspeed_plugin", None),
    )
    sharing, multiple = (
        trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size(),
        config.budget.pad_to_multiple_of,
    )
    sorting = {"aot", "aot_unpaired"} & _dpo_losses(trainer)
    own, named = "every rank loads its own batches; set it to False", "".join(ours[:1])
    steps = (
        inspect.unwrap(vars(c)["training_step"])
        for c in type(trainer).__mro__
        if "training_step" in vars(c)
    )
    named_in = [getattr(getattr(step, "__code__", None), "co_names", ()) for step in steps]
    alone = [
        names for names in named_in if "backward" in names and "training_step" not in names
    ]  # as transformers'
    foreign = [
        c
        for c in type(trainer).__mro__
        if not c.__module__.startswith(("transformers.", "dynagroup.", "trl."))
    ]
    own_steps = any("training_step" in vars(c) for c in foreign) or getattr(
        args, "activation_offloading", False
    )
    counts = any(
        "get_batch_samples" in vars(c)
        for c in foreign
        if not c.__module__.startswith(("llamafactory.", "swift."))
    )
    head = type(getattr(trainer.model, "get_base_model", lambda: trainer.model)()).__name__
    instead = COUPLED.get(
        named, f"only {', '.join(FITTING)} are known to fit; use TRL's own batches"
    )
    wrong: dict[str, tuple[Any, str]] = {
        f"TRL's {named}": (ours and named not in FITTING, instead),
        f"DPO with loss_type={min(sorting, default='')!r}": (
            sorting,
            "it sorts the pairs of a batch against each other; choose a loss of single pairs, e.g. 'sigmoid'",
        ),
        "a packed budget for pairs of answers": (
            ours and "SFTTrainer" not in ours and config.budget.layout == "packed",
            "TRL pads them; use a padded one",
        ),
        f"training_step of {type(trainer).__name__}": (
            len(alone) > 1,
            "it must call super().training_step to weigh losses",
        ),
        f"get_batch_samples of {type(trainer).__name__}": (
            counts,
            "give a loss that is a mean over its batch, and `weigh`",
        ),
        f"out_of_memory='retry' with a training_step of {type(trainer).__name__}": (
            config.out_of_memory and own_steps,
            "a batch that runs in parts would not pass through it; leave one of them out",
        ),
        "auto_find_batch_size=True": (
            args.auto_find_batch_size,
            "the budget limits batches already; set it to False",
        ),
        "dispatch_batches=True": (shards.dispatch_batches, own),
        "split_batches=True": (shards.split_batches, own),
        "dataloader_in_order=False": (
            not args.dataloader_in_order,
            "updates need batches in order; set it to True",
        ),
        "DeepSpeed ZeRO-3 with mode='online'": (
            plugin is not None and plugin.zero_stage == 3 and config.mode == "online",
            "ranks gather its parameters in every step together; use mode='offline'",
        ),
        "nn.DataParallel": (
            args.n_gpu > 1,
            "start one process per device, with torchrun or accelerate launch",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            str(args.train_sampling_strategy) == "batch_rebalance",
            "it forms batches without a limit; set it to 'random', because dynagroup balances ranks as well",
        ),
        "average_tokens_across_devices=False": (
            args.world_size > 1 and not args.average_tokens_across_devices,
            "ranks have batches of different sizes, so their tokens must be added; set it to True",
        ),
        f"tensor, context or sequence parallelism ({sharing} ranks share a sample)": (
            sharing > 1 and config.world is None,
            "pass DynagroupConfig(world=DistributedWorld(mesh.get_group('dp'))) with the mesh's data-parallel group",
        ),
        "out_of_memory='retry' for pairs of answers": (
            {"DPOTrainer", "RewardTrainer", "TPOTrainer"} & {*ours}
            and config.out_of_memory
            and config.splitter is None,
            "all chosen rows come before the rejected ones; pass a `splitter` that keeps pairs together",
        ),
        f"the loss of {head} with weigh='auto'": (
            config.weigh == "auto" and head.endswith(UNCLEAR) and not trainer._has_own_loss,
            "say what it is a mean of: weigh='samples' (CTC with ctc_loss_reduction='mean'), or a function",
        ),
        f"pad_to_multiple_of={multiple}": (
            multiple % sharing and sharing > trainer.get_tp_size(),
            f"{sharing} ranks divide the tokens of a sample; set a multiple of {sharing} in budget and collator",
        ),
    }
    for what, (is_set, instead) in wrong.items():
        if is_set:
            raise ConfigError(f"{what} cannot be combined with dynagroup: {instead}")
    if head.endswith("QuestionAnswering") and not trainer._has_own_loss:
        warn_user(
            f"the softmax in the loss of {head} is over padding, too, so losses depend on how batches are padded"
        )
    _warn_of_two_means(trainer, ours)


def _dpo_losses(trainer: Any) -> set[str]:
    return (
        set(getattr(trainer, "loss_types", ())) if "DPOTrainer" in trl_classes(trainer) else set()
    )


def _warn_of_two_means(trainer: Any, ours: list[str]) -> None:
    by_tokens = "sft" in _dpo_losses(trainer) or "ORPOTrainer" in ours
    if by_tokens or (
        ours and any(getattr(trainer, alpha, 0) for alpha in ("cpo_alpha", "tpo_alpha"))
    ):
        told = "a mean over pairs and a mean over tokens; dynagroup weighs both by pairs"
        warn_user(
            f"the loss of {type(trainer).__name__} adds {told}, so the second part depends on the batches"
        )
