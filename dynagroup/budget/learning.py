"""A budget that learns from out-of-memory errors; what it learned is saved with the run's state."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget, Wrapper, fits_of, largest_of
from dynagroup.budget.tokens import TokenBudget, as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within
from dynagroup.state import opened, sealed

COST_UNIT = 2**20  # ranks exchange costs as integers, in units of 1 / COST_UNIT
NO_COST = 2**62
BACKOFF = 0.9  # costs are predictions: after a failure, the limit is this share of the failed cost


@dataclass(slots=True)
class OomReport:
    """Counts of a run's out-of-memory errors, and the time they cost."""

    num_ooms: int = 0  # attempts that ran out of memory
    num_retries: int = 0  # parts of failed batches that were run again
    wasted_s: float = 0.0  # seconds spent in attempts that ran out of memory

    def __str__(self) -> str:
        return f"{self.num_ooms} out-of-memory errors, {self.num_retries} parts run again, {self.wasted_s:.1f} s wasted"


@dataclass
class _Lessons:
    """What was learned, shared by a budget and its copies for certain lengths."""

    limits: MutableSequence[float] = field(default_factory=lambda: [math.inf, math.inf])
    """Largest allowed cost: for steps from now on, and for plans since ``apply``; inf: any."""
    report: OomReport = field(default_factory=OomReport)


