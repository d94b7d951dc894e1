"""Stores batches as flat arrays, and rounds batch sizes to sizes with which kernels run well."""

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import BoolArray, Budget, fits_of, largest_of, padded_streams
from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape, IntArray, Streams, primary
from dynagroup.validation import LARGEST, check_int

RoundBatch: TypeAlias = Callable[[int], int]
CHUNK = 1 << 18
"""Samples of a block: lengths are read block by block."""


@dataclass(frozen=True, eq=False, slots=True)
class Batches(Sequence[IntArray]):
    """A division of samples into batches, stored in two arrays.

    Args:
        order: int64 (N,), positions of the samples, batch after batch.
        offsets: int64 (B + 1,), where each batch starts in ``order``; the last entry is N.

    >>> [batch.tolist() for batch in Batches(np.array([4, 2, 7]), np.array([0, 1, 3]))]
    [[4], [2, 7]]
    """

    order: IntArray
    offsets: IntArray

    @classmethod
    def of(cls, parts: Sequence[IntArray]) -> "Batches":
        """Makes batches from a list of position arrays; the list must not be empty."""
        sizes = np.asarray([len(part) for part in parts])
        return cls(np.concatenate(parts), offsets_of(sizes))

    @classmethod
    def concatenate(cls, parts: "Sequence[Batches]") -> "Batches":
        """Returns the batches of all parts, one after another."""
        if not parts:
            return cls(np.zeros(0, np.int64), np.zeros(1, np.int64))
        order = np.concatenate([part.order for part in parts])
        sizes = np.concatenate([part.sizes for part in parts])
        return cls(order, offsets_of(sizes))

    @property
    def sizes(self) -> IntArray:
        """Number of samples in each batch: int64 (B,)."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        """Returns the positions in one batch: int64 (n,)."""
        batch = range(len(self))[index]
        return self.order[self.offsets[batch] : self.offsets[batch + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        for start, stop in pairwise(self.offsets.tolist()):
            yield self.order[start:stop]

    def take(self, chosen: IntArray) -> "Batches":
        """Returns the chosen batches in the given order."""
        sizes = self.sizes[chosen]
        offsets = offsets_of(sizes)
        shift = self.offsets[:-1][chosen] - offsets[:-1]
        places = np.arange(offsets[-1]) + np.repeat(shift, sizes)
        return Batches(self.order[places], offsets)

    def map(self, index_of: IntArray) -> "Batches":
        """Returns the same batches with every position ``p`` replaced by ``index_of[p]``."""
        return Batches(index_of[self.order], self.offsets)


def offsets_of(sizes: NDArray[Any]) -> IntArray:
    """Returns where each batch starts if batches of these sizes are joined, and where the last one ends."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), ends])


def offsets_of_path(came_from: Sequence[int]) -> IntArray:
    """Returns the offsets of a cut, found from its end: the batch that ends at ``stop`` starts at ``came_from[stop]``."""
    offsets = [len(came_from) - 1]
    while offsets[-1] > 0:
        offsets.append(came_from[offsets[-1]])
    return np.asarray(offsets[::-1], np.int64)


def shapes_of(batches: Batches, lengths: Streams) -> BatchShape:
    """Returns every batch's number of samples, longest and total length; ``batches`` are positions in ``lengths``."""
    if not len(batches.order):
        none = np.zeros(0, np.int64)
        return BatchShape(none, dict.fromkeys(lengths, none), dict.fromkeys(lengths, none))
    starts = batches.offsets[:-1]
    longest = {}
    total = {}
    for name, values in lengths.items():
        ordered = values[batches.order]
        longest[name] = np.maximum.reduceat(ordered, starts).astype(np.int64)
        total[name] = np.add.reduceat(ordered, starts, dtype=np.int64)
    return BatchShape(batches.sizes, longest, total)


def longest_first(lengths: Streams) -> IntArray:
    """Returns positions sorted by tokens, longest first, then by the other streams; ties keep their order."""
    tokens = lengths[primary(lengths)]
    if len(lengths) > 1:
        others = [-values for name, values in lengths.items() if name != primary(lengths)]
        return np.lexsort([*others[::-1], -tokens])
    falling = tokens.max() - tokens
    if falling.max(initial=0) < 1 << 16:  # numpy sorts 16-bit keys by radix sort, ten times faster
        falling = falling.astype(np.uint16)
    return np.argsort(falling, kind="stable")


@dataclass(frozen=True)
class multiple_of:
    """Rounds batch sizes down to a multiple of ``number``; batches smaller than ``number`` are not changed.

    >>> list(map(multiple_of(8), (5, 8, 23)))
    [5, 8, 16]
    """

    number: int

    def __post_init__(self) -> None:
        check_int("number", self.number)

    def __call__(self, size: int) -> int:
        return size - size % self.number or size


def friendly_size(size: int) -> int:
    """Returns the largest ``2**n`` or ``3 * 2**n`` of at most ``size``, so that there are few batch shapes.

    >>> [friendly_size(n) for n in (1, 5, 7, 11, 100)]
    [1, 4, 6, 8, 96]
    """
    size = check_int("size", size)
    power = 1 << (size.bit_length() - 1)
    if 2 * size >= 3 * power > 3:
        return 3 * power // 2
    return power


