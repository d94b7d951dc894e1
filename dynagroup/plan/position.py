"""How far an epoch's plan was used: a few integers, how they are saved, and how they grow while steps are handed out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from dynagroup.checks import Check, a_list, an_int
from dynagroup.errors import StateError

__all__ = ["MOST_RANKS", "POSITION", "Position", "Segment", "Trail"]

MOST_RANKS = 1 << 20
Segment: TypeAlias = tuple[int, int]
"""(world size, rows emitted at that world size): how far a window was used, and by how many ranks."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far an epoch was used: whole windows, then part of one."""

    window_size: int
    windows_done: int = 0
    segments: tuple[Segment, ...] = ()
    tail: int = 1
    """Windows at the end that are one, so that their rows can be filled; fixed when the epoch starts."""

    def state(self) -> dict[str, Any]:
        """JSON-able, see :data:`POSITION`."""
        return {**asdict(self), "segments": [list(segment) for segment in self.segments]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """What :meth:`state` gave, also after JSON or among other fields; checked before by :data:`POSITION`."""
        segments = tuple((ranks, rows) for ranks, rows in state["segments"])
        return cls(state["window_size"], state["windows_done"], segments, state["tail"])


def _segment(value: Any, place: str) -> None:
    a_list(an_int(1), length=2)(value, place)
    an_int(1, MOST_RANKS)(value[0], f"{place}[0]")


POSITION: Mapping[str, Check] = {
    "window_size": an_int(1),
    "windows_done": an_int(),
    "segments": a_list(_segment, most=4096),
    "tail": an_int(1),
}
"""What the fields of a saved position must be."""


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
