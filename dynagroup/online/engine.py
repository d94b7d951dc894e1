"""The alignment engine: one rank's refined windows become steps that all ranks take together, an epoch at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dynagroup.errors import AlignmentError
from dynagroup.online.feeds import IterableFeed, MapFeed, Workers
from dynagroup.online.messages import Refined, RefinedWindow
from dynagroup.online.plans import Source, behind, handed_out
from dynagroup.online.protocol import Agreement, Exchange, agree, even_parts, offer, placed, quantile
from dynagroup.online.state import LearnedLengths, pack
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import units_of
from dynagroup.update.loss_weight import Share, loss_scale
from dynagroup.update.step import LoaderStats, Step
from dynagroup.validation import warn_user

LOW_WATER = 32  # batches that a rank wants queued before an exchange: so many steps follow one


class Take(NamedTuple):
    """One step on this rank: a batch, or None to idle, and what it weighs."""

    batch: Refined | None
    samples: Share
    weight: Share
    ends_update: bool


class Runner(ABC):
    """One epoch, fresh or resumed; what both ways of running share. It stands at a cursor whose ``begun_samples`` and
    ``begun_weight`` are this rank's; ``under_way`` are the update's samples over all ranks; from a saved place of this rank it
    goes on with the very batches that were queued. ``identity`` is what all ranks must have alike."""

    def __init__(
        self,
        source: Source,
        workers: Workers,
        stands: Cursor,
        place: Mapping[str, Any] | None,
        under_way: int,
        identity: Mapping[str, Any],
        stats: LoaderStats,
        learned: LearnedLengths | None,
    ) -> None:
        self.source, self.config, self.world, self._workers = source, source.config, source.world, workers
        self.exchange = Exchange(self.world, stands.epoch)
        self.stats, self._learned, self._identity, self._place = stats, learned, identity, place
        self.feed: Any = (IterableFeed if source.iterable else MapFeed)(source, workers, place and place["feed"])
        self.stands, self._under_way = stands, under_way
        self.queue: list[Refined] = []  # batches that wait for an agreement
        self.agreed: list[Refined | None] = []  # steps that wait for the rest of their update
        self.due: deque[Take] = deque()  # steps whose update's totals are known
        self.ended = False  # the steps that are agreed are the epoch's last
        self.split: bool = place is not None and place["split"]  # a planned batch had to be, on some rank
        self._smallest: Refined | None = None  # to idle on: a copy of the smallest batch that it had, or was lent

    @abstractmethod
    def _steps(self) -> Iterator[Step[Any]]: ...

    @property
    @abstractmethod
    def over(self) -> bool:
        """No step of the epoch is left, on any rank."""

    @property
    def cursor(self) -> Cursor:
        return handed_out(self.stands, self._under_way, self.source.sizes)

    def state(self) -> dict[str, Any] | None:
        """Its place, JSON-able; None once the epoch is over."""
        if self.over:
            return None
        base, feed = self.source.order.base, self.feed.state([*(t.batch for t in self.due), *self.agreed], self.queue)
        place = {"under_way": self._under_way, "ended": self.ended, "split": self.split, "feed": feed}
        return {**place, "base": base if base is None else pack(base)}

    def close(self) -> None:
        """Let go of the workers, also when the loop was left early."""
        self.feed.close()

    def __iter__(self) -> Iterator[Step[Any]]:
        failure, place = None, self._place
        try:
            self.agreed, self.queue = self.feed.reload()
            self._note([batch for batch in self.agreed if batch] + self.queue)
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        self.exchange.compare(self._identity, failure)
        if place is not None:
            # What was the end is none if some batch had to be split and waits again, or if an iterable is read again.
            waits = len(self.queue) or int(place["ended"] and self.feed.receiving)
            waits, lacking = self.exchange.highest([waits, int(self._smallest is None)])
            self.ended = place["ended"] and not waits
            self._lend(lacking and self.agreed)
        elif self.feed.shares:
            self.feed.share([0] * self.world.size, 0)
        yield from self._steps()

    def _even_out(self, batches: Sequence[Refined], steps: int) -> list[Refined]:
        """Split batches whose samples were kept, until there are ``steps`` or none can be split."""
        if len(batches) >= steps:
            return list(batches)
        sizes = [1 if batch.samples is None else len(batch) for batch in batches]
        split = self._workers.collator.split
        pairs = zip(batches, even_parts(sizes, steps), strict=True)
        return [part for batch, parts in pairs for part in ([batch] if parts == 1 else split(batch, parts))]

    @property
    def _in_rows(self) -> bool:
        """Batches are taken in the order they came in: the user's, or rows planned to be of equal work, none of them split."""
        return self.source.batches is not None or (self.source.lengths is not None and not self.split)

    def _loaded(self) -> Sequence[Refined] | None:
        began = time.perf_counter()
        window = self.feed.take()
        self.stats.wait_s += time.perf_counter() - began
        self._note(window or ())
        return window

    def _note(self, batches: Sequence[Refined]) -> None:
        self.split |= len({batch.group for batch in batches}) < len(batches)
        if self.world.size > 1 and batches:
            smallest = min(batches, key=lambda batch: batch.size_key)
            if self._smallest is None or smallest.size_key < self._smallest.size_key:
                self._smallest = smallest.copied()

    def _agree(self, queued: int, receiving: bool, failure: BaseException | None) -> Agreement:
        opening = self.feed.opening
        values = [*offer(queued, receiving), opening, -opening, int(self._smallest is None), int(self.split)]
        *highest, first, last, lacking, split = self.exchange.highest(values, failure)
        agreement, self.split = agree(highest), bool(split)
        if self.world.size > 1 and first and first == -last:
            if not self.source.iterable:
                raise AlignmentError(
                    "every rank's `batch_sampler` gives the same batches, so every sample would be used on every rank; give "
                    "each rank its own (LengthAwareBatchSampler does), or pass `sampler` and let the loader divide"
                )
            self._workers.tell_of_sharing(f"all {self.world.size} ranks")
        self._lend(lacking and agreement.steps)
        return agreement

    def _lend(self, needed: Any) -> None:
        """Some rank had no batch so far: it idles on a copy of another rank's smallest one."""
        if needed and self.world.size > 1:
            lent = self.exchange.lend(self._smallest and RefinedWindow(-1, [self._smallest]))
            self._smallest = self._smallest or lent.batches[0]

    def _total(self, updates: list[list[Refined | None]], extra: Sequence[int] = ()) -> list[float]:
        """Make these updates due, with their totals over ranks; gives back ``extra``, summed too."""
        weights = [float(sum(batch.weight for batch in update if batch)) for update in updates]
        samples = [sum(len(batch) for batch in update if batch) for update in updates]
        if updates:
            weights[0] += self.stands.begun_weight
            samples[0] += self.stands.begun_samples
        values = [*weights, *samples, *extra]
        found = self.exchange.total(values) if values else []
        for number, update in enumerate(updates):
            total, count = found[number], round(found[len(updates) + number])
            for place, batch in enumerate(update):
                local = (batch.weight, len(batch)) if batch else (0, 0)
                shares = Share(local[1], count), Share(local[0], total)
                self.due.append(Take(batch, *shares, ends_update=place == len(update) - 1))
        return found[2 * len(updates) :]

    def _emit(self) -> Step[Any]:
        """A step, counted as used before the training loop gets it."""
        take, cursor = self.due.popleft(), self.stands
        batch, self._under_way = take.batch, round(take.samples.total)
        begun: dict[str, Any] = {"steps": cursor.steps + 1}
        if take.ends_update:
            cursor = behind(cursor, self._under_way, self.source.sizes)
            self.stats.count_update(self._under_way)
        else:
            begun |= {"begun_rows": cursor.begun_rows + 1, "begun_weight": cursor.begun_weight + take.weight.local}
            begun["begun_samples"] = cursor.begun_samples + int(take.samples.local)
        self.stands = replace(cursor, **begun)
        if batch is None:
            self.stats.count_step(idle=True)
            assert self._smallest is not None, "a rank idles with no batch to idle on"
            shown = self._smallest.copied()
        else:
            self._count(batch)
            shown = batch
        scale = loss_scale(take.weight, self.world.size)
        return Step(shown.batch, [*shown.indices], take.samples, take.weight, scale, take.ends_update, batch is None)

    def _count(self, batch: Refined) -> None:
        self.stats.count_step(len(batch), batch.real, batch.padded)
        if batch.oversize and not self.stats.oversize:
            warn_user(
                f"sample {batch.indices[0]} ({units_of(batch.lengths, 0)}) does not fit the budget even alone and is emitted "
                "alone, as others may be (stats.oversize counts them); truncate it, raise the budget, or pass oversize='error'"
            )
        self.stats.oversize += batch.oversize
        if self._learned is not None:
            self._learned.observe(batch.indices, batch.lengths)


