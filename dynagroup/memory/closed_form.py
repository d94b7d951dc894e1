"""Memory of a batch from a workload's sizes alone: the largest of a few phases, each a sum of what is alive in it.

A phase is a polynomial in the batch shape with non-negative coefficients, so the form is monotone. Its dimensionless
constants (how many copies of the hidden states a layer keeps, and so on) are fitted to simulations by ``regressor/train.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.run import ELEMENT_BYTES, MASK_ALIGNMENT, MONOMIALS, Phases, monomials
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TOKENS, BatchShape, target_tokens

__all__ = ["COMPONENTS", "CONSTANTS", "ClosedForm", "columns"]

FloatArray = NDArray[np.float64]
COMPONENTS = ("weights", "activations", "attention", "logits", "cache")

ONE, N, NL, NL2, NT, T2, NT2, NLT = map(MONOMIALS.index, ("1", "n", "nL", "nL2", "nT", "T2", "nT2", "nLT"))
QUADRATIC = [MONOMIALS.index(name) for name in ("L2", "nL2", "T2", "nT2", "LT", "nLT")]

CONSTANTS: dict[str, float] = {
    "bias_hidden": 3.0, "bias_kv": 1.0, "bias_mask": 2.0, "bias_query": 2.0, "bias_scores": 2.0, "cache": 1.0,
    "cache_layer": 0.2369, "cast_weights": 0.8553, "keep_cross": 0.3, "keep_dropout": 5.8452,
    "keep_ffn": 1.6466, "keep_gate": 3.6327, "keep_hidden": 0.4837, "keep_kv": 3.4212, "keep_lora": 1.2466,
    "keep_query": 1.611, "keep_wide": 3.3868, "last_logits": 2.0958, "logits_grad": 1.5, "logits_run": 1.0218,
    "logits_train": 4.7154, "logits_wide": 1.2982, "mask_keep": 0.9933, "mask_pass": 0.5, "mask_run": 1.0,
    "run_expert": 1.0, "run_ffn": 2.5, "run_hidden": 3.0, "run_query": 1.0, "score_bias": 1.05,
    "score_pass": 2.0, "score_pass_wide": 4.0, "score_run": 1.5, "score_train": 1.0, "score_wide": 3.0,
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
    """Memory of one workload: the largest of its phases.

    >>> form = ClosedForm.of(Workload(mode="train", hidden_size=896, num_layers=24))
    >>> one, two = form.batch_bytes(BatchShape.of([1, 2], 1024))
    >>> bool(one < two)
    True
    """

    phases: FloatArray
    """float64 (phases, components, monomials), bytes."""
    until: float = np.inf
    """Tokens of the longest sample for which ``phases`` hold."""
    after: FloatArray | None = None
    """Phases beyond that."""
    aligned: ClosedForm | None = None
    """The form of lengths whose masks need no padding, where that is another one."""
    packed: bool = False
    """Whether a batch is one row of all its tokens."""

    @classmethod
    def of(cls, workload: Workload, constants: Mapping[str, float] = CONSTANTS) -> ClosedForm:
        """What was traced of the model, or else what its sizes say."""
        packed = workload.layout == "packed"
        if workload.phases is not None:
            return replace(cls.traced(workload.phases), packed=packed)
        return cls(np.stack(_Builder(workload, constants).phases()), packed=packed)

    @classmethod
    def traced(cls, phases: Phases) -> ClosedForm:
        """From phases whose components nobody knows: they all count as activations."""
        aligned = None if phases.aligned is None else cls.traced(phases.aligned)
        if phases.until is None:
            return cls(_spread(phases.rows), aligned=aligned)
        return cls(_spread(phases.rows), phases.until, _spread(phases.after), aligned)

    def batch_bytes(self, shape: BatchShape) -> FloatArray:
        """Bytes that grow with the batch, at least one: float64 (K,)."""
        if self.after is None:
            return np.maximum(_largest(self.phases, columns(shape, self.packed)), 1.0)
        # Beyond the border never less than at it, so that memory rises with the length everywhere.
        inside = {**shape.longest, TOKENS: np.minimum(shape.longest[TOKENS], int(self.until))}
        within = _largest(self.phases, columns(BatchShape.of(shape.num_samples, inside)))
        beyond = np.where(shape.longest[TOKENS] > self.until, _largest(self.after, columns(shape)), 0.0)
        return np.maximum(np.maximum(within, beyond), 1.0)

    def relative(self, shape: BatchShape, baseline: BatchShape) -> FloatArray:
        """Bytes of each batch as a share of the baseline's: float64 (K,)."""
        return self.batch_bytes(shape) / self.baseline_bytes(baseline)

    def baseline_bytes(self, baseline: BatchShape) -> FloatArray:
        """Bytes of a batch that others are held against: float64 (K,).

        A batch is taken to pad its masks, so that its share rises with the length; a baseline that does not is not.
        """
        least = self.batch_bytes(baseline)
        if self.aligned is not None:
            spared = np.logical_or.reduce(
                [longest % MASK_ALIGNMENT == 0 for longest in (baseline.longest[TOKENS], target_tokens(baseline))]
            )
            least = np.where(spared, self.aligned.batch_bytes(baseline), least)
        return least

    def shares(self, shape: BatchShape) -> FloatArray:
        """Of the largest phase of each shape: the share of each component, and of what is quadratic in length. (K, 6)."""
        values, phases = columns(shape, self.packed), self.phases
        largest = (values @ phases.sum(axis=1).T).argmax(axis=1)
        terms = phases[largest] * values[:, None, :]
        total = np.maximum(terms.sum(axis=(1, 2)), 1.0)
        quadratic = terms[:, :, QUADRATIC].sum(axis=(1, 2))
        return np.concatenate([terms.sum(axis=2), quadratic[:, None]], axis=1) / total[:, None]


