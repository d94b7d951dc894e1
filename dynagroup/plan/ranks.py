"""Rows of batches for all ranks: one batch a rank and step, cut so that the steps take least time; arranged, and proved."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import Batches, RoundBatch, shapes_of
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
Fits: TypeAlias = Callable[[Sequence[IntArray]], bool]

FEW_ROWS = 24
"""Rows; the batches of more rows, sorted by work, are alike already, and need no cut of their own."""
LIMITS, TABLE = 64, 1 << 17
"""Limits of work that are tried, and entries of a table of starts by limits: large windows try fewer limits, at least 12."""
EQUAL = 0.05
"""Of a row's mean work: what its batches may differ by."""
EXCHANGES, TRIED, PAIRS = 64, 8, 1 << 16
"""Of samples in a row, at most; the best that are tried whether they fit; and pairs that are judged, at most."""


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
    runs, of_run = Batches(np.arange(len(order)), offsets), window.total(offsets)
    in_front = longest_batches_first(runs.map(order), lengths, budget)
    by_row = in_front[_in_rows(of_run[in_front], num_ranks)]
    fit = lambda parts: bool(budget.fits(shapes_of(Batches.of(parts).map(order), lengths)).all())  # noqa: E731
    return _levelled(runs.take(by_row), of_run[by_row], num_ranks, window, fit).map(order)


def _cheapest(window: OrderedWindow, num_ranks: int, price: float) -> IntArray:
    """The cut of least predicted time that fills rows: one rank's, divided; or in few rows one of its own."""
    alone = window.least_time(price)
    cuts = [_filled(window, alone, num_ranks)]
    if len(alone) - 1 <= FEW_ROWS * num_ranks and len(window) > num_ranks:
        cuts.append(_filled(window, _rows_of_least_time(window, num_ranks, price), num_ranks))

    def time(offsets: IntArray) -> float:
        dearest = np.sort(window.total(offsets))[::-1][::num_ranks]  # of each row, in rows of the like
        return price * len(dearest) + float(np.add.reduce(dearest))

    full = [offsets for offsets in cuts if (len(offsets) - 1) % num_ranks == 0]
    return min(full, key=time) if full else _filled(window, fewest(window), num_ranks)  # no more batches fill a row


