"""One exchange of the alignment protocol: a MAX of a few integers, then a SUM of a few floats; errors reach every rank."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynagroup.distributed import World
from dynagroup.errors import AlignmentError

__all__ = ["Exchange", "fingerprint"]

TEXT_WORDS = 64
WIDTH = 48
"""Integers of a MAX; always the same number, so that ranks at different places still understand each other."""

COMPARED = (WIDTH - 3) // 2
"""Values that one MAX compares."""


def fingerprint(value: Any) -> int:
    """63 bits of a JSON-able value.

    >>> fingerprint({"seed": 0}) == fingerprint({"seed": 1})
    False
    """
    digest = hashlib.blake2b(json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Exchange:
    """Counts and carries the exchanges of one epoch.

    Every MAX begins with where this rank stands, so that ranks at different places end in AlignmentError, and with a
    flag for a rank that failed, so that the others raise what happened there instead of waiting for it.
    """

    def __init__(self, world: World, epoch: int = 0) -> None:
        self.world = world
        self.epoch = epoch
        self.count = 0
        self.num_bytes = 0

    def highest(self, values: Sequence[int], failure: BaseException | None = None) -> list[int]:
        """Element-wise maximum over ranks.

        Args:
            failure: what happened here instead; all ranks raise, this one raises ``failure`` itself.

        Raises:
            AlignmentError: another rank failed, or stands at another exchange.
        """
        self.count += 1
        place = (self.epoch << 32) + self.count
        failed_rank = 0 if failure is None else self.world.rank + 1
        if self.world.size == 1:
            if failure is not None:
                raise failure
            return list(values)
        vector = [place, -place, failed_rank, *values]
        found = self._max(vector + [0] * (WIDTH - len(vector)))
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
        self.num_bytes += 8 * len(values)
        return self.world.all_sum(values)

    def one_each(self, value: int) -> list[int]:
        """This rank's place in a vector with one integer a rank, for :meth:`total`."""
        vector = [0] * self.world.size
        vector[self.world.rank] = value
        return vector

    def lend(self, thing: Any) -> Any:
        """What the highest rank that has something gives to all: pickled, as a MAX of its bytes. None stands for nothing.

        Raises:
            AlignmentError: it could not be pickled there.
        """
        giver, text, failure = self.highest([0 if thing is None else self.world.rank + 1])[0] - 1, b"", None
        if giver < 0:
            return None
        if giver == self.world.rank:
            try:
                text = pickle.dumps(thing)
            except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
                failure = error
        size = self.highest([len(text)], failure)[0]
        words = self._max(np.frombuffer(text.ljust(-(-size // 4) * 4, b"\0"), "<u4").tolist())
        return pickle.loads(np.asarray(words, "<u4").tobytes()[:size])

    def compare(self, identity: Mapping[str, Any], failure: BaseException | None = None) -> None:
        """Refuse ranks that differ in any of these values.

        Raises:
            AlignmentError: names what differs, and this rank's value.
        """
        names: list[str] = []
        for start in range(0, len(identity), COMPARED):
            part = list(identity)[start : start + COMPARED]
            prints = [fingerprint(identity[name]) for name in part]
            found = self.highest([*prints, *(-p for p in prints)], failure)
            names += [name for i, name in enumerate(part) if found[i] != -found[len(part) + i]]
        if names:
            shown = "; ".join(f"{name} (rank {self.world.rank} has {identity[name]!r})" for name in names)
            raise AlignmentError(f"ranks differ in {shown}; give every rank the same data, seed and settings")

    def _max(self, values: Sequence[int]) -> list[int]:
        self.num_bytes += 8 * len(values)
        return self.world.all_max(values)

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
