"""Rows of batches for all ranks: one batch a rank and step, cut so that the steps take least time; arranged, and proved."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import Batches, RoundBatch, offsets_of, shapes_of
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.plan.packed import pack
from dynagroup.plan.padded import (
    TINY,
    Objective,
    OrderedWindow,
    cut,
    fewest,
    in_order,
    longest_batches_first,
    price_of,
    split_dearest,
)
from dynagroup.shapes import TOKENS, IntArray, Streams, units_of

__all__ = ["Rows", "Uneven", "arrange", "cut_rows", "even_out", "prove"]

Uneven: TypeAlias = Literal["repeat", "drop"]

FEW_ROWS = 24
"""Rows; the batches of more rows, sorted by work, are alike already, and need no cut of their own."""
LIMITS, TABLE = 64, 1 << 17
"""Limits of work that are tried, and entries of a table of starts by limits: large windows try fewer limits, at least 12."""
EQUAL = 0.05
"""Of a row's mean work: what its batches may differ by."""


def cut_rows(
    lengths: Streams,
    budget: Budget,
    num_ranks: int,
    *,
    work: Work = DEFAULT_WORK,
    objective: Objective = "time",
    round_batch: RoundBatch | None = None,
) -> Batches:
    """Cut a window into rows of one batch a rank, so that its steps take least predicted time: a price and the dearest batch.

    The number of batches divides by ``num_ranks`` wherever some batch has more than one sample. Row after row, each
    row's dearest batch first, the row with the longest sample in front; a row that cannot be filled comes last.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> window = {"tokens": np.full(10, 5, np.int32)}
    >>> cut_rows(window, TokenBudget(20), 4).sizes.tolist()
    [3, 3, 3, 1]
    """
    if num_ranks == 1 or not len(lengths[TOKENS]):
        return cut(lengths, budget, work=work, objective=objective, round_batch=round_batch)
    if budget.layout == "packed":
        batches = pack(lengths, budget, num_ranks, work=work, round_batch=round_batch)
        batches = even_out(batches, num_ranks)
        return batches.take(_in_rows(work.of_batches(batches, lengths, budget), num_ranks))
    order, window = in_order(lengths, budget, work, objective, round_batch)
    offsets = _cheapest(window, num_ranks, price_of(window, work, objective))
    batches, of_batch = Batches(order, offsets), window.total(offsets)
    in_front = longest_batches_first(batches, lengths, budget)
    by_row = in_front[_in_rows(of_batch[in_front], num_ranks)]
    again = lambda few: in_order(few, budget, work, objective, round_batch)  # noqa: E731
    return _evened(batches.take(by_row), of_batch[by_row], num_ranks, lengths, again)


def _cheapest(window: OrderedWindow, num_ranks: int, price: float) -> IntArray:
    """The cut of least predicted time that fills rows: one rank's, divided; or in few rows one of its own."""
    alone = window.least_time(price)
    cuts = [alone]
    if len(alone) - 1 <= FEW_ROWS * num_ranks and len(window) > num_ranks:
        cuts.append(_rows_of_least_time(window, num_ranks, price))
    filled = [_filled(window, offsets, num_ranks) for offsets in cuts]
    full = [offsets for offsets in filled if (len(offsets) - 1) % num_ranks == 0]
    if not full:  # so many batches that no more of them fill a row
        return _filled(window, fewest(window), num_ranks)
    return min(full, key=lambda offsets: _time_of(window.total(offsets), num_ranks, price))


