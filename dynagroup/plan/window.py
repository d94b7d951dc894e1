"""Plans one window: samples that are planned together, as an update or as a part of an epoch. Here a run resumes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynagroup.plan.batches import Batches, tokens_of
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.cut import cut_kinds, prove
from dynagroup.plan.exact_updates import UpdateBlock, way_to_cut
from dynagroup.plan.inputs import PlanInputs
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.rows import complete
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import IntArray

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Rows:
    """Batches of positions in a window, step after step, and whether each only fills its step: bool (steps, ranks)."""

    batches: Batches
    fills: BoolArray

    def samples_of(self, num_steps: int) -> IntArray:
        """Returns the samples of the first steps, without those that are only repeated to fill a step."""
        own = np.flatnonzero(~self.fills[:num_steps].ravel())
        return self.batches.take(own).order

    def after(self, num_steps: int) -> "Rows":
        """Returns the steps after the first ``num_steps``."""
        first = num_steps * self.fills.shape[1]
        rest = self.batches.take(np.arange(first, len(self.batches)))
        return Rows(rest, self.fills[num_steps:])


@dataclass(frozen=True)
class Window:
    """Samples that are planned together, each kind by itself, and how far a run has come in them."""

    inputs: PlanInputs
    indices: IntArray  # dataset indices
    cursor: Cursor
    # By kind: no later window has the kind, so samples left over cannot wait for one.
    is_last: BoolArray

    # While the number of ranks and the learned limit stay the same, a window's own remaining steps are used; after a
    # change, its remaining samples are cut again. A sample that was only repeated to fill a step still remains.
    def rest(self, world_size: int) -> BatchPlan:
        """Plans the steps after the cursor. Here a run resumes, also on another number of ranks."""
        now = (world_size, 0, self.inputs.limit)
        segments = (*self.cursor.segments, now)
        is_left = np.ones(len(self.indices), np.bool_)
        num_ranks, _, limit = segments[0]
        rows = self._cut(is_left, num_ranks, limit)
        for segment_ranks, num_steps, segment_limit in segments:
            if (segment_ranks, segment_limit) != (num_ranks, limit):
                num_ranks = segment_ranks
                limit = segment_limit
                rows = self._cut(is_left, num_ranks, limit)
            is_left[rows.samples_of(num_steps)] = False
            rows = rows.after(num_steps)
        return self._plan(is_left, rows)

    def _cut(self, is_left: BoolArray, num_ranks: int, limit: float | None) -> Rows:
        """Cuts the samples that are left into batches, step after step."""
        inputs = self.inputs.with_limit(limit)
        config = inputs.config
        positions = np.flatnonzero(is_left)
        indices = self.indices[positions]
        if way_to_cut(inputs, len(indices), num_ranks) == "at once":
            block = UpdateBlock.of(inputs, indices[None], num_ranks)
            if block.num_cut_from(0):
                batches = block.batches.map(positions)
                num_steps = len(batches) // num_ranks
                return Rows(batches, np.zeros((num_steps, num_ranks), np.bool_))
        lengths = {name: values[indices] for name, values in inputs.lengths.items()}
        kinds = inputs.kinds.codes[indices]
        rules = CutRules(inputs.budget, config.work, config.round_batch)
        together = config.one_kind == "batch"
        cuts = cut_kinds(lengths, kinds, rules, num_ranks, together=together)
        all_batches = Batches.concatenate(cuts)
        prove(all_batches, len(indices), lengths, inputs.budget, inputs.unfit(indices))
        tokens = tokens_of(lengths, inputs.budget)
        parts = []
        fills = []
        for batches in cuts:
            first_kind = kinds[batches.order[:1]]
            is_end = bool(self.is_last[first_kind].all())
            repeats = is_end and config.uneven == "repeat"
            part, part_fills = complete(batches, tokens, num_ranks, repeats=repeats)
            parts.append(part)
            fills.append(part_fills)
        rows = Rows(Batches.concatenate(parts), np.concatenate(fills))
        if not inputs.has_updates:
            rows = self._in_order_of_use(rows, tokens)
        return Rows(rows.batches.map(positions), rows.fills)

    def _in_order_of_use(self, rows: Rows, tokens: IntArray) -> Rows:
        """Puts steps with the longest samples first; or with ``shuffle`` in random order, after the first steps of an epoch."""
        config = self.inputs.config
        batches = rows.batches
        num_ranks = rows.fills.shape[1]
        table = np.arange(len(batches)).reshape(-1, num_ranks)
        if len(table):
            first_of_step = batches.offsets[:-1][::num_ranks]
            longest = np.maximum.reduceat(tokens[batches.order], first_of_step)
            table = table[np.argsort(-longest, kind="stable")]
        if config.shuffle:
            cursor = self.cursor
            rng = np.random.default_rng(
                (config.seed, cursor.epoch, cursor.windows_done, len(tokens))
            )
            num_first = 0 if cursor.windows_done else config.hardest_first
            steps = rng.permutation(table[num_first:])
            table[num_first:] = rng.permuted(steps, axis=1)
        return Rows(batches.take(table.ravel()), rows.fills.ravel()[table])

    def _plan(self, is_left: BoolArray, rows: Rows) -> BatchPlan:
        """Makes a plan of these rows, with loss scales. ``is_left``: the window's samples that are not used yet."""
        inputs = self.inputs
        num_steps, num_ranks = rows.fills.shape
        is_left[rows.batches.order] = False
        unused = self.indices[is_left]
        is_gone = self.is_last[inputs.kinds.codes[unused]]
        counts = np.where(rows.fills, 0, rows.batches.sizes.reshape(rows.fills.shape))
        if inputs.has_updates:
            num_weighed = np.asarray(len(self.indices) - len(unused))
            update_ends = np.arange(1, num_steps + 1) == num_steps
        else:  # each step is an update
            num_weighed = counts.sum(axis=1, keepdims=True)
            update_ends = np.ones(num_steps, np.bool_)
        batches = rows.batches.map(self.indices)
        only_fills = np.repeat(rows.fills.ravel(), batches.sizes)
        loss_scale = counts * num_ranks / np.maximum(num_weighed, 1)
        end = self.cursor.after_rows(num_steps, num_ranks, inputs.limit)
        return BatchPlan.of(
            inputs,
            batches,
            loss_scale=loss_scale,
            update_ends=update_ends,
            repeated=batches.order[only_fills],
            dropped=unused[is_gone],
            start=self.cursor,
            end=end.after_window(unused[~is_gone].tolist()),
            windows=np.asarray([num_steps]),
        )


def plan_update(
    inputs: PlanInputs, indices: IntArray, cursor: Cursor, world_size: int
) -> BatchPlan:
    """Returns the plan of the rest of the update that consists of these samples."""
    is_last = np.ones(len(inputs.kinds.labels), np.bool_)
    return Window(inputs, indices, cursor, is_last).rest(world_size)
