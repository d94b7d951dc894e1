"""Divides items into parts of equal cost, and samples in memory into micro-batches, as after a rollout in RL."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.lengths import as_streams
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import MOST_RANKS
from dynagroup.plan.cut import cut
from dynagroup.plan.inputs import Oversize, PlanConfig, PlanInputs
from dynagroup.plan.packed import Room, best_fit, fill_empty, least_loaded
from dynagroup.validation import check_flag, check_int, check_number, explained


def balanced_partitions(
    costs: Sequence[float] | np.ndarray,
    num_parts: int,
    *,
    sizes: Sequence[float] | np.ndarray | None = None,
    limit: float | None = None,
    equal_size: bool = False,
) -> list[list[int]]:
    """Divides items into parts of about equal total cost, each within a limit of total size.

    Args:
        costs: float (N,), cost of each item, at least 0.
        num_parts: int, number of parts; some are empty if there are fewer items.
        sizes: float (N,), size of each item, to which ``limit`` applies. None: the costs.
        limit: float, largest sum of sizes in a part; None: no limit.
        equal_size: True gives all parts the same number of items, or one more.

    Returns:
        ``result[part]``: sorted positions in ``costs``; every item is in exactly one part.

    Raises BudgetError if no division within the limit was found; ConfigError if an argument is wrong.

    >>> balanced_partitions([9, 1, 4, 4, 2, 8], 2)
    [[0, 1, 3], [2, 4, 5]]
    >>> balanced_partitions([5, 1, 1, 1], 2, equal_size=True)
    [[0, 3], [1, 2]]
    """
    num_parts, equal_size = (
        check_int("num_parts", num_parts, most=MOST_RANKS),
        check_flag("equal_size", equal_size),
    )
    cost = _numbers("costs", costs)
    size = cost if sizes is None else _numbers("sizes", sizes)
    if len(size) != len(cost):
        raise ConfigError(f"`sizes` must have {len(cost)} entries, as `costs`, but has {len(size)}")
    most = np.inf if limit is None else check_number("limit", limit, or_zero=True, finite=False)
    each, over = divmod(len(cost), num_parts)
    parts = _divided(
        cost,
        size,
        [each + (part < over) if equal_size else len(cost) for part in range(num_parts)],
        most,
    )
    fill_empty(parts)
    return [sorted(part) for part in parts]


def _divided(
    cost: NDArray[np.float64], size: NDArray[np.float64], slots: list[int], most: float
) -> list[list[int]]:
    """Divides items into parts of at most ``slots`` items, each of size ``most`` or less. Without a limit of size, the
    highest cost of a part is at most 4/3 of the lowest possible."""
    room, costs = Room([(size, most)], len(cost)), cost.tolist()
    bins = [room.bin(slots=items) for items in slots]
    if size.max(initial=0.0) <= most:
        if least_loaded(np.argsort(-cost, kind="stable").tolist(), costs, bins, room):
            return [bin.members for bin in bins]
        fresh = iter([*slots, *[len(cost)] * len(cost)])
        found = best_fit(
            np.argsort(-size, kind="stable").tolist(),
            costs,
            lambda: room.bin(slots=next(fresh)),
            room,
        )
        if len(found) <= len(slots):
            return [bin.members for bin in found] + [[] for _ in slots[len(found) :]]
        bins = [room.bin(slots=items) for items in slots]
        for item in range(len(cost)):  # last try, by first fit: callers may have counted parts so
            number = next(
                (number for number, bin in enumerate(bins) if room.admits(bin, item)), None
            )
            if number is None:
                break
            room.add(bins[number], item, 0.0)
        else:
            return [bin.members for bin in bins]
    least = max(
        math.ceil(size.sum() / most * (1 - 1e-12)) if most else 0, int((size > most / 2).sum())
    )
    why = (
        f"at least {least} are needed"
        if least > len(slots)
        else "list scheduling, best fit and first fit failed"
    )
    items = f"{len(size)} items of size {size.sum():g}, the largest {size.max():g},"
    way_out = f"({why}); allow more parts or a higher limit"
    raise BudgetError(
        f"{items} do not fit into {len(slots)} parts of at most {most:g} each {way_out}"
    )


def _numbers(name: str, values: Sequence[float] | np.ndarray) -> NDArray[np.float64]:
    with explained(f"`{name}` must be numbers"):
        array = np.asarray(values, np.float64)
    if array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any():
        raise ConfigError(
            f"`{name}` must be one finite number of at least 0 for each item, but is {values!r:.80}"
        )
    return array


def shard_micro_batches(
    lengths: Sequence[int] | np.ndarray | Mapping[str, Any],
    num_ranks: int,
    budget: Budget | int,
    *,
    multiple_of: int = 1,
    work: Work | None = None,
    oversize: Oversize = "alone",
) -> list[list[list[int]]]:
    """Divides samples into micro-batches for all ranks: equally many on each, within the budget, of about equal work.

    Every rank calls it with the lengths of all ranks' samples, and uses its own entry; ranks exchange nothing.

    Args:
        lengths: int (N,), tokens of each sample over all ranks, or a dict by stream.
        num_ranks: int, number of data-parallel ranks.
        budget: limit of a micro-batch; an int means that many tokens.
        multiple_of: int: the number of micro-batches per rank is a multiple of it (e.g. of the pipeline stages).
        work: predicted time of a micro-batch, e.g. ``Work.of(model)``, which ranks share equally.
        oversize: what to do with a sample that does not fit even alone: "alone" and "drop" warn, "error" raises.

    Returns:
        ``result[rank][step]``: positions in ``lengths``; every sample is in exactly one micro-batch.

    Raises ConfigError if there are fewer samples than micro-batches needed, or an argument is wrong.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> shards = shard_micro_batches([9, 1, 4, 4, 2, 8], 2, TokenBudget(9))
    >>> [len(micro_batches) for micro_batches in shards]
    [2, 2]
    >>> sorted(position for rank in shards for batch in rank for position in batch)
    [0, 1, 2, 3, 4, 5]
    """
    num_ranks = check_int("num_ranks", num_ranks, most=MOST_RANKS)
    every = num_ranks * check_int("multiple_of", multiple_of, most=MOST_RANKS)
    planner = PlanInputs(
        as_streams(lengths), budget, PlanConfig(work=check_work(work or Work()), oversize=oversize)
    )
    planner.warn_of_oversize()
    kept = np.delete(np.arange(planner.num_samples), planner.left_out)
    streams = {name: values[kept] for name, values in planner.lengths.items()}
    batches = cut(streams, planner.budget, every, work=(work := planner.config.work))
    if len(batches) % every:
        more = f"{every} (num_ranks x multiple_of); collect {-len(kept) % every} more, or use a smaller multiple_of"
        raise ConfigError(
            f"{len(kept)} samples do not give a number of micro-batches that is a multiple of {more}"
        )
    cost = work.of_batches(batches, streams, planner.budget)
    shards: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    rows = (
        np.argsort(-cost, kind="stable") if every == 1 else np.arange(len(cost))
    )  # for several ranks as cut
    for row in rows.reshape(
        -1, num_ranks
    ).tolist():  # the most expensive batch goes to the rank with the least work
        for rank, number in zip(np.argsort(load, kind="stable"), row, strict=True):
            shards[rank].append(kept[batches[number]].tolist())
            load[rank] += cost[number]
    return shards
