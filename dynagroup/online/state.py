"""The state of an online loader as JSON: which samples remain, in which batches."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import StateError
from dynagroup.shapes import IntArray

__all__ = ["check_state", "pack", "pack_groups", "unpack", "unpack_groups"]

STATE_VERSION = 1


def pack(values: Iterable[int] | NDArray[np.integer]) -> str:
    """Integers as compressed text; runs and small steps cost little.

    >>> unpack(pack([5, 6, 1000])).tolist()
    [5, 6, 1000]
    """
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int64)
    steps = np.diff(array, prepend=0).astype("<i8")
    planes = steps.view(np.uint8).reshape(-1, 8).T.tobytes()  # bytes of like weight side by side compress better
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def unpack(text: str) -> IntArray:
    """What :func:`pack` packed.

    Raises:
        StateError: the text is damaged.
    """
    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.uint8)
        steps = np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8").reshape(-1)
    except (ValueError, TypeError, zlib.error) as error:
        raise StateError(f"the state is damaged: {error}") from error
    return np.cumsum(steps, dtype=np.int64)


def pack_groups(groups: Iterable[Sequence[int]]) -> list[str]:
    """Lists of integers, as their sizes and their members.

    >>> unpack_groups(pack_groups([[3, 1], [], [2]]))
    [[3, 1], [], [2]]
    """
    groups = [list(group) for group in groups]
    return [pack([len(group) for group in groups]), pack([i for group in groups for i in group])]


def unpack_groups(packed: Sequence[str]) -> list[list[int]]:
    """What :func:`pack_groups` packed."""
    sizes, members = (unpack(text) for text in packed)
    if sizes.sum() != len(members):
        raise StateError(f"the state is damaged: {sizes.sum()} samples are announced, {len(members)} are there")
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    flat = members.tolist()
    return [flat[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def check_state(state: Any, identity: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The state, if it belongs to this run.

    Raises:
        StateError: it is damaged, of another version, or of other data or settings; names what differs.
    """
    needed = ("version", "kind", "identity", "world_size", "rank", "epoch", "progress")
    missing = [key for key in needed if key not in state] if isinstance(state, Mapping) else list(needed)
    if missing or state["kind"] != kind:
        raise StateError(
            f"this is no state of an {kind}: {missing or state['kind']} {'missing' if missing else 'found'}"
        )
    if state["version"] != STATE_VERSION:
        raise StateError(f"the state has version {state['version']}, this dynagroup reads version {STATE_VERSION}")
    theirs = state["identity"]
    differing = [f"{k}: {theirs.get(k)!r} then, {v!r} now" for k, v in identity.items() if theirs.get(k) != v]
    if differing:
        raise StateError(f"the state belongs to another run; {'; '.join(differing)}")
    return state


def checked_set(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The states of all ranks, in their order.

    Raises:
        StateError: some rank is missing, or they were not taken after the same step.
    """
    ordered = sorted(states, key=lambda s: s["rank"])
    size = ordered[0]["world_size"]
    if [s["rank"] for s in ordered] != list(range(size)):
        raise StateError(
            f"states of ranks {[s['rank'] for s in ordered]} were given; all {size} ranks' states are needed"
        )
    places = {(s["world_size"], s["epoch"], (s["progress"] or {}).get("steps")) for s in ordered}
    if len(places) > 1:
        raise StateError(
            f"the ranks' states were not taken after the same step: (ranks, epoch, step) are {sorted(places)}"
        )
    return ordered
