"""What a loader notices of its batches: that they are not what was planned, or that much of them is padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.plan.plan import FEW_BATCHES, MUCH_PADDING, dear_steps
from dynagroup.plan.planner import JUDGED
from dynagroup.shapes import TOKENS, said
from dynagroup.update.stats import LoaderStats
from dynagroup.update.updates import PlannedStep
from dynagroup.validation import warn_user

__all__ = ["BatchNotice", "PaddingNotice", "total_of", "unplanned", "width_of"]

SHOWN_IN = {"source": "input_ids", "target": "labels"}  # where collators of transformers put these streams


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


class BatchNotice:
    """Warns once where a batch is not what was planned."""

    def __init__(self) -> None:
        self._said = False

    def look(self, batch: Any, step: PlannedStep, budget: Budget) -> None:
        if step.idle or self._said:
            return
        differs = unplanned(batch, samples=len(step.indices), planned=step.streams, budget=budget)
        if differs is not None:
            self._said = True
            warn_user(
                f"a batch is not what was planned: {differs}. `lengths` are in another order than the dataset, or were measured "
                "with another tokenizer, truncation or template, so batches may not fit; measure them the way samples are "
                "processed and collated, or use OnlineDataLoader, which measures them so by itself (said once)"
            )


def unplanned(batch: Any, *, samples: int, planned: Mapping[str, tuple[int, int]], budget: Budget) -> str | None:
    """How a collated batch differs from its plan, in words; None if it does not, or does not show.

    Looks at the fields in which streams show: columns where samples are padded, their number where they are packed.

    Args:
        samples: how many samples the batch was planned from.
        planned: stream -> tokens of the longest of them, and of all.
        budget: what it was planned by; says what it pads to, and the layout.

    >>> import numpy as np
    >>> from dynagroup.budget.tokens import TokenBudget
    >>> batch = {"input_ids": np.ones((2, 5)), "labels": np.ones((2, 9))}
    >>> unplanned(batch, samples=2, planned={"tokens": (5, 8), "target": (6, 7)}, budget=TokenBudget(99))
    '2 samples came out 9 target tokens wide, but the longest of them was planned with 6'
    """
    packed = budget.layout == "packed"
    for stream, (longest, total) in planned.items():
        shown = total_of(batch, stream) if packed else width_of(batch, samples, stream)
        least = total if packed else longest
        if shown is None or least <= shown <= budget.padded_to(least):
            continue
        tokens = "tokens" if said(stream) == TOKENS else f"{said(stream)} tokens"
        if packed:
            return f"{samples} samples came out as {shown} {tokens}, but were planned with {total}"
        return f"{samples} samples came out {shown} {tokens} wide, but the longest of them was planned with {longest}"
    return None


def width_of(batch: Any, num_samples: int, stream: str) -> int | None:
    """Tokens of a stream that each row of a collated batch has, where a field of its name, or transformers' for it, shows it."""
    for shape in _shapes_shown(batch, stream):
        if len(shape) == 2 and shape[0] == num_samples:
            return int(shape[1])
    return None


def total_of(batch: Any, stream: str) -> int | None:
    """Tokens of a stream that a packed batch has."""
    for shape in _shapes_shown(batch, stream):
        if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
            return int(shape[-1])
    return None


def _shapes_shown(batch: Any, stream: str) -> Iterator[tuple[int, ...]]:
    if not (isinstance(batch, Mapping) or hasattr(batch, "keys")):
        return
    name = said(stream)
    for field_name in dict.fromkeys((name, SHOWN_IN.get(name, SHOWN_IN["source"] if stream == TOKENS else name))):
        try:
            yield tuple(batch[field_name].shape)
        except (TypeError, KeyError, AttributeError):
            continue
