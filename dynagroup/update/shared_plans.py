"""Shares the work of planning among ranks: each rank plans some of the next windows, and sends every other rank its
own batches of them. A plan depends only on settings and lengths, so a rank may plan any window by itself as well."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.distributed import World, on_all_ranks
from dynagroup.errors import AlignmentError
from dynagroup.plan.batches import Batches, offsets_of
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.plan import BatchPlan
from dynagroup.shapes import IntArray

Part: TypeAlias = tuple[int, int, int]
"""A window, or an update: its number, and where it starts and stops in the epoch's order."""
HEADER = 6  # numbers before the arrays of a column: its part, steps, samples carried, samples
MOST_SAMPLES = 1 << 16
"""Samples of all ranks, in parts that are planned together; more if each rank plans only one."""


@dataclass(frozen=True)
class Column:
    """What one rank needs of a window's plan.

    Args:
        batches: dataset indices of this rank's batches, one for each step.
        is_idle: bool (steps,), whether this rank's batch only fills the step.
        row_samples: int64 (steps,), samples of each step on all ranks.
        carried: int64, dataset indices that were too few for a further step, and come first in the next window.
    """

    batches: Batches
    is_idle: NDArray[np.bool_]
    row_samples: IntArray
    carried: IntArray

    @property
    def num_steps(self) -> int:
        return len(self.is_idle)

    def end(self, start: Cursor, world_size: int, limit: float | None) -> Cursor:
        """Returns the point in the epoch after this window, which begins at ``start``."""
        after = start.after_rows(self.num_steps, world_size, limit)
        return after.after_window(self.carried.tolist())

    def as_vector(self, part: Part) -> IntArray:
        """Returns this column as one vector."""
        num_carried = len(self.carried)
        num_samples = len(self.batches.order)
        header = np.array([*part, self.num_steps, num_carried, num_samples], np.int64)
        arrays = [
            header,
            self.row_samples,
            self.is_idle.astype(np.int64),
            self.batches.sizes,
            self.carried,
            self.batches.order,
        ]
        return np.concatenate(arrays)


def columns_of(plan: BatchPlan, ranks: Sequence[int]) -> list[Column]:
    """Returns the columns of these ranks in the plan of one window."""
    num_steps = plan.num_steps
    is_idle = plan.loss_scale == 0.0
    sizes = plan.batches.sizes[plan.table]
    row_samples = np.where(is_idle, 0, sizes).sum(axis=1)
    by_rank = plan.batches.take(plan.table[:, ranks].T.ravel())
    carried = np.asarray(plan.end.carried, np.int64)
    columns = []
    for place, rank in enumerate(ranks):
        first = place * num_steps
        offsets = by_rank.offsets[first : first + num_steps + 1]
        batches = Batches(by_rank.order[offsets[0] : offsets[-1]], offsets - offsets[0])
        columns.append(Column(batches, is_idle[:, rank], row_samples, carried))
    return columns


def columns_in(vector: IntArray) -> Iterator[tuple[Part, Column]]:
    """Yields the columns that were joined to a vector."""
    while len(vector):
        window, start, stop, num_steps, num_carried, num_samples = vector[:HEADER].tolist()
        sizes_of_arrays = [num_steps, num_steps, num_steps, num_carried, num_samples]
        borders = HEADER + np.cumsum(sizes_of_arrays)
        arrays = np.split(vector[HEADER : borders[-1]], borders[:-1] - HEADER)
        row_samples, is_idle, sizes, carried, order = arrays
        batches = Batches(order, offsets_of(sizes))
        column = Column(batches, is_idle.astype(np.bool_), row_samples, carried)
        yield (window, start, stop), column
        vector = vector[borders[-1] :]


def exchange_columns(
    world: World, parts: Iterable[Part], plans: Iterable[BatchPlan]
) -> dict[Part, Column]:
    """Sends every rank its columns of this rank's plans; returns this rank's columns of all ranks' plans.

    All ranks must call it. AlignmentError: a message does not match its checksum.
    """
    ranks = range(world.size)
    of_rank: list[list[IntArray]] = [[] for _ in ranks]
    for part, plan in zip(parts, plans, strict=True):
        for rank, column in enumerate(columns_of(plan, ranks)):
            of_rank[rank].append(column.as_vector(part))
    messages = []
    for vectors in of_rank:
        body = np.concatenate([np.zeros(0, np.int64), *vectors])
        messages.append(np.append(zlib.crc32(body.data), body))
    columns: dict[Part, Column] = {}
    for rank, message in enumerate(world.exchange(messages)):
        body = np.ascontiguousarray(message[1:])
        if zlib.crc32(body.data) != message[0]:
            raise AlignmentError(
                f"the batches that rank {rank} planned for rank {world.rank} of {world.size} arrived "
                "damaged: their checksum differs; check the network between the ranks' machines"
            )
        columns.update(columns_in(body))
    return columns


class SharedColumns:
    """This rank's columns of the next parts of an epoch, which all ranks have planned together."""

    def __init__(self, first: int = 0) -> None:
        self._columns: dict[Part, Column] = {}
        self._rank = -1
        self._stop = first  # number of the first part that is not planned
        self._due: float = first  # number of the part at which more are planned
        self._num_each = 1  # parts that each rank plans next

    def of(self, rank: int, cursor: Cursor, part: Part) -> Column | None:
        """Returns the column of a part that begins at the cursor. None: the rank must plan it by itself."""
        if rank != self._rank or cursor.segments or cursor.carried:
            return None
        return self._columns.get(part)

    def forget(self) -> None:
        """Forgets the columns: the rank plans these parts by itself."""
        self._columns = {}

    def refill(
        self,
        world: World,
        window: int,
        ahead: Iterator[Part],
        plans_of: Callable[[list[Part]], list[BatchPlan]],
    ) -> None:
        """Plans more parts, if few of those that are planned are left. All ranks must call it.

        Args:
            window: number of the part that is used next.
            ahead: this part and all later ones of the epoch.
        """
        if window < self._due:
            return
        first = max(self._stop - window, 0)
        new = list(islice(ahead, first, first + self._num_each * world.size))
        if len(new) < 2:  # nothing to share
            self._due = math.inf
            return
        num_each = -(-len(new) // world.size)
        mine = new[world.rank * num_each :][:num_each]
        plans = on_all_ranks(world, lambda: plans_of(mine), "plan its part of the epoch")
        kept = {part: column for part, column in self._columns.items() if part[0] >= window}
        self._columns = {**kept, **exchange_columns(world, mine, plans)}
        self._rank = world.rank
        self._stop = new[-1][0] + 1
        self._due = self._stop - len(new) // 2
        _, start, stop = new[0]
        if 2 * self._num_each * world.size * (stop - start) <= MOST_SAMPLES:
            self._num_each *= 2
