"""What running out of memory teaches: a correction to a budget, kept with the run's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import UNLIMITED, AllOf, BoolArray, Budget, cost_of, fits_of, largest_of
from dynagroup.budget.limits import LIMITS, CostLimits, Limits
from dynagroup.budget.tokens import TokenBudget
from dynagroup.distributed import World
from dynagroup.errors import StateError
from dynagroup.memory.run import Layout
from dynagroup.shapes import BatchShape, IntArray, Streams
from dynagroup.validation import a_mapping, a_number, a_text, an_int, either, nothing

__all__ = ["LearningBudget", "OomReport"]

_VERSION = 1
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
        self.budget = budget
        self._limits = CostLimits(backoff=backoff, growth=growth, patience=patience, full=full)
        self._waste = _Waste()

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

    def padded_to(self, tokens: int, /) -> int:
        return tokens if self.budget is None else self.budget.padded_to(tokens)

    @property
    def fingerprint(self) -> str:
        base = "everything" if self.budget is None else self.budget.fingerprint
        applied = self._limits.applied
        return base if applied.refuse_nothing else f"{base}, cost <= {applied.limit!r} and < {applied.wall!r}"

    @property
    def has_learned(self) -> bool:
        """Whether anything speaks against any batch yet."""
        return not self._limits.known.refuse_nothing

    @property
    def limits(self) -> Limits:
        """The costs that are allowed by what has been learned so far."""
        return self._limits.known

    def fits(self, shape: BatchShape, /) -> BoolArray:
        ok = np.ones(len(shape), dtype=np.bool_) if self.budget is None else fits_of(self.budget, shape)
        return ok & self._within(self._limits.applied, shape)

    def allows(self, shape: BatchShape, /) -> BoolArray:
        """Which shapes nothing learned so far speaks against, whatever the budget itself says: bool (K,)."""
        return self._within(self._limits.known, shape)

    def apply(self, world: World | None = None) -> None:
        """Plan by what has been learned so far. For between epochs.

        Args:
            world: ranks that plan together: the lowest limits of all of them count. Collective.
        """
        self._limits.apply(world)

    def _within(self, limits: Limits, shape: BatchShape) -> BoolArray:
        return np.ones(len(shape), np.bool_) if limits.refuse_nothing else limits.allow(self.cost(shape))

    def pads(self, stream: str, /) -> bool:
        return self.budget is None or self.budget.pads(stream)

    def bind(self, lengths: Streams, /) -> LearningBudget:
        return self._around(None if self.budget is None else self.budget.bind(lengths))

    def largest(self, longest: IntArray, /) -> IntArray | None:
        most = None if self.budget is None else largest_of(self.budget, longest)
        applied = self._limits.applied
        if most is None or applied.refuse_nothing:
            return most
        return _bisect(lambda count: self._within(applied, BatchShape.of(count, longest)), most)

    def cost(self, shape: BatchShape, /) -> np.ndarray:
        """What the budget predicts for each shape: float64 (K,), never falling when a sample is added or lengthened."""
        return _EVERYTHING.cost(shape) if self.budget is None else cost_of(self.budget, shape)

    def record_oom(self, shape: BatchShape, *, wasted_s: float = 0.0, num_retries: int = 2) -> None:
        """A batch of this shape (one row) ran out of memory and was run again in so many parts."""
        self.record_failed_cost(float(self.cost(shape)[0]))
        self.record_waste(num_ooms=1, wasted_s=wasted_s, num_retries=num_retries)

    def record_failed_cost(self, cost: float) -> None:
        """The same, for a cost that ranks have agreed on."""
        self._limits.failed(cost)

    def record_waste(
        self, *, num_ooms: int = 0, wasted_s: float = 0.0, num_retries: int = 0, num_skipped: int = 0
    ) -> None:
        """Count what recovery cost."""
        waste = self._waste
        waste.num_ooms += num_ooms
        waste.wasted_s += wasted_s
        waste.num_retries += num_retries
        waste.num_skipped += num_skipped

    def record_pass(self, shape: BatchShape, *, peak_bytes: int | None = None, device_bytes: int | None = None) -> None:
        """A batch of this shape (one row) passed, with this measured peak of the device's memory, if known."""
        share = None if peak_bytes is None or not device_bytes else peak_bytes / device_bytes
        self._limits.passed(lambda: float(self.cost(shape)[0]), share)

    @property
    def report(self) -> OomReport:
        """OOMs, retries, wasted seconds and the headroom over time."""
        return OomReport(**asdict(self._waste), curve=self._limits.curve)

    def share_memory(self) -> LearningBudget:
        """Keep what is learned in shared memory, so that worker processes started from now on follow it at once."""
        self._limits.share_memory()
        return self

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, for a checkpoint."""
        own = None if self.budget is None else self.budget.fingerprint
        return {"version": _VERSION, "budget": own, **self._limits.state(), **asdict(self._waste)}

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
        self._limits.restore(state)
        for field in fields(self._waste):
            setattr(self._waste, field.name, state[field.name])

    def _around(self, budget: Budget | None) -> LearningBudget:
        """Another base, the same lesson: what one learns the other knows."""
        other = LearningBudget(budget)
        other._limits, other._waste = self._limits, self._waste
        return other


@dataclass
class _Waste:
    """What recovery has cost, as :class:`OomReport` says it."""

    num_ooms: int = 0
    num_retries: int = 0
    num_skipped: int = 0
    wasted_s: float = 0.0


_SCHEMA = {
    "version": an_int(),
    "budget": either(nothing(), a_text()),
    **LIMITS,
    "wasted_s": a_number(0.0),
    **{name: an_int() for name in ("num_ooms", "num_retries", "num_skipped")},
}


def _bisect(fits: Any, most: IntArray) -> IntArray:
    """The largest count up to ``most`` that fits, 0 where none does; ``fits`` is monotone."""
    low, high = np.zeros_like(most), np.array(most)
    while (low < high).any():
        middle = (low + high + 1) // 2
        ok = fits(middle) & (middle > low)
        low, high = np.where(ok, middle, low), np.where(ok | (middle <= low), high, middle - 1)
    return low
