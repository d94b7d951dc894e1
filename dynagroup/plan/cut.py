"""Cut a window of samples into batches that fit, of least predicted time.

One kernel serves planning a million known lengths and re-cutting one window inside a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.plan.alike import AlikeWindow
from dynagroup.plan.batches import Batches, longest_first
from dynagroup.plan.boxes import orders_of
from dynagroup.plan.pack import pack
from dynagroup.plan.reach import most_by_start
from dynagroup.plan.rounding import RoundBatch
from dynagroup.plan.runs import EXACT_UP_TO, OrderedWindow, SortedWindow, fewest
from dynagroup.plan.work import Work
from dynagroup.shapes import TOKENS, IntArray, Streams, round_up
from dynagroup.validation import check_choice

__all__ = [
    "DEFAULT_WORK",
    "OBJECTIVES",
    "Objective",
    "by_longest",
    "cheapest_cut",
    "cut",
    "ordered_windows",
    "price_of",
    "runs_of",
]

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

    A padded window is sorted, longest first (ties keep their order), and cut into runs; with several padded streams it is
    ordered so that neighbours are alike in all of them. A packed one is filled first-fit
    decreasing on token sums, and samples keep their order of arrival inside a batch. A sample that does not fit even
    alone gets a batch of its own; the caller decides what becomes of it.

    Args:
        lengths: stream -> int32 (N,) of the window's samples.
        work: what a batch takes.
        objective: "time": least predicted time of all cuts into runs; "fewest": the fewest batches, and of those cuts one
            that pads least.
        round_batch: batch sizes are chosen among the values of this function.

    Returns:
        Positions into the window. Padded: longest batch first, of several streams by their sum. Packed: in order of arrival.

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
    windows = list(ordered_windows(lengths, budget, work, objective, round_batch))
    batches = cheapest_cut(windows, price_of(windows, work, objective), objective)
    return batches.take(by_longest(batches, lengths, budget))


def cheapest_cut(windows: Sequence[tuple[IntArray, OrderedWindow]], price: float, objective: Objective) -> Batches:
    """The cut of one rank, in the order in which it is cheapest."""
    cuts = [(order, window, runs_of(window, price, objective)) for order, window in windows]
    order, _, offsets = min(cuts, key=lambda cut: float(cut[1].total(cut[2]).sum()) + price * (len(cut[2]) - 1))
    return Batches(order, offsets)


def runs_of(window: OrderedWindow, price: float, objective: Objective) -> IntArray:
    """The cut of one rank, as offsets into the ordered window."""
    if objective == "fewest" and len(window) > EXACT_UP_TO:
        return fewest(window)
    return window.least_time(price)


def price_of(windows: Sequence[tuple[IntArray, OrderedWindow]], work: Work, objective: Objective) -> float:
    """What a further batch costs, in any order of a window; with "fewest" more than any padding."""
    if objective == "time":
        return work.per_step
    return 1.0 + max(len(window) * window.heaviest for _, window in windows)


def by_longest(batches: Batches, lengths: Streams, budget: Budget) -> IntArray:
    """Numbers of a cut's batches, the one with the longest sample first; of one padded stream they are in that order already."""
    names = padded_streams(budget, lengths)
    if len(names) == 1:
        return np.arange(len(batches))
    tokens = np.sum([lengths[name][batches.order].astype(np.int64) for name in names], axis=0)
    return np.argsort(-np.maximum.reduceat(tokens, batches.offsets[:-1]), kind="stable")


def ordered_windows(
    lengths: Streams, budget: Budget, work: Work, objective: Objective, round_batch: RoundBatch | None
) -> Iterator[tuple[IntArray, OrderedWindow]]:
    """A padded window's positions in the orders that are worth cutting, and what cutting needs to know of each; not empty.

    One padded stream: longest first, and nothing else can be better. Several: see :mod:`dynagroup.plan.boxes`. With "fewest" a
    sample's padded tokens stand for its work.
    """
    names = padded_streams(budget, lengths)
    for order in [longest_first(lengths)] if len(names) == 1 else orders_of(lengths, names):
        yield _ordered(order, lengths, names, budget, work, objective, round_batch)


def _ordered(
    order: IntArray,
    lengths: Streams,
    names: Sequence[str],
    budget: Budget,
    work: Work,
    objective: Objective,
    round_batch: RoundBatch | None,
) -> tuple[IntArray, OrderedWindow]:
    ordered = {name: values[order] for name, values in lengths.items()}
    padded = [round_up(ordered[name].astype(np.int64), budget.pad_to_multiple_of) for name in names]
    each = [work.of_lengths(p) if objective == "time" else p.astype(np.float64) for p in padded]
    most = most_by_start(ordered, budget)
    if len(each) == 1:
        return order, SortedWindow.of(each[0], most, round_batch)
    return order, AlikeWindow.of_streams(each, most, round_batch)
