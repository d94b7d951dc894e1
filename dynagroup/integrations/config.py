"""Settings for a Trainer with batches that fit, and checks of Trainer settings that cannot be combined with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

from dynagroup.attention import AttentionBackends, check_attention_backends
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.take import Splitter
from dynagroup.plan.mixture import Mixture
from dynagroup.update.loss_weight import Weigh, weigher
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.validation import check_choice, check_flag, check_identity, check_int


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
            small updates need little padding. Only with updates="preserved".
        mixture: a :class:`~dynagroup.Mixture` of dataset indices, instead of the Trainer's sampler. With its own
            ``samples_per_update``, every update has its shares, and the log has them as ``share_<source>``.
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
        layout: "auto": batches of a padded ``TokenBudget`` are packed if the model's attention keeps packed samples apart
            without a mask, and tests on the model show the same outputs and losses; the log says which and why. A loss
            of your own, retries, ``shapes`` and mode="online" keep padded batches, and so does evaluation. "padded":
            the budget's layout is kept.
        attention_backends: which kernels ``scaled_dot_product_attention`` may use. "auto": all but cuDNN's, which on an
            H100, H200 or B200 takes half a second for each new shape; with ``shapes``, all. None: torch chooses. A list of
            ``torch.nn.attention.SDPBackend``: these.
        identity: a text, or another value for JSON, that a saved state must have in common with the run that loads it.
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
    mixture: Mixture | None = None
    kinds: Any = None
    kind_of: Callable[[Any], object] | None = None
    one_kind: Literal["step", "batch"] = "step"
    shapes: int | None = None
    lengths: Any = None
    length_of: Callable[[Any], Any] | None = None
    weigh: Literal["auto"] | Weigh | Mapping[str, Weigh] = "auto"
    out_of_memory: Literal["retry"] | None = None
    min_samples: int = 1
    preflight: bool = False
    splitter: Splitter[Any] | None = None
    layout: Literal["auto", "padded"] = "auto"
    attention_backends: AttentionBackends = "auto"
    identity: object = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    world: World | None = None

    def __post_init__(self) -> None:
        if self.budget != "auto":
            object.__setattr__(self, "budget", as_budget(self.budget))
        check_choice("mode", self.mode, ("offline", "online"))
        check_choice("updates", self.updates, ("preserved", "free"))
        check_choice("layout", self.layout, ("auto", "padded"))
        check_choice("out_of_memory", self.out_of_memory, ("retry", None))
        check_flag("preflight", self.preflight)
        check_attention_backends(self.attention_backends)
        check_identity(self.identity)
        check_int("min_samples", self.min_samples)
        if isinstance(self.weigh, Mapping):
            for weight in self.weigh.values():
                weigher(weight)
        elif self.weigh != "auto":
            weigher(self.weigh)
        self._check_together()

    def _check_together(self) -> None:
        """Raises ConfigError for settings that would have no effect with the others."""
        if self.budget == "auto" and self.mode == "online":
            raise ConfigError(
                "`budget='auto'` needs mode='offline', which knows lengths; give tokens"
            )
        if isinstance(self.weigh, Mapping) and self.out_of_memory is not None:
            raise ConfigError("`weigh` for several losses needs out_of_memory=None; set it to None")
        if self.min_samples > 1 and self.out_of_memory is None:
            raise ConfigError(
                "`min_samples` needs out_of_memory='retry': only then a batch is run in parts; set it"
            )
        if self.updates == "free":
            self._check_free()
        if "sampler" in self.plan:
            raise ConfigError(
                "`plan` has a 'sampler', but the Trainer's sampler orders samples; for a Mixture pass "
                "DynagroupConfig(mixture=...), else override _get_train_sampler"
            )
        if self.mixture is not None and not isinstance(self.mixture, Mixture):
            raise ConfigError(
                f"`mixture` must be a dynagroup.Mixture or None, but is {self.mixture!r}"
            )
        if self.kind_of is not None and self.mode == "offline":
            raise ConfigError(
                "`kind_of` needs mode='online'; with mode='offline' pass the labels as `kinds`"
            )
        if self.mode == "online" and isinstance(self.lengths, Mapping):
            raise ConfigError(
                f"`lengths` must be one array with mode='online', but is a dict of {[*self.lengths]}"
            )

    def _check_free(self) -> None:
        settings = {
            "samples_per_update": self.samples_per_update,
            "mixture": self.mixture,
            "grouping": self.grouping,
        }
        for name, value in settings.items():
            if value is not None:
                raise ConfigError(
                    f"`{name}` needs updates='preserved', because 'free' updates have no set size and draw their own order"
                )


class HostTrainer(Protocol):
    """What dynagroup reads of a Trainer."""

    dynagroup: DynagroupConfig
    args: Any
    accelerator: Any
    model: Any
    processing_class: Any
    data_collator: Any
    train_dataset: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    accumulation: int
    layout_line: str | None

    @property
    def has_own_loss(self) -> bool: ...
    @property
    def data_world(self) -> World: ...
    def get_tp_size(self) -> int: ...
    def get_cp_size(self) -> int: ...
    def get_sp_size(self) -> int: ...


def refuse_unsupported(trainer: HostTrainer, config: DynagroupConfig) -> None:
    """Raises ConfigError for settings that would lose samples, and says what to do instead."""
    args = trainer.args
    shards = trainer.accelerator.dataloader_config
    if args.auto_find_batch_size:
        _refuse("auto_find_batch_size=True", "the budget limits batches already; set it to False")
    if shards.dispatch_batches:
        _refuse("dispatch_batches=True", "every rank loads its own batches; set it to False")
    if shards.split_batches:
        _refuse("split_batches=True", "every rank loads its own batches; set it to False")
    if not args.dataloader_in_order:
        _refuse("dataloader_in_order=False", "updates need batches in order; set it to True")
    if args.n_gpu > 1:
        _refuse(
            "nn.DataParallel", "start one process per device, with torchrun or accelerate launch"
        )
    if str(args.train_sampling_strategy) == "batch_rebalance":
        _refuse(
            "train_sampling_strategy='batch_rebalance'",
            "it forms batches without a limit; set it to 'random', because dynagroup balances ranks as well",
        )
    num_sharing = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    if num_sharing > 1 and config.world is None:
        raise ConfigError(
            f"tensor, context or sequence parallelism ({num_sharing} ranks share a sample) cannot be "
            "combined with dynagroup without `world`: pass "
            "DynagroupConfig(world=DistributedWorld(mesh.get_group('dp'))) with the data-parallel group"
        )


def _refuse(setting: str, instead: str) -> NoReturn:
    raise ConfigError(f"{setting} cannot be combined with dynagroup: {instead}")
