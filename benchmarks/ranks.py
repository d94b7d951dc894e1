"""The online loader on many ranks: steps and exchanges simulated on counts alone, and four real ranks that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loader import BUDGET, CV_ONE, LENGTHS
from dynagroup import TokenBudget
from dynagroup.online.config import OnlineConfig
from dynagroup.online.plans import Rank, exact_plans, exact_window
from dynagroup.online.protocol import WIDTH, Offer, agree, hand_out, level
from dynagroup.plan.padded import cut
from dynagroup.plan.ranks import cut_rows
from dynagroup.shapes import TOKENS


class Job:
    """Ranks as rows of arrays: the loader's decision functions on counts of batches alone."""

    def __init__(
        self, lengths: np.ndarray, ranks: int, *, budget: int, window: int, depth: int, low_water: int
    ) -> None:
        self.lengths, self.ranks, self.budget = lengths, ranks, TokenBudget(budget)
        self.window, self.depth, self.low_water = window, depth, low_water
        self.queued = [0] * ranks
        self.pending: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.start = 0
        self.made = [0] * ranks
        self.taken = [0] * ranks
        self.steps = self.exchanges = self.idle = self.bytes = 0
        self.per_batch = 0.0

    def load(self, rank: int, everything: bool) -> None:
        while self.pending[rank] and (everything or self.queued[rank] < self.low_water):
            first, last = self.pending[rank].pop(0)
            count = len(cut({"tokens": self.lengths[first:last]}, self.budget))
            self.queued[rank] += count
            self.made[rank] += count
            self.taken[rank] += last - first

    def grant(self, loads: list[int]) -> None:
        target = (self.depth + 1) * self.window + round(self.low_water * self.per_batch)
        grants, self.start = hand_out(loads, self.start, len(self.lengths), window=self.window, target=target)
        for rank, grant in enumerate(grants):
            self.pending[rank] += grant

    def run(self) -> Job:
        self.grant([0] * self.ranks)
        everything = False
        while True:
            for rank in range(self.ranks):
                self.load(rank, everything)
            closed = self.start >= len(self.lengths)
            offers = [Offer(q, bool(p) or not closed).to_max() for q, p in zip(self.queued, self.pending, strict=True)]
            agreement = agree([max(column) for column in zip(*offers, strict=True)])
            everything = agreement.load_all
            self.steps += agreement.steps
            self.exchanges += 1
            self.bytes += 8 * (WIDTH + 2 * agreement.steps + 3 + (0 if closed else self.ranks))
            for rank in range(self.ranks):
                self.idle += max(0, agreement.steps - self.queued[rank])
                self.queued[rank] = max(0, self.queued[rank] - agreement.steps)
            if agreement.last:
                return self
            self.per_batch = sum(self.taken) / max(sum(self.made), 1)
            if not closed:
                waiting = [sum(b - a for a, b in p) for p in self.pending]
                self.grant([round(q * self.per_batch) + w for q, w in zip(self.queued, waiting, strict=True)])


def simulated(name: str, ranks: int, samples: int, window: int = 1024) -> dict[str, Any]:
    tokens = np.load(LENGTHS / f"{name}.npz")["tokens"]
    lengths = np.random.default_rng(ranks).choice(tokens, ranks * samples)
    budget = max(BUDGET, int(tokens.max()))
    job = Job(lengths, ranks, budget=budget, window=window, depth=2, low_water=32).run()
    ideal = sum(job.made) / ranks
    size = TokenBudget(budget)
    counts = []
    for rank in range(min(ranks, 512)):
        shard = lengths[rank * samples : (rank + 1) * samples]
        counts.append([len(cut({"tokens": shard[s : s + window]}, size)) for s in range(0, samples, window)])
    fixed = max(sum(c) for c in counts) / (sum(map(sum, counts)) / len(counts)) - 1
    gathered = sum(max(column) for column in zip(*counts, strict=True)) / (sum(map(sum, counts)) / len(counts)) - 1
    return {
        "ranks": ranks,
        "samples_a_rank": samples,
        "steps": job.steps,
        "above_all_batches_over_ranks": job.steps / ideal - 1,
        "above_with_fixed_shards": fixed,
        "above_with_alignment_of_every_window": gathered,
        "idle_share_before_splitting": job.idle / (job.steps * ranks),
        "exchanges": job.exchanges,
        "bytes_a_rank_a_step": job.bytes / job.steps,
    }


def learned(ranks: int, samples: int) -> dict[str, Any]:
    """An epoch planned from known lengths: rows of the exact plan against all its batches."""
    tokens = np.load(LENGTHS / f"{CV_ONE}.npz")["tokens"]
    lengths = {"tokens": np.random.default_rng(ranks).choice(tokens, ranks * samples)}
    config = OnlineConfig(shuffle=True)
    window = exact_window(lengths, TokenBudget(BUDGET), ranks, config)
    counts = []
    for rank in sorted({0, ranks // 2, ranks - 1}):
        plans = exact_plans(lengths, Rank(rank, ranks, 0, TokenBudget(BUDGET), config), window=window)
        counts.append(sum(len(p.groups or ()) for p in plans))
    total = sum(
        len(cut_rows({TOKENS: lengths[TOKENS][s : s + window]}, TokenBudget(BUDGET), ranks))
        for s in range(0, ranks * samples, window)
    )
    above = max(counts) / (total / ranks) - 1
    return {"ranks": ranks, "samples_a_rank": samples, "steps": max(counts), "above_all_batches_over_ranks": above}


def many_ranks(quick: bool = False) -> dict[str, Any]:
    """Steps above what all batches over all ranks would take, 1 to 1,024 ranks."""
    level([0], 0)
    figures: dict[str, Any] = {"windows": {}}
    for path in sorted(LENGTHS.glob("*.npz")):
        rows = []
        sizes = [1, 8, 64] if quick else [1, 8, 64, 512, 1024]
        for ranks in sizes if path.stem == CV_ONE else [s for s in (8, 64, 512) if s <= sizes[-1]]:
            rows.append(simulated(path.stem, ranks, 16_000))
            print(path.stem, json.dumps(rows[-1]), flush=True)
        if path.stem == CV_ONE:
            for ranks in [8, 64] if quick else [8, 64, 512, 1024]:
                rows.append(simulated(path.stem, ranks, 64_000))
                print(path.stem, json.dumps(rows[-1]), flush=True)
        figures["windows"][path.stem] = rows
    return figures


def learned_rows() -> dict[str, Any]:
    """The same for an epoch planned from known lengths."""
    return {"rows": [learned(8, 16_000), learned(64, 16_000), learned(512, 16_000), learned(8, 64_000)]}


def train() -> dict[str, Any]:
    """Four gloo ranks train a small model on equal samples: fixed batches, free-running, update mode."""
    script = Path(__file__).parent / "ranks_training.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    return json.loads(line.removeprefix("REPORT "))
