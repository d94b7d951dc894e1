"""Draws training rows, pairs of a baseline and a candidate batch, from the simulated phases."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.measurements import Measurement, Measurements
from dynagroup.memory.phases import monomials
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape

__all__ = [
    "Group",
    "Pairs",
    "draw",
    "first_batches",
    "largest",
    "later_batches",
    "load_groups",
    "load_measured",
]

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

    def bytes(self, n: NDArray, length: NDArray, target: NDArray) -> NDArray[np.float64]:
        target = target if self.two_streams else np.zeros_like(length)
        return (monomials(n, length, target) @ self.phases.T).max(axis=1)

    def shape(self, n: NDArray, length: NDArray, target: NDArray) -> BatchShape:
        return BatchShape.of(
            n, {"tokens": length, "target": target} if self.two_streams else {"tokens": length}
        )


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

    groups = []
    for row in sorted(pq.read_table(path).to_pylist(), key=lambda r: r["key"]):
        checked = None if row["checked"] is None else tuple(row["checked"])
        known = {k: v for k, v in json.loads(row["workload"]).items() if k not in NO_FIELDS}
        workload, phases = Workload(**known), np.array(row["phases"])
        groups.append(
            Group(
                row["key"],
                row["family"],
                workload,
                row["static_bytes"],
                row["two_streams"],
                phases,
                checked,
            )
        )
    return groups


def load_measured(path: Path) -> list[Measurements]:
    """What ``measure_gpu`` measured, a table a workload; those with too few rows that fitted are left out."""
    import pyarrow.parquet as pq

    found: dict[str, list[Measurement]] = {}
    for row in pq.read_table(path).to_pylist():
        longest = {
            name.removeprefix("longest_"): v
            for name, v in row.items()
            if name.startswith("longest_") and v
        }
        sizes = {
            name: row[name]
            for name in ("num_samples", "static_bytes", "batch_bytes", "oom", "reserved_bytes")
        }
        measured = Measurement(longest=longest, **sizes)
        found.setdefault(row["workload"], []).append(measured)
    tables = [
        Measurements(tuple(rows), Workload.from_json(text), "measured")
        for text, rows in found.items()
    ]
    return [table for table in tables if len(table.complete) >= FEWEST_MEASURED]


def first_batches(
    group: Group, rng: np.random.Generator, size: int
) -> tuple[NDArray, NDArray, NDArray]:
    """Samples, tokens and target tokens of first batches: 1 to 512 samples of 16 to 8,192 tokens that take 40 to 95 % of what
    the static memory leaves of a device."""
    device = DEVICES[DEVICES > 1.2 * group.static_bytes][:5]
    limit = (rng.choice(device, size) - group.static_bytes) * rng.uniform(0.4, 0.95, size)
    length = np.exp(rng.uniform(np.log(16), np.log(8192), size)).astype(np.int64)
    target = np.maximum(8, (length * rng.uniform(0.1, 1.2, size)).astype(np.int64))
    return np.clip(largest(group, length, target, limit), 1, 512), length, target


def draw(group: Group, rng: np.random.Generator, size: int) -> Pairs:
    """Pairs as a plan meets them: a first batch that nearly fills a device, and candidates that are mostly shorter.

    Candidates have a quarter to 64 times the first batch's padded tokens; seven in ten are chosen near the decision.
    """
    n_b, len_b, tgt_b = first_batches(group, rng, size)
    longer = rng.random(size) < 0.15
    share = np.where(
        longer, rng.uniform(1.0, 2.0, size), np.exp(rng.uniform(0, 1, size) * np.log(16 / len_b))
    )
    len_c = np.maximum(16, np.minimum(8192, len_b * share)).astype(np.int64)
    tgt_c = np.maximum(8, np.minimum(tgt_b, (len_c * rng.uniform(0.1, 1.2, size)).astype(np.int64)))
    base = group.bytes(n_b, len_b, tgt_b)
    wide = np.exp(rng.uniform(np.log(0.25), np.log(64), size)) * n_b * len_b / len_c
    near = _solve(group, len_c, tgt_c, base * np.exp(rng.uniform(np.log(0.6), np.log(1.6), size)))
    n_c = np.where(rng.random(size) < 0.3, wide, near)
    n_c = np.maximum(1, np.minimum(n_c, 64.0 * n_b * len_b / len_c)).astype(np.int64)
    ratio = group.bytes(n_c, len_c, tgt_c) / base
    return Pairs(group, group.shape(n_b, len_b, tgt_b), group.shape(n_c, len_c, tgt_c), ratio)


def later_batches(group: Group, rng: np.random.Generator, size: int) -> tuple[NDArray, ...]:
    """First batches, and the lengths down to a sixteenth of later ones: n, tokens, target; tokens, target of the later one."""
    n_b, len_b, tgt_b = first_batches(group, rng, size)
    len_c = np.maximum(16, len_b * np.exp(rng.uniform(np.log(1 / 16), 0, size))).astype(np.int64)
    like = tgt_b * len_c / len_b * np.exp(rng.normal(0, 0.3, size))
    return n_b, len_b, tgt_b, len_c, np.maximum(8, np.minimum(tgt_b, like)).astype(np.int64)


def largest(group: Group, length: NDArray, target: NDArray, limit: NDArray) -> NDArray[np.int64]:
    """Most samples whose true memory is within ``limit`` bytes; 0 where not one is."""
    return np.floor(_solve(group, length, target, limit)).astype(np.int64)


def _solve(group: Group, length: NDArray, target: NDArray, limit: NDArray) -> NDArray[np.float64]:
    """Every phase is linear in n, so the limit is reached where the first of them reaches it."""
    target = target if group.two_streams else np.zeros_like(length)
    at_zero = monomials(np.zeros(len(length)), length, target) @ group.phases.T
    per_sample = monomials(np.ones(len(length)), length, target) @ group.phases.T - at_zero
    with np.errstate(divide="ignore", invalid="ignore"):
        n = np.where(per_sample > 0, (limit[:, None] - at_zero) / per_sample, np.inf)
    return np.clip(n.min(axis=1), 0, 2**40)
