"""Records how much memory batches of given shapes take: simulated without data, or measured on a device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
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
    """The peak memory of one batch, in bytes; ``batch_bytes`` is None if it ran out of memory."""

    num_samples: int
    longest: Mapping[str, int]
    static_bytes: int
    batch_bytes: int | None
    reserved_bytes: int | None = None
    """Most bytes that the allocator had reserved on the device; None unless measured."""

    @property
    def oom(self) -> bool:
        return self.batch_bytes is None

    @property
    def peak_bytes(self) -> int | None:
        return None if self.batch_bytes is None else self.static_bytes + self.batch_bytes


_PREFIX = "longest_"  # of the columns with lengths
_METADATA = "dynagroup."  # begins the names of a file's metadata


@dataclass(frozen=True, slots=True)
class Measurements:
    """The memory of several batch shapes for one workload, one row per shape.

    >>> Measurements((Measurement(2, {"tokens": 64}, 100, batch_bytes=50),), Workload()).rows[0].peak_bytes
    150
    """

    rows: tuple[Measurement, ...]
    workload: Workload
    source: str = "simulated"  # either "simulated" or "measured"
    about: Mapping[str, str] = field(default_factory=dict)
    """Hardware, versions and date, as text by name."""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            sizes = [row.num_samples - 1, row.static_bytes, *row.longest.values()]
            if row.batch_bytes is not None:
                sizes.append(row.batch_bytes)
            if not all(0 <= size < float("inf") for size in sizes):
                raise ConfigError(
                    f"row {number}: sizes must be finite and at least 0 (`num_samples`: 1), but the row is {row}"
                )

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
        names = list(rows[0].longest) if rows else [TOKENS]
        longest = {name: np.array([row.longest[name] for row in rows], np.int64) for name in names}
        return BatchShape.of([row.num_samples for row in rows], longest)

    def batch_bytes(self) -> FloatArray:
        """Returns the peak bytes, without static memory, of the rows that did not run out of memory: float64 (K,)."""
        return np.array([row.batch_bytes for row in self.complete], dtype=np.float64)

    def to_parquet(self, path: str | Path) -> None:
        """Writes the rows to a file, with workload, source and hardware in its metadata. Needs pyarrow."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = {
            f"{_METADATA}workload": self.workload.to_json(),
            f"{_METADATA}source": self.source,
            f"{_METADATA}about": json.dumps(dict(self.about)),
        }
        table = pa.Table.from_pylist([_columns_of(row) for row in self.rows])
        pq.write_table(table.replace_schema_metadata(metadata), path)

    @classmethod
    def from_parquet(cls, path: str | Path) -> Measurements:
        """Reads a file that :meth:`to_parquet` wrote. StateError: the file is damaged or has other content."""
        import pyarrow.parquet as pq

        with explained(
            f"{path} is damaged, or was not written by Measurements.to_parquet",
            OSError,
            MemoryError,
            way_out="; measure again",
            kind=StateError,
        ):
            table = pq.read_table(path)
            metadata = {
                name.decode().removeprefix(_METADATA): text.decode()
                for name, text in (table.schema.metadata or {}).items()
            }
            return cls(
                rows=tuple(_row_of(columns) for columns in table.to_pylist()),
                workload=Workload.from_json(metadata["workload"]),
                source=metadata["source"],
                about=json.loads(metadata["about"]),
            )


def _columns_of(row: Measurement) -> dict[str, Any]:
    columns = asdict(row)
    columns["peak_bytes"] = row.peak_bytes
    for name, length in columns.pop("longest").items():
        columns[_PREFIX + name] = length
    return columns


