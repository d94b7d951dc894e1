"""The order of an epoch and its windows: in which order samples come, and which samples are planned together. An order
is computed, not stored: reading a part of it takes time proportional to that part."""

import copy
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.distributed import current_world
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.plan.shares import rounded_shares
from dynagroup.shapes import IntArray
from dynagroup.validation import check_int, explained

Shares: TypeAlias = "Mapping[str, float] | Callable[[int], Mapping[str, float]]"
Change: TypeAlias = tuple[int, int, dict[str, float]]  # epoch, update in it, shares from there on

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
        seed, epoch = check_int("seed", seed, least=0), check_int("epoch", epoch, least=0)
        self.num_samples, self._shuffle, self._left_out = count, shuffle, left_out
        self._kept_before = left_out - np.arange(
            len(left_out)
        )  # number of kept samples before each one left out
        self._width = max(math.isqrt(max(count - 1, 0)) + 1, 1)
        self._height = max(-(-count // self._width), 1)
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint32)
        self._block, self._block_at = NONE, 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, where: slice) -> IntArray:
        """Returns a slice. Small ones are read from a cached block, which is computed again for other slices."""
        start, stop, _ = where.indices(self.num_samples)
        if stop - start >= BLOCK:
            return self.index_at(np.arange(start, stop, dtype=np.int64))
        if not self._block_at <= start <= stop <= self._block_at + len(self._block):
            reach = np.arange(start, min(start + BLOCK, self.num_samples), dtype=np.int64)
            self._block_at, self._block = start, self.index_at(reach)
        return self._block[start - self._block_at : stop - self._block_at]

    def index_at(self, positions: IntArray) -> IntArray:
        kept = self._walk(positions, range(ROUNDS), sign=1) if self._shuffle else positions
        return (
            kept + self._kept_before.searchsorted(kept, side="right")
            if len(self._left_out)
            else kept
        )

    def position_of(self, index: int) -> int:
        """Returns the position of a sample in the order, the inverse of :meth:`index_at`."""
        kept = np.asarray([index - self._left_out.searchsorted(index)], np.int64)
        return int(
            (self._walk(kept, range(ROUNDS - 1, -1, -1), sign=-1) if self._shuffle else kept)[0]
        )

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
                line = _turn(
                    line, sign * _hash(column, self._keys[number], self._height), self._height
                )
            else:
                column = _turn(
                    column, sign * _hash(line, self._keys[number], self._width), self._width
                )
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


