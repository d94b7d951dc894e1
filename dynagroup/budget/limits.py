"""Which costs are still allowed, by what has failed and what has passed: the numbers behind a budget that learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.validation import Check, a_list, a_number, an_int, either, nothing

__all__ = ["COST_UNIT", "LIMITS", "NO_COST", "CostLimits", "Limits"]

COST_UNIT = 2**20  # costs travel between ranks as integers
NO_COST = 2**62


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

    def saved(self) -> list[float | None]:
        return [_or_none(self.limit), _or_none(self.wall)]

    @classmethod
    def of(cls, saved: tuple[float | None, float | None]) -> Limits:
        limit, wall = saved
        return cls(_or_inf(limit), _or_inf(wall))


# A failure at cost c is a wall: nothing of cost c or more is tried again, and the limit falls to a share of it, because costs
# are predictions. Passes near the limit raise it again, one small step each time so many of them came in a row, and never to
# the wall; a measured peak that nearly fills the device stops the rise before an error does. Cost: a comparison a batch.
class CostLimits:
    """Limits that fall when a batch fails and rise while batches near them pass.

    Args:
        backoff: share of a failed cost that is allowed next.
        growth: factor by which the limit grows again.
        patience: batches near the limit that must pass before it grows.
        full: share of a device's memory from which a measured peak counts as full.
    """

    def __init__(self, *, backoff: float, growth: float, patience: int, full: float) -> None:
        if not 0 < backoff < 1:
            raise ConfigError(f"`backoff` must lie between 0 and 1, but is {backoff!r}")
        if not growth >= 1:
            raise ConfigError(f"`growth` must be at least 1, but is {growth!r}")
        self._backoff, self._growth, self._patience, self._full = backoff, growth, patience, full
        self._numbers: MutableSequence[float] = [math.inf] * 4
        """Of :attr:`known`, then of :attr:`applied`."""
        self._first = math.inf
        """The first cost that failed or filled the device."""
        self._calm = 0
        """Batches near the limit that have passed since it moved."""
        self._num_batches = 0
        self._curve: list[tuple[int, float]] = []

    @property
    def known(self) -> Limits:
        """What has been learned so far."""
        return Limits(float(self._numbers[0]), float(self._numbers[1]))

    @property
    def applied(self) -> Limits:
        """What plans follow."""
        return Limits(float(self._numbers[2]), float(self._numbers[3]))

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """(number of batches that passed, share of the first limit that was allowed from then on)."""
        return tuple((at, limit / self._first) for at, limit in self._curve)

    def _know(self, limit: float, wall: float) -> None:
        self._numbers[0], self._numbers[1] = limit, wall

    def apply(self, world: World | None = None) -> None:
        """Let plans follow what is known; of several ranks the lowest limits. Collective."""
        if world is not None and world.size > 1:
            own = [int(min(float(number) * COST_UNIT, NO_COST)) for number in self._numbers[:2]]
            lowest = [-n for n in world.all_max([-n for n in own])]
            self._know(*(math.inf if n == NO_COST else n / COST_UNIT for n in lowest))
        self._numbers[2], self._numbers[3] = self._numbers[0], self._numbers[1]

    def failed(self, cost: float) -> None:
        """A batch of this cost ran out of memory."""
        known = self.known
        self._know(min(known.limit, self._backoff * cost), min(known.wall, cost))
        self._calm = 0
        self._note_first(cost)
        self._log()

    def passed(self, cost_of_batch: Callable[[], float], share: float | None) -> None:
        """A batch passed, at this measured share of the device's memory; its cost is asked for only where it counts."""
        self._num_batches += 1
        known, full = self.known, share is not None and share > self._full
        if math.isinf(known.limit) and not full:
            return
        cost = cost_of_batch()
        if full:
            self._note_first(cost)
            if cost < known.limit:
                self._know(cost, known.wall)
                self._log()
            self._calm = 0
        elif cost >= self._backoff * known.limit:
            self._calm += 1
            if self._calm >= self._patience:
                self._calm = 0
                self._grow(known, share)

    def _grow(self, known: Limits, share: float | None) -> None:
        if self._growth * known.limit < known.wall and (share is None or share * self._growth <= self._full):
            self._know(self._growth * known.limit, known.wall)
            self._log()

    def _note_first(self, cost: float) -> None:
        self._first = cost if math.isinf(self._first) else self._first

    def _log(self) -> None:
        self._curve.append((self._num_batches, self.known.limit))

    def share_memory(self) -> None:
        """Keep the numbers where worker processes started from now on see them change."""
        import torch

        if isinstance(self._numbers, list):
            self._numbers = torch.tensor(self._numbers, dtype=torch.float64).share_memory_()  # type: ignore[assignment]

    def state(self) -> dict[str, Any]:
        """JSON-able, see :data:`LIMITS`."""
        return {
            "allowed": self.known.saved(),
            "applied": self.applied.saved(),
            "first": _or_none(self._first),
            "calm": self._calm,
            "num_batches": self._num_batches,
            "curve": list(self._curve),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave, also after JSON or among other fields; checked before by :data:`LIMITS`."""
        allowed, applied = Limits.of(state["allowed"]), Limits.of(state["applied"])
        numbers = (allowed.limit, allowed.wall, applied.limit, applied.wall)
        for place, number in enumerate(numbers):  # in place: they may be shared
            self._numbers[place] = number
        self._first = _or_inf(state["first"])
        self._calm, self._num_batches = state["calm"], state["num_batches"]
        self._curve = [(int(at), float(limit)) for at, limit in state["curve"]]


_COST = either(nothing(), a_number(0.0))
LIMITS: Mapping[str, Check] = {
    "allowed": a_list(_COST, length=2),
    "applied": a_list(_COST, length=2),
    "first": _COST,
    "calm": an_int(),
    "num_batches": an_int(),
    "curve": a_list(a_list(a_number(0.0), length=2)),
}
"""What the fields of saved limits must be."""


def _or_none(value: float) -> float | None:
    return None if math.isinf(value) else value  # JSON knows no infinity


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else float(value)
