"""The dataset is iterable."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynagroup.errors import AlignmentError, StateError
from dynagroup.online.feeds.base import Feed, Source
from dynagroup.online.records import Queued, Refined, RefinedWindow
from dynagroup.shapes import IntArray
from dynagroup.validation import a_list, a_mapping, an_int, anything

__all__ = ["StreamFeed"]


class StreamFeed(Feed):
    """Windows of an iterable dataset, until it ends. Its place is where each worker reads on, and what it leaves out."""

    kind = "stream"
    ordered = False
    bounded = False
    place = {
        "workers": a_mapping(
            values=a_mapping({"read": an_int(), "until": an_int(), "keep": a_list(an_int()), "state": anything()})
        )
    }

    def __init__(self, source: Source, place: Mapping[str, Any] | None) -> None:
        self._source = source
        self._place = None if place is None else {"epoch": source.epoch, "workers": place["workers"]}
        self._iterator: Iterator[RefinedWindow] | None = None
        self._receiving = True
        self._spare: Refined | None = None
        self._gave = False
        self._openings: dict[int, int] = {}
        """What workers' shares begin with -> the first worker whose share does."""
        self._opened: dict[int, deque[dict[str, Any]]] = {}
        """Worker -> its windows that may not be fully used: where each began, and its samples' numbers."""

    @property
    def receiving(self) -> bool:
        return self._receiving

    @property
    def can_take(self) -> bool:
        return self._receiving

    def take(self) -> list[Queued] | None:
        source = self._source
        if self._iterator is None:
            self._iterator = source.workers.open_stream(source.epoch, source.world, self._place)
        for window in self._iterator:
            if not window.spare:
                self._note_opening(window)
                self._opened.setdefault(window.worker, deque()).append({**window.resume})
                self._gave = self._gave or len(window) > 0
                return [Queued(refined, tuple(refined.indices)) for refined in window]
            self._spare = window.batches[0]
        self._receiving = False
        return None

    # A stream that does not divide itself gives every sample to every worker, or every rank. Shares that are one and the same
    # begin with the same samples; that is told, and never guessed: samples that are all alike, or drawn at random, say nothing.
    def _note_opening(self, window: RefinedWindow) -> None:
        opening = window.resume.pop("opening", 0)
        if not opening:
            return
        self.opening = self.opening or opening
        other = self._openings.setdefault(opening, window.worker)
        if other != window.worker:
            self._source.workers.tell_of_sharing(
                f"workers {other} and {window.worker} read the same samples: a stream must divide itself among its workers, or "
                f"every sample comes {self._source.workers.num_workers} times; let each yield its own part, by "
                "torch.utils.data.get_worker_info(), or use one worker"
            )

    def tell_of_equal_ranks(self) -> None:
        size = self._source.world.size
        self._source.workers.tell_of_sharing(
            f"all {size} ranks read the same samples: a stream must divide itself among ranks, or every sample comes {size} "
            "times; let each rank yield its own part, by dynagroup.distributed.rank_and_size() or datasets' split_dataset_by_node"
        )

    @property
    def has_nothing(self) -> bool:
        return not (self._receiving or self._gave or self._spare)

    def lent(self, refined: Refined) -> None:
        self._spare = refined

    def close(self) -> None:
        self._iterator = None

    def spare(self) -> Refined:
        if self._spare is None:
            raise AlignmentError(f"rank {self._source.world.rank} was lent nothing to idle on")
        return self._spare

    def state(self, front: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        workers, size = max(self._source.workers.num_workers, 1), self._source.world.size
        remaining: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        for queued in (*front, *pool):
            for arrival in queued.refined.indices if queued else ():
                number, worker = divmod(arrival // size, workers)
                remaining[worker].add(number)
        spots = {} if self._place is None else dict(self._place["workers"])  # of workers that gave nothing since
        for worker, opened in self._opened.items():
            while len(opened) > 1 and not remaining[worker].intersection(opened[0]["numbers"]):
                opened.popleft()
            first, last = opened[0], opened[-1]
            before = spots.get(str(worker), {"until": 0, "keep": ()})
            keep = remaining[worker].union(n for n in before["keep"] if n >= last["until"])  # not read again so far
            until = max(last["until"], before["until"])
            spots[str(worker)] = {"read": first["read"], "until": until, "keep": sorted(keep), "state": first["state"]}
        return {"workers": spots}

    def reload(self) -> tuple[list[Queued | None], list[Queued]]:
        return [], []

    @classmethod
    def left(cls, source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
        raise StateError(
            f"a stream is divided among ranks by itself: it resumes on {len(places)} ranks, as before, not on "
            f"{source.world.size}"
        )
