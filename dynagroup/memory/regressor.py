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

from dynagroup.errors import ConfigError, StateError
from dynagroup.memory.formula import COMPONENTS, ClosedForm, ProfiledMemory
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import (
    ELEMENT_BYTES,
    MONOMIALS,
    FloatArray,
    Mode,
    Phases,
    columns,
    needed,
)
from dynagroup.memory.workload import Workload, assumed
from dynagroup.shapes import BatchShape, primary, target_tokens
from dynagroup.state import seal_of
from dynagroup.validation import explained, warn_user

PRETRAINED = Path(__file__).parent / "artifacts" / "pretrained.ubj"
FORMAT, MIN_ROWS = 2, 8
MOST_LIFT = 5.0  # largest correction of a log ratio by the trees; real ones are far smaller
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
_known: "WeakKeyDictionary[Any, dict[Any, MemoryRegressor]]" = WeakKeyDictionary()

# Features that grow when the candidate batch gets another or a longer sample; predictions never fall when these grow.
CANDIDATE = ("closed_form", "samples", "padded_tokens", "squared_tokens", "target_tokens")
BASELINE = (
    "base_samples",
    "base_longest",
    "base_tokens",
    *(f"base_{name}" for name in COMPONENTS),
    "base_quadratic",
)


def _workload_values(w: Workload) -> dict[str, float]:
    """Returns the workload's features as numbers by name; NaN means unknown."""
    told = lambda value, answer: None if value is None else answer  # noqa: E731
    log = lambda value: None if value is None else np.log1p(value)  # noqa: E731
    share = lambda part, whole: None if part is None or not whole else part / whole  # noqa: E731
    values = {
        "generates": told(w.mode, w.mode == "generate"),
        "trains": told(w.mode, w.mode == "train"),
        "layers": log(w.num_layers),
        "encoder_layers": log(w.num_encoder_layers),
        "hidden": log(w.hidden_size),
        "heads": log(w.num_heads),
        "kv_share": share(w.num_kv_heads, w.num_heads),
        "ffn_share": share(w.intermediate_size, w.hidden_size),
        "vocabulary_share": share(w.vocabulary_size, w.hidden_size),
        "gated": w.gated_mlp,
        "experts": log(w.experts_per_token),
        "dropout": w.dropout,
        "lm_head": w.lm_head,
        "causal": w.causal,
        "score_bias": w.score_bias,
        "fixed_tokens": log(w.fixed_tokens),
        "parameters": log(w.num_parameters),
        "trainable_share": w.trainable_share,
        "parameter_bytes": told(w.dtype, ELEMENT_BYTES[w.dtype or "float32"]),
        "autocast": told(w.dtype, w.autocast is not None),
        "eager": told(w.attention, w.attention == "eager"),
        "checkpointing": w.gradient_checkpointing,
        "new_tokens": log(w.max_new_tokens),
    }
    return {name: np.nan if value is None else float(value) for name, value in values.items()}


FEATURES = (*CANDIDATE, *BASELINE, *_workload_values(Workload()))
MONOTONE = tuple(1 if name in CANDIDATE else 0 for name in FEATURES)


@dataclass(frozen=True, slots=True)
class Features:
    """Input of the trees for K pairs of batches. ``margin``: float64 (K,), the formula's log ratio, which the trees
    correct. ``values``: float64 (K, features), NaN if unknown. ``log_ratio``: float64 (K,), the truth, for training."""

    margin: FloatArray
    values: FloatArray
    log_ratio: FloatArray | None = None


def features(
    shape: BatchShape, baseline: BatchShape, workload: Workload, form: ClosedForm
) -> Features:
    """Returns the trees' input for K batches and their baselines; without means, which an added sample may lower."""
    ratio = np.log(form.batch_bytes(shape)) - np.log(form.baseline_bytes(baseline))
    n, length, target = _logs(shape)
    n_b, length_b, target_b = _logs(baseline)
    samples, longer = n - n_b, length - length_b
    candidate = [
        ratio,
        samples,
        samples + length - length_b,
        samples + 2 * longer,
        samples + target - target_b,
    ]
    base = [n_b, length_b, n_b + length_b, *form.shares(baseline).T]
    known = np.broadcast_arrays(ratio, *candidate, *base, *_workload_values(workload).values())
    return Features(known[0], np.stack(known[1:], axis=1))


