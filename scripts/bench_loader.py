"""The online loader: speed, fill, overhead, many ranks, real training; peers in the same run.

    python scripts/bench_loader.py                 # everything, about half an hour on two cores
    python scripts/bench_loader.py speed fill      # or some of: speed, fill, overhead, ranks, learned, balance, train

``online-dynamic-batching`` (extra ``bench``) is measured beside it in ``speed`` and ``fill``; where it is not installed,
that is said. ``train`` starts four gloo ranks of scripts/bench_loader_train.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
from results import save  # noqa: E402

from dynagroup import OnlineDataLoader, TokenBudget  # noqa: E402
from dynagroup.online.align import Offer, agree, hand_out, level  # noqa: E402
from dynagroup.online.config import OnlineConfig  # noqa: E402
from dynagroup.online.exchange import WIDTH  # noqa: E402
from dynagroup.online.requests import Rank, exact_plans, exact_window  # noqa: E402
from dynagroup.plan.batches import shapes_of  # noqa: E402
from dynagroup.plan.cut import cut  # noqa: E402
from dynagroup.plan.rows import cut_evenly  # noqa: E402
from dynagroup.shapes import TOKENS  # noqa: E402
from dynagroup.testing import run_ranks  # noqa: E402
from dynagroup.world import World  # noqa: E402

LENGTHS = Path(__file__).parent.parent / "benchmarks" / "lengths"
CV_ONE = "synth_sharegpt4o"
BUDGET = 16_384


def lengths_of(name: str, count: int | None = None) -> np.ndarray:
    tokens = np.load(LENGTHS / f"{name}.npz")["tokens"]
    return np.random.default_rng(0).permutation(tokens)[:count]


class Tokens(Dataset):
    """Processed samples of given lengths: three int64 arrays each."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(int(self.lengths[index]), dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    width = max(len(s["input_ids"]) for s in samples)
    batch = {}
    for name, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        rows = np.full((len(samples), width), filler, np.int64)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample[name])] = sample[name].numpy()
        batch[name] = torch.from_numpy(rows)
    return batch


def plain_loader(data: Dataset) -> Iterable[Any]:
    return DataLoader(data, batch_size=16, shuffle=True, num_workers=2, collate_fn=collate)


def our_loader(data: Dataset, window: int, budget: int = BUDGET) -> Iterable[Any]:
    return OnlineDataLoader(
        data, TokenBudget(budget), collate_fn=collate, shuffle=True, window=window, num_workers=2, seed=1
    )


def rival_loader(data: Dataset, window: int, budget: int = BUDGET) -> Iterable[Any] | None:
    try:
        import odb
    except ImportError:
        return None
    return odb.ODBDataLoader(
        data,
        token_budget=budget,
        batch_size=1,
        shuffle=True,
        num_workers=2,
        prefetch_factor=window // 2,
        collate_fn=collate,
    )


def drain(loader: Iterable[Any]) -> dict[str, float]:
    """One epoch: seconds, samples, steps, real and padded tokens."""
    samples = steps = real = padded = 0
    start = time.perf_counter()
    for item in loader:
        batch = item.batch if hasattr(item, "batch") else item
        mask = batch["attention_mask"]
        samples += len(mask)
        steps += 1
        padded += mask.numel()
        real += int(np.count_nonzero(mask.numpy()))
    return {"seconds": time.perf_counter() - start, "samples": samples, "steps": steps, "real_share": real / padded}


