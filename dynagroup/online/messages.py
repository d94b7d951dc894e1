"""Messages between main process and workers, in the order in which a sample passes through them.

::

    main process of a rank                                worker of that rank
    ----------------------                                -------------------
    Request       positions and dataset indices --------> IndexedDataset (or IterableWindows): process
                                                            |
                                                          WindowSamples
                                                            | RefinementCollator: measure, cut, collate
    Refined       <-------------------------------------- RefinedWindow
      | ranks agree on steps and totals
    Step          the user's batch, and what it weighs
"""

import copy
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from dynagroup.fingerprint import described, hashed
from dynagroup.shapes import IntArray, Streams


@dataclass(frozen=True, slots=True)
class Request:
    positions: IntArray  # places in the epoch's order: int64 (N,)
    groups: tuple[int, ...] | None = None  # sizes of batches already planned; None: one window to be cut
    keep: int = 0  # this many of the largest batches come back with their samples, so that they can be split later
    planned: bool = False  # whether it follows from the plans; a saved place only counts such requests
    number: int = -1  # number among this rank's requests, repeated in the answer; -1: it asks for nothing
    indices: Sequence[int] = ()  # dataset indices
    epoch: int = 0  # handed to the dataset's ``set_epoch`` in the worker, where it has one
    max_bytes: int | None = None  # about how many bytes of samples an answer holds; the rest is asked again; None: all

    @classmethod
    def of(cls, indices: Sequence[int]) -> "Request":
        """A request for one batch of dataset indices that have no positions."""
        return cls(np.arange(len(indices)), (len(indices),), number=0, indices=indices)

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: int, stop: int) -> "Request":
        """The request for a range of these samples, which must consist of whole groups."""
        groups = self.groups
        if groups is not None:
            first, end = np.searchsorted(np.cumsum(groups), (start, stop), side="right").tolist()
            groups = groups[first:end]
        return replace(self, positions=self.positions[start:stop], indices=self.indices[start:stop], groups=groups)


@dataclass(frozen=True, slots=True)
class WindowSamples:
    """A request with its processed samples; of an iterable, ``place`` is the worker that read them and from where."""

    request: Request
    samples: list[Any]
    place: Any = None


@dataclass(frozen=True, slots=True)
class Refined:
    """One collated batch with what the main process needs to know about it."""

    batch: Any  # what the user's ``collate_fn`` returned
    indices: list[int]  # dataset indices; arrival numbers of an iterable; or places in the window, if nothing is known
    positions: tuple[int, ...]  # the samples' places in the epoch's order
    lengths: Streams  # true ones, after processing
    weight: float  # loss weight, see ``weigh``
    padded: int  # padded tokens
    work: float  # predicted time without the fixed cost of a step, in linear tokens
    real: int  # tokens without padding
    group: int = 0  # which of the request's batches it came from
    oversize: bool = False  # a single sample that does not fit even alone
    label: Any = None  # label of all its samples, with kinds
    kind: int = 0  # the label's number, if ranks must take batches of one kind together; else 0
    samples: list[Any] | None = None  # the processed samples, if they were kept so that the batch can be split

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def idle(cls, kind: int) -> "Refined":
        """An empty batch, for a step on which other ranks have a batch of this kind."""
        return cls(None, [], (), {}, weight=0.0, padded=0, work=0.0, real=0, kind=kind)

    @property
    def rank_key(self) -> tuple[float, tuple[int, ...]]:
        """Sort key: most work first, the same on every run."""
        return -self.work, self.positions

    @property
    def size_key(self) -> tuple[bool, int]:
        """Sort key: fewest padded tokens first, batches without weight last."""
        return self.weight <= 0, self.padded

    def copied(self) -> "Refined":
        """A copy that the training loop cannot change; a batch that cannot be copied is shared."""
        try:
            return replace(self, batch=copy.deepcopy(self.batch), samples=None)
        except Exception:  # noqa: BLE001
            return replace(self, samples=None)


@lru_cache(maxsize=4096)
def number_of(label: Any) -> int:
    """A 63-bit hash of a label, the same in every process and epoch, to tell kinds apart. TypeError: not hashable."""
    return (int(hashed(described(_plain(label))), 16) >> 1) or 1


