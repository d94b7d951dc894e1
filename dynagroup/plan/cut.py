"""Cut a window of samples into batches that fit, of least predicted time.

One kernel serves planning a million known lengths and re-cutting one window inside a worker.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.checks import check_choice
from dynagroup.plan.batches import Batches, longest_first
from dynagroup.plan.pack import pack
from dynagroup.plan.reach import most_by_start
from dynagroup.plan.rounding import RoundBatch
from dynagroup.plan.runs import EXACT_UP_TO, SortedWindow, fewest, least_time
from dynagroup.plan.work import Work
from dynagroup.shapes import TOKENS, IntArray, Streams, round_up

__all__ = ["DEFAULT_WORK", "OBJECTIVES", "Objective", "cut", "price_of", "runs_of", "sorted_window"]

Objective: TypeAlias = Literal["time", "fewest"]
OBJECTIVES = ("time", "fewest")

DEFAULT_WORK = Work()


def cut(
    lengths: Streams,
    budget: Budget,
    *,
    work: Work = DEFAULT_WORK,
    objective: Objective = "time",
    round_batch: RoundBatch | None = None,
) -> Batches:
    """Divide one window of samples into batches that fit ``budget``.

    A padded window is sorted, longest first (ties keep their order), and cut into runs. A packed one is filled first-fit
    decreasing on token sums, and samples keep their order of arrival inside a batch. A sample that does not fit even
    alone gets a batch of its own; the caller decides what becomes of it.

    Args:
        lengths: stream -> int32 (N,) of the window's samples.
        work: what a batch takes.
        objective: "time": least predicted time of all cuts into runs; "fewest": the fewest batches, and of those cuts one
            that pads least.
        round_batch: batch sizes are chosen among the values of this function.

    Returns:
        Positions into the window. Padded: longest batch first. Packed: in order of arrival.

    Raises:
        ConfigError: ``objective`` or ``round_batch`` is wrong. BudgetError: the budget breaks its law.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> batches = cut({"tokens": np.array([3, 9, 2, 8], np.int32)}, TokenBudget(18))
    >>> [batch.tolist() for batch in batches]
    [[1, 3], [0, 2]]
    """
    check_choice("objective", objective, OBJECTIVES)
    if not len(lengths[TOKENS]):
        return Batches(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if budget.layout == "packed":
        return pack(lengths, budget, work=work, round_batch=round_batch)
    order, window = sorted_window(lengths, budget, work, objective, round_batch)
    return Batches(order, runs_of(window, work, objective))


def runs_of(window: SortedWindow, work: Work, objective: Objective) -> IntArray:
    """The cut of one rank, as offsets into the sorted window."""
    if objective == "fewest" and len(window) > EXACT_UP_TO:
        return fewest(window)
    return least_time(window, price_of(window, work, objective))


def price_of(window: SortedWindow, work: Work, objective: Objective) -> float:
    """What a further batch costs; with "fewest" more than any padding."""
    return work.per_step if objective == "time" else 1.0 + len(window) * float(window.work[0])


def sorted_window(
    lengths: Streams, budget: Budget, work: Work, objective: Objective, round_batch: RoundBatch | None
) -> tuple[IntArray, SortedWindow]:
    """A padded window's positions, longest first, and what cutting needs to know of it; not empty.

    With "fewest" a sample's padded tokens stand for its work.
    """
    order = longest_first(lengths)
    ordered = {name: values[order] for name, values in lengths.items()}
    padded = round_up(ordered[TOKENS].astype(np.int64), budget.pad_to_multiple_of)
    each = work.of_lengths(padded) if objective == "time" else padded.astype(np.float64)
    return order, SortedWindow.of(each, most_by_start(ordered, budget), round_batch)
