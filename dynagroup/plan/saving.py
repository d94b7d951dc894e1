"""Where a sampler's epoch stands, as a state to save; and checked, when it comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import StateError
from dynagroup.plan.planner import Planner
from dynagroup.plan.position import POSITION, Position
from dynagroup.plan.source import OrderSource
from dynagroup.validation import Check, a_text, an_int, anything, check_seal, check_state, either, nothing, seal_of

__all__ = ["checked_states", "sampler_state"]

KIND = "LengthAwareBatchSampler"
STATE_VERSION = 1


def sampler_state(
    planner: Planner, order: OrderSource | None, epoch: int, position: Position, steps: int
) -> dict[str, Any]:
    """A few integers that say where an epoch stands, JSON-able; ``steps`` of it were used."""
    state = {
        "kind": KIND,
        "version": STATE_VERSION,
        "identity": planner.identity,
        "epoch": epoch,
        "steps": steps,
        **position.state(),
        "learned": LearningBudget.saved(planner.budget),
        "order": None if order is None else order.checksum(epoch),
        "seal": "",
    }
    return {**state, "seal": seal_of(state)}


def checked_states(
    planner: Planner, order: OrderSource | None, states: Sequence[Any]
) -> tuple[Planner, Position, Mapping[str, Any]]:
    """The first of the states, if all are whole, of this run and of one step; its place, and the planner to go on with.

    What the budget has learned is taken over first, because fingerprints show it; a refused state puts it back.
    """
    with LearningBudget.of_state(planner.budget, states[0]):
        planner = planner.rebuilt()
        for state in states:
            check_state(state, KIND, STATE_VERSION, SCHEMA, planner.identity)
            check_seal(state)
        own = {"learned": None, "seal": None}
        if any({**other, **own} != {**states[0], **own} for other in states[1:]):
            raise StateError("the ranks' states differ: they were not taken after the same step")
        state, position = states[0], Position.of(states[0])
        epoch = state["epoch"]
        if order is not None and order.checksum(epoch) != state["order"]:
            raise StateError(
                f"`order` gives other indices in epoch {epoch} than when the state was taken; "
                "seed its generator alike, or give it a set_epoch"
            )
        planner.check_position(position, epoch, None if order is None else order.of_epoch(epoch))
    return planner, position, state


SCHEMA: Mapping[str, Check] = {
    "epoch": an_int(),
    "steps": an_int(),
    **POSITION,
    "learned": anything(),
    "order": either(nothing(), an_int()),
    "seal": a_text(),
}
"""What the fields of a saved state must be."""
