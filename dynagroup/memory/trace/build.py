"""Models and inputs that have shapes but no data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynagroup.errors import ConfigError
from dynagroup.memory.extras import needed
from dynagroup.shapes import TOKENS

if TYPE_CHECKING:
    import torch

    from dynagroup.memory.run import Attention, Run

ALIKE_LAYERS = 3  # as many layers of one kind make a stack

__all__ = [
    "ALIKE_LAYERS",
    "as_config",
    "as_meta_model",
    "as_random_model",
    "as_run_model",
    "checkpoint_layers",
    "is_encoder",
    "is_model",
    "make_inputs",
    "stacks",
]


def is_model(value: Any) -> bool:
    """Whether this is a torch module (a model) rather than a config."""
    import torch

    return isinstance(value, torch.nn.Module)


def as_config(value: Any) -> Any:
    """A transformers config: itself, or read from the name of one."""
    transformers = needed("transformers", "reading a model's sizes", "hf")
    if isinstance(value, str):
        try:
            return transformers.AutoConfig.from_pretrained(value)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no config found for {value!r}; give a model's name, or a folder or file with a config.json"
            ) from error
    if not isinstance(value, transformers.PretrainedConfig):
        raise ConfigError(
            f"`model_or_config` must be a model, a transformers config or its name, but is {type(value).__name__}"
        )
    return value


def as_meta_model(
    model_or_config: Any, run: Run | None = None, *, attention: Attention | None = None
) -> torch.nn.Module:
    """A copy of the model on the meta device: no weights are allocated or read.

    With a run (a workload), its dtype and attention implementation are set; without one, ``attention``.
    """
    dtype = run.dtype if run else None
    asked = run.attention if run else attention
    if run or attention:
        attention = "eager" if asked == "eager" else "sdpa"
    if is_model(model_or_config):
        model: Any = _without_data(model_or_config)
        if attention and hasattr(model, "set_attn_implementation"):
            _attend(model, attention, asked)
        return model
    return _from_config(copy.deepcopy(as_config(model_or_config)), dtype, attention)


def as_run_model(model_or_config: Any, *, dtype: str | None, attention: Attention | None, lora: Any = None) -> Any:
    """A copy on the meta device that is run in this dtype, with adapters where ``lora`` asks for them: True, their rank, or a
    config of peft. Adapters are kept in float32, as peft does by itself."""
    import torch

    if is_model(model_or_config):
        model: Any = as_meta_model(model_or_config, attention=attention)
        own = next(model.parameters()).dtype
        if dtype is not None and str(own) != f"torch.{dtype}":
            model = model.to(getattr(torch, dtype))
    else:
        config = copy.deepcopy(as_config(model_or_config))
        config.dtype = dtype = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        model = _from_config(config, dtype, "eager" if attention == "eager" else "sdpa")
        check_attention(model, attention)
    if lora is None or lora is False:
        return model
    from dynagroup.memory.trace.adapters import with_adapters

    return with_adapters(model, lora)


def as_random_model(config: Any, run: Run, device: torch.device) -> torch.nn.Module:
    """A model of this config with random weights, made on the device: what is measured where no weights are at hand.

    The run (a workload) says its dtype and whether its attention is eager.
    """
    attention = "eager" if run.attention == "eager" else "sdpa"
    return _from_config(copy.deepcopy(as_config(config)), run.dtype, attention, device)


def _from_config(
    config: Any, dtype: str | None, attention: str | None, device: torch.device | str = "meta"
) -> torch.nn.Module:
    import torch

    options: dict[str, Any] = {"dtype": getattr(torch, dtype or "float32")}
    if attention:
        options["attn_implementation"] = attention
    auto = _auto_class(config)
    with torch.device(device):
        try:
            try:
                return auto.from_config(config, **options)
            except ValueError:
                if options.pop("attn_implementation", None) != "sdpa":
                    raise
                return auto.from_config(config, attn_implementation="eager", **options)  # it has no fused attention
        except Exception as error:  # whatever the model's own code raises
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise ConfigError(
                f"no model can be built from this {type(config).__name__} ({reason}); correct it, or pass a model"
            ) from error


def check_attention(model: torch.nn.Module, asked: str | None) -> None:
    """Raises ConfigError where a model cannot attend as it was asked to."""
    if asked in ("sdpa", "flash") and hasattr(model, "set_attn_implementation"):
        _attend(model, "sdpa", asked)


def _attend(model: Any, attention: str, asked: str | None = None) -> None:
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"`attention` is {asked or attention!r}, but {type(model).__name__} has no fused attention and runs 'eager'; "
            "leave it out"
        ) from error


def is_encoder(config: Any) -> bool:
    """Whether every token sees all others, and nothing is decoded (BERT and its kin)."""
    hf = needed("transformers", "reading a model's sizes", "hf")
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return type(config) in hf.MODEL_FOR_MASKED_LM_MAPPING and not decodes


def _auto_class(config: Any) -> Any:
    """The Auto class that trains or generates with this kind of model."""
    hf = needed("transformers", "reading a model's sizes", "hf")
    kind = type(config)
    order = [hf.AutoModelForSpeechSeq2Seq, hf.AutoModelForSeq2SeqLM, hf.AutoModelForImageTextToText]
    if not getattr(config, "is_encoder_decoder", False):
        order = [hf.AutoModelForImageTextToText, hf.AutoModelForCausalLM]
    if is_encoder(config):
        order = [hf.AutoModelForMaskedLM, *order]
    for auto in [*order, hf.AutoModel]:
        if kind in auto._model_mapping:
            return auto
    raise ConfigError(f"transformers has no model for {kind.__name__}; pass a model built from it instead")


def _without_data(model: torch.nn.Module) -> torch.nn.Module:
    import torch

    from dynagroup.memory.trace.adapters import fold_on_meta

    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    without = copy.deepcopy(model, memo).to("meta")
    fold_on_meta(without)
    return without


def checkpoint_layers(model: Any, **options: Any) -> None:
    """Switch gradient checkpointing on, under the name that this version of transformers has for it."""
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **options})


def stacks(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The lists of like layers that a model is made of, outermost ones only."""
    import torch

    found: list[torch.nn.ModuleList] = []
    for module in model.modules():
        nested = any(module is inner for outer in found for inner in outer.modules())
        alike = (
            isinstance(module, torch.nn.ModuleList)
            and len(module) >= ALIKE_LAYERS
            and len({type(m) for m in module}) == 1
        )
        if alike and not nested:
            found.append(module)  # type: ignore[arg-type]
    return found


