"""Samples that do not fit even alone: found, refused, or told of."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, fits_of, largest_of
from dynagroup.errors import BudgetError
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, units_of
from dynagroup.validation import check_choice, warn_user

__all__ = ["Oversize", "check_oversize", "oversize_mask", "refuse_oversize", "warn_of_oversize"]

Oversize: TypeAlias = Literal["alone", "error", "drop"]


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
