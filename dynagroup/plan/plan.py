"""An epoch's plan as data: its batches, by step and rank, with statistics, a report and a picture."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import (
    UNLIMITED,
    AdditiveCap,
    AllOf,
    Budget,
    is_packed,
    padded_streams,
    padded_tokens,
    real_tokens,
)
from dynagroup.budget.memory import memory_by_part
from dynagroup.budget.tokens import TokenBudget
from dynagroup.lengths import Kinds
from dynagroup.plan.batches import Batches, maxima_of, oversize_of, shapes_of
from dynagroup.plan.cost import Work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import NONE
from dynagroup.plan.inputs import PlanInputs
from dynagroup.plan.plots import Panel, draw_panels
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within, primary
from dynagroup.validation import check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_KINDS = 8  # largest number of kinds that a report lists
RARELY = 0.5  # a token budget of which the largest batch uses less never limits a batch
ROWS_PER_GROUP = 4096  # steps that are written to a parquet file at a time


@dataclass(frozen=True)
class BatchPlan:
    """The batches of an epoch on all ranks, with statistics; or of the rest of an epoch, or of one window.

    Args:
        batches: all batches of dataset indices, step after step, with one batch for each rank in a step.
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

    @classmethod
    def of(
        cls,
        inputs: PlanInputs,
        batches: Batches,
        *,
        loss_scale: NDArray[np.float64],
        update_ends: NDArray[np.bool_],
        start: Cursor,
        end: Cursor,
        windows: IntArray,
        repeated: IntArray = NONE,
        dropped: IntArray = NONE,
    ) -> "BatchPlan":
        """Returns a plan of these batches, which must be given step after step."""
        return cls(
            batches,
            update_ends=update_ends,
            loss_scale=loss_scale,
            repeated=repeated,
            dropped=dropped,
            start=start,
            end=end,
            windows=windows,
            lengths=inputs.lengths,
            sample_kinds=inputs.kinds,
            budget=inputs.budget,
            oversize=inputs.oversize,
            work=inputs.config.work,
        )

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @property
    def world_size(self) -> int:
        return self.loss_scale.shape[1]

    @cached_property
    def table(self) -> IntArray:
        """Numbers of :attr:`batches`, by step and rank: int64 (num_steps, world_size)."""
        return np.arange(len(self.batches)).reshape(self.loss_scale.shape)

    @cached_property
    def rows(self) -> list[list[list[int]]]:
        """The batches: ``rows[step][rank]`` is a list of dataset indices."""
        batches = [batch.tolist() for batch in self.batches]
        size = self.world_size
        return [batches[first : first + size] for first in range(0, len(batches), size)]

    @cached_property
    def kinds(self) -> list[list[Any]]:
        """The kinds of the batches: ``kinds[step][rank]``."""
        labels = self.sample_kinds.labels
        first_samples = self.batches.order[self.batches.offsets[:-1]]
        codes = self.sample_kinds.codes[first_samples].reshape(self.loss_scale.shape)
        return [[labels[code] for code in row.tolist()] for row in codes]

    @property
    def num_steps(self) -> int:
        """Number of steps. In each, every rank runs one batch."""
        return len(self.loss_scale)

    @property
    def window_ends(self) -> list[Cursor]:
        """The point in the epoch after each window; the last is :attr:`end`. Only an epoch's last window may leave samples
        to the next one."""
        steps = self.start.steps + np.cumsum(self.windows)
        ends = []
        for windows_done, taken in enumerate(steps[:-1].tolist(), self.start.windows_done + 1):
            end = replace(
                self.start, steps=taken, windows_done=windows_done, segments=(), carried=()
            )
            ends.append(end)
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
        work = self.work.by_stream(self.batches, self.lengths, self.budget)
        return work.reshape(*self.loss_scale.shape, work.shape[1])

    @property
    def work_by_row(self) -> NDArray[np.float64]:
        """Predicted work of every batch, in linear tokens, without fixed costs: float64 (num_steps, world_size)."""
        return self._work.sum(axis=2)

    @property
    def predicted_time(self) -> float:
        """Predicted time of all steps in linear tokens: fixed costs, and the slowest rank's work, see ``Work.meet``."""
        return self.work.of_rows(self._work)

    @property
    def row_imbalance(self) -> float:
        """Predicted time of all steps, without fixed costs, over their time if all ranks had equal work; at least 1.0."""
        time = float(self.work.row_times(self._work).sum())
        if time == 0.0:
            return 1.0
        return time / max(float(self.work_by_row.mean(axis=1).sum()), 1e-9)

    @cached_property
    def statistics(self) -> Mapping[str, float]:
        """Statistics by name: counts, tokens, ``padding`` (their share that is padding), ``row_imbalance``.

        Tokens are those of all padded streams. ``row_imbalance`` is the predicted time of all steps over their time if
        all ranks had equal work: 1.0 is the best. With several streams, ``imbalance_NAME`` is the median, over steps,
        of a stream's largest sum on a rank over the mean sum."""
        padded = int(self.padded.sum())
        real = int(real_tokens(self.shapes, self.budget).sum())
        sizes = self.batches.sizes if len(self.batches) else np.zeros(1)
        figures = {
            "num_samples": len(self.batches.order) - len(self.repeated),
            "num_batches": len(self.batches),
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "real_tokens": real,
            "padded_tokens": padded,
            "padding": 1.0 - real / max(padded, 1),
            "smallest_batch": int(sizes.min()),
            "median_batch": float(np.median(sizes)),
            "largest_batch": int(sizes.max()),
            "predicted_time": self.predicted_time,
            "row_imbalance": self.row_imbalance,
            "num_oversize": len(self.oversize),
            "num_repeated": len(self.repeated),
            "num_dropped": len(self.dropped),
        }
        if len(self.lengths) > 1:
            for name in self.lengths:
                figures[f"imbalance_{name}"] = self._imbalance(name)
        return figures

    def _imbalance(self, stream: str) -> float:
        """Returns a stream's largest sum on a rank over the mean sum of the ranks: the median over steps."""
        by_row = self.shapes.total[stream].reshape(self.loss_scale.shape).astype(np.float64)
        by_row = by_row[by_row.any(axis=1)]
        if not len(by_row):
            return 1.0
        return float(np.median(by_row.max(axis=1) / by_row.mean(axis=1)))

    @property
    def fingerprint(self) -> str:
        """A hash of the plan, sixteen hexadecimal digits: changes if any batch, or its rank or place, changes."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.batches.order, self.batches.offsets, self.table, self.update_ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def with_fixed(self, batches: Batches) -> "BatchPlan":
        """Returns a plan of given batches, dealt to the ranks in turn, and padded by a collate function.

        The samples of the last step are divided evenly. If they are too few for all ranks, the first samples are
        repeated, as torch's DistributedSampler does.
        """
        ranks = self.world_size
        repeated = NONE
        num_left = len(batches) % ranks
        if num_left:
            whole = batches.take(np.arange(len(batches) - num_left))
            left = batches.order[len(whole.order) :]
            repeated = np.resize(batches.order, max(ranks - len(left), 0))
            last = np.array_split(np.append(left, repeated), ranks)
            batches = Batches.concatenate([whole, Batches.of(last)])
        num_steps = len(batches) // ranks
        budget: Budget = TokenBudget(1, pad_to_multiple_of=self.budget.pad_to_multiple_of)
        for name in self.lengths:
            if name not in self.padded_lengths:
                budget = budget & AdditiveCap(name, UNLIMITED)
        return replace(
            self,
            batches=batches,
            update_ends=np.ones(num_steps, np.bool_),
            loss_scale=np.zeros((num_steps, ranks)),
            repeated=repeated,
            dropped=NONE,
            budget=budget,
            oversize=NONE,
        )

    def shuffled(self, batch_size: int) -> "BatchPlan":
        """Returns a plan of the same samples in shuffled batches of one size."""
        order = np.random.default_rng(0).permutation(np.sort(self.batches.order))
        return self.with_fixed(fixed_batches(order, batch_size))

    def worst_case_batch_size(self) -> int:
        """Returns how many samples fit one batch if all have the longest length of each stream, at least 1."""
        lengths = {name: values[self.batches.order] for name, values in self.lengths.items()}
        return max(most_of_the_longest(lengths, self.budget), 1)

    def report(self, batch_size: int | None = None) -> str:
        """Returns a table that compares the plan with shuffled batches of a fixed size; read it before a long run.

        Args:
            batch_size: int, samples per rank that you use today; None: as many of the longest samples as fit a batch.
        """
        if batch_size is not None:
            batch_size = check_int("batch_size", batch_size)
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        layout = "packed" if is_packed(self.budget, self.lengths) else "padded"
        head = f"epoch {self.epoch}: {self.statistics['num_samples']:,} samples for {ranks}, {layout} layout"
        rows = list(_report_rows(self, batch_size))
        return "\n".join([head, format_table(rows[0], rows[1:])])

    def plot(self) -> "Figure":
        """Returns a matplotlib figure of the padding in this plan and in shuffled batches of a fixed size."""
        size = self.worst_case_batch_size()
        shuffled = self.shuffled(size)
        return draw_panels([shuffled.panel(f"fixed {size}, shuffled"), self.panel("this plan")])

    def panel(self, name: str, batches: Batches | None = None) -> Panel:
        """Returns what a picture of the padding in each batch needs, over all padded streams; None: of all batches."""
        drawn = self.batches if batches is None else batches
        streams = self.padded_lengths
        tokens = np.stack([*streams.values()]).sum(axis=0, dtype=np.int64)
        shapes = shapes_of(drawn, self.lengths)
        widths = np.sum([shapes.longest[stream] for stream in streams], axis=0)
        padding = self.statistics["padding"]
        title = f"{name}: {padding:.0%} padding, {self.num_steps:,} steps"
        return Panel(
            title=title,
            batches=[tokens[batch] for batch in drawn],
            widths=widths.tolist(),
            packed=is_packed(self.budget, self.lengths),
        )

    def to_parquet(self, path: str | Path) -> None:
        """Writes the plan for other engines: one row per sample of each batch, with int64 columns ``update``, ``step``,
        ``rank``, ``sample`` (dataset index), and float64 ``loss_scale``. Row groups: 4,096 steps. Needs pyarrow."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        schema = pa.schema(
            [
                ("update", pa.int64()),
                ("step", pa.int64()),
                ("rank", pa.int64()),
                ("sample", pa.int64()),
                ("loss_scale", pa.float64()),
            ]
        )
        update_of_step = np.cumsum(self.update_ends) - self.update_ends
        with ParquetWriter(path, schema) as file:
            for first in range(0, self.num_steps, ROWS_PER_GROUP):
                batches = self.batches.take(self.table[first : first + ROWS_PER_GROUP].ravel())
                batch_of_sample = np.repeat(np.arange(len(batches)), batches.sizes)
                step, rank = np.divmod(batch_of_sample, self.world_size)
                step += first
                loss_scale = self.loss_scale[step, rank]
                columns = [update_of_step[step], step, rank, batches.order, loss_scale]
                file.write_table(pa.table(columns, schema))


