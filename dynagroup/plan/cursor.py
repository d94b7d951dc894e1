"""A point in a run, stored as a few integers, from which the run can resume. ``window.Window.rest`` plans the rest of
a window after it; ``online/feeds.resumed`` continues an epoch of the online loader."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

MOST_RANKS = 1 << 20
# Number of ranks, steps taken, and the learned limit of the budget (None: no limit) when they were planned.
Segment: TypeAlias = tuple[int, int, "float | None"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A point in a run, the same on every rank: in an epoch, in its windows, and in the updates of the run.

    Args:
        epoch, steps: int, the current epoch, and steps taken in it, over all resumes.
        window_size: int, samples planned together, fixed when the epoch's plan begins; 0 before.
        windows_done: int, number of windows that are used up.
        carried: dataset indices that were too few for a further step of these windows, and come first in the next one.
        segments: how much of the next window (or with updates of a set size, of the current update) was used: for each
            run (ranks, rows, learned limit of the budget).
        update: int, updates since training began.
        samples_used, samples_seen: int, samples that this epoch used or left out; that training has used.
        current: int, size that the last update should have; None before the first.
        begun_rows: int, steps taken of the current update, which the four fields above do not count; 0 between updates.
        begun_samples, begun_weight: int, float, samples and weight of these steps.

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
        """Returns the point ``rows`` steps later in the current window."""
        if not rows:
            return self
        *before, (last_ranks, done, last_limit) = self.segments or ((ranks, 0, limit),)
        if (last_ranks, last_limit) != (ranks, limit):
            before = self.segments
            done = 0
        segments = (*before, (ranks, done + rows, limit))
        return replace(self, steps=self.steps + rows, segments=segments)

    def after_window(self, carried: Sequence[int] = ()) -> "Cursor":
        """Returns the point after the current window, whose steps :meth:`after_rows` has counted."""
        return replace(
            self, windows_done=self.windows_done + 1, segments=(), carried=tuple(carried)
        )

    def state(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "segments": list(map(list, self.segments)),
            "carried": list(self.carried),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Cursor":
        """Reads what :meth:`state` returned; ``state`` may have passed through JSON and have other fields."""
        found = {field.name: state[field.name] for field in fields(cls)}
        segments = tuple((ranks, rows, limit) for ranks, rows, limit in state["segments"])
        return cls(**{**found, "segments": segments, "carried": tuple(state["carried"])})
