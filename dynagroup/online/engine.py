"""The alignment engine: one rank's refined windows become steps that all ranks take together.

It knows no DataLoader: a feed brings windows, a ``World`` carries a few numbers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynagroup.online.config import OnlineConfig
from dynagroup.online.iterables import Feed
from dynagroup.online.messages import Refined, RefinedWindow
from dynagroup.online.protocol import Agreement, Exchange, Offer, Uneven, agree, even_parts, placed, quantile
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import units_of
from dynagroup.update.loss_weight import Share
from dynagroup.update.step import LoaderStats
from dynagroup.validation import warn_user

__all__ = ["FreeRunner", "Runner", "Take", "UpdateRunner"]

LOW_WATER = 32
"""Batches that a rank wants queued before an exchange: so many steps follow one exchange."""


@dataclass(frozen=True, slots=True)
class Take:
    """One step on this rank: a batch, or None to idle, and what it weighs."""

    batch: Refined | None
    samples: Share
    weight: Share
    ends_update: bool


class Runner(ABC):
    """What both ways of running share: updates whose totals are known, splitting, counting, and the saved place.

    Args:
        cursor: where the run stands; of the update under way, ``begun_samples`` and ``begun_weight`` are this rank's.
        behind: the cursor behind the update that follows, from the one before it and how many samples it holds.
    """

    def __init__(
        self,
        exchange: Exchange,
        feed: Feed,
        config: OnlineConfig,
        stats: LoaderStats,
        split: Callable[[Refined, int], list[Refined]],
        cursor: Cursor,
        behind: Callable[[Cursor, int], Cursor],
    ) -> None:
        self.exchange, self.feed, self.config, self.stats, self.split = exchange, feed, config, stats, split
        self.cursor, self._behind = cursor, behind
        self.due: deque[Take] = deque()
        """Steps whose update's totals are known."""
        self.update_samples = 0
        """Samples of the update under way, over all ranks."""
        self._last_cost = 0

    @abstractmethod
    def __iter__(self) -> Iterator[Take]:
        """The steps that remain of the epoch."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """No step of the epoch is left, on any rank."""

    @abstractmethod
    def resume(self, place: Mapping[str, Any]) -> None:
        """Go on from a saved place, with what the feed loads again."""

    def settle(self, place: Mapping[str, Any] | None) -> None:
        """Once all ranks have begun or resumed: what they must know of each other. Collective."""
        if place is None and self.feed.shares:
            self.feed.share([0] * self.exchange.world.size, 0)  # type: ignore[union-attr]

    def state(self) -> dict[str, Any]:
        """Its saved place: JSON-able."""
        return {"update_samples": self.update_samples}

    @property
    def front(self) -> list[Refined | None]:
        """Agreed steps that were not emitted."""
        return [take.batch for take in self.due]

    @property
    def pool(self) -> list[Refined]:
        """Batches that wait for an agreement."""
        return []

    def _even_out(self, batches: Sequence[Refined], steps: int) -> list[Refined]:
        """Split batches whose samples were kept, until there are ``steps`` or none can be split."""
        if len(batches) >= steps:
            return list(batches)
        sizes = [1 if batch.samples is None else len(batch) for batch in batches]
        evened = []
        for batch, parts in zip(batches, even_parts(sizes, steps), strict=True):
            evened += [batch] if parts == 1 else self.split(batch, parts)
        self.stats.splits += len(evened) - len(batches)
        return evened

    def _loaded(self) -> Sequence[Refined] | None:
        began = time.perf_counter()
        window = self.feed.take()
        self.stats.wait_s += time.perf_counter() - began
        self.stats.splits += sum(batch.late for batch in window or ())
        self.stats.merges += sum(batch.joined for batch in window or ())
        return window

    def _agree(self, offer: Offer, failure: BaseException | None, uneven: Uneven) -> tuple[Agreement, int]:
        """What all ranks do next, and the largest of their last rows' costs."""
        began, opening = time.perf_counter(), self.feed.opening
        *highest, first, last, cost, nothing = self.exchange.highest(
            [*offer.to_max(), opening, -opening, self._last_cost, int(self.feed.has_nothing)], failure
        )
        if first and first == -last and self.exchange.world.size > 1:
            self.feed.tell_of_equal_ranks()  # type: ignore[union-attr]
        agreement = agree(highest, uneven)
        if nothing and agreement.steps:
            self._lend()
        self.stats.exchange_s += time.perf_counter() - began
        self.stats.exchanges += 1
        return agreement, cost

    def _lend(self) -> None:
        """Some rank's share of an iterable is empty: it idles on a copy of another rank's smallest batch."""
        smallest = min(self.pool, key=lambda batch: (batch.weight <= 0, batch.padded), default=None)
        window = None if smallest is None else RefinedWindow(-1, [replace(smallest, samples=None)])
        window = self.exchange.lend(window)
        if window is not None and self.feed.has_nothing:
            self.feed.lent(window.batches[0])  # type: ignore[union-attr]

    def _total(self, updates: list[list[Refined | None]], dearest: int, extra: Sequence[int] = ()) -> list[float]:
        """Make these updates due, with their totals over ranks; gives back ``extra``, summed too."""
        weights = [float(sum(batch.weight for batch in update if batch)) for update in updates]
        samples = [sum(len(batch) for batch in update if batch) for update in updates]
        if updates:
            weights[0] += self.cursor.begun_weight
            samples[0] += self.cursor.begun_samples
        began = time.perf_counter()
        found = self.exchange.total([*weights, *samples, self._last_cost, *extra])
        self.stats.exchange_s += time.perf_counter() - began
        for number, update in enumerate(updates):
            total, count = found[number], round(found[len(updates) + number])
            for place, batch in enumerate(update):
                local = (batch.weight, len(batch)) if batch else (0, 0)
                shares = Share(local[1], count), Share(local[0], total)
                self.due.append(Take(batch, *shares, ends_update=place == len(update) - 1))
        return found[2 * len(updates) + 1 :]

    def _emit(self) -> Take:
        """Count a step as used, before the training loop gets it."""
        take = self.due.popleft()
        batch, cursor, self.update_samples = take.batch, self.cursor, round(take.samples.total)
        samples, weight = cursor.begun_samples + int(take.samples.local), cursor.begun_weight + take.weight.local
        begun = {"begun_rows": cursor.begun_rows + 1, "begun_samples": samples, "begun_weight": weight}
        after = self._behind(cursor, self.update_samples) if take.ends_update else replace(cursor, **begun)
        self.cursor = replace(after, steps=cursor.steps + 1)
        if take.ends_update:
            self.stats.count_update(self.update_samples)
        if batch is None:
            self.stats.count_step(0, idle=True)
            return take
        counted: dict[str, Any] = {
            "real_tokens": batch.real,
            "padded_tokens": batch.padded,
            "padded_squares": batch.squares,
        }
        self.stats.count_step(len(batch), **counted)
        if batch.oversize and not self.stats.oversize:
            warn_user(
                f"sample {batch.indices[0]} ({units_of(batch.lengths, 0)}) does not fit the budget even alone and is emitted "
                "alone, as others may be (stats.oversize counts them); truncate it, raise the budget, or pass oversize='error'"
            )
        self.stats.oversize += batch.oversize
        return take


