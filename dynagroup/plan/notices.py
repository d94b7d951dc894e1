"""What a user should know of a plan, said once."""

from __future__ import annotations

from dynagroup.plan.plan import PlannedWindow
from dynagroup.plan.planner import Planner
from dynagroup.validation import warn_user

__all__ = ["JUDGED", "PlanNotices"]

JUDGED = 1000
"""Samples after which a plan's padding says something."""


class PlanNotices:
    """Looks at windows as they are handed out, and warns of repeats and of padding, each once in its life."""

    def __init__(self) -> None:
        self._said_repeats = self._said_padding = False
        self._first: list[PlannedWindow] = []
        self._samples = 0

    def begin(self) -> None:
        """Windows of another epoch follow."""
        self._first, self._samples = [], 0

    def of_repeats(self, planned: PlannedWindow) -> None:
        """Say which samples of a window fill its last row."""
        if len(planned.repeated) and not self._said_repeats:
            self._said_repeats = True
            warn_user(
                f"too few samples for an equal number of steps on all ranks: samples {planned.repeated.tolist()} stand in a "
                "row a second time with weight 0 in plan.loss_scale; uneven='drop' leaves out samples instead"
            )

    def of_padding(self, planner: Planner, planned: PlannedWindow, epoch: int, world_size: int) -> None:
        """After the first windows of a thousand samples, say what keeps the plan from saving more."""
        if self._said_padding:
            return
        self._first.append(planned)
        self._samples += len(planned.batches.order)
        if self._samples >= JUDGED:
            self._said_padding = True
            said = planner.joined(self._first, epoch, world_size).advice()
            self.begin()
            if said is not None:
                warn_user(said)
