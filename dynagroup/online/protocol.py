"""How ranks agree on their next steps: functions of integers that all ranks share, and exchanges of these integers.
``docs/alignment.md`` proves that an epoch ends; ``tests/online/test_protocol.py`` checks all small cases."""

import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dynagroup.distributed import SingleProcess, World, without_parts
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.fingerprint import hashed

T = TypeVar("T")
NOTHING = 1 << 40  # means "no such rank" in a minimum over ranks


class Agreement(NamedTuple):
    steps: list[int]  # steps of each kind that all ranks take before they agree again
    last: bool = False  # True: the epoch, or the update, ends after these steps
    further: int = 0  # of these steps, how many are needed only because a step must have one kind


def offer(queued: Sequence[int], receiving: bool) -> list[int]:
    """Returns a rank's numbers of batches by kind, and whether more may come; :func:`agree` takes the ranks' maxima."""
    counts = [sum(queued), *queued]
    return [*counts, *(-(count if receiving else NOTHING) for count in counts)]


def agree(highest: Sequence[int]) -> Agreement:
    """Returns the numbers of steps that all ranks take next, from the maximum over ranks of what they :func:`offer`.

    For each kind, this is the smallest number of batches on any rank that may still get more; ranks without so many
    split batches, or are idle. If it is 0 for every kind, all batches of the kind of which some rank has the most are
    run. When no rank can get more, it is the largest number of each kind: the fewest steps without moving samples.

    >>> agree([max(column) for column in zip(offer([5], True), offer([3], True))]).steps
    [3]
    >>> agree([max(column) for column in zip(offer([5, 0], False), offer([3, 1], False))])
    Agreement(steps=[5, 1], last=True, further=1)
    """
    half = len(highest) // 2
    (longest, *most), (shortest, *least) = highest[:half], [-low for low in highest[half:]]
    if shortest == NOTHING:
        return Agreement(most, last=True, further=sum(most) - longest)
    if any(least) or not shortest:
        return Agreement(least)
    return Agreement(
        [count if kind == most.index(max(most)) else 0 for kind, count in enumerate(most)],
        further=max(most),
    )


def spread(groups: Sequence[Sequence[T]]) -> list[T]:
    """Mixes the members of all groups in one order, so that the members of each group are evenly spread."""
    shares = (
        ((n + 0.5) / len(group), number, n)
        for number, group in enumerate(groups)
        for n in range(len(group))
    )
    return [groups[number][n] for _, number, n in sorted(shares)]


def even_parts(sizes: Sequence[int], steps: int) -> list[int]:
    """Returns into how many parts to split each batch of ``sizes`` samples (1: not at all) to get ``steps`` batches, or
    as many as there are samples. Greedy: the batch with the largest parts gets one more part, again and again."""
    parts = [1] * len(sizes)
    for _ in range(min(steps, sum(sizes)) - len(sizes)):
        parts[
            max(
                range(len(sizes)),
                key=lambda i: (sizes[i] / parts[i] if parts[i] < sizes[i] else 0, -i),
            )
        ] += 1
    return parts


