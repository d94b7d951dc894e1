"""Ways to batch the same samples, side by side: fixed batches, grouped by length, and dynagroup in each of its modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.lengths import as_streams
from dynagroup.plan.batches import Batches, fixed_batches
from dynagroup.plan.cost import Work
from dynagroup.plan.epoch import epoch_order
from dynagroup.plan.plots import plot_ways
from dynagroup.plan.report import Way, fixed_way, format_table
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS, Streams
from dynagroup.validation import check_int

__all__ = ["Comparison", "Way", "compare", "grouped_batches"]

MEGA_BATCHES = 50  # `group_by_length` of transformers sorts so many batches together


@dataclass(frozen=True)
class Comparison:
    """What each way makes of the same samples; the first is what others are held against."""

    ways: Sequence[Way]
    lengths: Streams = field(repr=False)
    world_size: int
    batch_size: int
    samples_per_update: int
    budget: Budget

    def __getitem__(self, name: str) -> Way:
        return next(way for way in self.ways if way.name == name)

    def _share(self, way: Way) -> float:
        return way.time / max(self.ways[0].time, 1e-9)

    def figures(self) -> dict[str, Any]:
        """Everything that :meth:`report` shows, for machines."""
        return {
            "num_samples": len(self.lengths[TOKENS]),
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "samples_per_update": self.samples_per_update,
            "ways": {way.name: {**way.figures(), "share_of_time": self._share(way)} for way in self.ways},
        }

    def report(self) -> str:
        """One row a way: steps, padding, waiting, largest batch, and predicted time as a share of the first's."""
        columns = {
            "steps": lambda way: f"{way.num_steps:,}",
            "padding": lambda way: f"{way.padding:.1%}",
            "ranks wait": lambda way: f"{way.waiting:.1%}",
            "largest batch": lambda way: f"{way.largest_batch:,}",
            "predicted time": lambda way: f"{self._share(way):.2f}",
        }
        if self.world_size == 1:
            del columns["ranks wait"]
        return format_table(
            ["", *columns], [[way.name, *(shown(way) for shown in columns.values())] for way in self.ways]
        )

    def plot(self) -> Any:
        """A matplotlib figure: padding of the first way and of each mode side by side, and their predicted times."""
        return plot_ways(self.ways, self.lengths, self.budget)


def compare(
    lengths: ArrayLike | Mapping[str, ArrayLike],
    batch_size: int,
    *,
    world_size: int = 1,
    accumulation: int = 1,
    budget: Budget | None = None,
    work: Work | None = None,
    seed: int = 0,
) -> Comparison:
    """Batch the same samples in every way and predict what each costs. Nothing is run.

    Args:
        lengths: tokens of each sample (N,), or named streams.
        batch_size: samples of a batch on one rank, as you have it today. accumulation: such batches of an update.
        world_size: ranks.
        budget: what fits; default: as many padded tokens as your largest batch may have today, ``batch_size`` of the
            longest samples, so that no way needs more memory than yours.
        work: predicts time; default: ``Work()``.

    >>> found = compare([3, 9, 2, 8, 4, 4], batch_size=2)
    >>> [way.name for way in found.ways][:2]
    ['fixed 2, shuffled', 'group_by_length 2']
    """
    streams = as_streams(lengths)
    for name, value in {"batch_size": batch_size, "world_size": world_size, "accumulation": accumulation}.items():
        check_int(name, value)
    longest = max(sum(int(values.max(initial=0)) for values in streams.values()), 1)
    fits = TokenBudget(batch_size * longest) if budget is None else budget
    each, cost = batch_size * world_size * accumulation, Work() if work is None else work
    shuffled = fixed_batches(epoch_order(len(streams[TOKENS]), seed=seed, epoch=0), batch_size)
    grouped = grouped_batches(streams[TOKENS], batch_size, world_size=world_size, seed=seed)
    ways = [
        fixed_way(f"fixed {batch_size}, shuffled", shuffled, streams, world_size, fits, cost),
        fixed_way(f"group_by_length {batch_size}", grouped, streams, world_size, fits, cost),
    ]
    modes: dict[str, dict[str, Any]] = {
        f"dynagroup, updates of {each}": {"samples_per_update": each},
        "dynagroup, shuffle=True": {"shuffle": True},
        "dynagroup, sorted": {},
    }
    for name, mode in modes.items():
        sampler = LengthAwareBatchSampler(streams, fits, seed=seed, rank=0, world_size=world_size, work=cost, **mode)
        ways.append(sampler.plan.as_way(name))
    return Comparison(ways, streams, world_size, batch_size, each, fits)


def grouped_batches(lengths: NDArray[np.integer], batch_size: int, *, world_size: int = 1, seed: int = 0) -> Batches:
    """Batches as ``group_by_length`` makes them: a shuffle in pieces of 50 batches, each sorted, longest first."""
    order = epoch_order(len(lengths), seed=seed, epoch=0)
    piece = MEGA_BATCHES * batch_size * world_size
    parts = [order[start : start + piece] for start in range(0, len(order), piece)]
    parts = [part[np.argsort(-lengths[part].astype(np.int64), kind="stable")] for part in parts]
    if parts:  # the longest sample of all comes first, so that running out of memory shows at once
        hardest = max(range(len(parts)), key=lambda k: int(lengths[parts[k][0]]))
        parts[0][0], parts[hardest][0] = parts[hardest][0], parts[0][0]
    return fixed_batches(np.concatenate([np.zeros(0, np.int64), *parts]), batch_size)
