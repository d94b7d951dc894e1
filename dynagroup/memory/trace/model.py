"""Models and inputs that have shapes but no data, and what a model says of itself."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from dynagroup.errors import ConfigError
from dynagroup.memory.run import ELEMENT_BYTES, Attention, Run, needed
from dynagroup.memory.trace.adapters import fold_on_meta, with_adapters
from dynagroup.shapes import TOKENS

ALIKE_LAYERS = 3  # as many layers of one kind make a stack

__all__ = [
    "ALIKE_LAYERS",
    "architecture",
    "as_config",
    "as_meta_model",
    "as_random_model",
    "as_run_model",
    "checkpoint_layers",
    "describe",
    "is_encoder",
    "is_model",
    "make_inputs",
    "stacks",
]


def _transformers() -> Any:
    return needed("transformers", "reading a model's sizes", "hf")


def is_model(value: Any) -> bool:
    """Whether this is a torch module (a model) rather than a config."""
    return isinstance(value, torch.nn.Module)


def as_config(value: Any) -> Any:
    """A transformers config: itself, or read from the name of one."""
    transformers = _transformers()
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
    auto, options = _auto_class(config), {"dtype": getattr(torch, dtype or "float32")}
    kinds = {None: [{}], "sdpa": [{"attn_implementation": kind} for kind in ("sdpa", "eager")]}  # some have none fused
    failed: Exception | None = None
    for kind in kinds.get(attention, [{"attn_implementation": attention}]):
        try:
            with torch.device(device):
                return auto.from_config(config, **options, **kind)
        except Exception as error:  # whatever the model's own code raises
            failed = error
    reason = f"{type(failed).__name__}: {failed}".splitlines()[0][:200]
    raise ConfigError(
        f"no model can be built from this {type(config).__name__} ({reason}); correct it, or pass a model"
    ) from failed


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
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return type(config) in _transformers().MODEL_FOR_MASKED_LM_MAPPING and not decodes


def _auto_class(config: Any) -> Any:
    """The Auto class that trains or generates with this kind of model."""
    hf, kind = _transformers(), type(config)
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


def describe(model_or_config: Any, mode: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the Workload of this model in this mode; ``known`` fields win."""
    model_or_config = model_or_config if is_model(model_or_config) else as_config(model_or_config)
    config = getattr(model_or_config, "config", None) if is_model(model_or_config) else model_or_config
    if config is None:
        raise ConfigError(
            "`model_or_config` has no transformers config; "
            "write Workload(mode=..., num_layers=..., hidden_size=..., ...) from what you know of it"
        )
    if mode == "generate" and is_encoder(config):
        raise ConfigError(
            f"`mode` 'generate' is for models that decode, but {type(config).__name__} is of an encoder; mode='forward'"
        )
    found = {"mode": mode, **architecture(config), **_run_as(model_or_config, config, mode, known)}
    return {**found, **known}


