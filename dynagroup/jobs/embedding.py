"""Embeds every text of a dataset, or each of its tokens."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import RAGGED, VECTORS
from dynagroup.jobs.run import Job, all_results, results_as_they_come
from dynagroup.jobs.sentences import SentenceJob, is_sentence_transformer
from dynagroup.jobs.texts import (
    Batch,
    Encoded,
    Task,
    TokenizedJob,
    check_tokens,
    output_of,
    without_padding,
    without_wrapper,
)
from dynagroup.validation import check_choice

Pooling: TypeAlias = Literal["auto", "mean", "first", "last"]


def embed_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    pooling: Pooling | None = "auto",
    normalize: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> Any:
    """Returns one vector per text, float32 (num_texts, features): last hidden states, pooled over the tokens.

    Args:
        model: an encoder or a causal model; only the part before its head is run (``model.base_model``). Or a
            ``SentenceTransformer``, which runs all its own modules: the vectors are those of ``model.encode(texts)``.
        tokenizer: the model's; None for a ``SentenceTransformer``.
        texts: sequence of str, or of pairs of str, which the tokenizer joins.
        pooling: "mean" over the text's tokens, or the "first" or "last" token. "auto": "mean", or a
            ``SentenceTransformer``'s own. None: the result is a list with one array (num_tokens, features) per text, of
            all tokens that the tokenizer makes.
        normalize: True scales vectors to length 1.
        output: path of a ``.npy`` file. With ``pooling=None`` it has all tokens of all texts, and the file with the
            ending ``.offsets.npy`` says where each text begins; results are then mapped from the file, and read-only. Or
            a ``.parquet`` file with a list of lists per text. ``output``, ``world`` and errors are as in
            :func:`generate_dataset`.
        options: as in :func:`generate_dataset`, but texts are truncated to what model and tokenizer accept (logged).
            ``shapes``: int, largest number of shapes (samples, tokens) that a compiled model sees.

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    job = _embedding(model, tokenizer, texts, pooling, normalize, options)
    return all_results(job, output, world)


def iter_embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    pooling: Pooling | None = "auto",
    normalize: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index, vector) like :func:`embed_dataset`, longest texts first, without those in ``skip``."""
    job = _embedding(model, tokenizer, texts, pooling, normalize, options)
    return results_as_they_come(job, skip)


def _embedding(
    model: Any,
    tokenizer: Any,
    texts: Any,
    pooling: Pooling | None,
    normalize: bool,
    options: Mapping[str, Any],
) -> Job:
    check_choice("pooling", pooling, ("auto", "mean", "first", "last", None))
    if is_sentence_transformer(model):
        if pooling not in ("auto", None) or tokenizer is not None:
            raise ConfigError(
                "a SentenceTransformer has its own tokenizer and pooling; leave `pooling` out, and pass None as tokenizer"
            )
        return SentenceJob(model, texts, options, normalize=normalize, per_token=pooling is None)
    how = "mean" if pooling == "auto" else pooling
    encoder = model
    inner = without_wrapper(model)
    if inner is not None:
        encoder = inner.base_model if hasattr(inner, "base_model_prefix") else inner
    _check_encoder(encoder, model)

    def run(batch: Batch, encoded: Encoded) -> np.ndarray | list[np.ndarray]:
        way_out = "give the model without its head, as AutoModel loads it"
        states = output_of(encoder, batch, "last_hidden_state", way_out)
        return _vectors(states, batch["attention_mask"], how, normalize)

    task = Task(
        run=run,
        settings={"task": f"embed {how}", "normalize": int(normalize)},
        formats=RAGGED if how is None else (VECTORS,),
    )
    return TokenizedJob(encoder, tokenizer, texts, task, options)


def _check_encoder(encoder: object, model: object) -> None:
    if hasattr(encoder, "encoder") and hasattr(encoder, "decoder"):
        raise ConfigError(
            f"a {type(model).__name__} returns its decoder's hidden states; pass model.get_encoder()"
        )


def _vectors(
    states: torch.Tensor, mask: torch.Tensor, pooling: str | None, normalize: bool
) -> np.ndarray | list[np.ndarray]:
    """Returns the vector of each text, or with ``pooling=None`` those of its tokens."""
    check_tokens(states, mask)
    vectors = states if pooling is None else _pool(states, mask, pooling)
    if normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return without_padding(vectors, mask) if pooling is None else vectors.cpu().numpy()


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pools hidden states (samples, tokens, features) to float32 (samples, features); rows are padded on the right."""
    num_tokens = mask.sum(1).clamp(min=1)
    if pooling == "mean":  # summed in float32, because bfloat16 cannot count beyond 256
        shown = states * mask.unsqueeze(-1).to(states.dtype)
        return shown.sum(1, dtype=torch.float32) / num_tokens.unsqueeze(-1)
    position = torch.zeros_like(num_tokens) if pooling == "first" else num_tokens - 1
    rows = torch.arange(len(states), device=states.device)
    return states[rows, position].float()
