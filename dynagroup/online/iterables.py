"""The feed of an iterable dataset, which says by itself who reads what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynagroup.errors import AlignmentError
from dynagroup.online.feeds import KINDS, MapFeed, Source
from dynagroup.online.messages import Refined, RefinedWindow

__all__ = ["Feed", "IterableFeed"]


class IterableFeed:
    """Windows of an iterable dataset, until it ends. Its place is where each worker reads on, and what it leaves out.

    One that does not divide itself gives every sample to every worker, or every rank. Shares that are one and the same begin
    with the same samples; that is told, and never guessed: samples that are all alike, or drawn at random, say nothing.
    """

    kind = KINDS["iterable"]
    shares = False
    pending_samples = 0

    def __init__(self, source: Source, kind: str, place: Mapping[str, Any] | None) -> None:
        self._source = source
        self._spots: Mapping[str, Any] = place["workers"] if place else {}
        self._iterator: Iterator[RefinedWindow] | None = None
        self._spare: Refined | None = None
        self._gave = False
        self._openings: dict[int, int] = {}
        self._opened: dict[int, deque[dict[str, Any]]] = {}
        """Worker -> its windows that may not be fully used: where each began, and its samples' numbers."""
        self.receiving = True
        self.opening = 0
        """What this rank's share begins with, see :func:`~dynagroup.online.datasets.opening_of`; 0: not known."""

    @property
    def can_take(self) -> bool:
        """:meth:`take` would return a window, or find the end."""
        return self.receiving

    def take(self) -> list[Refined] | None:
        """The next window's batches; None at the end."""
        source = self._source
        if self._iterator is None:
            self._iterator = source.workers.open_iterable(source.epoch, source.world, self._spots)
        for window in self._iterator:
            if not window.spare:
                self._note_opening(window)
                self._opened.setdefault(window.worker, deque()).append({**window.resume})
                self._gave = self._gave or len(window) > 0
                return window.batches
            self._spare = window.batches[0]
        self.receiving = False
        return None

    def _note_opening(self, window: RefinedWindow) -> None:
        opening = window.resume.pop("opening", 0)
        if not opening:
            return
        self.opening = self.opening or opening
        other = self._openings.setdefault(opening, window.worker)
        if other != window.worker:
            self._source.workers.tell_of_sharing(
                f"workers {other} and {window.worker} read the same samples: an iterable dataset must divide itself among its "
                f"workers, or every sample comes {self._source.workers.num_workers} times; let each yield its own part, by "
                "torch.utils.data.get_worker_info(), or use one worker"
            )

    def tell_of_equal_ranks(self) -> None:
        """All ranks have the same ``opening``."""
        size = self._source.world.size
        self._source.workers.tell_of_sharing(
            f"all {size} ranks read the same samples: an iterable dataset must divide itself among ranks, or every sample comes "
            f"{size} times; let each rank yield its own part, by dynagroup.distributed.rank_and_size() or datasets' "
            "split_dataset_by_node"
        )

    @property
    def has_nothing(self) -> bool:
        """It gave no batch and will give none, so that its rank cannot even idle; see :meth:`lent`."""
        return not (self.receiving or self._gave or self._spare)

    def lent(self, refined: Refined) -> None:
        """A batch of another rank's, to idle on."""
        self._spare = refined

    def close(self) -> None:
        self._iterator = None

    def spare(self) -> Refined:
        if self._spare is None:
            raise AlignmentError(f"rank {self._source.world.rank} was lent nothing to idle on")
        return self._spare

    def state(self, front: Sequence[Refined | None], pool: Sequence[Refined]) -> dict[str, Any]:
        workers, size = max(self._source.workers.num_workers, 1), self._source.world.size
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
        return [], []

    def unused(self, pool: Sequence[Refined]) -> list[int]:
        return [index for batch in pool for index in batch.indices]


Feed = MapFeed | IterableFeed