def fixed_batches(order: IntArray, batch_size: int) -> Batches:
    """Returns consecutive batches of one size; the last may be smaller."""
    return Batches(order, np.append(np.arange(0, len(order), batch_size), len(order)))


def most_of_the_longest(lengths: Streams, budget: Budget) -> int:
    """Returns how many samples fit one batch if it has the longest of each stream, without those that do not fit alone."""
    oversize = oversize_of(lengths, budget, maxima_of(lengths))
    falling = {name: np.sort(np.delete(values, oversize))[::-1] for name, values in lengths.items()}

    def fits(count: IntArray) -> NDArray[np.bool_]:
        batch = {name: values[: count[0]] for name, values in falling.items()}
        return budget.fits(BatchShape.of_samples(batch))

    num_samples = len(falling[primary(lengths)])
    return int(largest_within(fits, 1, num_samples)[0])


def _report_rows(plan: BatchPlan, batch_size: int | None) -> Iterator[tuple[str, str]]:
    figures = plan.statistics
    yield "steps, updates", f"{figures['num_steps']:,}, {figures['num_updates']:,}"
    yield "tokens, real", f"{figures['real_tokens']:,}"
    yield "tokens, with padding", f"{figures['padded_tokens']:,}"
    yield "padding", f"{figures['padding']:.1%}"
    yield "predicted time, in tokens of one rank", f"{round(figures['predicted_time']):,}"
    yield from _fixed_rows(plan, batch_size)
    for name, values in plan.padded_lengths.items():
        stream = f" in {name!r}" if len(plan.padded_lengths) > 1 else ""
        lengths = _quantiles(values[plan.batches.order], (0.5, 0.99, 1.0))
        yield f"sample length{stream}, median / 99 % / longest", lengths
    sizes = _quantiles(plan.batches.sizes, (0.0, 0.5, 1.0))
    yield "batch size, smallest / median / largest", sizes
    tokens = _quantiles(plan.padded, (0.0, 0.5, 1.0))
    yield "tokens a batch, with padding, smallest / median / largest", tokens
    yield from _budget_rows(plan)
    yield "row imbalance (1: ranks never wait)", f"{figures['row_imbalance']:.3f}"
    if len(plan.lengths) > 1:
        for name in plan.lengths:
            imbalance = figures[f"imbalance_{name}"]
            yield f"largest sum of {name!r} over its mean, middle row", f"{imbalance:.3f}"
    yield from _memory_rows(plan)
    yield from _kind_rows(plan)
    yield "samples that do not fit even alone", f"{figures['num_oversize']:,}"
    left_out = f"{figures['num_dropped']:,}"
    yield "samples repeated, left out", f"{figures['num_repeated']:,}, {left_out}"


