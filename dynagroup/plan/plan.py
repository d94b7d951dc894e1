"""An epoch's plan as data: its batches, their places and their figures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import AllOf, Budget, padded_streams, padded_tokens, real_tokens
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cost import Work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.report import Way, format_table, most_of_the_longest, shuffled_way
from dynagroup.shapes import BatchShape, IntArray, Streams, said

__all__ = ["FEW_BATCHES", "MUCH_PADDING", "BatchPlan", "PlannedWindow", "dear_steps"]

MUCH_PADDING = 0.15
"""Share of padding from which on it is worth a sentence."""
FEW_BATCHES = 20
"""Of a window; with fewer of them its samples are too few to sort well."""
TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window's steps, ready to be emitted; ``batches`` hold dataset indices."""

    batches: Batches
    table: IntArray
    update_ends: NDArray[np.bool_]
    loss_scale: NDArray[np.float64]
    repeated: IntArray
    dropped: IntArray
    start: Cursor
    """The place before these steps."""
    end: Cursor
    """The place behind all of them."""

    def after(self, rows: int) -> Cursor:
        """The place behind so many of these steps."""
        return self.end if rows == len(self.table) else self.start.after_rows(rows, self.table.shape[1])


class PlanRows(Sequence[list[list[int]]]):
    """``rows[step][rank]``: the dataset indices of one batch."""

    __slots__ = ("_batches", "_table")

    def __init__(self, batches: Batches, table: IntArray) -> None:
        self._batches, self._table = batches, table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> list[list[int]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[list[int]]]: ...
    def __getitem__(self, index: int | slice) -> list[list[int]] | list[list[list[int]]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return [self._batches[int(number)].tolist() for number in self._table[index]]


@dataclass(frozen=True)
class BatchPlan:
    """One epoch's batches on all ranks, with their figures.

    Args:
        batches: all batches, dataset indices; ``table`` says which one a rank gets at a step.
        table: int64 (num_steps, world_size), batch numbers.
        update_ends: bool (num_steps,), the optimizer steps after this row.
        loss_scale: float64 (num_steps, world_size), factor for a batch's mean per-sample loss, see ``step.loss_scale``.
        lengths: the dataset's lengths, stream -> int32 (N,).
        budget: what the batches were made to fit.
        epoch, world_size: what the plan was made for.
        oversize: dataset indices of samples that do not fit even alone.
        repeated: dataset indices of samples that stand in a row a second time, to fill it; their weight is 0.
        dropped: dataset indices that were left out, by ``oversize="drop"`` or ``uneven="drop"``.
        work: what a batch takes.
        window: samples that were sorted together; None: those of an update.

    >>> from dynagroup import LengthAwareBatchSampler, TokenBudget
    >>> plan = LengthAwareBatchSampler([3, 9, 2, 8], TokenBudget(18)).plan
    >>> plan.rows[0], plan.num_steps, round(plan.statistics["padding"], 2)
    ([[1, 3]], 2, 0.08)
    """

    batches: Batches
    table: IntArray
    update_ends: NDArray[np.bool_]
    loss_scale: NDArray[np.float64]
    lengths: Streams = field(repr=False)
    budget: Budget
    epoch: int
    world_size: int
    oversize: IntArray
    repeated: IntArray
    dropped: IntArray
    work: Work = field(default=Work(), repr=False)
    window: int | None = field(default=None, repr=False)

    @property
    def rows(self) -> PlanRows:
        """``rows[step][rank]``: dataset indices of that batch."""
        return PlanRows(self.batches, self.table)

    @property
    def num_steps(self) -> int:
        """Rows: every rank runs one batch in each."""
        return len(self.table)

    @property
    def num_updates(self) -> int:
        """Optimizer steps."""
        return int(self.update_ends.sum())

    @cached_property
    def shapes(self) -> BatchShape:
        """The true shape of every batch, in the order of ``batches``."""
        return shapes_of(self.batches, self.lengths)

    @cached_property
    def padded(self) -> IntArray:
        """Tokens that a device multiplies for every batch, padding included, all padded streams added: int64 (B,)."""
        return padded_tokens(self.shapes, self.budget)

    @property
    def padded_lengths(self) -> Streams:
        """The lengths of the dataset's padded streams: those that count as tokens."""
        return {name: self.lengths[name] for name in padded_streams(self.budget, self.lengths)}

    @cached_property
    def work_by_row(self) -> NDArray[np.float64]:
        """Predicted work of every batch, in linear tokens, without the price of its step: float64 (num_steps, world_size)."""
        return self.work.of_batches(self.batches, self.lengths, self.budget)[self.table]

    @property
    def predicted_time(self) -> float:
        """Predicted time of the steps in linear tokens: each costs its price and the most work of a rank."""
        return self.work.of_rows(self.work_by_row)

    @cached_property
    def statistics(self) -> Mapping[str, float]:
        """The figures of the plan by name: counts, tokens, ``efficiency`` (real over padded tokens), row imbalance.

        Tokens are those of all padded streams: every stream but those that an ``AdditiveCap`` names or
        ``TokenBudget(streams=...)`` leaves out.

        ``row_imbalance`` is how much longer all rows take than with perfectly equal row mates: sum of the rows' maxima
        over the sum of their means, 1.0 at best, in predicted work.
        """
        sizes, padded = self.batches.sizes, self.padded
        by_row = self.work_by_row
        real = int(real_tokens(self.shapes, self.budget).sum())
        quantiles = np.quantile(sizes, [0.0, 0.5, 1.0]) if len(sizes) else np.zeros(3)
        return {
            "num_samples": len(self.batches.order) - len(self.repeated),
            "num_batches": len(sizes),
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "real_tokens": real,
            "padded_tokens": int(padded.sum()),
            "efficiency": real / max(int(padded.sum()), 1),
            "padding": 1.0 - real / max(int(padded.sum()), 1),
            "smallest_batch": int(quantiles[0]),
            "median_batch": float(quantiles[1]),
            "largest_batch": int(quantiles[2]),
            "predicted_time": self.predicted_time,
            "row_imbalance": float(by_row.max(axis=1, initial=0).sum() / max(by_row.mean(axis=1).sum(), 1e-9))
            if len(by_row)
            else 1.0,
            "num_oversize": len(self.oversize),
            "num_repeated": len(self.repeated),
            "num_dropped": len(self.dropped),
        }

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change with any batch, its rank, or its place."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.batches.order, self.batches.offsets, self.table, self.update_ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def as_way(self, name: str) -> Way:
        """The plan beside other ways to batch the same samples."""
        return Way.of(name, self.batches, self.table, self.lengths, self.budget, self.work)

    def report(self, batch_size: int | None = None) -> str:
        """The plan as a readable table, against shuffled batches of a fixed size: what a user checks before a long run.

        Args:
            batch_size: what you use today, samples on each rank; None: as many as fit even where the longest meet.
        """
        ranks = f"{self.world_size} rank" + "s" * (self.world_size > 1)
        samples = self.statistics["num_samples"]
        head = f"epoch {self.epoch}: {samples:,} samples for {ranks}, {self.budget.layout} layout"
        table = format_table(["", ""], list(_report_rows(self, batch_size)))[1:]
        advice = self.advice()
        return "\n".join([head, table, *([] if advice is None else [advice])])

    def advice(self) -> str | None:
        """What keeps this plan from saving more, with the figure and the way out; None where little is left to save."""
        padding = float(self.statistics["padding"])
        if padding <= MUCH_PADDING or self.budget.layout == "packed" or self.statistics["num_batches"] < 2:
            return None
        times = _times_larger(self)
        unused = (
            f"; {times} times as many samples would fit every batch: a larger budget changes nothing" if times else ""
        )
        return f"{padding:.0%} of the tokens are padding: {_cause(self)}{unused}"

    def plot(self) -> Any:
        """The plan as a matplotlib figure: padding before and after, batch sizes, work of the ranks, predicted memory."""
        from dynagroup.plan.plots import plot_plan

        return plot_plan(self, _fixed(self, None)[0])


def _fixed(plan: BatchPlan, batch_size: int | None) -> tuple[Way, int, bool]:
    """Shuffled batches of one size, of the plan's samples; their size, and whether they fit at their hardest.

    ``batch_size``: None: as many as fit, were they the longest.
    """
    samples = plan.batches.order
    most = most_of_the_longest({name: values[samples] for name, values in plan.lengths.items()}, plan.budget)
    size = batch_size or max(most, 1)
    return shuffled_way(samples, size, plan.lengths, plan.world_size, plan.budget, plan.work), size, size <= most


def _report_rows(plan: BatchPlan, batch_size: int | None) -> Iterator[tuple[str, str]]:
    stats, sizes = plan.statistics, plan.batches.sizes
    yield "steps, updates", f"{stats['num_steps']:,}, {stats['num_updates']:,}"
    yield "tokens, real", f"{stats['real_tokens']:,}"
    yield "tokens, with padding", f"{stats['padded_tokens']:,}"
    yield "padding", f"{stats['padding']:.1%}"
    yield "predicted time, in tokens of one rank", f"{round(stats['predicted_time']):,}"
    if plan.budget.layout == "padded" and len(plan.batches):
        way, size, fits = _fixed(plan, batch_size)
        unfit = "" if fits else "; the longest would not fit"
        yield f"(shuffled batches of {size} instead{unfit})", f"{way.padding:.1%} padding, {way.num_steps:,} steps"
        yield f"(predicted time against batches of {size})", f"{plan.predicted_time / max(way.time, 1e-9):.1%}"
    for name, values in plan.padded_lengths.items():
        of = f" in {said(name)!r}" if len(plan.padded_lengths) > 1 else ""
        length = _quantiles(values[plan.batches.order], (0.5, 0.99, 1.0))
        yield f"sample length{of}, median / 99 % / longest", length
    yield "batch size, smallest / median / largest", _quantiles(sizes, (0.0, 0.5, 1.0))
    yield "tokens a batch, with padding, smallest / median / largest", _quantiles(plan.padded, (0.0, 0.5, 1.0))
    yield "row imbalance (1: ranks never wait)", f"{stats['row_imbalance']:.3f}"
    yield from _predicted_peaks(plan)
    yield "samples that do not fit even alone", f"{stats['num_oversize']:,}"
    yield "samples repeated, left out", f"{stats['num_repeated']:,}, {stats['num_dropped']:,}"


def _quantiles(values: NDArray[np.integer], at: Sequence[float]) -> str:
    return " / ".join(f"{round(q):,}" for q in np.quantile(values, at)) if len(values) else "-"


def _predicted_peaks(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """Predicted peak memory, as a share of the limit, where a budget predicts it."""
    whole = plan.budget if isinstance(plan.budget, AllOf) else AllOf.of(plan.budget)
    for part in whole.parts if len(plan.batches) else ():
        predicted: Any = getattr(part, "predicted", None)
        if predicted is not None:
            shapes = whole.seen_by(part, plan.shapes)  # padded as far as any part of the budget asks
            limit = getattr(part, "limit", "the limit")
            yield f"predicted peak memory, share of {limit}", f"{float(predicted(shapes).max()):.1%}"


def _cause(plan: BatchPlan) -> str:
    """What most of a plan's padding comes from."""
    steps, updates, samples = plan.num_steps, plan.num_updates, int(plan.statistics["num_samples"])
    size = samples / len(plan.batches)
    if plan.window is not None and plan.window < min(FEW_BATCHES * size, samples):
        batches = f"{plan.window / size:.0f} batches"
        return f"a window of {plan.window:,} samples is {batches}, too few to sort; raise `window`"
    if plan.window is None and steps < 1.5 * updates:
        each = "one batch" if steps == updates else f"{steps / updates:.1f} batches"
        return (
            f"an update of {samples / updates:,.0f} samples is {each} a rank, too few to sort; take more samples an update "
            "(gradient accumulation), or free updates"
        )
    return dear_steps(size)


def dear_steps(size: float) -> str:
    """What is said where batches, of so many samples, are not smaller because steps have a price."""
    return (
        f"batches have {size:,.0f} samples, because more and smaller ones are predicted to take longer; if steps are cheap with "
        "you, say so: work=Work(per_step=...), or work=loader.stats.work of an earlier run"
    )


def _times_larger(plan: BatchPlan) -> int:
    """How many times as many samples like its own would fit even the fullest batch; 0 where not twice as many do."""
    shapes, found = plan.shapes, 0
    for times in TIMES:
        total = {name: values * times for name, values in shapes.total.items()}
        if not plan.budget.fits(BatchShape(shapes.num_samples * times, shapes.longest, total)).all():
            break
        found = times
    return found
