"""Plans the order of an epoch's samples, and the requests for them, as functions of their arguments alone."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, islice
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
from dynagroup.online.messages import Pool, Request
from dynagroup.online.protocol import print_of
from dynagroup.online.state import KINDS, LearnedLengths
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.epoch import NONE, EpochOrder
from dynagroup.plan.inputs import OneKind, PlanConfig
from dynagroup.plan.order import OrderSource
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
    grouping: int | None
    strata: int | None
    drop_last: bool
    accumulation: int
    seed: int
    shuffle: bool
    weigh: Weigh
    window_bytes: int | None
    work: Work
    one_kind: OneKind

    def __post_init__(self) -> None:
        self.window = check_int("window", self.window)
        self.seed = check_int("seed", self.seed, least=0)
        self.shuffle = check_flag("shuffle", self.shuffle)
        self.work = check_work(self.work)
        if self.window_bytes is not None:
            self.window_bytes = check_int("window_bytes", self.window_bytes)
        if self.samples_per_update is not None and not callable(self.samples_per_update):
            self.samples_per_update = check_int("samples_per_update", self.samples_per_update)
        if self.grouping is not None:
            self.grouping = check_int("grouping", self.grouping)
        if self.strata is not None:
            self.strata = check_int("strata", self.strata)
            if self.grouping is None:
                raise ConfigError(
                    "`strata` needs `grouping`, the number of updates that are dealt together"
                )
        self.drop_last = check_flag("drop_last", self.drop_last)
        self.accumulation = check_updates(
            self.samples_per_update,
            self.accumulation,
            drop_last=self.drop_last,
            grouping=self.grouping is not None,
        )

    @property
    def pooled_updates(self) -> int:
        """Number of updates that are requested together."""
        return self.grouping or 1

    def identity(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _compared(value) for name, value in values.items()}


def _compared(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, str)) else described(value)


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
        places = positions if self.base is None else self.base[positions]
        if isinstance(self.indices, EpochOrder):
            return self.indices.index_at(places).tolist()
        return self.indices[places].tolist()


class BatchSource(OrderSource):
    """The order of a user's batch sampler: all indices, and the size of each batch."""

    def _read(self, epoch: int) -> list[int]:
        set_epoch(self._source, epoch)
        source: Any = self._source
        with explained("`batch_sampler` must yield lists of dataset indices"):
            batches = [list(map(as_index, batch)) for batch in source]
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
        is_iterable = is_stream(dataset)
        options = {
            "batch_sampler": batch_sampler,
            "sampler": sampler,
            "shuffle": config.shuffle or None,
            "kinds": kinds,
            "length_hint": length_hint,
        }
        passed = [name for name, value in options.items() if value is not None]
        orders = [name for name in passed if name in ("batch_sampler", "sampler", "shuffle")]
        _check_order(orders, passed, sampler, is_iterable=is_iterable)
        if config.samples_per_update is not None and (is_iterable or batch_sampler is not None):
            raise ConfigError(
                "`samples_per_update` needs a map-style dataset and no `batch_sampler`; "
                "otherwise set `accumulation`"
            )
        self._config = config
        self.size = None if is_iterable else len(dataset)
        self.decided_by = orders[0] if orders else "dataset"
        self._source = _source_of(batch_sampler, sampler, self.size or 0)
        if self._source is not None and self._source.mixture is not None:
            if config.grouping is not None:
                raise ConfigError(
                    "`grouping` here would change a Mixture's shares of each update; use a "
                    "PlannedDataLoader, or leave `grouping` out"
                )
        self.sizes: UpdateSizes | None = None  # sizes of updates, if `samples_per_update` is set
        if config.samples_per_update is not None:
            self.sizes = UpdateSizes(
                config.samples_per_update,
                self.num_ordered,
                order=self._source,
                drop_last=config.drop_last,
            )
        self.hint = None if length_hint is None else as_hint(length_hint, len(dataset))
        self.kinds = None if kinds is None else Kinds.read(kinds, len(dataset))

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "num_samples": self.size,
            "order": self.decided_by,
            "length_hint": None if self.hint is None else described(self.hint),
            "kinds": None if self.kinds is None else described(self.kinds),
        }

    @property
    def num_samples(self) -> int | None:
        """Samples of one epoch over all ranks; None: there is no order over all ranks."""
        if self.size is None or isinstance(self._source, BatchSource):
            return None
        return self.num_ordered()

    def num_ordered(self) -> int:
        if self._source is None:
            return self.size or 0
        return len(self._source) if self.sizes is None else self._source.counted()

    def of_epoch(self, epoch: int) -> Order:
        """Returns dataset indices by position; a user's batches are this rank's only; an iterable dataset has none."""
        source = self._source
        size = self.size or 0
        if source is not None and self.sizes is not None:
            return Order(source.counted_epoch(epoch))
        if source is not None:
            return Order(source.of_epoch(epoch))
        if self._config.shuffle:
            return Order(EpochOrder(size, seed=self._config.seed, epoch=epoch))
        return Order(np.arange(size))

    def groups(self, epoch: int) -> tuple[int, ...] | None:
        """Returns the sizes of this rank's batches, if the user gives batches."""
        return self._source.groups(epoch) if isinstance(self._source, BatchSource) else None

    def fingerprint(self, epoch: int) -> int | None:
        """Returns a checksum of the user's order; None: seed and settings determine the order."""
        return None if self._source is None else self._source.checksum(epoch)


