"""Figures of merit: how close a prediction is near the decision, how often it is unsafe, how far it lets batches grow."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from regressor.rows import Group, Later, draw, largest, later_batches

__all__ = ["Judge"]

HEADROOM = 0.9
SAFETIES = (1.05, 1.1)
QUANTILES = (0.9, 0.99)
TRACED = "regressor, workload traced"
Row = dict[str, Any]
Predict = Callable[[BatchShape, BatchShape], NDArray[np.float64]]


class Judge:
    """Collects rows of held-out workloads; the same rows for every rival."""

    def __init__(self, pairs: int = 200, choices: int = 24) -> None:
        self._pairs = pairs
        self._choices = choices
        self.rows: list[Row] = []
        self.direct: list[Row] = []
        self.never: list[NDArray[np.float64]] = []

    def add(self, group: Group, regressor: MemoryRegressor) -> None:
        """Judge all rivals on one workload that ``regressor`` never saw."""
        rng = np.random.default_rng((7, zlib.crc32(group.key.encode())))
        pairs = draw(group, rng, self._pairs)
        later = later_batches(group, rng, self._choices)
        choices = _choices(group, later)
        # Growth of batches that stay at the first one's size.
        self.never.append(later.first_samples / choices.best)
        about = _about(group)
        rivals = _rivals(group, regressor)
        for name, predict in rivals.items():
            grown = _grow(predict, choices)
            used = group.bytes(grown, later.tokens, later.target)
            self.rows.append(
                {
                    **about,
                    "rival": name,
                    "predicted": predict(pairs.candidate, pairs.baseline),
                    "true": pairs.ratio,
                    "growth": grown / choices.best,
                    "choice_unsafe": used > choices.limit * (1 + 1e-9),
                }
            )
        if group.checked is not None:
            self._add_direct(group, regressor, rivals)

    def _add_direct(
        self, group: Group, regressor: MemoryRegressor, rivals: Mapping[str, Predict]
    ) -> None:
        """Every two of the shapes whose whole model was simulated, the traced workload among the rivals."""
        phases = Phases(tuple(map(tuple, group.phases)))
        traced = replace(regressor, workload=group.workload.replace(phases=phases))
        samples, tokens, target = np.array(CHECK_SHAPES).T
        true_bytes = np.array(group.checked, dtype=np.float64)
        stated = group.bytes(samples, tokens, target)
        first, second = np.array(list(permutations(range(len(samples)), 2))).T
        baseline = group.shape(samples[first], tokens[first], target[first])
        candidate = group.shape(samples[second], tokens[second], target[second])
        about = _about(group)
        for name, predict in {TRACED: traced.relative, **rivals}.items():
            self.direct.append(
                {
                    **about,
                    "rival": name,
                    "predicted": predict(candidate, baseline),
                    "true": true_bytes[second] / true_bytes[first],
                    "bytes_error": stated / true_bytes - 1,
                }
            )

    def summary(self) -> dict[str, Any]:
        """Figures overall, of models whose lengths count all that they read, by mode, by family, and of simulated shapes."""
        result: dict[str, Any] = {
            "overall": _by_rival(self.rows),
            "counted": _by_rival([row for row in self.rows if row["counted"]]),
        }
        for key in ("mode", "family"):
            result[f"by_{key}"] = {}
            for value in sorted({row[key] for row in self.rows}):
                rows = [row for row in self.rows if row[key] == value]
                result[f"by_{key}"][value] = _by_rival(rows)
        result["never_growing"] = float(np.concatenate(self.never).mean())
        result["simulated_directly"] = _by_rival(self.direct)
        errors = np.concatenate(
            [row["bytes_error"] for row in self.direct if row["rival"] == TRACED]
        )
        result["traced_bytes_error"] = {
            "median": float(np.median(np.abs(errors))),
            "lowest": float(errors.min()),
            "highest": float(errors.max()),
            "shapes": len(errors),
        }
        return result


def _about(group: Group) -> Row:
    return {
        "family": group.family,
        "key": group.key,
        "mode": group.workload.mode,
        "counted": not group.workload.fixed_tokens,
    }


def _rivals(group: Group, regressor: MemoryRegressor) -> dict[str, Predict]:
    def of(workload: Workload, **card: Any) -> Predict:
        return MemoryRegressor(regressor.trees, {**regressor.card, **card}, workload).relative

    def safer(factor: float) -> Predict:
        return lambda shape, baseline: factor * form(shape, baseline)

    known = group.workload
    of_mode = Workload(mode=known.mode)
    kind = {name: getattr(known, name) for name in (*LIKE, "max_new_tokens", "fixed_tokens")}
    form = of(known, lift=(0.0, 0.0))
    rivals = {"regressor, sizes known": of(known), "closed form, sizes known": form}
    for factor in SAFETIES:
        rivals[f"closed form, safety {factor}"] = safer(factor)
    rivals["regressor, kind known"] = of(Workload(**kind))
    rivals["regressor, mode known"] = of(of_mode)
    rivals["regressor, nothing known"] = of(Workload())
    for quantile in QUANTILES:
        rivals[f"quantile {quantile}, mode known"] = of(of_mode, quantile=quantile)
    for quantile in QUANTILES:
        rivals[f"quantile {quantile}, nothing known"] = of(Workload(), quantile=quantile)
    rivals["padded tokens"] = PaddedTokens().relative
    if rival.available():
        rivals["dynabatch 0.2.23"] = rival.relative
    return rivals


def _by_rival(rows: Sequence[Row]) -> dict[str, Any]:
    names = dict.fromkeys(row["rival"] for row in rows)
    return {name: figures([row for row in rows if row["rival"] == name]) for name in names}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """RMSE and bias of the ratio where it is 0.7-1.3; shares of accepted rows, and of choices, that are unsafe; growth."""
    predicted = np.concatenate([row["predicted"] for row in rows])
    true = np.concatenate([row["true"] for row in rows])
    near = (true > 0.7) & (true < 1.3)
    error = predicted[near] - true[near]
    accepted = predicted <= HEADROOM
    result = {
        "rmse": np.sqrt(np.mean(error**2)),
        "bias": error.mean(),
        "median_error": np.median(np.abs(error)),
        "unsafe_percent": 100 * np.mean(true[accepted] > 1.0) if accepted.any() else 0.0,
        "unsafe_percent_of_all": 100 * np.mean(accepted & (true > 1.0)),
        "rows": len(true),
    }
    if "growth" in rows[0]:
        growth = np.concatenate([row["growth"] for row in rows])
        is_unsafe = np.concatenate([row["choice_unsafe"] for row in rows])
        result["unsafe_choices_percent"] = 100 * np.mean(is_unsafe)
        result["growth"] = np.minimum(growth, 1.0).mean()
        result["growth_uncapped"] = growth.mean()
    return {name: round(float(value), 4) for name, value in result.items()}


@dataclass(frozen=True)
class _Choices:
    """Later batches of a workload, of which the samples are to be chosen."""

    group: Group
    later: Later
    limit: NDArray[np.float64]
    """What the first batch takes, in bytes."""
    best: NDArray[np.int64]
    """Most samples that truly stay within the headroom."""


def _choices(group: Group, later: Later) -> _Choices:
    limit = group.bytes(later.first_samples, later.first_tokens, later.first_target)
    most = largest(group, later.tokens, later.target, HEADROOM * limit)
    # The first batch's size always fits.
    return _Choices(group, later, limit, np.maximum(most, later.first_samples))


def _grow(predict: Predict, choices: _Choices) -> NDArray[np.int64]:
    """Returns the most samples that are predicted to fit. By bisection, as the prediction is monotone in n."""
    group = choices.group
    later = choices.later
    baseline = group.shape(later.first_samples, later.first_tokens, later.first_target)
    low = later.first_samples.copy()
    first_padded = later.first_samples * later.first_tokens
    high = np.maximum(4 * choices.best, 80 * first_padded // later.tokens)
    while (high - low > 1).any():
        middle = (low + high) // 2
        shape = group.shape(middle, later.tokens, later.target)
        fits = predict(shape, baseline) <= HEADROOM
        low = np.where(fits, middle, low)
        high = np.where(fits, high, middle)
        high = np.maximum(high, low + 1)
    return low
