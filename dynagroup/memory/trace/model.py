"""Makes models and inputs without data, and reads a model's sizes from its config and parameters."""

import copy
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from dynagroup.errors import ConfigError
from dynagroup.memory.phases import Attention, Run, needed
from dynagroup.memory.trace.audio import (
    convolutions,
    positions_of_input,
    reads_sound,
    setting_of,
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
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
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
    *,
    dtype: str | None = None,
    attention: Attention | None = None,
    lora: Any = None,
) -> Any:
    """Copies a model to the meta device, or builds one there from a config; no weights are allocated or read. ``dtype`` and
    ``attention``: None means the source's. ``lora``: as of :meth:`TracedMemory.of`."""
    if isinstance(source, torch.nn.Module):
        model = _copied(source)
        if dtype is not None and _described_dtype(model) != DTYPES[dtype]:
            model = model.to(DTYPES[dtype])
    else:
        model = _from_config(source, dtype, attention)
    if attention is not None and hasattr(model, "set_attn_implementation"):
        with explained(
            f"`attention` must be 'eager', because {type(model).__name__} has only 'eager' attention, "
            f"but is {attention!r}"
        ):
            model.set_attn_implementation(_implementation(attention))
    if lora is None or lora is False:
        return model
    return _with_adapters(model, lora)


def _implementation(attention: str | None) -> str:
    return "eager" if attention == "eager" else "sdpa"


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


def has_two_stacks(config: object) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def text_config(config: Any) -> Any:
    """Returns the config of a model's decoder, or of its only stack."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def positions_of(config: object, name: str = "max_position_embeddings") -> int | None:
    """Returns how many positions a config states; None: none, or -1 for any number (XLNet)."""
    num_positions = setting_of(config, name)
    return num_positions if num_positions and num_positions > 0 else None


def as_random_model(config: Any, run: Run, device: torch.device) -> torch.nn.Module:
    """Builds a model from a config on the device, with random weights, and with dtype and attention of ``run``."""
    return _from_config(config, run.dtype, _implementation(run.attention), device)


def _from_config(
    config: Any, dtype: str | None, attention: str | None, device: torch.device | str = "meta"
) -> Any:
    config = copy.deepcopy(as_config(config))
    dtype = dtype or config.dtype or "float32"
    implementation = _implementation(attention or config._attn_implementation)
    auto_class = _auto_class(config)
    error: Exception | None = None
    # Some models have only eager attention.
    for name in dict.fromkeys((implementation, "eager")):
        try:
            with torch.device(device):
                model = auto_class.from_config(config, dtype=dtype, attn_implementation=name)
            # Parameters made by torch.FloatTensor (XLNet) are on the CPU all the same.
            return model.to(device)
        except Exception as caught:  # the model's own code may raise anything
            error = caught
    raise ConfigError(
        f"cannot build a model from a {type(config).__name__} ({error!r:.200}); "
        "pass a model instead"
    ) from error


def is_encoder(config: object) -> bool:
    """Returns whether a config is of an encoder such as BERT or wav2vec2: every token attends to all others, nothing is
    decoded."""
    hf = _transformers()
    decodes = setting_of(config, "is_decoder") or has_two_stacks(config)
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
    elif has_two_stacks(config):
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


def modules_that_checkpoint(model: torch.nn.Module) -> list[Any]:
    """Returns the modules that are run again in the backward pass, so that they keep only their input."""
    return [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]


def checkpoint_settings(module: object) -> Mapping[str, Any]:
    """Returns the arguments of ``torch.utils.checkpoint`` with which a module is run again."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    return getattr(function, "keywords", {})


def checkpoint_layers(model: Any) -> None:
    """Turns on gradient checkpointing, as it is on already (of every second layer, for example, or reentrant), else of all."""
    modules = modules_that_checkpoint(model)
    settings: Mapping[str, Any] = {}
    for module in modules:
        settings = settings or checkpoint_settings(module)
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable  # the older name
    enable(settings or {"use_reentrant": False})
    if not modules:
        return
    for module in modules_that_checkpoint(model):
        module.gradient_checkpointing = module in modules


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
    config: Any = model.config
    num_tokens = int(longest[primary(longest)])
    is_encoder_decoder = has_two_stacks(config)
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
    return _accepted_by(model, inputs)


def packed_inputs(
    model: torch.nn.Module,
    num_samples: int,
    longest: Mapping[str, int],
    *,
    with_labels: bool,
    with_borders: bool,
    device: str,
) -> dict[str, Any]:
    """Returns arguments of a forward pass over samples of one length that lie end to end in one row: ids, and the place of
    each token in its sample. ``with_borders``: also where samples begin, as attention without masks needs it."""
    length = int(longest[primary(longest)])
    with torch.device(device):
        ids = torch.zeros(1, num_samples * length, dtype=torch.long)
        places = torch.arange(length).repeat(num_samples).unsqueeze(0)
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": places}
        if with_labels:
            inputs["labels"] = ids
        if with_borders:
            borders = length * torch.arange(num_samples + 1, dtype=torch.int32)
            inputs.update(cu_seq_lens_q=borders, cu_seq_lens_k=borders)
            inputs.update(max_length_q=length, max_length_k=length)
    return _accepted_by(model, inputs)


def _accepted_by(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns those of the inputs that the model's forward pass accepts."""
    accepted = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in accepted}


