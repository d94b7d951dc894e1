"""How an online loader runs: epochs begun, places saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.engine import FreeRunner, Runner, UpdateRunner
from dynagroup.online.feeds import FREE_RUNNING, Workers
from dynagroup.online.plans import KINDS, EpochOrders, OnlineConfig, Order, Source, handed_out
from dynagroup.online.protocol import Exchange, print_of
from dynagroup.online.state import LearnedLengths, together, unpack
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import IntArray
from dynagroup.update.loader import StepLoader
from dynagroup.update.schedule import UpdateSizes, Walk
from dynagroup.update.step import Step

__all__ = ["OnlineSteps"]

COMPARED = ("window", "window_bytes", "drop_last", "accumulation", "seed", "shuffle", "uneven")


class OnlineSteps(StepLoader[Any]):
    """How an online loader runs: epochs begun, places saved and loaded. Its door, with all arguments, is in ``loader``.

    Args:
        hint: of each sample's length; int64 (N,).
        learns: lengths that were seen plan later epochs.
    """

    KIND = "OnlineDataLoader"

    def __init__(
        self,
        dataset: Any,
        config: OnlineConfig,
        collator: RefinementCollator,
        orders: EpochOrders,
        *,
        hint: IntArray | None,
        kwargs: Mapping[str, Any],
        learns: bool,
        world: World | None,
    ) -> None:
        super().__init__(dataset, world=world)
        self.config, self._orders, self._hint = config, orders, hint
        self._workers = Workers(dataset, collator, config, kwargs)
        self.sizes: UpdateSizes | None = None
        """How many samples each update holds; None without ``samples_per_update``."""
        if config.samples_per_update is not None:
            self.sizes = UpdateSizes(config.samples_per_update, orders.num_ordered, drop_last=config.drop_last)
        self._learned = LearnedLengths(len(dataset)) if learns else None
        self._settings = _described(config, orders, self._workers, hint)
        self._run_of: Runner | None = None  # the epoch that was begun last, until another one is chosen
        self._resume: list[Mapping[str, Any]] = []
        """States of a place that was loaded, until it is gone on from."""
        self._cursor = Cursor()
        """Where the last run of an epoch ended, or the loaded place."""
        self._merge_due = False
        learner = collator.budget.learner
        if learner is not None and self._workers.persistent:
            learner.share_memory()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no iteration: it begins where this loader's next one would, or where it stands in an epoch."""
        own: dict[str, Any] = {"_live": None, "_run_of": None}
        if not self._resume:
            own["_cursor"] = self._reached
            if self._run_of is not None:
                place = self._state()
                own["_merge_due"] = place["merge_due"]
                if place["running"] is not None:
                    epoch = self.epoch
                    own |= {"_resume": [place], "_cursor": Cursor.of(place["cursor"]), "_epoch": epoch, "_next": epoch}
        return {**vars(self), **own}

    @property
    def budget(self) -> Budget:
        """What a batch may be."""
        return self._workers.collator.budget

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks; None of an iterable dataset, and where each rank brings its own batches."""
        return self._orders.num_samples

    @property
    def num_changes(self) -> int:
        """How often the size of updates was changed at run time."""
        return 0 if self.sizes is None else len(self.sizes.changes)

    @property
    def cursor(self) -> Cursor:
        """Where the updates that were handed out end, the one under way included."""
        stands = self._resume or (self._run_of is not None and not self._begun_anew)
        return self._reached if stands else self._start()

    @property
    def _reached(self) -> Cursor:
        """The same of the place that was loaded, or else of the epoch that was begun last."""
        if self._resume:
            return handed_out(self._cursor, self._resume[0]["running"]["under_way"], self.sizes)
        return self._cursor if self._run_of is None else self._run_of.cursor

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from now on; call it on every rank after the same step. It is part of the state.

        Updates that workers may already prefetch keep their size: with ``num_workers=0`` the next update is the first one
        of the new size; otherwise ``num_workers * prefetch_factor`` updates come in between, also across an epoch's end.

        Returns:
            The number (from 0) of the first update that holds ``samples`` samples.

        Raises:
            ConfigError: the loader was not made with ``samples_per_update``, or is allowed to mix windows
                (``in_order=False``) while ranks must agree on what was prefetched.
        """
        if self.sizes is None:
            raise ConfigError(FREE_RUNNING)
        if not self._workers.in_order and self._rank_and_size()[1] > 1:
            raise ConfigError("set_samples_per_update needs in_order=True: ranks would differ in what they prefetched")
        if self._run_of is not None and not self._begun_anew and not self._resume:
            return self._run_of.feed.set_samples_per_update(samples)
        return self.sizes.change(self.cursor, samples)

    def _identity(self) -> dict[str, Any]:
        return {**self._settings, "budget": self.budget.fingerprint}

    def _state(self) -> dict[str, Any]:
        """This rank's: a few KB, besides lengths seen (a few bytes a sample)."""
        rank, size = self._rank_and_size()
        if self._resume:
            if len(self._resume) > 1 or self._resume[0]["world_size"] != size:
                raise StateError(
                    "the state was just loaded on another number of ranks: take a step before saving it again"
                )
            return {name: self._resume[0][name] for name in FIELDS}
        begun = None if self._begun_anew else self._run_of
        running = None if begun is None else begun.state()
        if running is not None:
            running["order"] = self._orders.fingerprint(self._epoch)
        ended = begun is not None and running is None
        cursor = self._start() if begun is None else begun.stands
        return dict(
            world_size=size,
            rank=rank,
            epoch=self.epoch if begun is None else self._epoch + ended,
            running=running,
            changes=[] if self.sizes is None else [list(change) for change in self.sizes.changes],
            cursor=cursor.state(),
            lengths=None if self._learned is None else self._learned.state(),
            merge_due=ended or (self._merge_due and begun is None),
        )

    def _checked(self, states: list[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], LearnedLengths | None]:
        needed = together(states, *self._rank_and_size())
        running, epoch, learned = needed[0]["running"], needed[0]["epoch"], self._learned
        if running is not None and running["order"] != self._orders.fingerprint(epoch):
            raise StateError(
                f"`{self._orders.decided_by}` gives other indices in epoch {epoch} than when the state was taken: "
                "seed its generator alike, or give it a set_epoch"
            )
        return needed, None if learned is None else learned.restored([state["lengths"] for state in needed])

    def _restore(self, found: tuple[list[Mapping[str, Any]], LearnedLengths | None]) -> None:
        needed, self._learned = found
        own = needed[0]
        if self.sizes is not None:
            self.sizes.restore(own["changes"])
        self._epoch = self._next = own["epoch"]
        self._cursor, self._merge_due = Cursor.of(own["cursor"]), own["merge_due"]
        self._run_of = None
        self._resume = [] if own["running"] is None else needed
        self._workers.restart()

    def _start(self) -> Cursor:
        """The beginning of the epoch that comes."""
        if self.sizes is not None:
            return self.sizes.start(self.epoch)
        done = self._reached
        return Cursor(self.epoch, update=done.update, samples_seen=done.samples_seen, current=done.current)

    @property
    def _begun_anew(self) -> bool:
        """Another epoch was chosen than the one that was begun last."""
        return self._live is None and self._next != self._epoch + 1

    def _forget(self) -> None:
        self._cursor = self._reached
        self._run_of, self._resume = None, []

    def _walk(self) -> Walk:
        if self.sizes is None:
            raise ConfigError("the number of updates is known beforehand only with `samples_per_update`")
        return self.sizes

    def _run(self) -> Iterator[Step[Any]]:
        run = self._run_of = self._begin()
        try:
            yield from run
        finally:
            run.close()

    def _begin(self) -> Runner:
        """The epoch that is due; learned lengths and limits are told to all ranks before it."""
        world, epoch = self.world, self._epoch
        cursor = self._cursor if self._resume else self._start()
        states, self._resume = self._resume, []
        if self._merge_due and self._learned is not None:
            Exchange(world, epoch).highest([])  # ranks that are elsewhere are told so, before vectors differ
            self._learned.merge(world)
        self._merge_due = True
        learner = None if states else self.budget.learner
        if learner is not None:
            Exchange(world, epoch).highest([])
            learner.apply(world)
        self._workers.seed(self.config.seed, epoch, world.rank, cursor.steps)
        drawn = {"order": self._orders.of_epoch(epoch), "batches": self._orders.batches(epoch), "sizes": self.sizes}
        source = Source(world, self.config, self.budget, self._workers.iterable, cursor, **drawn)
        source, place, joined = _resumed(source, states, self._learned, self._hint)
        make = FreeRunner if self.sizes is None else UpdateRunner
        identity = {**self._of_ranks(source, place), "place": joined.steps}
        under_way = states[0]["running"]["under_way"] if states else 0
        facts = {"under_way": under_way, "identity": identity, "stats": self.stats, "learned": self._learned}
        return make(source, self._workers, joined, place, **facts)

    def _of_ranks(self, source: Source, place: Mapping[str, Any] | None) -> dict[str, Any]:
        """What all ranks must have alike in an epoch."""
        epoch, workers, orders, sizes = source.cursor.epoch, self._workers, self._orders, self.sizes
        base = source.order.base
        varying = (
            None if sizes is None or sizes.is_constant else [stop for _, stop, _ in sizes.spans(sizes.start(epoch))]
        )
        identity = {
            **self._identity(),
            "order": [orders.decided_by, orders.fingerprint(epoch) if orders.num_samples is not None else None],
            "epoch": epoch,
            "rest": 0 if base is None else print_of(base.tolist()),
            "handed out": place and place["feed"].get("handed_out"),
            "sizes of updates": print_of(varying),
            "num_workers": f"{workers.num_workers} with prefetch_factor={workers.prefetch_factor}",
        }
        if callable(self.config.weigh):
            del identity["weigh"]  # may read what differs by rank, such as a device
        return identity


