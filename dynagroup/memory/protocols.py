"""The interface of a memory model; the simplest such model; and a table of any model's answers by length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from dynagroup.memory.run import FloatArray
from dynagroup.shapes import BatchShape, IntArray, largest_within, primary


class MemoryModel(Protocol):
    """Predicts the memory of a batch relative to another: never less for one more sample, or for a longer one."""

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        """Memory of K shapes that grows with the batch, as a share of the one-row ``baseline``: float64 (K,)."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that changes whenever predictions may change."""
        ...


@runtime_checkable
class BytesMemoryModel(MemoryModel, Protocol):
    """A memory model that also knows absolute sizes, so that they can be compared with a device's bytes."""

    @property
    def static_bytes(self) -> int:
        """Bytes that do not depend on the batch: parameters, gradients, optimizer state, communication buckets."""
        ...

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        """The bytes of each batch at its peak, without ``static_bytes``: float64 (K,)."""
        ...


class PaddedTokens:
    """Memory proportional to padded tokens, summed over streams: right for models of linear memory, low for others.

    >>> PaddedTokens().relative(BatchShape.of([8], 64), BatchShape.of(4, 256)).tolist()
    [0.5]
    """

    fingerprint = "padded-tokens"

    def __str__(self) -> str:
        return "padded tokens"

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        return self._padded(shape) / np.maximum(self._padded(baseline), 1.0)

    @staticmethod
    def _padded(shape: BatchShape) -> FloatArray:
        return shape.num_samples * np.maximum(np.sum(list(shape.longest.values()), axis=0), 1.0)


REACH = 64  # limit of the table, times the first batch's padded tokens: as far as the regressor was trained
LONGER = 4  # the table goes up to this many times the first batch's lengths; longer samples fit none


@dataclass(frozen=True)
class LargestTable:
    """Most samples of a batch by its longest sample, computed once, because trees are slow: on a grid of lengths in
    geometric steps of 1 % (7 % with two streams). A length is rounded up to the grid.
    """

    grids: Mapping[str, IntArray]
    counts: IntArray

    @classmethod
    def of(cls, model: MemoryModel, baseline: BatchShape, headroom: float) -> "LargestTable":
        top = {name: int(longest[0]) for name, longest in baseline.longest.items()}
        grids = {name: _grid(LONGER * most, 0.01 if len(top) == 1 else 0.07, most) for name, most in top.items()}
        mesh = np.meshgrid(*grids.values(), indexing="ij")
        longest = {name: m.ravel() for name, m in zip(grids, mesh, strict=True)}
        fits = lambda count: model.relative(BatchShape.of(count, longest), baseline) <= headroom  # noqa: E731
        reach = REACH * int(baseline.num_samples[0]) * top[primary(top)] // np.maximum(longest[primary(longest)], 1) + 1
        return cls(grids, largest_within(fits, mesh[0].size, reach).reshape(mesh[0].shape))

    def largest(self, longest: Mapping[str, IntArray]) -> IntArray:
        """Most samples for these lengths: int64 (K,); 0 if a length is beyond the table."""
        places = [np.searchsorted(grid, longest[name]) for name, grid in self.grids.items()]
        inside = np.logical_and.reduce([p < n for p, n in zip(places, self.counts.shape, strict=True)])
        clipped = tuple(np.minimum(p, n - 1) for p, n in zip(places, self.counts.shape, strict=True))
        return np.where(inside, self.counts[clipped], 0)


def _grid(most: int, step: float, exact: int) -> IntArray:
    """Whole numbers, then geometric steps of ``step``; ``exact`` is one of them."""
    whole = np.arange(1, min(most, round(1 / step)) + 1)
    steps = np.exp(np.arange(np.log(whole[-1]), np.log(max(most, whole[-1])) + step, step))
    return np.unique(np.concatenate([whole, np.floor(steps).astype(np.int64), [exact]]))
