"""A whole dataset through a model: planned, safe from running out of memory, and from crashes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import World
from dynagroup.oom.tasks import Common, Pooling, classification, embedding, generation

__all__ = [
    "classify_dataset",
    "embed_dataset",
    "generate_dataset",
    "iter_classify",
    "iter_embed",
    "iter_generate",
]


def generate_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    progress: bool = True,
    world: World | None = None,
    learned: LearningBudget | None = None,
    **generate_kwargs: Any,
) -> list[Any]:
    """Generate for every text: what a loop over ``model.generate`` gives, in fewer and fuller batches.

    Batches are planned by length, longest first. One that does not fit after all is split, and the rest is planned again
    with what that taught. Under ``torchrun`` every rank takes its share; all return all results.

    Args:
        model: a transformers model that generates, where it is to run.
        tokenizer: the model's.
        texts: a sequence of strings.
        batch_size: samples of the longest kind that fit the device; other batches hold more (:class:`~dynagroup.MemoryBudget`).
        budget: what fits, instead of ``batch_size``.
        output: a ``.jsonl`` or ``.parquet`` file, one row a text in input order. Finished samples are kept beside it as
            they come, so that the same call after a crash does only the rest, and once all is done gives it back. Needed on
            several ranks.
        max_length: longer texts are truncated to so many tokens.
        max_new_tokens: tokens generated for a text, at most; default: the generation config's, else 128.
        progress: show samples and tokens a second, and the time left.
        world: ranks that share the work; default: all of ``torch.distributed``, which then wait for each other however
            long it takes.
        learned: what to learn into; its report says what running out of memory has cost.
        generate_kwargs: further arguments of ``generate``.

    Returns:
        The generated texts without their prompts, in input order; lists of them with ``num_return_sequences`` above 1.

    Raises:
        ConfigError: arguments that do not go together; a text that the model has no positions for.
        StateError: ``output``, or what was kept beside it, is of another job or damaged: says what differs, or which file.
        BudgetError: a text does not fit even alone; names it.

    >>> answers = generate_dataset(model, tokenizer, texts, max_new_tokens=64, output="answers.jsonl")  # doctest: +SKIP
    """
    job = generation(
        model, tokenizer, texts, Common(batch_size, budget, max_length, progress), max_new_tokens, learned, generate_kwargs
    )  # fmt: skip
    return job.whole(output, world)


def iter_generate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    progress: bool = True,
    skip: Collection[int] = (),
    learned: LearningBudget | None = None,
    **generate_kwargs: Any,
) -> Iterator[tuple[int, Any]]:
    """(index, result) as they come, longest texts first; nothing is kept. Arguments as for :func:`generate_dataset`.

    Args:
        skip: indices of texts that are done already.
    """
    job = generation(
        model, tokenizer, texts, Common(batch_size, budget, max_length, progress), max_new_tokens, learned, generate_kwargs
    )  # fmt: skip
    return job.as_they_come(skip)


def embed_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    batch_size: int = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    progress: bool = True,
    world: World | None = None,
) -> np.ndarray:
    """One vector a text, float32 (num_texts, features): the last hidden states, pooled over the text's tokens.

    Arguments as for :func:`generate_dataset`; ``output`` may also be a ``.npy`` file.

    Args:
        model: an encoder, or a causal model; of one with a head the part before it (``model.base_model``) is run.
        pooling: "mean" over the text's tokens, or the "first" or "last" of them.
        normalize: scale vectors to length 1.
        max_length: longer texts are truncated to so many tokens; default: to what model and tokenizer are made for (how many
            texts that shortens is logged).

    Raises:
        ConfigError: as there; or the model gives no hidden states.

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    common = Common(batch_size, budget, max_length, progress)
    return embedding(model, tokenizer, texts, common, pooling, normalize).whole(output, world)


def iter_embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    batch_size: int = 16,
    budget: Budget | None = None,
    max_length: int | None = None,
    progress: bool = True,
    skip: Collection[int] = (),
) -> Iterator[tuple[int, np.ndarray]]:
    """(index, float32 vector) as they come, longest texts first; nothing is kept. Arguments as for :func:`embed_dataset`.

    Args:
        skip: indices of texts that are done already.

    >>> vectors = {index: vector for index, vector in iter_embed(model, tokenizer, texts)}  # doctest: +SKIP
    """
    common = Common(batch_size, budget, max_length, progress)
    return embedding(model, tokenizer, texts, common, pooling, normalize).as_they_come(skip)


def classify_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    progress: bool = True,
    world: World | None = None,
) -> np.ndarray:
    """The logits of a sequence classifier, float32 (num_texts, classes). Arguments as for :func:`embed_dataset`."""
    return classification(model, tokenizer, texts, Common(batch_size, budget, max_length, progress)).whole(
        output, world
    )


def iter_classify(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    max_length: int | None = None,
    progress: bool = True,
    skip: Collection[int] = (),
) -> Iterator[tuple[int, np.ndarray]]:
    """(index, float32 logits) as they come, longest texts first; nothing is kept. Arguments as for :func:`iter_embed`."""
    return classification(model, tokenizer, texts, Common(batch_size, budget, max_length, progress)).as_they_come(skip)
