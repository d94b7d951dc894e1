"""Rows of batches for all ranks: cut, matched, arranged, and proved."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError
from dynagroup.plan.alike import AlikeWindow
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cut import (
    DEFAULT_WORK,
    Objective,
    by_longest,
    cut,
    ordered_windows,
    price_of,
    runs_of,
)
from dynagroup.plan.even import evened
from dynagroup.plan.interleave import interleaved
from dynagroup.plan.lowest import lowest_limits, whole
from dynagroup.plan.pack import pack
from dynagroup.plan.rounding import RoundBatch
from dynagroup.plan.row_limits import by_rows
from dynagroup.plan.runs import OrderedWindow, SortedWindow, fewest, split_dearest
from dynagroup.plan.trade import traded
from dynagroup.plan.work import Work
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, units_of

__all__ = ["Rows", "Uneven", "arrange", "cut_rows", "even_out", "prove"]

Uneven: TypeAlias = Literal["repeat", "drop"]

COUNTED_TOGETHER = 256
"""Windows."""
SURELY = 0.01
"""A margin for rounding, and for limits that are found to 1/256."""
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
    alone = _alone(windows, price, objective)
    order, window, offsets = _cheapest(alone, _one_by_one(alone, num_ranks), num_ranks)
    offsets = _closer(window, offsets, num_ranks)
    batches, work_of = Batches(order, offsets), window.total(offsets)
    in_front = by_longest(batches, lengths, budget)
    by_row = in_front[_in_rows(work_of[in_front], num_ranks)]
    batches = evened(batches.take(by_row), work_of[by_row], num_ranks, sorted_again)
    if not isinstance(window, AlikeWindow) or window.allowed is not None:
        return batches

    def fits(positions: IntArray) -> bool:
        return bool(budget.fits(BatchShape.of_samples({name: v[positions] for name, v in lengths.items()}))[0])

    return traded(batches, order, window, num_ranks, fits)


class _Alone(NamedTuple):
    """A window in one of the orders that are worth cutting, as one rank would cut it."""

    order: IntArray
    window: OrderedWindow
    runs: IntArray
    price: float
    """Of a step."""

    @property
    def time(self) -> float:
        return float(self.window.total(self.runs).sum()) + self.price * (len(self.runs) - 1)


def _alone(windows: Sequence[tuple[IntArray, OrderedWindow]], price: float, objective: Objective) -> list[_Alone]:
    """The orders of one window, the cheapest first."""
    found = [_Alone(order, window, runs_of(window, price, objective), price) for order, window in windows]
    return found if len(found) == 1 else sorted(found, key=lambda alone: alone.time)


def _in_few_rows(windows: Sequence[_Alone], num_ranks: int) -> Iterator[list[IntArray]]:
    """Further cuts for each window, if it is one of few rows: each row under its own limit of work, and all under one, in as
    many rows or the fewest."""
    few = [one for one in windows if len(one.runs) - 1 <= FEW_ROWS * num_ranks]
    of_one_stream = [(one.window, one.price) for one in few if isinstance(one.window, SortedWindow)]
    own = by_rows([window for window, _ in of_one_stream], num_ranks, [price for _, price in of_one_stream])
    cuts = [next(own) if isinstance(one.window, SortedWindow) else [one.runs] for one in few]
    least = [fewest(one.window) for one in few]
    even = _under_one_limit(few, cuts, least, num_ranks)
    found = iter([[*own, *under] for own, under in zip(cuts, even, strict=True)])
    return (next(found) if len(one.runs) - 1 <= FEW_ROWS * num_ranks else [] for one in windows)


def _one_by_one(alone: Sequence[_Alone], num_ranks: int) -> Iterator[list[IntArray]]:
    """The same for one window in several orders, of which only the first is likely to be asked for."""
    return (next(_in_few_rows([one], num_ranks)) for one in alone)


def _under_one_limit(
    windows: Sequence[_Alone], cuts: Sequence[list[IntArray]], least: Sequence[IntArray], num_ranks: int
) -> list[list[IntArray]]:
    """Each window with all its runs under one limit, in as many rows as each of its cuts and as the fewest."""
    rows = [
        sorted({-(-(len(offsets) - 1) // num_ranks) for offsets in [*own, few]})
        for own, few in zip(cuts, least, strict=True)
    ]
    numbers = [[number * num_ranks for number in own] for own in rows]
    every = (whole(one.window, most) for one, most in zip(windows, numbers, strict=True))
    found = iter(lowest_limits(list(chain.from_iterable(every))))
    return [[np.asarray(next(found) or few, np.int64) for _ in own] for own, few in zip(rows, least, strict=True)]


def _cheapest(
    alone: Sequence[_Alone], further: Iterable[list[IntArray]], num_ranks: int
) -> tuple[IntArray, OrderedWindow, IntArray]:
    """A window cut into rows, in the order in which one rank's cut is cheapest; in another where that fills no rows."""
    cuts = ((a.order, a.window, _one_of(a, others, num_ranks)) for a, others in zip(alone, further, strict=True))
    first = next(cuts)
    full = (cut for cut in chain([first], cuts) if (len(cut[2]) - 1) % num_ranks == 0)
    return next(full, first)


