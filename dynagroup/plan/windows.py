"""The windows of an epoch: which samples are sorted together, and how far they were used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, largest_of, padded_streams
from dynagroup.errors import ConfigError, StateError
from dynagroup.plan.config import PlanConfig
from dynagroup.plan.order import EpochOrder
from dynagroup.plan.padded import cut
from dynagroup.plan.position import Position
from dynagroup.shapes import TOKENS, IntArray, Streams

__all__ = ["EpochWindows", "Window"]

BATCHES_PER_WINDOW = 100
BLOCK = 1 << 14
"""Samples of an order that are drawn at a time, for windows that are smaller."""


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that are sorted and grouped together: dataset indices, int64 (n,)."""

    number: int
    indices: IntArray
    leads: bool
    num_windows: int = 1
    """As many as are counted for it."""

    def with_next(self, following: Window) -> Window:
        indices = np.append(self.indices, following.indices)
        return replace(self, indices=indices, num_windows=self.num_windows + following.num_windows)


class EpochWindows:
    """Divides epochs into windows. Holds the facts and the knobs, and no state.

    Args:
        lengths: stream -> int32 (N,), checked.
        budget: what fits, bound to these lengths.
        config: how to cut.
        left_out: samples that take no part, a mask; None: all take part.
    """

    def __init__(
        self, lengths: Streams, budget: Budget, config: PlanConfig, left_out: NDArray[np.bool_] | None
    ) -> None:
        self._lengths, self._budget, self._config = lengths, budget, config
        self._kept = None if left_out is None else ~left_out
        self._num_samples = len(lengths[TOKENS])

    @cached_property
    def _tokens(self) -> NDArray[np.integer]:
        """Tokens of each sample in all padded streams."""
        streams = [self._lengths[name] for name in padded_streams(self._budget, self._lengths)]
        return streams[0] if len(streams) == 1 else np.add.reduce(streams, axis=0, dtype=np.int64)

    @cached_property
    def batch_size(self) -> float:
        """Samples that a batch has on average when everything is sorted together; an estimate."""
        if not self._num_samples:
            return 1.0
        sample = {k: v[:: max(1, self._num_samples // 4096)] for k, v in self._lengths.items()}
        count = len(sample[TOKENS])
        longest, where = np.unique(sample[TOKENS].astype(np.int64), return_inverse=True)
        table = largest_of(self._budget, longest) if len(self._lengths) == 1 else None
        batches = (1.0 / np.maximum(table, 1))[where].sum() if table is not None else len(cut(sample, self._budget))
        return max(1.0, count / max(float(batches), 1.0))

    def size(self, world_size: int) -> int:
        """Samples a window, a multiple of ``world_size`` unless it is an update."""
        config = self._config
        if config.samples_per_update is not None:
            if config.samples_per_update < world_size:
                raise ConfigError(
                    f"`samples_per_update` ({config.samples_per_update}) must be at least the number of ranks "
                    f"({world_size}), so that every rank has a sample in every update"
                )
            return config.samples_per_update
        if config.window is not None:
            size = config.window
        elif config.shuffle:
            wanted = max(BATCHES_PER_WINDOW, 25 * world_size) * self.batch_size
            size = int(max(1, min(wanted, self._num_samples / 2)))
        else:
            size = max(self._num_samples, 1)
        return -(-size // world_size) * world_size

    def start(self, world_size: int, epoch: int = 0, order: IntArray | None = None) -> Position:
        """The beginning of an epoch."""
        size = self.size(world_size)
        return Position(size, tail=self._tail(self._epoch_samples(epoch, order), size, world_size))

    def _tail(self, ordered: _EpochSamples, size: int, world_size: int) -> int:
        """Windows, counted from the end, that must be cut together: a short last one alone might not fill its rows.

        Every other window holds a multiple of the ranks. The fewest at the end are taken whose batches, put together as far
        as they fit, are few enough to be divided again into full rows; one where even all of them do not help.
        """
        count = -(-len(ordered) // size)
        over = len(ordered) % world_size
        if not over or count <= 1 or self._config.samples_per_update is not None:
            return 1
        saved = 0
        for tail in range(1, count + 1):
            place = count - tail
            saved += self._can_save(ordered[place * size : (place + 1) * size])
            if saved >= over:
                return tail
        return 1

    def _can_save(self, indices: IntArray) -> int:
        """By how much the batches of these samples can be fewer than the samples."""
        lengths = {name: values[indices] for name, values in self._lengths.items()}
        return len(indices) - len(cut(lengths, self._budget, objective="fewest", round_batch=self._config.round_batch))

    def is_over(self, position: Position, epoch: int, order: IntArray | None = None) -> bool:
        """Whether nothing of the epoch remains."""
        return position.windows_done * position.window_size >= len(self._epoch_samples(epoch, order))

    def check_position(self, position: Position, epoch: int, order: IntArray | None = None) -> None:
        """Refuse a place that no run of an epoch comes by.

        Raises:
            StateError: it claims other windows, or more than there are.
        """
        ordered = self._epoch_samples(epoch, order)
        count = -(-len(ordered) // position.window_size)
        size = position.window_size
        config = self._config
        asked = config.samples_per_update or config.window
        rows = sum(ranks * done for ranks, done in position.segments)
        sound = (
            position.windows_done <= count
            and 1 <= position.tail <= max(count, 1)
            and (size == asked if config.samples_per_update else size >= (asked or 1))
            and size <= 2 * max(len(ordered), asked or 1) + (1 << 20)
            and rows <= len(ordered) + sum(ranks for ranks, _ in position.segments)
            and not (position.segments and position.windows_done == count)
        )
        if not sound:
            raise StateError(f"the state is damaged: no epoch of {len(ordered)} samples comes by {position}")

    def walk(self, epoch: int, position: Position, order: IntArray | None = None) -> Iterator[Window]:
        """The windows from ``position`` on, in the order in which they are used."""
        ordered = self._epoch_samples(epoch, order)
        size, updates = position.window_size, self._config.samples_per_update is not None
        count = -(-len(ordered) // size)
        last = max(count - position.tail, 0)
        lead = 0 if updates else min(self._leading_window(ordered, size), last)
        number = 0
        for turn in range(last + 1 if count else 0):
            place = lead if turn == 0 else turn - (turn <= lead)
            whole = place == last
            if number >= position.windows_done:
                indices = ordered[place * size : len(ordered) if whole else (place + 1) * size]
                yield Window(number, indices, turn == 0 and not updates, count - last if whole else 1)
            number += count - last if whole else 1

    def _epoch_samples(self, epoch: int, order: IntArray | None) -> _EpochSamples:
        if order is not None and self._kept is not None:
            order = order[self._kept[order]]
        kept = None if self._kept is None else np.flatnonzero(self._kept)
        return _EpochSamples(self._num_samples if kept is None else len(kept), epoch, self._config, order, kept)

    def _leading_window(self, ordered: _EpochSamples, size: int) -> int:
        if not self._config.hardest_first or len(ordered) <= size:
            return 0
        return ordered.position_of_longest(self._tokens) // size

    def filled(self, window: Window, following: Iterator[Window], world_size: int) -> Window:
        """The window, with those after it that it needs to fill its rows on a number of ranks the epoch did not start with."""
        while self._config.samples_per_update is None:
            over = len(window.indices) % world_size
            further = next(following, None) if over and self._can_save(window.indices) < over else None
            if further is None:
                break
            window = window.with_next(further)
        return window

    def with_more(
        self, window: Window, remaining: IntArray, following: Iterator[Window], world_size: int
    ) -> tuple[Window, IntArray]:
        """The rest of a window together with the next one, and with as many more as it takes to fill rows."""
        short = self._config.samples_per_update is None
        while short and (further := next(following, None)) is not None:
            remaining = np.append(remaining, len(window.indices) + np.arange(len(further.indices)))
            window = window.with_next(further)
            over = len(remaining) % world_size
            short = over > 0 and self._can_save(window.indices[remaining]) < over
        return window, remaining


class _EpochSamples:
    """Dataset indices in an epoch's order, read by slice. ``kept`` are the samples that take part, ascending."""

    def __init__(
        self, num_samples: int, epoch: int, config: PlanConfig, order: IntArray | None, kept: IntArray | None
    ) -> None:
        self._given = order
        self._kept = kept
        self._count = num_samples if order is None else len(order)
        shuffled = config.shuffle or config.samples_per_update is not None
        self._drawn = EpochOrder(num_samples, seed=config.seed, epoch=epoch) if shuffled else None
        self._block, self._block_at = np.zeros(0, np.int64), 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> IntArray:
        if self._given is not None:
            return self._given[where]
        start, stop, _ = where.indices(self._count)
        drawn = np.arange(start, stop, dtype=np.int64) if self._drawn is None else self._read(self._drawn, start, stop)
        return drawn if self._kept is None else self._kept[drawn]

    def _read(self, drawn: EpochOrder, start: int, stop: int) -> IntArray:
        """From the block at hand, which is drawn anew where it does not reach."""
        if stop - start >= BLOCK:
            return drawn[start:stop]
        if not self._block_at <= start <= stop <= self._block_at + len(self._block):
            self._block, self._block_at = drawn[start : start + BLOCK], start
        return self._block[start - self._block_at : stop - self._block_at]

    def position_of_longest(self, tokens: NDArray[np.integer]) -> int:
        if self._given is not None:
            return int(np.argmax(tokens[self._given]))
        longest = np.asarray([np.argmax(tokens if self._kept is None else tokens[self._kept])], np.int64)
        return int((longest if self._drawn is None else self._drawn.position_of(longest))[0])
