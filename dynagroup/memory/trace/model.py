"""Makes models and inputs without data, and reads a model's sizes from its config and parameters."""

import copy
import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from dynagroup.errors import ConfigError
from dynagroup.memory.phases import ELEMENT_BYTES, Attention, Run, needed
from dynagroup.shapes import primary
from dynagroup.validation import explained, warn_user

PREDICTED = {
    "use_cache": True,
    "num_beams": 1,
    "num_return_sequences": 1,
    "cache_implementation": "dynamic",
}
ALIKE_LAYERS = 3  # a list of fewer layers is not treated as a stack


def _transformers() -> Any:
    return needed("transformers", "reading a model's sizes", "hf")


def as_config(value: Any) -> Any:
    """Returns a transformers config, either ``value`` itself or the one with this name."""
    transformers = _transformers()
    if isinstance(value, str):
        with explained(
            f"no config found for {value!r}", way_out="; give a model's name, or its folder"
        ):
            return transformers.AutoConfig.from_pretrained(value)
    if not isinstance(value, transformers.PretrainedConfig):
        raise ConfigError(
            f"`model_or_config` must be a model, its config or its name, but is {type(value).__name__}"
        )
    return value


def as_meta_model(
    source: Any,
    run: Run | None = None,
    *,
    dtype: str | None = None,
    attention: Attention | None = None,
    lora: Any = None,
) -> Any:
    """Copies a model to the meta device, or builds one there from a config; no weights are allocated or read. ``run``
    (a workload) sets dtype and attention. Without it: ``dtype``, ``attention`` (None: the source's), ``lora``."""
    attention = run.attention if run else attention
    kind = (
        "eager"
        if (attention or getattr(source, "_attn_implementation", None)) == "eager"
        else "sdpa"
    )  # as the config asks
    if isinstance(source, torch.nn.Module):
        empty = lambda tensor: torch.empty_like(tensor, device="meta")  # noqa: E731
        memo: dict[int, Any] = {
            id(p): torch.nn.Parameter(empty(p), p.requires_grad) for p in source.parameters()
        }
        memo |= {id(b): empty(b) for b in source.buffers()}
        model: Any = copy.deepcopy(source, memo).to("meta")
        for part in model.modules():
            if (
                getattr(vars(part).get("forward"), "__globals__", {})
                .get("__name__", "")
                .startswith("trl.")
            ):
                del part.forward  # TRL's runs the source; without it, the whole logits count
        model = model if dtype is None else model.to(getattr(torch, dtype))
    else:
        model = _from_config(source, run.dtype if run else dtype, kind)
    if attention is not None and hasattr(model, "set_attn_implementation"):
        none = f"{type(model).__name__} has only 'eager' attention"
        with explained(f"`attention` must be 'eager', because {none}, but is {attention!r}"):
            model.set_attn_implementation(kind)
    return model if lora is None or lora is False else _with_adapters(model, lora)


def as_random_model(config: Any, run: Run, device: torch.device) -> torch.nn.Module:
    """Builds a model from a config on the device, with random weights, and with dtype and attention of ``run``."""
    return _from_config(config, run.dtype, "eager" if run.attention == "eager" else "sdpa", device)


def _from_config(
    config: Any, dtype: str | None, attention: str, device: torch.device | str = "meta"
) -> Any:
    config = copy.deepcopy(as_config(config))
    dtype = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    auto, failed = _auto_class(config), None
    for kind in (
        ("sdpa", "eager") if attention == "sdpa" else (attention,)
    ):  # some models have only eager attention
        try:
            with torch.device(device):
                return auto.from_config(
                    config, dtype=getattr(torch, dtype), attn_implementation=kind
                )
        except Exception as error:  # the model's own code may raise anything
            failed = error
    way_out = "pass a model instead"
    raise ConfigError(
        f"cannot build a model from a {type(config).__name__} ({failed!r:.200}); {way_out}"
    ) from failed


def is_encoder(config: Any) -> bool:
    """Returns whether a config is of an encoder such as BERT: every token attends to all others, nothing is decoded."""
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return type(config) in _transformers().MODEL_FOR_MASKED_LM_MAPPING and not decodes


def _auto_class(config: Any) -> Any:
    hf, kind = _transformers(), type(config)
    order = [hf.AutoModelForImageTextToText, hf.AutoModelForCausalLM]
    if getattr(config, "is_encoder_decoder", False):
        order = [
            hf.AutoModelForSpeechSeq2Seq,
            hf.AutoModelForSeq2SeqLM,
            hf.AutoModelForImageTextToText,
        ]
    if is_encoder(config):
        order = [hf.AutoModelForMaskedLM, *order]
    for auto in [*order, hf.AutoModel]:
        if kind in auto._model_mapping:
            return auto
    raise ConfigError(
        f"transformers has no model class for {kind.__name__}; pass a model instead of a config"
    )


