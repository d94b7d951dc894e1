"""Makes ``batch_sampler`` of ``SentenceTransformerTrainingArguments`` from a budget, for batches that fit.

Use it only for losses of single samples or pairs (cosine similarity, mean squared error, softmax, margins). A
contrastive loss (multiple negatives ranking, CoSENT) compares the samples of a batch, so keep fixed batches for it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.distributed import rank_and_size
from dynagroup.errors import ConfigError
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS
from dynagroup.text.measure import measure_lengths


class _Sampler(LengthAwareBatchSampler):
    """Has the attributes that sentence-transformers reads when it trains on several data sets."""

    drop_last = False
    usual_size: int
    """The batch size of the training arguments."""

    @property
    def batch_size(self) -> int:
        """:attr:`usual_size`, which one process only shows. On several ranks accelerate must not read a number, because
        it would take it for the size of every batch."""
        _, num_ranks = self._rank_and_size()
        if num_ranks == 1:
            return self.usual_size
        raise AttributeError(
            f"batches_that_fit takes one data set on several ranks ({num_ranks}); for several data sets "
            "train on one rank, or leave `batch_sampler` out"
        )


class _SameEveryEpoch(_Sampler):
    """Has its batches in one sequence: on several ranks, accelerate hides the epoch from a sampler that is resumed."""

    def _choose(self, epoch: int) -> None:
        super()._choose(0)


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
    budget: Budget | int,
    tokenizer: Callable[..., Any],
    max_length: int | None,
    settings: Mapping[str, Any],
    dataset: Any,
    batch_size: int = 1,
    valid_label_columns: Sequence[str] | None = None,
    seed: int = 0,
    **_: object,
) -> LengthAwareBatchSampler:
    """Makes the sampler; ``**_`` are drop_last and generator, which it does not need."""
    # The first column is named "tokens", which every budget knows; another column of that name gets another one.
    lengths: dict[str, NDArray[np.int32]] = {}
    for column in _text_columns(dataset, valid_label_columns or ()):
        name = column if lengths else TOKENS
        while name in lengths:
            name = f"{name}_"
        lengths[name] = measure_lengths(dataset, tokenizer, column, max_length)
    # accelerate runs batch k on rank k % W, so the sampler yields the batches of all ranks. transformers asks for
    # their number only once, so every epoch has the same batches, of one random order, in another sequence.
    num_ranks = rank_and_size()[1]
    num_samples = len(dataset)
    arguments: dict[str, Any] = {
        "shuffle": True,
        "seed": seed,
        "order": Random(seed).sample(range(num_samples), num_samples),
        "window": num_samples,
    }
    arguments.update(settings)
    arguments.update(rank=None, world_size=num_ranks)
    sampler_class = _SameEveryEpoch if num_ranks > 1 else _Sampler
    sampler = sampler_class(lengths, budget, **arguments)
    sampler.usual_size = batch_size
    return sampler


def _text_columns(dataset: Any, label_columns: Sequence[str]) -> list[str]:
    """Returns the columns of texts that the model reads. ConfigError: there are none.

    With several data sets, sentence-transformers adds a column ``dataset_name``, which the model does not read.
    """
    kinds = {name: getattr(kind, "dtype", None) for name, kind in dataset.features.items()}
    columns = []
    for name, kind in kinds.items():
        is_text = kind in ("string", "large_string")
        if is_text and name not in label_columns and name != "dataset_name":
            columns.append(name)
    if not columns:
        raise ConfigError(f"the dataset must have a text column, but has only {list(kinds)}")
    return columns
