"""Sizes of updates: schedules, the sequence of all updates of a run, and the scaling of the learning rate.

A schedule is a function ``(update, current) -> samples per update``: ``update`` is the update's number in the run, from
0; ``current`` is the size of the previous update (None at update 0). Every rank calls the schedule once per update,
when the update is planned, so its result must depend on these two arguments only."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

from dynagroup.errors import ConfigError
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.order import OrderSource
from dynagroup.validation import check_choice, check_int, check_number

BatchSizeSchedule: TypeAlias = Callable[[int, "int | None"], int]
Sizes: TypeAlias = "int | BatchSizeSchedule"
LARGEST_UPDATE = 1 << 40  # samples; planners get this size if each update has its own
ScalingRule: TypeAlias = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class linear_ramp:
    """Schedule from ``first`` to ``last`` samples in a straight line over ``num_updates`` updates, then constant. Sizes
    are rounded down to a multiple of ``multiple_of``, but are at least that.

    >>> [linear_ramp(8, 32, num_updates=4)(update, None) for update in (0, 1, 2, 4, 9)]
    [8, 14, 20, 32, 32]
    """

    first: int
    last: int
    num_updates: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_int(name, value)

    def __call__(self, update: int, current: int | None) -> int:
        done = min(update, self.num_updates)
        samples = self.first + (self.last - self.first) * done // self.num_updates
        return max(samples - samples % self.multiple_of, self.multiple_of)


def scale_learning_rate(
    learning_rate: float,
    *,
    samples_per_update: float,
    base_samples_per_update: float,
    rule: ScalingRule = "linear",
) -> float:
    """Returns the learning rate for updates of another size than the one that the rate was tuned for.

    Args:
        learning_rate: float, the rate tuned with ``base_samples_per_update`` samples per update.
        samples_per_update: float, samples per update in the new run.
        rule: "linear" (SGD; Goyal et al., arXiv:1706.02677), "sqrt" (Adam; Malladi et al., arXiv:2205.10287) or "none".

    >>> scale_learning_rate(1e-3, samples_per_update=64, base_samples_per_update=16, rule="sqrt")
    0.002
    """
    check_number("learning_rate", learning_rate, or_zero=True)
    check_number("samples_per_update", samples_per_update)
    check_number("base_samples_per_update", base_samples_per_update)
    ratio = samples_per_update / base_samples_per_update
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    return learning_rate * factors[check_choice("rule", rule, tuple(factors))]


class Walk(ABC):
    """The updates of a run in order: where each epoch begins and where each update ends."""

    def __init__(self) -> None:
        self._starts: list[Cursor] = [Cursor()]  # the beginnings of the known epochs

    @abstractmethod
    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        """Yields the point after each remaining update of an epoch."""

    def end(self, epoch: int) -> Cursor:
        start = self.start(epoch)
        return [start, *self.cursors(start)][-1]

    def start(self, epoch: int) -> Cursor:
        """Returns the beginning of an epoch (of the first known epoch, if that is later)."""
        while self._starts[-1].epoch < epoch:
            last = self._starts[-1].epoch
            self._starts.append(begun(last + 1, self.end(last)))
        return self._starts[max(epoch - self._starts[0].epoch, 0)]

    def num_updates(self, epoch: int) -> int:
        return self.start(epoch + 1).update - self.start(epoch).update

    def after(self, updates: int) -> Cursor:
        """Returns the point after this many updates of the run (or the first known point, if that is later)."""
        epoch = self._starts[0].epoch
        while self.start(epoch + 1).update < updates and self.num_updates(epoch):
            epoch += 1
        start = self.start(epoch)
        for place in chain([start], self.cursors(start)):
            if place.update >= updates:
                return place
        raise ConfigError(
            f"the run never gets to update {updates}: epoch {epoch} has none; use smaller updates"
        )


def begun(epoch: int, done: Cursor) -> Cursor:
    """Returns the beginning of ``epoch``; ``done``: the point at which the epochs before it ended."""
    return Cursor(epoch, update=done.update, samples_seen=done.samples_seen, current=done.current)


class UpdateSizes(Walk):
    """Computes the sizes of all updates from a schedule, later changes, and the samples of an epoch.
    >>> sizes = UpdateSizes(lambda update, current: 2 if current is None else 2 * current, lambda: 9)
    >>> [(start, stop) for start, stop, after in sizes.spans(sizes.start(0))]
    [(0, 2), (2, 6), (6, 9)]
    """

    def __init__(
        self,
        schedule: Sizes,
        num_ordered: Callable[[], int],
        *,
        order: OrderSource | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        self.order = order
        if not callable(schedule):
            schedule = self._checked("samples_per_update", schedule)
        self.schedule = schedule
        self.num_ordered = num_ordered
        self.drop_last = drop_last
        # (epoch, update, samples): the size from this update on
        self.changes: list[tuple[int, int, int]] = []

    @property
    def is_constant(self) -> bool:
        return not callable(self.schedule) and not self.changes

    def change(self, cursor: Cursor, samples: int) -> int:
        """Sets the size of all updates after ``cursor``; returns the number of the first. If that is past an epoch's
        last update, the size applies from the next epoch on, and samples that drop_last left out stay left out."""
        samples = self._checked("samples", samples)
        epoch = cursor.epoch
        if next(self.spans(cursor), None) is None:  # the epoch has no further update
            epoch += 1
        when = (epoch, cursor.update)
        earlier = [change for change in self.changes if change[:2] < when]
        self.changes = [*earlier, (*when, samples)]
        # What was computed of later epochs had the old size.
        self._starts = [start for start in self._starts if (start.epoch, start.update) <= when]
        return cursor.update

    def restore(self, changes: Iterable[Iterable[int]]) -> None:
        self.changes = [(epoch, update, samples) for epoch, update, samples in changes]
        self._starts = [Cursor()]

    def spans(self, cursor: Cursor) -> Iterator[tuple[int, int, Cursor]]:
        """Yields (start, stop, point after) of each remaining update of an epoch; looks up sizes one at a time."""
        num_ordered = self.num_ordered()
        while cursor.samples_used < num_ordered:
            samples = self._samples_of(cursor)
            start = cursor.samples_used
            stop = min(start + samples, num_ordered)
            if self.drop_last and stop - start < samples:
                return
            cursor = Cursor(
                cursor.epoch,
                update=cursor.update + 1,
                samples_used=stop,
                samples_seen=cursor.samples_seen + stop - start,
                current=samples,
            )
            yield start, stop, cursor

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        return (after for *_, after in self.spans(cursor))

    def start(self, epoch: int) -> Cursor:
        """Returns the beginning of an epoch; computed directly if all updates have one size."""
        if not self.is_constant or not epoch:
            return super().start(epoch)
        size = self._samples_of(Cursor())
        num_ordered = self.num_ordered()
        if self.drop_last:
            updates = epoch * (num_ordered // size)
            seen = updates * size
        else:
            updates = epoch * -(-num_ordered // size)
            seen = epoch * num_ordered
        return Cursor(epoch, update=updates, samples_seen=seen, current=size if updates else None)

    def _samples_of(self, cursor: Cursor) -> int:
        samples = self.schedule
        for epoch, update, changed in self.changes:
            if (epoch, update) <= (cursor.epoch, cursor.update):
                samples = changed
        if not callable(samples):
            return samples
        return self._checked(
            "samples_per_update",
            samples(cursor.update, cursor.current),
            where=f" at update {cursor.update}",
        )

    def _checked(self, name: str, samples: int, where: str = "") -> int:
        samples = check_int(name, samples, where=where)
        if self.order is not None:
            self.order.check_update(samples, where)
        return samples
