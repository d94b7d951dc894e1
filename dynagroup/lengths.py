"""Lengths of samples: measured once, checked once, int32 from then on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.errors import ConfigError
from dynagroup.shapes import TOKENS, Streams

__all__ = ["as_streams"]

LONGEST = int(np.iinfo(np.int32).max)


def as_streams(lengths: ArrayLike | Mapping[str, ArrayLike]) -> Streams:
    """Lengths in the form that dynagroup works with: stream name -> int32 array of shape (num_samples,).

    An int32 array is checked and passed on without a copy. Zero lengths are legal.

    Args:
        lengths: one whole number a sample (array, list, tensor, column), or a mapping of stream names to such;
            a bare array is the ``tokens`` stream, which a mapping must have.

    Raises:
        ConfigError: a length is negative, fractional, NaN, above 2**31 - 1 or not a number (names the sample and its
            value), streams differ in their number of samples, or there is no ``tokens`` stream.

    >>> as_streams([3, 0, 7])["tokens"].dtype
    dtype('int32')
    >>> sorted(as_streams({"tokens": [3, 4], "patches": [0, 9]}))
    ['patches', 'tokens']
    """
    named = dict(lengths) if isinstance(lengths, Mapping) else {TOKENS: lengths}
    if TOKENS not in named:
        raise ConfigError(f"`lengths` must have the stream {TOKENS!r}, but has {sorted(map(str, named))}")
    streams = {name: _as_int32(_as_array(values, name), name) for name, values in named.items()}
    num_samples = len(streams[TOKENS])
    for name, values in streams.items():
        if len(values) != num_samples:
            raise ConfigError(
                f"lengths[{name!r}] has {len(values)} samples, but lengths[{TOKENS!r}] has {num_samples}: sample "
                f"{min(len(values), num_samples)} is missing; every sample needs a length in every stream, or 0"
            )
    return streams


def _as_array(values: ArrayLike, name: str) -> NDArray[np.generic]:
    try:
        array = np.asarray(values)
    except ValueError:  # ragged lists
        array = np.empty(0)
        ragged = True
    else:
        ragged = False
    if ragged or array.ndim != 1:
        found = "ragged lists" if ragged else f"an array of shape {array.shape}"
        raise ConfigError(
            f"lengths[{name!r}] must be one number a sample, but is {found}; "
            "measure_lengths() measures texts and token lists"
        )
    return array.astype(np.int32) if array.size == 0 else array


def _as_int32(array: NDArray[np.generic], name: str) -> NDArray[np.int32]:
    kind = array.dtype.kind
    if kind in "iu":
        legal = len(array) == 0 or (int(array.min()) >= 0 and int(array.max()) <= LONGEST)  # pyright: ignore[reportArgumentType]
    elif kind == "f":
        legal = bool(_whole(array).all())
    else:
        legal = False
    if not legal:
        _refuse(array, name)
    return array.astype(np.int32, copy=False)


def _whole(array: NDArray[np.generic]) -> NDArray[np.bool_]:
    return (array >= 0) & (array <= LONGEST) & (np.floor(array) == array)  # pyright: ignore


def _refuse(array: NDArray[np.generic], name: str) -> None:
    if array.dtype.kind in "iuf":
        index = int(np.argmin(_whole(array)))
    else:
        index = next((i for i, value in enumerate(array.tolist()) if not _is_length(value)), 0)
    raise ConfigError(
        f"lengths[{name!r}][{index}] must be a whole number from 0 to {LONGEST}, but is {array.tolist()[index]!r}; "
        "correct or filter out that sample"
    )


def _is_length(value: object) -> bool:
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    return whole and 0 <= value <= LONGEST and value == int(value)  # type: ignore[operator,arg-type]
