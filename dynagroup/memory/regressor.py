"""Predicts the memory of a batch relative to another batch, with a formula that XGBoost's trees correct."""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError, StateError
from dynagroup.memory.formula import Form, closed_form, traced_form
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import (
    ELEMENT_BYTES,
    MONOMIALS,
    Dtype,
    FloatArray,
    MakeInputs,
    Mode,
    Phases,
    columns,
    needed,
)
from dynagroup.memory.profile import ProfiledMemory
from dynagroup.memory.workload import Workload, assumed
from dynagroup.shapes import BatchShape, primary, target_tokens
from dynagroup.state import seal_of
from dynagroup.validation import explained, warn_user

PRETRAINED = Path(__file__).parent / "artifacts" / "pretrained.ubj"
FORMAT = 2
MIN_ROWS = 8
MAX_LIFT = 5.0  # largest correction of a log ratio by the trees; real ones are far smaller
SLACK = 1e-6  # a feature may be outside its training range by so much, because ranges are rounded
# If all of these fields are known, the formula describes the user's own model and not an average one.
ESSENTIAL = (
    "mode",
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "intermediate_size",
    "vocabulary_size",
    "encoder_decoder",
    "dtype",
    "attention",
    "gradient_checkpointing",
)
# Features that grow when the candidate batch gets another or a longer sample; predictions never fall when these grow.
CANDIDATE = ("closed_form", "samples", "padded_tokens", "squared_tokens", "target_tokens")
BASELINE = ("base_samples", "base_longest", "base_tokens", "base_constant", "base_quadratic")
OF_WORKLOAD = (
    "generates",
    "trains",
    "layers",
    "encoder_layers",
    "hidden",
    "heads",
    "kv_share",
    "ffn_share",
    "vocabulary_share",
    "gated",
    "experts",
    "dropout",
    "lm_head",
    "causal",
    "score_bias",
    "fixed_tokens",
    "parameters",
    "trainable_share",
    "parameter_bytes",
    "autocast",
    "eager",
    "checkpointing",
    "new_tokens",
)
# The field of a workload of which a feature is the logarithm, or the value, or the two of which it is the ratio.
LOGARITHMS = {
    "layers": "num_layers",
    "encoder_layers": "num_encoder_layers",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "experts": "experts_per_token",
    "fixed_tokens": "fixed_tokens",
    "parameters": "num_parameters",
    "new_tokens": "max_new_tokens",
}
VALUES = {
    "gated": "gated_mlp",
    "dropout": "dropout",
    "lm_head": "lm_head",
    "causal": "causal",
    "score_bias": "score_bias",
    "trainable_share": "trainable_share",
    "checkpointing": "gradient_checkpointing",
}
RATIOS = {
    "kv_share": ("num_kv_heads", "num_heads"),
    "ffn_share": ("intermediate_size", "hidden_size"),
    "vocabulary_share": ("vocabulary_size", "hidden_size"),
}
FEATURES = (*CANDIDATE, *BASELINE, *OF_WORKLOAD)
MONOTONE = tuple(1 if name in CANDIDATE else 0 for name in FEATURES)

_traced_models: "WeakKeyDictionary[Any, dict[Any, MemoryRegressor]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Features:
    """Input of the trees for K pairs of batches. ``margin``: float64 (K,), the formula's log ratio, which the trees
    correct. ``values``: float64 (K, features), NaN if unknown. ``log_ratio``: float64 (K,), the truth, for training."""

    margin: FloatArray
    values: FloatArray
    log_ratio: FloatArray | None = None


def features(shape: BatchShape, baseline: BatchShape, workload: Workload, form: Form) -> Features:
    """Returns the trees' input for K batches and their baselines; without means, which an added sample may lower."""
    margin = np.log(form.ratio(shape, baseline))
    samples, longest, target = _log_sizes(shape)
    base_samples, base_longest, base_target = _log_sizes(baseline)
    more_samples = samples - base_samples
    longer = longest - base_longest
    constant, quadratic = form.shares(baseline)
    columns = {
        "closed_form": margin,
        "samples": more_samples,
        "padded_tokens": more_samples + longer,
        "squared_tokens": more_samples + 2 * longer,
        "target_tokens": more_samples + target - base_target,
        "base_samples": base_samples,
        "base_longest": base_longest,
        "base_tokens": base_samples + base_longest,
        "base_constant": constant,
        "base_quadratic": quadratic,
        **_workload_values(workload),
    }
    values = np.broadcast_arrays(*(columns[name] for name in FEATURES))
    return Features(margin, np.stack(values, axis=1))