def _source_of(batch_sampler: Any, sampler: Any, num_samples: int) -> OrderSource | None:
    if batch_sampler is not None:
        return BatchSource(batch_sampler, num_samples, "batch_sampler")
    return None if sampler is None else OrderSource(sampler, num_samples)


def _check_order(orders: list[str], passed: list[str], sampler: Any, *, is_iterable: bool) -> None:
    """Raises ConfigError if arguments (``passed``, of which ``orders`` order the samples) do not go together."""
    if len(orders) > 1:
        raise ConfigError(
            f"`{orders[0]}` and `{orders[1]}` both set the order of samples; pass only one of them"
        )
    if is_iterable and passed:
        raise ConfigError(
            f"`{passed[0]}` needs a map-style dataset; leave it out: an iterable one has its own "
            "order, and `kind_of` labels its samples"
        )
    num_ranks = getattr(sampler, "num_replicas", 1)
    if isinstance(num_ranks, int) and num_ranks > 1:
        raise ConfigError(
            f"`sampler` ({type(sampler).__name__}) already shards over {num_ranks} ranks; "
            "pass one that is not sharded, because the loader shards samples itself"
        )


def as_hint(hint: Any, num_samples: int) -> FloatArray:
    if isinstance(hint, (str, Path)):
        streams = as_streams(hint)
        hint = streams[primary(streams)]
    if callable(hint):
        hint = [hint(index) for index in range(num_samples)]
    array = np.asarray(hint)
    is_numeric = array.dtype.kind in "iuf" and bool(np.isfinite(array).all())
    if array.shape != (num_samples,) or not is_numeric:
        raise ConfigError(
            f"`length_hint` must be one finite number for each of the {num_samples} samples, or a "
            f"function from index to number, but is an array of {array.dtype} {array.shape}"
        )
    return array.astype(np.float64)


