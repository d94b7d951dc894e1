"""Fits the closed form's dimensionless constants to simulated workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from dynagroup.memory.formula import CONSTANTS, ClosedForm
from regressor.rows import Group, draw

__all__ = ["calibrate"]

SHAPES = 20
PULL = 0.7  # towards the start, whose constants count tensors in the models' code


def calibrate(
    groups: Sequence[Group], *, start: Mapping[str, float] = CONSTANTS, seed: int = 0, rounds: int = 12
) -> dict[str, float]:
    """Constants under which the closed form is closest to the simulations in log ratio (a robust least-squares fit)."""
    names = list(CONSTANTS)
    rng = np.random.default_rng(seed)
    cases = []
    for group in groups:
        pairs = draw(group, rng, SHAPES)
        weight = np.exp(-0.5 * (np.log(pairs.ratio) / 0.4) ** 2) + 0.02  # decisions are made near ratio 1
        cases.append((group.workload, pairs, np.log(pairs.ratio), np.sqrt(weight)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(logs), strict=True))
        parts = []
        for workload, pairs, ratio, weight in cases:
            form = ClosedForm.of(workload, constants)
            stated = np.log(form.batch_bytes(pairs.candidate)) - np.log(form.batch_bytes(pairs.baseline))
            parts.append(weight * (stated - ratio))
        pull = PULL * (logs - np.log([start[k] for k in names]))
        return np.concatenate([*parts, pull])

    first = np.log([max(start[k], 1e-3) for k in names])
    bounds = (np.log(1e-3), np.log(50.0))
    fit = least_squares(residuals, first, bounds=bounds, max_nfev=rounds)
    return {k: round(float(v), 4) for k, v in zip(names, np.exp(fit.x), strict=True)}