def _one_of(alone: _Alone, further: Sequence[IntArray], num_ranks: int) -> IntArray:
    """The cut of least predicted time among those that fill rows: it decides how many rows there are."""
    _, window, runs, price = alone
    found = [_filled(window, offsets, num_ranks) for offsets in [runs, *further]]
    full = [offsets for offsets in found if (len(offsets) - 1) % num_ranks == 0]
    if not full:  # so many batches that no more of them fill a row
        return _filled(window, fewest(window), num_ranks)
    distinct = list({offsets.tobytes(): offsets for offsets in full}.values())
    if len(distinct) == 1:
        return distinct[0]
    return min(distinct, key=lambda o: _time_of(window.total(o), num_ranks, price))


def _closer(window: OrderedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """As many rows of less time, if there are any."""
    if (len(offsets) - 1) % num_ranks or not isinstance(window, SortedWindow):
        return offsets
    tried = _filled(window, interleaved(window, offsets, num_ranks), num_ranks)
    found = [offsets, tried] if len(tried) == len(offsets) else [offsets]
    return min(found, key=lambda o: _time_of(window.total(o), num_ranks, 0.0))


# Small windows are counted many at a time: where their rows may end is one table for all of a size, and the limits of all their
# rows are searched together. Where the fewest rows already waste less than the price of one more, they are not even cut.
def num_batches(
    windows: Iterable[Streams],
    budget: Budget,
    num_ranks: int,
    *,
    work: Work = DEFAULT_WORK,
    objective: Objective = "time",
    round_batch: RoundBatch | None = None,
) -> Iterator[int]:
    """How many batches :func:`cut_rows` makes of each window, without making them.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> window = {"tokens": np.full(10, 5, np.int32)}
    >>> list(num_batches([window, window], TokenBudget(20), 4))
    [4, 4]
    """
    how: dict[str, Any] = {"work": work, "objective": objective, "round_batch": round_batch}
    if budget.layout == "packed":
        yield from (len(cut_rows(lengths, budget, num_ranks, **how)) for lengths in windows)
        return
    windows = iter(windows)
    while together := list(islice(windows, COUNTED_TOGETHER)):
        yield from _counted((_orders(lengths, budget, **how) for lengths in together), num_ranks, work, objective)


def _orders(lengths: Streams, budget: Budget, **how: Any) -> list[tuple[IntArray, OrderedWindow]]:
    return list(ordered_windows(lengths, budget, **how)) if len(lengths[TOKENS]) else []


def _counted(
    windows: Iterable[list[tuple[IntArray, OrderedWindow]]], num_ranks: int, work: Work, objective: Objective
) -> Iterator[int]:
    found: list[int | list[_Alone]] = []
    for orders in windows:
        price = price_of(orders, work, objective) if orders else 0.0
        glance = len(orders) == 1 and num_ranks > 1
        known = _num_at_a_glance(orders[0][1], num_ranks, price) if glance else None
        found.append(_alone(orders, price, objective) if known is None else known)
    if num_ranks == 1:
        yield from (len(alone[0].runs) - 1 if alone else 0 for alone in found if isinstance(alone, list))
        return
    single = [alone[0] for alone in found if isinstance(alone, list) and len(alone) == 1]
    further = _in_few_rows(single, num_ranks)
    for alone in found:
        if isinstance(alone, list):
            own = [next(further)] if len(alone) == 1 else _one_by_one(alone, num_ranks)
            yield len(_cheapest(alone, own, num_ranks)[2]) - 1 if alone else 0
        else:
            yield alone


# A cut in R rows takes R prices and at least the work of all samples over the ranks, or of the heaviest. So if the fewest rows,
# under one limit, stay below what one row more would take at the least, no cut in more rows is cheaper. The bisection for that
# limit comes within 1/256 of the lowest. One greedy pass: O(rows * ranks).
def _num_at_a_glance(window: OrderedWindow, num_ranks: int, price: float) -> int | None:
    """How many batches the cheapest cut has, if it is one in the fewest rows that there are; None where that is not sure."""
    if not isinstance(window, SortedWindow) or window.allowed is not None or not price:
        return None
    rows = -(-(len(fewest(window)) - 1) // num_ranks)
    total = float(window.work.sum())
    least = max(total / num_ranks, window.heaviest)
    most_alone = 1 + rows + (least - total / num_ranks) / price  # rows of one rank's cut, which is a candidate, too
    if len(window) < rows * num_ranks or most_alone > FEW_ROWS:
        return None
    limit = (1 - SURELY) * (price + least) / rows
    return rows * num_ranks if window.greedy()(limit, rows * num_ranks)[-1] == len(window) else None


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
    return per_step * len(dearest) + float(np.add.reduce(dearest))


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
