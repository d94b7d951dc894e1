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
    longest, *most = highest[:half]
    shortest, *least = [-low for low in highest[half:]]
    if shortest == NOTHING:
        return Agreement(most, last=True, further=sum(most) - longest)
    if any(least) or not shortest:
        return Agreement(least)
    steps = [0] * len(most)
    kind = most.index(max(most))
    steps[kind] = most[kind]
    return Agreement(steps, further=most[kind])


def spread(groups: Sequence[Sequence[T]]) -> list[T]:
    """Mixes the members of all groups in one order, so that the members of each group are evenly spread."""
    shares: list[tuple[float, int, int]] = []
    for number, group in enumerate(groups):
        shares += [((place + 0.5) / len(group), number, place) for place in range(len(group))]
    return [groups[number][place] for _, number, place in sorted(shares)]


def even_parts(sizes: Sequence[int], steps: int) -> list[int]:
    """Returns into how many parts to split each batch of ``sizes`` samples (1: not at all) to get ``steps`` batches, or
    as many as there are samples. Greedy: the batch with the largest parts gets one more part, again and again."""
    parts = [1] * len(sizes)
    for _ in range(min(steps, sum(sizes)) - len(sizes)):
        part_sizes = [
            size / count if count < size else 0 for size, count in zip(sizes, parts, strict=True)
        ]
        parts[part_sizes.index(max(part_sizes))] += 1
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
    loads = list(loads)
    num_ranks = len(loads)
    left = stop - start
    amounts = [0] * num_ranks
    while left and (min(loads) < target or left <= num_ranks * window):
        rank = loads.index(min(loads))
        amount = min(left, window)
        if left <= num_ranks * window:
            amount = -(-left // num_ranks // 8)
        loads[rank] += amount
        amounts[rank] += amount
        left -= amount
    windows: list[list[tuple[int, int]]] = []
    for amount in amounts:
        count = -(-amount // window)
        bounds = [start + amount * number // count for number in range(count + 1) if count]
        windows.append(list(pairwise(bounds)))
        start += amount
    return windows, start


def quantiles(seed: int, epoch: int, steps: Iterable[int]) -> list[float]:
    """Returns places in the sorted queue, in [0, 1), for these steps, the same on every rank: a Kronecker sequence of
    the golden ratio. Consecutive steps are spread evenly, so small and large batches mix throughout the epoch."""
    first = float(np.random.default_rng((seed, epoch)).random())
    golden_ratio = (math.sqrt(5) - 1) / 2
    return [(first + step * golden_ratio) % 1 for step in steps]


def placed(dearest_first: Sequence[T], at: Sequence[float]) -> list[T]:
    """Returns batches in the order of the numbers ``at``: the batch of most work at the smallest number. All ranks use
    the same numbers, so their largest batches are in one step. By the rearrangement inequality ranks then wait least."""
    ordered = list(dearest_first)
    for item, place in zip(dearest_first, np.argsort(at, kind="stable").tolist(), strict=True):
        ordered[place] = item
    return ordered


# Integers in a MAX: fixed, so that ranks at different points of a run can compare them. A second MAX has more kinds.
WIDTH = 48


def print_of(value: Any) -> int:
    return int(hashed(json.dumps(value, sort_keys=True, default=repr)), 16) >> 1


class Exchange:
    """Makes and counts the exchanges of an epoch: a MAX of a few integers, then a SUM of a few floats. Each MAX begins
    with the rank's point in the run and whether it failed, so that all ranks raise an error instead of waiting."""

    def __init__(self, world: World, epoch: int = 0) -> None:
        self.world = world if world.size > 1 else SingleProcess()
        self.epoch = epoch
        self.count = 0

    def highest(self, values: Sequence[int], failure: BaseException | None = None) -> list[int]:
        """Returns the largest value over ranks of each integer. If ranks are at different exchanges, all raise
        AlignmentError; if a rank passes a ``failure``, it raises that, and all others AlignmentError."""
        self.count += 1
        place = (self.epoch << 32) + self.count
        own_failure = 0 if failure is None else self.world.rank + 1
        vector = [place, -place, own_failure, *values]
        filling = [0] * (WIDTH - len(vector))
        highest = self.world.all_max(vector[:WIDTH] + filling)
        ahead, behind, failed, *largest = highest
        if failed:
            self._raise(failed, failure)
        if ahead != -behind:
            raise AlignmentError(
                f"ranks are at different points: this rank at exchange {self.count} of epoch {self.epoch}, "
                f"the rank furthest behind at {_shown(-behind)}, the rank furthest ahead at "
                f"{_shown(ahead)}; iterate the loader equally often and far on every rank"
            )
        if len(vector) > WIDTH:
            return largest + self.world.all_max(vector[WIDTH:])
        return largest[: len(values)]

    def _raise(self, failed: int, failure: BaseException | None) -> None:
        """Raises this rank's failure if the highest rank that failed (from 1) is this one; else says which it was."""
        said = b""
        if failed == self.world.rank + 1:
            said = f"{type(failure).__name__}: {failure}".encode()
        text = self._sent(said).decode(errors="replace")
        raise failure or AlignmentError(f"rank {failed - 1} failed while it loaded data: {text}")

    def gathered(self, values: Sequence[int], most: int) -> list[int]:
        """Returns the integers of all ranks, sorted, each once (they are positive, up to ``most`` a rank); after a MAX."""
        slots = [0] * (most * self.world.size)
        start = most * self.world.rank
        slots[start : start + len(values)] = values
        return sorted(set(self.world.all_max(slots)) - {0})

    def lend(self, thing: Any) -> Any:
        """Sends a ``thing`` from the highest rank that has one to all ranks; returns it, or None if no rank has one."""
        data = b""
        failure = None
        try:
            if thing is not None:
                data = pickle.dumps(thing)
        except Exception as error:
            failure = ConfigError(
                f"ranks without samples need a copy of a batch, so it must be picklable ({error})"
            )
        [giver] = self.highest([self.world.rank + 1 if data else 0], failure)
        if not giver:
            return None
        return pickle.loads(self._sent(data if giver == self.world.rank + 1 else b""))

    def compare(self, identity: Mapping[str, Any], failure: BaseException | None = None) -> None:
        """Raises AlignmentError if a value is not the same on all ranks; the message shows this rank's value."""
        prints = [print_of(value) for value in identity.values()]
        negative = [-value for value in prints]
        highest = self.highest([*prints, *negative], failure)
        pairs = zip(identity, highest[: len(prints)], highest[len(prints) :], strict=True)
        differing = [name for name, largest, lowest in pairs if largest != -lowest]
        if without_parts(differing):
            shown = [f"{n} (rank {self.world.rank} has {identity[n]!r})" for n in differing]
            raise AlignmentError(
                f"ranks have unequal {'; '.join(shown)}; give every rank the same data, seed and settings"
            )

    def _sent(self, data: bytes) -> bytes:
        """Sends bytes from one rank to all, as a MAX over words to which the other ranks add zeros."""
        [size] = self.world.all_max([len(data)])
        padded = data.ljust(-(-size // 4) * 4, b"\0")
        words = self.world.all_max(np.frombuffer(padded, "<u4").tolist())
        return np.asarray(words, "<u4").tobytes()[:size]


def _shown(place: int) -> str:
    return f"{place & 0xFFFFFFFF} of epoch {place >> 32}"
