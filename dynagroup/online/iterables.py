"""The feed of an iterable dataset, which says by itself who reads what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynagroup.online.feeds import Workers
from dynagroup.online.messages import Refined, RefinedWindow
from dynagroup.online.plans import Source

__all__ = ["IterableFeed"]


class IterableFeed:
    """Windows of an iterable dataset, until it ends. Its place is where each worker reads on, and what it leaves out.

    One that does not divide itself gives every sample to every worker, or every rank. Shares that are one and the same begin
    with the same samples; that is told, and never guessed: samples that are all alike, or drawn at random, say nothing.
    """

    shares = False
    pending_samples = 0

    def __init__(self, source: Source, workers: Workers, place: Mapping[str, Any] | None) -> None:
        self._workers, self._epoch, self._world = workers, source.cursor.epoch, source.world
        self._spots: Mapping[str, Any] = place["workers"] if place else {}
        self._iterator: Iterator[RefinedWindow] | None = None
        self._openings: dict[int, int] = {}
        self._opened: dict[int, deque[Mapping[str, Any]]] = {}
        """Worker -> its windows that may not be fully used: where each began, and its samples' numbers."""
        self.can_take = self.receiving = self.has_nothing = True
        """``has_nothing``: no batch came yet; if none will, its rank cannot even idle without another's."""
        self.opening = 0
        """What this rank's share begins with, see :func:`~dynagroup.online.datasets.opening_of`; 0: not known."""

    def take(self) -> list[Refined] | None:
        """The next window's batches; None at the end."""
        if self._iterator is None:
            self._iterator = self._workers.open_iterable(self._epoch, self._world, self._spots)
        window = next(self._iterator, None)
        if window is None:
            self.can_take = self.receiving = False
            return None
        self.has_nothing = self.has_nothing and not window.batches
        self._note_opening(window.place["opening"], window.place["worker"])
        self._opened.setdefault(window.place["worker"], deque()).append(window.place)
        return window.batches

    def _note_opening(self, opening: int, worker: int) -> None:
        self.opening = self.opening or opening
        other = self._openings.setdefault(opening, worker)
        if opening and other != worker:
            self._workers.tell_of_sharing(
                f"workers {other} and {worker} read the same samples: an iterable dataset must divide itself among its "
                f"workers, or every sample comes {self._workers.num_workers} times; let each yield its own part, by "
                "torch.utils.data.get_worker_info(), or use one worker"
            )

    def tell_of_equal_ranks(self) -> None:
        """All ranks have the same ``opening``."""
        size = self._world.size
        self._workers.tell_of_sharing(
            f"all {size} ranks read the same samples: an iterable dataset must divide itself among ranks, or every sample comes "
            f"{size} times; let each rank yield its own part, by dynagroup.distributed.rank_and_size() or datasets' "
            "split_dataset_by_node"
        )

    def close(self) -> None:
        """Let go of the workers."""
        self._iterator = None

    def state(self, front: Sequence[Refined | None], pool: Sequence[Refined]) -> dict[str, Any]:
        """Where each worker reads on, and what it leaves out: all but the samples of these batches."""
        workers, size = max(self._workers.num_workers, 1), self._world.size
        remaining: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        for arrival in (arrival for batch in (*front, *pool) if batch for arrival in batch.indices):
            number, worker = divmod(arrival // size, workers)
            remaining[worker].add(number)
        spots = dict(self._spots)  # of workers that gave nothing since
        for worker, opened in self._opened.items():
            while len(opened) > 1 and not remaining[worker].intersection(opened[0]["numbers"]):
                opened.popleft()
            first, last = opened[0], opened[-1]
            before = spots.get(str(worker), {"until": 0, "keep": ()})
            keep = remaining[worker].union(n for n in before["keep"] if n >= last["until"])  # not read again so far
            until = max(last["until"], before["until"])
            spots[str(worker)] = {"read": first["read"], "until": until, "keep": sorted(keep), "state": first["state"]}
        return {"workers": spots}

    def reload(self) -> tuple[list[Refined | None], list[Refined]]:
        """Nothing: what was queued is read again."""
        return [], []

    def unused(self, pool: Sequence[Refined]) -> list[int]:
        """Arrival numbers of what this rank would still have emitted."""
        return [index for batch in pool for index in batch.indices]