def allowed_sizes(most: int, round_batch: RoundBatch) -> IntArray:
    """Returns all results of ``round_batch`` up to ``most``, and all sizes below the smallest result; ascending.

    >>> allowed_sizes(20, multiple_of(8)).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 16]
    """
    rounded = {_rounded(size, round_batch) for size in range(1, most + 1)}
    smallest = min(rounded, default=most + 1)
    allowed = rounded.union(range(1, smallest))
    return np.asarray(sorted(size for size in allowed if size <= most), np.int64)


def _rounded(size: int, round_batch: RoundBatch) -> int:
    rounded = round_batch(size)
    if isinstance(rounded, bool) or not isinstance(rounded, (int, np.integer)) or rounded < 1:
        raise ConfigError(
            f"`round_batch` must return an int of at least 1, but returned {rounded!r} for {size}"
        )
    return min(int(rounded), LARGEST)


# The functions below read the lengths in blocks, because a memory map may have a billion of them.


def tokens_of(lengths: Mapping[str, NDArray[Any]], budget: Budget) -> NDArray[Any]:
    """Returns the tokens of each sample, added over its padded streams: int (N,)."""
    first, *others = padded_streams(budget, lengths)
    tokens = lengths[first]
    for name in others:
        tokens = tokens.astype(np.int64) + lengths[name]
    return tokens


def maxima_of(lengths: Streams) -> dict[str, IntArray]:
    """Returns the greatest length in each block of samples, by stream: int64 (blocks,)."""
    return {name: scanned(values)[0] for name, values in lengths.items()}


def block_of(lengths: Streams, start: int) -> Streams:
    """Returns the lengths of the block of samples from ``start`` on."""
    return {name: values[start : start + CHUNK] for name, values in lengths.items()}


def oversize_of(lengths: Streams, budget: Budget, maxima: Mapping[str, IntArray]) -> IntArray:
    """Returns the sorted dataset indices of samples that do not fit even alone, and checks a user's budget once."""
    longest = {name: int(values.max(initial=0)) for name, values in maxima.items()}
    if len(lengths) == 1:
        largest_of(budget, np.asarray([*longest.values()]))
    if fits_of(budget, BatchShape.of(1, longest))[0]:
        return np.zeros(0, np.int64)
    unfit = _unfit_samples(budget, longest)
    indices = [np.zeros(0, np.int64)]
    for start in (np.flatnonzero(unfit(maxima)) * CHUNK).tolist():
        indices.append(start + np.flatnonzero(unfit(block_of(lengths, start))))
    return np.concatenate(indices)


def _unfit_samples(
    budget: Budget, longest: Mapping[str, int]
) -> Callable[[Mapping[str, NDArray[Any]]], BoolArray]:
    """Returns a function from lengths to which of these samples do not fit alone. ``longest``: lengths of a sample
    that does not fit.

    With one stream, bisection finds the shortest length that does not fit.
    """
    if len(longest) == 1:
        ((name, length),) = longest.items()

        def is_unfit(units: int) -> bool:
            return not fits_of(budget, BatchShape.of(1, {name: units}))[0]

        least = bisect_left(range(length + 1), True, key=is_unfit)
        return lambda lengths: lengths[name] >= least

    def unfit(lengths: Mapping[str, NDArray[Any]]) -> BoolArray:
        units = {name: values.astype(np.int64) for name, values in lengths.items()}
        ones = np.ones(len(units[primary(units)]), np.int64)
        return ~fits_of(budget, BatchShape(ones, units, units))

    return unfit


def scanned(values: NDArray[Any]) -> tuple[IntArray, int]:
    """Reads an array once. Returns the greatest value in each block, int64 (blocks,), and a CRC-32 of all values."""
    greatest = []
    crc = 0
    for start in range(0, len(values), CHUNK):
        block = np.ascontiguousarray(values[start : start + CHUNK])
        greatest.append(block.max())
        crc = zlib.crc32(block.data, crc)
    return np.asarray(greatest, np.int64), crc


# Branch and bound: blocks with the largest upper bound first, until no other block can have a longer sample.
def longest_of(
    lengths: Streams, budget: Budget, left_out: IntArray, maxima: Mapping[str, IntArray]
) -> int:
    """Returns the dataset index of the sample with the most tokens, except those in ``left_out`` (sorted)."""
    longest = 0
    most_tokens = -1
    bounds = tokens_of(maxima, budget)
    for block in np.argsort(-bounds, kind="stable").tolist():
        if bounds[block] <= most_tokens:
            break
        start = block * CHUNK
        tokens = tokens_of(block_of(lengths, start), budget)
        first, last = left_out.searchsorted([start, start + CHUNK])
        if first < last:
            tokens = tokens.copy()
            tokens[left_out[first:last] - start] = -1
        if tokens.max() > most_tokens:
            most_tokens = int(tokens.max())
            longest = start + int(tokens.argmax())
    return longest
