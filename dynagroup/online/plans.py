"""Which samples come when: the order of an epoch, and the requests that follow from it. Pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import index as as_index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import Budget, FloatArray, padded_streams
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.lengths import Kinds, as_streams
from dynagroup.online.datasets import is_stream, set_epoch
from dynagroup.online.messages import Request
from dynagroup.online.protocol import print_of, spread
from dynagroup.online.state import KINDS, LearnedLengths
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochOrder, OrderSource, windows_of_kinds
from dynagroup.plan.planner import LEAST_SHARE, OneKind, PlanConfig, Planner
from dynagroup.plan.ranks import cut_kinds
from dynagroup.shapes import IntArray, Streams, primary
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import BatchSizeSchedule, UpdateSizes
from dynagroup.validation import check_flag, check_int

ROWS_A_REQUEST = 16
SORTED = 8  # windows a rank whose samples are sorted together by a hint
WINDOW_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    """Arguments of the loader that know no data and no ranks."""

    window: int = 1024
    samples_per_update: int | BatchSizeSchedule | None = None
    drop_last: bool = False
    accumulation: int = 1
    seed: int = 0
    shuffle: bool = False
    weigh: Weigh = "tokens"
    window_bytes: int | None = WINDOW_BYTES
    work: Work = field(default_factory=check_work)
    one_kind: OneKind = "step"

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
        if self.samples_per_update is None and self.drop_last:
            raise ConfigError("`drop_last` needs `samples_per_update`: without it no update is smaller than asked")
        if self.samples_per_update is not None and self.accumulation != 1:
            both = f"`accumulation` ({self.accumulation}) and `samples_per_update`"
            raise ConfigError(f"{both} exclude each other: an update takes as many steps as its samples need")

    def identity(self) -> dict[str, Any]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {n: v if v is None or isinstance(v, (int, str)) else described(v) for n, v in values}


class Order(NamedTuple):
    """The epoch's order: dataset indices by position. ``base``: the positions that a resumed epoch still has; None: all."""

    indices: IntArray | EpochOrder
    base: IntArray | None = None

    @property
    def num_positions(self) -> int:
        return len(self.indices if self.base is None else self.base)

    @property
    def skipped(self) -> int:
        """Samples at the order's beginning that were used before the epoch went on on another number of ranks."""
        return len(self.indices) - self.num_positions

    def at(self, positions: IntArray) -> list[int]:
        positions = positions if self.base is None else self.base[positions]
        if isinstance(self.indices, EpochOrder):
            return self.indices.index_at(positions).tolist()
        return self.indices[positions].tolist()

    def restricted(self, positions: IntArray) -> Order:
        return Order(self.indices, positions if self.base is None else self.base[positions])


class EpochOrders:
    """Each epoch's order, whoever decides it: the user's sampler or batches, a seeded shuffle, or the dataset."""

    def __init__(
        self, dataset: Any, config: OnlineConfig, batch_sampler: Any, sampler: Any, length_hint: Any, kinds: Any = None
    ) -> None:
        iterable = is_stream(dataset)
        sources = {"batch_sampler": batch_sampler, "sampler": sampler}
        given = [name for name, source in sources.items() if source is not None] + ["shuffle"] * config.shuffle
        if len(given) > 1:
            raise ConfigError(f"`{given[0]}` and `{given[1]}` exclude each other: both decide the order of samples")
        if iterable and given:
            raise ConfigError(f"`{given[0]}` needs a map-style dataset; an iterable one brings its own order")
        if config.samples_per_update is not None and (iterable or batch_sampler is not None):
            way_out = "an update's samples are drawn from one order over all ranks; elsewhere set `accumulation`"
            raise ConfigError(f"`samples_per_update` needs a map-style dataset and no `batch_sampler`: {way_out}")
        ranks = getattr(sampler, "num_replicas", 1)
        if isinstance(ranks, int) and ranks > 1:
            told = f"`sampler` divides its indices among {ranks} ranks already ({type(sampler).__name__})"
            raise ConfigError(f"{told}; give the undivided one: the loader hands out samples to ranks itself")
        if isinstance(batch_sampler, Iterator):
            raise ConfigError(f"`batch_sampler` must give batches anew every epoch, but is {batch_sampler!r:.200}")
        self._config, self.size = config, None if iterable else len(dataset)
        self._sampler = None if sampler is None else OrderSource(sampler, len(dataset))
        self._batch_sampler = batch_sampler
        self._drawn: tuple[int, list[list[int]]] = (-1, [])
        self.sizes: UpdateSizes | None = None  # how many samples each update holds, where it is set
        if config.samples_per_update is not None:
            self.sizes = UpdateSizes(config.samples_per_update, self.num_ordered, drop_last=config.drop_last)
        self.hint = None if length_hint is None else as_hint(length_hint, len(dataset))
        if kinds is not None and iterable:
            raise ConfigError("`kinds` needs a map-style dataset; label an iterable one's samples by `kind_of`")
        self.kinds = None if kinds is None else Kinds.read(kinds, len(dataset))
        self.decided_by = given[0] if given else "dataset"

    @property
    def identity(self) -> dict[str, Any]:
        hint = None if self.hint is None else described(self.hint)
        kinds = None if self.kinds is None else described(self.kinds)
        return {"num_samples": self.size, "order": self.decided_by, "length_hint": hint, "kinds": kinds}

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks, where one order decides it."""
        return None if self.size is None or self._batch_sampler is not None else self.num_ordered()

    def num_ordered(self) -> int:
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
        shuffled = EpochOrder(self.size, seed=self._config.seed, epoch=epoch) if self._config.shuffle else None
        return Order(np.arange(self.size) if shuffled is None else shuffled)

    def batches(self, epoch: int) -> list[list[int]] | None:
        """This rank's batches, where the user gives them. A sampler that cannot be told the epoch is drawn for each before."""
        source, drawn = self._batch_sampler, self._drawn[0]
        if source is None:
            return None
        if epoch != drawn:
            told = callable(getattr(source, "set_epoch", None))
            set_epoch(source, epoch)
            for _ in range(1 if told else max(1, epoch - drawn)):
                self._drawn = epoch, [[as_index(index) for index in batch] for batch in source]
        return self._drawn[1]

    def fingerprint(self, epoch: int) -> int | None:
        """63 bits of an order that the user decides; None where seed and settings do."""
        if self._batch_sampler is not None:
            return print_of(self.batches(epoch))
        return None if self._sampler is None else print_of(self._sampler.of_epoch(epoch).tolist())


