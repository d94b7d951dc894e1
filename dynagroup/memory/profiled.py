"""A formula in bytes, fitted to a handful of simulated or measured shapes of one workload."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.run import MONOMIALS, FloatArray, columns, max_affine
from dynagroup.shapes import TOKENS, BatchShape

FACTORS = [MONOMIALS.index(name) for name in ("1", "n", "nL", "nL2", "nT", "nT2", "nLT")]


@dataclass(frozen=True)
class ProfiledMemory:
    """Bytes of any batch: the largest of a few phases, each a sum of ``(1, n, n*L, n*L^2)`` with non-negative factors.

    Beyond what was measured it is a guess: asked about more than twice the longest row, it warns once. Make it with
    :meth:`fit`.

    >>> from dynagroup.memory.measurements import Measurement
    >>> from dynagroup.memory.workload import Workload
    >>> rows = [Measurement(n, {"tokens": L}, 1000, 64 * n * L) for n in (1, 2, 4) for L in (64, 128, 256)]
    >>> profile = ProfiledMemory.fit(Measurements(tuple(rows), Workload()))
    >>> profile.static_bytes, profile.batch_bytes(BatchShape.of(8, 512)).round().tolist()
    (1000, [262144.0])
    """

    static_bytes: int
    streams: tuple[str, ...]
    phases: tuple[tuple[float, ...], ...]
    """Bytes per (1, n, and for every stream n*L and n*L^2, and for two streams n*L*T), one tuple a phase."""
    error: float
    """Largest relative difference to the rows it was fitted to."""
    reach: tuple[int, ...] = ()
    """The longest that was measured, of each stream; empty: not known."""

    @classmethod
    def fit(cls, measurements: Measurements) -> ProfiledMemory:
        """The form closest to these rows, at least 4 (of two streams 8); those that ran out of memory are left out."""
        rows = measurements.complete
        streams = tuple(sorted({name for row in rows for name in row.longest}, key=lambda name: (name != TOKENS, name)))
        least = 4 if len(streams) < 2 else 8
        if len(rows) < least:
            raise ConfigError(
                f"ProfiledMemory.fit needs at least {least} rows of batches that ran, but got {len(rows)}"
            )
        known = columns(measurements.shapes())[:, FACTORS[: 4 if len(streams) < 2 else None]]
        phases, error = max_affine(known, np.maximum(measurements.batch_bytes(), 1.0))
        static = max(row.static_bytes for row in rows)
        reach = tuple(max(row.longest.get(name, 0) for row in rows) for name in streams)
        return cls(int(static), streams, tuple(tuple(map(float, p)) for p in phases), float(error), reach)

    def __str__(self) -> str:
        units = " and ".join(f"{most:,} {name}" for most, name in zip(self.reach, self.streams, strict=False))
        return f"a profile of rows{f' of up to {units}' if units else ''}, off by {self.error:.1%} of one at most"

    @property
    def rows(self) -> tuple[tuple[float, ...], ...]:
        """The phases with bytes for every one of ``MONOMIALS``."""
        rows = np.zeros((len(self.phases), len(MONOMIALS)))
        rows[:, FACTORS[: len(self.phases[0])]] = self.phases
        return tuple(map(tuple, rows.tolist()))

    @property
    def fingerprint(self) -> str:
        about = repr((self.static_bytes, self.streams, self.phases))
        return "profile-" + hashlib.sha256(about.encode()).hexdigest()[:12]

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        self._warn_beyond(shape)
        return (columns(shape)[:, FACTORS[: len(self.phases[0])]] @ np.array(self.phases).T).max(axis=1)

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        return self.batch_bytes(shape) / np.maximum(self.batch_bytes(baseline), 1.0)

    def _warn_beyond(self, shape: BatchShape) -> None:
        for name, reach in zip(self.streams, self.reach, strict=False):
            asked = int(np.max(shape.longest.get(name, 0), initial=0))
            if asked > 2 * reach and not self.__dict__.get("_warned"):
                self.__dict__["_warned"] = True
                warnings.warn(
                    f"this profile was fitted to samples of up to {reach} {name} and is asked about {asked}: what it says there "
                    "may be several times off; measure longer shapes, or use MemoryBudget.from_model, which traces the model",
                    stacklevel=3,
                )
