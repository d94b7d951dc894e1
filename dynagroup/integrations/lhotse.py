"""Uses a budget as ``constraint`` of lhotse's ``DynamicBucketingSampler``, so that no batch exceeds the budget."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from lhotse.dataset.sampling.base import SamplingConstraint  # pyright: ignore[reportMissingImports]

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.shapes import BatchShape


class BudgetConstraint(SamplingConstraint):  # type: ignore[misc]
    """Ends a batch before another sample of its bucket could exceed the budget.

    lhotse adds a sample before it asks whether the batch is full. So each sample counts as long as the longest one that
    its bucket may have, and batches never exceed the budget, in whatever order samples come.

    Args:
        budget: limit of a batch, in units of ``length_of``; an int means that many units, padding included.
        bounds: longest sample of each bucket; pass ``DynamicBucketingSampler(duration_bins=bounds[:-1])``.
        length_of: function from a cut to its length (frames, tokens). None: ``num_frames``.
    """

    def __init__(
        self,
        budget: Budget | int,
        bounds: Sequence[int],
        *,
        length_of: Callable[[Any], float] | None = None,
    ) -> None:
        self.budget = as_budget(budget)
        self.bounds = sorted(bounds)
        self.length_of = length_of or _num_frames
        if not self._fits(1, self.bounds[-1]):
            raise BudgetError(
                f"a sample of {self.bounds[-1]} does not fit even alone; raise the budget, or lower `bounds`"
            )
        self.reset()

    def _fits(self, num_samples: int, longest: int) -> bool:
        return bool(self.budget.fits(BatchShape.of(num_samples, longest))[0])

    def reset(self) -> None:
        self.num_samples = 0
        self.bucket = 0  # of the longest sample

    def add(self, example: object) -> None:
        length = self.measure_length(example)
        if length > self.bounds[-1]:
            raise ConfigError(
                f"a sample has length {length:g}, but `bounds` end at {self.bounds[-1]}; filter it out"
            )
        self.num_samples += 1
        self.bucket = max(self.bucket, bisect_left(self.bounds, length))

    def exceeded(self) -> bool:
        return self.num_samples > 0 and not self._fits(self.num_samples, self.bounds[self.bucket])

    def close_to_exceeding(self) -> bool:
        return not self._fits(self.num_samples + 1, self.bounds[self.bucket])

    def measure_length(self, example: object) -> float:
        return self.length_of(example)


def _num_frames(cut: Any) -> float:
    if cut.num_frames is None:
        raise ConfigError(
            f"cut {cut.id!r} has no `num_frames`, because it has no features; "
            "pass length_of=lambda cut: cut.num_samples"
        )
    return cut.num_frames