class FreeRunner(Runner):
    """Steps without update boundaries: as many as the rank with most batches needs. A rank loads windows until it has
    ``LOW_WATER`` batches, then all :func:`agree` on a number of steps and take so many from their queues. An update's steps are
    emitted once all are agreed: its totals are sums over ranks. Cost: one MAX and one SUM for about ``LOW_WATER`` steps."""

    @property
    def over(self) -> bool:
        return self.ended and not self.due and not self.agreed

    def _steps(self) -> Iterator[Step[Any]]:
        if self.agreed:
            self._complete([])
        while True:
            while self.due:
                yield self._emit()
            if self.ended:
                return
            self._exchange()

    def _exchange(self) -> None:
        failure, feed = None, self.feed
        try:
            while feed.can_take and len(self.queue) < LOW_WATER:
                self.queue += self._loaded() or ()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        agreement = self._agree(len(self.queue), feed.receiving, failure)
        self.ended = agreement.last
        held = [len(self.queue), sum(map(len, self.queue))]
        self.agreed += self._pick(agreement)
        if not feed.shares:
            self._complete([])
            return
        loads = [0] * self.world.size  # what each rank still has to emit
        loads[self.world.rank] = sum(map(len, self.queue)) + feed.pending_samples
        batches, samples, *loads = self._complete([*held, *loads])
        feed.share([round(load) for load in loads], round(LOW_WATER * samples / max(batches, 1)))

    def _pick(self, agreement: Agreement) -> list[Refined | None]:
        """So many batches of the queue: in order, or from places spread evenly over it, alike on all ranks."""
        if not self.feed.receiving:
            self.queue = self._even_out(self.queue, agreement.steps)
        count, number = min(agreement.steps, len(self.queue)), self.stands.steps + len(self.agreed)
        if self._in_rows:
            picked, self.queue = self.queue[:count], self.queue[count:]
        else:
            self.queue.sort(key=lambda batch: batch.rank_key)
            at = [quantile(self.config.seed, self.exchange.epoch, step) for step in range(number, number + count)]
            chosen = [self.queue.pop(int(share * len(self.queue))) for share in at]
            picked = placed(sorted(chosen, key=lambda batch: batch.rank_key), at)
        return [*picked, *[None] * (agreement.steps - count)]

    def _complete(self, extra: Sequence[int]) -> list[float]:
        size = self.config.accumulation
        updates, start, stop = [], 0, size - self.stands.begun_rows
        while stop <= len(self.agreed):
            updates.append(self.agreed[start:stop])
            start, stop = stop, stop + size
        if self.ended and start < len(self.agreed):
            updates.append(self.agreed[start:])
            start = len(self.agreed)
        self.agreed = self.agreed[start:]
        return self._total(updates, extra)


class UpdateRunner(Runner):
    """Updates of a set number of samples: a window is one rank's share of one update. Every rank takes its share's batches,
    dearest first; with fewer batches than another it splits them, then idles. Cost: one MAX and one SUM an update."""

    @property
    def over(self) -> bool:
        sizes, stands = self.source.sizes, self.stands
        begun = self.due or self.agreed or stands.begun_rows
        return not begun and sizes is not None and next(sizes.spans(stands), None) is None

    def _steps(self) -> Iterator[Step[Any]]:
        while not self.over:
            if not self.due:
                self._next_update()
            while self.due:
                yield self._emit()

    def _next_update(self) -> None:
        failure, batches = None, [*self.agreed, *self.queue]
        resumed, self.split, self.agreed, self.queue = bool(batches), False, [], []
        try:
            batches = batches or self._loaded() or ()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        steps = self._agree(len(batches), False, failure).steps
        evened = self._even_out([batch for batch in batches if batch is not None], steps)
        if not (resumed or self._in_rows):  # what is resumed goes on in the order that it had
            evened.sort(key=lambda batch: batch.rank_key)
        self._total([[*evened, *[None] * (steps - len(evened))]])