def _plain(label: Any) -> Any:
    """The same for labels that are equal: 1 for True, 1.0 and members of an enum that equal it."""
    value = label.item() if isinstance(label, np.generic) else label
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def by_kind(batches: Iterable[Refined]) -> dict[int, list[Refined]]:
    found: dict[int, list[Refined]] = {}
    for batch in batches:
        found.setdefault(batch.kind, []).append(batch)
    return found


@dataclass(frozen=True, slots=True)
class RefinedWindow:
    """The batches made of one request, longest first within each group."""

    number: int
    batches: list[Refined]
    place: Any = None

    def __iter__(self) -> Iterator[Refined]:
        return iter(self.batches)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all tensors in a few blocks; if that fails, in torch's usual way."""
        fields = (self.number, self.batches, self.place)
        try:
            packed = pack_tensors(fields)
        except Exception:  # noqa: BLE001 - torch's own pickler knows more types
            return RefinedWindow, fields
        return _unpacked, packed

    def pin_memory(self) -> "RefinedWindow":
        return replace(self, batches=[replace(b, batch=pin(b.batch)) for b in self.batches])


def _unpacked(*packed: Any) -> RefinedWindow:
    return RefinedWindow(*unpack_tensors(*packed))


def pin(batch: Any) -> Any:
    """A batch with its tensors in pinned memory; containers keep their type (BatchEncoding, named tuples), the batch is
    not changed. Anything else is passed on."""
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, tuple):
        values = [pin(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if not isinstance(batch, (MutableMapping, MutableSequence)):
        return batch
    copied: Any = copy.copy(batch)
    for key in batch if isinstance(batch, Mapping) else range(len(batch)):
        copied[key] = pin(batch[key])
    return copied


def shorten(indices: Sequence[int], most: int = 16) -> str:
    shown = ", ".join(str(i) for i in list(indices)[:most])
    return f"[{shown}]" if len(indices) <= most else f"[{shown}, ... {len(indices)} in all]"


# A window crosses from worker to main process in a few blocks of shared memory. A single tensor costs a file descriptor
# and a connection, and a window of a hundred batches has hundreds. Without blocks: half the throughput.
Location: TypeAlias = tuple[torch.dtype, torch.Size, int, int]  # dtype, shape, number of its block, first byte

ALIGN = 64  # bytes; a cache line, and a multiple of every element size
BLOCK_BYTES = 8 << 20  # the allocator reuses blocks of this size; larger ones are mapped and page-faulted each time


def _is_plain(value: Any) -> bool:
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return False
    return value.layout is torch.strided and not (value.is_quantized or value.is_complex() or value.requires_grad)


def pack_tensors(value: Any) -> tuple[bytes, list[Location], list[torch.Tensor]]:
    """(``value`` with numbers in place of plain CPU tensors, where each tensor is, the blocks: uint8)."""
    file, found = io.BytesIO(), dict[int, tuple[int, torch.Tensor]]()
    packer = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    packer.persistent_id = lambda obj: found.setdefault(id(obj), (len(found), obj))[0] if _is_plain(obj) else None
    packer.dump(value)
    places, sizes, tensors = list[Location](), [0], [tensor for _, tensor in found.values()]
    for tensor in tensors:
        size = -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        if sizes[-1] and sizes[-1] + size > BLOCK_BYTES:
            sizes.append(0)
        places.append((tensor.dtype, tensor.shape, len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for tensor, place in zip(tensors, places, strict=True):
        _view(blocks, place).copy_(tensor)
    return file.getvalue(), places, blocks


def unpack_tensors(payload: bytes, places: list[Location], blocks: list[torch.Tensor]) -> Any:
    """The packed value; its tensors are views of the blocks."""
    unpacker, tensors = pickle.Unpickler(io.BytesIO(payload)), [_view(blocks, place) for place in places]
    unpacker.persistent_load = lambda number: tensors[number]
    return unpacker.load()


def _view(blocks: list[torch.Tensor], place: Location) -> torch.Tensor:
    dtype, shape, number, start = place
    size = shape.numel() * dtype.itemsize
    return blocks[number][start : start + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
