"""Draws training rows, pairs of a baseline and a candidate batch, from the simulated phases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.measurements import Measurement, Measurements
from dynagroup.memory.phases import monomials
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TARGET, TOKENS, BatchShape

__all__ = [
    "Group",
    "Later",
    "Pairs",
    "draw",
    "first_batches",
    "largest",
    "later_batches",
    "load_groups",
    "load_measured",
]

Counts: TypeAlias = NDArray[np.int64]

FEWEST_MEASURED = 3
NO_FIELDS = ("ddp", "tied_embeddings")  # which workloads had when the data were made
DEVICES = np.array([16, 24, 40, 48, 80, 141, 192, 282, 564, 1128]) * 1e9
"""Bytes of the devices (beyond 192 GB: of several that share a model) whose memory a first batch nearly fills."""


@dataclass(frozen=True)
class Group:
    """One simulated workload."""

    key: str
    family: str
    workload: Workload
    static_bytes: int
    two_streams: bool
    phases: NDArray[np.float64]
    checked: tuple[int, ...] | None
    """Bytes that a simulation of the whole model says of each of ``generate.CHECK_SHAPES``, where there was one."""

    def bytes(self, samples: Counts, tokens: Counts, target: Counts) -> NDArray[np.float64]:
        if not self.two_streams:
            target = np.zeros_like(tokens)
        return (monomials(samples, tokens, target) @ self.phases.T).max(axis=1)

    def shape(self, samples: Counts, tokens: Counts, target: Counts) -> BatchShape:
        longest = {TOKENS: tokens}
        if self.two_streams:
            longest[TARGET] = target
        return BatchShape.of(samples, longest)


@dataclass(frozen=True)
class Pairs:
    """K baseline and candidate batches of one workload, and the true ratio of their memory."""

    group: Group
    baseline: BatchShape
    candidate: BatchShape
    ratio: NDArray[np.float64]


def load_groups(path: Path) -> list[Group]:
    """The workloads of a data set, in a fixed order."""
    import pyarrow.parquet as pq

    rows = sorted(pq.read_table(path).to_pylist(), key=lambda row: row["key"])
    return [_group_of(row) for row in rows]


def _group_of(row: Mapping[str, Any]) -> Group:
    fields = json.loads(row["workload"])
    for name in NO_FIELDS:
        fields.pop(name, None)
    return Group(
        key=row["key"],
        family=row["family"],
        workload=Workload(**fields),
        static_bytes=row["static_bytes"],
        two_streams=row["two_streams"],
        phases=np.array(row["phases"]),
        checked=None if row["checked"] is None else tuple(row["checked"]),
    )


def load_measured(path: Path) -> list[Measurements]:
    """What ``measure_gpu`` measured, a table a workload; those with too few rows that fitted are left out."""
    import pyarrow.parquet as pq

    by_workload: dict[str, list[Measurement]] = {}
    for row in pq.read_table(path).to_pylist():
        by_workload.setdefault(row["workload"], []).append(_measurement_of(row))
    tables = []
    for text, rows in by_workload.items():
        table = Measurements(tuple(rows), Workload.from_json(text), "measured")
        if len(table.complete) >= FEWEST_MEASURED:
            tables.append(table)
    return tables


def _measurement_of(row: Mapping[str, Any]) -> Measurement:
    longest = {}
    for name, value in row.items():
        if name.startswith("longest_") and value:
            longest[name.removeprefix("longest_")] = value
    return Measurement(
        num_samples=row["num_samples"],
        longest=longest,
        static_bytes=row["static_bytes"],
        batch_bytes=row["batch_bytes"],
        reserved_bytes=row["reserved_bytes"],
    )


def first_batches(
    group: Group, rng: np.random.Generator, size: int
) -> tuple[Counts, Counts, Counts]:
    """Samples, tokens and target tokens of first batches: 1 to 512 samples of 16 to 8,192 tokens that take 40 to 95 % of what
    the static memory leaves of a device."""
    devices = DEVICES[DEVICES > 1.2 * group.static_bytes][:5]
    left = rng.choice(devices, size) - group.static_bytes
    limit = left * rng.uniform(0.4, 0.95, size)
    log_tokens = rng.uniform(np.log(16), np.log(8192), size)
    tokens = np.exp(log_tokens).astype(np.int64)
    target = np.maximum(8, (tokens * rng.uniform(0.1, 1.2, size)).astype(np.int64))
    samples = np.clip(largest(group, tokens, target, limit), 1, 512)
    return samples, tokens, target


def draw(group: Group, rng: np.random.Generator, size: int) -> Pairs:
    """Pairs as a plan meets them: a first batch that nearly fills a device, and candidates that are mostly shorter.

    Candidates have a quarter to 64 times the first batch's padded tokens; seven in ten are chosen near the decision.
    """
    first_samples, first_tokens, first_target = first_batches(group, rng, size)
    is_longer = rng.random(size) < 0.15
    longer = rng.uniform(1.0, 2.0, size)
    shorter = np.exp(rng.uniform(0, 1, size) * np.log(16 / first_tokens))
    share = np.where(is_longer, longer, shorter)
    tokens = np.maximum(16, np.minimum(8192, first_tokens * share)).astype(np.int64)
    target = (tokens * rng.uniform(0.1, 1.2, size)).astype(np.int64)
    target = np.maximum(8, np.minimum(first_target, target))
    first_bytes = group.bytes(first_samples, first_tokens, first_target)
    # As many samples as have the first batch's padded tokens.
    equal = first_samples * first_tokens / tokens
    anywhere = np.exp(rng.uniform(np.log(0.25), np.log(64), size)) * equal
    limit = first_bytes * np.exp(rng.uniform(np.log(0.6), np.log(1.6), size))
    near = _solve(group, tokens, target, limit)
    samples = np.where(rng.random(size) < 0.3, anywhere, near)
    samples = np.maximum(1, np.minimum(samples, 64.0 * equal)).astype(np.int64)
    return Pairs(
        group=group,
        baseline=group.shape(first_samples, first_tokens, first_target),
        candidate=group.shape(samples, tokens, target),
        ratio=group.bytes(samples, tokens, target) / first_bytes,
    )


@dataclass(frozen=True)
class Later:
    """First batches, and the lengths of a later batch each."""

    first_samples: Counts
    first_tokens: Counts
    first_target: Counts
    tokens: Counts
    target: Counts


def later_batches(group: Group, rng: np.random.Generator, size: int) -> Later:
    """First batches, and later ones with lengths down to a sixteenth."""
    first_samples, first_tokens, first_target = first_batches(group, rng, size)
    share = np.exp(rng.uniform(np.log(1 / 16), 0, size))
    tokens = np.maximum(16, first_tokens * share).astype(np.int64)
    target = first_target * tokens / first_tokens * np.exp(rng.normal(0, 0.3, size))
    target = np.maximum(8, np.minimum(first_target, target)).astype(np.int64)
    return Later(first_samples, first_tokens, first_target, tokens, target)


def largest(
    group: Group, tokens: Counts, target: Counts, limit: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Most samples whose true memory is within ``limit`` bytes; 0 where not one is."""
    return np.floor(_solve(group, tokens, target, limit)).astype(np.int64)


def _solve(
    group: Group, tokens: Counts, target: Counts, limit: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Every phase is linear in n, so the limit is reached where the first of them reaches it."""
    if not group.two_streams:
        target = np.zeros_like(tokens)
    at_zero = monomials(np.zeros(len(tokens)), tokens, target) @ group.phases.T
    at_one = monomials(np.ones(len(tokens)), tokens, target) @ group.phases.T
    per_sample = at_one - at_zero
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = np.where(per_sample > 0, (limit[:, None] - at_zero) / per_sample, np.inf)
    return np.clip(samples.min(axis=1), 0, 2**40)
