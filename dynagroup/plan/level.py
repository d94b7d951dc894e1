"""Rows of packed batches made level: samples change places between the dearest and the cheapest batch of a row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.room import Bin, Room

__all__ = ["level"]

CLOSE = 0.005  # of a row's mean work; rows closer than that stay as they are
MOST_EXCHANGES = 4  # for each batch of a row
PARTNERS = 3
SINGLES, RUNS, PAIRED = (
    96,
    32,
    16,
)  # of a batch: samples tried alone, numbers of its shortest tried together, samples tried in pairs


def level(bins: Sequence[Bin], room: Room, costs: NDArray[np.float64], multiple: int) -> list[Bin]:
    """The bins in rows of ``multiple``, dearest first, with the work in each row evened out."""
    for bin in bins:
        room.fill(bin, bin.members, float(costs[bin.members].sum()))
    ordered = sorted(bins, key=lambda bin: -bin.load)
    if multiple == 1:
        return ordered
    exchanges = _Exchanges(room, costs)
    for first in range(0, len(ordered), multiple):
        row = ordered[first : first + multiple]
        mean = sum(bin.load for bin in row) / len(row)
        for _ in range(MOST_EXCHANGES * len(row)):
            row.sort(key=lambda bin: -bin.load)
            if row[0].load - row[-1].load <= CLOSE * mean or not exchanges.bring_closer(row):
                break
        ordered[first : first + multiple] = sorted(row, key=lambda bin: -bin.load)
    return ordered


class _Sets:
    """Candidate sets of a batch's samples, with what each comes to: none, one, the shortest few, or any two."""

    def __init__(self, bin: Bin, room: Room, costs: NDArray[np.float64], *, pairs: bool) -> None:
        tokens = np.asarray([room.tokens[s] for s in bin.members])
        order = np.argsort(tokens, kind="stable")
        self._members = np.asarray(bin.members)[order]
        count = len(order)
        self._singles = _spread(count, SINGLES)
        self._runs = _spread(count - 1, RUNS) + 1
        self._pairs = np.asarray(list(combinations(_spread(count, PAIRED), 2)) if pairs else [], np.int64).reshape(
            -1, 2
        )
        self.tokens, self.work = self._sums(tokens[order]), self._sums(costs[self._members])

    def _sums(self, values: NDArray) -> NDArray:
        runs = np.cumsum(values)[self._runs - 1]
        return np.concatenate([[0], values[self._singles], runs, values[self._pairs].sum(axis=1)])

    def samples(self, number: int) -> list[int]:
        """The samples of a set."""
        parts = [[], *self._singles[:, None], *(np.arange(run) for run in self._runs), *self._pairs]
        return self._members[np.asarray(parts[number], np.int64)].tolist()


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """Up to ``most`` of ``count`` places, evenly spread."""
    if count <= most:
        return np.arange(max(count, 0))
    return np.linspace(0, count - 1, most).astype(np.int64)


class _Exchanges:
    """Exchanges of samples between two batches that bring their work closer and leave both within the budget.

    Half the difference is best moved. A batch that is full takes a long sample against several short ones, which are less
    work for as many tokens. Sets of samples are compared all with all, pairs only where nothing simpler does.
    """

    def __init__(self, room: Room, costs: NDArray[np.float64]) -> None:
        self._room, self._costs = room, costs

    def bring_closer(self, row: Sequence[Bin]) -> bool:
        """One exchange of the dearest batch with a cheap one, or of the cheapest with a dear one; whether there was one."""
        pairs = [(row[0], low) for low in row[: -PARTNERS - 1 : -1]] + [(high, row[-1]) for high in row[1:PARTNERS]]
        distinct = [(high, low) for high, low in pairs if high.load > low.load]
        return any(self._between(high, low, pairs=deep) for deep in (False, True) for high, low in distinct)

    def _between(self, high: Bin, low: Bin, *, pairs: bool) -> bool:
        ours = _Sets(high, self._room, self._costs, pairs=pairs)
        theirs = _Sets(low, self._room, self._costs, pairs=pairs)
        gap = high.load - low.load
        moved = ours.work[:, None] - theirs.work[None, :]
        grown = ours.tokens[:, None] - theirs.tokens[None, :]
        fits = (grown <= self._room.spare_tokens(low)) & (-grown <= self._room.spare_tokens(high))
        rest = np.where(fits, np.abs(2 * moved - gap), np.inf)
        given, taken = np.unravel_index(int(rest.argmin()), rest.shape)
        if not rest[given, taken] < gap * 0.9:
            return False
        return self._carry_out(high, low, ours.samples(int(given)), theirs.samples(int(taken)))

    def _carry_out(self, high: Bin, low: Bin, given: Sequence[int], taken: Sequence[int]) -> bool:
        """If both batches still fit and keep a sample."""
        ours = [*(s for s in high.members if s not in given), *taken]
        theirs = [*(s for s in low.members if s not in taken), *given]
        if not ours or not theirs or not (self._room.together(ours) and self._room.together(theirs)):
            return False
        for bin, members in ((high, ours), (low, theirs)):
            self._room.fill(bin, members, float(self._costs[members].sum()))
        return True