class Source(NamedTuple):
    """What determines the requests of an epoch."""

    world: World
    config: OnlineConfig
    budget: Budget
    iterable: bool
    epoch: int
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
        is_divided = self.iterable or self.groups is not None or self.sizes is not None
        return not is_divided and self.lengths is None and self.rough is None

    def requests(self, rank: int, size: int) -> Iterator[Request]:
        """Yields a rank's requests for the samples of the order."""
        if self.groups is not None:
            return _batches(self.groups)
        if self.sizes is not None:
            return _updates(self, self.sizes, rank, size)
        if self.lengths is not None:
            return _rows(self, self.lengths, rank, size)
        if self.rough is not None:
            return _like(self, self.rough, rank, size)
        return iter(())

    def with_lengths(self, learned: LearnedLengths | None, orders: EpochOrders) -> "Source":
        """Returns this source with known lengths (exact ones to plan batches, rough ones to form windows) and kinds."""
        source = self._replace(lengths=None, rough=None, kinds=None)
        num_positions = self.order.num_positions
        has_learned = learned is not None and bool(learned.seen)
        has_hints = orders.hint is not None or orders.kinds is not None
        if not num_positions or not (has_learned or has_hints):
            return source
        indices = np.asarray(self.order.at(np.arange(num_positions)), np.int64)
        if orders.kinds is not None:
            source = source._replace(kinds=orders.kinds.codes[indices])
        known = None if learned is None else self._known(learned, indices)
        if learned is not None and known is not None:
            return source._with_known(known, steady=learned.steady)
        if orders.hint is not None:
            return source._replace(rough=orders.hint[indices])
        return source._replace(rough=np.zeros(num_positions)) if has_hints else source

    def _known(self, learned: LearnedLengths, indices: IntArray) -> dict[str, Any] | None:
        """Returns the learned lengths of samples in order; 0 for those that ``drop_last`` leaves out."""
        num_used = len(indices)
        if self.sizes is not None:
            num_used = self.sizes.end(self.epoch).samples_used - self.order.skipped
        known = learned.known(indices[:num_used])
        if known is None:
            return None
        unused = np.zeros(len(indices) - num_used, np.int32)
        return {name: np.append(values, unused) for name, values in known.items()}

    def _with_known(self, lengths: dict[str, Any], *, steady: bool) -> "Source":
        source = self._replace(kinds=lengths.pop(KINDS, self.kinds))
        if steady and self.config.grouping is None:
            return source._replace(lengths=lengths)
        padded = [lengths[name] for name in padded_streams(self.budget, lengths)]
        return source._replace(rough=np.sum(padded, axis=0, dtype=np.float64))


def _batches(groups: tuple[int, ...]) -> Iterator[Request]:
    """Yields one request for each of the user's batches."""
    for size, stop in zip(groups, accumulate(groups), strict=True):
        yield Request(np.arange(stop - size, stop), (size,))


def _planner(source: Source, lengths: Streams) -> Planner:
    """Returns the planner that the offline sampler uses, over positions; with ``sizes``, windows are updates."""
    config = source.config
    kinds = None
    if source.kinds is not None:
        labels, codes = np.unique(source.kinds, return_inverse=True)
        kinds = Kinds(codes.astype(np.int32), tuple(labels.tolist()))
    settings = PlanConfig(
        samples_per_update=None if source.sizes is None else LARGEST_UPDATE,
        hardest_first=0,
        shuffle=config.shuffle,
        seed=config.seed,
        work=config.work,
        one_kind=config.one_kind,
    )
    return Planner(lengths, source.budget, settings, kinds).with_limit(source.limit)


def _batches_of_rank(window: BatchPlan, rank: int) -> list[IntArray]:
    """Returns a rank's batches of a planned window, without idle ones. Ranks take turns with the batch of most work."""
    rows = np.arange(window.num_steps)
    turn = window.start.update + window.start.windows_done
    columns = (rank + turn + rows) % window.world_size
    is_used = window.loss_scale[rows, columns] > 0
    return list(window.batches.take(window.table[rows[is_used], columns[is_used]]))


def _rows(source: Source, lengths: Streams, rank: int, size: int) -> Iterator[Request]:
    """Yields requests for batches as the offline sampler plans them: all ranks have equal work in a step."""
    planner = _planner(source, lengths)
    order = np.arange(source.order.num_positions)
    for window in planner.steps_from(planner.start_of(source.epoch, size), size, order):
        batches = _batches_of_rank(window, rank)
        for start in range(0, len(batches), ROWS_A_REQUEST):
            part = batches[start : start + ROWS_A_REQUEST]
            yield Request(np.concatenate(part), tuple(map(len, part)), keep=size > 1)


def _like(source: Source, rough: FloatArray, rank: int, size: int) -> Iterator[Request]:
    """Yields requests for windows of similar samples, if lengths are known roughly. The samples of several windows per
    rank are sorted and divided, so that all ranks have similar samples at the same time."""
    row = source.config.window * size  # a window for each rank
    rng = np.random.default_rng((source.config.seed, source.epoch))
    for start in range(0, len(rough), SORTED * row):
        positions = np.arange(start, min(start + SORTED * row, len(rough)))
        positions = positions[np.argsort(-rough[positions], kind="stable")]
        rows = np.array_split(positions, range(row, len(positions), row))
        for number in rng.permutation(len(rows)):
            alike = rows[number]
            if source.kinds is not None:  # gives all ranks the same number of samples of each kind
                alike = alike[np.argsort(source.kinds[alike], kind="stable")]
            yield Request(np.sort(alike[rank::size]), keep=size > 1)


