"""What an online loader saves: positions in compact form, and learned lengths; and whose states a resume needs."""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.distributed import World
from dynagroup.errors import StateError
from dynagroup.shapes import IntArray, Streams


def pack(values: Iterable[int] | NDArray[np.integer]) -> str:
    """Returns integers as compressed text. Consecutive or close integers take little space."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int64)
    steps = np.diff(array, prepend=0).astype("<i8")
    # Bytes of equal significance in a row compress better.
    return base64.b64encode(
        zlib.compress(steps.view(np.uint8).reshape(-1, 8).T.tobytes(), 9)
    ).decode()


def unpack(text: str) -> IntArray:
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return np.cumsum(
        np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8").reshape(-1), dtype=np.int64
    )


def pack_groups(groups: Iterable[Sequence[int]]) -> list[Any]:
    """Returns lists of integers as two parts: their sizes, and all their members as compressed text."""
    groups = [list(group) for group in groups]
    return [[len(group) for group in groups], pack([i for group in groups for i in group])]


def unpack_groups(packed: Sequence[Any]) -> list[list[int]]:
    members = iter(unpack(packed[1]).tolist())
    return [[next(members) for _ in range(size)] for size in packed[0]]


def together(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> list[Mapping[str, Any]]:
    """Returns the states to resume from: this rank's own, or on another number of ranks those of all, in order."""
    given, ordered = states[0]["world_size"], sorted(states, key=lambda state: state["rank"])
    ranks = [state["rank"] for state in ordered]
    if ranks != list(range(given)) and (given, ranks) != (size, [rank]):
        way_out = "give each rank its own state, or if the number of ranks changed, the list of all"
        raise StateError(
            f"this is rank {rank} of {size}, but states of ranks {ranks} of {given} were given; {way_out}"
        )
    places = {standing(state) for state in ordered}
    if len(places) > 1:
        raise StateError(
            "the ranks saved their states after different steps: (ranks, epoch, step, samples, changes) are "
            f"{sorted(places)}; load states of one step"
        )
    return [ordered[rank]] if len(ordered) == size else ordered


def standing(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what the states of all ranks have in common if they saved them after the same step."""
    cursor = state["cursor"]
    # the end of an epoch is the beginning of the next one
    steps = cursor["steps"] if state["running"] else 0
    return state["world_size"], state["epoch"], steps, cursor["samples_seen"], str(state["changes"])


KINDS = "(kinds)"  # name of the kinds among the streams of lengths
UNKNOWN, CHUNK = -1, 1 << 16
STEADY_SHARE = (
    0.01  # exact batches are planned if at most this share of samples changes length between epochs
)


class LearnedLengths:
    """Lengths and kinds that were measured: in earlier epochs (equal on all ranks), and in this epoch by this rank."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.seen: dict[str, NDArray[Any]] = {}
        self.steady = True  # whether so few samples changed length or kind between epochs that exact batches can be planned
        self._fresh: dict[str, NDArray[Any]] = {}

    def observe(self, indices: Sequence[int], lengths: Streams, kind: int | None = None) -> None:
        """Records the true lengths of these samples, int32, and the number of their kind."""
        kinds = {} if kind is None else {KINDS: np.full(len(indices), kind, np.int64)}
        for name, values in {**lengths, **kinds}.items():
            if name not in self._fresh:
                self._fresh[name] = np.full(self.num_samples, UNKNOWN, values.dtype)
            self._fresh[name][indices] = values

    def known(self, indices: IntArray) -> dict[str, NDArray[Any]] | None:
        known = {name: values[indices] for name, values in self.seen.items()}
        return (
            None
            if not known or any((values == UNKNOWN).any() for values in known.values())
            else known
        )

    def merge(self, world: World) -> None:
        """Combines what all ranks measured in this epoch (each sample's largest length); call it on all ranks."""
        fresh, names = self._fresh, sorted(self._fresh)
        if world.size > 1:
            most, fewest = world.all_max([len(names), -len(names)])
            names = names if most == -fewest else []  # ranks without samples know no streams
        changed, seen = np.zeros(self.num_samples, np.bool_), dict(self.seen)
        for name in names:
            for start in range(0, self.num_samples if world.size > 1 else 0, CHUNK):
                part = fresh[name][start : start + CHUNK]
                part[:] = world.all_max(part.tolist())
            unseen = fresh[name] == UNKNOWN
            if name in self.seen:
                changed |= (fresh[name] != self.seen[name]) & ~unseen
            seen[name] = np.where(unseen, self.seen.get(name, fresh[name]), fresh[name])
        self.steady = (
            int(changed.sum()) <= STEADY_SHARE * self.num_samples if names else self.steady
        )
        self.seen, self._fresh = seen, {}  # not before: if a rank stops, the state still has them

    def state(self) -> dict[str, Any]:
        fresh = {name: pack(values.astype(np.int64)) for name, values in self._fresh.items()}
        return {
            "seen": {n: pack(v) for n, v in self.seen.items()},
            "fresh": fresh,
            "steady": self.steady,
        }

    def restored(self, states: Sequence[Mapping[str, Any]]) -> "LearnedLengths":
        """Returns the lengths in a rank's state, updated with what other ranks have measured since."""
        other = LearnedLengths(self.num_samples)
        other.steady = states[0]["steady"]
        read = lambda name, text: unpack(text).astype(np.int64 if name == KINDS else np.int32)  # noqa: E731
        other.seen = {name: read(name, text) for name, text in states[0]["seen"].items()}
        for name, text in (
            (name, text) for state in states for name, text in state["fresh"].items()
        ):
            values = read(name, text)
            other._fresh[name] = np.maximum(other._fresh.get(name, values), values)
        return other