def _logs(shape: BatchShape) -> list[FloatArray]:
    values = (shape.num_samples, shape.longest[primary(shape.longest)], target_tokens(shape))
    return [np.log(np.maximum(v, 1).astype(np.float64)) for v in values]


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
    """Facts about the training: features and their ranges, constants, metrics, versions, hash of the data."""
    workload: Workload = Workload()

    @classmethod
    def pretrained(cls, workload: Workload | None = None) -> "MemoryRegressor":
        """Returns dynagroup's own regressor for ``workload``; None: unknown, so predictions are cautious."""
        return replace(_pretrained(), workload=workload) if workload else _pretrained()

    @classmethod
    def of_model(cls, model: Any, mode: Mode, **known: Any) -> "MemoryRegressor":
        """Returns the pretrained regressor for a torch model. Each model is traced once, which takes seconds; without a
        config, only the mode is known. ``known``: values of :class:`Workload` fields."""
        found, key = _known.setdefault(model, {}), (mode, *sorted(known.items()))
        if key not in found:
            tells = getattr(model, "config", None) is not None
            found[key] = cls.pretrained(
                Workload.from_model(model, mode, **known) if tells else Workload(mode=mode)
            )
        return found[key]

    @classmethod
    def load(cls, path: str | Path, workload: Workload | None = None) -> "MemoryRegressor":
        """Loads a file that :meth:`save` wrote. ``workload``: None means the saved one. Trees need XGBoost to predict.
        StateError: the file does not match the card (a JSON file) beside it, or has another version."""
        path = Path(path)
        trees, text = path.read_bytes(), path.with_suffix(".json").read_bytes()
        with explained(
            f"the JSON card of {path} is damaged",
            way_out="; save the regressor again",
            kind=StateError,
        ):
            card = json.loads(text)
            hashes = {"sharp": hashlib.sha256(trees).hexdigest()}
            right = {
                "format": FORMAT,
                "features": list(FEATURES),
                "seal": seal_of(card),
                "hashes": hashes,
            }
            wrong = [name for name, value in right.items() if card.get(name) != value]
        if wrong:
            raise StateError(
                f"{path} does not match the JSON file beside it in {', '.join(wrong)}; save it again"
            )
        return cls(trees, card, workload or Workload(**card.get("workload", {})))

    @classmethod
    def fit(cls, measurements: Measurements | Sequence[Measurements]) -> "MemoryRegressor":
        """Fits a regressor to simulated or measured rows of your own workload, or of several.

        At least 8 rows of each workload must not have run out of memory. If the workload was traced, trees only raise
        the trace (:meth:`MemoryBudget.from_model` with ``measured=rows`` is safer); else they correct a fitted formula."""
        tables = [measurements] if isinstance(measurements, Measurements) else list(measurements)
        least = min((len(t.complete) for t in tables), default=0)
        if least < MIN_ROWS:
            wanted = f"fit needs at least {MIN_ROWS} rows of each workload that did not run out of memory"
            raise ConfigError(f"{wanted}, but got {least}; measure more shapes")
        fitted = lambda table: ClosedForm.of_phases(ProfiledMemory.fit(table).phases)  # noqa: E731
        forms = [ClosedForm.of(t.workload, {}) if t.workload.phases else fitted(t) for t in tables]
        parts = [*map(pairs_of, tables, forms)]
        # Trees are small, because there are only hundreds of rows.
        booster = train_booster(
            parts, rounds=120, max_depth=3, least_weight=1.0, regularisation=1.0
        )
        workload = tables[0].workload
        about: dict[str, Any] = {"workload": json.loads(workload.to_json())}
        if workload.phases is None:
            about["form"] = forms[0].traced and forms[0].traced.rows
        else:
            about |= {"corrects": "trace", "lift": [0.0, MOST_LIFT]}
        return cls.of(booster, {**describe(parts, {}), **about}, workload)

    @classmethod
    def of(
        cls, booster: Any, card: Mapping[str, Any], workload: Workload | None = None
    ) -> "MemoryRegressor":
        """Makes a regressor from XGBoost's trees, whose hash is added to the card."""
        trees = bytes(booster.save_raw("ubj"))
        about = {"format": FORMAT, "hashes": {"sharp": hashlib.sha256(trees).hexdigest()}}
        return cls(trees, {**card, **about}, workload or Workload())

    def save(self, path: str | Path) -> None:
        """Writes the trees as XGBoost's UBJSON to ``path``, and the card beside it as JSON."""
        path = Path(path)
        path.write_bytes(self.trees)
        card = json.loads(json.dumps(dict(self.card)))
        card["seal"] = seal_of(card)
        path.with_suffix(".json").write_text(
            json.dumps(card, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )

    def __str__(self) -> str:
        how = "known by its sizes" if self.sharp else "not fully known, so assumed to need much"
        how = how if self.workload.phases is None or "form" in self.card else "traced"
        return f"a regressor of a model that is {how} ({assumed(self.workload)})".removesuffix(
            " ()"
        )

    @property
    def sharp(self) -> bool:
        """Whether enough of the workload is known to predict its memory; False: only an upper bound is predicted."""
        w, asked = (
            self.workload,
            ESSENTIAL + (("max_new_tokens",) if self.workload.mode == "generate" else ()),
        )
        known = all(getattr(w, name) is not None for name in asked)
        return known or self._traced is not None or "plausible" not in self.card

    @property
    def _traced(self) -> Phases | None:
        return None if self.card.keys() & {"form", "corrects"} else self.workload.phases

    @property
    def fingerprint(self) -> str:
        about = json.dumps(
            [self.card.get("hashes"), self.card["data_hash"], self.workload.to_json()]
        )
        return "regressor-" + hashlib.sha256(about.encode()).hexdigest()[:12]

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        if self._traced is not None:
            packed = self.workload.layout == "packed"
            return self._traced.bytes(shape, packed) / self._traced.baseline_bytes(baseline, packed)
        if not self.sharp:
            models = self._plausible[len(shape.longest) > 1]
            ratios = models.batch_bytes(shape) / models.batch_bytes(baseline)
            return np.quantile(ratios, self.card["quantile"], axis=1, method="higher")
        found = features(shape, baseline, self.workload, self._form)
        lowest, highest = self.card.get("lift", (-np.inf, np.inf))
        values, lifted = found.values.astype(np.float32), np.zeros(len(shape))
        raw = _booster(self.trees).inplace_predict(
            values, predict_type="margin", base_margin=lifted
        )
        return self._clamped(
            np.exp(found.margin + np.clip(raw, lowest, highest)), found
        )  # clipping keeps it monotone

    @cached_property
    def _plausible(self) -> "list[Plausible]":
        return [
            Plausible(self.workload, self.card["plausible"], two_streams)
            for two_streams in (False, True)
        ]

    @cached_property
    def _form(self) -> ClosedForm:
        if "form" in self.card:
            return ClosedForm.of_phases(Phases(self.card["form"]))
        return ClosedForm.of(self.workload, self.card["constants"])

    def _clamped(self, predicted: FloatArray, found: Features) -> FloatArray:
        """Raises predictions for input unlike the training data: to the formula, or out of range, to padded tokens."""
        lowest, highest = (
            np.array(self.card["ranges"][k], dtype=np.float64) for k in ("lowest", "highest")
        )
        values, count = found.values, len(CANDIDATE)
        with np.errstate(invalid="ignore"):
            above = values > highest + 1e-6
            outside = above | (values < lowest - 1e-6)
        beyond, strange = above[:, :count].any(axis=1), outside[:, count:].any(axis=1)
        if strange.any() and not self.__dict__.get("_warned"):
            self.__dict__["_warned"] = True
            feature = FEATURES[count + int(outside[:, count:].any(axis=0).argmax())]
            told = f"the regressor was not trained on models or batches like these ({feature} is outside its training range)"
            warn_user(
                f"{told}, so it may predict too much memory; MemoryRegressor.fit(simulate(...)) fits your model"
            )
        floored = np.where(strange | beyond, np.maximum(predicted, np.exp(found.margin)), predicted)
        return np.where(
            beyond,
            np.maximum(floored, np.exp(values[:, CANDIDATE.index("padded_tokens")])),
            floored,
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
FEWEST = 24


class Plausible:
    """Memory of a batch in several traced models that agree with what is known of a workload. Unless the workload has
    ``fixed_tokens``, lengths are assumed to count everything that the model reads."""

    def __init__(
        self, workload: Workload, members: Sequence[Mapping[str, Any]], two_streams: bool
    ) -> None:
        phases = [member["phases"] for member in _like(workload, members, two_streams)]
        self._phases = np.array(
            [[row.get(name, 0.0) for name in MONOMIALS] for rows in phases for row in rows]
        )
        self._starts = np.cumsum([0, *map(len, phases[:-1])])

    def batch_bytes(self, shape: BatchShape) -> FloatArray:
        """Returns the peak bytes, without static memory, of K batches in M models: float64 (K, M)."""
        return np.maximum(
            np.maximum.reduceat(columns(shape) @ self._phases.T, self._starts, axis=1), 1.0
        )


def _like(
    workload: Workload, members: Sequence[Mapping[str, Any]], two_streams: bool
) -> list[Mapping[str, Any]]:
    """Returns models that agree in as many fields of ``LIKE`` as possible; of these, the third with the nearest sizes."""
    found = [m for m in members if m["two_streams"] == two_streams]
    apart = bool(workload.fixed_tokens)
    found = [m for m in found if bool(m["workload"]["fixed_tokens"]) == apart] or list(members)
    for name in LIKE:
        value = getattr(workload, name)
        agreeing = [m for m in found if m["workload"][name] == value]
        if value is not None and len(agreeing) >= (1 if name == "mode" else FEWEST):
            found = agreeing
    sizes = {name: getattr(workload, name) for name in NEAR if getattr(workload, name)}
    if not sizes or len(found) <= FEWEST:
        return found
    apart = lambda known: sum(  # noqa: E731
        abs(math.log(size / max(known[name] or 1, 1))) for name, size in sizes.items()
    )
    return sorted(found, key=lambda member: apart(member["workload"]))[
        : max(FEWEST, len(found) // 3)
    ]


def pairs_of(measurements: Measurements, form: ClosedForm) -> Features:
    """Returns the trees' input for all pairs of rows that did not run out of memory; one row of a pair is the baseline."""
    shapes, size = measurements.shapes(), np.maximum(measurements.batch_bytes(), 1.0)
    first, second = (
        a.ravel() for a in np.meshgrid(np.arange(len(size)), np.arange(len(size)), indexing="ij")
    )
    of = lambda rows: BatchShape.of(  # noqa: E731
        shapes.num_samples[rows], {k: v[rows] for k, v in shapes.longest.items()}
    )
    ratio = np.log(size[second]) - np.log(size[first])
    return replace(features(of(second), of(first), measurements.workload, form), log_ratio=ratio)


def train_booster(
    parts: Sequence[Features],
    *,
    rounds: int,
    max_depth: int,
    quantile: float | None = None,
    learning_rate: float = 0.05,
    regularisation: float = 20.0,
    least_weight: float = 30.0,
) -> Any:
    """Trains XGBoost's trees that correct the log ratio of the formula; predictions never fall as candidates grow.
    ``quantile``: the share of rows that must be below the prediction, if it is to be an upper bound."""
    xgboost = needed("xgboost", "fitting a regressor")
    values = np.concatenate([p.values for p in parts]).astype(np.float32)
    margin = np.concatenate([p.margin for p in parts])
    target = np.concatenate([p.log_ratio for p in parts if p.log_ratio is not None])
    weight = np.exp(-0.5 * (target / 0.5) ** 2) + 0.05  # ratios near 1 decide whether a batch fits
    data = xgboost.QuantileDMatrix(
        values, label=target, base_margin=margin, weight=weight, max_bin=128, nthread=1
    )
    settings: dict[str, Any] = {
        "tree_method": "hist",
        "max_depth": max_depth,
        "eta": learning_rate,
        "lambda": regularisation,
        "seed": 0,
        "nthread": 1,
        "min_child_weight": least_weight,
        "subsample": 0.7,
        "colsample_bytree": 0.7,
        "max_bin": 128,
        "base_score": 0.0,
        "monotone_constraints": MONOTONE,
        "objective": "reg:squarederror",
    }
    if quantile is not None:
        settings |= {"objective": "reg:quantileerror", "quantile_alpha": quantile}
    return xgboost.train(settings, data, num_boost_round=rounds)


def describe(parts: Sequence[Features], constants: Mapping[str, float]) -> dict[str, Any]:
    """Returns the card of a regressor that was trained on these rows: data hash, ranges of features, versions."""
    xgboost = needed("xgboost", "fitting a regressor")
    values = np.concatenate([p.values for p in parts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for features that are NaN in all rows
        lowest, highest = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    ends = {"lowest": np.nan_to_num(lowest, nan=-1e30), "highest": np.nan_to_num(highest, nan=1e30)}
    digest = hashlib.sha256(
        np.ascontiguousarray(np.nan_to_num(values, nan=-1.0).round(6)).tobytes()
    ).hexdigest()
    ranges = {
        name: [round(float(v), 9) for v in end] for name, end in ends.items()
    }  # last bits depend on the CPU
    versions = {"xgboost": xgboost.__version__, "numpy": np.__version__}
    about = {
        "ranges": ranges,
        "constants": dict(constants),
        "rows": len(values),
        "data_hash": digest,
    }
    return {"features": list(FEATURES), **about, "versions": versions}


@lru_cache(maxsize=4)
def _booster(trees: bytes) -> Any:
    return needed("xgboost", "the trees of a regressor").Booster(
        {"nthread": 1}, model_file=bytearray(trees)
    )


@lru_cache(maxsize=1)
def _pretrained() -> MemoryRegressor:
    return MemoryRegressor.load(PRETRAINED)
