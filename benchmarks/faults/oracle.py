"""What is wrong with what came, in words; it knows the true lengths, and nothing of the library."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
        if step.idle:
            return cls([], 0.0, step.ends_update)
        samples = numbers_of(step.batch)
        is_predicted = step.batch["labels"][:, 1:] != -100
        mean = mean_loss(samples, is_predicted.sum(dim=1).tolist())
        return cls(samples, step.loss_scale * mean, step.ends_update)


def mean_loss(samples: Sequence[int], num_predicted: Sequence[int]) -> float:
    """Over all predicted tokens of these samples; 0 if there are none."""
    total = 0.0
    for sample, number in zip(samples, num_predicted, strict=True):
        total += number * value_of(sample)
    return total / max(sum(num_predicted), 1)


Ranks = Sequence[Sequence[Seen]]


def judged(lengths: Sequence[int], ranks: Ranks, expected: Counter[int]) -> list[str]:
    """What is wrong with the steps of all ranks; empty if nothing."""
    num_steps = [len(steps) for steps in ranks]
    if len(set(num_steps)) > 1:
        return [f"unequal steps: {num_steps}"]
    steps = chain.from_iterable(ranks)
    found = Counter(chain.from_iterable(step.samples for step in steps))
    wrong = []
    for what, samples in (("lost", expected - found), ("repeated", found - expected)):
        if samples:
            wrong.append(f"{samples.total()} samples {what}, such as {sorted(samples)[:5]}")
    for row in zip(*ranks, strict=True):
        if len({step.ends for step in row}) > 1:
            wrong.append("updates end at different steps")
            break
    return wrong + wrong_gradients(lengths, ranks)


def wrong_gradients(lengths: Sequence[int], ranks: Ranks) -> list[str]:
    """The ranks' mean of the summed losses of an update against one mean over its predicted tokens."""
    update: list[Seen] = []
    for row in zip(*ranks, strict=True):
        update += row
        if not row[0].ends:
            continue
        samples = list(chain.from_iterable(step.samples for step in update))
        expected = mean_loss(samples, [lengths[sample] - 1 for sample in samples])
        found = sum(step.loss for step in update) / len(ranks)
        if abs(found - expected) > 1e-9 * max(1.0, abs(expected)):
            update_is = f"gradient of an update of {len(samples)} samples is"
            return [f"{update_is} {found!r}, not {expected!r}"]
        update = []
    return []


def over_budget(
    lengths: Sequence[int], ranks: Ranks, max_tokens: int, *, packed: bool = False
) -> list[str]:
    """Batches of more than one sample that hold too many tokens."""
    for step in chain.from_iterable(ranks):
        num_samples = len(step.samples)
        if num_samples < 2:
            continue
        of_samples = [lengths[sample] for sample in step.samples]
        tokens = sum(of_samples) if packed else num_samples * max(of_samples)
        if tokens > max_tokens:
            return [f"a batch of {num_samples} samples holds {tokens} tokens, {max_tokens} fit"]
    return []
