"""What gets worse without each mechanism above a hundred lines that no law asks for: one switched off at a time.

A mechanism earns its lines by 1 % of predicted time on some length file, by a law, by 1.3 times the speed, or by a promise of the
pages. All is counted or predicted but the CPU time of planning.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import CV_ONE, FILES, lengths_of, lognormal, pairs_of
from benchmarks.loader import light_loader
from benchmarks.machine import Machine, config_of
from benchmarks.methods import planned
from benchmarks.predicted import PACKED
from benchmarks.shapes import WORK, cost_of, rivals, windows_of
from dynagroup import MemoryBudget, ShapeLadder, TokenBudget
from dynagroup.memory import MemoryRegressor, Workload
from dynagroup.plan import cut, packed, padded, rows
from dynagroup.plan.batches import longest_first
from dynagroup.testing import run_ranks

ROOT = Path(__file__).parents[1]

SAMPLES = 2048
UPDATES: dict[str, dict[str, Any]] = {
    **{str(size): {"samples_per_update": size} for size in (64, 256, 1024)},
    "window": {"shuffle": True},
}


def without_rows(window: Any, num_ranks: int, price: float) -> Any:
    """One rank's cut, its dearest batches divided until they fill rows."""
    return rows._full_steps(window, window.least_time(price), num_ranks)


def without_order(units: Any) -> Any:
    """Sorted by the first stream, then the others."""
    return longest_first({"tokens": units[0], **{str(n): u for n, u in enumerate(units[1:])}})


MECHANISMS: dict[str, tuple[str, Any, str, Any]] = {
    "rows by dynamic programming (ranks)": ("padded", cut, "cut_into_steps", without_rows),
    "the exact cut (padded)": (
        "padded",
        padded,
        "shortest_path",
        padded.one_by_one,
    ),
    "greedy runs in large windows (padded)": ("large", padded, "one_by_one", padded.shortest_path),
    "an order alike in all streams (multistream)": ("pairs", padded, "alike_order", without_order),
    "rows by dynamic programming, two streams (ranks)": (
        "pairs",
        cut,
        "cut_into_steps",
        without_rows,
    ),
    "rows filled up to their longest sample (packed)": (
        "packed",
        packed,
        "_paces",
        lambda _, rows, __: [1.0] * rows,
    ),
}
"""Name -> the layout it is for, its module, what it is called there, and what stands in for it."""


def cases(layout: str) -> dict[str, Callable[[], Any]]:
    """Name -> a plan to make."""
    if layout == "large":
        lengths = {"tokens": lognormal(200_000)}
        return {
            "200,000 lognormal": partial(planned, lengths, TokenBudget(32_768), 8, shuffle=True)
        }
    found: dict[str, Callable[[], Any]] = {}
    for name in FILES:
        lengths = (
            pairs_of(name, SAMPLES) if layout == "pairs" else {"tokens": lengths_of(name, SAMPLES)}
        )
        if lengths is None or (layout == "packed" and name not in PACKED):
            continue
        most = sum(int(values.max()) for values in lengths.values())
        cap = max(4 * int(np.quantile(sum(lengths.values()), 0.99)), most)
        budget = (
            TokenBudget(PACKED[name], layout="packed") if layout == "packed" else TokenBudget(cap)
        )
        for (update, how), num_ranks in product(UPDATES.items(), (1, 8)):
            found[f"{name}/{update}/{num_ranks}"] = partial(
                planned, lengths, budget, num_ranks, **how
            )
    return found


def made(plans: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], float]:
    """Predicted time of each, and the CPU seconds that all took."""
    start = time.process_time()
    times = {case: plan_of().predicted_time for case, plan_of in plans.items()}
    return times, time.process_time() - start


def ablation(_machine: Machine) -> dict[str, Any]:
    """Planning without each of its mechanisms; and what the other rooms count, or predict."""
    rooms = {
        what: {"lines": _count(files), **measure()} for what, (files, measure) in MEASURED.items()
    }
    return {"planning": planning(), "rooms": rooms}