def _described(config: OnlineConfig, orders: EpochOrders, workers: Workers, hint: IntArray | None) -> dict[str, Any]:
    """What saved states are compared by, besides the budget, which may learn."""
    per_update = config.samples_per_update
    return {
        **{name: getattr(config, name) for name in COMPARED},
        "num_samples": orders.size,
        "work": described(config.work),
        "samples_per_update": described(per_update) if callable(per_update) else per_update,
        "order": orders.decided_by,
        "length_hint": None if hint is None else described(hint),
        "oversize": workers.collator.oversize,
        "weigh": described(config.weigh),
        "num_workers": workers.num_workers if workers.iterable else None,
    }


def _resumed(
    source: Source, states: list[Mapping[str, Any]], learned: LearnedLengths | None, hint: IntArray | None
) -> tuple[Source, Mapping[str, Any] | None, Cursor]:
    """Where an epoch goes on from states: what it draws on, this rank's saved place, and where it stands.

    On as many ranks as before it goes on with the very batches that were queued. On another number, what no rank has emitted
    becomes an order of its own, which is begun like an epoch, in the middle of the update that was under way.
    """
    cursor, sizes = source.cursor, source.sizes
    if not states:
        return source.with_lengths(learned, hint), None, cursor
    place, indices = states[0]["running"], source.order.indices
    order = source.order if place["base"] is None else Order(indices, unpack(place["base"], len(indices)))
    source = source._replace(order=order, cursor=handed_out(cursor, place["under_way"], sizes)).with_lengths(
        learned, hint
    )
    if place["kind"] != source.kind:
        raise StateError(f"the state was taken in an epoch of kind {place['kind']!r}, this one is {source.kind!r}")
    if states[0]["world_size"] == source.world.size:
        return source, place, cursor
    order = source.order.restricted(_left(source, [state["running"]["feed"] for state in states]))
    source = source._replace(order=order, cursor=cursor).with_lengths(learned, hint)
    return source, None, _joined(cursor, states, source.world.rank)


