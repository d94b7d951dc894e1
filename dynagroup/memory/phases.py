"""How a model is run (training, forward pass, generation), and how its memory depends on the batch shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.shapes import BatchShape, primary, target_tokens
from dynagroup.validation import explained

FloatArray: TypeAlias = NDArray[np.float64]
Mode: TypeAlias = Literal["train", "forward", "generate"]
Attention: TypeAlias = Literal["eager", "sdpa", "flash"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Layout: TypeAlias = Literal["padded", "packed"]
Sharding: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
Run: TypeAlias = Any  # a :class:`~dynagroup.memory.Workload`; this alias avoids a circular import
MakeInputs: TypeAlias = Callable[[Any, int, Mapping[str, int]], dict[str, Any]]
"""``(model, num_samples, longest) -> arguments of model.forward``: tensors by name."""

ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
# The memory-efficient kernel pads a mask's last dimension to this (attention.cpp, pad_bias).
MASK_ALIGNMENT = 16
# Monomials in the memory of a phase (n: samples, L: tokens of the longest sample, T: tokens of the
# longest target).
MONOMIALS = ("1", "n", "L", "nL", "L2", "nL2", "T", "nT", "T2", "nT2", "LT", "nLT")


def needed(module: str, purpose: str, extra: str = "memory") -> Any:
    """Imports an optional module. ConfigError: the module is missing; the message says how to install it."""
    package = module.partition(".")[0]
    with explained(f"{purpose} needs {package}: pip install dynagroup[{extra}]"):
        return import_module(module)


def monomials(num_samples: NDArray[Any], tokens: NDArray[Any], target: NDArray[Any]) -> FloatArray:
    """Returns the monomials of each shape: float64 (K, 12)."""
    n = np.asarray(num_samples, dtype=np.float64)[:, None]
    length = np.asarray(tokens, dtype=np.float64)
    t = np.asarray(target, dtype=np.float64)
    per_batch = np.stack([np.ones_like(length), length, length**2, t, t**2, length * t], axis=1)
    return np.stack([per_batch, n * per_batch], axis=2).reshape(len(length), len(MONOMIALS))


def columns(shape: BatchShape, packed: bool = False) -> FloatArray:
    """Returns the monomials of each shape, float64 (K, 12). A packed batch counts as one sample with all its tokens."""
    if packed:
        total = np.maximum(shape.total[primary(shape.total)], 1)
        return monomials(np.ones_like(total), total, total)
    tokens = np.maximum(shape.longest[primary(shape.longest)], 1)
    target = np.maximum(target_tokens(shape), 1)
    return monomials(shape.num_samples, tokens, target)


@dataclass(frozen=True, slots=True)
class Phases:
    """A model's memory by batch shape: the largest of its phases (moments of a step), in bytes per monomial."""

    rows: tuple[tuple[float, ...], ...]
    """Bytes per monomial of each phase, in the order of ``MONOMIALS``."""
    until: int | None = None
    """Tokens of the longest sample up to which ``rows`` are valid; None: no limit."""
    after: tuple[tuple[float, ...], ...] = ()
    """Like ``rows``, for longer samples than ``until``; only with sliding-window attention."""
    aligned: "Phases | None" = None
    """Phases for lengths that are multiples of 16, for which masks are not padded; None: these same phases."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Phases":
        """Returns phases from their fields as JSON keeps them."""
        aligned = values["aligned"]
        return cls(
            rows=_as_tuples(values["rows"]),
            until=values["until"],
            after=_as_tuples(values["after"]),
            aligned=None if aligned is None else cls.from_json(aligned),
        )

    @classmethod
    def of(cls, monomials: Sequence[int], sizes: FloatArray) -> "Phases":
        """Makes phases from their bytes for some monomials, float64 (P, columns); other monomials get 0."""
        rows = np.zeros((len(sizes), len(MONOMIALS)))
        rows[:, monomials] = sizes
        return cls(_as_tuples(rows.tolist()))

    def bytes(self, shape: BatchShape, packed: bool = False) -> FloatArray:
        """Returns the bytes of each batch, at least 1: float64 (K,). They never fall where a length passes ``until``."""
        if self.until is None:
            return _largest(self.rows, columns(shape, packed))
        name = primary(shape.longest)
        tokens = shape.longest[name]
        inside = {**shape.longest, name: np.minimum(tokens, self.until)}
        within = _largest(self.rows, columns(BatchShape.of(shape.num_samples, inside)))
        beyond = _largest(self.after, columns(shape))
        return np.where(tokens > self.until, np.maximum(within, beyond), within)

    def baseline_bytes(self, baseline: BatchShape, packed: bool = False) -> FloatArray:
        """Returns the bytes of baseline batches, float64 (K,), without mask padding if their lengths need none."""
        padded = self.bytes(baseline, packed)
        if self.aligned is None:
            return padded
        tokens = baseline.longest[primary(baseline.longest)]
        is_aligned = tokens % MASK_ALIGNMENT == 0
        is_aligned |= target_tokens(baseline) % MASK_ALIGNMENT == 0
        return np.where(is_aligned, self.aligned.bytes(baseline, packed), padded)


def _as_tuples(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, rows))


def _largest(rows: Sequence[Sequence[float]], values: FloatArray) -> FloatArray:
    phase_bytes = values @ np.array(rows).T
    return np.maximum(phase_bytes.max(axis=1), 1.0)
