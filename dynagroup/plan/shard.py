"""Micro-batches for samples that are already in memory, as reinforcement learning has them after a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.lengths import as_streams
from dynagroup.plan.batches import Batches
from dynagroup.plan.oversize import Oversize, check_oversize, oversize_mask, refuse_oversize, warn_of_oversize
from dynagroup.plan.position import MOST_RANKS
from dynagroup.plan.rows import cut_rows
from dynagroup.plan.work import Work, check_work
from dynagroup.shapes import IntArray, Streams
from dynagroup.validation import check_int

__all__ = ["shard_micro_batches"]


def shard_micro_batches(
    lengths: Sequence[int] | np.ndarray | Mapping[str, Any],
    num_ranks: int,
    budget: Budget | int,
    *,
    multiple_of: int = 1,
    work: Work | None = None,
    oversize: Oversize = "alone",
) -> list[list[list[int]]]:
    """Divide samples over ranks: equally many micro-batches on every rank, each within the budget, of equal cost.

    Every rank calls it with the lengths of all ranks' samples and takes its own entry; nothing is exchanged.

    Args:
        lengths: tokens of each sample over all ranks, or a dict of named streams.
        num_ranks: data-parallel ranks.
        budget: what a micro-batch may be; a number means so many tokens.
        multiple_of: the number of micro-batches on a rank is a multiple of this (pipeline stages, say).
        work: predicted time of a micro-batch, e.g. ``Work.of(model)``; the steps' work is levelled over the ranks.
        oversize: a sample that does not fit even alone is a micro-batch of its own ("alone", with a warning), an "error", or
            left out of the result with a warning ("drop").

    Returns:
        ``result[rank][step]``: positions in ``lengths``; every sample is in exactly one micro-batch.

    Raises:
        BudgetError: a sample does not fit and ``oversize="error"``. ConfigError: there are fewer samples than micro-batches
            needed, or an argument is wrong.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> shards = shard_micro_batches([9, 1, 4, 4, 2, 8], 2, TokenBudget(9))
    >>> [len(micro_batches) for micro_batches in shards]
    [2, 2]
    >>> sorted(position for rank in shards for batch in rank for position in batch)
    [0, 1, 2, 3, 4, 5]
    """
    num_ranks = check_int("num_ranks", num_ranks, most=MOST_RANKS)
    multiple_of = check_int("multiple_of", multiple_of, most=MOST_RANKS)
    work = check_work(work)
    check_oversize(oversize)
    streams = as_streams(lengths)
    budget = as_budget(budget).bind(streams)
    unfit = oversize_mask(streams, budget)
    if oversize == "error":
        refuse_oversize(streams, np.flatnonzero(unfit))
    warn_of_oversize(streams, np.flatnonzero(unfit), oversize)
    kept = np.flatnonzero(~unfit) if oversize == "drop" else np.arange(len(unfit))
    return _sharded(streams, kept, budget, num_ranks, multiple_of, work)


def _sharded(
    lengths: Streams, kept: IntArray, budget: Budget, num_ranks: int, multiple_of: int, work: Work
) -> list[list[list[int]]]:
    """Micro-batches of the samples at ``kept``, positions in ``lengths``."""
    lengths = {name: values[kept] for name, values in lengths.items()}
    every = num_ranks * multiple_of
    batches = cut_rows(lengths, budget, every, work=work)
    if len(batches) % every:
        raise ConfigError(
            f"{len(kept)} samples cannot be divided into a multiple of num_ranks x multiple_of = {every} micro-batches; "
            "collect more samples, or use a smaller multiple_of"
        )
    cost = work.of_batches(batches, lengths, budget)
    dearest_first = np.argsort(-cost, kind="stable")
    return _levelled(batches.map(kept).take(dearest_first), cost[dearest_first], num_ranks)


def _levelled(batches: Batches, cost: np.ndarray, num_ranks: int) -> list[list[list[int]]]:
    """Rows of like cost, each row's dearest batch to the rank with the least so far."""
    shards: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for first in range(0, len(batches), num_ranks):
        for rank, number in zip(np.argsort(load, kind="stable"), range(first, first + num_ranks), strict=True):
            shards[rank].append(batches[number].tolist())
            load[rank] += cost[number]
    return shards
