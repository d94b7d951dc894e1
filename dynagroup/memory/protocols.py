"""What a budget asks of a memory model, and the closed form used when nothing better is known."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dynagroup.shapes import TOKENS, BatchShape

__all__ = ["BytesMemoryModel", "MemoryModel", "PaddedTokens"]

FloatArray = NDArray[np.float64]


class MemoryModel(Protocol):
    """Predicts how much memory a batch takes relative to another one.

    Law: neither adding a sample nor lengthening one ever lowers the prediction (for a fixed baseline).
    """

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        """Memory that grows with the batch, of each of K shapes, as a share of the one-row ``baseline``'s: float64 (K,)."""
        ...

    @property
    def fingerprint(self) -> str:
        """Short text that changes whenever predictions may change."""
        ...


@runtime_checkable
class BytesMemoryModel(MemoryModel, Protocol):
    """A memory model that also knows absolute sizes, so it can be held against what a device has."""

    @property
    def static_bytes(self) -> int:
        """Bytes that do not depend on the batch: parameters, gradients, optimizer state, communication buckets."""
        ...

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        """Bytes that grow with the batch, on top of ``static_bytes``, at the peak: float64 (K,)."""
        ...


class PaddedTokens:
    """Memory proportional to padded tokens, all streams added: right for long-known linear models, careful for none.

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
        longest = sum((shape.longest[name] for name in shape.longest), np.zeros_like(shape.longest[TOKENS]))
        return np.asarray(shape.num_samples * np.maximum(longest, 1), dtype=np.float64)