def checkpoint_layers(model: Any) -> None:
    """Turns on gradient checkpointing, as it is on already (of every second layer, for example, or reentrant), else of all."""
    on = {module for module in model.modules() if getattr(module, "gradient_checkpointing", False)}
    own = next(
        (
            f
            for m in on
            if (f := getattr(getattr(m, "_gradient_checkpointing_func", None), "keywords", None))
        ),
        None,
    )
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )  # the older name
    enable(own or {"use_reentrant": False})
    for module in (m for m in model.modules() if on and hasattr(m, "gradient_checkpointing")):
        module.gradient_checkpointing = module in on


def stacks(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """Returns the model's stacks: lists of layers of one class, without lists inside other lists."""
    found: list[torch.nn.ModuleList] = []
    for module in (
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) >= ALIKE_LAYERS
    ):
        nested = any(module is inner for outer in found for inner in outer.modules())
        if not nested and len({type(layer) for layer in module}) == 1:
            found.append(module)
    return found


def make_inputs(
    model: torch.nn.Module,
    num_samples: int,
    longest: Mapping[str, int],
    with_labels: bool,
    device: str = "meta",
) -> dict[str, torch.Tensor]:
    """Returns arguments of a forward pass over ``num_samples`` samples, with a padding mask.

    Stream ``tokens`` is the input of the encoder or of the only stack; ``target`` is the decoder's output (None: as
    long). Inputs of speech models always have the full audio window."""
    config: Any = getattr(model, "config", None)
    with torch.device(device):
        ids = torch.zeros(num_samples, int(longest[primary(longest)]), dtype=torch.long)
        if getattr(model, "main_input_name", "input_ids") == "input_features":
            window = (num_samples, config.num_mel_bins, 2 * config.max_source_positions)
            inputs = {"input_features": torch.zeros(window, dtype=next(model.parameters()).dtype)}
        else:
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        decodes = bool(getattr(config, "is_encoder_decoder", False))
        words = (
            torch.zeros(num_samples, longest.get("target", ids.shape[1]), dtype=torch.long)
            if decodes
            else ids
        )
        if with_labels:
            classifies = (
                "ForSequenceClassification"
                in type(getattr(model, "get_base_model", lambda: model)()).__name__
            )
            inputs["labels"] = words[:, 0].clone() if classifies else words
            words = words.clone()  # the decoder reads a second tensor: the labels, shifted by one
        if decodes:
            inputs["decoder_input_ids"] = words
    accepted = inspect.signature(model.forward).parameters
    return {
        k: v
        for k, v in inputs.items()
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()) or k in accepted
    }


