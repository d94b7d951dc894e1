"""Fits a formula to the memory of a few batches, and predicts the bytes of any other batch with it."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import MONOMIALS, FloatArray, Phases, columns, needed
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape, primary
from dynagroup.validation import warn_user

# Columns of the monomials that a profile has factors for.
ONE_STREAM = [MONOMIALS.index(name) for name in ("1", "n", "nL", "nL2")]
TWO_STREAMS = [*ONE_STREAM, *(MONOMIALS.index(name) for name in ("nT", "nT2", "nLT"))]
MIN_ROWS = {1: 4, 2: 8}  # by the number of streams
MAX_PHASES = 4
NUM_STARTS = 12
NUM_ROUNDS = 25
GAIN = 0.8  # another phase must reduce the error at least to this share
EXACT = 1e-3  # a relative error that no further phase need reduce


@dataclass(frozen=True)
class ProfiledMemory:
    """Predicts the bytes of any batch with a formula that :meth:`fit` has fitted to measured or simulated batches.

    The formula is the largest of a few phases, each a sum of ``(1, n, n*L, n*L^2)`` with factors of 0 or more. A packed
    batch counts as one sample with all its tokens. In the padded layout, a warning is given once if a sample is more than
    twice as long as the longest one in the fit."""

    static_bytes: int
    phases: Phases
    error: float
    """Largest relative error of the formula on the rows that it was fitted to."""
    reach: Mapping[str, int]
    """Length of the longest fitted sample, by stream."""
    workload: Workload = field(default=Workload(), repr=False)
    """Its layout alone."""

    @classmethod
    def fit(cls, measurements: Measurements) -> "ProfiledMemory":
        """Fits the formula to at least 4 rows (8 with two streams); rows that ran out of memory do not count.

        >>> from dynagroup.memory import Measurement, Workload
        >>> rows = [Measurement(n, {"tokens": L}, 1000, 64 * n * L) for n in (1, 2, 4) for L in (64, 128, 256)]
        >>> profile = ProfiledMemory.fit(Measurements(tuple(rows), Workload()))
        >>> profile.static_bytes, profile.batch_bytes(BatchShape.of(8, 512)).round().tolist()
        (1000, [262144.0])
        """
        rows = measurements.complete
        shapes = measurements.shapes()
        num_streams = min(len(shapes.longest), 2)
        if len(rows) < MIN_ROWS[num_streams]:
            raise ConfigError(
                f"ProfiledMemory.fit needs at least {MIN_ROWS[num_streams]} rows that did not run out of "
                f"memory, but got {len(rows)}; measure more shapes"
            )
        used = ONE_STREAM if num_streams == 1 else TWO_STREAMS
        workload = Workload(layout=measurements.workload.layout)
        is_packed = workload.layout == "packed"
        known = columns(shapes, is_packed)[:, used]
        sizes = np.maximum(measurements.batch_bytes(), 1.0)
        phases, error = max_affine(known, sizes)
        static_bytes = max(row.static_bytes for row in rows)
        reach = {name: int(lengths.max()) for name, lengths in shapes.longest.items()}
        return cls(int(static_bytes), Phases.of(used, phases), error, reach, workload)

    def __str__(self) -> str:
        reach = " and ".join(f"{length:,} {name}" for name, length in self.reach.items())
        return f"a profile of rows of up to {reach}, wrong by at most {self.error:.1%} on each"

    @property
    def fingerprint(self) -> str:
        text = repr((self.static_bytes, sorted(self.reach), self.phases, self.workload.layout))
        return "profile-" + hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def _is_packed(self) -> bool:
        return self.workload.layout == "packed"

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        self._warn_beyond_reach(shape)
        return self.phases.bytes(shape, self._is_packed)

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        return self.batch_bytes(shape) / self.batch_bytes(baseline)

    def _warn_beyond_reach(self, shape: BatchShape) -> None:
        if self._is_packed or "_warned" in self.__dict__:
            return
        for name, reach in self.reach.items():
            stream = primary(shape.longest) if name == primary(self.reach) else name
            longest = int(np.max(shape.longest.get(stream, 0), initial=0))
            if longest > 2 * reach:
                self.__dict__["_warned"] = True
                warn_user(
                    f"the profile was fitted to samples of up to {reach} {name}, but a batch has one of "
                    f"{longest}; predictions may be far too low: measure longer shapes, or use from_model"
                )


def max_affine(known: FloatArray, sizes: FloatArray) -> tuple[FloatArray, float]:
    """Max-affine regression: finds phases whose maximum is close to ``sizes``, float64 (K,).

    ``known`` holds the monomials of the K rows. Returns the factors of each phase, at least 0, float64
    (P, columns), and their largest relative error. The method alternates from several starts (Magnani and
    Boyd, 2009): it fits each phase to its rows, and then gives each row to its largest phase."""
    best = np.zeros((1, known.shape[1]))
    least_error = np.inf
    rng = np.random.default_rng(0)
    for num_phases in range(1, MAX_PHASES + 1):
        if num_phases > 1 and (least_error < EXACT or 2 * num_phases > len(sizes)):
            break
        for owners in _starts(known, sizes, num_phases, rng):
            phases = _alternate(known, sizes, owners, num_phases)
            error = float(np.abs((known @ phases.T).max(axis=1) / sizes - 1).max())
            if error < GAIN * least_error:
                best = phases
                least_error = error
    return best, least_error


def _starts(
    known: FloatArray, sizes: FloatArray, num_phases: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yields, for each start, the phase of every row: rows are sorted by a monomial, by size, or at random, and divided."""
    if num_phases == 1:
        yield np.zeros(len(sizes), np.int64)
        return
    orders = [*known.T[1:], sizes]
    while len(orders) < NUM_STARTS:
        orders.append(rng.normal(size=len(sizes)))
    for order in orders:
        rank = np.argsort(np.argsort(order))
        yield rank * num_phases // len(sizes)


def _alternate(
    known: FloatArray, sizes: FloatArray, owners: NDArray[np.int64], num_phases: int
) -> FloatArray:
    """Returns the phases at which fitting and giving rows to their largest phase stop changing."""
    nnls = needed("scipy.optimize", "fitting a profile").nnls
    # NNLS solves for factors of numbers from 0 to 1: of monomials as shares of their largest value.
    largest = np.maximum(known.max(axis=0), 1.0)
    # Each row is divided by its size, so that small batches matter as much as large ones.
    shares = known / largest / sizes[:, None]
    phases = np.zeros((num_phases, known.shape[1]))
    for _ in range(NUM_ROUNDS):
        for phase in range(num_phases):
            rows = owners == phase
            if rows.any():
                factors_of_shares, _ = nnls(shares[rows], np.ones(rows.sum()))
                phases[phase] = factors_of_shares / largest
        largest_phases = (known @ phases.T).argmax(axis=1)
        if (largest_phases == owners).all():
            break
        owners = largest_phases
    return phases
