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
from dynagroup.shapes import TOKENS, BatchShape, primary

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
        wanted = f"a number of bytes per trained parameter, or one of {', '.join(OPTIMIZERS)}"
        raise ConfigError(f"`optimizer` must be {wanted}, but is {optimizer!r}")
    times, besides = OPTIMIZERS[optimizer]
    return float(times * ELEMENT_BYTES[dtype] + besides)


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
    pads_masks: bool = (
        True  # False: all lengths are multiples of 16, so that attention masks are not padded
    )
    factor: float = 1.0  # predicted bytes are ``factor`` times the trace plus ``constant_bytes``, see :meth:`corrected`
    constant_bytes: float = 0.0
    said: str = field(default="a model", compare=False)
    longest: int | None = field(default=None, compare=False)

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
        from dynagroup.memory.trace.model import as_meta_model
        from dynagroup.memory.trace.program import prepare, static_bytes

        dtype, attention = Workload(dtype=known.get("dtype")).dtype, known.get("attention")
        model = as_meta_model(model_or_config, dtype=dtype, attention=attention, lora=lora)
        if optimizer is not None:
            trained = next((p.dtype for p in model.parameters() if p.requires_grad), "float32")
            known["optimizer_bytes"] = optimizer_bytes(
                optimizer, str(trained).removeprefix("torch.")
            )
        workload = Workload.from_model(model, mode, trace=False, **known).traced(model, inputs)
        static = static_bytes(prepare(as_meta_model(model, workload), workload), workload)
        name = (
            model_or_config if isinstance(model_or_config, str) else type(model_or_config).__name__
        )
        usual = "AdamW" if optimizer is None and "optimizer_bytes" not in known else None
        run = assumed(workload, optimizer if isinstance(optimizer, str) else usual)
        text = (
            model.config.get_text_config()
            if hasattr(model.config, "get_text_config")
            else model.config
        )
        said = f"{name} of {workload.num_parameters:,} parameters, traced ({run})"
        found = cls(
            static, workload, said=said, longest=getattr(text, "max_position_embeddings", None)
        )
        return found if measured is None else found.corrected(measured)

    def corrected(self, measured: Measurements) -> "TracedMemory":
        """Returns this trace with predictions raised so that no measured row is above its prediction. Predictions
        become ``factor`` times the trace plus a constant, never below the trace: the line above all rows with the
        smallest mean excess. Static memory becomes the larger of traced and measured."""
        if not isinstance(measured, Measurements) or not measured.complete:
            raise ConfigError(
                "`measured` must be Measurements with at least one row that did not run out of memory"
            )
        for name in _SAME:
            theirs, ours = getattr(measured.workload, name), getattr(self.workload, name)
            if None not in (theirs, ours) and theirs != ours:
                way_out = "measure the workload that you will run"
                raise ConfigError(
                    f"`measured` has {name}={theirs!r}, but the traced model {name}={ours!r}; {way_out}"
                )
        factor, constant = line_above(self._bytes(measured.shapes()), measured.batch_bytes())
        static = max(self.static_bytes, *(row.static_bytes for row in measured.complete))
        return replace(self, static_bytes=static, factor=factor, constant_bytes=constant)

    def __str__(self) -> str:
        raised = (
            f", raised to measured rows (x {self.factor:.3g} + {self.constant_bytes / 1e9:.3g} GB)"
        )
        return self.said + (raised if (self.factor, self.constant_bytes) != (1.0, 0.0) else "")

    @property
    def fingerprint(self) -> str:
        about = [
            self.static_bytes,
            self.pads_masks,
            self.workload.to_json(),
            self.factor,
            self.constant_bytes,
        ]
        return "traced-" + hashlib.sha256(" ".join(map(str, about)).encode()).hexdigest()[:12]

    @cached_property
    def _phases(self) -> Phases:
        found = self.workload.phases
        if found is None:
            raise ConfigError("`workload` was not traced; use TracedMemory.of(model), which traces")
        return found if self.pads_masks else found.aligned or found

    def _bytes(self, shape: BatchShape) -> FloatArray:
        return self._phases.bytes(shape, self.workload.layout == "packed")

    @cached_property
    def _knows_targets(self) -> bool:
        short, long = self._bytes(BatchShape.of(8, {TOKENS: [64, 64], "target": [1, 4096]}))
        return bool(long > short)

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        """Returns the peak bytes of each batch, without static memory: float64 (K,)."""
        other = next((name for name in shape.longest if name != primary(shape.longest)), None)
        if other is not None and not self._knows_targets:
            way_out = f"(the sum of both), or, if {other!r} is not padded, add & AdditiveCap({other!r}, limit)"
            told = f"the model was traced with one stream of tokens, but batches also have the stream {other!r}"
            raise ConfigError(f"{told}; give each sample one length {way_out}")
        return self.factor * self._bytes(shape) + self.constant_bytes

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        least = self._phases.baseline_bytes(baseline, self.workload.layout == "packed")
        return self.batch_bytes(shape) / (self.factor * least + self.constant_bytes)


def line_above(predicted: FloatArray, taken: FloatArray) -> tuple[float, float]:
    """Returns (factor >= 1, constant >= 0) of the line above all ``taken`` with the least mean relative excess. That is
    piecewise linear in the factor, so only its ends and lines through two rows need to be tried."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.subtract.outer(taken, taken) / np.subtract.outer(predicted, predicted)
    factors = np.unique(
        np.maximum([1.0, float((taken / predicted).max()), *slopes[np.isfinite(slopes)]], 1.0)
    )
    constants = [max(float((taken - factor * predicted).max()), 0.0) for factor in factors]
    best = int(
        np.argmin(
            [np.mean((f * predicted + c) / taken) for f, c in zip(factors, constants, strict=True)]
        )
    )
    return float(factors[best]), constants[best]
