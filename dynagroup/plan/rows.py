"""Rows of batches for all ranks: evened out, arranged, and proved."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, padded_tokens
from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.cut import cut
from dynagroup.plan.rounding import RoundBatch
from dynagroup.shapes import TOKENS, IntArray, Streams

__all__ = ["Rows", "Uneven", "arrange", "cut_evenly", "even_out", "matched_by_cost", "prove"]

Uneven: TypeAlias = Literal["repeat", "drop"]

OPTIMAL_UP_TO = 100  # batches; with more of them there is next to no padding left to save
BALANCE_UP_TO = 64  # rows; with more of them a few halved batches cost next to nothing
TIGHTNESS = 64  # rows are balanced to one part in so many


def even_out(batches: Batches, multiple: int) -> Batches:
    """Halve the largest batches until their number divides by ``multiple``, or all hold a single sample.

    Nothing is dropped or repeated: a half of a batch that fits also fits.

    >>> even_out(Batches(np.arange(6), np.array([0, 1, 6])), 4).sizes.tolist()
    [1, 2, 1, 2]
    """
    sizes = batches.sizes
    missing = -len(sizes) % multiple
    heap = [(-int(size), -int(start)) for size, start in zip(sizes, batches.offsets[:-1], strict=True)]
    heapq.heapify(heap)
    new_offsets: list[int] = []
    while len(new_offsets) < missing and heap and heap[0][0] < -1:
        size, start = (-value for value in heapq.heappop(heap))
        half = size - size // 2
        new_offsets.append(start + half)
        heapq.heappush(heap, (-half, -start))
        heapq.heappush(heap, (half - size, -start - half))
    return Batches(batches.order, np.sort(np.append(batches.offsets, np.asarray(new_offsets, np.int64))))


def cut_evenly(lengths: Streams, budget: Budget, multiple: int, *, round_batch: RoundBatch | None = None) -> Batches:
    """Cut a window into batches that fit, in a number that divides by ``multiple`` wherever its samples allow that.

    A window of few rows is cut again under the tightest cost that still needs no further row, so that its batches cost
    about the same and no rank waits; what is then missing to a full row comes from halving.

    >>> window = {"tokens": np.full(10, 5, np.int32)}
    >>> cut_evenly(window, TokenBudget(20), 4).sizes.tolist()
    [1, 3, 3, 3]
    """
    batches = cut(lengths, budget, round_batch=round_batch)
    rows = -(-len(batches) // multiple)
    if multiple > 1 and 0 < rows <= BALANCE_UP_TO:
        budget = _tightest(lengths, budget, rows * multiple, batches, round_batch)
        batches = cut(lengths, budget, round_batch=round_batch)
    if len(batches) <= OPTIMAL_UP_TO:
        batches = cut(lengths, budget, method="optimal", round_batch=round_batch)
    return even_out(batches, multiple)


def _tightest(lengths: Streams, budget: Budget, most: int, batches: Batches, round_batch: RoundBatch | None) -> Budget:
    """``budget`` under the smallest cost a batch that still makes at most ``most`` batches."""
    shapes = shapes_of(batches, lengths)
    high = int(padded_tokens(shapes, budget).max())
    low = max(int(shapes.total[TOKENS].sum()) // most - 1, 0)  # no cut can do with less than the mean
    tight = budget
    while high - low > max(1, high // TIGHTNESS):
        middle = (low + high) // 2
        capped = budget & TokenBudget(middle, pad_to_multiple_of=budget.pad_to_multiple_of, layout=budget.layout)
        if len(cut(lengths, capped, round_batch=round_batch)) <= most:
            high, tight = middle, capped
        else:
            low = middle
    return tight


def matched_by_cost(batches: Batches, lengths: Streams, budget: Budget, keep: int) -> Batches:
    """The batches, dearest first, so that the mates of a row cost about the same; the first ``keep`` stay in front."""
    cost = padded_tokens(shapes_of(batches, lengths), budget)
    return batches.take(np.append(np.arange(min(keep, len(cost))), keep + np.argsort(-cost[keep:], kind="stable")))


@dataclass(frozen=True, slots=True)
class Rows:
    """The steps of one window. ``batches`` hold positions in the window; ``table`` numbers them, int64 (steps, ranks)."""

    batches: Batches
    table: IntArray
    repeated: IntArray
    """Positions of samples that stand in a row a second time to fill it; the last batches hold one each."""
    dropped: IntArray
    """Positions of samples left out because they cannot fill a row."""


def arrange(batches: Batches, world_size: int, uneven: Uneven, smallest: IntArray) -> Rows:
    """Batches in rows of one for each rank, in their order; ``smallest`` lists positions that may fill the last row."""
    none = np.zeros(0, np.int64)
    over = len(batches) % world_size
    if not over:
        table = np.arange(len(batches)).reshape(-1, world_size)
        return Rows(batches, table, none, none)
    if uneven == "drop":
        keep = len(batches) - over
        dropped = batches.order[batches.offsets[keep] :]
        kept = Batches(batches.order[: batches.offsets[keep]], batches.offsets[: keep + 1])
        return Rows(kept, np.arange(keep).reshape(-1, world_size), none, dropped)
    repeated = np.resize(smallest, world_size - over)
    fillers = Batches(repeated, np.arange(len(repeated) + 1))
    filled = Batches.concatenate([batches, fillers])
    return Rows(filled, np.arange(len(filled)).reshape(-1, world_size), repeated, none)


def prove(batches: Batches, num_samples: int, lengths: Streams, budget: Budget, oversize: NDArray[np.bool_]) -> None:
    """Every sample once, every batch fits or is a single oversize sample; runs on every window of every plan."""
    seen = np.zeros(num_samples, np.bool_)
    seen[batches.order] = True
    assert len(batches.order) == num_samples == seen.sum(), "a plan lost or repeated a sample"
    if not num_samples:
        return
    fits = budget.fits(shapes_of(batches, lengths))
    bad = np.flatnonzero(~fits & ~((batches.sizes == 1) & oversize[batches.order[batches.offsets[:-1]]]))
    if len(bad):
        batch = batches[int(bad[0])]
        raise BudgetError(
            f"a batch of {len(batch)} samples, longest {lengths[TOKENS][batch].max()} tokens, does not fit {budget.fingerprint}, "
            "although it is part of one that does; a budget must never refuse a smaller batch: check it with "
            "dynagroup.testing.assert_budget_law"
        )
