"""Settings for a Trainer with batches that fit, and checks of Trainer settings that cannot be combined with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.split import Splitter
from dynagroup.update.loss_weight import Weigh, weigher
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.validation import check_choice, check_flag, check_int


@dataclass(frozen=True, kw_only=True)
class DynagroupConfig:
    """Settings for how a Trainer forms its batches.

    Args:
        budget: limit of a batch: tokens with padding (int, or ``TokenBudget(16_384)``), or any other budget; "auto": as
            many tokens as per_device_train_batch_size of the longest samples have, which is what must fit today.
        mode: "offline": lengths are known before training. "online": workers measure samples after processing, so
            ``lengths`` may be approximate, and data may be random or streamed.
        updates: "preserved": every update has the samples that fixed batches would have, in the order of the Trainer's
            sampler. "free": an update is gradient_accumulation_steps steps, with batches as large as fit.
        samples_per_update: samples of each update over all ranks: int, or a schedule ``(update, current) -> int``.
            None: per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks.
        grouping: int: the samples of this many updates are dealt anew to stratified updates of the same size, so that
            small updates need little padding. Only with mode="offline" and updates="preserved".
        kinds: name of a column of labels, used in evaluation as well; or a label for each training sample.
        kind_of: function from a processed sample to its label, instead of ``kinds``, with mode="online".
        one_kind: with labels: "step": all batches of a step, on all ranks, have one kind; "batch": each batch has.
        shapes: int, largest number of batch shapes (samples, tokens) that a compiled model sees: batches of training and
            padded batches of evaluation are filled to these, also with rows of weight 0. Needs one stream of ``lengths``.
        lengths: tokens of each training sample, int (num_samples,), or a dict by stream, such as
            ``{"tokens": ..., "target": ...}``. None: from the length column, else counted from the model's first input
            (with ``target`` from the labels of encoder-decoder models).
        length_of: function from a processed sample to its tokens (None: counts ``input_ids``), with mode="online".
        weigh: the weight of a batch's mean loss. "auto": the split test (:func:`~dynagroup.check_loss`) finds how losses add
            up, or refuses the loss. "tokens" (labels without each sample's first), "labels", "samples", a function from a
            batch to a number, or a dict of these for several losses, which the model or ``compute_loss`` returns as ``losses``.
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

    budget: Any  # a Budget, an int or "auto"; a Budget once a Trainer has it
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
    weigh: Literal["auto"] | Weigh | Mapping[str, Weigh] = "auto"
    out_of_memory: Literal["retry"] | None = None
    min_samples: int = 1
    preflight: bool = False
    splitter: Splitter[Any] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    world: World | None = None

    def __post_init__(self) -> None:
        if self.budget != "auto":
            object.__setattr__(self, "budget", as_budget(self.budget))
        elif self.mode == "online":
            raise ConfigError(
                "`budget='auto'` needs mode='offline', which knows lengths; give tokens"
            )
        check_choice("mode", self.mode, ("offline", "online"))
        check_choice("updates", self.updates, ("preserved", "free"))
        check_choice("out_of_memory", self.out_of_memory, ("retry", None))
        check_flag("preflight", self.preflight)
        weigh: Any = self.weigh
        weights = weigh.values() if isinstance(weigh, Mapping) else [weigh]
        for weight in weights:
            if isinstance(weigh, Mapping) or weight != "auto":
                weigher(weight)
        if isinstance(self.weigh, Mapping) and self.out_of_memory is not None:
            raise ConfigError("`weigh` for several losses needs out_of_memory=None; set it to None")
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


def refuse_unsupported(trainer: Any, config: DynagroupConfig) -> None:
    """Raises ConfigError for settings that would lose samples, and says what to do instead."""
    args, shards = trainer.args, trainer.accelerator.dataloader_config
    own = "every rank loads its own batches; set it to False"
    refused = {
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
        "nn.DataParallel": (
            args.n_gpu > 1,
            "start one process per device, with torchrun or accelerate launch",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            str(args.train_sampling_strategy) == "batch_rebalance",
            "it forms batches without a limit; set it to 'random', because dynagroup balances ranks as well",
        ),
    }
    losses = getattr(args, "loss_type", None) or ()
    losses = [losses] if isinstance(losses, str) else losses
    refused["DPO with loss_type='aot'"] = (
        any(name in ("aot", "aot_unpaired") for name in losses),
        "it sorts the pairs of a batch against each other; choose a loss of single pairs, e.g. 'sigmoid'",
    )
    for what, (is_set, instead) in refused.items():
        if is_set:
            raise ConfigError(f"{what} cannot be combined with dynagroup: {instead}")
    sharing = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    if sharing > 1 and config.world is None:
        raise ConfigError(
            f"tensor, context or sequence parallelism ({sharing} ranks share a sample) cannot be "
            "combined with dynagroup without `world`: pass "
            "DynagroupConfig(world=DistributedWorld(mesh.get_group('dp'))) with the data-parallel group"
        )
