"""Runs, without data, what one batch does on a device: a training step, a forward pass, or prefill and decoding."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from dynagroup.errors import ConfigError
from dynagroup.memory.phases import ELEMENT_BYTES, MakeInputs, Run
from dynagroup.memory.trace.audio import reads_sound
from dynagroup.memory.trace.kernels import CudaKernels, LiveBytes, rounded_up
from dynagroup.memory.trace.model import (
    DTYPES,
    base_model,
    checkpoint_layers,
    checkpoint_settings,
    is_encoder,
    make_inputs,
    modules_that_checkpoint,
    stacks,
)
from dynagroup.shapes import TARGET, TOKENS, primary

# Elements in a bucket of gradients; default of DeepSpeed's `reduce_bucket_size`.
REDUCE_BUCKET = 500_000_000
# Values of a config's `layer_types` with a mask of their own.
MASKED = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
# What is sharded over ranks: optimizer state (1), also gradients (2), also parameters (3).
_STAGES = {None: 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


@contextmanager
def own_settings() -> Iterator[None]:
    """Runs models with gradients and without compilation, whatever the caller has set."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def prepare(model: Any, workload: Run) -> torch.nn.Module:
    """Prepares the model on the meta device for the workload: its mode and dtype, and gradients of earlier micro-batches."""
    is_training = workload.mode == "train"
    model.train(is_training)
    if is_training:
        _without_chance(model)
        model.config.use_cache = False
        if workload.gradient_checkpointing:
            checkpoint_layers(model)
            _trace_checkpoints(model, workload)
        else:
            for module in modules_that_checkpoint(model):
                module.gradient_checkpointing = False
    if workload.autocast is not None and _shares_parameters(workload):
        model = model.to(DTYPES[workload.autocast])  # ranks gather parameters in lower precision
    for p in _trained(model, workload):
        p.grad = torch.empty_like(p)
    return model


def _without_chance(model: Any) -> None:
    """Makes a model of speech run all its layers (no LayerDrop), on all its frames (no SpecAugment): which of them it
    leaves out depends on random values, and the most memory is needed if it leaves none out."""
    model.config.apply_spec_augment = False
    for owner in (model.config, *model.modules()):
        if hasattr(owner, "layerdrop"):
            owner.layerdrop = 0.0


def _trace_checkpoints(model: Any, workload: Run) -> None:
    """Makes layers that are run again in the backward pass run with CUDA's kernels there, too: the autograd engine calls
    them outside of all function modes."""
    for module in modules_that_checkpoint(model):
        settings = {"use_reentrant": True, **checkpoint_settings(module)}
        run_twice = partial(checkpoint, **settings)
        module._gradient_checkpointing_func = _checkpointing(run_twice, _autocast(workload))


def _checkpointing(
    run_twice: Callable[..., Any], autocast: torch.dtype | None
) -> Callable[..., Any]:
    def checkpointed(layer: Callable[..., Any], *inputs: Any) -> Any:
        num_calls = count()

        def run(*inputs: Any) -> Any:
            is_first = next(num_calls) == 0
            with nullcontext() if is_first else CudaKernels(autocast):
                return layer(*inputs)

        return run_twice(run, *inputs)

    return checkpointed


def _shares_parameters(workload: Run) -> bool:
    return _STAGES[workload.sharding] == 3 and (workload.num_ranks or 1) > 1


def _autocast(workload: Run) -> torch.dtype | None:
    """Returns the dtype of autocast; None without autocast, or if sharded parameters are gathered in that dtype."""
    if workload.autocast is None or _shares_parameters(workload):
        return None
    return DTYPES[workload.autocast]


def static_bytes(model: torch.nn.Module, workload: Run) -> int:
    """Returns bytes that do not depend on the batch: parameters, buffers; for training gradients and optimizer. With
    sharding: this rank's part of these, plus what it gathers for a short time: a bucket of gradients ("zero1",
    "zero2"), or parameters outside the layers, two layers, and the gradients of one layer ("zero3", "fsdp")."""
    kept = _blocks(model.buffers()) + kept_bytes(model, workload)
    if _STAGES[workload.sharding] == 3:
        return kept + (_gathered(model, workload) if _shares_parameters(workload) else 0)
    if workload.sharding is None:
        return kept
    trained = _trained(model, workload)
    gradient_bytes = _blocks(trained)
    if workload.sharding == "ddp":
        return kept + gradient_bytes
    widest = max((p.element_size() for p in trained), default=0)
    return kept + min(gradient_bytes, REDUCE_BUCKET * widest)


