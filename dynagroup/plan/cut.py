"""Cuts windows into batches for steps of several ranks, with the least predicted time, and checks each cut."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, is_packed
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import Batches, RoundBatch, shapes_of
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.plan.multistream import Exchanges, costs_of_rows
from dynagroup.plan.packed import EQUAL, pack
from dynagroup.plan.padded import (
    FEWEST,
    TINY,
    OrderedWindow,
    in_order,
    longest_batches_first,
    split_dearest,
)
from dynagroup.shapes import IntArray, Streams, primary, units_of

FEW_ROWS = 20  # with more steps, sorting batches by work is enough: cutting step by step gains 0.3 % at most
# How many limits of work to try for a step (fewer in large windows, at least 12); most entries in a table of them.
LIMITS, TABLE = 64, 1 << 17


def cut(
    lengths: Streams,
    budget: Budget,
    num_ranks: int = 1,
    *,
    work: Work = DEFAULT_WORK,
    round_batch: RoundBatch | None = None,
) -> Batches:
    """Cuts a window into batches that fit, for steps with one batch per rank, with the least predicted time.

    A step takes a fixed time plus the time of its most expensive batch. A padded window is sorted, so that neighbours
    are similar, and cut into runs of neighbours; a packed window is filled. The number of batches is a multiple of
    ``num_ranks`` if any has more than one sample. A sample that does not fit even alone is a batch of its own.

    Returns positions in the window, step after step: the step with the longest sample first, one with too few batches
    last, the most expensive batch of a step first. ConfigError, BudgetError: ``round_batch`` or ``budget`` is wrong."""
    if len(lengths[primary(lengths)]) <= num_ranks:  # at most one step: each sample is a batch
        each = work.of_lengths({name: lengths[name] for name in work.priced(budget, lengths)})
        return Batches(np.argsort(-each, kind="stable"), np.arange(len(each) + 1))
    several = costs_of_rows(lengths, budget, work) if num_ranks > 1 else None
    if is_packed(budget, lengths):

        def packed(costs: NDArray | None = None) -> Batches:
            batches = pack(lengths, budget, num_ranks, work=work, costs=costs)
            return batches.take(_in_rows(work.of_batches(batches, lengths, budget), num_ranks))

        by_work = packed()
        if several is None:
            return by_work
        rows = _even_rows(
            packed(several.mean(axis=0)), num_ranks, several, lengths, budget, work, exchange=True
        )
        most = (1 + EQUAL) * time_of_rows(
            by_work, lengths, budget, num_ranks, work
        )  # what equal costs may take
        even = time_of_rows(rows, lengths, budget, num_ranks, work) <= most
        return (
            rows
            if even
            else _even_rows(by_work, num_ranks, several, lengths, budget, work, exchange=True)
        )
    order, window = in_order(lengths, budget, work, round_batch)
    offsets = _cheapest(window, num_ranks, work.per_step)
    runs, of_run = Batches(np.arange(len(order)), offsets), window.total(offsets)
    in_front = longest_batches_first(runs.map(order), lengths, budget)
    if num_ranks == 1:
        return runs.take(in_front).map(order)
    if several is not None:
        beside = np.add.reduceat(several.sum(axis=0)[order], offsets[:-1])
        rows = runs.take(
            np.lexsort([-beside, -np.round(np.log(np.maximum(of_run, 1.0)) / EQUAL)])
        ).map(order)
        return _even_rows(
            rows, num_ranks, several, lengths, budget, work, exchange=round_batch is None
        )
    by_row = in_front[_in_rows(of_run[in_front], num_ranks)]
    rows, even = runs.take(by_row), bool(window.streams) or len(window.limits)
    return (rows if even else _levelled(rows, of_run[by_row], num_ranks, window)).map(order)


def cut_kinds(
    lengths: Streams,
    kinds: NDArray[np.integer],
    budget: Budget,
    num_ranks: int,
    *,
    together: bool,
    **how: Any,
) -> list[Batches]:
    """Cuts like :func:`cut`, with samples of one kind in a batch; with ``together``, a step may have several kinds."""
    by_kind = np.argsort(kinds, kind="stable") if kinds.any() else np.arange(len(kinds))
    parts = np.split(by_kind, 1 + np.flatnonzero(np.diff(kinds[by_kind])))
    of = [{name: values[part] for name, values in lengths.items()} for part in parts]
    rows = [
        cut(own, budget, num_ranks, **how).map(part) for own, part in zip(of, parts, strict=True)
    ]
    if not together or len(parts) == 1:
        return rows
    found = [cut(own, budget, **how) for own in of]
    time = [
        float(how["work"].of_batches(batches, own, budget).sum())
        for batches, own in zip(found, of, strict=True)
    ]
    # Greedy apportionment: the kind with the largest batches gets a missing batch, and is cut again into one more.
    while missing := -sum(map(len, found)) % num_ranks:
        shares = [*map(len, found)]
        for _ in range(missing):
            growing = [n for n, share in enumerate(shares) if share < len(parts[n])] or [0]
            shares[max(growing, key=lambda n: time[n] / shares[n])] += 1
        if sum(shares) > len(kinds):
            break
        each = zip(of, shares, found, strict=True)
        found = [
            cut(own, budget, n, **how) if n > len(before) else before for own, n, before in each
        ]
    batches = Batches.concatenate(
        [batches.map(part) for batches, part in zip(found, parts, strict=True)]
    )
    ways = [batches.take(_in_rows(how["work"].of_batches(batches, lengths, budget), num_ranks))]
    ways += [] if any(len(row) % num_ranks for row in rows) else [Batches.concatenate(rows)]
    return [min(ways, key=lambda way: time_of_rows(way, lengths, budget, num_ranks, how["work"]))]


def time_of_rows(
    batches: Batches, lengths: Streams, budget: Budget, num_ranks: int, work: Work
) -> float:
    """Returns the predicted time of batches, given step after step; the last step may lack batches."""
    each = work.of_batches(batches, lengths, budget)
    return work.of_rows(np.append(each, np.zeros(-len(each) % num_ranks)).reshape(-1, num_ranks))


def filled(
    batches: Batches, tokens: IntArray, num_ranks: int, fill: bool
) -> tuple[Batches, NDArray[np.bool_]]:
    """Returns the batches of all complete steps, and which of them only fill the last step: bool (steps, ranks).
    ``fill``: copies of the smallest samples complete the last step; without it, an incomplete step is left out."""
    num, missing = len(batches), -len(batches) % num_ranks
    if missing and fill:
        own = np.sort(batches.order)
        smallest = own[np.argsort(tokens[own], kind="stable")]
        batches = Batches.concatenate(
            [batches, Batches(np.resize(smallest, missing), np.arange(missing + 1))]
        )
    full = np.arange(len(batches) - len(batches) % num_ranks)
    return batches.take(full), full.reshape(-1, num_ranks) >= num


def _cheapest(window: OrderedWindow, num_ranks: int, price: float) -> IntArray:
    """Returns the fastest cut into a multiple of ``num_ranks`` batches: one rank's best, split; or one made by steps."""
    alone = window.least_time(price)
    if num_ranks == 1:
        return alone
    cuts = [_filled(window, alone, num_ranks)]
    if len(alone) - 1 <= FEW_ROWS * num_ranks and len(window) > num_ranks:
        cuts.append(_filled(window, _rows_of_least_time(window, num_ranks, price), num_ranks))

    def time(offsets: IntArray) -> float:
        dearest = np.sort(window.total(offsets))[::-1][
            ::num_ranks
        ]  # the most expensive batch of each step
        return price * len(dearest) + float(np.add.reduce(dearest))

    full = [offsets for offsets in cuts if (len(offsets) - 1) % num_ranks == 0]
    return (
        min(full, key=time) if full else _filled(window, window.least_time(FEWEST), num_ranks)
    )  # no full steps


