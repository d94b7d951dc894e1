"""Every decision of the alignment protocol, as pure functions of integers that all ranks see alike.

The loader, the simulation of many ranks and the exhaustive model in ``tests/model`` run these same functions.
The protocol and why it ends are described in ``docs/alignment.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError

__all__ = ["Agreement", "Grant", "Offer", "Uneven", "agree", "even_parts", "hand_out", "level", "quantile"]

Uneven: TypeAlias = Literal["idle", "stop"]
NOTHING = 1 << 40
"""Stands for "no such rank" in a minimum over ranks."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank says before steps are agreed.

    Args:
        queued: batches ready to run.
        receiving: more windows may still arrive here.
        bounded: all that may still arrive was handed out already, so that loading it all at once ends.
    """

    queued: int
    receiving: bool
    bounded: bool = True

    def to_max(self) -> list[int]:
        """Integers whose maximum over ranks is all that :func:`agree` needs."""
        open_queue = self.queued if self.receiving else NOTHING
        unbounded = self.receiving and not self.bounded
        return [self.queued, -self.queued, -open_queue, int(self.receiving), int(not self.receiving), int(unbounded)]


OFFER_SIZE = 6


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks do until the next exchange.

    Args:
        steps: steps that every rank takes now.
        last: the epoch ends with them; every rank evens out its queue to ``steps`` by splitting, then by idling.
        load_all: before the next exchange every rank loads all that was handed out to it.
    """

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
    most, least, least_open = highest[0], -highest[1], -highest[2]
    any_receives, any_done, any_unbounded = (bool(flag) for flag in highest[3:OFFER_SIZE])
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
    """Into how many parts each batch is split so that ``steps`` batches result, or as many as there are samples.

    The batch whose parts are largest is split further, one part at a time.

    Args:
        sizes: samples in each batch that may be split; 1 for one that may not.

    >>> even_parts([4, 1], 4)
    [3, 1]
    """
    parts = [1] * len(sizes)
    missing = min(steps, sum(sizes)) - len(sizes)
    while missing > 0:
        largest = max(range(len(sizes)), key=lambda i: (sizes[i] / parts[i] if parts[i] < sizes[i] else 0, -i))
        parts[largest] += 1
        missing -= 1
    return parts


def level(loads: Sequence[int], amount: int) -> list[int]:
    """Divide ``amount`` so that the smallest loads are raised to one level; exact, ties to lower ranks.

    >>> level([5, 0, 3], 4)
    [0, 4, 0]
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


@dataclass(frozen=True, slots=True)
class Grant:
    """Windows given to one rank at an exchange: ranges of positions in the epoch's order."""

    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def num_samples(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def hand_out(loads: Sequence[int], start: int, stop: int, *, window: int, target: int) -> tuple[list[Grant], int]:
    """Which windows each rank opens next, by a prefix sum over what the ranks need.

    A rank whose windows made fewer batches has a smaller load and opens more of them. When less than a window a rank
    would remain, everything is given out, so that all ranks end at one level.

    Args:
        loads: what each rank still has to emit, in samples.
        start: positions up to here are given out.
        stop: end of the epoch's order.
        window: samples a window, at most.
        target: load, in samples, up to which a rank is supplied.

    Returns:
        The grants of all ranks, and the new ``start``.

    >>> grants, start = hand_out([0, 9], 0, 100, window=10, target=20)
    >>> [grant.ranges for grant in grants], start
    ([((0, 10), (10, 20)), ((20, 30), (30, 40))], 40)
    """
    wanted = [max(0, -(-(target - load) // window)) for load in loads]
    if (sum(wanted) + len(loads)) * window >= stop - start:
        shares = level(loads, stop - start)
        closing = True
    else:
        shares = [count * window for count in wanted]
        closing = False
    grants = []
    for share in shares:
        grants.append(Grant(_ranges(start, share, window, even=closing)))
        start += share
    return grants, start


def _ranges(start: int, share: int, window: int, *, even: bool) -> tuple[tuple[int, int], ...]:
    count = -(-share // window)
    bounds = (
        [start + (share * i // count if even else min(i * window, share)) for i in range(count + 1)] if count else []
    )
    return tuple(zip(bounds[:-1], bounds[1:], strict=True))


STRATA = 16
DRAWN = 1024  # steps drawn at once


def quantile(seed: int, epoch: int, step: int) -> float:
    """Where in its sorted queue a rank takes its batch of this step: the same on all ranks, evenly spread over [0, 1).

    Every 16 steps visit each sixteenth of the queue once, in a shuffled order: rows carry similar lengths on all ranks,
    and an epoch has no curriculum.

    >>> sorted(int(16 * quantile(0, 0, step)) for step in range(16)) == list(range(16))
    True
    """
    return _strata(seed, epoch, step // DRAWN)[step % DRAWN]


@lru_cache(maxsize=64)
def _strata(seed: int, epoch: int, number: int) -> list[float]:
    rng = np.random.default_rng((seed, epoch, number))
    blocks = rng.permuted(np.tile(np.arange(STRATA), (DRAWN // STRATA, 1)), axis=1)
    return ((blocks + rng.random(blocks.shape)) / STRATA).ravel().tolist()


def split_share(amount: int, rank: int, size: int) -> tuple[int, int]:
    """The part ``[start, stop)`` of ``range(amount)`` that is a rank's; parts differ by at most one.

    >>> [split_share(7, rank, 3) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    if not 0 <= rank < size:
        raise ConfigError(f"`rank` must be from 0 to {size - 1}, but is {rank}")
    base, extra = divmod(amount, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)