def kept_bytes(model: torch.nn.Module, workload: Run) -> int:
    """Returns the bytes of this rank's part of the parameters and, for training, of gradients and optimizer state."""
    trained = _trained(model, workload)
    state_bytes = sum(rounded_up(int(p.numel() * workload.optimizer_bytes)) for p in trained)
    # Higher ZeRO stages shard more of them, in this order.
    sizes = [state_bytes, _blocks(trained), _blocks(model.parameters())]
    num_sharded = _STAGES[workload.sharding]
    num_ranks = workload.num_ranks or 1
    sharded = sum(-(-size // num_ranks) for size in sizes[:num_sharded])
    return sharded + sum(sizes[num_sharded:])


def _gathered(model: torch.nn.Module, workload: Run) -> int:
    """Returns the bytes of parameters and gradients that a rank has whole while one layer runs."""
    inside: set[torch.nn.Parameter] = set()
    largest = 0
    largest_trained = 0
    for stack in stacks(model):
        for layer in stack:
            parameters = list(layer.parameters())
            inside.update(parameters)
            trained = [p for p in parameters if p.requires_grad]
            largest = max(largest, _num_elements(parameters))
            largest_trained = max(largest_trained, _num_elements(trained))
    elements = _num_elements(set(model.parameters()) - inside) + 2 * largest
    if workload.mode == "train":
        elements += largest_trained
    return ELEMENT_BYTES[workload.autocast or workload.dtype or "float32"] * elements


def _num_elements(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _trained(model: torch.nn.Module, workload: Run) -> list[torch.nn.Parameter]:
    if workload.mode != "train":
        return []
    return [p for p in model.parameters() if p.requires_grad]


def _blocks(tensors: Iterable[torch.Tensor]) -> int:
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(rounded_up(tensor.nbytes) for tensor in distinct.values())


def trace(
    model: torch.nn.Module,
    workload: Run,
    num_samples: int,
    longest: Mapping[str, int],
    *,
    inputs: MakeInputs | None = None,
    smooth: bool = False,
    watch: Callable[[LiveBytes], AbstractContextManager[None]] | None = None,
) -> LiveBytes:
    """Runs one batch on the meta device; returns the bytes alive during the run, without static memory.

    ``smooth``: see :class:`LiveBytes`. ``watch``: makes a context in which the batch runs."""
    apart = [*model.buffers(), *model.parameters()]
    apart += [p.grad for p in model.parameters() if p.grad is not None]
    tracer = LiveBytes(apart, smooth)
    kernels = CudaKernels(_autocast(workload), padded=workload.attention != "flash")
    watching = nullcontext() if watch is None else watch(tracer)
    with torch.device("meta"), watching, kernels, tracer:
        if inputs is None:
            batch = _batch(model, workload, num_samples, longest)
            masks = _packed_masks(model, workload, batch)  # all are alive during the run
            if masks:
                batch["attention_mask"] = masks[0]
        else:
            batch = inputs(model, num_samples, longest)
        if workload.mode == "generate":
            _generate(model, batch, workload.max_new_tokens or 1, tracer)
        else:
            _run(model, batch, workload, kernels, tracer)
    return tracer


def _run(
    model: Any, batch: dict[str, Any], workload: Run, kernels: CudaKernels, tracer: LiveBytes
) -> None:
    """Runs a forward pass, for training also a backward pass."""
    is_training = workload.mode == "train"
    with torch.set_grad_enabled(is_training):
        outputs = model(**batch)
    if not is_training:
        return
    loss = outputs["loss"]
    if workload.keeps_outputs is False:
        del outputs
    tracer.mark("forward_ends")
    kernels.end_forward()
    torch.autograd.backward(loss)


def _batch(
    model: Any, workload: Run, num_samples: int, longest: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    with_labels = workload.mode == "train"
    if workload.layout == "packed":
        if reads_sound(model):
            raise ConfigError(
                "`layout` 'packed' is for texts, but the model reads sound; leave it out"
            )
        num_tokens = num_samples * longest[primary(longest)]
        batch = make_inputs(model, 1, {TOKENS: num_tokens}, with_labels)
        _without_mask(model, batch)
        if is_encoder(model.config):
            # Packed rows may be longer than the positions that a model has.
            for name in {"position_ids", "token_type_ids"} & _accepted(model):
                batch[name] = torch.zeros_like(batch["input_ids"])
        return batch
    if workload.mode == "generate" and workload.encoder_decoder:
        longest = {**longest, TARGET: 1}
    batch = make_inputs(model, num_samples, longest, with_labels)
    if workload.attention == "flash":
        _without_mask(model, batch)
    return batch


def _packed_masks(
    model: Any, workload: Run, batch: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the masks between packed samples: one for each way in which the model's layers attend."""
    if workload.layout != "packed" or workload.attention == "flash":
        return []
    num_tokens = batch["input_ids"].shape[1]
    dtype = torch.bool if workload.attention == "sdpa" else next(model.parameters()).dtype
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    num_masks = max(len(MASKED.intersection(layer_types)), 1)
    return [torch.ones(1, 1, num_tokens, num_tokens, dtype=dtype) for _ in range(num_masks)]


def _without_mask(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    batch.pop("attention_mask", None)
    for module in model.modules():
        # It would look for padding among ids, and the meta device has none.
        vars(module)["warn_if_padding_and_no_attention_mask"] = _warn_of_nothing


def _warn_of_nothing(*_: Any) -> None: ...


def _accepted(model: Any) -> set[str]:
    """Returns the names of the arguments that the model's forward pass accepts, adapters aside."""
    return set(inspect.signature(base_model(model).forward).parameters)


@torch.no_grad()
def _generate(
    model: Any, batch: dict[str, torch.Tensor], new_tokens: int, tracer: LiveBytes
) -> None:
    """Runs prefill and the last decoding step, whose cache contains the input and all new tokens but one."""
    from transformers import DynamicCache, EncoderDecoderCache

    two_stacks = model.config.is_encoder_decoder
    config = model.config.get_text_config(decoder=True)
    own_cache = DynamicCache(config=config)
    cache: Any = own_cache
    if two_stacks:
        cache = EncoderDecoderCache(own_cache, DynamicCache(config=config))
    accepted = set() if two_stacks else _accepted(model)
    settings: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in accepted:
        settings["logits_to_keep"] = 1
    if "position_ids" in accepted and "input_ids" in batch:
        # As generate() does; rotary embeddings have as many rows.
        batch.setdefault("position_ids", torch.zeros_like(batch["input_ids"]))
    scores, encoded = _decoded(model, batch | settings)
    words = scores.argmax(-1, keepdim=True)
    num_cached = int(cache.get_seq_length()) + new_tokens - 1
    tracer.mark("prefilled")
    _stretch(own_cache, num_cached)
    tracer.mark("stretched")
    last = dict(settings)
    if two_stacks:
        last["encoder_outputs"] = (encoded,)
        last["decoder_input_ids"] = words
    else:
        last["input_ids"] = words
        if "position_ids" in accepted:
            last["position_ids"] = torch.zeros_like(words)
    if "attention_mask" in batch:
        last["attention_mask"] = batch["attention_mask"]
        if not two_stacks:
            last["attention_mask"] = torch.ones(len(words), num_cached + 1, dtype=torch.long)
    # Beside the scores before, which are still alive; sampling makes more copies.
    _last_scores, _ = _decoded(model, last)


def _decoded(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Returns the last position's scores in float32, of which generate() keeps a copy until the next ones, and what the
    encoder wrote."""
    outputs = model(**inputs)
    scores = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32)
    return scores, getattr(outputs, "encoder_last_hidden_state", None)


def _stretch(cache: Any, num_tokens: int) -> None:
    """Gives the cache the size that it has with so many tokens."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        window = getattr(layer, "sliding_window", None)
        num_kept = num_tokens if window is None else min(num_tokens, window - 1)
        for name in ("keys", "values"):
            *sides, _, size = getattr(layer, name).shape
            setattr(layer, name, None)  # freed before the new tensor is allocated
            stretched = torch.empty(*sides, num_kept, size, dtype=layer.dtype, device="meta")
            setattr(layer, name, stretched)
        if window is not None:
            layer.cumulative_length = num_tokens
