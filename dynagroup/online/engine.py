"""The alignment engine: one rank's refined windows become steps that all ranks take together, an epoch at a time.

A feed brings windows, a ``World`` carries a few numbers.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dynagroup.errors import AlignmentError
from dynagroup.online.feeds import MapFeed, Workers
from dynagroup.online.iterables import IterableFeed
from dynagroup.online.messages import Refined, RefinedWindow, shorten
from dynagroup.online.plans import KINDS, Source, behind, handed_out
from dynagroup.online.protocol import (
    Agreement,
    Exchange,
    Offer,
    Uneven,
    agree,
    even_parts,
    in_rows,
    placed,
    print_of,
    quantile,
)
from dynagroup.online.state import LearnedLengths, pack
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import units_of
from dynagroup.update.loss_weight import Share, loss_scale
from dynagroup.update.step import LoaderStats, Step
from dynagroup.validation import warn_user

__all__ = ["FreeRunner", "Runner", "UpdateRunner"]

LOW_WATER = 32
"""Batches that a rank wants queued before an exchange: so many steps follow one exchange."""


class Take(NamedTuple):
    """One step on this rank: a batch, or None to idle, and what it weighs."""

    batch: Refined | None
    samples: Share
    weight: Share
    ends_update: bool


class Runner(ABC):
    """One epoch, fresh or resumed; what both ways of running share: updates whose totals are known, splitting, counting, and
    the saved place.

    Args:
        source: of the epoch; its cursor is where the updates that come begin.
        stands: where the run stands; of the update under way, ``begun_samples`` and ``begun_weight`` are this rank's.
        place: a saved one of this rank, to go on with the very batches that were queued.
        under_way: samples of the update under way, over all ranks. identity: what all ranks must have alike.
    """

    def __init__(
        self,
        source: Source,
        workers: Workers,
        stands: Cursor,
        place: Mapping[str, Any] | None,
        *,
        under_way: int,
        identity: Mapping[str, Any],
        stats: LoaderStats,
        learned: LearnedLengths | None,
    ) -> None:
        self.source, self.config, self.world, self.kind = source, source.config, source.world, KINDS[source.kind]
        self.exchange = Exchange(self.world, stands.epoch)
        self.stats, self._learned, self._identity, self._place = stats, learned, identity, place
        self.feed: Any = (IterableFeed if source.iterable else MapFeed)(source, workers, place and place["feed"])
        self._split = workers.collator.split
        self.stands, self._under_way = stands, under_way
        self.queue: list[Refined] = []
        """Batches that wait for an agreement."""
        self.agreed: list[Refined | None] = []
        """Steps that wait for the rest of their update."""
        self.due: deque[Take] = deque()
        """Steps whose update's totals are known."""
        self.load_all = self.ended = False
        """``ended``: the steps that are agreed are the epoch's last."""
        self.delivered = (0, 0)
        """Batches and samples that workers delivered here."""
        self.samples_per_batch = 0.0
        self._smallest: Refined | None = None
        """What this rank idles on: a copy of the smallest batch that it had, or was lent."""

    @abstractmethod
    def _steps(self) -> Iterator[Step[Any]]:
        """The steps that remain of the epoch."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """No step of the epoch is left, on any rank."""

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end; the one that is under way counts."""
        return handed_out(self.stands, self._under_way, self.source.sizes)

    def state(self) -> dict[str, Any] | None:
        """Its place, JSON-able; None once the epoch is over."""
        if self.over:
            return None
        base, front = self.source.order.base, [*(take.batch for take in self.due), *self.agreed]
        return {
            "kind": self.source.kind,
            "base": None if base is None else pack(base),
            "under_way": self._under_way,
            "load_all": self.load_all,
            "ended": self.ended,
            "delivered": list(self.delivered),
            "samples_per_batch": self.samples_per_batch,
            "feed": self.feed.state(front, self.queue),
        }

    def close(self) -> None:
        """Let go of the workers, also when the loop was left early."""
        self.feed.close()

    def __iter__(self) -> Iterator[Step[Any]]:
        """Reload what a resumed epoch had queued, and compare ranks; an error on one of them reaches all. Then the steps."""
        failure, place = None, self._place
        try:
            if place is not None:
                self.load_all, self.samples_per_batch = place["load_all"], place["samples_per_batch"]
                self.delivered = (place["delivered"][0], place["delivered"][1])
                self.agreed, self.queue = self.feed.reload()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        self.exchange.compare(self._identity, failure)
        self._refuse_equal_batches()
        if place is not None:
            waits = self.exchange.highest([len(self.queue), int(self.feed.receiving)])
            # What was the end is none if some batch had to be split and waits again, or if an iterable is read again.
            self.ended = place["ended"] and not any(waits)
        elif self.feed.shares:
            self.feed.share([0] * self.world.size, 0)
        yield from self._steps()
        if self.config.uneven == "stop":
            self._count_left()

    def _refuse_equal_batches(self) -> None:
        batches = self.source.batches
        if batches is None or self.world.size == 1:
            return
        first = print_of(batches[:4])
        low, high = self.exchange.highest([first, -first])
        if low == -high and batches:
            raise AlignmentError(
                "every rank's `batch_sampler` gives the same batches, so every sample would be used on every rank; give "
                "each rank its own (LengthAwareBatchSampler does), or pass `sampler` and let the loader divide"
            )

    def _count_left(self) -> None:
        unused = self.feed.unused(self.queue)
        self.stats.left_samples += len(unused)
        if unused:
            warn_user(
                f"uneven='stop' ended the epoch with {len(unused)} samples left on rank {self.world.rank}: "
                f"{shorten(unused)}; uneven='idle' uses them"
            )

    def _even_out(self, batches: Sequence[Refined], steps: int) -> list[Refined]:
        """Split batches whose samples were kept, until there are ``steps`` or none can be split."""
        if len(batches) >= steps:
            return list(batches)
        sizes = [1 if batch.samples is None else len(batch) for batch in batches]
        evened = []
        for batch, parts in zip(batches, even_parts(sizes, steps), strict=True):
            evened += [batch] if parts == 1 else self._split(batch, parts)
        return evened

    def _loaded(self) -> Sequence[Refined] | None:
        began = time.perf_counter()
        window = self.feed.take()
        self.stats.wait_s += time.perf_counter() - began
        return window

    def _agree(self, offer: Offer, failure: BaseException | None, uneven: Uneven) -> Agreement:
        """What all ranks do next."""
        opening = self.feed.opening
        lacks = int(self.feed.has_nothing and self._smallest is None)
        *highest, first, last, nothing = self.exchange.highest([*offer.to_max(), opening, -opening, lacks], failure)
        if first and first == -last and self.world.size > 1:
            self.feed.tell_of_equal_ranks()
        agreement = agree(highest, uneven)
        if nothing and agreement.steps:
            self._lend()
        return agreement

    def _lend(self) -> None:
        """Some rank's share of an iterable is empty: it idles on a copy of another rank's smallest batch."""
        smallest = min(self.queue, key=lambda batch: batch.size_key, default=None)
        window = self.exchange.lend(smallest and RefinedWindow(-1, [replace(smallest, samples=None)]))
        if window is not None and self._smallest is None and not self.queue:
            self._smallest = window.batches[0]

    def _total(self, updates: list[list[Refined | None]], extra: Sequence[int] = ()) -> list[float]:
        """Make these updates due, with their totals over ranks; gives back ``extra``, summed too."""
        weights = [float(sum(batch.weight for batch in update if batch)) for update in updates]
        samples = [sum(len(batch) for batch in update if batch) for update in updates]
        if updates:
            weights[0] += self.stands.begun_weight
            samples[0] += self.stands.begun_samples
        found = self.exchange.total([*weights, *samples, *extra])
        for number, update in enumerate(updates):
            total, count = found[number], round(found[len(updates) + number])
            for place, batch in enumerate(update):
                local = (batch.weight, len(batch)) if batch else (0, 0)
                shares = Share(local[1], count), Share(local[0], total)
                self.due.append(Take(batch, *shares, ends_update=place == len(update) - 1))
        return found[2 * len(updates) :]

    def _emit(self) -> Step[Any]:
        """Count a step as used, before the training loop gets it."""
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
            spare = self._smallest = self._smallest or self.feed.spare()
            held, indices = copy.deepcopy(spare.batch), list(spare.indices)
        else:
            self._count(batch)
            held, indices = batch.batch, list(batch.indices)
        scale = loss_scale(take.weight, self.world.size)
        return Step(held, indices, take.samples, take.weight, scale, take.ends_update, idle=batch is None)

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
        if self.world.size > 1 and (self._smallest is None or batch.size_key < self._smallest.size_key):
            self._smallest = batch.copied()


