"""What every feed draws on and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.online.config import OnlineConfig
from dynagroup.online.records import Planned, Queued, Refined
from dynagroup.online.refine import RefinementCollator
from dynagroup.online.requests import Order, Rank, UpdateMark
from dynagroup.online.workers import Windows, Workers
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.schedule import UpdateSizes
from dynagroup.update.stats import LoaderStats
from dynagroup.validation import Check

__all__ = ["Feed", "Source"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What the feeds of an epoch draw on: facts, and the knobs they were given.

    Args:
        order: dataset indices by position; empty where the dataset or the user brings batches.
        lengths: known lengths by position. rough: roughly known ones. At most one of them.
        restart: where updates go on, on another number of ranks than they began on.
        batches: this rank's batches of dataset indices, where the user gives them.
    """

    dataset: Any
    world: World
    epoch: int
    budget: Budget
    config: OnlineConfig
    collator: RefinementCollator
    stats: LoaderStats
    workers: Workers
    order: Order
    sizes: UpdateSizes | None = None
    batches: list[list[int]] | None = None
    lengths: Streams | None = None
    rough: IntArray | None = None
    restart: UpdateMark | None = None

    def rank(self, number: int | None = None, size: int | None = None) -> Rank:
        """This rank, or another one."""
        who = self.world.rank if number is None else number
        return Rank(who, size or self.world.size, self.config.seed, self.epoch)

    def windows(self, plans: Iterable[Planned] = (), *, whole: bool = False, order: Order | None = None) -> Windows:
        """Requests for this epoch's workers."""
        return Windows(
            self.workers.queue,
            self.workers.open_map,
            self.order if order is None else order,
            self.epoch,
            plans=plans,
            max_bytes=None if whole else self.config.window_bytes,
        )


class Feed(ABC):
    """Windows of one rank in one epoch, in the order in which it opened them."""

    kind: ClassVar[str]
    """Stands in saved states."""
    ordered: ClassVar[bool] = True
    """Batches keep the order in which they come (they were planned in rows), instead of being shuffled."""
    bounded: ClassVar[bool] = True
    """What a rank still receives is known beforehand."""
    place: ClassVar[Mapping[str, Check]] = {}
    """What its saved place must be."""
    opening: int = 0
    """What a stream's share begins with, see :func:`~dynagroup.online.datasets.opening_of`; 0: not known."""

    @property
    def has_nothing(self) -> bool:
        """It gave no batch and will give none, so that its rank cannot even idle; see :meth:`lent`."""
        return False

    def lent(self, refined: Refined) -> None:
        """A batch of another rank's, to idle on."""
        raise ConfigError(f"a {type(self).__name__} has samples of its own to idle on")

    def tell_of_equal_ranks(self) -> None:
        """All ranks have the same ``opening``."""
        raise ConfigError(f"a {type(self).__name__} has no opening")

    @property
    @abstractmethod
    def receiving(self) -> bool:
        """Something was handed out and not taken yet, or more may be handed out."""

    @property
    @abstractmethod
    def can_take(self) -> bool:
        """:meth:`take` would return a window, or find the end of a stream."""

    @property
    def pending_samples(self) -> int:
        """Samples handed out and not taken yet; 0 where it is not known."""
        return 0

    @property
    def shares(self) -> bool:
        """Positions are left that the ranks' loads hand out, see :meth:`share`."""
        return False

    def share(self, loads: Sequence[int], ahead: int) -> None:
        """Hand out positions by all ranks' loads, in samples, so that each has ``ahead`` and what its workers prefetch."""
        raise ConfigError(f"a {type(self).__name__} hands nothing out")

    def check_given(self, samples: int) -> None:
        """So many samples, delivered or on their way, were handed out to all ranks before they resumed.

        Raises:
            StateError: the place says otherwise.
        """
        raise ConfigError(f"a {type(self).__name__} hands nothing out")

    @abstractmethod
    def take(self) -> Sequence[Queued] | None:
        """The next window's batches; None at the end of a stream. Raises what a worker raised."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the workers; a later fork must not inherit them."""

    @abstractmethod
    def spare(self) -> Refined:
        """One sample as a batch, for a rank that idles and never had any."""

    @abstractmethod
    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        """Its place, and the batches that it gave and that are not used: ``front`` are agreed steps, ``pool`` is queued."""

    @abstractmethod
    def reload(self) -> tuple[list[Queued | None], list[Queued]]:
        """What a resumed epoch had agreed and queued, loaded again."""

    @classmethod
    @abstractmethod
    def left(cls, source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
        """Positions that no rank has emitted, from the places of all of them.

        Raises:
            StateError: the ranks' parts were fixed beforehand, so that they resume on as many ranks only.
        """

    def unused(self, pool: Sequence[Queued]) -> list[int]:
        """Dataset indices of what this rank would still have emitted."""
        return [index for queued in pool for index in queued.refined.indices]

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end."""
        raise ConfigError("updates are counted only with `samples_per_update`")

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from the first on that no rank's workers can have been asked for."""
        raise ConfigError("set_samples_per_update needs a loader with samples_per_update: this one is free-running")
