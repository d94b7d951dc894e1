"""What kinds and several costs buy and cost: vision-language samples, images in some of them."""

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import lognormal
from benchmarks.machine import Machine
from benchmarks.methods import planned
from dynagroup import AdditiveCap, TokenBudget
from dynagroup.plan import cut as rows_of_ranks
from dynagroup.shapes import Streams

SHARES = (0.5, 0.2, 0.05)  # of samples that have images
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "8 ranks, updates of 2,048": (8, {"samples_per_update": 2048}),
    "8 ranks, updates of 256": (8, {"samples_per_update": 256}),
    "8 ranks, free": (8, {"shuffle": True}),
    "64 ranks, updates of 2,048": (64, {"samples_per_update": 2048}),
}
ALONE: Any = {"costs_to_balance": lambda *_: None}
WAYS: Any = {
    "tokens_alone": {},
    "no_kinds": {},
    "kinds": {"one_kind": "step"},
    "batch_kinds": {"one_kind": "batch"},
}


def samples(share: float, count: int) -> Streams:
    """Text (lognormal, median 300 tokens), and in a share of the samples 1 to 4 images of 256 to 2,048 patches, a quarter as many
    tokens."""
    rng = np.random.default_rng(0)
    text = np.clip(rng.lognormal(np.log(300), 0.9, count), 8, 6000).astype(np.int64)
    images = np.where(rng.random(count) < share, rng.integers(1, 5, count), 0)
    patches = np.asarray([int(rng.integers(256, 2049, number).sum()) for number in images])
    return {"tokens": (text + patches // 4).astype(np.int32), "patches": patches.astype(np.int32)}


def rows(machine: Machine) -> dict[str, Any]:
    """Of an epoch: rows that mix ranks with and without images, steps, idle batches, predicted time, and the most expensive rank
    over the mean (median over rows) in tokens and patches. "tokens_alone": patches are limited, not balanced."""
    found: dict[str, Any] = {}
    for layout, (mode, (ranks, how)), share in product(("packed", "padded"), MODES.items(), SHARES):
        budget = TokenBudget(16_384, layout=layout) & AdditiveCap("patches", 24_576)
        lengths = samples(share, 8192 if ranks == 8 else 16_384)
        labels = np.where(lengths["patches"] > 0, "image", "text")
        entry = found.setdefault(f"{layout}, {mode}, images in {share:.0%}", {})
        for way, kinds in WAYS.items():
            with (
                mock.patch.multiple(rows_of_ranks, **ALONE)
                if way == "tokens_alone"
                else nullcontext()
            ):
                plan = planned(
                    lengths, budget, ranks, **how, **({"kinds": labels, **kinds} if kinds else {})
                )
            with_images = (sum("image" in labels[batch] for batch in row) for row in plan.rows)
            mixed, time = (
                sum(0 < number < ranks for number in with_images),
                round(plan.predicted_time),
            )
            uneven = {name: round(plan.statistics[f"imbalance_{name}"], 3) for name in lengths}
            entry[way] = {
                "steps": plan.num_steps,
                "mixed": mixed,
                "idle": len(plan.repeated),
                "time": time,
                **uneven,
            }
    return found


def planning(machine: Machine) -> dict[str, Any]:
    """CPU seconds of planning 50,000 lengths for 8 ranks, without and with three kinds."""
    lengths, labels = lognormal(50_000), np.random.default_rng(0).integers(0, 3, 50_000)
    found: dict[str, Any] = {}
    for mode, (ranks, how) in MODES.items():
        runs = {
            str(n): partial(planned, lengths, TokenBudget(16_384), ranks, kinds=n, **how)
            for n in (None, labels)
        }
        without, with_kinds = machine.in_turns(runs, 5).values()
        ratio = float(np.median(with_kinds) / np.median(without))
        found[mode] = {"without_s": without, "with_s": with_kinds, "ratio": ratio}
    return found
