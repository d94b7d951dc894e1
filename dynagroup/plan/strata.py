"""Stratified updates: every optimizer update gets samples of all lengths, and each of its batches similar ones.

The samples of a pool of updates are sorted by length and cut into *strata*, from the longest samples to the shortest. A
stratum is cut into *chunks* of consecutive samples, and every update gets one chunk of each stratum. An update that gets
long samples of the first stratum gets short ones of the others (antithetic stratified sampling), so updates have about
equally many tokens. Updates come in random order. So an update has short, middle and long samples like a random one,
but each of its chunks needs hardly any padding. With a single stratum an update is one run of neighbours: its samples
all have about one length, and training loses quality. ``docs/benchmarks.md`` has the measurements, also of designs that
were rejected."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.batches import longest_first
from dynagroup.plan.epoch import NONE
from dynagroup.shapes import TOKENS, IntArray

STRATA = 4
"""The fewest that lost nothing where the label of a sample goes with its length."""


def places_by_length(update_of: IntArray, num_strata: int, rank_of_update: IntArray) -> IntArray:
    """Returns in which order the places of updates get samples, longest first. An update's places are divided into strata,
    of equally many places or one more.

    Args:
        update_of: (places,), the update of each place, rising.
        rank_of_update: (updates,), which chunk of the first stratum each update gets; of the others, it gets the chunk as
            far from the end.

    >>> places_by_length(np.array([0, 0, 0, 1, 1, 1]), 2, np.array([1, 0])).tolist()
    [3, 0, 1, 2, 4, 5]
    """
    num_places = np.bincount(update_of)
    first = np.cumsum(num_places) - num_places
    num_up_to = np.arange(1, len(update_of) + 1) - first[update_of]
    stratum = (num_up_to * num_strata - 1) // num_places[update_of]
    rank = rank_of_update[update_of]
    chunk = np.where(stratum == 0, rank, len(num_places) - 1 - rank)
    return np.argsort(stratum * len(num_places) + chunk, kind="stable")


def dealt(by_length: NDArray[Any], num_strata: int, rank_of_update: IntArray) -> NDArray[Any]:
    """Deals samples, given longest first, to stratified updates of one size: (updates, samples). An update's places are
    divided as by :func:`places_by_length`."""
    num_updates = len(rank_of_update)
    size = len(by_length) // num_updates
    place = np.arange(size)
    stratum = ((place + 1) * num_strata - 1) // size
    chunk_sizes = np.bincount(stratum)
    first_place = (np.cumsum(chunk_sizes) - chunk_sizes)[stratum]
    rank = rank_of_update[:, None]
    chunk = np.where(stratum == 0, rank, num_updates - 1 - rank)
    start_of_chunk = num_updates * first_place + chunk * chunk_sizes[stratum]
    return by_length[start_of_chunk + place - first_place]


def spread_of_strata(tokens: NDArray[Any], num_updates: int, num_strata: int) -> float:
    """Returns the variance of the tokens of an update that is dealt from these samples.

    Args:
        tokens: (N,), tokens of a pool's samples, longest first; N is a multiple of ``num_updates``.
    """
    updates = dealt(tokens, num_strata, np.arange(num_updates))
    return float(updates.sum(axis=1, dtype=np.float64).var())


def spread_at_random(tokens: NDArray[Any], num_updates: int) -> float:
    """Returns the variance of the tokens of an update that is drawn from these samples at random.

    A sum of ``n`` of ``N`` values drawn without replacement varies by ``n * variance * (N - n) / (N - 1)`` (Cochran,
    *Sampling Techniques*, 1977).
    """
    num_samples = len(tokens)
    size = num_samples // num_updates
    return size * float(tokens.var()) * (num_samples - size) / max(num_samples - 1, 1)


def fewest_strata(tokens: NDArray[Any], num_updates: int) -> int:
    """Returns the fewest strata with which the tokens of an update vary no more than those of random updates.

    Tried are 4, 8, 16, ... strata, at most one a sample. Updates of fewer than 8 samples begin with half as many as samples.

    Args:
        tokens: (N,), tokens of a pool's samples, or of samples like them, longest first; N is a multiple of ``num_updates``.
    """
    size = len(tokens) // num_updates
    num_strata = min(STRATA, max(size // 2, 1))
    at_random = spread_at_random(tokens, num_updates)
    while num_strata < size and spread_of_strata(tokens, num_updates, num_strata) > at_random:
        num_strata = min(2 * num_strata, size)
    return num_strata


def number_of_strata(strata: int | None, tokens: NDArray[Any], size: int, pool: int) -> int:
    """Returns ``strata``, or for None the fewest that an update of ``size`` samples needs; at most one a sample.

    A typical pool stands for all pools: the samples at evenly spaced quantiles of the lengths.

    Args:
        tokens: (N,), tokens of some samples of the data set, in any order, at least one.
        pool: int, updates that are dealt together.
    """
    if strata is not None:
        return min(strata, size)
    falling = np.sort(tokens)[::-1]
    quantiles = (np.arange(pool * size) + 0.5) / (pool * size)
    places = (quantiles * len(tokens)).astype(np.int64)
    return fewest_strata(falling[places], pool)


def deal_pool(
    by_length: IntArray, size: int, num_strata: int, rng: np.random.Generator
) -> IntArray:
    """Deals a pool's samples, given longest first, to updates of ``size``: (samples,), update after update.

    Samples that are too few for a whole update form a smaller last one. They are evenly spaced over the pool.
    """
    num_updates, rest = divmod(len(by_length), size)
    # Systematic sampling: every sample is in the smaller last update with the same probability.
    spaced = (np.arange(rest) + rng.random()) * (len(by_length) / max(rest, 1))
    left_over = by_length[spaced.astype(np.int64)]
    if not num_updates:
        return left_over
    if rest:
        by_length = np.delete(by_length, spaced.astype(np.int64))
    updates = dealt(by_length, num_strata, rng.permutation(num_updates))
    return np.append(updates.ravel(), left_over)


class StratifiedOrder:
    """An order in which consecutive samples form stratified updates of ``size``, dealt from pools of ``pool`` updates.

    Each update is sorted from its longest to its shortest sample. An epoch's smaller last update stays last; it gets
    samples evenly spaced over its pool. Each sample is in each update of its pool with the same probability. Reading a
    slice of dataset indices deals each pool in it; the last pool is cached.

    Args:
        order: the epoch's dataset indices, to be read by slices.
        tokens_of: function from dataset indices to the tokens of these samples.
        size: int, samples of an update.
        pool: int, updates that are dealt together.
        strata: int, strata of an update, at most one a sample; see :func:`fewest_strata`.
        seed, epoch: int; the order depends on these and the arguments above alone.
        source_of: source of each dataset index, int (N,): each update keeps its number of samples of each source.

    >>> lengths = np.array([5, 1, 4, 2, 9, 3, 8, 7])
    >>> order = StratifiedOrder(np.arange(8), lengths.take, size=4, pool=2, strata=2, seed=0)
    >>> lengths[order[:]].tolist()
    [7, 5, 4, 3, 9, 8, 2, 1]
    """

    def __init__(
        self,
        order: Any,
        tokens_of: Callable[[IntArray], NDArray[Any]],
        *,
        size: int,
        pool: int,
        strata: int,
        seed: int = 0,
        epoch: int = 0,
        source_of: IntArray | None = None,
    ) -> None:
        self._order = order
        self._source_of = source_of
        self._tokens_of = tokens_of
        self._strata = min(strata, size)
        self._seeds = (seed, epoch)
        self.size = size
        self.span = size * pool
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
        return drawn[deal_pool(by_length, self.size, self._strata, rng)]

    def _deal_sources(
        self, drawn: IntArray, sources: IntArray, rng: np.random.Generator
    ) -> IntArray:
        """Deals each source's samples by itself, to as many places as the source has in each update. A source has strata in
        proportion to its share, at least two, so that a source's long and short samples balance."""
        update_of = np.arange(len(drawn)) // self.size
        dealt_pool = np.empty_like(drawn)
        for source in np.unique(sources):
            places = np.flatnonzero(sources == source)
            samples = rng.permutation(drawn[places])
            by_length = samples[longest_first({TOKENS: self._tokens_of(samples)})]
            num_strata = max(round(self._strata * len(places) / len(drawn)), 2)
            rank_of_update = rng.permutation(update_of[places[-1]] + 1)
            order = places_by_length(update_of[places], num_strata, rank_of_update)
            dealt_pool[places[order]] = by_length
        by_length = longest_first({TOKENS: self._tokens_of(dealt_pool)})
        return dealt_pool[by_length[np.argsort(update_of[by_length], kind="stable")]]
