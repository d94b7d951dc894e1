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
from typing import Any

import numpy as np

from dynagroup import LengthAwareBatchSampler, ShapeLadder, TokenBudget
from dynagroup.budget.base import Budget
from dynagroup.plan.cost import CPU_PER_STEP, Work

__all__ = ["METHODS", "Job", "Method", "updates_of"]

Update = list[list[int]]


@dataclass(frozen=True)
class Job:
    """Lengths, samples an update, tokens that fit a batch."""

    lengths: np.ndarray
    per_update: int
    tokens: int
    seed: int = 0
    plain_tokens: int | None = None
    """Tokens that fit a batch without gradient checkpointing, where ``tokens`` do with it; None: nothing is recomputed."""
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


@dataclass(frozen=True)
class Method:
    """``same_updates``: every update holds ``per_update`` samples drawn at random, as fixed batches would."""

    updates: Callable[[Job, int], Iterator[Update]]
    packed: bool = False
    same_updates: bool = True
    few_shapes: bool = False
    """Batches are padded to the lengths of the job's ladder, so that a compiled model meets few of them."""
    capped: bool = True
    """Batches hold at most the tokens they were given; dynabatch's are capped by its own prediction instead."""
    needs: str | None = None
    """A package beyond transformers."""

    @property
    def available(self) -> bool:
        return self.needs is None or find_spec(self.needs) is not None


def _in_fixed(indices: Any, size: int) -> Update:
    return [list(map(int, indices[k : k + size])) for k in range(0, len(indices), size)]


def _shuffled(job: Job, epoch: int) -> Iterator[Update]:
    order = np.random.default_rng((job.seed, epoch)).permutation(len(job.lengths))
    for start in range(0, len(order) - job.per_update + 1, job.per_update):
        yield _in_fixed(order[start : start + job.per_update], job.fixed)


def _group_by_length(job: Job, epoch: int) -> Iterator[Update]:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(1000 * job.seed + epoch)
    order = list(LengthGroupedSampler(job.per_update, lengths=job.lengths.tolist(), generator=generator))
    for start in range(0, len(order) - job.per_update + 1, job.per_update):
        yield _in_fixed(order[start : start + job.per_update], job.fixed)


def _batch_rebalance(job: Job, epoch: int) -> Iterator[Update]:
    """It has no cap on memory: the number of batches an update is the least under which none of them is too large."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    accumulation = -(-job.per_update // job.fixed)
    for count in range(1, accumulation + 1):
        sampler = BatchRebalanceSampler(job.lengths.tolist(), job.per_update, 1, count, seed=job.seed)
        sampler.set_epoch(epoch)
        batches = [list(map(int, batch)) for batch in sampler]
        if count == accumulation or max(len(b) * int(job.lengths[b].max()) for b in batches) <= job.tokens:
            break
    for start in range(0, len(batches), count):
        yield batches[start : start + count]


def _planned(
    layout: Any = "padded", budget: Budget | None = None, **options: Any
) -> Callable[[Job, int], Iterator[Update]]:
    def updates(job: Job, epoch: int) -> Iterator[Update]:
        sampler = LengthAwareBatchSampler(
            job.lengths,
            TokenBudget(job.tokens, layout=layout) if budget is None else budget,
            samples_per_update=job.per_update,
            seed=job.seed,
            rank=0,
            world_size=1,
            **{"work": job.work, **options},
        )
        sampler.set_epoch(epoch)
        plan = sampler.plan
        update: Update = []
        for row, ends in zip(plan.rows, plan.update_ends, strict=True):
            update.append(row[0])
            if ends:
                yield update
                update = []

    return updates


def _free(job: Job, epoch: int) -> Iterator[Update]:
    sampler = LengthAwareBatchSampler(
        job.lengths, TokenBudget(job.tokens), shuffle=True, seed=job.seed, rank=0, world_size=1
    )
    sampler.set_epoch(epoch)
    yield from _grouped(list(sampler), job)


def _padding_free(job: Job, epoch: int) -> Iterator[Update]:
    """Fixed numbers of samples, flattened: TRL's ``padding_free=True``."""
    return _shuffled(job, epoch)


def _best_fit_packs(job: Job, epoch: int) -> Iterator[Update]:
    """Whole-set best-fit decreasing into packs of ``tokens``, one pack a batch: TRL's ``packing_strategy="bfd"``, by its
    description; an update is as many packs as hold ``per_update`` samples on average."""
    free: list[int] = []
    packs: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    for index in np.argsort(-job.lengths, kind="stable").tolist():
        need = int(min(job.lengths[index], job.tokens))
        space = min((s for s in by_space if s >= need and by_space[s]), default=None)
        if space is None:
            packs.append([])
            free.append(job.tokens)
            number = len(packs) - 1
        else:
            number = by_space[space].pop()
            if not by_space[space]:
                del by_space[space]
        packs[number].append(index)
        free[number] -= need
        by_space.setdefault(free[number], []).append(number)
    order = np.random.default_rng((job.seed, epoch)).permutation(len(packs))
    yield from _grouped([packs[int(k)] for k in order], job)


