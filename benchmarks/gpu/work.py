"""Seconds of a training step over (samples, length): what the price of a step and the crossover of attention are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build
from benchmarks.record import spread

__all__ = ["run"]

LENGTHS = (32, 128, 512, 2048, 8192)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TOKENS = 32768
REPEATS = 5


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields the figures so far, after every model."""
    figures: dict[str, Any] = {}
    for name in ("135M", "0.5B", "1.5B"):
        if machine.left_s() < 100:
            figures[name] = {"left out": "no time"}
            continue
        figures[name] = {"rows": _rows(name, machine)}
        yield figures
    yield figures


def _step(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def _rows(name: str, machine: Machine) -> list[dict[str, Any]]:
    model = build(name, machine)
    shapes = [(n, length) for length in LENGTHS for n in SAMPLES if n * length <= MOST_TOKENS]
    if machine.dry:
        shapes = [(1, 8), (2, 8), (4, 8), (1, 32), (2, 32)]
    rows = []
    for n, length in shapes:
        ids = torch.randint(3, model.config.vocab_size, (n, length), device=machine.device)
        step = partial(_step, model, ids)
        step()
        taken = spread([machine.seconds(step) for _ in range(1 if machine.dry else REPEATS)])
        rows.append({"num_samples": n, "longest": length, "seconds": taken["median"], "quartiles": taken["quartiles"]})
    del model
    machine.free()
    return rows