def _count(files: str) -> int:
    paths = [path for name in files.split() for path in ROOT.glob(f"dynagroup/{name}.py")]
    assert paths, f"{files} are gone"
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def planning() -> dict[str, Any]:
    """By how much predicted time grows without each, on average, at most and where; and CPU time of planning over today's."""
    found = {}
    for name, (layout, module, called, instead) in MECHANISMS.items():
        plans = cases(layout)
        now, seconds = made(plans)
        with mock.patch.object(module, called, instead):
            then, seconds_then = made(plans)
        more = {case: then[case] / now[case] - 1 for case in plans}
        worst = max(more, key=lambda case: more[case])
        about = {
            "mean": round(float(np.mean(list(more.values()))), 5),
            "most": round(more[worst], 5),
            "worst": worst,
        }
        found[name] = {**about, "plans": len(plans), "speed": round(seconds_then / seconds, 2)}
    return found


# Other rooms: what is counted with a mechanism and without it


def _compared(unit: str, now: float, without: float, instead: str) -> dict[str, Any]:
    return {"unit": unit, "with": round(now, 4), "without": round(without, 4), "instead": instead}


def few_shapes() -> dict[str, Any]:
    """Mean over the length files: updates of 64 samples, 16 shapes, a budget of four of the longest."""
    shares = []
    for tokens in (lengths_of(name, SAMPLES) for name in FILES):
        longest = int(tokens.max())
        budget, how = TokenBudget(4 * longest), {"samples_per_update": 64, "work": WORK}
        free = planned(tokens, budget, **how)
        windows = windows_of(free, tokens, "updates of 64")
        ways = (
            ShapeLadder(tokens, budget, 16, window=64, work=WORK).shapes,
            rivals(longest, 16, 4 * longest)["uniform"],
        )
        shares.append(
            [
                sum(cost_of(w, np.asarray(way))[0] for w in windows) / free.predicted_time
                for way in ways
            ]
        )
    unit = "predicted time with 16 shapes, of that with free shapes"
    return _compared(unit, *np.mean(shares, axis=0), "16 uniform lengths")


def preflight() -> dict[str, Any]:
    """Mean over the length files of where the dearest batch is in a shuffled epoch."""
    steps = []
    for name in FILES:
        tokens = lengths_of(name, 20_000)
        plan = planned(tokens, TokenBudget(4 * int(tokens.max())), shuffle=True)
        steps.append(int(np.argmax([len(batch) * tokens[batch].max() for batch in plan.batches])))
    return _compared(
        "steps before the batch of most tokens runs", 0, np.mean(steps), "it runs when it is drawn"
    )


def learned_plans() -> dict[str, Any]:
    """Two epochs of four ranks: lengths are learned in the first."""
    lengths = lengths_of(CV_ONE, 40_000)

    def cost(step: Any) -> float:
        longest = 0 if step.idle else int(lengths[step.indices].max())
        return WORK.per_step + len(step.indices) * float(WORK.of_lengths(longest))

    def run(world: Any) -> list[list[float]]:
        loader = light_loader(lengths, world=world, work=WORK)
        return [[cost(step) for step in loader] for _ in range(2)]

    windows, learned = (
        float(np.max(costs, axis=0).sum()) for costs in zip(*run_ranks(4, run), strict=True)
    )
    return _compared(
        "predicted time of an epoch, 4 ranks",
        1.0,
        windows / learned,
        "windows as in the first epoch",
    )


def tracing() -> dict[str, Any]:
    """Samples that fit beside a hardest batch of 8 x 2,048, mean over 0.5B and 135M models, three modes, 64 to 1,024 tokens."""
    lengths, shares = np.array([64, 128, 256, 512, 1024]), []
    for size in ("0.5B", "135M"):
        for mode in ("train", "forward", "generate"):
            known = partial(Workload.from_model, config_of(size), mode, dtype="bfloat16")
            models = [MemoryRegressor.pretrained(known(trace=trace)) for trace in (True, False)]
            budgets = [MemoryBudget(8, longest=2048, model=model) for model in (*models, None)]
            shares.append([np.asarray(budget.largest(lengths)) for budget in budgets])
    traced, sizes, unknown = np.array(shares, float).transpose(1, 0, 2)
    instead = f"its sizes, not its trace (knowing neither: {float((unknown / traced).mean()):.2f})"
    unit = "samples allowed beside a hardest batch of decoders, of those a trace allows"
    return _compared(unit, 1.0, float((sizes / traced).mean()), instead)


MEASURED: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "shapes chosen for least work": ("plan/few_shapes update/filling", few_shapes),
    "pre-flight": ("oom/preflight", preflight),
    "plans from lengths that were learned": ("online/requests", learned_plans),
    "a model's program is traced": ("memory/trace/* memory/traced", tracing),
}
"""What it is -> its files, and what is counted with it and without."""
