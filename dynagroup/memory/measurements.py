"""Records how much memory batches of given shapes take: simulated without data, or measured on a device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError, StateError
from dynagroup.memory.phases import FloatArray, MakeInputs
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TOKENS, BatchShape
from dynagroup.validation import check_int, explained

if TYPE_CHECKING:
    import torch

    from dynagroup.device import Device

Shape: TypeAlias = "tuple[int, int | Mapping[str, int]]"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The peak memory of one batch, in bytes. If it ran out of memory, ``batch_bytes`` is None and ``oom`` is True."""

    num_samples: int
    longest: Mapping[str, int]
    static_bytes: int
    batch_bytes: int | None
    oom: bool = False
    reserved_bytes: int | None = None
    """Most bytes that the allocator had reserved on the device; None unless measured."""

    @property
    def peak_bytes(self) -> int | None:
        return None if self.batch_bytes is None else self.static_bytes + self.batch_bytes


_FIELDS = ("num_samples", "static_bytes", "batch_bytes", "oom", "reserved_bytes")


@dataclass(frozen=True, slots=True)
class Measurements:
    """The memory of several batch shapes for one workload, one row per shape.

    >>> Measurements((Measurement(2, {"tokens": 64}, 100, batch_bytes=50),), Workload()).rows[0].peak_bytes
    150
    """

    rows: tuple[Measurement, ...]
    workload: Workload
    source: str = "simulated"  # either "simulated" or "measured"
    about: Mapping[str, str] = field(
        default_factory=dict
    )  # hardware, versions and date, as text by name

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            sizes = [row.num_samples - 1, row.static_bytes, *row.longest.values()]
            sizes += [] if row.batch_bytes is None else [row.batch_bytes]
            if row.oom != (row.batch_bytes is None) or not all(
                0 <= size < float("inf") for size in sizes
            ):
                wanted = "sizes must be finite and at least 0, and `batch_bytes` None exactly if `oom` is True"
                raise ConfigError(f"row {number}: {wanted}, but the row is {row}")

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def complete(self) -> tuple[Measurement, ...]:
        return tuple(row for row in self.rows if row.batch_bytes is not None)

    def shapes(self) -> BatchShape:
        """Returns the shapes of the rows that did not run out of memory."""
        rows = self.complete
        names = rows[0].longest if rows else {TOKENS: 0}
        return BatchShape.of(
            [r.num_samples for r in rows], {k: [r.longest[k] for r in rows] for k in names}
        )

    def batch_bytes(self) -> FloatArray:
        """Returns the peak bytes, without static memory, of the rows that did not run out of memory: float64 (K,)."""
        return np.array([row.batch_bytes for row in self.complete], dtype=np.float64)

    def to_parquet(self, path: str | Path) -> None:
        """Writes the rows to a file, with workload, source and hardware in its metadata. Needs pyarrow."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        streams = sorted({name for row in self.rows for name in row.longest})
        sizes = ("static_bytes", "batch_bytes", "peak_bytes", "reserved_bytes")
        table = pa.table(
            {
                "num_samples": [r.num_samples for r in self.rows],
                **{f"longest_{s}": [r.longest.get(s) for r in self.rows] for s in streams},
                **{
                    name: pa.array([getattr(r, name) for r in self.rows], type=pa.int64())
                    for name in sizes
                },
                "oom": [r.oom for r in self.rows],
            }
        )
        about = {
            "workload": self.workload.to_json(),
            "source": self.source,
            "about": json.dumps(dict(self.about)),
        }
        pq.write_table(
            table.replace_schema_metadata({f"dynagroup.{k}": v for k, v in about.items()}), path
        )

    @classmethod
    def from_parquet(cls, path: str | Path) -> Measurements:
        """Reads a file that :meth:`to_parquet` wrote. StateError: the file is damaged or has other content."""
        import pyarrow.parquet as pq

        told = f"{path} is damaged, or was not written by Measurements.to_parquet"
        with explained(told, OSError, MemoryError, way_out="; measure again", kind=StateError):
            table = pq.read_table(path)
            about = {
                k.decode().removeprefix("dynagroup."): v.decode()
                for k, v in (table.schema.metadata or {}).items()
            }
            rows = []
            for values in table.to_pylist():
                longest = {
                    k[8:]: v
                    for k, v in values.items()
                    if k.startswith("longest_") and v is not None
                }
                rows.append(
                    Measurement(longest=longest, **{name: values[name] for name in _FIELDS})
                )
            return cls(
                tuple(rows),
                Workload.from_json(about["workload"]),
                about["source"],
                json.loads(about["about"]),
            )


def simulate(
    model_or_config: Any,
    workload: Workload | None,
    shapes: Iterable[Shape],
    *,
    inputs: MakeInputs | None = None,
) -> Measurements:
    """Returns the peak memory of a ``transformers`` model for each shape, as on a CUDA device, without using one.

    The model runs on tensors without data, with CUDA's kernels, a padding mask, and the rounding of CUDA's allocator.
    For training, the gradients of earlier micro-batches count as static memory.

    Args:
        model_or_config: a torch model (which is not changed), a transformers config, or its name.
        workload: from :meth:`Workload.from_model`; None: training.
        shapes: pairs ``(num_samples, longest)``; ``longest`` is int (tokens), or ``{"tokens": 512, "target": 64}``.
        inputs: ``(model, num_samples, longest) -> arguments of model.forward``, for models with other inputs.

    Raises ConfigError if the model cannot run on tensors without data.

    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000)
    >>> [row.batch_bytes // 1000 for row in simulate(config, None, [(2, 64), (4, 64)])]
    [4067, 8132]
    """
    import torch

    from dynagroup.memory.trace.model import as_config, as_meta_model
    from dynagroup.memory.trace.program import as_gathered, prepare, static_bytes, trace

    wanted = _checked_shapes(shapes)
    model_or_config = (
        model_or_config
        if isinstance(model_or_config, torch.nn.Module)
        else as_config(model_or_config)
    )
    workload, rows = _checked_workload(model_or_config, workload), []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):  # whatever the caller set
        model = prepare(as_meta_model(model_or_config, workload), workload)
        static, model = static_bytes(model, workload), as_gathered(model, workload)
        told = f"the model cannot run without data in mode {workload.mode!r}, so simulate() cannot be used"
        with explained(
            told,
            ConfigError,
            MemoryError,
            way_out="; use measure() on a device, or MemoryRegressor",
        ):
            for num_samples, longest in wanted:
                peak = trace(model, workload, num_samples, longest, inputs=inputs).peak
                rows.append(Measurement(num_samples, longest, static, peak))
    versions = {
        package: version(package) for package in ("torch", "transformers") if find_spec(package)
    }
    return Measurements(tuple(rows), workload, "simulated", versions)


def _checked_shapes(shapes: Iterable[Shape]) -> list[tuple[int, dict[str, int]]]:
    checked = []
    for num_samples, longest in shapes:
        streams = longest if isinstance(longest, Mapping) else {TOKENS: longest}
        units = {name: check_int(name, int(value)) for name, value in streams.items()}
        checked.append((check_int("num_samples", int(num_samples)), units))
    return checked


def _checked_workload(model_or_config: Any, workload: Workload | None) -> Workload:
    if workload is None:
        return Workload.from_model(model_or_config, trace=False)
    own = {
        n: getattr(workload, n)
        for n in Workload.__slots__
        if n != "mode" and getattr(workload, n) is not None
    }
    return Workload.from_model(
        model_or_config, workload.mode or "train", trace=False, dtype=workload.dtype
    ).replace(**own)


def measure(
    model: torch.nn.Module,
    workload: Workload | None,
    shapes: Iterable[Shape],
    *,
    inputs: MakeInputs | None = None,
    device: Device | None = None,
) -> Measurements:
    """Returns the peak memory of each shape, measured on a real device (:func:`simulate` predicts the same numbers).

    The model is moved to the device. Training is measured with gradients present, and the optimizer state is added by
    calculation. Each shape runs twice, and the second run is recorded. A shape that runs out of memory has no
    ``batch_bytes``. ``device``: an object that reads an allocator's counters; None: CUDA's. ConfigError: no CUDA device."""
    from dynagroup.device import CudaDevice

    wanted, workload = _checked_shapes(shapes), _checked_workload(model, workload)
    counters = device or CudaDevice()
    model, added = _prepared(model, workload, counters.device)
    counters.reset()
    resident, rows = counters.allocated(), []
    for num_samples, longest in wanted:
        passed = _passes(
            lambda n=num_samples, by=longest: _run(model, workload, n, by, inputs, counters),
            counters,
        )
        allocated, reserved = counters.peaks() if passed else (None, None)
        grown = None if allocated is None else max(0, allocated - resident)
        rows.append(
            Measurement(num_samples, longest, resident + added, grown, not passed, reserved)
        )
    return Measurements(
        tuple(rows),
        workload,
        "measured",
        counters.about() if isinstance(counters, CudaDevice) else {},
    )


def _passes(run: Callable[[], None], counters: Device) -> bool:
    """Returns whether a batch runs twice without running out of memory; the first run also fills caches."""
    from dynagroup.device import is_out_of_memory

    passed = True
    for _ in range(2):
        counters.reset()  # outside the except block: its traceback would keep the batch's tensors alive
        try:
            passed = passed and run() is None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            passed = False
    if not passed:
        counters.reset()
    return passed


def _prepared(model: Any, workload: Workload, device: torch.device) -> tuple[torch.nn.Module, int]:
    """Returns the model as the workload runs it, with gradients; and the bytes that optimizer and DDP would add."""
    import torch

    from dynagroup.memory.trace.model import checkpoint_layers

    model = model.to(device)
    model.train(workload.mode == "train")
    if workload.mode != "train":
        return model, 0
    if workload.gradient_checkpointing:
        checkpoint_layers(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    state = (8.0 if workload.optimizer_bytes is None else workload.optimizer_bytes) * sum(
        p.numel() for p in trained
    )
    return model, int(state) + (
        sum(p.numel() * p.element_size() for p in trained) if workload.sharding == "ddp" else 0
    )


def _run(
    model: Any, workload: Workload, num_samples: int, longest: Any, inputs: Any, counters: Device
) -> None:
    import torch

    from dynagroup.memory.trace.model import make_inputs

    training, device = workload.mode == "train", counters.device
    with device:
        made = None if inputs is None else inputs(model, num_samples, longest)
    batch = made or make_inputs(
        model, num_samples, longest, with_labels=training, device=str(device)
    )
    if "attention_mask" in batch and num_samples > 1:
        batch["attention_mask"][0, 0] = 0  # one padding token, because real batches are padded
    lower = getattr(torch, workload.autocast) if workload.autocast else None
    with (
        torch.autocast(device.type, dtype=lower, enabled=lower is not None),
        torch.set_grad_enabled(training),
    ):
        if workload.mode == "generate":
            count = workload.max_new_tokens or 1
            batch = {k: v for k, v in batch.items() if k not in ("decoder_input_ids", "labels")}
            model.generate(**batch, max_new_tokens=count, min_new_tokens=count, do_sample=True)
            return
        outputs = model(**batch)
    if training:
        outputs["loss"].backward()
