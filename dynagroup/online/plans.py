"""Which samples come when: the order of an epoch, and a table of kinds of epochs, with the requests that each makes of it. Pure
functions of their arguments.

============  =====================================  ========================================
kind          when                                   its place in the epoch
============  =====================================  ========================================
``windows``   nothing is known of the samples        what was handed out, what is still to be
``exact``     lengths were seen in an earlier epoch  the next request of the plan
``rough``     lengths are hinted at, or change       the next request of the plan
``updates``   ``samples_per_update`` is set          the run's cursor
``batches``   the user gives batches                 the number of the next batch
``iterable``  the dataset is iterable                where each worker stands
============  =====================================  ========================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index as as_index
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import Budget, padded_streams, padded_tokens
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.online.datasets import set_epoch
from dynagroup.online.messages import Request
from dynagroup.online.protocol import Uneven, print_of
from dynagroup.online.state import LearnedLengths
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.cost import DEFAULT_WORK, Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochOrder, OrderSource
from dynagroup.plan.planner import PlanConfig, Planner
from dynagroup.plan.ranks import cut_rows
from dynagroup.shapes import IntArray, Streams
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import BatchSizeSchedule, UpdateSizes
from dynagroup.validation import check_choice, check_flag, check_int

__all__ = ["KINDS", "EpochOrders", "OnlineConfig", "Order", "Source", "behind", "handed_out"]

ROWS_A_REQUEST = 16
CHUNKS_A_WINDOW = 8
WINDOW_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    """How a loader forms steps: arguments of :class:`~dynagroup.OnlineDataLoader`. Knows no data and no ranks."""

    window: int = 1024
    samples_per_update: int | BatchSizeSchedule | None = None
    drop_last: bool = False
    accumulation: int = 1
    seed: int = 0
    shuffle: bool = False
    weigh: Weigh = "tokens"
    uneven: Uneven = "idle"
    window_bytes: int | None = WINDOW_BYTES
    work: Work = DEFAULT_WORK

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"work": check_work(self.work)}
        for name, least in (("window", 1), ("accumulation", 1), ("seed", 0)):
            checked[name] = check_int(name, getattr(self, name), least=least)
        for name in ("shuffle", "drop_last"):
            checked[name] = check_flag(name, getattr(self, name))
        if self.window_bytes is not None:
            checked["window_bytes"] = check_int("window_bytes", self.window_bytes)
        if self.samples_per_update is not None and not callable(self.samples_per_update):
            checked["samples_per_update"] = check_int("samples_per_update", self.samples_per_update)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_choice("uneven", self.uneven, ("idle", "stop"))
        if self.samples_per_update is None and self.drop_last:
            raise ConfigError("`drop_last` needs `samples_per_update`: without it no update is smaller than asked")
        if self.samples_per_update is not None and self.accumulation != 1:
            raise ConfigError(
                f"`accumulation` ({self.accumulation}) and `samples_per_update` exclude each other: an update takes "
                "as many steps as its samples need"
            )
        if self.samples_per_update is not None and self.uneven == "stop":
            raise ConfigError(
                "`uneven='stop'` and `samples_per_update` exclude each other: an update is whole on all ranks; to leave out "
                "the epoch's last one where it is smaller, pass `drop_last=True`"
            )


class Order(NamedTuple):
    """The epoch's order: dataset indices by position. ``base``: the positions that a resumed epoch still has; None: all."""

    indices: IntArray | EpochOrder
    base: IntArray | None = None

    @property
    def num_positions(self) -> int:
        """Positions."""
        return len(self.indices if self.base is None else self.base)

    @property
    def skipped(self) -> int:
        """Samples at the beginning of the epoch's order that were used before it went on on another number of ranks."""
        return len(self.indices) - self.num_positions

    def at(self, positions: IntArray) -> list[int]:
        """Dataset indices at these positions."""
        positions = positions if self.base is None else self.base[positions]
        if isinstance(self.indices, EpochOrder):
            return self.indices.index_at(positions).tolist()
        return self.indices[positions].tolist()

    def restricted(self, positions: IntArray) -> Order:
        """The same order with these positions only."""
        return Order(self.indices, positions if self.base is None else self.base[positions])


