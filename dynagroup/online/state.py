"""What an online loader saves: positions in compact form, and learned lengths; and whose states a resume needs."""

import base64
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.distributed import World
from dynagroup.errors import StateError
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.loader import State


def pack(values: Iterable[int] | NDArray[np.integer]) -> str:
    """Returns integers as compressed text. Consecutive or close integers take little space."""
    listed = values if isinstance(values, np.ndarray) else list(values)
    steps = np.diff(np.asarray(listed, np.int64), prepend=0).astype("<i8")
    planes = steps.view(np.uint8).reshape(-1, 8).T  # bytes of one significance compress better
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


def unpack(text: str) -> IntArray:
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    steps = np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8")
    return np.cumsum(steps.reshape(-1), dtype=np.int64)


def pack_groups(groups: Iterable[Sequence[int]]) -> list[Any]:
    """Returns lists of integers as two parts: their sizes, and all their members as compressed text."""
    groups = list(groups)
    return [list(map(len, groups)), pack(chain.from_iterable(groups))]


def unpack_groups(packed: Sequence[Any]) -> list[IntArray]:
    sizes, members = packed
    return np.split(unpack(members), np.cumsum(sizes, dtype=np.int64)[:-1])


def together(states: Sequence[State], rank: int, size: int) -> list[State]:
    """Returns the states to resume from: this rank's own, or on another number of ranks those of all, in order."""
    saved_size = states[0]["world_size"]
    ordered = sorted(states, key=lambda state: state["rank"])
    ranks = [state["rank"] for state in ordered]
    is_own = saved_size == size and ranks == [rank]
    if not is_own and ranks != list(range(saved_size)):
        raise StateError(
            f"this is rank {rank} of {size}, but states of ranks {ranks} of {saved_size} were given; "
            "give each rank its own state, or if the number of ranks changed, the list of all"
        )
    places = {standing(state) for state in ordered}
    if len(places) > 1:
        raise StateError(
            "the ranks saved their states after different steps: (ranks, epoch, step, samples, changes) "
            f"are {sorted(places)}; load states of one step"
        )
    return [ordered[rank]] if len(ordered) == size else ordered


def standing(state: State) -> tuple[Any, ...]:
    """Returns what the states of all ranks have in common if they saved them after the same step."""
    cursor = state["cursor"]
    # The end of an epoch is the beginning of the next one.
    steps = cursor["steps"] if state["running"] else 0
    changes = str(state["changes"])
    return state["world_size"], state["epoch"], steps, cursor["samples_seen"], changes


KINDS = "(kinds)"  # name of the kinds among the streams of lengths
UNKNOWN = -1
CHUNK = 1 << 16  # lengths of one exchange
# Exact batches are planned if at most this share of the samples changes length between epochs.
STEADY_SHARE = 0.01


class LearnedLengths:
    """Lengths and kinds that were measured: in earlier epochs (equal on all ranks), and in this epoch by this rank."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.seen: dict[str, NDArray[Any]] = {}
        # Whether so few samples changed length or kind between epochs that exact batches can be planned.
        self.steady = True
        self._fresh: dict[str, NDArray[Any]] = {}

    def observe(self, indices: Sequence[int], lengths: Streams, kind: int | None = None) -> None:
        """Records the true lengths of these samples, int32, and the number of their kind."""
        for name, values in lengths.items():
            self._record(name, indices, values)
        if kind is not None:
            self._record(KINDS, indices, np.full(len(indices), kind, np.int64))

    def _record(self, name: str, indices: Sequence[int], values: NDArray[Any]) -> None:
        if name not in self._fresh:
            self._fresh[name] = np.full(self.num_samples, UNKNOWN, values.dtype)
        self._fresh[name][indices] = values

    def known(self, indices: IntArray) -> dict[str, NDArray[Any]] | None:
        """Returns what earlier epochs measured of these samples; None if it is unknown of any."""
        known = {name: values[indices] for name, values in self.seen.items()}
        is_complete = all((values != UNKNOWN).all() for values in known.values())
        return known if known and is_complete else None

    def merge(self, world: World) -> None:
        """Combines what all ranks measured in this epoch (each sample's largest length); call it on all ranks."""
        names = self._common_names(world)
        changed = np.zeros(self.num_samples, np.bool_)
        seen = dict(self.seen)
        for name in names:
            fresh = self._fresh[name]
            if world.size > 1:
                for start in range(0, self.num_samples, CHUNK):
                    part = fresh[start : start + CHUNK]
                    part[:] = world.all_max(part.tolist())
            is_fresh = fresh != UNKNOWN
            before = self.seen.get(name, fresh)
            changed |= (fresh != before) & is_fresh
            seen[name] = np.where(is_fresh, fresh, before)
        if names:
            self.steady = int(changed.sum()) <= STEADY_SHARE * self.num_samples
        # Not before: if a rank stops, the state still has them.
        self.seen = seen
        self._fresh = {}

    def _common_names(self, world: World) -> list[str]:
        """Returns the streams that this epoch measured, or none if a rank had no samples, and so knows no streams."""
        names = sorted(self._fresh)
        if world.size == 1:
            return names
        most, fewest = world.all_max([len(names), -len(names)])
        return names if most == -fewest else []

    def state(self) -> dict[str, Any]:
        return {
            "seen": {name: pack(values) for name, values in self.seen.items()},
            "fresh": {name: pack(values) for name, values in self._fresh.items()},
            "steady": self.steady,
        }

    def restored(self, states: Sequence[State]) -> "LearnedLengths":
        """Returns the lengths in a rank's state, updated with what other ranks have measured since."""
        learned = LearnedLengths(self.num_samples)
        learned.steady = states[0]["steady"]
        for name, text in states[0]["seen"].items():
            learned.seen[name] = _unpacked(name, text)
        for state in states:
            for name, text in state["fresh"].items():
                values = _unpacked(name, text)
                learned._fresh[name] = np.maximum(learned._fresh.get(name, values), values)
        return learned


def _unpacked(name: str, text: str) -> NDArray[Any]:
    return unpack(text).astype(np.int64 if name == KINDS else np.int32)
