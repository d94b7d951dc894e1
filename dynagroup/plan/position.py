"""How far an epoch's plan was used: a few integers, how they are saved, and how they grow while steps are handed out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from dynagroup.errors import StateError
from dynagroup.validation import Check, a_list, an_int

__all__ = ["MOST_RANKS", "POSITION", "Position", "Progress", "Segment", "Trail"]

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

    @property
    def is_start(self) -> bool:
        """Whether nothing of the epoch was used."""
        return not self.windows_done and not self.segments

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


class Progress:
    """Where an epoch stands: at its beginning, where a loaded state says, or behind what an iteration has handed out."""

    def __init__(self) -> None:
        self._start: Position | None = None  # where the next iteration begins, if a state was loaded
        self._steps_before = 0  # of the epoch, used before the next iteration
        self._trail: Trail | None = None

    @property
    def has_ended(self) -> bool:
        """Whether an iteration has handed out the last step."""
        return self._trail is not None and self._trail.ended

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has handed out steps, and not the last one."""
        return self._trail is not None and not self._trail.ended and self._trail.steps > 0

    @property
    def resumed_at(self) -> Position | None:
        """Where the iteration that runs, or comes next, goes on in the epoch; None: at its beginning."""
        start = self._start or (self._trail.start if self._trail is not None else None)
        return None if start is None or start.is_start else start

    def restart(self) -> None:
        """Another epoch: its beginning comes next."""
        self._start, self._steps_before, self._trail = None, 0, None

    def resume(self, position: Position, steps: int) -> None:
        """What is behind a position comes next; so many steps of the epoch lie before."""
        self._start, self._steps_before, self._trail = None if position.is_start else position, steps, None

    def begin(self, beginning: Callable[[], Position], world_size: int) -> Trail:
        """An iteration begins; ``beginning`` says where its epoch does."""
        self._trail = Trail(self._start or beginning(), world_size, self._steps_before)
        self._start, self._steps_before = None, 0
        return self._trail

    def at(self, num_steps: int | None, beginning: Callable[[], Position]) -> tuple[Position, int]:
        """Where the epoch stands after so many of its steps, and how many they are; None: all that were handed out.

        Raises:
            StateError: this iteration has not come by so many steps.
        """
        if self._trail is None:
            if num_steps not in (None, self._steps_before):
                raise StateError(
                    f"`num_steps` is {num_steps}, but this epoch stands at step {self._steps_before}: nothing was iterated"
                )
            return self._start or beginning(), self._steps_before
        first, last = self._trail.steps_before, self._trail.steps_before + self._trail.steps
        used = last if num_steps is None else num_steps
        if not first <= used <= last:
            raise StateError(
                f"`num_steps` must be from {first} to {last}, the steps of this epoch that were handed out since it was "
                f"begun or resumed, but is {used}; count from the beginning of the epoch, across resumes"
            )
        return self._trail.position(used - first), used