class FreeRunner(Runner):
    """Steps without update boundaries: as many as the rank with most batches needs.

    Between exchanges a rank loads windows until it has ``LOW_WATER`` batches. At an exchange all ranks agree on a number of
    steps (see :func:`~dynagroup.online.protocol.agree`) and take so many batches from their queues. An update's steps are
    emitted once all of them are agreed, because its totals are sums over ranks. Cost: one MAX and one SUM for about
    ``LOW_WATER`` steps.
    """

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
        failure = None
        try:
            self._load()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        offer = Offer(len(self.queue), self.feed.receiving, bounded=self.kind.bounded)
        agreement = self._agree(offer, failure, self.config.uneven)
        self.load_all, self.ended = agreement.load_all, agreement.last
        self.agreed += self._pick(agreement)
        shares = self.feed.shares
        batches, samples, *loads = self._complete([*self.delivered, *(self._loads() if shares else ())])
        self.samples_per_batch = samples / max(batches, 1)
        if shares:
            self.feed.share([round(load) for load in loads], round(LOW_WATER * self.samples_per_batch))

    def _load(self) -> None:
        while self.feed.can_take and (self.load_all or len(self.queue) < LOW_WATER):
            window = self._loaded()
            if window is None:
                break
            self.queue += window
            batches, samples = self.delivered
            self.delivered = batches + len(window), samples + sum(len(batch) for batch in window)
        self.queue.sort(key=(lambda batch: batch.late) if self.kind.ordered else (lambda batch: batch.rank_key))

    def _pick(self, agreement: Agreement) -> list[Refined | None]:
        """So many batches of the queue: in order, or from places spread evenly over it, alike on all ranks."""
        if (agreement.last or not self.feed.receiving) and self.config.uneven == "idle":
            self.queue = self._even_out(self.queue, agreement.steps)
        count, number = min(agreement.steps, len(self.queue)), self.stands.steps + len(self.agreed)
        if self.kind.ordered:
            picked, self.queue = self.queue[:count], self.queue[count:]
        else:
            self.queue.sort(key=lambda batch: batch.rank_key)  # what was split has a place of its own
            at = [quantile(self.config.seed, self.exchange.epoch, step) for step in range(number, number + count)]
            chosen = [self.queue.pop(int(share * len(self.queue))) for share in at]
            picked = placed(sorted(chosen, key=lambda batch: batch.rank_key), at)
        return [*picked, *[None] * (agreement.steps - count)]

    def _complete(self, extra: Sequence[int]) -> list[float]:
        """Move the updates that are complete from ``agreed`` to ``due``."""
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

    def _loads(self) -> list[int]:
        """One number a rank: what this one still has to emit, in samples; zeros for the others, to be summed."""
        batches, samples = self.delivered
        per_batch = self.samples_per_batch or samples / max(batches, 1)
        loads = [0] * self.world.size
        loads[self.world.rank] = round(len(self.queue) * per_batch) + self.feed.pending_samples
        return loads


class UpdateRunner(Runner):
    """Updates of a set number of samples: a window is one rank's share of one update.

    Every rank takes its share's batches; with fewer batches than another rank it splits them, then idles. Cost: one MAX and one
    SUM an update.
    """

    @property
    def over(self) -> bool:
        return not self.due and not self.agreed and not self.feed.receiving

    def _steps(self) -> Iterator[Step[Any]]:
        while not self.over:
            if not self.due:
                self._next_update()
            while self.due:
                yield self._emit()

    def _next_update(self) -> None:
        failure, batches = None, [*self.agreed, *self.queue]
        resumed, self.agreed, self.queue = bool(batches), [], []
        try:
            batches = batches or self._loaded() or ()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        steps = max(self._agree(Offer(len(batches), receiving=False), failure, "idle").steps, 1)
        evened = self._even_out([batch for batch in batches if batch is not None], steps)
        if not resumed:  # which go on in the order that they had
            evened = in_rows(evened)
        self._total([[*evened, *[None] * (steps - len(evened))]])
