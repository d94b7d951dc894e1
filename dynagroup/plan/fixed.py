"""What shuffled batches of one size would make of a plan's samples: what plans are held against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynagroup.budget.base import Budget, padded_tokens, real_tokens
from dynagroup.plan.batches import Batches, fixed_batches, shapes_of
from dynagroup.plan.plan import BatchPlan
from dynagroup.shapes import BatchShape, IntArray, Streams

__all__ = ["FixedBatches", "most_of_the_longest"]


@dataclass(frozen=True)
class FixedBatches:
    """Shuffled batches of a fixed size, with their figures.

    Args:
        size: samples of a batch.
        fits: whether a batch of the hardest samples, which the shuffle may draw, fits the plan's budget.
        batches: dataset indices.
        padding: share of the padded tokens that is padding.
        num_steps: with one batch a rank in each.
        time: predicted time of the epoch, in linear tokens.
    """

    size: int
    fits: bool
    batches: Batches
    padding: float
    num_steps: int
    time: float

    @classmethod
    def of(cls, plan: BatchPlan, size: int | None = None, *, seed: int = 0) -> FixedBatches:
        """Of the plan's samples on its ranks. ``size``: None: as many as fit, were they the longest."""
        samples = np.sort(plan.batches.order)
        most = most_of_the_longest({name: values[samples] for name, values in plan.lengths.items()}, plan.budget)
        size = size or max(most, 1)
        batches = fixed_batches(np.random.default_rng(seed).permutation(samples), size)
        shapes = shapes_of(batches, plan.lengths)
        padded = int(padded_tokens(shapes, plan.budget).sum())
        work = plan.work.of_batches(batches, plan.lengths, plan.budget)
        rows = np.zeros(-(-len(work) // plan.world_size) * plan.world_size)
        rows[: len(work)] = work
        return cls(
            size=size,
            fits=size <= most,
            batches=batches,
            padding=1.0 - int(real_tokens(shapes, plan.budget).sum()) / max(padded, 1) if padded else 0.0,
            num_steps=len(rows) // plan.world_size,
            time=plan.work.of_rows(rows.reshape(-1, plan.world_size)),
        )


def most_of_the_longest(lengths: Streams, budget: Budget) -> int:
    """Samples that fit one batch even if they are the longest in every stream; those that do not fit alone do not count.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> most_of_the_longest({"tokens": np.array([3, 9, 2, 50])}, TokenBudget(20))
    2
    """
    wide = {name: values.astype(np.int64) for name, values in lengths.items()}
    count = len(next(iter(wide.values())))
    alone = budget.fits(BatchShape(np.ones(count, np.int64), wide, wide)) if count else np.zeros(0, np.bool_)
    falling = {name: np.sort(values[alone])[::-1] for name, values in wide.items()}
    sums: dict[str, IntArray] = {name: np.cumsum(values) for name, values in falling.items()}
    low, high = 0, int(alone.sum())
    while low < high:
        middle = (low + high + 1) // 2
        longest = {name: int(values[0]) for name, values in falling.items()}
        shape = BatchShape.of(middle, longest, {name: int(values[middle - 1]) for name, values in sums.items()})
        low, high = (middle, high) if budget.fits(shape)[0] else (low, middle - 1)
    return low
