"""The alignment engine: one rank's refined windows become steps that all ranks take together.

It knows no DataLoader: a :class:`Feed` brings windows, a ``World`` carries a few integers. So the same code serves the
loader and a simulation of a thousand ranks.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dynagroup.online.align import Agreement, Grant, Offer, Uneven, agree, even_parts, hand_out, quantile
from dynagroup.online.collate import Refined, RefinedWindow
from dynagroup.online.exchange import Exchange
from dynagroup.update.stats import LoaderStats
from dynagroup.update.step import Share

__all__ = ["Feed", "FreeRunner", "HandOut", "Knobs", "Queued", "Take", "UpdateRunner"]


class Feed(Protocol):
    """Where a rank's windows come from, in the order in which it opened them."""

    @property
    def receiving(self) -> bool:
        """Something was handed out and not taken yet, or more may be handed out."""
        ...

    @property
    def pending_samples(self) -> int:
        """Samples handed out and not taken yet; 0 where it is not known."""
        ...

    @property
    def can_take(self) -> bool:
        """:meth:`take` would return a window, or find the end of a stream."""
        ...

    def take(self) -> Sequence[Queued] | None:
        """The next window's batches; None at the end of a stream. Raises what a worker raised."""
        ...

    def grant(self, ranges: Sequence[tuple[int, int]], *, closed: bool) -> None:
        """More positions of the epoch's order, a window each; with ``closed`` they are the last ones."""
        ...


@dataclass(frozen=True, slots=True)
class Queued:
    """A batch in the queue.

    Args:
        positions: its samples' places in the epoch's order.
        late: it waits behind all that was planned.
        kept: its processed samples were kept, so that it can be split.
    """

    refined: Refined
    positions: tuple[int, ...]
    late: bool = False
    kept: bool = False

    @property
    def rank_key(self) -> tuple[int, tuple[int, ...]]:
        return -self.refined.padded, self.positions


@dataclass(frozen=True, slots=True)
class Knobs:
    """How ranks are aligned. The same on all of them."""

    window: int = 1024
    accumulation: int = 1
    seed: int = 0
    uneven: Uneven = "idle"
    depth: int = 0
    """Windows that a rank's workers fetch ahead."""
    low_water: int = 32
    """Batches that a rank wants queued before an exchange: so many steps follow one exchange."""
    ordered: bool = False
    """Batches keep the order in which they come (they were planned in rows), instead of being shuffled."""
    streams: bool = False
    """What a rank still receives is not known beforehand."""


@dataclass(frozen=True, slots=True)
class Take:
    """One step on this rank: a batch, or None to idle, and what it weighs."""

    queued: Queued | None
    samples: Share
    weight: Share
    ends_update: bool


@dataclass(slots=True)
class HandOut:
    """Positions of the epoch's order that no rank was given yet."""

    start: int
    stop: int

    @property
    def closed(self) -> bool:
        return self.start >= self.stop


@dataclass
class _Runner:
    """What both modes share: updates whose totals are known, and splitting."""

    exchange: Exchange
    feed: Feed
    knobs: Knobs
    stats: LoaderStats
    split: Callable[[Queued, int], list[Queued]] | None = None
    due: deque[Take] = field(default_factory=deque)
    partial: tuple[float, int] = (0.0, 0)
    """Weight and samples that this rank emitted of the update that is under way."""
    offset: int = 0
    """Steps of the update under way that were emitted."""
    steps: int = 0
    """Steps emitted in this epoch."""
    last_cost: int = 0

    def _even_out(self, batches: Sequence[Queued], steps: int) -> list[Queued]:
        """Split batches whose samples were kept, until there are ``steps`` or none can be split."""
        if len(batches) >= steps or self.split is None:
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

    def _agree(self, offer: Offer, failure: BaseException | None) -> tuple[Agreement, list[int]]:
        began = time.perf_counter()
        highest = self.exchange.highest([*offer.to_max(), self.last_cost], failure)
        self.stats.exchange_s += time.perf_counter() - began
        self.stats.exchanges += 1
        return agree(highest, self.knobs.uneven), highest

    def _total(self, items: list[list[Queued | None]], extra: Sequence[int] = ()) -> tuple[list[Take], list[int]]:
        """Totals over ranks of these updates, then ``extra`` summed too."""
        weights = [sum(q.refined.weight for q in update if q) for update in items]
        samples = [sum(len(q.refined) for q in update if q) for update in items]
        if items:
            weights[0] += self.partial[0]
            samples[0] += self.partial[1]
        began = time.perf_counter()
        found = self.exchange.total([*weights, *samples, self.last_cost, *extra])
        self.stats.exchange_s += time.perf_counter() - began
        takes = []
        for number, update in enumerate(items):
            total, count = found[number], int(found[len(items) + number])
            for place, queued in enumerate(update):
                local = (queued.refined.weight, len(queued.refined)) if queued else (0, 0)
                shares = Share(local[1], count), Share(local[0], total)
                takes.append(Take(queued, *shares, ends_update=place == len(update) - 1))
        return takes, [int(value) for value in found[2 * len(items) :]]

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
        if refined is None:
            self.stats.idle_steps += 1
            return take
        self.stats.samples += len(refined)
        self.stats.real_tokens += refined.real
        self.stats.padded_tokens += refined.padded
        if refined.oversize and not self.stats.oversize:
            warnings.warn(
                f"sample {refined.indices[0]} ({refined.real} tokens) does not fit the budget even alone and is emitted alone, "
                "as others may be (stats.oversize counts them); truncate it, raise the budget, or pass oversize='error'",
                stacklevel=2,
            )
        self.stats.oversize += refined.oversize
        return take


