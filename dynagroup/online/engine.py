"""Turns the collated windows of a rank into steps that all ranks take together, epoch by epoch."""

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from dynagroup.errors import AlignmentError, StateError
from dynagroup.online.feeds import IterableFeed, MapFeed, Workers
from dynagroup.online.messages import Refined, RefinedWindow, by_kind, number_of
from dynagroup.online.protocol import (
    Agreement,
    Exchange,
    agree,
    even_parts,
    offer,
    placed,
    quantiles,
    spread,
)
from dynagroup.online.requests import Source, behind, handed_out
from dynagroup.online.state import LearnedLengths, pack, unpack
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import units_of
from dynagroup.update.loss_weight import Share, loss_scale
from dynagroup.update.step import LoaderStats, Step
from dynagroup.validation import warn_user

LOW_WATER, OF_EACH = (
    32,
    2,
)  # batches that a rank queues before ranks agree; more for each further kind


class Take(NamedTuple):
    """One step on this rank: a batch and its weights. The batch is empty if the rank is idle."""

    batch: Refined
    samples: Share
    weight: Share
    ends_update: bool


@dataclass(eq=False)
class Runner(ABC):
    """Base class of both runners, which run one epoch or the rest of it. ``stands``: the point in the run (with this
    rank's part of a begun update). ``under_way``: samples of the current update on all ranks. ``place``: a saved state,
    whose queued batches come first. ``identity``: values that must be equal on all ranks."""

    source: Source
    workers: Workers
    stands: Cursor
    place: Mapping[str, Any] | None
    under_way: int
    identity: Mapping[str, Any]
    stats: LoaderStats
    learned: LearnedLengths | None
    send: Callable[[Any], Any] | None

    def __post_init__(self) -> None:
        source, place = self.source, self.place
        self.config, self.world, self.exchange = (
            source.config,
            source.world,
            Exchange(source.world, self.stands.epoch),
        )
        self.feed: Any = (IterableFeed if source.iterable else MapFeed)(
            source, self.workers, place and place["feed"]
        )
        self.queue: list[Refined] = []  # batches that are not in an agreed step yet
        self.agreed: list[
            Refined
        ] = []  # agreed steps that wait for the rest of their update; empty batches are idle
        self.due: deque[Take] = deque()  # steps of updates whose totals are known
        self.ended = False  # True: the agreed steps are the epoch's last
        self._is_whole = True  # False: between two steps, or stopped there
        self._failure: Exception | None = None  # of a split, not told to the other ranks yet
        self.split: bool = (
            place is not None and place["split"]
        )  # True: some rank had to split a planned batch
        self.kinds = [0]  # kinds that any rank has had, in the same order on all ranks
        # Batches for idle steps: a copy of the smallest batch of each kind, this rank's or another's.
        self._smallest: dict[int, Refined] = {}

    @abstractmethod
    def _more(self) -> None:
        """Appends steps to ``due``. After a resume, the first ones are those that ranks had agreed on before."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the epoch has ended on all ranks."""

    @property
    def cursor(self) -> Cursor:
        return handed_out(self.stands, self.under_way, self.source.sizes)

    def state(self) -> dict[str, Any] | None:
        """Returns the point from which this rank can resume, as JSON values; None after the end of the epoch. StateError:
        loading was interrupted between two steps."""
        if not self._is_whole:
            raise StateError(
                "loading failed or was interrupted between two steps, so the loader has no state to save; "
                "resume from a state that was saved after a step"
            )
        if self.over:
            return None
        front = [*(take.batch for take in self.due), *self.agreed]
        if self.source.sizes is not None and not self.stands.begun_rows:
            front = []  # if no step of an update was used, the update is planned again
        base, feed = self.source.order.base, self.feed.state(front, self.queue)
        place = {
            "under_way": self.under_way,
            "ended": self.ended,
            "split": self.split,
            "limit": self.source.limit,
        }
        return {
            **place,
            "feed": feed,
            "base": base if base is None else pack(base),
            "kinds": pack(self.kinds),
        }

    def close(self) -> None:
        """Releases the workers; also called when the loop is left early."""
        self.feed.close()

    def __iter__(self) -> Iterator[Step[Any]]:
        failure, place = None, self.place
        try:
            self.agreed, self.queue = self.feed.reload()
            self._note([*filter(len, self.agreed), *self.queue])
        except Exception as error:
            failure = error
        self.exchange.compare(self.identity, failure)
        if place is not None:
            # The saved end of an epoch no longer holds if a split batch waits, or if an iterable dataset is read again.
            waits = len(self.queue) or int(place["ended"] and self.feed.receiving)
            self.kinds, before = unpack(place["kinds"]).tolist(), self.feed.kinds_before
            changed = [batch.kind for batch in self.agreed] != before
            waits, changed, *lacking = self.exchange.highest([waits, int(changed), *self._lacking])
            if (
                changed and self.source.sizes is None
            ):  # processing has changed kinds; with `sizes` they are agreed anew
                self.agreed, self.queue = [], [*filter(len, self.agreed), *self.queue]
            self.ended = place["ended"] and not (waits or changed)
            self._lend(lacking, [0 if changed else before.count(kind) for kind in self.kinds])
        elif self.feed.shares:
            self.feed.share([0] * self.world.size, 0)
        while not self.over:
            if self.due:
                yield self._emit()
                continue
            self._is_whole = False
            self._more()
            self._tell_of_oversize()
            self._is_whole = True

    def _even_out(self, batches: Sequence[Refined], steps: int) -> list[Refined]:
        """Splits batches whose samples were kept, until there are ``steps`` batches or none can be split. If that fails,
        they stay whole, and the next exchange raises the error."""
        sizes = [1 if batch.samples is None else len(batch) for batch in batches]
        split, pairs = (
            self.workers.collator.split_for_ranks,
            zip(batches, even_parts(sizes, steps), strict=True),
        )
        try:
            return [
                part
                for batch, parts in pairs
                for part in ([batch] if parts == 1 else split(batch, parts))
            ]
        except Exception as error:
            self._failure = error
            return [*batches]

    @property
    def _in_rows(self) -> bool:
        """Whether batches keep their order: the user's own, or the planned one if no batch had to be split."""
        return self.source.groups is not None or (
            self.source.lengths is not None and not self.split
        )

    def _loaded(self) -> Sequence[Refined] | None:
        began, window = time.perf_counter(), self.feed.take()
        self.stats.wait_s += time.perf_counter() - began
        self._note(window or ())
        return window

    def _note(self, batches: Sequence[Refined]) -> None:
        self.split |= len({batch.group for batch in batches}) < len(batches)
        for kind, alike in by_kind(batches).items() if self.world.size > 1 else ():
            smallest = min(alike, key=lambda batch: batch.size_key)
            if kind not in self._smallest or smallest.size_key < self._smallest[kind].size_key:
                self._smallest[kind] = smallest.copied()

    @property
    def _lacking(self) -> list[int]:
        """For each kind: 1 if this rank has no batch of the kind that it could run in idle steps, else 0."""
        return [int(kind not in self._smallest) for kind in self.kinds]

    def _agree(
        self, batches: Sequence[Refined], receiving: bool, failure: BaseException | None
    ) -> Agreement:
        """Agrees with all ranks on the next steps of each kind. Kinds that are new to a rank are exchanged first."""
        opening, counts = self.feed.opening, Counter(batch.kind for batch in batches)
        new = sorted(counts.keys() - {*self.kinds})
        flags, offered = (
            [opening, -opening, int(self.split), len(new)],
            [counts[kind] for kind in self.kinds],
        )
        found = self.exchange.highest([*flags, *offer(offered, receiving), *self._lacking], failure)
        (first, last, split, most), highest, lacking = (
            found[:4],
            found[4 : -len(offered)],
            found[-len(offered) :],
        )
        if most:
            self.kinds = sorted({*self.kinds, *self.exchange.gathered(new, most)} - {0})
            return self._agree(batches, receiving, None)
        agreement, self.split = agree(highest), bool(split)
        self.stats.kind_steps += agreement.further
        if self.world.size > 1 and first and first == -last:
            if not self.source.iterable:
                own = "give each its own (LengthAwareBatchSampler does), or pass `sampler`, which the loader shards"
                raise AlignmentError(
                    f"`batch_sampler` gives all ranks the same batches and samples; {own}"
                )
            self.workers.tell_of_sharing(f"all {self.world.size} ranks")
        self._lend(lacking, agreement.steps)
        return agreement

    def _lend(self, lacking: Sequence[int], steps: Sequence[int]) -> None:
        """Gives an idle rank that never had a batch of the kind a copy of another rank's smallest one."""
        for kind, lacks, needed in zip(self.kinds, lacking, steps, strict=True):
            if lacks and needed and self.world.size > 1:
                own = self._smallest.get(kind)
                lent = self.exchange.lend(own and RefinedWindow(-1, [own]))
                self._smallest[kind] = own or lent.batches[0]

    def _total(self, updates: list[list[Refined]], extra: Sequence[int] = ()) -> list[float]:
        """Sums updates' samples and weights over ranks, appends their steps to ``due``; returns sums of ``extra``. Raises the
        error of a failed split, on all ranks."""
        weights = [float(sum(batch.weight for batch in update)) for update in updates]
        samples = [sum(map(len, update)) for update in updates]
        if updates:
            weights[0] += self.stands.begun_weight
            samples[0] += self.stands.begun_samples
        values, failed = [*weights, *samples, *extra], float(self._failure is not None)
        found = (
            self.exchange.world.all_sum([*values, failed]) if values else []
        )  # only after a MAX, which checks the ranks
        if found and found[-1]:
            self.exchange.highest([], self._failure)
        for number, update in enumerate(updates):
            total, count = found[number], round(found[len(updates) + number])
            for place, batch in enumerate(update):
                shares = Share(len(batch), count), Share(batch.weight, total)
                self.due.append(Take(batch, *shares, ends_update=place == len(update) - 1))
        return found[2 * len(updates) : len(values)]

    def _emit(self) -> Step[Any]:
        take, cursor = self.due[0], self.stands
        batch, shares = (
            take.batch,
            (take.samples, take.weight, loss_scale(take.weight, self.world.size)),
        )
        shown, filled = (
            batch or self._smallest[batch.kind].copied(),
            self.source.budget.ladder is not None,
        )
        sent = shown.batch if self.send is None else self.send(shown.batch)
        step = Step(
            sent, [*shown.indices], *shares, take.ends_update, not batch, shown.label, filled
        )
        begun, under_way = dict[str, Any](steps=cursor.steps + 1), round(take.samples.total)
        if take.ends_update:
            cursor = behind(cursor, under_way, self.source.sizes)
            self.stats.count_update(under_way)
        else:
            begun |= {
                "begun_rows": cursor.begun_rows + 1,
                "begun_weight": cursor.begun_weight + take.weight.local,
            }
            begun["begun_samples"] = cursor.begun_samples + int(take.samples.local)
        if batch:
            self._count(batch)
        else:
            self.stats.count_step(0, shown.real, shown.padded, idle=True)
        self.stands, self.under_way = (
            replace(cursor, **begun),
            under_way,
        )  # not before: if `send` fails, the step is not used
        self.due.popleft()
        return step

    def _tell_of_oversize(self) -> None:
        """Warns once of a sample that does not fit, before any step of its update is used."""
        batch = next((take.batch for take in self.due if take.batch.oversize), None)
        if batch is not None and not self.stats.oversize:
            who = f"sample {batch.indices[0]} ({units_of(batch.lengths, 0)})"
            told = f"{who} does not fit the budget even alone and is a batch of its own (stats.oversize counts such samples)"
            warn_user(f"{told}; truncate it, raise the budget, or pass oversize='error'")

    def _count(self, batch: Refined) -> None:
        self.stats.count_step(len(batch), batch.real, batch.padded)
        self.stats.oversize += batch.oversize
        if self.learned is not None:
            labelled = self.workers.collator.has_kinds
            self.learned.observe(
                batch.indices, batch.lengths, number_of(batch.label) if labelled else None
            )


