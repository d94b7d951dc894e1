"""One epoch of an online loader: it chooses where windows come from and who runs them, and says where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.errors import AlignmentError, StateError
from dynagroup.online.codec import pack, unpack
from dynagroup.online.engine import FreeRunner, Knobs, Runner, UpdateRunner
from dynagroup.online.exchange import Exchange, fingerprint
from dynagroup.online.feeds.base import Feed, Source
from dynagroup.online.feeds.batches import BatchesFeed
from dynagroup.online.feeds.handed_out import HandedOutFeed
from dynagroup.online.feeds.planned import ExactFeed, RoughFeed
from dynagroup.online.feeds.stream import StreamFeed
from dynagroup.online.feeds.updates import UpdateFeed
from dynagroup.online.learned import LearnedLengths
from dynagroup.online.records import Refined, Take, shorten
from dynagroup.online.requests import Order
from dynagroup.online.workers import split_queued
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray
from dynagroup.update.schedule import UpdateSizes
from dynagroup.validation import warn_user

__all__ = ["FEEDS", "EpochRun", "Known"]


class Kind(NamedTuple):
    """What an epoch of a kind is made of."""

    feed: type[Feed]
    runner: type[Runner]


FEEDS: Mapping[str, Kind] = {
    feed.kind: Kind(feed, UpdateRunner if feed is UpdateFeed else FreeRunner)
    for feed in (BatchesFeed, ExactFeed, HandedOutFeed, RoughFeed, StreamFeed, UpdateFeed)
}


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
        at = np.asarray(source.order.at(np.arange(len(source.order))), np.int64)
        used = len(at)
        if source.sizes is not None:
            used = source.sizes.end(source.epoch).samples_used - source.order.skipped
        known = None if self.learned is None else self.learned.known(at[:used])
        if known is not None and self.learned is not None:
            unused = np.zeros(len(at) - used, np.int32)  # what an epoch drops is never measured, and never asked for
            whole = {name: np.append(values, unused) for name, values in known.items()}
            if self.learned.steady:
                return replace(source, lengths=whole)
            padded = [whole[name] for name in padded_streams(self.budget, whole)]
            return replace(source, rough=np.sum(padded, axis=0, dtype=np.int64))
        return source if self.hint is None else replace(source, rough=self.hint[at])


def kind_of(source: Source, *, stream: bool) -> Kind:
    """Which kind of epoch a source makes."""
    if stream:
        return FEEDS[StreamFeed.kind]
    if source.batches is not None:
        return FEEDS[BatchesFeed.kind]
    if source.sizes is not None:
        return FEEDS[UpdateFeed.kind]
    if source.lengths is not None:
        return FEEDS[ExactFeed.kind]
    return FEEDS[HandedOutFeed.kind if source.rough is None else RoughFeed.kind]


class EpochRun:
    """One epoch, fresh or resumed.

    Resumed on as many ranks as before it goes on with the very batches that were queued. On another number, what no rank
    has emitted becomes an order of its own, which is begun like an epoch, in the middle of the update that was under way.

    Args:
        identity: what all ranks must have alike.
        resume: states to go on from: this rank's, or all ranks' of another number.

    Raises:
        StateError: the epoch would be of another kind than the one that was saved.
    """

    def __init__(
        self,
        source: Source,
        known: Known,
        *,
        stream: bool,
        identity: Mapping[str, Any],
        resume: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._ended = False
        self.exchange = Exchange(source.world, source.epoch)
        progress, rest, begun = None, 0, []
        if resume is not None and resume[0]["progress"]["base"] is not None:
            source = replace(source, order=Order(source.order.indices, unpack(resume[0]["progress"]["base"])))
        source = known.of(source)
        self.kind = kind_of(source, stream=stream)
        if resume is not None:
            progress = resume[0]["progress"]
            if progress["kind"] != self.kind.feed.kind:
                raise StateError(
                    f"the state was taken in an epoch of kind {progress['kind']!r}, this one is {self.kind.feed.kind!r}"
                )
            if resume[0]["world_size"] != source.world.size:
                places = [state["progress"]["feed"] for state in resume]
                left = self.kind.feed.left(source, places)
                restart = UpdateFeed.restart(places) if source.sizes is not None else None
                source = known.of(replace(source, order=source.order.restricted(left), restart=restart))
                self.kind = kind_of(source, stream=stream)
                begun = [state["progress"]["runner"] for state in resume]
                progress, rest = None, fingerprint(left.tolist())
        self.source, self._progress = source, progress
        self._identity = {
            **identity,
            "epoch": source.epoch,
            "place": progress["runner"]["steps"] if progress else 0,
            "rest": rest,
            "handed out": progress["feed"].get("handed_out") if progress else None,
            "sizes of updates": _print_of_sizes(source.sizes, source.epoch),
            "num_workers": f"{source.workers.num_workers} with prefetch_factor={source.workers.prefetch_factor}",
        }
        self.feed = self.kind.feed(source, progress and progress["feed"])  # pyright: ignore[reportCallIssue]
        knobs = Knobs(source.config.accumulation, source.config.seed, source.config.uneven)
        split = partial(split_queued, source.collator)
        self.runner = self.kind.runner(self.exchange, self.feed, knobs, source.stats, split)
        if begun:
            self.runner.go_on(begun)

    def __iter__(self) -> Iterator[Take]:
        self._begin()
        yield from self.runner

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end; the one that is under way counts."""
        return self.feed.cursor

    def set_samples_per_update(self, samples: int) -> int:
        """See :meth:`OnlineDataLoader.set_samples_per_update`."""
        return self.feed.set_samples_per_update(samples)

    def spare(self) -> Refined:
        """A batch to idle on, for a rank that never had any."""
        return self.feed.spare()

    def finish(self) -> None:
        """After the last step: name what was left."""
        self._ended = True
        if self.source.config.uneven == "stop":
            self._count_left()

    def close(self) -> None:
        """Let go of the workers, also when the loop was left early."""
        self.feed.close()
        self.source.stats.exchanged_bytes += self.exchange.num_bytes
        self.exchange.num_bytes = 0

    def state(self) -> dict[str, Any] | None:
        """Progress, JSON-able; None once the epoch is over."""
        if self._ended or self.runner.over:
            return None
        base = self.source.order.base
        return {
            "kind": self.kind.feed.kind,
            "base": None if base is None else pack(base),
            "runner": self.runner.state(),
            "feed": self.feed.state(self.runner.front, self.runner.pool),
        }

    def _begin(self) -> None:
        """Reload what a resumed epoch had queued, and compare ranks; an error on one of them reaches all."""
        failure = None
        try:
            if self._progress is not None:
                self.runner.resume(self._progress["runner"])
        except Exception as error:  # noqa: BLE001 - told to every rank, and raised again
            failure = error
        if self.source.world.size > 1:
            self.exchange.compare(self._identity, failure)
            self._refuse_equal_batches()
        elif failure is not None:
            raise failure
        if self._progress is None:
            self.runner.start()
        else:
            self.runner.settle(self._progress["runner"])

    def _refuse_equal_batches(self) -> None:
        batches = self.source.batches
        if batches is None:
            return
        first = fingerprint(batches[:4])
        low, high = self.exchange.highest([first, -first])
        if low == -high and batches:
            raise AlignmentError(
                "every rank's `batch_sampler` gives the same batches, so every sample would be used on every rank; give "
                "each rank its own (LengthAwareBatchSampler does), or pass `sampler` and let the loader divide"
            )

    def _count_left(self) -> None:
        left = self.feed.unused(self.runner.pool)
        self.source.stats.left_samples += len(left)
        if left:
            warn_user(
                f"uneven='stop' ended the epoch with {len(left)} samples left on rank {self.source.world.rank}: "
                f"{shorten(left)}; uneven='idle' uses them"
            )


def _print_of_sizes(sizes: UpdateSizes | None, epoch: int) -> int:
    if sizes is None or sizes.is_constant:
        return 0
    return fingerprint([stop for _, stop, _ in sizes.spans(sizes.start(epoch))])
