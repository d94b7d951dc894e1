"""Defines what a memory model must offer, the simplest memory model, and a table of the most samples by length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.phases import FloatArray
from dynagroup.shapes import BatchShape, IntArray, largest_within, primary


class MemoryModel(Protocol):
    """Predicts the memory of a batch relative to another one; it never falls when a sample is added or grows."""

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        """Returns the memory of K shapes divided by that of ``baseline``, without what all batches need: float64 (K,)."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that changes whenever a prediction could change."""
        ...


@runtime_checkable
class BytesMemoryModel(MemoryModel, Protocol):
    """A memory model that also predicts bytes, which can be compared with the memory of a device."""

    @property
    def static_bytes(self) -> int:
        """Bytes that do not depend on the batch: parameters, gradients, optimizer state, communication buckets."""
        ...

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        """Returns the peak bytes of each batch, without ``static_bytes``: float64 (K,)."""
        ...


class PaddedTokens:
    """Predicts memory proportional to padded tokens, summed over streams; too low for models with quadratic memory.

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
        units = np.sum(list(shape.longest.values()), axis=0)
        return shape.num_samples * np.maximum(units, 1.0)


MAX_RATIO = 64  # of padded tokens to the baseline's, the largest in training
MAX_LONGER = 4  # times the baseline's lengths; longer samples do not fit
STEPS = {1: 0.01, 2: 0.07}  # of the grid of lengths, by the number of streams


@dataclass(frozen=True)
class LargestTable:
    """Table of the most samples that fit, by the length of the longest sample. It is computed once, because XGBoost's
    trees are slow. Lengths are rounded up to a grid with steps of 1 % (7 % with two streams)."""

    grids: Mapping[str, IntArray]
    counts: IntArray

    @classmethod
    def of(cls, model: MemoryModel, baseline: BatchShape, headroom: float) -> "LargestTable":
        step = STEPS[len(baseline.longest)]
        grids = {name: _grid(int(longest[0]), step) for name, longest in baseline.longest.items()}
        meshes = np.meshgrid(*grids.values(), indexing="ij")
        longest = {name: mesh.ravel() for name, mesh in zip(grids, meshes, strict=True)}

        def fits(count: IntArray) -> NDArray[np.bool_]:
            return model.relative(BatchShape.of(count, longest), baseline) <= headroom

        first = primary(grids)
        baseline_tokens = int(baseline.num_samples[0]) * int(baseline.longest[first][0])
        most = MAX_RATIO * baseline_tokens // longest[first] + 1
        counts = largest_within(fits, len(most), most)
        return cls(grids, counts.reshape(meshes[0].shape))

    def largest(self, longest: Mapping[str, IntArray]) -> IntArray:
        """Returns the most samples that fit with these lengths: int64 (K,); 0 for lengths beyond the table."""
        inside = np.True_
        places = []
        for name, grid in self.grids.items():
            place = np.searchsorted(grid, longest[name])
            inside = inside & (place < len(grid))
            places.append(np.minimum(place, len(grid) - 1))
        return np.where(inside, self.counts[tuple(places)], 0)


def _grid(baseline_length: int, step: float) -> IntArray:
    """Returns the grid of lengths: all small whole numbers, then steps of the factor 1 + ``step``, and the baseline's."""
    most = MAX_LONGER * baseline_length
    whole = np.arange(1, min(most, round(1 / step)) + 1)
    logs = np.arange(np.log(whole[-1]), np.log(most) + step, step)
    steps = np.floor(np.exp(logs)).astype(np.int64)
    return np.unique(np.concatenate([whole, steps, [baseline_length]]))
