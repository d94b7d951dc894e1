"""Work: how long a batch will take, predicted in linear tokens. It cuts windows and matches ranks; it never decides what fits.

A *linear token* is the time of one token in the matrix products of a layer. Attention adds to it in proportion to the
length of the sample, and every step costs something before its first token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget, Layout
from dynagroup.checks import check_number
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.shapes import TOKENS, BatchShape, Streams, round_up

__all__ = ["Work"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Predicted time of a batch: ``per_step + n * (L + L**2 / crossover)``, packed ``per_step + sum(l + l**2 / crossover)``.

    Args:
        per_step: linear tokens that a step costs however small its batch is: launching kernels, reducing gradients.
        crossover: tokens at which a sample's attention costs as much as everything else; ``math.inf``: attention is free.

    Raises:
        ConfigError: an argument is no such number.

    >>> Work(per_step=100, crossover=1000).of_lengths([10, 1000]).tolist()
    [10.1, 2000.0]
    """

    per_step: float = 1024.0
    crossover: float = 12_288.0

    def __post_init__(self) -> None:
        if self.per_step != 0:
            check_number("per_step", self.per_step)
        if self.crossover != math.inf:
            check_number("crossover", self.crossover)

    def of_lengths(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Work of samples of these lengths, without the price of a step: linear tokens, float64 (N,)."""
        linear = np.asarray(tokens, np.float64)
        return linear + linear * linear / self.crossover

    def of_shapes(
        self, shape: BatchShape, *, layout: Layout = "padded", pad_to_multiple_of: int = 1
    ) -> NDArray[np.float64]:
        """Work of batches of these shapes, without the price of a step; packed at most: a shape does not tell its squares."""
        longest = round_up(shape.longest[TOKENS], pad_to_multiple_of)
        if layout == "packed":
            return shape.total[TOKENS] * (1.0 + shape.longest[TOKENS] / self.crossover)
        return shape.num_samples * self.of_lengths(longest)

    def of_batches(self, batches: Batches, lengths: Streams, budget: Budget) -> NDArray[np.float64]:
        """Work of every batch, without the price of a step; ``lengths`` are indexed by what ``batches`` hold."""
        if budget.layout == "packed" and len(batches):
            return np.add.reduceat(self.of_lengths(lengths[TOKENS][batches.order]), batches.offsets[:-1])
        return self.of_shapes(shapes_of(batches, lengths), pad_to_multiple_of=budget.pad_to_multiple_of)

    def of_rows(self, work: NDArray[np.float64]) -> float:
        """Predicted time of steps: each costs its price and the most work of a rank. ``work``: float64 (steps, ranks)."""
        return float(self.per_step * len(work) + work.max(axis=1, initial=0.0).sum())