class Windows:
    """Computes where each window starts and stops in the epoch's order: (start, stop), in the order of use.

    The window with the longest sample is used first, so that an out-of-memory error comes at once. It also gets the
    samples that are left over, so that the size of all other windows is a multiple of the number of ranks. ``first`` is
    its number; None: windows are used in order, and the last may be smaller.

    >>> list(Windows(7, 2, first=1)), list(Windows(7, 2))
    ([(2, 5), (0, 2), (5, 7)], [(0, 2), (2, 4), (4, 6), (6, 7)])
    """

    def __init__(self, count: int, size: int, first: int | None = None) -> None:
        self._count = count
        self._size = size
        if first is None:
            self._number = -(-count // size)
            self._first = min(0, self._number - 1)
            self._rest = 0
        else:
            self._number = max(count // size, min(count, 1))
            self._first = min(first, self._number - 1)
            self._rest = count - self._number * size  # samples that are left over

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self._number:
            raise IndexError(number)
        place = number  # of the window in the epoch's order
        if number <= self._first:
            place = (number - 1) % (self._first + 1)
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
        last: by kind, the number of the last window that has samples of the kind: int64 (kinds,).
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
    window = (part + shift[kind]) * (num_windows / num_parts[kind])
    window = np.minimum(window.astype(np.int64), num_windows - 1)
    by_window = by_kind[np.argsort(window, kind="stable")]
    in_windows = order[by_window]
    stops = np.cumsum(np.bincount(window, minlength=num_windows))
    spans = list(pairwise([0, *stops.tolist()]))
    if tokens is not None and len(order):
        hardest = int(np.argmax(tokens[in_windows]))
        number = int(np.searchsorted(stops, hardest, side="right"))
        spans.insert(0, spans.pop(number))
    last = np.zeros(int(kinds.max(initial=0)) + 1, np.int64)
    for number, (start, stop) in enumerate(spans):
        last[kinds[in_windows[start:stop]]] = number
    return EpochWindows(in_windows, spans, last)


class Mixture:
    """Mixes samples from several sources in given shares, as a sampler's ``order=`` or a loader's ``sampler=``.

    Each source gives its samples in shuffled passes that continue over epochs: all samples come once before any comes
    again. The samples of an epoch depend only on seed, epoch and shares, so a resumed run continues in the same order.

    Args:
        sources: name -> dataset indices, int (N,).
        shares: name -> weight of at least 0; or a function from the epoch to such weights, or with
            ``samples_per_update`` from the number of the update in the run (``epoch * updates of an epoch + place``).
        num_samples: int, samples per epoch; None: as many as all sources have.
        samples_per_update: int: so many consecutive samples, an update, hold each source's share, rounded up or down.
            The remainders are carried: after each update of an epoch, each source has given its share of all samples
            so far, within one sample. Give the loader or sampler the same. None: an epoch as a whole has the shares.

    >>> order = Mixture({"code": range(3), "text": range(3, 9)}, {"code": 1, "text": 3}, num_samples=4)
    >>> [sorted(order.of_epoch(epoch).tolist()) for epoch in range(2)]
    [[1, 4, 5, 7], [2, 3, 6, 8]]
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[int]],
        shares: Shares,
        *,
        num_samples: int | None = None,
        samples_per_update: int | None = None,
        seed: int = 0,
    ) -> None:
        must = "`sources` must map names to dataset indices, at least one each"
        with explained(f"{must}, but is {sources!r:.200}"):
            self._sources = {name: np.asarray(indices) for name, indices in sources.items()}
            for indices in self._sources.values():
                if indices.ndim != 1 or not indices.size or indices.dtype.kind not in "iu":
                    raise ValueError(
                        "dataset indices are integers; for a boolean mask give np.flatnonzero(mask)"
                    )
        if num_samples is None:
            num_samples = sum(len(indices) for indices in self._sources.values())
        self._size = check_int("num_samples", num_samples)
        self.samples_per_update = samples_per_update
        if samples_per_update is not None:
            self.samples_per_update = check_int("samples_per_update", samples_per_update)
        self._update_size = min(self.samples_per_update or self._size, self._size)
        self._seed = check_int("seed", seed, least=0)
        self._epoch = 0
        self._shares = shares
        self._changes: list[Change] = []
        self._rounded: dict[int, IntArray] = {}  # epoch -> samples of each source in each update
        self._apply: Callable[[dict[str, float]], int] | None = None
        self.counts(0)  # raises if shares are wrong

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_epoch(self._epoch).tolist())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_apply": None}

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def set_shares(self, shares: Mapping[str, float]) -> int:
        """Changes the shares of all later updates, for example by a metric. Call it on every rank after the same step, with
        equal shares. The states of the :class:`~dynagroup.PlannedDataLoader` that was made with this mixture include it.

        Updates that workers are already loading keep their shares; with ``grouping``, so do those grouped with them.

        Returns:
            The number of the first update (of ``samples_per_update`` samples, in its epoch) with these shares.

        Raises ConfigError without such a loader, or without ``samples_per_update``."""
        if self._apply is None or self.samples_per_update is None:
            raise ConfigError(
                "set_shares needs a Mixture with `samples_per_update`, and a PlannedDataLoader that was "
                "made with `sampler=` this mixture; or give `shares` as a function"
            )
        weights = self._weights(shares, "set_shares")
        return self._apply(dict(zip(self._sources, weights.tolist(), strict=True)))

    def bind(self, apply: Callable[[dict[str, float]], int]) -> None:
        """Makes ``set_shares`` call a loader's function, which knows which updates are still free."""
        self._apply = apply

    @property
    def changes(self) -> list[Change]:
        """What :meth:`set_shares` changed: (epoch, update in the epoch, shares). Part of a loader's state."""
        return self._changes

    def change(self, epoch: int, position: int, shares: dict[str, float]) -> int:
        """Sets the shares from the first update at or after a position of an epoch on; returns its number there."""
        when = (epoch, -(-position // self._update_size))
        earlier = [change for change in self._changes if tuple(change[:2]) < when]
        self.restore([*earlier, (*when, shares)])
        return when[1]

    def restore(self, changes: Iterable[Sequence[Any]]) -> None:
        self._changes = [(epoch, update, shares) for epoch, update, shares in changes]
        self._rounded = {}

    def with_changes(self, changes: Iterable[Sequence[Any]]) -> "Mixture":
        """Returns a copy with other changes."""
        other = copy.copy(self)
        other.restore(changes)
        return other

    def counts(self, epoch: int) -> dict[str, int]:
        """Returns how many samples each source gives in an epoch."""
        totals = self.counts_of_updates(epoch).sum(axis=0)
        return dict(zip(self._sources, totals.tolist(), strict=True))

    def counts_between(self, start: int, stop: int) -> dict[str, int]:
        """Returns how many samples each source gives in whole updates, from sample ``start`` to ``stop`` of the run."""
        totals = np.zeros(len(self._sources), np.int64)
        for epoch in range(start // self._size, -(-stop // self._size)):
            first = max(start - epoch * self._size, 0)
            last = stop - epoch * self._size
            updates = slice(-(-first // self._update_size), -(-last // self._update_size))
            totals += self.counts_of_updates(epoch)[updates].sum(axis=0)
        return dict(zip(self._sources, totals.tolist(), strict=True))

    def counts_of_updates(self, epoch: int) -> IntArray:
        """Returns how many samples each source gives to each update of an epoch: (updates, sources)."""
        if epoch in self._rounded:
            return self._rounded[epoch]
        num_updates = -(-self._size // self._update_size)
        places = [place for when, place, _ in self._changes if when == epoch]
        starts = [0, *(min(place, num_updates) for place in places), num_updates]
        behind = np.zeros(len(self._sources))
        parts = []
        num_known = sum(when < epoch for when, *_ in self._changes)
        # What comes before a change was rounded without knowing of it, so each part between changes is rounded alone.
        for number, (start, stop) in enumerate(pairwise(starts)):
            exact = self._exact(epoch, self._changes[: num_known + number])[start:]
            rounded = rounded_shares(exact, behind)[: stop - start] if len(exact) else exact[:0]
            behind += (exact[: stop - start] - rounded).sum(axis=0)
            parts.append(rounded.astype(np.int64))
        self._rounded[epoch] = np.concatenate(parts)
        return self._rounded[epoch]

    def _exact(self, epoch: int, changes: list[Change]) -> NDArray[np.float64]:
        """Returns each source's share of each update, in samples: (updates, sources)."""
        sizes = np.full(-(-self._size // self._update_size), self._update_size)
        sizes[-1] = self._size - sizes[:-1].sum()
        shares = np.empty((len(sizes), len(self._sources)))
        if not callable(self._shares):
            shares[:] = self._weights(self._shares, f"epoch {epoch}")
        elif self.samples_per_update is None:
            shares[:] = self._weights(self._shares(epoch), f"epoch {epoch}")
        elif not changes or changes[0][:2] > (epoch, 0):
            for place, update in enumerate(range(epoch * len(sizes), (epoch + 1) * len(sizes))):
                shares[place] = self._weights(self._shares(update), f"update {update}")
        for when, place, changed in changes:
            shares[place if when == epoch else 0 :] = self._weights(changed, "set_shares")
        return sizes[:, None] * (shares / shares.sum(axis=1, keepdims=True))

    def _weights(self, weights: Mapping[str, float], where: str) -> NDArray[np.float64]:
        must = f"must have a weight of at least 0 (not all 0) for each of {list(self._sources)}"
        with explained(f"`shares` {must}, but in {where} is {weights!r}"):
            shares = np.array([weights[name] for name in self._sources], np.float64)
            has_others = len(weights) > len(shares)
            if has_others or not np.isfinite(shares).all() or shares.min() < 0 or not shares.any():
                raise ValueError("a weight is missing, negative, or has no source")
        return shares

    def sources_of(self, num_samples: int) -> IntArray:
        """Returns the number of each dataset sample's source; that of samples without one is the number of sources."""
        codes = np.full(num_samples, len(self._sources), np.int64)
        for code, indices in enumerate(self._sources.values()):
            if (codes[indices] != len(self._sources)).any():
                raise ConfigError(
                    "`grouping` with a Mixture of `samples_per_update` needs `sources` without common "
                    "samples; give each sample to one source"
                )
            codes[indices] = code
        return codes

    def of_epoch(self, epoch: int) -> IntArray:
        """Returns the dataset indices of an epoch, in order: int64 (num_samples,)."""
        counts = [self.counts(number) for number in range(epoch + 1)]
        parts = [NONE]
        for place, name in enumerate(self._sources):
            stop = sum(of_epoch[name] for of_epoch in counts)
            start = stop - counts[epoch][name]
            parts.append(self._read(place, name, start, stop))
        of_updates = self.counts_of_updates(epoch)
        sources = np.tile(np.arange(len(self._sources)), len(of_updates))
        unordered = np.repeat(sources, of_updates.ravel())
        order = epoch_order(self._size, seed=self._seed, epoch=epoch)
        by_update = order[np.argsort(order // self._update_size, kind="stable")]
        mixed = np.empty_like(order)
        # each source's samples in their own order
        mixed[np.argsort(unordered[by_update], kind="stable")] = np.concatenate(parts)
        return mixed

    def _read(self, place: int, name: str, start: int, stop: int) -> IntArray:
        """Returns the indices from ``start`` to ``stop`` of a source's shuffled passes, laid end to end."""
        indices = self._sources[name]
        size = len(indices)
        first_pass = start // size
        passes = [NONE]
        for number in range(first_pass, -(-stop // size)):
            passes.append(epoch_order(size, seed=self._seed + place, epoch=number))
        skipped = first_pass * size
        return indices[np.concatenate(passes)[start - skipped : stop - skipped]]


class OrderSource:
    """Reads a user's sampler of indices once per epoch, and keeps the indices of the running epoch.

    A sampler with ``set_epoch`` is given the epoch; others are just read, so only a list, or a sampler that begins anew,
    has the same order when an epoch is read again. Raises ConfigError if the sampler can be read only once, or yields a
    value that is no index."""

    NAME = "order"

    def __init__(self, source: Iterable[int], num_samples: int) -> None:
        is_iterable = isinstance(source, Iterable) and not isinstance(source, Iterator)
        is_scalar = getattr(source, "ndim", 1) == 0
        if not is_iterable or is_scalar:
            raise ConfigError(
                f"`{self.NAME}` must be a list or a sampler, which can be read anew in every epoch, "
                f"but is {source!r}"
            )
        self._source = source
        self._num_samples = num_samples
        self._epoch = -1
        self._indices = NONE
        self._counts: dict[int, int] = {}  # samples left out -> indices in every epoch without them

    def __len__(self) -> int:
        """Returns the number of indices in an epoch, by the sampler's own ``len()`` if it has one."""
        if isinstance(self._source, Sized):
            return len(self._source)
        return len(self._known_epoch())

    def _known_epoch(self) -> IntArray:
        """Returns the indices of the epoch that was read last, or of the first."""
        return self.of_epoch(max(self._epoch, 0))

    @property
    def mixture(self) -> Mixture | None:
        """The source, if it is a mixture with the same shares in every update."""
        if isinstance(self._source, Mixture) and self._source.samples_per_update is not None:
            return self._source
        return None

    def forget(self) -> None:
        """Reads the running epoch anew when it is next needed."""
        self._epoch = -1

    def check_updates(self, samples_per_update: Any) -> None:
        """Raises ConfigError if updates would have other shares than a mixture gives them."""
        mixture = self.mixture
        if mixture is None or not isinstance(samples_per_update, int):
            return
        if samples_per_update % (mixture.samples_per_update or 1):
            raise ConfigError(
                f"`samples_per_update` ({samples_per_update}) must be a multiple of that of the Mixture "
                f"({mixture.samples_per_update}), so that each update has its shares; give both the same"
            )

    def counted(self, left_out: IntArray = NONE) -> int:
        """Returns the number of indices in every epoch, without those left out."""
        if len(left_out) and isinstance(self._source, Mixture):
            raise ConfigError(
                "oversize='drop' would leave out more of a Mixture in some epochs; filter its `sources`"
            )
        if len(left_out) not in self._counts:
            num_out = 0
            if len(left_out):
                num_out = int(np.isin(self._known_epoch(), left_out).sum())
            self._counts[len(left_out)] = len(self) - num_out
        return self._counts[len(left_out)]

    def counted_epoch(self, epoch: int, left_out: IntArray = NONE) -> IntArray:
        """Returns the indices of an epoch, without those left out. ConfigError: other epochs have another number."""
        num_wanted = self.counted()
        num_fitting = self.counted(left_out)
        indices = self.of_epoch(epoch)
        fitting = indices
        if len(left_out):
            fitting = indices[~np.isin(indices, left_out)]
        if len(indices) != num_wanted or len(fitting) != num_fitting:
            raise ConfigError(
                f"`sampler` yields {len(indices)} indices ({len(fitting)} that fit) in epoch {epoch}, "
                f"but {num_wanted} ({num_fitting} that fit) by its len() or in the epoch before; "
                "yield each sample once in every epoch, and correct __len__"
            )
        return fitting

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
        indices = list(self._source)
        if not indices and len(self._indices):
            name = type(self._source).__name__
            raise ConfigError(
                f"`order` ({name}) yields nothing after its first epoch; its __iter__ must begin anew"
            )
        return indices

    def _checked(self, indices: list[int]) -> IntArray:
        with explained(f"`{self.NAME}` must yield integer indices"):
            array = np.asarray(indices)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"`{self.NAME}` must yield integer indices, but yields {array.dtype} {array.shape[1:]}"
            )
        outside = np.flatnonzero((array < 0) | (array >= self._num_samples))
        if len(outside):
            raise ConfigError(
                f"`{self.NAME}` yields index {array[outside[0]]}, but there are only "
                f"{self._num_samples} samples"
            )
        return array.astype(np.int64)


def check_alike(order: OrderSource, epoch: int) -> None:
    """Raises AlignmentError if ranks have different orders. All ranks must call it, once per epoch."""
    crc = order.checksum(epoch)
    highest, lowest = current_world().all_max([crc, -crc])
    if highest != -lowest:
        raise AlignmentError(
            f"`order` yields different indices on different ranks in epoch {epoch}, so samples would be "
            "lost and repeated; seed it the same on all ranks, e.g. "
            "RandomSampler(data, generator=torch.Generator().manual_seed(0))"
        )
