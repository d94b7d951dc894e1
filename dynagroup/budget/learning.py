"""What running out of memory teaches: a correction to a budget, kept with the run's state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import UNLIMITED, AllOf, BoolArray, Budget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.checks import a_list, a_mapping, a_number, a_text, an_int, either, nothing
from dynagroup.errors import ConfigError, StateError
from dynagroup.memory.run import Layout
from dynagroup.shapes import BatchShape, IntArray, Streams
from dynagroup.world import World

__all__ = ["LearningBudget", "OomReport"]

_VERSION = 1
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
        self.budget = budget
        self._backoff, self._growth, self._patience, self._full = backoff, growth, patience, full
        self._learned = _Learned()

    counts_every_stream: ClassVar[bool] = True

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

    @property
    def fingerprint(self) -> str:
        base = "everything" if self.budget is None else self.budget.fingerprint
        limit, wall = self._learned.applied
        return base if math.isinf(limit) and math.isinf(wall) else f"{base}, cost <= {limit!r} and < {wall!r}"

    @property
    def has_learned(self) -> bool:
        """Whether anything speaks against any batch yet."""
        return not all(math.isinf(x) for x in self._learned.numbers)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        ok = np.ones(len(shape), dtype=np.bool_) if self.budget is None else self.budget.fits(shape)
        return ok & self._within(self._learned.applied, shape)

    def allows(self, shape: BatchShape, /) -> BoolArray:
        """Which shapes nothing learned so far speaks against, whatever the budget itself says: bool (K,)."""
        return self._within(self._learned.numbers, shape)

    def apply(self, world: World | None = None) -> None:
        """Plan by what has been learned so far. For between epochs.

        Args:
            world: ranks that plan together: the lowest limits of all of them count. Collective.
        """
        learned = self._learned
        if world is not None and world.size > 1:
            own = [int(min(number * COST_UNIT, NO_COST)) for number in learned.numbers]
            lowest = [-n for n in world.all_max([-n for n in own])]
            learned.set(*(math.inf if n == NO_COST else n / COST_UNIT for n in lowest))
        learned.apply()

    def _within(self, numbers: tuple[float, float], shape: BatchShape) -> BoolArray:
        limit, wall = numbers
        if math.isinf(limit) and math.isinf(wall):
            return np.ones(len(shape), dtype=np.bool_)
        cost = self.cost(shape)
        return (cost <= limit) & (cost < wall)

    def pads(self, stream: str, /) -> bool:
        return self.budget is None or self.budget.pads(stream)

    def bind(self, lengths: Streams, /) -> LearningBudget:
        return self._around(None if self.budget is None else self.budget.bind(lengths))

    def largest(self, longest: IntArray, /) -> IntArray | None:
        most = None if self.budget is None else self.budget.largest(longest)
        applied = self._learned.applied
        if most is None or all(math.isinf(x) for x in applied):
            return most
        return _bisect(lambda count: self._within(applied, BatchShape.of(count, longest)), most)

    def cost(self, shape: BatchShape, /) -> np.ndarray:
        """What the budget predicts for each shape: float64 (K,), never falling when a sample is added or lengthened."""
        return _EVERYTHING.cost(shape) if self.budget is None else self.budget.cost(shape)

    def record_oom(self, shape: BatchShape, *, wasted_s: float = 0.0, num_retries: int = 2) -> None:
        """A batch of this shape (one row) ran out of memory and was run again in so many parts."""
        self.record_failed_cost(float(self.cost(shape)[0]))
        self.record_waste(num_ooms=1, wasted_s=wasted_s, num_retries=num_retries)

    def record_failed_cost(self, cost: float) -> None:
        """The same, for a cost that ranks have agreed on."""
        learned = self._learned
        limit, wall = learned.numbers
        learned.set(min(limit, self._backoff * cost), min(wall, cost))
        learned.calm = 0
        learned.first = cost if math.isinf(learned.first) else learned.first
        learned.log()

    def record_waste(
        self, *, num_ooms: int = 0, wasted_s: float = 0.0, num_retries: int = 0, num_skipped: int = 0
    ) -> None:
        """Count what recovery cost."""
        learned = self._learned
        learned.num_ooms += num_ooms
        learned.wasted_s += wasted_s
        learned.num_retries += num_retries
        learned.num_skipped += num_skipped

    def record_pass(self, shape: BatchShape, *, peak_bytes: int | None = None, device_bytes: int | None = None) -> None:
        """A batch of this shape (one row) passed, with this measured peak of the device's memory, if known."""
        learned = self._learned
        learned.num_batches += 1
        share = None if peak_bytes is None or not device_bytes else peak_bytes / device_bytes
        limit, wall = learned.numbers
        if math.isinf(limit) and (share is None or share <= self._full):
            return
        cost = float(self.cost(shape)[0])
        if share is not None and share > self._full:
            learned.first = cost if math.isinf(learned.first) else learned.first
            if cost < limit:
                learned.set(cost, wall)
                learned.log()
            learned.calm = 0
            return
        if cost < self._backoff * limit:
            return
        learned.calm += 1
        if learned.calm >= self._patience:
            learned.calm = 0
            if self._growth * limit < wall and (share is None or share * self._growth <= self._full):
                learned.set(self._growth * limit, wall)
                learned.log()

    @property
    def report(self) -> OomReport:
        """OOMs, retries, wasted seconds and the headroom over time."""
        learned = self._learned
        curve = tuple((at, limit / learned.first) for at, limit in learned.curve)
        return OomReport(learned.num_ooms, learned.num_retries, learned.num_skipped, learned.wasted_s, curve)

    def share_memory(self) -> LearningBudget:
        """Keep what is learned in shared memory, so that worker processes started from now on follow it at once."""
        import torch

        if isinstance(self._learned.numbers_kept, list):
            self._learned.numbers_kept = torch.tensor(self._learned.numbers_kept, dtype=torch.float64).share_memory_()  # type: ignore[assignment]
        return self

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, for a checkpoint."""
        learned = self._learned
        kept = {f.name: getattr(learned, f.name) for f in fields(learned) if f.name != "numbers_kept"}
        kept |= {"first": _or_none(learned.first), "allowed": [_or_none(x) for x in learned.numbers]}
        kept["applied"] = [_or_none(x) for x in learned.applied]
        kept["curve"] = list(learned.curve)
        return {"version": _VERSION, "budget": None if self.budget is None else self.budget.fingerprint, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what a run with the same budget had learned.

        Raises:
            StateError: the state is damaged, of another version, or of another budget: its costs have another meaning. Then
                nothing has changed.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"this is no state of a LearningBudget: {state!r}")
        own = None if self.budget is None else self.budget.fingerprint
        if state.get("version") != _VERSION or state.get("budget", "") != own:
            raise StateError(
                f"state of version {state.get('version')} for budget {state.get('budget')!r} does not belong to version "
                f"{_VERSION} and budget {own!r}; start without it, or with the budget it was learned for"
            )
        a_mapping(_SCHEMA)(state, "learned")
        learned = self._learned
        learned.set(*(_or_inf(x) for x in state["applied"]))
        learned.apply()
        learned.set(*(_or_inf(x) for x in state["allowed"]))
        learned.first = _or_inf(state["first"])
        for name in ("calm", "num_batches", "num_ooms", "num_retries", "num_skipped", "wasted_s"):
            setattr(learned, name, state[name])
        learned.curve = [(int(at), float(limit)) for at, limit in state["curve"]]

    def _around(self, budget: Budget | None) -> LearningBudget:
        """Another base, the same lesson: what one learns the other knows."""
        other = LearningBudget(
            budget, backoff=self._backoff, growth=self._growth, patience=self._patience, full=self._full
        )
        other._learned = self._learned
        return other


@dataclass
class _Learned:
    numbers_kept: MutableSequence[float]
    calm: int
    first: float
    num_batches: int
    num_ooms: int
    num_retries: int
    num_skipped: int
    wasted_s: float
    curve: list[tuple[int, float]]

    def __init__(self) -> None:
        self.numbers_kept = [math.inf] * 4
        self.first = math.inf
        self.calm = self.num_batches = self.num_ooms = self.num_retries = self.num_skipped = 0
        self.wasted_s = 0.0
        self.curve = []

    @property
    def numbers(self) -> tuple[float, float]:
        """(largest cost allowed, lowest cost that has failed)"""
        return float(self.numbers_kept[0]), float(self.numbers_kept[1])

    @property
    def applied(self) -> tuple[float, float]:
        """The same, as plans know it."""
        return float(self.numbers_kept[2]), float(self.numbers_kept[3])

    def apply(self) -> None:
        self.numbers_kept[2], self.numbers_kept[3] = self.numbers_kept[0], self.numbers_kept[1]

    def set(self, limit: float, wall: float) -> None:
        self.numbers_kept[0], self.numbers_kept[1] = limit, wall

    def log(self) -> None:
        self.curve.append((self.num_batches, self.numbers[0]))


_COST = either(nothing(), a_number(0.0))
_SCHEMA = {
    "version": an_int(),
    "budget": either(nothing(), a_text()),
    "applied": a_list(_COST, length=2),
    "allowed": a_list(_COST, length=2),
    "first": _COST,
    "curve": a_list(a_list(a_number(0.0), length=2)),
    "wasted_s": a_number(0.0),
    **{name: an_int() for name in ("calm", "num_batches", "num_ooms", "num_retries", "num_skipped")},
}


def _or_none(value: float) -> float | None:
    return None if math.isinf(value) else value  # JSON knows no infinity


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _bisect(fits: Any, most: IntArray) -> IntArray:
    """The largest count up to ``most`` that fits, 0 where none does; ``fits`` is monotone."""
    low, high = np.zeros_like(most), np.array(most)
    while (low < high).any():
        middle = (low + high + 1) // 2
        ok = fits(middle) & (middle > low)
        low, high = np.where(ok, middle, low), np.where(ok | (middle <= low), high, middle - 1)
    return low
