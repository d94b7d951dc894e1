"""The online loader, seen by an adapter as a source of updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dynagroup.errors import ConfigError, StateError
from dynagroup.loader import OnlineDataLoader
from dynagroup.step import Step
from dynagroup.update_plan import UpdateStats
from dynagroup.update_sizes import Cursor
from dynagroup.world import World

__all__ = ["OnlineUpdates"]


class OnlineUpdates:
    """What adapters ask of :class:`~dynagroup.updates.UpdateLoader`, answered by an :class:`OnlineDataLoader`.

    Args:
        loader: with a fixed ``samples_per_update``; without one, or with a stream, there is no length.
        world: the ranks it was made with.
    """

    num_changes = 0

    def __init__(self, loader: OnlineDataLoader, world: World) -> None:
        if callable(loader.config.samples_per_update):
            raise ConfigError(
                "a schedule of samples_per_update needs mode='offline', where every update is planned before training"
            )
        self.loader = loader
        self.world = world
        self.dataset = loader.dataset
        self.stats, self.recent = UpdateStats(), UpdateStats()
        self._cursor = Cursor()

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    @property
    def num_samples(self) -> int:
        """Samples of an epoch; 0 for a stream, whose number nobody knows."""
        try:
            return len(self.dataset)
        except TypeError:
            return 0

    @property
    def _size(self) -> int:
        size = self.loader.config.samples_per_update
        if size is None or not self.num_samples:
            raise TypeError("the number of updates is not known beforehand; set max_steps")
        return int(size)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.num_updates(0)

    def num_updates(self, epoch: int) -> int:
        return -(-self.num_samples // self._size)

    def samples_after(self, updates: int) -> int:
        epochs, rest = divmod(updates, len(self))
        return epochs * self.num_samples + min(rest * self._size, self.num_samples)

    def updates_until(self, samples: int) -> int:
        epochs, rest = divmod(samples, self.num_samples)
        return epochs * len(self) + -(-rest // self._size)

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
                samples_used=self._cursor.samples_used + done.samples,
                samples_seen=self._cursor.samples_seen + done.samples,
                current=done.samples,
            )
            self.stats.add(done)
            self.recent.add(done)
            yield steps

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank's must be saved."""
        return {"cursor": asdict(self._cursor), "loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        self.loader.load_state_dict([state["loader"] for state in states])
        self._cursor = Cursor(**states[0]["cursor"])


def _stats_of(steps: Sequence[Step[Any]], real_tokens: int, padded_tokens: int) -> UpdateStats:
    """Tokens and batches are this rank's, samples all ranks'."""
    sizes = [int(step.samples.local) for step in steps if not step.idle]
    return UpdateStats(
        updates=1,
        samples=int(steps[0].samples.total),
        batches=len(sizes),
        idle_steps=len(steps) - len(sizes),
        real_tokens=real_tokens,
        padded_tokens=padded_tokens,
        smallest_batch=min(sizes, default=0),
        largest_batch=max(sizes, default=0),
    )
