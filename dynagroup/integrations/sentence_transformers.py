"""Batches that fit for ``SentenceTransformerTrainer``: a callable for its ``args.batch_sampler``.

Only for losses of single samples or pairs (cosine similarity, mean squared error, softmax, margins, a cross-encoder's binary
cross-entropy). A contrastive loss (multiple negatives ranking, CoSENT, triplets mined in a batch) compares the samples of a batch
with each other: its batch size is part of the loss, and samples of one length make easy negatives. Keep fixed batches for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.distributed import rank_and_size
from dynagroup.errors import ConfigError
from dynagroup.lengths import measure_lengths
from dynagroup.plan.sampler import LengthAwareBatchSampler

__all__ = ["batches_that_fit"]


def batches_that_fit(
    budget: Budget | int, tokenizer: Callable[..., Any], *, max_length: int | None = None, **settings: Any
) -> Callable[..., LengthAwareBatchSampler]:
    """What to set as ``SentenceTransformerTrainingArguments(batch_sampler=...)``.

    Args:
        budget: what a batch may be. Every text column is padded by itself and counts.
        tokenizer: the model's, e.g. ``model.tokenizer``; texts longer than ``max_length`` are truncated, as the model does.
        settings: further ones of :class:`~dynagroup.LengthAwareBatchSampler`, e.g. ``window``.

    Raises:
        ConfigError: when the Trainer calls it: the dataset has no text column.
    """

    def sampler(
        dataset: Any,
        batch_size: int = 0,
        drop_last: bool = False,
        valid_label_columns: Sequence[str] | None = None,
        generator: Any = None,
        seed: int = 0,
    ) -> LengthAwareBatchSampler:
        columns = _text_columns(dataset, valid_label_columns or ())
        names = ["tokens", *columns[1:]]  # the first column is the stream that every budget knows
        lengths: Mapping[str, Any] = {
            name: measure_lengths(dataset, tokenizer, column, max_length)
            for name, column in zip(names, columns, strict=True)
        }
        # accelerate gives batch k to rank k % W; it needs the batches of all ranks.
        return LengthAwareBatchSampler(
            lengths, budget, **{"shuffle": True, "seed": seed, **settings}, rank=None, world_size=rank_and_size()[1]
        )

    return sampler


def _text_columns(dataset: Any, labels: Sequence[str]) -> list[str]:
    texts = [
        name
        for name, kind in dataset.features.items()
        if getattr(kind, "dtype", None) in ("string", "large_string") and name not in labels and name != "dataset_name"
    ]
    if not texts:
        raise ConfigError(f"the dataset has no text column among {list(dataset.features)}")
    return texts
