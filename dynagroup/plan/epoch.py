"""The order of an epoch and its windows: in which order samples come, and which samples are planned together. An order
is computed, not stored: reading a part of it takes time proportional to that part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.shapes import IntArray
from dynagroup.validation import check_int

Cells: TypeAlias = NDArray[np.uint32]
"""Lines or columns of a grid: of at most 2**62 cells, so the sum of two has 32 bits."""

ROUNDS = 8
NONE = np.zeros(0, np.int64)
BLOCK = 1 << 14  # least number of indices that are computed at once


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> IntArray:
    """Returns dataset indices in one epoch's order, which depends on the arguments alone: int64 (num_samples,).

    With fixed batches of G samples in this order, update ``k`` has ``epoch_order(...)[k * G : (k + 1) * G]``; with
    ``samples_per_update=G`` each of dynagroup's loaders and samplers uses the same samples in update ``k``.

    >>> sorted(epoch_order(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return EpochOrder(num_samples, seed=seed, epoch=epoch).index_at(
        np.arange(num_samples, dtype=np.int64)
    )


class EpochOrder:
    """A permutation of ``num_samples`` dataset indices, without ``left_out`` (sorted), read at any position, not stored.

    It is an alternating Feistel network over a grid of about sqrt(n) by sqrt(n) cells; cycle walking skips cells
    without a sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; rounds of MurmurHash3)."""

    def __init__(
        self, count: int, *, seed: int, epoch: int, shuffle: bool = True, left_out: IntArray = NONE
    ) -> None:
        seed = check_int("seed", seed, least=0)
        epoch = check_int("epoch", epoch, least=0)
        self.num_samples = count
        self._shuffle = shuffle
        self._left_out = left_out
        # how many kept samples are before each one left out
        self._kept_before = left_out - np.arange(len(left_out))
        self._width = max(math.isqrt(max(count - 1, 0)) + 1, 1)
        self._height = max(-(-count // self._width), 1)
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint32)
        self._block = NONE
        self._block_at = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, where: slice) -> IntArray:
        """Returns a slice. Small ones are read from a cached block, which is computed again for other slices."""
        start, stop, _ = where.indices(self.num_samples)
        if stop - start >= BLOCK:
            return self.index_at(np.arange(start, stop, dtype=np.int64))
        if not self._block_at <= start <= stop <= self._block_at + len(self._block):
            reach = np.arange(start, min(start + BLOCK, self.num_samples), dtype=np.int64)
            self._block = self.index_at(reach)
            self._block_at = start
        return self._block[start - self._block_at : stop - self._block_at]

    def index_at(self, positions: IntArray) -> IntArray:
        kept = self._walk(positions, range(ROUNDS)) if self._shuffle else positions
        if not len(self._left_out):
            return kept
        return kept + self._kept_before.searchsorted(kept, side="right")

    def position_of(self, index: int) -> int:
        """Returns the position of a sample in the order, the inverse of :meth:`index_at`."""
        kept = np.asarray([index - self._left_out.searchsorted(index)], np.int64)
        if self._shuffle:
            kept = self._walk(kept, range(ROUNDS - 1, -1, -1), is_inverse=True)
        return int(kept[0])

    def _walk(self, values: IntArray, rounds: range, *, is_inverse: bool = False) -> IntArray:
        values = self._mix(values, rounds, is_inverse=is_inverse)
        outside = np.flatnonzero(values >= self.num_samples)
        while len(outside):
            values[outside] = self._mix(values[outside], rounds, is_inverse=is_inverse)
            outside = outside[values[outside] >= self.num_samples]
        return values

    def _mix(self, values: IntArray, rounds: range, *, is_inverse: bool = False) -> IntArray:
        lines = values // self._width
        line = lines.astype(np.uint32)
        column = (values - lines * self._width).astype(np.uint32)
        for key_place in rounds:
            key = self._keys[key_place]
            if key_place % 2:
                by = _hash(column, key, self._height)
                line = _turn(line, self._height - by if is_inverse else by, self._height)
            else:
                by = _hash(line, key, self._width)
                column = _turn(column, self._width - by if is_inverse else by, self._width)
        return line.astype(np.int64) * self._width + column


def _turn(values: Cells, by: Cells, size: int) -> Cells:
    """Returns ``values + by`` modulo ``size``; ``by`` is at most ``size``."""
    turned = values + by
    # Without a sign, what would be below 0 is a large number.
    return np.minimum(turned, turned - size)


def _hash(values: Cells, key: np.uint32, size: int) -> Cells:
    mixed = values ^ key
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return ((mixed.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.uint32)


class Windows:
    """Computes where each window starts and stops in the epoch's order: (start, stop), in the order of use.

    The window with the longest sample is used first, so that an out-of-memory error comes at once. It also gets the
    samples that are left over, so that the size of all other windows is a multiple of the number of ranks. ``first`` is
    its place in the order; None: windows are used in order, and the last may be smaller.

    >>> list(Windows(7, 2, first=1)), list(Windows(7, 2))
    ([(2, 5), (0, 2), (5, 7)], [(0, 2), (2, 4), (4, 6), (6, 7)])
    """

    def __init__(self, count: int, size: int, first: int | None = None) -> None:
        self._count = count
        self._size = size
        if first is None:
            self._num_windows = -(-count // size)
            self._first = min(0, self._num_windows - 1)
            self._rest = 0
        else:
            self._num_windows = max(count // size, min(count, 1))
            self._first = min(first, self._num_windows - 1)
            self._rest = count - self._num_windows * size  # samples that are left over

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, window: int) -> tuple[int, int]:
        if not 0 <= window < self._num_windows:
            raise IndexError(window)
        place = window  # of the window in the epoch's order
        if window <= self._first:
            place = (window - 1) % (self._first + 1)
        start = place * self._size
        stop = start + self._size
        if place > self._first:
            start += self._rest
        if place >= self._first:
            stop += self._rest
        return start, min(stop, self._count)


@dataclass(frozen=True)
class EpochWindows:
    """An epoch's windows, in the order of use.

    Args:
        order: dataset indices; an array, or an order that is computed when a slice is read.
        spans: where each window starts and stops in ``order``.
        last: by kind, the last window that has samples of the kind: int64 (kinds,).
    """

    order: Any
    spans: Sequence[tuple[int, int]] | Windows
    last: IntArray


def windows_of_kinds(
    order: IntArray,
    kinds: NDArray[np.integer],
    size: int,
    *,
    least: int,
    rng: np.random.Generator | None = None,
    tokens: IntArray | None = None,
) -> EpochWindows:
    """Returns windows for samples of several kinds. ``order``: dataset indices.

    A window has about ``size`` samples of the most common kind. Samples of rarer kinds, at least ``least``, are in some
    windows, evenly spread (by ``rng``, else to the middle), so that each kind is sorted among many of its own. The window
    with the most ``tokens`` is first. Takes O(N log N).

    >>> windows = windows_of_kinds(np.arange(6), np.array([0, 1, 0, 0, 1, 0]), 2, least=2)
    >>> windows.order, windows.spans
    (array([0, 2, 3, 5, 1, 4]), [(0, 2), (2, 6)])
    """
    counts = np.bincount(kinds[order], minlength=1)
    part_sizes = np.clip(counts // 2, least, size)
    num_parts = np.maximum(counts // part_sizes, 1)
    num_windows = int(num_parts.max())
    shift = np.full(len(counts), 0.5) if rng is None else rng.random(len(counts))
    # The samples of each kind are divided into parts; the parts of a kind are evenly spaced over the windows.
    codes = kinds[order]
    if len(counts) < 1 << 16:
        codes = codes.astype(np.uint16)  # numpy sorts 16-bit keys by radix sort
    by_kind = np.argsort(codes, kind="stable")
    kind = codes[by_kind].astype(np.int64)
    first_of_kind = np.cumsum(counts) - counts
    place_in_kind = np.arange(len(kind)) - first_of_kind[kind]
    part = np.minimum(place_in_kind // part_sizes[kind], num_parts[kind] - 1)
    window_of = (part + shift[kind]) * (num_windows / num_parts[kind])
    window_of = np.minimum(window_of.astype(np.int64), num_windows - 1)
    by_window = by_kind[np.argsort(window_of, kind="stable")]
    in_windows = order[by_window]
    stops = np.cumsum(np.bincount(window_of, minlength=num_windows))
    spans = list(pairwise([0, *stops.tolist()]))
    if tokens is not None and len(order):
        hardest = int(np.argmax(tokens[in_windows]))
        window = int(np.searchsorted(stops, hardest, side="right"))
        spans.insert(0, spans.pop(window))
    last = np.zeros(int(kinds.max(initial=0)) + 1, np.int64)
    for window, (start, stop) in enumerate(spans):
        last[kinds[in_windows[start:stop]]] = window
    return EpochWindows(in_windows, spans, last)
