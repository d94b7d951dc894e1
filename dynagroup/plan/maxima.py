"""Maxima of runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynagroup.shapes import IntArray

__all__ = ["RunMaxima"]


class RunMaxima:
    """The largest value of any run of up to ``reach`` of them, from maxima over powers of two: O(N log reach) memory.

    >>> RunMaxima(np.array([3, 9, 2, 8]), reach=3).of(np.array([0, 2]), np.array([3, 2])).tolist()
    [9, 8]
    """

    def __init__(self, values: NDArray, reach: int) -> None:
        levels, width = [values], 1
        while 2 * width <= reach:
            last = levels[-1]
            shifted = np.append(last[width:], np.zeros(min(width, len(last)), last.dtype))
            levels.append(np.maximum(last, shifted))
            width *= 2
        self._levels = np.stack(levels)

    def of(self, starts: IntArray | int, sizes: IntArray | int) -> NDArray:
        """Of the runs from these positions on of so many values, at least 1."""
        level = np.frexp(np.asarray(sizes, np.float64))[1] - 1
        second = starts + sizes - (1 << level.astype(np.int64))
        return np.maximum(self._levels[level, starts], self._levels[level, second])
