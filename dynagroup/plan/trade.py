"""Rows of several padded streams made even: samples change places between the dearest batch and others of its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.alike import AlikeWindow
from dynagroup.plan.batches import Batches, offsets_of
from dynagroup.plan.even import EQUAL
from dynagroup.shapes import IntArray

__all__ = ["traded"]

ENOUGH = 1.02
"""Times a row's mean work: rows whose dearest batch is no more than that stay as they are."""
EACH = 3
"""Trades for each batch of a row, at most."""
WORTH = 0.998
"""Of the dearest batch's work: what it must come to after a trade."""
TRIED = 4
"""Trades that are asked of the budget, the best first, before a row stays as it is."""


# A padded batch costs its samples times the sum of its maxima over the streams. A sample that alone sets a maximum is dear to
# its batch and may be cheap to another, which no cut of one order finds where streams go apart. So the dearest batch gives a
# sample away, or takes one for it, such that the dearer of the two becomes least; as often as the row's dearest falls. Only
# ever less work: the dearest batch of a row falls with each trade. O(samples of the batch * samples of the row) each.
def traded(
    batches: Batches, order: IntArray, window: AlikeWindow, num_ranks: int, fits: Callable[[IntArray], bool]
) -> Batches:
    """The rows, of those that are uneven each with a dearest batch of less work, where that is found.

    Args:
        batches: row after row, ``num_ranks`` a row, of positions; what does not fill a row stays as it is.
        order: the positions that stand in ``window``.
        fits: whether a batch fits.
    """
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    work = np.stack(window.streams)[:, place]
    parts = list(batches)
    for first in range(0, len(parts) - num_ranks + 1, num_ranks):
        row = [_Batch(members, work) for members in parts[first : first + num_ranks]]
        costs = [batch.cost for batch in row]
        if max(costs) - min(costs) > EQUAL * sum(costs) / num_ranks:
            found = sorted(_evened(row, work, fits), key=lambda batch: -batch.cost)
            parts[first : first + num_ranks] = [batch.members[np.argsort(place[batch.members])] for batch in found]
    return Batches(np.concatenate(parts), offsets_of(np.asarray([len(part) for part in parts])))


def _evened(row: list[_Batch], work: NDArray[np.float64], fits: Callable[[IntArray], bool]) -> list[_Batch]:
    for _ in range(EACH * len(row)):
        dearest = max(row, key=lambda batch: batch.cost)
        others = [batch for batch in row if batch is not dearest]
        if len(dearest.members) == 1 or dearest.cost * len(row) <= ENOUGH * sum(batch.cost for batch in row):
            break
        found = _trade(dearest, others, fits)
        if found is None:
            break
        other, ours, theirs = found
        row = [*(batch for batch in others if batch is not other), _Batch(ours, work), _Batch(theirs, work)]
    return row


class _Batch:
    def __init__(self, members: IntArray, work: NDArray[np.float64]) -> None:
        self.members = members
        self.each = work[:, members]
        """Work of its samples: (streams, samples)."""
        self.most = self.each.max(axis=1, keepdims=True)
        self.cost = len(members) * float(self.most.sum())
        first = self.each.argmax(axis=1)[:, None]
        rest = self.each.copy()
        np.put_along_axis(rest, first, 0.0, axis=1)
        self.without = np.repeat(self.most, len(members), axis=1)
        """The maxima that are left without each sample."""
        np.put_along_axis(self.without, first, rest.max(axis=1, keepdims=True), axis=1)


def _trade(
    dearest: _Batch, others: Sequence[_Batch], fits: Callable[[IntArray], bool]
) -> tuple[_Batch, IntArray, IntArray] | None:
    """The trade that leaves the dearer of two batches with least work: who takes part, and what both hold then."""
    count, bound = len(dearest.members), WORTH * dearest.cost
    numbers = np.repeat(np.arange(len(others)), [len(batch.members) for batch in others])
    sizes = np.asarray([len(batch.members) for batch in others])
    each, without = (np.concatenate([getattr(b, name) for b in others], axis=1) for name in ("each", "without"))
    ours = count * np.maximum(dearest.without[:, :, None], each[:, None, :]).sum(axis=0)
    theirs = sizes[numbers] * np.maximum(without[:, None, :], dearest.each[:, :, None]).sum(axis=0)
    swapped = np.maximum(ours, theirs)
    most = np.concatenate([batch.most for batch in others], axis=1)
    given = (sizes + 1) * np.maximum(most[:, None, :], dearest.each[:, :, None]).sum(axis=0)
    given = np.maximum(given, (count - 1) * dearest.without.sum(axis=0)[:, None])
    time = np.concatenate([given, swapped], axis=1).ravel()
    good = np.flatnonzero(time < bound)
    for place in good[np.argsort(time[good], kind="stable")[:TRIED]].tolist():
        sample, partner = divmod(place, given.shape[1] + swapped.shape[1])
        taken = partner - given.shape[1]
        other = others[partner if taken < 0 else int(numbers[taken])]
        mine, yours = np.delete(dearest.members, sample), other.members
        if taken >= 0:
            index = taken - int(np.flatnonzero(numbers == numbers[taken])[0])
            mine, yours = np.append(mine, yours[index]), np.delete(yours, index)
        yours = np.append(yours, dearest.members[sample])
        if fits(mine) and fits(yours):
            return other, mine, yours
    return None
