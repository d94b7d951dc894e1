"""Micro-batches for samples that are already in memory, as reinforcement learning has them after a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.lengths import as_streams
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cut import DEFAULT_WORK
from dynagroup.plan.rows import cut_rows
from dynagroup.plan.work import Work
from dynagroup.shapes import units_of

__all__ = ["shard_micro_batches"]


def shard_micro_batches(
    lengths: Sequence[int] | np.ndarray | Mapping[str, Any],
    num_ranks: int,
    budget: Budget | int,
    *,
    multiple_of: int = 1,
    work: Work = DEFAULT_WORK,
) -> list[list[list[int]]]:
    """Divide samples over ranks: equally many micro-batches on every rank, each within the budget, of equal cost.

    Every rank calls it with the lengths of all ranks' samples and takes its own entry; nothing is exchanged.

    Args:
        lengths: tokens of each sample over all ranks, or a dict of named streams.
        num_ranks: data-parallel ranks.
        budget: what a micro-batch may be; a number means so many tokens.
        work: what a micro-batch takes; the steps' work is levelled over the ranks.
        multiple_of: the number of micro-batches on a rank is a multiple of this (pipeline stages, say).

    Returns:
        ``result[rank][step]``: positions in ``lengths``; every sample is in exactly one micro-batch.

    Raises:
        BudgetError: a sample does not fit even alone. ConfigError: there are fewer samples than micro-batches needed.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> shards = shard_micro_batches([9, 1, 4, 4, 2, 8], 2, TokenBudget(9))
    >>> [len(micro_batches) for micro_batches in shards]
    [2, 2]
    >>> sorted(position for rank in shards for batch in rank for position in batch)
    [0, 1, 2, 3, 4, 5]
    """
    for name, value in (("num_ranks", num_ranks), ("multiple_of", multiple_of)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ConfigError(f"`{name}` must be an int of at least 1, but is {value!r}")
    streams = as_streams(lengths)
    budget = as_budget(budget).bind(streams)
    every = num_ranks * multiple_of
    batches = cut_rows(streams, budget, every, work=work)
    if not len(batches.order):
        return [[] for _ in range(num_ranks)]
    _check(batches, streams, budget, every)
    cost = work.of_batches(batches, streams, budget)
    dearest_first = np.argsort(-cost, kind="stable")
    return _levelled(batches.take(dearest_first), cost[dearest_first], num_ranks)


def _check(batches: Batches, streams: Mapping[str, Any], budget: Budget, every: int) -> None:
    fits = budget.fits(shapes_of(batches, streams))
    if not fits.all():
        sample = int(batches[int(np.flatnonzero(~fits)[0])][0])
        raise BudgetError(
            f"sample {sample} ({units_of(streams, sample)}) does not fit even alone; truncate it or raise the budget"
        )
    if len(batches) % every:
        raise ConfigError(
            f"{len(batches.order)} samples cannot be divided into a multiple of num_ranks x multiple_of = {every} micro-batches; "
            "collect more samples, or use a smaller multiple_of"
        )


def _levelled(batches: Batches, cost: np.ndarray, num_ranks: int) -> list[list[list[int]]]:
    """Rows of like cost, each row's dearest batch to the rank with the least so far."""
    shards: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for first in range(0, len(batches), num_ranks):
        for rank, number in zip(np.argsort(load, kind="stable"), range(first, first + num_ranks), strict=True):
            shards[rank].append(batches[number].tolist())
            load[rank] += cost[number]
    return shards