def _log_sizes(shape: BatchShape) -> list[FloatArray]:
    """Returns the logarithms of the samples, longest lengths and target tokens of K batches."""
    sizes = (shape.num_samples, shape.longest[primary(shape.longest)], target_tokens(shape))
    return [np.log(np.maximum(size, 1).astype(np.float64)) for size in sizes]


def _workload_values(w: Workload) -> dict[str, float]:
    """Returns the workload's features by name; NaN means unknown."""
    known = w.known()
    values: dict[str, float] = dict.fromkeys(OF_WORKLOAD, math.nan)
    for name, field_name in LOGARITHMS.items():
        if field_name in known:
            values[name] = math.log1p(known[field_name])
    for name, field_name in VALUES.items():
        if field_name in known:
            values[name] = float(known[field_name])
    for name, (part, whole) in RATIOS.items():
        if part in known and known.get(whole):
            values[name] = known[part] / known[whole]
    if w.mode is not None:
        values["generates"] = float(w.mode == "generate")
        values["trains"] = float(w.mode == "train")
    if w.dtype is not None:
        values["parameter_bytes"] = ELEMENT_BYTES[w.dtype]
        values["autocast"] = float(w.autocast is not None)
    if w.attention is not None:
        values["eager"] = float(w.attention == "eager")
    return values


