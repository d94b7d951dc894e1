"""How an epoch is cut into batches, as one value; and what becomes of samples that do not fit even alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, fits_of, largest_of
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.plan.batches import RoundBatch
from dynagroup.plan.cost import DEFAULT_WORK, Work, check_work
from dynagroup.plan.padded import OBJECTIVES, Objective
from dynagroup.plan.ranks import Uneven
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, units_of
from dynagroup.validation import check_choice, check_flag, check_function, check_int, warn_user

__all__ = ["Oversize", "PlanConfig", "check_oversize", "oversize_mask", "refuse_oversize", "warn_of_oversize"]

Oversize: TypeAlias = Literal["alone", "error", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How an epoch is cut into batches. Knows no ranks, lengths or budget."""

    shuffle: bool = False
    """Draw windows in a random order and shuffle the steps inside each."""
    window: int | None = None
    """Samples sorted together. None: all of them, or with ``shuffle`` a hundred batches or so."""
    seed: int = 0
    hardest_first: int = 1
    """Steps with the longest samples that lead an epoch, so that running out of memory shows at once."""
    round_batch: RoundBatch | None = None
    """Batch sizes are chosen among this function's values, before the fit check."""
    samples_per_update: int | None = None
    """Every update consists of exactly so many samples over all ranks, drawn as fixed batches would draw them."""
    work: Work = DEFAULT_WORK
    """Predicted time of a batch, which cutting makes least and row mates share."""
    objective: Objective = "time"
    """What cutting makes least: "time", or with "fewest" the number of batches."""
    oversize: Oversize = "alone"
    """A sample that does not fit even alone: "alone", "error" or "drop"."""
    uneven: Uneven = "repeat"
    """Where halving cannot fill the last row: "repeat" the smallest samples, or "drop" the row's samples."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffle", check_flag("shuffle", self.shuffle))
        for name in ("window", "samples_per_update"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_int(name, getattr(self, name), where=" (or None)"))
        for name in ("seed", "hardest_first"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least=0))
        if self.window is not None and self.samples_per_update is not None:
            raise ConfigError(
                "`window` and `samples_per_update` exclude each other: an update's samples are the window"
            )
        check_oversize(self.oversize)
        check_choice("uneven", self.uneven, ("repeat", "drop"))
        check_choice("objective", self.objective, OBJECTIVES)
        object.__setattr__(self, "work", check_work(self.work))
        if self.round_batch is not None:
            check_function("round_batch", self.round_batch, "from int to int")


def check_oversize(value: Oversize) -> None:
    """Refuse what is no such choice."""
    check_choice("oversize", value, ("alone", "error", "drop"))


def oversize_mask(lengths: Streams, budget: Budget) -> NDArray[np.bool_]:
    """Which samples do not fit even alone: bool (N,).

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> oversize_mask({"tokens": np.array([3, 12])}, TokenBudget(10)).tolist()
    [False, True]
    """
    tokens = lengths[TOKENS]
    if not len(tokens):
        return np.zeros(0, np.bool_)
    if len(lengths) == 1 and largest_of(budget, np.asarray([tokens.max()], np.int64)) is not None:
        low, high = -1, int(tokens.max())  # the largest length that fits alone, by bisection
        while low < high:
            middle = (low + high + 1) // 2
            table = budget.largest(np.asarray([middle], np.int64))
            low, high = (middle, high) if table is not None and table[0] >= 1 else (low, middle - 1)
        return tokens > low
    wide = {name: values.astype(np.int64) for name, values in lengths.items()}
    return ~fits_of(budget, BatchShape(np.ones(len(tokens), np.int64), wide, wide))


def refuse_oversize(lengths: Streams, oversize: IntArray) -> None:
    """Raise a :class:`BudgetError` that names the first of these samples, if there are any."""
    if len(oversize):
        index = int(oversize[0])
        raise BudgetError(
            f"sample {index} ({units_of(lengths, index)}) does not fit even alone, nor do {len(oversize) - 1} others; "
            "truncate or filter them, raise the budget, or pass oversize='alone' or 'drop'"
        )


def warn_of_oversize(lengths: Streams, oversize: IntArray, done: Oversize) -> None:
    """Say which samples do not fit even alone and what is done with them, if there are any."""
    if len(oversize):
        what = "left out" if done == "drop" else "emitted alone"
        warn_user(
            f"{len(oversize)} samples do not fit the budget even alone and are {what}; "
            f"the first is sample {oversize[0]} with {units_of(lengths, int(oversize[0]))}; truncate them, raise the budget, or "
            "pass oversize='error'"
        )
