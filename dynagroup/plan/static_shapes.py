"""Few shapes of batches, for models that are compiled for each shape they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynagroup.budget.base import BoolArray, Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.lengths import as_streams
from dynagroup.plan.padded import OrderedWindow
from dynagroup.shapes import TOKENS, BatchShape, IntArray, round_up
from dynagroup.validation import check_int

LOOKED_AT = 4096  # samples, spread evenly over the sorted lengths, that the rungs are fitted to


class ShapeLadder(Budget):
    """A few shapes (samples, tokens) that fit a budget, fitted to a dataset's lengths; itself the budget to plan with.

    Pad every batch to the shape that :meth:`shape_for` names, in tokens and, where the number of samples must be fixed too,
    with empty rows. The lengths of the rungs are those that pad least.

    Args:
        lengths: tokens of each sample.
        budget: what fits; a number means so many tokens. It must decide by samples and longest alone.
        num_shapes: most shapes.

    Raises:
        ConfigError: there are no lengths, or the budget decides by more than the longest sample.

    >>> ladder = ShapeLadder([10, 11, 12, 50, 100], 200, num_shapes=2)
    >>> ladder.shapes
    [(16, 12), (2, 100)]
    >>> ladder.shape_for(40)
    (2, 100)
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray | Mapping[str, Any],
        budget: Budget | int,
        num_shapes: int = 8,
    ) -> None:
        streams = as_streams(lengths)
        num_shapes = check_int("num_shapes", num_shapes)
        base = as_budget(budget).bind(streams)
        if not len(streams[TOKENS]):
            raise ConfigError("a ShapeLadder needs lengths to be fitted to, but there are none")
        ordered = np.sort(streams[TOKENS].astype(np.int64))[::-1]
        spread = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), LOOKED_AT)).astype(np.int64))
        rungs = _rungs(round_up(ordered[spread], base.pad_to_multiple_of), num_shapes)
        most = base.largest(rungs) if len(streams) == 1 else None
        if most is None or base.layout == "packed":
            said = "a ShapeLadder needs a padded budget that decides by samples and longest alone"
            raise ConfigError(f"{said}, but has {base.fingerprint}")
        self._multiple = base.pad_to_multiple_of
        self._rungs, self._most = rungs, np.maximum(most, 0)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(samples, tokens) of each rung, shortest first."""
        return list(zip(self._most.tolist(), self._rungs.tolist(), strict=True))

    def shape_for(self, longest: int) -> tuple[int, int]:
        """The (samples, tokens) to pad a batch to whose longest sample has so many tokens."""
        longest = check_int("longest", longest, least=0)
        place = int(np.searchsorted(self._rungs, longest))
        if place == len(self._rungs):
            raise ConfigError(f"a sample of {longest} tokens is longer than the highest rung, {self._rungs[-1]}")
        return self.shapes[place]

    @property
    def pad_to_multiple_of(self) -> int:
        return self._multiple

    @property
    def fingerprint(self) -> str:
        return f"ShapeLadder{described(self.shapes)}"

    def padded_to(self, tokens: int, /) -> int:
        place = int(np.searchsorted(self._rungs, tokens))
        return int(self._rungs[place]) if place < len(self._rungs) else super().padded_to(tokens)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return shape.num_samples <= self.largest(shape.longest[TOKENS])

    def largest(self, longest: IntArray, /) -> IntArray:
        most = np.append(self._most, 0)  # nothing fits above the highest rung
        return most[np.searchsorted(self._rungs, longest)]


def _rungs(falling: IntArray, num_shapes: int) -> IntArray:
    """Lengths, growing, at most so many, to which these are padded up with least padding: the exact cut into runs, of which each
    costs a price that is bisected until they are few enough. O(N log(longest * N))."""
    window = OrderedWindow(falling.astype(np.float64), np.arange(len(falling), 0, -1))
    low, high = 0.0, 1.0 + float(falling[0]) * len(falling)
    best = window.least_time(high)
    for _ in range(40):
        middle = (low + high) / 2
        tried = window.least_time(middle)
        if len(tried) - 1 > num_shapes:
            low = middle
        else:
            best, high = tried, middle
    return np.unique(falling[best[:-1]])
