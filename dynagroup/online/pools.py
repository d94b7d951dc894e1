"""Deals the samples of a pool of updates by length, in a worker, as soon as their true lengths are known.

A rank requests its part of several updates at once. The worker deals this part as the offline plan deals a whole pool
(:mod:`dynagroup.plan.strata`): each update keeps its number of samples, and gets a chunk of each stratum."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.online.messages import Pool
from dynagroup.plan.batches import longest_first
from dynagroup.plan.epoch import NONE
from dynagroup.plan.strata import deal_pool, scaled_strata, strata_of
from dynagroup.shapes import TOKENS, IntArray


def deal_updates(pool: Pool, tokens: NDArray[Any]) -> list[IntArray]:
    """Returns which of a request's samples (by their place in it) each update of the pool gets.

    All ranks draw the same random numbers. So the k-th update has samples of about the same lengths on every rank, and
    ranks hardly wait for each other. If this rank's part of an update is too small for a chunk of each stratum, the rank
    draws numbers of its own: else all samples of an update could have about one length.

    Args:
        tokens: (N,), true tokens of the request's samples.
    """
    if not len(tokens):
        return [NONE for _ in pool.share_sizes]
    size = pool.share_sizes[0]
    num_full = pool.share_sizes.count(size)
    own_rng = np.random.default_rng((*pool.seeds, pool.rank))
    drawn = own_rng.permutation(len(tokens))  # samples of one length are dealt at random
    by_length = drawn[longest_first({TOKENS: tokens[drawn]})]
    rng = np.random.default_rng(pool.seeds)
    strata = strata_of(pool.strata, tokens, pool.update_size, num_full)
    if len(strata) > size:
        rng = own_rng
        strata = strata_of(pool.strata, tokens, size, num_full)
    dealt = deal_pool(by_length, scaled_strata(strata, size), rng)
    return np.split(dealt, np.cumsum(pool.share_sizes)[:-1])
