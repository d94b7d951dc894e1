"""Models and inputs that have shapes but no data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynagroup.errors import ConfigError
from dynagroup.shapes import TOKENS

if TYPE_CHECKING:
    import torch

    from dynagroup.memory.workload import Workload

__all__ = ["as_config", "as_meta_model", "as_random_model", "is_encoder", "is_model", "make_inputs"]


def is_model(value: Any) -> bool:
    """Whether this is a torch module (a model) rather than a config."""
    import torch

    return isinstance(value, torch.nn.Module)


def as_config(value: Any) -> Any:
    """A transformers config: itself, or read from the name of one."""
    import transformers

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


def as_meta_model(model_or_config: Any, workload: Workload | None = None) -> torch.nn.Module:
    """A copy of the model on the meta device: no weights are allocated or read.

    With a workload, its dtype and attention implementation are set.
    """
    dtype = workload.dtype if workload else None
    attention = None if workload is None else "eager" if workload.attention == "eager" else "sdpa"
    if is_model(model_or_config):
        model: Any = _without_data(model_or_config)
        if attention and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(attention)
        return model
    return _from_config(copy.deepcopy(as_config(model_or_config)), dtype, attention)


def as_random_model(config: Any, workload: Workload, device: torch.device) -> torch.nn.Module:
    """A model of this config with random weights, made on the device: what is measured where no weights are at hand.

    The workload says its dtype and whether its attention is eager.
    """
    attention = "eager" if workload.attention == "eager" else "sdpa"
    return _from_config(copy.deepcopy(as_config(config)), workload.dtype, attention, device)


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
            return auto.from_config(config, **options)
        except ValueError:
            if options.pop("attn_implementation", None) != "sdpa":
                raise
            return auto.from_config(config, attn_implementation="eager", **options)  # the model has no fused attention


def is_encoder(config: Any) -> bool:
    """Whether every token sees all others, and nothing is decoded (BERT and its kin)."""
    import transformers as hf

    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return type(config) in hf.MODEL_FOR_MASKED_LM_MAPPING and not decodes


def _auto_class(config: Any) -> Any:
    """The Auto class that trains or generates with this kind of model."""
    import transformers as hf

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

    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo).to("meta")


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
