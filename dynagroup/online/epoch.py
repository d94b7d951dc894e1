"""One epoch of an online loader: which windows come, who runs them, and its state at every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from dynagroup.errors import AlignmentError, StateError
from dynagroup.online.collate import Refined, RefinementCollator, shorten
from dynagroup.online.config import Facts
from dynagroup.online.engine import FreeRunner, HandOut, Knobs, Queued, Take, UpdateRunner
from dynagroup.online.exchange import Exchange, fingerprint
from dynagroup.online.learned import LearnedLengths
from dynagroup.online.requests import Rank, UpdateMark, exact_plans, exact_window, rough_plans, update_plans
from dynagroup.online.state import pack, pack_groups, unpack, unpack_groups
from dynagroup.online.windows import IndexedDataset, MapFeed, Order, Planned, RequestQueue, StreamFeed, split_queued
from dynagroup.shapes import TOKENS, IntArray
from dynagroup.update.sizes import Cursor, UpdateSizes

__all__ = ["EpochRun"]


class EpochRun:
    """Makes the feed and the runner of one epoch, fresh or resumed, and iterates."""

    def __init__(
        self,
        facts: Facts,
        *,
        open_stream: Callable[[Mapping[str, Any] | None], Iterator[Any]],
        open_map: Callable[[], Iterator[Any]],
        queue: RequestQueue,
        sizes: UpdateSizes | None,
        batch_sampler: Iterable[Sequence[int]] | None,
        learned: LearnedLengths | None,
        hint: IntArray | None,
        resume: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self.facts, self.sizes, self._learned, self._hint = facts, sizes, learned, hint
        self._open_stream, self._open_map, self._queue = open_stream, open_map, queue
        self._batch_sampler = batch_sampler
        self._own_batches: list[list[int]] | None = None
        self.exchange = Exchange(facts.world, facts.epoch)
        self._ended = False
        self.order = Order(facts.indices if facts.indices is not None else np.zeros(0, np.int64))
        self._restart: UpdateMark | None = None
        progress, rest = self._resolve(resume)
        self._progress = progress
        self._identity = {
            **facts.identity,
            "epoch": facts.epoch,
            "place": (progress or {}).get("steps", 0),
            "rest": rest,
            "sizes of updates": self._print_of_sizes(),
        }
        self._build(progress)

    @property
    def mode(self) -> str:
        """One of "stream", "batches", "update", "exact", "rough" or "windows"."""
        if self.facts.indices is None:
            return "stream" if self._batch_sampler is None else "batches"
        if self.sizes is not None:
            return "update"
        if self._lengths is not None:
            return "exact"
        return "rough" if self._rough is not None else "windows"

    def __iter__(self) -> Iterator[Take]:
        self._begin()
        if isinstance(self.runner, FreeRunner) and self._progress is None:
            self.runner.start()
        yield from self.runner

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end; the one that is under way counts."""
        assert self.sizes is not None
        return self._update_mark().cursor(self.sizes)

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from the first on that no rank's workers can have been asked for."""
        assert self.sizes is not None
        assert isinstance(self.feed, MapFeed)
        cursor = self._update_mark().passed.cursor(self.sizes)
        for after in islice(self.sizes.cursors(cursor), self.facts.depth):
            cursor = after
        update = self.sizes.change(cursor, samples)
        if self.feed.upcoming is not None:
            self.feed.replan(self._update_plans(UpdateMark(*self.feed.upcoming.mark)))
        return update

    def finish(self) -> None:
        """After the last step: name what was left."""
        self._ended = True
        if self.facts.config.uneven == "stop" and isinstance(self.runner, FreeRunner):
            self._count_left()

    def close(self) -> None:
        """Let go of the workers, also when the loop was left early."""
        self.feed.close()
        self.facts.stats.exchanged_bytes += self.exchange.num_bytes

    def any_batch(self, dataset: Any, collator: RefinementCollator) -> Refined:
        """One sample of the dataset as a batch, for a rank that never had any."""
        if isinstance(self.feed, StreamFeed) and self.feed.spare is not None:
            return self.feed.spare
        if self.facts.indices is None:
            raise AlignmentError(
                f"rank {self.facts.world.rank} has no samples at all to idle on; give every rank at least one sample"
            )
        samples = IndexedDataset(dataset).__getitems__(self.order.at(np.arange(1)))
        return collator(samples).batches[0]

    def state(self) -> dict[str, Any] | None:
        """Progress, JSON-able; None once the epoch is over."""
        runner = self.runner
        common = {
            "mode": self.mode,
            "steps": runner.steps,
            "offset": runner.offset,
            "partial": list(runner.partial),
            "last_cost": runner.last_cost,
            "base": None if self.order.base is None else pack(self.order.base),
        }
        if isinstance(runner, UpdateRunner):
            return self._update_state(runner, common)
        due = [take.queued for take in runner.due]
        if self._ended or (runner.ended and not due and not runner.agreed):
            return None
        agreed = [*due, *runner.agreed]
        common |= {
            "picked": runner.picked,
            "load_all": runner.load_all,
            "delivered": list(runner.delivered),
            "samples_per_batch": runner.samples_per_batch,
        }
        if isinstance(self.feed, StreamFeed):
            return common | {"agreed": None, "pool": None, **self._stream_state(agreed, runner.pool)}
        common |= {"agreed": _groups(agreed), "pool": _groups(runner.pool), "late": [int(q.late) for q in runner.pool]}
        common |= {"kept": [int(q.kept) for q in runner.pool]}
        if runner.handout is not None:
            ranges = [(int(p.positions[0]), int(p.positions[-1]) + 1, p.keep) for p in self.feed.pending]
            return common | {"handout": [runner.handout.start, runner.handout.stop], "pending": ranges}
        return common | {"next": self._next_mark(self.feed)}

    # -- building ----------------------------------------------------------------------------------------------------

    def _resolve(self, resume: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any] | None, int]:
        """The progress to go on from on as many ranks as before; on another number only what remains is kept."""
        self._lengths = self._rough = None
        if resume is None:
            self._choose_lengths()
            return None, 0
        progress = resume[0]["progress"]
        if progress["base"] is not None:
            self.order.base = unpack(progress["base"])
        self._choose_lengths()
        if progress["mode"] != self.mode:
            raise StateError(f"the state was taken in a {progress['mode']!r} epoch, this one is {self.mode!r}")
        if resume[0]["world_size"] == self.facts.world.size:
            return progress, 0
        remaining = self._remaining(resume)
        if self.sizes is not None:
            self._restart = self._restarted(resume)
        self.order.base = remaining if self.order.base is None else self.order.base[remaining]
        self._choose_lengths()
        return None, fingerprint(remaining.tolist())

    def _choose_lengths(self) -> None:
        """Lengths by position: known ones for exact plans, hints for rough ones."""
        self._lengths = self._rough = None
        if self.facts.indices is None or not len(self.order):
            return
        learned = self._learned
        if self._hint is None and (learned is None or not learned.seen):
            return
        at = np.asarray(self.order.at(np.arange(len(self.order))), np.int64)
        used = len(at) if self.sizes is None else self.sizes.end(self.facts.epoch).samples_used - self._skipped
        known = None if learned is None else learned.known(at[:used])
        if known is not None and learned is not None:
            unused = np.zeros(len(at) - used, np.int32)  # what an epoch drops is never measured, and never asked for
            whole = {name: np.append(values, unused) for name, values in known.items()}
            if learned.steady:
                self._lengths = whole
            else:
                self._rough = whole[TOKENS].astype(np.int64)
        elif self._hint is not None:
            self._rough = self._hint[at]

    def _build(self, progress: Mapping[str, Any] | None) -> None:
        config = self.facts.config
        knobs = Knobs(
            window=config.window,
            accumulation=config.accumulation,
            seed=config.seed,
            uneven=config.uneven,
            depth=self.facts.depth,
            ordered=self.mode in ("exact", "rough", "batches"),
            streams=self.mode in ("stream", "batches"),
        )
        self.feed = self._feed(progress)
        split = partial(split_queued, self.facts.collator)
        if self.sizes is not None:
            self.runner = UpdateRunner(self.exchange, self.feed, knobs, self.facts.stats, split)
        else:
            handout = None
            if self.mode == "windows":
                handout = HandOut(*(progress["handout"] if progress else (0, len(self.order))))
            self.runner = FreeRunner(self.exchange, self.feed, knobs, self.facts.stats, split, handout=handout)
        if progress is not None:
            self._restore(progress)

    def _feed(self, progress: Mapping[str, Any] | None) -> MapFeed | StreamFeed:
        if self.mode == "stream":
            spots = None if progress is None else {"epoch": self.facts.epoch, "workers": progress["workers"]}
            return StreamFeed(partial(self._open_stream, spots))
        first = [] if progress is None else self._first(progress)
        source = self._source(progress)
        feed = MapFeed(self._queue, self._open_map, self.order, self.facts.epoch, first=first, source=source)
        if self.mode == "windows" and progress is not None:
            closed = progress["handout"][0] >= progress["handout"][1]
            for start, stop, keep in progress["pending"]:
                feed.grant([(start, stop)], closed=False, keep=keep)
            feed.grant([], closed=closed)
        return feed

    def _source(self, progress: Mapping[str, Any] | None) -> Iterator[Planned] | None:
        who, config, budget = self.facts.rank, self.facts.config, self.facts.budget
        start = None if progress is None or "next" not in progress else progress["next"]
        if self.sizes is not None:
            return self._update_plans(UpdateMark(*start) if start else self._restart)
        if progress is not None and "next" in progress and start is None:
            return iter(())
        if self.mode == "batches":
            return self._batches((start or [0])[0])
        if self._lengths is not None:
            window = exact_window(self._lengths, budget, who.size, config)
            return exact_plans(
                self._lengths, budget, who, window=window, shuffle=config.shuffle, start=tuple(start or (0, 0))
            )
        if self._rough is not None:
            return rough_plans(self._rough, who, window=config.window, start=tuple(start or (0, 0)))
        return None

    def _update_plans(self, start: UpdateMark | None) -> Iterator[Planned]:
        assert self.sizes is not None
        facts, skipped = self.facts, self._skipped
        known = {"lengths": self._lengths, "hint": self._rough}
        return update_plans(self.sizes, facts.rank, budget=facts.budget, **known, skipped=skipped, start=start)

    @property
    def _skipped(self) -> int:
        """Samples at the beginning of the epoch's order that were used before it went on on another number of ranks."""
        if self.order.base is None or self.facts.indices is None:
            return 0
        return len(self.facts.indices) - len(self.order.base)

    def _batches(self, start: int) -> Iterator[Planned]:
        """The user's batches, each refined by itself; positions number this rank's samples as they come."""
        assert self._batch_sampler is not None
        _set_epoch(self._batch_sampler, self.facts.epoch)
        self._own_batches = [[int(i) for i in batch] for batch in self._batch_sampler]
        flat = np.asarray([i for batch in self._own_batches for i in batch], np.int64)
        self.order = Order(flat)
        return self._own_plans(start)

    def _own_plans(self, start: int) -> Iterator[Planned]:
        assert self._own_batches is not None
        position = 0
        for number, batch in enumerate(self._own_batches):
            if number >= start:
                yield Planned(np.arange(position, position + len(batch)), (len(batch),), mark=(number,))
            position += len(batch)

    def _first(self, progress: Mapping[str, Any]) -> list[Planned]:
        """What a resumed epoch had in its queues comes first, in the very same batches."""
        groups = [g for name in ("agreed", "pool") for g in unpack_groups(progress[name]) if g]
        if not groups:
            return []
        keep = len(groups) if any(progress.get("kept", ())) else 0
        return [Planned(np.concatenate([np.asarray(g, np.int64) for g in groups]), tuple(len(g) for g in groups), keep)]

    def _restore(self, progress: Mapping[str, Any]) -> None:
        runner = self.runner
        runner.steps, runner.offset, runner.last_cost = progress["steps"], progress["offset"], progress["last_cost"]
        runner.partial = (progress["partial"][0], progress["partial"][1])
        if isinstance(runner, UpdateRunner):
            return
        runner.picked, runner.load_all = progress["picked"], progress["load_all"]
        runner.delivered = (progress["delivered"][0], progress["delivered"][1])
        runner.samples_per_batch = progress["samples_per_batch"]

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Reload what a resumed epoch had queued, and compare ranks; an error on one of them reaches all."""
        failure = None
        try:
            self._reload()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        if self.facts.world.size > 1:
            workers = {"num_workers": self.facts.num_workers, "prefetch_factor": self.facts.prefetch_factor}
            self.exchange.compare({**self._identity, **workers}, failure)
            if self._own_batches is not None:
                self._refuse_equal_batches(self._own_batches)
        elif failure is not None:
            raise failure

    def _reload(self) -> None:
        progress = self._progress
        if progress is None or progress["agreed"] is None:
            return
        agreed, pool = unpack_groups(progress["agreed"]), unpack_groups(progress["pool"])
        pieces: dict[int, list[Queued]] = {}
        if any(agreed) or any(pool):
            for q in self.feed.take() or ():
                pieces.setdefault(q.refined.group, []).append(q)
        numbers = iter(range(len(pieces)))
        slots = [pieces[next(numbers)] if group else [] for group in (*agreed, *pool)]
        front, back = slots[: len(agreed)], slots[len(agreed) :]
        extra = [q for pieces_of in front for q in pieces_of[1:]]
        first = [pieces_of[0] if pieces_of else None for pieces_of in front]
        if isinstance(self.runner, UpdateRunner):
            self.runner.resumed = [*first, *extra] or None
            return
        self.runner.agreed = first
        self.runner.pool = [q for pieces_of in back for q in pieces_of] + extra
        flags = list(zip(progress["late"], progress["kept"], strict=True))
        if len(flags) == len(self.runner.pool):  # processing may have changed lengths, and so the number of batches
            self.runner.pool = [
                replace(q, late=bool(late), kept=bool(kept))
                for q, (late, kept) in zip(self.runner.pool, flags, strict=True)
            ]

    def _refuse_equal_batches(self, batches: list[list[int]]) -> None:
        first = fingerprint(batches[:4])
        low, high = self.exchange.highest([first, -first])
        if low == -high and batches:
            raise AlignmentError(
                "every rank's `batch_sampler` gives the same batches, so every sample would be used on every rank; give "
                "each rank its own (LengthAwareBatchSampler does), or pass `sampler` and let the loader divide"
            )

    # -- state -------------------------------------------------------------------------------------------------------

    def _update_state(self, runner: UpdateRunner, common: dict[str, Any]) -> dict[str, Any] | None:
        rest = [take.queued for take in runner.due]
        if not rest and (self._ended or not self.feed.receiving):
            return None
        assert isinstance(self.feed, MapFeed)
        queues = {"agreed": _groups(rest), "pool": _groups([])}
        return common | queues | {"next": [int(m) for m in self._update_mark()]}

    def _next_mark(self, feed: MapFeed) -> list[int] | None:
        waiting = [p for p in feed.pending if p.mark]
        waiting += [feed.upcoming] if feed.upcoming is not None else []
        return [int(m) for m in waiting[0].mark] if waiting else None

    def _update_mark(self) -> UpdateMark:
        """Where the first update begins that was not taken yet."""
        assert self.sizes is not None
        assert isinstance(self.feed, MapFeed)
        mark = self._next_mark(self.feed)
        return UpdateMark(*mark) if mark is not None else UpdateMark.of(self.sizes.end(self.facts.epoch))

    def _print_of_sizes(self) -> int:
        if self.sizes is None or self.sizes.is_constant:
            return 0
        return fingerprint([stop for _, stop, _ in self.sizes.spans(self.sizes.start(self.facts.epoch))])

    def _stream_state(self, agreed: Sequence[Queued | None], pool: Sequence[Queued]) -> dict[str, Any]:
        workers, size = max(self.facts.num_workers, 1), self.facts.world.size
        remaining: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        for queued in (*agreed, *pool):
            for arrival in queued.refined.indices if queued else ():
                number, worker = divmod(arrival // size, workers)
                remaining[worker].add(number)
        assert isinstance(self.feed, StreamFeed)
        spots = {}
        for worker, opened in self.feed.opened.items():
            while len(opened) > 1 and not remaining[worker].intersection(opened[0]["numbers"]):
                opened.popleft()
            first, last = opened[0], opened[-1]
            keep = sorted(remaining[worker])
            spots[str(worker)] = {"read": first["read"], "until": last["until"], "keep": keep, "state": first["state"]}
        return {"workers": spots}

    def _remaining(self, states: Sequence[Mapping[str, Any]]) -> IntArray:
        """Positions that no rank has emitted, from the states of all of them."""
        if self.mode in ("stream", "batches"):
            raise StateError(
                f"a {'stream' if self.mode == 'stream' else 'batch_sampler'} is divided among ranks by itself: it resumes on "
                f"{len(states)} ranks, as before, not on {self.facts.world.size}"
            )
        parts: list[IntArray] = []
        for rank, state in enumerate(states):
            progress = state["progress"]
            for name in ("agreed", "pool"):
                parts += [np.asarray(g, np.int64) for g in unpack_groups(progress[name])]
            parts += [np.arange(start, stop) for start, stop, _ in progress.get("pending", ())]
            if "next" in progress and progress["next"] is not None:
                parts += self._still_planned(rank, len(states), progress["next"])
        if "handout" in states[0]["progress"]:
            parts.append(np.arange(*states[0]["progress"]["handout"]))
        return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))

    def _restarted(self, states: Sequence[Mapping[str, Any]]) -> UpdateMark:
        """Where updates go on, on another number of ranks: what remains of one is an update of its own."""
        begun = sum(int(unpack(s["progress"]["agreed"][0]).sum()) for s in states)
        mark = UpdateMark(*states[0]["progress"]["next"])
        if not begun:
            return mark
        return mark._replace(update=mark.update - 1, samples_used=mark.samples_used - begun, until=mark.samples_used)

    def _still_planned(self, rank: int, size: int, mark: Sequence[int]) -> list[IntArray]:
        config, facts = self.facts.config, self.facts
        who = Rank(rank, size, config.seed, facts.epoch)
        if self.sizes is not None:
            first = UpdateMark(*mark).samples_used - self._skipped
            return [np.arange(first, len(self.order))] if rank == 0 else []
        if self._lengths is not None:
            window = exact_window(self._lengths, facts.budget, size, config)
            plans = exact_plans(
                self._lengths, facts.budget, who, window=window, shuffle=config.shuffle, start=tuple(mark)
            )
        else:
            assert self._rough is not None
            plans = rough_plans(self._rough, who, window=config.window, start=tuple(mark))
        return [planned.positions for planned in plans]

    def _count_left(self) -> None:
        assert isinstance(self.runner, FreeRunner)
        left = [p for q in self.runner.pool for p in q.positions]
        if isinstance(self.feed, MapFeed):
            left += [int(p) for planned in self.feed.pending for p in planned.positions]
            handout = self.runner.handout
            if handout is not None and self.facts.world.rank == 0:
                left += range(handout.start, handout.stop)
            left = self.order.at(np.asarray(left, np.int64))
        self.facts.stats.left_samples += len(left)
        if left:
            warnings.warn(
                f"uneven='stop' ended the epoch with {len(left)} samples left on rank {self.facts.world.rank}: "
                f"{shorten(left)}; uneven='idle' uses them",
                stacklevel=4,
            )


def _groups(batches: Sequence[Queued | None]) -> list[str]:
    return pack_groups([q.positions if q is not None else () for q in batches])


def _set_epoch(sampler: Any, epoch: int) -> None:
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
