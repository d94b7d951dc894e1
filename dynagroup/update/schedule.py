"""How many samples an optimizer update holds: schedules, their walk over epochs, and the learning rate that goes with them.

A schedule is any function ``(update, current) -> samples per update``: ``update`` counts from 0 over the whole run and
``current`` is the size of the update before (None at update 0). It is asked once for every update, when that update is
planned, on every rank alike; so it must depend on nothing else.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from operator import index
from typing import Any, Literal, TypeAlias

from dynagroup.errors import ConfigError
from dynagroup.plan.cursor import Cursor
from dynagroup.validation import check_choice, check_int, check_number

__all__ = ["MOST_EPOCHS", "BatchSizeSchedule", "ScalingRule", "UpdateSizes", "Walk", "adabatch", "checked_samples", "constant",
           "doubling", "linear_ramp", "next_epoch", "scale_learning_rate"]  # fmt: skip

BatchSizeSchedule: TypeAlias = Callable[[int, "int | None"], int]
ScalingRule: TypeAlias = Literal["linear", "sqrt", "none"]
MOST_EPOCHS = 1_000_000
"""No run has more epochs; what needs more is a slip, or would be counted without end."""


def checked_samples(value: Any, *, name: str = "samples_per_update", where: str = "") -> int:
    """``value`` as a number of samples an update.

    >>> checked_samples(16)
    16
    """
    try:
        whole = value if isinstance(value, bool) else index(value)  # also of a tensor or array of one integer
    except TypeError:
        whole = value
    return check_int(name, whole, where=where)


class _Schedule:
    """Checks the counts that a schedule is made of."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if field.type == "int":
                checked_samples(getattr(self, field.name), name=field.name)


@dataclass(frozen=True)
class constant(_Schedule):  # noqa: N801
    """The same number of samples in every update.

    >>> constant(64)(1000, 64)
    64
    """

    samples: int

    def __call__(self, update: int, current: int | None) -> int:
        return self.samples


@dataclass(frozen=True)
class linear_ramp(_Schedule):  # noqa: N801
    """From ``first`` to ``last`` samples in a straight line over ``num_updates`` updates, then ``last``. Sizes are rounded down
    to a multiple of ``multiple_of``, but not below it.

    >>> [linear_ramp(8, 32, num_updates=4)(update, None) for update in (0, 1, 2, 4, 9)]
    [8, 14, 20, 32, 32]
    """

    first: int
    last: int
    num_updates: int
    multiple_of: int = 1

    def __call__(self, update: int, current: int | None) -> int:
        done = min(update, self.num_updates)
        samples = self.first + (self.last - self.first) * done // self.num_updates
        return max(samples - samples % self.multiple_of, self.multiple_of)


