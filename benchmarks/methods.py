"""Ways to form the batches of a training, each as a stream of optimizer updates: lists of batches of sample indices.

Each rival is used as its documentation says, with the setting that is best here where it has several. All get the same memory: a
padded batch holds at most ``tokens`` tokens, a packed one at most as many; fixed batches hold as many of the longest samples as
fit. All that draw samples at random draw the job's permutation, so that the same updates are the same sets of samples.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.data import Numbered, collate, numbers_of
from dynagroup import Budget, LengthAwareBatchSampler, ShapeLadder, TokenBudget, Work
from dynagroup.plan.few_shapes import PackedTotals

Update = list[list[int]]
Setting = dict[str, Any]
WORK = Work()


def padded_tokens(batches: Any, lengths: np.ndarray) -> int:
    return sum(len(batch) * int(lengths[batch].max()) for batch in batches)


def in_fixed(order: Any, size: int) -> list[list[Any]]:
    """Parts of so many, in this order: batches of samples, rows of batches."""
    members = order.tolist() if isinstance(order, np.ndarray) else list(order)
    starts = range(0, len(members), size)
    return [members[start : start + size] for start in starts]


def longest_first(members: Any, lengths: np.ndarray) -> np.ndarray:
    """Sorted by length: what whoever sorts does first."""
    members = np.asarray(members)
    order = np.argsort(-lengths[members], kind="stable")
    return members[order]


def in_capped(order: Any, lengths: np.ndarray, cap: int, *, packed: bool = False) -> Update:
    """Batches in this order, each closed where the next sample would make it larger than the cap."""
    batches: Update = []
    batch: list[int] = []
    total = 0
    longest = 0
    for sample in map(int, order):
        length = int(lengths[sample])
        total += length
        longest = max(longest, length)
        tokens = total if packed else (len(batch) + 1) * longest
        if not batches or tokens > cap:
            batch = []
            batches.append(batch)
            total = length
            longest = length
        batch.append(sample)
    return batches


def planned(
    lengths: Any,
    budget: Budget,
    ranks: int = 1,
    epoch: int = 0,
    work: Work | None = WORK,
    **options: Any,
) -> Any:
    """Our plan of an epoch for so many ranks; ``options`` are those of the sampler."""
    sampler = LengthAwareBatchSampler(
        lengths, budget, rank=0, world_size=ranks, work=work, **options
    )
    sampler.set_epoch(epoch)
    return sampler.plan


@dataclass(frozen=True)
class Job:
    """Lengths, samples an update, tokens that fit a batch."""

    lengths: np.ndarray
    per_update: int
    tokens: int
    seed: int = 0
    work: Work = field(default_factory=Work)
    """What the model's steps take, measured beforehand where a benchmark does so."""
    num_shapes: int = 8
    """Of methods with few shapes."""
    updates_so_far: dict[Any, list[Update]] = field(default_factory=dict, repr=False)
    """Of each method, epoch and setting: some take long, and are asked again."""

    @cached_property
    def ladder(self) -> ShapeLadder:
        """Few shapes (samples, tokens) that fit."""
        budget = TokenBudget(self.tokens)
        return ShapeLadder(
            self.lengths,
            budget,
            num_shapes=self.num_shapes,
            window=self.per_update,
            work=self.work,
        )

    @cached_property
    def totals(self) -> PackedTotals:
        """Few totals of tokens that fit, of packed batches."""
        budget = TokenBudget(self.tokens, layout="packed")
        return PackedTotals(self.lengths, budget, num_shapes=self.num_shapes)

    @property
    def fixed(self) -> int:
        """Samples of a fixed batch that fits whatever comes."""
        return max(1, self.tokens // int(self.lengths.max()))

    @property
    def accumulation(self) -> int:
        """Fixed batches of an update."""
        return -(-self.per_update // self.fixed)

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of an epoch, the same for everyone who draws samples at random."""
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))


@dataclass(frozen=True)
class Method:
    """``batches``: one epoch's updates, or flat batches: updates then end where they hold ``per_update`` samples on average.

    Args:
        settings: what may be tried, the largest batches first; each is named arguments of ``batches``.
        same_updates: every update holds the ``per_update`` samples that fixed batches would.
        few_shapes: batches are filled to the job's few shapes (packed: totals), so that a compiled model meets few of them.
        capped: batches must hold at most the tokens they were given; dynabatch's are capped by its own prediction instead.
        needs: packages beyond transformers.
    """

    batches: Callable[..., Iterable[Any]]
    settings: Callable[[Job], Sequence[Setting]] = lambda _job: [{}]
    flat: bool = False
    packed: bool = False
    same_updates: bool = True
    few_shapes: bool = False
    capped: bool = True
    needs: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        return all(find_spec(name) is not None for name in self.needs)

    def updates(self, job: Job, epoch: int, setting: Setting) -> Iterator[Update]:
        key = (self.batches, epoch, *setting.items())
        if key not in job.updates_so_far:
            batches = self.batches(job, epoch, **setting)
            updates = _in_updates(batches, job.per_update) if self.flat else batches
            job.updates_so_far[key] = list(updates)
        return iter(job.updates_so_far[key])

    def tried(self, job: Job) -> list[Setting]:
        """The settings whose batches all fit in the first epoch, the largest batches first; at least the last."""
        settings = list(self.settings(job))
        if not self.capped:
            return settings
        fitting = [setting for setting in settings if self._fits(job, setting)]
        return fitting if fitting else settings[-1:]

    def _fits(self, job: Job, setting: Setting) -> bool:
        batches = chain.from_iterable(self.updates(job, 0, setting))
        return all(self._tokens(batch, job.lengths) <= job.tokens for batch in batches)

    def _tokens(self, batch: list[int], lengths: np.ndarray) -> int:
        if self.packed:
            return int(lengths[batch].sum())
        return padded_tokens([batch], lengths)


def _in_updates(batches: Iterable[list[int]], per_update: int) -> Iterator[Update]:
    """An update ends where the samples so far are nearest to a whole number of updates."""
    update: Update = []
    num_samples = 0
    num_due = per_update
    for batch in batches:
        if update and num_samples + len(batch) / 2 > num_due:
            yield update
            update = []
            num_due += per_update
        update.append(batch)
        num_samples += len(batch)
    yield update


def _updates(order: Any, job: Job) -> Iterator[np.ndarray]:
    """Whole updates in this order."""
    num_updates = len(order) // job.per_update
    for start in range(0, num_updates * job.per_update, job.per_update):
        yield order[start : start + job.per_update]


def _sizes(job: Job) -> list[Setting]:
    """Fixed numbers of samples, from those that seldom fit to a half of what always fits."""
    sizes = (8 * job.fixed, 4 * job.fixed, 2 * job.fixed, job.fixed, job.fixed // 2)
    return [{"size": size} for size in sizes if size > 0]


def _shuffled(job: Job, epoch: int, size: int = 0) -> Iterator[Update]:
    if size == 0:
        size = job.fixed
    for update in _updates(job.order(epoch), job):
        yield in_fixed(update, size)


def _sorted(job: Job, epoch: int, size: int = 0) -> Iterator[Update]:
    """The simplest rival: an update's samples by length, then batches of one size, or (0) as large as the cap allows."""
    for update in _updates(job.order(epoch), job):
        ordered = longest_first(update, job.lengths)
        yield in_fixed(ordered, size) if size else in_capped(ordered, job.lengths, job.tokens)


def group_by_length(lengths: np.ndarray, size: int, seed: int) -> list[int]:
    """The order that transformers' ``group_by_length`` gives updates of so many samples."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(seed)
    sampler = LengthGroupedSampler(size, lengths=lengths.tolist(), generator=generator)
    return list(sampler)


def _group_by_length(job: Job, epoch: int, size: int) -> Iterator[Update]:
    order = group_by_length(job.lengths, job.per_update, 1000 * job.seed + epoch)
    for update in _updates(order, job):
        yield in_fixed(update, size)


SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1, 3 / 2, 2)


def _counts(job: Job) -> list[Setting]:
    """Batches an update, from a quarter of the fixed ones to twice as many: it has no cap, so those are taken that fit."""
    counts = {round(job.accumulation * share) for share in SHARES}
    return [{"count": count} for count in sorted(counts) if 1 <= count <= job.per_update]


def _batch_rebalance(job: Job, epoch: int, count: int = 0) -> Iterator[Update]:
    """Its own balancing of the job's updates, into so many batches each, or (0) as many as fixed batches make."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    if count == 0:
        count = job.accumulation
    order = job.order(epoch)
    lengths = job.lengths[order].tolist()
    sampler = BatchRebalanceSampler(lengths, job.per_update, 1, count, shuffle=False)
    batches = [order[batch].tolist() for batch in sampler]
    return iter(in_fixed(batches, count))


def ours(
    layout: Any = "padded",
    *,
    grouping: int | None = None,
    knows_work: bool = True,
    few_shapes: bool = False,
) -> Callable[[Job, int], Iterator[Update]]:
    """With the work that was measured, or without a word of it."""

    def updates(job: Job, epoch: int) -> Iterator[Update]:
        budget: Any = TokenBudget(job.tokens, layout=layout)
        if few_shapes:
            budget = job.ladder if layout == "padded" else job.totals
        plan = planned(
            job.lengths,
            budget,
            epoch=epoch,
            work=job.work if knows_work else None,
            samples_per_update=job.per_update,
            order=job.order(epoch),
            seed=job.seed,
            grouping=grouping,
        )
        batches = [row[0] for row in plan.rows]
        stops = np.flatnonzero(plan.update_ends) + 1
        for start, stop in pairwise([0, *stops.tolist()]):
            yield batches[start:stop]

    return updates


def _free(job: Job, epoch: int) -> Update:
    budget = TokenBudget(job.tokens)
    plan = planned(job.lengths, budget, epoch=epoch, work=job.work, shuffle=True, seed=job.seed)
    return [row[0] for row in plan.rows]


def trl_packs(lengths: np.ndarray, cap: int, strategy: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """TRL's own packing of the whole set: of each pack the samples, and how many tokens of each."""
    import pyarrow as pa
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    samples = np.arange(len(lengths), dtype=np.int32)
    tokens = pa.array(np.repeat(samples, lengths))  # each token is its sample's number
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), tokens)
    dataset = Dataset(pa.table({"input_ids": column}))
    packs: Any = pack_dataset(dataset, seq_length=cap, strategy=strategy).with_format("numpy")
    return [np.unique(pack["input_ids"], return_counts=True) for pack in packs]


def _best_fit_packs(job: Job, epoch: int, cap: int) -> Update:
    packs = trl_packs(job.lengths, cap, "bfd")
    order = np.random.default_rng((job.seed, epoch)).permutation(len(packs))
    batches = []
    for place in order.tolist():
        samples, _num_tokens = packs[place]
        batches.append(samples.tolist())
    return batches


def _caps(job: Job) -> list[Setting]:
    longest = int(job.lengths.max())
    return [{"cap": max(job.tokens // part, longest)} for part in (1, 2, 4)]


def dynabatch(lengths: np.ndarray, size: int, **options: Any) -> Any:
    """Its sampler: batches that its regressor grows under the predicted memory of the first. Its features are tokens, words
    and characters: here words are 0.75 and characters 4 times the tokens."""
    from dynabatch.sampler import DynaBatchSampler

    words = (lengths * 0.75).astype(int).tolist()
    characters = (lengths * 4).tolist()
    return DynaBatchSampler(lengths.tolist(), words, characters, size, threshold=0.9, **options)


def _dynabatch(job: Job, epoch: int, max_batch_range: float) -> Update:
    sampler = dynabatch(
        job.lengths,
        job.fixed,
        shuffle=True,
        shuffle_seed=job.seed + epoch,
        max_batch_range=max_batch_range,
    )
    return [list(map(int, batch)) for batch in sampler]


def online_dynamic_batching(lengths: Any, tokens: int, waiting: int) -> Any:
    """Its loader with its default grouping, two workers, and so many samples that wait to be grouped."""
    import odb

    return odb.ODBDataLoader(
        Numbered(lengths),
        token_budget=tokens,
        batch_size=1,
        shuffle=True,
        num_workers=2,
        prefetch_factor=waiting // 2,
        collate_fn=collate,
    )


def _online_dynamic_batching(job: Job, epoch: int, waiting: int) -> Update:
    torch.manual_seed(1000 * job.seed + epoch)
    loader = online_dynamic_batching(job.lengths, job.tokens, waiting)
    return [numbers_of(batch) for batch in loader]


def _lhotse(job: Job, epoch: int, num_buckets: int) -> Update:
    """Its dynamic buckets of text under its constraint on tokens."""
    from lhotse.cut.text import TextExample
    from lhotse.dataset.sampling import DynamicBucketingSampler
    from lhotse.dataset.sampling.base import TokenConstraint

    examples = []
    for sample in job.order(epoch).tolist():  # drawn at random, as lazily read shards are
        content = np.zeros(job.lengths[sample], np.int8)
        examples.append(TextExample("", content, {"number": sample}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the examples are in memory
        sampler = DynamicBucketingSampler(
            examples,
            constraint=TokenConstraint(max_tokens=job.tokens),
            shuffle=True,
            seed=1000 * job.seed + epoch,
            world_size=1,
            rank=0,
            num_buckets=num_buckets,
        )
        return [_numbers(batch) for batch in sampler]


def _numbers(examples: Iterable[Any]) -> list[int]:
    return [example.custom["number"] for example in examples]


def _each(name: str, *values: Any) -> Callable[[Job], list[Setting]]:
    return lambda _job: [{name: value} for value in values]


def _size_or_cap(job: Job) -> list[Setting]:
    return [{"size": 0}, *_sizes(job)]


METHODS: dict[str, Method] = {
    "fixed": Method(_shuffled),
    "sorted inside the update": Method(_sorted, _size_or_cap),
    "transformers batch_rebalance": Method(_batch_rebalance, _counts),
    "transformers batch_rebalance, accumulation as given": Method(_batch_rebalance, capped=False),
    # fixed numbers of samples, flattened
    "TRL padding-free": Method(_shuffled, _sizes, packed=True),
    "transformers group_by_length": Method(_group_by_length, _sizes, same_updates=False),
    "TRL packing (bfd)": Method(
        _best_fit_packs,
        _caps,
        flat=True,
        packed=True,
        same_updates=False,
        needs=("trl", "pyarrow", "datasets"),
    ),
    "dynabatch": Method(
        _dynabatch,
        _each("max_batch_range", 4.0, 2.0),
        flat=True,
        same_updates=False,
        capped=False,
        needs=("dynabatch", "xgboost"),
    ),
    "online-dynamic-batching": Method(
        _online_dynamic_batching,
        _each("waiting", 1024, 256),
        flat=True,
        same_updates=False,
        needs=("odb",),
    ),
    "lhotse DynamicBucketingSampler": Method(
        _lhotse, _each("num_buckets", 10, 30), flat=True, same_updates=False, needs=("lhotse",)
    ),
    "dynagroup": Method(ours()),
    "dynagroup, nothing said of work": Method(ours(knows_work=False)),
    "dynagroup, packed": Method(ours("packed"), packed=True),
    "dynagroup, 8 lengths": Method(ours(few_shapes=True), few_shapes=True),
    "dynagroup, grouping 10": Method(ours(grouping=10), same_updates=False),
    "dynagroup, grouping 50": Method(ours(grouping=50), same_updates=False),
    "dynagroup, free updates": Method(_free, flat=True, same_updates=False),
}
