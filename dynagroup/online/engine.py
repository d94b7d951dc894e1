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
from dynagroup.online.state import LearnedLengths, State, pack, unpack
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import units_of
from dynagroup.update.loss_weight import Share, loss_scale
from dynagroup.update.step import LoaderStats, Step
from dynagroup.validation import warn_user

LOW_WATER = 32  # batches that a rank queues before ranks agree
OF_EACH = 2  # more of them for each further kind


class Take(NamedTuple):
    """One step on this rank: a batch and its weights. The batch is empty if the rank is idle."""

    batch: Refined
    samples: Share
    weight: Share
    ends_update: bool


@dataclass(eq=False)
class Runner(ABC):
    """Base class of both runners, which run one epoch or the rest of it.

    ``stands``: the point in the run (with this rank's part of a begun update). ``under_way``: samples of the current
    update on all ranks. ``place``: a saved state, whose queued batches come first. ``identity``: values that must be
    equal on all ranks. ``send``: applied to each batch.
    """

    source: Source
    workers: Workers
    stands: Cursor
    place: State | None
    under_way: int
    identity: Mapping[str, Any]
    stats: LoaderStats
    learned: LearnedLengths | None
    send: Callable[[Any], Any] | None

    def __post_init__(self) -> None:
        source = self.source
        self.config = source.config
        self.world = source.world
        self.exchange = Exchange(source.world, source.epoch)
        place = None if self.place is None else self.place["feed"]
        self.feed: Any  # MapFeed or IterableFeed
        if source.iterable:
            self.feed = IterableFeed(source, self.workers, place)
        else:
            self.feed = MapFeed(source, self.workers, place)
        self.queue: list[Refined] = []  # batches that are not in an agreed step yet
        # Agreed steps that wait for the rest of their update; empty batches are idle.
        self.agreed: list[Refined] = []
        self.due: deque[Take] = deque()  # steps of updates whose totals are known
        self.ended = False  # True: the agreed steps are the epoch's last
        self._is_whole = True  # False: between two steps, or stopped there
        self._failure: Exception | None = None  # of a split, not told to the other ranks yet
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
        front = [take.batch for take in self.due] + self.agreed
        base = self.source.order.base
        return {
            "under_way": self.under_way,
            "ended": self.ended,
            "limit": self.source.limit,
            "feed": self.feed.state(front, self.queue),
            "base": None if base is None else pack(base),
            "kinds": pack(self.kinds),
        }

    def close(self) -> None:
        """Releases the workers; also called when the loop is left early."""
        self.feed.close()

    def __iter__(self) -> Iterator[Step[Any]]:
        self._begin()
        while not self.over:
            if self.due:
                yield self._emit()
                continue
            self._is_whole = False
            self._more()
            self._warn_of_oversize()
            self._is_whole = True

    def _begin(self) -> None:
        """Loads the batches of a saved state again, and checks that all ranks run the same epoch."""
        failure = None
        try:
            self.agreed, self.queue = self.feed.reload()
            self._note([batch for batch in self.agreed if batch])
            self._note(self.queue)
        except Exception as error:
            failure = error
        self.exchange.compare(self.identity, failure)
        if self.place is not None:
            self._agree_again(self.place)
        elif self.feed.shares:
            self.feed.share([0] * self.world.size, 0)

    def _agree_again(self, place: State) -> None:
        """Agrees whether the saved end of the epoch and the kinds of the agreed steps still hold. The end does not if a
        split batch waits, or if an iterable dataset is read again; processing may have changed kinds."""
        self.kinds = unpack(place["kinds"]).tolist()
        before = self.feed.kinds_before
        waits = bool(self.queue) or (place["ended"] and self.feed.receiving)
        has_changed = [batch.kind for batch in self.agreed] != before
        flags = [int(waits), int(has_changed)]
        waits, has_changed, *lacking = self.exchange.highest([*flags, *self._lacking])
        if has_changed and self.source.sizes is None:  # with `sizes` they are agreed anew
            self.queue = [batch for batch in self.agreed if batch] + self.queue
            self.agreed = []
        self.ended = place["ended"] and not (waits or has_changed)
        counts = [0 if has_changed else before.count(kind) for kind in self.kinds]
        self._lend(lacking, counts)

    def _even_out(self, batches: list[Refined], steps: int) -> list[Refined]:
        """Splits batches whose samples were kept, until there are ``steps`` batches or none can be split. If that fails,
        they stay whole, and the next exchange raises the error."""
        sizes = [1 if batch.samples is None else len(batch) for batch in batches]
        evened: list[Refined] = []
        try:
            for batch, parts in zip(batches, even_parts(sizes, steps), strict=True):
                if parts == 1:
                    evened.append(batch)
                else:
                    evened += self.workers.collator.split_for_ranks(batch, parts)
        except Exception as error:
            self._failure = error
            return list(batches)
        return evened

    def _loaded(self) -> Sequence[Refined]:
        began = time.perf_counter()
        window = self.feed.take() or []
        self.stats.wait_s += time.perf_counter() - began
        self._note(window)
        return window

    def _note(self, batches: Sequence[Refined]) -> None:
        """Keeps a copy of the smallest batch of each kind, for idle steps."""
        if self.world.size == 1:
            return
        for kind, alike in by_kind(batches).items():
            smallest = min(alike, key=lambda batch: batch.size_key)
            kept = self._smallest.get(kind)
            if kept is None or smallest.size_key < kept.size_key:
                self._smallest[kind] = smallest.copied()

    @property
    def _lacking(self) -> list[int]:
        """For each kind: 1 if this rank has no batch of the kind that it could run in idle steps, else 0."""
        return [int(kind not in self._smallest) for kind in self.kinds]

    def _agree(
        self, batches: Sequence[Refined], receiving: bool, failure: BaseException | None
    ) -> Agreement:
        """Agrees with all ranks on the next steps of each kind. Kinds that are new to a rank are exchanged first."""
        opening = self.feed.opening
        counts = Counter(batch.kind for batch in batches)
        new = sorted(counts.keys() - set(self.kinds))
        offered = offer([counts[kind] for kind in self.kinds], receiving)
        values = [opening, -opening, len(new), *offered, *self._lacking]
        first, last, most_new, *agreed = self.exchange.highest(values, failure)
        if most_new:
            kinds = {*self.kinds, *self.exchange.gathered(new, most_new)}
            self.kinds = sorted(kinds - {0})
            return self._agree(batches, receiving, None)
        agreement = agree(agreed[: len(offered)])
        self.stats.kind_steps += agreement.further
        if self.world.size > 1 and first and first == -last:
            self._tell_of_sharing()
        self._lend(agreed[len(offered) :], agreement.steps)
        return agreement

    def _tell_of_sharing(self) -> None:
        """Says that all ranks read the same samples: an iterable dataset may have equal samples, batches may not."""
        if not self.source.iterable:
            raise AlignmentError(
                "`batch_sampler` gives all ranks the same batches and samples; give each its own "
                "(LengthAwareBatchSampler does), or pass `sampler`, which the loader shards"
            )
        self.workers.warn_of_sharing(f"all {self.world.size} ranks")

    def _lend(self, lacking: Sequence[int], steps: Sequence[int]) -> None:
        """Gives an idle rank that never had a batch of the kind a copy of another rank's smallest one."""
        if self.world.size == 1:
            return
        for kind, is_lacking, needed in zip(self.kinds, lacking, steps, strict=True):
            if not (is_lacking and needed):
                continue
            smallest = self._smallest.get(kind)
            window = None if smallest is None else RefinedWindow(-1, [smallest])
            lent = self.exchange.lend(window)
            if smallest is None:
                self._smallest[kind] = lent.batches[0]

    def _total(self, updates: list[list[Refined]], extra: Sequence[int] = ()) -> list[float]:
        """Sums updates' samples and weights over ranks, appends their steps to ``due``; returns sums of ``extra``. Raises the
        error of a failed split, on all ranks. It is called after a MAX, which checks the ranks."""
        weights = [float(sum(batch.weight for batch in update)) for update in updates]
        samples = [sum(map(len, update)) for update in updates]
        if updates:
            weights[0] += self.stands.begun_weight
            samples[0] += self.stands.begun_samples
        values = [*weights, *samples, *extra]
        if not values:
            return []
        has_failed = float(self._failure is not None)
        *sums, num_failed = self.exchange.world.all_sum([*values, has_failed])
        if num_failed:
            self.exchange.highest([], self._failure)
        for number, update in enumerate(updates):
            total_weight = sums[number]
            total_samples = round(sums[len(updates) + number])
            for batch in update:
                take = Take(
                    batch,
                    samples=Share(len(batch), total_samples),
                    weight=Share(batch.weight, total_weight),
                    ends_update=batch is update[-1],
                )
                self.due.append(take)
        return sums[2 * len(updates) :]

    def _emit(self) -> Step[Any]:
        """Returns the next step. If ``send`` fails, the step is not used, and nothing has changed."""
        take = self.due[0]
        batch = take.batch
        shown = batch or self._smallest[batch.kind].copied()
        sent = shown.batch if self.send is None else self.send(shown.batch)
        step = Step(
            batch=sent,
            indices=list(shown.indices),
            samples=take.samples,
            weight=take.weight,
            loss_scale=loss_scale(take.weight, self.world.size),
            ends_update=take.ends_update,
            idle=not batch,
            kind=shown.label,
            filled=self.source.budget.ladder is not None,
        )
        if batch:
            self._count(batch)
        else:
            self.stats.count_step(0, shown.real, shown.padded, idle=True)
        self.under_way = round(take.samples.total)
        self.stands = self._after(take)
        if take.ends_update:
            self.stats.count_update(self.under_way)
        self.due.popleft()
        return step

    def _after(self, take: Take) -> Cursor:
        cursor = self.stands
        if take.ends_update:
            samples = round(take.samples.total)
            return behind(cursor, samples, self.source.sizes, cursor.steps + 1)
        return replace(
            cursor,
            steps=cursor.steps + 1,
            begun_rows=cursor.begun_rows + 1,
            begun_samples=cursor.begun_samples + int(take.samples.local),
            begun_weight=cursor.begun_weight + take.weight.local,
        )

    def _warn_of_oversize(self) -> None:
        """Warns once of a sample that does not fit, before any step of its update is used."""
        if self.stats.oversize:
            return
        for take in self.due:
            if take.batch.oversize:
                units = units_of(take.batch.lengths, 0)
                warn_user(
                    f"sample {take.batch.indices[0]} ({units}) does not fit the budget even alone and is a "
                    "batch of its own (stats.oversize counts such samples); truncate it, raise the "
                    "budget, or pass oversize='error'"
                )
                return

    def _count(self, batch: Refined) -> None:
        self.stats.count_step(len(batch), batch.real, batch.padded)
        self.stats.count_memory(batch.memory)
        self.stats.oversize += batch.oversize
        if self.learned is not None:
            kind = number_of(batch.label) if self.workers.collator.has_kinds else None
            self.learned.observe(batch.indices, batch.lengths, kind)


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
        failure: BaseException | None = self._failure
        feed = self.feed
        wanted = LOW_WATER + OF_EACH * (len(self.kinds) - 1)
        try:
            while feed.can_take and len(self.queue) < wanted:
                self.queue += self._loaded()
        except Exception as error:
            failure = error
        agreement = self._agree(self.queue, feed.receiving, failure)
        self.ended = agreement.last
        queued = [len(self.queue), sum(map(len, self.queue))]
        self.agreed += self._pick(agreement.steps)
        if not feed.shares:
            self._complete([])
            return
        loads = [0] * self.world.size  # samples that each rank has not yielded yet
        loads[self.world.rank] = sum(map(len, self.queue)) + feed.pending_samples
        num_batches, num_samples, *all_loads = self._complete([*queued, *loads])
        ahead = round(wanted * num_samples / max(num_batches, 1))
        feed.share([round(load) for load in all_loads], ahead)

    def _pick(self, steps: Sequence[int]) -> list[Refined]:
        """Takes as many batches of each kind as ranks agreed on, kinds evenly mixed; idle batches replace missing ones."""
        queued = by_kind(self.queue)
        first_step = self.stands.steps + len(self.agreed)
        self.queue = []
        picked: list[list[Refined]] = []
        for kind, count in zip(self.kinds, steps, strict=True):
            batches = self._pick_alike(queued.get(kind, []), count, first_step)
            idle = [Refined.idle(kind) for _ in range(count - len(batches))]
            picked.append(batches + idle)
            first_step += count
        return spread(picked)

    def _pick_alike(self, batches: list[Refined], count: int, first_step: int) -> list[Refined]:
        """Takes batches of one kind from the queue: evenly spread ones of the sorted queue, or the user's next ones."""
        if not self.feed.receiving:
            batches = self._even_out(batches, count)
        count = min(count, len(batches))
        if self.source.groups is not None:
            self.queue += batches[count:]
            return batches[:count]
        batches = sorted(batches, key=lambda batch: batch.rank_key)
        steps = range(first_step, first_step + count)
        shares = quantiles(self.config.seed, self.source.epoch, steps)
        chosen = [batches.pop(int(share * len(batches))) for share in shares]
        self.queue += batches
        return placed(sorted(chosen, key=lambda batch: batch.rank_key), shares)

    def _complete(self, extra: Sequence[int]) -> list[float]:
        """Moves the agreed steps of whole updates to ``due``; returns the sums of ``extra`` over ranks."""
        count = len(self.agreed)
        size = self.config.accumulation
        bounds = [0, *range(size - self.stands.begun_rows, count + 1, size)]
        if self.ended and bounds[-1] < count:
            bounds.append(count)
        sums = self._total([self.agreed[start:stop] for start, stop in pairwise(bounds)], extra)
        self.agreed = self.agreed[bounds[-1] :]  # not before: if a rank stops, the state has them
        return sums


