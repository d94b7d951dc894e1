"""How a model is run, and how its memory depends on the batch shape: the records that tracing works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.memory.extras import needed

__all__ = [
    "max_affine",
    "ELEMENT_BYTES",
    "MASK_ALIGNMENT",
    "MONOMIALS",
    "Attention",
    "Dtype",
    "FloatArray",
    "Layout",
    "Mode",
    "Phases",
    "Run",
    "Sharding",
    "monomials",
]

FloatArray: TypeAlias = NDArray[np.float64]
Mode: TypeAlias = Literal["train", "forward", "generate"]
Attention: TypeAlias = Literal["eager", "sdpa", "flash"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Layout: TypeAlias = Literal["padded", "packed"]
Sharding: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]

ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MASK_ALIGNMENT = 16  # the memory-efficient kernel pads the mask's last dimension to this (attention.cpp, pad_bias)

# What a phase has bytes for (n: samples, L: tokens of the longest, T: of the longest target).
MONOMIALS = ("1", "n", "L", "nL", "L2", "nL2", "T", "nT", "T2", "nT2", "LT", "nLT")


def monomials(n: NDArray[Any], length: NDArray[Any], target: NDArray[Any]) -> FloatArray:
    """The monomials of each shape: float64 (K, 12)."""
    n, ln, t = (np.asarray(v, dtype=np.float64) for v in (n, length, target))
    one = np.ones_like(n)
    return np.stack([one, n, ln, n * ln, ln**2, n * ln**2, t, n * t, t**2, n * t**2, ln * t, n * ln * t], axis=1)


@dataclass(frozen=True, slots=True)
class Phases:
    """How a model's memory depends on the batch shape: of each phase the bytes per monomial, of which the largest counts.

    >>> Phases(((0.0,) * 12,)).until is None
    True
    """

    rows: tuple[tuple[float, ...], ...]
    """One tuple a phase, of the monomials that ``MONOMIALS`` lists."""
    until: int | None = None
    """The longest sample, in tokens, for which ``rows`` hold; None: for all."""
    after: tuple[tuple[float, ...], ...] = ()
    """As ``rows``, beyond that: where attention slides."""
    aligned: Phases | None = None
    """The same for lengths that are multiples of 16, whose masks need no padding for their kernel; None: no different."""

    def __post_init__(self) -> None:
        for name in ("rows", "after"):
            rows = tuple(tuple(map(float, row)) for row in getattr(self, name))
            if not all(value >= 0 for row in rows for value in row):  # false for NaN, too
                raise ConfigError("`phases` has a size below zero or NaN; make it with Workload.from_model")
            if any(len(row) != len(MONOMIALS) for row in rows) or (name == "rows" and not rows):
                raise ConfigError(f"`phases` needs rows of {len(MONOMIALS)} numbers; make it with Workload.from_model")
            object.__setattr__(self, name, rows)
        if isinstance(self.aligned, Mapping):
            object.__setattr__(self, "aligned", Phases(**self.aligned))


# A :class:`~dynagroup.memory.Workload`, for files that it imports itself: what of it decides which program a model runs.
Run: TypeAlias = Any

MOST_PHASES = 4
STARTS = 12


def max_affine(columns: FloatArray, size: FloatArray) -> tuple[FloatArray, float]:
    """Max-affine regression: phases (P, columns) with factors of at least 0 whose largest is close to ``size`` (K,), and how
    far off it is at most, as a share.

    Alternating minimisation from several starts: give every row to a phase, fit each phase to its rows by non-negative least
    squares of relative errors, give every row to its largest phase, and again. One phase more only if it helps by a fifth.
    """
    best: tuple[float, int, FloatArray] | None = None
    rng = np.random.default_rng(0)
    orders = [columns[:, k] for k in range(1, columns.shape[1])] + [size]
    for count in range(1, MOST_PHASES + 1):
        if best is not None and (best[0] < 1e-3 or 2 * count > len(size)):
            break
        for start in range(1 if count == 1 else STARTS):
            by = orders[start] if start < len(orders) else rng.normal(size=len(size))
            owner = (np.argsort(np.argsort(by)) * count) // len(size)
            phases, error = _alternate(columns, size, owner, count)
            if best is None or error < 0.8 * best[0]:
                best = (error, count, phases)
    assert best is not None
    return best[2], best[0]


def _alternate(columns: FloatArray, size: FloatArray, owner: NDArray[np.int64], count: int) -> tuple[FloatArray, float]:
    nnls = needed("scipy.optimize", "fitting a profile").nnls
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    phases = np.zeros((count, columns.shape[1]))
    for _ in range(25):
        for k in range(count):
            mine = owner == k
            if mine.any():  # relative errors count: small batches matter as much as large ones
                phases[k] = nnls(columns[mine] / scale / size[mine, None], np.ones(mine.sum()))[0] / scale
        again = (columns @ phases.T).argmax(axis=1)
        if (again == owner).all():
            break
        owner = again
    error = np.abs((columns @ phases.T).max(axis=1) / size - 1).max()
    return phases, float(error)
