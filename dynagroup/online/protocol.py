"""The alignment protocol: its decisions, as pure functions of integers that all ranks see alike, and what carries the integers.

The loader, the simulation of many ranks and the exhaustive model in ``tests/online/test_protocol.py`` run these same functions.
The protocol and why it ends are described in ``docs/alignment.md``.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from dynagroup.distributed import World
from dynagroup.errors import AlignmentError
from dynagroup.fingerprint import hashed

__all__ = ["Exchange", "Offer", "agree", "even_parts", "hand_out", "in_rows", "level", "placed", "print_of", "quantile"]

T = TypeVar("T")
Uneven: TypeAlias = Literal["idle", "stop"]
NOTHING = 1 << 40
"""Stands for "no such rank" in a minimum over ranks."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank says before steps are agreed: batches ready to run; whether more may arrive; and whether all that may arrive
    was handed out already, so that loading it all at once ends."""

    queued: int
    receiving: bool
    bounded: bool = True

    def to_max(self) -> list[int]:
        """Integers whose maximum over ranks is all that :func:`agree` needs."""
        open_queue = self.queued if self.receiving else NOTHING
        unbounded = self.receiving and not self.bounded
        return [self.queued, -self.queued, -open_queue, int(self.receiving), int(not self.receiving), int(unbounded)]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks do until the next exchange: so many steps; whether the epoch ends with them, so that every rank evens out
    its queue to them by splitting, then by idling; and whether to load all that was handed out before the next exchange."""

    steps: int
    last: bool = False
    load_all: bool = False


