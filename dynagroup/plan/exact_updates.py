"""Cuts many updates of one size at once, which is faster than cutting each one as a window."""

from dataclasses import dataclass, replace

import numpy as np

from dynagroup.budget.base import is_packed
from dynagroup.plan.batches import Batches
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.cut import prove
from dynagroup.plan.inputs import PlanInputs
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.update_cuts import MOST_PLACES, cut_updates
from dynagroup.shapes import IntArray, round_up

FEW_STEPS = 4  # samples of an exact update for each rank, up to which updates are cut at once


def can_cut_at_once(inputs: PlanInputs, size: int, world_size: int) -> bool:
    """Whether updates of this size can be cut many at once."""
    if not inputs.has_updates or inputs.has_kinds:
        return False
    if len(inputs.lengths) > 1 or is_packed(inputs.budget, inputs.lengths):
        return False
    if inputs.config.round_batch is not None or inputs.budget.ladder is not None:
        return False
    if inputs.config.grouping is not None:
        return True
    # Samples of a step differ more in exact updates: this cut is as good as the other only in few steps.
    return size <= MOST_PLACES and (world_size == 1 or size <= FEW_STEPS * world_size)


@dataclass(frozen=True)
class UpdateBlock:
    """Consecutive updates of one size, cut at once.

    Args:
        indices: int64 (updates, samples), the updates' dataset indices.
        batches: positions in all of ``indices``, update after update, step after step.
        num_steps: int64 (updates,), steps of each update. 0: it must be cut by itself, and has no batches here.
    """

    inputs: PlanInputs
    indices: IntArray
    batches: Batches
    num_steps: IntArray
    world_size: int

    @classmethod
    def of(cls, inputs: PlanInputs, indices: IntArray, world_size: int) -> "UpdateBlock | None":
        """Cuts these updates; None: the first one must be cut by itself. ``indices``: (updates, samples)."""
        (name,) = inputs.lengths
        tokens = inputs.lengths[name][indices].astype(np.int64)
        positions = np.arange(indices.size).reshape(indices.shape)
        if (np.diff(tokens, axis=1) > 0).any():
            longest_first = np.argsort(-tokens, axis=1, kind="stable")
            positions = np.take_along_axis(positions, longest_first, axis=1)
            tokens = np.take_along_axis(tokens, longest_first, axis=1)
        work = inputs.config.work
        padded = round_up(tokens, inputs.budget.pad_to_multiple_of)
        costs = work.price(name).of(padded)
        cuts = cut_updates(tokens, inputs.budget, world_size, costs, work.per_step)
        if cuts is None or not cuts.num_steps[0]:
            return None
        chosen = cuts.batches.order
        batches = cuts.batches.map(positions.ravel())
        prove(
            Batches(np.arange(len(chosen)), batches.offsets),
            len(chosen),
            {name: tokens.ravel()[chosen].astype(np.int32)},
            inputs.budget,
            inputs.unfit(indices.ravel()[batches.order]),
        )
        return cls(inputs, indices, batches, cuts.num_steps, world_size)

    @property
    def num_leading(self) -> int:
        """Number of updates up to the first that must be cut by itself."""
        uncut = np.flatnonzero(self.num_steps == 0)
        return int(uncut[0]) if len(uncut) else len(self.num_steps)

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
        end = replace(
            start,
            steps=start.steps + len(sizes),
            windows_done=start.windows_done + len(num_steps),
            segments=(),
        )
        return BatchPlan.of(
            self.inputs,
            batches,
            loss_scale=sizes * ranks / self.indices.shape[1],
            update_ends=update_ends,
            start=start,
            end=end,
            windows=num_steps,
        )
