"""Divides items into parts of equal cost, and samples in memory into micro-batches, as after a rollout in RL."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.lengths import as_streams
from dynagroup.plan.cost import Work
from dynagroup.plan.cursor import MOST_RANKS
from dynagroup.plan.cut import cut
from dynagroup.plan.inputs import Oversize, PlanConfig, PlanInputs
from dynagroup.plan.packed import Limits, best_fit, fill_empty, least_loaded
from dynagroup.plan.rules import CutRules
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
    num_parts = check_int("num_parts", num_parts, most=MOST_RANKS)
    equal_size = check_flag("equal_size", equal_size)
    cost = _numbers("costs", costs)
    size = cost if sizes is None else _numbers("sizes", sizes)
    if len(size) != len(cost):
        raise ConfigError(f"`sizes` must have {len(cost)} entries, as `costs`, but has {len(size)}")
    most = np.inf
    if limit is not None:
        most = check_number("limit", limit, or_zero=True, finite=False)
    slots = [len(cost)] * num_parts
    if equal_size:
        each, num_larger = divmod(len(cost), num_parts)
        slots = [each + 1] * num_larger + [each] * (num_parts - num_larger)
    parts = _divided(cost, size, slots, most)
    fill_empty(parts)
    return [sorted(part) for part in parts]


def _divided(
    cost: NDArray[np.float64], size: NDArray[np.float64], slots: list[int], most: float
) -> list[list[int]]:
    """Divides items into parts of at most ``slots`` items, each of size ``most`` or less.

    Without a limit of size, the highest cost of a part is at most 4/3 of the lowest possible. With one, division by
    cost is tried first, then best fit decreasing, then first fit, by which callers may have counted parts.
    """
    limits = Limits(size, most)
    if size.max(initial=0.0) <= most:
        for divide in (_by_cost, _by_best_fit, _by_first_fit):
            parts = divide(cost, size, slots, limits)
            if parts is not None:
                return parts
    num_needed = int((size > most / 2).sum())
    if most:
        num_needed = max(num_needed, math.ceil(size.sum() / most * (1 - 1e-12)))
    reason = "list scheduling, best fit and first fit failed"
    if num_needed > len(slots):
        reason = f"at least {num_needed} are needed"
    items = f"{len(size)} items of size {size.sum():g}, the largest {size.max():g},"
    raise BudgetError(
        f"{items} do not fit into {len(slots)} parts of at most {most:g} each ({reason}); "
        "allow more parts or a higher limit"
    )


def _by_cost(
    cost: NDArray[np.float64], size: NDArray[np.float64], slots: list[int], limits: Limits
) -> list[list[int]] | None:
    """Gives each item, dearest first, to the part with the least cost that has room."""
    bins = [limits.bin(slots=num_items) for num_items in slots]
    dearest_first = np.argsort(-cost, kind="stable").tolist()
    if not least_loaded(dearest_first, cost.tolist(), bins, limits):
        return None
    return [bin.members for bin in bins]


def _by_best_fit(
    cost: NDArray[np.float64], size: NDArray[np.float64], slots: list[int], limits: Limits
) -> list[list[int]] | None:
    """Gives each item, largest first, to the fullest part with room."""
    further = [len(cost)] * len(cost)  # parts beyond the allowed ones
    unused = iter([*slots, *further])
    largest_first = np.argsort(-size, kind="stable").tolist()
    bins = best_fit(largest_first, cost.tolist(), lambda: limits.bin(slots=next(unused)), limits)
    if len(bins) > len(slots):
        return None
    empty: list[list[int]] = [[] for _ in slots[len(bins) :]]
    return [bin.members for bin in bins] + empty


def _by_first_fit(
    cost: NDArray[np.float64], size: NDArray[np.float64], slots: list[int], limits: Limits
) -> list[list[int]] | None:
    """Gives each item, in the given order, to the first part with room."""
    bins = [limits.bin(slots=num_items) for num_items in slots]
    for item in range(len(cost)):
        for bin in bins:
            if limits.admits(bin, item):
                limits.add(bin, item, 0.0)
                break
        else:
            return None
    return [bin.members for bin in bins]


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
    multiple = num_ranks * check_int("multiple_of", multiple_of, most=MOST_RANKS)
    config = PlanConfig(work=work or Work(), oversize=oversize)
    inputs = PlanInputs(as_streams(lengths), budget, config)
    inputs.warn_of_oversize()
    kept = np.delete(np.arange(inputs.num_samples), inputs.left_out)
    streams = {name: values[kept] for name, values in inputs.lengths.items()}
    rules = CutRules(inputs.budget, config.work)
    batches = cut(streams, rules, multiple)
    if len(batches) % multiple:
        raise ConfigError(
            f"{len(kept)} samples do not give a number of micro-batches that is a multiple of "
            f"{multiple} (num_ranks x multiple_of); collect {-len(kept) % multiple} more, or use "
            "a smaller multiple_of"
        )
    work_of_batch = rules.work_of(batches, streams)
    by_step = np.argsort(-work_of_batch, kind="stable").reshape(-1, num_ranks)
    shards: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for of_step in by_step.tolist():
        # the most expensive batch goes to the rank with the least work
        for rank, batch in zip(np.argsort(load, kind="stable"), of_step, strict=True):
            shards[rank].append(kept[batches[batch]].tolist())
            load[rank] += work_of_batch[batch]
    return shards
