"""What memory depends on besides the shape of a batch."""

from __future__ import annotations  # fields are checked by how their types are written

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args

from dynagroup.errors import ConfigError
from dynagroup.memory.run import Attention, Dtype, Layout, MakeInputs, Mode, Phases, Sharding
from dynagroup.validation import check_flag, check_int, explained, warn_user

_CHOICES = {"Mode": Mode, "Attention": Attention, "Dtype": Dtype, "Layout": Layout, "Sharding": Sharding}
# Other usual spellings.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and how it is run. None means "not known": predictions then become more cautious.

    >>> Workload(mode="train", hidden_size=896).hidden_size
    896
    """

    mode: Mode | None = None
    """"train": forward and backward; "forward": without gradients; "generate": prefill and decoding with a cache."""
    num_layers: int | None = None
    num_encoder_layers: int | None = None
    """Layers of the encoder, in addition; 0 without one."""
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    intermediate_size: int | None = None
    """Width of the feed-forward layer (of one expert, in a mixture of experts)."""
    experts_per_token: int | None = None
    gated_mlp: bool | None = None
    dropout: bool | None = None
    vocabulary_size: int | None = None
    lm_head: bool | None = None
    """Whether the model computes a logit for every word of the vocabulary."""
    encoder_decoder: bool | None = None
    causal: bool | None = None
    """Whether it is a language model of one stack in which a token attends only to those before it."""
    fixed_tokens: int | None = None
    """Positions that every sample has in addition, whatever its length, such as Whisper's 1,500 audio frames."""
    num_parameters: int | None = None
    trainable_share: float | None = None
    """Share of the parameters that have gradients: below 1 with LoRA."""
    dtype: Dtype | None = None
    autocast: Dtype | None = None
    """The lower precision of `torch.autocast`; None: not used."""
    attention: Attention | None = None
    score_bias: bool | None = None
    """Whether attention adds a learnt or computed bias to every score (T5, BLOOM), which materialises the scores."""
    gradient_checkpointing: bool | None = None
    keeps_outputs: bool | None = None
    """Whether logits stay alive in the backward pass. After ``outputs = model(**batch)`` they do (None means this), in
    ``model(**batch).loss.backward()`` they do not."""
    optimizer_bytes: float | None = None
    """Bytes of optimizer state per trainable parameter."""
    sharding: Sharding | None = None
    """What is divided among ranks. "zero1": the optimizer state; "zero2": also gradients; "zero3" and "fsdp": also
    parameters; "ddp": nothing, and its buckets are a second copy of the gradients."""
    num_ranks: int | None = None
    layout: Layout | None = None
    """"packed": samples lie end to end in one row, without padding; None: "padded"."""
    max_new_tokens: int | None = None
    phases: Phases | None = field(default=None, repr=False)
    """How memory depends on the batch shape, exactly: found by tracing the model."""

    def __post_init__(self) -> None:
        for known in fields(self):
            if (value := getattr(self, known.name)) is not None:
                kind = str(known.type).removesuffix(" | None")
                object.__setattr__(self, known.name, _checked(known.name, kind, value))
        if self.layout == "packed" and self.mode == "generate":
            raise ConfigError("`layout` 'packed' is for training and forward passes; generate() pads its prompts")
        if self.layout == "packed" and self.encoder_decoder:
            raise ConfigError("`layout` 'packed' is not for encoder-decoders: leave it out, and group by both lengths")
        if self.sharding not in (None, "ddp") and not self.num_ranks:
            raise ConfigError(f"`sharding` {self.sharding!r} divides memory over ranks; pass their number: num_ranks=8")

    @classmethod
    def from_model(
        cls, model_or_config: Any, mode: Mode = "train", *,
        trace: bool = True, inputs: MakeInputs | None = None, **known: Any,
    ) -> Workload:  # fmt: skip
        """The workload of a ``transformers`` model or config, or of its name.

        Args:
            model_or_config: a model, a config, or a name that ``AutoConfig.from_pretrained`` takes. No weights are loaded.
            mode: "train", "forward" or "generate".
            trace: run a few layers without data (seconds on a CPU) to learn exactly how memory depends on the batch.
                False, or with a warning if tracing fails: memory is estimated from the sizes.
            inputs: ``(model, num_samples, longest) -> arguments of model.forward``, for models of more than text.
            known: your own values, such as ``dtype="bfloat16"`` or ``max_new_tokens=256``; default: AdamW's states.

        >>> from transformers import GPT2Config
        >>> workload = Workload.from_model(GPT2Config(), mode="generate", max_new_tokens=64)
        >>> workload.num_layers, workload.num_parameters, workload.dropout
        (12, 124439808, True)
        """
        from dynagroup.memory.trace.model import describe

        asked = cls(mode=mode, **known)  # refuses wrong fields before a model is built
        said = {name: value for name in known if (value := getattr(asked, name)) is not None}
        workload = cls(**describe(model_or_config, mode, said))
        try:
            return workload.traced(model_or_config, inputs) if trace else workload
        except ConfigError as error:
            told = f"the memory of this model is estimated from its sizes, because {error}"
            warn_user(f"{told}; trace=False silences this warning")
            return workload

    def traced(self, model_or_config: Any, inputs: MakeInputs | None = None) -> Workload:
        """This workload with the phases of its model. ConfigError: it can neither be traced nor simulated."""
        from dynagroup.memory.trace.phases import trace_phases

        way_out = "MemoryBudget.from_bytes(limit, model=ProfiledMemory.fit(measure(...))), or of simulate(...)"
        told = f". `inputs=` helps where only the arguments are wrong; else fit batches: {way_out}"
        with explained("this model cannot be traced", way_out=told):
            if self.fixed_tokens and inputs is None and not self.encoder_decoder:
                raise ConfigError("it reads images, whose memory does not follow from the text")
            return self.replace(phases=trace_phases(model_or_config, self, inputs=inputs))

    def replace(self, **changes: Any) -> Workload:
        """This workload with some fields changed. The trace is dropped if it no longer applies."""
        changed = replace(self, **{"phases": None, **changes})
        return self if all(getattr(self, name) == getattr(changed, name) for name in changes) else changed

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return cls(**json.loads(text))


