"""What running out of memory teaches: a correction to a budget, kept with the run's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
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
_EVERYTHING = TokenBudget(UNLIMITED)


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

    def allow(self, cost: Any) -> Any:
        """Whether each cost is allowed."""
        return (cost <= self.limit) & (cost < self.wall)


# A failure at cost c is a wall: nothing of cost c or more is tried again, and the limit falls to a share of it, because costs
# are predictions. Passes near the limit raise it again, one small step each time so many of them came in a row, and never to
# the wall; a measured peak that nearly fills the device stops the rise before an error does. Cost: a comparison a batch.
class _Lessons:
    """What has been learned. A budget shares it with those that are bound to lengths."""

    def __init__(self, backoff: float, growth: float, patience: int, full: float) -> None:
        self._backoff, self._growth, self._patience, self._full = backoff, growth, patience, full
        self._numbers: MutableSequence[float] = [math.inf] * 4
        """Limit and wall that are known, then those that plans follow."""
        self._first = math.inf
        """The first cost that failed or filled the device."""
        self._calm = 0
        """Batches near the limit that have passed since it moved."""
        self._num_batches = 0
        self._curve: list[tuple[int, float]] = []
        self.waste: dict[str, Any] = {"num_ooms": 0, "num_retries": 0, "num_skipped": 0, "wasted_s": 0.0}

    @property
    def known(self) -> Limits:
        return Limits(float(self._numbers[0]), float(self._numbers[1]))

    @property
    def applied(self) -> Limits:
        return Limits(float(self._numbers[2]), float(self._numbers[3]))

    @property
    def report(self) -> OomReport:
        return OomReport(**self.waste, curve=tuple((at, limit / self._first) for at, limit in self._curve))

    def apply(self, world: World | None) -> None:
        if world is not None and world.size > 1:
            own = [int(min(float(number) * COST_UNIT, NO_COST)) for number in self._numbers[:2]]
            lowest = [-n for n in world.all_max([-n for n in own])]
            self._know(*(math.inf if n == NO_COST else n / COST_UNIT for n in lowest))
        self._numbers[2], self._numbers[3] = self._numbers[0], self._numbers[1]

    def _know(self, limit: float, wall: float) -> None:
        self._numbers[0], self._numbers[1] = limit, wall

    def failed(self, cost: float) -> None:
        known = self.known
        self._move(cost, min(known.limit, self._backoff * cost), min(known.wall, cost))
        self._calm = 0

    def passed(self, cost_of_batch: Callable[[], float], share: float | None) -> None:
        """A batch passed, at this measured share of the device's memory; its cost is asked for only where it counts."""
        self._num_batches += 1
        known, full = self.known, share is not None and share > self._full
        if math.isinf(known.limit) and not full:
            return
        cost = cost_of_batch()
        if full:
            self._calm = 0
            self._move(cost, min(cost, known.limit), known.wall)
        elif cost >= self._backoff * known.limit:
            self._calm += 1
            if self._calm >= self._patience:
                self._calm = 0
                self._grow(known, share)

    def _grow(self, known: Limits, share: float | None) -> None:
        if self._growth * known.limit < known.wall and (share is None or share * self._growth <= self._full):
            self._move(known.limit, self._growth * known.limit, known.wall)

    def _move(self, cost: float, limit: float, wall: float) -> None:
        self._first = cost if math.isinf(self._first) else self._first
        if (limit, wall) != (self.known.limit, self.known.wall):
            self._know(limit, wall)
            self._curve.append((self._num_batches, limit))

    def share_memory(self) -> None:
        import torch

        if isinstance(self._numbers, list):
            self._numbers = torch.tensor(self._numbers, dtype=torch.float64).share_memory_()  # type: ignore[assignment]

    def state(self) -> dict[str, Any]:
        numbers = [None if math.isinf(n) else float(n) for n in (*self._numbers, self._first)]  # JSON knows no infinity
        curve = [[at, limit] for at, limit in self._curve]
        return {"numbers": numbers, "calm": self._calm, "num_batches": self._num_batches, "curve": curve, **self.waste}

    def restore(self, state: Mapping[str, Any]) -> None:
        *numbers, self._first = (math.inf if n is None else float(n) for n in state["numbers"])
        for place, number in enumerate(numbers):  # in place: they may be shared
            self._numbers[place] = number
        self._calm, self._num_batches = state["calm"], state["num_batches"]
        self._curve = [(at, limit) for at, limit in state["curve"]]
        self.waste = {name: state[name] for name in self.waste}