class EpochOrders:
    """The order of samples in each epoch, whoever decides it: the user's sampler or batches, a seeded shuffle, or the dataset.

    Args:
        size: samples of the dataset; None for an iterable one.
        sampler: of all ranks' indices. batch_sampler: of this rank's batches.
    """

    def __init__(
        self,
        size: int | None,
        config: OnlineConfig,
        *,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
    ) -> None:
        self._config, self.size = config, size
        self._sampler = None if sampler is None or size is None else OrderSource(sampler, size)
        self._batch_sampler = batch_sampler
        self._drawn: tuple[int, list[list[int]]] = (-1, [])
        own = {"sampler": self._sampler is not None, "batch_sampler": batch_sampler is not None}
        self.decided_by = next((name for name in own if own[name]), "shuffle" if config.shuffle else "dataset")
        """In a word, for comparing runs."""

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks, where one order decides it."""
        return None if self.size is None or self._batch_sampler is not None else self.num_ordered()

    def num_ordered(self) -> int:
        """Positions of the order."""
        if self._sampler is None:
            return self.size or 0
        return len(self._sampler) if self._config.samples_per_update is None else self._sampler.counted()

    def of_epoch(self, epoch: int) -> Order:
        """Dataset indices by position; of this rank's batches where the user gives them; none of an iterable."""
        batches = self.batches(epoch)
        if self.size is None or batches is not None:
            return Order(np.asarray(list(chain.from_iterable(batches or ())), np.int64))
        if self._sampler is not None:
            counts = self._config.samples_per_update is not None
            return Order(self._sampler.counted_epoch(epoch) if counts else self._sampler.of_epoch(epoch))
        return Order(
            EpochOrder(self.size, seed=self._config.seed, epoch=epoch) if self._config.shuffle else np.arange(self.size)
        )

    def batches(self, epoch: int) -> list[list[int]] | None:
        """This rank's batches, where the user gives them. A sampler that cannot be told the epoch is drawn for each before."""
        source, drawn = self._batch_sampler, self._drawn[0]
        if source is None:
            return None
        if epoch != drawn:
            told = callable(getattr(source, "set_epoch", None))
            set_epoch(source, epoch)
            for _ in range(1 if told else max(1, epoch - drawn)):
                self._drawn = epoch, [_indices(batch) for batch in source]
        return self._drawn[1]

    def fingerprint(self, epoch: int) -> int | None:
        """63 bits of an order that the user decides; None where seed and settings do."""
        if self._batch_sampler is not None:
            return print_of(self.batches(epoch))
        return None if self._sampler is None else print_of(self._sampler.of_epoch(epoch).tolist())


def _indices(batch: Any) -> list[int]:
    try:
        if not isinstance(batch, (str, bytes)):
            return [as_index(index) for index in batch]
        error = None
    except TypeError as refused:  # a fraction is not cut off
        error = refused
    raise ConfigError(f"`batch_sampler` must give lists of dataset indices, but gives {batch!r:.200}") from error


