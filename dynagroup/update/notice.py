"""Batches that are not what was planned: noticed by their width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynagroup.budget.base import Budget

__all__ = ["unplanned"]


def unplanned(batch: Any, *, samples: int, longest: int, tokens: int, budget: Budget) -> str | None:
    """How a collated batch differs from its plan, in words; None if it does not, or does not show.

    Looks at ``input_ids`` alone: their columns where samples are padded, their number where they are packed.

    Args:
        samples, longest, tokens: how many samples the batch was planned from, the tokens of the longest, and of all.
        budget: what it was planned by; says what it pads to, and the layout.

    >>> import numpy as np
    >>> from dynagroup.budget.tokens import TokenBudget
    >>> unplanned({"input_ids": np.ones((2, 9))}, samples=2, longest=5, tokens=8, budget=TokenBudget(99))
    '2 samples came out 9 tokens wide, but the longest of them was planned with 5'
    """
    ids = (
        batch["input_ids"] if (isinstance(batch, Mapping) or hasattr(batch, "keys")) and "input_ids" in batch else None
    )
    shape = tuple(getattr(ids, "shape", ()))
    if budget.layout == "packed" and shape and (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)):
        pad = budget.pad_to_multiple_of
        if tokens <= shape[-1] <= -(-tokens // pad) * pad:
            return None
        return f"{samples} samples came out as {shape[-1]} tokens, but were planned with {tokens}"
    if budget.layout == "padded" and len(shape) == 2 and shape[0] == samples:
        pad = budget.pad_to_multiple_of
        if longest <= shape[1] <= -(-longest // pad) * pad:
            return None
        return f"{samples} samples came out {shape[1]} tokens wide, but the longest of them was planned with {longest}"
    return None
