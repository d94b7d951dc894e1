"""One epoch of an online loader: it chooses where windows come from and who runs them, and says where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.errors import AlignmentError, StateError
from dynagroup.online.engine import FreeRunner, Take, UpdateRunner
from dynagroup.online.feeds import MapFeed, Source, kind_of, left
from dynagroup.online.iterables import IterableFeed
from dynagroup.online.messages import shorten
from dynagroup.online.plans import Order
from dynagroup.online.protocol import Exchange, print_of
from dynagroup.online.state import LearnedLengths, pack, unpack
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray
from dynagroup.update.schedule import UpdateSizes
from dynagroup.update.step import LoaderStats
from dynagroup.validation import warn_user

__all__ = ["EpochRun", "Known", "behind", "handed_out"]


def behind(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where a run stands behind its next update, which holds so many samples; ``steps`` are not counted."""
    if sizes is not None:
        return next(sizes.cursors(cursor))
    used, seen = cursor.samples_used + samples, cursor.samples_seen + samples
    return Cursor(cursor.epoch, update=cursor.update + 1, samples_used=used, samples_seen=seen, current=samples)


def handed_out(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where the updates end that were handed out; the one under way, of so many samples, counts."""
    return behind(cursor, samples, sizes) if cursor.begun_rows else cursor


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of lengths before an epoch begins."""

    learned: LearnedLengths | None
    hint: IntArray | None
    budget: Budget
    """Says which streams are padded."""

    def of(self, source: Source) -> Source:
        """The source with the lengths of its order: exact ones for plans of batches, rough ones for windows alike."""
        source = replace(source, lengths=None, rough=None)
        if not len(source.order) or (self.hint is None and (self.learned is None or not self.learned.seen)):
            return source
        at, used = np.asarray(source.order.at(np.arange(len(source.order))), np.int64), len(source.order)
        if source.sizes is not None:
            used = source.sizes.end(source.epoch).samples_used - source.order.skipped
        known = None if self.learned is None else self.learned.known(at[:used])
        if known is None or self.learned is None:
            return source if self.hint is None else replace(source, rough=self.hint[at])
        unused = np.zeros(len(at) - used, np.int32)  # what an epoch drops is never measured, and never asked for
        whole = {name: np.append(values, unused) for name, values in known.items()}
        if self.learned.steady:
            return replace(source, lengths=whole)
        padded = [whole[name] for name in padded_streams(self.budget, whole)]
        return replace(source, rough=np.sum(padded, axis=0, dtype=np.int64))


class EpochRun:
    """One epoch, fresh or resumed.

    Resumed on as many ranks as before it goes on with the very batches that were queued. On another number, what no rank
    has emitted becomes an order of its own, which is begun like an epoch, in the middle of the update that was under way.

    Args:
        source: of the epoch; its cursor is where the run stands.
        identity: what all ranks must have alike.
        states: to go on from: this rank's, or all ranks' of another number; none for a fresh epoch.
        split: a batch in so many parts.

    Raises:
        StateError: the epoch would be of another kind than the one that was saved.
    """

    def __init__(
        self,
        source: Source,
        known: Known,
        *,
        stats: LoaderStats,
        identity: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._stats, self._ended = stats, False
        self.exchange = Exchange(source.world, source.epoch)
        cursor, place, rest = source.cursor, None, 0
        if states:
            base, total = states[0]["running"]["base"], states[0]["running"]["runner"]["update_samples"]
            after = handed_out(cursor, total, source.sizes)
            source = replace(source, order=source.order if base is None else Order(source.order.indices, unpack(base)))
            source = known.of(replace(source, cursor=after))
            place = states[0]["running"]
            if place["kind"] != kind_of(source):
                raise StateError(
                    f"the state was taken in an epoch of kind {place['kind']!r}, this one is {kind_of(source)!r}"
                )
            if states[0]["world_size"] != source.world.size:
                positions = left(source, place["kind"], [state["running"]["feed"] for state in states])
                source, place = replace(source, order=source.order.restricted(positions), cursor=cursor), None
                rest = print_of(positions.tolist())
                cursor = _joined(cursor, states, source.world.rank)
        self.source = source = source if place is not None else known.of(source)
        self.kind, self._place = kind_of(source), place
        self._identity = {
            **identity,
            "epoch": source.epoch,
            "place": cursor.steps,
            "rest": rest,
            "handed out": place and place["feed"].get("handed_out"),
            "sizes of updates": _print_of_sizes(source.sizes, source.epoch),
            "num_workers": f"{source.workers.num_workers} with prefetch_factor={source.workers.prefetch_factor}",
        }
        feed = IterableFeed if source.iterable else MapFeed
        self.feed = feed(source, self.kind, place and place["feed"])
        runner = UpdateRunner if self.kind == "updates" else FreeRunner
        following = partial(behind, sizes=source.sizes)
        self.runner = runner(self.exchange, self.feed, source.config, stats, source.collator.split, cursor, following)
        if states:
            self.runner.update_samples = states[0]["running"]["runner"]["update_samples"]

    def __iter__(self) -> Iterator[Take]:
        self._begin()
        yield from self.runner
        self._ended = True
        if self.source.config.uneven == "stop":
            self._count_left()

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end; the one that is under way counts."""
        return handed_out(self.runner.cursor, self.runner.update_samples, self.source.sizes)

    def close(self) -> None:
        """Let go of the workers, also when the loop was left early."""
        self.feed.close()
        self._stats.exchanged_bytes += self.exchange.num_bytes
        self.exchange.num_bytes = 0

    def state(self) -> dict[str, Any] | None:
        """Its place, JSON-able; None once the epoch is over."""
        if self._ended or self.runner.over:
            return None
        base = self.source.order.base
        return {
            "kind": self.kind,
            "base": None if base is None else pack(base),
            "runner": self.runner.state(),
            "feed": self.feed.state(self.runner.front, self.runner.pool),
        }

    def _begin(self) -> None:
        """Reload what a resumed epoch had queued, and compare ranks; an error on one of them reaches all."""
        failure, place = None, self._place and self._place["runner"]
        try:
            if place is not None:
                self.runner.resume(place)
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        if self.source.world.size > 1:
            self.exchange.compare(self._identity, failure)
            self._refuse_equal_batches()
        elif failure is not None:
            raise failure
        self.runner.settle(place)

    def _refuse_equal_batches(self) -> None:
        batches = self.source.batches
        if batches is None:
            return
        first = print_of(batches[:4])
        low, high = self.exchange.highest([first, -first])
        if low == -high and batches:
            raise AlignmentError(
                "every rank's `batch_sampler` gives the same batches, so every sample would be used on every rank; give "
                "each rank its own (LengthAwareBatchSampler does), or pass `sampler` and let the loader divide"
            )

    def _count_left(self) -> None:
        unused = self.feed.unused(self.runner.pool)
        self._stats.left_samples += len(unused)
        if unused:
            warn_user(
                f"uneven='stop' ended the epoch with {len(unused)} samples left on rank {self.source.world.rank}: "
                f"{shorten(unused)}; uneven='idle' uses them"
            )


def _joined(cursor: Cursor, states: Sequence[Mapping[str, Any]], rank: int) -> Cursor:
    """Other ranks have begun the update under way: what it holds so far counts on the first rank."""
    begun = [Cursor.of(state["cursor"]) for state in states] if rank == 0 else []
    samples, weight = sum(c.begun_samples for c in begun), float(sum(c.begun_weight for c in begun))
    return replace(cursor, begun_samples=samples, begun_weight=weight)


def _print_of_sizes(sizes: UpdateSizes | None, epoch: int) -> int:
    if sizes is None or sizes.is_constant:
        return 0
    return print_of([stop for _, stop, _ in sizes.spans(sizes.start(epoch))])