def _checked(name: str, kind: str, value: Any) -> Any:
    """A field's value, checked and converted by its annotation ``kind``."""
    if kind == "int":
        return check_int(name, value, least=0)
    if kind == "bool":
        return check_flag(name, value)
    if kind == "Phases" and isinstance(value, Mapping):
        return Phases(**value)
    if kind == "Dtype":  # torch.bfloat16, "bf16" and the like under the name that torch prints
        value = _DTYPES.get(name_of := str(value).removeprefix("torch."), name_of)
    allowed = get_args(_CHOICES[kind]) if kind in _CHOICES else None
    if allowed and value not in allowed:
        raise ConfigError(f"`{name}` must be one of {', '.join(map(repr, allowed))} or None, but is {value!r}")
    return value


def assumed(workload: Workload, optimizer: str | None = None) -> str:
    """How a model is assumed to be run, defaults included.

    >>> assumed(Workload(mode="generate", dtype="float16", max_new_tokens=256))
    'generate, float16, 256 new tokens'
    """
    w = workload
    told = [w.mode, w.dtype, w.autocast and f"autocast to {w.autocast}", w.attention and f"{w.attention} attention"]
    told += [w.layout == "packed" and "packed", w.mode == "generate" and f"{w.max_new_tokens} new tokens"]
    if w.mode == "train":
        told += ["checkpointing" if w.gradient_checkpointing else "no checkpointing"]
        told += [(w.trainable_share or 1) < 1 and f"{w.trainable_share:.2%} of the parameters trained"]
        state = w.optimizer_bytes is not None and f" of {w.optimizer_bytes:g} bytes a trained parameter"
        told += [state and f"{optimizer or 'an optimizer'}{state}"]
        told += [w.keeps_outputs is False and "logits let go before the backward pass"]
        told += [w.sharding and f"{w.sharding} over {w.num_ranks or 'some'} ranks"]
    return ", ".join(str(part) for part in told if part)
