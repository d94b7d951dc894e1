"""Ways to form the batches of a training, each as a stream of optimizer updates: lists of batches of sample indices.

Each rival is used as its documentation says. All get the same memory: a padded batch holds at most ``tokens`` tokens, a
packed one at most as many; fixed batches hold as many of the longest samples as fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, count
from typing import Any

import numpy as np
import torch

from benchmarks.data import Numbered, collate, numbers_of
from dynagroup import Budget, LengthAwareBatchSampler, ShapeLadder, TokenBudget, Work
from dynagroup.plan.cost import CPU_PER_STEP

Update = list[list[int]]


def padded_tokens(batches: Any, lengths: np.ndarray) -> int:
    return sum(len(batch) * int(lengths[batch].max()) for batch in batches)


def in_fixed(order: Any, size: int) -> Update:
    """Batches of so many samples, in this order."""
    return [list(map(int, order[k : k + size])) for k in range(0, len(order), size)]


def planned(lengths: Any, budget: Budget, ranks: int = 1, **options: Any) -> Any:
    """Our plan for so many ranks."""
    return LengthAwareBatchSampler(lengths, budget, rank=0, world_size=ranks, **options).plan


@dataclass(frozen=True)
class Job:
    """Lengths, samples an update, tokens that fit a batch."""

    lengths: np.ndarray
    per_update: int
    tokens: int
    seed: int = 0
    work: Work = field(default_factory=Work)
    """What the model's steps take, measured beforehand where a benchmark does so."""

    @cached_property
    def ladder(self) -> ShapeLadder:
        """Eight shapes (samples, tokens) that fit."""
        return ShapeLadder(self.lengths, TokenBudget(self.tokens), num_shapes=8)

    @property
    def fixed(self) -> int:
        """Samples of a fixed batch that fits whatever comes."""
        return max(1, self.tokens // int(self.lengths.max()))

    def rng(self, epoch: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, epoch))


@dataclass(frozen=True)
class Method:
    """``batches``: one epoch's updates, or flat batches: then an update is as many as hold ``per_update`` samples on average.

    Args:
        same_updates: every update holds ``per_update`` samples drawn at random, as fixed batches would.
        few_shapes: batches are padded to the lengths of the job's ladder, so that a compiled model meets few of them.
        capped: batches hold at most the tokens they were given; dynabatch's are capped by its own prediction instead.
        needs: packages beyond transformers.
    """

    batches: Callable[[Job, int], Iterator[Update] | Update]
    flat: bool = False
    packed: bool = False
    same_updates: bool = True
    few_shapes: bool = False
    capped: bool = True
    needs: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        return all(find_spec(name) is not None for name in self.needs)

    def updates(self, job: Job, epoch: int) -> Iterator[Update]:
        found: Any = self.batches(job, epoch)
        if not self.flat:
            yield from found
            return
        size = max(1, round(job.per_update * len(found) / len(job.lengths)))
        for start in range(0, len(found), size):
            yield found[start : start + size]


def _fixed_updates(order: Any, job: Job) -> Iterator[Update]:
    for start in range(0, len(order) - job.per_update + 1, job.per_update):
        yield in_fixed(order[start : start + job.per_update], job.fixed)


def _shuffled(job: Job, epoch: int) -> Iterator[Update]:
    return _fixed_updates(job.rng(epoch).permutation(len(job.lengths)), job)


def group_by_length(lengths: np.ndarray, size: int, seed: int) -> list[int]:
    """The order that transformers' ``group_by_length`` gives batches of so many samples."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(seed)
    return list(LengthGroupedSampler(size, lengths=lengths.tolist(), generator=generator))


def _group_by_length(job: Job, epoch: int) -> Iterator[Update]:
    return _fixed_updates(group_by_length(job.lengths, job.per_update, 1000 * job.seed + epoch), job)


def _batch_rebalance(job: Job, epoch: int) -> Iterator[Update]:
    """It has no cap on memory: the number of batches an update is the least under which none of them is too large."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    accumulation = -(-job.per_update // job.fixed)
    for number in range(1, accumulation + 1):
        sampler = BatchRebalanceSampler(job.lengths.tolist(), job.per_update, 1, number, seed=job.seed)
        sampler.set_epoch(epoch)
        batches = [list(map(int, batch)) for batch in sampler]
        if number == accumulation or max(padded_tokens([batch], job.lengths) for batch in batches) <= job.tokens:
            break
    for start in range(0, len(batches), number):
        yield batches[start : start + number]


def _ours(layout: Any = "padded", **options: Any) -> Callable[[Job, int], Iterator[Update]]:
    def updates(job: Job, epoch: int) -> Iterator[Update]:
        options_ = {"samples_per_update": job.per_update, "work": job.work, "seed": job.seed, **options}
        size = job.ladder if layout == "ladder" else TokenBudget(job.tokens, layout=layout)
        sampler = LengthAwareBatchSampler(job.lengths, size, rank=0, world_size=1, **options_)
        sampler.set_epoch(epoch)
        update: Update = []
        for row, ends in zip(sampler.plan.rows, sampler.plan.update_ends, strict=True):
            update.append(row[0])
            if ends:
                yield update
                update = []

    return updates


