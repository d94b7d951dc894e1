"""What gets worse without each mechanism above a hundred lines that no law asks for: one switched off at a time.

A mechanism earns its lines by 1 % of predicted time on some length file, by a law, by 1.3 times the speed, or by a promise of the
pages. All is counted or predicted but the CPU time of planning.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import CV_ONE, FILES, lengths_of, lognormal, pairs_of
from benchmarks.loader import light_loader
from benchmarks.machine import Machine, config_of
from benchmarks.methods import planned
from benchmarks.predicted import PACKED
from benchmarks.shapes import WORK, cost_of, rivals, windows_of
from dynagroup import Budget, MemoryBudget, ShapeLadder, TokenBudget
from dynagroup.memory import MemoryRegressor, Workload
from dynagroup.plan import cut, packed, padded, rows
from dynagroup.testing import run_ranks

ROOT = Path(__file__).parents[1]

SAMPLES = 2048
LARGE = 200_000
"""Samples of a window that is cut greedily."""
UPDATES = {"64": 64, "256": 256, "1024": 1024, "window": None}
"""Name -> samples of an update; None: no updates, a shuffled epoch."""


def without_rows(window: Any, num_ranks: int, price: float) -> Any:
    """One rank's cut, its dearest batches divided until they fill rows."""
    return rows._full_steps(window, window.least_time(price), num_ranks)


def without_order(units: Sequence[np.ndarray], size: int = 0) -> np.ndarray:
    """Each window sorted by the first stream, then the others."""
    num_samples = len(units[0])
    if size == 0:
        size = num_samples
    window = np.arange(num_samples) // size
    falling = [-of_stream for of_stream in reversed(units)]
    return np.lexsort([*falling, window])


def without_paces(_works: Any, num_steps: int, _num_ranks: int) -> list[float]:
    return [1.0] * num_steps


@dataclass(frozen=True)
class Mechanism:
    """A function of the planner, what stands in for it, and the layout that it is for."""

    layout: str
    module: ModuleType
    function: str
    instead: Callable[..., Any]


MECHANISMS = {
    "rows by dynamic programming (ranks)": Mechanism("padded", cut, "cut_into_steps", without_rows),
    "the exact cut (padded)": Mechanism("padded", padded, "shortest_path", padded.one_by_one),
    "greedy runs in large windows (padded)": Mechanism(
        "large", padded, "one_by_one", padded.shortest_path
    ),
    "an order alike in all streams (multistream)": Mechanism(
        "pairs", padded, "alike_order", without_order
    ),
    "rows by dynamic programming, two streams (ranks)": Mechanism(
        "pairs", cut, "cut_into_steps", without_rows
    ),
    "rows filled up to their longest sample (packed)": Mechanism(
        "packed", packed, "_paces", without_paces
    ),
}


def cases(layout: str) -> dict[str, Callable[[], Any]]:
    """Name -> a plan to make."""
    if layout == "large":
        lengths = {"tokens": lognormal(LARGE)}
        plan_of = partial(planned, lengths, TokenBudget(32_768), ranks=8, shuffle=True)
        return {"200,000 lognormal": plan_of}
    plans: dict[str, Callable[[], Any]] = {}
    for name, lengths, budget in samples_of(layout):
        for (update, size), num_ranks in product(UPDATES.items(), (1, 8)):
            plans[f"{name}/{update}/{num_ranks}"] = partial(
                planned,
                lengths,
                budget,
                ranks=num_ranks,
                samples_per_update=size,
                shuffle=size is None,
            )
    return plans


def samples_of(layout: str) -> Iterator[tuple[str, dict[str, np.ndarray], Budget]]:
    """The length files of a layout, their lengths, and a budget for each."""
    for name in FILES:
        if layout == "packed":
            if name in PACKED:
                budget = TokenBudget(PACKED[name], layout="packed")
                yield name, {"tokens": lengths_of(name, SAMPLES)}, budget
            continue
        lengths: dict[str, np.ndarray] | None = {"tokens": lengths_of(name, SAMPLES)}
        if layout == "pairs":
            lengths = pairs_of(name, SAMPLES)
        if lengths is not None:
            yield name, lengths, budget_of(lengths)


def budget_of(lengths: dict[str, np.ndarray]) -> TokenBudget:
    """Four times a long sample (the 99th percentile), or the longest one if that is more."""
    longest = sum(int(of_stream.max()) for of_stream in lengths.values())
    totals = np.sum(list(lengths.values()), axis=0)
    long = int(np.quantile(totals, 0.99))
    return TokenBudget(max(4 * long, longest))


def predicted_times(plans: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], float]:
    """Of each plan; and the CPU seconds that making them took."""
    start = time.process_time()
    times = {case: plan_of().predicted_time for case, plan_of in plans.items()}
    return times, time.process_time() - start


def ablation(_machine: Machine) -> dict[str, Any]:
    """Planning without each of its mechanisms; and what the other rooms count, or predict."""
    rooms = {}
    for what, (files, measure) in MEASURED.items():
        rooms[what] = {"lines": _count(files), **measure()}
    return {"planning": planning(), "rooms": rooms}


def _count(files: str) -> int:
    """Lines of these files of the package."""
    num_lines = 0
    for name in files.split():
        paths = list(ROOT.glob(f"dynagroup/{name}.py"))
        assert paths, f"{name} is gone"
        for path in paths:
            num_lines += len(path.read_text(encoding="utf-8").splitlines())
    return num_lines


