"""The shape of a batch, about which budgets and memory models are asked.

A *stream* is one named count per sample. One is *primary* (``tokens``, or else what the user names first): it always counts as
tokens. Others (``target``, ``patches``, ``edges``) may stand beside it. Lengths travel through dynagroup as ``Streams``: a dict
from stream name to an int32 array of shape (num_samples,).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["TARGET", "TOKENS", "BatchShape", "IntArray", "Streams", "largest_within", "primary", "round_up", "target_tokens",
           "units_of"]  # fmt: skip

TOKENS = "tokens"
TARGET = "target"


def primary(streams: Iterable[str]) -> str:
    """The primary one of these streams: ``tokens``, or if none has that name the first.

    >>> primary(["nodes", "edges"]), primary(["patches", "tokens"])
    ('nodes', 'tokens')
    """
    return TOKENS if TOKENS in streams else next(iter(streams))


def units_of(lengths: Streams, sample: int) -> str:
    """The lengths of a sample as text for messages: "9 source, 2 target"."""
    return ", ".join(f"{values[sample]} {name}" for name, values in lengths.items())


Streams: TypeAlias = Mapping[str, NDArray[np.int32]]
IntArray: TypeAlias = NDArray[np.int64]
Units: TypeAlias = "ArrayLike | Mapping[str, ArrayLike]"
"""Numbers of tokens, or of units by the names of streams."""


def round_up(values: IntArray, multiple: int) -> IntArray:
    """``values`` rounded up to a multiple.

    >>> round_up(np.array([0, 1, 8, 9]), 8).tolist()
    [0, 8, 8, 16]
    """
    return values if multiple == 1 else -(-values // multiple) * multiple


def largest_within(fits: Callable[[IntArray], NDArray[np.bool_]], size: int, most: int | IntArray = 2**40) -> IntArray:
    """For each of ``size`` questions, the most samples, up to ``most``, that fit: int64 (size,). 0: not one fits.

    Bisection over a monotone ``fits``, which is asked about all questions at once; at most 41 times.

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
    """The shapes of K candidate batches, one array entry a batch.

    Args:
        num_samples: int64 (K,), samples in each batch.
        longest: stream -> int64 (K,), longest sample of each batch, before any rounding for padding.
        total: stream -> int64 (K,), sum over the samples of each batch.

    >>> shape = BatchShape.of(num_samples=[2, 4], longest=10)
    >>> shape.total["tokens"].tolist()
    [20, 40]
    """

    num_samples: IntArray
    longest: Mapping[str, IntArray]
    total: Mapping[str, IntArray]

    @classmethod
    def of(cls, num_samples: ArrayLike, longest: Units, total: Units | None = None) -> BatchShape:
        """Shapes from numbers or arrays, broadcast together; a number or array without a name is the stream ``tokens``.

        Without ``total``, every sample of a batch is assumed to be as long as its longest.
        """
        count = np.asarray(num_samples, dtype=np.int64)
        longest_by = _by_stream(longest)
        total_by = {k: count * v for k, v in longest_by.items()} if total is None else _by_stream(total)
        size = np.broadcast_shapes((1,), np.shape(count), *map(np.shape, longest_by.values()))
        spread = lambda streams: {name: np.broadcast_to(v, size) for name, v in streams.items()}  # noqa: E731
        return cls(np.broadcast_to(count, size), spread(longest_by), spread(total_by))

    @classmethod
    def of_samples(cls, lengths: Streams) -> BatchShape:
        """The shape (K = 1) of one batch that holds exactly these samples."""
        count = len(next(iter(lengths.values())))
        longest = {name: int(values.max(initial=0)) for name, values in lengths.items()}
        return cls.of(count, longest, {name: int(values.sum(dtype=np.int64)) for name, values in lengths.items()})

    def __len__(self) -> int:
        return len(self.num_samples)

    def without(self, streams: Collection[str]) -> BatchShape:
        """The same batches without some of their streams; the primary stream always stays."""
        apart = set(streams) - {primary(self.longest)}
        longest = {name: values for name, values in self.longest.items() if name not in apart}
        return BatchShape(self.num_samples, longest, {name: self.total[name] for name in longest})


def target_tokens(shape: BatchShape) -> IntArray:
    """The most tokens that a decoder beside an encoder reads: the stream ``target``, or else the sum of all streams
    except the primary one. If there is no other stream, the primary one. int64 (K,).

    >>> target_tokens(BatchShape.of(2, {"tokens": 9, "labels": 4})).tolist()
    [4]
    """
    first = primary(shape.longest)
    others = [values for name, values in shape.longest.items() if name != first]
    if TARGET in shape.longest or not others:
        return shape.longest.get(TARGET, shape.longest[first])
    return np.sum(others, axis=0)


def _by_stream(value: Units) -> dict[str, IntArray]:
    named = value if isinstance(value, Mapping) else {TOKENS: value}
    return {name: np.asarray(values, np.int64) for name, values in named.items()}
