"""The one feature function of the regressor: training and prediction both call it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.closed_form import COMPONENTS, ClosedForm
from dynagroup.memory.run import ELEMENT_BYTES
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TOKENS, BatchShape, target_tokens

__all__ = ["FEATURES", "MONOTONE", "Features", "features", "is_sharp"]

FloatArray = NDArray[np.float64]

# They rise when a sample is added to the candidate or lengthened; the regressor may rise with them, never fall.
CANDIDATE = ("closed_form", "samples", "padded_tokens", "squared_tokens", "target_tokens")
BASELINE = ("base_samples", "base_longest", "base_tokens", *(f"base_{name}" for name in COMPONENTS), "base_quadratic")
WORKLOAD = ("generates", "trains", "layers", "encoder_layers", "hidden", "heads", "kv_share", "ffn_share", "vocabulary_share",
            "gated", "experts", "dropout", "lm_head", "causal", "score_bias", "fixed_tokens", "parameters", "trainable_share",
            "parameter_bytes", "autocast", "eager", "checkpointing", "new_tokens")  # fmt: skip
FEATURES = (*CANDIDATE, *BASELINE, *WORKLOAD)
MONOTONE = tuple(1 if name in CANDIDATE else 0 for name in FEATURES)

# With all of these known the closed form is about this workload, not about a usual one.
ESSENTIAL = ("mode", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "intermediate_size",
             "vocabulary_size", "encoder_decoder", "dtype", "attention", "gradient_checkpointing")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Features:
    """``margin``: log ratio of the closed form, where the trees start; ``values``: (K, features), NaN for the unknown."""

    margin: FloatArray
    values: FloatArray


def is_sharp(workload: Workload) -> bool:
    """Whether enough is known of the workload to predict it rather than to bound it."""
    known = all(getattr(workload, name) is not None for name in ESSENTIAL)
    return known and (workload.mode != "generate" or workload.max_new_tokens is not None)


def features(shape: BatchShape, baseline: BatchShape, workload: Workload, form: ClosedForm) -> Features:
    """Features of K candidates against one baseline, or against K of them.

    Only counts, maxima and their products: a mean or a spread could fall when a sample is added.
    """
    size = len(shape)
    ratio = np.log(form.batch_bytes(shape)) - np.log(form.batch_bytes(baseline))
    n, length, target = _logs(shape)
    n_b, length_b, target_b = _logs(baseline)
    samples = n - n_b
    candidate = [
        ratio,
        samples,
        samples + length - length_b,
        samples + 2 * (length - length_b),
        samples + target - target_b,
    ]
    shares = form.shares(baseline)
    base = [n_b, length_b, n_b + length_b, *shares.T]
    columns = [np.broadcast_to(c, size) for c in (*candidate, *base)]
    about = np.broadcast_to(_workload_values(workload), (size, len(WORKLOAD)))
    return Features(np.broadcast_to(ratio, size), np.concatenate([np.stack(columns, axis=1), about], axis=1))


def _logs(shape: BatchShape) -> tuple[FloatArray, FloatArray, FloatArray]:
    values = (shape.num_samples, shape.longest[TOKENS], target_tokens(shape))
    n, length, target = (np.log(np.maximum(v, 1).astype(np.float64)) for v in values)
    return n, length, target


def _workload_values(w: Workload) -> FloatArray:
    def flag(value: bool | None) -> float:
        return np.nan if value is None else float(value)

    def log(value: float | None) -> float:
        return np.nan if value is None else float(np.log1p(value))

    def share(part: int | None, whole: int | None) -> float:
        return np.nan if part is None or not whole else part / whole

    known_kind = w.attention is not None
    found = {
        "generates": np.nan if w.mode is None else float(w.mode == "generate"),
        "trains": np.nan if w.mode is None else float(w.mode == "train"),
        "layers": log(w.num_layers), "encoder_layers": log(w.num_encoder_layers), "hidden": log(w.hidden_size),
        "heads": log(w.num_heads), "kv_share": share(w.num_kv_heads, w.num_heads),
        "ffn_share": share(w.intermediate_size, w.hidden_size),
        "vocabulary_share": share(w.vocabulary_size, w.hidden_size), "gated": flag(w.gated_mlp),
        "experts": log(w.experts_per_token), "dropout": flag(w.dropout), "lm_head": flag(w.lm_head),
        "causal": flag(w.causal), "score_bias": flag(w.score_bias), "fixed_tokens": log(w.fixed_tokens), "parameters": log(w.num_parameters),  # noqa: E501
        "trainable_share": np.nan if w.trainable_share is None else w.trainable_share,
        "parameter_bytes": np.nan if w.dtype is None else float(ELEMENT_BYTES[w.dtype]),
        "autocast": np.nan if w.dtype is None else float(w.autocast is not None),
        "eager": float(w.attention == "eager") if known_kind else np.nan,
        "checkpointing": flag(w.gradient_checkpointing), "new_tokens": log(w.max_new_tokens),
    }  # fmt: skip
    return np.array([found[name] for name in WORKLOAD])
