"""How a model is run (training, forward pass, generation), and how its memory depends on the batch shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
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
MASK_ALIGNMENT = (
    16  # the memory-efficient kernel pads a mask's last dimension to this (attention.cpp, pad_bias)
)
# Monomials in the memory of a phase (n: samples, L: tokens of the longest sample, T: tokens of the longest target).
MONOMIALS = ("1", "n", "L", "nL", "L2", "nL2", "T", "nT", "T2", "nT2", "LT", "nLT")


def needed(module: str, purpose: str, extra: str = "memory") -> Any:
    """Imports an optional module. ConfigError: the module is missing; the message says how to install it."""
    with explained(f"{purpose} needs {module.partition('.')[0]}: pip install dynagroup[{extra}]"):
        return import_module(module)


def monomials(n: NDArray[Any], length: NDArray[Any], target: NDArray[Any]) -> FloatArray:
    """Returns the monomials of each shape: float64 (K, 12)."""
    n, ln, t = (np.asarray(v, dtype=np.float64) for v in (n, length, target))
    return np.stack(
        [n**0, n, ln, n * ln, ln**2, n * ln**2, t, n * t, t**2, n * t**2, ln * t, n * ln * t],
        axis=1,
    )


def columns(shape: BatchShape, packed: bool = False) -> FloatArray:
    """Returns the monomials of each shape, float64 (K, 12). A packed batch counts as one sample with all its tokens."""
    if packed:
        total = np.maximum(shape.total[primary(shape.total)], 1)
        return monomials(np.ones_like(total), total, total)
    length = shape.longest[primary(shape.longest)]
    return monomials(shape.num_samples, np.maximum(length, 1), np.maximum(target_tokens(shape), 1))


@dataclass(frozen=True, slots=True)
class Phases:
    """A model's memory by batch shape: the largest of its phases (moments of a step), in bytes per monomial."""

    rows: tuple[
        tuple[float, ...], ...
    ]  # bytes per monomial of each phase, in the order of ``MONOMIALS``
    until: int | None = (
        None  # length of the longest sample up to which ``rows`` are valid, in tokens; None: no limit
    )
    after: tuple[tuple[float, ...], ...] = ()
    """Like ``rows``, for longer samples than ``until``; only with sliding-window attention."""
    aligned: "Phases | None" = None
    """Phases for lengths that are multiples of 16, for which masks are not padded; None: these same phases."""

    def __post_init__(self) -> None:
        for name in ("rows", "after"):
            rows = tuple(tuple(map(float, row)) for row in getattr(self, name))
            right = all(
                len(row) == len(MONOMIALS) and min(row) >= 0 and sum(row) < np.inf for row in rows
            )
            if not right or (name == "rows" and not rows):
                wanted = f"rows of {len(MONOMIALS)} numbers of at least 0"
                raise ConfigError(
                    f"`phases` must have {wanted}; make them with Workload.from_model"
                )
            object.__setattr__(self, name, rows)
        if isinstance(self.aligned, Mapping):
            object.__setattr__(self, "aligned", Phases(**self.aligned))

    @classmethod
    def of(cls, monomials: Sequence[int], sizes: FloatArray) -> "Phases":
        """Makes phases from their bytes for some monomials, float64 (P, columns); other monomials get 0."""
        rows = np.zeros((len(sizes), len(MONOMIALS)))
        rows[:, monomials] = sizes
        return cls(tuple(map(tuple, rows.tolist())))

    def bytes(self, shape: BatchShape, packed: bool = False) -> FloatArray:
        """Returns the bytes of each batch, at least 1: float64 (K,). They never fall where a length passes ``until``."""
        if self.until is None:
            return _largest(self.rows, columns(shape, packed))
        first = primary(shape.longest)
        inside = {**shape.longest, first: np.minimum(shape.longest[first], self.until)}
        within = _largest(self.rows, columns(BatchShape.of(shape.num_samples, inside)))
        return np.where(
            shape.longest[first] > self.until,
            np.maximum(within, _largest(self.after, columns(shape))),
            within,
        )

    def baseline_bytes(self, baseline: BatchShape, packed: bool = False) -> FloatArray:
        """Returns the bytes of baseline batches, float64 (K,), without mask padding if their lengths need none."""
        least = self.bytes(baseline, packed)
        if self.aligned is None:
            return least
        lengths = baseline.longest[primary(baseline.longest)], target_tokens(baseline)
        spared = np.any([values % MASK_ALIGNMENT == 0 for values in lengths], axis=0)
        return np.where(spared, self.aligned.bytes(baseline, packed), least)


def _largest(rows: Sequence[Sequence[float]], values: FloatArray) -> FloatArray:
    return np.maximum((values @ np.array(rows).T).max(axis=1), 1.0)


MOST_PHASES, STARTS = 4, 12


def max_affine(known: FloatArray, size: FloatArray) -> tuple[FloatArray, float]:
    """Max-affine regression: finds phases (P, columns) with factors of at least 0, whose maximum is close to ``size``
    (K,). Returns the phases, and their largest relative error.

    Each of several starts alternates: fit each phase to its rows (non-negative least squares on relative errors), then
    give each row to its largest phase. Another phase is added only if it reduces the error by a fifth."""
    best, least = np.zeros((1, known.shape[1])), np.inf
    rng, orders = np.random.default_rng(0), [known[:, k] for k in range(1, known.shape[1])] + [size]
    for count in range(1, MOST_PHASES + 1):
        if count > 1 and (least < 1e-3 or 2 * count > len(size)):
            break
        for start in range(1 if count == 1 else STARTS):
            by = orders[start] if start < len(orders) else rng.normal(size=len(size))
            phases = _alternate(
                known, size, (np.argsort(np.argsort(by)) * count) // len(size), count
            )
            error = float(np.abs((known @ phases.T).max(axis=1) / size - 1).max())
            if error < 0.8 * least:
                best, least = phases, error
    return best, least


def _alternate(
    known: FloatArray, size: FloatArray, owner: NDArray[np.int64], count: int
) -> FloatArray:
    nnls = needed("scipy.optimize", "fitting a profile").nnls
    scale = np.where(known.max(axis=0) == 0, 1.0, known.max(axis=0))
    phases = np.zeros((count, known.shape[1]))
    for _ in range(25):
        for k in range(count):
            mine = owner == k
            if mine.any():  # divides by size, so that small batches matter as much as large ones
                phases[k] = (
                    nnls(known[mine] / scale / size[mine, None], np.ones(mine.sum()))[0] / scale
                )
        again = (known @ phases.T).argmax(axis=1)
        if (again == owner).all():
            break
        owner = again
    return phases
