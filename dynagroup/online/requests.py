"""Requests for an epoch whose lengths are known, roughly known, or fixed by its updates: pure functions of the arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import Budget, padded_tokens
from dynagroup.errors import ConfigError
from dynagroup.online.align import split_share
from dynagroup.online.config import OnlineConfig
from dynagroup.online.datasets import set_epoch
from dynagroup.online.exchange import fingerprint
from dynagroup.online.records import Planned
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.config import PlanConfig
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochOrder, OrderSource
from dynagroup.plan.padded import Objective
from dynagroup.plan.planner import Planner
from dynagroup.plan.ranks import cut_rows
from dynagroup.shapes import TOKENS, IntArray, Streams
from dynagroup.update.schedule import UpdateSizes

__all__ = ["EpochOrders", "Order", "Rank", "UpdateMark", "exact_plans", "exact_window", "rough_plans", "update_plans"]

ROWS_A_REQUEST = 16
CHUNKS_A_WINDOW = 8


class Order:
    """The epoch's order: dataset indices by position. ``base`` restricts it to what a resumed epoch still has."""

    def __init__(self, indices: IntArray | EpochOrder, base: IntArray | None = None) -> None:
        self.indices = indices
        self.base = base

    def __len__(self) -> int:
        return len(self.indices) if self.base is None else len(self.base)

    @property
    def skipped(self) -> int:
        """Samples at the beginning of the epoch's order that were used before it went on on another number of ranks."""
        return 0 if self.base is None else len(self.indices) - len(self.base)

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
        sampler: of all ranks' indices. batch_sampler: of this rank's batches.
    """

    def __init__(
        self,
        dataset: Any,
        config: OnlineConfig,
        *,
        stream: bool,
        sampler: Iterable[int] | None,
        batch_sampler: Iterable[Sequence[int]] | None,
    ) -> None:
        self._config = config
        self._size = None if stream else len(dataset)
        self._sampler = None if sampler is None else OrderSource(sampler, len(dataset))
        self._batch_sampler = batch_sampler
        self._drawn: tuple[int, list[list[int]]] = (-1, [])

    @property
    def decided_by(self) -> str:
        """In a word, for comparing runs."""
        if self._sampler is not None or self._batch_sampler is not None:
            return "sampler" if self._sampler is not None else "batch_sampler"
        return "dataset" if not self._config.shuffle else "shuffle"

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks, where one order decides it."""
        return None if self._size is None or self._batch_sampler is not None else self.num_ordered()

    def num_ordered(self) -> int:
        """Positions of the order."""
        if self._sampler is None:
            return self._size or 0
        return len(self._sampler) if self._config.samples_per_update is None else self._sampler.counted

    def num_in(self, epoch: int) -> int | None:
        """Positions of an epoch's order, where one order decides it. Only where updates are counted must epochs be alike."""
        if self._sampler is None or self._config.samples_per_update is not None:
            return self.num_samples
        return len(self._sampler.of_epoch(epoch))

    def of_epoch(self, epoch: int) -> Order:
        """Dataset indices by position; none where the dataset or the user brings batches."""
        if self._size is None or self._batch_sampler is not None:
            return Order(np.zeros(0, np.int64))
        if self._sampler is not None:
            counts = self._config.samples_per_update is not None
            return Order(self._sampler.counted_epoch(epoch) if counts else self._sampler.of_epoch(epoch))
        if self._config.shuffle:
            return Order(EpochOrder(self._size, seed=self._config.seed, epoch=epoch))
        return Order(np.arange(self._size))

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
            return fingerprint(self.batches(epoch))
        return None if self._sampler is None else fingerprint(self._sampler.of_epoch(epoch).tolist())


def _indices(batch: Any) -> list[int]:
    try:
        if not isinstance(batch, (str, bytes)):
            return [as_index(index) for index in batch]
        error = None
    except TypeError as refused:  # a fraction is not cut off
        error = refused
    raise ConfigError(f"`batch_sampler` must give lists of dataset indices, but gives {batch!r:.200}") from error


