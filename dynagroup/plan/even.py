"""Rows of padded batches made even: a row's samples are divided over its ranks again, so that its dearest batch is least work."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.batches import Batches, offsets_of
from dynagroup.plan.runs import OrderedWindow, split_dearest, under_one_limit
from dynagroup.shapes import IntArray

__all__ = ["evened"]

EQUAL = 0.05
"""Of a row's mean work: what its batches may differ by."""


# Neighbours in work can differ where batches are few or each is unlike the next. A row's samples, sorted and cut into one run a
# rank with no run above a limit, are the division of least limit: whoever holds the longest sample pays its length for every
# sample beside it, so there the next longest lose least, and so on with the rest. Rows within 5 %, and rows that a single
# sample sets the pace of, stay as they are. O(n log n) for each other row, of n samples.
def evened(
    batches: Batches,
    work: NDArray[np.float64],
    num_ranks: int,
    orders_of: Callable[[IntArray], list[tuple[IntArray, OrderedWindow]]],
) -> Batches:
    """The rows, each with a dearest batch of about the least work that any division of its samples over the ranks has.

    Args:
        batches: row after row, ``num_ranks`` a row; what does not fill a row stays as it is. ``work``: of each of them.
        orders_of: of some positions, the orders worth cutting and what cutting needs to know of each.
    """
    by_row = work[: len(work) - len(work) % num_ranks].reshape(-1, num_ranks)
    dearest = by_row.max(axis=1)
    uneven = np.flatnonzero(dearest - by_row.min(axis=1) > EQUAL * by_row.mean(axis=1)).tolist()
    if not uneven or len(by_row) == 1:  # one row was cut under one limit
        return batches
    parts = list(batches)
    for row in uneven:
        places = slice(row * num_ranks, (row + 1) * num_ranks)
        parts[places] = _divided(parts[places], float(dearest[row]), orders_of)
    return Batches(np.concatenate(parts), offsets_of(np.asarray([len(part) for part in parts])))


def _divided(
    row: list[IntArray], dearest: float, orders_of: Callable[[IntArray], list[tuple[IntArray, OrderedWindow]]]
) -> list[IntArray]:
    """A row divided again, dearest batch first; as it was if its dearest batch would be no less work."""
    members = np.concatenate(row)
    for order, window in orders_of(members):
        if window.work.max() >= dearest:
            break
        runs = under_one_limit(window, len(row), dearest)
        if runs is None:
            continue
        runs = split_dearest(window, runs, len(row))
        work = window.total(runs)
        if len(work) == len(row) and work.max() < dearest:
            dearest = float(work.max())
            row = [members[order[runs[k] : runs[k + 1]]] for k in np.argsort(-work, kind="stable").tolist()]
    return row
