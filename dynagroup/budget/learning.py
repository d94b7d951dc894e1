"""A budget that learns from out-of-memory errors; what it learned is saved with the run's state."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget, Wrapper, fits_of, largest_of
from dynagroup.budget.tokens import TokenBudget, as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within
from dynagroup.state import opened, sealed

COST_UNIT = 2**20  # ranks exchange costs as integers, in units of 1 / COST_UNIT
NO_COST = 2**62
BACKOFF = 0.9  # after a failure, the limit is this share of the failed cost
GROWTH = (
    1.01  # factor that raises the limit after PATIENCE batches near the limit have passed in a row
)
PATIENCE = 32
FULL = 0.95  # a measured peak above this share of the device's memory counts as full


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

    numbers: MutableSequence[float] = field(default_factory=lambda: [math.inf] * 3)
    """Largest allowed cost; smallest cost that failed; limit in current plans. inf: none."""
    calm: int = 0  # batches near the limit that have passed since the limit last changed
    report: OomReport = field(default_factory=OomReport)


# A batch whose cost is at least that of one that failed is never tried again. Costs are only predictions, so a failure
# lowers the limit further, to a share of the failed cost. If many batches near the limit pass, it rises in small steps.
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

    counts_every_stream: ClassVar[bool] = True
    learner: Any = property(lambda self: self)

    def __init__(self, budget: Budget | int | None = None) -> None:
        self.base = TokenBudget(UNLIMITED) if budget is None else as_budget(budget)
        if self.base.ladder is not None:
            way_out = "ShapeLadder(lengths, LearningBudget(budget))"
            raise ConfigError(f"a LearningBudget cannot contain a ShapeLadder; write {way_out}")
        self._lessons = _Lessons()
        self._held: float | None = None

    def bind(self, lengths: Streams, /) -> "LearningBudget":
        """Returns a budget for these lengths; the old and the new budget share what they learn."""
        return self.around(self.base.bind(lengths))

    def with_memory(self, known: Callable[[], Any], /) -> "LearningBudget":
        return self.around(self.base.with_memory(known))

    @property
    def limits(self) -> tuple[float, float]:
        """The largest allowed cost, and the smallest cost that has failed; inf: none was learned."""
        return float(self._lessons.numbers[0]), float(self._lessons.numbers[1])

    @property
    def _followed(self) -> float:
        return float(self._lessons.numbers[2] if self._held is None else self._held)

    def held(self, limit: float | None, /) -> "LearningBudget":
        other = copy.copy(self)
        other._held = math.inf if limit is None else limit
        return other

    @property
    def applied(self) -> float | None:
        return None if math.isinf(limit := float(self._lessons.numbers[2])) else limit

    @property
    def has_learned(self) -> bool:
        """Whether a limit was learned."""
        return not math.isinf(self.limits[0])

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return fits_of(self.base, shape) & self._within(self._followed, shape)

    def allows(self, shape: BatchShape, /) -> BoolArray:
        """Returns whether the learned limit allows each of K shapes, whatever ``budget`` decides: bool (K,)."""
        return self._within(self.limits[0], shape)

    def _within(self, limit: float, shape: BatchShape) -> BoolArray:
        return np.ones(len(shape), np.bool_) if math.isinf(limit) else self.cost(shape) <= limit

    def largest(self, longest: IntArray, /) -> IntArray | None:
        most, followed = largest_of(self.base, longest), self._followed
        if most is None or math.isinf(followed):
            return most
        return largest_within(
            lambda n: self._within(followed, BatchShape.of(n, longest)), len(longest), most
        )

    def apply(self, world: World | None = None) -> None:
        """Makes ``fits`` use what was learned, the lowest limits of all ranks; call it between epochs, on all ranks."""
        numbers = self._lessons.numbers
        if world is not None and world.size > 1:
            lowest = world.all_max([-int(min(limit * COST_UNIT, NO_COST)) for limit in self.limits])
            numbers[0], numbers[1] = (math.inf if n == -NO_COST else -n / COST_UNIT for n in lowest)
        numbers[2] = numbers[0]

    def record_oom(self, shape: BatchShape, *, wasted_s: float = 0.0, num_retries: int = 2) -> None:
        """Records that a batch of this shape (K = 1) ran out of memory and was run again in ``num_retries`` parts."""
        self.record_failed_cost(float(self.cost(shape)[0]))
        self.record_waste(num_ooms=1, wasted_s=wasted_s, num_retries=num_retries)

    def record_failed_cost(self, cost: float) -> None:
        """Records the cost of a batch that ran out of memory; all ranks must pass the same cost."""
        limit, wall = self.limits
        self._move(min(limit, BACKOFF * cost), min(wall, cost))

    def record_waste(self, **more: float) -> None:
        """Adds to the report: ``num_ooms``, ``num_retries``, ``wasted_s``."""
        for name, value in more.items():
            setattr(self._lessons.report, name, getattr(self._lessons.report, name) + value)

    def record_pass(
        self, shape: BatchShape, *, peak_bytes: int | None = None, device_bytes: int | None = None
    ) -> None:
        """Records that a batch of this shape (K = 1) succeeded; ``peak_bytes``: its measured peak, if known."""
        share = 0.0 if peak_bytes is None or not device_bytes else peak_bytes / device_bytes
        limit, wall = self.limits
        if share <= FULL and math.isinf(limit):
            return
        cost = float(self.cost(shape)[0])
        if share > FULL:
            self._move(min(cost, limit), wall)
        elif cost >= BACKOFF * limit:
            self._lessons.calm += 1
            if self._lessons.calm == PATIENCE:
                self._move(
                    GROWTH * limit if GROWTH * limit < wall and share * GROWTH <= FULL else limit,
                    wall,
                )

    def _move(self, limit: float, wall: float) -> None:
        self._lessons.numbers[0], self._lessons.numbers[1] = limit, wall
        self._lessons.calm = 0

    @property
    def report(self) -> OomReport:
        return self._lessons.report

    def share_memory(self) -> "LearningBudget":
        """Puts what is learned into shared memory, so that worker processes started from now on use it at once."""
        import torch

        if isinstance(self._lessons.numbers, list):
            shared: Any = torch.tensor(self._lessons.numbers, dtype=torch.float64).share_memory_()
            self._lessons.numbers = shared
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned, to save in a checkpoint."""
        numbers = [
            None if math.isinf(n) else float(n) for n in self._lessons.numbers
        ]  # JSON has no infinity
        fields = {
            "numbers": numbers,
            "calm": self._lessons.calm,
            "report": asdict(self._lessons.report),
        }
        return sealed("LearningBudget", {"budget": self.base.fingerprint}, fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what a run with the same budget learned. Raises StateError, and changes nothing, for another budget."""
        [found], lessons = (
            opened(state, "LearningBudget", {"budget": self.base.fingerprint}),
            self._lessons,
        )
        for place, number in enumerate(
            found["numbers"]
        ):  # changed in place: the numbers may be in shared memory
            lessons.numbers[place] = math.inf if number is None else number
        lessons.calm, lessons.report = found["calm"], OomReport(**found["report"])

    @staticmethod
    @contextmanager
    def taken_up(budget: Budget, state: Mapping[str, Any]) -> Iterator[None]:
        """Context manager: a budget loads what :meth:`saved` put into a loader's state, and undoes that on an error."""
        learner, learned = budget.learner, state["learned"]
        before = None if learner is None else learner.state_dict()
        if learner is None and learned is not None and learned["numbers"][2] is not None:
            raise StateError(
                "the state was saved with limits of a LearningBudget; give this loader a LearningBudget"
            )
        try:
            if learner is not None and learned is not None:
                learner.load_state_dict(learned)
            yield
        except BaseException:
            if learner is not None:
                learner.load_state_dict(before)
            raise

    @staticmethod
    def saved(budget: Budget) -> dict[str, Any] | None:
        """Returns the state of a budget's learning part, for a loader's checkpoint; None: the budget does not learn."""
        return None if budget.learner is None else budget.learner.state_dict()
