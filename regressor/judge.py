"""Figures of merit: how close a prediction is near the decision, how often it is unsafe, how far it lets batches grow."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.closed_form import ClosedForm
from dynagroup.memory.model import PaddedTokens
from dynagroup.memory.regressor import MemoryRegressor
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape
from regressor import rival
from regressor.rows import Group, draw, largest

__all__ = ["Judge"]

HEADROOM = 0.9
SAFETIES = (1.05, 1.1, 1.2)
QUANTILES = (0.8,)
Predict = Callable[[BatchShape, BatchShape], NDArray[np.float64]]


class Judge:
    """Collects rows of held-out workloads; the same rows for every rival."""

    def __init__(self, pairs: int = 200, choices: int = 24) -> None:
        self._pairs, self._choices = pairs, choices
        self.rows: list[dict[str, Any]] = []

    def add(self, group: Group, regressor: MemoryRegressor) -> None:
        """Judge all rivals on one workload that ``regressor`` never saw."""
        known = MemoryRegressor(regressor.boosters, regressor.card, group.workload)
        form = ClosedForm.of(group.workload, regressor.card["constants"])
        rivals: dict[str, Predict] = {
            "regressor, workload known": known.relative,
            "closed form, workload known": lambda s, b: form.batch_bytes(s) / form.batch_bytes(b),
            "regressor, workload unknown": MemoryRegressor(regressor.boosters, regressor.card, Workload()).relative,
            "regressor, only mode known": MemoryRegressor(
                regressor.boosters, regressor.card, Workload(mode=group.workload.mode)
            ).relative,
            "padded tokens": PaddedTokens().relative,
        }
        if rival.available():
            rivals["dynabatch 0.2.23"] = rival.relative
        seed = np.random.default_rng((7, zlib.crc32(group.key.encode())))
        pairs = draw(group, seed, self._pairs)
        cases = _choices(group, seed, self._choices)
        for safety in SAFETIES:
            card = {**regressor.card, "bound": 0.0, "safety": safety}
            rivals[f"closed form, safety {safety}"] = MemoryRegressor(regressor.boosters, card, group.workload).relative
        for quantile in QUANTILES:
            card = {**regressor.card, "quantile": quantile}
            for name, workload in (("unknown", Workload()), ("mode", Workload(mode=group.workload.mode))):
                rivals[f"quantile {quantile}, {name}"] = MemoryRegressor(regressor.boosters, card, workload).relative
        for name, predict in rivals.items():
            predicted = predict(pairs.candidate, pairs.baseline)
            chosen, unsafe = _grow(predict, *cases)
            self.rows.append({
                "rival": name, "family": group.family, "key": group.key, "mode": group.workload.mode,
                "predicted": predicted, "true": pairs.ratio, "growth": chosen, "choice_unsafe": unsafe,
            })  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Figures overall, by mode, and by family."""
        names = list(dict.fromkeys(r["rival"] for r in self.rows))
        by = lambda key, value: [r for r in self.rows if r[key] == value]  # noqa: E731
        result: dict[str, Any] = {"overall": {n: figures(by("rival", n)) for n in names}}
        for key in ("mode", "family"):
            result[f"by_{key}"] = {
                value: {n: figures([r for r in by(key, value) if r["rival"] == n]) for n in names}
                for value in sorted({r[key] for r in self.rows})
            }
        return result


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """RMSE and bias of the ratio where it is 0.7-1.3; shares of accepted rows, and of choices, that are unsafe; growth."""
    predicted, true = np.concatenate([r["predicted"] for r in rows]), np.concatenate([r["true"] for r in rows])
    near = (true > 0.7) & (true < 1.3)
    error = predicted[near] - true[near]
    accepted = predicted <= HEADROOM
    growth = np.concatenate([r["growth"] for r in rows])
    found = {
        "rmse": np.sqrt(np.mean(error**2)), "bias": error.mean(), "median_error": np.median(np.abs(error)),
        "unsafe_percent": 100 * np.mean(true[accepted] > 1.0) if accepted.any() else 0.0,
        "unsafe_choices_percent": 100 * np.mean(np.concatenate([r["choice_unsafe"] for r in rows])),
        "growth": np.minimum(growth, 1.0).mean(), "growth_uncapped": growth.mean(), "rows": len(true),
    }  # fmt: skip
    return {k: round(float(v), 4) for k, v in found.items()}


def _choices(group: Group, rng: np.random.Generator, size: int) -> tuple[Any, ...]:
    """Baselines and lengths of later batches, with the most samples that truly stay within the headroom, and in memory."""
    total = np.exp(rng.uniform(np.log(4096), np.log(524288), size))
    n_b = np.maximum(1, np.exp(rng.uniform(0, np.log(256), size))).astype(np.int64)
    len_b = np.clip(total / n_b, 32, 8192).astype(np.int64)
    len_c = np.maximum(16, len_b * np.exp(rng.uniform(np.log(1 / 16), 0, size))).astype(np.int64)
    share = rng.uniform(0.2, 1.0, size)
    tgt_b = np.maximum(8, len_b * share).astype(np.int64)
    tgt_c = np.maximum(8, len_c * share).astype(np.int64)
    limit = group.bytes(n_b, len_b, tgt_b)
    best = np.maximum(largest(group, len_c, tgt_c, HEADROOM * limit), n_b)  # the first batch's size always fits
    return group, n_b, len_b, tgt_b, len_c, tgt_c, best, limit


def _grow(
    predict: Predict, group: Group, n_b: Any, len_b: Any, tgt_b: Any, len_c: Any, tgt_c: Any, best: Any, limit: Any
) -> tuple[Any, Any]:
    """By bisection, as the prediction is monotone in n."""
    low, high = n_b.copy(), np.maximum(4 * best, 80 * n_b * len_b // len_c)
    baseline = group.shape(n_b, len_b, tgt_b)
    while (high - low > 1).any():
        middle = (low + high) // 2
        fits = predict(group.shape(middle, len_c, tgt_c), baseline) <= HEADROOM
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        high = np.maximum(high, low + 1)
    return low / best, group.bytes(low, len_c, tgt_c) > limit * (1 + 1e-9)