class UpdateMark(NamedTuple):
    """Where an update begins: a few integers of an epoch's state."""

    epoch: int
    update: int
    """Updates done since training began."""
    samples_used: int
    """Where it begins in the epoch's order."""
    current: int = 0
    """Samples the update before was asked to hold; 0 before the first."""
    until: int = 0
    """Where it ends, if it is the rest of an update that was begun on another number of ranks; else 0."""

    @classmethod
    def of(cls, cursor: Cursor) -> UpdateMark:
        return cls(cursor.epoch, cursor.update, cursor.samples_used, cursor.current or 0)

    @property
    def passed(self) -> UpdateMark:
        """Behind that rest."""
        return self._replace(update=self.update + 1, samples_used=self.until, until=0) if self.until else self

    def cursor(self, sizes: UpdateSizes) -> Cursor:
        begin = sizes.start(self.epoch)
        seen = begin.samples_seen + self.samples_used
        used, current = self.samples_used, self.current or None
        return Cursor(self.epoch, update=self.update, samples_used=used, samples_seen=seen, current=current)


@dataclass(frozen=True, slots=True)
class Rank:
    """Whose requests: facts, not knobs."""

    rank: int
    size: int
    seed: int
    epoch: int


def rank_batches(
    lengths: Streams,
    budget: Budget,
    who: Rank,
    *,
    work: Work,
    objective: Objective = "time",
    rows_shuffled: bool,
    window: int = 0,
) -> list[IntArray]:
    """This rank's batches of one window, a row each, as positions in the window; no sample is repeated to fill a row."""
    batches = cut_rows(lengths, budget, who.size, work=work, objective=objective)
    num_rows = -(-len(batches) // who.size)
    rng = np.random.default_rng((who.seed, who.epoch, window))
    mine = []
    for row in range(num_rows):
        column = int(rng.permutation(who.size)[who.rank]) if who.size > 1 else 0  # no rank always has the dearest batch
        number = row * who.size + column
        if number < len(batches):
            mine.append((row, batches[number]))
    if rows_shuffled:
        place = rng.permutation(num_rows)
        mine.sort(key=lambda item: place[item[0]] if (item[0] + 1) * who.size <= len(batches) else num_rows)
    return [members for _, members in mine]


def exact_plans(
    lengths: Streams,
    budget: Budget,
    who: Rank,
    *,
    window: int,
    shuffle: bool,
    work: Work = DEFAULT_WORK,
    objective: Objective = "time",
    start: tuple[int, ...] = (0, 0),
) -> Iterator[Planned]:
    """Batches planned like the offline sampler's from known lengths, in rows of equal cost over the ranks.

    Args:
        lengths: by position in the epoch's order.
        window: samples sorted together, over all ranks.
        start: the mark of the first request wanted.
    """
    num_samples = len(lengths[TOKENS])
    for number in range(start[0], -(-num_samples // window)):
        first = number * window
        part = {name: values[first : first + window] for name, values in lengths.items()}
        mine = rank_batches(part, budget, who, work=work, objective=objective, rows_shuffled=shuffle, window=number)
        for chunk in range(start[1] if number == start[0] else 0, -(-len(mine) // ROWS_A_REQUEST)):
            batches = mine[chunk * ROWS_A_REQUEST : (chunk + 1) * ROWS_A_REQUEST]
            positions = first + np.concatenate(batches)
            sizes, costs = tuple(len(b) for b in batches), _costs(batches, part, budget)
            yield Planned(positions, sizes, keep=_keep(who, 1), mark=(number, chunk), costs=costs)


def rough_plans(hint: IntArray, who: Rank, *, window: int, start: tuple[int, ...] = (0, 0)) -> Iterator[Planned]:
    """Windows of similar samples where lengths are known roughly: workers cut them by true lengths.

    The samples of all ranks' windows are sorted by the hint and dealt out like cards, so that all ranks hold the like;
    each rank's share is cut into chunks of neighbours, which come in the same shuffled order on all ranks.
    """
    span = window * who.size
    for number in range(start[0], -(-len(hint) // span)):
        first = number * span
        mine = first + deal(hint[first : first + span], who)
        count = max(1, min(CHUNKS_A_WINDOW, len(mine) // 32))
        order = np.random.default_rng((who.seed, who.epoch, number)).permutation(CHUNKS_A_WINDOW)
        chunks = np.array_split(mine, count)
        for place in range(start[1] if number == start[0] else 0, count):
            which = int(order[order < count][place])
            yield Planned(np.sort(chunks[which]), None, keep=_keep(who, 1), mark=(number, place))


def deal(hint: IntArray, who: Rank) -> IntArray:
    """This rank's places among these samples, longest first, dealt in snake order so that the ranks' sums are alike.

    >>> [deal(np.array([5, 1, 9, 3]), Rank(rank, 2, 0, 0)).tolist() for rank in range(2)]
    [[2, 1], [0, 3]]
    """
    order = np.argsort(-np.asarray(hint, np.int64), kind="stable")
    rounds = np.arange(len(order)) // who.size
    column = np.arange(len(order)) % who.size
    return order[np.where(rounds % 2, who.size - 1 - column, column) == who.rank]


def update_plans(
    sizes: UpdateSizes,
    who: Rank,
    *,
    budget: Budget,
    lengths: Streams | None = None,
    hint: IntArray | None = None,
    work: Work = DEFAULT_WORK,
    objective: Objective = "time",
    skipped: int = 0,
    start: UpdateMark | None = None,
) -> Iterator[Planned]:
    """One request an update: this rank's share of the samples that fixed batches would draw for it.

    Args:
        lengths: known lengths by position: shares are planned batches, in rows over the ranks.
        hint: roughly known lengths by position: shares are balanced by them. Without either, by number of samples.
        skipped: samples at the beginning of the epoch's order that have no position any more.
        start: the first update wanted; None: the epoch's first.
    """
    for mark, stop in _marked_spans(sizes, start or UpdateMark.of(sizes.start(who.epoch))):
        first, end = mark.samples_used - skipped, stop - skipped
        if lengths is not None:
            part = {name: values[first:end] for name, values in lengths.items()}
            mine = rank_batches(
                part, budget, who, work=work, objective=objective, rows_shuffled=False, window=mark.update
            )
            flat = np.concatenate(mine) if mine else np.zeros(0, np.int64)
            groups, costs = tuple(len(b) for b in mine), _costs(mine, part, budget)
            yield Planned(first + flat, groups, keep=_keep(who, 1), mark=mark, costs=costs)
        elif hint is not None:
            yield Planned(first + np.sort(deal(hint[first:end], who)), None, keep=_keep(who, 1), mark=mark)
        else:
            begin, until = split_share(end - first, (who.rank + mark.update) % who.size, who.size)
            yield Planned(np.arange(first + begin, first + until), None, keep=_keep(who, 1), mark=mark)


def _marked_spans(sizes: UpdateSizes, start: UpdateMark) -> Iterator[tuple[UpdateMark, int]]:
    """(where an update begins, where it ends) from ``start`` on."""
    cursor = start.cursor(sizes)
    if start.until:
        yield start, start.until
        cursor = start.passed.cursor(sizes)
    for _, stop, after in sizes.spans(cursor):
        yield UpdateMark.of(cursor), stop
        cursor = after


def _costs(batches: Sequence[IntArray], lengths: Streams, budget: Budget) -> tuple[int, ...]:
    """Padded tokens that each batch is planned to have."""
    if not batches:
        return ()
    shapes = shapes_of(Batches(np.concatenate(batches), np.cumsum([0, *map(len, batches)])), lengths)
    return tuple(padded_tokens(shapes, budget).tolist())


def _keep(who: Rank, number: int) -> int:
    """Samples are kept for splitting only where another rank may need more steps."""
    return number if who.size > 1 else 0


def exact_window(lengths: Streams, budget: Budget, size: int, config: Any) -> int:
    """Samples planned together: all ranks' windows, at least what the offline sampler would choose.

    With ``shuffle`` at most a quarter of an epoch, so that batches differ from epoch to epoch.
    """
    offline = Planner(lengths, budget, PlanConfig(shuffle=config.shuffle)).window_size(size)
    return max(offline, min(config.window * size, len(lengths[TOKENS]) // 4))
