"""Compares several ways to form batches from the same samples, by their plans. Runs nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.lengths import as_streams
from dynagroup.plan.batches import Batches
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.epoch import NONE, epoch_order
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.plan import BatchPlan, fixed_batches, format_table
from dynagroup.plan.planner import Planner
from dynagroup.plan.plots import draw_panels
from dynagroup.shapes import Streams, primary
from dynagroup.validation import check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEGA_BATCHES = 50  # number of batches that transformers' `group_by_length` sorts together
GROUPING = 50  # updates that stratified ways deal together, unless another number is given
COLUMNS = {  # title of a report's column -> name of the figure, and how it is written
    "steps": ("steps", "{:,}"),
    "padding": ("padding", "{:.1%}"),
    "ranks wait": ("waiting", "{:.1%}"),
    "largest batch": ("largest_batch_tokens", "{:,}"),
    "predicted time": ("share_of_time", "{:.2f}"),
}


@dataclass(frozen=True)
class Way:
    """One way to form an epoch's batches: its name and its plan."""

    name: str
    plan: BatchPlan = field(repr=False)

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding."""
        return float(self.plan.statistics["padding"])

    @property
    def waiting(self) -> float:
        """Share of the ranks' time in which they wait for the slowest rank of a step."""
        return max(0.0, 1.0 - 1.0 / self.plan.statistics["row_imbalance"])

    @property
    def largest_batch(self) -> int:
        """Tokens of the largest batch, with padding, which must fit in memory."""
        return int(self.plan.padded.max(initial=0))

    @property
    def mixed_steps(self) -> int:
        """Number of steps whose batches, over all ranks, have several kinds."""
        batches = self.plan.batches
        codes = self.plan.sample_kinds.codes[batches.order]
        first_of_step = batches.offsets[: -1 : self.plan.world_size]
        lowest = np.minimum.reduceat(codes, first_of_step)
        return int((np.maximum.reduceat(codes, first_of_step) > lowest).sum())

    def figures(self, today: float) -> dict[str, Any]:
        """Returns this way's numbers for the table; ``today`` is the predicted time of the way to compare with."""
        time = self.plan.predicted_time
        return {
            "steps": self.plan.num_steps,
            "padding": self.padding,
            "waiting": self.waiting,
            "largest_batch_tokens": self.largest_batch,
            "predicted_time": time,
            "share_of_time": time / max(today, 1e-9),
            "mixed_steps": self.mixed_steps,
        }


@dataclass(frozen=True)
class Comparison:
    """Plans of several ways to form batches from the same samples; all are compared with the first."""

    ways: Sequence[Way]
    lengths: Streams = field(repr=False)
    world_size: int
    batch_size: int
    samples_per_update: int
    budget: Budget

    def figures(self) -> dict[str, Any]:
        """Returns the numbers of :meth:`report` as a dict for JSON."""
        today = self.ways[0].plan.predicted_time
        return {
            "num_samples": len(self.lengths[primary(self.lengths)]),
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "samples_per_update": self.samples_per_update,
            "ways": {way.name: way.figures(today) for way in self.ways},
        }

    def report(self) -> str:
        """Returns a table, one row per way: steps, padding, waiting, largest batch, time as a share of the first's."""
        head, *rows = self.table()
        return format_table(head, rows)

    def table(self) -> list[list[str]]:
        """Returns the cells of :meth:`report`: the head, and one row per way."""
        columns = dict(COLUMNS)
        if len(self.ways[0].plan.sample_kinds.labels) > 1:
            columns["steps that mix kinds"] = ("mixed_steps", "{:,}")
        rows = [["", *columns]]
        for name, figures in self.figures()["ways"].items():
            row = [name]
            for figure, form in columns.values():
                row.append(form.format(figures[figure]))
            rows.append(row)
        return rows

    def plot(self) -> "Figure":
        """Returns a matplotlib figure: the padding of the first way and of two ways of dynagroup, side by side."""
        drawn = [self.ways[0], self.ways[2], self.ways[4]]
        return draw_panels([way.plan.panel(way.name) for way in drawn])