@dataclass(frozen=True)
class doubling(_Schedule):  # noqa: N801
    """``first`` samples, twice as many from each milestone (an update number) on.

    >>> [doubling(16, milestones=(10, 20))(update, None) for update in (9, 10, 25)]
    [16, 32, 64]
    """

    first: int
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.milestones
        if isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
            object.__setattr__(self, "milestones", tuple(given))
            for number, milestone in enumerate(self.milestones):
                checked_samples(milestone, name=f"milestones[{number}]")
        if not isinstance(self.milestones, tuple) or list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(f"`milestones` must be growing update numbers from 1 on, but are {given!r}")

    def __call__(self, update: int, current: int | None) -> int:
        return self.first << sum(update >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class adabatch(_Schedule):  # noqa: N801
    """Grow the update by ``growth`` every ``interval`` updates, up to ``most``, and couple the learning rate to it.

    AdaBatch (Devarakonda, Naumov and Garland 2017, arXiv:1712.02029) replaces part of a step-wise decay of the learning
    rate by growing the batch: growing it by b while multiplying the rate by a acts on the weights like multiplying the
    rate by a / b at the old batch size. :meth:`learning_rate_factor` is that a, to the power of the growths so far.

    Args:
        first: samples of update 0.
        interval: updates between two growths.
        growth: factor of the samples; 2 in the paper.
        decay: factor of the learning rate at each growth; 0.75 in the paper's ImageNet runs (with 0.375 at fixed size).
        most: samples at which growing ends; the learning rate goes on decaying, by ``decay / growth``.

    >>> schedule = adabatch(128, interval=100, most=512)
    >>> [schedule(update, None) for update in (0, 99, 100, 250, 999)], schedule.learning_rate_factor(100)
    ([128, 128, 256, 512, 512], 0.75)
    """

    first: int
    interval: int
    growth: int = 2
    decay: float = 0.75
    most: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth < 2:
            raise ConfigError(f"`growth` must be at least 2, but is {self.growth!r}")
        if self.most is not None and checked_samples(self.most, name="most") < self.first:
            raise ConfigError(f"`most` must be at least `first` ({self.first}), but is {self.most}")
        check_number("decay", self.decay, most=1.0)

    def __call__(self, update: int, current: int | None) -> int:
        return self.first * self.growth ** min(update // self.interval, self._growths)

    def learning_rate_factor(self, update: int) -> float:
        """Factor of the base learning rate at an update."""
        times = update // self.interval
        grown = min(times, self._growths)
        return self.decay**grown * (self.decay / self.growth) ** (times - grown)

    @property
    def _growths(self) -> int:
        """How often the batch grows at all; without ``most`` as often as an int64 of samples allows."""
        limit, growths = self.most or 2**62, 0
        while self.first * self.growth ** (growths + 1) <= limit:
            growths += 1
        return growths


def scale_learning_rate(
    learning_rate: float, *, samples_per_update: float, base_samples_per_update: float, rule: ScalingRule = "linear"
) -> float:
    """The learning rate for updates of another size than the one it was tuned for.

    Args:
        learning_rate: tuned at ``base_samples_per_update`` samples an update.
        samples_per_update: samples an update will hold; of a run, or of one update.
        rule: "linear" for SGD (Goyal et al. 2017, arXiv:1706.02677), "sqrt" for Adam and its relatives (Malladi et al.
            2022, arXiv:2205.10287), "none" to leave it.

    Raises:
        ConfigError: a number is not positive, or the rule is not known.

    >>> scale_learning_rate(1e-3, samples_per_update=64, base_samples_per_update=16, rule="sqrt")
    0.002
    """
    check_number("learning_rate", learning_rate, or_zero=True)
    check_number("samples_per_update", samples_per_update)
    check_number("base_samples_per_update", base_samples_per_update)
    ratio = samples_per_update / base_samples_per_update
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    return learning_rate * factors[check_choice("rule", rule, tuple(factors))]


def next_epoch(end: Cursor) -> Cursor:
    """The beginning of the epoch behind the one that ends here."""
    return Cursor(end.epoch + 1, update=end.update, samples_seen=end.samples_seen, current=end.current)


class Walk(ABC):
    """The updates of a run, one after another: where each epoch begins, and where each update ends."""

    def __init__(self) -> None:
        self._starts: list[Cursor] = [Cursor()]
        """The beginning of each epoch, as far as the run was walked."""

    @abstractmethod
    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        """Where each update that remains of an epoch ends."""

    def end(self, epoch: int) -> Cursor:
        """Where the last update of an epoch ends."""
        start = self.start(epoch)
        return [start, *self.cursors(start)][-1]

    def start(self, epoch: int) -> Cursor:
        """The beginning of an epoch."""
        while len(self._starts) <= epoch:
            self._starts.append(next_epoch(self.end(len(self._starts) - 1)))
        return self._starts[epoch]

    def num_updates(self, epoch: int) -> int:
        """Updates of a whole epoch."""
        return self.start(epoch + 1).update - self.start(epoch).update

    def first(self, reached: Callable[[Cursor], bool]) -> Cursor:
        """The first place of the run, at the end of an update or at its beginning, that ``reached`` says yes to."""
        epoch = 0
        while not reached(self.start(epoch + 1)):
            if not self.num_updates(epoch):
                raise ConfigError(
                    f"epoch {epoch} has no update, so that many are never reached: the dataset is empty, or an "
                    "update is larger than an epoch and `drop_last` leaves it out"
                )
            epoch += 1
            if epoch == MOST_EPOCHS:
                raise ConfigError(f"that many are not reached in {MOST_EPOCHS:,} epochs")
        start = self.start(epoch)
        return start if reached(start) else next(after for after in self.cursors(start) if reached(after))


class UpdateSizes(Walk):
    """The sizes of updates: a pure function of a schedule, of changes, and of how many samples an epoch draws.

    Offline plans and online requests both walk it, so that a schedule means the same in both.

    Args:
        schedule: samples an update, or (update, current) -> samples.
        num_ordered: how many samples an epoch draws.
        drop_last: leave out an epoch's last update if it is smaller than asked.

    Raises:
        ConfigError: ``schedule`` takes no two arguments; when it is asked, it gives no number of samples.

    >>> sizes = UpdateSizes(lambda update, current: 2 if current is None else 2 * current, lambda: 9)
    >>> [(start, stop) for start, stop, after in sizes.spans(sizes.start(0))]
    [(0, 2), (2, 6), (6, 9)]
    """

    def __init__(
        self, schedule: int | BatchSizeSchedule, num_ordered: Callable[[], int], *, drop_last: bool = False
    ) -> None:
        super().__init__()
        self.schedule = _takes_two(schedule) if callable(schedule) else constant(checked_samples(schedule))
        self.num_ordered, self.drop_last = num_ordered, drop_last
        self.changes: list[tuple[int, int, int]] = []
        """(epoch, update, samples): set at run time, in force from that update on."""

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
        self.changes = [change for change in self.changes if change[:2] < when] + [(*when, int(samples))]
        self._starts = [start for start in self._starts if (start.epoch, start.update) <= when]
        return cursor.update

    def restore(self, changes: Iterable[Iterable[int]]) -> None:
        """Take over another walk's changes."""
        self.changes = [(epoch, update, samples) for epoch, update, samples in changes]
        self._starts = [Cursor()]

    def spans(self, cursor: Cursor) -> Iterator[tuple[int, int, Cursor]]:
        """(start, stop, cursor after) of the updates that remain of an epoch. Each size is looked up when its turn comes, so
        that changes take effect."""
        count = self.num_ordered()
        while cursor.samples_used < count:
            samples, start = self._samples_of(cursor), cursor.samples_used
            stop = min(start + samples, count)
            if self.drop_last and stop - start < samples:
                return
            update, seen = cursor.update + 1, cursor.samples_seen + stop - start
            cursor = Cursor(cursor.epoch, update=update, samples_used=stop, samples_seen=seen, current=samples)
            yield start, stop, cursor

    def cursors(self, cursor: Cursor) -> Iterator[Cursor]:
        return (after for *_, after in self.spans(cursor))

    def start(self, epoch: int) -> Cursor:
        """The beginning of an epoch. Where all updates are of one size, epochs are not walked but counted."""
        if not self.is_constant or not epoch:
            return super().start(epoch)
        size, count = self._samples_of(Cursor()), self.num_ordered()
        updates = epoch * (count // size if self.drop_last else -(-count // size))
        seen = updates * size if self.drop_last else epoch * count
        return Cursor(epoch, update=updates, samples_seen=seen, current=size if updates else None)

    def _samples_of(self, cursor: Cursor) -> int:
        """Samples that the update behind ``cursor`` is asked to hold."""
        when = (cursor.epoch, cursor.update)
        changed = next((samples for *since, samples in reversed(self.changes) if tuple(since) <= when), None)
        samples = self.schedule(cursor.update, cursor.current) if changed is None else changed
        return checked_samples(samples, where=f" at update {cursor.update}")


def _takes_two(schedule: BatchSizeSchedule) -> BatchSizeSchedule:
    try:
        inspect.signature(schedule).bind(0, None)
    except TypeError as error:
        raise ConfigError(
            f"`samples_per_update` must be a number or a function (update, current) -> samples, but {schedule!r} cannot be "
            f"called with two: {error}"
        ) from error
    except ValueError:  # a built-in that does not show its arguments
        pass
    return schedule