def _spread(rows: Sequence[Sequence[float]]) -> FloatArray:
    phases = np.zeros((len(rows), len(COMPONENTS), len(MONOMIALS)))
    phases[:, COMPONENTS.index("activations")] = rows
    return phases


def _largest(phases: FloatArray, values: FloatArray) -> FloatArray:
    return (values @ phases.sum(axis=1).T).max(axis=1)


def columns(shape: BatchShape, packed: bool = False) -> FloatArray:
    """The monomials of a shape; a target without lengths of its own is as long as the tokens.

    Packed, a batch is one sample as long as all of its samples together.
    """
    if packed:
        total = np.maximum(shape.total[TOKENS], 1)
        return monomials(np.ones_like(total), total, total)
    return monomials(shape.num_samples, np.maximum(shape.longest[TOKENS], 1), np.maximum(target_tokens(shape), 1))


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
        target = (NT, NT2) if two_stacks else (NL, NL2)
        # Tokens, tokens squared, of the decoder (or only stack) and of the encoder, as columns of a phase.
        offset = 0.0 if two_stacks else self.fixed
        self.words, self.words2 = self._powers(target[0], target[1], offset)
        self.read, self.read2 = self._powers(NL, NL2, 0.0)
        if speech:
            self.read, self.read2 = self._unit(N, self.fixed), self._unit(N, self.fixed**2)
        self.cross = self.fixed * self.words if speech else self._unit(NLT)
        # A decoder beside an encoder knows no padding: its mask is the same for every sample.
        self.mask_of = {NT2: self._unit(T2)} if two_stacks else {}
        # Models that have no dropout any more normalise their scores in float32.
        self.wide_scores = self.element < 4 and not w["dropout"] and not two_stacks
        # BART and its kin drop hidden states only.
        self.dropped_scores = w["mode"] == "train" and w["dropout"] and (not two_stacks or w["score_bias"])
        self.layers = float(w["num_layers"])
        self.encoders = float(w["num_encoder_layers"] or (w["num_layers"] if two_stacks else 0))

    @staticmethod
    def _unit(column: int, value: float = 1.0) -> FloatArray:
        row = np.zeros(len(MONOMIALS))
        row[column] = value
        return row

    def _powers(self, one: int, two: int, offset: float) -> tuple[FloatArray, FloatArray]:
        first = self._unit(one) + self._unit(N, offset)
        second = self._unit(two) + self._unit(one, 2 * offset) + self._unit(N, offset**2)
        return first, second

    def phases(self) -> list[FloatArray]:
        if self.w["mode"] == "train":
            return self._training()
        return self._generation() if self.w["mode"] == "generate" else self._forward()

    def _phase(self, **parts: FloatArray | float) -> FloatArray:
        rows = [parts.get(name, 0.0) for name in COMPONENTS]
        return np.stack([np.asarray(r) if np.ndim(r) else self._unit(ONE, float(r)) for r in rows])  # type: ignore[arg-type]

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
        w, c = self.w, self.c
        if w["attention"] == "eager":
            copies = per_score * (c["score_wide"] if self.wide_scores else 1.0)
            if self.dropped_scores:  # kept before and after dropout, and its mask of one byte
                copies = per_score * (2 + 1 / self.element)
            return self.element * (copies * w["num_heads"] + per_mask) * squared
        shared = self._shared(squared)
        if w["score_bias"]:
            return self.element * c["score_bias"] * w["num_heads"] * shared
        return self.element * per_mask * shared if w["attention"] == "sdpa" else 0.0 * squared

    def _shared(self, squared: FloatArray) -> FloatArray:
        """The pairs of which a mask or bias has one entry each."""
        return next((unit for column, unit in self.mask_of.items() if squared[column] > 0), squared)

    def _training(self) -> list[FloatArray]:
        w, c = self.w, self.c
        per_token = self._layer_keeps()
        keep = lambda squared: self._scores(squared, c["score_train"], c["mask_keep"])  # noqa: E731
        decoder, encoder = (per_token * self.words, keep(self.words2)), (per_token * self.read, keep(self.read2))
        if w["encoder_decoder"]:
            decoder = (1 + c["keep_cross"]) * decoder[0], decoder[1] + keep(self.cross)
        stored = self._stored(decoder, self.layers, self.words, self.words2)
        below = (
            self._stored(encoder, self.encoders, self.read, self.read2)
            if self.encoders
            else (0 * stored[0], 0 * stored[1])
        )
        all_stored, all_scores = stored[0] + below[0], stored[1] + below[1]
        trains_all = w["trainable_share"] >= 0.5
        table = c["weight_grad"] * w["vocabulary_size"] * w["hidden_size"] * self.parameter if trains_all else 0.0
        cast = self._cast_weights()
        head = w["vocabulary_size"] * self.words if w["lm_head"] else np.zeros(len(MONOMIALS))
        copies = c["logits_train"] * self.element  # and in causal models a copy in float32
        copies += 4 * c["logits_wide"] if w["causal"] and self.element < 4 else 0.0
        output = self.element * head  # what the model returned lives as long as its caller holds it
        first = self.element * w["hidden_size"] * (self.words + (self.read if self.encoders else 0.0))
        phases = [
            self._phase(weights=cast, activations=all_stored, attention=all_scores, logits=copies * head),
            self._phase(
                weights=cast + table, activations=all_stored, attention=all_scores, logits=c["logits_grad"] * output
            ),
            self._phase(weights=cast + table * c["table_grad"], activations=first, logits=output),
        ]
        stacks = [(all_stored, all_scores, decoder, self.words, self.words2)]
        if self.encoders:
            stacks.append((*below, encoder, self.read, self.read2))
        for kept, scores, layer, tokens, squared in stacks:
            run = self.element * (c["run_hidden"] * w["hidden_size"] + c["run_ffn"] * self.ffn) * tokens
            extra = self._scores(squared, c["score_run"], c["mask_run"])
            if w["gradient_checkpointing"]:
                run, extra = run + layer[0], extra + layer[1]
            parts = {"activations": kept + run, "attention": scores + extra, "logits": output}
            phases.append(self._phase(weights=cast + table, **parts))
        return phases

    def _stored(
        self, layer: tuple[FloatArray, FloatArray], count: float, tokens: FloatArray, squared: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """What a stack keeps for its backward pass: of every layer all, or with checkpointing its input."""
        if not self.w["gradient_checkpointing"]:
            return count * layer[0], count * layer[1]
        return self.element * self.w["hidden_size"] * count * tokens, self._scores(squared, 0.0, self.c["mask_keep"])

    def _cast_weights(self) -> float:
        """Autocast keeps a copy of every matrix in the lower precision from its forward to its backward."""
        if self.element == self.parameter:
            return 0.0
        w = self.w
        matrices = (4 if w["encoder_decoder"] else 2) * w["hidden_size"] * (self.query + self.kv)
        matrices += (3 if w["gated_mlp"] else 2) * w["hidden_size"] * w["intermediate_size"]
        head = w["hidden_size"] * w["vocabulary_size"] if w["lm_head"] else 0
        return self.c["cast_weights"] * self.element * ((self.layers + self.encoders) * matrices + head)

    def _running(self, tokens: FloatArray, squared: FloatArray, **held: FloatArray) -> list[FloatArray]:
        """Two phases of a layer that runs without gradients, beside what is ``held`` already: its attention, and what follows.

        Attention widens the mask (or the bias of every head) to what its kernel reads, or holds the scores in several
        copies; the feed-forward layer is wide, and beside it only what attention returned is left.
        """
        w, c = self.w, self.c
        fused = w["attention"] != "eager"
        wide = c["run_hidden"] * w["hidden_size"] + c["run_ffn"] * self.ffn + c["run_query"] * self.query
        if w["experts_per_token"] > 1:
            wide += c["run_expert"] * w["experts_per_token"] * w["hidden_size"]
        narrow = c["bias_hidden"] * w["hidden_size"] + c["bias_query"] * self.query + c["bias_kv"] * self.kv
        if w["attention"] == "sdpa" and self.kv < self.query:
            narrow += 2 * self.query  # the kernel that takes a mask has no grouped heads
        scores = 0.0
        if fused and w["attention"] == "sdpa":
            scores = c["bias_scores"] * w["num_heads"] if w["score_bias"] else c["bias_mask"]
        elif not fused:
            copies = c["score_pass_wide"] if self.wide_scores else c["score_pass"]
            scores = copies * w["num_heads"] + c["mask_pass"]
        left = c["mask_pass"] if w["attention"] == "sdpa" else 0.0 if fused else w["num_heads"] + c["mask_pass"]
        kept = held.pop("activations", 0.0)
        squared = self._shared(squared) if fused else squared
        return [
            self._phase(
                activations=kept + self.element * narrow * tokens, attention=self.element * scores * squared, **held
            ),
            self._phase(
                activations=kept + self.element * wide * tokens, attention=self.element * left * squared, **held
            ),
        ]

    def _forward(self) -> list[FloatArray]:
        w, c = self.w, self.c
        head = self.element * (w["vocabulary_size"] if w["lm_head"] else 0) * self.words
        hidden = self.element * w["hidden_size"]
        per_layer = c["cache"] * 2 * self.kv * self.element * self.layers  # models return it unless told otherwise
        cache = per_layer * self.words if w["causal"] or w["encoder_decoder"] else np.zeros(len(MONOMIALS))
        phases, encoded = [], np.zeros(len(MONOMIALS))
        if self.encoders:
            phases += self._running(self.read, self.read2)
            cache, encoded = cache + per_layer * self.read, hidden * self.read
        phases += self._running(self.words, self.words2, cache=cache, activations=encoded)
        return [
            *phases,
            self._phase(activations=encoded + hidden * self.words, logits=c["logits_run"] * head, cache=cache),
        ]

    def _generation(self) -> list[FloatArray]:
        w, c = self.w, self.c
        two_stacks = bool(w["encoder_decoder"])
        prompt, squared = (self.read, self.read2) if two_stacks else (self.words, self.words2)
        new = self._unit(N, float(w["max_new_tokens"]))
        per_layer = c["cache"] * 2 * self.kv * self.element
        held = per_layer * (prompt + new)
        if two_stacks:
            held = held + self.element * w["hidden_size"] * prompt / max(self.layers, 1.0)
        filled = np.zeros(len(MONOMIALS)) if two_stacks else self.layers * per_layer * prompt
        last = self._unit(N, c["last_logits"] * 4.0 * w["vocabulary_size"])
        step = self._unit(N, self.element * self.ffn * 2.0)
        grown = self.layers * held + c["cache_layer"] * held
        mask = np.zeros(len(MONOMIALS))  # of one new token: fused kernels need none
        if w["attention"] == "eager":
            mask = self._scores(self._unit(N) + prompt, c["score_pass"], c["mask_pass"])
        encoded = self.element * w["hidden_size"] * prompt
        return [
            *self._running(prompt, squared, cache=filled),
            self._phase(activations=encoded, cache=self.layers * per_layer * prompt, logits=last),
            self._phase(activations=step, attention=mask, cache=grown, logits=last),
        ]
