"""Fits the closed form's dimensionless constants to simulated workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dynagroup.memory.formula import closed_form
from regressor.rows import Group, Pairs, draw

__all__ = ["calibrate"]

SHAPES = 20
LOWEST = np.log(1e-3)
HIGHEST = np.log(50.0)
PULL = 0.7  # towards the start, whose constants count tensors in the models' code
CONSTANTS: dict[str, float] = {
    "bias_hidden": 3.0,
    "bias_kv": 1.0,
    "bias_mask": 2.0,
    "bias_query": 2.0,
    "bias_scores": 2.0,
    "cache": 1.0,
    "cache_layer": 0.2369,
    "cast_weights": 0.8553,
    "keep_cross": 0.3,
    "keep_dropout": 5.8452,
    "keep_ffn": 1.6466,
    "keep_gate": 3.6327,
    "keep_hidden": 0.4837,
    "keep_kv": 3.4212,
    "keep_lora": 1.2466,
    "keep_query": 1.611,
    "keep_wide": 3.3868,
    "last_logits": 2.0958,
    "logits_grad": 1.5,
    "logits_run": 1.0218,
    "logits_train": 4.7154,
    "logits_wide": 1.2982,
    "mask_keep": 0.9933,
    "mask_pass": 0.5,
    "mask_run": 1.0,
    "run_expert": 1.0,
    "run_ffn": 2.5,
    "run_hidden": 3.0,
    "run_query": 1.0,
    "score_bias": 1.05,
    "score_pass": 2.0,
    "score_pass_wide": 4.0,
    "score_run": 1.5,
    "score_train": 1.0,
    "score_wide": 3.0,
    "table_grad": 2.6617,
    "weight_grad": 0.9314,
}


def calibrate(
    groups: Sequence[Group],
    *,
    start: Mapping[str, float] = CONSTANTS,
    seed: int = 0,
    rounds: int = 12,
) -> dict[str, float]:
    """Constants under which the closed form is closest to the simulations in log ratio (a robust least-squares fit)."""
    names = list(CONSTANTS)
    rng = np.random.default_rng(seed)
    cases = [_case(draw(group, rng, SHAPES)) for group in groups]
    start_logs = np.log([start[name] for name in names])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = dict(zip(names, np.exp(logs), strict=True))
        parts = [case.residuals(constants) for case in cases]
        return np.concatenate([*parts, PULL * (logs - start_logs)])

    first = np.maximum(start_logs, LOWEST)
    fit = least_squares(residuals, first, bounds=(LOWEST, HIGHEST), max_nfev=rounds)
    values = np.exp(fit.x).tolist()
    return {name: round(value, 4) for name, value in zip(names, values, strict=True)}


@dataclass(frozen=True)
class _Case:
    """Pairs of batches of one workload."""

    pairs: Pairs
    log_ratio: NDArray[np.float64]
    weight: NDArray[np.float64]

    def residuals(self, constants: Mapping[str, float]) -> NDArray[np.float64]:
        form = closed_form(self.pairs.group.workload, constants)
        stated = np.log(form.ratio(self.pairs.candidate, self.pairs.baseline))
        return self.weight * (stated - self.log_ratio)


def _case(pairs: Pairs) -> _Case:
    log_ratio = np.log(pairs.ratio)
    # Decisions are made near ratio 1.
    weight = np.exp(-0.5 * (log_ratio / 0.4) ** 2) + 0.02
    return _Case(pairs, log_ratio, np.sqrt(weight))
