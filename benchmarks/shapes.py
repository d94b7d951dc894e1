"""What few shapes cost, counted and not run: predicted time and padding of ladders beside other choices of as many shapes."""

import time
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch._inductor.config

from benchmarks.data import FILES, Numbered, collate, lengths_of
from benchmarks.machine import Machine, build, paired
from benchmarks.methods import planned
from dynagroup import PlannedDataLoader, ShapeLadder, TokenBudget, Work

COUNTS = (4, 8, 16, 32)
UPDATE = 64
WORK = Work()


def few(_machine: Machine) -> dict[str, Any]:
    """A row a length file, number of shapes and way of training: predicted time over that of free shapes; share of padding; CPU
    seconds that the choice took. The budget holds four of the longest."""
    rows: dict[str, Any] = {}
    for name in FILES:
        tokens = lengths_of(name, 20_000)
        budget = TokenBudget(4 * int(tokens.max()))
        updates = planned(tokens, budget, samples_per_update=UPDATE)
        rows |= few_of_plan(name, tokens, budget, updates, "updates of 64")
        window = planned(tokens, budget, shuffle=True)
        rows |= few_of_plan(name, tokens, budget, window, "a window")
    return rows


def few_of_plan(
    name: str, tokens: np.ndarray, budget: TokenBudget, free: Any, mode: str
) -> dict[str, Any]:
    """A row a number of shapes; ``free`` is the plan of free shapes."""
    cv = round(float(tokens.std() / tokens.mean()), 2)
    windows = windows_of(free, tokens, mode)
    size = UPDATE if mode == "updates of 64" else len(windows[0])
    rows = {}
    for number in COUNTS:
        began = time.process_time()
        ladder = ShapeLadder(tokens, budget, number, window=size, work=WORK)
        chosen_in_s = time.process_time() - began
        row: dict[str, Any] = {"cv": cv, "chosen_in_s": round(chosen_in_s, 2)}
        ways = rivals(int(tokens.max()), number, budget.max_tokens)
        for way, shapes in {"ladder": ladder.shapes, **ways}.items():
            row[way] = time_and_padding(windows, np.asarray(shapes), free.predicted_time)
        padding = free.statistics["padding"]
        row["free"] = {"time": 1.0, "padding": round(padding, 3)}
        rows[f"{name}, {mode}, {number} shapes"] = row
    return rows


def time_and_padding(
    windows: list[np.ndarray], shapes: np.ndarray, free_time: float
) -> dict[str, float]:
    costs = [cost_of(window, shapes) for window in windows]
    time_taken, padded = np.sum(costs, axis=0)
    real = sum(int(window.sum()) for window in windows)
    return {
        "time": round(time_taken / free_time, 3),
        "padding": round(1 - real / padded, 3),
    }


def windows_of(plan: Any, tokens: np.ndarray, mode: str) -> list[np.ndarray]:
    """Lengths of what was cut together, the longest first."""
    if mode == "updates of 64":
        ends = np.flatnonzero(plan.update_ends) + 1
    else:
        size = plan.start.window_size
        sums = np.cumsum(plan.batches.sizes)
        ends_in_samples = np.arange(size, sums[-1], size)
        last_batches = np.searchsorted(sums, ends_in_samples)
        ends = np.unique([*last_batches + 1, len(sums)])
    windows = []
    for places in np.split(np.arange(len(plan.batches)), ends[:-1]):
        samples = plan.batches.take(places).order
        shortest_first = np.sort(tokens[samples])
        windows.append(shortest_first[::-1])
    return windows


def rivals(longest: int, number: int, cap: int) -> dict[str, list[tuple[int, int]]]:
    """As many lengths, of each as many samples as fit."""
    uniform = np.ceil(longest * np.arange(1, number + 1) / number).astype(int)
    powers = [2**exponent for exponent in range(1, 40) if 2**exponent < longest]
    largest_powers = powers[-(number - 1) :]
    return {
        "uniform": shapes_of(uniform.tolist(), cap),
        "powers of two": shapes_of([*largest_powers, longest], cap),
        "longest": shapes_of([longest], cap),
    }


def shapes_of(lengths: list[int], cap: int) -> list[tuple[int, int]]:
    return [(cap // length, length) for length in lengths]


def cost_of(window: np.ndarray, shapes: np.ndarray) -> tuple[float, int]:
    """Least predicted time of a sorted window in these shapes, by dynamic programming, and its padded tokens."""
    samples = shapes[:, 0]
    lengths = shapes[:, 1]
    costs = samples * WORK.of_lengths(lengths) + WORK.per_step
    num_samples = len(window)
    least_time = np.zeros(num_samples + 1)
    padded = np.zeros(num_samples + 1, np.int64)
    for start in reversed(range(num_samples)):
        stops = np.minimum(start + samples, num_samples)
        holds = lengths >= window[start]
        times = np.where(holds, costs + least_time[stops], np.inf)
        best = int(times.argmin())
        least_time[start] = times[best]
        padded[start] = padded[stops[best]] + samples[best] * lengths[best]
    return float(least_time[0]), int(padded[0])


WAYS = {"not compiled": None, "one dynamic graph": True, "a graph a shape": False}
"""What torch.compile is told of shapes; None: it is not called."""


def compiled(machine: Machine, updates: int = 6, passes: int = 4) -> dict[str, Any]:
    """A decoder of three layers of width 96 on gsm8k's lengths, with and without torch.compile: CPU seconds of each further pass
    over the same samples, and how much longer the first one took, which compiles."""
    batches = batches_to_compile(lengths_of("gsm8k", UPDATE * updates))
    torch._dynamo.config.recompile_limit = 64
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True

    def run(model: Any, batches: list[Any]) -> None:
        for batch in batches:
            model(**batch).loss.backward()

    batches_of_run = {}
    runs = {}
    for name, way in product(batches, WAYS):
        if way == "a graph a shape" and not name.endswith("shapes"):
            continue
        model: Any = build("small")
        if WAYS[way] is not None:
            model = torch.compile(model, dynamic=WAYS[way])
        key = f"{name}, {way}"
        batches_of_run[key] = batches[name]
        runs[key] = partial(run, model, batches[name])
    times = machine.in_turns(runs, passes)
    fixed = times["fixed 8, not compiled"][1:]
    rows = {}
    for key, (first, *further) in times.items():
        shapes = {batch["input_ids"].shape for batch in batches_of_run[key]}
        rows[key] = {
            "compiling_s": first - further[0],
            "seconds": further,
            "over_fixed": paired(fixed, further),
            "batches": len(batches_of_run[key]),
            "shapes": len(shapes),
        }
    return rows


def batches_to_compile(lengths: np.ndarray) -> dict[str, list[Any]]:
    """Batches of one fixed size, of free shapes, and of the same updates in free or few shapes."""
    data = Numbered(lengths)
    fixed = []
    for start in range(0, len(data), 8):
        samples = [data[place] for place in range(start, start + 8)]
        fixed.append(collate(samples))
    loader = partial(
        PlannedDataLoader,
        data,
        lengths,
        TokenBudget(8 * int(lengths.max())),
        shuffle=True,
        work=Work.of_known(build("small"), device="cpu"),
        collate_fn=collate,
    )
    same_updates = loader(samples_per_update=UPDATE)
    in_few_shapes = loader(samples_per_update=UPDATE, shapes=8)
    return {
        "fixed 8": fixed,
        "free": [step.batch for step in loader()],
        "same updates": [step.batch for step in same_updates],
        "same updates, 8 shapes": [step.batch for step in in_few_shapes],
    }
