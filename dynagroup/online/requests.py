"""Plans the order of an epoch's samples, and the requests for them, as functions of their arguments alone."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from operator import index as as_index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynagroup.budget.base import Budget, FloatArray, padded_streams
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.lengths import Kinds, as_streams
from dynagroup.online.datasets import is_stream
from dynagroup.online.messages import Request
from dynagroup.online.protocol import print_of
from dynagroup.online.state import KINDS, LearnedLengths
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import EpochOrder, OrderSource
from dynagroup.plan.inputs import OneKind, PlanConfig
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Planner
from dynagroup.plan.window import plan_update
from dynagroup.shapes import IntArray, Streams, primary
from dynagroup.update.loader import check_updates
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import LARGEST_UPDATE, BatchSizeSchedule, UpdateSizes
from dynagroup.validation import check_flag, check_int, explained, set_epoch

ROWS_A_REQUEST = 16
SORTED = 8  # windows per rank to sort together if lengths are known roughly
WINDOW_BYTES = 1 << 28


@dataclass(kw_only=True, slots=True)
class OnlineConfig:
    """Arguments of the online loader that do not depend on data or ranks."""

    window: int
    samples_per_update: int | BatchSizeSchedule | None
    drop_last: bool
    accumulation: int
    seed: int
    shuffle: bool
    weigh: Weigh
    window_bytes: int | None
    work: Work
    one_kind: OneKind

    def __post_init__(self) -> None:
        self.window, self.seed = (
            check_int("window", self.window),
            check_int("seed", self.seed, least=0),
        )
        self.shuffle, self.work = check_flag("shuffle", self.shuffle), check_work(self.work)
        if self.window_bytes is not None:
            self.window_bytes = check_int("window_bytes", self.window_bytes)
        if self.samples_per_update is not None and not callable(self.samples_per_update):
            self.samples_per_update = check_int("samples_per_update", self.samples_per_update)
        self.drop_last = check_flag("drop_last", self.drop_last)
        self.accumulation = check_updates(
            self.samples_per_update, self.accumulation, drop_last=self.drop_last
        )

    def identity(self) -> dict[str, Any]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {n: v if v is None or isinstance(v, (int, str)) else described(v) for n, v in values}


class Order(NamedTuple):
    """The order of an epoch: dataset indices by position. ``base``: the positions left after a resume; None: all."""

    indices: IntArray | EpochOrder
    base: IntArray | None = None

    @property
    def num_positions(self) -> int:
        return len(self.indices if self.base is None else self.base)

    @property
    def skipped(self) -> int:
        """Samples at the beginning of the order that were used before the epoch was resumed on other ranks."""
        return len(self.indices) - self.num_positions

    def at(self, positions: IntArray) -> list[int]:
        positions, indices = positions if self.base is None else self.base[positions], self.indices
        return (
            indices.index_at(positions) if isinstance(indices, EpochOrder) else indices[positions]
        ).tolist()


class BatchSource(OrderSource):
    """The order of a user's batch sampler: all indices, and the size of each batch. Of a sampler without ``set_epoch``,
    all earlier epochs are read first."""

    NAME = "batch_sampler"

    def _read(self, epoch: int) -> list[int]:
        for _ in range(0 if hasattr(self._source, "set_epoch") else epoch - self._epoch - 1):
            deque(self._source, maxlen=0)
        set_epoch(self._source, epoch)
        with explained("`batch_sampler` must yield lists of dataset indices"):
            batches = [[as_index(index) for index in batch] for batch in self._source]  # type: ignore[attr-defined]
        self._groups = tuple(map(len, batches))
        return [*chain.from_iterable(batches)]

    def groups(self, epoch: int) -> tuple[int, ...]:
        self.of_epoch(epoch)
        return self._groups

    def checksum(self, epoch: int) -> int:
        return print_of([super().checksum(epoch), self._groups])


class EpochOrders:
    """The order of each epoch: that of the user's sampler or batches, a seeded shuffle, or dataset order."""

    def __init__(
        self,
        dataset: Any,
        config: OnlineConfig,
        batch_sampler: Any,
        sampler: Any,
        length_hint: Any,
        kinds: Any = None,
    ) -> None:
        iterable, sources = is_stream(dataset), {"batch_sampler": batch_sampler, "sampler": sampler}
        given = [name for name, source in sources.items() if source is not None] + [
            "shuffle"
        ] * config.shuffle
        if len(given) > 1:
            raise ConfigError(
                f"`{given[0]}` and `{given[1]}` both set the order of samples; pass only one of them"
            )
        hints = {"kinds": kinds, "length_hint": length_hint}
        if iterable and (
            wrong := [*given, *(name for name, hint in hints.items() if hint is not None)]
        ):
            way_out = (
                "leave it out: an iterable one has its own order, and `kind_of` labels its samples"
            )
            raise ConfigError(f"`{wrong[0]}` needs a map-style dataset; {way_out}")
        if config.samples_per_update is not None and (iterable or batch_sampler is not None):
            way_out = "otherwise set `accumulation`"
            raise ConfigError(
                f"`samples_per_update` needs a map-style dataset and no `batch_sampler`; {way_out}"
            )
        ranks = getattr(sampler, "num_replicas", 1)
        if isinstance(ranks, int) and ranks > 1:
            way_out = "pass one that is not sharded, because the loader shards samples itself"
            raise ConfigError(
                f"`sampler` ({type(sampler).__name__}) already shards over {ranks} ranks; {way_out}"
            )
        self._config, self.size = config, None if iterable else len(dataset)
        self.decided_by = given[0] if given else "dataset"
        self._source = None if sampler is None else OrderSource(sampler, len(dataset))
        if batch_sampler is not None:
            self._source = BatchSource(batch_sampler, len(dataset))
        self.sizes: UpdateSizes | None = None  # sizes of updates, if `samples_per_update` is set
        if config.samples_per_update is not None:
            self.sizes = UpdateSizes(
                config.samples_per_update, self.num_ordered, drop_last=config.drop_last
            )
        self.hint = None if length_hint is None else as_hint(length_hint, len(dataset))
        self.kinds = None if kinds is None else Kinds.read(kinds, len(dataset))

    @property
    def identity(self) -> dict[str, Any]:
        told = {"length_hint": self.hint, "kinds": self.kinds}
        facts = {name: None if value is None else described(value) for name, value in told.items()}
        return {"num_samples": self.size, "order": self.decided_by, **facts}

    @property
    def num_samples(self) -> int | None:
        """Samples of one epoch over all ranks; None: there is no order over all ranks."""
        return (
            None
            if self.size is None or isinstance(self._source, BatchSource)
            else self.num_ordered()
        )

    def num_ordered(self) -> int:
        if self._source is None:
            return self.size or 0
        return len(self._source) if self.sizes is None else self._source.counted()

    def of_epoch(self, epoch: int) -> Order:
        """Returns dataset indices by position; a user's batches are this rank's only; an iterable dataset has none."""
        source, size = self._source, self.size or 0
        if source is not None:
            return Order(
                source.of_epoch(epoch) if self.sizes is None else source.counted_epoch(epoch)
            )
        return Order(
            EpochOrder(size, seed=self._config.seed, epoch=epoch)
            if self._config.shuffle
            else np.arange(size)
        )

    def groups(self, epoch: int) -> tuple[int, ...] | None:
        """Returns the sizes of this rank's batches, if the user gives batches."""
        return self._source.groups(epoch) if isinstance(self._source, BatchSource) else None

    def fingerprint(self, epoch: int) -> int | None:
        """Returns a checksum of the user's order; None: seed and settings determine the order."""
        return None if self._source is None else self._source.checksum(epoch)