@dataclass
class FreeRunner(_Runner):
    """Steps without update boundaries: as many as the rank with most batches needs."""

    handout: HandOut | None = None
    pool: list[Queued] = field(default_factory=list)
    agreed: list[Queued | None] = field(default_factory=list)
    picked: int = 0
    """Steps agreed in this epoch."""
    load_all: bool = False
    ended: bool = False
    delivered: tuple[int, int] = (0, 0)
    """Batches and samples that workers delivered here."""
    samples_per_batch: float = 0.0

    def start(self) -> None:
        """Open the first windows; every rank knows all ranks' loads, which are zero."""
        if self.handout is not None:
            self._hand_out([0] * self.exchange.world.size)

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
        offer = Offer(len(self.pool), self.feed.receiving, bounded=not self.knobs.streams)
        agreement, highest = self._agree(offer, failure)
        assert agreement.steps or agreement.last or agreement.load_all, (
            "an exchange must bring the epoch nearer its end"
        )
        self.load_all, self.ended = agreement.load_all, agreement.last
        picks = self._pick(agreement)
        self.agreed += picks
        loads = self._loads() if self.handout is not None and not self.handout.closed else []
        rest = self._complete([*loads, *self.delivered])
        self._note_row(highest[-1], rest[0])
        self.last_cost = picks[0].refined.padded if picks and picks[0] else 0
        batches, samples = rest[-2:]
        self.samples_per_batch = samples / max(batches, 1)
        if loads:
            self._hand_out(rest[1:-2])

    def _load(self) -> None:
        wanted = max(self.knobs.low_water, 1)
        while self.feed.can_take and (self.load_all or len(self.pool) < wanted):
            window = self._loaded()
            if window is None:
                break
            self.pool += window
            batches, samples = self.delivered
            self.delivered = batches + len(window), samples + sum(len(q.refined) for q in window)
        if self.knobs.ordered:
            self.pool.sort(key=lambda q: q.late)
        else:
            self.pool.sort(key=lambda q: q.rank_key)

    def _pick(self, agreement: Agreement) -> list[Queued | None]:
        steps = agreement.steps
        short = agreement.last or not self.feed.receiving
        if short and self.knobs.uneven == "idle":
            self.pool = self._even_out(self.pool, steps)
        picks: list[Queued | None] = []
        for number in range(min(steps, len(self.pool))):
            place = 0
            if not self.knobs.ordered:
                place = int(quantile(self.knobs.seed, self.exchange.epoch, self.picked + number) * len(self.pool))
            picks.append(self.pool.pop(place))
        picks += [None] * (steps - len(picks))
        self.picked += steps
        return picks

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
        return self.exchange.one_each(round(len(self.pool) * per_batch) + self.feed.pending_samples)

    def _hand_out(self, loads: Sequence[int]) -> None:
        handout, knobs = self.handout, self.knobs
        assert handout is not None
        ahead = round(knobs.low_water * self.samples_per_batch)
        target = (knobs.depth + 1) * knobs.window + ahead
        grants, handout.start = hand_out(loads, handout.start, handout.stop, window=knobs.window, target=target)
        grant: Grant = grants[self.exchange.world.rank]
        self.feed.grant(grant.ranges, closed=handout.closed)


@dataclass
class UpdateRunner(_Runner):
    """Updates of a set number of samples: a window is one rank's share of one update."""

    resumed: list[Queued | None] | None = None
    """Steps that a resumed update still has."""

    def __iter__(self) -> Iterator[Take]:
        while self.due or self.resumed or self.feed.receiving:
            if not self.due:
                self._next_update()
            while self.due:
                yield self._emit(self.due.popleft())

    def _next_update(self) -> None:
        failure, batches = None, []
        try:
            batches, self.resumed = (self.resumed, None) if self.resumed else (list(self._loaded() or ()), None)
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        _, highest = self._agree(Offer(len(batches), receiving=False), failure)
        steps = max(highest[0], 1)
        whole = [q for q in batches if q is not None]
        if self.knobs.ordered or self.offset:
            evened = self._even_out(whole, steps)
        else:
            evened = sorted(self._even_out(whole, steps), key=lambda q: q.rank_key)
        row: list[Queued | None] = [*evened, *[None] * (steps - len(evened))]
        takes, rest = self._total([row])
        self._note_row(highest[-1], rest[0])
        self.last_cost = row[0].refined.padded if row[0] else 0
        self.due.extend(takes)


def late(window: RefinedWindow, queued: Sequence[Queued]) -> list[Queued]:
    """Mark what splitting planned batches brought on top: it waits behind the rows that were planned."""
    seen: set[int] = set()
    marked = []
    for q in queued:
        marked.append(replace(q, late=q.refined.group in seen))
        seen.add(q.refined.group)
    return marked
