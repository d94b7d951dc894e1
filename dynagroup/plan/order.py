"""The order of an epoch, computed and never remembered: any slice of it, in time proportional to the slice."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.shapes import IntArray

__all__ = ["EpochOrder", "epoch_order"]

ROUNDS = 8


def epoch_order(num_samples: int, *, seed: int, epoch: int, start: int = 0, stop: int | None = None) -> IntArray:
    """Sample indices in one epoch's order, a function of the arguments alone: int64 (stop - start,).

    A run with fixed batches of G samples that uses this order draws ``epoch_order(...)[k * G : (k + 1) * G]`` for its
    update ``k``; so does every mode of dynagroup that is given ``samples_per_update=G``.

    >>> sorted(epoch_order(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    order = EpochOrder(num_samples, seed=seed, epoch=epoch)
    return order[start : num_samples if stop is None else stop]


class EpochOrder:
    """A permutation of ``range(num_samples)`` that can be read anywhere without being built.

    An alternating Feistel network over a grid of about sqrt(n) by sqrt(n) cells, walked past the cells that are no
    sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; round function: MurmurHash3's finaliser).
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        for name, value in (("seed", seed), ("epoch", epoch)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise ConfigError(f"`{name}` must be an int of at least 0, but is {value!r}")
        self.num_samples = num_samples
        self._width = max(math.isqrt(max(num_samples - 1, 0)) + 1, 1)
        self._height = max(-(-num_samples // self._width), 1)
        self._keys = np.random.SeedSequence((int(seed), int(epoch))).generate_state(ROUNDS, np.uint32)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, where: slice) -> IntArray:
        return self.index_at(np.arange(*where.indices(self.num_samples), dtype=np.int64))

    def index_at(self, positions: IntArray) -> IntArray:
        """The samples that stand at these positions."""
        return self._walk(positions, range(ROUNDS), sign=1)

    def position_of(self, indices: IntArray) -> IntArray:
        """The positions at which these samples stand: the inverse of :meth:`index_at`."""
        return self._walk(indices, range(ROUNDS - 1, -1, -1), sign=-1)

    def _walk(self, values: IntArray, rounds: range, sign: int) -> IntArray:
        values = self._mix(values, rounds, sign)
        outside = np.flatnonzero(values >= self.num_samples)
        while len(outside):
            values[outside] = self._mix(values[outside], rounds, sign)
            outside = outside[values[outside] >= self.num_samples]
        return values

    def _mix(self, values: IntArray, rounds: range, sign: int) -> IntArray:
        column, line = values % self._width, values // self._width
        for number in rounds:
            if number % 2:
                line = _turn(line, sign * _hash(column, self._keys[number], self._height), self._height)
            else:
                column = _turn(column, sign * _hash(line, self._keys[number], self._width), self._width)
        return line * self._width + column


def _turn(values: IntArray, by: IntArray, size: int) -> IntArray:
    values = values + by
    values -= size * (values >= size)
    values += size * (values < 0)
    return values


def _hash(values: IntArray, key: np.uint32, size: int) -> IntArray:
    mixed: NDArray[np.uint32] = values.astype(np.uint32) ^ key
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return ((mixed.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
