"""What kinds and several costs buy and cost: vision-language samples, images in some of them."""

from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.machine import Machine
from benchmarks.methods import planned
from dynagroup import AdditiveCap, TokenBudget
from dynagroup.plan import cut
from dynagroup.shapes import Streams

SHARES = (0.5, 0.2, 0.05)
"""Of samples that have images."""


MODES: dict[str, tuple[int, int | None]] = {
    "8 ranks, updates of 2,048": (8, 2048),
    "8 ranks, updates of 256": (8, 256),
    "8 ranks, free": (8, None),
    "64 ranks, updates of 2,048": (64, 2048),
}
"""Name -> ranks, and samples of an update; None: a shuffled epoch without updates."""


def samples(share: float, count: int) -> Streams:
    """Text (lognormal, median 300 tokens), and in a share of the samples 1 to 4 images of 256 to 2,048 patches, a quarter as many
    tokens."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(300), 0.9, count)
    text = np.clip(drawn, 8, 6000).astype(np.int64)
    images = np.where(rng.random(count) < share, rng.integers(1, 5, count), 0)
    patches = np.asarray([int(rng.integers(256, 2049, number).sum()) for number in images])
    tokens = text + patches // 4
    return {"tokens": tokens.astype(np.int32), "patches": patches.astype(np.int32)}


def rows(_machine: Machine) -> dict[str, Any]:
    """Of an epoch: rows that mix ranks with and without images, steps, idle batches, predicted time, and the most expensive rank
    over the mean (median over rows) in tokens and patches. "tokens_alone": patches are limited, not balanced."""
    figures: dict[str, Any] = {}
    for layout, mode, share in product(("packed", "padded"), MODES, SHARES):
        ranks, per_update = MODES[mode]
        budget = TokenBudget(16_384, layout=layout) & AdditiveCap("patches", 24_576)
        lengths = samples(share, 8192 if ranks == 8 else 16_384)
        labels = np.where(lengths["patches"] > 0, "image", "text")
        plan = partial(
            planned,
            lengths,
            budget,
            ranks=ranks,
            samples_per_update=per_update,
            shuffle=per_update is None,
        )
        with mock.patch.multiple(cut, costs_to_balance=_no_costs, levelled=_as_they_are):
            tokens_alone = plan()
        plans = {
            "tokens_alone": tokens_alone,
            "no_kinds": plan(),
            "kinds": plan(kinds=labels, one_kind="step"),
            "batch_kinds": plan(kinds=labels, one_kind="batch"),
        }
        figures[f"{layout}, {mode}, images in {share:.0%}"] = {
            way: _row(plan_of_way, labels) for way, plan_of_way in plans.items()
        }
    return figures


def _no_costs(*_: Any) -> None:
    """Nothing but work is balanced."""


def _as_they_are(_window: Any, batches: Any, _num_ranks: int) -> Any:
    """Without costs to balance, the planner would level steps and look at tokens alone."""
    return batches


def _row(plan: Any, labels: np.ndarray) -> dict[str, Any]:
    num_mixed = 0
    for row in plan.rows:
        has_images = ["image" in labels[batch] for batch in row]
        num_mixed += any(has_images) and not all(has_images)
    figures = {
        "steps": plan.num_steps,
        "mixed": num_mixed,
        "idle": len(plan.repeated),
        "time": round(plan.predicted_time),
    }
    for stream in ("tokens", "patches"):
        figures[stream] = round(plan.statistics[f"imbalance_{stream}"], 3)
    return figures
