"""How a model is run, and how its memory depends on the batch shape: the records that tracing works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError

__all__ = [
    "ELEMENT_BYTES",
    "MASK_ALIGNMENT",
    "MONOMIALS",
    "Attention",
    "Dtype",
    "Layout",
    "Mode",
    "Phases",
    "Run",
    "Sharding",
    "monomials",
]

Mode: TypeAlias = Literal["train", "forward", "generate"]
Attention: TypeAlias = Literal["eager", "sdpa", "flash"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Layout: TypeAlias = Literal["padded", "packed"]
Sharding: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]

ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MASK_ALIGNMENT = 16  # the memory-efficient kernel pads the mask's last dimension to this (attention.cpp, pad_bias)

# What a phase has bytes for (n: samples, L: tokens of the longest, T: of the longest target).
MONOMIALS = ("1", "n", "L", "nL", "L2", "nL2", "T", "nT", "T2", "nT2", "LT", "nLT")


def monomials(n: NDArray[Any], length: NDArray[Any], target: NDArray[Any]) -> NDArray[np.float64]:
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


class Run(Protocol):
    """What of a workload decides which program a model runs. See :class:`~dynagroup.memory.Workload` for each field."""

    @property
    def mode(self) -> Mode | None: ...
    @property
    def dtype(self) -> Dtype | None: ...
    @property
    def autocast(self) -> Dtype | None: ...
    @property
    def attention(self) -> Attention | None: ...
    @property
    def encoder_decoder(self) -> bool | None: ...
    @property
    def gradient_checkpointing(self) -> bool | None: ...
    @property
    def keeps_outputs(self) -> bool | None: ...
    @property
    def max_new_tokens(self) -> int | None: ...
    @property
    def optimizer_bytes(self) -> float | None: ...
    @property
    def ddp(self) -> bool | None: ...
    @property
    def sharding(self) -> Sharding | None: ...
    @property
    def num_ranks(self) -> int | None: ...
    @property
    def layout(self) -> Layout | None: ...