class Source(NamedTuple):
    world: World
    config: OnlineConfig
    budget: Budget
    iterable: bool
    cursor: Cursor  # where the updates that come begin
    order: Order  # empty of an iterable dataset
    sizes: UpdateSizes | None = None  # how many samples each update holds, where it is set
    batches: list[list[int]] | None = None  # this rank's, where the user gives them
    lengths: Streams | None = None  # known ones, by position; at most one of these two
    rough: FloatArray | None = None  # roughly known ones, by position
    kinds: IntArray | None = None  # known beside either, by position, as numbers

    @property
    def shares(self) -> bool:
        """Windows belong to no rank until an exchange hands them out."""
        divided = self.iterable or self.batches is not None or self.sizes is not None
        return not divided and self.lengths is None and self.rough is None

    def requests(self, rank: int, size: int) -> Iterator[Request]:
        """A rank's requests: from the cursor on where updates are of a set size, else from the order's beginning."""
        if self.batches is not None:
            return _batches(self.batches)
        if self.sizes is not None:
            return _updates(self, rank, size)
        if self.lengths is not None:
            return _rows(self, rank, size)
        return iter(()) if self.rough is None else _like(self, self.rough, rank, size)

    def with_lengths(self, learned: LearnedLengths | None, orders: EpochOrders) -> Source:
        """The same with what is known of the lengths of its order: exact ones for plans, or rough ones for like windows; and of
        its kinds."""
        source, count = self._replace(lengths=None, rough=None, kinds=None), self.order.num_positions
        if not count or (orders.hint is None and orders.kinds is None and (learned is None or not learned.seen)):
            return source
        at, used = np.asarray(self.order.at(np.arange(count)), np.int64), count
        kinds = None if orders.kinds is None else orders.kinds.codes[at]
        if self.sizes is not None:
            used = self.sizes.end(self.cursor.epoch).samples_used - self.order.skipped
        known = None if learned is None else learned.known(at[:used])
        if known is None or learned is None:
            unknown = None if kinds is None else np.zeros(count)
            return source._replace(rough=unknown if orders.hint is None else orders.hint[at], kinds=kinds)
        unused = np.zeros(count - used, np.int32)  # what an epoch drops is never measured, and never asked for
        whole = {name: np.append(values, unused) for name, values in known.items()}
        source = source._replace(kinds=whole.pop(KINDS, kinds))
        if learned.steady:
            return source._replace(lengths=whole)
        padded = [whole[name] for name in padded_streams(self.budget, whole)]
        return source._replace(rough=np.sum(padded, axis=0, dtype=np.float64))


def _in_rows(source: Source, window: IntArray, rank: int, size: int, *, number: int) -> list[IntArray]:
    """A rank's batches of one window's positions, one a row; no sample is repeated to fill a row, and nobody always has the
    dearest batch. Each kind has rows of its own, evenly among the others'."""
    config, of_window = source.config, {name: values[window] for name, values in (source.lengths or {}).items()}
    kinds = np.zeros(len(window), np.int64) if source.kinds is None else source.kinds[window]
    rng, rows = np.random.default_rng((config.seed, source.cursor.epoch, number)), list[list[IntArray]]()
    together = config.one_kind == "batch"
    for batches in cut_kinds(of_window, kinds, source.budget, size, together=together, work=config.work):
        full = len(batches) // size
        order = np.append(rng.permutation(full) if config.shuffle else np.arange(full), full)  # the last is not filled
        mine = order * size + (rank + rng.integers(size, size=len(order))) % size
        rows.append([*batches.take(mine[mine < len(batches)]).map(window)])
    return spread(rows)


