"""How many samples an optimizer update holds, and the learning rate that goes with it.

A schedule is any function ``(update, current) -> samples per update``: ``update`` counts from 0 over the whole run and
``current`` is the size of the update before (None at update 0). It is asked once for every update, when that update is
planned, on every rank alike; so it must depend on nothing else. One with an attribute ``settled`` gives the same number from
that update on: epochs behind it are counted at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, TypeAlias

from dynagroup.errors import ConfigError
from dynagroup.validation import check_choice, check_int, check_number

__all__ = [
    "BatchSizeSchedule",
    "ScalingRule",
    "adabatch",
    "checked_samples",
    "constant",
    "doubling",
    "linear_ramp",
    "scale_learning_rate",
]

BatchSizeSchedule: TypeAlias = Callable[[int, "int | None"], int]
ScalingRule: TypeAlias = Literal["linear", "sqrt", "none"]


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


@dataclass(frozen=True)
class constant:  # noqa: N801
    """The same number of samples in every update.

    >>> constant(64)(1000, 64)
    64
    """

    samples: int

    def __post_init__(self) -> None:
        checked_samples(self.samples, name="samples")

    @property
    def settled(self) -> int:
        """The update from which sizes stay the same."""
        return 0

    def __call__(self, update: int, current: int | None) -> int:
        return self.samples


@dataclass(frozen=True)
class linear_ramp:  # noqa: N801
    """From ``first`` to ``last`` samples in a straight line over ``num_updates`` updates, then ``last``.

    Args:
        multiple_of: sizes are rounded down to a multiple of this, but not below it.

    >>> [linear_ramp(8, 32, num_updates=4)(update, None) for update in (0, 1, 2, 4, 9)]
    [8, 14, 20, 32, 32]
    """

    first: int
    last: int
    num_updates: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name in ("first", "last", "num_updates", "multiple_of"):
            checked_samples(getattr(self, name), name=name)

    @property
    def settled(self) -> int:
        """The update from which sizes stay the same."""
        return self.num_updates

    def __call__(self, update: int, current: int | None) -> int:
        done = min(update, self.num_updates)
        samples = self.first + (self.last - self.first) * done // self.num_updates
        return max(samples - samples % self.multiple_of, self.multiple_of)


@dataclass(frozen=True)
class doubling:  # noqa: N801
    """``first`` samples, twice as many from each milestone (an update number) on.

    >>> [doubling(16, milestones=(10, 20))(update, None) for update in (9, 10, 25)]
    [16, 32, 64]
    """

    first: int
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        checked_samples(self.first, name="first")
        if isinstance(self.milestones, (str, bytes)) or not isinstance(self.milestones, Iterable):
            raise ConfigError(f"`milestones` must be growing update numbers from 1 on, but are {self.milestones!r}")
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for number, milestone in enumerate(self.milestones):
            checked_samples(milestone, name=f"milestones[{number}]")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(f"`milestones` must be growing update numbers from 1 on, but are {self.milestones!r}")

    @property
    def settled(self) -> int:
        """The update from which sizes stay the same."""
        return max(self.milestones, default=0)

    def __call__(self, update: int, current: int | None) -> int:
        return self.first << sum(update >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class adabatch:  # noqa: N801
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
    >>> [schedule(update, None) for update in (0, 99, 100, 250, 999)]
    [128, 128, 256, 512, 512]
    >>> schedule.learning_rate_factor(100)
    0.75
    """

    first: int
    interval: int
    growth: int = 2
    decay: float = 0.75
    most: int | None = None

    def __post_init__(self) -> None:
        for name in ("first", "interval", "growth"):
            checked_samples(getattr(self, name), name=name)
        if self.growth < 2:
            raise ConfigError(f"`growth` must be at least 2, but is {self.growth!r}")
        if self.most is not None and checked_samples(self.most, name="most") < self.first:
            raise ConfigError(f"`most` must be at least `first` ({self.first}), but is {self.most}")
        check_number("decay", self.decay, most=1.0)

    @property
    def settled(self) -> int:
        """The update from which sizes stay the same."""
        return self.interval * self._growths

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
    numbers = {
        "learning_rate": learning_rate,
        "samples_per_update": samples_per_update,
        "base_samples_per_update": base_samples_per_update,
    }
    for name, value in numbers.items():
        check_number(name, value, or_zero=name == "learning_rate")
    check_choice("rule", rule, ("linear", "sqrt", "none"))
    ratio = samples_per_update / base_samples_per_update
    factors: Mapping[str, float] = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    return learning_rate * factors[rule]
