"""Rows of batches for all ranks: cut, matched, arranged, and proved."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cut import (
    DEFAULT_WORK,
    Objective,
    by_longest,
    cheapest_cut,
    cut,
    ordered_windows,
    price_of,
    runs_of,
)
from dynagroup.plan.even import evened
from dynagroup.plan.interleave import interleaved
from dynagroup.plan.pack import pack
from dynagroup.plan.rounding import RoundBatch
from dynagroup.plan.runs import OrderedWindow, SortedWindow, by_rows, fewest, split_dearest, under_one_limit
from dynagroup.plan.work import Work
from dynagroup.shapes import TOKENS, IntArray, Streams, units_of

__all__ = ["Rows", "Uneven", "arrange", "cut_rows", "even_out", "prove"]

Uneven: TypeAlias = Literal["repeat", "drop"]

FEW_ROWS = 24
"""Rows; with more of them the batches of a window, sorted by work, are alike already, and need no cut of their own."""


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

    def sorted_again(positions: IntArray) -> tuple[IntArray, OrderedWindow]:
        few = {name: values[positions] for name, values in lengths.items()}
        return next(ordered_windows(few, budget, work, objective, round_batch))

    windows = list(ordered_windows(lengths, budget, work, objective, round_batch))
    price = price_of(windows, work, objective)
    order, window, offsets = _cheapest(windows, num_ranks, price, objective)
    offsets = _closer(window, offsets, num_ranks)
    batches, work_of = Batches(order, offsets), window.total(offsets)
    in_front = by_longest(batches, lengths, budget)
    by_row = in_front[_in_rows(work_of[in_front], num_ranks)]
    return evened(batches.take(by_row), work_of[by_row], num_ranks, sorted_again)


def _cheapest(
    windows: Sequence[tuple[IntArray, OrderedWindow]], num_ranks: int, price: float, objective: Objective
) -> tuple[IntArray, OrderedWindow, IntArray]:
    """A window cut into rows, in the order in which one rank's cut is cheapest; in another where that fills no rows."""
    alone = [(order, window, runs_of(window, price, objective)) for order, window in windows]
    alone.sort(key=lambda cut: float(cut[1].total(cut[2]).sum()) + price * (len(cut[2]) - 1))
    cuts = ((order, window, _one_of(window, runs, num_ranks, price)) for order, window, runs in alone)
    first = next(cuts)
    full = (cut for cut in chain([first], cuts) if (len(cut[2]) - 1) % num_ranks == 0)
    return next(full, first)


def _one_of(window: OrderedWindow, runs: IntArray, num_ranks: int, price: float) -> IntArray:
    """The cut of least predicted time among those that fill rows: it decides how many rows there are. ``runs``: of one rank."""
    found = [_filled(window, runs, num_ranks)]
    if len(found[0]) - 1 <= FEW_ROWS * num_ranks:
        found += [_filled(window, offsets, num_ranks) for offsets in _in_few_rows(window, runs, num_ranks, price)]
    full = [offsets for offsets in found if (len(offsets) - 1) % num_ranks == 0]
    if not full:  # so many batches that no more of them fill a row
        return _filled(window, fewest(window), num_ranks)
    return min(full, key=lambda o: _time_of(window.total(o), num_ranks, price))


def _closer(window: OrderedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """As many rows of less time, if there are any."""
    if (len(offsets) - 1) % num_ranks or not isinstance(window, SortedWindow):
        return offsets
    tried = _filled(window, interleaved(window, offsets, num_ranks), num_ranks)
    found = [offsets, tried] if len(tried) == len(offsets) else [offsets]
    return min(found, key=lambda o: _time_of(window.total(o), num_ranks, 0.0))


def _in_few_rows(window: OrderedWindow, runs: IntArray, num_ranks: int, price: float) -> list[IntArray]:
    """Cuts for a window of few rows: each row under its own limit of work, and all under one, in as many rows or the fewest."""
    cuts = by_rows(window, num_ranks, price) if isinstance(window, SortedWindow) else [runs]
    rows = {-(-(len(offsets) - 1) // num_ranks) for offsets in [*cuts, fewest(window)]}
    even = [under_one_limit(window, number * num_ranks) for number in sorted(rows)]
    return [*cuts, *(offsets for offsets in even if offsets is not None)]


def num_batches(
    lengths: Streams,
    budget: Budget,
    num_ranks: int,
    *,
    work: Work = DEFAULT_WORK,
    objective: Objective = "time",
    round_batch: RoundBatch | None = None,
) -> int:
    """How many batches :func:`cut_rows` makes of a window, in about half the time."""
    how: dict[str, Any] = {"work": work, "objective": objective, "round_batch": round_batch}
    if budget.layout == "packed" or not len(lengths[TOKENS]):
        return len(cut_rows(lengths, budget, num_ranks, **how))
    windows = list(ordered_windows(lengths, budget, work, objective, round_batch))
    price = price_of(windows, work, objective)
    if num_ranks == 1:
        return len(cheapest_cut(windows, price, objective))
    return len(_cheapest(windows, num_ranks, price, objective)[2]) - 1


def num_fewest(lengths: Streams, budget: Budget, round_batch: RoundBatch | None = None) -> int:
    """The fewest batches that a window can be cut into (packed: that packing finds)."""
    if budget.layout == "packed" or not len(lengths[TOKENS]):
        return len(cut(lengths, budget, objective="fewest", round_batch=round_batch))
    windows = ordered_windows(lengths, budget, DEFAULT_WORK, "fewest", round_batch)
    return min(len(fewest(window)) for _, window in windows) - 1


def _filled(window: OrderedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """The runs, split until their number divides by the ranks; into sizes that are not allowed only where it must be."""
    number = -(-(len(offsets) - 1) // num_ranks) * num_ranks
    offsets = split_dearest(window, offsets, number)
    return offsets if len(offsets) > number else split_dearest(replace(window, allowed=None), offsets, number)


def _time_of(work: NDArray[np.float64], num_ranks: int, per_step: float) -> float:
    """Predicted time of these batches in rows of the like: every ``num_ranks``-th is the dearest of a row."""
    dearest = np.sort(work)[::-1][::num_ranks]
    return per_step * len(dearest) + float(dearest.sum())


def _in_rows(work: NDArray[np.float64], num_ranks: int) -> IntArray:
    """Numbers of the batches row after row: row mates are neighbours in work, rows are in the order of their longest sample."""
    by_work = np.argsort(-work, kind="stable")
    full = len(by_work) - len(by_work) % num_ranks
    rows = by_work[:full].reshape(-1, num_ranks)
    rows = rows[np.argsort(rows.min(axis=1, initial=full), kind="stable")]
    return np.append(rows.ravel(), by_work[full:])


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
