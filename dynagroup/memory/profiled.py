"""A formula in bytes, fitted to a handful of simulated or measured shapes of one workload."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.run import MONOMIALS, FloatArray, Phases, columns, max_affine
from dynagroup.shapes import TOKENS, BatchShape, primary
from dynagroup.validation import warn_user

FACTORS = [MONOMIALS.index(name) for name in ("1", "n", "nL", "nL2", "nT", "nT2", "nLT")]


@dataclass(frozen=True)
class ProfiledMemory:
    """Bytes of any batch: the largest of a few phases, each a sum of ``(1, n, n*L, n*L^2)`` with non-negative factors.

    If asked about more than twice the longest row, it warns once that it guesses. Made by :meth:`fit`.
    """

    static_bytes: int
    phases: Phases
    error: float
    """Largest relative error on the rows that it was fitted to."""
    reach: Mapping[str, int]
    """The longest length that was measured in each stream."""

    @classmethod
    def fit(cls, measurements: Measurements) -> "ProfiledMemory":
        """Fit the form to these rows, at least 4 (with two streams 8). Rows that ran out of memory are left out.

        >>> from dynagroup.memory import Measurement, Workload
        >>> rows = [Measurement(n, {"tokens": L}, 1000, 64 * n * L) for n in (1, 2, 4) for L in (64, 128, 256)]
        >>> profile = ProfiledMemory.fit(Measurements(tuple(rows), Workload()))
        >>> profile.static_bytes, profile.batch_bytes(BatchShape.of(8, 512)).round().tolist()
        (1000, [262144.0])
        """
        rows = measurements.complete
        streams = sorted({name for row in rows for name in row.longest}, key=lambda name: (name != TOKENS, name))
        least = 4 if len(streams) < 2 else 8
        if len(rows) < least:
            raise ConfigError(f"ProfiledMemory.fit needs at least {least} rows of batches that ran but got {len(rows)}")
        factors = FACTORS[: 4 if len(streams) < 2 else None]
        shapes, sizes = columns(measurements.shapes())[:, factors], np.maximum(measurements.batch_bytes(), 1.0)
        found, error = max_affine(shapes, sizes)
        static = max(row.static_bytes for row in rows)
        reach = {name: max(row.longest.get(name, 0) for row in rows) for name in streams}
        return cls(int(static), Phases.of(factors, found), float(error), reach)

    def __str__(self) -> str:
        units = " and ".join(f"{most:,} {name}" for name, most in self.reach.items())
        return f"a profile of rows of up to {units}, off by {self.error:.1%} of one at most"

    @property
    def fingerprint(self) -> str:
        about = repr((self.static_bytes, sorted(self.reach), self.phases))
        return "profile-" + hashlib.sha256(about.encode()).hexdigest()[:12]

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        for name, reach in self.reach.items():
            of = primary(shape.longest) if name == primary(self.reach) else name
            asked = int(np.max(shape.longest.get(of, 0), initial=0))
            if asked > 2 * reach and not self.__dict__.get("_warned"):
                self.__dict__["_warned"] = True
                warn_user(
                    f"this profile was fitted to samples of up to {reach} {name} and is asked about {asked}: what it says there "
                    "may be several times off; measure longer shapes, or use MemoryBudget.from_model, which traces the model"
                )
        return self.phases.bytes(shape)

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        return self.batch_bytes(shape) / self.batch_bytes(baseline)