class FreeRunner(Runner):
    """Runs an epoch without updates of a set size: it has as many steps as the rank with the most batches needs. Each
    rank loads windows until it has ``LOW_WATER`` batches (``OF_EACH`` more per further kind). All ranks :func:`agree`
    on numbers of steps, and each takes so many batches from its queue. The steps of an update are yielded once all are
    agreed, because its totals are sums over ranks. Cost: one MAX and one SUM per about ``LOW_WATER`` steps."""

    @property
    def over(self) -> bool:
        return self.ended and not self.due and not self.agreed

    def _more(self) -> None:
        self._complete([])
        if not self.due:
            self._exchange()

    def _exchange(self) -> None:
        failure, feed, wanted = (
            self._failure,
            self.feed,
            LOW_WATER + OF_EACH * (len(self.kinds) - 1),
        )
        try:
            while feed.can_take and len(self.queue) < wanted:
                self.queue += self._loaded() or ()
        except Exception as error:
            failure = error
        agreement = self._agree(self.queue, feed.receiving, failure)
        self.ended = agreement.last
        held = [len(self.queue), sum(map(len, self.queue))]
        self.agreed += self._pick(agreement.steps)
        if not feed.shares:
            self._complete([])
            return
        loads = [0] * self.world.size  # samples that each rank has not yielded yet
        loads[self.world.rank] = sum(map(len, self.queue)) + feed.pending_samples
        batches, samples, *loads = self._complete([*held, *loads])
        feed.share([round(load) for load in loads], round(wanted * samples / max(batches, 1)))

    def _pick(self, steps: Sequence[int]) -> list[Refined]:
        """Takes as many batches of each kind as ranks agreed on, kinds evenly mixed; idle batches replace missing ones."""
        queued, number, picked = by_kind(self.queue), self.stands.steps + len(self.agreed), []
        self.queue = []
        for kind, count in zip(self.kinds, steps, strict=True):
            found = self._picked(queued.get(kind, []), count, number)
            picked.append([*found, *[Refined.idle(kind)] * (count - len(found))])
            number += count
        return spread(picked)

    def _picked(self, batches: Sequence[Refined], steps: int, number: int) -> list[Refined]:
        """Takes ``steps`` batches of one kind from the queue: the next ones, or evenly spread ones of the sorted queue."""
        batches = [*batches] if self.feed.receiving else self._even_out(batches, steps)
        count = min(steps, len(batches))
        if self._in_rows:
            self.queue += batches[count:]
            return batches[:count]
        batches.sort(key=lambda batch: batch.rank_key)
        at = quantiles(self.config.seed, self.exchange.epoch, range(number, number + count))
        chosen = [batches.pop(int(share * len(batches))) for share in at]
        self.queue += batches
        return placed(sorted(chosen, key=lambda batch: batch.rank_key), at)

    def _complete(self, extra: Sequence[int]) -> list[float]:
        count, size = len(self.agreed), self.config.accumulation
        bounds = [0, *range(size - self.stands.begun_rows, count + 1, size)]
        bounds += [count] * (self.ended and bounds[-1] < count)
        found = self._total([self.agreed[start:stop] for start, stop in pairwise(bounds)], extra)
        self.agreed = self.agreed[bounds[-1] :]  # not before: if a rank stops, the state has them
        return found