def speed(repeats: int) -> dict[str, Any]:
    """20,000 samples of CV 1.0, two workers, three int64 tensors; the loaders take turns."""
    lengths = lengths_of(CV_ONE, 20_000)
    loaders: dict[str, Callable[[], Iterable[Any] | None]] = {
        "plain, 16 a batch": lambda: plain_loader(Tokens(lengths)),
        "dynagroup, window 1024": lambda: our_loader(Tokens(lengths), 1024),
        "dynagroup, window 256": lambda: our_loader(Tokens(lengths), 256),
        "online-dynamic-batching, window 256": lambda: rival_loader(Tokens(lengths[:4000]), 256),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
    for turn in range(repeats):
        for name, make in loaders.items():
            loader = make()
            if loader is None:
                print(f"{name}: not installed, left out")
                continue
            runs[name].append(drain(loader))
            got = runs[name][-1]
            print(
                f"turn {turn}: {name}: {got['samples'] / got['seconds']:,.0f} samples/s, real {got['real_share']:.3f}"
            )
    rates = {name: [r["samples"] / r["seconds"] for r in found] for name, found in runs.items() if found}
    figures: dict[str, Any] = {}
    for name, found in rates.items():
        figures[name] = {"samples_per_s": sorted(round(r) for r in found), "real_share": runs[name][-1]["real_share"]}
    for name in list(rates):
        if name.startswith("dynagroup"):
            for peer in ("plain, 16 a batch", "online-dynamic-batching, window 256"):
                if peer in rates:
                    ratios = [a / b for a, b in zip(rates[name], rates[peer], strict=True)]
                    figures[f"{name} / {peer}"] = spread(ratios)
    return figures


def spread(values: list[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def untimed(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name != "seconds"}


def fill() -> dict[str, Any]:
    """Steps and padding at equal window and budget, one rank, every length file."""
    figures = {}
    for path in sorted(LENGTHS.glob("*.npz")):
        lengths = lengths_of(path.stem, 3000)
        budget = max(BUDGET, int(lengths.max()))
        row: dict[str, Any] = {"samples": len(lengths), "budget": budget}
        for window in (256, 1024):
            row[f"dynagroup {window}"] = {
                k: v for k, v in drain(our_loader(Tokens(lengths), window, budget)).items() if k != "seconds"
            }
        rival = rival_loader(Tokens(lengths), 256, budget)
        if rival is not None:
            row["online-dynamic-batching 256"] = untimed(drain(rival))
        print(path.stem, json.dumps(row))
        figures[path.stem] = row
    long = lengths_of(CV_ONE)
    for window in (256, 1024):
        real = padded = steps = 0
        for start in range(0, len(long), window):
            part = {"tokens": long[start : start + window]}
            shapes = shapes_of(cut(part, TokenBudget(BUDGET)), part)
            padded += int((shapes.num_samples * shapes.longest["tokens"]).sum())
            real += int(part["tokens"].sum())
            steps += len(shapes)
        figures[f"CV 1.0, window {window}, 100,000 samples"] = {"real_share": real / padded, "steps": steps}
    return figures


class Nothing(Dataset):
    """Samples that cost nothing to make: what is left is the loader."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths.tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> int:
        return self.lengths[index]


def first_of(samples: list[int]) -> int:
    return samples[0]


def same(sample: int) -> int:
    return sample


def overhead(repeats: int) -> dict[str, Any]:
    """Main process, one rank: time a step beyond what fetching windows takes; and cutting a window of 1,024."""
    lengths = lengths_of(CV_ONE, 40_000)
    per_step = []
    for _ in range(repeats):
        loader = OnlineDataLoader(
            Nothing(lengths), TokenBudget(BUDGET), collate_fn=first_of, length_of=same, weigh="samples", shuffle=True
        )
        start = time.perf_counter()
        steps = sum(1 for _ in loader)
        per_step.append((time.perf_counter() - start - loader.stats.wait_s) / steps * 1e6)
    cuts = []
    for start in range(0, 20 * 1024, 1024):
        began = time.perf_counter()
        cut({"tokens": lengths[start : start + 1024]}, TokenBudget(BUDGET))
        cuts.append((time.perf_counter() - began) * 1e3)
    return {"microseconds_a_step": spread(per_step), "milliseconds_to_cut_1024": spread(cuts)}


def balance() -> dict[str, Any]:
    """Four ranks: padded tokens of the fullest rank of each row over the mean, first and second epoch."""
    lengths = lengths_of(CV_ONE, 40_000)

    def run(world: World) -> list[list[int]]:
        loader = OnlineDataLoader(
            Nothing(lengths),
            TokenBudget(BUDGET),
            collate_fn=first_of,
            length_of=same,
            weigh="samples",
            shuffle=True,
            world=world,
        )
        cost = lambda step: 0 if step.idle else len(step.indices) * int(lengths[step.indices].max())  # noqa: E731
        return [[cost(step) for step in loader] for _ in range(2)]

    by_rank = run_ranks(4, run)
    figures = {}
    for epoch, name in enumerate(("windows", "learned lengths")):
        costs = np.array([rank[epoch] for rank in by_rank])
        shuffled = np.array([np.random.default_rng(r).permutation(row) for r, row in enumerate(costs)])
        figures[name] = {
            "row_imbalance": float(costs.max(0).sum() / costs.mean(0).sum() - 1),
            "if_ranks_shuffled_apart": float(shuffled.max(0).sum() / shuffled.mean(0).sum() - 1),
        }
    return figures


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
            self.pending[rank] += grant.ranges

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
    window = exact_window(lengths, TokenBudget(BUDGET), ranks, OnlineConfig(shuffle=True))
    counts = []
    for rank in sorted({0, ranks // 2, ranks - 1}):
        plans = exact_plans(lengths, TokenBudget(BUDGET), Rank(rank, ranks, 0, 0), window=window, shuffle=True)
        counts.append(sum(len(p.groups or ()) for p in plans))
    total = sum(
        len(cut_evenly({TOKENS: lengths[TOKENS][s : s + window]}, TokenBudget(BUDGET), ranks))
        for s in range(0, ranks * samples, window)
    )
    above = max(counts) / (total / ranks) - 1
    return {"ranks": ranks, "samples_a_rank": samples, "steps": max(counts), "above_all_batches_over_ranks": above}


def many_ranks(quick: bool) -> dict[str, Any]:
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


def train() -> dict[str, Any]:
    """Four gloo ranks train a small model on equal samples: fixed batches, free-running, update mode."""
    script = Path(__file__).parent / "bench_loader_train.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", choices=["speed", "fill", "overhead", "ranks", "learned", "balance", "train", []]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer ranks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": lambda: speed(arguments.repeats),
        "fill": fill,
        "overhead": lambda: overhead(arguments.repeats),
        "ranks": lambda: many_ranks(arguments.quick),
        "balance": balance,
        "train": train,
        "learned": lambda: {
            "rows": [learned(8, 16_000), learned(64, 16_000), learned(512, 16_000), learned(8, 64_000)]
        },
    }
    for part in arguments.parts or runs:
        figures = runs[part]()
        assert not any(isinstance(v, float) and math.isnan(v) for v in figures.values())
        print(part, json.dumps(figures, indent=1))
        print("written to", save(f"loader_{part}", figures, "online-dynamic-batching", "transformers"))


if __name__ == "__main__":
    main()
