"""An epoch's plan as data: its batches, by step and rank, and statistics."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, padded_streams, padded_tokens, real_tokens
from dynagroup.lengths import Kinds
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cost import Work
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import BatchShape, IntArray, Streams


@dataclass(frozen=True)
class BatchPlan:
    """The batches of an epoch on all ranks, with statistics; or of the rest of an epoch, or of one window.

    Args:
        batches: all batches of dataset indices, step after step, with one batch for each rank in a step.
        table: int64 (num_steps, world_size), numbers of ``batches``.
        update_ends: bool (num_steps,), whether an optimizer update ends with the step.
        loss_scale: float64 (num_steps, world_size), factor for a batch's mean per-sample loss, see ``step.loss_scale``.
        repeated: dataset indices of samples that are repeated with weight 0, to fill a row.
        dropped: dataset indices left out by ``oversize="drop"`` or ``uneven="drop"``; once per time drawn.
        start, end: the points in the epoch before and after these steps.
        windows: number of rows of each window, or of each update; windows and updates are planned one by one.
        lengths: the dataset's lengths, stream -> int32 (N,).
        sample_kinds: the kind of each sample of the dataset.
        budget: the limit of a batch.
        oversize: dataset indices of samples that do not fit even alone.
        work: predicts the time of a batch.

    >>> from dynagroup import LengthAwareBatchSampler, TokenBudget
    >>> plan = LengthAwareBatchSampler([3, 9, 2, 8], TokenBudget(18)).plan
    >>> plan.rows[0], plan.num_steps, round(plan.statistics["padding"], 2)
    ([[1, 3]], 2, 0.08)
    """

    batches: Batches
    table: IntArray
    update_ends: NDArray[np.bool_]
    loss_scale: NDArray[np.float64]
    repeated: IntArray
    dropped: IntArray
    start: Cursor
    end: Cursor
    windows: IntArray = field(repr=False)
    lengths: Streams = field(repr=False)
    sample_kinds: Kinds = field(repr=False)
    budget: Budget
    oversize: IntArray
    work: Work = field(default=Work(), repr=False)

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @property
    def world_size(self) -> int:
        return self.table.shape[1]

    @cached_property
    def rows(self) -> list[list[list[int]]]:
        """The batches: ``rows[step][rank]`` is a list of dataset indices."""
        batches = [batch.tolist() for batch in self.batches]
        return [[batches[number] for number in row] for row in self.table.tolist()]

    @cached_property
    def kinds(self) -> list[list[Any]]:
        """The kinds of the batches: ``kinds[step][rank]``."""
        labels, codes = (
            self.sample_kinds.labels,
            self.sample_kinds.codes[self.batches.order[self.batches.offsets[:-1]]],
        )
        return [[labels[code] for code in row] for row in codes[self.table].tolist()]

    @property
    def num_steps(self) -> int:
        """Number of steps. In each, every rank runs one batch."""
        return len(self.table)

    @property
    def window_ends(self) -> list[Cursor]:
        """The point in the epoch after each window; the last is :attr:`end`. Only an epoch's last window may leave samples
        to the next one."""
        steps = self.start.steps + np.cumsum(self.windows)
        ends = []
        for number, taken in enumerate(steps[:-1].tolist()):
            done = self.start.windows_done + number + 1
            ends.append(
                replace(self.start, steps=taken, windows_done=done, segments=(), carried=())
            )
        return [*ends, self.end]

    @property
    def num_updates(self) -> int:
        return int(self.update_ends.sum())

    @cached_property
    def shapes(self) -> BatchShape:
        """The shape of every batch (samples, longest, total) in the order of ``batches``, before rounding up."""
        return shapes_of(self.batches, self.lengths)

    @cached_property
    def padded(self) -> IntArray:
        """Tokens that a device computes for every batch, with padding, over all padded streams: int64 (B,)."""
        return padded_tokens(self.shapes, self.budget)

    @property
    def padded_lengths(self) -> Streams:
        """The dataset's lengths in the padded streams only."""
        return {name: self.lengths[name] for name in padded_streams(self.budget, self.lengths)}

    @cached_property
    def _work(self) -> NDArray[np.float64]:
        """Predicted work of every batch by stream, in linear tokens: float64 (num_steps, world_size, streams)."""
        return self.work.by_stream(self.batches, self.lengths, self.budget)[self.table]

    @property
    def work_by_row(self) -> NDArray[np.float64]:
        """Predicted work of every batch, in linear tokens, without fixed costs: float64 (num_steps, world_size)."""
        return self._work.sum(axis=2)

    @property
    def predicted_time(self) -> float:
        """Predicted time of all steps in linear tokens: fixed costs, and the slowest rank's work, see ``Work.meet``."""
        return self.work.of_rows(self._work)

    @cached_property
    def statistics(self) -> Mapping[str, float]:
        """Statistics by name: counts, tokens, ``padding`` (their share that is padding), ``row_imbalance``.

        Tokens are those of all padded streams. ``row_imbalance`` is the predicted time of all steps over their time if
        all ranks had equal work: 1.0 is the best. With several streams, ``imbalance_NAME`` is the median, over steps,
        of a stream's largest sum on a rank over the mean sum."""
        sizes, padded, mean = (
            self.batches.sizes,
            int(self.padded.sum()),
            self.work_by_row.mean(axis=1).sum(),
        )
        real = int(real_tokens(self.shapes, self.budget).sum())
        quantiles = np.quantile(sizes, [0.0, 0.5, 1.0]) if len(sizes) else np.zeros(3)
        return {
            "num_samples": len(self.batches.order) - len(self.repeated),
            "num_batches": len(sizes),
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "real_tokens": real,
            "padded_tokens": padded,
            "padding": 1.0 - real / max(padded, 1),
            "smallest_batch": int(quantiles[0]),
            "median_batch": float(quantiles[1]),
            "largest_batch": int(quantiles[2]),
            "predicted_time": self.predicted_time,
            "row_imbalance": float(self.work.row_times(self._work).sum() / max(mean, 1e-9)) or 1.0,
            "num_oversize": len(self.oversize),
            "num_repeated": len(self.repeated),
            "num_dropped": len(self.dropped),
            **{
                f"imbalance_{n}": self._imbalance(n)
                for n in (self.lengths if len(self.lengths) > 1 else ())
            },
        }

    def _imbalance(self, stream: str) -> float:
        """Returns a stream's largest sum on a rank over the mean sum of the ranks: the median over steps."""
        by_row = self.shapes.total[stream][self.table].astype(np.float64)
        by_row = by_row[by_row.any(axis=1)]
        return float(np.median(by_row.max(axis=1) / by_row.mean(axis=1))) if len(by_row) else 1.0

    @property
    def fingerprint(self) -> str:
        """A hash of the plan, sixteen hexadecimal digits: changes if any batch, or its rank or place, changes."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.batches.order, self.batches.offsets, self.table, self.update_ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def report(self, batch_size: int | None = None) -> str:
        """Returns a table that compares the plan with shuffled batches of a fixed size; read it before a long run.

        Args:
            batch_size: int, samples per rank that you use today; None: as many of the longest samples as fit a batch.
        """
        from dynagroup.plan.report import report_of

        return report_of(self, batch_size)

    def plot(self) -> Any:
        """Returns a matplotlib figure of the padding in this plan and in shuffled batches of a fixed size."""
        from dynagroup.plan.plots import plot_ways
        from dynagroup.plan.report import Way, shuffled_way

        return plot_ways([shuffled_way(self, None)[0], Way("this plan", self)])

    def to_parquet(self, path: str | Path) -> None:
        """Writes the plan for other engines: one row per sample of each batch, with int64 columns ``update``, ``step``,
        ``rank``, ``sample`` (dataset index), and float64 ``loss_scale``. Row groups: 4,096 steps. Needs pyarrow."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        names, update = (
            ("update", "step", "rank", "sample"),
            np.cumsum(self.update_ends) - self.update_ends,
        )
        schema = pa.schema([*((name, pa.int64()) for name in names), ("loss_scale", pa.float64())])
        with ParquetWriter(path, schema) as file:
            for first in range(0, self.num_steps, 4096):
                batches = self.batches.take(self.table[first : first + 4096].ravel())
                step, rank = np.divmod(
                    np.repeat(np.arange(len(batches)), batches.sizes), self.world_size
                )
                columns = [
                    update[first + step],
                    first + step,
                    rank,
                    batches.order,
                    self.loss_scale[first + step, rank],
                ]
                file.write_table(pa.table(columns, schema))

    def to_html(self, path: str | Path) -> None:
        """Writes :meth:`report` and pictures of padding, work, memory and shapes to one static HTML file."""
        from dynagroup.plan.plots import page, plot_plan

        Path(path).write_text(
            page(f"dynagroup: plan of epoch {self.epoch}", self.report(), plot_plan(self)),
            encoding="utf-8",
        )
