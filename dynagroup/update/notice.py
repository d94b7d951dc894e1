"""What a loader notices of its batches: that they are not what was planned, or that much of them is padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.checks import warn_user
from dynagroup.plan.advice import FEW_BATCHES, MUCH_PADDING, dear_steps
from dynagroup.plan.notices import JUDGED
from dynagroup.update.stats import LoaderStats

__all__ = ["PaddingNotice", "unplanned"]


class PaddingNotice:
    """Warns once, after a thousand samples, where batches that were cut as they came are much padding.

    Args:
        per_update: whether updates are of a set size, so that an update's share is what is sorted, or else a ``window``.
    """

    def __init__(self, *, per_update: bool, window: int) -> None:
        self._per_update, self._window = per_update, window
        self._judged = False

    def look(self, stats: LoaderStats) -> None:
        """At what the loader has done so far; call it behind an update, or where none is of a set size, behind any step."""
        if self._judged or stats.samples < JUDGED:
            return
        self._judged = True
        if stats.padding > MUCH_PADDING:
            warn_user(f"{stats.padding:.0%} of the tokens are padding: {self._why(stats)}")

    def _why(self, stats: LoaderStats) -> str:
        size, share = stats.samples / max(stats.batches, 1), stats.samples / max(stats.updates, 1)
        if self._per_update and share < 1.5 * size:
            return (
                f"a rank's share of an update, {share:,.0f} samples, is {share / size:.1f} batches, too few to sort; take more "
                "samples an update (gradient accumulation), or none set (`accumulation`)"
            )
        if not self._per_update and self._window < FEW_BATCHES * size:
            return f"a window of {self._window:,} samples is {self._window / size:.0f} batches, too few to sort; raise `window`"
        return dear_steps(size)


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
