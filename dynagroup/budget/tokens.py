"""Budgets that count tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget, Layout, padded_tokens, positive
from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape, IntArray, round_up

__all__ = ["TokenBudget"]


@dataclass(frozen=True)
class TokenBudget(Budget):
    """At most ``max_tokens`` tokens a batch, padding counted.

    Args:
        max_tokens: tokens. Padded layout: ``num_samples * longest``; packed layout: the sum over the samples.
        max_samples: at most so many samples a batch.
        pad_to_multiple_of: the longest sample is rounded up to a multiple of this before the check.
        layout: "padded" or "packed".

    A sample of length 0 counts as one token, so that a batch stays finite.

    >>> TokenBudget(1024).fits(BatchShape.of([4, 5], longest=256)).tolist()
    [True, False]
    """

    max_tokens: int
    max_samples: int | None = field(default=None, kw_only=True)
    pad_to_multiple_of: int = field(default=1, kw_only=True)  # type: ignore[assignment]
    layout: Layout = field(default="padded", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        positive("max_tokens", self.max_tokens)
        positive("pad_to_multiple_of", self.pad_to_multiple_of)
        if self.max_samples is not None:
            positive("max_samples", self.max_samples)
        if self.layout not in ("padded", "packed"):
            raise ConfigError(f"`layout` must be 'padded' or 'packed', but is {self.layout!r}")

    @classmethod
    def from_sequence_length(cls, sequence_length: int, micro_batch_size: int) -> TokenBudget:
        """The budget of a run sized by hand: ``sequence_length * 2 * micro_batch_size`` tokens.

        The factor 2 is online-dynamic-batching's rule of thumb: the typical batch of a fixed-size run is about half padding.
        """
        positive("sequence_length", sequence_length)
        positive("micro_batch_size", micro_batch_size)
        return cls(sequence_length * 2 * micro_batch_size)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        ok = shape.num_samples <= min(self.max_tokens, self.max_samples or UNLIMITED)
        return ok & (padded_tokens(shape, self) <= self.max_tokens)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.layout == "packed":
            return None
        most = self.max_tokens // np.maximum(round_up(longest, self.pad_to_multiple_of), 1)
        return most if self.max_samples is None else np.minimum(most, self.max_samples)