def agree(highest: Sequence[int], uneven: Uneven = "idle") -> Agreement:
    """Steps that every rank takes next, from the maximum over ranks of :meth:`Offer.to_max`.

    While every rank receives windows they take the smallest queue's length. Once a rank receives no more, all that was
    handed out is loaded everywhere, and they take the longest queue's length: the least possible without moving samples.
    Streams, whose rest is unknown, take the smallest queue's length among the ranks that still receive.

    >>> agree([max(column) for column in zip(Offer(5, True).to_max(), Offer(3, True).to_max())])
    Agreement(steps=3, last=False, load_all=False)
    >>> agree([max(column) for column in zip(Offer(5, False).to_max(), Offer(3, False).to_max())])
    Agreement(steps=5, last=True, load_all=False)
    """
    most, least, least_open, any_receives, any_done, any_unbounded = highest[0], -highest[1], -highest[2], *highest[3:6]
    if not any_receives:
        return Agreement(least if uneven == "stop" else most, last=True)
    if not any_done:
        return Agreement(least)
    if uneven == "stop":
        return Agreement(least, last=least == 0)
    if any_unbounded:
        return Agreement(least_open)
    return Agreement(least // 2, load_all=True)


def even_parts(sizes: Sequence[int], steps: int) -> list[int]:
    """Into how many parts each batch of ``sizes`` samples is split (1: it may not be) so that ``steps`` batches result, or as
    many as there are samples. Greedy: the batch whose parts are largest is split further, one part at a time.

    >>> even_parts([4, 1], 4)
    [3, 1]
    """
    parts = [1] * len(sizes)
    for _ in range(min(steps, sum(sizes)) - len(sizes)):
        largest = max(range(len(sizes)), key=lambda i: (sizes[i] / parts[i] if parts[i] < sizes[i] else 0, -i))
        parts[largest] += 1
    return parts


def level(loads: Sequence[int], amount: int) -> list[int]:
    """Water filling: divide ``amount`` so that the smallest loads are raised to one level; exact, ties to lower ranks.

    >>> level([5, 0, 3], 10)
    [1, 6, 3]
    """
    values = np.asarray(loads, np.int64)
    order = np.argsort(values, kind="stable")
    rising = values[order]
    below = np.arange(1, len(loads) + 1) * rising - np.cumsum(rising)  # what brings the ranks below up to each load
    used = int(np.searchsorted(below, amount, side="right"))
    height, extra = divmod(int(rising[:used].sum()) + amount, used)
    shares = np.zeros(len(loads), np.int64)
    shares[order[:used]] = height + (np.arange(used) < extra) - rising[:used]
    return shares.tolist()


def hand_out(
    loads: Sequence[int], start: int, stop: int, *, window: int, target: int
) -> tuple[list[list[tuple[int, int]]], int]:
    """Which windows each rank opens next, by a prefix sum over what the ranks need.

    A rank whose windows made fewer batches has a smaller load and opens more of them. When less than a window a rank
    would remain, everything is given out, so that all ranks end at one level.

    Args:
        loads: what each rank still has to emit, in samples.
        start, stop: positions of the epoch's order that are not given out yet.
        window: samples a window, at most. target: load, in samples, up to which a rank is supplied.

    Returns:
        For each rank its windows, ranges of positions; and the new ``start``.

    >>> hand_out([0, 9], 0, 100, window=10, target=20)
    ([[(0, 10), (10, 20)], [(20, 30), (30, 40)]], 40)
    """
    wanted = [max(0, -(-(target - load) // window)) for load in loads]
    closing = (sum(wanted) + len(loads)) * window >= stop - start
    shares = level(loads, stop - start) if closing else [count * window for count in wanted]
    windows = []
    for share in shares:
        count = -(-share // window)
        bounds = [start + (share * i // count if closing else i * window) for i in range(count + 1)] if count else []
        windows.append(list(zip(bounds[:-1], bounds[1:], strict=True)))
        start += share
    return windows, start


STRATA = 16
DRAWN = 1024  # steps drawn at once


def quantile(seed: int, epoch: int, step: int) -> float:
    """Where in its sorted queue a rank takes its batch of this step: the same on all ranks, evenly spread over [0, 1).

    Stratified sampling: every 16 steps visit each sixteenth of the queue once, in a shuffled order. So rows carry similar
    lengths on all ranks, and an epoch has no curriculum.

    >>> sorted(int(16 * quantile(0, 0, step)) for step in range(16)) == list(range(16))
    True
    """
    return _strata(seed, epoch, step // DRAWN)[step % DRAWN]


@lru_cache(maxsize=64)
def _strata(seed: int, epoch: int, number: int) -> list[float]:
    rng = np.random.default_rng((seed, epoch, number))
    blocks = rng.permuted(np.tile(np.arange(STRATA), (DRAWN // STRATA, 1)), axis=1)
    return ((blocks + rng.random(blocks.shape)) / STRATA).ravel().tolist()


def placed(dearest_first: Sequence[T], at: Sequence[float]) -> list[T]:
    """Batches where numbers of the same rank stand: the dearest in the place of the smallest. Ranks that place theirs by the
    same numbers have their dearest in one row, their second dearest in another: by the rearrangement inequality no other
    order of them waits less.

    >>> placed(["dear", "fair", "cheap"], [0.5, 0.1, 0.9])
    ['fair', 'dear', 'cheap']
    """
    found = list(dearest_first)
    for item, place in zip(dearest_first, np.argsort(at, kind="stable").tolist(), strict=True):
        found[place] = item
    return found


def in_rows(batches: Sequence[Any]) -> list[Any]:
    """Planned batches in the order of their rows, which are of equal work, and behind them what was split off; batches of
    one group, or none planned, dearest first. Ranks that follow the same plan take the same row at the same step."""
    seen: Counter[int] = Counter()
    found = []
    for batch in sorted(batches, key=lambda batch: batch.rank_key):
        found.append((seen[batch.group], batch.group, batch))
        seen[batch.group] += 1
    return [batch for *_, batch in sorted(found, key=lambda item: item[:2])]


TEXT_WORDS = 64
WIDTH = 48
"""Integers of a MAX; always the same number, so that ranks at different places still understand each other."""
COMPARED = (WIDTH - 3) // 2
"""Values that one MAX compares."""


def print_of(value: Any) -> int:
    """63 bits of a JSON-able value.

    >>> print_of({"seed": 0}) == print_of({"seed": 1})
    False
    """
    return int(hashed(json.dumps(value, sort_keys=True, default=repr)), 16) >> 1


class Exchange:
    """Counts and carries the exchanges of one epoch: a MAX of a few integers, then a SUM of a few floats.

    Every MAX begins with where this rank stands, so that ranks at different places end in AlignmentError, and with a
    flag for a rank that failed, so that the others raise what happened there instead of waiting for it.
    """

    def __init__(self, world: World, epoch: int = 0) -> None:
        self.world, self.epoch = world, epoch
        self.count = 0

    def highest(self, values: Sequence[int], failure: BaseException | None = None) -> list[int]:
        """Element-wise maximum over ranks. Where one tells a failure instead, it raises that itself, and all others an
        AlignmentError; so they do where one stands at another exchange."""
        self.count += 1
        if self.world.size == 1:
            if failure is not None:
                raise failure
            return list(values)
        place = (self.epoch << 32) + self.count
        vector = [place, -place, 0 if failure is None else self.world.rank + 1, *values]
        found = self.world.all_max(vector + [0] * (WIDTH - len(vector)))
        if found[2]:
            self._spread(failure, found[2] - 1)
        if found[0] != -found[1]:
            raise AlignmentError(
                f"ranks stand at different places: this one at exchange {self.count} of epoch {self.epoch}, the last at "
                f"{found[0] & 0xFFFFFFFF} of epoch {found[0] >> 32}, the first at {-found[1] & 0xFFFFFFFF} of epoch "
                f"{-found[1] >> 32}; every rank must iterate as often and as far as the others"
            )
        return found[3 : len(vector)]

    def total(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64: exact for integers up to 2**53. May follow a MAX only."""
        if self.world.size == 1:
            return [float(value) for value in values]
        return self.world.all_sum(values)

    def lend(self, thing: Any) -> Any:
        """What the highest rank that has something gives to all: pickled, as a MAX of its bytes. None stands for nothing."""
        giver, text, failure = self.highest([0 if thing is None else self.world.rank + 1])[0] - 1, b"", None
        if giver < 0:
            return None
        if giver == self.world.rank:
            try:
                text = pickle.dumps(thing)
            except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
                failure = error
        size = self.highest([len(text)], failure)[0]
        words = self.world.all_max(np.frombuffer(text.ljust(-(-size // 4) * 4, b"\0"), "<u4").tolist())
        return pickle.loads(np.asarray(words, "<u4").tobytes()[:size])

    def compare(self, identity: Mapping[str, Any], failure: BaseException | None = None) -> None:
        """Refuse ranks that differ in any of these values: an AlignmentError names it, and this rank's value."""
        differing: list[str] = []
        for start in range(0, len(identity), COMPARED):
            names = list(identity)[start : start + COMPARED]
            prints = [print_of(identity[name]) for name in names]
            found = self.highest([*prints, *(-p for p in prints)], failure)
            differing += [name for i, name in enumerate(names) if found[i] != -found[len(names) + i]]
        if differing:
            shown = "; ".join(f"{name} (rank {self.world.rank} has {identity[name]!r})" for name in differing)
            raise AlignmentError(f"ranks differ in {shown}; give every rank the same data, seed and settings")

    def _spread(self, failure: BaseException | None, rank: int) -> None:
        """All ranks learn what the failing rank says; with several, the highest is heard."""
        words = [0] * TEXT_WORDS
        if failure is not None and rank == self.world.rank:
            text = f"{type(failure).__name__}: {failure}".encode()[: TEXT_WORDS * 7]
            words = [int.from_bytes(text[7 * i : 7 * i + 7].ljust(7), "big") for i in range(TEXT_WORDS)]
        words = self.world.all_max(words)
        if failure is not None:
            raise failure
        text = b"".join(word.to_bytes(7, "big") for word in words).decode(errors="replace").strip()
        raise AlignmentError(f"rank {rank} failed while it loaded data: {text}")
