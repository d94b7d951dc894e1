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

TOKENS, TARGET = "tokens", "target"


def primary(streams: Iterable[str]) -> str:
    """Returns the name of the primary stream: ``tokens``, or without that name the first.

    >>> primary(["nodes", "edges"]), primary(["patches", "tokens"])
    ('nodes', 'tokens')
    """
    return TOKENS if TOKENS in streams else next(iter(streams))


def check_names(named: Mapping[str, Any]) -> None:
    """Raises ConfigError unless ``named`` maps stream names (str) to lengths."""
    if not named or not all(isinstance(name, str) for name in named):
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

    Bisects ``fits``, a monotone function of one count per question, with at most 41 calls.

    >>> largest_within(lambda count: count * np.array([10, 50]) <= 100, 2).tolist()
    [10, 2]
    """
    low, high = np.zeros(size, np.int64), np.full(size, most) + 1
    while (high - low > 1).any():
        middle = np.maximum((low + high) // 2, 1)
        ok = fits(middle) & (middle < high)
        low, high = np.where(ok, middle, low), np.where(ok, high, np.minimum(middle, high))
    return low


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
        count, longest_by = np.asarray(num_samples, dtype=np.int64), _by_stream(longest)
        total_by = (
            {k: count * v for k, v in longest_by.items()} if total is None else _by_stream(total)
        )
        size = np.broadcast_shapes((1,), np.shape(count), *map(np.shape, longest_by.values()))
        spread = lambda streams: {name: np.broadcast_to(v, size) for name, v in streams.items()}  # noqa: E731
        return cls(np.broadcast_to(count, size), spread(longest_by), spread(total_by))

    @classmethod
    def of_samples(cls, lengths: Streams) -> BatchShape:
        """Returns the shape (K = 1) of the batch that consists of exactly these samples."""
        count = len(next(iter(lengths.values())))
        longest = {name: int(values.max(initial=0)) for name, values in lengths.items()}
        return cls.of(
            count,
            longest,
            {name: int(values.sum(dtype=np.int64)) for name, values in lengths.items()},
        )

    def __len__(self) -> int:
        return len(self.num_samples)

    def without(self, streams: Collection[str]) -> BatchShape:
        """Returns the same shapes without the given streams; the primary stream is always kept."""
        apart = set(streams) - {primary(self.longest)}
        longest = {name: values for name, values in self.longest.items() if name not in apart}
        return BatchShape(self.num_samples, longest, {name: self.total[name] for name in longest})


def target_tokens(shape: BatchShape) -> IntArray:
    """Returns the length of the longest decoder input of each batch in an encoder-decoder model, int64 (K,): the stream
    ``target``, else all streams but the primary one, added; without such streams, the primary stream.

    >>> target_tokens(BatchShape.of(2, {"tokens": 9, "labels": 4})).tolist()
    [4]
    """
    first = primary(shape.longest)
    others = [values for name, values in shape.longest.items() if name != first]
    return (
        shape.longest.get(TARGET, shape.longest[first])
        if TARGET in shape.longest or not others
        else np.sum(others, axis=0)
    )


def _by_stream(value: Units) -> dict[str, IntArray]:
    named = value if isinstance(value, Mapping) else {TOKENS: value}
    return {name: np.asarray(values, np.int64) for name, values in named.items()}
