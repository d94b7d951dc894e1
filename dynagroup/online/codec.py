"""Positions and states as JSON: packed small, checked whole before any of it is used."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import StateError
from dynagroup.shapes import IntArray
from dynagroup.validation import Check, a_list, a_text

__all__ = ["a_pack", "pack", "pack_groups", "some_groups", "unpack", "unpack_groups"]

MOST_BYTES = 1 << 34
"""A pack that claims to be larger is damaged: two thousand million integers."""


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
        reader = zlib.decompressobj()
        planes = np.frombuffer(reader.decompress(base64.b64decode(text, validate=True), MOST_BYTES), np.uint8)
        steps = np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8").reshape(-1)
    except (ValueError, TypeError, zlib.error) as error:
        raise StateError(f"the state is damaged: {error}") from error
    if not reader.eof:
        raise StateError("the state is damaged: packed integers end too early, or are too many")
    return np.cumsum(steps, dtype=np.int64)


def pack_groups(groups: Iterable[Sequence[int]]) -> list[str]:
    """Lists of integers, as their sizes and their members.

    >>> unpack_groups(pack_groups([[3, 1], [], [2]]))
    [[3, 1], [], [2]]
    """
    groups = [list(group) for group in groups]
    return [pack([len(group) for group in groups]), pack([i for group in groups for i in group])]


def unpack_groups(packed: Sequence[str]) -> list[list[int]]:
    """What :func:`pack_groups` packed.

    Raises:
        StateError: it is damaged.
    """
    sizes, members = (unpack(text) for text in packed)
    if (sizes < 0).any() or sizes.sum() != len(members):
        raise StateError(f"the state is damaged: {sizes.sum()} samples are announced, {len(members)} are there")
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    flat = members.tolist()
    return [flat[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def a_pack() -> Check:
    """Packed integers of at least 0."""

    def check(value: Any, place: str) -> None:
        a_text()(value, place)
        if (unpack(value) < 0).any():
            raise StateError(f"the state is damaged: {place} holds a negative position")

    return check


def some_groups() -> Check:
    """Packed lists of integers."""

    def check(value: Any, place: str) -> None:
        a_list(a_pack(), length=2)(value, place)
        unpack_groups(value)

    return check
