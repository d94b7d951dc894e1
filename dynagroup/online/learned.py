"""True lengths that a loader has seen, kept per sample, and merged over ranks at the end of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.distributed import World
from dynagroup.errors import StateError
from dynagroup.online.codec import pack, unpack
from dynagroup.shapes import IntArray, Streams

__all__ = ["LearnedLengths"]

UNKNOWN = -1
CHUNK = 1 << 16
STEADY_SHARE = 0.01  # up to this share of samples may change length between epochs for plans of exact batches


class LearnedLengths:
    """Lengths observed in earlier epochs, alike on all ranks, and those that this rank observed in the running one."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.seen: dict[str, NDArray[np.int32]] = {}
        self.steady = True
        """Few samples changed their length, in any stream, between epochs: exact batches can be planned."""
        self._fresh: dict[str, NDArray[np.int32]] = {}

    def observe(self, indices: Sequence[int], lengths: Streams) -> None:
        """Remember the true lengths of these samples."""
        for name, values in lengths.items():
            if name not in self._fresh:
                self._fresh[name] = np.full(self.num_samples, UNKNOWN, np.int32)
            self._fresh[name][indices] = values

    def known(self, indices: IntArray) -> Streams | None:
        """Lengths of these samples, or None while some of them has none."""
        known = {name: values[indices] for name, values in self.seen.items()}
        return None if not known or any((values == UNKNOWN).any() for values in known.values()) else known

    def merge(self, world: World) -> None:
        """Tell all ranks what each has observed in this epoch; collective. The largest of several observations counts."""
        names = sorted(self._fresh)
        if world.size > 1:
            most, fewest = world.all_max([len(names), -len(names)])
            if most != -fewest:  # a rank without a single sample knows no streams
                self._fresh = {}
                return
        changed = np.zeros(self.num_samples, np.bool_)
        for name in names:
            fresh = self._fresh[name]
            for start in range(0, self.num_samples if world.size > 1 else 0, CHUNK):
                part = fresh[start : start + CHUNK]
                part[:] = world.all_max(part.tolist())
            if name in self.seen:
                changed |= (fresh != self.seen[name]) & (fresh != UNKNOWN)
            self.seen[name] = np.where(fresh == UNKNOWN, self.seen.get(name, fresh), fresh)
        self.steady = int(changed.sum()) <= STEADY_SHARE * self.num_samples
        self._fresh = {}

    def state(self) -> dict[str, Any]:
        """JSON-able; a few bytes a sample."""
        fresh = {
            name: pack(values.astype(np.int64) - self.seen.get(name, UNKNOWN)) for name, values in self._fresh.items()
        }
        return {"seen": {n: pack(v) for n, v in self.seen.items()}, "fresh": fresh, "steady": self.steady}

    def restored(self, state: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> LearnedLengths:
        """What a state knows; ``others`` are further ranks' states, whose observations are added.

        Raises:
            StateError: it is damaged.
        """
        other = LearnedLengths(self.num_samples)
        other.steady = state["steady"]
        other.seen = {name: self._checked(name, unpack(text)) for name, text in state["seen"].items()}
        for one in (state, *others):
            for name, text in one["fresh"].items():
                before, change = other.seen.get(name, UNKNOWN), unpack(text)
                values = self._checked(name, change + before if len(change) == self.num_samples else change)
                other._fresh[name] = np.maximum(other._fresh.get(name, values), values)
        return other

    def _checked(self, name: str, values: NDArray[np.int64]) -> NDArray[np.int32]:
        if len(values) != self.num_samples or ((values < UNKNOWN) | (values > np.iinfo(np.int32).max)).any():
            raise StateError(
                f"the state is damaged: it holds {len(values)} lengths of {name!r}, or impossible ones; there are "
                f"{self.num_samples} samples"
            )
        return values.astype(np.int32)
