"""What grows how: planning, its memory, the online loader and the exchanges between ranks, as exponents fitted to CPU seconds,
bytes and counts. An exponent of 1 is a cost in proportion; below it, less."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.loader import Nothing, first_of, same
from benchmarks.predicted import lognormal
from benchmarks.ranks import Job
from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, TokenBudget

__all__ = ["exponent", "growth", "table"]

BUDGET = 16_384
SAMPLES = (10_000, 100_000, 1_000_000, 10_000_000)
RANKS = (1, 8, 64, 512, 1024)


def exponent(sizes: Iterable[float], costs: Iterable[float]) -> float:
    """Slope of the line through the logarithms, by least squares.

    >>> round(exponent([10, 100, 1000], [5, 50, 500]), 6), round(exponent([1, 4, 16], [3, 6, 12]), 6)
    (1.0, 0.5)
    """
    return float(np.polyfit(np.log(list(sizes)), np.log(list(costs)), 1)[0])


def growth(samples: tuple[int, ...] = SAMPLES, ranks: tuple[int, ...] = RANKS) -> dict[str, Any]:
    """One entry a cost: over what, which sizes, what it was there, the exponent."""
    smaller = samples[:3]
    return {
        "planning, sorted": _fitted("samples", samples, "CPU s", lambda n: _planned(n)),
        "planning, shuffle=True": _fitted("samples", samples, "CPU s", lambda n: _planned(n, shuffle=True)),
        "planning, samples_per_update=256": _fitted(
            "samples", smaller, "CPU s", lambda n: _planned(n, samples_per_update=256)
        ),
        "planning for many ranks": _fitted("ranks", ranks, "CPU s", lambda r: _planned(samples[1], ranks=r)),
        "memory of planning over the input": _fitted("samples", samples, "MB", _memory),
        "online loader, main process": _fitted("samples", smaller, "CPU s", _loaded),
        "alignment, exchanges an epoch": _fitted("ranks", ranks, "exchanges", lambda r: _aligned(r).exchanges),
        "alignment, bytes a rank an epoch": _fitted("ranks", ranks, "bytes", lambda r: _aligned(r).bytes),
    }


def table(figures: dict[str, Any]) -> str:
    from dynagroup.plan.report import format_table

    lines = [[name, f["over"], f["unit"], str(f["costs"]), f"{f['exponent']:.2f}"] for name, f in figures.items()]
    return format_table(["", "over", "unit", "costs", "exponent"], lines)


def _fitted(over: str, sizes: tuple[int, ...], unit: str, cost: Callable[[int], float]) -> dict[str, Any]:
    costs = [cost(size) for size in sizes]
    print(over, unit, costs, flush=True)
    return {"over": over, "unit": unit, "sizes": list(sizes), "costs": costs, "exponent": exponent(sizes, costs)}


def _planned(count: int, ranks: int = 8, **options: Any) -> float:
    """The least of some repeats: what is added to it is the machine's other work."""
    lengths = lognormal(count)
    taken = []
    for _ in range(5 if count < 1_000_000 else 2):
        began = time.process_time()
        sampler = LengthAwareBatchSampler(lengths, TokenBudget(BUDGET), rank=0, world_size=ranks, **options)
        assert sampler.plan.num_steps
        taken.append(time.process_time() - began)
    return min(taken)


def _memory(count: int) -> float:
    lengths = lognormal(count)
    tracemalloc.start()
    assert LengthAwareBatchSampler(lengths, TokenBudget(BUDGET), rank=0, world_size=8).plan.num_steps
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def _loaded(count: int) -> float:
    loader = OnlineDataLoader(
        Nothing(lognormal(count)),
        TokenBudget(BUDGET),
        collate_fn=first_of,
        length_of=same,
        weigh="samples",
        shuffle=True,
    )
    began = time.process_time()
    for _ in loader:
        pass
    return time.process_time() - began


def _aligned(ranks: int) -> Job:
    lengths = np.random.default_rng(ranks).choice(lognormal(100_000), ranks * 2000)
    return Job(lengths, ranks, budget=BUDGET, window=256, depth=2, low_water=32).run()
