"""Computes the memory of a batch by a formula, from a model's sizes or fitted to a few batches.

A step passes through a few phases; its memory is that of the largest one. The memory of a phase is a polynomial in the
batch shape with coefficients of 0 or more, so memory never falls when a batch grows. For models known by sizes,
``regressor/train.py`` has fitted constants (such as how many copies of hidden states a layer keeps) to simulations."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import (
    ELEMENT_BYTES,
    MONOMIALS,
    FloatArray,
    Phases,
    columns,
    max_affine,
)
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TOKENS, BatchShape, primary
from dynagroup.validation import warn_user

COMPONENTS = ("weights", "activations", "attention", "logits", "cache")

# Unit vectors over the monomials: N is one byte per sample, NL one byte per padded token, and so on.
ONE, N, NL, NL2, NT, T2, NT2, NLT = (
    np.eye(12)[MONOMIALS.index(name)] for name in "1 n nL nL2 nT T2 nT2 nLT".split()
)
NOTHING = np.zeros(len(MONOMIALS))
QUADRATIC = [MONOMIALS.index(name) for name in ("L2", "nL2", "T2", "nT2", "LT", "nLT")]

# Values assumed for fields of a workload that are None. Sizes have no such value and must be given.
USUAL: dict[str, Any] = {
    "num_encoder_layers": 0,
    "experts_per_token": 1,
    "gated_mlp": True,
    "dropout": False,
    "lm_head": True,
    "causal": True,
    "fixed_tokens": 0,
    "trainable_share": 1.0,
    "score_bias": False,
}


@dataclass(frozen=True)
class ClosedForm:
    """The memory of a batch by formula: that of its largest phase, divided into ``COMPONENTS``."""

    phases: FloatArray  # float64 (phases, components, monomials), bytes
    traced: Phases | None = None
    """Phases that tracing or fitting found. Without a division into components, all bytes count as activations."""
    packed: bool = False  # True: samples are packed, so that a batch is one row with all its tokens

    @classmethod
    def of(cls, workload: Workload, constants: Mapping[str, float]) -> "ClosedForm":
        """Makes the formula from the phases in ``workload``, or without these from its sizes and ``constants``."""
        packed = workload.layout == "packed"
        if workload.phases is not None:
            return cls.of_phases(workload.phases, packed)
        return cls(np.stack(_Builder(workload, constants).phases()), packed=packed)

    @classmethod
    def of_phases(cls, traced: Phases, packed: bool = False) -> "ClosedForm":
        phases = np.zeros((len(traced.rows), len(COMPONENTS), len(MONOMIALS)))
        phases[:, COMPONENTS.index("activations")] = traced.rows
        return cls(phases, traced, packed)

    def batch_bytes(self, shape: BatchShape) -> FloatArray:
        """Returns the bytes of each batch (1 or more), without static memory: float64 (K,)."""
        if self.traced is not None:
            return self.traced.bytes(shape, self.packed)
        return np.maximum(
            (columns(shape, self.packed) @ self.phases.sum(axis=1).T).max(axis=1), 1.0
        )

    def baseline_bytes(self, baseline: BatchShape) -> FloatArray:
        """Like :meth:`batch_bytes`, but without mask padding if the lengths need none."""
        return (
            self.batch_bytes(baseline)
            if self.traced is None
            else self.traced.baseline_bytes(baseline, self.packed)
        )

    def shares(self, shape: BatchShape) -> FloatArray:
        """Returns the share of each component, and of terms quadratic in length, in the largest phase: float64 (K, 6)."""
        values, phases = columns(shape, self.packed), self.phases
        terms = phases[(values @ phases.sum(axis=1).T).argmax(axis=1)] * values[:, None, :]
        total = np.maximum(terms.sum(axis=(1, 2)), 1.0)
        quadratic = terms[:, :, QUADRATIC].sum(axis=(1, 2))
        return np.concatenate([terms.sum(axis=2), quadratic[:, None]], axis=1) / total[:, None]


def _phase(weights: Any = 0.0, **parts: Any) -> FloatArray:
    return np.stack(
        [NOTHING + {"weights": weights * ONE, **parts}.get(name, 0.0) for name in COMPONENTS]
    )


class _Builder:
    """Builds the phases of a workload (their bytes per monomial) from the model's sizes."""

    def __init__(self, workload: Workload, constants: Mapping[str, float]) -> None:
        known = {name: getattr(workload, name) for name in Workload.__slots__}
        w: dict[str, Any] = {
            name: USUAL.get(name) if value is None else value for name, value in known.items()
        }
        self.w, self.c = w, constants
        self.element = ELEMENT_BYTES[workload.autocast or w["dtype"]]
        self.parameter = ELEMENT_BYTES[w["dtype"]]
        self.query, self.kv = (w[name] * w["head_size"] for name in ("num_heads", "num_kv_heads"))
        self.ffn = w["intermediate_size"] * w["experts_per_token"]
        fixed, two_stacks = float(w["fixed_tokens"]), w["encoder_decoder"]
        speech = two_stacks and fixed > 0
        # Tokens (and their squares) in the decoder or only stack, with each sample's fixed tokens; then in the encoder.
        self.words, self.words2 = (
            (NT, NT2) if two_stacks else (NL + fixed * N, NL2 + 2 * fixed * NL + fixed**2 * N)
        )
        self.read, self.read2 = (fixed * N, fixed**2 * N) if speech else (NL, NL2)
        self.cross = fixed * self.words if speech else NLT
        # Models without dropout compute the softmax of attention scores in float32.
        self.wide_scores = self.element < 4 and not w["dropout"] and not two_stacks
        # BART and similar models apply dropout to hidden states only, not to attention scores.
        self.dropped_scores = (
            w["mode"] == "train" and w["dropout"] and (not two_stacks or w["score_bias"])
        )
        self.layers = float(w["num_layers"])
        self.encoders = float(w["num_encoder_layers"] or (w["num_layers"] if two_stacks else 0))

    def phases(self) -> list[FloatArray]:
        return {"train": self._training, "generate": self._generation, "forward": self._forward}[
            self.w["mode"]
        ]()

    def _layer_keeps(self) -> float:
        w, c, e = self.w, self.c, self.element
        kept = (
            c["keep_hidden"] * w["hidden_size"]
            + c["keep_query"] * self.query
            + c["keep_kv"] * self.kv
        )
        kept += (c["keep_ffn"] + (c["keep_gate"] if w["gated_mlp"] else 0.0)) * self.ffn
        kept = e * kept + (c["keep_dropout"] * w["hidden_size"] * e if w["dropout"] else 0.0)
        if e < 4:  # normalisation layers compute in float32
            kept += 4 * c["keep_wide"] * w["hidden_size"]
        return kept * (c["keep_lora"] if w["trainable_share"] < 0.5 else 1.0)

    def _scores(self, squared: FloatArray, per_score: float, per_mask: float) -> FloatArray:
        """Returns the bytes of one layer's attention scores and masks; ``squared``: its pairs of tokens."""
        w, c = self.w, self.c
        if w["attention"] == "eager":
            copies = per_score * (c["score_wide"] if self.wide_scores else 1.0)
            if (
                self.dropped_scores
            ):  # scores before and after dropout, and the dropout mask with one byte per score
                copies = per_score * (2 + 1 / self.element)
            return self.element * (copies * w["num_heads"] + per_mask) * squared
        if w["score_bias"]:
            return self.element * c["score_bias"] * w["num_heads"] * self._shared(squared)
        return (
            self.element * per_mask * self._shared(squared) if w["attention"] == "sdpa" else NOTHING
        )

    def _shared(self, squared: FloatArray) -> FloatArray:
        """Returns the pairs of tokens for which a mask or bias is stored; all samples of an encoder-decoder share one."""
        return T2 if self.w["encoder_decoder"] and squared @ NT2 > 0 else squared

    def _training(self) -> list[FloatArray]:
        w, c = self.w, self.c
        per_token = self._layer_keeps()
        keep = lambda squared: self._scores(squared, c["score_train"], c["mask_keep"])  # noqa: E731
        decoder, encoder = (
            (per_token * self.words, keep(self.words2)),
            (per_token * self.read, keep(self.read2)),
        )
        if w["encoder_decoder"]:
            decoder = (1 + c["keep_cross"]) * decoder[0], decoder[1] + keep(self.cross)
        stored = self._stored(decoder, self.layers, self.words, self.words2)
        below = (
            self._stored(encoder, self.encoders, self.read, self.read2)
            if self.encoders
            else (NOTHING, NOTHING)
        )
        activations, scores = stored[0] + below[0], stored[1] + below[1]
        trains_all = w["trainable_share"] >= 0.5
        table = (
            c["weight_grad"] * w["vocabulary_size"] * w["hidden_size"] * self.parameter
            if trains_all
            else 0.0
        )
        cast = self._cast_weights()
        head = w["vocabulary_size"] * self.words if w["lm_head"] else NOTHING
        copies = c["logits_train"] * self.element  # causal models also make a copy in float32
        copies += 4 * c["logits_wide"] if w["causal"] and self.element < 4 else 0.0
        output = self.element * head  # the caller keeps the model's output alive
        first = (
            self.element * w["hidden_size"] * (self.words + (self.read if self.encoders else 0.0))
        )
        kept = {"activations": activations, "attention": scores}
        phases = [
            _phase(cast, **kept, logits=copies * head),
            _phase(cast + table, **kept, logits=c["logits_grad"] * output),
            _phase(cast + table * c["table_grad"], activations=first, logits=output),
        ]
        stacks = [((activations, scores), decoder, self.words, self.words2)]
        stacks += [(below, encoder, self.read, self.read2)] if self.encoders else []
        for held, layer, tokens, squared in stacks:
            run = (
                self.element
                * (c["run_hidden"] * w["hidden_size"] + c["run_ffn"] * self.ffn)
                * tokens
            )
            extra = self._scores(squared, c["score_run"], c["mask_run"])
            if w["gradient_checkpointing"]:
                run, extra = run + layer[0], extra + layer[1]
            phases.append(
                _phase(
                    cast + table,
                    activations=held[0] + run,
                    attention=held[1] + extra,
                    logits=output,
                )
            )
        return phases

    def _stored(
        self, layer: Any, count: float, tokens: FloatArray, squared: FloatArray
    ) -> tuple[FloatArray, ...]:
        """Returns what a stack keeps for its backward pass, (activations, scores); with checkpointing, layers' inputs."""
        if not self.w["gradient_checkpointing"]:
            return count * layer[0], count * layer[1]
        return self.element * self.w["hidden_size"] * count * tokens, self._scores(
            squared, 0.0, self.c["mask_keep"]
        )

    def _cast_weights(self) -> float:
        """Returns the bytes of weights in lower precision that autocast keeps until the backward pass."""
        if self.element == self.parameter:
            return 0.0
        w = self.w
        matrices = (4 if w["encoder_decoder"] else 2) * w["hidden_size"] * (self.query + self.kv)
        matrices += (3 if w["gated_mlp"] else 2) * w["hidden_size"] * w["intermediate_size"]
        head = w["hidden_size"] * w["vocabulary_size"] if w["lm_head"] else 0
        return (
            self.c["cast_weights"]
            * self.element
            * ((self.layers + self.encoders) * matrices + head)
        )

    def _running(
        self, tokens: FloatArray, squared: FloatArray, **held: FloatArray
    ) -> list[FloatArray]:
        """Returns two phases of a layer without gradients: attention, and the rest; ``held``: bytes kept besides."""
        w, c, e = self.w, self.c, self.element
        fused, masked = w["attention"] != "eager", w["attention"] == "sdpa"
        wide = (
            c["run_hidden"] * w["hidden_size"]
            + c["run_ffn"] * self.ffn
            + c["run_query"] * self.query
        )
        if w["experts_per_token"] > 1:
            wide += c["run_expert"] * w["experts_per_token"] * w["hidden_size"]
        narrow = (
            c["bias_hidden"] * w["hidden_size"]
            + c["bias_query"] * self.query
            + c["bias_kv"] * self.kv
        )
        if masked and self.kv < self.query:
            narrow += (
                2 * self.query
            )  # the kernel that takes a mask needs the key and value heads repeated
        scores = (
            (c["bias_scores"] * w["num_heads"] if w["score_bias"] else c["bias_mask"])
            if masked
            else 0.0
        )
        left = c["mask_pass"] if masked else 0.0
        if not fused:
            copies = c["score_pass_wide"] if self.wide_scores else c["score_pass"]
            scores, left = copies * w["num_heads"] + c["mask_pass"], w["num_heads"] + c["mask_pass"]
        kept, squared = held.pop("activations", 0.0), self._shared(squared) if fused else squared
        return [
            _phase(activations=kept + e * narrow * tokens, attention=e * scores * squared, **held),
            _phase(activations=kept + e * wide * tokens, attention=e * left * squared, **held),
        ]

    def _forward(self) -> list[FloatArray]:
        w, c, hidden = self.w, self.c, self.element * self.w["hidden_size"]
        head = self.element * (w["vocabulary_size"] if w["lm_head"] else 0) * self.words
        per_layer = (
            c["cache"] * 2 * self.kv * self.element * self.layers
        )  # models return the cache by default
        cache = per_layer * self.words if w["causal"] or w["encoder_decoder"] else NOTHING
        phases, encoded = [], NOTHING
        if self.encoders:
            phases += self._running(self.read, self.read2)
            cache, encoded = cache + per_layer * self.read, hidden * self.read
        phases += self._running(self.words, self.words2, cache=cache, activations=encoded)
        return [
            *phases,
            _phase(
                activations=encoded + hidden * self.words,
                logits=c["logits_run"] * head,
                cache=cache,
            ),
        ]

    def _generation(self) -> list[FloatArray]:
        w, c = self.w, self.c
        two_stacks = w["encoder_decoder"]
        prompt, squared = (self.read, self.read2) if two_stacks else (self.words, self.words2)
        per_layer = c["cache"] * 2 * self.kv * self.element
        held = per_layer * (prompt + float(w["max_new_tokens"]) * N)
        if two_stacks:
            held = held + self.element * w["hidden_size"] * prompt / max(self.layers, 1.0)
        filled = self.layers * per_layer * prompt
        last = c["last_logits"] * 4.0 * w["vocabulary_size"] * N
        step, grown = (
            self.element * self.ffn * 2.0 * N,
            self.layers * held + c["cache_layer"] * held,
        )
        eager = w["attention"] == "eager"  # fused kernels need no mask for one new token
        mask = self._scores(N + prompt, c["score_pass"], c["mask_pass"]) if eager else NOTHING
        return [
            *self._running(prompt, squared, cache=NOTHING if two_stacks else filled),
            _phase(activations=self.element * w["hidden_size"] * prompt, cache=filled, logits=last),
            _phase(activations=step, attention=mask, cache=grown, logits=last),
        ]


