"""Mixes samples of several sources in given shares, in an epoch as a whole or in every update."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.plan.epoch import NONE, epoch_order
from dynagroup.plan.shares import rounded_shares
from dynagroup.shapes import IntArray
from dynagroup.validation import check_int, explained

Shares: TypeAlias = "Mapping[str, float] | Callable[[int], Mapping[str, float]]"
Change: TypeAlias = tuple[int, int, dict[str, float]]  # epoch, update in it, shares from there on


class Mixture:
    """Mixes samples from several sources in given shares, as a sampler's ``order=`` or a loader's ``sampler=``.

    Each source gives its samples in shuffled passes that continue over epochs: all samples come once before any comes
    again. The samples of an epoch depend only on seed, epoch and shares, so a resumed run continues in the same order.

    Args:
        sources: name -> dataset indices, int (N,).
        shares: name -> weight of at least 0; or a function from the epoch to such weights, or with
            ``samples_per_update`` from the number of the update in the run (``epoch * updates of an epoch + place``), in
            updates of the mixture's own ``samples_per_update``.
        num_samples: int, samples per epoch; None: as many as all sources have.
        samples_per_update: int: so many consecutive samples, an update, hold each source's share, rounded up or down.
            The remainders are carried: after each update of an epoch, each source has given its share of all samples
            so far, within one sample. Give the loader or sampler the same, or for updates that grow a schedule of
            multiples. None: an epoch as a whole has the shares.

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
            if callable(samples_per_update):
                raise ConfigError(
                    f"`samples_per_update` of a Mixture must be an int, but is {samples_per_update!r}; give "
                    "the schedule to the loader, and the Mixture a number that divides all its sizes"
                )
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
            The number of the loader's first update with these shares, in its epoch.

        Raises ConfigError without such a loader, or without ``samples_per_update``. AlignmentError: ranks gave different
        shares."""
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

    def change(self, epoch: int, position: int, shares: dict[str, float]) -> None:
        """Sets the shares from the first update at or after a position of an epoch on."""
        when = (epoch, -(-position // self._update_size))
        earlier = [change for change in self._changes if tuple(change[:2]) < when]
        self.restore([*earlier, (*when, shares)])

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
        for num_more, (start, stop) in enumerate(pairwise(starts)):
            exact = self._exact(epoch, self._changes[: num_known + num_more])[start:]
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
        """Returns the source of each dataset sample as its place in `sources`; behind the last one: it has none."""
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
        counts = [self.counts(earlier) for earlier in range(epoch + 1)]
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
        for of_source in range(first_pass, -(-stop // size)):
            passes.append(epoch_order(size, seed=self._seed + place, epoch=of_source))
        skipped = first_pass * size
        return indices[np.concatenate(passes)[start - skipped : stop - skipped]]
