"""How long are a Trainer's samples? From the length column, else from the columns that are padded, else row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dynagroup.errors import ConfigError
from dynagroup.lengths import count_ids, measure_lengths
from dynagroup.shapes import TOKENS, IntArray

__all__ = ["sample_lengths"]

TARGET = "target"

PAIR, PROMPT = ("chosen_ids", "rejected_ids"), "prompt_ids"
"""TRL's columns of a preference: both answers are rows of a batch padded to the longest, in DPO each behind the prompt."""


def sample_lengths(trainer: Any, dataset: Any, *, name: str) -> dict[str, IntArray]:
    """Tokens of each sample; for an encoder-decoder those of its labels too, in the stream ``target``.

    Args:
        dataset: the one that the Trainer was given: what it hands to its samplers has lost the length column.
        name: what messages call it, e.g. "train_dataset".

    Raises:
        ConfigError: samples have neither the length column nor a known input, nor are they ids.
    """
    columns = getattr(dataset, "column_names", None)
    columns = list(columns) if isinstance(columns, (list, tuple)) else []
    inputs = getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"]
    both = (
        bool(getattr(trainer.model.config, "is_encoder_decoder", False)) if hasattr(trainer.model, "config") else False
    )
    if trainer.args.length_column_name in columns:
        streams = {TOKENS: np.asarray(dataset[trainer.args.length_column_name][:], np.int64)}
    elif set(PAIR) <= set(columns):
        streams = {TOKENS: _pair_tokens(trainer, dataset, has_prompt=PROMPT in columns)}
    elif inputs[0] in columns:
        streams = {TOKENS: measure_lengths(dataset, column=inputs[0]).astype(np.int64)}
    else:
        return _row_by_row(trainer, dataset, inputs[0], both, name)
    if both and "labels" in columns and _holds_lists(dataset, "labels"):
        streams[TARGET] = measure_lengths(dataset, column="labels").astype(np.int64)
    return streams


def _pair_tokens(trainer: Any, dataset: Any, *, has_prompt: bool) -> IntArray:
    longest = np.maximum(*(measure_lengths(dataset, column=column) for column in PAIR)).astype(np.int64)
    if has_prompt:
        longest += measure_lengths(dataset, column=PROMPT)
    most = getattr(trainer.args, "max_length", None)
    return 2 * (longest if most is None else np.minimum(longest, most))


def _holds_lists(dataset: Any, column: str) -> bool:
    return len(dataset) > 0 and hasattr(dataset[0][column], "__len__")


def _row_by_row(trainer: Any, dataset: Any, column: str, both: bool, name: str) -> dict[str, IntArray]:
    def lengths_of(row: Any) -> dict[str, int]:
        plain = isinstance(row, (list, np.ndarray, torch.Tensor))
        count = count_ids(row) if plain else len(row[column])
        if count is None:
            raise TypeError("no row of ids")
        found = {TOKENS: count}
        if both and not plain and hasattr(row.get("labels"), "__len__"):
            found[TARGET] = len(row["labels"])
        return found

    try:
        measured: Any = measure_lengths(dataset, length_of=lengths_of, progress=not trainer.args.disable_tqdm)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"the lengths of {name} are not known: it has no column {trainer.args.length_column_name!r} and no {column!r}; "
            "pass DynagroupConfig(budget=..., lengths=...), e.g. measure_lengths(texts, tokenizer)"
        ) from error
    return {stream: np.asarray(values, np.int64) for stream, values in measured.items()}
