"""Two padded streams: what sorting by the first alone pads and takes, and what an order of both does. Predicted, nothing is run.

The first rule is the one of most samplers, and was this package's: samples fall in their source, ties in their target, and runs
of them are cut for least time of the source alone. Both keep the same budget, which counts both streams. 20,000 pairs, in
windows of 4,096 samples, in updates of 256, and sorted whole; one rank.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plan import lognormal, plan
from dynagroup.budget.base import padded_tokens
from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.batches import Batches, longest_first, shapes_of
from dynagroup.plan.cut import cut
from dynagroup.plan.reach import most_by_start
from dynagroup.plan.runs import SortedWindow
from dynagroup.plan.work import Work
from dynagroup.shapes import Streams

LENGTHS = Path(__file__).parent / "lengths"
PAIRS = 20_000
WINDOWS = {"updates of 256": 256, "windows of 4,096": 4096, "sorted whole": PAIRS}
WORK = Work()


def files() -> dict[str, tuple[str, Streams]]:
    """Name -> (what it is, source and target tokens)."""
    rng = np.random.default_rng(0)
    source = rng.lognormal(3.3, 0.6, PAIRS).clip(2, 512)
    target = (source * rng.lognormal(0.1, 0.25, PAIRS)).clip(1, 512)
    found = {"translation": ("drawn: target = source x 1.1, ratio varies by 25 %", _streams(source, target))}
    for name, what in {
        "gsm8k": "questions and worked answers, correlation 0.52",
        "t0_mix_50k": "prompts and short answers, correlation 0.12",
        "azure_llm_conv_2023": "long conversations and answers, correlation -0.11",
    }.items():
        read = np.load(LENGTHS / f"{name}.npz")
        chosen = np.random.default_rng(0).permutation(len(read["tokens"]))[:PAIRS]
        found[name] = (what, _streams(read["src_tokens"][chosen], read["tgt_tokens"][chosen]))
    return found


def _streams(source: np.ndarray, target: np.ndarray) -> Streams:
    return {"tokens": source.astype(np.int32), "target": target.astype(np.int32)}


def by_first(lengths: Streams, budget: TokenBudget) -> Batches:
    """Sorted and cut by the first stream; what fits is asked for both."""
    order = longest_first(lengths)
    ordered = {name: values[order] for name, values in lengths.items()}
    window = SortedWindow.of(WORK.of_lengths(ordered["tokens"]), most_by_start(ordered, budget), None)
    return Batches(order, window.least_time(WORK.per_step))


def by_both(lengths: Streams, budget: TokenBudget) -> Batches:
    return cut(lengths, budget, work=WORK)


def figures(lengths: Streams, budget: TokenBudget, window: int, rule: Any) -> dict[str, float]:
    """Padding over both streams, steps, predicted time in linear tokens, CPU seconds of planning."""
    begun, padded, steps, predicted = time.process_time(), 0, 0, 0.0
    for first in range(0, len(lengths["tokens"]), window):
        part = {name: values[first : first + window] for name, values in lengths.items()}
        batches = rule(part, budget)
        padded += int(padded_tokens(shapes_of(batches, part), budget).sum())
        predicted += WORK.of_rows(WORK.of_batches(batches, part, budget)[:, None])
        steps += len(batches)
    real = sum(int(values.sum()) for values in lengths.values())
    return {
        "padding": 1.0 - real / padded,
        "steps": steps,
        "predicted_time": predicted,
        "planning_s": time.process_time() - begun,
    }


def bench_streams() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (what, lengths) in files().items():
        longest = sum(int(values.max()) for values in lengths.values())
        budget = TokenBudget(max(16_384, 2 * longest))
        rows: dict[str, Any] = {"what": what, "pairs": len(lengths["tokens"]), "max_tokens": budget.max_tokens}
        for label, window in WINDOWS.items():
            before, after = (figures(lengths, budget, window, rule) for rule in (by_first, by_both))
            share = after["predicted_time"] / before["predicted_time"]
            rows[label] = {"by_first_stream": before, "by_both": after, "share_of_time": share}
        found[name] = rows
    return {"pairs": found, "planning_1m_s": planning()}


def planning() -> float:
    """CPU seconds of planning a million pairs, sorted whole, for 8 ranks."""
    source = lognormal(1_000_000)
    target = np.clip(source * np.random.default_rng(1).uniform(0.5, 1.5, len(source)), 1, None)
    begun = time.process_time()
    plan(_streams(source, target), TokenBudget(32_768))
    return time.process_time() - begun
