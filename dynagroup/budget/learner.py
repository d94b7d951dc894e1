"""What loaders ask of a budget that learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from dynagroup.budget.base import AllOf, Budget
from dynagroup.world import World

__all__ = ["Learner", "learned_state", "learner_of", "restore_learned"]


@runtime_checkable
class Learner(Protocol):
    """A budget that changes between epochs, such as :class:`dynagroup.oom.LearningBudget`. Loaders apply what it has
    learned when an epoch begins, and keep its state in their own."""

    def apply(self, world: World | None = None) -> None: ...

    def share_memory(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


def learner_of(budget: Budget) -> Learner | None:
    """The part of a budget that learns, if one does."""
    parts = budget.parts if isinstance(budget, AllOf) else (budget,)
    return next((part for part in parts if isinstance(part, Learner)), None)


def learned_state(budget: Budget) -> dict[str, Any] | None:
    """What the part that learns keeps in a checkpoint."""
    learner = learner_of(budget)
    return None if learner is None else learner.state_dict()


def restore_learned(budget: Budget, state: Any) -> None:
    """Take up what a loader's ``state`` has learned: before it is checked, because what is learned changes fingerprints."""
    learner = learner_of(budget)
    if learner is not None and isinstance(state, Mapping) and state.get("learned") is not None:
        learner.load_state_dict(state["learned"])