@dataclass(frozen=True)
class MemoryRegressor:
    """Predicts the memory of a batch relative to a baseline batch. Make one with :meth:`pretrained` or :meth:`fit`.

    If the workload was traced (:meth:`Workload.from_model`), its trace predicts. If only its sizes are known, a formula
    predicts and trees correct it; outside the range of the training data the result is at least the ratio of padded
    tokens. If sizes are unknown, the result is a high quantile of what similar traced models need.

    >>> regressor = MemoryRegressor.pretrained()
    >>> half, same = regressor.relative(BatchShape.of([4, 8], 512), BatchShape.of(8, 512))
    >>> bool(half < same)
    True
    """

    trees: bytes = field(repr=False)  # XGBoost's UBJSON; read when trees are first used
    card: Mapping[str, Any] = field(repr=False)
    """Facts about the training: features and their ranges, constants, metrics, versions, hash of the data. ``rows`` are
    pairs of batch shapes, the memory of one over that of the other."""
    workload: Workload = Workload()

    @classmethod
    def pretrained(cls, workload: Workload | None = None) -> "MemoryRegressor":
        """Returns dynagroup's own regressor for ``workload``; None: unknown, so predictions are cautious."""
        regressor = _pretrained()
        return regressor if workload is None else replace(regressor, workload=workload)

    @classmethod
    def of_model(
        cls,
        model: Any,
        mode: Mode,
        *,
        program: Any = None,
        inputs: MakeInputs | None = None,
        autocast: Dtype | None = None,
        gradient_checkpointing: bool | None = None,
        max_new_tokens: int | None = None,
    ) -> "MemoryRegressor":
        """Returns the pretrained regressor for a torch model. Each model is traced once, which takes seconds; without a
        config, only the mode is known.

        Args:
            program: a module that runs the model, and is traced in its place, with these ``inputs`` (see
                :meth:`Workload.from_model`). None: the model itself.
            autocast, gradient_checkpointing, max_new_tokens: as of :class:`Workload`; None: the model's.
        """
        regressors = _traced_models.setdefault(model, {})
        key = (mode, autocast, gradient_checkpointing, max_new_tokens, type(program), inputs)
        if key not in regressors:
            workload = Workload(mode=mode)
            if getattr(model, "config", None) is not None:
                workload = Workload.from_model(
                    model if program is None else program,
                    mode,
                    inputs=inputs,
                    autocast=autocast,
                    gradient_checkpointing=gradient_checkpointing,
                    max_new_tokens=max_new_tokens,
                )
            regressors[key] = cls.pretrained(workload)
        return regressors[key]

    @classmethod
    def load(cls, path: str | Path, workload: Workload | None = None) -> "MemoryRegressor":
        """Loads a file that :meth:`save` wrote. ``workload``: None means the saved one. Trees need XGBoost to predict.
        StateError: the file does not match the card (a JSON file) beside it, or has another version."""
        path = Path(path)
        trees = path.read_bytes()
        text = path.with_suffix(".json").read_bytes()
        with explained(
            f"the JSON card of {path} is damaged",
            way_out="; save the regressor again",
            kind=StateError,
        ):
            card = json.loads(text)
            expected = {
                "format": FORMAT,
                "features": list(FEATURES),
                "seal": seal_of(card),
                "hashes": _hashes_of(trees),
            }
            wrong = [name for name, value in expected.items() if card.get(name) != value]
        if wrong:
            raise StateError(
                f"{path} does not match the JSON file beside it in {', '.join(wrong)}; save it again"
            )
        if workload is None:
            workload = Workload(**card.get("workload", {}))
        return cls(trees, card, workload)

    @classmethod
    def fit(cls, measurements: Measurements) -> "MemoryRegressor":
        """Fits a regressor to simulated or measured rows of your own workload.

        At least 8 rows must not have run out of memory. If the workload was traced, trees only raise the trace
        (:meth:`MemoryBudget.from_model` with ``measured=rows`` is safer); else they correct a fitted formula."""
        num_rows = len(measurements.complete)
        if num_rows < MIN_ROWS:
            raise ConfigError(
                f"fit needs at least {MIN_ROWS} rows that did not run out of memory, "
                f"but got {num_rows}; measure more shapes"
            )
        workload = measurements.workload
        traced = traced_form(workload)
        form = traced or Form(
            ProfiledMemory.fit(measurements).phases, packed=workload.layout == "packed"
        )
        parts = [pairs_of(measurements, form)]
        # Trees are small, because there are only hundreds of rows.
        small = TreeSettings(rounds=120, max_depth=3, min_weight=1.0, regularisation=1.0)
        booster = train_booster(parts, small)
        card = describe(parts, constants={})
        card["workload"] = json.loads(workload.to_json())
        if traced is None:
            card["form"] = form.phases.rows
        else:
            card["corrects"] = "trace"
            card["lift"] = [0.0, MAX_LIFT]
        return cls.of(booster, card, workload)

    @classmethod
    def of(
        cls, booster: Any, card: Mapping[str, Any], workload: Workload | None = None
    ) -> "MemoryRegressor":
        """Makes a regressor from XGBoost's trees, whose hash is added to the card."""
        trees = bytes(booster.save_raw("ubj"))
        card = {**card, "format": FORMAT, "hashes": _hashes_of(trees)}
        return cls(trees, card, workload or Workload())

    def save(self, path: str | Path) -> None:
        """Writes the trees as XGBoost's UBJSON to ``path``, and the card beside it as JSON."""
        path = Path(path)
        path.write_bytes(self.trees)
        card = json.loads(json.dumps(dict(self.card)))
        card["seal"] = seal_of(card)
        text = json.dumps(card, indent=1, sort_keys=True) + "\n"
        path.with_suffix(".json").write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        if not self.sharp:
            known = "not fully known, so assumed to need much"
        elif self.workload.phases is not None and "form" not in self.card:
            known = "traced"
        else:
            known = "known by its sizes"
        run = assumed(self.workload)
        return f"a regressor of a model that is {known}" + (f" ({run})" if run else "")

    @property
    def sharp(self) -> bool:
        """Whether enough of the workload is known to predict its memory; False: only an upper bound is predicted."""
        if self._traced is not None or "plausible" not in self.card:
            return True
        names: list[str] = list(ESSENTIAL)
        if self.workload.mode == "generate":
            names.append("max_new_tokens")
        known = self.workload.known()
        return all(name in known for name in names)

    @property
    def fingerprint(self) -> str:
        values = [self.card.get("hashes"), self.card["data_hash"], self.workload.to_json()]
        return "regressor-" + hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        if self._traced is not None:
            return self._traced.ratio(shape, baseline)
        if not self.sharp:
            with_one_stream, with_two_streams = self._similar_models
            models = with_two_streams if len(shape.longest) > 1 else with_one_stream
            ratios = models.batch_bytes(shape) / models.batch_bytes(baseline)
            return np.quantile(ratios, self.card["quantile"], axis=1, method="higher")
        inputs = features(shape, baseline, self.workload, self._form)
        lift = _booster(self.trees).inplace_predict(
            inputs.values.astype(np.float32),
            predict_type="margin",
            base_margin=np.zeros(len(shape)),
        )
        least_lift, most_lift = self.card.get("lift", (-np.inf, np.inf))
        # Clipping keeps predictions monotone.
        predicted = np.exp(inputs.margin + np.clip(lift, least_lift, most_lift))
        return self._raised_outside_training(predicted, inputs)

    @property
    def _traced(self) -> Form | None:
        """The trace, if it predicts alone."""
        is_corrected = "form" in self.card or "corrects" in self.card
        return None if is_corrected else traced_form(self.workload)

    @cached_property
    def _form(self) -> Form:
        """What the trees correct."""
        if "form" in self.card:
            return Form(Phases(self.card["form"]), packed=self.workload.layout == "packed")
        return traced_form(self.workload) or closed_form(self.workload, self.card["constants"])

    @cached_property
    def _similar_models(self) -> "list[SimilarModels]":
        """Those with one stream of tokens, and those with two."""
        members = self.card["plausible"]
        return [SimilarModels(similar(self.workload, members, two)) for two in (False, True)]

    def _raised_outside_training(self, predicted: FloatArray, inputs: Features) -> FloatArray:
        """Raises predictions for input unlike the training data to the formula's, and those of batches that are larger
        than all trained ones also to the ratio of padded tokens."""
        lowest = np.array(self.card["ranges"]["lowest"])
        highest = np.array(self.card["ranges"]["highest"])
        with np.errstate(invalid="ignore"):  # NaN is unknown, and never outside
            above = inputs.values > highest + SLACK
            below = inputs.values < lowest - SLACK
        is_larger = above[:, : len(CANDIDATE)].any(axis=1)
        is_strange = (above | below)[:, len(CANDIDATE) :]
        if is_strange.any():
            strange_features = np.flatnonzero(is_strange.any(axis=0))
            self._warn_once(FEATURES[len(CANDIDATE) + strange_features[0]])
        is_outside = is_larger | is_strange.any(axis=1)
        padded_tokens = np.exp(inputs.values[:, CANDIDATE.index("padded_tokens")])
        floor = np.where(is_outside, np.exp(inputs.margin), 0.0)
        floor = np.where(is_larger, np.maximum(floor, padded_tokens), floor)
        return np.maximum(predicted, floor)

    def _warn_once(self, feature: str) -> None:
        if "_warned" in self.__dict__:
            return
        self.__dict__["_warned"] = True
        warn_user(
            f"the regressor was not trained on models or batches like these ({feature} is outside its "
            "training range), so it may predict too much memory; "
            "MemoryRegressor.fit(simulate(...)) fits your model"
        )