def architecture(config: Any) -> dict[str, Any]:
    """Sizes that a config states, under the many names that configs give them."""
    two_stacks = bool(getattr(config, "is_encoder_decoder", False))
    nested = hasattr(config, "get_text_config") and not two_stacks
    text = config.get_text_config(decoder=True) if nested else config

    def first(*names: str, decoder: tuple[str, ...] = ()) -> Any:
        return _first(text, *(decoder if two_stacks else ()), *names)

    hidden = first("hidden_size", "d_model", "n_embd")
    heads = first("num_attention_heads", "num_heads", "n_head", decoder=("decoder_attention_heads",))
    ffn = first("moe_intermediate_size") or first(
        "intermediate_size", "ffn_dim", "d_ff", "n_inner", decoder=("decoder_ffn_dim",)
    )
    return {
        "num_layers": first(
            "num_hidden_layers", "num_layers", "n_layer", decoder=("decoder_layers", "num_decoder_layers")
        ),
        "num_encoder_layers": first("encoder_layers", "num_layers", "num_hidden_layers") if two_stacks else 0,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": 1 if getattr(text, "multi_query", False) else first("num_key_value_heads") or heads,
        "head_size": first("head_dim", "d_kv") or (hidden // heads if hidden and heads else None),
        "intermediate_size": ffn or (4 * hidden if hidden else None),
        "experts_per_token": first("num_experts_per_tok", "num_experts_per_token", "top_k_experts") or 1,
        "gated_mlp": _gated(text),
        "dropout": _dropout(text),
        "vocabulary_size": first("vocab_size") or 0,
        "tied_embeddings": bool(getattr(config, "tie_word_embeddings", True)),
        "encoder_decoder": two_stacks,
        "causal": not two_stacks and not is_encoder(config),
        "fixed_tokens": _fixed_tokens(config),
        "score_bias": hasattr(config, "relative_attention_num_buckets") or getattr(config, "model_type", "") == "bloom",
    }


def _run_as(model_or_config: Any, config: Any, mode: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's parameters and settings say about how it is run."""
    model = model_or_config if is_model(model_or_config) else as_meta_model(config, attention=known.get("attention"))
    sizes = {id(p): (p.numel(), p.requires_grad) for p in model.parameters()}
    total = sum(n for n, _ in sizes.values())
    dtype = known.get("dtype") or _dtype_of(model_or_config, config)
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"`dtype` must be one of {', '.join(map(repr, ELEMENT_BYTES))} or None, but is {dtype!r}")
    trained = [p for p in {id(p): p for p in model.parameters()}.values() if p.requires_grad]
    count = max(sum(p.numel() for p in trained), 1)
    # Adapters may be wider than what they adapt.
    own = 2.0 * sum(p.numel() * p.element_size() for p in trained) / count
    state = own if is_model(model_or_config) else 2.0 * ELEMENT_BYTES[dtype]
    stated = getattr(model.config, "_attn_implementation", None)  # what the model runs, not what was asked for
    attention = stated if stated in ("eager", "sdpa") else "flash" if stated and "flash" in stated else "sdpa"
    if known.get("attention") != attention:
        check_attention(as_meta_model(model) if is_model(model_or_config) else model, known.get("attention"))
    return {
        "num_parameters": total,
        "trainable_share": sum(n for n, trains in sizes.values() if trains) / max(total, 1) if mode == "train" else 0.0,
        "lm_head": getattr(model, "get_output_embeddings", lambda: None)() is not None,
        "dtype": dtype,
        "attention": attention,
        "gradient_checkpointing": _checkpoints(model),
        "optimizer_bytes": state if mode == "train" else 0.0,
        "ddp": False,
        "max_new_tokens": _new_tokens(model) if mode == "generate" else 0,
    }


def _checkpoints(model: Any) -> bool:
    name = (
        "is_activation_checkpointing" if hasattr(model, "is_activation_checkpointing") else "is_gradient_checkpointing"
    )
    return bool(getattr(model, name, False))


def _first(config: Any, *names: str) -> Any:
    """The first of these that a config states; where it varies over layers, what the first layer has."""
    for name in filter(None, names):
        try:
            value = getattr(config, name, None)
        except Exception:  # configs of transformers refuse to name what differs between layers
            continue
        if value is not None:
            return value[0] if isinstance(value, (list, tuple)) else value
    return None


def _gated(config: Any) -> bool:
    if hasattr(config, "is_gated_act"):
        return bool(config.is_gated_act)
    plain = {"gpt2", "opt", "bert", "roberta", "bart", "marian", "m2m_100", "whisper", "gpt_neox", "bloom", "phi",
             "distilbert", "electra", "gpt_neo", "gptj", "falcon", "mpt", "codegen", "starcoder2", "deberta-v2"}  # fmt: skip
    return getattr(config, "model_type", "") not in plain


def _dropout(config: Any) -> bool:
    names = ("hidden_dropout_prob", "hidden_dropout", "resid_pdrop", "dropout", "dropout_rate", "mlp_dropout")
    return any(isinstance(getattr(config, n, None), float) and getattr(config, n) > 0 for n in names)


def _fixed_tokens(config: Any) -> int:
    if getattr(config, "model_type", "") == "whisper":
        return int(config.max_source_positions)
    vision = getattr(config, "vision_config", None)
    if vision is not None and hasattr(vision, "image_size") and hasattr(vision, "patch_size"):
        return int((vision.image_size // vision.patch_size) ** 2)
    return 0


def _dtype_of(model_or_config: Any, config: Any) -> str:
    if is_model(model_or_config):  # quantised parameters are integers; what it computes with is not
        dtypes = [p.dtype for p in model_or_config.parameters()]
        dtype = next((found for found in dtypes if found.is_floating_point), "float32")
    else:
        dtype = getattr(config, "dtype", None) or "float32"
    name = str(dtype).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def _new_tokens(model: Any) -> int:
    """generate()'s own default where none is set: 20 tokens beyond the input."""
    settings = getattr(model, "generation_config", None)
    return int(getattr(settings, "max_new_tokens", None) or 20)
