"""What a run learns from running out of memory: a correction to a budget, saved with the run's state."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget, Wrapper, fits_of, largest_of
from dynagroup.budget.tokens import TokenBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within
from dynagroup.state import opened, sealed

COST_UNIT = 2**20  # ranks exchange costs as integers, in units of 1 / COST_UNIT
NO_COST = 2**62
BACKOFF = 0.9  # share of a failed cost that is allowed afterwards
GROWTH = 1.01  # factor by which the limit grows after so many batches near it have passed in a row:
PATIENCE = 32
FULL = 0.95  # a measured peak above this share of a device's memory counts as full


@dataclass(slots=True)
class OomReport:
    """What out-of-memory errors have cost a run so far."""

    num_ooms: int = 0  # attempts that failed
    num_retries: int = 0  # parts of failed batches that were run again
    wasted_s: float = 0.0  # seconds spent in attempts that failed

    def __str__(self) -> str:
        return f"{self.num_ooms} out-of-memory errors, {self.num_retries} parts run again, {self.wasted_s:.1f} s wasted"


@dataclass
class _Lessons:
    """What has been learned. A budget shares it with the copies of it that are bound to lengths."""

    numbers: MutableSequence[float] = field(default_factory=lambda: [math.inf] * 3)
    """[highest allowed cost, lowest failed cost (higher than that), limit that plans follow]; inf: none."""
    calm: int = 0  # batches near the limit that have passed since the limit changed
    report: OomReport = field(default_factory=OomReport)


# A failure at cost c sets a wall: no batch of cost c or more is tried again. Costs are predictions, so the limit falls
# to a share of c. Batches that pass near the limit raise it again in small steps, but never up to the wall.
class LearningBudget(Wrapper):
    """A budget that refuses batches as large as those that ran out of memory. Without ``budget``, others fit.

    The cost of a batch is what ``budget`` predicts for it. ``allows`` uses each failure at once:
    :class:`~dynagroup.oom.OomSafeBackward` and generation ask it and split a batch before it fails. ``fits``, which
    plans use, changes only after :meth:`apply`: loaders call it when an epoch begins, and save this state in theirs. So
    does a :class:`LengthAwareBatchSampler` on one rank; on several, call it yourself, with equal records on all.

    >>> budget = LearningBudget(TokenBudget(1000))
    >>> budget.record_oom(BatchShape.of(8, longest=100))
    >>> budget.allows(BatchShape.of([7, 8, 9], longest=100)).tolist()
    [True, False, False]
    >>> budget.apply()
    >>> budget.fits(BatchShape.of([7, 8, 9], longest=100)).tolist()
    [True, False, False]
    """

    counts_every_stream: ClassVar[bool] = True

    def __init__(self, budget: Budget | None = None) -> None:
        self.base = TokenBudget(UNLIMITED) if budget is None else budget
        if self.base.ladder is not None:
            way_out = "ShapeLadder(lengths, LearningBudget(budget))"
            raise ConfigError(f"a ShapeLadder cannot be inside a LearningBudget; write {way_out}")
        self._lessons = _Lessons()
        self._held: float | None = None

    @property
    def learner(self) -> "LearningBudget":
        return self

    def bind(self, lengths: Streams, /) -> "LearningBudget":
        """Bind the budget to lengths. The old and the new budget share what they learn."""
        return self.around(self.base.bind(lengths))

    def with_memory(self, known: Callable[[], Any], /) -> "LearningBudget":
        return self.around(self.base.with_memory(known))

    @property
    def limits(self) -> tuple[float, float]:
        """What has been learned so far: the highest allowed cost, and the lowest cost that has failed; inf: none."""
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
        """Whether a limit has been learned."""
        return not math.isinf(self.limits[0])

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return fits_of(self.base, shape) & self._within(self._followed, shape)

    def allows(self, shape: BatchShape, /) -> BoolArray:
        """Which shapes are within the learned limit, whatever ``budget`` says: bool (K,)."""
        return self._within(self.limits[0], shape)

    def _within(self, limit: float, shape: BatchShape) -> BoolArray:
        return np.ones(len(shape), np.bool_) if math.isinf(limit) else self.cost(shape) <= limit

    def largest(self, longest: IntArray, /) -> IntArray | None:
        most, followed = largest_of(self.base, longest), self._followed
        if most is None or math.isinf(followed):
            return most
        return largest_within(lambda n: self._within(followed, BatchShape.of(n, longest)), len(longest), most)

    def apply(self, world: World | None = None) -> None:
        """Make ``fits`` use what was learned; call it between epochs. Ranks get the lowest limits. Collective."""
        numbers = self._lessons.numbers
        if world is not None and world.size > 1:
            lowest = world.all_max([-int(min(limit * COST_UNIT, NO_COST)) for limit in self.limits])
            numbers[0], numbers[1] = (math.inf if n == -NO_COST else -n / COST_UNIT for n in lowest)
        numbers[2] = numbers[0]

    def record_oom(self, shape: BatchShape, *, wasted_s: float = 0.0, num_retries: int = 2) -> None:
        """Record that a batch of this shape (one row) ran out of memory and was run in ``num_retries`` parts."""
        self.record_failed_cost(float(self.cost(shape)[0]))
        self.record_waste(num_ooms=1, wasted_s=wasted_s, num_retries=num_retries)

    def record_failed_cost(self, cost: float) -> None:
        """Record the cost of a batch that failed; all ranks pass the same cost."""
        limit, wall = self.limits
        self._move(min(limit, BACKOFF * cost), min(wall, cost))

    def record_waste(self, **more: float) -> None:
        """Add what recovery cost to the report: ``num_ooms``, ``num_retries``, ``wasted_s``."""
        for name, value in more.items():
            setattr(self._lessons.report, name, getattr(self._lessons.report, name) + value)

    def record_pass(self, shape: BatchShape, *, peak_bytes: int | None = None, device_bytes: int | None = None) -> None:
        """Record that a batch of this shape (one row) succeeded; ``peak_bytes``: measured peak, if known."""
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
                grows = GROWTH * limit < wall and share * GROWTH <= FULL
                self._move(GROWTH * limit if grows else limit, wall)

    def _move(self, limit: float, wall: float) -> None:
        self._lessons.numbers[0], self._lessons.numbers[1] = limit, wall
        self._lessons.calm = 0

    @property
    def report(self) -> OomReport:
        return self._lessons.report

    def share_memory(self) -> "LearningBudget":
        """Keep what is learned in shared memory: worker processes that start from now on use it at once."""
        import torch

        if isinstance(self._lessons.numbers, list):
            shared: Any = torch.tensor(self._lessons.numbers, dtype=torch.float64).share_memory_()
            self._lessons.numbers = shared
        return self

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, for a checkpoint."""
        numbers = [None if math.isinf(n) else float(n) for n in self._lessons.numbers]  # JSON knows no infinity
        fields = {"numbers": numbers, "calm": self._lessons.calm, "report": asdict(self._lessons.report)}
        return sealed("LearningBudget", {"budget": self.base.fingerprint}, fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what a run with the same budget has learned. StateError: another budget; nothing has changed."""
        [found], lessons = opened(state, "LearningBudget", {"budget": self.base.fingerprint}), self._lessons
        for place, number in enumerate(found["numbers"]):  # in place, because they may be in shared memory
            lessons.numbers[place] = math.inf if number is None else number
        lessons.calm, lessons.report = found["calm"], OomReport(**found["report"])

    @staticmethod
    @contextmanager
    def taken_up(budget: Budget, state: Mapping[str, Any]) -> Iterator[None]:
        """Context: a budget knows what it had :meth:`saved` in a loader's state. An error inside changes nothing."""
        learner, learned = budget.learner, state["learned"]
        before = None if learner is None else learner.state_dict()
        if learner is None and learned is not None and learned["numbers"][2] is not None:
            raise StateError("the saved plan uses limits of a LearningBudget; give this loader a LearningBudget, too")
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
        """State of the learning part of a budget, for a loader's checkpoint; None: no part learns."""
        return None if budget.learner is None else budget.learner.state_dict()