class UpdateRunner(Runner):
    """Runs an epoch with updates of a set size: a window is one rank's part of an update. Each rank runs its batches
    kind by kind, those of most work first. A rank with fewer batches of a kind than another splits some, and is idle in
    the steps that remain. Cost: one MAX and one SUM per update."""

    @property
    def over(self) -> bool:
        sizes = self.source.sizes
        if sizes is None or self.due or self.agreed or self.stands.begun_rows:
            return False
        return next(sizes.spans(self.stands), None) is None

    def _more(self) -> None:
        batches: Sequence[Refined] = [batch for batch in self.agreed if batch] + self.queue
        is_resumed = bool(batches or self.agreed)
        self.agreed = []
        self.queue = []
        failure = None
        try:
            if not is_resumed:
                batches = self._loaded()
        except Exception as error:
            failure = error
        steps = self._agree(batches, False, failure).steps
        queued = by_kind(batches)
        update: list[Refined] = []
        for kind, count in zip(self.kinds, steps, strict=True):
            evened = self._even_out(queued.get(kind, []), count)
            if not is_resumed:  # resumed batches keep their order
                evened.sort(key=lambda batch: batch.rank_key)
            update += evened
            update += [Refined.idle(kind) for _ in range(count - len(evened))]
        self._total([update])