class Source(NamedTuple):
    world: World
    config: OnlineConfig
    budget: Budget
    iterable: bool
    cursor: Cursor  # the point where the next updates begin
    order: Order  # empty for an iterable dataset
    sizes: UpdateSizes | None = None  # sizes of updates, if `samples_per_update` is set
    groups: tuple[int, ...] | None = None  # sizes of this rank's batches, if the user gives batches
    limit: float | None = None  # the budget's learned limit when the epoch began
    lengths: Streams | None = None  # exact lengths by position; None if `rough` is set
    rough: FloatArray | None = None  # rough lengths by position; None if `lengths` is set
    kinds: IntArray | None = None  # numbers of the kinds by position, if known

    @property
    def shares(self) -> bool:
        """Whether ranks get windows one by one during the epoch, according to how many samples each still has."""
        divided = self.iterable or self.groups is not None or self.sizes is not None
        return not divided and self.lengths is None and self.rough is None

    def requests(self, rank: int, size: int) -> Iterator[Request]:
        """Yields a rank's requests for samples: if updates have a set size, from the saved point, else for all samples."""
        if self.groups is not None:
            stops = accumulate(self.groups)
            return (
                Request(np.arange(stop - n, stop), (n,))
                for stop, n in zip(stops, self.groups, strict=True)
            )
        planner = None if self.lengths is None else _planner(self, self.lengths)
        if self.sizes is not None:
            return _updates(self, self.sizes, planner, rank, size)
        if planner is not None:
            return _rows(self, planner, rank, size)
        return iter(()) if self.rough is None else _like(self, self.rough, rank, size)

    def with_lengths(self, learned: LearnedLengths | None, orders: EpochOrders) -> "Source":
        """Returns this source with known lengths (exact ones to plan batches, rough ones to form windows) and kinds."""
        source, count = (
            self._replace(lengths=None, rough=None, kinds=None),
            self.order.num_positions,
        )
        if not count or (
            orders.hint is None and orders.kinds is None and (learned is None or not learned.seen)
        ):
            return source
        at, used = np.asarray(self.order.at(np.arange(count)), np.int64), count
        kinds = None if orders.kinds is None else orders.kinds.codes[at]
        if self.sizes is not None:
            used = self.sizes.end(self.cursor.epoch).samples_used - self.order.skipped
        known = None if learned is None else learned.known(at[:used])
        if known is None or learned is None:
            unknown = None if kinds is None else np.zeros(count)
            return source._replace(
                rough=unknown if orders.hint is None else orders.hint[at], kinds=kinds
            )
        # drop_last leaves some samples out: never measured
        whole = {
            name: np.append(values, np.zeros(count - used, np.int32))
            for name, values in known.items()
        }
        source = source._replace(kinds=whole.pop(KINDS, kinds))
        if learned.steady:
            return source._replace(lengths=whole)
        padded = [whole[name] for name in padded_streams(self.budget, whole)]
        return source._replace(rough=np.sum(padded, axis=0, dtype=np.float64))


