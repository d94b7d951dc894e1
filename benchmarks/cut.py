"""What the time-cut is worth, by prediction: against the fewest batches, and shards against a balancing rule of the field.

``cut``: updates of 16 to 256 samples and free ones, on 1 and 8 ranks, a budget of 16 of the longest sample, 20,000 samples
(4,000 for updates of up to 64). The cost is padded tokens of the dearest rank of each step, plus 1,024 a step.
``shards``: `shard_micro_batches` against Karmarkar-Karp over the ranks, then over each rank's micro-batches, in the fewest
that keep the cap; both in rows by work. The critical path is the sum over steps of the dearest rank, plus the price of steps.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup import TokenBudget, shard_micro_batches
from dynagroup.plan.config import PlanConfig
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Planner

LENGTHS = Path(__file__).parent / "lengths"
CUT = (
    "gsm8k",
    "azure_llm_conv_2023",
    "python_files",
    "mooncake_conv",
    "t0_mix_50k",
    "synth_ultrachat",
    "synth_sharegpt4o",
)
SHARDED = {
    "azure_llm_conv_2023": 16_384,
    "python_files": 65_536,
    "synth_sharegpt4o": 16_384,
    "t0_mix_50k": 8_192,
    "mooncake_conv": 131_072,
}
PRICE = 1024.0


def tokens_of(name: str, most: int) -> np.ndarray:
    return np.load(LENGTHS / f"{name}.npz")["tokens"][:most]


def figures(plan: BatchPlan) -> dict[str, float]:
    """With padded tokens for work, whatever the plan was made to save."""
    by_row = plan.padded[plan.table].astype(float)
    return {
        "steps": plan.num_steps,
        "real_share": plan.statistics["efficiency"],
        "cost": PRICE * len(by_row) + float(by_row.max(axis=1).sum()),
        "waiting": float(by_row.max(axis=1).sum() / max(by_row.mean(axis=1).sum(), 1e-9)),
    }


def plans(**how: Any) -> dict[str, Any]:
    """Figures of every file, update size and number of ranks."""
    found: dict[str, Any] = {}
    for name in CUT:
        budget = TokenBudget(16 * int(tokens_of(name, 20_000).max()))
        for group in (16, 32, 64, 256, None):
            tokens = tokens_of(name, 20_000 if group is None or group >= 256 else 4_000)
            size: dict[str, Any] = {"shuffle": True} if group is None else {"samples_per_update": group}
            planner = Planner({"tokens": tokens}, budget, PlanConfig(seed=1, **size, **how))
            for ranks in (1, 8):
                found[f"{name}/{group or 'free'}/{ranks}"] = figures(planner.plan(0, ranks))
    return found


def bench_cut(before: Path) -> dict[str, Any]:
    """Now, and as the checkout of an earlier version does it."""
    from dynagroup.plan.work import Work

    environment = {**os.environ, "PYTHONPATH": str(before)}
    run = subprocess.run([sys.executable, __file__], env=environment, check=True, capture_output=True, text=True)
    earlier = json.loads(run.stdout)
    now = plans(work=Work(per_step=PRICE, crossover=math.inf))
    return {key: {"before": earlier[key], "now": now[key]} for key in now}


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Largest differencing (Karmarkar and Karp 1982) for several parts: the two most uneven partial divisions are joined,
    the dearest of one with the cheapest of the other."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, cost in enumerate(costs):
        division = [(0.0, []) for _ in range(parts - 1)] + [(float(cost), [item])]
        heapq.heappush(heap, (-float(cost), item, division))
    number = len(costs)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = sorted(
            ((a + b, p + q) for (a, p), (b, q) in zip(one, reversed(other), strict=True)), key=lambda part: part[0]
        )
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
        number += 1
    return [items for _, items in heap[0][2]]


def rival_shards(tokens: np.ndarray, ranks: int, cap: int, work: Any, layout: str) -> list[list[list[int]]]:
    """Balance work over ranks, then over each rank's micro-batches; as few of them as keep every one under the cap."""
    each = work.of_lengths(tokens)
    mine = karmarkar_karp(each.tolist(), ranks)
    size = (lambda m: tokens[m].max() * len(m)) if layout == "padded" else (lambda m: tokens[m].sum())
    count = max(-(-int(tokens[m].sum()) // cap) for m in mine)
    while True:
        cut = [[[m[i] for i in part] for part in karmarkar_karp(each[m].tolist(), count)] for m in mine]
        if all(size(part) <= cap for rank in cut for part in rank if part):
            return cut
        count += 1


def critical_path(shards: list[list[list[int]]], tokens: np.ndarray, work: Any, layout: str) -> float:
    def of(part: list[int]) -> float:
        if not part:
            return 0.0
        return float(
            len(part) * work.of_lengths(tokens[part].max())
            if layout == "padded"
            else work.of_lengths(tokens[part]).sum()
        )

    by_rank = np.asarray([sorted((of(part) for part in rank), reverse=True) for rank in shards])
    return work.of_rows(by_rank.T)


def bound(tokens: np.ndarray, ranks: int, cap: int, work: Any, layout: str) -> float:
    """No division takes less: each row's dearest rank has at least the row's mean work, and one row has the longest sample.

    Padded, the batches' work and price come to at least those of the exact cut for one rank.
    """
    from dynagroup.plan.cut import cut

    each = work.of_lengths(tokens)
    rows = max(-(-int(tokens.sum()) // (ranks * cap)), 1)
    least = work.per_step * rows + max(float(each.sum()) / ranks, float(each.max()))
    if layout == "packed":
        return least
    lengths, budget = {"tokens": tokens.astype(np.int32)}, TokenBudget(cap)
    alone = cut(lengths, budget, work=work)
    return max(least, (work.per_step * len(alone) + float(work.of_batches(alone, lengths, budget).sum())) / ranks)


def bench_shards() -> dict[str, Any]:
    found: dict[str, Any] = {}
    from dynagroup.plan.work import Work

    work = Work(per_step=PRICE, crossover=24_576)
    for name, cap in SHARDED.items():
        tokens = tokens_of(name, 20_000).astype(np.int64)
        tokens = np.random.default_rng(0).permutation(tokens[tokens <= cap])
        for layout in ("packed", "padded"):
            sums = np.zeros(5)
            for first in range(0, min(len(tokens), 10 * 256) - 255, 256):
                part = tokens[first : first + 256]
                theirs = rival_shards(part, 8, cap, work, layout)
                ours = shard_micro_batches(part, 8, TokenBudget(cap, layout=layout), work=work)
                sums += [
                    *(critical_path(s, part, work, layout) for s in (ours, theirs)),
                    *(len(ours[0]), len(theirs[0]), bound(part, 8, cap, work, layout)),
                ]
            found[f"{name}/{layout}"] = {
                "critical_path": sums[0] / sums[1],
                "over_bound": sums[0] / sums[4],
                "rival_over_bound": sums[1] / sums[4],
                "micro_batches": sums[2],
                "rival_micro_batches": sums[3],
            }
            print(name, layout, json.dumps(found[f"{name}/{layout}"]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout of the version to compare with")
    given = parser.parse_args()
    if given.before is None:  # a version that is compared with: it prints its plans
        print(json.dumps(plans()))
    else:
        from benchmarks.record import RESULTS, save  # an earlier version has none

        print(save(RESULTS, "cut", bench_cut(given.before)))


if __name__ == "__main__":
    main()