def _filled(window: OrderedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """The runs, split until their number divides by the ranks; into sizes that are not allowed only where it must be."""
    number = -(-(len(offsets) - 1) // num_ranks) * num_ranks
    offsets = split_dearest(window, offsets, number)
    return offsets if len(offsets) > number else split_dearest(replace(window, allowed=None), offsets, number)


def _time_of(work: NDArray[np.float64], num_ranks: int, price: float) -> float:
    """Predicted time of these batches in rows of the like: every ``num_ranks``-th is the dearest of a row."""
    dearest = np.sort(work)[::-1][::num_ranks]
    return price * len(dearest) + float(np.add.reduce(dearest))


# Dynamic programming over the starts of rows. Under a limit of work a row is greedy, so where it ends and what its dearest run is
# are one table over starts and limits, made by binary lifting: two runs further is one run further, twice. The least time from
# each start on picks each row's limit. A row takes at least a sample a rank, so so many starts are done at once.
# O(N * limits * log ranks) time, O(N * limits) memory.
def _rows_of_least_time(window: OrderedWindow, num_ranks: int, price: float) -> IntArray:
    """Offsets of the runs of the rows that take least time, where each costs its price and its dearest run."""
    num, limits = len(window), _limits(window, num_ranks, price)
    ends, dearest = _row_ends(window, limits, num_ranks)
    best, choice = np.zeros(num + 1), np.zeros(num + 1, np.int64)
    for stop in range(num, 0, -num_ranks):
        block = slice(max(stop - num_ranks, 0), stop)
        time = dearest[block] + best[ends[block]]
        choice[block] = time.argmin(axis=1)
        best[block] = price + time.min(axis=1)
    offsets, start = [0], 0
    while start < num:
        which, stop = int(choice[start]), int(ends[start, choice[start]])
        low = float(limits[which - 1]) if which else 0.0
        row = _evenest(window, start, stop, num_ranks, low, float(limits[which]))
        offsets += row[1:]
        start = stop
    return np.asarray(offsets, np.int64)


def _limits(window: OrderedWindow, num_ranks: int, price: float) -> NDArray[np.float64]:
    """Limits to try: from far below the price of a step, where rows no longer pay, to what a single row would need."""
    mean = float(window.work.sum()) / num_ranks
    largest = float(window.work_of(np.arange(len(window)), window.most).max())
    high = min(largest, 2 * mean + window.heaviest)
    low = max(min(price / 8, mean), float(window.work.min()), high / 1e6)
    count = max(min(TABLE // len(window), LIMITS), 12)
    return low * (high / low) ** np.linspace(0.0, 1.0, count) if TINY < low < high else np.asarray([high])


def _row_ends(
    window: OrderedWindow, limits: NDArray[np.float64], num_ranks: int
) -> tuple[IntArray, NDArray[np.float64]]:
    """Where a row ends and what its dearest run is, for each start and limit: (N + 1, limits)."""
    sizes, (num, wide) = window.sizes_under(limits), (len(window), len(limits))
    place = np.arange(num)[:, None]
    step = np.append(place + sizes, np.full((1, wide), num), axis=0) * wide + np.arange(
        wide
    )  # flat places of the table
    work = np.append(window.work_of(np.broadcast_to(place, sizes.shape), sizes), np.zeros((1, wide)), axis=0)
    ends, dearest, left = np.arange((num + 1) * wide).reshape(num + 1, wide), np.zeros(step.shape), num_ranks
    while left:
        if left & 1:
            dearest, ends = np.maximum(dearest, work.take(ends)), step.take(ends)
        left >>= 1
        if left:
            work, step = np.maximum(work, work.take(step)), step.take(step)
    return ends // wide, dearest


def _evenest(window: OrderedWindow, start: int, stop: int, most_runs: int, low: float, high: float) -> list[int]:
    """Offsets of at most so many runs from ``start`` to ``stop``, the dearest of least work: parametric search, to 1/256, for the
    lowest limit between two under which greedy runs suffice. ``high`` suffices for certain."""
    low = max(low, float(np.add.reduce(window.work[start:stop])) / most_runs)
    row = window.greedy(high, most_runs, start, stop)
    while low < high * (1 - 1 / 256):
        middle = (low + high) / 2
        tried = window.greedy(middle, most_runs, start, stop)
        low, high, row = (low, middle, tried) if tried[-1] == stop else (middle, high, row)
    return row


def _in_rows(work: NDArray[np.float64], num_ranks: int) -> IntArray:
    """Numbers of the batches row after row: row mates are neighbours in work, rows are in the order of their longest sample."""
    by_work = np.argsort(-work, kind="stable")
    full = len(by_work) - len(by_work) % num_ranks
    rows = by_work[:full].reshape(-1, num_ranks)
    rows = rows[np.argsort(rows.min(axis=1, initial=full), kind="stable")]
    return np.append(rows.ravel(), by_work[full:])


# Parametric search again, inside each row whose batches differ by more than 5 %: its samples, sorted anew and cut into one run a
# rank under the lowest limit, are the division of least dearest batch. O(n log n) for a row of n samples.
def _evened(
    batches: Batches,
    work: NDArray[np.float64],
    num_ranks: int,
    lengths: Streams,
    in_order: Callable[[Streams], tuple[IntArray, OrderedWindow]],
) -> Batches:
    """The rows, uneven ones divided again where that makes their dearest batch less. ``work``: of each batch."""
    by_row = work[: len(work) - len(work) % num_ranks].reshape(-1, num_ranks)
    dearest, parts = by_row.max(axis=1), list(batches)
    for row in np.flatnonzero(dearest - by_row.min(axis=1) > EQUAL * by_row.mean(axis=1)).tolist():
        places = slice(row * num_ranks, (row + 1) * num_ranks)
        members = np.concatenate(parts[places])
        order, window = in_order({name: values[members] for name, values in lengths.items()})
        runs = _evenest(window, 0, len(members), num_ranks, 0.0, float(dearest[row]))
        offsets = split_dearest(window, np.asarray(runs, np.int64), num_ranks)
        found = window.total(offsets)
        if runs[-1] == len(members) and len(found) == num_ranks and found.max() < dearest[row]:
            parts[places] = [members[order[offsets[k] : offsets[k + 1]]] for k in np.argsort(-found, kind="stable")]
    return Batches(np.concatenate(parts), offsets_of(np.asarray([len(part) for part in parts])))


def even_out(batches: Batches, multiple: int) -> Batches:
    """Halve the largest batches until their number divides by ``multiple``, or all hold a single sample.

    Nothing is dropped or repeated: a half of a batch that fits also fits.

    >>> even_out(Batches(np.arange(6), np.array([0, 1, 6])), 4).sizes.tolist()
    [1, 2, 1, 2]
    """
    sizes = batches.sizes
    missing = -len(sizes) % multiple
    heap = [(-int(size), -int(start)) for size, start in zip(sizes, batches.offsets[:-1], strict=True)]
    heapq.heapify(heap)
    new_offsets: list[int] = []
    while len(new_offsets) < missing and heap and heap[0][0] < -1:
        size, start = (-value for value in heapq.heappop(heap))
        half = size - size // 2
        new_offsets.append(start + half)
        heapq.heappush(heap, (-half, -start))
        heapq.heappush(heap, (half - size, -start - half))
    return Batches(batches.order, np.sort(np.append(batches.offsets, np.asarray(new_offsets, np.int64))))


@dataclass(frozen=True, slots=True)
class Rows:
    """The steps of one window. ``batches`` hold positions in the window; ``table`` numbers them, int64 (steps, ranks)."""

    batches: Batches
    table: IntArray
    repeated: IntArray
    """Positions of samples that stand in a row a second time to fill it; the last batches hold one each."""
    dropped: IntArray
    """Positions of samples left out because they cannot fill a row."""


def arrange(batches: Batches, world_size: int, uneven: Uneven, smallest: IntArray) -> Rows:
    """Batches in rows of one for each rank, in their order; ``smallest`` lists positions that may fill the last row."""
    none = np.zeros(0, np.int64)
    over = len(batches) % world_size
    if not over:
        table = np.arange(len(batches)).reshape(-1, world_size)
        return Rows(batches, table, none, none)
    if uneven == "drop":
        keep = len(batches) - over
        dropped = batches.order[batches.offsets[keep] :]
        kept = Batches(batches.order[: batches.offsets[keep]], batches.offsets[: keep + 1])
        return Rows(kept, np.arange(keep).reshape(-1, world_size), none, dropped)
    repeated = np.resize(smallest, world_size - over)
    fillers = Batches(repeated, np.arange(len(repeated) + 1))
    filled = Batches.concatenate([batches, fillers])
    return Rows(filled, np.arange(len(filled)).reshape(-1, world_size), repeated, none)


def prove(batches: Batches, num_samples: int, lengths: Streams, budget: Budget, oversize: NDArray[np.bool_]) -> None:
    """Every sample once, every batch fits or is a single oversize sample; runs on every window of every plan."""
    seen = np.zeros(num_samples, np.bool_)
    seen[batches.order] = True
    assert len(batches.order) == num_samples == seen.sum(), "a plan lost or repeated a sample"
    if not num_samples:
        return
    fits = budget.fits(shapes_of(batches, lengths))
    bad = np.flatnonzero(~fits & ~((batches.sizes == 1) & oversize[batches.order[batches.offsets[:-1]]]))
    if len(bad):
        batch = batches[int(bad[0])]
        longest = units_of({name: values[batch].max(keepdims=True) for name, values in lengths.items()}, 0)
        raise BudgetError(
            f"a batch of {len(batch)} samples, longest {longest}, does not fit {budget.fingerprint}, "
            "although it is part of one that does; a budget must never refuse a smaller batch: check it with "
            "dynagroup.testing.assert_budget_law"
        )
