"""How many samples each update of a run holds: a schedule walked over epochs, with the changes made at run time.

Offline plans and online requests both walk it, so that a schedule means the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from dynagroup.errors import ConfigError
from dynagroup.plan.position import Position
from dynagroup.update.schedule import BatchSizeSchedule, checked_samples, constant

__all__ = ["MOST_EPOCHS", "Cursor", "UpdateSizes", "Walk", "first_cursor"]

MOST_EPOCHS = 1_000_000
"""No run has more epochs; what needs more is a slip, or would be counted without end."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands between two updates.

    Args:
        epoch: the epoch that is running.
        update: updates done since training began.
        samples_used: samples of this epoch's order that are done or dropped.
        samples_seen: samples trained on since training began.
        current: samples the last update was asked to hold; None before the first.
        position: where the epoch's windows stand, for updates that are not preserved.
    """

    epoch: int = 0
    update: int = 0
    samples_used: int = 0
    samples_seen: int = 0
    current: int | None = None
    position: Position | None = None

    def after(self, stop: int, current: int | None) -> Cursor:
        """The cursor behind the next update, which ends at ``stop`` of the epoch's order and was asked to hold ``current``."""
        seen = self.samples_seen + stop - self.samples_used
        return replace(self, update=self.update + 1, samples_used=stop, samples_seen=seen, current=current)


class Walk(Protocol):
    """The updates of a run, one after another."""

    def start(self, epoch: int) -> Cursor:
        """The beginning of an epoch."""
        ...

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        """Where each update that remains of an epoch ends."""
        ...

    def num_updates(self, epoch: int) -> int:
        """Updates of a whole epoch."""
        ...


def first_cursor(walk: Walk, reached: Callable[[Cursor], bool]) -> Cursor:
    """The first place of a run, at the end of an update or at its beginning, that ``reached`` says yes to."""
    epoch = 0
    while not reached(after := walk.start(epoch + 1)):
        if after.update == walk.start(epoch).update:
            raise ConfigError(
                f"epoch {epoch} has no update, so that many are never reached: the dataset is empty, or an "
                "update is larger than an epoch and `drop_last` leaves it out"
            )
        epoch += 1
        if epoch == MOST_EPOCHS:
            raise ConfigError(
                f"that many are not reached in {MOST_EPOCHS:,} epochs of {after.samples_seen // epoch} samples"
            )
    cursor = walk.start(epoch)
    if not reached(cursor):
        cursor = next(after for after in walk.cursors(cursor) if reached(after))
    return cursor


