"""The alignment engine: one rank's refined windows become steps that all ranks take together.

It knows no DataLoader: a :class:`~dynagroup.online.feeds.base.Feed` brings windows, a ``World`` carries a few numbers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from dynagroup.online.align import Agreement, Offer, Uneven, agree, even_parts, quantile
from dynagroup.online.exchange import Exchange
from dynagroup.online.feeds.base import Feed
from dynagroup.online.records import Queued, RefinedWindow, Take
from dynagroup.shapes import units_of
from dynagroup.update.loss_weight import Share
from dynagroup.update.stats import LoaderStats
from dynagroup.validation import Check, a_flag, a_list, a_number, an_int, warn_user

__all__ = ["FreeRunner", "Knobs", "Runner", "UpdateRunner", "placed"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Knobs:
    """How ranks are aligned. The same on all of them."""

    accumulation: int = 1
    seed: int = 0
    uneven: Uneven = "idle"
    low_water: int = 32
    """Batches that a rank wants queued before an exchange: so many steps follow one exchange."""


@dataclass
class Runner(ABC):
    """What both ways of running share: updates whose totals are known, splitting, counting, and the saved place."""

    exchange: Exchange
    feed: Feed
    knobs: Knobs
    stats: LoaderStats
    split: Callable[[Queued, int], list[Queued]]
    due: deque[Take] = field(default_factory=deque)
    """Steps whose update's totals are known."""
    partial: tuple[float, int] = (0.0, 0)
    """Weight and samples that this rank emitted of the update that is under way."""
    offset: int = 0
    """Steps of the update under way that were emitted."""
    steps: int = 0
    """Steps emitted in this epoch."""
    last_cost: int = 0

    place: ClassVar[Mapping[str, Check]] = {
        "steps": an_int(),
        "offset": an_int(),
        "partial": a_list(a_number(0), length=2),
        "last_cost": an_int(),
    }

    @abstractmethod
    def __iter__(self) -> Iterator[Take]:
        """The steps that remain of the epoch."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """No step of the epoch is left, on any rank."""

    def start(self) -> None:
        """Begin an epoch; every rank knows all ranks' loads, which are zero."""
        if self.feed.shares:
            self.feed.share([0] * self.exchange.world.size, 0)

    def resume(self, place: Mapping[str, Any]) -> None:
        """Go on from a saved place, with what the feed loads again."""
        self.steps, self.offset, self.last_cost = place["steps"], place["offset"], place["last_cost"]
        self.partial = (float(place["partial"][0]), int(place["partial"][1]))

    def go_on(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Other ranks have begun the update under way: what it weighs so far counts on the first rank."""
        if self.exchange.world.rank == 0:
            weights, samples = zip(*(place["partial"] for place in places), strict=True)
            self.partial = (float(sum(weights)), int(sum(samples)))

    @abstractmethod
    def settle(self, place: Mapping[str, Any]) -> None:
        """Once all ranks have resumed: what they must know of each other. Collective."""

    def state(self) -> dict[str, Any]:
        """Its saved place: JSON-able."""
        return {"steps": self.steps, "offset": self.offset, "partial": list(self.partial), "last_cost": self.last_cost}

    @property
    def front(self) -> list[Queued | None]:
        """Agreed steps that were not emitted."""
        return [take.queued for take in self.due]

    @property
    def pool(self) -> list[Queued]:
        """Batches that wait for an agreement."""
        return []

    def _even_out(self, batches: Sequence[Queued], steps: int) -> list[Queued]:
        """Split batches whose samples were kept, until there are ``steps`` or none can be split."""
        if len(batches) >= steps:
            return list(batches)
        sizes = [len(q.refined) if q.kept and q.refined.samples is not None else 1 for q in batches]
        evened = []
        for queued, parts in zip(batches, even_parts(sizes, steps), strict=True):
            evened += [queued] if parts == 1 else self.split(queued, parts)
        self.stats.splits += len(evened) - len(batches)
        return evened

    def _loaded(self) -> Sequence[Queued] | None:
        began = time.perf_counter()
        window = self.feed.take()
        self.stats.wait_s += time.perf_counter() - began
        self.stats.splits += sum(queued.late for queued in window or ())
        self.stats.merges += sum(queued.refined.joined for queued in window or ())
        return window

    def _agree(self, offer: Offer, failure: BaseException | None, uneven: Uneven) -> tuple[Agreement, int]:
        """What all ranks do next, and the largest of their last rows' costs."""
        began = time.perf_counter()
        opening = self.feed.opening
        *highest, first, last, cost, nothing = self.exchange.highest(
            [*offer.to_max(), opening, -opening, self.last_cost, int(self.feed.has_nothing)], failure
        )
        if first and first == -last and self.exchange.world.size > 1:
            self.feed.tell_of_equal_ranks()
        agreement = agree(highest, uneven)
        if nothing and agreement.steps:
            self._lend()
        self.stats.exchange_s += time.perf_counter() - began
        self.stats.exchanges += 1
        return agreement, cost

    def _lend(self) -> None:
        """Some rank's share of a stream is empty: it idles on a copy of another rank's smallest batch."""
        smallest = min((queued.refined for queued in self.pool), key=lambda r: (r.weight <= 0, r.padded), default=None)
        window = None if smallest is None else RefinedWindow(-1, [replace(smallest, samples=None)])
        window = self.exchange.lend(window)
        if window is not None and self.feed.has_nothing:
            self.feed.lent(window.batches[0])

    def _total(self, items: list[list[Queued | None]], extra: Sequence[int] = ()) -> tuple[list[Take], list[int]]:
        """Totals over ranks of these updates, then ``extra`` summed too."""
        weights = [float(sum(q.refined.weight for q in update if q)) for update in items]
        samples = [sum(len(q.refined) for q in update if q) for update in items]
        if items:
            weights[0] += self.partial[0]
            samples[0] += self.partial[1]
        began = time.perf_counter()
        found = self.exchange.total([*weights, *samples, self.last_cost, *extra])
        self.stats.exchange_s += time.perf_counter() - began
        takes = []
        for number, update in enumerate(items):
            total, count = found[number], round(found[len(items) + number])
            for place, queued in enumerate(update):
                local = (queued.refined.weight, len(queued.refined)) if queued else (0, 0)
                shares = Share(local[1], count), Share(local[0], total)
                takes.append(Take(queued, *shares, ends_update=place == len(update) - 1))
        return takes, [round(value) for value in found[2 * len(items) :]]

    def _note_row(self, highest: int, total: int) -> None:
        self.stats.row_highest += highest
        self.stats.row_total += round(total / self.exchange.world.size)

    def _emit(self, take: Take) -> Take:
        """Count a step as used, before the training loop gets it."""
        refined = take.queued.refined if take.queued else None
        self.steps += 1
        self.offset = 0 if take.ends_update else self.offset + 1
        weight, samples = self.partial
        self.partial = (0.0, 0) if take.ends_update else (weight + take.weight.local, samples + int(take.samples.local))
        self.stats.steps += 1
        if take.ends_update:
            self.stats.updates += 1
            self.stats.update_samples += round(take.samples.total)
        if refined is None:
            self.stats.idle_steps += 1
            return take
        self.stats.samples += len(refined)
        self.stats.batch_sizes[len(refined)] += 1
        self.stats.real_tokens += refined.real
        self.stats.padded_tokens += refined.padded
        self.stats.padded_squares += refined.squares
        if refined.oversize and not self.stats.oversize:
            length = units_of(refined.lengths, 0)
            warn_user(
                f"sample {refined.indices[0]} ({length}) does not fit the budget even alone and is emitted alone, "
                "as others may be (stats.oversize counts them); truncate it, raise the budget, or pass oversize='error'"
            )
        self.stats.oversize += refined.oversize
        return take


@dataclass
class FreeRunner(Runner):
    """Steps without update boundaries: as many as the rank with most batches needs.

    Between exchanges a rank loads windows until it has ``low_water`` batches. At an exchange all ranks agree on a number of
    steps (see :func:`~dynagroup.online.align.agree`) and take so many batches from their queues. An update's steps are
    emitted once all of them are agreed, because its totals are sums over ranks. Cost: one MAX and one SUM for about
    ``low_water`` steps.
    """

    queue: list[Queued] = field(default_factory=list)
    agreed: list[Queued | None] = field(default_factory=list)
    picked: int = 0
    """Steps agreed in this epoch."""
    load_all: bool = False
    ended: bool = False
    """The steps that are agreed are the epoch's last."""
    delivered: tuple[int, int] = (0, 0)
    """Batches and samples that workers delivered here."""
    samples_per_batch: float = 0.0

    place = {
        **Runner.place,
        "picked": an_int(),
        "load_all": a_flag(),
        "ended": a_flag(),
        "delivered": a_list(an_int(), length=2),
        "samples_per_batch": a_number(0),
    }

    @property
    def over(self) -> bool:
        return self.ended and not self.due and not self.agreed

    @property
    def front(self) -> list[Queued | None]:
        return [*super().front, *self.agreed]

    @property
    def pool(self) -> list[Queued]:
        return self.queue

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "picked": self.picked,
            "load_all": self.load_all,
            "ended": self.ended,
            "delivered": list(self.delivered),
            "samples_per_batch": self.samples_per_batch,
        }

    def resume(self, place: Mapping[str, Any]) -> None:
        super().resume(place)
        self.picked, self.load_all = place["picked"], place["load_all"]
        self.delivered = (place["delivered"][0], place["delivered"][1])
        self.samples_per_batch = place["samples_per_batch"]
        self.agreed, self.queue = self.feed.reload()

    def settle(self, place: Mapping[str, Any]) -> None:
        waits = self.exchange.highest([len(self.queue), int(self.feed.receiving)])
        # What was the end is none if some batch had to be split and waits again, or if a stream is read again.
        self.ended = place["ended"] and not any(waits)
        if self.feed.shares:
            self.feed.check_given(round(self.exchange.total([self.delivered[1] + self.feed.pending_samples])[0]))

    def go_on(self, places: Sequence[Mapping[str, Any]]) -> None:
        super().go_on(places)
        self.offset = places[0]["offset"]

    def __iter__(self) -> Iterator[Take]:
        if self.agreed:
            self._complete([])
        while True:
            while self.due:
                yield self._emit(self.due.popleft())
            if self.ended:
                return
            self._exchange()

    def _exchange(self) -> None:
        failure = None
        try:
            self._load()
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        offer = Offer(len(self.queue), self.feed.receiving, bounded=self.feed.bounded)
        agreement, dearest = self._agree(offer, failure, self.knobs.uneven)
        self.load_all, self.ended = agreement.load_all, agreement.last
        picks = self._pick(agreement)
        self.agreed += picks
        loads = self._loads() if self.feed.shares else []
        rest = self._complete([*loads, *self.delivered])
        self._note_row(dearest, rest[0])
        self.last_cost = picks[0].refined.padded if picks and picks[0] else 0
        batches, samples = rest[-2:]
        self.samples_per_batch = samples / max(batches, 1)
        if loads:
            self.feed.share(rest[1:-2], round(self.knobs.low_water * self.samples_per_batch))

    def _load(self) -> None:
        wanted = max(self.knobs.low_water, 1)
        while self.feed.can_take and (self.load_all or len(self.queue) < wanted):
            window = self._loaded()
            if window is None:
                break
            self.queue += window
            batches, samples = self.delivered
            self.delivered = batches + len(window), samples + sum(len(q.refined) for q in window)
        if self.feed.ordered:
            self.queue.sort(key=lambda q: q.late)
        else:
            self.queue.sort(key=lambda q: q.rank_key)

    def _pick(self, agreement: Agreement) -> list[Queued | None]:
        """So many batches of the queue: in order, or from places spread evenly over it, alike on all ranks."""
        steps = agreement.steps
        short = agreement.last or not self.feed.receiving
        if short and self.knobs.uneven == "idle":
            self.queue = self._even_out(self.queue, steps)
        count = min(steps, len(self.queue))
        if self.feed.ordered:
            picked, self.queue = self.queue[:count], self.queue[count:]
        else:
            self.queue.sort(key=lambda q: q.rank_key)  # what was split has a place of its own
            at = [quantile(self.knobs.seed, self.exchange.epoch, self.picked + number) for number in range(count)]
            chosen = [self.queue.pop(int(share * len(self.queue))) for share in at]
            picked = placed(sorted(chosen, key=lambda q: q.rank_key), at)
        self.picked += steps
        return [*picked, *[None] * (steps - count)]

    def _complete(self, extra: Sequence[int]) -> list[int]:
        """Move the updates that are complete from ``agreed`` to ``due``."""
        size = self.knobs.accumulation
        items, start, stop = [], 0, size - self.offset
        while stop <= len(self.agreed):
            items.append(self.agreed[start:stop])
            start, stop = stop, stop + size
        if self.ended and start < len(self.agreed):
            items.append(self.agreed[start:])
            start = len(self.agreed)
        self.agreed = self.agreed[start:]
        takes, rest = self._total(items, extra)
        self.due.extend(takes)
        return rest

    def _loads(self) -> list[int]:
        batches, samples = self.delivered
        per_batch = self.samples_per_batch or samples / max(batches, 1)
        return self.exchange.one_each(round(len(self.queue) * per_batch) + self.feed.pending_samples)


