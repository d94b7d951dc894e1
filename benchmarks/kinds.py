"""What kinds buy and cost: vision-language samples, of which rows mix ranks with and without images where kinds are ignored."""

from itertools import product
from typing import Any

import numpy as np

from benchmarks.machine import Machine
from benchmarks.methods import planned
from dynagroup import AdditiveCap, TokenBudget
from dynagroup.shapes import Streams

SHARES = (0.5, 0.2, 0.05)  # of samples that have images
UPDATES = {8: 256, 64: 2048}  # ranks -> samples of an update
WAYS: Any = {"ignored": {"kinds": None}, "step": {"one_kind": "step"}, "batch": {"one_kind": "batch"}}


def samples(share: float, count: int) -> Streams:
    """Text (lognormal, median 300 tokens), and in a share of the samples 1 to 4 images of 256 to 2,048 patches, a quarter as many
    tokens."""
    rng = np.random.default_rng(0)
    text = np.clip(rng.lognormal(np.log(300), 0.9, count), 8, 6000).astype(np.int64)
    images = np.where(rng.random(count) < share, rng.integers(1, 5, count), 0)
    patches = np.asarray([int(rng.integers(256, 2049, number).sum()) for number in images])
    return {"tokens": (text + patches // 4).astype(np.int32), "patches": patches.astype(np.int32)}


def rows(machine: Machine) -> dict[str, Any]:
    """Rows that mix ranks with and without images, steps, predicted time and idle batches of an epoch."""
    budget = TokenBudget(16_384, layout="packed") & AdditiveCap("patches", 24_576)
    found: dict[str, Any] = {}
    for (ranks, update), share in product(UPDATES.items(), SHARES):
        lengths = samples(share, 8 * 1024 if ranks == 8 else 8 * update)
        labels = np.where(lengths["patches"] > 0, "image", "text")
        modes: dict[str, dict[str, Any]] = {"updates": {"samples_per_update": update}, "free": {"shuffle": True}}
        for (mode, how), (way, kinds) in product(modes.items(), WAYS.items()):
            plan = planned(lengths, budget, ranks, **how, **{"kinds": labels, **kinds})
            with_images = (sum("image" in labels[batch] for batch in row) for row in plan.rows)
            mixed, time = sum(0 < number < ranks for number in with_images), round(plan.predicted_time)
            figures = {"steps": plan.num_steps, "mixed": mixed, "idle": len(plan.repeated), "predicted_time": time}
            found[f"{ranks} ranks, images in {share:.0%}, {mode}, {way}"] = figures
    return found
