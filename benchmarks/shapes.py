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

COUNTS, UPDATE, WORK = (4, 8, 16, 32), 64, Work()


def few(_machine: Machine) -> dict[str, Any]:
    """A row a length file, number of shapes and way of training: predicted time over that of free shapes; share of padding; CPU
    seconds that the choice took. The budget holds four of the longest."""
    rows: dict[str, Any] = {}
    for name in FILES:
        tokens = lengths_of(name, 20_000)
        longest = int(tokens.max())
        budget, cv = TokenBudget(4 * longest), round(float(tokens.std() / tokens.mean()), 2)
        for mode, how in (
            ("updates of 64", {"samples_per_update": UPDATE}),
            ("a window", {"shuffle": True}),
        ):
            free = planned(tokens, budget, **how)
            windows = windows_of(free, tokens, mode)
            for number in COUNTS:
                began = time.process_time()
                size = UPDATE if mode == "updates of 64" else len(windows[0])
                ladder = ShapeLadder(tokens, budget, number, window=size, work=WORK)
                found: dict[str, Any] = {
                    "cv": cv,
                    "chosen_in_s": round(time.process_time() - began, 2),
                }
                ways = {"ladder": ladder.shapes, **rivals(longest, number, budget.max_tokens)}
                for way, shapes in ways.items():
                    taken, padded = np.sum(
                        [cost_of(window, np.asarray(shapes)) for window in windows], axis=0
                    )
                    real = sum(int(window.sum()) for window in windows)
                    found[way] = {
                        "time": round(taken / free.predicted_time, 3),
                        "padding": round(1 - real / padded, 3),
                    }
                found["free"] = {"time": 1.0, "padding": round(free.statistics["padding"], 3)}
                rows[f"{name}, {mode}, {number} shapes"] = found
    return rows


def strata(_machine: Machine) -> dict[str, Any]:
    """Stratified updates of 32 in few shapes: predicted time over that of free shapes. The ladder is chosen for such
    updates; fixed borders give each of as many strata one shape, as long as its longest sample."""
    rows: dict[str, Any] = {}
    size = 32
    for name in FILES:
        tokens = lengths_of(name, 8_000)
        budget = TokenBudget(4 * int(tokens.max()))
        how = {"samples_per_update": size, "grouping": 50}
        free = planned(tokens, budget, **how).predicted_time
        rows[name] = {}
        for number in (4, 8, 16):
            ladder = ShapeLadder(tokens, budget, number, window=size, grouping=50, work=WORK)
            borders = fixed_borders(tokens, budget.max_tokens, number, size)
            rows[name][f"shapes_{number}"] = {
                "ladder": planned(tokens, ladder, **how).predicted_time / free,
                "fixed borders": borders * len(tokens) / size / free,
            }
    return rows


def fixed_borders(tokens: np.ndarray, cap: int, number: int, size: int) -> float:
    """Predicted time of an update of which each of so many strata has one shape."""
    longest_first = np.sort(tokens)[::-1]
    time_taken = 0.0
    for stratum in range(number):
        longest = int(longest_first[len(tokens) * stratum // number])
        samples = size * (stratum + 1) // number - size * stratum // number
        of_batch = max(1, min(samples, cap // longest))
        steps = -(-samples // of_batch)
        time_taken += steps * (WORK.per_step + of_batch * float(WORK.of_lengths(longest)))
    return time_taken


def windows_of(plan: Any, tokens: np.ndarray, mode: str) -> list[np.ndarray]:
    """Lengths of what was cut together, the longest first."""
    if mode == "updates of 64":
        ends = np.flatnonzero(plan.update_ends) + 1
    else:
        size, sums = plan.start.window_size, np.cumsum(plan.batches.sizes)
        ends = np.unique([*np.searchsorted(sums, np.arange(size, sums[-1], size)) + 1, len(sums)])
    parts = np.split(np.arange(len(plan.batches)), ends[:-1])
    return [np.sort(tokens[plan.batches.take(part).order])[::-1] for part in parts]


def rivals(longest: int, number: int, cap: int) -> dict[str, list[tuple[int, int]]]:
    """As many lengths, of each as many samples as fit."""
    uniform = np.ceil(longest * np.arange(1, number + 1) / number).astype(int).tolist()
    powers = [2**n for n in range(1, 40) if 2**n < longest][-(number - 1) :] + [longest]
    lengths = {"uniform": uniform, "powers of two": powers, "longest": [longest]}
    return {way: [(cap // wide, wide) for wide in found] for way, found in lengths.items()}


def cost_of(window: np.ndarray, shapes: np.ndarray) -> tuple[float, int]:
    """Least predicted time of a sorted window in these shapes, by dynamic programming, and its padded tokens."""
    samples, wide = shapes[:, 0], shapes[:, 1]
    costs, num = samples * WORK.of_lengths(wide) + WORK.per_step, len(window)
    best, padded = np.zeros(num + 1), np.zeros(num + 1, np.int64)
    for start in range(num - 1, -1, -1):
        stops = np.minimum(start + samples, num)
        taken = np.where(wide >= window[start], costs + best[stops], np.inf)
        shape = int(taken.argmin())
        best[start], padded[start] = (
            taken[shape],
            padded[stops[shape]] + samples[shape] * wide[shape],
        )
    return float(best[0]), int(padded[0])


WAYS = {"not compiled": None, "one dynamic graph": True, "a graph a shape": False}
"""What torch.compile is told of shapes; None: it is not called."""


def compiled(machine: Machine, updates: int = 6, passes: int = 4) -> dict[str, Any]:
    """A decoder of three layers of width 96 on gsm8k's lengths, with and without torch.compile: CPU seconds of each further pass
    over the same samples, and how much longer the first one took, which compiles."""
    lengths = lengths_of("gsm8k", UPDATE * updates)
    data, budget = Numbered(lengths), TokenBudget(8 * int(lengths.max()))
    work = Work.of_known(build("small"), device="cpu")
    batches = {
        "fixed 8": [
            collate([data[i] for i in range(start, start + 8)]) for start in range(0, len(data), 8)
        ]
    }
    same: dict[str, Any] = {"samples_per_update": UPDATE}
    for name, how in (
        ("free", {}),
        ("same updates", same),
        ("same updates, 8 shapes", {**same, "shapes": 8}),
    ):
        loader = PlannedDataLoader(
            data, lengths, budget, shuffle=True, work=work, collate_fn=collate, **how
        )
        batches[name] = [step.batch for step in loader]
    torch._dynamo.config.recompile_limit, inductor = 64, torch._inductor.config
    inductor.compile_threads, inductor.force_disable_caches = 1, True
    runs: dict[str, tuple[str, Any]] = {}
    for name, way in product(batches, WAYS):
        if way != "a graph a shape" or name.endswith("shapes"):
            model = build("small")
            runs[f"{name}, {way}"] = (
                name,
                model if WAYS[way] is None else torch.compile(model, dynamic=WAYS[way]),
            )

    def run(name: str, model: Any) -> None:
        for batch in batches[name]:
            model(**batch).loss.backward()

    taken = machine.in_turns({way: partial(run, *what) for way, what in runs.items()}, passes)
    return {
        way: {
            "compiling_s": seconds[0] - seconds[1],
            "seconds": seconds[1:],
            "over_fixed": paired(taken["fixed 8, not compiled"][1:], seconds[1:]),
            "batches": len(batches[runs[way][0]]),
            "shapes": len({batch["input_ids"].shape for batch in batches[runs[way][0]]}),
        }
        for way, seconds in taken.items()
    }
