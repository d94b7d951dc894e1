"""Where a sampler's epoch stands, as a state to save; and checked, when it comes back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynagroup.budget.learning import LearningBudget
from dynagroup.checks import Check, a_list, a_text, an_int, anything, check_seal, check_state, either, nothing, seal_of
from dynagroup.errors import StateError
from dynagroup.plan.planner import Planner
from dynagroup.plan.source import OrderSource
from dynagroup.plan.windows import Position

__all__ = ["MOST_RANKS", "Trail", "checked_states", "sampler_state"]

KIND = "LengthAwareBatchSampler"
STATE_VERSION = 1
MOST_RANKS = 1 << 20


class Trail:
    """What one iteration has handed out.

    Args:
        start: where it began.
        world_size: its ranks.
        steps_before: steps of the epoch that were used before it, in iterations that it resumes.
    """

    def __init__(self, start: Position, world_size: int, steps_before: int = 0) -> None:
        self.start = start
        self.world_size = world_size
        self.steps_before = steps_before
        self.steps = 0
        self.ended = False
        self._rows_before = [0]
        self._windows_before = [start.windows_done]

    def open(self, num_rows: int, num_windows: int) -> None:
        """So many rows, made of so many windows, are about to be handed out."""
        self._rows_before.append(self._rows_before[-1] + num_rows)
        self._windows_before.append(self._windows_before[-1] + num_windows)

    def position(self, steps: int | None) -> Position:
        """Where the epoch stands after so many steps of this iteration; None: all that were handed out."""
        steps = self.steps if steps is None else steps
        if not 0 <= steps <= self.steps:
            raise StateError(f"`num_steps` must be from 0 to the {self.steps} steps handed out, but is {steps}")
        window = bisect_right(self._rows_before, steps) - 1
        rows = steps - self._rows_before[window]
        used = self.start.segments if window == 0 else ()
        if rows and used and used[-1][0] == self.world_size:
            used = (*used[:-1], (self.world_size, used[-1][1] + rows))
        elif rows:
            used = (*used, (self.world_size, rows))
        return replace(self.start, windows_done=self._windows_before[window], segments=used)


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
        "window_size": position.window_size,
        "windows_done": position.windows_done,
        "segments": [list(segment) for segment in position.segments],
        "tail": position.tail,
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
        state, position = states[0], _position_of(states[0])
        epoch = state["epoch"]
        if order is not None and order.checksum(epoch) != state["order"]:
            raise StateError(
                f"`order` gives other indices in epoch {epoch} than when the state was taken; "
                "seed its generator alike, or give it a set_epoch"
            )
        planner.check_position(position, epoch, None if order is None else order.of_epoch(epoch))
    return planner, position, state


def _position_of(state: Mapping[str, Any]) -> Position:
    segments = tuple((ranks, rows) for ranks, rows in state["segments"])
    return Position(state["window_size"], state["windows_done"], segments, state["tail"])


def _segment(value: Any, place: str) -> None:
    a_list(an_int(1), length=2)(value, place)
    an_int(1, MOST_RANKS)(value[0], f"{place}[0]")


SCHEMA: Mapping[str, Check] = {
    "epoch": an_int(),
    "steps": an_int(),
    "window_size": an_int(1),
    "windows_done": an_int(),
    "segments": a_list(_segment, most=4096),
    "tail": an_int(1),
    "learned": anything(),
    "order": either(nothing(), an_int()),
    "seal": a_text(),
}
"""What the fields of a saved state must be."""