def describe(source: Any, mode: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model's Workload in this mode; ``known`` fields override."""
    dtype, attention = known.get("dtype"), known.get("attention")
    model: Any = (
        source
        if isinstance(source, torch.nn.Module)
        else as_meta_model(source, dtype=dtype, attention=attention)
    )
    config = getattr(model, "config", None)
    if config is None:
        way_out = "describe it yourself: Workload(mode=..., num_layers=..., ...)"
        raise ConfigError(f"the model of `model_or_config` has no transformers config; {way_out}")
    if mode == "generate" and is_encoder(config):
        raise ConfigError(
            f"`mode` 'generate' needs a model that decodes, but {type(config).__name__} is of an encoder"
        )
    own = getattr(source, "generation_config", source) if mode == "generate" else None
    odd = [
        f"{k}={v}"
        for k, usual in PREDICTED.items()
        if (v := getattr(own, k, usual)) not in (usual, None)
    ]
    if odd:
        warn_user(
            f"{', '.join(odd)} needs more memory than predicted (one sequence, growing cache); lower the limit"
        )
    return {"mode": mode, **architecture(config), **_run_as(model, mode), **known}


def architecture(config: Any) -> dict[str, Any]:
    """Returns the sizes in a config, which go by other names from one model family to the next."""
    two_stacks = bool(getattr(config, "is_encoder_decoder", False))
    text = (
        config.get_text_config(decoder=True)
        if hasattr(config, "get_text_config") and not two_stacks
        else config
    )

    def first(*names: str, decoder: tuple[str, ...] = ()) -> Any:
        return _first(text, *(decoder if two_stacks else ()), *names)

    hidden = first("hidden_size", "d_model", "n_embd")
    heads = first(
        "num_attention_heads", "num_heads", "n_head", decoder=("decoder_attention_heads",)
    )
    of_experts, widths = (
        first("moe_intermediate_size"),
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner"),
    )
    ffn = (
        of_experts
        or first(*widths, decoder=("decoder_ffn_dim",))
        or (4 * hidden if hidden else None)
    )
    layers = first(
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        decoder=("decoder_layers", "num_decoder_layers"),
    )
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "intermediate_size": ffn,
        "num_encoder_layers": first("encoder_layers", "num_layers", "num_hidden_layers")
        if two_stacks
        else 0,
        "num_kv_heads": 1
        if getattr(text, "multi_query", False)
        else first("num_key_value_heads") or heads,
        "head_size": first("head_dim", "d_kv") or (hidden // heads if hidden and heads else None),
        "experts_per_token": first("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
        or 1,
        "gated_mlp": bool(
            getattr(text, "is_gated_act", getattr(text, "model_type", "") not in _PLAIN_MLP)
        ),
        "dropout": any(
            isinstance(p, float) and p > 0
            for p in (getattr(text, name, None) for name in _DROPOUTS)
        ),
        "vocabulary_size": first("vocab_size") or 0,
        "fixed_tokens": _fixed_tokens(config),
        "score_bias": hasattr(config, "relative_attention_num_buckets")
        or getattr(config, "model_type", "") == "bloom",
        "encoder_decoder": two_stacks,
        "causal": not two_stacks and not is_encoder(config),
    }


_PLAIN_MLP = {
    "gpt2",
    "opt",
    "bert",
    "roberta",
    "bart",
    "marian",
    "m2m_100",
    "whisper",
    "gpt_neox",
    "bloom",
    "phi",
    "distilbert",
    "electra",
    "gpt_neo",
    "gptj",
    "falcon",
    "mpt",
    "codegen",
    "starcoder2",
    "deberta-v2",
}
# Part of an attention's name in transformers -> how the attention is traced.
_ATTENTION = {"eager": "eager", "flash": "flash", "varlen": "flash"}
_DROPOUTS = (
    "hidden_dropout_prob",
    "hidden_dropout",
    "resid_pdrop",
    "dropout",
    "dropout_rate",
    "mlp_dropout",
)


def _run_as(model: Any, mode: str) -> dict[str, Any]:
    """Returns the workload fields for how a model is run, read from its parameters and settings."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    total, count = (sum(p.numel() for p in part) for part in (parameters, trained))
    # Quantised parameters are integers, but the model computes in floating point.
    dtype = str(
        next((p.dtype for p in parameters if p.is_floating_point()), "float32")
    ).removeprefix("torch.")
    width = sum(p.numel() * p.element_size() for p in trained) / max(
        count, 1
    )  # with LoRA only adapters are trained
    stated = (
        getattr(model.config, "_attn_implementation", None) or ""
    )  # the one in use, not the one requested
    checkpoints = any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    settings = getattr(model, "generation_config", None)
    new_tokens = int(getattr(settings, "max_new_tokens", None) or 20)  # generate()'s own default
    return {
        "num_parameters": total,
        "trainable_share": count / max(total, 1) if mode == "train" else 0.0,
        "lm_head": getattr(model, "get_output_embeddings", lambda: None)() is not None,
        "dtype": dtype if dtype in ELEMENT_BYTES else "float32",
        "gradient_checkpointing": checkpoints,
        "attention": next((kind for name, kind in _ATTENTION.items() if name in stated), "sdpa"),
        "optimizer_bytes": 2.0 * width if mode == "train" else 0.0,
        "max_new_tokens": new_tokens if mode == "generate" else 0,
    }


def _first(config: Any, *names: str) -> Any:
    for name in names:
        with suppress(
            Exception
        ):  # transformers' configs raise errors for values that vary over layers
            if (value := getattr(config, name, None)) is not None:
                return value[0] if isinstance(value, (list, tuple)) else value
    return None


def _fixed_tokens(config: Any) -> int:
    if getattr(config, "model_type", "") == "whisper":
        return int(config.max_source_positions)
    vision: Any = getattr(config, "vision_config", None)
    known = hasattr(vision, "image_size") and hasattr(vision, "patch_size")
    return int((vision.image_size // vision.patch_size) ** 2) if known else 0


def _with_adapters(model: Any, lora: Any) -> Any:
    """Returns the model with adapters in float32: of this rank on every linear layer, or as a LoraConfig says."""
    import peft

    if not isinstance(lora, (int, peft.LoraConfig)):
        raise ConfigError(
            f"`lora` must be True, an int (the adapters' rank) or a LoraConfig of peft, but is {lora!r}"
        )
    rank: Any = 16 if lora is True else lora
    config: Any = (
        peft.LoraConfig(r=rank, target_modules="all-linear") if isinstance(lora, int) else lora
    )
    adapted: Any = peft.inject_adapter_in_model(config, model)
    for p in adapted.parameters():
        if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
            p.data = p.data.float()
    return adapted.to("meta")