FACTORS = [MONOMIALS.index(name) for name in ("1", "n", "nL", "nL2", "nT", "nT2", "nLT")]


@dataclass(frozen=True)
class ProfiledMemory:
    """Predicts the bytes of any batch with a formula that :meth:`fit` has fitted to measured or simulated batches.

    The formula is the largest of a few phases, each a sum of ``(1, n, n*L, n*L^2)`` with factors of 0 or more. A
    warning is given once if a sample is more than twice as long as the longest one in the fit."""

    static_bytes: int
    phases: Phases
    error: float  # largest relative error of the formula on the rows that it was fitted to
    reach: Mapping[str, int]  # length of the longest fitted sample, by stream

    @classmethod
    def fit(cls, measurements: Measurements) -> "ProfiledMemory":
        """Fits the formula to at least 4 rows (8 with two streams); rows that ran out of memory do not count.

        >>> from dynagroup.memory import Measurement, Workload
        >>> rows = [Measurement(n, {"tokens": L}, 1000, 64 * n * L) for n in (1, 2, 4) for L in (64, 128, 256)]
        >>> profile = ProfiledMemory.fit(Measurements(tuple(rows), Workload()))
        >>> profile.static_bytes, profile.batch_bytes(BatchShape.of(8, 512)).round().tolist()
        (1000, [262144.0])
        """
        rows = measurements.complete
        streams = sorted(
            {name for row in rows for name in row.longest}, key=lambda name: (name != TOKENS, name)
        )
        least = 4 if len(streams) < 2 else 8
        if len(rows) < least:
            wanted = (
                f"ProfiledMemory.fit needs at least {least} rows that did not run out of memory"
            )
            raise ConfigError(f"{wanted}, but got {len(rows)}; measure more shapes")
        factors = FACTORS[: 4 if len(streams) < 2 else None]
        shapes, sizes = (
            columns(measurements.shapes())[:, factors],
            np.maximum(measurements.batch_bytes(), 1.0),
        )
        found, error = max_affine(shapes, sizes)
        static = max(row.static_bytes for row in rows)
        reach = {name: max(row.longest.get(name, 0) for row in rows) for name in streams}
        return cls(int(static), Phases.of(factors, found), float(error), reach)

    def __str__(self) -> str:
        units = " and ".join(f"{most:,} {name}" for name, most in self.reach.items())
        return f"a profile of rows of up to {units}, wrong by at most {self.error:.1%} on each"

    @property
    def fingerprint(self) -> str:
        return (
            "profile-"
            + hashlib.sha256(
                repr((self.static_bytes, sorted(self.reach), self.phases)).encode()
            ).hexdigest()[:12]
        )

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        for name, reach in self.reach.items():
            of = primary(shape.longest) if name == primary(self.reach) else name
            asked = int(np.max(shape.longest.get(of, 0), initial=0))
            if asked > 2 * reach and not self.__dict__.get("_warned"):
                self.__dict__["_warned"] = True
                told = f"the profile was fitted to samples of up to {reach} {name}, but a batch has one of {asked}"
                warn_user(
                    f"{told}; predictions may be far too low: measure longer shapes, or use from_model"
                )
        return self.phases.bytes(shape)

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        return self.batch_bytes(shape) / self.batch_bytes(baseline)
