"""What running out of memory teaches: a correction to a budget, kept with the run's state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import UNLIMITED, AllOf, BoolArray, Budget, FloatArray, cost_of, fits_of, largest_of
from dynagroup.budget.tokens import TokenBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.memory.fits import largest_within
from dynagroup.memory.run import Layout
from dynagroup.shapes import BatchShape, IntArray, Streams
from dynagroup.state import opened, sealed
from dynagroup.validation import check_int, check_number

__all__ = ["COST_UNIT", "NO_COST", "LearningBudget", "Limits", "OomReport"]

COST_UNIT = 2**20  # costs travel between ranks as integers
NO_COST = 2**62


@dataclass(frozen=True, slots=True)
class OomReport:
    """What running out of memory has cost a run so far.

    Args:
        num_ooms: attempts that failed.
        num_retries: parts that were run in their place.
        num_skipped: samples left out by mode "skip".
        wasted_s: seconds spent in attempts that failed.
        curve: (number of observed batches, share of the first limit that was then allowed): the headroom over time.
    """

    num_ooms: int
    num_retries: int
    num_skipped: int
    wasted_s: float
    curve: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        headroom = f"{self.curve[-1][1]:.0%}" if self.curve else "untouched"
        return (
            f"{self.num_ooms} out-of-memory errors, {self.num_retries} parts run again, {self.num_skipped} samples "
            f"skipped, {self.wasted_s:.1f} s wasted, headroom {headroom}"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Costs up to ``limit`` are allowed, if they are below ``wall``, the lowest that has failed; inf: none is refused."""

    limit: float = math.inf
    wall: float = math.inf

    @property
    def refuse_nothing(self) -> bool:
        return math.isinf(self.limit) and math.isinf(self.wall)


@dataclass
class _Lessons:
    """What has been learned. A budget shares it with those that are bound to lengths."""

    numbers: MutableSequence[float] = field(default_factory=lambda: [math.inf] * 4)
    """Limit and wall that are known, then those that plans follow."""
    first: float = math.inf
    """The first cost that failed or filled the device."""
    calm: int = 0
    """Batches near the limit that have passed since it moved."""
    num_batches: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    waste: dict[str, Any] = field(
        default_factory=lambda: {"num_ooms": 0, "num_retries": 0, "num_skipped": 0, "wasted_s": 0.0}
    )

    def move(self, cost: float, limit: float, wall: float) -> None:
        """The limits become these, because of a batch of this cost."""
        self.first = cost if math.isinf(self.first) else self.first
        if (limit, wall) != (float(self.numbers[0]), float(self.numbers[1])):
            self.numbers[0], self.numbers[1] = limit, wall
            self.curve.append((self.num_batches, limit))

    def state(self) -> dict[str, Any]:
        numbers = [None if math.isinf(n) else float(n) for n in (*self.numbers, self.first)]  # JSON knows no infinity
        plain = {"calm": self.calm, "num_batches": self.num_batches, "curve": list(map(list, self.curve))}
        return {"numbers": numbers, **plain, **self.waste}

    def restore(self, state: Mapping[str, Any]) -> None:
        *numbers, self.first = (math.inf if n is None else float(n) for n in state["numbers"])
        for place, number in enumerate(numbers):  # in place: they may be shared
            self.numbers[place] = number
        self.calm, self.num_batches = state["calm"], state["num_batches"]
        self.curve = [(at, limit) for at, limit in state["curve"]]
        self.waste = {name: state[name] for name in self.waste}


