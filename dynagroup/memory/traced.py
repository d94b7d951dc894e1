"""Memory of any batch of one model, in bytes: its static memory, and the phases that tracing found."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.run import ELEMENT_BYTES, FloatArray, MakeInputs, Mode, Phases
from dynagroup.memory.workload import Workload, assumed
from dynagroup.shapes import TOKENS, BatchShape, primary

# Bytes of state per trainable parameter, as (multiples of the parameter's size, further bytes). "adamw_master" keeps
# two states and a copy of the parameter in float32 (DeepSpeed, Megatron).
OPTIMIZERS: Mapping[str, tuple[float, float]] = {
    "adamw": (2, 0), "adam": (2, 0), "adamw_8bit": (0, 2), "lion": (1, 0), "lion_8bit": (0, 1), "muon": (1, 0),
    "sgd": (0, 0), "sgd_momentum": (1, 0), "adafactor": (0, 0), "adamw_master": (0, 12),
}  # fmt: skip
# If two workloads differ in one of these, measurements of one say nothing about the other's bytes.
_SAME = ("mode", "num_layers", "hidden_size", "vocabulary_size", "dtype", "autocast", "attention", "layout",
         "gradient_checkpointing", "max_new_tokens")  # fmt: skip


def optimizer_bytes(optimizer: str | float, dtype: str) -> float:
    """Bytes of optimizer state per trainable parameter of this dtype, by a name in ``OPTIMIZERS``, or as given."""
    if isinstance(optimizer, (int, float)):
        return float(optimizer)
    if optimizer not in OPTIMIZERS:
        wanted = f"bytes a parameter, or one of {', '.join(OPTIMIZERS)}"
        raise ConfigError(f"`optimizer` must be {wanted}, but is {optimizer!r}")
    times, besides = OPTIMIZERS[optimizer]
    return float(times * ELEMENT_BYTES[dtype] + besides)


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of any batch of one traced model, without static memory. Make it with :meth:`of`.

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
    """False: every length is a multiple of 16, so masks need no padding for their kernel."""
    factor: float = 1.0
    """Bytes are ``factor`` times the trace, plus ``constant_bytes``, see :meth:`corrected`."""
    constant_bytes: float = 0.0
    said: str = field(default="a model", compare=False)
    longest: int | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, model_or_config: Any, mode: Mode = "train", *, lora: Any = None, optimizer: str | float | None = None,
        inputs: MakeInputs | None = None, measured: Measurements | None = None, **known: Any,
    ) -> "TracedMemory":  # fmt: skip
        """Trace a model (a few seconds on the CPU, no weights).

        Args:
            lora: train adapters only: True, a rank, or a peft config. Needs peft.
            optimizer: one of ``OPTIMIZERS``, or its bytes of state per parameter; default: AdamW.
            inputs: as in :func:`~dynagroup.memory.simulate`.
            measured: rows of :func:`~dynagroup.memory.measure` on a device, which correct the trace: :meth:`corrected`.
            known: fields of a :class:`Workload`.

        ConfigError: the model cannot be traced.
        """
        from dynagroup.memory.trace.model import as_meta_model
        from dynagroup.memory.trace.program import prepare, static_bytes

        dtype, attention = Workload(dtype=known.get("dtype")).dtype, known.get("attention")
        model = as_meta_model(model_or_config, dtype=dtype, attention=attention, lora=lora)
        if optimizer is not None:
            trained = next((p.dtype for p in model.parameters() if p.requires_grad), "float32")
            known["optimizer_bytes"] = optimizer_bytes(optimizer, str(trained).removeprefix("torch."))
        workload = Workload.from_model(model, mode, trace=False, **known).traced(model, inputs)
        static = static_bytes(prepare(as_meta_model(model, workload), workload), workload)
        name = model_or_config if isinstance(model_or_config, str) else type(model_or_config).__name__
        usual = "AdamW" if optimizer is None and "optimizer_bytes" not in known else None
        run = assumed(workload, optimizer if isinstance(optimizer, str) else usual)
        text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        said = f"{name} of {workload.num_parameters:,} parameters, traced ({run})"
        found = cls(static, workload, said=said, longest=getattr(text, "max_position_embeddings", None))
        return found if measured is None else found.corrected(measured)

    def corrected(self, measured: Measurements) -> "TracedMemory":
        """This trace, raised so that no measured row takes more than predicted.

        Bytes become ``factor`` times the trace plus a constant: the line above all rows with least excess, never below
        the trace. Static memory is the larger of both.
        """
        if not isinstance(measured, Measurements) or not measured.complete:
            raise ConfigError("`measured` must be Measurements with at least one row that did not run out of memory")
        for name in _SAME:
            theirs, ours = getattr(measured.workload, name), getattr(self.workload, name)
            if None not in (theirs, ours) and theirs != ours:
                told = f"`measured` has {name}={theirs!r}, but this trace has {name}={ours!r}"
                raise ConfigError(f"{told}; measure the workload that you will run")
        factor, constant = line_above(self._bytes(measured.shapes()), measured.batch_bytes())
        static = max(self.static_bytes, *(row.static_bytes for row in measured.complete))
        return replace(self, static_bytes=static, factor=factor, constant_bytes=constant)

    def __str__(self) -> str:
        raised = f", raised by what was measured (x {self.factor:.3g} + {self.constant_bytes / 1e9:.3g} GB)"
        return self.said + (raised if (self.factor, self.constant_bytes) != (1.0, 0.0) else "")

    @property
    def fingerprint(self) -> str:
        about = [self.static_bytes, self.pads_masks, self.workload.to_json(), self.factor, self.constant_bytes]
        return "traced-" + hashlib.sha256(" ".join(map(str, about)).encode()).hexdigest()[:12]

    @cached_property
    def _phases(self) -> Phases:
        found = self.workload.phases
        if found is None:
            raise ConfigError("`workload` was not traced; make it with TracedMemory.of(model)")
        return found if self.pads_masks else found.aligned or found

    def _bytes(self, shape: BatchShape) -> FloatArray:
        return self._phases.bytes(shape, self.workload.layout == "packed")

    @cached_property
    def _knows_targets(self) -> bool:
        short, long = self._bytes(BatchShape.of(8, {TOKENS: [64, 64], "target": [1, 4096]}))
        return bool(long > short)

    def batch_bytes(self, shape: BatchShape, /) -> FloatArray:
        """The bytes of each batch at its peak, without static memory: float64 (K,)."""
        other = next((name for name in shape.longest if name != primary(shape.longest)), None)
        if other is not None and not self._knows_targets:
            way_out = f"(the sum of both), or, where {other!r} is not padded, add & AdditiveCap({other!r}, limit)"
            told = f"the model was traced with one stream of tokens, but batches have {other!r} beside it"
            raise ConfigError(f"{told}; give each sample one length {way_out}")
        return self.factor * self._bytes(shape) + self.constant_bytes

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        least = self._phases.baseline_bytes(baseline, self.workload.layout == "packed")
        return self.batch_bytes(shape) / (self.factor * least + self.constant_bytes)


def line_above(predicted: FloatArray, taken: FloatArray) -> tuple[float, float]:
    """The line ``factor * predicted + constant`` (factor >= 1, constant >= 0) above all ``taken``, of least mean
    relative excess: piecewise linear in the factor, so the best line goes through two rows or lies at an end."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.subtract.outer(taken, taken) / np.subtract.outer(predicted, predicted)
    ends = [1.0, float((taken / predicted).max())]
    factors = np.unique(np.maximum([*ends, *slopes[np.isfinite(slopes)]], 1.0))
    constants = [max(float((taken - factor * predicted).max()), 0.0) for factor in factors]
    excess = [np.mean((f * predicted + c) / taken) for f, c in zip(factors, constants, strict=True)]
    best = int(np.argmin(excess))
    return float(factors[best]), constants[best]