class LearningBudget(Wrapper):
    """Wraps a budget and refuses batches as large as one that ran out of memory. Without ``budget`` all others fit.

    A batch's cost is what ``budget`` predicts. :meth:`allows` uses each failure at once: generation and
    :class:`~dynagroup.oom.OomSafeBackward` ask it, and split a batch that would fail. :meth:`fits`, which plans use,
    changes only when :meth:`apply` is called. Loaders call ``apply`` when an epoch begins and save what was learned; so does a
    :class:`LengthAwareBatchSampler` on one rank. With several ranks call ``apply`` yourself, with the same records.

    >>> budget = LearningBudget(TokenBudget(1000))
    >>> budget.record_oom(BatchShape.of(8, longest=100))
    >>> budget.allows(BatchShape.of([7, 8, 9], longest=100)).tolist()
    [True, False, False]
    >>> budget.apply()
    >>> budget.fits(BatchShape.of([7, 8, 9], longest=100)).tolist()
    [True, False, False]
    """

    def __init__(self, budget: Budget | int | None = None) -> None:
        self.base = TokenBudget(UNLIMITED) if budget is None else as_budget(budget)
        if self.base.ladder is not None:
            raise ConfigError(
                "a LearningBudget cannot contain a ShapeLadder; write ShapeLadder(lengths, LearningBudget(budget))"
            )
        self._lessons = _Lessons()
        self._held_limit: float | None = None

    def bind(self, lengths: Streams, /) -> "LearningBudget":
        """Returns a budget for these lengths; the old and the new budget share what they learn."""
        return self.around(self.base.bind(lengths))

    def with_memory(self, known: Callable[[], Any], /) -> "LearningBudget":
        return self.around(self.base.with_memory(known))

    @property
    def learner(self) -> "LearningBudget":
        return self

    @property
    def limit(self) -> float:
        """The largest allowed cost; inf: none was learned."""
        return float(self._lessons.limits[0])

    @property
    def has_learned(self) -> bool:
        """Whether a limit was learned."""
        return math.isfinite(self.limit)

    @property
    def applied(self) -> float | None:
        limit = float(self._lessons.limits[1])
        return limit if math.isfinite(limit) else None

    def held(self, limit: float | None, /) -> "LearningBudget":
        other = copy.copy(self)
        other._held_limit = math.inf if limit is None else limit
        return other

    @property
    def _limit_of_plans(self) -> float:
        return float(self._lessons.limits[1]) if self._held_limit is None else self._held_limit

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return fits_of(self.base, shape) & self._within(self._limit_of_plans, shape)

    def allows(self, shape: BatchShape, /) -> BoolArray:
        """Returns whether the learned limit allows each of K shapes, whatever ``budget`` decides: bool (K,)."""
        return self._within(self.limit, shape)

    def _within(self, limit: float, shape: BatchShape) -> BoolArray:
        return np.ones(len(shape), np.bool_) if math.isinf(limit) else self.cost(shape) <= limit

    def largest(self, longest: IntArray, /) -> IntArray | None:
        limit = self._limit_of_plans
        most = largest_of(self.base, longest)
        if most is None or math.isinf(limit):
            return most
        return largest_within(
            lambda count: self._within(limit, BatchShape.of(count, longest)), len(longest), most
        )

    def apply(self, world: World | None = None) -> None:
        """Makes ``fits`` use what was learned, the lowest limit of all ranks; call it between epochs, on all ranks."""
        limits = self._lessons.limits
        if world is not None and world.size > 1:
            [lowest] = world.all_max([-int(min(self.limit * COST_UNIT, NO_COST))])
            limits[0] = math.inf if lowest == -NO_COST else -lowest / COST_UNIT
        limits[1] = limits[0]

    def record_oom(self, shape: BatchShape, *, wasted_s: float = 0.0, num_retries: int = 2) -> None:
        """Records that a batch of this shape (K = 1) ran out of memory and was run again in ``num_retries`` parts."""
        self.record_failed_cost(float(self.cost(shape)[0]))
        self.record_waste(wasted_s=wasted_s, num_retries=num_retries)

    def record_failed_cost(self, cost: float) -> None:
        """Records the cost of a batch that ran out of memory; all ranks must pass the same cost."""
        self._lessons.limits[0] = min(self.limit, BACKOFF * cost)

    def record_waste(self, *, wasted_s: float, num_retries: int = 2) -> None:
        """Counts an attempt that ran out of memory after ``wasted_s`` and is run again in ``num_retries`` parts."""
        self.report.num_ooms += 1
        self.report.num_retries += num_retries
        self.report.wasted_s += wasted_s

    @property
    def report(self) -> OomReport:
        return self._lessons.report

    def share_memory(self) -> "LearningBudget":
        """Puts what is learned into shared memory, so that worker processes started from now on use it at once."""
        import torch

        if isinstance(self._lessons.limits, list):
            limits: Any = torch.tensor(self._lessons.limits, dtype=torch.float64)
            self._lessons.limits = limits.share_memory_()
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned, to save in a checkpoint."""
        limits = [float(limit) for limit in self._lessons.limits]
        fields = {
            "limits": [
                limit if math.isfinite(limit) else None for limit in limits
            ],  # as JSON has no infinity
            "report": asdict(self.report),
        }
        return sealed("LearningBudget", {"budget": self.base.fingerprint}, fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what a run with the same budget learned. Raises StateError, and changes nothing, for another budget."""
        [saved] = opened(state, "LearningBudget", {"budget": self.base.fingerprint})
        for place, limit in enumerate(
            saved["limits"]
        ):  # changed in place: they may be in shared memory
            self._lessons.limits[place] = math.inf if limit is None else limit
        self._lessons.report = OomReport(**saved["report"])

    @staticmethod
    def saved(budget: Budget) -> dict[str, Any] | None:
        """Returns the state of a budget's learning part, for a loader's checkpoint; None: the budget does not learn."""
        return None if budget.learner is None else budget.learner.state_dict()

    @staticmethod
    @contextmanager
    def taken_up(budget: Budget, state: Mapping[str, Any]) -> Iterator[None]:
        """Context manager: a budget loads what :meth:`saved` put into a loader's state, and undoes that on an error."""
        learner = budget.learner
        learned = state["learned"]
        if learner is None:
            if learned is not None and learned["limits"][1] is not None:
                raise StateError(
                    "the state was saved with limits of a LearningBudget; give this loader a LearningBudget"
                )
            yield
            return
        before = learner.state_dict()
        try:
            if learned is not None:
                learner.load_state_dict(learned)
            yield
        except BaseException:
            learner.load_state_dict(before)
            raise
