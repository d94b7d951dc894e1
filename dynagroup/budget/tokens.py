"""Budgets that count tokens."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget, FloatArray
from dynagroup.errors import ConfigError
from dynagroup.memory.phases import Layout
from dynagroup.shapes import BatchShape, IntArray, round_up
from dynagroup.validation import check_choice, check_int


@dataclass(frozen=True)
class TokenBudget(Budget):
    """Allows at most ``max_tokens`` tokens per batch, padding included, summed over all streams.

    Args:
        max_tokens: int. Padded layout: counts ``num_samples * longest`` of each stream; packed: the sum of all lengths.
        max_samples: int, most samples per batch; None: no limit.
        pad_to_multiple_of: int, tokens: the longest length of each stream (packed: the sum) is rounded up to a multiple.
        layout: "padded" (a batch costs samples times longest) or "packed" (the sum of its tokens).

    A stream with an :class:`AdditiveCap` joined by ``&`` does not count. A batch has at most ``max_tokens`` samples.

    >>> TokenBudget(1024).fits(BatchShape.of([4, 5], longest=256)).tolist()
    [True, False]
    >>> TokenBudget(1024).fits(BatchShape.of([2, 3], {"tokens": 256, "labels": 200})).tolist()
    [True, False]
    """

    counts_every_stream: ClassVar[bool] = True

    max_tokens: int
    max_samples: int | None = field(default=None, kw_only=True)
    pad_to_multiple_of: int = field(default=1, kw_only=True)  # type: ignore[assignment]
    layout: Layout = field(default="padded", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in (
            "max_tokens",
            "pad_to_multiple_of",
            *(() if self.max_samples is None else ("max_samples",)),
        ):
            check_int(name, getattr(self, name))
        check_choice("layout", self.layout, ("padded", "packed"))

    @classmethod
    def from_sequence_length(cls, sequence_length: int, micro_batch_size: int) -> "TokenBudget":
        """Returns a budget of ``sequence_length * 2 * micro_batch_size`` tokens: the rule of thumb of
        online-dynamic-batching, by which half of a batch of fixed size is padding."""
        return cls(
            check_int("sequence_length", sequence_length)
            * 2
            * check_int("micro_batch_size", micro_batch_size)
        )

    def fits(self, shape: BatchShape, /) -> BoolArray:
        ok = shape.num_samples <= min(self.max_tokens, self.max_samples or UNLIMITED)
        if self.layout == "packed":
            return ok & (self._counted(shape) <= self.max_tokens)
        return ok & (
            self._widths(shape) <= self.max_tokens // np.maximum(shape.num_samples, 1)
        )  # a product overflows

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return self._counted(shape).astype(np.float64)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.layout == "packed":
            return None
        most = self.max_tokens // round_up(np.maximum(longest, 1), self.pad_to_multiple_of)
        return most if self.max_samples is None else np.minimum(most, self.max_samples)

    def _counted(self, shape: BatchShape) -> IntArray:
        if self.layout == "padded":
            return shape.num_samples * self._widths(shape)
        return round_up(np.sum(list(shape.total.values()), axis=0), self.pad_to_multiple_of)

    def _widths(self, shape: BatchShape) -> IntArray:
        """Returns the padded tokens of one sample, over all streams."""
        padded = np.sum(
            [round_up(longest, self.pad_to_multiple_of) for longest in shape.longest.values()],
            axis=0,
        )
        return np.maximum(
            padded, self.pad_to_multiple_of
        )  # batches of empty samples are padded as well


def as_budget(budget: Budget | int) -> Budget:
    """Returns a budget as it is, or a number of tokens as a TokenBudget. ConfigError: ``budget`` is neither."""
    if isinstance(budget, (int, np.integer)) and not isinstance(budget, bool):
        return TokenBudget(int(budget))
    if not isinstance(budget, Budget):
        wanted = "a budget such as TokenBudget(4096), or an int (tokens per batch)"
        raise ConfigError(f"`budget` must be {wanted}, but is {budget!r}")
    return budget
