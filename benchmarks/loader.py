"""The online loader on one machine, and a peer in the same run; and the rows of four ranks."""

import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.data import CV_ONE, Numbered, collate, lengths_of
from benchmarks.machine import Machine, paired
from benchmarks.methods import online_dynamic_batching
from dynagroup import OnlineDataLoader, TokenBudget, Work
from dynagroup.testing import run_ranks

BUDGET = 16_384
RIVAL = "online-dynamic-batching"


def light_loader(lengths: np.ndarray, budget: TokenBudget, **options: Any) -> OnlineDataLoader:
    """Samples that cost nothing to make, for they are their lengths: what is left is the loader."""
    how: dict[str, Any] = {"collate_fn": itemgetter(0), "length_of": int, "weigh": "samples", "shuffle": True}
    return OnlineDataLoader(lengths.tolist(), budget, **how, **options)


def filled(loader: Iterable[Any]) -> dict[str, float]:
    """One epoch: samples, steps, share of real tokens."""
    samples = steps = real = padded = 0
    for item in loader:
        mask = getattr(item, "batch", item)["attention_mask"]
        samples, steps = samples + len(mask), steps + 1
        real, padded = real + int(np.count_nonzero(mask.numpy())), padded + mask.numel()
    return {"samples": samples, "steps": steps, "real_share": real / padded}


def speed(machine: Machine, samples: int = 8_000, repeats: int = 3) -> dict[str, Any]:
    """The same samples of CV 1.0 for all, two workers, three int64 tensors; the loaders take turns. Samples a CPU second,
    and ratios also on the wall. As many samples wait in each of a pair: ours sorts a window in each worker, the rival what both
    have sent."""
    lengths, found, walls = lengths_of(CV_ONE, samples), {}, {}
    how: dict[str, Any] = {"shuffle": True, "num_workers": 2, "collate_fn": collate}
    ours = partial(OnlineDataLoader, Numbered(lengths), TokenBudget(BUDGET), seed=1, **how)
    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        "plain, 16 a batch": partial(DataLoader, Numbered(lengths), batch_size=16, **how)
    }
    for waiting in (256, 2048):
        name = f"{waiting:,} samples waiting"
        loaders[f"dynagroup, {name}"] = partial(ours, window=waiting // 2)
        loaders[f"{RIVAL}, {name}"] = partial(online_dynamic_batching, lengths, BUDGET, waiting)

    def run(name: str) -> None:
        began = time.perf_counter()
        found[name] = filled(loaders[name]())
        walls.setdefault(name, []).append(time.perf_counter() - began)
        gc.collect()  # the loader's workers end, and what they took is known

    taken = machine.in_turns({name: partial(run, name) for name in loaders}, repeats)
    rates = {name: [found[name]["samples"] / s for s in seconds] for name, seconds in taken.items()}
    peers = {name: {"plain": "plain, 16 a batch", "odb": name.replace("dynagroup", RIVAL)} for name in rates}
    return {
        name: {
            "samples_per_cpu_s": sorted(map(round, each)),
            "real_share": found[name]["real_share"],
            **{f"over_{short}": paired(each, rates[peer]) for short, peer in peers[name].items() if peer != name},
            **{
                f"wall_over_{short}": paired(walls[peer], walls[name])
                for short, peer in peers[name].items()
                if peer != name
            },
        }
        for name, each in rates.items()
    }


def row_costs(epochs: int = 2) -> list[np.ndarray]:
    """Predicted time of every step of four ranks, an array (rank, step) an epoch. Lengths are learned in the first."""
    lengths, work = lengths_of(CV_ONE, 40_000), Work()

    def cost(step: Any) -> float:
        longest = 0 if step.idle else int(lengths[step.indices].max())
        return work.per_step + len(step.indices) * float(work.of_lengths(longest))

    def run(world: Any) -> list[list[float]]:
        loader = light_loader(lengths, TokenBudget(BUDGET), world=world, work=work)
        return [[cost(step) for step in loader] for _ in range(epochs)]

    by_rank = run_ranks(4, run)
    return [np.array([rank[epoch] for rank in by_rank]) for epoch in range(epochs)]