# Fields in which similar models should agree. If too few models agree in all of them, the last fields are ignored.
LIKE = (
    "mode",
    "gradient_checkpointing",
    "attention",
    "encoder_decoder",
    "causal",
    "lm_head",
    "score_bias",
    "autocast",
    "dtype",
    "dropout",
)
# Sizes by which the most similar models are chosen.
NEAR = (
    "max_new_tokens",
    "vocabulary_size",
    "hidden_size",
    "num_layers",
    "num_kv_heads",
    "intermediate_size",
)
MIN_SIMILAR = 24

Member = Mapping[str, Any]
"""One traced model of the card: its "workload", "two_streams", and "phases" without their zeros."""


class SimilarModels:
    """The memory of batches in M traced models."""

    def __init__(self, members: Sequence[Member]) -> None:
        rows = []
        first_rows = []
        for member in members:
            first_rows.append(len(rows))
            for phase in member["phases"]:
                rows.append([phase.get(name, 0.0) for name in MONOMIALS])
        self._phases = np.array(rows)
        self._first_rows = np.array(first_rows)

    def batch_bytes(self, shape: BatchShape) -> FloatArray:
        """Returns the peak bytes, without static memory, of K batches in M models: float64 (K, M)."""
        phase_bytes = columns(shape) @ self._phases.T
        peaks = np.maximum.reduceat(phase_bytes, self._first_rows, axis=1)
        return np.maximum(peaks, 1.0)


