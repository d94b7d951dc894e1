"""The order of an epoch and its windows: which samples come when, and which are sorted together.

An order is computed and never remembered: any slice of it, in time proportional to the slice.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized

import numpy as np
from numpy.typing import NDArray

from dynagroup.distributed import current_world
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.shapes import IntArray
from dynagroup.validation import check_int

ROUNDS = 8
NONE = np.zeros(0, np.int64)
BLOCK = 1 << 14  # samples that are drawn at a time where slices are smaller


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> IntArray:
    """Sample indices in one epoch's order, a function of the arguments alone: int64 (num_samples,).

    A run with fixed batches of G samples that uses this order draws ``epoch_order(...)[k * G : (k + 1) * G]`` for its
    update ``k``; so does every mode of dynagroup that is given ``samples_per_update=G``.

    >>> sorted(epoch_order(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return EpochOrder(num_samples, seed=seed, epoch=epoch).index_at(np.arange(num_samples, dtype=np.int64))


class EpochOrder:
    """A permutation of ``range(num_samples)`` that can be read anywhere without being built.

    An alternating Feistel network over a grid of about sqrt(n) by sqrt(n) cells, walked past the cells that are no
    sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; round function: MurmurHash3's finaliser).
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        seed, epoch = check_int("seed", seed, least=0), check_int("epoch", epoch, least=0)
        self.num_samples = num_samples
        self._width = max(math.isqrt(max(num_samples - 1, 0)) + 1, 1)
        self._height = max(-(-num_samples // self._width), 1)
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint32)
        self._block, self._block_at = NONE, 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, where: slice) -> IntArray:
        """A slice; a small one from the block at hand, which is drawn anew where it does not reach."""
        start, stop, _ = where.indices(self.num_samples)
        if stop - start >= BLOCK:
            return self.index_at(np.arange(start, stop, dtype=np.int64))
        if not self._block_at <= start <= stop <= self._block_at + len(self._block):
            self._block_at = start
            self._block = self.index_at(np.arange(start, min(start + BLOCK, self.num_samples), dtype=np.int64))
        return self._block[start - self._block_at : stop - self._block_at]

    def index_at(self, positions: IntArray) -> IntArray:
        return self._walk(positions, range(ROUNDS), sign=1)

    def position_of(self, index: int) -> int:
        """The position at which this sample stands: the inverse of :meth:`index_at`."""
        return int(self._walk(np.asarray([index], np.int64), range(ROUNDS - 1, -1, -1), sign=-1)[0])

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


class GroupedOrder:
    """An order whose updates hold samples of similar length: ``pool`` updates at a time are sorted by length, ties at random, and
    dealt into updates of neighbours, which come in random order. An epoch's last update stays the one that is short.

    Any slice of it costs one sort of each pool that it touches; the last pool is remembered.

    Args:
        order: dataset indices, read in slices. lengths: of all samples, by dataset index. size: samples an update.

    >>> GroupedOrder(np.arange(6), np.array([5, 1, 4, 2, 9, 3]), size=2, pool=2, seed=0)[:].tolist()
    [1, 3, 2, 0, 5, 4]
    """

    def __init__(
        self, order: IntArray | EpochOrder, lengths: IntArray, *, size: int, pool: int, seed: int, epoch: int = 0
    ) -> None:
        self._order, self._lengths, self._size, self._span = order, lengths, size, size * pool
        self._seeds, self._pool, self._number = (seed, epoch), NONE, -1

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, where: slice) -> IntArray:
        start, stop, _ = where.indices(len(self))
        first = start // self._span
        pools = [self._dealt(number) for number in range(first, -(-stop // self._span))]
        return np.concatenate([NONE, *pools])[start - first * self._span : stop - first * self._span]

    def _dealt(self, number: int) -> IntArray:
        if number != self._number:
            rng = np.random.default_rng((*self._seeds, number))
            drawn = rng.permutation(self._order[number * self._span : (number + 1) * self._span])
            ranked = drawn[np.argsort(self._lengths[drawn], kind="stable")]
            whole, rest = divmod(len(ranked), self._size)
            short = int(rng.integers(whole + 1)) * self._size + np.arange(rest)
            updates = np.delete(ranked, short).reshape(whole, self._size)
            self._pool = np.append(updates[rng.permutation(whole)], ranked[short])
            self._number = number
        return self._pool


def windows_of(
    count: int, size: int, *, keep_order: bool = False, longest: Callable[[], int] | None = None
) -> list[tuple[int, int]]:
    """An epoch's windows in the order in which they are used: where each starts and stops in the epoch's order.

    The one with the longest sample is used first, so that running out of memory shows at once; it also takes what is left over
    of the division, so that all others hold a multiple of the ranks. Updates of a set size keep the order, the last one short.
    ``longest`` finds the position of the longest sample; None: the first window is used first.

    >>> windows_of(7, 2, longest=lambda: 3)
    [(2, 5), (0, 2), (5, 7)]
    """
    if keep_order:
        return [(start, min(start + size, count)) for start in range(0, count, size)]
    whole = max(count // size, min(count, 1))
    lead = min(longest() // size, whole - 1) if longest is not None and whole > 1 else 0
    starts = [number * size + (count - whole * size) * (number > lead) for number in range(whole)]
    found = list(zip(starts, [*starts[1:], count], strict=True)) if whole else []
    return [*found[lead : lead + 1], *found[:lead], *found[lead + 1 :]]


class OrderSource:
    """Reads a user's sampler of indices once an epoch and keeps the epoch that is running.

    A sampler with ``set_epoch`` is told the epoch. One with a ``torch.Generator`` as its ``generator`` reaches an epoch by
    drawing all before it, from where that stood at first: an epoch has the same order whenever it is asked for. Any other is
    read as it comes. ConfigError: it is no iterable, can be read only once, or gives what is no index.
    """

    def __init__(self, source: Iterable[int], num_samples: int) -> None:
        if not isinstance(source, Iterable) or isinstance(source, Iterator):
            raise ConfigError(
                f"`order` must be a list or a sampler, that gives indices anew every epoch, not {source!r}"
            )
        self._source, self._num_samples = source, num_samples
        self._epoch, self._indices = -1, NONE
        generator = getattr(source, "generator", None)
        self._generator = generator if hasattr(generator, "get_state") else None
        # Where it stood before each epoch.
        self._before = [] if self._generator is None else [self._generator.get_state()]
        self._counts: dict[int, int] = {}  # indices that every epoch keeps, by how many are left out

    def __len__(self) -> int:
        """Indices an epoch draws, without drawing them where the source can say."""
        return len(self._source) if isinstance(self._source, Sized) else len(self.of_epoch(max(self._epoch, 0)))

    def counted(self, left_out: IntArray = NONE) -> int:
        """Indices that every epoch draws, but for those that are left out, where updates are counted by it."""
        if len(left_out) not in self._counts:
            out = np.isin(self.of_epoch(max(self._epoch, 0)), left_out).sum() if len(left_out) else 0
            self._counts[len(left_out)] = len(self) - int(out)
        return self._counts[len(left_out)]

    def counted_epoch(self, epoch: int, left_out: IntArray = NONE) -> IntArray:
        """:meth:`of_epoch` without those that are left out, of exactly :meth:`counted` indices; or ConfigError."""
        drawn, wanted, indices = self.counted(), self.counted(left_out), self.of_epoch(epoch)
        kept = indices[~np.isin(indices, left_out)] if len(left_out) else indices
        if (len(indices), len(kept)) != (drawn, wanted):
            raise ConfigError(
                f"`sampler` gives {len(indices)} indices in epoch {epoch}, but its len(), or the epoch before, said {drawn} "
                f"(that fit: {len(kept)}, {wanted}), so updates cannot be counted: draw each sample once, correct __len__"
            )
        return kept

    def of_epoch(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            self._indices = self._checked(self._read(epoch))
            self._epoch = epoch
        return self._indices

    def checksum(self, epoch: int) -> int:
        return zlib.crc32(self.of_epoch(epoch).data)

    def _read(self, epoch: int) -> list[int]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)  # type: ignore[attr-defined]
            return list(self._source)
        if self._generator is None:
            read = list(self._source)
            if not read and len(self._indices):
                name = type(self._source).__name__
                raise ConfigError(f"`order`: {name} gave indices once and then none; its __iter__ must begin anew")
            return read
        known = min(epoch, len(self._before) - 1)
        self._generator.set_state(self._before[known])
        for drawn in range(known, epoch):
            list(self._source)
            self._before[drawn + 1 :] = [self._generator.get_state()]
        return list(self._source)

    def _checked(self, indices: list[int]) -> IntArray:
        array = np.asarray(indices)
        if len(array) and not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(f"`order` must give integer indices, but gives {array.dtype}")
        outside = np.flatnonzero((array < 0) | (array >= self._num_samples))
        if len(outside):
            given = array[outside[0]]
            raise ConfigError(f"`order` gives index {given}, but there are lengths for {self._num_samples} samples")
        return array.astype(np.int64)


def check_alike(order: OrderSource, epoch: int) -> None:
    """Refuse an `order` that differs between the ranks of this job. Collective, once an epoch."""
    crc = order.checksum(epoch)
    highest, lowest = current_world().all_max([crc, -crc])
    if highest != -lowest:
        raise AlignmentError(
            f"`order` gives other indices on other ranks in epoch {epoch}, so samples would be lost and repeated; "
            "seed it alike on all ranks, e.g. RandomSampler(data, generator=torch.Generator().manual_seed(0))"
        )