class Source(NamedTuple):
    """What an epoch's requests follow from: facts, and the settings they were given."""

    world: World
    config: OnlineConfig
    budget: Budget
    iterable: bool
    cursor: Cursor  # where the updates that come begin
    order: Order  # empty of an iterable dataset
    sizes: UpdateSizes | None = None  # how many samples each update holds, where it is set
    batches: list[list[int]] | None = None  # this rank's, where the user gives them
    lengths: Streams | None = None  # known ones, by position; at most one of these two
    rough: IntArray | None = None  # roughly known ones, by position

    @property
    def kind(self) -> str:
        """Which kind of epoch it makes, see the table."""
        if self.iterable:
            return "iterable"
        if self.batches is not None:
            return "batches"
        if self.sizes is not None:
            return "updates"
        if self.lengths is not None:
            return "exact"
        return "windows" if self.rough is None else "rough"

    def requests(self, start: Any) -> Iterable[Request]:
        """This rank's requests from a mark on; None: from the epoch's beginning."""
        return KINDS[self.kind].plans(self, self.world.rank, self.world.size, start)

    def with_lengths(self, learned: LearnedLengths | None, hint: IntArray | None) -> Source:
        """The same with what is known of the lengths of its order: exact ones for plans, or rough ones for like windows."""
        source, count = self._replace(lengths=None, rough=None), self.order.num_positions
        if not count or (hint is None and (learned is None or not learned.seen)):
            return source
        at, used = np.asarray(self.order.at(np.arange(count)), np.int64), count
        if self.sizes is not None:
            used = self.sizes.end(self.cursor.epoch).samples_used - self.order.skipped
        known = None if learned is None else learned.known(at[:used])
        if known is None or learned is None:
            return source if hint is None else source._replace(rough=hint[at])
        unused = np.zeros(count - used, np.int32)  # what an epoch drops is never measured, and never asked for
        whole = {name: np.append(values, unused) for name, values in known.items()}
        if learned.steady:
            return source._replace(lengths=whole)
        padded = [whole[name] for name in padded_streams(self.budget, whole)]
        return source._replace(rough=np.sum(padded, axis=0, dtype=np.int64))


