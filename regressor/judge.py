"""Figures of merit: how close a prediction is near the decision, how often it is unsafe, how far it lets batches grow."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.phases import Phases
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.memory.regressor import LIKE, MemoryRegressor
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape
from regressor import rival
from regressor.generate import CHECK_SHAPES
from regressor.rows import Group, draw, largest, later_batches

__all__ = ["Judge"]

HEADROOM = 0.9
SAFETIES = (1.05, 1.1)
QUANTILES = (0.9, 0.99)
Predict = Callable[[BatchShape, BatchShape], NDArray[np.float64]]


class Judge:
    """Collects rows of held-out workloads; the same rows for every rival."""

    def __init__(self, pairs: int = 200, choices: int = 24) -> None:
        self._pairs, self._choices = pairs, choices
        self.rows: list[dict[str, Any]] = []
        self.direct: list[dict[str, Any]] = []
        self.never: list[NDArray[np.float64]] = []

    def add(self, group: Group, regressor: MemoryRegressor) -> None:
        """Judge all rivals on one workload that ``regressor`` never saw."""
        rivals = _rivals(group, regressor)
        seed = np.random.default_rng((7, zlib.crc32(group.key.encode())))
        pairs = draw(group, seed, self._pairs)
        cases = _choices(group, seed, self._choices)
        self.never.append(
            cases[1] / cases[6]
        )  # growth of batches that stay at the first one's size
        about = {
            "family": group.family,
            "key": group.key,
            "mode": group.workload.mode,
            "counted": not group.workload.fixed_tokens,
        }
        for name, predict in rivals.items():
            predicted = predict(pairs.candidate, pairs.baseline)
            chosen, unsafe = _grow(predict, *cases)
            self.rows.append(
                {
                    **about,
                    "rival": name,
                    "predicted": predicted,
                    "true": pairs.ratio,
                    "growth": chosen,
                    "choice_unsafe": unsafe,
                }
            )
        if group.checked is not None:
            self._add_direct(group, regressor, about)

    def _add_direct(self, group: Group, regressor: MemoryRegressor, about: dict[str, Any]) -> None:
        """Every two of the shapes whose whole model was simulated, the traced workload among the rivals."""
        traced = group.workload.replace(phases=Phases(tuple(map(tuple, group.phases))))
        rivals = {
            "regressor, workload traced": MemoryRegressor(
                regressor.trees, regressor.card, traced
            ).relative,
            **_rivals(group, regressor),
        }
        n, length, target = np.array(CHECK_SHAPES).T
        first, second = np.array(list(permutations(range(len(n)), 2))).T
        size = np.array(group.checked, dtype=np.float64)
        stated = group.bytes(n, length, target) / size - 1
        baseline, candidate = (
            group.shape(n[rows], length[rows], target[rows]) for rows in (first, second)
        )
        for name, predict in rivals.items():
            self.direct.append(
                {
                    **about,
                    "rival": name,
                    "predicted": predict(candidate, baseline),
                    "true": size[second] / size[first],
                    "bytes_error": stated,
                }
            )

    def summary(self) -> dict[str, Any]:
        """Figures overall, of models whose lengths count all that they read, by mode, by family, and of simulated shapes."""
        result: dict[str, Any] = {
            "overall": _by_rival(self.rows),
            "counted": _by_rival([r for r in self.rows if r["counted"]]),
        }
        for key in ("mode", "family"):
            values = sorted({r[key] for r in self.rows})
            result[f"by_{key}"] = {
                value: _by_rival([r for r in self.rows if r[key] == value]) for value in values
            }
        errors = np.concatenate(
            [r["bytes_error"] for r in self.direct if r["rival"] == "regressor, workload traced"]
        )
        result["never_growing"] = float(np.concatenate(self.never).mean())
        result["simulated_directly"] = _by_rival(self.direct)
        result["traced_bytes_error"] = {
            "median": float(np.median(np.abs(errors))),
            "lowest": float(errors.min()),
            "highest": float(errors.max()),
            "shapes": len(errors),
        }
        return result


def _rivals(group: Group, regressor: MemoryRegressor) -> dict[str, Predict]:
    def told(workload: Workload, **card: Any) -> Predict:
        return MemoryRegressor(regressor.trees, {**regressor.card, **card}, workload).relative

    known, mode = group.workload, Workload(mode=group.workload.mode)
    kind = Workload(
        **{name: getattr(known, name) for name in (*LIKE, "max_new_tokens", "fixed_tokens")}
    )
    form = told(known, lift=(0.0, 0.0))
    rivals: dict[str, Predict] = {
        "regressor, sizes known": told(known),
        "closed form, sizes known": form,
        **{f"closed form, safety {s}": lambda *a, s=s: s * form(*a) for s in SAFETIES},
        "regressor, kind known": told(kind),
        "regressor, mode known": told(mode),
        "regressor, nothing known": told(Workload()),
        **{f"quantile {q}, mode known": told(mode, quantile=q) for q in QUANTILES},
        **{f"quantile {q}, nothing known": told(Workload(), quantile=q) for q in QUANTILES},
        "padded tokens": PaddedTokens().relative,
    }
    return {**rivals, "dynabatch 0.2.23": rival.relative} if rival.available() else rivals


def _by_rival(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(r["rival"] for r in rows)
    return {name: figures([r for r in rows if r["rival"] == name]) for name in names}


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """RMSE and bias of the ratio where it is 0.7-1.3; shares of accepted rows, and of choices, that are unsafe; growth."""
    predicted, true = (
        np.concatenate([r["predicted"] for r in rows]),
        np.concatenate([r["true"] for r in rows]),
    )
    near = (true > 0.7) & (true < 1.3)
    error = predicted[near] - true[near]
    accepted = predicted <= HEADROOM
    found = {
        "rmse": np.sqrt(np.mean(error**2)),
        "bias": error.mean(),
        "median_error": np.median(np.abs(error)),
        "unsafe_percent": 100 * np.mean(true[accepted] > 1.0) if accepted.any() else 0.0,
        "unsafe_percent_of_all": 100 * np.mean(accepted & (true > 1.0)),
        "rows": len(true),
    }
    if "growth" in rows[0]:
        growth = np.concatenate([r["growth"] for r in rows])
        found["unsafe_choices_percent"] = 100 * np.mean(
            np.concatenate([r["choice_unsafe"] for r in rows])
        )
        found |= {"growth": np.minimum(growth, 1.0).mean(), "growth_uncapped": growth.mean()}
    return {k: round(float(v), 4) for k, v in found.items()}


def _choices(group: Group, rng: np.random.Generator, size: int) -> tuple[Any, ...]:
    """Later batches, with the most samples that truly stay within the headroom, and what the first one takes."""
    n_b, len_b, tgt_b, len_c, tgt_c = later_batches(group, rng, size)
    limit = group.bytes(n_b, len_b, tgt_b)
    best = np.maximum(
        largest(group, len_c, tgt_c, HEADROOM * limit), n_b
    )  # the first batch's size always fits
    return group, n_b, len_b, tgt_b, len_c, tgt_c, best, limit


def _grow(
    predict: Predict,
    group: Group,
    n_b: Any,
    len_b: Any,
    tgt_b: Any,
    len_c: Any,
    tgt_c: Any,
    best: Any,
    limit: Any,
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