def _fixed_rows(plan: BatchPlan, batch_size: int | None) -> Iterator[tuple[str, str]]:
    """Yields the comparison with shuffled batches of a fixed size; a packed plan has none."""
    if is_packed(plan.budget, plan.lengths) or not len(plan.batches):
        return
    most = plan.worst_case_batch_size()
    size = most if batch_size is None else batch_size
    shuffled = plan.shuffled(size)
    unfit = "" if size <= most else "; the longest would not fit"
    padding = shuffled.statistics["padding"]
    share = plan.predicted_time / max(shuffled.predicted_time, 1e-9)
    result = f"{padding:.1%} padding, {shuffled.num_steps:,} steps"
    yield f"(shuffled batches of {size} instead{unfit})", result
    yield f"(predicted time against batches of {size})", f"{share:.1%}"


def _budget_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yields the share of a token budget that the largest batch uses."""
    whole = plan.budget if isinstance(plan.budget, AllOf) else AllOf((plan.budget,))
    for part in whole.parts:
        if isinstance(part, TokenBudget) and len(plan.batches):
            share = int(plan.padded.max()) / part.max_tokens
            never = ", so the budget decides nothing" if share < RARELY else ""
            yield (
                "largest batch, share of the token budget",
                f"{share:.0%} of {part.max_tokens:,}{never}",
            )


def _memory_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yields the largest predicted memory by each part of the budget that predicts it, and that part's headroom."""
    if not len(plan.batches):
        return
    for part, shares in memory_by_part(plan.budget, plan.shapes):
        title = f"predicted peak memory, headroom: shares of {part.limit_in_short}"
        yield title, f"{shares.max():.1%}, {part.headroom:.1%}"


def _kind_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yields the number of steps that have each kind; a step may have several."""
    num_labels = len(plan.sample_kinds.labels)
    if num_labels < 2:
        return
    num_steps: Counter[Any] = Counter()
    for kinds in plan.kinds:
        num_steps.update(set(kinds))
    listed = [f"{kind}: {count:,}" for kind, count in num_steps.most_common(MOST_KINDS)]
    if len(num_steps) > MOST_KINDS:
        listed.append(f"{len(num_steps) - MOST_KINDS} more")
    yield f"steps of each of {num_labels} kinds", ", ".join(listed)


def _quantiles(values: NDArray[np.integer], quantiles: Sequence[float]) -> str:
    if not len(values):
        return "-"
    return " / ".join(f"{round(value):,}" for value in np.quantile(values, quantiles))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a plain text table, with the first column left-aligned and the others right-aligned."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        aligned = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            aligned.append(cell.rjust(width))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
