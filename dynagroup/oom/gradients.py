"""Gradients and random states that a failed step must not spoil, and their exchange between ranks after the step."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.oom.retry import attempt

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["GradientExchange", "RngState", "broadcast_buffers", "find_ddp", "local_gradients", "lost_ranks_named"]

BUCKET_BYTES = 25 * 2**20  # DDP's default
_LOST = re.compile(r"(?i)gloo|nccl|rccl|connection (?:closed|reset|refused)|timed ?out")
_MAX_TRAVELLING = 4  # bounds the memory of buckets on their way


@dataclass(frozen=True, slots=True)
class RngState:
    """torch's random states on the CPU and on one device: what dropout draws from."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    device_type: str

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        import torch

        backend = None if device.type == "cpu" else getattr(torch, device.type, None)
        on_device = None if backend is None else backend.get_rng_state()
        return cls(torch.get_rng_state(), on_device, device.type)

    def restore(self) -> None:
        import torch

        torch.set_rng_state(self.cpu)
        if self.device is not None:
            getattr(torch, self.device_type).set_rng_state(self.device)


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` in a model, also beneath ``torch.compile``.

    Raises:
        ConfigError: the model exchanges data inside its forward or backward pass in a way that one rank cannot repeat alone.
    """
    from torch.nn import SyncBatchNorm
    from torch.nn.parallel import DistributedDataParallel

    modules = list(model.modules())
    sharded = next((type(m).__name__ for m in modules if _is_sharded(m)), None)
    if sharded is not None:
        raise ConfigError(
            f"`model` contains {sharded}, whose ranks exchange parameters inside forward and backward: one rank cannot "
            "repeat a step alone; use DistributedDataParallel, or mode=None (out_of_memory=None in a DynagroupConfig) with a "
            "smaller budget"
        )
    ddp = next((m for m in modules if isinstance(m, DistributedDataParallel)), None)
    if ddp is None:
        return None
    if ddp.static_graph:
        raise ConfigError(
            "`model` is DistributedDataParallel(static_graph=True), which cannot skip an exchange; leave it False"
        )
    if any(isinstance(m, SyncBatchNorm) for m in modules):
        raise ConfigError(
            "`model` contains SyncBatchNorm, which exchanges data inside forward; use another normalisation"
        )
    return ddp


def _is_sharded(module: Any) -> bool:
    names = {cls.__name__ for cls in type(module).__mro__}
    return bool(names & {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"})


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """A collective that fails or times out because another rank has gone says so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AlignmentError) or not _LOST.search(str(error)):
            raise
        raise AlignmentError(f"another rank was lost while gradients were exchanged; see its error: {error}") from error


@contextmanager
def local_gradients(ddp: DistributedDataParallel | None) -> Iterator[None]:
    """Forward and backward passes without any exchange between ranks: neither gradients nor buffers."""
    if ddp is not None:
        # Otherwise the first forward broadcasts buffers, and a rank that repeats it would wait for the others forever.
        ddp.require_forward_param_sync = False
    with nullcontext() if ddp is None else ddp.no_sync():
        yield


class GradientExchange:
    """Every ``.grad`` replaced by its mean over ranks, in buckets that travel while later gradients are computed.

    DDP's own exchange cannot be called off: a rank that fails inside it leaves the others waiting for ever. This one is
    ours, so a rank that fails still takes part in it, and says afterwards that the sum is worth nothing.

    Args:
        parameters: the same on every rank; one without a gradient counts as zero.
        group: the ranks that take part.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
        import torch.distributed as dist

        self._group, self._size = group, dist.get_world_size(group)
        self._buckets = list(_buckets(parameters[::-1]))  # backward passes reach the last layers first
        self._bucket_of = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        self._travelling: deque[tuple[Any, torch.Tensor, list[torch.nn.Parameter]]] = deque()
        self.num_started = 0
        self.spoiled = False
        """What was sent is not what it should have been: all ranks must throw the result away."""

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Send a bucket as soon as a backward pass in this context has added to all its gradients."""
        if not self.num_started:  # an earlier pass may have failed half way
            self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        parameters = [p for bucket in self._buckets for p in bucket]
        hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """Send what has not been sent, and wait for everything."""
        while self.num_started < len(self._buckets):
            if attempt(self._start).error is not None:  # memory has been freed by now
                self._start()
        while self._travelling:
            self._receive()

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        bucket = self._bucket_of[id(parameter)]
        if bucket < self.num_started:  # a second backward pass inside this one (reentrant checkpoints, shared weights)
            self.spoiled = True
            return
        self._missing[bucket].discard(id(parameter))
        while self.num_started < len(self._buckets) and not self._missing[self.num_started]:
            self._start()

    def _start(self) -> None:
        import torch
        import torch.distributed as dist

        bucket = self._buckets[self.num_started]
        with torch.no_grad():
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad.is_sparse:
                    raise ConfigError(
                        "a sparse gradient cannot be exchanged in a bucket; use nn.Embedding(sparse=False)"
                    )
            flat = torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None]).div_(self._size)
        with lost_ranks_named():
            self._travelling.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, bucket))
        self.num_started += 1  # only now: packing may have run out of memory, and is then tried again
        if len(self._travelling) > _MAX_TRAVELLING:
            self._receive()

    def _receive(self) -> None:
        import torch

        work, flat, bucket = self._travelling.popleft()
        with lost_ranks_named():
            work.wait()
        with torch.no_grad():
            for parameter, values in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(values.view_as(parameter))


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    kinds: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same_kind in kinds.values():
        bucket: list[torch.nn.Parameter] = []
        size = 0
        for parameter in same_kind:
            if bucket and size + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        yield bucket


def broadcast_buffers(ddp: DistributedDataParallel) -> None:
    """What DDP does before a forward pass, done after the update instead: buffers follow the group's first rank."""
    import torch.distributed as dist

    if not ddp.broadcast_buffers:
        return
    first = dist.get_process_group_ranks(ddp.process_group)[0]
    for buffer in ddp.modules_buffers:
        dist.broadcast(buffer.data, src=first, group=ddp.process_group)
