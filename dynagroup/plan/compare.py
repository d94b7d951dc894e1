"""Ways to batch the same samples, side by side: fixed batches, grouped by length, and dynagroup in each of its modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget, padded_streams, padded_tokens, real_tokens
from dynagroup.budget.tokens import TokenBudget
from dynagroup.lengths import as_streams
from dynagroup.plan.batches import Batches, fixed_batches, shapes_of
from dynagroup.plan.cost import Work
from dynagroup.plan.order import epoch_order
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS, IntArray, Streams
from dynagroup.validation import check_int

__all__ = ["Comparison", "Way", "compare", "grouped_batches"]

MEGA_BATCHES = 50  # `group_by_length` of transformers sorts so many batches together
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

    @property
    def num_steps(self) -> int:
        """Steps of the epoch."""
        return len(self.table)

    @property
    def padding(self) -> float:
        """Share of the multiplied tokens that is padding."""
        return 1.0 - self.real_tokens / max(int(self.padded.sum()), 1)

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

    def figures(self) -> dict[str, Any]:
        """Everything that :meth:`report` shows, for machines."""
        return {
            "num_samples": len(self.lengths[TOKENS]),
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "samples_per_update": self.samples_per_update,
            "ways": {
                way.name: {**way.figures(), "share_of_time": way.time / max(self.ways[0].time, 1e-9)}
                for way in self.ways
            },
        }

    def report(self) -> str:
        """One row a way: steps, padding, waiting, largest batch, and predicted time as a share of the first's."""
        from dynagroup.plan.report import format_table

        first = self.ways[0].time
        rows = [
            [
                way.name,
                f"{way.num_steps:,}",
                f"{way.padding:.1%}",
                *([f"{way.waiting:.1%}"] if self.world_size > 1 else []),
                f"{way.largest_batch:,}",
                f"{way.time / max(first, 1e-9):.2f}",
            ]
            for way in self.ways
        ]
        waiting = ["ranks wait"] if self.world_size > 1 else []
        return format_table(["", "steps", "padding", *waiting, "largest batch", "predicted time"], rows)

    def plot(self) -> Any:
        """A matplotlib figure: padding of the first way and of each mode side by side, and their predicted times."""
        from dynagroup.plan.pictures import plot_comparison

        return plot_comparison(self)


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
    order = epoch_order(len(streams[TOKENS]), seed=seed, epoch=0)
    grouped = grouped_batches(streams[TOKENS], batch_size, world_size=world_size, seed=seed)
    ways = [
        _way(f"fixed {batch_size}, shuffled", fixed_batches(order, batch_size), streams, world_size, fits, cost),
        _way(f"group_by_length {batch_size}", grouped, streams, world_size, fits, cost),
    ]
    modes: dict[str, dict[str, Any]] = {
        f"dynagroup, updates of {each}": {"samples_per_update": each},
        "dynagroup, shuffle=True": {"shuffle": True},
        "dynagroup, sorted": {},
    }
    for name, mode in modes.items():
        sampler = LengthAwareBatchSampler(streams, fits, seed=seed, rank=0, world_size=world_size, work=cost, **mode)
        plan = sampler.plan
        ways.append(_judged(name, plan.batches, plan.table, streams, plan.budget, cost))
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


def _way(name: str, batches: Batches, lengths: Streams, world_size: int, budget: Budget, work: Work) -> Way:
    """Batches dealt to the ranks in turn, padded as any collate function pads."""
    steps = -(-len(batches) // world_size)
    table = np.full(steps * world_size, NOTHING, np.int64)
    table[: len(batches)] = np.arange(len(batches))
    names = padded_streams(budget, lengths)
    padded = TokenBudget(1, pad_to_multiple_of=budget.pad_to_multiple_of, streams=names)
    return _judged(name, batches, table.reshape(steps, world_size), lengths, padded, work)


def _judged(name: str, batches: Batches, table: IntArray, lengths: Streams, budget: Budget, work: Work) -> Way:
    shapes = shapes_of(batches, lengths)
    cost = work.of_batches(batches, lengths, budget)
    return Way(
        name=name,
        batches=batches,
        table=table,
        padded=padded_tokens(shapes, budget),
        work=cost,
        time=work.of_rows(_of_ranks(cost, table)),
        real_tokens=int(real_tokens(shapes, budget).sum()),
    )


def _of_ranks(work: NDArray[np.float64], table: IntArray) -> NDArray[np.float64]:
    return np.append(work, 0.0)[table]  # NOTHING is -1: the last entry
