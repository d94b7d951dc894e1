"""Tables of plans."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import AllOf
from dynagroup.budget.memory import MemoryBudget
from dynagroup.plan.fixed import FixedBatches
from dynagroup.plan.plan import BatchPlan
from dynagroup.shapes import said

__all__ = ["environment", "format_table", "report_plan"]


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


def report_plan(plan: BatchPlan, batch_size: int | None = None) -> str:
    """The plan as a readable table: what a user checks before a long run.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> from dynagroup.plan.sampler import LengthAwareBatchSampler
    >>> print(LengthAwareBatchSampler([3, 9, 2, 8], TokenBudget(18)).plan.report().splitlines()[0])
    epoch 0: 4 samples for 1 rank, padded layout
    """
    stats = plan.statistics
    ranks = f"{plan.world_size} rank" + "s" * (plan.world_size > 1)
    head = f"epoch {plan.epoch}: {stats['num_samples']:,} samples for {ranks}, {plan.budget.layout} layout"
    table = format_table(["", ""], list(_report_rows(plan, batch_size)))[1:]
    said = plan.advice()
    return "\n".join([head, table, *([] if said is None else [said])])


def _report_rows(plan: BatchPlan, batch_size: int | None) -> Iterator[tuple[str, str]]:
    stats, sizes, streams = plan.statistics, plan.batches.sizes, plan.padded_lengths
    yield "steps, updates", f"{stats['num_steps']:,}, {stats['num_updates']:,}"
    yield "tokens, real", f"{stats['real_tokens']:,}"
    yield "tokens, with padding", f"{stats['padded_tokens']:,}"
    yield "padding", f"{stats['padding']:.1%}"
    yield "predicted time, in tokens of one rank", f"{round(stats['predicted_time']):,}"
    yield from _fixed_rows(plan, batch_size)
    for name, values in streams.items():
        of = f" in {said(name)!r}" if len(streams) > 1 else ""
        yield f"sample length{of}, median / 99 % / longest", _quantiles(values, (0.5, 0.99, 1.0))
    yield "batch size, smallest / median / largest", _quantiles(sizes, (0.0, 0.5, 1.0))
    yield "tokens a batch, with padding, smallest / median / largest", _quantiles(plan.padded, (0.0, 0.5, 1.0))
    yield "row imbalance (1: ranks never wait)", f"{stats['row_imbalance']:.3f}"
    for name, share in _predicted(plan):
        yield name, f"{share:.1%}"
    yield "samples that do not fit even alone", f"{stats['num_oversize']:,}"
    yield "samples repeated, left out", f"{stats['num_repeated']:,}, {stats['num_dropped']:,}"


def _fixed_rows(plan: BatchPlan, batch_size: int | None) -> Iterator[tuple[str, str]]:
    """What shuffled fixed batches of the same samples would pad and take; by themselves as large as fits at their hardest."""
    if plan.budget.layout == "packed" or not len(plan.batches):
        return
    fixed = FixedBatches.of(plan, batch_size)
    unfit = "" if fixed.fits else "; the longest would not fit"
    yield (
        f"(shuffled batches of {fixed.size} instead{unfit})",
        f"{fixed.padding:.1%} padding, {fixed.num_steps:,} steps",
    )
    yield f"(predicted time against batches of {fixed.size})", f"{plan.predicted_time / max(fixed.time, 1e-9):.1%}"


def _quantiles(values: NDArray[np.integer], at: Sequence[float]) -> str:
    return " / ".join(f"{round(q):,}" for q in np.quantile(values, at)) if len(values) else "-"


def _predicted(plan: BatchPlan) -> Iterator[tuple[str, float]]:
    """Predicted peak memory, as a share of the limit, where a budget predicts it."""
    whole = plan.budget if isinstance(plan.budget, AllOf) else AllOf.of(plan.budget)
    for budget in whole.parts:
        if isinstance(budget, MemoryBudget) and len(plan.batches):
            shapes = whole.seen_by(budget, plan.shapes)  # padded as far as any part of the budget asks
            yield f"predicted peak memory, share of {budget.limit}", float(budget.predicted(shapes).max())


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