def rank_batches(
    source: Source, lengths: Streams, rank: int, size: int, *, shuffled: bool, window: int
) -> tuple[list[IntArray], list[int]]:
    """A rank's batches of one window, a row each, as positions in the window, and their padded tokens; no sample is repeated
    to fill a row, and nobody always has the dearest batch."""
    config = source.config
    batches = cut_rows(lengths, source.budget, size, work=config.work)
    num_rows = -(-len(batches) // size)
    rng = np.random.default_rng((config.seed, source.cursor.epoch, window))
    columns = [int(rng.permutation(size)[rank]) if size > 1 else 0 for _ in range(num_rows)]
    rows = list(range(num_rows))
    if shuffled:
        place = rng.permutation(num_rows)
        rows.sort(key=lambda row: place[row] if (row + 1) * size <= len(batches) else num_rows)
    numbers = [row * size + columns[row] for row in rows]
    mine = batches.take(np.array([number for number in numbers if number < len(batches)], np.int64))
    return list(mine), padded_tokens(shapes_of(mine, lengths), source.budget).tolist()


def exact_plans(source: Source, rank: int, size: int, start: Sequence[int] | None) -> Iterator[Request]:
    """Batches planned like the offline sampler's from known lengths, in rows of equal cost over the ranks. All ranks' windows
    up to a quarter of an epoch are planned together, so that batches differ from epoch to epoch; at least what the offline
    sampler would choose. A mark is (window, request of the window)."""
    lengths, config, count = source.lengths or {}, source.config, source.order.num_positions
    if not count:
        return
    offline = Planner(lengths, source.budget, PlanConfig(shuffle=config.shuffle)).window_size(size)
    window = max(offline, min(config.window * size, count // 4))
    begin, done = start or (0, 0)
    for number in range(begin, -(-count // window)):
        first = number * window
        part = {name: values[first : first + window] for name, values in lengths.items()}
        mine, costs = rank_batches(source, part, rank, size, shuffled=config.shuffle, window=number)
        for chunk in range(done if number == begin else 0, -(-len(mine) // ROWS_A_REQUEST)):
            rows = slice(chunk * ROWS_A_REQUEST, (chunk + 1) * ROWS_A_REQUEST)
            sizes, flat = tuple(map(len, mine[rows])), first + np.concatenate(mine[rows])
            yield Request(flat, sizes, tuple(costs[rows]), keep=size > 1, mark=(number, chunk))


def rough_plans(source: Source, rank: int, size: int, start: Sequence[int] | None) -> Iterator[Request]:
    """Windows of similar samples where lengths are known roughly: workers cut them by true lengths.

    The samples of all ranks' windows are sorted by the hint and dealt out like cards, so that all ranks hold the like;
    each rank's share is cut into chunks of neighbours, which come in the same shuffled order on all ranks.
    """
    span, hint = source.config.window * size, np.asarray(source.rough)
    begin, done = start or (0, 0)
    for number in range(begin, -(-len(hint) // span)):
        first = number * span
        mine = first + deal(hint[first : first + span], rank, size)
        count = max(1, min(CHUNKS_A_WINDOW, len(mine) // 32))
        rng = np.random.default_rng((source.config.seed, source.cursor.epoch, number))
        order, chunks = rng.permutation(CHUNKS_A_WINDOW), np.array_split(mine, count)
        for place in range(done if number == begin else 0, count):
            yield Request(np.sort(chunks[order[order < count][place]]), keep=size > 1, mark=(number, place))


def deal(hint: IntArray, rank: int, size: int) -> IntArray:
    """Snake draft: this rank's places among these samples, longest first, so that the ranks' sums are alike.

    >>> [deal(np.array([5, 1, 9, 3]), rank, 2).tolist() for rank in range(2)]
    [[2, 1], [0, 3]]
    """
    order = np.argsort(-np.asarray(hint, np.int64), kind="stable")
    rounds, column = np.divmod(np.arange(len(order)), size)
    return order[np.where(rounds % 2, size - 1 - column, column) == rank]


def batch_plans(source: Source, rank: int, size: int, start: Sequence[int] | None) -> Iterator[Request]:
    """The user's batches, each refined by itself; positions number this rank's samples as they come."""
    batches = source.batches or []
    ends = np.cumsum([0, *map(len, batches)]).tolist()
    for number in range(start[0] if start else 0, len(batches)):
        yield Request(np.arange(ends[number], ends[number + 1]), (len(batches[number]),), mark=(number,))


def update_plans(source: Source, rank: int, size: int, start: Cursor | None) -> Iterator[Request]:
    """One request an update: this rank's share of the samples that fixed batches would draw for it. By known lengths shares are
    planned batches, in rows over the ranks; by roughly known ones they are balanced, without either of equal size.

    Of an epoch that goes on on other ranks, the first samples have no position any more; of the update that was under way then,
    only the rest.
    """
    mark, skipped = start or source.cursor, source.order.skipped
    for begin, stop, after in source.sizes.spans(mark) if source.sizes is not None else ():
        first, end = max(begin - skipped, 0), stop - skipped
        if source.lengths is not None:
            part = {name: values[first:end] for name, values in source.lengths.items()}
            mine, costs = rank_batches(source, part, rank, size, shuffled=False, window=mark.update)
            flat = first + np.concatenate([np.zeros(0, np.int64), *mine])
            yield Request(flat, tuple(map(len, mine)), tuple(costs), keep=size > 1, mark=mark)
        elif source.rough is not None:
            yield Request(first + np.sort(deal(source.rough[first:end], rank, size)), keep=size > 1, mark=mark)
        else:
            share = np.array_split(np.arange(first, end), size)[(rank + mark.update) % size]
            yield Request(share, keep=size > 1, mark=mark)
        mark = after


class Kind(NamedTuple):
    """Where the requests of an epoch come from, and what may be done with their batches."""

    plans: Callable[[Source, int, int, Any], Iterable[Request]] = lambda source, rank, size, start: ()
    ordered: bool = False
    """Batches keep the order in which they come (they were planned in rows), instead of being shuffled."""
    bounded: bool = True
    """What a rank still receives is known beforehand."""
    divided: str = ""
    """What divides the samples among ranks, if the user's does."""


KINDS: Mapping[str, Kind] = {
    "windows": Kind(),
    "exact": Kind(exact_plans, ordered=True),
    "rough": Kind(rough_plans),
    "updates": Kind(update_plans),
    "batches": Kind(batch_plans, ordered=True, bounded=False, divided="a batch_sampler"),
    "iterable": Kind(bounded=False, divided="an iterable dataset"),
}


def behind(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where a run stands behind its next update, which holds so many samples; ``steps`` are not counted."""
    if sizes is not None:
        return next(sizes.cursors(cursor))
    used, seen = cursor.samples_used + samples, cursor.samples_seen + samples
    return Cursor(cursor.epoch, update=cursor.update + 1, samples_used=used, samples_seen=seen, current=samples)


def handed_out(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where the updates end that were handed out; the one under way, of so many samples, counts."""
    return behind(cursor, samples, sizes) if cursor.begun_rows else cursor
