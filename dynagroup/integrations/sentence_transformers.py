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
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS
from dynagroup.text.measure import measure_lengths


class _Sampler(LengthAwareBatchSampler):
    """Has the attributes that sentence-transformers reads when it trains on several data sets."""

    drop_last = False

    def __init__(self, lengths: Any, budget: Any, *, usual_size: int, **settings: Any) -> None:
        super().__init__(lengths, budget, **settings)
        self._usual_size = usual_size

    @property
    def batch_size(self) -> int:
        """The batch size of the training arguments, which one process only shows. On several ranks accelerate must not
        read a number, because it would take it for the size of every batch."""
        ranks = self._rank_and_size()[1]
        if ranks == 1:
            return self._usual_size
        raise AttributeError(
            f"batches_that_fit takes one data set on several ranks ({ranks}); for several data sets "
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
    budget: Any,
    tokenizer: Any,
    max_length: int | None,
    settings: Mapping[str, Any],
    dataset: Any,
    batch_size: int = 1,
    valid_label_columns: Sequence[str] | None = None,
    seed: int = 0,
    **_: Any,
) -> LengthAwareBatchSampler:
    """Makes the sampler; ``**_`` are drop_last and generator, which it does not need."""
    kinds = {name: getattr(kind, "dtype", None) for name, kind in dataset.features.items()}
    unread = {*(valid_label_columns or ()), "dataset_name"}
    columns = [
        name
        for name, kind in kinds.items()
        if kind in ("string", "large_string") and name not in unread
    ]
    if not columns:
        raise ConfigError(f"the dataset must have a text column, but has only {list(kinds)}")
    # The first column is named "tokens", which every budget knows; another column of that name gets another one.
    lengths: dict[str, Any] = {}
    for column in columns:
        name = TOKENS if not lengths else column
        while name in lengths:
            name = f"{name}_"
        lengths[name] = measure_lengths(dataset, tokenizer, column, max_length)
    # accelerate runs batch k on rank k % W, so the sampler yields the batches of all ranks. transformers asks for
    # their number only once, so every epoch has the same batches, of one random order, in another sequence.
    order = Random(seed).sample(range(len(dataset)), len(dataset))
    ranks = rank_and_size()[1]
    usual: Any = {"shuffle": True, "seed": seed, "order": order, "window": len(dataset)}
    ours: Any = {"rank": None, "world_size": ranks, "usual_size": batch_size}
    kind = _SameEveryEpoch if ranks > 1 else _Sampler
    return kind(lengths, budget, **(usual | settings | ours))