def _planner(source: Source, lengths: Streams) -> Planner:
    """Returns the planner that the offline sampler uses, over positions; with ``sizes``, windows are updates."""
    config, size = source.config, None if source.sizes is None else LARGEST_UPDATE
    how = {name: getattr(config, name) for name in ("shuffle", "seed", "work", "one_kind")}
    kinds = None
    if source.kinds is not None:
        labels, codes = np.unique(source.kinds, return_inverse=True)
        kinds = Kinds(codes.astype(np.int32), tuple(labels.tolist()))
    return Planner(
        lengths, source.budget, PlanConfig(samples_per_update=size, hardest_first=0, **how), kinds
    ).with_limit(source.limit)


def _own(window: BatchPlan, rank: int) -> list[IntArray]:
    """Returns a rank's batches of a planned window, without idle ones. Ranks take turns with the batch of most work."""
    rows, first = np.arange(window.num_steps), window.start.update + window.start.windows_done
    columns = (rank + first + rows) % window.world_size
    takes = window.loss_scale[rows, columns] > 0
    return [*window.batches.take(window.table[rows[takes], columns[takes]])]


def _rows(source: Source, planner: Planner, rank: int, size: int) -> Iterator[Request]:
    """Yields requests for batches as the offline sampler plans them: all ranks have equal work in a step."""
    order = np.arange(source.order.num_positions)
    for window in planner.steps_from(planner.start_of(source.cursor.epoch, size), size, order):
        mine = _own(window, rank)
        for start in range(0, len(mine), ROWS_A_REQUEST):
            batches = mine[start : start + ROWS_A_REQUEST]
            yield Request(np.concatenate(batches), tuple(map(len, batches)), keep=size > 1)