# A failure at cost c is a wall: nothing of cost c or more is tried again, and the limit falls to a share of it, because costs
# are predictions. Passes near the limit raise it again, one small step each time so many of them came in a row, and never to
# the wall; a measured peak that nearly fills the device stops the rise before an error does. Cost: a comparison a batch.
class LearningBudget(Budget):
    """A budget that no longer allows what has failed.

    A batch costs what the budget predicts for it (a memory model's answer; padded tokens otherwise). What is learned guards
    the run at once: ``allows`` asks it, and :class:`~dynagroup.oom.OomSafeBackward` and generation split beforehand what it
    speaks against. ``fits``, which plans are made by, follows with :meth:`apply`: loaders call it when an epoch begins, so that
    a plan stays the one it was while it is carried out, also across a resume, and keep its state in their own. A
    :class:`LengthAwareBatchSampler` does so on one rank; on several, call it yourself, and record the same facts on every rank.

    Args:
        budget: the budget to correct; None allows everything that has not failed.
        backoff: share of a failed cost that is allowed next.
        growth: factor by which the limit grows again.
        patience: batches near the limit that must pass before it grows.
        full: share of a device's memory from which a measured peak counts as full.

    >>> budget = LearningBudget(TokenBudget(1000))
    >>> budget.record_oom(BatchShape.of(8, longest=100))
    >>> budget.allows(BatchShape.of([7, 8, 9], longest=100)).tolist()
    [True, False, False]
    >>> budget.apply()
    >>> budget.fits(BatchShape.of([7, 8, 9], longest=100)).tolist()
    [True, False, False]
    """

    counts_every_stream: ClassVar[bool] = True

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        backoff: float = 0.9,
        growth: float = 1.01,
        patience: int = 32,
        full: float = 0.95,
    ) -> None:
        if not 0 < backoff < 1:
            raise ConfigError(f"`backoff` must lie between 0 and 1, but is {backoff!r}")
        if not growth >= 1:
            raise ConfigError(f"`growth` must be at least 1, but is {growth!r}")
        self._backoff, self._growth = backoff, growth
        self._patience, self._full = check_int("patience", patience), check_number("full", full)
        self._base = TokenBudget(UNLIMITED) if budget is None else budget
        self._named = "everything" if budget is None else None
        self._lessons = _Lessons()

    @property
    def layout(self) -> Layout:
        return self._base.layout

    @property
    def pad_to_multiple_of(self) -> int:
        return self._base.pad_to_multiple_of

    def padded_to(self, tokens: int, /) -> int:
        return self._base.padded_to(tokens)

    def pads(self, stream: str, /) -> bool:
        return self._base.pads(stream)

    def bind(self, lengths: Streams, /) -> LearningBudget:
        """What one learns the other knows."""
        bound = copy.copy(self)
        bound._base = self._base.bind(lengths)
        return bound

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """What the budget predicts for each shape: float64 (K,), never falling when a sample is added or lengthened."""
        return cost_of(self._base, shape)

    @property
    def fingerprint(self) -> str:
        base, applied = self._named or self._base.fingerprint, self._applied
        return base if applied.refuse_nothing else f"{base}, cost <= {applied.limit!r} and < {applied.wall!r}"

    @property
    def limits(self) -> Limits:
        """The costs that are allowed by what has been learned so far."""
        return Limits(*map(float, self._lessons.numbers[:2]))

    @property
    def _applied(self) -> Limits:
        return Limits(*map(float, self._lessons.numbers[2:]))

    @property
    def has_learned(self) -> bool:
        """Whether anything speaks against any batch yet."""
        return not self.limits.refuse_nothing

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return fits_of(self._base, shape) & self._within(self._applied, shape)

    def allows(self, shape: BatchShape, /) -> BoolArray:
        """Which shapes nothing learned so far speaks against, whatever the budget says: bool (K,)."""
        return self._within(self.limits, shape)

    def _within(self, limits: Limits, shape: BatchShape) -> BoolArray:
        if limits.refuse_nothing:
            return np.ones(len(shape), np.bool_)
        cost = self.cost(shape)
        return (cost <= limits.limit) & (cost < limits.wall)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        most, applied = largest_of(self._base, longest), self._applied
        if most is None or applied.refuse_nothing:
            return most
        return largest_within(lambda n: self._within(applied, BatchShape.of(n, longest)), len(longest), most)

    def apply(self, world: World | None = None) -> None:
        """Plan by what has been learned so far. For between epochs.

        Args:
            world: ranks that plan together: the lowest limits of all of them count. Collective.
        """
        numbers = self._lessons.numbers
        if world is not None and world.size > 1:
            lowest = world.all_max([-int(min(float(number) * COST_UNIT, NO_COST)) for number in numbers[:2]])
            numbers[0], numbers[1] = (math.inf if n == -NO_COST else -n / COST_UNIT for n in lowest)
        numbers[2], numbers[3] = numbers[0], numbers[1]

    def record_oom(self, shape: BatchShape, *, wasted_s: float = 0.0, num_retries: int = 2) -> None:
        """A batch of this shape (one row) ran out of memory and was run again in so many parts."""
        self.record_failed_cost(float(self.cost(shape)[0]))
        self.record_waste(num_ooms=1, wasted_s=wasted_s, num_retries=num_retries)

    def record_failed_cost(self, cost: float) -> None:
        """The same, for a cost that ranks have agreed on."""
        known = self.limits
        self._lessons.move(cost, min(known.limit, self._backoff * cost), min(known.wall, cost))
        self._lessons.calm = 0

    def record_waste(self, **more: float) -> None:
        """Count what recovery cost: ``num_ooms``, ``num_retries``, ``num_skipped``, ``wasted_s``."""
        for name, value in more.items():
            self._lessons.waste[name] += value

    def record_pass(self, shape: BatchShape, *, peak_bytes: int | None = None, device_bytes: int | None = None) -> None:
        """A batch of this shape (one row) passed, with this measured peak of the device's memory, if known."""
        share = 0.0 if peak_bytes is None or not device_bytes else peak_bytes / device_bytes
        lessons, known = self._lessons, self.limits
        lessons.num_batches += 1
        if share <= self._full and math.isinf(known.limit):
            return
        cost = float(self.cost(shape)[0])
        if share > self._full:
            lessons.calm = 0
            lessons.move(cost, min(cost, known.limit), known.wall)
        elif cost >= self._backoff * known.limit:
            lessons.calm = (lessons.calm + 1) % self._patience
            grown = self._growth * known.limit
            if not lessons.calm and grown < known.wall and share * self._growth <= self._full:
                lessons.move(known.limit, grown, known.wall)

    @property
    def report(self) -> OomReport:
        """OOMs, retries, wasted seconds and the headroom over time."""
        lessons = self._lessons
        return OomReport(**lessons.waste, curve=tuple((at, limit / lessons.first) for at, limit in lessons.curve))

    def share_memory(self) -> LearningBudget:
        """Keep what is learned in shared memory: worker processes started from now on follow it at once, which otherwise keep
        what was known when they started."""
        import torch

        if isinstance(self._lessons.numbers, list):
            shared: Any = torch.tensor(self._lessons.numbers, dtype=torch.float64).share_memory_()
            self._lessons.numbers = shared
        return self

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, for a checkpoint."""
        return sealed("LearningBudget", self._identity, self._lessons.state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what a run with the same budget had learned.

        Raises:
            StateError: the state is damaged, of another version, or of another budget: its costs have another meaning. Then
                nothing has changed.
        """
        self._lessons.restore(opened(state, "LearningBudget", self._identity)[0])

    @property
    def _identity(self) -> dict[str, Any]:
        return {"budget": self._named or self._base.fingerprint}

    @classmethod
    def within(cls, budget: Budget) -> LearningBudget | None:
        """The part of a budget that learns, if one does."""
        parts = budget.parts if isinstance(budget, AllOf) else (budget,)
        return next((part for part in parts if isinstance(part, cls)), None)

    @classmethod
    def saved(cls, budget: Budget) -> dict[str, Any] | None:
        """What the part of a budget that learns keeps in a loader's checkpoint."""
        part = cls.within(budget)
        return None if part is None else part.state_dict()

    @classmethod
    @contextmanager
    def of_state(cls, budget: Budget, state: Any) -> Iterator[None]:
        """Inside, the budget knows what a loader's state had learned, because that changes fingerprints; if the state is refused
        there, it knows what it knew before."""
        part, before = cls.within(budget), cls.saved(budget)
        learned = state.get("learned") if isinstance(state, Mapping) else None
        try:
            if part is not None and learned is not None:
                part.load_state_dict(learned)
            yield
        except BaseException:
            if part is not None and before is not None:
                part.load_state_dict(before)
            raise
