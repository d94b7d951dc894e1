"""Messages between the main process and its workers, in the order in which a sample passes through them.

::

    main process of a rank                                worker of that rank
    ----------------------                                -------------------
    Request       positions and dataset indices --------> IndexedDataset (or IterableWindows): process
                                                            |
                                                          WindowSamples
                                                            | RefinementCollator: measure, cut, collate
    Refined       <-------------------------------------- RefinedWindow
      | ranks agree on steps and totals
    Step          the user's batch and its weight
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dynagroup.fingerprint import described, hashed
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.blocks import reduced

Sample: TypeAlias = Any  # what the user's dataset returns
Label: TypeAlias = Any  # what the user's ``kind_of`` returns


class Pool(NamedTuple):
    """How the samples of a request are dealt to updates, see :mod:`dynagroup.online.pools`."""

    share_sizes: tuple[int, ...]  # this rank's samples in each update
    update_size: int  # samples of an update over all ranks; the last one of an epoch may have fewer
    strata: int | None
    seeds: tuple[int, ...]  # equal on all ranks
    rank: int


@dataclass(frozen=True, slots=True)
class Request:
    positions: IntArray  # int64 (N,), positions in the epoch's order
    # Sizes of the planned batches; None: the worker cuts the window.
    groups: tuple[int, ...] | None = None
    # So many of the largest batches (of each update) keep their samples, so that they can be split later.
    keep: int = 0
    # True: plans give this request again after a resume, so a state only counts it.
    planned: bool = False
    # Number of the request, repeated in the answer; -1: an empty request.
    number: int = -1
    indices: Sequence[int] = ()  # dataset indices
    epoch: int = 0  # passed to the dataset's ``set_epoch`` in the worker, if it has one
    # Most bytes of samples in an answer; the rest is requested again; None: all.
    max_bytes: int | None = None
    pool: Pool | None = None  # set if the samples are those of several updates

    @classmethod
    def of(cls, indices: Sequence[int]) -> "Request":
        """Makes a request for one batch of dataset indices that have no positions."""
        return cls(np.arange(len(indices)), (len(indices),), number=0, indices=indices)

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: int, stop: int) -> "Request":
        """Returns the request for a range of these samples, which must consist of whole groups."""
        groups = self.groups
        if groups is not None:
            ends = np.cumsum(groups)
            first, end = np.searchsorted(ends, (start, stop), side="right").tolist()
            groups = groups[first:end]
        return replace(
            self,
            positions=self.positions[start:stop],
            indices=self.indices[start:stop],
            groups=groups,
        )


@dataclass(frozen=True, slots=True)
class WindowSamples:
    """A request with its processed samples. ``place``: for iterable datasets, the worker and its resume point."""

    request: Request
    samples: list[Sample]
    place: Any = None


@dataclass(slots=True, eq=False)  # a frozen one takes three times as long to make
class Refined:
    """One collated batch, with what the main process needs to know of it."""

    batch: Any  # what the user's ``collate_fn`` returned
    # Dataset indices; or numbers of arrival (iterable dataset), or places in the window.
    indices: list[int]
    positions: tuple[int, ...]  # the samples' positions in the epoch's order
    lengths: Streams  # true lengths, after processing
    weight: float  # loss weight, see ``weigh``
    padded: int  # padded tokens
    work: float  # predicted time in linear tokens, without the fixed cost of a step
    real: int  # tokens without padding
    memory: float | None = None  # predicted memory as a share of the limit; None: not predicted
    group: int = 0  # number of the planned batch that it comes from
    update: int = 0  # place of its update in a pool
    oversize: bool = False  # True: a single sample that does not fit even alone
    label: Label = None  # with kinds, the label of all its samples
    kind: int = 0  # the label's number, if all ranks must have one kind in a step; else 0
    samples: list[Sample] | None = None  # its samples, if kept to split the batch

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def idle(cls, kind: int) -> "Refined":
        """Returns an empty batch, for a step in which other ranks have a batch of this kind."""
        return cls(None, [], (), {}, weight=0.0, padded=0, work=0.0, real=0, kind=kind)

    @property
    def rank_key(self) -> tuple[float, tuple[int, ...]]:
        """Sort key: most work first, with ties broken the same way in every run."""
        return -self.work, self.positions

    @property
    def size_key(self) -> tuple[bool, int]:
        """Sort key: fewest padded tokens first, batches of weight 0 last."""
        return self.weight <= 0, self.padded

    def copied(self) -> "Refined":
        """Returns a copy that the training loop cannot change; a batch that cannot be copied is shared."""
        try:
            return replace(self, batch=copy.deepcopy(self.batch), samples=None)
        except Exception:
            return replace(self, samples=None)


@lru_cache(maxsize=4096)
def number_of(label: Label) -> int:
    """Returns a 63-bit hash of a label, the same in every process. TypeError: not hashable, or compared by identity."""
    if copy.deepcopy(label) != label:
        raise TypeError("it does not equal its own copy")
    return (int(hashed(described(_plain(label))), 16) >> 1) or 1


def _plain(label: Label) -> Any:
    """Returns one value for all equal labels: for example 1 for True, 1.0, and enum members that equal 1."""
    value = label.item() if isinstance(label, np.generic) else label
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value


def by_kind(batches: Iterable[Refined]) -> dict[int, list[Refined]]:
    alike: dict[int, list[Refined]] = {}
    for batch in batches:
        alike.setdefault(batch.kind, []).append(batch)
    return alike


@dataclass(frozen=True, slots=True)
class RefinedWindow:
    """The batches made from one request, longest first within each group."""

    number: int
    batches: list[Refined]
    place: Any = None

    def __iter__(self) -> Iterator[Refined]:
        return iter(self.batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(RefinedWindow, (self.number, self.batches, self.place))

    def pin_memory(self) -> "RefinedWindow":
        pinned = [replace(batch, batch=pin(batch.batch)) for batch in self.batches]
        return replace(self, batches=pinned)


def pin(batch: Any) -> Any:
    """Returns a batch with its tensors in pinned memory. Containers keep their type (BatchEncoding, named tuples), and
    the batch itself is not changed. Values without tensors are returned as they are."""
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
