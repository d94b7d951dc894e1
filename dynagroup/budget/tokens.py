"""Budgets that count tokens."""

from dataclasses import dataclass, field

import numpy as np

from dynagroup.budget.base import BoolArray, Budget, FloatArray
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

    max_tokens: int
    max_samples: int | None = field(default=None, kw_only=True)
    pad_to_multiple_of: int = field(default=1, kw_only=True)  # type: ignore[assignment]
    layout: Layout = field(default="padded", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens)
        check_int("pad_to_multiple_of", self.pad_to_multiple_of)
        if self.max_samples is not None:
            check_int("max_samples", self.max_samples)
        check_choice("layout", self.layout, ("padded", "packed"))

    @classmethod
    def from_sequence_length(cls, sequence_length: int, micro_batch_size: int) -> "TokenBudget":
        """Returns a budget of ``sequence_length * 2 * micro_batch_size`` tokens: the rule of thumb of
        online-dynamic-batching, by which half of a batch of fixed size is padding."""
        check_int("sequence_length", sequence_length)
        check_int("micro_batch_size", micro_batch_size)
        return cls(sequence_length * 2 * micro_batch_size)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        if self.layout == "packed":
            tokens_fit = self._packed(shape) <= self.max_tokens
        else:  # a product with num_samples may exceed 64 bits
            most_tokens = self.max_tokens // np.maximum(shape.num_samples, 1)
            tokens_fit = self._padded_sample(shape) <= most_tokens
        return tokens_fit & (shape.num_samples <= self._most_samples)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.layout == "packed":
            return None
        padded = round_up(np.maximum(longest, 1), self.pad_to_multiple_of)
        return np.minimum(self.max_tokens // padded, self._most_samples)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        if self.layout == "packed":
            return self._packed(shape).astype(np.float64)
        return (shape.num_samples * self._padded_sample(shape)).astype(np.float64)

    @property
    def _most_samples(self) -> int:
        return (
            self.max_tokens if self.max_samples is None else min(self.max_tokens, self.max_samples)
        )

    def _packed(self, shape: BatchShape) -> IntArray:
        tokens = np.sum(list(shape.total.values()), axis=0)
        return round_up(tokens, self.pad_to_multiple_of)

    def _padded_sample(self, shape: BatchShape) -> IntArray:
        """Returns the tokens of one sample with its padding, over all streams; an empty sample is padded as well."""
        padded = [round_up(longest, self.pad_to_multiple_of) for longest in shape.longest.values()]
        return np.maximum(np.sum(padded, axis=0), self.pad_to_multiple_of)


def as_budget(budget: Budget | int) -> Budget:
    """Returns a budget as it is, or a number of tokens as a TokenBudget. ConfigError: ``budget`` is neither."""
    if isinstance(budget, (int, np.integer)) and not isinstance(budget, bool):
        return TokenBudget(int(budget))
    if not isinstance(budget, Budget):
        raise ConfigError(
            "`budget` must be a budget such as TokenBudget(4096), or an int (tokens per batch), "
            f"but is {budget!r}"
        )
    return budget
