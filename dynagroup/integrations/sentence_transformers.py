"""Makes ``batch_sampler`` of ``SentenceTransformerTrainingArguments`` from a budget, for batches that fit.

Use it only for losses of single samples or pairs (cosine similarity, mean squared error, softmax, margins). A
contrastive loss (multiple negatives ranking, CoSENT) compares the samples of a batch, so keep fixed batches for it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.distributed import rank_and_size
from dynagroup.errors import ConfigError
from dynagroup.lengths import measure_lengths
from dynagroup.plan.sampler import LengthAwareBatchSampler


class _SameEveryEpoch(LengthAwareBatchSampler):
    """Has its batches in one sequence: on several ranks, accelerate hides the epoch from a sampler that is resumed."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(0)


def batches_that_fit(
    budget: Budget | int,
    tokenizer: Callable[..., Any],
    *,
    max_length: int | None = None,
    **settings: Any,
) -> Callable[..., LengthAwareBatchSampler]:
    """Returns the value for ``SentenceTransformerTrainingArguments(batch_sampler=...)``.

    Args:
        budget: limit of a batch. Every text column is padded separately, and counts.
        tokenizer: the model's, e.g. ``model.tokenizer``; texts are truncated to ``max_length`` tokens, as by the model.
        settings: further settings of :class:`~dynagroup.LengthAwareBatchSampler`, e.g. ``window``.
    """
    return partial(_sampler, budget, tokenizer, max_length, settings)


def _sampler(
    budget: Any,
    tokenizer: Any,
    max_length: int | None,
    settings: Mapping[str, Any],
    dataset: Any,
    valid_label_columns: Sequence[str] | None = None,
    seed: int = 0,
    **_: Any,
) -> LengthAwareBatchSampler:
    """Makes the sampler; ``**_`` are batch size, drop_last and generator, which it does not need."""
    kinds = {name: getattr(kind, "dtype", None) for name, kind in dataset.features.items()}
    unread = {*(valid_label_columns or ()), "dataset_name"}
    columns = [
        name
        for name, kind in kinds.items()
        if kind in ("string", "large_string") and name not in unread
    ]
    if not columns:
        raise ConfigError(f"the dataset must have a text column, but has only {list(kinds)}")
    # The first column is named "tokens", which every budget knows.
    measured = (measure_lengths(dataset, tokenizer, name, max_length) for name in columns)
    lengths = dict(zip(["tokens", *columns[1:]], measured, strict=True))
    # accelerate runs batch k on rank k % W, so the sampler yields the batches of all ranks. transformers asks for
    # their number only once, so every epoch has the same batches, of one random order, in another sequence.
    order = Random(seed).sample(range(len(dataset)), len(dataset))
    how: Any = {"shuffle": True, "seed": seed, "order": order, "window": len(dataset), **settings}
    made = _SameEveryEpoch if (ranks := rank_and_size()[1]) > 1 else LengthAwareBatchSampler
    return made(lengths, budget, **{**how, "rank": None, "world_size": ranks})
