"""Peak memory on a real device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dynagroup.device import CudaDevice, Device, is_out_of_memory
from dynagroup.memory.measurements import Measurement, Measurements
from dynagroup.memory.trace.build import checkpoint_layers, make_inputs
from dynagroup.memory.trace.simulate import Shape, checked_shapes, checked_workload
from dynagroup.memory.workload import Workload

if TYPE_CHECKING:
    import torch

    from dynagroup.memory.trace.program import MakeInputs

__all__ = ["measure"]


def measure(
    model: torch.nn.Module,
    workload: Workload | None,
    shapes: Iterable[Shape],
    *,
    inputs: MakeInputs | None = None,
    device: Device | None = None,
) -> Measurements:
    """Peak memory of each shape on a real device: what :func:`simulate` predicts, measured.

    The model is moved to the device. Training is measured as a step inside an accumulation, gradients present; no optimizer
    is run, and its state is added to ``static_bytes`` by size. Generation runs ``model.generate`` for exactly
    ``max_new_tokens`` tokens. Every shape is run twice and the second counts. A shape that runs out of memory is a row
    without a size, and longer runs go on.

    Args:
        device: counters of another allocator; default: CUDA's.

    Raises:
        ConfigError: there is no CUDA device, or the workload contradicts the model.
    """
    wanted = checked_shapes(shapes)
    workload = checked_workload(model, workload)
    counters = device or CudaDevice()
    model = _prepared(model, workload, counters.device)
    counters.reset()
    resident, extra = counters.allocated(), _optimizer_bytes(model, workload)
    rows = [_row(model, workload, n, longest, inputs, counters, resident, extra) for n, longest in wanted]
    about = counters.about() if isinstance(counters, CudaDevice) else {}
    return Measurements(tuple(rows), workload, "measured", about)


def _prepared(model: Any, workload: Workload, device: torch.device) -> torch.nn.Module:
    import torch

    model = model.to(device)
    model.train(workload.mode == "train")
    if workload.mode == "train":
        if workload.gradient_checkpointing:
            checkpoint_layers(model)
        for p in model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
    return model


def _optimizer_bytes(model: torch.nn.Module, workload: Workload) -> int:
    if workload.mode != "train":
        return 0
    trained = [p for p in model.parameters() if p.requires_grad]
    per_parameter = workload.optimizer_bytes if workload.optimizer_bytes is not None else 8.0
    ddp = sum(p.numel() * p.element_size() for p in trained) if workload.ddp else 0
    return int(per_parameter * sum(p.numel() for p in trained)) + ddp


def _row(
    model: torch.nn.Module,
    workload: Workload,
    num_samples: int,
    longest: Mapping[str, int],
    inputs: MakeInputs | None,
    counters: Device,
    resident: int,
    extra: int,
) -> Measurement:
    failed = False
    for _ in range(2):  # the first run pays for workspaces and caches of kernels
        counters.reset()
        try:
            _run(model, workload, num_samples, longest, inputs, counters.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        if failed:  # outside the except block: its traceback kept the batch's tensors alive
            counters.reset()
            return Measurement(num_samples, longest, resident + extra, None, oom=True)
    allocated, reserved = counters.peaks()
    return Measurement(num_samples, longest, resident + extra, max(0, allocated - resident), False, reserved)


def _run(
    model: Any,
    workload: Workload,
    num_samples: int,
    longest: Mapping[str, int],
    inputs: MakeInputs | None,
    device: torch.device,
) -> None:
    import torch

    training = workload.mode == "train"
    if inputs is None:
        batch = make_inputs(model, num_samples, longest, with_labels=training, device=str(device))
    else:
        with device:
            batch = inputs(model, num_samples, longest)
    if "attention_mask" in batch and num_samples > 1:
        batch["attention_mask"][0, 0] = 0  # padding, as real batches have
    lower = getattr(torch, workload.autocast) if workload.autocast else None
    with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
        if workload.mode == "generate":
            for name in ("decoder_input_ids", "labels"):
                batch.pop(name, None)
            count = workload.max_new_tokens or 1
            with torch.no_grad():
                model.generate(**batch, max_new_tokens=count, min_new_tokens=count, do_sample=True)
            return
        if not training:
            with torch.no_grad():
                _held = model(**batch)
            return
        outputs = model(**batch)
    outputs["loss"].backward()
