"""What is wrong with what came, in words; it knows the true lengths, and nothing of the library."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.data import numbers_of


def value_of(sample: int) -> float:
    """The made-up loss of each token of a sample."""
    return math.sin(1.0 + sample)


@dataclass
class Seen:
    """One step as the training loop saw it."""

    samples: list[int]
    loss: float
    """Factor times the batch's mean loss over its predicted tokens."""
    ends: bool

    @classmethod
    def of(cls, step: Any) -> "Seen":
        samples = [] if step.idle else numbers_of(step.batch)
        counts = [] if step.idle else (step.batch["labels"][:, 1:] != -100).sum(dim=1).tolist()
        total = sum(counts)
        mean = (
            sum(n * value_of(i) for n, i in zip(counts, samples, strict=True)) / total
            if total
            else 0.0
        )
        return cls(samples, step.loss_scale * mean, step.ends_update)


Ranks = Sequence[Sequence[Seen]]


def judged(lengths: Sequence[int], ranks: Ranks, expected: Counter[int]) -> list[str]:
    """What is wrong with the steps of all ranks; empty if nothing."""
    if len({len(steps) for steps in ranks}) > 1:
        return [f"unequal steps: {[len(steps) for steps in ranks]}"]
    found, wrong = Counter(i for steps in ranks for step in steps for i in step.samples), []
    for what, samples in (("lost", expected - found), ("repeated", found - expected)):
        if samples:
            wrong.append(f"{samples.total()} samples {what}, such as {sorted(samples)[:5]}")
    if any(len({step.ends for step in row}) > 1 for row in zip(*ranks, strict=True)):
        wrong.append("updates end at different steps")
    return wrong + wrong_gradients(lengths, ranks)


def wrong_gradients(lengths: Sequence[int], ranks: Ranks) -> list[str]:
    """The ranks' mean of the summed losses of an update against one mean over its predicted tokens."""
    update: list[Seen] = []
    for row in zip(*ranks, strict=True):
        update += row
        if not row[0].ends:
            continue
        members = [i for step in update for i in step.samples]
        weight = sum(lengths[i] - 1 for i in members)
        wanted = sum((lengths[i] - 1) * value_of(i) for i in members) / weight if weight else 0.0
        found = sum(step.loss for step in update) / len(ranks)
        if abs(found - wanted) > 1e-9 * max(1.0, abs(wanted)):
            return [f"gradient of an update of {len(members)} samples is {found!r}, not {wanted!r}"]
        update = []
    return []


def over_budget(
    lengths: Sequence[int], ranks: Ranks, max_tokens: int, *, packed: bool = False
) -> list[str]:
    """Batches of more than one sample that hold too many tokens."""
    for step in (step for steps in ranks for step in steps if len(step.samples) > 1):
        found = [lengths[i] for i in step.samples]
        tokens = sum(found) if packed else len(found) * max(found)
        if tokens > max_tokens:
            return [f"a batch of {len(found)} samples holds {tokens} tokens, {max_tokens} fit"]
    return []