def compare(
    lengths: ArrayLike | Mapping[str, ArrayLike],
    batch_size: int,
    *,
    world_size: int = 1,
    accumulation: int = 1,
    budget: Budget | None = None,
    work: Work | None = None,
    kinds: Iterable[Any] | None = None,
    grouping: int = GROUPING,
) -> Comparison:
    """Forms batches from the same samples in several ways, and predicts the time of each.

    Args:
        lengths: int (N,), tokens of each sample, or a dict by stream.
        batch_size: int, samples per batch on one rank today. accumulation: int, number of such batches per update.
        world_size: int, number of ranks.
        budget: limit of a batch. None: the padded tokens of today's largest possible batch (``batch_size`` x longest).
        work: predicted time of a batch. None: a small decoder on this machine's device, as in loaders.
        kinds: label of each sample: dynagroup's steps then have one kind; in other ways, mixed steps are counted.
        grouping: int, number of updates that the stratified way deals together.

    >>> found = compare([3, 9, 2, 8, 4, 4], batch_size=2)
    >>> [way.name for way in found.ways][:2]
    ['fixed 2, shuffled', 'group_by_length 2']
    """
    check_int("batch_size", batch_size)
    check_int("world_size", world_size)
    check_int("accumulation", accumulation)
    streams = as_streams(lengths)
    if budget is None:
        budget = TokenBudget(batch_size * most_units(streams))
    work = check_work(work)
    per_update = batch_size * world_size * accumulation
    updates = PlanConfig(work=work, samples_per_update=per_update)
    grouped = PlanConfig(work=work, samples_per_update=per_update, grouping=grouping)
    configs = {
        f"dynagroup, updates of {per_update}": updates,
        f"dynagroup, grouping={grouping}": grouped,
        "dynagroup, shuffle=True": PlanConfig(work=work, shuffle=True),
        "dynagroup, sorted": PlanConfig(work=work),
    }
    planners = {
        name: Planner.of(streams, budget, config, kinds) for name, config in configs.items()
    }
    if isinstance(budget, TokenBudget) and budget.layout == "padded":
        packed = TokenBudget(budget.max_tokens, layout="packed")
        planners["dynagroup, packed updates"] = Planner.of(streams, packed, updates, kinds)
    next(iter(planners.values())).warn_of_oversize()
    ours = [Way(name, planner.plan(0, world_size)) for name, planner in planners.items()]

    tokens = streams[primary(streams)]
    shuffled = fixed_batches(epoch_order(len(tokens), seed=0, epoch=0), batch_size)
    by_length = grouped_batches(tokens, batch_size, world_size=world_size)
    plan = ours[0].plan
    theirs = [
        Way(f"fixed {batch_size}, shuffled", plan.with_fixed(shuffled)),
        Way(f"group_by_length {batch_size}", plan.with_fixed(by_length)),
    ]
    return Comparison(
        ways=[*theirs, *ours],
        lengths=streams,
        world_size=world_size,
        batch_size=batch_size,
        samples_per_update=per_update,
        budget=budget,
    )


def most_units(lengths: Streams) -> int:
    """Returns the tokens of a sample that has the longest length of every stream, at least 1."""
    return max(sum(int(values.max(initial=0)) for values in lengths.values()), 1)


def grouped_batches(
    lengths: NDArray[np.integer], batch_size: int, *, world_size: int = 1
) -> Batches:
    """Returns batches as ``group_by_length`` forms them: shuffled samples, of which each 50 batches are sorted."""
    order = epoch_order(len(lengths), seed=0, epoch=0)
    size = MEGA_BATCHES * batch_size * world_size
    parts = []
    for start in range(0, len(order), size):
        part = order[start : start + size]
        longest_first = np.argsort(-lengths[part].astype(np.int64), kind="stable")
        parts.append(part[longest_first])
    if parts:  # the longest sample of all is first, so that an out-of-memory error comes at once
        hardest = int(np.argmax([lengths[part[0]] for part in parts]))
        parts[0][0], parts[hardest][0] = parts[hardest][0], parts[0][0]
    return fixed_batches(np.concatenate([NONE, *parts]), batch_size)
