"""What gets worse without each mechanism of planning above a hundred lines, or that a law rests on: one switched off at a time.

Real lengths (``benchmarks/lengths``), updates of 64, 256 and 1,024 samples and plain windows, 1 and 8 ranks. A mechanism earns
its lines by 1 % of predicted time on some length file, by a law, or by 1.3 times the speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from benchmarks.data import FILES, lengths_of, lognormal, pairs_of
from benchmarks.methods import planned
from benchmarks.predicted import PACKED
from dynagroup import TokenBudget
from dynagroup.plan import packed, padded, ranks
from dynagroup.plan.batches import longest_first

__all__ = ["ablation", "table"]

SAMPLES = 2048
UPDATES: dict[str, dict[str, Any]] = {
    **{str(size): {"samples_per_update": size} for size in (64, 256, 1024)},
    "window": {"shuffle": True},
}


def without_rows(window: Any, num_ranks: int, price: float) -> Any:
    """One rank's cut, its dearest batches divided until they fill rows."""
    return ranks._filled(window, window.least_time(price), num_ranks)


def as_they_are(row: Any, *_: Any) -> Any:
    return row


def without_order(units: Any) -> Any:
    """Sorted by the first stream, then the others."""
    return longest_first({"tokens": units[0], **{str(n): u for n, u in enumerate(units[1:])}}, ("tokens",))


class Mechanism(NamedTuple):
    """Its layout, and what stands in for it."""

    layout: str
    owner: Any
    name: str
    instead: Any


MECHANISMS = {
    "rows by dynamic programming (ranks)": Mechanism("padded", ranks, "_cheapest", without_rows),
    "uneven rows cut again (ranks)": Mechanism("padded", ranks, "_level_runs", as_they_are),
    "the exact cut by a convex hull trick (padded)": Mechanism("padded", padded, "by_queue", padded.one_by_one),
    "greedy runs in large windows (padded)": Mechanism("large", padded, "EXACT_UP_TO", 1 << 30),
    "an order alike in all streams (multistream)": Mechanism("pairs", padded, "alike_order", without_order),
    "rows by dynamic programming, two streams (ranks)": Mechanism("pairs", ranks, "_cheapest", without_rows),
    "samples of uneven rows exchanged (ranks)": Mechanism("pairs", ranks, "_level_pairs", as_they_are),
    "rows filled up to their longest sample (packed)": Mechanism(
        "packed", packed, "_paces", lambda dearest, rows, multiple: [1.0] * rows
    ),
}


@contextmanager
def switched_off(mechanism: Mechanism) -> Iterator[None]:
    before = getattr(mechanism.owner, mechanism.name)
    setattr(mechanism.owner, mechanism.name, mechanism.instead)
    try:
        yield
    finally:
        setattr(mechanism.owner, mechanism.name, before)


def cases(layout: str) -> dict[str, Callable[[], Any]]:
    """Name -> a plan to make."""
    if layout == "large":
        lengths = {"tokens": lognormal(200_000)}
        return {"200,000 lognormal": lambda: planned(lengths, TokenBudget(32_768), 8, shuffle=True)}
    found: dict[str, Callable[[], Any]] = {}
    for name in FILES:
        lengths = pairs_of(name, SAMPLES) if layout == "pairs" else {"tokens": lengths_of(name, SAMPLES)}
        if lengths is None or (layout == "packed" and name not in PACKED):
            continue
        most = sum(int(values.max()) for values in lengths.values())
        cap = max(4 * int(np.quantile(sum(lengths.values()), 0.99)), most)
        budget = TokenBudget(PACKED[name], layout="packed") if layout == "packed" else TokenBudget(cap)
        for update, how in UPDATES.items():
            for num_ranks in (1, 8):
                found[f"{name}/{update}/{num_ranks}"] = (
                    lambda lengths=lengths, budget=budget, ranks=num_ranks, how=how: planned(
                        lengths, budget, ranks, **how
                    )
                )
    return found


class Planned(NamedTuple):
    time: float
    """Predicted."""
    uneven: int
    rows: int
    """Of those in which no sample is more work than the mean: which differ by more than 5 % of it, and how many there are."""
    seconds: float


def made(plan_of: Callable[[], Any]) -> Planned:
    start = time.process_time()
    plan = plan_of()
    seconds = time.process_time() - start
    streams = {name: values for name, values in plan.lengths.items() if plan.budget.pads(name)}
    each = plan.work.of_lengths(streams)
    work = plan.work.of_batches(plan.batches, plan.lengths, plan.budget)[plan.table]
    dearest = np.asarray([each[batch].max() for batch in plan.batches])[plan.table].max(axis=1)
    mean = work.mean(axis=1)
    apart = work.max(axis=1) - work.min(axis=1) > 0.05 * mean
    return Planned(plan.predicted_time, int((apart & (dearest <= mean)).sum()), int((dearest <= mean).sum()), seconds)


def ablation() -> dict[str, Any]:
    """For each mechanism: by how much predicted time grows without it, on average, at most and where; uneven rows; speed."""
    found = {}
    for name, mechanism in MECHANISMS.items():
        plans = cases(mechanism.layout)
        now = {case: made(plan_of) for case, plan_of in plans.items()}
        with switched_off(mechanism):
            then = {case: made(plan_of) for case, plan_of in plans.items()}
        more = {case: then[case].time / now[case].time - 1 for case in plans}
        worst = max(more, key=lambda case: more[case])
        found[name] = {
            "plans": len(plans),
            "more_time_mean": round(float(np.mean(list(more.values()))), 5),
            "more_time_worst": round(more[worst], 5),
            "worst": worst,
            "uneven_rows": [sum(plan.uneven for plan in made_.values()) for made_ in (now, then)],
            "rows": [sum(plan.rows for plan in made_.values()) for made_ in (now, then)],
            "planning_s": [round(sum(plan.seconds for plan in made_.values()), 2) for made_ in (now, then)],
        }
    return found


def table(figures: dict[str, Any]) -> str:
    """One row a mechanism."""
    rows = [
        "| without | predicted time: mean | worst | where | rows beyond 5 %: now, without | planning: now, without |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in figures.items():
        uneven = ", ".join(
            f"{bad / max(count, 1):.1%}" for bad, count in zip(row["uneven_rows"], row["rows"], strict=True)
        )
        seconds = ", ".join(f"{value:.1f} s" for value in row["planning_s"])
        more = f"{row['more_time_mean']:+.2%} | {row['more_time_worst']:+.2%}"
        rows.append(f"| {name} | {more} | {row['worst']} | {uneven} | {seconds} |")
    return "\n".join(rows)
