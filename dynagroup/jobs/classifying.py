"""Classifies every text or pair of a dataset, or each of its tokens."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import JSON_LINES, RAGGED, VECTORS, Format
from dynagroup.jobs.run import Job, all_results, results_as_they_come
from dynagroup.jobs.texts import Batch, Encoded, Task, TokenizedJob, output_of, without_padding


def classify_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    per_token: bool = False,
    return_offsets: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> Any:
    """Returns a classifier's logits, float32 (num_texts, classes); other arguments are as in :func:`embed_dataset`.

    Args:
        texts: sequence of str, or of pairs of str, such as (query, document) for a cross-encoder.
        per_token: True for a token classifier: the result is a list with one array (num_tokens, classes) per text, of
            all tokens that the tokenizer makes. Files are those of ``embed_dataset(pooling=None)``.
        return_offsets: True, for a token classifier: the result is a list with one list per text. Each entry is a token,
            without special tokens: ``{"label": ..., "score": ..., "start": ..., "end": ...}``, with the characters of
            the text from ``start`` to before ``end``. The output file is then a ``.jsonl`` file.

    >>> entities = classify_dataset(model, tokenizer, texts, return_offsets=True)  # doctest: +SKIP
    >>> entities[0][0]  # doctest: +SKIP
    {'label': 'PER', 'score': 0.98, 'start': 0, 'end': 4}
    """
    job = _classification(model, tokenizer, texts, per_token, return_offsets, options)
    return all_results(job, output, world)


def iter_classify(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    per_token: bool = False,
    return_offsets: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, Any]]:
    """Yields (index, logits) like :func:`classify_dataset`, longest texts first, without those in ``skip``."""
    job = _classification(model, tokenizer, texts, per_token, return_offsets, options)
    return results_as_they_come(job, skip)


def _classification(
    model: Any,
    tokenizer: Any,
    texts: Any,
    per_token: bool,
    return_offsets: bool,
    options: Mapping[str, Any],
) -> Job:
    by_token = per_token or return_offsets
    num_dimensions = 3 if by_token else 2

    def run(batch: Batch, encoded: Encoded) -> Any:
        way_out = "give the model with a head for texts or tokens"
        logits = output_of(model, batch, "logits", way_out)
        if logits.dim() != num_dimensions:
            raise ConfigError(
                f"{type(model).__name__} returns logits {tuple(logits.shape)} for {len(batch['input_ids'])} texts; "
                "for a classifier of tokens pass per_token=True or return_offsets=True, for one of texts leave them out"
            )
        if not by_token:
            return logits.float().cpu().numpy()
        tokens = without_padding(logits, batch["attention_mask"])
        if not return_offsets:
            return tokens
        return _labels(tokens, encoded, model.config.id2label)

    formats: Sequence[Format] = (VECTORS,)
    tokenizer_options: dict[str, bool] = {}
    if return_offsets:
        formats = (JSON_LINES,)
        tokenizer_options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    elif per_token:
        formats = RAGGED
    task = Task(
        run=run,
        settings={"task": "classify", "per_token": int(by_token), "offsets": int(return_offsets)},
        formats=formats,
        tokenizer_options=tokenizer_options,
    )
    return TokenizedJob(model, tokenizer, texts, task, options)


def _labels(
    logits: Sequence[np.ndarray], encoded: Encoded, names: Mapping[int, str]
) -> list[list[dict[str, object]]]:
    """Returns the label of each token that is not special, with its probability and its place in the text."""
    results = []
    texts = zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
    # more rows of logits fill a shape
    for values, (offsets, are_special) in zip(logits, texts, strict=False):
        probabilities = torch.from_numpy(values).softmax(dim=1).numpy()
        tokens = []
        for (start, end), is_special, row in zip(offsets, are_special, probabilities, strict=True):
            if not is_special:
                label = int(row.argmax())
                score = float(row[label])
                tokens.append({"label": names[label], "score": score, "start": start, "end": end})
        results.append(tokens)
    return results
