"""The online loader, seen by an adapter as a source of updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dynagroup.errors import StateError
from dynagroup.online.loader import OnlineDataLoader
from dynagroup.update.planned import PlannedDataLoader
from dynagroup.update.sizes import Cursor, UpdateSizes, first_cursor
from dynagroup.update.stats import LoaderStats
from dynagroup.update.step import Step
from dynagroup.world import World

__all__ = ["OnlineUpdates", "PlannedUpdates"]


class PlannedUpdates:
    """A :class:`~dynagroup.PlannedDataLoader` whose items are updates."""

    def __init__(self, loader: PlannedDataLoader[Any]) -> None:
        self.loader = loader
        self._logged = loader.stats.copy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property
    def recent(self) -> LoaderStats:
        return self.loader.stats - self._logged

    @recent.setter
    def recent(self, value: LoaderStats) -> None:
        self._logged = self.loader.stats - value

    def __len__(self) -> int:
        return self.loader.num_updates_in(0)

    def num_updates(self, epoch: int) -> int:
        return self.loader.num_updates_in(epoch)

    @property
    def next_epoch(self) -> int:
        return self.loader.epoch

    def __iter__(self) -> Iterator[list[Step[Any]]]:
        return self.loader.updates()


class OnlineUpdates:
    """What adapters ask of :class:`~dynagroup.PlannedDataLoader`, answered by an :class:`OnlineDataLoader`.

    Args:
        loader: with ``samples_per_update``, a number or a schedule; without it, or with a stream, there is no length.
        world: the ranks it was made with.
    """

    def __init__(self, loader: OnlineDataLoader, world: World) -> None:
        self.loader = loader
        self.world = world
        self.dataset, self.budget = loader.dataset, loader.budget
        self.stats, self.recent = LoaderStats(), LoaderStats()
        self._cursor = Cursor()

    @property
    def num_changes(self) -> int:
        """How often the size of updates was changed at run time."""
        return len(self.loader.sizes.changes) if self.loader.sizes is not None else 0

    def set_samples_per_update(self, samples: int) -> int:
        """See :meth:`OnlineDataLoader.set_samples_per_update`."""
        return self.loader.set_samples_per_update(samples)

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    @property
    def num_samples(self) -> int:
        """Samples of an epoch; 0 for a stream, whose number nobody knows."""
        if self.loader.sizes is not None:
            return self.loader.sizes.num_ordered()
        try:
            return len(self.dataset)
        except TypeError:
            return 0

    @property
    def _sizes(self) -> UpdateSizes:
        if self.loader.sizes is None:
            raise TypeError("the number of updates is not known beforehand; set max_steps")
        return self.loader.sizes

    def __len__(self) -> int:
        return self.num_updates(0)

    def num_updates(self, epoch: int) -> int:
        return self._sizes.num_updates(epoch)

    def samples_after(self, updates: int) -> int:
        return first_cursor(self._sizes, lambda cursor: cursor.update >= updates).samples_seen

    def updates_until(self, samples: int) -> int:
        return first_cursor(self._sizes, lambda cursor: cursor.samples_seen >= samples).update

    @property
    def next_epoch(self) -> int:
        return self.loader.epoch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._cursor.epoch:
            self._cursor = replace(self._cursor, epoch=epoch, samples_used=0)
        self.loader.set_epoch(epoch)

    def restart_epoch(self) -> None:
        epoch = self.loader.epoch
        self.loader.set_epoch(epoch + 1)
        self.set_epoch(epoch)
        self._cursor = replace(self._cursor, samples_used=0)

    def skip_to(self, epoch: int, samples_used: int, update: int) -> None:
        raise StateError(
            "this checkpoint was saved without the online loader's state; continue it with mode='offline', "
            "or pass ignore_data_skip=True to begin its epoch anew"
        )

    def __iter__(self) -> Iterator[list[Step[Any]]]:
        padded, real = self.loader.stats.padded_tokens, self.loader.stats.real_tokens
        for steps in self.loader.updates():
            counts = self.loader.stats
            done = _stats_of(steps, counts.real_tokens - real, counts.padded_tokens - padded)
            padded, real = counts.padded_tokens, counts.real_tokens
            self._cursor = replace(
                self._cursor,
                update=self._cursor.update + 1,
                samples_used=self._cursor.samples_used + done.update_samples,
                samples_seen=self._cursor.samples_seen + done.update_samples,
                current=int(steps[0].samples.total) if self.loader.sizes is None else self.loader.cursor.current,
            )
            self.stats, self.recent = self.stats + done, self.recent + done
            yield steps

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank's must be saved."""
        return {"cursor": asdict(self._cursor), "loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        self.loader.load_state_dict([state["loader"] for state in states])
        self._cursor = Cursor(**states[0]["cursor"])


def _stats_of(steps: Sequence[Step[Any]], real_tokens: int, padded_tokens: int) -> LoaderStats:
    done = LoaderStats(real_tokens=real_tokens, padded_tokens=padded_tokens)
    for step in steps:
        done.count_step(int(step.samples.local), idle=step.idle)
    done.count_update(int(steps[0].samples.total))
    return done
