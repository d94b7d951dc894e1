"""Rows of padded batches made even: a row's samples are divided over its ranks again, so that its dearest batch is least work."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.batches import Batches, offsets_of
from dynagroup.plan.lowest import under_one_limit
from dynagroup.plan.runs import OrderedWindow, split_dearest
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
    sorted_again: Callable[[IntArray], tuple[IntArray, OrderedWindow]],
) -> Batches:
    """The rows, each with a dearest batch of about the least work that any division of its samples over the ranks has.

    Args:
        batches: row after row, ``num_ranks`` a row; what does not fill a row stays as it is. ``work``: of each of them.
        sorted_again: of some positions, the order that sorts them and what cutting needs to know of them.
    """
    by_row = work[: len(work) - len(work) % num_ranks].reshape(-1, num_ranks)
    dearest = by_row.max(axis=1)
    uneven = np.flatnonzero(dearest - by_row.min(axis=1) > EQUAL * by_row.mean(axis=1)).tolist()
    if not uneven or len(by_row) == 1:  # one row was cut under one limit
        return batches
    parts = list(batches)
    for row in uneven:
        places = slice(row * num_ranks, (row + 1) * num_ranks)
        parts[places] = _divided(parts[places], float(dearest[row]), sorted_again) or parts[places]
    return Batches(np.concatenate(parts), offsets_of(np.asarray([len(part) for part in parts])))


def _divided(
    row: list[IntArray], dearest: float, sorted_again: Callable[[IntArray], tuple[IntArray, OrderedWindow]]
) -> list[IntArray] | None:
    """A row divided again, dearest batch first; None if its dearest batch would be no less work."""
    members = np.concatenate(row)
    order, window = sorted_again(members)
    if window.work.max() >= dearest:
        return None
    runs = under_one_limit(window, len(row), dearest)
    if runs is None:
        return None
    runs = split_dearest(window, runs, len(row))
    work = window.total(runs)
    if len(work) != len(row) or work.max() >= dearest:
        return None
    return [members[order[runs[k] : runs[k + 1]]] for k in np.argsort(-work, kind="stable").tolist()]