def make_inputs(
    model: torch.nn.Module, num_samples: int, longest: Mapping[str, int], with_labels: bool, device: str = "meta"
) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass over ``num_samples`` samples, with a padding mask.

    Streams: ``tokens`` is the input of the encoder or of the only stack, ``target`` (default: as long) what a decoder is
    taught. Speech models always read their full window of audio.
    """
    import torch

    config: Any = getattr(model, "config", None)
    length = int(longest[TOKENS])
    target = int(longest.get("target", length))
    speech = getattr(model, "main_input_name", "input_ids") == "input_features"
    with torch.device(device):
        ids = torch.zeros(num_samples, length, dtype=torch.long)
        if speech:
            frames = 2 * config.max_source_positions
            features = torch.zeros(num_samples, config.num_mel_bins, frames, dtype=next(model.parameters()).dtype)
            inputs = {"input_features": features}
        else:
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        decodes = bool(getattr(config, "is_encoder_decoder", False))
        words = torch.zeros(num_samples, target, dtype=torch.long) if decodes else ids
        if with_labels:
            inputs["labels"] = words if "ForSequenceClassification" not in type(model).__name__ else words[:, 0].clone()
            words = words.clone()  # what the decoder reads: the labels, shifted by the collator or by the model
        if decodes:
            inputs["decoder_input_ids"] = words
    accepted = inspect.signature(model.forward).parameters
    if "kwargs" not in accepted and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        inputs = {k: v for k, v in inputs.items() if k in accepted}
    return inputs
