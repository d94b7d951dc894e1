"""Which samples come when: the order of an epoch, and the requests that follow from it where lengths are known, roughly known,
or fixed by updates. Pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index as as_index
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import Budget, padded_tokens
from dynagroup.errors import ConfigError
from dynagroup.online.datasets import set_epoch
from dynagroup.online.messages import Request
from dynagroup.online.protocol import Uneven, print_of
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.cost import DEFAULT_WORK, Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochOrder, OrderSource
from dynagroup.plan.padded import OBJECTIVES, Objective
from dynagroup.plan.planner import PlanConfig, Planner
from dynagroup.plan.ranks import cut_rows
from dynagroup.shapes import TOKENS, IntArray, Streams
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import BatchSizeSchedule, UpdateSizes, checked_samples
from dynagroup.validation import check_choice, check_flag, check_int

__all__ = [
    "EpochOrders",
    "OnlineConfig",
    "Order",
    "Rank",
    "batch_plans",
    "behind",
    "exact_plans",
    "handed_out",
    "rough_plans",
    "update_plans",
]

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
    objective: Objective = "time"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"work": check_work(self.work)}
        for name, least in (("window", 1), ("accumulation", 1), ("seed", 0)):
            checked[name] = check_int(name, getattr(self, name), least=least)
        for name in ("shuffle", "drop_last"):
            checked[name] = check_flag(name, getattr(self, name))
        if self.window_bytes is not None:
            checked["window_bytes"] = check_int("window_bytes", self.window_bytes)
        if self.samples_per_update is not None and not callable(self.samples_per_update):
            checked["samples_per_update"] = checked_samples(self.samples_per_update)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_choice("uneven", self.uneven, ("idle", "stop"))
        check_choice("objective", self.objective, OBJECTIVES)
        self._check_together()

    def _check_together(self) -> None:
        if self.samples_per_update is None:
            if self.drop_last:
                raise ConfigError("`drop_last` needs `samples_per_update`: without it no update is smaller than asked")
        elif self.accumulation != 1:
            raise ConfigError(
                f"`accumulation` ({self.accumulation}) and `samples_per_update` exclude each other: an update takes "
                "as many steps as its samples need"
            )
        elif self.uneven == "stop":
            raise ConfigError(
                "`uneven='stop'` and `samples_per_update` exclude each other: an update is whole on all ranks; to leave out "
                "the epoch's last one where it is smaller, pass `drop_last=True`"
            )


class Order(NamedTuple):
    """The epoch's order: dataset indices by position. ``base``: the positions that a resumed epoch still has; None: all."""

    indices: IntArray | EpochOrder
    base: IntArray | None = None

    @property
    def count(self) -> int:
        """Positions."""
        return len(self.indices if self.base is None else self.base)

    @property
    def skipped(self) -> int:
        """Samples at the beginning of the epoch's order that were used before it went on on another number of ranks."""
        return len(self.indices) - self.count

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
        return len(self._sampler) if self._config.samples_per_update is None else self._sampler.counted

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
        source, (drawn, _) = self._batch_sampler, self._drawn
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


class Rank(NamedTuple):
    """Whose requests, and how they are cut."""

    rank: int
    size: int
    epoch: int
    budget: Budget
    config: OnlineConfig

    @property
    def keep(self) -> int:
        """Samples are kept for splitting only where another rank may need more steps."""
        return int(self.size > 1)