def planning() -> dict[str, Any]:
    """By how much predicted time grows without each, on average, at most and where; and CPU time of planning over today's."""
    return {name: _without(mechanism) for name, mechanism in MECHANISMS.items()}


def _without(mechanism: Mechanism) -> dict[str, Any]:
    plans = cases(mechanism.layout)
    times_with, seconds_with = predicted_times(plans)
    with mock.patch.object(mechanism.module, mechanism.function, mechanism.instead):
        times_without, seconds_without = predicted_times(plans)
    growth = {case: times_without[case] / times_with[case] - 1 for case in plans}
    worst = max(growth, key=growth.__getitem__)
    mean = float(np.mean(list(growth.values())))
    return {
        "mean": round(mean, 5),
        "most": round(growth[worst], 5),
        "worst": worst,
        "plans": len(plans),
        "speed": round(seconds_without / seconds_with, 2),
    }


# Other rooms: what is counted with a mechanism and without it


def _compared(unit: str, now: float, without: float, instead: str) -> dict[str, Any]:
    return {"unit": unit, "with": round(now, 4), "without": round(without, 4), "instead": instead}


def few_shapes() -> dict[str, Any]:
    """Mean over the length files: updates of 64 samples, 16 shapes, a budget of four of the longest."""
    with_ladder = []
    with_uniform = []
    for name in FILES:
        tokens = lengths_of(name, SAMPLES)
        longest = int(tokens.max())
        budget = TokenBudget(4 * longest)
        free = planned(tokens, budget, samples_per_update=64, work=WORK)
        windows = windows_of(free, tokens, "updates of 64")
        ladder = ShapeLadder(tokens, budget, 16, window=64, work=WORK).shapes
        uniform = rivals(longest, 16, 4 * longest)["uniform"]
        with_ladder.append(_time_in(ladder, windows) / free.predicted_time)
        with_uniform.append(_time_in(uniform, windows) / free.predicted_time)
    return _compared(
        "predicted time with 16 shapes, of that with free shapes",
        now=float(np.mean(with_ladder)),
        without=float(np.mean(with_uniform)),
        instead="16 uniform lengths",
    )


def _time_in(shapes: Any, windows: list[np.ndarray]) -> float:
    """Predicted time of all windows in these shapes."""
    shapes = np.asarray(shapes)
    return sum(cost_of(window, shapes)[0] for window in windows)


def preflight() -> dict[str, Any]:
    """Mean over the length files of where the dearest batch is in a shuffled epoch."""
    steps = []
    for name in FILES:
        tokens = lengths_of(name, 20_000)
        plan = planned(tokens, TokenBudget(4 * int(tokens.max())), shuffle=True)
        padded_tokens = [len(batch) * tokens[batch].max() for batch in plan.batches]
        steps.append(int(np.argmax(padded_tokens)))
    return _compared(
        "steps before the batch of most tokens runs",
        now=0,
        without=float(np.mean(steps)),
        instead="it runs when it is drawn",
    )


def learned_plans() -> dict[str, Any]:
    """Two epochs of four ranks: lengths are learned in the first."""
    lengths = lengths_of(CV_ONE, 40_000)

    def cost(step: Any) -> float:
        longest = 0 if step.idle else int(lengths[step.indices].max())
        return WORK.per_step + len(step.indices) * float(WORK.of_lengths(longest))

    def run(world: Any) -> list[list[float]]:
        loader = light_loader(lengths, world=world, work=WORK)
        first_epoch = [cost(step) for step in loader]
        second_epoch = [cost(step) for step in loader]
        return [first_epoch, second_epoch]

    times = []
    for costs_of_ranks in zip(*run_ranks(4, run), strict=True):
        slowest = np.max(costs_of_ranks, axis=0)
        times.append(float(slowest.sum()))
    in_windows, learned = times
    return _compared(
        "predicted time of an epoch, 4 ranks",
        now=1.0,
        without=in_windows / learned,
        instead="windows as in the first epoch",
    )


LENGTHS = np.array([64, 128, 256, 512, 1024])


def tracing() -> dict[str, Any]:
    """Samples that fit beside a hardest batch of 8 x 2,048, mean over 0.5B and 135M models, three modes, 64 to 1,024 tokens."""
    of_sizes = []
    of_nothing = []
    nothing = _samples_allowed(None)
    for size, mode in product(("0.5B", "135M"), ("train", "forward", "generate")):
        known = partial(Workload.from_model, config_of(size), mode, dtype="bfloat16")
        traced = _samples_allowed(MemoryRegressor.pretrained(known(trace=True)))
        sizes = _samples_allowed(MemoryRegressor.pretrained(known(trace=False)))
        of_sizes.append(sizes / traced)
        of_nothing.append(nothing / traced)
    return _compared(
        "samples allowed beside a hardest batch of decoders, of those a trace allows",
        now=1.0,
        without=float(np.mean(of_sizes)),
        instead=f"its sizes, not its trace (knowing neither: {np.mean(of_nothing):.2f})",
    )


def _samples_allowed(model: Any) -> np.ndarray:
    """The most samples of each length; None: nothing is known of the model."""
    budget = MemoryBudget(8, longest=2048, model=model)
    return np.asarray(budget.largest(LENGTHS), float)


MEASURED: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "shapes chosen for least work": ("plan/few_shapes update/filling", few_shapes),
    "pre-flight": ("oom/preflight", preflight),
    "plans from lengths that were learned": ("online/requests", learned_plans),
    "a model's program is traced": ("memory/trace/* memory/traced", tracing),
}
"""What it is -> its files, and what is counted with it and without."""