def _left(source: Source, places: Sequence[Mapping[str, Any]]) -> IntArray:
    """Positions that no rank has emitted, from the places of all of them.

    Raises:
        StateError: the user divides the samples among ranks, so that they resume on as many ranks only.
    """
    whose, count = KINDS[source.kind].divided, source.order.num_positions
    if whose:
        raise StateError(
            f"{whose} is divided among ranks by itself: it resumes on {len(places)} ranks, as before, not on {source.world.size}"
        )
    parts = [unpack(place[name][1], count) for place in places for name in ("front", "pool")]
    parts += [unpack(rest[0], count) for place in places for rest in place["rest"]]
    if source.kind == "windows":
        parts.append(np.arange(count)[slice(*places[0]["handed_out"])])
    elif source.kind == "updates":
        parts.append(np.arange(source.cursor.samples_used - source.order.skipped, count))
    else:
        for rank, place in enumerate(places):
            if place["next"] is not None:
                requests = KINDS[source.kind].plans(source, rank, len(places), place["next"])
                parts += [request.positions for request in requests]
    return np.sort(np.concatenate(parts))


def _joined(cursor: Cursor, states: list[Mapping[str, Any]], rank: int) -> Cursor:
    """Other ranks have begun the update under way: what it holds so far counts on the first rank."""
    begun = [Cursor.of(state["cursor"]) for state in states] if rank == 0 else []
    samples, weight = sum(c.begun_samples for c in begun), float(sum(c.begun_weight for c in begun))
    return replace(cursor, begun_samples=samples, begun_weight=weight)


FIELDS = ("world_size", "rank", "epoch", "running", "changes", "cursor", "lengths", "merge_due")
