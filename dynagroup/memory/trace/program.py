"""Runs, without data, what one batch does on a device: a training step, a forward pass, or prefill and decoding."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from dynagroup.memory.phases import ELEMENT_BYTES, MakeInputs, Run
from dynagroup.memory.trace.kernels import BLOCK, CudaKernels, LiveBytes
from dynagroup.memory.trace.model import checkpoint_layers, is_encoder, make_inputs, stacks
from dynagroup.shapes import TARGET, TOKENS, primary

REDUCE_BUCKET = (
    500_000_000  # elements in a bucket of gradients; default of DeepSpeed's `reduce_bucket_size`
)
MASKED = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
}  # values of `layer_types` with a mask of their own
_STAGES = {None: 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


def prepare(model: Any, workload: Run) -> torch.nn.Module:
    """Prepares the model on the meta device for the workload: its mode, and gradients of earlier micro-batches."""
    training = workload.mode == "train"
    model.train(training)
    if not training:
        return model
    for part in (
        m
        for m in model.modules()
        if not workload.gradient_checkpointing and hasattr(m, "gradient_checkpointing")
    ):
        part.gradient_checkpointing = False
    if workload.gradient_checkpointing:
        checkpoint_layers(model)
        for part in (m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")):
            settings = {
                "use_reentrant": True,
                **getattr(part._gradient_checkpointing_func, "keywords", {}),
            }
            part._gradient_checkpointing_func = partial(_checkpoint, _autocast(workload), settings)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.empty_like(p)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    return model


def _checkpoint(
    autocast: torch.dtype | None,
    settings: Any,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    calls = count()

    def run(
        *args: Any, **kwargs: Any
    ) -> Any:  # the autograd engine calls it a second time, outside of all function modes
        with CudaKernels(autocast) if next(calls) else nullcontext():
            return function(*args, **kwargs)

    return checkpoint(run, *args, **settings, **kwargs)


def as_gathered(model: torch.nn.Module, workload: Run) -> torch.nn.Module:
    """Changes a prepared model to the dtype in which it runs: ranks gather sharded parameters in lower precision."""
    if workload.autocast is None or _autocast(workload) is not None:
        return model
    model = model.to(getattr(torch, workload.autocast))
    for p in model.parameters():
        p.grad = None if p.grad is None else torch.empty_like(p)
    return model


def _shares_parameters(workload: Run) -> bool:
    return _STAGES[workload.sharding] == 3 and (workload.num_ranks or 1) > 1


def _autocast(workload: Run) -> torch.dtype | None:
    """Returns the dtype of autocast; None without autocast, or if sharded parameters are gathered in that dtype."""
    return (
        getattr(torch, workload.autocast)
        if workload.autocast and not _shares_parameters(workload)
        else None
    )


def static_bytes(model: torch.nn.Module, workload: Run) -> int:
    """Returns bytes that do not depend on the batch: parameters, buffers; for training gradients and optimizer. With
    sharding: this rank's part of these, plus what it gathers for a short time: a bucket of gradients ("zero1",
    "zero2"), or parameters outside the layers, two layers, and the gradients of one layer ("zero3", "fsdp")."""
    kept, trained = (
        _blocks(model.buffers()) + kept_bytes(model, workload),
        _trained(model, workload),
    )
    gradients, stage = _blocks(trained), _STAGES[workload.sharding]
    bucket = REDUCE_BUCKET * max((p.element_size() for p in trained), default=0)
    if stage == 3:
        return kept + (_gathered(model, workload) if _shares_parameters(workload) else 0)
    return kept + (min(gradients, bucket) if stage else gradients * (workload.sharding == "ddp"))


def kept_bytes(model: torch.nn.Module, workload: Run) -> int:
    """Returns the bytes of this rank's part of the parameters and, for training, of gradients and optimizer state."""
    trained, stage, ranks = (
        _trained(model, workload),
        _STAGES[workload.sharding],
        workload.num_ranks or 1,
    )
    state = sum(_block(p.numel() * workload.optimizer_bytes) for p in trained)
    parts = [
        state,
        _blocks(trained),
        _blocks(model.parameters()),
    ]  # higher ZeRO stages shard more of them, in order
    return sum(-(-size // ranks) if place < stage else size for place, size in enumerate(parts))


def _gathered(model: torch.nn.Module, workload: Run) -> int:
    """Returns the bytes of parameters and gradients that a rank has whole while one layer runs."""
    element = ELEMENT_BYTES[workload.autocast or workload.dtype or "float32"]
    layers = [list(layer.parameters()) for stack in stacks(model) for layer in stack]
    inside = {id(p) for layer in layers for p in layer}
    outside = sum(p.numel() for p in set(model.parameters()) if id(p) not in inside)
    largest = max((sum(p.numel() for p in layer) for layer in layers), default=0)
    trained = max((sum(p.numel() for p in layer if p.requires_grad) for layer in layers), default=0)
    return element * (outside + 2 * largest + trained * (workload.mode == "train"))


def _trained(model: torch.nn.Module, workload: Run) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and workload.mode == "train"]


def _blocks(tensors: Any) -> int:
    return sum(_block(t.numel() * t.element_size()) for t in {id(t): t for t in tensors}.values())


def _block(size: float) -> int:
    return -(-int(size) // BLOCK) * BLOCK


def trace(
    model: torch.nn.Module,
    workload: Run,
    num_samples: int,
    longest: Mapping[str, int],
    *,
    inputs: MakeInputs | None = None,
    smooth: bool = False,
    watch: Callable[[LiveBytes], Any] | None = None,
) -> LiveBytes:
    """Runs one batch on the meta device; returns the bytes alive during the run, without static memory."""
    apart = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    tracer, kernels = (
        LiveBytes(apart, smooth),
        CudaKernels(_autocast(workload), padded=workload.attention != "flash"),
    )
    with torch.device("meta"), watch(tracer) if watch else nullcontext(), kernels, tracer:
        batch, _masks = (
            (inputs(model, num_samples, longest), ())
            if inputs
            else _batch(model, workload, num_samples, longest)
        )
        if workload.mode == "train":
            outputs = model(**batch)
            loss = outputs["loss"]
            if workload.keeps_outputs is False:
                del outputs
            tracer.mark("forward_ends")
            kernels.end_forward()
            torch.autograd.backward(loss)
        elif workload.mode == "generate":
            _generate(model, batch, workload.max_new_tokens or 1, tracer)
        else:
            with torch.no_grad():
                _held = model(**batch)
    return tracer


def _batch(
    model: Any, workload: Run, num_samples: int, longest: Mapping[str, int]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Returns a batch, and further packed masks: models whose layers attend in several ways make one for each of them."""
    packed, total = workload.layout == "packed", num_samples * longest[primary(longest)]
    if workload.mode == "generate" and workload.encoder_decoder:
        longest = {**longest, TARGET: 1}
    shape = (1, {TOKENS: total}) if packed else (num_samples, longest)
    batch = make_inputs(model, *shape, with_labels=workload.mode == "train")
    if packed and is_encoder(
        model.config
    ):  # packed rows may be longer than the positions that a model has
        takes = {"position_ids", "token_type_ids"} & {*inspect.signature(model.forward).parameters}
        batch |= {name: torch.zeros_like(batch["input_ids"]) for name in takes}
    if packed or workload.attention == "flash":
        batch.pop("attention_mask", None)
        for (
            module
        ) in model.modules():  # it would look for padding among ids, and the meta device has none
            vars(module)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    if packed and workload.attention != "flash":
        dtype = torch.bool if workload.attention == "sdpa" else next(model.parameters()).dtype
        source, made_by = "", type(getattr(model, "get_base_model", lambda: model)()).__module__
        with suppress(OSError, TypeError):  # some models make masks that none of their layers uses
            source = inspect.getsource(sys.modules[made_by])
        always = (
            re.findall(r'"(\w+_attention)": create_', source) if workload.mode == "forward" else []
        )  # freed before backward
        ways = MASKED & {
            *always,
            *(getattr(model.config.get_text_config(), "layer_types", None) or ()),
        }
        batch["attention_mask"], *others = (
            torch.ones(1, 1, total, total, dtype=dtype) for _ in ways or [None]
        )
        return batch, others
    return batch, []


@torch.no_grad()
def _generate(
    model: Any, batch: dict[str, torch.Tensor], new_tokens: int, tracer: LiveBytes
) -> None:
    """Runs prefill and the last decoding step, whose cache contains the input and all new tokens but one."""
    from transformers import DynamicCache, EncoderDecoderCache

    two_stacks, text = model.config.is_encoder_decoder, model.config.get_text_config(decoder=True)
    own = DynamicCache(config=text)
    cache: Any = EncoderDecoderCache(own, DynamicCache(config=text)) if two_stacks else own
    takes = set() if two_stacks else {*inspect.signature(model.forward).parameters}
    keep: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    if (
        "position_ids" in takes and "input_ids" in batch
    ):  # as generate() does; rotary embeddings have as many rows
        batch.setdefault("position_ids", torch.zeros_like(batch["input_ids"]))
    outputs = model(**batch, past_key_values=cache, use_cache=True, **keep)
    encoded = getattr(outputs, "encoder_last_hidden_state", None)
    scores = outputs.logits[:, -1, :].to(
        copy=True, dtype=torch.float32
    )  # generate() keeps such a copy until the next one
    del outputs
    words = scores.argmax(-1, keepdim=True)
    final = int(cache.get_seq_length()) + new_tokens - 1
    tracer.mark("prefilled")
    _stretch(own, final)
    tracer.mark("stretched")
    held: dict[str, Any] = {
        "input_ids": words,
        **({"position_ids": torch.zeros_like(words)} if "position_ids" in takes else {}),
    }
    if two_stacks:
        held = {"encoder_outputs": (encoded,), "decoder_input_ids": words}
    if "attention_mask" in batch:
        sides = (words.shape[0], final + 1)
        held["attention_mask"] = (
            batch["attention_mask"] if two_stacks else torch.ones(sides, dtype=torch.long)
        )
    outputs = model(**held, past_key_values=cache, use_cache=True, **keep)
    scores = outputs.logits[:, -1, :].to(
        copy=True, dtype=torch.float32
    )  # beside the one before; sampling makes more copies


def _stretch(cache: Any, length: int) -> None:
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        window = getattr(layer, "sliding_window", None)
        kept = length if window is None else min(length, window - 1)
        for name in ("keys", "values"):
            old = getattr(layer, name)
            shape = (*old.shape[:-2], kept, old.shape[-1])
            setattr(layer, name, None)
            del old  # freed before the new tensor is allocated
            setattr(layer, name, torch.empty(shape, dtype=layer.dtype, device="meta"))
        if window is not None:
            layer.cumulative_length = length