def _row_of(columns: Mapping[str, Any]) -> Measurement:
    longest = {}
    for name, value in columns.items():
        if name.startswith(_PREFIX) and value is not None:
            longest[name.removeprefix(_PREFIX)] = value
    return Measurement(
        num_samples=columns["num_samples"],
        longest=longest,
        static_bytes=columns["static_bytes"],
        batch_bytes=columns["batch_bytes"],
        reserved_bytes=columns["reserved_bytes"],
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

    from dynagroup.memory.trace.model import as_meta_model
    from dynagroup.memory.trace.program import own_settings, prepare, static_bytes, trace

    checked_shapes = _checked_shapes(shapes)
    workload = workload or Workload()
    rows = []
    with own_settings():
        model = as_meta_model(model_or_config, dtype=workload.dtype, attention=workload.attention)
        workload = workload.completed(model)
        static = static_bytes(model, workload)
        model = prepare(model, workload)
        with explained(
            f"the model cannot run without data in mode {workload.mode!r}, so simulate() cannot be used",
            ConfigError,
            MemoryError,
            way_out="; use measure() on a device, or MemoryRegressor",
        ):
            for num_samples, longest in checked_shapes:
                peak = trace(model, workload, num_samples, longest, inputs=inputs).peak
                rows.append(Measurement(num_samples, longest, static, peak))
    versions = {name: version(name) for name in ("torch", "transformers") if find_spec(name)}
    return Measurements(tuple(rows), workload, "simulated", versions)


def _checked_shapes(shapes: Iterable[Shape]) -> list[tuple[int, dict[str, int]]]:
    checked = []
    for num_samples, longest in shapes:
        streams = longest if isinstance(longest, Mapping) else {TOKENS: longest}
        units = {name: check_int(name, value) for name, value in streams.items()}
        checked.append((check_int("num_samples", num_samples), units))
    return checked


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
    calculation. Outputs are kept during the backward pass, unless the workload says ``keeps_outputs=False``; samples of a
    packed workload lie end to end. Each shape runs twice, and the second run is recorded. A shape that runs out of memory
    has no ``batch_bytes``. ``device``: an object that reads an allocator's counters; None: CUDA's. ConfigError: no CUDA
    device."""
    from dynagroup.device import CudaDevice
    from dynagroup.memory.trace.program import static_bytes

    checked_shapes = _checked_shapes(shapes)
    workload = (workload or Workload()).completed(model)
    counters = device or CudaDevice()
    model = model.to(counters.device)
    model.train(workload.mode == "train")
    added_bytes = 0
    if workload.mode == "train":
        _make_trainable(model, workload)
        alone = workload.replace(optimizer_bytes=0.0, sharding=None)
        added_bytes = static_bytes(model, workload) - static_bytes(model, alone)
    counters.reset()
    resident_bytes = counters.allocated()
    rows = []
    for num_samples, longest in checked_shapes:
        run = partial(_run, model, workload, num_samples, longest, inputs, counters.device)
        peaks = _peaks(run, counters)
        allocated, reserved = peaks or (None, None)
        batch_bytes = None if allocated is None else max(0, allocated - resident_bytes)
        rows.append(
            Measurement(
                num_samples=num_samples,
                longest=longest,
                static_bytes=resident_bytes + added_bytes,
                batch_bytes=batch_bytes,
                reserved_bytes=reserved,
            )
        )
    about = counters.about() if isinstance(counters, CudaDevice) else {}
    return Measurements(tuple(rows), workload, "measured", about)


def _make_trainable(model: torch.nn.Module, workload: Workload) -> None:
    """Gives the model gradients, as earlier micro-batches leave them, and checkpointing."""
    import torch

    from dynagroup.memory.trace.model import checkpoint_layers

    if workload.gradient_checkpointing:
        checkpoint_layers(model)
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


def _peaks(run: Callable[[], None], counters: Device) -> tuple[int, int] | None:
    """Runs a batch twice, as the first run also fills caches. Returns the second run's peaks of allocated and reserved
    bytes; None: it ran out of memory."""
    from dynagroup.device import is_out_of_memory

    for _ in range(2):
        ran_out = False
        counters.reset()
        try:
            run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
        if ran_out:
            counters.reset()  # outside the except block: its traceback would keep the batch's tensors alive
            return None
    return counters.peaks()


def _run(
    model: Any,
    workload: Workload,
    num_samples: int,
    longest: Mapping[str, int],
    inputs: MakeInputs | None,
    device: torch.device,
) -> None:
    """Runs a batch of this shape: generation, or a forward pass, for training also a backward pass."""
    import torch

    from dynagroup.memory.trace.model import DTYPES, make_inputs, packed_inputs

    is_training = workload.mode == "train"
    if inputs is not None:
        with device:
            batch = inputs(model, num_samples, longest)
    elif workload.layout == "packed":
        batch = packed_inputs(
            model,
            num_samples,
            longest,
            with_labels=is_training,
            with_borders=workload.attention == "flash",
            device=str(device),
        )
    else:
        batch = make_inputs(model, num_samples, longest, is_training, str(device))
    if "attention_mask" in batch and num_samples > 1:
        batch["attention_mask"][0, 0] = 0  # one padding token, because real batches are padded
    lower = None if workload.autocast is None else DTYPES[workload.autocast]
    with (
        torch.autocast(device.type, dtype=lower, enabled=lower is not None),
        torch.set_grad_enabled(is_training),
    ):
        if workload.mode == "generate":
            num_tokens = workload.max_new_tokens or 1
            batch.pop("decoder_input_ids", None)
            model.generate(
                **batch, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=True
            )
            return
        outputs = model(**batch)
    if not is_training:
        return
    loss = outputs["loss"]
    if workload.keeps_outputs is False:
        del outputs
    loss.backward()
