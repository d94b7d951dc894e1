"""Computes a model's memory from its sizes, for models that cannot be traced.

A step passes through a few phases; its memory is that of the largest one. The memory of a phase is a
polynomial in the batch shape with coefficients of 0 or more, so memory never falls when a batch grows.
``regressor/train.py`` has fitted constants (such as how many copies of hidden states a layer keeps) to
simulations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynagroup.memory.phases import ELEMENT_BYTES, MONOMIALS, FloatArray, Phases, columns
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape

# Polynomials of one monomial: N is one byte per sample, NL one byte per padded token, and so on.
UNIT = dict(zip(MONOMIALS, np.eye(len(MONOMIALS)), strict=True))
ONE = UNIT["1"]
N = UNIT["n"]
NL = UNIT["nL"]
NL2 = UNIT["nL2"]
NT = UNIT["nT"]
T2 = UNIT["T2"]
NT2 = UNIT["nT2"]
NLT = UNIT["nLT"]
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


@dataclass(frozen=True, slots=True)
class Form:
    """A formula for the memory of a batch."""

    phases: Phases
    packed: bool = False
    """True: samples are packed, so that a batch is one row with all its tokens."""

    def ratio(self, shape: BatchShape, baseline: BatchShape) -> FloatArray:
        """Returns the memory of each batch divided by that of its baseline: float64 (K,)."""
        baseline_bytes = self.phases.baseline_bytes(baseline, self.packed)
        return self.phases.bytes(shape, self.packed) / baseline_bytes

    def shares(self, shape: BatchShape) -> tuple[FloatArray, FloatArray]:
        """Returns how much of each batch's memory does not depend on its shape, and is quadratic in lengths: float64 (K,)."""
        values = columns(shape, self.packed)
        rows = np.array(self.phases.rows)
        largest = (values @ rows.T).argmax(axis=1)
        terms = rows[largest] * values
        total = np.maximum(terms.sum(axis=1), 1.0)
        return terms[:, 0] / total, terms[:, QUADRATIC].sum(axis=1) / total


def traced_form(workload: Workload) -> Form | None:
    """Returns the formula of a traced workload; None: it was not traced."""
    if workload.phases is None:
        return None
    return Form(workload.phases, packed=workload.layout == "packed")


def closed_form(workload: Workload, constants: Mapping[str, float]) -> Form:
    """Returns the formula of a model of which the mode and all sizes are known."""
    formula = _Formula(workload, constants)
    if workload.mode == "train":
        rows = formula.training()
    elif workload.mode == "generate":
        rows = formula.generation()
    else:
        rows = formula.forward()
    phases = Phases(tuple(map(tuple, rows)))
    return Form(phases, packed=workload.layout == "packed")


@dataclass(frozen=True, slots=True)
class _Stack:
    """An encoder, a decoder, or the only stack of layers; polynomials of how much a layer of it reads."""

    num_layers: int
    tokens: FloatArray
    pairs: FloatArray
    """Pairs of tokens between which attention has scores."""
    cross_pairs: FloatArray | None = None
    """The same for attention to the encoder's output; None: the stack has no such attention."""


