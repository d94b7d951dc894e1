"""Seconds of a training step over (samples, length): what the price of a step and the crossover of attention are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Machine, build
from benchmarks.record import spread
from dynagroup.device import is_out_of_memory
from dynagroup.plan.cost import Work

__all__ = ["fit_of", "run", "table"]

MODELS = ("135M", "0.5B", "1.5B")
LENGTHS = (32, 128, 512, 2048, 8192)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TOKENS = 32768
REPEATS = 5


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields the figures so far, after every shape."""
    figures: dict[str, Any] = {}
    machine.warm_up()
    for number, name in enumerate(MODELS):
        seconds = (machine.left_s() - 10) / (len(MODELS) - number)
        if seconds < 20 and not machine.dry:
            figures[name] = {"left out": "no time"}
            continue
        figures[name] = {"rows": []}
        for row in _rows(name, machine, machine.left_s() - seconds):
            figures[name]["rows"].append(row)
            yield figures
        machine.free()
    yield figures


def _rows(name: str, machine: Machine, end: float) -> Iterator[dict[str, Any]]:
    """Shapes of few tokens first: what does not fit, or comes too late, is the largest."""
    model = build(name, machine)
    shapes = [(n, length) for length in LENGTHS for n in SAMPLES if n * length <= MOST_TOKENS]
    if machine.dry:
        shapes = [(1, 8), (2, 8), (4, 8), (1, 32), (2, 32)]
    for n, length in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)):
        if machine.left_s() < end and not machine.dry:
            return
        row = _row(model, n, length, machine)
        machine.free()
        yield {"num_samples": n, "longest": length, **row}


def _step(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def _row(model: Any, n: int, length: int, machine: Machine) -> dict[str, Any]:
    ids = torch.randint(3, model.config.vocab_size, (n, length), device=machine.device)
    step = partial(_step, model, ids)
    try:
        step()
        taken = spread([machine.seconds(step) for _ in range(1 if machine.dry else REPEATS)])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"left out": "out of memory"}
    return {"seconds": taken["median"], "quartiles": taken["quartiles"]}


def fit_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Price and crossover of measured steps, and how far off the fit is: median and largest relative error."""
    shapes = [(row["num_samples"], row["longest"], row["seconds"]) for row in rows]
    work = Work.fit(shapes)
    predicted = np.array([work.per_step + n * float(work.of_lengths(longest)) for n, longest, _ in shapes])
    seconds = np.array([s for _, _, s in shapes])
    errors = np.abs(predicted / seconds * np.median(seconds / predicted) - 1)
    return {
        "per_step": work.per_step, "crossover": work.crossover,
        "median_error": float(np.median(errors)), "largest_error": float(errors.max()),
    }  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    from dynagroup.plan.report import format_table

    timed = {name: [row for row in found.get("rows", []) if "seconds" in row] for name, found in figures.items()}
    fits = {name: fit_of(rows) for name, rows in timed.items() if len(rows) >= 3}
    lines = [
        [
            name,
            f"{f['per_step']:,.0f}",
            f"{f['crossover']:,.0f}",
            f"{f['median_error']:.1%}",
            f"{f['largest_error']:.0%}",
        ]
        for name, f in fits.items()
    ]
    head = ["model", "price of a step (linear tokens)", "crossover (tokens)", "median error", "largest"]
    return format_table(head, lines)