def _filled(window: OrderedWindow, offsets: IntArray, num_ranks: int) -> IntArray:
    """Splits batches until their number is a multiple of the ranks; uses sizes that are not allowed only if necessary."""
    number = -(-(len(offsets) - 1) // num_ranks) * num_ranks
    offsets = split_dearest(window, offsets, number)
    return (
        offsets
        if len(offsets) > number
        else split_dearest(replace(window, allowed=None), offsets, number)
    )


# Dynamic programming over the starts of steps. If the work of a batch is limited, a step is filled greedily, so start
# and limit decide where it ends and what its most expensive batch is. A table of both is made by binary lifting (two
# batches further is one batch further, twice). Each step then gets the limit of least total time. A step has a sample
# per rank or more, so many starts are computed at once. O(N * limits * log ranks) time, O(N * limits) memory.
def _rows_of_least_time(window: OrderedWindow, num_ranks: int, price: float) -> IntArray:
    """Returns the cut of least total time. A step takes ``price`` and the time of its most expensive batch."""
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
    """Returns limits of a batch's work to try: from far below a step's fixed cost up to what a single step needs."""
    if len(window.limits):
        return window.limits
    mean = float(window.work.sum()) / num_ranks
    largest = float(window.work_of(np.arange(len(window)), window.most).max())
    high = min(
        largest, 2 * mean + float(sum(values.max() for values in window.streams or (window.work,)))
    )
    low = max(min(price / 8, mean), float(window.work.min()), high / 1e6)
    count = max(min(TABLE // len(window), LIMITS), 12)
    return (
        low * (high / low) ** (np.arange(count) / (count - 1))
        if TINY < low < high
        else np.asarray([high])
    )


def _row_ends(
    window: OrderedWindow, limits: NDArray[np.float64], num_ranks: int
) -> tuple[IntArray, NDArray]:
    """Returns where steps end, and the work of their most expensive batch, by start and limit: both (N + 1, limits)."""
    sizes, (num, wide) = window.sizes_under(limits), (len(window), len(limits))
    place = np.arange(num)[:, None]
    step = np.append(place + sizes, np.full((1, wide), num), axis=0) * wide + np.arange(
        wide
    )  # place in the flat table
    work = np.append(
        window.work_of(np.broadcast_to(place, sizes.shape), sizes), np.zeros((1, wide)), axis=0
    )
    ends, dearest, left = (
        np.arange((num + 1) * wide).reshape(num + 1, wide),
        np.zeros(step.shape),
        num_ranks,
    )
    while left:
        if left & 1:
            dearest, ends = np.maximum(dearest, work.take(ends)), step.take(ends)
        left >>= 1
        if left:
            work, step = np.maximum(work, work.take(step)), step.take(step)
    return ends // wide, dearest


def _evenest(
    window: OrderedWindow, start: int, stop: int, most_runs: int, low: float, high: float
) -> list[int]:
    """Cuts ``start`` to ``stop`` into at most ``most_runs`` batches, the most expensive as cheap as possible. Bisects
    for the lowest limit of work (to 1/256) within which greedy batches suffice; ``high`` must suffice."""
    low = max(low, float(np.add.reduce(window.work[start:stop])) / most_runs)
    under, close = window.greedy(start, stop, most_runs), 1 - 1 / 256
    row, middle = under(high), high * close
    while low < high * close:
        tried = under(middle)
        low, high, row = (low, middle, tried) if tried[-1] == stop else (middle, high, row)
        middle = (low + high) / 2
    return row


def _in_rows(work: NDArray[np.float64], num_ranks: int) -> IntArray:
    """Sorts batches so that those of similar work share a step; returns their numbers, step after step."""
    by_work = np.argsort(-work, kind="stable")
    full = len(by_work) - len(by_work) % num_ranks
    rows = by_work[:full].reshape(-1, num_ranks)
    return np.append(
        rows[np.argsort(rows.min(axis=1, initial=full), kind="stable")].ravel(), by_work[full:]
    )


# An uneven step is cut again: its samples, sorted, within the lowest limit of work that suffices for the ranks. By an
# exchange argument, no other division has a cheaper most expensive batch.
def _levelled(
    batches: Batches, work: NDArray[np.float64], num_ranks: int, window: OrderedWindow
) -> Batches:
    """Makes the work of ranks more even in each step (one padded stream). ``batches``: positions, with their ``work``."""
    by_row = work[: len(work) - len(work) % num_ranks].reshape(-1, num_ranks)
    uneven = np.ptp(by_row, axis=1) > EQUAL * by_row.mean(axis=1)
    uneven = np.flatnonzero(
        uneven & (batches.sizes[: by_row.size : num_ranks] > 1)
    )  # a single sample cannot be cut
    order, cuts = batches.order.copy(), batches.offsets.copy()
    for row, dearest in zip(uneven.tolist(), by_row[uneven].max(axis=1).tolist(), strict=True):
        ends = slice(row * num_ranks, (row + 1) * num_ranks + 1)
        here = slice(cuts[ends][0], cuts[ends][-1])
        places = np.sort(order[here])
        most = np.minimum(window.most[places], np.arange(len(places), 0, -1))
        part = OrderedWindow(window.work[places], most, window.allowed)
        runs = _evenest(part, 0, len(places), num_ranks, 0.0, dearest)
        offsets = split_dearest(part, np.asarray(runs, np.int64), num_ranks)
        found = part.total(offsets)
        if runs[-1] == len(places) and len(found) == num_ranks and found.max() < dearest:
            level = Batches(places, offsets).take(np.argsort(-found, kind="stable"))
            order[here], cuts[ends] = level.order, here.start + level.offsets
    return Batches(order, cuts)


def _even_rows(
    rows: Batches,
    num_ranks: int,
    several: NDArray,
    lengths: Streams,
    budget: Budget,
    work: Work,
    *,
    exchange: bool,
) -> Batches:
    """Makes steps even in several costs, with ``exchange`` by exchanging samples; sorts them, most expensive first."""
    full = np.arange(len(rows) - len(rows) % num_ranks)
    made = rows.take(full)
    if exchange and len(full) and budget.ladder is None:
        made = Exchanges(made, num_ranks, lengths, budget, work).made()
    by_work = np.argsort(
        -work.of_batches(made, lengths, budget).reshape(-1, num_ranks), axis=1, kind="stable"
    )
    dearest = np.maximum.reduceat(several.sum(axis=0)[made.order], made.offsets[:-1][::num_ranks])
    by_work = (by_work + full[::num_ranks, None])[np.argsort(-dearest, kind="stable")]
    return Batches.concatenate(
        [made.take(by_work.ravel()), rows.take(np.arange(len(full), len(rows)))]
    )


def prove(
    batches: Batches,
    num_samples: int,
    lengths: Streams,
    budget: Budget,
    oversize: NDArray[np.bool_],
) -> None:
    """Checks that every sample is in one batch, and that every batch fits or is one oversize sample."""
    seen = np.zeros(num_samples, np.bool_)
    seen[batches.order] = True
    assert len(batches.order) == num_samples == seen.sum(), "a plan lost or repeated a sample"
    if not num_samples:
        return
    fits = budget.fits(shapes_of(batches, lengths))
    bad = np.flatnonzero(
        ~fits & ~((batches.sizes == 1) & oversize[batches.order[batches.offsets[:-1]]])
    )
    if len(bad):
        batch = batches[int(bad[0])]
        longest = units_of(
            {name: values[batch].max(keepdims=True) for name, values in lengths.items()}, 0
        )
        refused = (
            f"a batch of {len(batch)} samples, longest {longest}, does not fit {budget.fingerprint}"
        )
        law = "correct the budget's `fits`, and check it with dynagroup.testing.assert_budget_law"
        raise BudgetError(f"{refused}, although a larger one does; {law}")
