"""Stratified updates: every optimizer update gets samples of all lengths, and each of its batches similar ones.

The samples of a pool of updates are sorted by length and cut into *strata*, from the longest samples to the shortest. A
stratum is cut into *chunks* of consecutive samples, and every update gets one chunk of each stratum. An update that gets
long samples of the first stratum gets short ones of the others (antithetic stratified sampling), so updates have about
equally many tokens. Updates come in random order. So an update has short, middle and long samples like a random one,
but each of its chunks needs hardly any padding. Strata have equally many samples; where lengths vary much they are finer,
so that an update has about as many tokens as any other. With a single stratum an update is one run of neighbours: its
samples all have about one length, and training loses quality. ``docs/benchmarks.md`` has the measurements, also of
designs that were rejected."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.batches import longest_first
from dynagroup.plan.epoch import NONE
from dynagroup.shapes import TOKENS, IntArray

STRATA = 4
"""The fewest that lost nothing where the label of a sample goes with its length."""
MOST_SAMPLES = 32
"""In a stratum of a large update: with more, batches of several strata need more padding (of 16, 32 and 64, on eight files of
lengths)."""


def places_by_length(
    update_of: IntArray, strata: Sequence[int], rank_of_update: IntArray
) -> IntArray:
    """Returns in which order the places of updates get samples, longest first.

    Args:
        update_of: (places,), the update of each place, rising.
        strata: samples of each stratum of a usual update, the longest first. An update with more or fewer places has them
            in proportion.
        rank_of_update: (updates,), which chunk of the first stratum each update gets; of the others, it gets the chunk as
            far from the end.

    >>> places_by_length(np.array([0, 0, 0, 1, 1, 1]), [1, 2], np.array([1, 0])).tolist()
    [3, 0, 1, 2, 4, 5]
    """
    num_places = np.bincount(update_of)
    first = np.cumsum(num_places) - num_places
    place = np.arange(len(update_of)) - first[update_of]
    stratum = _stratum_of_places(strata, place, num_places[update_of])
    rank = rank_of_update[update_of]
    chunk = np.where(stratum == 0, rank, len(num_places) - 1 - rank)
    return np.argsort(stratum * len(num_places) + chunk, kind="stable")


def _stratum_of_places(strata: Sequence[int], place: IntArray, num_places: Any) -> IntArray:
    """Returns the stratum of these places in updates of so many places each, in proportion."""
    stratum = np.repeat(np.arange(len(strata)), strata)
    return stratum[place * len(stratum) // num_places]


def equal_strata(size: int, num_strata: int) -> list[int]:
    """Returns the samples of each stratum of an update of ``size`` samples: equally many, or one more.

    >>> equal_strata(10, 4)
    [2, 3, 2, 3]
    """
    places = np.arange(1, size + 1)
    stratum = (places * min(num_strata, size) - 1) // size
    return np.bincount(stratum).tolist()


def dealt(by_length: NDArray[Any], strata: Sequence[int], rank_of_update: IntArray) -> NDArray[Any]:
    """Deals samples, given longest first, to stratified updates of one size: (updates, samples).

    Args:
        strata: samples of each stratum of an update, the longest first.
        rank_of_update: (updates,), as in :func:`places_by_length`.
    """
    num_updates = len(rank_of_update)
    chunk_sizes = np.asarray(strata)
    stratum = np.repeat(np.arange(len(chunk_sizes)), chunk_sizes)
    first_place = (np.cumsum(chunk_sizes) - chunk_sizes)[stratum]
    rank = rank_of_update[:, None]
    chunk = np.where(stratum == 0, rank, num_updates - 1 - rank)
    start_of_chunk = num_updates * first_place + chunk * chunk_sizes[stratum]
    return by_length[start_of_chunk + np.arange(len(stratum)) - first_place]


def spread_of_strata(tokens: NDArray[Any], num_updates: int, strata: Sequence[int]) -> float:
    """Returns the variance of the tokens of an update that is dealt from these samples.

    Args:
        tokens: (N,), tokens of a pool's samples, longest first; N is a multiple of ``num_updates``.
        strata: samples of each stratum of an update, the longest first.
    """
    updates = dealt(tokens, strata, np.arange(num_updates))
    return float(updates.sum(axis=1, dtype=np.float64).var())


def spread_at_random(tokens: NDArray[Any], num_updates: int) -> float:
    """Returns the variance of the tokens of an update that is drawn from these samples at random.

    A sum of ``n`` of ``N`` values drawn without replacement varies by ``n * variance * (N - n) / (N - 1)`` (Cochran,
    *Sampling Techniques*, 1977).
    """
    num_samples = len(tokens)
    size = num_samples // num_updates
    return size * float(tokens.var()) * (num_samples - size) / max(num_samples - 1, 1)


def balanced_strata(tokens: NDArray[Any], num_updates: int) -> list[int]:
    """Returns the fewest strata with which the tokens of an update vary no more than those of random updates: the samples
    of each, the longest first.

    Begins with equal strata of at most 32 samples: at least four, or half as many as samples in updates of fewer than 8.
    The stratum whose chunks vary most is halved, and again. Mostly that is the first one, with the longest samples; the
    others need few batches.

    Args:
        tokens: (N,), tokens of a pool's samples, or of samples like them, longest first; N is a multiple of ``num_updates``.

    >>> balanced_strata(np.exp(np.linspace(9, 3, 320)), num_updates=10)
    [4, 4, 8, 8, 8]
    """
    size = len(tokens) // num_updates
    fewest = min(STRATA, max(size // 2, 1))
    strata = equal_strata(size, max(fewest, size // MOST_SAMPLES))
    at_random = spread_at_random(tokens, num_updates)
    while max(strata) > 1 and spread_of_strata(tokens, num_updates, strata) > at_random:
        widest = _widest(tokens, num_updates, strata)
        half = strata[widest] // 2
        strata[widest : widest + 1] = [half, strata[widest] - half]
    return strata


def _widest(tokens: NDArray[Any], num_updates: int, strata: Sequence[int]) -> int:
    """Returns which stratum of several samples has the chunks whose tokens vary most."""
    borders = num_updates * np.cumsum(strata)
    spreads = []
    for chunk_size, samples in zip(strata, np.split(tokens, borders[:-1]), strict=True):
        chunks = samples.reshape(num_updates, chunk_size)
        spread = float(chunks.sum(axis=1, dtype=np.float64).var())
        spreads.append(spread if chunk_size > 1 else -1.0)
    return int(np.argmax(spreads))


def strata_of(strata: int | None, tokens: NDArray[Any], size: int, pool: int) -> list[int]:
    """Returns the samples of each stratum of an update of ``size`` samples, the longest first: ``strata`` equal ones, or for
    None those that the tokens need (:func:`balanced_strata`).

    A typical pool stands for all pools: the samples at evenly spaced quantiles of the lengths.

    Args:
        tokens: (N,), tokens of some samples of the data set, in any order, at least one.
        pool: int, updates that are dealt together.
    """
    if strata is not None:
        return equal_strata(size, strata)
    falling = np.sort(tokens)[::-1]
    quantiles = (np.arange(pool * size) + 0.5) / (pool * size)
    places = (quantiles * len(tokens)).astype(np.int64)
    return balanced_strata(falling[places], pool)


def scaled_strata(strata: Sequence[int], size: int) -> list[int]:
    """Returns the strata of a part of an update with ``size`` of its samples, in proportion.

    >>> scaled_strata([8, 8, 16], size=4)
    [1, 1, 2]
    """
    stratum = _stratum_of_places(strata, np.arange(size), size)
    num_samples = np.bincount(stratum)
    return num_samples[num_samples > 0].tolist()


def deal_pool(by_length: IntArray, strata: Sequence[int], rng: np.random.Generator) -> IntArray:
    """Deals a pool's samples, given longest first, to updates of these strata: (samples,), update after update.

    Samples that are too few for a whole update form a smaller last one. They are evenly spaced over the pool.
    """
    num_updates, rest = divmod(len(by_length), sum(strata))
    # Systematic sampling: every sample is in the smaller last update with the same probability.
    spaced = (np.arange(rest) + rng.random()) * (len(by_length) / max(rest, 1))
    left_over = by_length[spaced.astype(np.int64)]
    if not num_updates:
        return left_over
    if rest:
        by_length = np.delete(by_length, spaced.astype(np.int64))
    updates = dealt(by_length, strata, rng.permutation(num_updates))
    return np.append(updates.ravel(), left_over)


class StratifiedOrder:
    """An order in which consecutive samples form stratified updates of one size, dealt from pools of ``pool`` updates.

    Each update is sorted from its longest to its shortest sample. An epoch's smaller last update stays last; it gets
    samples evenly spaced over its pool. Each sample is in each update of its pool with the same probability. Reading a
    slice of dataset indices deals each pool in it; the last pool is cached.

    Args:
        order: the epoch's dataset indices, to be read by slices.
        tokens_of: function from dataset indices to the tokens of these samples.
        pool: int, updates that are dealt together.
        strata: samples of each stratum of an update, the longest first; see :func:`strata_of`.
        seed, epoch: int; the order depends on these and the other arguments alone.
        source_of: source of each dataset index, int (N,): each update keeps its number of samples of each source, and each
            source has strata of its own.
        num_strata: int, strata of an update of several sources; None: as many as the tokens of each source need.

    >>> lengths = np.array([5, 1, 4, 2, 9, 3, 8, 7])
    >>> order = StratifiedOrder(np.arange(8), lengths.take, pool=2, strata=[2, 2], seed=0)
    >>> lengths[order[:]].tolist()
    [7, 5, 4, 3, 9, 8, 2, 1]
    """

    def __init__(
        self,
        order: Any,
        tokens_of: Callable[[IntArray], NDArray[Any]],
        *,
        pool: int,
        strata: Sequence[int],
        seed: int = 0,
        epoch: int = 0,
        source_of: IntArray | None = None,
        num_strata: int | None = None,
    ) -> None:
        self._order = order
        self._source_of = source_of
        self._num_strata = num_strata
        self._tokens_of = tokens_of
        self._strata = strata
        self._seeds = (seed, epoch)
        self.size = sum(strata)
        self.span = self.size * pool
        """Samples of a pool."""
        self._dealt = NONE
        self._pool = -1  # that is dealt

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, where: slice) -> IntArray:
        start, stop, _ = where.indices(len(self))
        first = start // self.span
        pools = [self._pool_at(pool) for pool in range(first, -(-stop // self.span))]
        joined = np.concatenate([NONE, *pools])
        return joined[start - first * self.span : stop - first * self.span]

    def _pool_at(self, pool: int) -> IntArray:
        """Returns the dataset indices of a pool, update after update."""
        if pool != self._pool:
            drawn = self._order[pool * self.span : (pool + 1) * self.span]
            rng = np.random.default_rng((*self._seeds, pool))
            self._dealt = self._deal(np.asarray(drawn), rng)
            self._pool = pool
        return self._dealt

    def _deal(self, drawn: IntArray, rng: np.random.Generator) -> IntArray:
        if self._source_of is not None:
            return self._deal_sources(drawn, self._source_of[drawn], rng)
        drawn = rng.permutation(drawn)  # samples of one length are dealt at random
        by_length = longest_first({TOKENS: self._tokens_of(drawn)})
        return drawn[deal_pool(by_length, self._strata, rng)]

    def _deal_sources(
        self, drawn: IntArray, sources: IntArray, rng: np.random.Generator
    ) -> IntArray:
        """Deals each source's samples by itself, to as many places as the source has in each update. Of a given number of
        strata, a source has its share, at least two, so that its long and short samples balance."""
        update_of = np.arange(len(drawn)) // self.size
        dealt_pool = np.empty_like(drawn)
        for source in np.unique(sources):
            places = np.flatnonzero(sources == source)
            samples = rng.permutation(drawn[places])
            tokens = self._tokens_of(samples)
            by_length = samples[longest_first({TOKENS: tokens})]
            num_updates = int(update_of[places[-1]]) + 1
            num_strata = self._num_strata
            if num_strata is not None:
                num_strata = max(round(num_strata * len(places) / len(drawn)), 2)
            usual_size = max(len(places) // num_updates, 1)
            strata = strata_of(num_strata, tokens, usual_size, num_updates)
            order = places_by_length(update_of[places], strata, rng.permutation(num_updates))
            dealt_pool[places[order]] = by_length
        by_length = longest_first({TOKENS: self._tokens_of(dealt_pool)})
        return dealt_pool[by_length[np.argsort(update_of[by_length], kind="stable")]]