def hand_out(
    loads: Sequence[int], start: int, stop: int, *, window: int, target: int
) -> tuple[list[list[tuple[int, int]]], int]:
    """Returns the windows of positions, from ``start`` to ``stop``, that each rank gets next; and where the rest
    starts. Greedy: the rank with the fewest samples left (``loads``) gets the next window, until each has ``target``
    samples. When only one window per rank is left, a rank gets an eighth of its part of that, so that all end together.

    >>> hand_out([0, 9], 0, 100, window=10, target=20)
    ([[(0, 10), (10, 20)], [(20, 30), (30, 40)]], 40)
    """
    loads, left, given = list(loads), stop - start, [0] * len(loads)
    while left and (min(loads) < target or left <= len(loads) * window):
        rank = loads.index(min(loads))
        amount = min(left, window if left > len(loads) * window else -(-left // len(loads) // 8))
        loads[rank] += amount
        given[rank] += amount
        left -= amount
    windows = []
    for amount in given:
        count = max(-(-amount // window), 1)
        windows.append(
            list(pairwise(start + amount * i // count for i in range(count + 1))) if amount else []
        )
        start += amount
    return windows, start


def quantiles(seed: int, epoch: int, steps: Iterable[int]) -> list[float]:
    """Returns places in the sorted queue, in [0, 1), for these steps, the same on every rank: a Kronecker sequence of
    the golden ratio. Consecutive steps are spread evenly, so small and large batches mix throughout the epoch."""
    first = float(np.random.default_rng((seed, epoch)).random())
    return [(first + step * (math.sqrt(5) - 1) / 2) % 1 for step in steps]


def placed(dearest_first: Sequence[T], at: Sequence[float]) -> list[T]:
    """Returns batches in the order of the numbers ``at``: the batch of most work at the smallest number. All ranks use
    the same numbers, so their largest batches are in one step. By the rearrangement inequality ranks then wait least."""
    found = list(dearest_first)
    for item, place in zip(dearest_first, np.argsort(at, kind="stable").tolist(), strict=True):
        found[place] = item
    return found


# Integers in a MAX: fixed, so that ranks at different points of a run can compare them. A second MAX has more kinds.
WIDTH = 48


def print_of(value: Any) -> int:
    return int(hashed(json.dumps(value, sort_keys=True, default=repr)), 16) >> 1


class Exchange:
    """Makes and counts the exchanges of an epoch: a MAX of a few integers, then a SUM of a few floats. Each MAX begins
    with the rank's point in the run and whether it failed, so that all ranks raise an error instead of waiting."""

    def __init__(self, world: World, epoch: int = 0) -> None:
        self.world, self.epoch = world if world.size > 1 else SingleProcess(), epoch
        self.count = 0

    def highest(self, values: Sequence[int], failure: BaseException | None = None) -> list[int]:
        """Returns the largest value over ranks of each integer. If ranks are at different exchanges, all raise
        AlignmentError; if a rank passes a ``failure``, it raises that, and all others AlignmentError."""
        self.count += 1
        rank, place = self.world.rank, (self.epoch << 32) + self.count
        vector = [place, -place, 0 if failure is None else rank + 1, *values]
        found = self.world.all_max(vector[:WIDTH] + [0] * (WIDTH - len(vector)))
        if found[2]:
            said = f"{type(failure).__name__}: {failure}".encode() if found[2] == rank + 1 else b""
            text = self._sent(said).decode(errors="replace")
            raise failure or AlignmentError(
                f"rank {found[2] - 1} failed while it loaded data: {text}"
            )
        if found[0] != -found[1]:
            behind, ahead = (
                f"{mark & 0xFFFFFFFF} of epoch {mark >> 32}" for mark in (-found[1], found[0])
            )
            here = f"this rank at exchange {self.count} of epoch {self.epoch}, the rank furthest behind at {behind}"
            alike = "iterate the loader equally often and far on every rank"
            raise AlignmentError(
                f"ranks are at different points: {here}, the rank furthest ahead at {ahead}; {alike}"
            )
        return [
            *found[3 : len(vector)],
            *(self.world.all_max(vector[WIDTH:]) if len(vector) > len(found) else []),
        ]

    def gathered(self, values: Sequence[int], most: int) -> list[int]:
        """Returns the integers of all ranks, sorted, each once (they are positive, up to ``most`` a rank); after a MAX."""
        start, slots = most * self.world.rank, [0] * (most * self.world.size)
        slots[start : start + len(values)] = values
        return sorted({*self.world.all_max(slots)} - {0})

    def lend(self, thing: Any) -> Any:
        """Sends a ``thing`` from the highest rank that has one to all ranks; returns it, or None if no rank has one."""
        data, failure = b"", None
        try:
            data = b"" if thing is None else pickle.dumps(thing)
        except Exception as error:
            failure = ConfigError(
                f"ranks without samples need a copy of a batch, so it must be picklable ({error})"
            )
        giver = self.highest([self.world.rank + 1 if data else 0], failure)[0] - 1
        return (
            None
            if giver < 0
            else pickle.loads(self._sent(data if giver == self.world.rank else b""))
        )

    def compare(self, identity: Mapping[str, Any], failure: BaseException | None = None) -> None:
        """Raises AlignmentError if a value is not the same on all ranks; the message shows this rank's value."""
        prints = [print_of(value) for value in identity.values()]
        found = self.highest([*prints, *(-p for p in prints)], failure)
        differing = [name for i, name in enumerate(identity) if found[i] != -found[len(prints) + i]]
        if without_parts(differing):
            shown = "; ".join(
                f"{name} (rank {self.world.rank} has {identity[name]!r})" for name in differing
            )
            raise AlignmentError(
                f"ranks have unequal {shown}; give every rank the same data, seed and settings"
            )

    def _sent(self, data: bytes) -> bytes:
        """Sends bytes from one rank to all, as a MAX over words to which the other ranks add zeros."""
        [size] = self.world.all_max([len(data)])
        words = self.world.all_max(
            np.frombuffer(data.ljust(-(-size // 4) * 4, b"\0"), "<u4").tolist()
        )
        return np.asarray(words, "<u4").tobytes()[:size]