def rank_batches(lengths: Streams, who: Rank, *, shuffled: bool, window: int) -> tuple[list[IntArray], list[int]]:
    """This rank's batches of one window, a row each, as positions in the window, and their padded tokens; no sample is repeated
    to fill a row, and nobody always has the dearest batch."""
    config, size = who.config, who.size
    batches = cut_rows(lengths, who.budget, size, work=config.work, objective=config.objective)
    num_rows = -(-len(batches) // size)
    rng = np.random.default_rng((config.seed, who.epoch, window))
    columns = [int(rng.permutation(size)[who.rank]) if size > 1 else 0 for _ in range(num_rows)]
    rows = list(range(num_rows))
    if shuffled:
        place = rng.permutation(num_rows)
        rows.sort(key=lambda row: place[row] if (row + 1) * size <= len(batches) else num_rows)
    numbers = [row * size + columns[row] for row in rows]
    mine = batches.take(np.array([number for number in numbers if number < len(batches)], np.int64))
    return list(mine), padded_tokens(shapes_of(mine, lengths), who.budget).tolist()


def exact_plans(lengths: Streams, who: Rank, start: Sequence[int] = (0, 0)) -> Iterator[Request]:
    """Batches planned like the offline sampler's from known lengths, in rows of equal cost over the ranks.

    Args:
        lengths: by position in the epoch's order.
        start: the mark of the first request wanted: (window, request of the window).
    """
    count = len(lengths[TOKENS])
    window = exact_window(lengths, who) if count else 1
    for number in range(start[0], -(-count // window)):
        first = number * window
        part = {name: values[first : first + window] for name, values in lengths.items()}
        mine, costs = rank_batches(part, who, shuffled=who.config.shuffle, window=number)
        skipped = start[1] if number == start[0] else 0
        for chunk in range(skipped, -(-len(mine) // ROWS_A_REQUEST)):
            rows = slice(chunk * ROWS_A_REQUEST, (chunk + 1) * ROWS_A_REQUEST)
            sizes = tuple(map(len, mine[rows]))
            yield Request(
                first + np.concatenate(mine[rows]), sizes, tuple(costs[rows]), keep=who.keep, mark=(number, chunk)
            )


def exact_window(lengths: Streams, who: Rank) -> int:
    """Samples planned together: all ranks' windows up to a quarter of an epoch, so that batches differ from epoch to epoch; at
    least what the offline sampler would choose."""
    offline = Planner(lengths, who.budget, PlanConfig(shuffle=who.config.shuffle)).window_size(who.size)
    return max(offline, min(who.config.window * who.size, len(lengths[TOKENS]) // 4))


def rough_plans(hint: IntArray, who: Rank, start: Sequence[int] = (0, 0)) -> Iterator[Request]:
    """Windows of similar samples where lengths are known roughly: workers cut them by true lengths.

    The samples of all ranks' windows are sorted by the hint and dealt out like cards, so that all ranks hold the like;
    each rank's share is cut into chunks of neighbours, which come in the same shuffled order on all ranks.
    """
    span = who.config.window * who.size
    for number in range(start[0], -(-len(hint) // span)):
        first = number * span
        mine = first + deal(hint[first : first + span], who.rank, who.size)
        count = max(1, min(CHUNKS_A_WINDOW, len(mine) // 32))
        order = np.random.default_rng((who.config.seed, who.epoch, number)).permutation(CHUNKS_A_WINDOW)
        chunks = np.array_split(mine, count)
        for place in range(start[1] if number == start[0] else 0, count):
            yield Request(np.sort(chunks[order[order < count][place]]), keep=who.keep, mark=(number, place))


def deal(hint: IntArray, rank: int, size: int) -> IntArray:
    """Snake draft: this rank's places among these samples, longest first, so that the ranks' sums are alike.

    >>> [deal(np.array([5, 1, 9, 3]), rank, 2).tolist() for rank in range(2)]
    [[2, 1], [0, 3]]
    """
    order = np.argsort(-np.asarray(hint, np.int64), kind="stable")
    rounds, column = np.divmod(np.arange(len(order)), size)
    return order[np.where(rounds % 2, size - 1 - column, column) == rank]


def batch_plans(batches: Sequence[Sequence[int]], start: Sequence[int] = (0,)) -> Iterator[Request]:
    """The user's batches, each refined by itself; positions number this rank's samples as they come."""
    ends = np.cumsum([0, *map(len, batches)]).tolist()
    for number in range(start[0], len(batches)):
        yield Request(np.arange(ends[number], ends[number + 1]), (len(batches[number]),), mark=(number,))


def update_plans(
    sizes: UpdateSizes, who: Rank, start: Cursor, *, skipped: int, lengths: Streams | None, hint: IntArray | None
) -> Iterator[Request]:
    """One request an update: this rank's share of the samples that fixed batches would draw for it.

    Args:
        start: where the first update wanted begins.
        skipped: samples at the beginning of the epoch's order that have no position any more; of the update that was under
            way then, the rest.
        lengths: known lengths by position: shares are planned batches, in rows over the ranks.
        hint: roughly known lengths by position: shares are balanced by them. Without either, by number of samples.
    """
    mark = start
    for begin, stop, after in sizes.spans(start):
        first, end = max(begin - skipped, 0), stop - skipped
        if lengths is not None:
            part = {name: values[first:end] for name, values in lengths.items()}
            mine, costs = rank_batches(part, who, shuffled=False, window=mark.update)
            flat = np.concatenate([np.zeros(0, np.int64), *mine])
            yield Request(first + flat, tuple(map(len, mine)), tuple(costs), keep=who.keep, mark=mark)
        elif hint is not None:
            yield Request(first + np.sort(deal(hint[first:end], who.rank, who.size)), keep=who.keep, mark=mark)
        else:
            shares = np.array_split(np.arange(first, end), who.size)
            yield Request(shares[(who.rank + mark.update) % who.size], keep=who.keep, mark=mark)
        mark = after


def behind(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where a run stands behind its next update, which holds so many samples; ``steps`` are not counted."""
    if sizes is not None:
        return next(sizes.cursors(cursor))
    used, seen = cursor.samples_used + samples, cursor.samples_seen + samples
    return Cursor(cursor.epoch, update=cursor.update + 1, samples_used=used, samples_seen=seen, current=samples)


def handed_out(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where the updates end that were handed out; the one under way, of so many samples, counts."""
    return behind(cursor, samples, sizes) if cursor.begun_rows else cursor
