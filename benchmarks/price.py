"""Seconds of a training step over (samples, length): what the price of a step and the crossover of attention are."""

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Machine, build
from benchmarks.record import spread, table
from dynagroup import Work

MODELS = ("135M", "0.5B", "1.5B")
LENGTHS = (32, 128, 512, 2048, 8192)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TOKENS = 32768
DRY = ((1, 8), (8, 8), (1, 128), (8, 128), (32, 128))
ON_CPU = (
    (1, 16),
    (1, 64),
    (1, 256),
    (4, 16),
    (4, 64),
    (4, 256),
    (16, 16),
    (16, 64),
    (32, 16),
    (32, 64),
)


def measured_work(machine: Machine) -> Work:
    """What the recipe says: time a dozen shapes of the small model, fit."""
    return work_of_steps(build("small", machine), machine, ON_CPU)


def work_of_steps(
    model: Any, machine: Machine, shapes: Iterable[tuple[int, int]], repeats: int = 5
) -> Work:
    """Work that is fitted to the times of steps of these shapes; those that do not fit the device are left out."""
    timed = []
    for num_samples, longest in shapes:
        row = row_of(model, num_samples, longest, machine, repeats)
        if "seconds" in row:
            timed.append((num_samples, longest, row["seconds"]))
    return Work.fit(timed)


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields the figures so far, after every shape."""
    figures: dict[str, Any] = {}
    machine.warm_up()
    for number, name in enumerate(MODELS):
        figures[name] = {"rows": []}
        left = machine.left_s()
        seconds_of_model = (left - 10) / (len(MODELS) - number)
        for row in _rows(name, machine, end=left - seconds_of_model):
            figures[name]["rows"].append(row)
            yield figures
        machine.free()
    yield figures


def _rows(name: str, machine: Machine, end: float) -> Iterator[dict[str, Any]]:
    """Shapes of few tokens first: what does not fit, or comes too late, is the largest."""
    model = build(name, machine)
    shapes = DRY if machine.dry else product(SAMPLES, LENGTHS)
    for num_samples, length in sorted(shapes, key=lambda shape: (math.prod(shape), shape)):
        if num_samples * length > MOST_TOKENS or not machine.has(end):
            return
        row = row_of(model, num_samples, length, machine)
        machine.free()
        yield {"num_samples": num_samples, "longest": length, **row}


def row_of(model: Any, n: int, length: int, machine: Machine, repeats: int = 5) -> dict[str, Any]:
    """Seconds of forward and backward, after one that is not counted."""
    ids = torch.randint(3, model.config.vocab_size, (n, length), device=machine.device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    if not machine.fits(step):
        return {"left out": "out of memory"}
    taken = spread(machine.in_turns({"": step}, 1 if machine.dry else repeats)[""])
    return {"seconds": taken["median"], "quartiles": taken["quartiles"]}


def fit_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Price and crossover of measured steps, and how far off the fit is: median and largest relative error."""
    num_samples = np.array([row["num_samples"] for row in rows])
    longest = np.array([row["longest"] for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    shapes = zip(num_samples.tolist(), longest.tolist(), seconds.tolist(), strict=True)
    work = Work.fit(list(shapes))
    predicted = work.per_step + num_samples * work.of_lengths(longest)
    unit_s = np.median(seconds / predicted)
    errors = np.abs(predicted / seconds * unit_s - 1)
    return {
        "per_step": work.per_step,
        "crossover": work.crossover,
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
    }


def shown(figures: dict[str, Any]) -> list[str]:
    rows = []
    for name, found in figures.items():
        timed = [row for row in found.get("rows", []) if "seconds" in row]
        if len(timed) >= 3:
            rows.append({"key": name, **fit_of(timed)})
    head = (
        "| model | price of a step (linear tokens) | crossover (tokens) | median error | largest |"
    )
    return table(
        rows,
        head,
        "{key} | {per_step:,.0f} | {crossover:,.0f} | {median_error:.1%} | {largest_error:.0%}",
    )
