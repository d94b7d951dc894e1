"""What memory depends on besides the shape of a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    from dynagroup.memory.trace.program import MakeInputs

__all__ = ["MONOMIALS", "Attention", "Dtype", "Mode", "Phases", "Workload"]

Mode: TypeAlias = Literal["train", "forward", "generate"]
Attention: TypeAlias = Literal["eager", "sdpa", "flash"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

# What a phase has bytes for (n: samples, L: tokens of the longest, T: of the longest target).
MONOMIALS = ("1", "n", "L", "nL", "L2", "nL2", "T", "nT", "T2", "nT2", "LT", "nLT")
ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_CHOICES = {
    "mode": get_args(Mode),
    "attention": get_args(Attention),
    "dtype": get_args(Dtype),
    "autocast": get_args(Dtype),
}
_COUNTS = ("num_layers", "num_encoder_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size",
           "intermediate_size", "experts_per_token", "vocabulary_size", "fixed_tokens", "num_parameters",
           "max_new_tokens")  # fmt: skip
_FLAGS = ("gated_mlp", "dropout", "lm_head", "tied_embeddings", "encoder_decoder", "causal", "score_bias",
          "gradient_checkpointing", "ddp")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phases:
    """How a model's memory depends on the batch shape: of each phase the bytes per monomial, of which the largest counts.

    >>> Phases(((0.0,) * 12,)).until is None
    True
    """

    rows: tuple[tuple[float, ...], ...]
    """One tuple a phase, of the monomials that ``memory.closed_form.MONOMIALS`` lists."""
    until: int | None = None
    """The longest sample, in tokens, for which ``rows`` hold; None: for all."""
    after: tuple[tuple[float, ...], ...] = ()
    """As ``rows``, beyond that: where attention slides."""
    aligned: Phases | None = None
    """The same for lengths that are multiples of 16, whose masks need no padding for their kernel; None: no different."""

    def __post_init__(self) -> None:
        for name in ("rows", "after"):
            rows = tuple(tuple(map(float, row)) for row in getattr(self, name))
            if not all(value >= 0 for row in rows for value in row):  # false for NaN, too
                raise ConfigError("`phases` has a size below zero or NaN; make it with Workload.from_model")
            if any(len(row) != len(MONOMIALS) for row in rows) or (name == "rows" and not rows):
                raise ConfigError(f"`phases` needs rows of {len(MONOMIALS)} numbers; make it with Workload.from_model")
            object.__setattr__(self, name, rows)
        if isinstance(self.aligned, Mapping):
            object.__setattr__(self, "aligned", Phases(**self.aligned))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and what is done with it. None means "not known": predictions then become more careful.

    >>> Workload(mode="train", hidden_size=896).hidden_size
    896
    """

    mode: Mode | None = None
    """"train": forward and backward; "forward": forward without gradients; "generate": prefill and decoding with a cache."""
    num_layers: int | None = None
    """Layers of the decoder, or of the only stack."""
    num_encoder_layers: int | None = None
    """Layers of the encoder beside it; 0 without one."""
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    intermediate_size: int | None = None
    """Width of the feed-forward layer (of one expert, in a mixture of experts)."""
    experts_per_token: int | None = None
    """Experts that each token runs through; 1 without experts."""
    gated_mlp: bool | None = None
    dropout: bool | None = None
    """Whether hidden states pass through dropout in training."""
    vocabulary_size: int | None = None
    lm_head: bool | None = None
    """Whether the model computes a logit for every word of the vocabulary."""
    tied_embeddings: bool | None = None
    encoder_decoder: bool | None = None
    causal: bool | None = None
    """Whether it is a language model of one stack in which a token sees only those before it."""
    fixed_tokens: int | None = None
    """Positions that every sample adds whatever its length, such as Whisper's 1,500 audio frames."""
    num_parameters: int | None = None
    trainable_share: float | None = None
    """Share of the parameters that have gradients: below 1 with LoRA."""
    dtype: Dtype | None = None
    """Of the parameters."""
    autocast: Dtype | None = None
    """The lower precision of `torch.autocast`; None: not used."""
    attention: Attention | None = None
    score_bias: bool | None = None
    """Whether every score of attention gets a learnt or computed bias (T5, BLOOM), which materialises the scores."""
    gradient_checkpointing: bool | None = None
    optimizer_bytes: float | None = None
    """Bytes of optimizer state per trainable parameter."""
    ddp: bool | None = None
    """Whether DistributedDataParallel keeps a second copy of the gradients in its buckets."""
    max_new_tokens: int | None = None
    phases: Phases | None = field(default=None, repr=False)
    """What tracing the model found: how its memory depends on the batch shape, exactly. See ``memory.phases``."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ConfigError(f"`{name}` must be one of {', '.join(map(repr, allowed))} or None, but is {value!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            least = 0 if name in ("num_encoder_layers", "fixed_tokens", "vocabulary_size", "max_new_tokens") else 1
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"`{name}` must be an integer of at least {least} or None, but is {value!r}")
        for name in _FLAGS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"`{name}` must be True, False or None, but is {value!r}")
        self._check_relations()
        if isinstance(self.phases, Mapping):
            object.__setattr__(self, "phases", Phases(**self.phases))

    def _check_relations(self) -> None:
        share, state = self.trainable_share, self.optimizer_bytes
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"`trainable_share` must be between 0 and 1 or None, but is {share!r}")
        if state is not None and not 0 <= state <= 64:
            raise ConfigError(f"`optimizer_bytes` must be between 0 and 64 bytes a parameter or None, but is {state!r}")
        if self.num_heads and self.num_kv_heads and self.num_kv_heads > self.num_heads:
            raise ConfigError(
                f"`num_kv_heads` must be at most `num_heads` ({self.num_heads}), but is {self.num_kv_heads} instead"
            )

    @classmethod
    def from_model(
        cls,
        model_or_config: Any,
        mode: Mode = "train",
        *,
        trace: bool = True,
        inputs: MakeInputs | None = None,
        **known: Any,
    ) -> Workload:
        """The workload of a ``transformers`` model or config, or of its name.

        Args:
            model_or_config: a model, a config, or a name that ``AutoConfig.from_pretrained`` takes. No weights are loaded.
            mode: "train", "forward" or "generate".
            trace: run a few layers of the model on tensors without data (a few seconds on a CPU) to know exactly how its
                memory depends on the batch. Without, or with a warning where that is impossible, it is estimated from the sizes.
            inputs: ``(model, num_samples, longest) -> arguments of model.forward``, for models that take more than text.
            known: fields that you know better, such as ``dtype="bfloat16"``, ``gradient_checkpointing=True``,
                ``max_new_tokens=256``, ``ddp=True`` or ``optimizer_bytes=8``.

        AdamW is assumed in training: two states of the parameters' dtype. Gradients of DDP are not, unless ``ddp=True``.

        >>> from transformers import GPT2Config
        >>> workload = Workload.from_model(GPT2Config(), mode="generate", max_new_tokens=64)
        >>> workload.num_layers, workload.num_parameters, workload.dropout
        (12, 124439808, True)
        """
        from dynagroup.memory.trace.describe import describe, traced

        names = [f.name for f in fields(cls) if f.name != "phases"]
        unknown = sorted(set(known) - set(names))
        if unknown:
            raise ConfigError(f"Workload has no field {unknown[0]!r}; it has {', '.join(names)}")
        workload = cls(**describe(model_or_config, mode, known))
        return traced(model_or_config, workload, inputs) if trace else workload

    @property
    def known_share(self) -> float:
        """Share of the fields that are known."""
        values = [getattr(self, f.name) for f in fields(self) if f.name not in ("autocast", "phases")]
        return sum(v is not None for v in values) / len(values)

    def replace(self, **changes: Any) -> Workload:
        """This workload with some fields changed. What was traced is forgotten where it no longer holds."""
        same = all(getattr(self, name) == value for name, value in changes.items())
        return self if same else replace(self, **{"phases": None, **changes})

    def to_json(self) -> str:
        """The known fields as JSON text."""
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """The workload that :meth:`to_json` wrote."""
        return cls.from_mapping(json.loads(text))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Workload:
        """The workload with these fields; None and absent ones are unknown."""
        names = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ConfigError(f"Workload has no field {unknown[0]!r}; it has {', '.join(sorted(names))}")
        return cls(**values)

    def contradicts(self, other: Workload) -> str | None:
        """The first architecture field on which both are known and differ, or None."""
        described = ("num_layers", "num_encoder_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size",
                     "intermediate_size", "vocabulary_size", "encoder_decoder", "num_parameters")  # fmt: skip
        for name in described:
            mine, its = getattr(self, name), getattr(other, name)
            if mine is not None and its is not None and mine != its:
                return name
        return None
