"""Describes the shapes of batches, which budgets and memory models are asked about.

A *stream* is one named count per sample, such as ``tokens``, ``target``, ``patches`` or ``edges``. The *primary* stream
is ``tokens``, or without that name the first; its units are treated as tokens. Lengths are passed as ``Streams``: a
dict from stream name to an int32 array of shape (num_samples,)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.errors import ConfigError

__all__ = [
    "TARGET",
    "TOKENS",
    "BatchShape",
    "IntArray",
    "Streams",
    "largest_within",
    "primary",
    "round_up",
    "target_tokens",
    "units_of",
]

TOKENS = "tokens"
TARGET = "target"


def primary(streams: Iterable[str]) -> str:
    """Returns the name of the primary stream: ``tokens``, or without that name the first.

    >>> primary(["nodes", "edges"]), primary(["patches", "tokens"])
    ('nodes', 'tokens')
    """
    return TOKENS if TOKENS in streams else next(iter(streams))


def check_names(named: Mapping[str, Any]) -> None:
    """Raises ConfigError unless ``named`` maps stream names (str) to lengths."""
    are_names = all(isinstance(name, str) for name in named)
    if not named or not are_names:
        raise ConfigError(
            f"`lengths` must be one number per sample, or a dict by stream name, but has {list(named)}"
        )


def units_of(lengths: Streams, sample: int) -> str:
    """Returns the lengths of one sample as text for messages: "9 source, 2 target"."""
    return ", ".join(f"{values[sample]} {name}" for name, values in lengths.items())


Streams: TypeAlias = Mapping[str, NDArray[np.int32]]
IntArray: TypeAlias = NDArray[np.int64]
Units: TypeAlias = "ArrayLike | Mapping[str, ArrayLike]"
"""Either one array of token counts, or a dict from stream names to arrays of counts."""


def round_up(values: IntArray, multiple: int) -> IntArray:
    """Returns ``values`` rounded up to a multiple of ``multiple``.

    >>> round_up(np.array([0, 1, 8, 9]), 8).tolist()
    [0, 8, 8, 16]
    """
    return values if multiple == 1 else -(-values // multiple) * multiple


def largest_within(
    fits: Callable[[IntArray], NDArray[np.bool_]], size: int, most: int | IntArray = 2**40
) -> IntArray:
    """Returns the largest count (up to ``most``) that fits, for each of ``size`` questions: int64 (size,). 0: none.

    Bisection of ``fits``, which allows every count below one that it allows: at most 41 calls, of all questions at once.

    >>> largest_within(lambda count: count * np.array([10, 50]) <= 100, 2).tolist()
    [10, 2]
    """
    fitting = np.zeros(size, np.int64)
    too_large = np.full(size, most) + 1
    while (too_large - fitting > 1).any():
        middle = np.maximum((fitting + too_large) // 2, 1)
        middle_fits = fits(middle) & (middle < too_large)
        fitting = np.where(middle_fits, middle, fitting)
        too_large = np.where(middle_fits, too_large, np.minimum(middle, too_large))
    return fitting


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shapes of K possible batches; each array has one entry per batch.

    Args:
        num_samples: int64 (K,), number of samples in each batch.
        longest: stream name -> int64 (K,), length of the longest sample in each batch, before padding is rounded up.
        total: stream name -> int64 (K,), sum of the lengths in each batch.

    >>> shape = BatchShape.of(num_samples=[2, 4], longest=10)
    >>> shape.total["tokens"].tolist()
    [20, 40]
    """

    num_samples: IntArray
    longest: Mapping[str, IntArray]
    total: Mapping[str, IntArray]

    @classmethod
    def of(cls, num_samples: ArrayLike, longest: Units, total: Units | None = None) -> BatchShape:
        """Makes shapes from numbers or arrays, which are broadcast; those without a name are the stream ``tokens``.
        Without ``total``, every sample of a batch counts as long as the longest."""
        count = np.asarray(num_samples, dtype=np.int64)
        longest = _by_stream(longest)
        if total is None:
            total = {name: count * values for name, values in longest.items()}
        else:
            total = _by_stream(total)
        shapes = map(np.shape, [*longest.values(), *total.values()])
        size = np.broadcast_shapes((1,), count.shape, *shapes)
        return cls(np.broadcast_to(count, size), _broadcast(longest, size), _broadcast(total, size))

    @classmethod
    def of_samples(cls, lengths: Streams) -> BatchShape:
        """Returns the shape (K = 1) of the batch that consists of exactly these samples."""
        num_samples = len(next(iter(lengths.values())))
        longest = {name: int(values.max(initial=0)) for name, values in lengths.items()}
        total = {name: int(values.sum(dtype=np.int64)) for name, values in lengths.items()}
        return cls.of(num_samples, longest, total)

    def __len__(self) -> int:
        return len(self.num_samples)

    def without(self, streams: Collection[str]) -> BatchShape:
        """Returns the same shapes without the given streams; the primary stream is always kept."""
        first = primary(self.longest)
        kept = [name for name in self.longest if name == first or name not in streams]
        return BatchShape(
            self.num_samples,
            {name: self.longest[name] for name in kept},
            {name: self.total[name] for name in kept},
        )


def target_tokens(shape: BatchShape) -> IntArray:
    """Returns the length of the longest decoder input of each batch in an encoder-decoder model, int64 (K,): the stream
    ``target``, else all streams but the primary one, added; without such streams, the primary stream.

    >>> target_tokens(BatchShape.of(2, {"tokens": 9, "labels": 4})).tolist()
    [4]
    """
    if TARGET in shape.longest:
        return shape.longest[TARGET]
    first = primary(shape.longest)
    others = [values for name, values in shape.longest.items() if name != first]
    return np.sum(others, axis=0) if others else shape.longest[first]


def _by_stream(value: Units) -> dict[str, IntArray]:
    named = value if isinstance(value, Mapping) else {TOKENS: value}
    return {name: np.asarray(values, np.int64) for name, values in named.items()}


def _broadcast(streams: Mapping[str, IntArray], size: tuple[int, ...]) -> dict[str, IntArray]:
    return {name: np.broadcast_to(values, size) for name, values in streams.items()}
