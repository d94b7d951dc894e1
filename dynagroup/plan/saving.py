"""Where a sampler's epoch stands, as a state to save; and checked, when it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import StateError
from dynagroup.plan.planner import Planner
from dynagroup.plan.position import Position
from dynagroup.plan.source import OrderSource
from dynagroup.state import agreed, listed, opened, sealed

__all__ = ["checked_states", "sampler_state"]

KIND = "LengthAwareBatchSampler"


def sampler_state(
    planner: Planner, order: OrderSource | None, epoch: int, position: Position, steps: int
) -> dict[str, Any]:
    """A few integers that say where an epoch stands, JSON-able; ``steps`` of it were used."""
    fields = {
        "epoch": epoch,
        "steps": steps,
        **position.state(),
        "learned": LearningBudget.saved(planner.budget),
        "order": None if order is None else order.checksum(epoch),
    }
    return sealed(KIND, planner.identity, fields)


def checked_states(
    planner: Planner, order: OrderSource | None, states: Any
) -> tuple[Planner, Position, Mapping[str, Any]]:
    """The first of the states, if all are whole, of this run and of one step; its place, and the planner to go on with.

    What the budget has learned is taken over first, because fingerprints show it; a refused state puts it back.
    """
    states = listed(states)
    with LearningBudget.of_state(planner.budget, states[0]):
        planner = planner.rebuilt()
        state = agreed(opened(states, KIND, planner.identity))
        epoch = state["epoch"]
        if order is not None and order.checksum(epoch) != state["order"]:
            raise StateError(
                f"`order` gives other indices in epoch {epoch} than when the state was taken; "
                "seed its generator alike, or give it a set_epoch"
            )
    return planner, Position.of(state), state
