"""Fits the closed form's dimensionless constants to simulated workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from dynagroup.memory.closed_form import CONSTANTS, ClosedForm
from regressor.rows import Group

__all__ = ["calibrate"]

SHAPES = 10


def calibrate(
    groups: Sequence[Group], *, start: Mapping[str, float] = CONSTANTS, seed: int = 0, rounds: int = 12
) -> dict[str, float]:
    """Constants under which the closed form is closest to the simulations in log bytes (a robust least-squares fit)."""
    names = list(CONSTANTS)
    rng = np.random.default_rng(seed)
    cases = []
    for group in groups:
        length = np.exp(rng.uniform(np.log(32), np.log(8192), SHAPES)).astype(np.int64)
        n = np.maximum(1, np.exp(rng.uniform(np.log(2048), np.log(524288), SHAPES)) / length).astype(np.int64)
        target = np.maximum(16, (length * rng.uniform(0.2, 1.0, SHAPES)).astype(np.int64))
        cases.append((group.workload, group.shape(n, length, target), np.log(group.bytes(n, length, target))))

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(logs), strict=True))
        parts = [np.log(ClosedForm.of(w, constants).batch_bytes(s)) - y for w, s, y in cases]
        centred = [0.3 * p.mean() + (p - p.mean()) for p in parts]  # ratios matter more than sizes
        pull = 0.05 * (logs - np.log([start[k] for k in names]))
        return np.concatenate([*centred, pull])

    first = np.log([max(start[k], 1e-3) for k in names])
    bounds = (np.log(1e-3), np.log(50.0))
    fit = least_squares(residuals, first, bounds=bounds, loss="soft_l1", f_scale=0.1, max_nfev=rounds)
    return {k: round(float(v), 4) for k, v in zip(names, np.exp(fit.x), strict=True)}