def _filled(window: OrderedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """The runs, split until their number divides by the ranks; into sizes that are not allowed only where it must be."""
    number = -(-(len(offsets) - 1) // num_ranks) * num_ranks
    offsets = split_dearest(window, offsets, number)
    return offsets if len(offsets) > number else split_dearest(replace(window, allowed=None), offsets, number)


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
        offsets += _evenest(window, start, stop, num_ranks, low, float(limits[which]))[1:]
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


def _row_ends(window: OrderedWindow, limits: NDArray[np.float64], num_ranks: int) -> tuple[IntArray, NDArray]:
    """Where a row ends and what its dearest run is, for each start and limit: (N + 1, limits)."""
    sizes, (num, wide) = window.sizes_under(limits), (len(window), len(limits))
    place = np.arange(num)[:, None]
    step = np.append(place + sizes, np.full((1, wide), num), axis=0) * wide + np.arange(
        wide
    )  # places in the flat table
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


def _levelled(batches: Batches, work: NDArray[np.float64], num_ranks: int, window: OrderedWindow, fit: Fits) -> Batches:
    """The rows, with less work in the dearest batches of uneven ones. ``batches`` hold places of the window."""
    by_row = work[: len(work) - len(work) % num_ranks].reshape(-1, num_ranks)
    uneven = by_row.max(axis=1) - by_row.min(axis=1) > EQUAL * by_row.mean(axis=1)
    parts = list(batches)
    for row in np.flatnonzero(uneven).tolist():
        places = slice(row * num_ranks, (row + 1) * num_ranks)
        level = _level_pairs if window.streams else _level_runs
        parts[places] = level(parts[places], window, float(by_row[row].max()), fit)
    return Batches.of(parts) if uneven.any() else batches


def _level_runs(row: list[IntArray], window: OrderedWindow, dearest: float, fit: Fits) -> list[IntArray]:
    """One padded stream: the row's samples sorted anew and cut under the lowest limit, which makes the dearest batch least."""
    places = np.sort(np.concatenate(row))
    most = np.minimum(window.most[places], np.arange(len(places), 0, -1))
    part = OrderedWindow(window.work[places], most, window.allowed)
    runs = _evenest(part, 0, len(places), len(row), 0.0, dearest)
    offsets = split_dearest(part, np.asarray(runs, np.int64), len(row))
    found = part.total(offsets)
    if runs[-1] < len(places) or len(found) < len(row) or found.max() >= dearest:
        return row
    return [places[offsets[k] : offsets[k + 1]] for k in np.argsort(-found, kind="stable")]


# Local search: the exchange of a sample of the dearest batch for one of another batch, or for none, that makes the dearer of the
# two least; until none helps. A batch costs its samples times the sum of its maxima, so all exchanges are judged at once from the
# maxima of each batch without each of its samples: O(d * n) an exchange, in a row of n samples, d of them in the dearest batch.
def _level_pairs(row: list[IntArray], window: OrderedWindow, dearest: float, fit: Fits) -> list[IntArray]:
    """Several padded streams: less work in the dearest batch. Batches whose sizes are rounded stay as they are."""
    units = np.stack(window.streams)
    for _ in range(EXCHANGES if window.allowed is None else 0):
        better = _exchanged(row, units, fit)
        if better is None:
            break
        row = sorted(better, key=lambda part: -len(part) * float(units[:, part].max(axis=1).sum()))
    return row


def _exchanged(row: list[IntArray], units: NDArray[np.float64], fit: Fits) -> list[IntArray] | None:
    """The row after the best exchange that fits; None where none makes its first batch, the dearest, and another less."""
    mine, others = row[0], row[1:]
    sizes = np.asarray([len(part) for part in others])
    theirs = np.append(np.concatenate(others), np.full(len(others), -1))  # -1: no sample of theirs comes for mine
    owner = np.append(np.repeat(np.arange(len(others)), sizes), np.arange(len(others)))
    if len(mine) * len(theirs) > PAIRS:
        return None
    come = np.where(theirs < 0, 0.0, units[:, theirs])
    left = [_maxima_without(units[:, part]) for part in others]
    left.append(np.stack([units[:, part].max(axis=1) for part in others], axis=1))
    after_mine = np.maximum(_maxima_without(units[:, mine])[:, :, None], come[:, None]).sum(axis=0)
    after_theirs = np.maximum(np.concatenate(left, axis=1)[:, None], units[:, mine, None]).sum(axis=0)
    one = theirs < 0  # the other batch has one more then, and the dearest one less
    dearer = np.maximum(after_mine * (len(mine) - one), after_theirs * (sizes[owner] + one))
    now = len(mine) * float(units[:, mine].max(axis=1).sum())
    for flat in np.argsort(dearer, axis=None)[:TRIED].tolist():
        gives, takes = divmod(flat, len(theirs))
        if dearer[gives, takes] >= now * (1 - TINY):
            return None
        if len(mine) == 1 and theirs[takes] < 0:
            continue  # no batch becomes empty
        other = others[owner[takes]]
        new_mine = np.append(np.delete(mine, gives), theirs[takes][theirs[takes] >= 0])
        new_other = np.append(other[other != theirs[takes]], mine[gives])
        if fit([new_mine, new_other]):
            others[owner[takes]] = new_other
            return [new_mine, *others]
    return None


def _maxima_without(units: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each stream, the largest of all but each sample: (streams, n)."""
    if units.shape[1] == 1:
        return np.zeros_like(units)
    second, first = np.partition(units, -2, axis=1)[:, -2:].T[:, :, None]
    return np.where(units == first, second, first)


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
    none, full = np.zeros(0, np.int64), len(batches) - len(batches) % world_size
    if uneven == "drop" or full == len(batches):
        cut_off = batches.offsets[full]
        kept = Batches(batches.order[:cut_off], batches.offsets[: full + 1])
        return Rows(kept, np.arange(full).reshape(-1, world_size), none, batches.order[cut_off:])
    repeated = np.resize(smallest, full + world_size - len(batches))
    filled = Batches.concatenate([batches, Batches(repeated, np.arange(len(repeated) + 1))])
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
