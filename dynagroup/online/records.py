"""What passes between main process and workers: the records of one sample's way, in the order in which it meets them.

::

    main process of a rank                                worker of that rank
    ----------------------                                -------------------
    Planned       positions in the epoch's order
      | Windows
    WindowRequest dataset indices ----------------------> IndexedDataset (or StreamDataset): process
                                                            |
                                                          WindowSamples
                                                            | RefinementCollator: measure, cut, collate
    Queued        <-------------------------------------- RefinedWindow of Refined
      | ranks agree on steps and totals
    Take          a Queued, or None to idle
      | OnlineDataLoader
    Step          the user's batch, and what it weighs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynagroup.online.transfer import pack_tensors, unpack_tensors
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.loss_weight import Share
from dynagroup.update.step import pin

__all__ = ["Planned", "Queued", "Refined", "RefinedWindow", "Take", "WindowRequest", "WindowSamples", "shorten"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A request before it is sent: positions, and how they are grouped.

    Args:
        positions: places in the epoch's order: int64 (N,).
        groups: sizes of batches already planned; None: one window to be cut.
        keep: see :class:`WindowRequest`.
        mark: where it stands in the plan it comes from; empty for what comes from no plan.
        costs: padded tokens planned for each of the groups.
    """

    positions: IntArray
    groups: tuple[int, ...] | None = None
    keep: int = 0
    mark: tuple[int, ...] = ()
    costs: tuple[int, ...] | None = None

    def behind(self, count: int) -> Planned:
        """What remains once the first ``count`` samples (whole groups) were delivered."""
        if self.groups is None:
            return Planned(self.positions[count:], None, self.keep)
        first = int(np.searchsorted(np.cumsum(self.groups), count, side="right"))
        costs = None if self.costs is None else self.costs[first:]
        return Planned(self.positions[count:], self.groups[first:], self.keep, costs=costs)


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """What the main process asks a worker for.

    Args:
        number: which of this rank's windows; answers carry it. -1: nothing is asked for.
        indices: dataset indices.
        groups: sizes of batches already planned, in the order of ``indices``; None: one window to be cut.
        keep: so many of the largest batches come back with their processed samples, so that they can be split later.
        epoch: handed to the dataset's ``set_epoch`` in the worker, where it has one.
        costs: padded tokens planned for each of ``groups``; neighbours that both came out smaller are joined where they fit.
        max_bytes: an answer holds about so many bytes of processed samples; what is left over is asked for again. None: all.
    """

    number: int
    indices: Sequence[int]
    groups: tuple[int, ...] | None = None
    keep: int = 0
    epoch: int = 0
    costs: tuple[int, ...] | None = None
    max_bytes: int | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def first(self, count: int) -> WindowRequest:
        """The same for its first ``count`` samples only, which must be whole groups."""
        if count == len(self.indices):
            return self
        indices = self.indices[:count]
        if self.groups is None:
            return replace(self, indices=indices)
        groups = int(np.searchsorted(np.cumsum(self.groups), count, side="right"))
        costs = None if self.costs is None else self.costs[:groups]
        return replace(self, indices=indices, groups=self.groups[:groups], costs=costs)


@dataclass(frozen=True, slots=True)
class WindowSamples:
    """A request with its processed samples.

    Args:
        resume: a stream's own state before the first of them.
        worker: which worker made them.
        spare: they were used before the epoch was resumed; they only serve to idle on.
    """

    request: WindowRequest
    samples: list[Any]
    resume: Any = None
    worker: int = 0
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Refined:
    """One collated batch with what the main process needs to know about it.

    Args:
        batch: what the user's ``collate_fn`` returned.
        indices: dataset indices (arrival numbers for iterable datasets, places in the window where nothing is known).
        offsets: the samples' places in their window.
        lengths: stream -> int32, true lengths after processing.
        weight: loss weight, see ``weigh``.
        padded: padded tokens. squares: the same, each times its sample's padded length.
        work: predicted time without the price of a step, in linear tokens.
        real: tokens that are no padding.
        group: which planned batch it came from; the window's only group without planned batches.
        oversize: a single sample that does not fit even alone.
        samples: the processed samples, where they were asked for.
        joined: planned batches that were joined to the first of them.
    """

    batch: Any
    indices: list[int]
    offsets: list[int]
    lengths: Streams
    weight: float
    padded: int
    squares: int
    work: float
    real: int
    group: int = 0
    oversize: bool = False
    samples: list[Any] | None = None
    joined: int = 0

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class RefinedWindow:
    """The batches made of one request, longest first within each group."""

    number: int
    batches: list[Refined]
    resume: Any = None
    worker: int = 0
    spare: bool = False

    def __iter__(self) -> Iterator[Refined]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes all tensors travel in one block; what cannot be pickled so goes the usual way."""
        fields = (self.number, self.batches, self.resume, self.worker, self.spare)
        try:
            packed = pack_tensors(fields)
        except Exception:  # noqa: BLE001 - torch's own pickler knows more types
            return RefinedWindow, fields
        return _unpacked, packed

    def pin_memory(self) -> RefinedWindow:
        """The same window with its batches' tensors in pinned memory; DataLoader calls it."""
        return replace(self, batches=[replace(b, batch=pin(b.batch)) for b in self.batches])


def _unpacked(*packed: Any) -> RefinedWindow:
    return RefinedWindow(*unpack_tensors(*packed))


@dataclass(frozen=True, slots=True)
class Queued:
    """A batch that waits for its step.

    Args:
        positions: its samples' places in the epoch's order.
        late: it waits behind all that was planned.
        kept: its processed samples were kept, so that it can be split.
    """

    refined: Refined
    positions: tuple[int, ...]
    late: bool = False
    kept: bool = False

    @property
    def rank_key(self) -> tuple[float, tuple[int, ...]]:
        """Dearest first, the same on every run."""
        return -self.refined.work, self.positions


@dataclass(frozen=True, slots=True)
class Take:
    """One step on this rank: a batch, or None to idle, and what it weighs."""

    queued: Queued | None
    samples: Share
    weight: Share
    ends_update: bool


def shorten(indices: Sequence[int], most: int = 16) -> str:
    """Indices for a message.

    >>> shorten(range(20), most=3)
    '[0, 1, 2, ... 20 in all]'
    """
    shown = ", ".join(str(i) for i in list(indices)[:most])
    return f"[{shown}]" if len(indices) <= most else f"[{shown}, ... {len(indices)} in all]"
