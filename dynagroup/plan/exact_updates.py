"""Cuts many updates of one size at once, which is faster than cutting each one as a window."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from dynagroup.budget.base import is_packed
from dynagroup.plan.batches import Batches
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.cut import cut, prove
from dynagroup.plan.inputs import PlanInputs
from dynagroup.plan.padded import windows_in_order
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.rules import CutRules
from dynagroup.plan.update_cuts import MOST_PLACES, UpdateCuts, cut_updates
from dynagroup.shapes import IntArray, Streams, round_up

Way: TypeAlias = Literal["at once", "in turn"]
FEW_STEPS = 4  # samples of an exact update for each rank, up to which updates are cut at once


def way_to_cut(inputs: PlanInputs, size: int, world_size: int) -> Way | None:
    """Returns how many updates of this size are cut: by operations on all of them, or one after another. None: each window
    is planned by itself, because it is no update, or samples have kinds."""
    if not inputs.has_updates or inputs.has_kinds:
        return None
    if len(inputs.lengths) > 1 or is_packed(inputs.budget, inputs.lengths):
        return "in turn"
    if inputs.config.round_batch is not None or inputs.budget.ladder is not None:
        return "in turn"
    # Samples of a step differ more in exact updates: this cut is as good as the other only in few steps.
    has_few_steps = world_size == 1 or size <= FEW_STEPS * world_size
    if inputs.config.grouping is not None or (size <= MOST_PLACES and has_few_steps):
        return "at once"
    return "in turn"


@dataclass(frozen=True)
class UpdateBlock:
    """Consecutive updates of one size, cut at once.

    Args:
        indices: int64 (updates, samples), the updates' dataset indices.
        batches: positions in all of ``indices``, update after update, step after step.
        num_steps: int64 (updates,), steps of each update. 0: it must be planned by itself, and has no batches here.
    """

    inputs: PlanInputs
    indices: IntArray
    batches: Batches
    num_steps: IntArray
    world_size: int

    @classmethod
    def of(cls, inputs: PlanInputs, indices: IntArray, world_size: int) -> "UpdateBlock":
        """Cuts these updates. ``indices``: (updates, samples)."""
        lengths = {name: values[indices.ravel()] for name, values in inputs.lengths.items()}
        cuts = None
        if way_to_cut(inputs, indices.shape[1], world_size) == "at once":
            cuts = _cut_at_once(inputs, lengths, indices.shape, world_size)
        if cuts is None:
            cuts = _cut_in_turn(inputs, lengths, indices.shape, world_size)
        elif not cuts.num_steps.all():
            cuts = _with_uncut_in_turn(cuts, inputs, lengths, indices.shape, world_size)
        is_cut = np.repeat(cuts.num_steps > 0, indices.shape[1])
        place_of_position = np.cumsum(is_cut) - 1
        batches = cuts.batches.map(place_of_position)
        lengths = {name: values[is_cut] for name, values in lengths.items()}
        unfit = inputs.unfit(indices.ravel()[is_cut])
        prove(batches, len(unfit), lengths, inputs.budget, unfit)
        return cls(inputs, indices, cuts.batches, cuts.num_steps, world_size)

    def num_cut_from(self, first: int) -> int:
        """Returns how many updates from this one on are cut; 0: it must be planned by itself."""
        uncut = np.flatnonzero(self.num_steps[first:] == 0)
        return int(uncut[0]) if len(uncut) else len(self.num_steps) - first

    def plan(self, first: int, stop: int, start: Cursor) -> BatchPlan:
        """Returns the plan of the updates from ``first`` to ``stop``. ``start``: the point in the epoch before them."""
        ranks = self.world_size
        num_steps = self.num_steps[first:stop]
        first_batch = int(self.num_steps[:first].sum()) * ranks
        num_batches = int(num_steps.sum()) * ranks
        offsets = self.batches.offsets[first_batch : first_batch + num_batches + 1]
        positions = self.batches.order[offsets[0] : offsets[-1]]
        batches = Batches(self.indices.ravel()[positions], offsets - offsets[0])
        sizes = batches.sizes.reshape(-1, ranks)
        update_ends = np.zeros(len(sizes), np.bool_)
        update_ends[np.cumsum(num_steps) - 1] = True
        num_taken = start.steps + len(sizes)
        num_windows = start.windows_done + len(num_steps)
        end = replace(start, steps=num_taken, windows_done=num_windows, segments=())
        return BatchPlan.of(
            self.inputs,
            batches,
            loss_scale=sizes * ranks / self.indices.shape[1],
            update_ends=update_ends,
            start=start,
            end=end,
            windows=num_steps,
        )


def _cut_at_once(
    inputs: PlanInputs, lengths: Streams, shape: tuple[int, int], world_size: int
) -> UpdateCuts | None:
    """Cuts updates of one padded stream by operations on all of them. ``shape``: updates, samples of an update."""
    (name,) = lengths
    tokens = lengths[name].astype(np.int64).reshape(shape)
    positions = np.arange(tokens.size).reshape(shape)
    if (np.diff(tokens, axis=1) > 0).any():
        longest_first = np.argsort(-tokens, axis=1, kind="stable")
        positions = np.take_along_axis(positions, longest_first, axis=1)
        tokens = np.take_along_axis(tokens, longest_first, axis=1)
    work = inputs.config.work
    padded = round_up(tokens, inputs.budget.pad_to_multiple_of)
    costs = work.price(name).of(padded)
    cuts = cut_updates(tokens, inputs.budget, world_size, costs, work.per_step)
    if cuts is None:
        return None
    return replace(cuts, batches=cuts.batches.map(positions.ravel()))


def _cut_in_turn(
    inputs: PlanInputs, lengths: Streams, shape: tuple[int, int], world_size: int
) -> UpdateCuts:
    """Cuts one update after another, but those whose last step is not full; samples of several streams are sorted at once.
    ``shape``: updates, samples of an update."""
    num_updates, size = shape
    rules = CutRules(inputs.budget, inputs.config.work, inputs.config.round_batch)
    windows = [None] * num_updates
    if not rules.packs(lengths):
        windows = windows_in_order(lengths, rules, size)
    parts = []
    num_steps = np.zeros(num_updates, np.int64)
    for update, window in enumerate(windows):
        positions = np.arange(update * size, (update + 1) * size)
        of_update = {name: values[positions] for name, values in lengths.items()}
        batches = cut(of_update, rules, world_size, window)
        if len(batches) % world_size:
            continue
        parts.append(batches.map(positions))
        num_steps[update] = len(batches) // world_size
    return UpdateCuts(Batches.concatenate(parts), num_steps)


def _with_uncut_in_turn(
    cuts: UpdateCuts,
    inputs: PlanInputs,
    lengths: Streams,
    shape: tuple[int, int],
    world_size: int,
) -> UpdateCuts:
    """Returns these cuts, with the updates that could not be cut at once cut one after another."""
    num_updates, size = shape
    uncut = np.flatnonzero(cuts.num_steps == 0)
    positions = np.arange(num_updates * size).reshape(shape)[uncut].ravel()
    of_uncut = {name: values[positions] for name, values in lengths.items()}
    in_turn = _cut_in_turn(inputs, of_uncut, (len(uncut), size), world_size)
    num_steps = cuts.num_steps.copy()
    num_steps[uncut] = in_turn.num_steps
    batches = Batches.concatenate([cuts.batches, in_turn.batches.map(positions)])
    update_of_batch = np.concatenate(
        [
            np.repeat(np.arange(num_updates), cuts.num_steps * world_size),
            np.repeat(uncut, in_turn.num_steps * world_size),
        ]
    )
    return UpdateCuts(batches.take(np.argsort(update_of_batch, kind="stable")), num_steps)