def _like(source: Source, rough: FloatArray, rank: int, size: int) -> Iterator[Request]:
    """Yields requests for windows of similar samples, if lengths are known roughly. The samples of several windows per
    rank are sorted and divided, so that all ranks have similar samples at the same time."""
    config = source.config
    together, rng = config.window * size, np.random.default_rng((config.seed, source.cursor.epoch))
    for span in np.array_split(
        np.arange(len(rough)), range(SORTED * together, len(rough), SORTED * together)
    ):
        groups = np.array_split(
            span[np.argsort(-rough[span], kind="stable")], range(together, len(span), together)
        )
        for number in rng.permutation(len(groups)):
            alike = groups[number]
            if source.kinds is not None:  # gives all ranks the same number of samples of each kind
                alike = alike[np.argsort(source.kinds[alike], kind="stable")]
            yield Request(np.sort(alike[rank::size]), keep=size > 1)


def _updates(
    source: Source, sizes: UpdateSizes, planner: Planner | None, rank: int, size: int
) -> Iterator[Request]:
    """Yields a request per update: this rank's part of the samples that fixed batches would draw. When a run resumes on
    other ranks, used samples have no position, and the rest of the current update comes first."""
    mark, skipped = source.cursor, source.order.skipped
    for begin, stop, after in sizes.spans(mark):
        first, end = max(begin - skipped, 0), stop - skipped
        groups = None
        if planner is not None:
            mine = _own(
                plan_update(
                    planner,
                    np.arange(first, end),
                    Cursor(mark.epoch, update=mark.update),
                    size,
                ),
                rank,
            )
            groups, share = (
                tuple(map(len, mine)),
                np.concatenate([np.zeros(0, np.int64), *mine]) - first,
            )
        elif source.rough is not None:
            kinds = None if source.kinds is None else source.kinds[first:end]
            share = np.sort(deal(source.rough[first:end], rank, size, kinds))
        else:
            share = np.array_split(np.arange(end - first), size)[(rank + mark.update) % size]
        yield Request(first + share, groups, keep=size > 1)
        mark = after


def deal(hint: FloatArray, rank: int, size: int, kinds: IntArray | None = None) -> IntArray:
    """Snake draft: returns this rank's samples (indices), dealt kind by kind, longest first; sums are about equal."""
    order = np.lexsort((-hint,) if kinds is None else (-hint, kinds))
    rounds, column = np.divmod(np.arange(len(order)), size)
    return order[np.where(rounds % 2, size - 1 - column, column) == rank]


def as_hint(hint: Any, num_samples: int) -> FloatArray:
    if isinstance(hint, (str, Path)):
        streams = as_streams(hint)
        hint = streams[primary(streams)]
    array = np.asarray([hint(i) for i in range(num_samples)] if callable(hint) else hint)
    if (
        array.shape != (num_samples,)
        or array.dtype.kind not in "iuf"
        or not np.isfinite(array).all()
    ):
        wanted = f"one finite number for each of the {num_samples} samples, or a function from index to number"
        raise ConfigError(
            f"`length_hint` must be {wanted}, but is an array of {array.dtype} {array.shape}"
        )
    return array.astype(np.float64)


def behind(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Returns the point in the run after one more update of ``samples`` samples, without the number of its steps."""
    if sizes is not None:
        return next(sizes.cursors(cursor))
    used, seen = cursor.samples_used + samples, cursor.samples_seen + samples
    return Cursor(
        cursor.epoch,
        update=cursor.update + 1,
        samples_used=used,
        samples_seen=seen,
        current=samples,
    )


def handed_out(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Returns the point after all yielded updates, including the current one of ``samples`` samples."""
    return behind(cursor, samples, sizes) if cursor.begun_rows else cursor
