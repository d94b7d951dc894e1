"""Reads a workload's fields from a ``transformers`` model or config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynagroup.errors import ConfigError
from dynagroup.memory.run import ELEMENT_BYTES
from dynagroup.memory.trace.build import as_config, as_meta_model, check_attention, is_encoder, is_model

__all__ = ["describe"]


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
    found = {"mode": mode, **architecture(config), **run(model_or_config, config, mode, known)}
    return {**found, **known}


def architecture(config: Any) -> dict[str, Any]:
    """Sizes that a config states, under the many names that configs give them."""
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    nested = hasattr(config, "get_text_config") and not encoder_decoder
    text = config.get_text_config(decoder=True) if nested else config
    hidden = _first(text, "hidden_size", "d_model", "n_embd")
    heads = _first(
        text, "decoder_attention_heads" if encoder_decoder else "", "num_attention_heads", "num_heads", "n_head"
    )
    head_size = _first(text, "head_dim", "d_kv") or (hidden // heads if hidden and heads else None)
    layers = _first(text, "decoder_layers" if encoder_decoder else "", "num_decoder_layers" if encoder_decoder else "",
                    "num_hidden_layers", "num_layers", "n_layer")  # fmt: skip
    ffn = _first(text, "moe_intermediate_size", "decoder_ffn_dim" if encoder_decoder else "", "intermediate_size", "ffn_dim",
                 "d_ff", "n_inner")  # fmt: skip
    encoder_layers = _first(text, "encoder_layers", "num_layers", "num_hidden_layers") if encoder_decoder else 0
    return {
        "num_layers": layers,
        "num_encoder_layers": encoder_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": 1 if getattr(text, "multi_query", False) else _first(text, "num_key_value_heads") or heads,
        "head_size": head_size,
        "intermediate_size": ffn or (4 * hidden if hidden else None),
        "experts_per_token": _first(text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts") or 1,
        "gated_mlp": _gated(text),
        "dropout": _dropout(text),
        "vocabulary_size": _first(text, "vocab_size") or 0,
        "tied_embeddings": bool(getattr(config, "tie_word_embeddings", True)),
        "encoder_decoder": encoder_decoder,
        "causal": not encoder_decoder and not is_encoder(config),
        "fixed_tokens": _fixed_tokens(config),
        "score_bias": hasattr(config, "relative_attention_num_buckets") or getattr(config, "model_type", "") == "bloom",
    }


def run(model_or_config: Any, config: Any, mode: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's parameters and settings say about how it is run."""
    model = model_or_config if is_model(model_or_config) else as_meta_model(config, attention=known.get("attention"))
    sizes = {id(p): (p.numel(), p.requires_grad) for p in model.parameters()}
    total = sum(n for n, _ in sizes.values())
    dtype = known.get("dtype") or _dtype_of(model_or_config, config)
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"`dtype` must be one of {', '.join(map(repr, ELEMENT_BYTES))} or None, but is {dtype!r}")
    trained = [p for p in {id(p): p for p in model.parameters()}.values() if p.requires_grad]
    count = max(sum(p.numel() for p in trained), 1)
    state = (
        2.0 * sum(p.numel() * p.element_size() for p in trained) / count
    )  # adapters may be wider than what they adapt
    if not is_model(model_or_config):
        state = 2.0 * ELEMENT_BYTES[dtype]
    stated = getattr(model.config, "_attn_implementation", None)  # what the model runs, not what was asked for
    attention = stated if stated in ("eager", "sdpa") else "flash" if stated and "flash" in stated else "sdpa"
    if known.get("attention") != attention:
        check_attention(as_meta_model(model) if is_model(model_or_config) else model, known.get("attention"))
    return {
        "num_parameters": total,
        "trainable_share": sum(n for n, trains in sizes.values() if trains) / max(total, 1) if mode == "train" else 0.0,
        "lm_head": _has_lm_head(model),
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
    for name in names:
        value = getattr(config, name, None) if name else None
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


def _has_lm_head(model: Any) -> bool:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head is not None


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
