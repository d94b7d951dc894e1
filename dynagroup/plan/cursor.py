"""The place of a run: a few integers that determine everything that remains."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

MOST_RANKS = 1 << 20
# (world size, rows taken, the learned limit that they were cut by)
Segment: TypeAlias = tuple[int, int, "float | None"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a run, the same on every rank: in an epoch, in its windows, and in the updates of the run.

    Args:
        epoch: the current epoch.
        steps: steps taken in it, over all resumes.
        window_size: samples sorted together; 0 before an epoch's plan begins, fixed from then on.
        windows_done: windows that were used up.
        carried: samples that could fill no row of these windows and come first in the next one.
        segments: how far the next window (with updates of a set size: the current update) was used: (ranks, rows, limit
            that the budget had learned) of each run.
        update: updates done since training began.
        samples_used: samples of this epoch's order that are done or dropped.
        samples_seen: samples trained on since training began.
        current: samples that the last update was asked to hold; None before the first.
        begun_rows: steps taken of the current update, which the four fields above do not count yet; 0 between updates.
        begun_samples: samples in these steps.
        begun_weight: weight of these steps.

    >>> cursor = Cursor(window_size=64).after_rows(3, ranks=2).after_rows(1, ranks=4)
    >>> cursor.segments, cursor.steps, cursor.after_window().windows_done
    (((2, 3, None), (4, 1, None)), 4, 1)
    """

    epoch: int = 0
    steps: int = 0
    window_size: int = 0
    windows_done: int = 0
    carried: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()
    update: int = 0
    samples_used: int = 0
    samples_seen: int = 0
    current: int | None = None
    begun_rows: int = 0
    begun_samples: int = 0
    begun_weight: float = 0.0

    def after_rows(self, rows: int, ranks: int, limit: float | None = None) -> "Cursor":
        """The place after this many more rows of the current window."""
        if not rows:
            return self
        *before, (size, done, by) = self.segments or ((ranks, 0, limit),)
        if (size, by) != (ranks, limit):
            before, done = self.segments, 0
        return replace(self, steps=self.steps + rows, segments=(*before, (ranks, done + rows, limit)))

    def after_window(self, carried: Sequence[int] = ()) -> "Cursor":
        """The place after the current window, whose rows :meth:`after_rows` has counted."""
        return replace(self, windows_done=self.windows_done + 1, segments=(), carried=tuple(carried))

    def state(self) -> dict[str, Any]:
        return {**asdict(self), "segments": list(map(list, self.segments)), "carried": list(self.carried)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Cursor":
        """Read what :meth:`state` gave, also after JSON or among other fields."""
        found = {field.name: state[field.name] for field in fields(cls)}
        segments = tuple((ranks, rows, limit) for ranks, rows, limit in state["segments"])
        return cls(**{**found, "segments": segments, "carried": tuple(state["carried"])})
