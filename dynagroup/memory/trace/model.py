"""Makes models and inputs without data, and reads a model's sizes from its config and parameters."""

import copy
import inspect
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from dynagroup.errors import ConfigError
from dynagroup.memory.phases import ELEMENT_BYTES, Attention, Run, needed
from dynagroup.memory.trace.audio import (
    convolutions,
    positions_of_input,
    reads_sound,
    sound_inputs,
)
from dynagroup.shapes import TARGET, primary
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
        way_out = "; give a model's name, or its folder"
        with explained(f"no config found for {value!r}", way_out=way_out):
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
    if run is not None:
        attention = run.attention
    requested = attention or getattr(source, "_attn_implementation", None)
    implementation = "eager" if requested == "eager" else "sdpa"
    if isinstance(source, torch.nn.Module):
        model = _copied(source)
        if dtype is not None:
            model = model.to(getattr(torch, dtype))
    else:
        model = _from_config(source, run.dtype if run else dtype, implementation)
    if attention is not None and hasattr(model, "set_attn_implementation"):
        with explained(
            f"`attention` must be 'eager', because {type(model).__name__} has only 'eager' attention, "
            f"but is {attention!r}"
        ):
            model.set_attn_implementation(implementation)
    if lora is None or lora is False:
        return model
    return _with_adapters(model, lora)


def _copied(source: torch.nn.Module) -> Any:
    """Copies a model to the meta device. Its modules run the forward pass of their class: one that a trainer has set on a
    module may run the source, or compute the loss in chunks whose number depends on the batch."""
    memo: dict[int, Any] = {}
    for p in source.parameters():
        empty = torch.empty_like(p, device="meta")
        memo[id(p)] = torch.nn.Parameter(empty, p.requires_grad)
    for buffer in source.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    model = copy.deepcopy(source, memo).to("meta")
    for module in model.modules():
        has_forward = type(module).forward is not torch.nn.Module.forward
        if has_forward:  # the wrapper that torch.compile makes has one of its own only
            vars(module).pop("forward", None)
    return model


def trained_dtype(model: torch.nn.Module) -> str:
    """Returns the dtype of the parameters that are trained."""
    for p in model.parameters():
        if p.requires_grad:
            return str(p.dtype).removeprefix("torch.")
    return "float32"


def base_model(model: Any) -> Any:
    """Returns the model without the wrapper that peft puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_config(model: Any) -> Any:
    """Returns the config of the model's decoder, or of its only stack; None: the model has no config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def num_positions(model: Any) -> int | None:
    """Returns the tokens of the longest sample that the model accepts; None: unknown."""
    return positions_of(text_config(model))


def positions_of(config: Any, name: str = "max_position_embeddings") -> int | None:
    """Returns how many positions a config states; None: none, or -1 for any number (XLNet)."""
    num_positions = getattr(config, name, None)
    return num_positions if num_positions and num_positions > 0 else None


def as_random_model(config: Any, run: Run, device: torch.device) -> torch.nn.Module:
    """Builds a model from a config on the device, with random weights, and with dtype and attention of ``run``."""
    implementation = "eager" if run.attention == "eager" else "sdpa"
    return _from_config(config, run.dtype, implementation, device)


def _from_config(
    config: Any, dtype: str | None, implementation: str, device: torch.device | str = "meta"
) -> Any:
    config = copy.deepcopy(as_config(config))
    if dtype is None:
        dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    auto_class = _auto_class(config)
    error: Exception | None = None
    # Some models have only eager attention.
    for name in dict.fromkeys((implementation, "eager")):
        try:
            with torch.device(device):
                model = auto_class.from_config(
                    config, dtype=getattr(torch, dtype), attn_implementation=name
                )
            # Parameters made by torch.FloatTensor (XLNet) are on the CPU all the same.
            return model.to(device)
        except Exception as caught:  # the model's own code may raise anything
            error = caught
    raise ConfigError(
        f"cannot build a model from a {type(config).__name__} ({error!r:.200}); "
        "pass a model instead"
    ) from error


def is_encoder(config: Any) -> bool:
    """Returns whether a config is of an encoder such as BERT or wav2vec2: every token attends to all others, nothing is
    decoded."""
    hf = _transformers()
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    encodes = (
        type(config) in hf.MODEL_FOR_MASKED_LM_MAPPING or type(config) in hf.MODEL_FOR_CTC_MAPPING
    )
    return encodes and not decodes


def _auto_class(config: Any) -> Any:
    hf = _transformers()
    if is_encoder(config):
        classes = [
            hf.AutoModelForMaskedLM,
            hf.AutoModelForCTC,
            hf.AutoModelForImageTextToText,
            hf.AutoModelForCausalLM,
        ]
    elif getattr(config, "is_encoder_decoder", False):
        classes = [
            hf.AutoModelForSpeechSeq2Seq,
            hf.AutoModelForSeq2SeqLM,
            hf.AutoModelForImageTextToText,
        ]
    else:
        classes = [hf.AutoModelForImageTextToText, hf.AutoModelForCausalLM]
    for auto_class in [*classes, hf.AutoModel]:
        if type(config) in auto_class._model_mapping:
            return auto_class
    raise ConfigError(
        f"transformers has no model class for {type(config).__name__}; "
        "pass a model instead of a config"
    )


