"""Planning: how fast and how little memory; a peer in the same run.

``rival`` needs dynabatch; it is left out, and said so, where that is missing.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.predicted import lognormal
from dynagroup.budget.base import Budget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape


def seconds(run: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Median and spread in CPU seconds of one thread: other work on the machine does not count."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return {"median_s": float(np.median(taken)), "min_s": min(taken), "max_s": max(taken)}


class TwoStreams(Budget):
    """Source and target padded apart: their padded tokens together stay under a limit."""

    def fits(self, shape: BatchShape, /) -> np.ndarray:
        return shape.num_samples * (shape.longest["tokens"] + shape.longest["target"]) <= 16384


def plan(lengths: Any, budget: Budget, ranks: int = 8, **options: Any) -> None:
    sampler = LengthAwareBatchSampler(lengths, budget, rank=0, world_size=ranks, **options)
    assert sampler.plan.num_steps


def first_batch(lengths: np.ndarray) -> dict[str, float]:
    sampler = LengthAwareBatchSampler(lengths, TokenBudget(16384), shuffle=True, window=4096, rank=0, world_size=8)

    def run() -> None:
        sampler.set_epoch(sampler.epoch + 1)
        next(iter(sampler))

    run()
    return seconds(run)


def bench_speed() -> dict[str, Any]:
    million, ten = lognormal(1_000_000), lognormal(10_000_000)
    million[::100_000] = 16384  # the longest possible sample occurs
    target = np.clip(million * np.random.default_rng(1).uniform(0.5, 1.5, len(million)), 1, None).astype(np.int32)
    tracemalloc.start()
    plan(million, TokenBudget(16384))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    def iterate() -> None:
        for _ in LengthAwareBatchSampler(million, TokenBudget(16384), rank=0, world_size=8):
            pass

    return {
        "token_budget_1m": seconds(lambda: plan(million, TokenBudget(16384))),
        "token_budget_1m_peak_mb_over_input": peak / 1e6,
        "token_budget_1m_shuffled": seconds(lambda: plan(million, TokenBudget(16384), shuffle=True)),
        "token_budget_1m_iterated": seconds(iterate),
        "token_budget_10m": seconds(lambda: plan(ten, TokenBudget(16384)), repeats=3),
        "memory_budget_1m_pretrained": seconds(lambda: plan(million, MemoryBudget(32))),
        "two_padded_streams_1m": seconds(lambda: plan({"tokens": million, "target": target}, TwoStreams()), repeats=3),
        "first_batch_of_1m_window_4096": first_batch(million),
        "first_batch_of_10m_window_4096": first_batch(ten),
    }


def bench_rival() -> dict[str, Any]:
    """20,000 samples: dynabatch asks its regressor for every batch, we ask ours once."""
    try:
        from dynabatch.sampler import DynaBatchSampler
    except ImportError:
        return {"skipped": "dynabatch is not installed (pip install --no-deps dynabatch==0.2.23)"}
    lengths = lognormal(20_000, longest=2048)
    words, chars = (lengths * 0.75).astype(int).tolist(), (lengths * 4).tolist()
    figures: dict[str, Any] = {"samples": len(lengths)}
    for size in (8, 32):
        theirs = seconds(lambda n=size: DynaBatchSampler(lengths.tolist(), words, chars, n, threshold=0.9), repeats=1)
        ours = seconds(lambda n=size: plan(lengths, MemoryBudget(n, headroom=0.9), ranks=1))
        token = seconds(lambda n=size: plan(lengths, TokenBudget(n * 2048), ranks=1))
        figures[f"batch_size_{size}"] = {
            "dynabatch": theirs,
            "memory_budget": ours,
            "token_budget": token,
            "times_faster_memory_budget": theirs["median_s"] / ours["median_s"],
            "times_faster_token_budget": theirs["median_s"] / token["median_s"],
        }
    return figures