class FreeRunner(Runner):
    """Steps without update boundaries: as many as the rank with most batches needs.

    Between exchanges a rank loads windows until it has ``LOW_WATER`` batches. At an exchange all ranks agree on a number of
    steps (see :func:`~dynagroup.online.protocol.agree`) and take so many batches from their queues. An update's steps are
    emitted once all of them are agreed, because its totals are sums over ranks. Cost: one MAX and one SUM for about
    ``LOW_WATER`` steps.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queue: list[Refined] = []
        self.agreed: list[Refined | None] = []
        self.load_all = self.ended = False
        """``ended``: the steps that are agreed are the epoch's last."""
        self.delivered = (0, 0)
        """Batches and samples that workers delivered here."""
        self.samples_per_batch = 0.0

    @property
    def over(self) -> bool:
        return self.ended and not self.due and not self.agreed

    @property
    def front(self) -> list[Refined | None]:
        return [*super().front, *self.agreed]

    @property
    def pool(self) -> list[Refined]:
        return self.queue

    def state(self) -> dict[str, Any]:
        own = {"load_all": self.load_all, "ended": self.ended, "delivered": list(self.delivered)}
        return {**super().state(), **own, "samples_per_batch": self.samples_per_batch}

    def resume(self, place: Mapping[str, Any]) -> None:
        self.load_all, self.samples_per_batch = place["load_all"], place["samples_per_batch"]
        self.delivered = (place["delivered"][0], place["delivered"][1])
        self.agreed, self.queue = self.feed.reload()

    def settle(self, place: Mapping[str, Any] | None) -> None:
        super().settle(place)
        if place is not None:
            waits = self.exchange.highest([len(self.queue), int(self.feed.receiving)])
            # What was the end is none if some batch had to be split and waits again, or if an iterable is read again.
            self.ended = place["ended"] and not any(waits)

    def __iter__(self) -> Iterator[Take]:
        if self.agreed:
            self._complete(0, [])
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
        offer = Offer(len(self.queue), self.feed.receiving, bounded=self.feed.kind.bounded)
        agreement, dearest = self._agree(offer, failure, self.config.uneven)
        self.load_all, self.ended = agreement.load_all, agreement.last
        picks = self._pick(agreement)
        self.agreed += picks
        shares = self.feed.shares
        batches, samples, *loads = self._complete(dearest, [*self.delivered, *(self._loads() if shares else ())])
        self._last_cost = picks[0].padded if picks and picks[0] else 0
        self.samples_per_batch = samples / max(batches, 1)
        if shares:
            self.feed.share([round(load) for load in loads], round(LOW_WATER * self.samples_per_batch))  # type: ignore[union-attr]

    def _load(self) -> None:
        while self.feed.can_take and (self.load_all or len(self.queue) < LOW_WATER):
            window = self._loaded()
            if window is None:
                break
            self.queue += window
            batches, samples = self.delivered
            self.delivered = batches + len(window), samples + sum(len(batch) for batch in window)
        self.queue.sort(key=(lambda batch: batch.late) if self.feed.kind.ordered else (lambda batch: batch.rank_key))

    def _pick(self, agreement: Agreement) -> list[Refined | None]:
        """So many batches of the queue: in order, or from places spread evenly over it, alike on all ranks."""
        if (agreement.last or not self.feed.receiving) and self.config.uneven == "idle":
            self.queue = self._even_out(self.queue, agreement.steps)
        count, number = min(agreement.steps, len(self.queue)), self.cursor.steps + len(self.agreed)
        if self.feed.kind.ordered:
            picked, self.queue = self.queue[:count], self.queue[count:]
        else:
            self.queue.sort(key=lambda batch: batch.rank_key)  # what was split has a place of its own
            at = [quantile(self.config.seed, self.exchange.epoch, step) for step in range(number, number + count)]
            chosen = [self.queue.pop(int(share * len(self.queue))) for share in at]
            picked = placed(sorted(chosen, key=lambda batch: batch.rank_key), at)
        return [*picked, *[None] * (agreement.steps - count)]

    def _complete(self, dearest: int, extra: Sequence[int]) -> list[float]:
        """Move the updates that are complete from ``agreed`` to ``due``."""
        size = self.config.accumulation
        updates, start, stop = [], 0, size - self.cursor.begun_rows
        while stop <= len(self.agreed):
            updates.append(self.agreed[start:stop])
            start, stop = stop, stop + size
        if self.ended and start < len(self.agreed):
            updates.append(self.agreed[start:])
            start = len(self.agreed)
        self.agreed = self.agreed[start:]
        return self._total(updates, dearest, extra)

    def _loads(self) -> list[int]:
        """One number a rank: what this one still has to emit, in samples; zeros for the others, to be summed."""
        batches, samples = self.delivered
        per_batch = self.samples_per_batch or samples / max(batches, 1)
        loads = [0] * self.exchange.world.size
        loads[self.exchange.world.rank] = round(len(self.queue) * per_batch) + self.feed.pending_samples
        return loads


