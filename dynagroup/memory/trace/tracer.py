"""Adds up the storages that are alive while a program runs on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # documented for extension authors; no public alias yet

__all__ = ["LiveBytes"]

BLOCK = 512  # the caching allocator rounds every request up to this (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)
_aten = torch.ops.aten
_ATTENTION_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
}


class LiveBytes(TorchDispatchMode):
    """Bytes alive now, at most, and after every allocation.

    Args:
        apart: tensors that are counted elsewhere (parameters, gradients); their storages and views count nothing here.
        block: allocations are rounded up to a multiple of this many bytes.
        slack: bytes that every allocation takes beyond its size: half a block, where rounding would hide what it grows with.
    """

    def __init__(self, apart: Iterable[torch.Tensor] = (), block: int = BLOCK, slack: int = 0) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.timeline: list[int] = []
        self.marks: dict[str, tuple[int, int]] = {}
        self._block, self._slack = block, slack
        self._apart = {_key(t): t.untyped_storage() for t in apart}  # held, so that no new storage takes their place
        self._known = set(self._apart)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ATTENTION_BACKWARD:
            self._reach(self.live + _workspace(args[1]))
        if type(out) is torch.Tensor:
            self._add(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._add(item)
        elif isinstance(out, torch.Tensor):
            self._add(out)
        return out

    def mark(self, name: str) -> None:
        """Remember how many allocations there were, and how many bytes are alive, at a named point."""
        self.marks[name] = (len(self.timeline), self.live)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not tensor.is_meta:
            return
        size = -(-storage.nbytes() // self._block) * self._block + self._slack
        self._known.add(key)
        self.live += size
        self._reach(self.live)
        weakref.finalize(storage, self._free, key, size).atexit = False

    def _reach(self, size: int) -> None:
        self.peak = max(self.peak, size)
        self.timeline.append(size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _workspace(query: torch.Tensor) -> int:
    """Bytes that the fused attention kernels hold inside their backward: the query's gradient summed in float32, and one
    float32 a row (``dq_accum`` and ``softmax_d`` of FlashAttention 2, ``delta`` and ``workspace`` of the other)."""
    return 4 * query.numel() + 4 * query.numel() // query.shape[-1]
