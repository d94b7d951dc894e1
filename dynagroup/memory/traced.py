"""Predicts the bytes of any batch of one model from a trace: static memory, plus phases that depend on the batch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import ELEMENT_BYTES, FloatArray, MakeInputs, Mode, Phases
from dynagroup.memory.workload import Workload, assumed
from dynagroup.shapes import TARGET, TOKENS, BatchShape, primary

# Optimizer state per trainable parameter: (multiples of the parameter's bytes, additional bytes). "adamw_master" has
# two states and a copy of the parameter, all in float32 (DeepSpeed, Megatron).
OPTIMIZERS: Mapping[str, tuple[float, float]] = {
    "adamw": (2, 0),
    "adam": (2, 0),
    "adamw_8bit": (0, 2),
    "lion": (1, 0),
    "lion_8bit": (0, 1),
    "muon": (1, 0),
    "sgd": (0, 0),
    "sgd_momentum": (1, 0),
    "adafactor": (0, 0),
    "adamw_master": (0, 12),
}
# Measurements can correct a trace only if their workload has the same values in these fields.
_SAME = (
    "mode",
    "num_layers",
    "hidden_size",
    "vocabulary_size",
    "dtype",
    "autocast",
    "attention",
    "layout",
    "gradient_checkpointing",
    "max_new_tokens",
)


def optimizer_bytes(optimizer: str | float, dtype: str) -> float:
    """Returns the bytes of optimizer state per trainable parameter of this dtype, for a name in ``OPTIMIZERS``."""
    if isinstance(optimizer, (int, float)):
        return float(optimizer)
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            "`optimizer` must be a number of bytes per trained parameter, or one of "
            f"{', '.join(OPTIMIZERS)}, but is {optimizer!r}"
        )
    multiple, additional = OPTIMIZERS[optimizer]
    return float(multiple * ELEMENT_BYTES[dtype] + additional)


@dataclass(frozen=True)
class TracedMemory:
    """Predicts the bytes of any batch of one traced model. Make one with :meth:`of`.

    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000)
    >>> memory = TracedMemory.of(config, "train", dtype="bf16", gradient_checkpointing=True)
    >>> one, two = memory.batch_bytes(BatchShape.of([1, 2], 512))
    >>> bool(one < two < 2 * one + 1e6)
    True
    """

    static_bytes: int
    workload: Workload
    pads_masks: bool = True
    """False: all lengths are multiples of 16, so that attention masks are not padded."""
    factor: float = 1.0
    """Predicted bytes are ``factor`` times the trace plus ``constant_bytes``, see :meth:`corrected`."""
    constant_bytes: float = 0.0
    description: str = field(default="a model", compare=False)
    longest: int | None = field(default=None, compare=False)
    """Tokens of the longest sample that the model accepts; None: unknown."""
    stride: int = field(default=1, compare=False)
    """Units of length that become one position of the model: 320 samples of a waveform in wav2vec2, 1 token of a text."""

    @classmethod
    def of(
        cls,
        model_or_config: Any,
        mode: Mode = "train",
        *,
        lora: Any = None,
        optimizer: str | float | None = None,
        inputs: MakeInputs | None = None,
        measured: Measurements | None = None,
        **known: Any,
    ) -> "TracedMemory":
        """Traces a model, which takes a few seconds on the CPU and loads no weights.

        Args:
            lora: True, an int (rank of the adapters), or a peft config: only adapters are trained. Needs peft.
            optimizer: a name in ``OPTIMIZERS``, or float: bytes of state per trainable parameter. None: AdamW.
            inputs: see :func:`~dynagroup.memory.simulate`.
            measured: rows of :func:`~dynagroup.memory.measure` from a device, which correct the trace.
            known: values of :class:`Workload` fields.

        ConfigError: the model cannot be traced.
        """
        from dynagroup.memory.trace.audio import convolutions, length_in_words, stride_of
        from dynagroup.memory.trace.model import (
            as_meta_model,
            positions_of,
            text_config,
            trained_dtype,
        )
        from dynagroup.memory.trace.program import static_bytes

        asked = Workload(mode=mode, **known)
        model = as_meta_model(
            model_or_config, dtype=asked.dtype, attention=asked.attention, lora=lora
        )
        optimizer_name = None
        if isinstance(optimizer, str):
            optimizer_name = optimizer
        elif optimizer is None and asked.optimizer_bytes is None:
            optimizer_name = "AdamW"
        if optimizer is not None:
            state_bytes = optimizer_bytes(optimizer, trained_dtype(model))
            asked = asked.replace(optimizer_bytes=state_bytes)
        workload = asked.completed(model).traced(model, inputs)
        name = model_or_config
        if not isinstance(name, str):
            name = type(model_or_config).__name__
        run = f"traced ({assumed(workload, optimizer_name)})"
        units = length_in_words(model)
        memory = cls(
            static_bytes=static_bytes(model, workload),
            workload=workload,
            description=f"{name} of {workload.num_parameters:,} parameters, {run}{units}",
            longest=positions_of(text_config(model.config)),
            stride=stride_of(convolutions(model.config)),
        )
        return memory if measured is None else memory.corrected(measured)

    def corrected(self, measured: Measurements) -> "TracedMemory":
        """Returns this trace with predictions raised so that no measured row is above its prediction. Predictions
        become ``factor`` times the trace plus a constant, never below the trace: the line above all rows with the
        smallest mean excess. Static memory becomes the larger of traced and measured."""
        if not isinstance(measured, Measurements) or not measured.complete:
            raise ConfigError(
                "`measured` must be Measurements with at least one row that did not run out of memory"
            )
        ours = self.workload.known()
        theirs = measured.workload.known()
        for name in _SAME:
            if name in ours and name in theirs and ours[name] != theirs[name]:
                raise ConfigError(
                    f"`measured` has {name}={theirs[name]!r}, but the traced model {name}={ours[name]!r}; "
                    "measure the workload that you will run"
                )
        factor, constant = line_above(self._traced_bytes(measured.shapes()), measured.batch_bytes())
        static = max(self.static_bytes, *(row.static_bytes for row in measured.complete))
        return replace(self, static_bytes=static, factor=factor, constant_bytes=constant)

    def __str__(self) -> str:
        if self.factor == 1.0 and self.constant_bytes == 0.0:
            return self.description
        line = f"x {self.factor:.3g} + {self.constant_bytes / 1e9:.3g} GB"
        return f"{self.description}, raised to measured rows ({line})"

    @property
    def fingerprint(self) -> str:
        values = (
            self.static_bytes,
            self.pads_masks,
            self.workload.to_json(),
            self.factor,
            self.constant_bytes,
        )
        text = " ".join(map(str, values))
        return "traced-" + hashlib.sha256(text.encode()).hexdigest()[:12]

    @cached_property
    def _phases(self) -> Phases:
        phases = self.workload.phases
        if phases is None:
            raise ConfigError("`workload` was not traced; use TracedMemory.of(model), which traces")
        if self.pads_masks or phases.aligned is None:
            return phases
        return phases.aligned

    @property
    def _is_packed(self) -> bool:
        return self.workload.layout == "packed"

    def _traced_bytes(self, shape: BatchShape) -> FloatArray:
        return self._phases.bytes(shape, self._is_packed)

    @cached_property
    def _has_targets(self) -> bool:
        shape = BatchShape.of(8, {TOKENS: [64, 64], TARGET: [1, 4096]})
        short, long = self._traced_bytes(shape)
        return bool(long > short)

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        """Returns the peak bytes of each batch, without static memory: float64 (K,)."""
        others = [name for name in shape.longest if name != primary(shape.longest)]
        if others and not self._has_targets:
            raise ConfigError(
                "the model was traced with one stream of tokens, but batches also have the stream "
                f"{others[0]!r}; give each sample one length (the sum of both), or, if {others[0]!r} "
                f"is not padded, add & AdditiveCap({others[0]!r}, limit)"
            )
        return self.factor * self._traced_bytes(shape) + self.constant_bytes

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        traced_baseline = self._phases.baseline_bytes(baseline, self._is_packed)
        return self.batch_bytes(shape) / (self.factor * traced_baseline + self.constant_bytes)


def line_above(predicted: FloatArray, measured: FloatArray) -> tuple[float, float]:
    """Returns (factor >= 1, constant >= 0) of the line above all ``measured`` with the least mean relative excess. That
    is piecewise linear in the factor, so only its ends and lines through two rows need to be tried."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.subtract.outer(measured, measured) / np.subtract.outer(predicted, predicted)
    slopes = slopes[np.isfinite(slopes)]
    steepest = float((measured / predicted).max())
    best = (1.0, 0.0)
    least_excess = np.inf
    for factor in np.unique(np.maximum([1.0, steepest, *slopes], 1.0)):
        constant = max(float((measured - factor * predicted).max()), 0.0)
        excess = np.mean((factor * predicted + constant) / measured)
        if excess < least_excess:
            best = (float(factor), constant)
            least_excess = excess
    return best