class UpdateRunner(Runner):
    """Runs an epoch with updates of a set size: a window is one rank's part of an update. Each rank runs its batches
    kind by kind, those of most work first. A rank with fewer batches of a kind than another splits some, and is idle in
    the steps that remain. Cost: one MAX and one SUM per update."""

    @property
    def over(self) -> bool:
        sizes, stands = self.source.sizes, self.stands
        begun = self.due or self.agreed or stands.begun_rows
        return not begun and sizes is not None and next(sizes.spans(stands), None) is None

    def _more(self) -> None:
        failure, batches = None, [*filter(len, self.agreed), *self.queue]
        resumed, self.split, self.agreed, self.queue = bool(batches or self.agreed), False, [], []
        try:
            batches = batches if resumed else self._loaded() or ()
        except Exception as error:
            failure = error
        steps, held, update = (
            self._agree(batches, False, failure).steps,
            by_kind(batches),
            list[Refined](),
        )
        for kind, count in zip(self.kinds, steps, strict=True):
            evened = self._even_out(held.get(kind, []), count)
            if not (resumed or self._in_rows):  # resumed batches keep their order
                evened.sort(key=lambda batch: batch.rank_key)
            update += [*evened, *[Refined.idle(kind)] * (count - len(evened))]
        self._total([update])
