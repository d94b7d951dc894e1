"""A whole window crosses from worker to main process in a few blocks of shared memory.

Sending a tensor by itself costs a file descriptor and a socket connection; a window of a hundred batches has hundreds.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeAlias

import torch

__all__ = ["pack_tensors", "unpack_tensors"]

Location: TypeAlias = tuple[torch.dtype, torch.Size, int, int]
"""Where a tensor lies: dtype, shape, number of its block, first byte."""

ALIGN = 64  # bytes; a cache line, and a multiple of every element size
BLOCK_BYTES = 8 << 20  # the allocator reuses blocks of this size; larger ones are mapped and faulted in anew every time


class _Packer(pickle.Pickler):
    """Pickles anything; plain CPU tensors are left out and collected."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]


def _is_plain(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_complex()
    return strided and tensor.device.type == "cpu" and not tensor.requires_grad


def pack_tensors(value: Any) -> tuple[bytes, list[Location], list[torch.Tensor]]:
    """``value`` pickled without its tensors; where each of them stands; and the blocks: uint8.

    >>> value = {"ids": torch.arange(3), "name": "x"}
    >>> back = unpack_tensors(*pack_tensors(value))
    >>> back["ids"].tolist(), back["name"]
    ([0, 1, 2], 'x')
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    places: list[Location] = []
    sizes = [0]
    for tensor in packer.tensors:
        size = -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        if sizes[-1] and sizes[-1] + size > BLOCK_BYTES:
            sizes.append(0)
        places.append((tensor.dtype, tensor.shape, len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for tensor, place in zip(packer.tensors, places, strict=True):
        if tensor.numel():
            _view(blocks, place).copy_(tensor)
    return file.getvalue(), places, blocks


def unpack_tensors(payload: bytes, places: list[Location], blocks: list[torch.Tensor]) -> Any:
    """What was packed; its tensors are views of the blocks."""
    return _Unpacker(io.BytesIO(payload), [_view(blocks, place) for place in places]).load()


def _view(blocks: list[torch.Tensor], place: Location) -> torch.Tensor:
    dtype, shape, number, start = place
    size = shape.numel() * dtype.itemsize
    return blocks[number][start : start + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
