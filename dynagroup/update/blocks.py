"""Sends values from workers with all their tensors in a few blocks of shared memory, not tensor by tensor.

Each tensor alone would cost a file descriptor and a connection: three in most batches, hundreds in an online window."""

import io
import pickle
from typing import Any, TypeAlias

import torch

# dtype, shape, which block, first byte
Location: TypeAlias = tuple[torch.dtype, torch.Size, int, int]

ALIGN = 64  # bytes: a cache line, and a multiple of every element size
BLOCK_BYTES = 8 << 20  # the allocator reuses blocks of this size; larger ones cause page faults


def _is_plain(value: Any) -> bool:
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return False
    if value.layout is not torch.strided or value.requires_grad:
        return False
    return not (value.is_quantized or value.is_complex())


class _Pickler(pickle.Pickler):
    """Pickles numbers in place of plain CPU tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # by id; the tensors live as long as this object

    def persistent_id(self, obj: Any) -> int | None:
        if not _is_plain(obj):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(payload))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def to_blocks(value: Any) -> tuple[bytes, list[Location], list[torch.Tensor]]:
    """Returns (pickle of ``value`` with numbers for plain CPU tensors, location of each tensor, blocks of uint8)."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    locations: list[Location] = []
    block_sizes = [0]
    for tensor in pickler.tensors:
        size = -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        if block_sizes[-1] and block_sizes[-1] + size > BLOCK_BYTES:
            block_sizes.append(0)
        locations.append((tensor.dtype, tensor.shape, len(block_sizes) - 1, block_sizes[-1]))
        block_sizes[-1] += size
    blocks = [torch.empty(size, dtype=torch.uint8) for size in block_sizes]
    for tensor, location in zip(pickler.tensors, locations, strict=True):
        _view(blocks, location).copy_(tensor)
    return file.getvalue(), locations, blocks


def reduced(make: Any, fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what ``make(*fields).__reduce__`` must return to be sent in blocks; if that fails, in torch's usual way."""
    try:
        sent = to_blocks(fields)
    except Exception:
        return make, fields
    return from_blocks, (make, *sent)


def from_blocks(
    make: Any, payload: bytes, locations: list[Location], blocks: list[torch.Tensor]
) -> Any:
    """Returns what ``make`` makes of the fields; their tensors are views of the blocks."""
    tensors = [_view(blocks, location) for location in locations]
    return make(*_Unpickler(payload, tensors).load())


def _view(blocks: list[torch.Tensor], location: Location) -> torch.Tensor:
    dtype, shape, block, start = location
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return blocks[block][start : start + size].view(dtype).view(shape)