class Update(NamedTuple):
    start: int  # first position
    stop: int
    number: int  # in the run, from 0


def pools_of(source: Source, sizes: UpdateSizes) -> Iterator[list[Update]]:
    """Yields the updates of an epoch that are requested together: ``grouping`` updates of one size, or one update.

    When a run has resumed on other ranks, used samples have no position. The rest of the current update then comes
    first, as a pool of its own. Sizes are looked up pool by pool, because later ones may still be changed.
    """
    skipped = source.order.skipped
    mark = _first_unused(sizes, source.epoch, skipped)
    while True:
        pool: list[Update] = []
        for start, stop, after in islice(sizes.spans(mark), source.config.pooled_updates):
            if pool and after.current != mark.current:
                break
            pool.append(Update(max(start - skipped, 0), stop - skipped, mark.update))
            mark = after
            if start < skipped:
                break
        if not pool:
            return
        yield pool


def _first_unused(sizes: UpdateSizes, epoch: int, num_used: int) -> Cursor:
    """Returns the beginning of the first update that has samples after the first ``num_used`` ones of an epoch."""
    mark = sizes.start(epoch)
    for after in sizes.cursors(mark):
        if after.samples_used > num_used:
            break
        mark = after
    return mark


def _updates(source: Source, sizes: UpdateSizes, rank: int, size: int) -> Iterator[Request]:
    """Yields a request per pool of updates: this rank's part of the samples that fixed batches would draw."""
    planner = None if source.lengths is None else _planner(source, source.lengths)
    seeds = source.config.seed, source.epoch
    for pool in pools_of(source, sizes):
        first = pool[0]
        if planner is not None:
            drawn = np.arange(first.start, first.stop)
            cursor = Cursor(source.epoch, update=first.number)
            batches = _batches_of_rank(plan_update(planner, drawn, cursor, size), rank)
            positions = np.concatenate([NONE, *batches])
            yield Request(positions, tuple(map(len, batches)), keep=size > 1)
            continue
        shares = [_share(source, update, rank, size, turn=first.number) for update in pool]
        dealt = None
        if len(pool) > 1:
            dealt = Pool(
                share_sizes=tuple(map(len, shares)),
                update_size=first.stop - first.start,
                strata=source.config.strata,
                seeds=(*seeds, first.number),
                rank=rank,
            )
        yield Request(np.concatenate(shares), keep=size > 1, pool=dealt)


def _share(source: Source, update: Update, rank: int, size: int, *, turn: int) -> IntArray:
    """Returns the positions of an update's samples for one rank; ranks take turns with a sample more."""
    drawn = np.arange(update.start, update.stop)
    if source.rough is None:
        return np.array_split(drawn, size)[(rank + turn) % size]
    kinds = None if source.kinds is None else source.kinds[drawn]
    return drawn[np.sort(deal(source.rough[drawn], rank, size, kinds))]


def deal(hint: FloatArray, rank: int, size: int, kinds: IntArray | None = None) -> IntArray:
    """Snake draft: returns this rank's samples (places in ``hint``), dealt kind by kind, longest first; sums are about equal."""
    order = np.lexsort((-hint,) if kinds is None else (-hint, kinds))
    rounds, columns = np.divmod(np.arange(len(order)), size)
    is_backward = rounds % 2 == 1
    return order[np.where(is_backward, size - 1 - columns, columns) == rank]


def behind(cursor: Cursor, samples: int, sizes: UpdateSizes | None, steps: int = 0) -> Cursor:
    """Returns the point in the run after one more update of ``samples`` samples; ``steps``: taken in the epoch by then."""
    if sizes is not None:
        return replace(next(sizes.cursors(cursor)), steps=steps)
    return Cursor(
        cursor.epoch,
        steps,
        update=cursor.update + 1,
        samples_used=cursor.samples_used + samples,
        samples_seen=cursor.samples_seen + samples,
        current=samples,
    )


def handed_out(cursor: Cursor, samples: int, sizes: UpdateSizes | None) -> Cursor:
    """Returns the point after all yielded updates, including the current one of ``samples`` samples."""
    return behind(cursor, samples, sizes) if cursor.begun_rows else cursor
