"""What one batch does on a device: a training step in mid-accumulation, a forward pass, or prefill and the last decode step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from dynagroup.memory.trace.build import make_inputs
from dynagroup.memory.trace.kernels import CudaKernels
from dynagroup.memory.trace.tracer import BLOCK, LiveBytes
from dynagroup.memory.workload import ELEMENT_BYTES, Workload

__all__ = ["MakeInputs", "prepare", "static_bytes", "trace"]

MakeInputs: TypeAlias = Callable[[torch.nn.Module, int, Mapping[str, int]], dict[str, torch.Tensor]]


def prepare(model: torch.nn.Module, workload: Workload, aligned: bool = True) -> torch.nn.Module:
    """The meta model in the state that the workload runs it in, gradients of earlier steps included.

    ``aligned``: as in :func:`trace`, for what checkpointing runs again.
    """
    training = workload.mode == "train"
    model.train(training)
    if training and workload.gradient_checkpointing:
        _checkpoint(model, getattr(torch, workload.autocast) if workload.autocast else None, aligned)
    if training:
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.empty_like(p)
    config: Any = getattr(model, "config", None)
    if training and hasattr(config, "use_cache"):
        config.use_cache = False
    return model


def _checkpoint(model: Any, autocast: torch.dtype | None, aligned: bool) -> None:
    # Function modes do not reach what the autograd engine calls, so the recomputation enters its own.
    options = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), CudaKernels(autocast, aligned=aligned))}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5.2x renamed it
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def static_bytes(model: torch.nn.Module, workload: Workload) -> int:
    """Bytes that stay whatever the batch: parameters, buffers, and in training gradients, optimizer state, DDP buckets."""

    def block(size: float) -> int:
        return -(-int(size) // BLOCK) * BLOCK

    held = sum(
        block(t.numel() * t.element_size())
        for t in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    )
    if workload.mode != "train":
        return held
    trained = [p for p in {id(p): p for p in model.parameters()}.values() if p.requires_grad]
    gradients = sum(block(p.numel() * p.element_size()) for p in trained)
    default = 2 * ELEMENT_BYTES[workload.dtype or "float32"]
    per_parameter = default if workload.optimizer_bytes is None else workload.optimizer_bytes
    state = sum(block(p.numel() * per_parameter) for p in trained)
    return held + gradients * (2 if workload.ddp else 1) + state


def trace(
    model: torch.nn.Module,
    workload: Workload,
    num_samples: int,
    longest: Mapping[str, int],
    *,
    inputs: MakeInputs | None = None,
    block: int = BLOCK,
    slack: int = 0,
    watch: Callable[[LiveBytes], Any] | None = None,
    aligned: bool = True,
) -> LiveBytes:
    """Run one batch on the meta device and return the bytes that were alive meanwhile, static memory left out.

    ``block`` and ``slack``: of :class:`LiveBytes`. ``aligned=False``: masks are padded whatever the length, as those of most
    lengths are.
    """
    apart = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tracer = LiveBytes(apart, block=block, slack=slack)
    autocast = getattr(torch, workload.autocast) if workload.autocast else None
    kernels = CudaKernels(autocast, padded=workload.attention != "flash", aligned=aligned)
    with torch.device("meta"), watch(tracer) if watch else nullcontext(), kernels, tracer:
        batch = inputs(model, num_samples, longest) if inputs else _batch(model, workload, num_samples, longest)
        if workload.mode == "train":
            _train(model, batch, kernels, tracer)
        elif workload.mode == "generate":
            _generate(model, batch, workload.max_new_tokens or 1, tracer)
        else:
            with torch.no_grad():
                _held = model(**batch)
    return tracer


def _batch(
    model: torch.nn.Module, workload: Workload, num_samples: int, longest: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    if workload.mode == "generate" and workload.encoder_decoder:
        longest = {**longest, "target": 1}
    batch = make_inputs(model, num_samples, longest, with_labels=workload.mode == "train")
    if (
        workload.attention == "flash"
    ):  # FlashAttention reads sequences without their padding: no mask reaches the kernel
        batch.pop("attention_mask", None)
    return batch


def _train(model: torch.nn.Module, batch: dict[str, torch.Tensor], kernels: CudaKernels, tracer: LiveBytes) -> None:
    # The outputs stay alive through the backward pass, as they do in a Trainer that returns them.
    outputs = model(**batch)
    loss = outputs["loss"]
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
