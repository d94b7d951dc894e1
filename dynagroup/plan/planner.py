"""Plans an epoch as steps of batches that fit, ``rows[step][rank]``, with every sample exactly once.

A plan depends only on lengths, budget, settings, epoch and number of ranks. It is made window by window, so that the
first batch of any dataset comes at once, and a run can resume from a few integers, also on another number of ranks.

All plans share this way: an order of the samples is divided into windows, and each window is cut by itself
(:class:`~dynagroup.plan.window.Window`). They differ in orders and windows:

- free windows: consecutive samples of a shuffled order or of dataset order (:meth:`Planner._free_windows`);
- free windows of several kinds: samples of each kind, evenly spread (:func:`~dynagroup.plan.epoch.windows_of_kinds`);
- exact updates: the samples that fixed batches would have (:meth:`Planner._updates`); many are cut at once;
- stratified updates: the same in a :class:`~dynagroup.plan.strata.StratifiedOrder` (:meth:`Planner.order_of`)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.lengths import Kinds, as_streams
from dynagroup.plan.batches import Batches
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import NONE, EpochOrder, EpochWindows, Windows, windows_of_kinds
from dynagroup.plan.exact_updates import UpdateBlock, way_to_cut
from dynagroup.plan.inputs import PlanConfig, PlanInputs
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.strata import StratifiedOrder, strata_of
from dynagroup.plan.window import Window, plan_update
from dynagroup.shapes import IntArray, primary

Order: TypeAlias = "IntArray | EpochOrder | StratifiedOrder"
Drawn: TypeAlias = "IntArray | None"  # dataset indices in the order of the user's sampler

LEFT_OUT = "learned limits leave out other samples than before (oversize='drop'); call set_epoch with the next epoch"
BATCHES_PER_WINDOW = 100
STEPS_PER_WINDOW = 25
BLOCK = 1 << 16  # samples of updates that are cut at once
SMALL_BLOCK = 1 << 12  # of updates that are cut in turn, so that the first batch comes soon
SPREAD = 1 << 14  # lengths from which strata are decided
# A rare kind's windows have at least 1/8 of the usual size, so that its batches vary as well.
LEAST_SHARE = 8


class Planner(PlanInputs):
    """Makes plans from lengths, kinds, a budget bound to the lengths, and settings. Keeps no state of a run."""

    @classmethod
    def of(
        cls, lengths: Any, budget: Budget | int, config: PlanConfig, kinds: Any = None
    ) -> "Planner":
        """Makes a planner from lengths and kinds as users give them."""
        if kinds is None and config.one_kind != "step":
            raise ConfigError(
                f"`one_kind` ({config.one_kind!r}) needs a label for each sample; pass `kinds`"
            )
        streams = as_streams(lengths)
        work = config.work.for_plan(streams, as_budget(budget))
        num_samples = len(streams[primary(streams)])
        return cls(streams, budget, replace(config, work=work), Kinds.read(kinds, num_samples))

    # Learned limits: a plan keeps its limit for an epoch, and a resumed epoch may go on under another one.

    def renewed(self, world: World | None = None, *, apply: bool = True) -> "Planner":
        """Returns the planner of the next epoch: a new one if the budget has learned another limit, else this one.
        ``apply``: first combines the limits of all ranks, so all ranks must call it."""
        learner = self.budget.learner
        if learner is not None and apply:
            learner.apply(world)
        return self if self.budget.applied == self.limit else self.rebuilt()

    def in_mid_epoch(self) -> "Planner":
        """Returns a planner for the rest of an epoch, with the limit that the budget now applies; or this one if the
        limit is the same. StateError: the limit would change which samples are planned."""
        after = self.with_limit(self.budget.applied)
        if self.config.oversize == "drop" and not np.array_equal(after.oversize, self.oversize):
            raise StateError(LEFT_OUT)
        return after

    def check_left_out(self, state: Mapping[str, Any]) -> None:
        """Raises StateError if a state in mid-epoch left out other samples than this planner does."""
        if state["cursor"]["steps"] and state["left_out"] != self.left_print:
            raise StateError(LEFT_OUT)

    # Which samples are planned together.

    def window_size(self, world_size: int) -> int:
        """Returns the samples per window: a multiple of ``world_size``, unless the window is an update."""
        config = self.config
        if config.samples_per_update is not None:
            if config.samples_per_update < world_size:
                raise ConfigError(
                    f"`samples_per_update` ({config.samples_per_update}) must be at least the number "
                    f"of ranks ({world_size}); each needs a sample"
                )
            return config.samples_per_update
        if config.window is not None:
            size = config.window
        elif config.shuffle:
            num_batches = max(BATCHES_PER_WINDOW, STEPS_PER_WINDOW * world_size)
            size = min(num_batches * self.batch_size, self.num_samples / 2)
            size = max(int(size), 1)
        else:
            size = max(self.num_samples, 1)
        return -(-size // world_size) * world_size

    def order_of(self, epoch: int, drawn: Drawn = None, *, shuffle: bool, size: int = 1) -> Order:
        """Returns the epoch's dataset indices in order, without those left out; ``size``: samples per update.
        ``drawn``: the order of the user's sampler; None: shuffled, or dataset order."""
        config = self.config
        order: Order
        if drawn is None:
            order = EpochOrder(
                self.num_planned,
                seed=config.seed,
                epoch=epoch,
                shuffle=shuffle,
                left_out=self.left_out,
            )
        elif len(self.left_out):
            order = drawn[~self.unfit(drawn)]
        else:
            order = drawn
        if config.grouping is None:
            return order
        return StratifiedOrder(
            order,
            self.tokens_of,
            pool=config.grouping,
            strata=self._strata(size, config.grouping),
            seed=config.seed,
            epoch=epoch,
            source_of=self.source_of,
            num_strata=config.strata,
        )

    def _strata(self, size: int, pool: int) -> list[int]:
        """Returns the strata of an update of ``size`` samples, judged by lengths spread over the data set."""
        if not self.num_samples:
            return [size]
        every = max(1, self.num_samples // SPREAD)
        tokens = self.tokens_of(slice(None, None, every))
        return strata_of(self.config.strata, tokens, size, pool)

    def windows(self, cursor: Cursor, drawn: Drawn = None) -> EpochWindows:
        """Returns the windows of the cursor's epoch."""
        size = cursor.window_size or self.window_size(1)
        shuffle = self.config.shuffle or self.has_updates
        order = self.order_of(cursor.epoch, drawn, shuffle=shuffle, size=size)
        if self.has_updates:
            return self._updates(order, size)
        if self.has_kinds:
            return self._windows_of_kinds(order[:], size, cursor.epoch)
        return self._free_windows(order, size)

    def _updates(self, order: Order, size: int) -> EpochWindows:
        """Returns updates: consecutive samples of the order. An update may have samples of all kinds."""
        last = np.zeros(len(self.kinds.labels), np.int64)
        return EpochWindows(order, Windows(len(order), size), last)

    def _free_windows(self, order: Order, size: int) -> EpochWindows:
        """Returns windows of consecutive samples of the order; that with the longest sample is used first."""
        first = 0
        if self.config.hardest_first and len(order) >= 2 * size:
            if isinstance(order, EpochOrder):
                hardest = order.position_of(self.longest)
            else:
                hardest = int(self.tokens_of(order[:]).argmax())
            first = hardest // size
        windows = Windows(len(order), size, first)
        return EpochWindows(order, windows, np.asarray([len(windows) - 1]))

    def _windows_of_kinds(self, order: IntArray, size: int, epoch: int) -> EpochWindows:
        """Returns windows in which each kind is sorted among many samples of its own."""
        config = self.config
        least = size
        if config.shuffle and config.window is None:
            least = -(-size // LEAST_SHARE)
        rng = np.random.default_rng((config.seed, epoch)) if config.shuffle else None
        tokens = self.tokens_of(slice(None)) if config.hardest_first else None
        windows = windows_of_kinds(
            order, self.kinds.codes, size, least=least, rng=rng, tokens=tokens
        )
        if config.one_kind == "batch":  # a step may have several kinds, so any sample may fill it
            last = np.full_like(windows.last, len(windows.spans) - 1)
            windows = replace(windows, last=last)
        return windows

    # Plans.

    def start_of(self, epoch: int, world_size: int = 1) -> Cursor:
        return Cursor(epoch=epoch, window_size=self.window_size(world_size))

    def in_windows(self, cursor: Cursor, world_size: int) -> Cursor:
        """Returns the cursor with the size of the epoch's windows, which is chosen when the epoch begins."""
        return replace(cursor, window_size=cursor.window_size or self.window_size(world_size))

    def is_done(self, cursor: Cursor, world_size: int = 1, order: Drawn = None) -> bool:
        """Whether nothing of the cursor's epoch remains."""
        if cursor.windows_done >= len(self.windows(cursor, order).spans):
            return True
        if self.config.uneven == "repeat":
            return False
        # The remaining windows may have too few samples for a step.
        return not any(part.num_steps for part in self.steps_from(cursor, world_size, order))

    def steps_from(
        self, cursor: Cursor, world_size: int = 1, order: Drawn = None
    ) -> Iterator[BatchPlan]:
        """Yields the rest of the cursor's epoch, planned when it is needed: one plan per window, or of many updates."""
        size = self.window_size(world_size)  # raises if an update has too few samples for the ranks
        cursor = self.in_windows(cursor, world_size)
        epoch = self.windows(cursor, order)
        block = None
        first = 0  # of the block's updates that remain
        while cursor.windows_done < len(epoch.spans):
            num_cut = 0
            if not cursor.segments:
                if block is None or first == len(block.num_steps):
                    start, _ = epoch.spans[cursor.windows_done]
                    block = cut_block(self, epoch.order, start, size, world_size)
                    first = 0
                if block is not None:
                    num_cut = block.num_cut_from(first)
            if block is not None and num_cut:
                planned = block.plan(first, first + num_cut, cursor)
            else:
                planned = self.plan_window(epoch, cursor, world_size)
            first += max(num_cut, 1)
            yield planned
            cursor = planned.end

    def plan_window(self, epoch: EpochWindows, cursor: Cursor, world_size: int) -> BatchPlan:
        """Plans the rest of the window in which the cursor is."""
        start, stop = epoch.spans[cursor.windows_done]
        indices = epoch.order[start:stop]
        if cursor.carried:
            indices = np.append(np.asarray(cursor.carried, np.int64), indices)
        is_last = epoch.last <= cursor.windows_done
        return Window(self, indices, cursor, is_last).rest(world_size)

    def plan(
        self, epoch: int = 0, world_size: int = 1, cursor: Cursor | None = None, order: Drawn = None
    ) -> BatchPlan:
        """Returns a plan of a whole epoch, or of what remains of one from ``cursor`` on."""
        if cursor is None:
            cursor = self.start_of(epoch, world_size)
        parts = list(self.steps_from(cursor, world_size, order))
        return self.joined(parts, cursor, world_size, order)

    def joined(
        self, parts: list[BatchPlan], cursor: Cursor, world_size: int, order: Drawn = None
    ) -> BatchPlan:
        """Returns one plan of several windows; the first begins at ``cursor``. ``order``: of the user's sampler."""
        loss_scale = [np.zeros((0, world_size))]
        update_ends = [np.zeros(0, np.bool_)]
        repeated = [NONE]
        dropped = [self.left_out if order is None else order[np.isin(order, self.left_out)]]
        end = cursor
        for part in parts:
            loss_scale.append(part.loss_scale)
            update_ends.append(part.update_ends)
            repeated.append(part.repeated)
            dropped.append(part.dropped)
            end = part.end
        return BatchPlan.of(
            self,
            Batches.concatenate([part.batches for part in parts]),
            loss_scale=np.concatenate(loss_scale),
            update_ends=np.concatenate(update_ends),
            repeated=np.concatenate(repeated),
            dropped=np.concatenate(dropped),
            start=cursor,
            end=end,
            windows=np.asarray([part.num_steps for part in parts], np.int64),
        )


def cut_block(
    inputs: PlanInputs, order: Order, start: int, size: int, world_size: int, most: int = BLOCK
) -> UpdateBlock | None:
    """Returns whole updates that are cut together, from position ``start`` of the order on, of at most ``most`` samples; None:
    each window is planned by itself, or fewer samples than an update remain."""
    way = way_to_cut(inputs, size, world_size)
    if way is None:
        return None
    if way == "in turn":
        most = min(most, SMALL_BLOCK)
    num_updates = min(max(most // size, 1), (len(order) - start) // size)
    if not num_updates:
        return None
    indices = order[start : start + num_updates * size].reshape(num_updates, size)
    return UpdateBlock.of(inputs, indices, world_size)


class UpdatePlans:
    """Plans the updates of an order one by one; while they keep their size, it cuts more and more of them in advance,
    at first ``num_updates``."""

    def __init__(
        self, planner: Planner, order: Order, world_size: int, num_updates: int = 1
    ) -> None:
        self._planner = planner
        self._order = order
        self._world_size = world_size
        self._block: UpdateBlock | None = None
        self._block_start = 0  # positions in the order
        self._block_stop = 0
        self._size = 0
        self._num_first = num_updates
        self._num_updates = 0  # updates in the block, or that would be in it

    def plan(self, start: int, stop: int, cursor: Cursor) -> BatchPlan:
        """Returns the plan of the update from ``start`` to ``stop`` of the order; ``cursor``: the point in the epoch."""
        size = stop - start
        if not cursor.segments:
            if size != self._size or not self._block_start <= start < self._block_stop:
                self._cut(start, size)
            if self._block is not None:
                update = (start - self._block_start) // size
                if self._block.num_steps[update]:
                    return self._block.plan(update, update + 1, cursor)
        return plan_update(self._planner, self._order[start:stop], cursor, self._world_size)

    def _cut(self, start: int, size: int) -> None:
        self._num_updates = 2 * self._num_updates if size == self._size else self._num_first
        self._size = size
        most = min(self._num_updates * size, BLOCK)
        self._block = cut_block(self._planner, self._order, start, size, self._world_size, most)
        num_planned = 1 if self._block is None else len(self._block.num_steps)
        self._block_start = start
        self._block_stop = start + num_planned * size
