"""Rows and trees of the regressor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.closed_form import ClosedForm
from dynagroup.memory.extras import needed
from dynagroup.memory.learned.features import MONOTONE, Features, features
from dynagroup.memory.measurements import Measurements
from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    import xgboost

__all__ = ["MIN_ROWS", "TrainingRows", "pairs_of", "train_booster"]

MIN_ROWS = 8


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """K rows: features, and the log of the true ratio."""

    features: Features
    log_ratio: NDArray[np.float64]


def pairs_of(measurements: Measurements, form: ClosedForm) -> TrainingRows:
    """Every complete row against every other one as its baseline."""
    shapes, size = measurements.shapes(), measurements.batch_bytes()
    first, second = (a.ravel() for a in np.meshgrid(np.arange(len(size)), np.arange(len(size)), indexing="ij"))
    candidate, baseline = _take(shapes, second), _take(shapes, first)
    ratio = np.log(np.maximum(size[second], 1.0)) - np.log(np.maximum(size[first], 1.0))
    return TrainingRows(features(candidate, baseline, measurements.workload, form), ratio)


def _take(shape: BatchShape, rows: NDArray[Any]) -> BatchShape:
    return BatchShape.of(shape.num_samples[rows], {k: v[rows] for k, v in shape.longest.items()})


def train_booster(
    parts: Sequence[TrainingRows],
    *,
    rounds: int,
    max_depth: int,
    seed: int = 0,
    quantile: float | None = None,
    learning_rate: float = 0.05,
    regularisation: float = 20.0,
    least_weight: float = 30.0,
) -> xgboost.Booster:
    """Trees for what the closed form misses: they start from its log ratio, and rise with every candidate feature.

    ``quantile``: bound instead of predict; the share of rows that should lie below the prediction.
    """
    xgboost = needed("xgboost", "fitting a regressor")
    values = np.concatenate([p.features.values for p in parts]).astype(np.float32)
    margin = np.concatenate([p.features.margin for p in parts])
    target = np.concatenate([p.log_ratio for p in parts])
    weight = np.exp(-0.5 * (target / 0.5) ** 2) + 0.05  # decisions are made near ratio 1
    data = xgboost.QuantileDMatrix(values, label=target, base_margin=margin, weight=weight, max_bin=128, nthread=1)
    settings: dict[str, Any] = {
        "tree_method": "hist", "max_depth": max_depth, "eta": learning_rate, "lambda": regularisation, "seed": seed,
        "min_child_weight": least_weight, "subsample": 0.7, "colsample_bytree": 0.7, "max_bin": 128, "nthread": 1, "base_score": 0.0,  # noqa: E501
        "monotone_constraints": MONOTONE, "objective": "reg:squarederror",
    }  # fmt: skip
    if quantile is not None:
        settings |= {"objective": "reg:quantileerror", "quantile_alpha": quantile}
    return xgboost.train(settings, data, num_boost_round=rounds)
