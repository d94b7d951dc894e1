"""Draws training rows, pairs of a baseline and a candidate batch, from the simulated phases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape
from regressor.families import FAMILIES
from regressor.phases import design, peaks

__all__ = ["Group", "Pairs", "draw", "largest", "load_groups"]


@dataclass(frozen=True)
class Group:
    """One simulated workload."""

    key: str
    family: str
    workload: Workload
    static_bytes: int
    two_streams: bool
    phases: NDArray[np.float64]

    def bytes(self, n: NDArray, length: NDArray, target: NDArray) -> NDArray[np.float64]:
        return peaks(self.phases, n, length, target if self.two_streams else np.zeros_like(length))

    def shape(self, n: NDArray, length: NDArray, target: NDArray) -> BatchShape:
        return BatchShape.of(n, {"tokens": length, "target": target} if self.two_streams else {"tokens": length})


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
        workload = Workload.from_json(row["workload"])
        workload = _completed(workload, row["family"])
        groups.append(
            Group(row["key"], row["family"], workload, row["static_bytes"], row["two_streams"], np.array(row["phases"]))
        )
    return groups


def _completed(workload: Workload, family: str) -> Workload:
    """Fields that the first generation of the data did not record."""
    if workload.causal is None:
        workload = workload.replace(causal=FAMILIES[family].kind in ("decoder", "vision"))
    if workload.attention == "flash":  # these were traced with the mask that FlashAttention does without
        workload = workload.replace(attention="sdpa")
    if family in ("bloom", "gemma2"):  # they have no fused attention: traced as eager, whatever was asked for
        workload = workload.replace(attention="eager")
    return workload.replace(num_kv_heads=1) if family == "falcon" else workload


def _lengths(rng: np.random.Generator, size: int, least: float, most: NDArray | float) -> NDArray[np.int64]:
    return np.exp(rng.uniform(np.log(least), np.log(np.maximum(most, least)), size)).astype(np.int64)


def draw(group: Group, rng: np.random.Generator, size: int) -> Pairs:
    """Pairs as a plan meets them: a first batch that is worth its device, and candidates that are mostly shorter.

    Baselines have 1 to 512 samples of 16 to 8,192 tokens, 1,024 to 524,288 tokens in all; candidates a quarter to 64 times
    the baseline's padded tokens, half of them chosen near the decision.
    """
    total = _lengths(rng, size, 1024, 524288)
    n_b = np.minimum(_lengths(rng, size, 1, 512), total // 16)
    len_b = np.clip(total // n_b, 16, 8192)
    longer = rng.random(size) < 0.15
    len_c = np.where(longer, _lengths(rng, size, 16, np.minimum(2.0 * len_b, 8192)), _lengths(rng, size, 16, len_b))
    tgt_b = np.maximum(16, (len_b * rng.uniform(0.1, 1.2, size)).astype(np.int64))
    tgt_c = np.maximum(8, np.minimum(tgt_b, (len_c * rng.uniform(0.1, 1.2, size)).astype(np.int64)))
    base = group.bytes(n_b, len_b, tgt_b)
    wide = np.exp(rng.uniform(np.log(0.25), np.log(64), size)) * n_b * len_b / len_c
    near = _solve(group, len_c, tgt_c, base * np.exp(rng.uniform(np.log(0.6), np.log(1.6), size)))
    n_c = np.where(rng.random(size) < 0.3, wide, near)
    n_c = np.clip(n_c, 1, 64.0 * n_b * len_b / len_c).astype(np.int64)
    n_c = np.maximum(n_c, 1)
    ratio = group.bytes(n_c, len_c, tgt_c) / base
    return Pairs(group, group.shape(n_b, len_b, tgt_b), group.shape(n_c, len_c, tgt_c), ratio)


def largest(group: Group, length: NDArray, target: NDArray, limit: NDArray) -> NDArray[np.int64]:
    """Most samples whose true memory is within ``limit`` bytes; 0 where not one is."""
    return np.floor(_solve(group, length, target, limit)).astype(np.int64)


def _solve(group: Group, length: NDArray, target: NDArray, limit: NDArray) -> NDArray[np.float64]:
    """Every phase is linear in n, so the limit is reached where the first of them reaches it."""
    target = target if group.two_streams else np.zeros_like(length)
    at_zero = design(np.zeros(len(length)), length, target) @ group.phases.T
    per_sample = design(np.ones(len(length)), length, target) @ group.phases.T - at_zero
    with np.errstate(divide="ignore", invalid="ignore"):
        n = np.where(per_sample > 0, (limit[:, None] - at_zero) / per_sample, np.inf)
    return np.clip(n.min(axis=1), 0, 2**40)
