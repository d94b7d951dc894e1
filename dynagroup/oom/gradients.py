"""Gradients of ``DistributedDataParallel`` without its own exchange: kept on their rank, then averaged once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from dynagroup.device import is_out_of_memory
from dynagroup.errors import AlignmentError, ConfigError

BUCKET_BYTES = 2**20
"""Smaller gradients travel together; a larger one travels in the tensor that holds it, without a copy."""
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` in a model. What one rank cannot repeat alone is refused."""
    modules = list(model.modules())
    ddp = next((m for m in modules if isinstance(m, DistributedDataParallel)), None)
    for module in modules:
        if _SHARDED & {cls.__name__ for cls in type(module).__mro__}:
            way_out = "one rank cannot repeat a step alone; use DistributedDataParallel, or a plain backward pass"
            raise ConfigError(f"`model` contains {type(module).__name__}, whose ranks exchange parameters: {way_out}")
        if ddp is not None and (isinstance(module, SyncBatchNorm) or getattr(module, "static_graph", False)):
            way_out = "use another normalisation, and static_graph=False"
            raise ConfigError(f"`model` contains {type(module).__name__}, which no rank can run alone; {way_out}")
    return ddp


def local_gradients(ddp: DistributedDataParallel | None) -> AbstractContextManager[None]:
    """Forward and backward passes without any exchange between ranks: neither gradients nor buffers."""
    if ddp is None:
        return nullcontext()
    # Otherwise the first forward broadcasts buffers, and a rank that repeats it would wait for the others forever.
    ddp.require_forward_param_sync = False
    return ddp.no_sync()


# DDP's own exchange cannot be called off: a rank that fails inside it leaves the others waiting for ever. So ours begins when
# every rank has all its gradients. Nothing of it overlaps with the backward pass; in exchange large gradients are not copied.
def average_gradients(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Every ``.grad`` replaced by its mean over ranks; one that is None counts as zero. ``parameters``: alike on all ranks."""
    size = dist.get_world_size(group)
    with torch.no_grad():
        buckets = _buckets([_gradient_of(p) for p in parameters])
        try:
            packed = [_packed(bucket).div_(size) for bucket in buckets]
            works: list[Any] = [dist.all_reduce(flat, group=group, async_op=True) for flat in packed]
            for work, flat, bucket in zip(works, packed, buckets, strict=True):
                work.wait()
                if flat is not bucket[0]:
                    for gradient, values in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                        gradient.copy_(values.view_as(gradient))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            lost = "another rank was lost while gradients were exchanged; see its error"
            raise AlignmentError(f"{lost}: {error}") from error


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise ConfigError("a sparse gradient cannot be exchanged in a bucket; use nn.Embedding(sparse=False)")
    return parameter.grad


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Large gradients alone, small ones of one dtype and device together."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for number, gradient in enumerate(gradients):
        alone = gradient.nbytes >= BUCKET_BYTES
        kinds.setdefault(number if alone else (gradient.dtype, gradient.device), []).append(gradient)
    return list(kinds.values())


def _packed(bucket: list[torch.Tensor]) -> torch.Tensor:
    alone = len(bucket) == 1 and bucket[0].is_contiguous()
    return bucket[0] if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])


def broadcast_buffers(ddp: DistributedDataParallel) -> None:
    """What DDP does before a forward pass, done after the update instead: buffers follow the group's first rank."""
    if not ddp.broadcast_buffers:
        return
    first = dist.get_process_group_ranks(ddp.process_group)[0]
    for buffer in ddp.modules_buffers:
        dist.broadcast(buffer.data, src=first, group=ddp.process_group)