class UpdateSizes:
    """The sizes of updates: a pure function of a schedule, of changes, and of how many samples an epoch draws.

    Args:
        schedule: samples an update, or (update, current) -> samples. What has an attribute ``settled`` gives the same number
            from that update on.
        num_ordered: how many samples an epoch draws.
        drop_last: leave out an epoch's last update if it is smaller than asked.

    >>> sizes = UpdateSizes(lambda update, current: 2 if current is None else 2 * current, lambda: 9)
    >>> [(start, stop) for start, stop, after in sizes.spans(sizes.start(0))]
    [(0, 2), (2, 6), (6, 9)]
    """

    def __init__(
        self, schedule: int | BatchSizeSchedule, num_ordered: Callable[[], int], *, drop_last: bool = False
    ) -> None:
        self.schedule = schedule if callable(schedule) else constant(checked_samples(schedule))
        self.num_ordered = num_ordered
        self.drop_last = drop_last
        self.changes: list[tuple[int, int, int]] = []
        """(epoch, update, samples): set at run time, in force from that update on."""
        self._starts: list[Cursor] = [Cursor()]

    @property
    def is_constant(self) -> bool:
        return isinstance(self.schedule, constant) and not self.changes

    def change(self, cursor: Cursor, samples: int) -> int:
        """Updates hold ``samples`` from the one behind ``cursor`` on. What an epoch drops stays dropped: behind its last
        update comes the next epoch's first.

        Returns:
            The number of that update.
        """
        checked_samples(samples, name="samples")
        over = next(self.spans(cursor), None) is None
        when = (cursor.epoch + over, cursor.update)
        self.changes = [c for c in self.changes if c[:2] < when] + [(*when, int(samples))]
        self._starts = [start for start in self._starts if (start.epoch, start.update) <= when]
        return cursor.update

    def restore(self, changes: Iterable[Iterable[int]]) -> None:
        """Take over another walk's changes."""
        self.changes = [(int(epoch), int(update), int(samples)) for epoch, update, samples in changes]
        self._starts = [Cursor()]

    def samples_of(self, cursor: Cursor) -> int:
        """Samples that the update behind ``cursor`` is asked to hold."""
        when = (cursor.epoch, cursor.update)
        changed = next((samples for *since, samples in reversed(self.changes) if tuple(since) <= when), None)
        samples = self.schedule(cursor.update, cursor.current) if changed is None else changed
        checked_samples(samples, where=f" at update {cursor.update}")
        return int(samples)

    def spans(self, cursor: Cursor) -> Iterator[tuple[int, int, Cursor]]:
        """(start, stop, cursor after) of the updates that remain of an epoch. Each size is looked up when its turn comes, so
        that changes take effect."""
        count = self.num_ordered()
        while cursor.samples_used < count:
            samples = self.samples_of(cursor)
            start, stop = cursor.samples_used, min(cursor.samples_used + samples, count)
            if self.drop_last and stop - start < samples:
                return
            cursor = cursor.after(stop, samples)
            yield start, stop, cursor

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        """Where each update that remains of an epoch ends."""
        return (after for *_, after in self.spans(cursor))

    def end(self, epoch: int) -> Cursor:
        """Where the last update of an epoch ends."""
        cursor = self.start(epoch)
        for after in self.cursors(cursor):
            cursor = after
        return cursor

    def at(self, epoch: int, samples_used: int) -> Cursor | None:
        """The place between two updates of an epoch at which so many of its samples are used; None if there is none."""
        cursor = self.start(epoch)
        after = self.cursors(cursor)
        while cursor.samples_used < samples_used:
            following = next(after, None)
            if following is None:
                return None
            cursor = following
        return cursor if cursor.samples_used == samples_used else None

    def comes_by(self, cursor: Cursor) -> bool:
        """Whether a run comes by this place, between two updates. Asks the schedule for no more updates than it claims, and
        for none where its samples are not those of its epochs."""
        drawn = cursor.epoch * self.num_ordered() + cursor.samples_used
        seen = cursor.update <= cursor.samples_seen <= drawn and (self.drop_last or cursor.samples_seen == drawn)
        if not seen or self._walked_to(cursor.epoch, cursor.update) is None:
            return False
        return self.at(cursor.epoch, cursor.samples_used) == cursor

    def start(self, epoch: int) -> Cursor:
        """The beginning of an epoch. Epochs in which the size no longer changes are not walked but counted."""
        found = self._walked_to(epoch)
        assert found is not None
        return found

    def _walked_to(self, epoch: int, most_updates: float = math.inf) -> Cursor | None:
        """The beginning of an epoch; None if it comes behind more updates than that."""
        while len(self._starts) <= epoch and self._starts[-1].update <= most_updates:
            start = self._starts[-1]
            if self._is_settled(start):
                return self._repeated(start, epoch)
            end = self.end(start.epoch)
            self._starts.append(replace(end, epoch=len(self._starts), samples_used=0))
        found = self._starts[min(epoch, len(self._starts) - 1)]
        return found if found.epoch == epoch and found.update <= most_updates else None

    def _is_settled(self, start: Cursor) -> bool:
        """Whether all updates from the beginning of an epoch on are asked to hold as many samples."""
        if self.changes:
            return self.changes[-1][:2] <= (start.epoch, start.update)
        since = getattr(self.schedule, "settled", None)
        return since is not None and since <= start.update

    def _repeated(self, start: Cursor, epoch: int) -> Cursor:
        size, epochs = self.samples_of(start), epoch - start.epoch
        updates = epochs * self._num_of_size(size)
        samples = updates * size if self.drop_last else epochs * self.num_ordered()
        return replace(
            start,
            epoch=epoch,
            update=start.update + updates,
            samples_seen=start.samples_seen + samples,
            current=size if updates else start.current,
        )

    def _num_of_size(self, size: int) -> int:
        """Updates of an epoch, if they all hold as many samples."""
        count = self.num_ordered()
        return count // size if self.drop_last else -(-count // size)

    def num_updates(self, epoch: int) -> int:
        """Updates of a whole epoch."""
        start = self.start(epoch)
        if self._is_settled(start):
            return self._num_of_size(self.samples_of(start))
        return sum(1 for _ in self.spans(start))
