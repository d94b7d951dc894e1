"""Features of the regressor, for training and prediction alike; and its training rows, trees and card."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynagroup.memory.formula import COMPONENTS, ClosedForm
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.run import ELEMENT_BYTES, FloatArray, needed
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape, primary, target_tokens

# These grow when a sample is added to the candidate or lengthened; the prediction may grow with them, but never fall.
CANDIDATE = ("closed_form", "samples", "padded_tokens", "squared_tokens", "target_tokens")
BASELINE = ("base_samples", "base_longest", "base_tokens", *(f"base_{name}" for name in COMPONENTS), "base_quadratic")


def _workload_values(w: Workload) -> dict[str, float]:
    def known(value: Any, answer: float | None = None) -> float:
        return np.nan if value is None else float(value if answer is None else answer)

    def log(value: float | None) -> float:
        return np.nan if value is None else float(np.log1p(value))

    def share(part: int | None, whole: int | None) -> float:
        return np.nan if part is None or not whole else part / whole

    return {
        "generates": known(w.mode, w.mode == "generate"), "trains": known(w.mode, w.mode == "train"),
        "layers": log(w.num_layers), "encoder_layers": log(w.num_encoder_layers), "hidden": log(w.hidden_size),
        "heads": log(w.num_heads), "kv_share": share(w.num_kv_heads, w.num_heads),
        "ffn_share": share(w.intermediate_size, w.hidden_size),
        "vocabulary_share": share(w.vocabulary_size, w.hidden_size), "gated": known(w.gated_mlp),
        "experts": log(w.experts_per_token), "dropout": known(w.dropout), "lm_head": known(w.lm_head),
        "causal": known(w.causal), "score_bias": known(w.score_bias), "fixed_tokens": log(w.fixed_tokens),
        "parameters": log(w.num_parameters), "trainable_share": known(w.trainable_share),
        "parameter_bytes": known(w.dtype, ELEMENT_BYTES[w.dtype or "float32"]),
        "autocast": known(w.dtype, w.autocast is not None), "eager": known(w.attention, w.attention == "eager"),
        "checkpointing": known(w.gradient_checkpointing), "new_tokens": log(w.max_new_tokens),
    }  # fmt: skip


FEATURES = (*CANDIDATE, *BASELINE, *_workload_values(Workload()))
MONOTONE = tuple(1 if name in CANDIDATE else 0 for name in FEATURES)


@dataclass(frozen=True, slots=True)
class Features:
    """``margin``: log ratio of the closed form, where the trees start. ``values``: (K, features), NaN if unknown. And
    for rows to train on, the true log ratio."""

    margin: FloatArray
    values: FloatArray
    log_ratio: FloatArray | None = None


def features(shape: BatchShape, baseline: BatchShape, workload: Workload, form: ClosedForm) -> Features:
    """Features of K batches against one baseline, or K. No means or spreads, which may fall when a sample is added."""
    ratio = np.log(form.batch_bytes(shape)) - np.log(form.batch_bytes(baseline))
    n, length, target = _logs(shape)
    n_b, length_b, target_b = _logs(baseline)
    samples, longer = n - n_b, length - length_b
    candidate = [ratio, samples, samples + length - length_b, samples + 2 * longer, samples + target - target_b]
    base = [n_b, length_b, n_b + length_b, *form.shares(baseline).T]
    known = np.broadcast_arrays(ratio, *candidate, *base, *_workload_values(workload).values())
    return Features(known[0], np.stack(known[1:], axis=1))


def _logs(shape: BatchShape) -> list[FloatArray]:
    values = (shape.num_samples, shape.longest[primary(shape.longest)], target_tokens(shape))
    return [np.log(np.maximum(v, 1).astype(np.float64)) for v in values]


def pairs_of(measurements: Measurements, form: ClosedForm) -> Features:
    """Each complete row against each other one as its baseline."""
    shapes, size = measurements.shapes(), np.maximum(measurements.batch_bytes(), 1.0)
    first, second = (a.ravel() for a in np.meshgrid(np.arange(len(size)), np.arange(len(size)), indexing="ij"))
    candidate, baseline = (
        BatchShape.of(shapes.num_samples[rows], {k: v[rows] for k, v in shapes.longest.items()})
        for rows in (second, first)
    )
    ratio = np.log(size[second]) - np.log(size[first])
    return replace(features(candidate, baseline, measurements.workload, form), log_ratio=ratio)


def train_booster(
    parts: Sequence[Features], *, rounds: int, max_depth: int, quantile: float | None = None,
    learning_rate: float = 0.05, regularisation: float = 20.0, least_weight: float = 30.0,
) -> Any:  # fmt: skip
    """XGBoost's trees for what the closed form misses. They start at its log ratio, and rise with candidate features.

    ``quantile``: the share of rows that should be below the prediction, if it is an upper bound.
    """
    xgboost = needed("xgboost", "fitting a regressor")
    values = np.concatenate([p.values for p in parts]).astype(np.float32)
    margin = np.concatenate([p.margin for p in parts])
    target = np.concatenate([p.log_ratio for p in parts if p.log_ratio is not None])
    weight = np.exp(-0.5 * (target / 0.5) ** 2) + 0.05  # decisions are made near ratio 1
    data = xgboost.QuantileDMatrix(values, label=target, base_margin=margin, weight=weight, max_bin=128, nthread=1)
    settings: dict[str, Any] = {
        "tree_method": "hist", "max_depth": max_depth, "eta": learning_rate, "lambda": regularisation, "seed": 0,
        "min_child_weight": least_weight, "subsample": 0.7, "colsample_bytree": 0.7, "max_bin": 128, "nthread": 1, "base_score": 0.0,  # noqa: E501
        "monotone_constraints": MONOTONE, "objective": "reg:squarederror",
    }  # fmt: skip
    if quantile is not None:
        settings |= {"objective": "reg:quantileerror", "quantile_alpha": quantile}
    return xgboost.train(settings, data, num_boost_round=rounds)


def describe(parts: Sequence[Features], constants: Mapping[str, float]) -> dict[str, Any]:
    """The card of a regressor trained on these rows: data, and ranges of the features."""
    xgboost = needed("xgboost", "fitting a regressor")
    values = np.concatenate([p.values for p in parts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a feature that no row knows has no range
        lowest, highest = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    ends = {"lowest": np.nan_to_num(lowest, nan=-1e30), "highest": np.nan_to_num(highest, nan=1e30)}
    digest = hashlib.sha256(np.ascontiguousarray(np.nan_to_num(values, nan=-1.0).round(6)).tobytes()).hexdigest()
    ranges = {name: [round(float(v), 9) for v in end] for name, end in ends.items()}  # last bits differ between CPUs
    versions = {"xgboost": xgboost.__version__, "numpy": np.__version__}
    about = {"ranges": ranges, "constants": dict(constants), "rows": len(values), "data_hash": digest}
    return {"features": list(FEATURES), **about, "versions": versions}