def checkpoint_layers(model: Any) -> None:
    """Turns on gradient checkpointing, as it is on already (of every second layer, for example, or reentrant), else of all."""
    checkpointed = set()
    settings = None
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            checkpointed.add(module)
            function = getattr(module, "_gradient_checkpointing_func", None)
            settings = settings or getattr(function, "keywords", None)
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable  # the older name
    enable(settings or {"use_reentrant": False})
    if not checkpointed:
        return
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = module in checkpointed


def stacks(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """Returns the model's stacks: lists of layers of one class, without lists inside other lists."""
    outer_stacks: list[torch.nn.ModuleList] = []
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) < ALIKE_LAYERS:
            continue
        is_of_one_class = len({type(layer) for layer in module}) == 1
        if is_of_one_class and module not in inside:
            outer_stacks.append(module)
            inside.update(module.modules())
    return outer_stacks


def make_inputs(
    model: torch.nn.Module,
    num_samples: int,
    longest: Mapping[str, int],
    with_labels: bool,
    device: str = "meta",
) -> dict[str, torch.Tensor]:
    """Returns arguments of a forward pass over ``num_samples`` samples, with a padding mask.

    Stream ``tokens`` is the input of the encoder or of the only stack; ``target`` is the decoder's output (None: as
    long). The labels of CTC are as long as its output, the most that it can align."""
    config: Any = getattr(model, "config", None)
    num_tokens = int(longest[primary(longest)])
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    with torch.device(device):
        if reads_sound(model):
            inputs = sound_inputs(model, num_samples, num_tokens)
            num_positions = positions_of_input(convolutions(config), num_tokens)
            words = torch.ones(num_samples, num_positions, dtype=torch.long)  # 0 is no label of CTC
        else:
            words = torch.zeros(num_samples, num_tokens, dtype=torch.long)
            inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
        if is_encoder_decoder:
            num_target_tokens = longest.get(TARGET, num_tokens)
            words = torch.zeros(num_samples, num_target_tokens, dtype=torch.long)
        if with_labels:
            is_classifier = "ForSequenceClassification" in type(base_model(model)).__name__
            inputs["labels"] = words[:, 0].clone() if is_classifier else words
            words = words.clone()  # the decoder reads a second tensor: the labels, shifted by one
        if is_encoder_decoder:
            inputs["decoder_input_ids"] = words
    accepted = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return inputs
    return {name: tensor for name, tensor in inputs.items() if name in accepted}


