"""Budgets that predict memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import BoolArray, Budget, positive
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.memory.run import TARGET
from dynagroup.memory.learned.regressor import MemoryRegressor
from dynagroup.memory.model import BytesMemoryModel, MemoryModel
from dynagroup.memory.table import LargestTable
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, round_up

__all__ = ["MemoryBudget"]


@dataclass(frozen=True)
class MemoryBudget(Budget):
    """As many samples as fit in the memory of the hardest batch, as a memory model predicts it.

    The hardest batch is the ``batch_size`` longest samples: you know that it fits your device. Every later batch grows as
    far as its predicted memory stays within ``headroom`` of that one's. Shapes no larger than the hardest one always fit.

    Args:
        batch_size: samples of the hardest batch.
        longest: tokens (or stream -> units) of its longest sample; default: taken from the dataset's lengths.
        model: any :class:`~dynagroup.memory.MemoryModel`; default: the pretrained regressor.
        headroom: share of the hardest batch's memory that a grown batch may be predicted to take, in (0, 1].
        max_growth: a batch has at most ``batch_size * max_growth`` samples; None: no limit.
        pad_to_multiple_of: the longest sample is rounded up to a multiple of this before the check.

    >>> from dynagroup.memory.model import PaddedTokens
    >>> budget = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.9)
    >>> budget.fits(BatchShape.of([4, 7, 8], longest=[100, 50, 50])).tolist()
    [True, True, False]
    """

    batch_size: int | None
    longest: int | Mapping[str, int] | None = field(default=None, kw_only=True)
    model: MemoryModel | None = field(default=None, kw_only=True)
    headroom: float = field(default=0.9, kw_only=True)
    max_growth: float | None = field(default=None, kw_only=True)
    pad_to_multiple_of: int = field(default=1, kw_only=True)  # type: ignore[assignment]
    limit_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.limit_bytes is None:
            positive("batch_size", self.batch_size)  # type: ignore[arg-type]
        positive("pad_to_multiple_of", self.pad_to_multiple_of)
        positive("headroom", self.headroom, float)
        if self.headroom > 1:
            raise ConfigError(
                f"`headroom` is the share of the limit that may be used, at most 1.0, but is {self.headroom!r}"
            )
        for name, value in self.longest.items() if isinstance(self.longest, Mapping) else [("longest", self.longest)]:
            if value is not None:
                positive(name, value)
        if self.model is not None and not hasattr(self.model, "relative"):
            raise ConfigError(
                f"`model` must predict memory, but is {type(self.model).__name__}; for a model of transformers: "
                "MemoryRegressor.pretrained(Workload.from_model(model))"
            )
        if self.max_growth is not None:
            positive("max_growth", self.max_growth, float)

    @classmethod
    def from_bytes(
        cls, limit_bytes: int, *, model: BytesMemoryModel, headroom: float = 0.9, pad_to_multiple_of: int = 1
    ) -> MemoryBudget:
        """A budget held against the bytes that a device has, static memory included."""
        positive("limit_bytes", limit_bytes)
        if not isinstance(model, BytesMemoryModel):
            raise ConfigError(f"`model` must answer in bytes (ProfiledMemory does), but is {model!r}")
        if model.static_bytes >= headroom * limit_bytes:
            raise BudgetError(
                f"static memory ({model.static_bytes:,} bytes) alone exceeds {headroom:.0%} of limit_bytes={limit_bytes:,}; "
                "use a smaller model, a leaner optimizer, sharding, or more memory"
            )
        return cls(None, model=model, headroom=headroom, pad_to_multiple_of=pad_to_multiple_of, limit_bytes=limit_bytes)

    def bind(self, lengths: Streams, /) -> MemoryBudget:
        if self.limit_bytes is not None or self.longest is not None:
            return self
        return replace(self, longest={name: int(v.max(initial=1)) for name, v in lengths.items()})

    def predicted(self, shape: BatchShape, /) -> NDArray[np.float64]:
        """Predicted memory as a share of the limit (``limit_bytes``, or what the hardest batch takes): float64 (K,)."""
        padded = self._padded(shape)
        if self.limit_bytes is not None:
            return (self._bytes_model.static_bytes + self._bytes_model.batch_bytes(padded)) / self.limit_bytes
        return self._model.relative(padded, self._baseline)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        padded = self._padded(shape)
        if self.limit_bytes is not None:
            model = self._bytes_model
            return model.static_bytes + model.batch_bytes(padded) <= self.headroom * self.limit_bytes
        baseline = self._baseline
        known_safe = padded.num_samples <= baseline.num_samples
        for name, longest in padded.longest.items():
            known_safe = known_safe & (longest <= baseline.longest[name])
        ok = known_safe | self._grown(padded)
        return ok if self.max_growth is None else ok & (padded.num_samples <= int(self.batch_size * self.max_growth))  # type: ignore[operator]

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.limit_bytes is None and len(self._baseline.longest) > 1:
            return None
        low, high = np.zeros(len(longest), np.int64), np.full(len(longest), 2**40)
        while (high - low > 1).any():  # by bisection over `fits`, so that the two always agree
            middle = (low + high) // 2
            fits = self.fits(BatchShape.of(middle, longest))
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low

    @property
    def fingerprint(self) -> str:
        return super().fingerprint if self.model is not None else replace(self, model=self._model).fingerprint

    def _grown(self, padded: BatchShape) -> BoolArray:
        """Shapes that are predicted to fit. A regressor is asked once, for a table; a formula is asked directly."""
        table = self._table
        if table is None:
            return self._model.relative(padded, self._baseline) <= self.headroom
        return padded.num_samples <= table.largest(padded.longest)

    @cached_property
    def _table(self) -> LargestTable | None:
        model, baseline = self._model, self._baseline
        if not isinstance(model, MemoryRegressor):
            return None
        known = {name: v for name, v in baseline.longest.items() if name in (TOKENS, TARGET)}
        return LargestTable.of(model, BatchShape(baseline.num_samples, known, baseline.total), self.headroom)

    @cached_property
    def _model(self) -> MemoryModel:
        return self.model or MemoryRegressor.pretrained()

    @property
    def _bytes_model(self) -> BytesMemoryModel:
        assert isinstance(self.model, BytesMemoryModel)
        return self.model

    @property
    def _baseline(self) -> BatchShape:
        if self.longest is None:
            raise ConfigError(
                "`longest` is not known: give MemoryBudget(..., longest=tokens of your longest sample), "
                "or hand the budget to a sampler that has the lengths"
            )
        return self._padded(BatchShape.of(self.batch_size, self.longest))  # type: ignore[arg-type]

    def _padded(self, shape: BatchShape) -> BatchShape:
        if self.pad_to_multiple_of == 1:
            return shape
        longest = {**shape.longest, TOKENS: round_up(shape.longest[TOKENS], self.pad_to_multiple_of)}
        return BatchShape(shape.num_samples, longest, shape.total)
