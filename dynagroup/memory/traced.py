"""Bytes of any batch of one model: what it keeps whatever the batch, and the phases that tracing it found."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.memory.closed_form import ClosedForm
from dynagroup.memory.run import ELEMENT_BYTES, MASK_ALIGNMENT, Layout, Mode
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    from dynagroup.memory.trace.program import MakeInputs

__all__ = ["OPTIMIZERS", "TracedMemory", "optimizer_bytes"]

# Bytes of state per trainable parameter, as (parts of the parameter's own size, bytes besides).
OPTIMIZERS: Mapping[str, tuple[float, float]] = {
    "adamw": (2, 0), "adam": (2, 0), "adamw_8bit": (0, 2), "lion": (1, 0), "lion_8bit": (0, 1), "muon": (1, 0),
    "sgd": (0, 0), "sgd_momentum": (1, 0), "adafactor": (0, 0),
    "adamw_master": (0, 12),
}  # fmt: skip


def optimizer_bytes(optimizer: str | float, dtype: str) -> float:
    """Bytes of optimizer state per trainable parameter of this dtype.

    Args:
        optimizer: one of ``OPTIMIZERS``: "adamw" and its kin keep two states of the parameter's dtype, "adamw_8bit" two
            bytes, "adamw_master" two states and a copy of the parameter in float32 (DeepSpeed, Megatron); or the bytes.

    >>> optimizer_bytes("adamw", "bfloat16"), optimizer_bytes("adamw_master", "bfloat16"), optimizer_bytes(6, "float32")
    (4.0, 12.0, 6.0)
    """
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return float(optimizer)
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"`optimizer` must be one of {', '.join(OPTIMIZERS)} or its bytes of state per parameter, but is {optimizer!r}"
        )
    times, besides = OPTIMIZERS[optimizer]
    return float(times * ELEMENT_BYTES[dtype] + besides)


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of any batch of one traced model, static memory apart. Make it with :meth:`of`.

    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=1000)
    >>> memory = TracedMemory.of(config, "train", dtype="bf16", gradient_checkpointing=True)
    >>> one, two = memory.batch_bytes(BatchShape.of([1, 2], 512))
    >>> bool(one < two < 2 * one + 1e6)
    True
    """

    static_bytes: int
    workload: Workload
    pads_masks: bool = True
    """False: every length is a multiple of 16, so that masks fit their kernel as they are."""

    @classmethod
    def of(
        cls,
        model_or_config: Any,
        mode: Mode = "train",
        *,
        lora: Any = None,
        optimizer: str | float | None = None,
        inputs: MakeInputs | None = None,
        **known: Any,
    ) -> TracedMemory:
        """Traces a model (a few seconds on the CPU, no weights).

        Args:
            model_or_config: a model, a transformers config, or its name.
            mode: "train", "forward" or "generate".
            lora: train adapters only: True, their rank, or a config of peft. Needs peft.
            optimizer: see :func:`optimizer_bytes`; default: AdamW.
            inputs: as in :func:`~dynagroup.memory.simulate`.
            known: fields of a :class:`Workload`: ``dtype``, ``autocast``, ``attention``, ``layout``, ``max_new_tokens``,
                ``gradient_checkpointing``, ``sharding``, ``num_ranks``, ...

        Raises:
            ConfigError: an argument is wrong, or peft is missing.
        """
        from dynagroup.memory.trace.build import as_meta_model, as_run_model
        from dynagroup.memory.trace.program import prepare, static_bytes

        model = as_run_model(model_or_config, dtype=Workload(dtype=known.get("dtype")).dtype,
                             attention=known.get("attention"), lora=lora)  # fmt: skip
        if optimizer is not None:
            trained = next((p.dtype for p in model.parameters() if p.requires_grad), None)
            known["optimizer_bytes"] = optimizer_bytes(optimizer, str(trained or "float32").removeprefix("torch."))
        workload = Workload.from_model(model, mode, inputs=inputs, **known)
        static = static_bytes(prepare(as_meta_model(model, workload), workload), workload)
        return cls(static, workload)

    def padded_to(self, multiple: int) -> TracedMemory:
        """For batches whose lengths are rounded up to a multiple of this: masks of 16, 32, ... fit their kernel."""
        return replace(self, pads_masks=multiple % MASK_ALIGNMENT != 0)

    @property
    def layout(self) -> Layout:
        """ "padded" or "packed": which of a shape's numbers count."""
        return self.workload.layout or "padded"

    @property
    def fingerprint(self) -> str:
        """Changes with the model and how it is run."""
        about = f"{self.static_bytes} {self.pads_masks} {self.workload.to_json()}"
        return "traced-" + hashlib.sha256(about.encode()).hexdigest()[:12]

    @cached_property
    def _form(self) -> ClosedForm:
        form = ClosedForm.of(self.workload)
        return form if self.pads_masks or form.aligned is None else form.aligned

    def batch_bytes(self, shape: BatchShape, /) -> NDArray[np.float64]:
        """Bytes that grow with the batch, at the peak: float64 (K,)."""
        return self._form.batch_bytes(shape)

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> NDArray[np.float64]:
        """Memory that grows with the batch, as a share of the baseline's: float64 (K,)."""
        return self._form.relative(shape, baseline)
