"""Stores batches as flat arrays, and rounds batch sizes to sizes with which kernels run well."""

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, fits_of, largest_of, padded_streams
from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape, IntArray, Streams, primary
from dynagroup.validation import LARGEST, check_int

RoundBatch: TypeAlias = Callable[[int], int]
CHUNK, ROW = (
    1 << 18,
    1 << 9,
)  # samples that are read at a time; and 64-bit words in a table row, for the checksum


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
        return cls(np.concatenate(parts), offsets_of(np.asarray([len(part) for part in parts])))

    @classmethod
    def concatenate(cls, parts: "Sequence[Batches]") -> "Batches":
        """Returns the batches of all parts, one after another."""
        if not parts:
            return cls(np.zeros(0, np.int64), np.zeros(1, np.int64))
        return cls(
            np.concatenate([p.order for p in parts]),
            offsets_of(np.concatenate([p.sizes for p in parts])),
        )

    @property
    def sizes(self) -> IntArray:
        """Number of samples in each batch: int64 (B,)."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        """Returns the positions in one batch: int64 (n,)."""
        number = range(len(self))[index]
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        bounds = self.offsets.tolist()
        yield from (
            self.order[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
        )

    def take(self, chosen: IntArray) -> "Batches":
        """Returns the chosen batches in the given order."""
        sizes = self.sizes[chosen]
        offsets = offsets_of(sizes)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return Batches(self.order[np.repeat(self.offsets[:-1][chosen], sizes) + within], offsets)

    def map(self, index_of: IntArray) -> "Batches":
        """Returns the same batches with every position ``p`` replaced by ``index_of[p]``."""
        return Batches(index_of[self.order], self.offsets)


def offsets_of(sizes: NDArray[Any]) -> IntArray:
    """Returns where each batch starts if batches of these sizes are joined, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


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
    longest, total = {}, {}
    for name, values in lengths.items():
        ordered = values[batches.order]
        longest[name] = np.maximum.reduceat(ordered, starts).astype(np.int64)
        total[name] = np.add.reduceat(ordered, starts, dtype=np.int64)
    return BatchShape(batches.sizes, longest, total)


def longest_first(lengths: Streams) -> IntArray:
    """Returns positions sorted by tokens, longest first, then by the other streams; ties keep their order."""
    if len(lengths) > 1:
        others = [-values for name, values in lengths.items() if name != primary(lengths)]
        return np.lexsort([*others[::-1], -lengths[primary(lengths)]])
    tokens = lengths[primary(lengths)]
    falling = tokens.max() - tokens
    if falling.max(initial=0) < 1 << 16:
        falling = falling.astype(
            np.uint16
        )  # numpy sorts 16-bit keys by radix sort, ten times faster
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
    return power + power // 2 if power > 1 and size >= power + power // 2 else power


def allowed_sizes(most: int, round_batch: RoundBatch) -> IntArray:
    """Returns all results of ``round_batch`` up to ``most``, and all sizes below the smallest result; ascending.

    >>> allowed_sizes(20, multiple_of(8)).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 16]
    """
    rounded = np.unique(
        np.fromiter((_rounded(size, round_batch) for size in range(1, most + 1)), np.int64, most)
    )
    rounded = rounded[rounded <= most]
    return np.concatenate([np.arange(1, int(rounded[0]) if len(rounded) else most + 1), rounded])


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
    first, *others = (lengths[name] for name in padded_streams(budget, lengths))
    return reduce(np.add, others, first.astype(np.int64)) if others else first


def maxima_of(lengths: Streams) -> dict[str, IntArray]:
    """Returns the greatest length in each block of samples, by stream: int64 (blocks,)."""
    return {name: scanned(values)[0] for name, values in lengths.items()}


def oversize_of(lengths: Streams, budget: Budget, maxima: Mapping[str, IntArray]) -> IntArray:
    """Returns the sorted dataset indices of samples that do not fit even alone, and checks a user's budget once."""
    first, longest = (
        primary(lengths),
        {name: int(values.max(initial=0)) for name, values in maxima.items()},
    )
    fits = lambda units: fits_of(budget, BatchShape.of(1, units))[0]  # noqa: E731
    if len(lengths) == 1:
        largest_of(budget, np.asarray([longest[first]]))
    if fits(longest):
        return np.zeros(0, np.int64)
    if len(lengths) == 1:
        least = bisect_left(
            range(longest[first] + 1), True, key=lambda units: not fits({first: units})
        )
        unfit: Any = lambda part: part[first] >= least  # noqa: E731
    else:
        unfit = lambda part: (  # noqa: E731
            ~fits_of(budget, BatchShape(np.ones(len(part[first]), np.int64), part, part))
        )
    found = [np.zeros(0, np.int64)]
    for start in (np.flatnonzero(unfit(maxima)) * CHUNK).tolist():
        part = {
            name: values[start : start + CHUNK].astype(np.int64) for name, values in lengths.items()
        }
        found.append(start + np.flatnonzero(unfit(part)))
    return np.concatenate(found)


def scanned(values: NDArray[Any]) -> tuple[IntArray, int]:
    """Reads an array once. Returns the greatest value in each block, int64 (blocks,), by which later passes skip blocks,
    and a CRC-32. Instead of a full block's values, the CRC uses the sums of rows and of columns of a table of 64-bit
    words: a value that changes or moves changes a sum, and sums are as fast as reading memory."""
    greatest, crc = [], 0
    for start in range(0, len(values), CHUNK):
        block = np.ascontiguousarray(values[start : start + CHUNK])
        greatest.append(block.max())
        full = block.nbytes % (8 * ROW) == 0
        table = block.view(np.int64).reshape(-1, ROW) if full else block[None]
        for part in [table.sum(axis=0), table.sum(axis=1)] if full else table:
            crc = zlib.crc32(part.data, crc)
    return np.asarray(greatest, np.int64), crc


# Branch and bound: blocks with the largest upper bound first, until no other block can have a longer sample.
def longest_of(
    lengths: Streams, budget: Budget, left_out: IntArray, maxima: Mapping[str, IntArray]
) -> int:
    """Returns the dataset index of the sample with the most tokens, except those in ``left_out`` (sorted)."""
    found, most, bounds = 0, -1, tokens_of(maxima, budget)
    for start in (np.argsort(-bounds, kind="stable") * CHUNK).tolist():
        if bounds[start // CHUNK] <= most:
            break
        tokens = tokens_of(
            {name: values[start : start + CHUNK] for name, values in lengths.items()}, budget
        )
        out = left_out[slice(*left_out.searchsorted([start, start + CHUNK]))]
        if len(out):
            tokens = tokens.copy()
            tokens[out - start] = -1
        if tokens.max() > most:
            found, most = start + int(tokens.argmax()), int(tokens.max())
    return found