class LearningBudget(Budget):
    """A budget that no longer allows what has failed.

    A batch costs what the budget predicts for it (a memory model's answer; padded tokens otherwise). After an
    out-of-memory error at cost c, no batch of cost c or more fits any more, and the limit is ``backoff * c``. After
    ``patience`` batches that came close to the limit and passed, the limit grows by ``growth``, never up to c again.
    A measured peak above ``full`` of the device stops the growth there, before an error does.

    What is learned guards the run at once: ``allows`` asks it, and :class:`~dynagroup.oom.OomSafeBackward` and generation
    split beforehand what it speaks against. ``fits``, which plans are made by, follows with :meth:`apply`: loaders call it
    when an epoch begins, so that a plan stays the one it was while it is carried out, also across a resume, and keep
    its state in their own. A :class:`LengthAwareBatchSampler` does so on one rank; on several, call it yourself.

    All of it is four numbers. ``share_memory()`` lets worker processes see them at once; without it, a worker
    keeps what was known when it started. On several ranks record the same facts on every rank
    (:class:`~dynagroup.oom.OomSafeBackward` does), or plans differ.

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
        check_int("patience", patience)
        check_number("full", full)
        self.budget = budget
        self._lessons = _Lessons(backoff, growth, patience, full)

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
        there, it knows what it knew before.

        Raises:
            StateError: what had been learned is damaged, or of another budget.
        """
        part = cls.within(budget)
        before = cls.saved(budget)
        learned = state.get("learned") if isinstance(state, Mapping) else None
        try:
            if part is not None and learned is not None:
                part.load_state_dict(learned)
            yield
        except BaseException:
            if part is not None and before is not None:
                part.load_state_dict(before)
            raise

    @property
    def layout(self) -> Layout:
        return "padded" if self.budget is None else self.budget.layout

    @property
    def pad_to_multiple_of(self) -> int:
        return 1 if self.budget is None else self.budget.pad_to_multiple_of

    def padded_to(self, tokens: int, /) -> int:
        return tokens if self.budget is None else self.budget.padded_to(tokens)

    @property
    def fingerprint(self) -> str:
        base = "everything" if self.budget is None else self.budget.fingerprint
        applied = self._lessons.applied
        return base if applied.refuse_nothing else f"{base}, cost <= {applied.limit!r} and < {applied.wall!r}"

    @property
    def has_learned(self) -> bool:
        """Whether anything speaks against any batch yet."""
        return not self._lessons.known.refuse_nothing

    @property
    def limits(self) -> Limits:
        """The costs that are allowed by what has been learned so far."""
        return self._lessons.known

    def fits(self, shape: BatchShape, /) -> BoolArray:
        ok = np.ones(len(shape), dtype=np.bool_) if self.budget is None else fits_of(self.budget, shape)
        return ok & self._within(self._lessons.applied, shape)

    def allows(self, shape: BatchShape, /) -> BoolArray:
        """Which shapes nothing learned so far speaks against, whatever the budget itself says: bool (K,)."""
        return self._within(self._lessons.known, shape)

    def apply(self, world: World | None = None) -> None:
        """Plan by what has been learned so far. For between epochs.

        Args:
            world: ranks that plan together: the lowest limits of all of them count. Collective.
        """
        self._lessons.apply(world)

    def _within(self, limits: Limits, shape: BatchShape) -> BoolArray:
        return np.ones(len(shape), np.bool_) if limits.refuse_nothing else limits.allow(self.cost(shape))

    def pads(self, stream: str, /) -> bool:
        return self.budget is None or self.budget.pads(stream)

    def bind(self, lengths: Streams, /) -> LearningBudget:
        """What one learns the other knows."""
        other = LearningBudget(None if self.budget is None else self.budget.bind(lengths))
        other._lessons = self._lessons
        return other

    def largest(self, longest: IntArray, /) -> IntArray | None:
        most = None if self.budget is None else largest_of(self.budget, longest)
        applied = self._lessons.applied
        if most is None or applied.refuse_nothing:
            return most
        return np.minimum(
            most, largest_within(lambda n: self._within(applied, BatchShape.of(n, longest)), len(longest), most)
        )

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """What the budget predicts for each shape: float64 (K,), never falling when a sample is added or lengthened."""
        return _EVERYTHING.cost(shape) if self.budget is None else cost_of(self.budget, shape)

    def record_oom(self, shape: BatchShape, *, wasted_s: float = 0.0, num_retries: int = 2) -> None:
        """A batch of this shape (one row) ran out of memory and was run again in so many parts."""
        self.record_failed_cost(float(self.cost(shape)[0]))
        self.record_waste(num_ooms=1, wasted_s=wasted_s, num_retries=num_retries)

    def record_failed_cost(self, cost: float) -> None:
        """The same, for a cost that ranks have agreed on."""
        self._lessons.failed(cost)

    def record_waste(self, **more: float) -> None:
        """Count what recovery cost: ``num_ooms``, ``num_retries``, ``num_skipped``, ``wasted_s``."""
        for name, value in more.items():
            self._lessons.waste[name] += value

    def record_pass(self, shape: BatchShape, *, peak_bytes: int | None = None, device_bytes: int | None = None) -> None:
        """A batch of this shape (one row) passed, with this measured peak of the device's memory, if known."""
        share = None if peak_bytes is None or not device_bytes else peak_bytes / device_bytes
        self._lessons.passed(lambda: float(self.cost(shape)[0]), share)

    @property
    def report(self) -> OomReport:
        """OOMs, retries, wasted seconds and the headroom over time."""
        return self._lessons.report

    def share_memory(self) -> LearningBudget:
        """Keep what is learned in shared memory, so that worker processes started from now on follow it at once."""
        self._lessons.share_memory()
        return self

    @property
    def _identity(self) -> dict[str, Any]:
        return {"budget": None if self.budget is None else self.budget.fingerprint}

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
