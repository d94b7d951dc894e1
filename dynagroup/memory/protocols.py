"""Defines what a memory model must offer, the simplest memory model, and a table of the most samples by length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

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
        return shape.num_samples * np.maximum(np.sum(list(shape.longest.values()), axis=0), 1.0)


REACH = 64  # the table ends at this many times the baseline's padded tokens, the largest ratio in training
LONGER = 4  # the table ends at this many times the baseline's lengths; longer samples do not fit


@dataclass(frozen=True)
class LargestTable:
    """Table of the most samples that fit, by the length of the longest sample. It is computed once, because XGBoost's
    trees are slow. Lengths are rounded up to a grid with steps of 1 % (7 % with two streams)."""

    grids: Mapping[str, IntArray]
    counts: IntArray

    @classmethod
    def of(cls, model: MemoryModel, baseline: BatchShape, headroom: float) -> "LargestTable":
        top = {name: int(longest[0]) for name, longest in baseline.longest.items()}
        grids = {
            name: _grid(LONGER * most, 0.01 if len(top) == 1 else 0.07, most)
            for name, most in top.items()
        }
        mesh = np.meshgrid(*grids.values(), indexing="ij")
        longest = {name: m.ravel() for name, m in zip(grids, mesh, strict=True)}
        fits = lambda count: model.relative(BatchShape.of(count, longest), baseline) <= headroom  # noqa: E731
        reach = (
            REACH
            * int(baseline.num_samples[0])
            * top[primary(top)]
            // np.maximum(longest[primary(longest)], 1)
            + 1
        )
        return cls(grids, largest_within(fits, mesh[0].size, reach).reshape(mesh[0].shape))

    def largest(self, longest: Mapping[str, IntArray]) -> IntArray:
        """Returns the most samples that fit with these lengths: int64 (K,); 0 for lengths beyond the table."""
        places = [np.searchsorted(grid, longest[name]) for name, grid in self.grids.items()]
        inside = np.logical_and.reduce(
            [p < n for p, n in zip(places, self.counts.shape, strict=True)]
        )
        clipped = tuple(
            np.minimum(p, n - 1) for p, n in zip(places, self.counts.shape, strict=True)
        )
        return np.where(inside, self.counts[clipped], 0)


def _grid(most: int, step: float, exact: int) -> IntArray:
    """Returns the grid of lengths: all small whole numbers, then steps of the factor 1 + ``step``, and ``exact``."""
    whole = np.arange(1, min(most, round(1 / step)) + 1)
    steps = np.exp(np.arange(np.log(whole[-1]), np.log(max(most, whole[-1])) + step, step))
    return np.unique(np.concatenate([whole, np.floor(steps).astype(np.int64), [exact]]))