def describe(source: Any, mode: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model's Workload in this mode; ``known`` fields override."""
    model: Any = source
    if not isinstance(source, torch.nn.Module):
        model = as_meta_model(source, dtype=known.get("dtype"), attention=known.get("attention"))
    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(
            "the model of `model_or_config` has no transformers config; "
            "describe it yourself: Workload(mode=..., num_layers=..., ...)"
        )
    if mode == "generate":
        if is_encoder(config):
            raise ConfigError(
                f"`mode` 'generate' needs a model that decodes, but {type(config).__name__} is of an encoder"
            )
        _warn_of_generation(getattr(source, "generation_config", source))
    return {"mode": mode, **architecture(config), **_run_as(model, mode), **known}


def _warn_of_generation(settings: Any) -> None:
    """Warns if a generation config, or a config, has settings that need more memory than is predicted."""
    unusual = []
    for name, usual in PREDICTED.items():
        value = getattr(settings, name, None)
        if value is not None and value != usual:
            unusual.append(f"{name}={value}")
    if unusual:
        warn_user(
            f"{', '.join(unusual)} needs more memory than predicted (one sequence, growing cache); "
            "lower the limit"
        )


def architecture(config: Any) -> dict[str, Any]:
    """Returns the sizes in a config, which go by other names from one model family to the next."""
    two_stacks = bool(getattr(config, "is_encoder_decoder", False))
    text = config
    if hasattr(config, "get_text_config") and not two_stacks:
        text = config.get_text_config(decoder=True)
    decoder = DECODER_SIZES if two_stacks else {}
    hidden = _first(text, *SIZES["hidden_size"])
    num_heads = _first(text, *decoder.get("num_heads", ()), *SIZES["num_heads"])
    names = (*decoder.get("intermediate_size", ()), *SIZES["intermediate_size"])
    intermediate = _first(text, "moe_intermediate_size") or _first(text, *names)
    head_size = _first(text, "head_dim", "d_kv")
    if hidden:
        intermediate = intermediate or 4 * hidden
        head_size = head_size or (hidden // num_heads if num_heads else None)
    num_kv_heads = _first(text, "num_key_value_heads") or num_heads
    if getattr(text, "multi_query", False):
        num_kv_heads = 1
    num_encoder_layers = 0
    if two_stacks:
        num_encoder_layers = _first(text, "encoder_layers", "num_layers", "num_hidden_layers")
    is_gated = getattr(text, "is_gated_act", getattr(text, "model_type", "") not in _PLAIN_MLP)
    is_bloom = getattr(config, "model_type", "") == "bloom"
    return {
        "num_layers": _first(text, *decoder.get("num_layers", ()), *SIZES["num_layers"]),
        "num_encoder_layers": num_encoder_layers,
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "intermediate_size": intermediate,
        "experts_per_token": _first(text, *SIZES["experts_per_token"]) or 1,
        "gated_mlp": bool(is_gated),
        "dropout": _has_dropout(text),
        "vocabulary_size": _first(text, "vocab_size") or 0,
        "fixed_tokens": _fixed_tokens(config),
        "score_bias": is_bloom or hasattr(config, "relative_attention_num_buckets"),
        "encoder_decoder": two_stacks,
        "causal": not two_stacks and not is_encoder(config),
    }


# Names of a size in configs, by field of a workload.
SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "num_heads": ("num_attention_heads", "num_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "d_ff", "n_inner"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
}
# The same in encoder-decoders.
DECODER_SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("decoder_layers", "num_decoder_layers"),
    "num_heads": ("decoder_attention_heads",),
    "intermediate_size": ("decoder_ffn_dim",),
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
    num_parameters = 0
    num_trained = 0
    trained_bytes = 0
    for p in model.parameters():
        num_parameters += p.numel()
        if p.requires_grad:
            num_trained += p.numel()
            trained_bytes += p.numel() * p.element_size()
    fields: dict[str, Any] = {
        "num_parameters": num_parameters,
        "trainable_share": 0.0,
        "lm_head": getattr(model, "get_output_embeddings", lambda: None)() is not None,
        "dtype": _dtype_of(model),
        "gradient_checkpointing": _is_checkpointed(model),
        "attention": _attention_of(model.config),
        "optimizer_bytes": 0.0,
        "max_new_tokens": 0,
    }
    if mode == "train":
        fields["trainable_share"] = num_trained / max(num_parameters, 1)
        # AdamW has two values for each parameter; with LoRA only adapters are trained.
        fields["optimizer_bytes"] = 2.0 * trained_bytes / max(num_trained, 1)
    if mode == "generate":
        settings = getattr(model, "generation_config", None)
        # generate()'s own default is 20.
        fields["max_new_tokens"] = int(getattr(settings, "max_new_tokens", None) or 20)
    return fields


def _dtype_of(model: torch.nn.Module) -> str:
    """Returns the dtype in which a model computes; quantised parameters are integers."""
    for p in model.parameters():
        if p.is_floating_point():
            name = str(p.dtype).removeprefix("torch.")
            return name if name in ELEMENT_BYTES else "float32"
    return "float32"


def _is_checkpointed(model: torch.nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _attention_of(config: Any) -> str:
    """Returns the attention in use, which may differ from the one that was requested."""
    implementation = getattr(config, "_attn_implementation", None) or ""
    for part, attention in _ATTENTION.items():
        if part in implementation:
            return attention
    return "sdpa"


def _first(config: Any, *names: str) -> Any:
    """Returns the first of these values that the config has; None: it has none. Of a list, its first value."""
    for name in names:
        value = None
        with suppress(Exception):  # configs of transformers raise for values that vary over layers
            value = getattr(config, name, None)
        if value is not None:
            return value[0] if isinstance(value, (list, tuple)) else value
    return None


def _has_dropout(config: Any) -> bool:
    rates = [getattr(config, name, None) for name in _DROPOUTS]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _fixed_tokens(config: Any) -> int:
    if getattr(config, "model_type", "") == "whisper":
        return int(config.max_source_positions)
    vision: Any = getattr(config, "vision_config", None)
    if hasattr(vision, "image_size") and hasattr(vision, "patch_size"):
        return int((vision.image_size // vision.patch_size) ** 2)
    return 0


def _with_adapters(model: Any, lora: Any) -> Any:
    """Returns the model with adapters in float32: of this rank on every linear layer, or as a LoraConfig says."""
    import peft

    config = lora
    if isinstance(lora, int):
        rank = 16 if lora is True else lora
        config = peft.LoraConfig(r=rank, target_modules="all-linear")
    if not isinstance(config, peft.LoraConfig):
        raise ConfigError(
            "`lora` must be True, an int (the adapters' rank) or a LoraConfig of peft, "
            f"but is {lora!r}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a setting that peft corrects itself
        adapted = peft.inject_adapter_in_model(config, model)
    for p in adapted.parameters():
        if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
            p.data = p.data.float()
    return adapted.to("meta")