class _Formula:
    """The phases of a workload, each a polynomial in bytes: float64 (12,)."""

    def __init__(self, workload: Workload, constants: Mapping[str, float]) -> None:
        w: Any = Workload(**USUAL | workload.known())  # its sizes are known
        self.workload = w
        self.constants = constants
        self.element = ELEMENT_BYTES[w.autocast or w.dtype]
        self.parameter = ELEMENT_BYTES[w.dtype]
        self.query = w.num_heads * w.head_size
        self.kv = w.num_kv_heads * w.head_size
        self.ffn = w.intermediate_size * w.experts_per_token
        self.head = w.vocabulary_size if w.lm_head else 0
        # Models without dropout compute the softmax of attention scores in float32.
        self.wide_scores = self.element < 4 and not w.dropout and not w.encoder_decoder
        # BART and similar models apply dropout to hidden states only, not to attention scores.
        drops_scores = not w.encoder_decoder or w.score_bias
        self.dropped_scores = w.mode == "train" and w.dropout and drops_scores
        self.encoder = None
        if w.encoder_decoder:
            self._set_two_stacks()
            return
        fixed = w.fixed_tokens
        pairs = NL2 + 2 * fixed * NL + fixed**2 * N
        self.decoder = _Stack(w.num_layers, tokens=NL + fixed * N, pairs=pairs)
        self.prompt = self.decoder

    def _set_two_stacks(self) -> None:
        w = self.workload
        tokens = NL
        pairs = NL2
        cross_pairs = NLT
        if w.fixed_tokens:  # speech: the encoder always reads the same number of frames
            tokens = w.fixed_tokens * N
            pairs = w.fixed_tokens**2 * N
            cross_pairs = w.fixed_tokens * NT
        self.encoder = _Stack(w.num_encoder_layers or w.num_layers, tokens, pairs)
        self.decoder = _Stack(w.num_layers, NT, NT2, cross_pairs)
        self.prompt = self.encoder

    def training(self) -> list[FloatArray]:
        w = self.workload
        c = self.constants
        stored = self._stored(self.decoder)
        stored_below = self._stored(self.encoder) if self.encoder else NOTHING
        table = NOTHING
        if w.trainable_share >= 0.5:
            embeddings = w.vocabulary_size * w.hidden_size * self.parameter
            table = c["weight_grad"] * embeddings * ONE
        cast = self._cast_weights() * ONE
        copies = c["logits_train"] * self.element
        if w.causal and self.element < 4:  # causal models also make a copy in float32
            copies += 4 * c["logits_wide"]
        logits = self.head * self.decoder.tokens
        output = self.element * logits  # the caller keeps the model's output alive
        first_tokens = self.decoder.tokens
        if self.encoder:
            first_tokens = first_tokens + self.encoder.tokens
        first_hidden = self.element * w.hidden_size * first_tokens
        kept = stored + stored_below
        forward_ends = cast + kept + copies * logits
        of_logits = cast + table + kept + c["logits_grad"] * output
        of_embeddings = cast + c["table_grad"] * table + first_hidden + output
        of_layer = cast + table + kept + self._backward(self.decoder) + output
        phases = [forward_ends, of_logits, of_embeddings, of_layer]
        if self.encoder:
            phases.append(cast + table + stored_below + self._backward(self.encoder) + output)
        return phases

    def forward(self) -> list[FloatArray]:
        w = self.workload
        c = self.constants
        hidden = self.element * w.hidden_size
        # Models return the cache by default.
        per_token = c["cache"] * 2 * self.kv * self.element * self.decoder.num_layers
        cache = NOTHING
        if w.causal or w.encoder_decoder:
            cache = per_token * self.decoder.tokens
        encoded = NOTHING
        phases = []
        if self.encoder:
            phases += self._running(self.encoder, NOTHING)
            cache = cache + per_token * self.encoder.tokens
            encoded = hidden * self.encoder.tokens
        phases += self._running(self.decoder, cache + encoded)
        logits = self.element * self.head * self.decoder.tokens
        phases.append(encoded + hidden * self.decoder.tokens + c["logits_run"] * logits + cache)
        return phases

    def generation(self) -> list[FloatArray]:
        w = self.workload
        c = self.constants
        prompt = self.prompt.tokens
        hidden = self.element * w.hidden_size
        per_layer = c["cache"] * 2 * self.kv * self.element
        filled = self.decoder.num_layers * per_layer * prompt
        layer_cache = per_layer * (prompt + w.max_new_tokens * N)
        if self.encoder:
            layer_cache = layer_cache + hidden * prompt / max(self.decoder.num_layers, 1)
        cache = (self.decoder.num_layers + c["cache_layer"]) * layer_cache
        last_logits = c["last_logits"] * 4.0 * w.vocabulary_size * N
        step = self.element * self.ffn * 2.0 * N
        mask = NOTHING
        if w.attention == "eager":  # fused kernels need no mask for one new token
            mask = self._scores(N + prompt, c["score_pass"], c["mask_pass"])
        running = self._running(self.prompt, NOTHING if self.encoder else filled)
        prefilled = hidden * prompt + filled + last_logits
        decoding = step + mask + cache + last_logits
        return [*running, prefilled, decoding]

    def _layer_keeps(self, stack: _Stack) -> FloatArray:
        """Returns the bytes that one layer keeps for its backward pass."""
        w = self.workload
        c = self.constants
        per_token = c["keep_hidden"] * w.hidden_size
        per_token += c["keep_query"] * self.query
        per_token += c["keep_kv"] * self.kv
        per_token += c["keep_ffn"] * self.ffn
        if w.gated_mlp:
            per_token += c["keep_gate"] * self.ffn
        if w.dropout:
            per_token += c["keep_dropout"] * w.hidden_size
        per_token *= self.element
        if self.element < 4:  # normalisation layers compute in float32
            per_token += 4 * c["keep_wide"] * w.hidden_size
        if w.trainable_share < 0.5:
            per_token *= c["keep_lora"]
        scores = self._scores(stack.pairs, c["score_train"], c["mask_keep"])
        if stack.cross_pairs is None:
            return per_token * stack.tokens + scores
        cross_scores = self._scores(stack.cross_pairs, c["score_train"], c["mask_keep"])
        return (1 + c["keep_cross"]) * per_token * stack.tokens + scores + cross_scores

    def _stored(self, stack: _Stack) -> FloatArray:
        """Returns what a stack keeps for its backward pass; with gradient checkpointing, its layers' inputs."""
        if not self.workload.gradient_checkpointing:
            return stack.num_layers * self._layer_keeps(stack)
        inputs = self.element * self.workload.hidden_size * stack.num_layers * stack.tokens
        return inputs + self._scores(stack.pairs, 0.0, self.constants["mask_keep"])

    def _backward(self, stack: _Stack) -> FloatArray:
        """Returns what the backward pass of one layer needs, beside what the stack keeps."""
        c = self.constants
        per_token = c["run_hidden"] * self.workload.hidden_size + c["run_ffn"] * self.ffn
        needs = self.element * per_token * stack.tokens
        needs = needs + self._scores(stack.pairs, c["score_run"], c["mask_run"])
        if self.workload.gradient_checkpointing:
            needs = needs + self._layer_keeps(stack)
        return needs

    def _running(self, stack: _Stack, beside: FloatArray) -> list[FloatArray]:
        """Returns two phases of a layer without gradients: attention, and the rest; ``beside``: bytes kept besides."""
        w = self.workload
        c = self.constants
        narrow = c["bias_hidden"] * w.hidden_size + c["bias_query"] * self.query
        narrow += c["bias_kv"] * self.kv
        wide = c["run_hidden"] * w.hidden_size + c["run_ffn"] * self.ffn
        wide += c["run_query"] * self.query
        if w.experts_per_token > 1:
            wide += c["run_expert"] * w.experts_per_token * w.hidden_size
        pairs = self._shared(stack.pairs)
        if w.attention == "eager":
            pairs = stack.pairs
            copies = c["score_pass_wide"] if self.wide_scores else c["score_pass"]
            during = copies * w.num_heads + c["mask_pass"]
            after = w.num_heads + c["mask_pass"]
        elif w.attention == "sdpa":
            during = c["bias_scores"] * w.num_heads if w.score_bias else c["bias_mask"]
            after = c["mask_pass"]
            if self.kv < self.query:  # the kernel that takes a mask needs as many key heads
                narrow += 2 * self.query
        else:
            during = 0.0
            after = 0.0
        attending = beside + self.element * (narrow * stack.tokens + during * pairs)
        others = beside + self.element * (wide * stack.tokens + after * pairs)
        return [attending, others]

    def _scores(self, pairs: FloatArray, per_score: float, per_mask: float) -> FloatArray:
        """Returns the bytes of one layer's attention scores and masks for so many pairs of tokens."""
        w = self.workload
        c = self.constants
        if w.attention == "eager":
            copies = per_score
            if self.dropped_scores:  # before and after dropout, and a byte per score for its mask
                copies *= 2 + 1 / self.element
            elif self.wide_scores:
                copies *= c["score_wide"]
            return self.element * (copies * w.num_heads + per_mask) * pairs
        if w.score_bias:
            return self.element * c["score_bias"] * w.num_heads * self._shared(pairs)
        if w.attention == "sdpa":
            return self.element * per_mask * self._shared(pairs)
        return NOTHING

    def _shared(self, pairs: FloatArray) -> FloatArray:
        """Returns the pairs for which a mask or bias is stored; all samples of an encoder-decoder share one."""
        if self.workload.encoder_decoder and pairs @ NT2 > 0:
            return T2
        return pairs

    def _cast_weights(self) -> float:
        """Returns the bytes of weights in lower precision that autocast keeps until the backward pass."""
        if self.element == self.parameter:
            return 0.0
        w = self.workload
        num_attentions = 2 if w.encoder_decoder else 1
        num_projections = 3 if w.gated_mlp else 2
        num_layers = self.decoder.num_layers
        if self.encoder:
            num_layers += self.encoder.num_layers
        per_layer = num_attentions * 2 * w.hidden_size * (self.query + self.kv)
        per_layer += num_projections * w.hidden_size * w.intermediate_size
        elements = num_layers * per_layer + w.hidden_size * self.head
        return self.constants["cast_weights"] * self.element * elements