def describe(model: Any, mode: str) -> dict[str, Any]:
    """Returns the fields of a model's Workload in this mode."""
    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(
            "the model of `model_or_config` has no transformers config; "
            "describe it yourself: Workload(mode=..., num_layers=..., ...)"
        )
    settings = getattr(model, "generation_config", None)
    if mode == "generate":
        if is_encoder(config):
            raise ConfigError(
                f"`mode` 'generate' needs a model that decodes, but {type(config).__name__} is of an encoder"
            )
        _warn_of_generation(settings)
    return {"mode": mode, **architecture(config), **_run_as(model, mode, settings)}


def _warn_of_generation(settings: object) -> None:
    """Warns if a generation config has settings that need more memory than is predicted."""
    unusual = []
    for name, usual in PREDICTED.items():
        value = setting_of(settings, name)
        if value is not None and value != usual:
            unusual.append(f"{name}={value}")
    if unusual:
        warn_user(
            f"{', '.join(unusual)} needs more memory than predicted (one sequence, growing cache); "
            "lower the limit"
        )


def architecture(config: object) -> dict[str, Any]:
    """Returns the sizes in a config, which go by other names from one model family to the next."""
    two_stacks = has_two_stacks(config)
    text = config if two_stacks else text_config(config)
    decoder = DECODER_SIZES if two_stacks else {}
    sizes: dict[str, Any] = {}
    for name, names in SIZES.items():
        sizes[name] = _size(text, *decoder.get(name, ()), *names)
    hidden = sizes["hidden_size"]
    num_heads = sizes["num_heads"]
    if hidden and num_heads:
        sizes["head_size"] = sizes["head_size"] or hidden // num_heads
    if hidden:
        sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * hidden
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or num_heads
    if setting_of(text, "multi_query"):
        sizes["num_kv_heads"] = 1
    sizes["num_encoder_layers"] = _size(text, *ENCODER_LAYERS) if two_stacks else 0
    sizes["experts_per_token"] = sizes["experts_per_token"] or 1
    sizes["vocabulary_size"] = sizes["vocabulary_size"] or 0
    sizes["fixed_tokens"] = _fixed_tokens(config)
    sizes["gated_mlp"] = _is_gated(text)
    sizes["dropout"] = _has_dropout(text)
    sizes["score_bias"] = _has_score_bias(config)
    sizes["encoder_decoder"] = two_stacks
    sizes["causal"] = not two_stacks and not is_encoder(config)
    return sizes


# Names of a size in configs, by field of a workload.
SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "num_heads": ("num_attention_heads", "num_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim", "d_kv"),
    "intermediate_size": (
        "moe_intermediate_size",
        "intermediate_size",
        "ffn_dim",
        "d_ff",
        "n_inner",
    ),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    "vocabulary_size": ("vocab_size",),
}
# The same in encoder-decoders.
DECODER_SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("decoder_layers", "num_decoder_layers"),
    "num_heads": ("decoder_attention_heads",),
    "intermediate_size": ("moe_intermediate_size", "decoder_ffn_dim"),
}
ENCODER_LAYERS = ("encoder_layers", "num_layers", "num_hidden_layers")
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


def _run_as(model: Any, mode: str, settings: object) -> dict[str, Any]:
    """Returns the workload fields for how a model is run, read from its parameters and its generation config."""
    head = getattr(model, "get_output_embeddings", None)
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
        "lm_head": head is not None and head() is not None,
        "dtype": str(_described_dtype(model)).removeprefix("torch."),
        "gradient_checkpointing": bool(modules_that_checkpoint(model)),
        "attention": _attention_of(model.config),
        "optimizer_bytes": 0.0,
        "max_new_tokens": 0,
    }
    if mode == "train":
        fields["trainable_share"] = num_trained / max(num_parameters, 1)
        # AdamW has two values for each parameter; with LoRA only adapters are trained.
        fields["optimizer_bytes"] = 2.0 * trained_bytes / max(num_trained, 1)
    if mode == "generate":
        # generate()'s own default is 20.
        fields["max_new_tokens"] = setting_of(settings, "max_new_tokens") or 20
    return fields


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Returns the dtype in which a model computes; quantised parameters are integers."""
    for p in model.parameters():
        if p.is_floating_point():
            return p.dtype
    return torch.float32


def _described_dtype(model: torch.nn.Module) -> torch.dtype:
    """Returns the dtype that a workload names: float32 for dtypes without a name, such as float64."""
    dtype = _dtype_of(model)
    return dtype if dtype in DTYPES.values() else torch.float32


def _attention_of(config: object) -> str:
    """Returns the attention in use, which may differ from the one that was requested."""
    implementation = setting_of(config, "_attn_implementation") or ""
    for part, attention in _ATTENTION.items():
        if part in implementation:
            return attention
    return "sdpa"


def _size(config: object, *names: str) -> Any:
    """Returns the first of these sizes that is not 0; of a list, the size of the first layer. None: there is none."""
    for name in names:
        value = setting_of(config, name)
        if value:
            return value[0] if isinstance(value, (list, tuple)) else value
    return None


def _is_gated(config: object) -> bool:
    is_gated = setting_of(config, "is_gated_act")
    if is_gated is None:
        return setting_of(config, "model_type") not in _PLAIN_MLP
    return bool(is_gated)


def _has_dropout(config: object) -> bool:
    rates = [setting_of(config, name) for name in _DROPOUTS]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _has_score_bias(config: object) -> bool:
    has_buckets = setting_of(config, "relative_attention_num_buckets") is not None
    return has_buckets or setting_of(config, "model_type") == "bloom"


def _fixed_tokens(config: Any) -> int:
    if setting_of(config, "model_type") == "whisper":
        return int(config.max_source_positions)
    vision = setting_of(config, "vision_config")
    image_size = _size(vision, "image_size")
    patch_size = _size(vision, "patch_size")
    return int((image_size // patch_size) ** 2) if image_size and patch_size else 0


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