def similar(workload: Workload, members: Sequence[Member], two_streams: bool) -> list[Member]:
    """Returns models that agree in as many fields of ``LIKE`` as possible; of these, the third with the nearest sizes.

    Unless the workload has ``fixed_tokens``, lengths are assumed to count everything that the model reads."""
    has_fixed = bool(workload.fixed_tokens)
    candidates = [
        member
        for member in members
        if member["two_streams"] == two_streams
        and bool(member["workload"]["fixed_tokens"]) == has_fixed
    ]
    candidates = _agreeing(workload, candidates or list(members))
    known = workload.known()
    sizes = {name: known[name] for name in NEAR if known.get(name)}
    if not sizes or len(candidates) <= MIN_SIMILAR:
        return candidates
    candidates.sort(key=lambda member: _distance(sizes, member["workload"]))
    return candidates[: max(MIN_SIMILAR, len(candidates) // 3)]


def _agreeing(workload: Workload, candidates: list[Member]) -> list[Member]:
    known = workload.known()
    for name in LIKE:
        if name not in known:
            continue
        agreeing = [member for member in candidates if member["workload"][name] == known[name]]
        fewest = 1 if name == "mode" else MIN_SIMILAR
        if len(agreeing) >= fewest:
            candidates = agreeing
    return candidates


def _distance(sizes: Mapping[str, int], other: Mapping[str, Any]) -> float:
    """Returns the sum of the sizes' log ratios to those of another model."""
    distance = 0.0
    for name, size in sizes.items():
        distance += abs(math.log(size / max(other[name] or 1, 1)))
    return distance


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSettings:
    """How XGBoost's trees are trained."""

    rounds: int
    max_depth: int
    regularisation: float
    min_weight: float = 30.0
    learning_rate: float = 0.05
    quantile: float | None = None
    """The share of rows that must be below the prediction, if it is to be an upper bound."""


def pairs_of(measurements: Measurements, form: Form) -> Features:
    """Returns the trees' input for all pairs of rows that did not run out of memory; one row of a pair is the baseline."""
    shapes = measurements.shapes()
    log_bytes = np.log(np.maximum(measurements.batch_bytes(), 1.0))
    rows = np.arange(len(log_bytes))
    baselines = np.repeat(rows, len(rows))
    candidates = np.tile(rows, len(rows))
    pairs = features(
        _selected(shapes, candidates), _selected(shapes, baselines), measurements.workload, form
    )
    return replace(pairs, log_ratio=log_bytes[candidates] - log_bytes[baselines])


def _selected(shapes: BatchShape, rows: NDArray[np.int64]) -> BatchShape:
    longest = {name: values[rows] for name, values in shapes.longest.items()}
    return BatchShape.of(shapes.num_samples[rows], longest)


def train_booster(parts: Sequence[Features], settings: TreeSettings) -> Any:
    """Trains XGBoost's trees that correct the log ratio of the formula; predictions never fall as candidates grow."""
    xgboost = needed("xgboost", "fitting a regressor")
    target = np.concatenate([part.log_ratio for part in parts if part.log_ratio is not None])
    values = np.concatenate([part.values for part in parts])
    margin = np.concatenate([part.margin for part in parts])
    data = xgboost.QuantileDMatrix(
        values.astype(np.float32),
        label=target,
        base_margin=margin,
        # Ratios near 1 decide whether a batch fits.
        weight=np.exp(-0.5 * (target / 0.5) ** 2) + 0.05,
        max_bin=128,
        nthread=1,
    )
    parameters: dict[str, Any] = {
        "tree_method": "hist",
        "max_depth": settings.max_depth,
        "eta": settings.learning_rate,
        "lambda": settings.regularisation,
        "seed": 0,
        "nthread": 1,
        "min_child_weight": settings.min_weight,
        "subsample": 0.7,
        "colsample_bytree": 0.7,
        "max_bin": 128,
        "base_score": 0.0,
        "monotone_constraints": MONOTONE,
        "objective": "reg:squarederror",
    }
    if settings.quantile is not None:
        parameters["objective"] = "reg:quantileerror"
        parameters["quantile_alpha"] = settings.quantile
    return xgboost.train(parameters, data, num_boost_round=settings.rounds)


def describe(parts: Sequence[Features], constants: Mapping[str, float]) -> dict[str, Any]:
    """Returns the card of a regressor that was trained on these rows: data hash, ranges of features, versions."""
    xgboost = needed("xgboost", "fitting a regressor")
    values = np.concatenate([part.values for part in parts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for features that are NaN in all rows
        lowest = np.nan_to_num(np.nanmin(values, axis=0), nan=-1e30)
        highest = np.nan_to_num(np.nanmax(values, axis=0), nan=1e30)
    rounded = np.nan_to_num(values, nan=-1.0).round(6)
    data = np.ascontiguousarray(rounded).tobytes()
    return {
        "features": list(FEATURES),
        "ranges": {"lowest": _rounded(lowest), "highest": _rounded(highest)},
        "constants": dict(constants),
        "rows": len(values),
        "data_hash": hashlib.sha256(data).hexdigest(),
        "versions": {"xgboost": xgboost.__version__, "numpy": np.__version__},
    }


def _rounded(values: FloatArray) -> list[float]:
    """Last bits depend on the CPU."""
    return [round(float(value), 9) for value in values]


def _hashes_of(trees: bytes) -> dict[str, str]:
    return {"sharp": hashlib.sha256(trees).hexdigest()}


@lru_cache(maxsize=4)
def _booster(trees: bytes) -> Any:
    xgboost = needed("xgboost", "the trees of a regressor")
    return xgboost.Booster({"nthread": 1}, model_file=bytearray(trees))


@lru_cache(maxsize=1)
def _pretrained() -> MemoryRegressor:
    return MemoryRegressor.load(PRETRAINED)
