"""Rows of packed batches made level: samples change places between the dearest and the cheapest batch of a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.room import Bin, Room

__all__ = ["is_equal", "level"]

EQUAL = 0.05  # of a row's mean work: what the batches of a row may differ by
CLOSE = 0.005  # rows closer than that stay as they are
MOST_EXCHANGES = 4  # for each batch of a row
PARTNERS = 3
HOSTS, GUESTS = 32, (64, 512)  # batches of its own row, and of all other rows, that a stubborn row's may exchange with
MOST_STUBBORN = 8  # rows that could not be helped, after which the others are not tried
SINGLES, RUNS, PAIRED = 96, 32, 16  # of a batch: samples tried alone, numbers of its shortest, samples in pairs


def level(bins: Sequence[Bin], room: Room, costs: NDArray[np.float64], multiple: int) -> list[Bin]:
    """The bins in rows of ``multiple``, dearest first, with the work in each row evened out.

    Row after row, the dearest and the cheapest batch exchange samples with a few partners, which suffices for nearly all.
    A row that stays unequal (long samples of few sizes, batches filled to the last token) is taken up again: its farthest
    batches may exchange with any of its row and with batches of all other rows, which stay where they are to a fiftieth.
    """
    for bin in bins:
        room.fill(bin, bin.members, float(costs[bin.members].sum()))
    ordered = sorted(bins, key=lambda bin: -bin.load)
    if multiple == 1:
        return ordered
    exchanges = _Exchanges(room, costs)
    rows = [ordered[first : first + multiple] for first in range(0, len(ordered), multiple)]
    for row in rows:
        for _ in range(MOST_EXCHANGES * len(row)):
            row.sort(key=lambda bin: -bin.load)
            if row[0].load - row[-1].load <= CLOSE * mean_load(row) or not exchanges.bring_closer(row):
                break
    _mend(rows, exchanges, costs)
    return [bin for row in rows for bin in sorted(row, key=lambda bin: -bin.load)]


def is_equal(row: Sequence[Bin], costs: NDArray[np.float64]) -> bool:
    """Whether the batches of a row are equal work, or some single sample is more work than their mean."""
    loads, mean = [bin.load for bin in row], mean_load(row)
    return max(loads) - min(loads) <= EQUAL * mean or max(costs[bin.members].max() for bin in row) > mean


def mean_load(row: Sequence[Bin]) -> float:
    return sum(bin.load for bin in row) / len(row)


def _mend(rows: Sequence[list[Bin]], exchanges: _Exchanges, costs: NDArray[np.float64]) -> None:
    stubborn = 0
    everywhere = [(bin, row) for row in rows for bin in row]
    for row in rows:
        if stubborn < MOST_STUBBORN and not is_equal(row, costs):
            stubborn += not any(_mended(row, guests, exchanges, costs) for guests in _guests(row, everywhere))


def _guests(row: list[Bin], everywhere: Sequence[tuple[Bin, list[Bin]]]) -> Iterator[list[tuple[Bin, float]]]:
    """Batches of other rows, each with the mean of its row: first a few, then many."""
    for count in GUESTS:
        spread = [everywhere[place] for place in _spread(len(everywhere), count)]
        yield [(bin, mean_load(other)) for bin, other in spread if other is not row]


def _mended(
    row: Sequence[Bin], guests: Sequence[tuple[Bin, float]], exchanges: _Exchanges, costs: NDArray[np.float64]
) -> bool:
    for _ in range(MOST_EXCHANGES * len(row)):
        mean = mean_load(row)
        far = sorted(row, key=lambda bin: -abs(bin.load - mean))
        other = next((bin for bin in far if (bin.load > mean) != (far[0].load > mean)), far[-1])
        if is_equal(row, costs) or not any(exchanges.bring_home(bin, row, guests) for bin in (far[0], other)):
            break
    return is_equal(row, costs)


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
        self._known: dict[tuple[int, bool], tuple[list[int], _Sets]] = {}

    def bring_closer(self, row: Sequence[Bin]) -> bool:
        """One exchange of the dearest batch with a cheap one, or of the cheapest with a dear one; whether there was one."""
        pairs = [(row[0], low) for low in row[: -PARTNERS - 1 : -1]] + [(high, row[-1]) for high in row[1:PARTNERS]]
        distinct = [(high, low) for high, low in pairs if high.load > low.load]
        return any(self._between(high, low, pairs=deep) for deep in (False, True) for high, low in distinct)

    def bring_home(self, far: Bin, row: Sequence[Bin], guests: Sequence[tuple[Bin, float]]) -> bool:
        """The exchange that brings a batch closest to its row's mean, if one does; guests come with the mean of theirs."""
        aim = mean_load(row)
        mates = sorted((bin for bin in row if bin is not far), key=lambda bin: bin.load, reverse=far.load < aim)
        hosts = [(mates[place], aim) for place in _spread(len(mates), HOSTS)]
        return any(self._towards(far, aim, [*hosts, *guests], pairs=deep) for deep in (False, True))

    def _towards(self, far: Bin, aim: float, hosts: Sequence[tuple[Bin, float]], *, pairs: bool) -> bool:
        ours, theirs = self._sets(far, pairs), [self._sets(host, pairs) for host, _ in hosts]
        counts = [len(sets.work) for sets in theirs]
        spare = np.repeat([self._room.spare_tokens(host) for host, _ in hosts], counts)
        grown = ours.tokens[:, None] - np.concatenate([sets.tokens for sets in theirs])
        given, taken = np.nonzero((grown <= spare) & (grown >= -self._room.spare_tokens(far)))
        beyond = np.repeat([host.load - goal for host, goal in hosts], counts)[taken]
        goal = np.repeat([goal for _, goal in hosts], counts)[taken]
        moved = ours.work[given] - np.concatenate([sets.work for sets in theirs])[taken]
        apart, theirs_apart = np.abs(far.load - aim - moved) / aim, np.abs(beyond + moved) / goal
        good = apart < 0.9 * abs(far.load - aim) / aim
        good &= theirs_apart <= np.maximum(0.4 * EQUAL, np.abs(beyond) / goal)
        if not good.any():
            return False
        best = int(np.where(good, np.maximum(apart, theirs_apart), np.inf).argmin())
        number = int(np.searchsorted(np.cumsum(counts), taken[best], side="right"))
        samples = theirs[number].samples(int(taken[best]) - sum(counts[:number]))
        return self._carry_out(far, hosts[number][0], ours.samples(int(given[best])), samples)

    def _sets(self, bin: Bin, pairs: bool) -> _Sets:
        members, sets = self._known.get((id(bin), pairs), (None, None))
        if sets is None or members is not bin.members:
            sets = _Sets(bin, self._room, self._costs, pairs=pairs)
            self._known[id(bin), pairs] = bin.members, sets
        return sets

    def _between(self, high: Bin, low: Bin, *, pairs: bool) -> bool:
        ours, theirs = self._sets(high, pairs), self._sets(low, pairs)
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