def _rows(source: Source, rank: int, size: int) -> Iterator[Request]:
    """Batches planned like the offline sampler's, in rows of equal cost over the ranks. All ranks' windows up to a quarter of an
    epoch are planned together, so that batches differ between epochs; at least what the offline sampler would choose."""
    lengths, config, count = source.lengths or {}, source.config, source.order.num_positions
    offline = Planner(lengths, source.budget, PlanConfig(shuffle=config.shuffle)).window_size(size)
    window = max(offline, min(config.window * size, count // 4))
    order, spans = np.arange(count), [(first, first + window) for first in range(0, count, window)]
    if source.kinds is not None:
        rng = np.random.default_rng((config.seed, source.cursor.epoch)) if config.shuffle else None
        codes = np.unique(source.kinds, return_inverse=True)[1]
        order, spans, _ = windows_of_kinds(order, codes, window, least=-(-window // LEAST_SHARE), rng=rng)
    for number, span in enumerate(spans):
        mine = _in_rows(source, order[slice(*span)], rank, size, number=number)
        for start in range(0, len(mine), ROWS_A_REQUEST):
            batches = mine[start : start + ROWS_A_REQUEST]
            yield Request(np.concatenate(batches), tuple(map(len, batches)), keep=size > 1)


def _like(source: Source, rough: FloatArray, rank: int, size: int) -> Iterator[Request]:
    """Windows of like samples, where lengths are known roughly: those of several windows a rank are sorted, and dealt out so that
    all ranks hold the like at the same time."""
    config = source.config
    together, rng = config.window * size, np.random.default_rng((config.seed, source.cursor.epoch))
    for span in np.array_split(np.arange(len(rough)), range(SORTED * together, len(rough), SORTED * together)):
        longest_first = span[np.argsort(-rough[span], kind="stable")]
        groups = np.array_split(longest_first, range(together, len(span), together))
        for number in rng.permutation(len(groups)):
            alike = groups[number]
            if source.kinds is not None:  # all ranks hold as many of each kind
                alike = alike[np.argsort(source.kinds[alike], kind="stable")]
            yield Request(np.sort(alike[rank::size]), keep=size > 1)


def _batches(batches: Sequence[Sequence[int]]) -> Iterator[Request]:
    """The user's batches, each refined by itself; positions number this rank's samples as they come."""
    first = 0
    for batch in batches:
        yield Request(np.arange(first, first + len(batch)), (len(batch),))
        first += len(batch)


def _updates(source: Source, rank: int, size: int) -> Iterator[Request]:
    """One request an update: this rank's share of the samples that fixed batches would draw for it. Of an epoch that goes on on
    other ranks, the first samples have no position any more; of the update that was under way then, only the rest."""
    mark, skipped = source.cursor, source.order.skipped
    for begin, stop, after in source.sizes.spans(mark) if source.sizes is not None else ():
        first, end = max(begin - skipped, 0), stop - skipped
        groups = None
        if source.lengths is not None:
            mine = _in_rows(source, np.arange(first, end), rank, size, number=mark.update)
            groups, share = tuple(map(len, mine)), np.concatenate([np.zeros(0, np.int64), *mine]) - first
        elif source.rough is not None:
            kinds = None if source.kinds is None else source.kinds[first:end]
            share = np.sort(deal(source.rough[first:end], rank, size, kinds))
        else:
            share = np.array_split(np.arange(end - first), size)[(rank + mark.update) % size]
        yield Request(first + share, groups, keep=size > 1)
        mark = after


def deal(hint: FloatArray, rank: int, size: int, kinds: IntArray | None = None) -> IntArray:
    """Snake draft: this rank's places among these samples, kind after kind, longest first, so that the ranks' sums are alike."""
    order = np.lexsort((-hint,) if kinds is None else (-hint, kinds))
    rounds, column = np.divmod(np.arange(len(order)), size)
    return order[np.where(rounds % 2, size - 1 - column, column) == rank]


def as_hint(hint: Any, num_samples: int) -> FloatArray:
    if isinstance(hint, (str, Path)):
        streams = as_streams(hint)
        hint = streams[primary(streams)]
    values = [hint(i) for i in range(num_samples)] if callable(hint) else hint
    array = np.asarray(values)
    if array.shape != (num_samples,) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        wanted = f"one finite number for each of the {num_samples} samples, or a function from index to number"
        raise ConfigError(f"`length_hint` must be {wanted}, but is an array of {array.dtype} {array.shape}")
    return array.astype(np.float64)


def behind(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where a run stands behind its next update, which holds so many samples; ``steps`` are not counted."""
    if sizes is not None:
        return next(sizes.cursors(cursor))
    used, seen = cursor.samples_used + samples, cursor.samples_seen + samples
    return Cursor(cursor.epoch, update=cursor.update + 1, samples_used=used, samples_seen=seen, current=samples)


def handed_out(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Where the updates end that were handed out; the one under way, of so many samples, counts."""
    return behind(cursor, samples, sizes) if cursor.begun_rows else cursor
