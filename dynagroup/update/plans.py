"""What a planned loader runs: one update of one rank, and what plans them. The pure half of :mod:`dynagroup.update.planned`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dynagroup.budget.base import padded_squares, padded_streams, padded_tokens, real_tokens
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.notices import PlanNotices
from dynagroup.plan.plan import BatchPlan, PlannedWindow
from dynagroup.plan.planner import Planner
from dynagroup.plan.position import Position
from dynagroup.shapes import IntArray
from dynagroup.update.place import Begun, Place
from dynagroup.update.sizes import Cursor, Walk

__all__ = ["PlannedUpdate", "Updates", "as_planned"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """What remains of one update, or all of it, as one rank runs it. Sequences have one entry a step."""

    batches: Sequence[list[int]]
    """Dataset indices."""
    idle: Sequence[bool]
    real: Sequence[int]
    """Tokens of this rank's batches, of all padded streams."""
    streams: Mapping[str, Sequence[tuple[int, int]]]
    """The longest sample, and all of them, in each padded stream: what its field of a batch should come out as."""
    padded: Sequence[int]
    squares: Sequence[int]
    row_samples: Sequence[int]
    """Samples on all ranks."""
    row_padded: Sequence[tuple[int, float]]
    """Padded tokens of the fullest rank, and of a rank on average."""
    before: Cursor
    after: Cursor
    begun: Begun | None
    position: Callable[[int], Position]
    """Where the epoch's windows stand after so many of these steps."""

    @property
    def rows_before(self) -> int:
        """Steps of the update that were taken before."""
        return 0 if self.begun is None else self.begun.rows

    @property
    def num_samples(self) -> int:
        """Samples of the whole update over all ranks."""
        return sum(self.row_samples) + (0 if self.begun is None else self.begun.samples)

    def place(self, steps: int, weight: float) -> Place:
        """Behind so many of these steps, when all that was taken of the update weighs ``weight``."""
        if steps == len(self.batches):
            return Place(self.after)
        done = 0 if self.begun is None else self.begun.samples
        samples = done + sum(self.row_samples[:steps])
        return Place(self.before, Begun(self.position(steps), self.rows_before + steps, samples, weight))


def as_planned(window: PlannedWindow, rows: slice, planner: Planner, rank: int, **where: Any) -> PlannedUpdate:
    """These rows of a window as the update of one rank; ``where`` are the fields that say where it stands."""
    table = window.table[rows]
    idle = window.loss_scale[rows] == 0.0
    shapes = shapes_of(window.batches.take(table.ravel()), planner.lengths)
    padded = np.where(idle, 0, padded_tokens(shapes, planner.budget).reshape(table.shape))
    samples = np.where(idle, 0, shapes.num_samples.reshape(table.shape))
    real = real_tokens(shapes, planner.budget).reshape(table.shape)[:, rank].tolist()
    squares = padded_squares(shapes, planner.budget).reshape(table.shape)[:, rank].tolist()
    own = np.arange(table.size).reshape(table.shape)[:, rank]
    names = padded_streams(planner.budget, shapes.longest)
    longest, total = ({name: by[name][own].tolist() for name in names} for by in (shapes.longest, shapes.total))
    return PlannedUpdate(
        batches=[window.batches[int(number)].tolist() for number in table[:, rank]],
        idle=idle[:, rank].tolist(),
        real=real,
        streams={name: list(zip(longest[name], total[name], strict=True)) for name in names},
        padded=padded[:, rank].tolist(),
        squares=squares,
        row_samples=samples.sum(axis=1).tolist(),
        row_padded=list(zip(padded.max(axis=1).tolist(), padded.mean(axis=1).tolist(), strict=True)),
        **where,
    )


class Updates(ABC):
    """Plans updates one after another; knows ranks only by number."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.notices: PlanNotices | None = None
        """Told of the windows that are handed out."""
        self._memory: dict[str, tuple[tuple[Any, ...], Any]] = {}

    @abstractmethod
    def updates(self, place: Place, rank: int, world_size: int) -> Iterator[PlannedUpdate]:
        """What remains of ``place``'s epoch."""

    @abstractmethod
    def start(self, epoch: int, world_size: int) -> Cursor:
        """The beginning of an epoch."""

    @abstractmethod
    def walk(self, world_size: int) -> Walk:
        """How a run's updates follow one another."""

    @abstractmethod
    def is_over(self, cursor: Cursor) -> bool:
        """Whether nothing of its epoch remains."""

    @abstractmethod
    def check(self, state: Mapping[str, Any], place: Place) -> None:
        """Refuse a place that these updates cannot reach; its types are right already."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], place: Place) -> None:
        """Take over what :attr:`state` held of another run, which stands at ``place``."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples of an epoch."""

    @property
    @abstractmethod
    def num_changes(self) -> int:
        """Grows whenever the number of updates may have changed."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What updates depend on besides epoch and ranks; JSON-able."""

    def state(self, epoch: int, world_size: int) -> dict[str, Any]:
        """What a place needs besides itself."""
        return {"changes": [], "past": [], "order": None}

    def begin(self, planner: Planner, epoch: int, world_size: int) -> None:
        """An epoch begins, planned by this planner."""
        self.planner = planner

    def end(self, cursor: Cursor) -> None:  # noqa: B027 - most have nothing to note
        """An epoch has ended at this cursor."""

    def order_of(self, epoch: int) -> IntArray | None:
        """The epoch's order of samples, where there is one."""
        return None

    def _notice(self, window: PlannedWindow, epoch: int, world_size: int) -> None:
        if self.notices is not None:
            self.notices.of_padding(self.planner, window, epoch, world_size)

    def num_steps(self, epoch: int, world_size: int) -> int:
        """Steps of a whole epoch: they are counted, not planned. Remembered until something changes."""
        return self._remembered(self._num_steps, epoch, world_size)

    def plan(self, epoch: int, world_size: int) -> BatchPlan:
        """A whole epoch on all ranks. Remembered until something changes."""
        return self._remembered(self._plan, epoch, world_size)

    def _remembered(self, make: Callable[[int, int], T], epoch: int, world_size: int) -> T:
        key = (epoch, world_size, self.num_changes, self.planner)
        if make.__name__ not in self._memory or self._memory[make.__name__][0] != key:
            self._memory[make.__name__] = key, make(epoch, world_size)
        return self._memory[make.__name__][1]

    def _plan(self, epoch: int, world_size: int) -> BatchPlan:
        return self.planner.joined(list(self._windows(epoch, world_size)), epoch, world_size)

    @abstractmethod
    def _num_steps(self, epoch: int, world_size: int) -> int:
        """See :meth:`num_steps`."""

    @abstractmethod
    def _windows(self, epoch: int, world_size: int) -> Iterator[PlannedWindow]:
        """The steps of a whole epoch, with the ends and weights of these updates."""
