"""What is wrong with what came, in words; it knows the true lengths, and nothing of the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.faults.data import Seen, value_of

__all__ = ["judged", "lost_or_repeated", "over_budget", "wrong_gradients"]


def judged(lengths: Sequence[int], ranks: Sequence[Sequence[Seen]], expected: Counter[int]) -> list[str]:
    """What is wrong with the steps of all ranks; empty if nothing."""
    if len({len(steps) for steps in ranks}) > 1:
        return [f"unequal steps: {[len(steps) for steps in ranks]}"]
    wrong = lost_or_repeated(Counter(i for steps in ranks for step in steps for i in step.samples), expected)
    if any(len({step.ends for step in row}) > 1 for row in zip(*ranks, strict=True)):
        wrong.append("updates end at different steps")
    return wrong + wrong_gradients(lengths, ranks)


def lost_or_repeated(found: Counter[int], expected: Counter[int]) -> list[str]:
    wrong = []
    if lost := expected - found:
        wrong.append(f"{lost.total()} samples lost, such as {sorted(lost)[:5]}")
    if extra := found - expected:
        wrong.append(f"{extra.total()} samples repeated, such as {sorted(extra)[:5]}")
    return wrong


def wrong_gradients(lengths: Sequence[int], ranks: Sequence[Sequence[Seen]]) -> list[str]:
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
    lengths: Sequence[int], ranks: Sequence[Sequence[Seen]], max_tokens: int, *, packed: bool = False
) -> list[str]:
    """Batches of more than one sample that hold too many tokens."""
    for step in (step for steps in ranks for step in steps if len(step.samples) > 1):
        found = [lengths[i] for i in step.samples]
        tokens = sum(found) if packed else len(found) * max(found)
        if tokens > max_tokens:
            return [f"a batch of {len(found)} samples holds {tokens} tokens, {max_tokens} fit"]
    return []
