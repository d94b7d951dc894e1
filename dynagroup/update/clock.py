"""What a training loop's own times say about the work of its batches."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.update.stats import LoaderStats
from dynagroup.update.step import Step

__all__ = ["StepClock"]

WARM_UP = 3
"""Updates that are not timed: the first ones compile kernels, fill caches and make the optimizer's state."""


class StepClock:
    """Times what a loop does between two steps, an update at a time: devices run behind the loop, and an update's end is where
    loops wait for them (they log a loss, clip gradients, exchange them). Updates with idle steps wait for other ranks and
    are left out. Costs a microsecond a step."""

    def __init__(self, stats: LoaderStats) -> None:
        self._stats = stats
        self._begin_update()

    def begin(self, step: Step[Any]) -> None:
        """The loop is about to get this step, which the counts know already."""
        counted = self._counted()
        self._usable &= counted[0] > self._before[0] and not step.idle
        if self._usable:
            self._row += counted - self._before
        self._before = counted
        self._since = time.perf_counter()

    def end(self, step: Step[Any]) -> None:
        """The loop asks for the next one."""
        self._seconds += time.perf_counter() - self._since
        if step.ends_update:
            if self._usable and self._stats.updates > WARM_UP and self._seconds > 0:
                steps, tokens, squares = self._row.tolist()
                self._stats.times.note(int(steps), tokens, squares, self._seconds)
            self._begin_update()

    def _begin_update(self) -> None:
        self._before = self._counted()
        self._row, self._seconds, self._usable, self._since = np.zeros(3), 0.0, True, 0.0

    def _counted(self) -> NDArray[np.float64]:
        return np.array([self._stats.batches, self._stats.padded_tokens, self._stats.padded_squares], np.float64)
