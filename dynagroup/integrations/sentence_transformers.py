"""Batches that fit for ``SentenceTransformerTrainer``: a callable for its ``args.batch_sampler``.

Only for losses of single samples or pairs (cosine similarity, mean squared error, softmax, margins). A contrastive loss (multiple
negatives ranking, CoSENT) compares the samples of a batch with each other: keep fixed batches for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.distributed import rank_and_size
from dynagroup.errors import ConfigError
from dynagroup.lengths import measure_lengths
from dynagroup.plan.sampler import LengthAwareBatchSampler


def batches_that_fit(
    budget: Budget | int, tokenizer: Callable[..., Any], *, max_length: int | None = None, **settings: Any
) -> Callable[..., LengthAwareBatchSampler]:
    """The value of ``SentenceTransformerTrainingArguments(batch_sampler=...)``.

    Args:
        budget: limit of a batch. Every text column is padded by itself and counts.
        tokenizer: the model's, e.g. ``model.tokenizer``; texts over ``max_length`` are truncated, as by the model.
        settings: further settings of :class:`~dynagroup.LengthAwareBatchSampler`, e.g. ``window``.
    """

    def sampler(dataset: Any, valid_label_columns: Sequence[str] | None = None, seed: int = 0, **_: Any) -> Any:
        """``**_``: batch size, dropping of the last batch, and generator, which are not needed."""
        kinds = {name: getattr(kind, "dtype", None) for name, kind in dataset.features.items()}
        unread = {*(valid_label_columns or ()), "dataset_name"}
        columns = [name for name, kind in kinds.items() if kind in ("string", "large_string") and name not in unread]
        if not columns:
            raise ConfigError(f"the dataset has no text column among {list(kinds)}")
        # The first column is the stream that every budget knows.
        lengths: Mapping[str, Any] = {
            name if number else "tokens": measure_lengths(dataset, tokenizer, name, max_length)
            for number, name in enumerate(columns)
        }
        # accelerate gives batch k to rank k % W; it needs the batches of all ranks.
        how: Any = {"shuffle": True, "seed": seed, **settings, "rank": None, "world_size": rank_and_size()[1]}
        return LengthAwareBatchSampler(lengths, budget, **how)

    return sampler