@dataclass
class UpdateRunner(Runner):
    """Updates of a set number of samples: a window is one rank's share of one update.

    Every rank takes its share's batches; with fewer batches than another rank it splits them, then idles. Cost: one MAX and one
    SUM an update.
    """

    resumed: list[Queued | None] = field(default_factory=list)
    """Steps that a resumed update still has."""

    @property
    def over(self) -> bool:
        return not self.due and not self.resumed and not self.feed.receiving

    def resume(self, place: Mapping[str, Any]) -> None:
        super().resume(place)
        front, split_off = self.feed.reload()
        self.resumed = [*front, *split_off]

    def settle(self, place: Mapping[str, Any]) -> None:
        """Nothing: each update begins with an exchange of its own."""

    def __iter__(self) -> Iterator[Take]:
        while not self.over:
            if not self.due:
                self._next_update()
            while self.due:
                yield self._emit(self.due.popleft())

    def _next_update(self) -> None:
        failure, batches = None, self.resumed
        try:
            if not batches:
                batches = list(self._loaded() or ())
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        self.resumed = []
        agreement, dearest = self._agree(Offer(len(batches), receiving=False), failure, "idle")
        steps = max(agreement.steps, 1)
        whole = [q for q in batches if q is not None]
        evened = self._even_out(whole, steps)
        if not self.offset:
            evened = _in_rows(evened)
        row: list[Queued | None] = [*evened, *[None] * (steps - len(evened))]
        takes, rest = self._total([row])
        self._note_row(dearest, rest[0])
        self.last_cost = row[0].refined.padded if row[0] else 0
        self.due.extend(takes)


def placed(dearest_first: Sequence[T], at: Sequence[float]) -> list[T]:
    """Batches where numbers of the same rank stand: the dearest in the place of the smallest. Ranks that place theirs by the same
    numbers have their dearest in one row, their second dearest in another, and so on: no other order of them waits less.

    >>> placed(["dear", "fair", "cheap"], [0.5, 0.1, 0.9])
    ['fair', 'dear', 'cheap']
    """
    found = list(dearest_first)
    for item, place in zip(dearest_first, np.argsort(at, kind="stable").tolist(), strict=True):
        found[place] = item
    return found


def _in_rows(batches: Sequence[Queued]) -> list[Queued]:
    """Planned batches in the order of their rows, which are of equal work, and behind them what was split off; batches of
    one group, or none planned, dearest first. Ranks that follow the same plan take the same row at the same step."""
    seen: Counter[int] = Counter()
    placed = []
    for queued in sorted(batches, key=lambda q: q.rank_key):
        group = queued.refined.group
        placed.append((seen[group], group, queued))
        seen[group] += 1
    return [queued for *_, queued in sorted(placed, key=lambda item: item[:2])]
