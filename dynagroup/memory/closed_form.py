"""Memory of a batch from a workload's sizes alone: the largest of a few phases, each a sum of what is alive in it.

A phase is a polynomial in the batch shape with non-negative coefficients, so the form is monotone. Its dimensionless
constants (how many copies of the hidden states a layer keeps, and so on) are fitted to simulations by ``regressor/train.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.workload import ELEMENT_BYTES, Workload
from dynagroup.shapes import TOKENS, BatchShape

__all__ = ["CONSTANTS", "COMPONENTS", "TARGET", "ClosedForm"]

FloatArray = NDArray[np.float64]
TARGET = "target"
COMPONENTS = ("weights", "activations", "attention", "logits", "cache")

# Columns of a phase: 1, n, n*L, n*L^2, n*T, n*T^2, n*L*T (L: tokens, T: tokens of the target stream).
WIDTH = 7

CONSTANTS: dict[str, float] = {
    "bias_hidden": 6.0, "bias_mask": 2.0, "bias_query": 8.0, "bias_scores": 2.0,
    "cache": 1.0, "cache_layer": 0.2369, "cast_weights": 0.8553, "keep_dropout": 5.8452,
    "keep_ffn": 1.6466, "keep_gate": 3.6327, "keep_hidden": 0.4837, "keep_kv": 3.4212,
    "keep_lora": 1.2466, "keep_query": 1.611, "keep_wide": 3.3868, "last_logits": 2.0958,
    "logits_grad": 1.5, "logits_run": 1.0218, "logits_train": 4.7154, "logits_wide": 1.2982,
    "mask_keep": 0.9933, "mask_run": 1.0, "run_ffn": 1.4975, "run_hidden": 0.7566,
    "run_query": 11.543, "score_bias": 1.6204, "score_run": 3.2944, "score_train": 2.1947,
    "table_grad": 2.6617, "weight_grad": 0.9314,
}  # fmt: skip

# What an unknown field is taken to be: a middling decoder in training.
USUAL: dict[str, Any] = {
    "mode": "train", "num_layers": 24, "num_encoder_layers": 0, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8,
    "head_size": 128, "intermediate_size": 7168, "experts_per_token": 1, "gated_mlp": True, "dropout": False,
    "vocabulary_size": 65536, "lm_head": True, "tied_embeddings": True, "encoder_decoder": False, "causal": True, "fixed_tokens": 0,  # noqa: E501
    "num_parameters": None, "trainable_share": 1.0, "dtype": "bfloat16", "attention": "sdpa", "score_bias": False,
    "gradient_checkpointing": False, "max_new_tokens": 256,
}  # fmt: skip


@dataclass(frozen=True)
class ClosedForm:
    """Phases of one workload.

    >>> form = ClosedForm.of(Workload(mode="train", hidden_size=896, num_layers=24))
    >>> one, two = form.batch_bytes(BatchShape.of([1, 2], 1024))
    >>> bool(one < two)
    True
    """

    phases: FloatArray
    """float64 (phases, components, columns), bytes."""

    @classmethod
    def of(cls, workload: Workload, constants: Mapping[str, float] = CONSTANTS) -> ClosedForm:
        return cls(np.stack(_Builder(workload, constants).phases()))

    def batch_bytes(self, shape: BatchShape) -> FloatArray:
        """Bytes that grow with the batch, at least one: float64 (K,)."""
        return np.maximum((_columns(shape) @ self.phases.sum(axis=1).T).max(axis=1), 1.0)

    def shares(self, shape: BatchShape) -> FloatArray:
        """Of the largest phase of each shape: the share of each component, and of what is quadratic in length. (K, 6)."""
        columns = _columns(shape)
        largest = (columns @ self.phases.sum(axis=1).T).argmax(axis=1)
        terms = self.phases[largest] * columns[:, None, :]
        total = np.maximum(terms.sum(axis=(1, 2)), 1.0)
        quadratic = terms[:, :, [3, 5, 6]].sum(axis=(1, 2))
        return np.concatenate([terms.sum(axis=2), quadratic[:, None]], axis=1) / total[:, None]


def _columns(shape: BatchShape) -> FloatArray:
    n = shape.num_samples.astype(np.float64)
    length = np.maximum(shape.longest[TOKENS], 1).astype(np.float64)
    target = np.maximum(shape.longest.get(TARGET, shape.longest[TOKENS]), 1).astype(np.float64)
    one = np.ones_like(n)
    return np.stack([one, n, n * length, n * length**2, n * target, n * target**2, n * length * target], axis=1)


def _filled(workload: Workload) -> dict[str, Any]:
    known: dict[str, Any] = {f.name: getattr(workload, f.name) for f in fields(workload)}
    known = {k: USUAL.get(k) if v is None else v for k, v in known.items()}
    hidden: int = known["hidden_size"]
    if workload.hidden_size is not None and workload.intermediate_size is None:
        known["intermediate_size"] = 4 * hidden
    if workload.num_heads is None and workload.head_size is None:
        known["head_size"] = min(128, hidden)
        known["num_heads"] = max(1, hidden // known["head_size"])
        known["num_kv_heads"] = workload.num_kv_heads or max(1, known["num_heads"] // 2)
    elif workload.num_kv_heads is None:
        known["num_kv_heads"] = known["num_heads"]
    return known


class _Builder:
    """Writes the phases down from a workload's fields."""

    def __init__(self, workload: Workload, constants: Mapping[str, float]) -> None:
        w = self.w = _filled(workload)
        self.c = constants
        self.element = ELEMENT_BYTES[workload.autocast or w["dtype"]]
        self.parameter = ELEMENT_BYTES[w["dtype"]]
        self.query = w["num_heads"] * w["head_size"]
        self.kv = w["num_kv_heads"] * w["head_size"]
        self.ffn = w["intermediate_size"] * w["experts_per_token"]
        self.fixed = float(w["fixed_tokens"])
        two_stacks = w["encoder_decoder"]
        speech = two_stacks and self.fixed > 0
        target = [4, 5] if two_stacks and not speech else [2, 3]
        # Tokens, tokens squared, of the decoder (or only stack) and of the encoder, as columns of a phase.
        offset = 0.0 if two_stacks else self.fixed
        self.words, self.words2 = self._powers(target[0], target[1], offset)
        self.read, self.read2 = self._powers(2, 3, 0.0)
        if speech:
            self.read, self.read2 = self._unit(1, self.fixed), self._unit(1, self.fixed**2)
        self.cross = self.fixed * self.words if speech else self._unit(6)
        self.layers = float(w["num_layers"])
        self.encoders = float(w["num_encoder_layers"] or (w["num_layers"] if two_stacks else 0))

    @staticmethod
    def _unit(column: int, value: float = 1.0) -> FloatArray:
        row = np.zeros(WIDTH)
        row[column] = value
        return row

    def _powers(self, one: int, two: int, offset: float) -> tuple[FloatArray, FloatArray]:
        first = self._unit(one) + self._unit(1, offset)
        second = self._unit(two) + self._unit(one, 2 * offset) + self._unit(1, offset**2)
        return first, second

    def phases(self) -> list[FloatArray]:
        if self.w["mode"] == "train":
            return self._training()
        return self._generation() if self.w["mode"] == "generate" else self._forward()

    def _phase(self, **parts: FloatArray | float) -> FloatArray:
        rows = [parts.get(name, 0.0) for name in COMPONENTS]
        return np.stack([np.asarray(r) if np.ndim(r) else self._unit(0, float(r)) for r in rows])  # type: ignore[arg-type]

    def _layer_keeps(self) -> float:
        """Bytes that a layer keeps for its backward pass, per token."""
        w, c, e = self.w, self.c, self.element
        kept = c["keep_hidden"] * w["hidden_size"] + c["keep_query"] * self.query + c["keep_kv"] * self.kv
        kept += (c["keep_ffn"] + (c["keep_gate"] if w["gated_mlp"] else 0.0)) * self.ffn
        kept = e * kept + (c["keep_dropout"] * w["hidden_size"] * e if w["dropout"] else 0.0)
        if e < 4:  # norms lift to float32
            kept += 4 * c["keep_wide"] * w["hidden_size"]
        return kept * (c["keep_lora"] if w["trainable_share"] < 0.5 else 1.0)

    def _scores(self, squared: FloatArray, per_score: float, per_mask: float) -> FloatArray:
        """Score matrices and masks of one layer of attention over ``squared`` pairs."""
        w = self.w
        size = 0.0
        if w["attention"] == "eager":
            size = per_score * w["num_heads"] * self.element + per_mask * self.element
        elif w["score_bias"]:
            size = self.c["score_bias"] * w["num_heads"] * self.element
        elif w["attention"] == "sdpa":
            size = per_mask * self.element
        return size * squared

    def _training(self) -> list[FloatArray]:
        w, c = self.w, self.c
        per_token = self._layer_keeps()
        keep = lambda squared: self._scores(squared, c["score_train"], c["mask_keep"])  # noqa: E731
        decoder = per_token * self.words, keep(self.words2)
        encoder = per_token * self.read, keep(self.read2)
        if w["encoder_decoder"]:
            decoder = 1.3 * decoder[0], decoder[1] + keep(self.cross)
        one_layer = (
            decoder[0] + (encoder[0] if self.encoders else 0.0),
            decoder[1] + (encoder[1] if self.encoders else 0.0),
        )
        if w["gradient_checkpointing"]:
            inputs = self.element * w["hidden_size"] * (self.layers * self.words + self.encoders * self.read)
            stored, scores = (
                inputs,
                self._scores(self.words2 + (self.read2 if self.encoders else 0.0), 0.0, c["mask_keep"]),
            )
        else:
            stored = self.layers * decoder[0] + self.encoders * encoder[0]
            scores = self.layers * decoder[1] + self.encoders * encoder[1]
        trains_all = w["trainable_share"] >= 0.5
        table = c["weight_grad"] * w["vocabulary_size"] * w["hidden_size"] * self.parameter if trains_all else 0.0
        cast = self._cast_weights()
        head = w["vocabulary_size"] * self.words if w["lm_head"] else np.zeros(WIDTH)
        copies = c["logits_train"] * self.element  # and in causal models a copy in float32
        copies += 4 * c["logits_wide"] if w["causal"] and self.element < 4 else 0.0
        run = self.element * (c["run_hidden"] * w["hidden_size"] + c["run_ffn"] * self.ffn) * self.words
        extra = self._scores(self.words2, c["score_run"], c["mask_run"])
        layer = one_layer if w["gradient_checkpointing"] else (run, extra)
        return [
            self._phase(weights=cast, activations=stored, attention=scores, logits=copies * head),
            self._phase(
                weights=cast + table,
                activations=stored,
                attention=scores,
                logits=c["logits_grad"] * self.element * head,
            ),
            self._phase(weights=cast, activations=stored + layer[0] + 0 * run, attention=scores + layer[1] + extra),
            self._phase(
                weights=cast + table * c["table_grad"], activations=self.element * w["hidden_size"] * self.words
            ),
        ]

    def _cast_weights(self) -> float:
        """Autocast keeps a copy of every matrix in the lower precision from its forward to its backward."""
        if self.element == self.parameter:
            return 0.0
        w = self.w
        matrices = (4 if w["encoder_decoder"] else 2) * w["hidden_size"] * (self.query + self.kv)
        matrices += (3 if w["gated_mlp"] else 2) * w["hidden_size"] * w["intermediate_size"]
        head = w["hidden_size"] * w["vocabulary_size"] if w["lm_head"] else 0
        return self.c["cast_weights"] * self.element * ((self.layers + self.encoders) * matrices + head)

    def _running(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What one layer holds while it runs without gradients: activations, scores, and where each attention begins.

        Attention first widens the mask (or the bias of every head) to what its kernel reads, and then lets go of it:
        that is a phase of its own, with the activations of the projections only.
        """
        w, c = self.w, self.c
        wide = self.element * (
            c["run_hidden"] * w["hidden_size"] + c["run_ffn"] * self.ffn + c["run_query"] * self.query
        )
        first = c["bias_hidden"] * w["hidden_size"]
        narrow = self.element * (first if w["score_bias"] else c["bias_query"] * (self.query + self.kv))
        tokens, squared = self.words, self.words2
        if w["encoder_decoder"] and w["mode"] == "generate":  # only the encoder reads in parallel
            tokens, squared = self.read, self.read2
        elif self.encoders:
            tokens, squared = np.maximum(tokens, self.read), np.maximum(squared, self.read2)
        fused = w["attention"] == "sdpa"
        per_mask = self.element * (c["bias_scores"] * w["num_heads"] if w["score_bias"] else c["bias_mask"])
        held = c["mask_run"] * squared if fused else self._scores(squared, c["score_run"], c["mask_run"])
        biased = self._phase(activations=narrow * tokens, attention=per_mask * squared if fused else 0.0 * held)
        return wide * tokens, held, biased

    def _forward(self) -> list[FloatArray]:
        w, c = self.w, self.c
        running, scores, biased = self._running()
        head = self.element * (w["vocabulary_size"] if w["lm_head"] else 0) * self.words
        encoded = self.element * w["hidden_size"] * (self.words + (self.read if self.encoders else 0.0))
        cache = (
            c["cache"] * 2 * self.kv * self.element * self.layers * self.words
        )  # models return it unless told otherwise
        if w["encoder_decoder"]:
            cache = cache + c["cache"] * 2 * self.kv * self.element * self.layers * self.read
        elif not w["causal"]:
            cache = np.zeros(WIDTH)
        return [
            self._phase(activations=running, attention=scores, cache=cache),
            biased + self._phase(cache=cache),
            self._phase(activations=encoded, logits=c["logits_run"] * head, cache=cache),
        ]

    def _generation(self) -> list[FloatArray]:
        w, c = self.w, self.c
        running, scores, biased = self._running()
        prompt = self.read if w["encoder_decoder"] else self.words
        new = self._unit(1, float(w["max_new_tokens"]))
        per_layer = c["cache"] * 2 * self.kv * self.element
        held = per_layer * (prompt + new)
        if w["encoder_decoder"]:
            held = held + self.element * w["hidden_size"] * prompt / max(self.layers, 1.0)
        last = self._unit(1, c["last_logits"] * 4.0 * w["vocabulary_size"])
        step = self._unit(1, self.element * self.ffn * 2.0)
        grown = self.layers * held + c["cache_layer"] * held
        mask = self._scores(self._unit(1) + prompt, c["score_run"], c["mask_run"])
        return [
            self._phase(activations=running, attention=scores),
            biased,
            self._phase(
                activations=self.element * w["hidden_size"] * prompt,
                cache=self.layers * per_layer * prompt,
                logits=last,
            ),
            self._phase(activations=step, attention=mask, cache=grown, logits=last),
        ]