def _free(job: Job, epoch: int) -> Update:
    sampler = LengthAwareBatchSampler(
        job.lengths, TokenBudget(job.tokens), shuffle=True, seed=job.seed, rank=0, world_size=1
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def trl_packs(lengths: np.ndarray, cap: int, strategy: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """TRL's own packing of the whole set: of each pack the samples, and how many tokens of each."""
    import pyarrow as pa
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    numbers = pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    rows = Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, numbers)}))
    packed = pack_dataset(rows, seq_length=cap, strategy=strategy).with_format("numpy")
    return [np.unique(row["input_ids"], return_counts=True) for row in packed]


def _best_fit_packs(job: Job, epoch: int) -> Update:
    packs = trl_packs(job.lengths, job.tokens, "bfd")
    return [packs[int(k)][0].tolist() for k in job.rng(epoch).permutation(len(packs))]


def dynabatch(lengths: np.ndarray, size: int, **options: Any) -> Any:
    """Its sampler: batches that its regressor grows under the predicted memory of the first. Its features are tokens, words
    and characters: here words are 0.75 and characters 4 times the tokens."""
    from dynabatch.sampler import DynaBatchSampler

    words, characters = (lengths * 0.75).astype(int).tolist(), (lengths * 4).tolist()
    return DynaBatchSampler(lengths.tolist(), words, characters, size, threshold=0.9, **options)


def _dynabatch(job: Job, epoch: int) -> Update:
    sampler = dynabatch(job.lengths, job.fixed, shuffle=True, shuffle_seed=job.seed + epoch)
    return [list(map(int, batch)) for batch in sampler]


def online_dynamic_batching(lengths: Any, tokens: int) -> Any:
    """Its loader with its default grouping, two workers and a window of 256 samples."""
    import odb

    how = {"batch_size": 1, "shuffle": True, "num_workers": 2, "prefetch_factor": 128, "collate_fn": collate}
    return odb.ODBDataLoader(Numbered(lengths), token_budget=tokens, **how)


def _online_dynamic_batching(job: Job, epoch: int) -> Update:
    torch.manual_seed(1000 * job.seed + epoch)
    return [numbers_of(batch) for batch in online_dynamic_batching(job.lengths, job.tokens)]


def _lhotse(job: Job, epoch: int) -> Update:
    """Its dynamic buckets of text under its constraint on tokens; of 10 buckets (its default) and 30, what pads less."""
    from lhotse.cut.text import TextExample
    from lhotse.dataset.sampling import DynamicBucketingSampler
    from lhotse.dataset.sampling.base import TokenConstraint

    examples = [TextExample("", np.zeros(n, np.int8), {"number": i}) for i, n in enumerate(job.lengths.tolist())]
    drawn = [examples[int(i)] for i in job.rng(epoch).permutation(len(examples))]  # as lazily read shards are
    how = {"shuffle": True, "seed": 1000 * job.seed + epoch, "world_size": 1, "rank": 0}
    tried = []
    for buckets in (10, 30):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that the examples are in memory
            fits = TokenConstraint(max_tokens=job.tokens)
            sampler = DynamicBucketingSampler(drawn, constraint=fits, num_buckets=buckets, **how)
            tried.append([[example.custom["number"] for example in batch] for batch in sampler])
    return min(tried, key=lambda batches: padded_tokens(batches, job.lengths))


METHODS: dict[str, Method] = {
    "fixed": Method(_shuffled),
    "transformers group_by_length": Method(_group_by_length, same_updates=False),
    "transformers batch_rebalance": Method(_batch_rebalance),
    "TRL padding-free": Method(_shuffled, packed=True),  # fixed numbers of samples, flattened
    "TRL packing (bfd)": Method(
        _best_fit_packs, flat=True, packed=True, same_updates=False, needs=("trl", "pyarrow", "datasets")
    ),
    "dynabatch": Method(_dynabatch, flat=True, same_updates=False, capped=False, needs=("dynabatch", "xgboost")),
    "online-dynamic-batching": Method(_online_dynamic_batching, flat=True, same_updates=False, needs=("odb",)),
    "lhotse DynamicBucketingSampler": Method(_lhotse, flat=True, same_updates=False, needs=("lhotse",)),
    "dynagroup": Method(_ours()),
    "dynagroup, default work": Method(_ours(work=Work())),
    "dynagroup, a CPU's work": Method(_ours(work=Work(per_step=CPU_PER_STEP))),
    "dynagroup, fewest batches": Method(_ours(work=Work(per_step=1e12))),
    "dynagroup, grouping 10": Method(_ours(grouping=10), same_updates=False),
    "dynagroup, grouping 50": Method(_ours(grouping=50), same_updates=False),
    "dynagroup, free updates": Method(_free, flat=True, same_updates=False),
    "dynagroup, packed": Method(_ours("packed"), packed=True),
    "dynagroup, 8 lengths": Method(_ours("ladder"), few_shapes=True),
}


def updates_of(name: str, job: Job) -> Iterator[Update]:
    """Updates of one epoch after another, without end."""
    return chain.from_iterable(METHODS[name].updates(job, epoch) for epoch in count())
