"""Simulated peaks held against the device's: nine models, training with and without checkpointing, generation, forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu.machine import Machine
from dynagroup.memory import Workload, measure, simulate
from dynagroup.memory.trace.build import as_random_model
from regressor.families import FAMILIES, Sizes
from regressor.measure_gpu import MODELS, DryDevice

__all__ = ["run"]

TRAIN = ((1, 128), (32, 128), (4, 1024), (16, 1024), (1, 8192), (1, 32768))
OTHER = ((1, 128), (64, 128), (16, 1024), (4, 8192), (1, 32768))
POSITIONS = 32768 + 64


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields the figures so far, after every workload."""
    figures: dict[str, Any] = {"rows": [], "left_out": [], "failed": {}}
    for name in MODELS:
        for label, workload, shapes in _workloads(name, machine):
            case = f"{name}, {label}"
            if machine.left_s() < 45:
                figures["left_out"].append(case)
                continue
            try:
                figures["rows"] += _rows(case, name, workload, shapes, machine)
            except Exception as error:  # one case's failure is written down, and costs no other its place
                figures["failed"][case] = f"{type(error).__name__}: {error}"[:500]
            machine.free()
            yield figures
        if machine.dry:
            break
    yield figures


def _config(name: str, machine: Machine) -> Any:
    family = FAMILIES[name]
    sizes = family.known
    if machine.dry:
        sizes = Sizes(hidden=32, layers=1, heads=2, kv_heads=1 if family.grouped else 2, ffn=64, vocabulary=128)
    config = family.build(sizes)
    for field in ("max_position_embeddings", "n_positions"):
        if hasattr(config, field):
            setattr(config, field, POSITIONS)
    return config


def _workloads(name: str, machine: Machine) -> Iterator[tuple[str, Workload, Any]]:
    config, kind = _config(name, machine), FAMILIES[name].kind
    known: dict[str, Any] = {"dtype": "float32" if machine.dry else "bfloat16", "attention": "sdpa", "trace": False}
    small = ((1, 16), (2, 16))
    train = Workload.from_model(config, "train", **known)
    yield "train", train, small if machine.dry else TRAIN
    yield "train, checkpointing", replace(train, gradient_checkpointing=True), small if machine.dry else TRAIN
    if kind == "encoder":
        yield "forward", Workload.from_model(config, "forward", **known), small if machine.dry else OTHER
    else:
        new = 2 if machine.dry else 32
        yield (
            "generate",
            Workload.from_model(config, "generate", max_new_tokens=new, **known),
            small if machine.dry else OTHER,
        )


def _rows(case: str, name: str, workload: Workload, shapes: Any, machine: Machine) -> list[dict[str, Any]]:
    config = _config(name, machine)
    model = as_random_model(config, workload, machine.device)
    found = measure(model, workload, shapes, device=DryDevice() if machine.dry else None)
    del model
    expected = simulate(config, workload, shapes)
    return [
        {
            "case": case, "num_samples": real.num_samples, "longest": dict(real.longest), "oom": real.oom,
            "measured_bytes": real.peak_bytes, "reserved_bytes": real.reserved_bytes, "simulated_bytes": fake.peak_bytes,
            "error": None if real.peak_bytes is None or fake.peak_bytes is None else fake.peak_bytes / real.peak_bytes - 1,
        }
        for real, fake in zip(found.rows, expected.rows, strict=True)
    ]  # fmt: skip