def _dynabatch(job: Job, epoch: int) -> Iterator[Update]:
    """Batches that its regressor grows under the predicted memory of the first; an update is as many of them as hold
    ``per_update`` samples on average. Its features are tokens, words and characters: here words are 0.75 and characters 4
    times the tokens."""
    from dynabatch.sampler import DynaBatchSampler

    words, characters = (job.lengths * 0.75).astype(int).tolist(), (job.lengths * 4).tolist()
    sampler = DynaBatchSampler(
        job.lengths.tolist(), words, characters, job.fixed, shuffle=True, threshold=0.9, shuffle_seed=job.seed + epoch
    )
    yield from _grouped([list(map(int, batch)) for batch in sampler], job)


def _online_dynamic_batching(job: Job, epoch: int) -> Iterator[Update]:
    """Its loader with its default grouping, two workers and a window of 256 samples; read as indices."""
    import odb
    import torch

    torch.manual_seed(1000 * job.seed + epoch)
    loader = odb.ODBDataLoader(
        _Numbered(job.lengths), token_budget=job.tokens, batch_size=1, shuffle=True, num_workers=2, prefetch_factor=128,
        collate_fn=_numbers,
    )  # fmt: skip
    yield from _grouped([batch["number"].tolist() for batch in loader], job)


def _lhotse(job: Job, epoch: int) -> Iterator[Update]:
    """Its dynamic buckets of text under its constraint on tokens; of 10 buckets (its default) and 30, what pads less."""
    from lhotse.cut.text import TextExample
    from lhotse.dataset.sampling import DynamicBucketingSampler
    from lhotse.dataset.sampling.base import TokenConstraint

    examples = [TextExample("", np.zeros(n, np.int8), {"number": i}) for i, n in enumerate(job.lengths.tolist())]
    order = np.random.default_rng((job.seed, epoch)).permutation(
        len(examples)
    )  # as lazily read shards are, before buckets
    tried = []
    for buckets in (10, 30):
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="You are using DynamicBucketingSampler with an eagerly read CutSet"
            )
            sampler = DynamicBucketingSampler(
                [examples[int(i)] for i in order], constraint=TokenConstraint(max_tokens=job.tokens), num_buckets=buckets,
                shuffle=True, seed=1000 * job.seed + epoch, world_size=1, rank=0,
            )  # fmt: skip
            tried.append([[example.custom["number"] for example in batch] for batch in sampler])
    yield from _grouped(min(tried, key=lambda batches: _padded_tokens(batches, job)), job)


def _padded_tokens(batches: Update, job: Job) -> int:
    return sum(len(batch) * int(job.lengths[batch].max()) for batch in batches)


def _few_shapes(job: Job, epoch: int) -> Iterator[Update]:
    """Whole updates cut to the shapes of a ladder; what runs them pads batches to these lengths."""
    yield from _planned(budget=job.ladder)(job, epoch)


class _Numbered:
    """Samples that know their number."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"input_ids": torch.ones(int(self.lengths[index]), dtype=torch.int64), "number": index}


def _numbers(samples: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": ids, "number": torch.tensor([s["number"] for s in samples])}


def _grouped(batches: Update, job: Job) -> Iterator[Update]:
    size = max(1, round(job.per_update * len(batches) / len(job.lengths)))
    for start in range(0, len(batches), size):
        yield batches[start : start + size]


METHODS: dict[str, Method] = {
    "fixed": Method(_shuffled),
    "transformers group_by_length": Method(_group_by_length, same_updates=False),
    "transformers batch_rebalance": Method(_batch_rebalance),
    "TRL padding-free": Method(_padding_free, packed=True),
    "TRL packing (bfd)": Method(_best_fit_packs, packed=True, same_updates=False),
    "dynabatch": Method(_dynabatch, same_updates=False, capped=False, needs="dynabatch"),
    "online-dynamic-batching": Method(_online_dynamic_batching, same_updates=False, needs="odb"),
    "lhotse DynamicBucketingSampler": Method(_lhotse, same_updates=False, needs="lhotse"),
    "dynagroup": Method(_planned()),
    "dynagroup, default work": Method(_planned(work=Work())),
    "dynagroup, a CPU's work": Method(_planned(work=Work(per_step=CPU_PER_STEP))),
    "dynagroup, fewest batches": Method(_planned(objective="fewest")),
    "dynagroup, free updates": Method(_free, same_updates=False),
    "dynagroup, packed": Method(_planned("packed"), packed=True),
    "dynagroup, 8 lengths": Method(_few_shapes, few_shapes=True),
}


def updates_of(name: str, job: Job, method: Method | None = None) -> Iterator[Update]:
    """Updates of one epoch after another, without end. ``method``: one that :data:`METHODS` does not list."""
    epoch = 0
    while True:
        found = False
        for update in (method or METHODS[name]).updates(job, epoch):
            found = True
            yield update
        if not found:
            raise ValueError(f"{name} makes no update of {job.per_update} samples")
        epoch += 1