class UpdateRunner(Runner):
    """Updates of a set number of samples: a window is one rank's share of one update.

    Every rank takes its share's batches; with fewer batches than another rank it splits them, then idles. Cost: one MAX and one
    SUM an update.
    """

    _resumed: Sequence[Refined | None] = ()
    """Steps that a resumed update still has."""

    @property
    def over(self) -> bool:
        return not self.due and not self._resumed and not self.feed.receiving

    def resume(self, place: Mapping[str, Any]) -> None:
        front, split_off = self.feed.reload()
        self._resumed = [*front, *split_off]

    def __iter__(self) -> Iterator[Take]:
        while not self.over:
            if not self.due:
                self._next_update()
            while self.due:
                yield self._emit()

    def _next_update(self) -> None:
        failure, batches, resumed = None, self._resumed, bool(self._resumed)
        try:
            batches = batches or self._loaded() or ()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        self._resumed = ()
        agreement, dearest = self._agree(Offer(len(batches), receiving=False), failure, "idle")
        steps = max(agreement.steps, 1)
        evened = self._even_out([batch for batch in batches if batch is not None], steps)
        if not resumed:  # which go on in the order that they had
            evened = _in_rows(evened)
        row: list[Refined | None] = [*evened, *[None] * (steps - len(evened))]
        self._total([row], dearest)
        self._last_cost = row[0].padded if row[0] else 0


def _in_rows(batches: Sequence[Refined]) -> list[Refined]:
    """Planned batches in the order of their rows, which are of equal work, and behind them what was split off; batches of
    one group, or none planned, dearest first. Ranks that follow the same plan take the same row at the same step."""
    seen: Counter[int] = Counter()
    found = []
    for batch in sorted(batches, key=lambda batch: batch.rank_key):
        found.append((seen[batch.group], batch.group, batch))
        seen[batch.group] += 1
    return [batch for *_, batch in sorted(found, key=lambda item: item[:2])]
