"""What an answer about memory takes for granted, in words that its reader can check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynagroup.memory.workload import Workload

__all__ = ["Told", "assumed"]


@dataclass(frozen=True, slots=True)
class Told:
    """What tracing was told of a model that its numbers no longer say."""

    name: str = "a model"
    optimizer: str | None = None
    """None: only its bytes are known."""
    lora: Any = None
    positions: int | None = None
    """Tokens that a sample can have; None: not known."""


def assumed(workload: Workload, told: Told | None = None) -> str:
    """How a model is taken to be run, what nobody said included.

    >>> assumed(Workload(mode="train", dtype="float32", attention="sdpa", optimizer_bytes=8), Told(optimizer="AdamW"))
    'train, float32, sdpa attention, no checkpointing, AdamW of 8 bytes a trained parameter'
    >>> shared = Workload(mode="train", dtype="bfloat16", sharding="fsdp", num_ranks=8, gradient_checkpointing=True)
    >>> assumed(shared, Told(optimizer="lion", lora=8))
    'train, bfloat16, LoRA of rank 8, checkpointing, lion, fsdp over 8 ranks'
    >>> assumed(Workload(mode="generate", dtype="float16", max_new_tokens=256))
    'generate, float16, 256 new tokens'
    """
    told = told or Told()
    said = [workload.mode, workload.dtype, workload.autocast and f"autocast to {workload.autocast}"]
    said += [workload.attention and f"{workload.attention} attention", workload.layout == "packed" and "packed"]
    said += [workload.mode == "generate" and f"{workload.max_new_tokens} new tokens", _adapters(workload, told)]
    if workload.mode == "train":
        said += ["checkpointing" if workload.gradient_checkpointing else "no checkpointing", _optimizer(workload, told)]
        said += [workload.keeps_outputs is False and "logits let go before the backward pass", _ranks(workload)]
    return ", ".join(filter(None, said))


def _adapters(workload: Workload, told: Told) -> str:
    if told.lora:
        return f"LoRA of rank {16 if told.lora is True else getattr(told.lora, 'r', told.lora)}"
    share = workload.trainable_share
    return (
        f"{share:.2%} of the parameters trained" if workload.mode == "train" and share is not None and share < 1 else ""
    )


def _optimizer(workload: Workload, told: Told) -> str:
    if workload.optimizer_bytes is None:
        return told.optimizer or ""
    return f"{told.optimizer or 'an optimizer'} of {workload.optimizer_bytes:g} bytes a trained parameter"


def _ranks(workload: Workload) -> str:
    many = "" if workload.num_ranks is None else f" over {workload.num_ranks} ranks"
    return f"{workload.sharding}{many}" if workload.sharding else "ddp" if workload.ddp else ""
