"""Describes a model and how it is run: everything besides the batch shape that memory depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args

from dynagroup.errors import ConfigError
from dynagroup.memory.phases import Attention, Dtype, Layout, MakeInputs, Mode, Phases, Sharding
from dynagroup.validation import check_flag, check_int, explained, warn_user

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "mode": get_args(Mode),
    "attention": get_args(Attention),
    "dtype": get_args(Dtype),
    "autocast": get_args(Dtype),
    "layout": get_args(Layout),
    "sharding": get_args(Sharding),
}
# Other usual spellings of dtypes.
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and how it is run. A field of None is unknown, and makes predictions more cautious.

    >>> Workload(mode="train", hidden_size=896).hidden_size
    896
    """

    mode: Mode | None = None
    """"train": forward and backward pass; "forward": no gradients; "generate": prefill and decoding with a cache."""
    num_layers: int | None = None
    num_encoder_layers: int | None = None
    """Layers of the encoder, not counted in ``num_layers``; 0 without an encoder."""
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    intermediate_size: int | None = None
    """Width of the feed-forward layer; in a mixture of experts, of one expert."""
    experts_per_token: int | None = None
    gated_mlp: bool | None = None
    dropout: bool | None = None
    vocabulary_size: int | None = None
    lm_head: bool | None = None
    """Whether the model computes logits for the whole vocabulary."""
    encoder_decoder: bool | None = None
    causal: bool | None = None
    """Whether the model is a causal language model without encoder: a token attends only to earlier ones."""
    fixed_tokens: int | None = None
    """Positions that every sample has besides its tokens, such as the 1,500 audio frames of Whisper."""
    num_parameters: int | None = None
    trainable_share: float | None = None
    """Share of parameters that are trained; below 1 with LoRA."""
    dtype: Dtype | None = None
    autocast: Dtype | None = None
    """The lower precision of `torch.autocast`; None: not used, or unknown."""
    attention: Attention | None = None
    score_bias: bool | None = None
    """Whether attention adds a learnt or computed bias to every score (T5, BLOOM), for which scores must be stored."""
    gradient_checkpointing: bool | None = None
    keeps_outputs: bool | None = None
    """Whether logits stay alive during the backward pass: they do after ``outputs = model(**batch)`` (None means so),
    and do not with ``model(**batch).loss.backward()``."""
    optimizer_bytes: float | None = None
    """Bytes of optimizer state per trainable parameter."""
    sharding: Sharding | None = None
    """What is sharded over ranks. "zero1": optimizer state; "zero2": also gradients; "zero3", "fsdp": also parameters;
    "ddp": nothing, and DDP's buckets are a second copy of the gradients."""
    num_ranks: int | None = None
    layout: Layout | None = None
    """"packed": samples are joined in one row without padding; "padded" or None: padded to the longest."""
    max_new_tokens: int | None = None
    phases: Phases | None = field(default=None, repr=False)
    """Memory by batch shape, found by tracing the model."""

    def __post_init__(self) -> None:
        for name, value in self.known().items():
            object.__setattr__(self, name, _checked(name, value))
        if self.layout == "packed" and self.mode == "generate":
            raise ConfigError(
                "`layout` 'packed' needs mode 'train' or 'forward', because generate() pads its prompts"
            )
        if self.layout == "packed" and self.encoder_decoder:
            raise ConfigError(
                "`layout` 'packed' is not available for encoder-decoder models; leave it out"
            )
        if self.sharding not in (None, "ddp") and not self.num_ranks:
            raise ConfigError(
                f"`sharding` {self.sharding!r} needs the number of ranks; pass e.g. num_ranks=8"
            )

    def known(self) -> dict[str, Any]:
        """Returns the values of the fields that are known, by name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}

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
        """Returns the workload of a ``transformers`` model, of a config, or of a model's name. No weights are loaded.

        Args:
            model_or_config: a model, a config, or a name for ``AutoConfig.from_pretrained``.
            mode: "train", "forward" or "generate".
            trace: True runs a few layers without data (seconds on a CPU) to learn exactly how memory depends on the
                batch. False, or if tracing fails (with a warning): memory is estimated from the model's sizes.
            inputs: ``(model, num_samples, longest) -> arguments of model.forward``, for models that read not only text.
            known: values of fields, such as ``dtype="bfloat16"``; without ``optimizer_bytes`` the optimizer is AdamW.

        >>> from transformers import GPT2Config
        >>> workload = Workload.from_model(GPT2Config(), mode="generate", max_new_tokens=64)
        >>> workload.num_layers, workload.num_parameters, workload.dropout
        (12, 124439808, True)
        """
        from torch.nn import Module

        from dynagroup.memory.trace.model import as_meta_model

        asked = cls(mode=mode, **known)  # refuses wrong values before a model is built
        model = model_or_config
        if not isinstance(model, Module):
            model = as_meta_model(model, dtype=asked.dtype, attention=asked.attention)
        workload = asked.completed(model)
        if not trace:
            return workload
        try:
            return workload.traced(model, inputs)
        except ConfigError as error:
            warn_user(
                "the memory of this model is only estimated from its sizes, because "
                f"{error}; pass trace=False to silence this warning"
            )
            return workload

    def completed(self, model: Any) -> Workload:
        """Returns this workload with a model's values in its unknown fields; an unknown mode is that of training."""
        from dynagroup.memory.trace.model import describe

        return Workload(**describe(model, self.mode or "train") | self.known())

    def traced(self, model: Any, inputs: MakeInputs | None = None) -> Workload:
        """Returns this workload with traced memory. ConfigError: the model can neither be traced nor simulated."""
        from dynagroup.memory.trace.polynomials import trace_phases

        with explained(
            f"this model cannot be traced in mode {self.mode!r}",
            way_out="; pass `inputs` if the model needs other arguments, else fit batches with "
            "MemoryBudget.from_bytes(limit, model=ProfiledMemory.fit(measure(...))), or of simulate(...)",
        ):
            if self.fixed_tokens and inputs is None and not self.encoder_decoder:
                raise ConfigError(
                    "the model reads images, whose memory cannot be computed from the text"
                )
            return self.replace(phases=trace_phases(model, self, inputs=inputs))

    def replace(self, **changes: Any) -> Workload:
        """Returns this workload with some fields changed; a trace is dropped if any value really changes."""
        changed = replace(self, **{"phases": None, **changes})
        before = self.known()
        after = changed.known()
        is_changed = any(after.get(name) != before.get(name) for name in changes)
        return changed if is_changed else self

    def to_json(self) -> str:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return cls(**json.loads(text))


