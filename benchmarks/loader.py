"""The online loader on one machine: speed, fill, overhead, balance; peers in the same run.

``online-dynamic-batching`` is measured beside it where it is installed; where it is not, that is said.
"""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.record import spread
from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.distributed import World
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.cost import Work
from dynagroup.plan.padded import cut
from dynagroup.testing import run_ranks

LENGTHS = Path(__file__).parent / "lengths"
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


def cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def speed(repeats: int = 3) -> dict[str, Any]:
    """20,000 samples of CV 1.0, two workers, three int64 tensors; the loaders take turns. Samples a CPU second."""
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
            before = cpu_seconds()
            got = drain(loader)
            del loader  # its workers end, and what they took is known
            gc.collect()
            runs[name].append({**got, "seconds": cpu_seconds() - before})
            print(f"turn {turn}: {name}: {runs[name][-1]}")
    rates = {name: [r["samples"] / r["seconds"] for r in found] for name, found in runs.items() if found}
    figures: dict[str, Any] = {}
    for name, found in rates.items():
        figures[name] = {
            "samples_per_cpu_s": sorted(round(r) for r in found),
            "real_share": runs[name][-1]["real_share"],
        }
    for name in list(rates):
        if name.startswith("dynagroup"):
            for peer in ("plain, 16 a batch", "online-dynamic-batching, window 256"):
                if peer in rates:
                    ratios = [a / b for a, b in zip(rates[name], rates[peer], strict=True)]
                    figures[f"{name} / {peer}"] = spread(ratios)
    return figures


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


def overhead(repeats: int = 5) -> dict[str, Any]:
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
    """Four ranks: predicted time of the dearest rank of each row over the mean rank's, first and second epoch."""
    lengths, work = lengths_of(CV_ONE, 40_000), Work()

    def run(world: World) -> list[list[float]]:
        loader = OnlineDataLoader(
            Nothing(lengths), TokenBudget(BUDGET), collate_fn=first_of, length_of=same, weigh="samples", shuffle=True,
            world=world, work=work,
        )  # fmt: skip
        return [[_cost(step, lengths, work) for step in loader] for _ in range(2)]

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


def _cost(step: Any, lengths: np.ndarray, work: Work) -> float:
    if step.idle:
        return work.per_step
    return work.per_step + len(step.indices) * float(work.of_lengths(lengths[step.indices].max()))
