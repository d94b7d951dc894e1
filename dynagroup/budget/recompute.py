"""An experiment: batches that fit as they are, and long samples that fit once their activations are recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import BoolArray, Budget, FloatArray, cost_of, fits_of, largest_of
from dynagroup.budget.memory import MemoryBudget
from dynagroup.errors import ConfigError
from dynagroup.memory.run import Layout
from dynagroup.shapes import BatchShape, IntArray, Streams
from dynagroup.validation import check_int

__all__ = ["RecomputeBudget"]


@dataclass(frozen=True)
class RecomputeBudget(Budget):
    """Experimental. Batches fit without gradient checkpointing, but those of so few samples that there is no other way.

    Checkpointing runs every forward pass twice: about a third more time. A batch of short samples is better made smaller;
    a sample that does not fit even alone cannot be. So a batch fits if it fits ``without``, or if it has at most
    ``most_samples`` samples and fits ``recomputed``. This is monotone: whatever fits ``without`` still does with a
    sample less, and so does a batch of few samples ``recomputed``. :class:`~dynagroup.oom.RecomputeWhereNeeded` switches
    checkpointing on for the steps that need it.

    Args:
        without: the budget of batches that are not recomputed.
        recomputed: the budget with checkpointing; it should allow all that ``without`` does.
        most_samples: of a batch that is recomputed.

    Raises:
        ConfigError: the two differ in layout or padding, or ``most_samples`` is no positive integer.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> budget = RecomputeBudget(TokenBudget(1000), TokenBudget(4000))
    >>> budget.fits(BatchShape.of([10, 11, 1, 2, 1], [100, 100, 4000, 1500, 5000])).tolist()
    [True, False, True, False, False]
    >>> budget.needs(BatchShape.of([10, 1], [100, 4000])).tolist()
    [False, True]
    """

    counts_every_stream: ClassVar[bool] = True
    knows_memory: ClassVar[bool] = True

    without: Budget
    recomputed: Budget
    most_samples: int = 1

    def __post_init__(self) -> None:
        check_int("most_samples", self.most_samples)
        for name in ("layout", "pad_to_multiple_of"):
            one, other = getattr(self.without, name), getattr(self.recomputed, name)
            if one != other:
                raise ConfigError(f"`without` has {name}={one!r}, but `recomputed` has {other!r}; give both the same")

    @classmethod
    def from_model(
        cls, model_or_config: Any, memory: str | int | None = None, *, most_samples: int = 1, **how: Any
    ) -> RecomputeBudget:
        """Both budgets from one model, traced with and without checkpointing. Arguments as of ``MemoryBudget.from_model``.

        Raises:
            ConfigError, BudgetError: as there; and ``gradient_checkpointing`` is not to be given.
        """
        if "gradient_checkpointing" in how:
            raise ConfigError("`gradient_checkpointing` is what RecomputeBudget decides for every batch; leave it out")
        without, recomputed = (
            MemoryBudget.from_model(model_or_config, memory, mode="train", gradient_checkpointing=on, **how)
            for on in (False, True)
        )
        return cls(without, recomputed, most_samples)

    @property
    def layout(self) -> Layout:
        return self.without.layout

    @property
    def pad_to_multiple_of(self) -> int:
        return self.without.pad_to_multiple_of

    def bind(self, lengths: Streams, /) -> RecomputeBudget:
        return RecomputeBudget(self.without.bind(lengths), self.recomputed.bind(lengths), self.most_samples)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        few = shape.num_samples <= self.most_samples
        return fits_of(self.without, shape) | (few & fits_of(self.recomputed, shape))

    def needs(self, shape: BatchShape, /) -> BoolArray:
        """Which of these batches must be recomputed: those that do not fit without. bool (K,)."""
        return ~fits_of(self.without, shape)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        most, recomputed = largest_of(self.without, longest), largest_of(self.recomputed, longest)
        if most is None or recomputed is None:
            return None
        return np.maximum(most, np.minimum(recomputed, self.most_samples))

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return cost_of(self.without, shape)  # what it costs recomputed would fall from one sample to two

    @property
    def fingerprint(self) -> str:
        return f"{self.without.fingerprint}, or {self.most_samples} recomputed: {self.recomputed.fingerprint}"
