"""Batch sizes that kernels like: roundings that are applied before the fit check, and only downwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.shapes import IntArray
from dynagroup.validation import LARGEST, check_int

__all__ = ["RoundBatch", "allowed_sizes", "friendly_size", "multiple_of", "smaller_size"]

RoundBatch: TypeAlias = Callable[[int], int]


def multiple_of(number: int) -> RoundBatch:
    """Round batch sizes down to a multiple of ``number``; a batch smaller than it stays as it is.

    >>> [multiple_of(8)(n) for n in (5, 8, 23)]
    [5, 8, 16]
    """
    return _MultipleOf(check_int("number", number))


class _MultipleOf:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, size: int) -> int:
        return size - size % self.number or size

    def __repr__(self) -> str:
        return f"multiple_of({self.number})"


def friendly_size(size: int) -> int:
    """The largest ``2**n`` or ``3 * 2**n`` that is at most ``size``: few different shapes, well-filled tiles.

    >>> [friendly_size(n) for n in (1, 5, 7, 11, 100)]
    [1, 4, 6, 8, 96]
    """
    size = check_int("size", size)
    power = 1 << (size.bit_length() - 1)
    return power + power // 2 if power > 1 and size >= power + power // 2 else power


def allowed_sizes(most: int, round_batch: RoundBatch) -> IntArray:
    """The batch sizes up to ``most`` that ``round_batch`` produces, growing; before the first of them every size.

    >>> allowed_sizes(20, multiple_of(8)).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 16]
    """
    rounded = np.unique(np.fromiter((_rounded(size, round_batch) for size in range(1, most + 1)), np.int64, most))
    rounded = rounded[rounded <= most]
    least = int(rounded[0]) if len(rounded) else most + 1
    return np.concatenate([np.arange(1, least), rounded])


def smaller_size(size: int, round_batch: RoundBatch | None) -> int:
    """The largest batch size up to ``size`` that ``round_batch`` produces; ``size`` itself where there is none."""
    return size if round_batch is None else int(allowed_sizes(size, round_batch)[-1])


def _rounded(size: int, round_batch: RoundBatch) -> int:
    rounded = round_batch(size)
    if isinstance(rounded, bool) or not isinstance(rounded, (int, np.integer)) or rounded < 1:
        raise ConfigError(f"`round_batch` must return an int of at least 1, but returned {rounded!r} for {size}")
    return min(int(rounded), LARGEST)
