"""The largest batch by length, asked of a memory model once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dynagroup.memory.protocols import MemoryModel
from dynagroup.shapes import TOKENS, BatchShape, IntArray

__all__ = ["LargestTable"]

REACH = 64  # times the first batch's padded tokens: as far as the regressor was trained
LONGER = 4  # lengths up to so many times the first batch's are in the table; nothing longer grows


@dataclass(frozen=True)
class LargestTable:
    """Most samples of a batch by its longest sample, lengths rounded up to a grid.

    >>> from dynagroup.memory.protocols import PaddedTokens
    >>> table = LargestTable.of(PaddedTokens(), BatchShape.of(8, 100), headroom=1.0)
    >>> table.largest({"tokens": np.array([100, 50, 10, 5000])}).tolist()
    [8, 16, 80, 0]
    """

    grids: Mapping[str, IntArray]
    counts: IntArray
    """int64, one axis a stream."""

    @classmethod
    def of(cls, model: MemoryModel, baseline: BatchShape, headroom: float) -> LargestTable:
        """Asks ``model`` about all lengths of a grid at once, bisecting over the number of samples."""
        streams = list(baseline.longest)
        fine = 0.01 if len(streams) == 1 else 0.07
        first = int(baseline.num_samples[0])
        top = {name: int(baseline.longest[name][0]) for name in streams}
        grids = {name: _grid(1, LONGER * top[name], fine, top[name]) for name in streams}
        mesh = np.meshgrid(*grids.values(), indexing="ij")
        longest = {name: m.ravel() for name, m in zip(streams, mesh, strict=True)}
        low = np.zeros(mesh[0].size, np.int64)
        high = REACH * first * top[TOKENS] // np.maximum(longest[TOKENS], 1) + 2  # as far as the regressor was trained
        while (high - low > np.maximum(1, low // 256)).any():  # to within half a percent, on the safe side
            middle = (low + high) // 2
            fits = model.relative(BatchShape.of(middle, longest), baseline) <= headroom
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        most = low.reshape(mesh[0].shape)
        for axis in range(most.ndim):  # where the bisection stopped early must not break the law
            most = np.minimum.accumulate(most, axis=axis)
        return cls(grids, most)

    def largest(self, longest: Mapping[str, IntArray]) -> IntArray:
        """int64 (K,); 0 where a length is beyond the table."""
        places = [np.searchsorted(grid, longest[name], side="left") for name, grid in self.grids.items()]
        inside = np.logical_and.reduce([p < len(g) for p, g in zip(places, self.grids.values(), strict=True)])
        clipped = tuple(np.minimum(p, len(g) - 1) for p, g in zip(places, self.grids.values(), strict=True))
        return np.where(inside, self.counts[clipped], 0)


def _grid(least: int, most: int, step: float, exact: int) -> IntArray:
    """Whole numbers, then geometric steps of ``step``; ``exact`` is one of them."""
    whole = np.arange(least, min(most, round(1 / step)) + 1)
    steps = np.exp(np.arange(np.log(whole[-1]), np.log(max(most, whole[-1])) + step, step))
    return np.unique(np.concatenate([whole, np.floor(steps).astype(np.int64), [exact]]))
