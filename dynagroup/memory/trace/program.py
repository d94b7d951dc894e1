"""What one batch does on a device: a training step in mid-accumulation, a forward pass, or prefill and the last decode step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from dynagroup.memory.run import ELEMENT_BYTES, Run
from dynagroup.memory.trace.kernels import BLOCK, CudaKernels, LiveBytes
from dynagroup.memory.trace.model import checkpoint_layers, make_inputs, stacks
from dynagroup.shapes import TARGET, TOKENS

__all__ = ["MakeInputs", "as_gathered", "kept_bytes", "prepare", "static_bytes", "trace"]

MakeInputs: TypeAlias = Callable[[torch.nn.Module, int, Mapping[str, int]], dict[str, torch.Tensor]]


def prepare(model: torch.nn.Module, workload: Run, copies_masks: bool | None = None) -> torch.nn.Module:
    """The meta model in the state that the workload runs it in, gradients of earlier steps included.

    ``copies_masks``: as in :func:`trace`, for what checkpointing runs again.
    """
    training = workload.mode == "train"
    model.train(training)
    if training and workload.gradient_checkpointing:
        _checkpoint(model, _autocast(workload), copies_masks)
    if training:
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.empty_like(p)
    config: Any = getattr(model, "config", None)
    if training and hasattr(config, "use_cache"):
        config.use_cache = False
    return model


def _checkpoint(model: Any, autocast: torch.dtype | None, copies_masks: bool | None) -> None:
    # Function modes do not reach what the autograd engine calls, so the recomputation enters its own.
    checkpoint_layers(model, context_fn=lambda: (nullcontext(), CudaKernels(autocast, copies_masks=copies_masks)))


def as_gathered(model: torch.nn.Module, workload: Run) -> torch.nn.Module:
    """The prepared model in the dtype that runs: ranks that share parameters gather them in the lower precision, layer by
    layer, where autocast would keep a copy of all of them. Changes the model: ask for ``static_bytes`` before."""
    if not _gathers_lower(workload):
        return model
    model = model.to(getattr(torch, workload.autocast or "float32"))
    for p in model.parameters():
        p.grad = None if p.grad is None else torch.empty_like(p)
    return model


def _gathers_lower(workload: Run) -> bool:
    shares = _STAGES[workload.sharding] == 3 and (workload.num_ranks or 1) > 1
    return workload.mode == "train" and shares and workload.autocast is not None


def _autocast(workload: Run) -> torch.dtype | None:
    """What ``torch.autocast`` has left to cast to."""
    return getattr(torch, workload.autocast) if workload.autocast and not _gathers_lower(workload) else None


def static_bytes(model: torch.nn.Module, workload: Run) -> int:
    """Bytes that stay whatever the batch: parameters, buffers, and in training gradients, optimizer state, DDP buckets.

    With sharding, this rank's part of them, and what a rank holds whole for a while: with "zero3" and "fsdp" the parameters
    outside the layers, two layers (the one that runs and the next) and one layer's gradients, in the dtype that
    runs; with "zero1" and "zero2" a bucket of ``REDUCE_BUCKET`` gradients, or all of them where there are fewer.
    """
    buffers = sum(_block(b.numel() * b.element_size()) for b in {id(b): b for b in model.buffers()}.values())
    return buffers + kept_bytes(model, workload) + _held_for_a_while(model, workload)


def kept_bytes(model: torch.nn.Module, workload: Run) -> int:
    """This rank's part of parameters and, in training, gradients and optimizer state: what the ZeRO paper counts."""
    parameters = list({id(p): p for p in model.parameters()}.values())
    held = sum(_block(p.numel() * p.element_size()) for p in parameters)
    if workload.mode != "train":
        return held
    trained = [p for p in parameters if p.requires_grad]
    default = 2 * ELEMENT_BYTES[workload.dtype or "float32"]
    per_parameter = default if workload.optimizer_bytes is None else workload.optimizer_bytes
    state = sum(_block(p.numel() * per_parameter) for p in trained)
    stage = _STAGES[workload.sharding]
    ranks = (workload.num_ranks or 1) if stage else 1
    parts = [state, _gradient_bytes(trained), held]  # divided in this order
    return sum(-(-size // ranks) if place < stage else size for place, size in enumerate(parts))


def _held_for_a_while(model: torch.nn.Module, workload: Run) -> int:
    """What ranks that train together hold besides, while they exchange it."""
    if workload.mode != "train":
        return 0
    trained = [p for p in {id(p): p for p in model.parameters()}.values() if p.requires_grad]
    gradients, stage = _gradient_bytes(trained), _STAGES[workload.sharding]
    if workload.ddp or workload.sharding == "ddp":
        return gradients
    if stage == 3:
        return _gathered(model, workload) if (workload.num_ranks or 1) > 1 else 0
    return min(gradients, REDUCE_BUCKET * max((p.element_size() for p in trained), default=0)) if stage else 0


def _gradient_bytes(trained: Sequence[torch.nn.Parameter]) -> int:
    return sum(_block(p.numel() * p.element_size()) for p in trained)


REDUCE_BUCKET = 500_000_000  # elements; DeepSpeed's `reduce_bucket_size`
_STAGES = {None: 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


def _block(size: float) -> int:
    return -(-int(size) // BLOCK) * BLOCK


def _gathered(model: torch.nn.Module, workload: Run) -> int:
    """Bytes of parameters and gradients that a rank holds whole while one layer runs."""
    element = ELEMENT_BYTES[workload.autocast or workload.dtype or "float32"]
    layers = [layer for stack in stacks(model) for layer in stack]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values() if id(p) not in inside)
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
    trained = max((sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers), default=0)
    return element * (outside + 2 * largest + trained)


def trace(
    model: torch.nn.Module,
    workload: Run,
    num_samples: int,
    longest: Mapping[str, int],
    *,
    inputs: MakeInputs | None = None,
    block: int = BLOCK,
    slack: int = 0,
    watch: Callable[[LiveBytes], Any] | None = None,
    copies_masks: bool | None = None,
) -> LiveBytes:
    """Run one batch on the meta device and return the bytes that were alive meanwhile, static memory left out.

    ``block`` and ``slack``: of :class:`LiveBytes`. ``copies_masks``: of :class:`CudaKernels`.
    """
    apart = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tracer = LiveBytes(apart, block=block, slack=slack)
    kernels = CudaKernels(_autocast(workload), padded=workload.attention != "flash", copies_masks=copies_masks)
    with torch.device("meta"), watch(tracer) if watch else nullcontext(), kernels, tracer:
        batch = inputs(model, num_samples, longest) if inputs else _batch(model, workload, num_samples, longest)
        if workload.mode == "train":
            _train(model, batch, kernels, tracer, workload.keeps_outputs is not False)
        elif workload.mode == "generate":
            _generate(model, batch, workload.max_new_tokens or 1, tracer)
        else:
            with torch.no_grad():
                _held = model(**batch)
    return tracer


def _batch(
    model: torch.nn.Module, workload: Run, num_samples: int, longest: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    if workload.mode == "generate" and workload.encoder_decoder:
        longest = {**longest, TARGET: 1}
    if workload.layout == "packed":
        return _packed(model, workload, num_samples * longest[TOKENS])
    batch = make_inputs(model, num_samples, longest, with_labels=workload.mode == "train")
    if workload.attention == "flash":
        batch.pop(
            "attention_mask", None
        )  # FlashAttention reads sequences without their padding: no mask reaches the kernel
    return batch


def _packed(model: torch.nn.Module, workload: Run, total: int) -> dict[str, torch.Tensor]:
    """One row of all tokens. Flash attention keeps samples apart by their ends, other kernels by a mask of total x total."""
    batch = make_inputs(model, 1, {TOKENS: total}, with_labels=workload.mode == "train")
    batch.pop("attention_mask", None)
    if workload.attention != "flash":
        dtype = torch.bool if workload.attention == "sdpa" else next(model.parameters()).dtype
        batch["attention_mask"] = torch.ones(1, 1, total, total, dtype=dtype)
    return batch


def _train(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], kernels: CudaKernels, tracer: LiveBytes, keeps_outputs: bool
) -> None:
    outputs = model(**batch)
    loss = outputs["loss"]
    if not keeps_outputs:
        del outputs
    tracer.mark("forward_ends")
    kernels.end_forward()
    torch.autograd.backward(loss)


@torch.no_grad()
def _generate(model: Any, batch: dict[str, torch.Tensor], new_tokens: int, tracer: LiveBytes) -> None:
    """Prefill, then the last decode step: its cache holds the input and every new token but one."""
    from transformers import DynamicCache, EncoderDecoderCache

    encoder_decoder = model.config.is_encoder_decoder
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    if encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config.get_text_config(decoder=True)))
    keep = {} if encoder_decoder or not _takes(model, "logits_to_keep") else {"logits_to_keep": 1}
    outputs = model(**batch, past_key_values=cache, use_cache=True, **keep)
    encoded = getattr(outputs, "encoder_last_hidden_state", None)
    scores = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32)  # as generate() keeps them
    del outputs
    words = scores.argmax(-1, keepdim=True)
    del scores
    final = int(cache.get_seq_length()) + new_tokens - 1
    tracer.mark("prefilled")
    stretch(cache.self_attention_cache if encoder_decoder else cache, final)
    tracer.mark("stretched")
    if encoder_decoder:
        held = {"encoder_outputs": (encoded,), "decoder_input_ids": words}
        if "attention_mask" in batch:
            held["attention_mask"] = batch["attention_mask"]
    else:
        mask = torch.ones(words.shape[0], final + 1, dtype=torch.long)
        held = {"input_ids": words, **({"attention_mask": mask} if "attention_mask" in batch else {})}
    outputs = model(**held, past_key_values=cache, use_cache=True, **keep)
    scores = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32)
    scores.softmax(-1)  # sampling; greedy search keeps less


def stretch(cache: Any, length: int) -> None:
    """Give every layer of a dynamic cache ``length`` positions, a sliding layer at most its window."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        window = getattr(layer, "sliding_window", None)
        kept = length if window is None else min(length, window - 1)
        for name in ("keys", "values"):
            old = getattr(layer, name)
            setattr(layer, name, None)
            shape = (*old.shape[:-2], kept, old.shape[-1])
            del old
            setattr(layer, name, torch.empty(shape, dtype=layer.dtype, device="meta"))
        if window is not None:
            layer.cumulative_length = length


def _takes(model: torch.nn.Module, name: str) -> bool:
    import inspect

    return name in inspect.signature(model.forward).parameters