_KINDS = {field.name: field.type for field in fields(Workload)}


def _checked(name: str, value: Any) -> Any:
    """Returns the value of a field, checked and converted."""
    kind = _KINDS[name]
    if kind == "int | None":
        return check_int(name, value, least=0)
    if kind == "bool | None":
        return check_flag(name, value)
    if name == "phases" and isinstance(value, Mapping):  # from JSON
        return Phases.from_json(value)
    if name not in _CHOICES:
        return value
    if name in ("dtype", "autocast"):  # also torch.bfloat16, "bf16" and so on
        printed = str(value).removeprefix("torch.")
        value = _DTYPES.get(printed, printed)
    if value not in _CHOICES[name]:
        choices = ", ".join(map(repr, _CHOICES[name]))
        raise ConfigError(f"`{name}` must be one of {choices} or None, but is {value!r}")
    return value


def assumed(workload: Workload, optimizer: str | None = None) -> str:
    """Returns how a model is assumed to be run as text, defaults included.

    >>> assumed(Workload(mode="generate", dtype="float16", max_new_tokens=256))
    'generate, float16, 256 new tokens'
    """
    w = workload
    parts: list[str | None] = [w.mode, w.dtype]
    if w.autocast:
        parts.append(f"autocast to {w.autocast}")
    if w.attention:
        parts.append(f"{w.attention} attention")
    if w.layout == "packed":
        parts.append("packed")
    if w.mode == "generate":
        parts.append(f"{w.max_new_tokens} new tokens")
    if w.mode == "train":
        parts += _assumed_training(w, optimizer)
    return ", ".join(part for part in parts if part)


def _assumed_training(w: Workload, optimizer: str | None) -> list[str]:
    parts = ["checkpointing" if w.gradient_checkpointing else "no checkpointing"]
    if w.trainable_share and w.trainable_share < 1:
        parts.append(f"{w.trainable_share:.2%} of the parameters trained")
    if w.optimizer_bytes is not None:
        name = optimizer or "an optimizer"
        parts.append(f"{name} of {w.optimizer_bytes:g} bytes per trained parameter")
    if w.keeps_outputs is False:
        parts.append("logits freed before the backward pass")
    if w.sharding:
        parts.append(f"{w.sharding} over {w.num_ranks or 'some'} ranks")
    return parts
