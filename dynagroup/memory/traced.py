"""Bytes of any batch of one model: what it keeps whatever the batch, and the phases that tracing it found."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.memory.closed_form import ClosedForm
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.run import ELEMENT_BYTES, MASK_ALIGNMENT, Layout, Mode
from dynagroup.memory.workload import Told, Workload, assumed
from dynagroup.shapes import TOKENS, BatchShape, said

if TYPE_CHECKING:
    from dynagroup.memory.trace.program import MakeInputs

__all__ = ["OPTIMIZERS", "TracedMemory", "optimizer_bytes", "positions_of"]

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
    factor: float = 1.0
    """What the trace says is taken so many times, and ``constant_bytes`` added: from :meth:`corrected`."""
    constant_bytes: float = 0.0
    told: Told = field(default=Told(), compare=False, repr=False)

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
    ) -> TracedMemory:
        """Traces a model (a few seconds on the CPU, no weights).

        Args:
            model_or_config: a model, a transformers config, or its name.
            mode: "train", "forward" or "generate".
            lora: train adapters only: True, their rank, or a config of peft. Needs peft.
            optimizer: see :func:`optimizer_bytes`; default: AdamW.
            inputs: as in :func:`~dynagroup.memory.simulate`.
            measured: rows of :func:`~dynagroup.memory.measure` on a device, to correct the trace by; see :meth:`corrected`.
            known: fields of a :class:`Workload`: ``dtype``, ``autocast``, ``attention``, ``layout``, ``max_new_tokens``,
                ``gradient_checkpointing``, ``sharding``, ``num_ranks``, ...

        Raises:
            ConfigError: an argument is wrong, peft is missing, or the model can neither be traced nor simulated.
        """
        from dynagroup.memory.trace.model import as_meta_model, as_run_model
        from dynagroup.memory.trace.program import prepare, static_bytes

        model = as_run_model(model_or_config, dtype=Workload(dtype=known.get("dtype")).dtype,
                             attention=known.get("attention"), lora=lora)  # fmt: skip
        told = Told(
            _name_of(model_or_config),
            _optimizer_name(optimizer, known),
            lora,
            positions_of(getattr(model, "config", None)),
        )
        if optimizer is not None:
            trained = next((p.dtype for p in model.parameters() if p.requires_grad), None)
            known["optimizer_bytes"] = optimizer_bytes(optimizer, str(trained or "float32").removeprefix("torch."))
        workload = Workload.from_model(model, mode, trace=False, **known).traced(model, inputs)
        static = static_bytes(prepare(as_meta_model(model, workload), workload), workload)
        found = cls(static, workload, told=told)
        return found if measured is None else found.corrected(measured)

    def corrected(self, measured: Measurements) -> TracedMemory:
        """This trace, raised to what was measured: no row takes more than is then predicted.

        Bytes are ``factor`` times the trace plus a constant (workspaces of kernels, blocks of the allocator): the line
        above all rows that exceeds them least, never below the trace. A handful of rows is enough. Static memory is the
        larger of both. No trees: on measured batches they are bolder than the device (``regressor/REPORT.md``).

        Raises:
            ConfigError: the rows are of another workload, or all of them ran out of memory.

        >>> from dynagroup.memory.measurements import Measurement
        >>> from dynagroup.memory.run import Phases
        >>> ten_a_token = Workload(phases=Phases(((0, 0, 0, 10, *[0] * 8),)))
        >>> rows = [Measurement(n, {"tokens": 100}, 0, 1500 * n + 200) for n in (1, 2, 4)]
        >>> better = TracedMemory(0, ten_a_token).corrected(Measurements(tuple(rows), ten_a_token))
        >>> round(better.factor, 6), round(better.constant_bytes, 3)
        (1.5, 200.0)
        """
        self._check(measured)
        said, taken = self._form.batch_bytes(measured.shapes()), measured.batch_bytes()
        factor, constant = line_above(said, taken)
        static = max(self.static_bytes, *(row.static_bytes for row in measured.complete))
        return replace(self, static_bytes=static, factor=factor, constant_bytes=constant)

    def _check(self, measured: Measurements) -> None:
        if not isinstance(measured, Measurements) or not measured.complete:
            raise ConfigError(
                "`measured` must be Measurements with at least one row that did not run out of memory; see memory.measure"
            )
        field = measured.workload.contradicts(self.workload) or next(
            (name for name in _SAME if _differ(getattr(measured.workload, name), getattr(self.workload, name))), None
        )
        if field is not None:
            raise ConfigError(
                f"`measured` has {field}={getattr(measured.workload, field)!r}, but what is asked about has "
                f"{field}={getattr(self.workload, field)!r}; measure the workload that you will run"
            )

    def padded_to(self, multiple: int) -> TracedMemory:
        """For batches whose lengths are rounded up to a multiple of this: masks of 16, 32, ... fit their kernel."""
        return replace(self, pads_masks=multiple % MASK_ALIGNMENT != 0)

    @property
    def assumes(self) -> str:
        """How the model is taken to be run, what nobody said included: "train, float32, sdpa attention, ..."."""
        return assumed(self.workload, self.told)

    def __str__(self) -> str:
        count = self.workload.num_parameters
        raised = f", raised by what was measured (x {self.factor:.3g} + {self.constant_bytes / 1e9:.3g} GB)"
        exact = "traced" if self.workload.phases is not None else "estimated from its sizes"
        size = "" if count is None else f" of {count:,} parameters"
        return f"{self.told.name}{size}, {exact}{raised if (self.factor, self.constant_bytes) != (1.0, 0.0) else ''}"

    @property
    def layout(self) -> Layout:
        """ "padded" or "packed": which of a shape's numbers count."""
        return self.workload.layout or "padded"

    @property
    def fingerprint(self) -> str:
        """Changes with the model and how it is run."""
        about = f"{self.static_bytes} {self.pads_masks} {self.workload.to_json()}"
        if (self.factor, self.constant_bytes) != (1.0, 0.0):
            about += f" {self.factor!r} {self.constant_bytes!r}"
        return "traced-" + hashlib.sha256(about.encode()).hexdigest()[:12]

    @cached_property
    def _form(self) -> ClosedForm:
        form = ClosedForm.of(self.workload)
        return form if self.pads_masks or form.aligned is None else form.aligned

    def _check_streams(self, shape: BatchShape) -> None:
        others = [said(name) for name in shape.longest if name != TOKENS]
        if others and not self._knows_targets:
            raise ConfigError(
                f"the model was traced with one stream of tokens, but batches have {others[0]!r} beside it; give each sample one "
                f"length (source and target of a decoder are one sequence: their sum), or, where {others[0]!r} is not padded, "
                f"combine the budget: & AdditiveCap({others[0]!r}, limit)"
            )

    @cached_property
    def _knows_targets(self) -> bool:
        sizes = [self._form.batch_bytes(BatchShape.of(8, {TOKENS: 64, "target": units})) for units in (1, 4096)]
        return bool(sizes[1] > sizes[0])

    def batch_bytes(self, shape: BatchShape, /) -> NDArray[np.float64]:
        """Bytes that grow with the batch, at the peak: float64 (K,).

        Raises:
            ConfigError: batches have a second padded stream, and the model was traced with one.
        """
        self._check_streams(shape)
        return self._raised(self._form.batch_bytes(shape))

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> NDArray[np.float64]:
        """Memory that grows with the batch, as a share of the baseline's: float64 (K,)."""
        return self.batch_bytes(shape) / self._raised(self._form.baseline_bytes(baseline))

    def _raised(self, traced: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.factor * traced + self.constant_bytes


def _name_of(model_or_config: Any) -> str:
    if isinstance(model_or_config, str):
        return model_or_config
    return f"{type(model_or_config).__name__} {getattr(model_or_config, 'name_or_path', None) or ''}".rstrip()


def _optimizer_name(optimizer: str | float | None, known: Mapping[str, Any]) -> str | None:
    if optimizer is None:
        return "AdamW" if known.get("optimizer_bytes") is None else None
    return optimizer if isinstance(optimizer, str) else None


def positions_of(config: Any) -> int | None:
    """Tokens that a sample of a model of this config can have, where the config states it."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    return int(most) if most else None


# Where two workloads differ in these, neither's measurements say anything about the other's bytes.
_SAME = ("mode", "dtype", "autocast", "attention", "layout", "gradient_checkpointing", "max_new_tokens")


def _differ(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one != other


def line_above(said: NDArray[np.float64], taken: NDArray[np.float64]) -> tuple[float, float]:
    """The factor (at least 1) and constant (at least 0) with ``factor * said + constant >= taken`` everywhere that exceed
    ``taken`` least, as a mean of shares.

    For a given factor the constant is the largest gap. What they then exceed is convex and piecewise linear in the factor,
    with corners where two rows have the same gap, or one has none: the best factor is one of these. K log K.

    >>> [round(number, 6) for number in line_above(np.array([10.0, 20.0, 40.0]), np.array([19.0, 35.0, 65.0]))]
    [1.6, 3.0]
    """
    corners = _hull(said, taken)
    slopes = np.diff(corners[:, 1]) / np.maximum(np.diff(corners[:, 0]), 1e-300)
    tried = np.maximum(np.concatenate([[1.0], slopes, (corners[:, 1] / corners[:, 0])]), 1.0)
    gaps = np.maximum((corners[None, :, 1] - tried[:, None] * corners[None, :, 0]).max(axis=1), 0.0)
    excess = [float(np.mean((factor * said + gap) / taken)) for factor, gap in zip(tried, gaps, strict=True)]
    best = int(np.argmin(excess))
    return float(tried[best]), float(gaps[best])


def _hull(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Corners of the upper convex hull, from left to right: float64 (C, 2)."""
    corners: list[tuple[float, float]] = []
    for point in sorted(zip(x.tolist(), y.tolist(), strict=True)):
        while corners and (
            corners[-1][0] == point[0] or (len(corners) > 1 and _below(corners[-1], corners[-2], point))
        ):
            corners.pop()
        corners.append(point)
    return np.array(corners)


def _below(middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    over = (middle[0] - left[0]) * (right[1] - left[1]) - (middle[1] - left[1]) * (right[0] - left[0])
    return over >= 0
