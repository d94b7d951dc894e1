"""Figures of one way to batch samples, and the plain tables that show them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, padded_streams, padded_tokens, real_tokens
from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.batches import Batches, fixed_batches, shapes_of
from dynagroup.plan.cost import Work
from dynagroup.shapes import BatchShape, IntArray, Streams

__all__ = ["Way", "environment", "fixed_way", "format_table", "most_of_the_longest", "shuffled_way"]

NOTHING = -1  # in a table: this rank has no batch in this step


@dataclass(frozen=True)
class Way:
    """One way to batch an epoch, with its figures.

    Args:
        name: what it is called.
        batches: dataset indices, batch by batch; ``table`` (num_steps, world_size) says which one a rank gets at a step.
        padded: tokens that a device multiplies for each batch, padding included: int64 (B,).
        work: predicted time of each batch without the price of a step, in linear tokens: float64 (B,).
        time: predicted time of the epoch, in linear tokens: of each step its price and its slowest rank.
        real_tokens: tokens of all samples.
    """

    name: str
    batches: Batches = field(repr=False)
    table: IntArray = field(repr=False)
    padded: IntArray = field(repr=False)
    work: NDArray[np.float64] = field(repr=False)
    time: float
    real_tokens: int

    @classmethod
    def of(cls, name: str, batches: Batches, table: IntArray, lengths: Streams, budget: Budget, work: Work) -> Way:
        """These batches, padded as ``budget`` says and priced by ``work``."""
        shapes = shapes_of(batches, lengths)
        cost = work.of_batches(batches, lengths, budget)
        time = work.of_rows(_of_ranks(cost, table))
        return cls(
            name, batches, table, padded_tokens(shapes, budget), cost, time, int(real_tokens(shapes, budget).sum())
        )

    @property
    def num_steps(self) -> int:
        """Steps of the epoch."""
        return len(self.table)

    @property
    def padding(self) -> float:
        """Share of the multiplied tokens that is padding."""
        padded = int(self.padded.sum())
        return 1.0 - self.real_tokens / padded if padded else 0.0

    @property
    def rank_work(self) -> NDArray[np.float64]:
        """Work of every rank in every step: float64 (num_steps, world_size); 0 where a rank has nothing."""
        return _of_ranks(self.work, self.table)

    @property
    def waiting(self) -> float:
        """Share of the ranks' time spent waiting for the slowest of their step."""
        most = self.rank_work.max(axis=1, initial=0.0).sum() * self.table.shape[1]
        return max(0.0, 1.0 - float(self.work.sum()) / max(float(most), 1e-9))

    @property
    def largest_batch(self) -> int:
        """Tokens of the largest batch, padding included: what memory must hold."""
        return int(self.padded.max(initial=0))

    def figures(self) -> dict[str, float]:
        """All of these by name."""
        return {
            "steps": self.num_steps,
            "padding": self.padding,
            "waiting": self.waiting,
            "largest_batch_tokens": self.largest_batch,
            "predicted_time": self.time,
        }


def fixed_way(name: str, batches: Batches, lengths: Streams, world_size: int, budget: Budget, work: Work) -> Way:
    """Batches dealt to the ranks in turn, padded as any collate function pads."""
    steps = -(-len(batches) // world_size)
    table = np.full(steps * world_size, NOTHING, np.int64)
    table[: len(batches)] = np.arange(len(batches))
    names = padded_streams(budget, lengths)
    padded = TokenBudget(1, pad_to_multiple_of=budget.pad_to_multiple_of, streams=names)
    return Way.of(name, batches, table.reshape(steps, world_size), lengths, padded, work)


def shuffled_way(
    samples: IntArray, size: int, lengths: Streams, world_size: int, budget: Budget, work: Work, *, seed: int = 0
) -> Way:
    """Shuffled batches of one size of these samples (dataset indices)."""
    order = np.random.default_rng(seed).permutation(np.sort(samples))
    return fixed_way(f"fixed {size}, shuffled", fixed_batches(order, size), lengths, world_size, budget, work)


def _of_ranks(work: NDArray[np.float64], table: IntArray) -> NDArray[np.float64]:
    return np.append(work, 0.0)[table]  # NOTHING is -1: the last entry


def most_of_the_longest(lengths: Streams, budget: Budget) -> int:
    """Samples that fit one batch even if they are the longest in every stream; those that do not fit alone do not count.

    >>> most_of_the_longest({"tokens": np.array([3, 9, 2, 50])}, TokenBudget(20))
    2
    """
    wide = {name: values.astype(np.int64) for name, values in lengths.items()}
    count = len(next(iter(wide.values())))
    alone = budget.fits(BatchShape(np.ones(count, np.int64), wide, wide)) if count else np.zeros(0, np.bool_)
    falling = {name: np.sort(values[alone])[::-1] for name, values in wide.items()}
    sums: dict[str, IntArray] = {name: np.cumsum(values) for name, values in falling.items()}
    low, high = 0, int(alone.sum())
    while low < high:
        middle = (low + high + 1) // 2
        longest = {name: int(values[0]) for name, values in falling.items()}
        shape = BatchShape.of(middle, longest, {name: int(values[middle - 1]) for name, values in sums.items()})
        low, high = (middle, high) if budget.fits(shape)[0] else (low, middle - 1)
    return low


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain text table: the first column left-aligned, the others right-aligned.

    >>> print(format_table(["", "steps"], [["fixed", "12"], ["dynagroup", "5"]]))
               steps
    fixed         12
    dynagroup      5
    """
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in cells)  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def environment(*packages: str) -> dict[str, Any]:
    """Hardware, versions of what is installed of ``packages``, and the date: for every file of figures.

    >>> sorted(environment("numpy"))
    ['date', 'hardware', 'python', 'versions']
    """
    installed = {name: _version(name) for name in ("torch", "numpy", *packages)}
    return {
        "hardware": f"{os.cpu_count()}-core {_processor()}",
        "python": platform.python_version(),
        "versions": {name: found for name, found in installed.items() if found is not None},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
