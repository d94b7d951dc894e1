"""Storms of out-of-memory errors, whatever a batch's size: results complete and in order, gradients those of one process."""

import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data import Numbered, collate, numbers_of
from benchmarks.faults.case import Case
from benchmarks.faults.oracle import value_of
from benchmarks.faults.processes import on_processes
from dynagroup import OomSafeBackward, run_with_oom_retry
from dynagroup.testing import run_ranks

Update = tuple[list[int], np.ndarray]
"""A rank's samples, and the gradient that its optimizer would see."""
LIKELY = 0.35
"""A pass of several samples fails in its forward with this probability, and in its backward again."""


def storm_in_calls(case: Case) -> list[str]:
    """Every call may fail, but for single samples: results are complete and in order."""
    rng = random.Random(case.seed)

    def fragile(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = batch["input_ids"]
        if len(rows) > 1 and rng.random() < 0.6:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return rows[:, 0].clone()

    samples = Numbered(case.lengths[:40])
    batch = collate([samples[i] for i in range(len(samples))])
    parts = list(run_with_oom_retry(fragile, batch))
    results = torch.cat(parts).tolist()
    if results != list(range(len(samples))):
        return [f"results are {results}"]
    return []


class Fragile(torch.nn.Module):
    """Squared error of ``scale * weight[token] + bias``: a model whose gradient is a line of algebra.

    ``bias`` has its gradient before a failing backward pass comes to ``scale`` and ``weight``.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        super().__init__()
        drawn = np.random.default_rng(seed).normal(size=num_samples)
        self.weight = torch.nn.Parameter(torch.from_numpy(drawn))
        self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.tensor(-0.2, dtype=torch.float64))
        self.rng = random.Random(seed)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        """The mean over predicted tokens, as causal models take it."""
        self._fail(len(labels))
        predicted = labels[:, 1:]
        known = predicted != -100
        chosen = predicted[known]
        hidden = self.scale * self.weight[chosen]
        hidden.register_hook(lambda _: self._fail(len(labels)))
        targets = [value_of(sample) for sample in chosen.tolist()]
        error = hidden + self.bias - torch.tensor(targets, dtype=torch.float64)
        return (error * error).sum() / max(int(known.sum()), 1)

    def _fail(self, num_samples: int) -> None:
        if num_samples > 1 and self.rng.random() < LIKELY:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")


def gradient_of(case: Case, members: Sequence[int]) -> np.ndarray:
    """The oracle: of weight, scale and bias, for one mean over the update's predicted tokens."""
    num_samples = len(case.lengths)
    weight = np.random.default_rng(case.seed).normal(size=num_samples)
    scale = 0.7
    bias = -0.2
    times = np.bincount(members, minlength=num_samples)
    counts = times * (np.asarray(case.lengths) - 1)
    targets = np.array([value_of(sample) for sample in range(num_samples)])
    difference = scale * weight + bias - targets
    error = 2 * counts * difference / max(int(counts.sum()), 1)
    return np.concatenate([scale * error, [weight @ error, error.sum()]])


def trained(case: Case, world: Any, wrap: Any) -> list[Update]:
    """One epoch's updates on this rank."""
    model = Fragile(len(case.lengths), case.seed)
    if world is not None:
        model.rng = random.Random(f"{case.seed}, rank {world.rank}")
    wrapped = wrap(model)
    backward = OomSafeBackward(wrapped, weigh=_num_predicted, world=world)
    updates: list[Update] = []
    members: list[int] = []
    for step in case.loader(world):
        backward.step(lambda batch: wrapped(batch["labels"]), step)
        if not step.idle:
            members += numbers_of(step.batch)
        if step.ends_update:
            updates.append((members, _gradient(model)))
            members = []
            model.zero_grad(set_to_none=True)
    return updates


def _num_predicted(batch: Mapping[str, torch.Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def _gradient(model: torch.nn.Module) -> np.ndarray:
    """Of all parameters, one after another; zero where there is none."""
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradients.append(gradient.flatten())
    return torch.cat(gradients).numpy()


def wrong_updates(case: Case, ranks: Sequence[Sequence[Update]]) -> list[str]:
    num_updates = [len(updates) for updates in ranks]
    if len(set(num_updates)) > 1:
        return [f"unequal updates: {num_updates}"]
    samples: list[int] = []
    for number, parts in enumerate(zip(*ranks, strict=True)):
        members = list(chain.from_iterable(of_rank for of_rank, _ in parts))
        expected = gradient_of(case, members)
        tolerance = 1e-9 * max(1.0, float(np.abs(expected).max()))
        for _, gradient in parts:
            difference = float(np.abs(gradient - expected).max())
            if not difference <= tolerance:  # nor is it NaN
                return [f"gradient of update {number} is off by {difference}"]
        samples += members
    if sorted(samples) != list(range(len(case.lengths))):
        return ["samples of the epoch are lost or repeated"]
    return []


def storm_in_training(case: Case) -> list[str]:
    """Forward and backward passes fail at random on one process."""
    return wrong_updates(case, [trained(case, None, lambda model: model)])


def storm_on_ranks(case: Case) -> list[str]:
    """The same on two or three processes with DistributedDataParallel: each fails where it will."""
    case.ranks = max(2, min(case.ranks, 3))
    run_ranks(case.ranks, case.loader)  # what the loader refuses, it refuses here, too

    wrap = partial(DistributedDataParallel, bucket_cap_mb=1)
    reports = on_processes(case, lambda world: trained(case, world, wrap))
    for report in reports:
        if not isinstance(report, list):
            return [f"a rank ended with {report}"]
    return wrong_updates(case, reports)


FAULTS = {
    "out-of-memory storm in calls": storm_in_calls,
    "out-of-memory storm in training": storm_in_training,
}
RARE = {"out-of-memory storm on DDP ranks": storm_on_ranks}
