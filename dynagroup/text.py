"""Makes a PyTorch ``DataLoader`` from texts and a tokenizer in one call; all batches fit the budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader, Dataset

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.lengths import (
    begun_once,
    by_position,
    check_text,
    limit_of,
    measure_lengths,
    padded,
    shortened,
)
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.update.filling import FillingCollator
from dynagroup.update.loader import checked_kwargs
from dynagroup.validation import sendable

IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores by default


def text_dataloader(
    texts: Sequence[str],
    tokenizer: Callable[..., Any],
    budget: Budget | int,
    *,
    max_length: int | None = None,
    labels: bool = False,
    lengths: ArrayLike | Mapping[str, ArrayLike] | None = None,
    shuffle: bool = False,
    shapes: int | None = None,
    **options: Any,
) -> DataLoader[str]:
    """Returns a PyTorch ``DataLoader`` of tokenized batches that fit ``budget``, after measuring all texts.

    Args:
        texts: sequence of str; for a ``datasets.Dataset``, its text column (``dataset["text"]``).
        tokenizer: a transformers tokenizer that has a padding token. If every text starts with the tokenizer's BOS
            token, as texts from a chat template do, the tokenizer adds no special tokens.
        budget: limit of a batch, e.g. ``TokenBudget(16384)``. Lengths are padded to the budget's
            ``pad_to_multiple_of``. With ``layout="packed"`` a batch is one row without padding, made by transformers'
            ``DataCollatorWithFlattening`` (with ``position_ids`` and ``cu_seq_lens_q``). Only some models then keep the
            samples' attention apart: see ``integrations.packing``.
        max_length: int, tokens: longer texts are truncated. None: no limit.
        labels: True adds ``labels`` of a causal model: ids, with -100 on padding or a packed sample's first token.
        lengths: int array (N,), tokens of each text, if you measured them before with the same ``max_length``.
        shuffle: True forms new batches in every epoch; False gives the longest batches first, for inference.
        shapes: int, largest number of batch shapes (samples, tokens) that a compiled model sees. Batches are padded to
            one of these shapes. Added rows repeat the first text; their ``labels`` are -100.
        options: other arguments of :class:`LengthAwareBatchSampler` (``samples_per_update``, ``seed``, ``window``,
            ``rank``, ...) or of ``DataLoader`` (``num_workers``, ``pin_memory``, ...).

    The loader's ``batch_sampler`` has the ``plan`` and ``set_epoch``. ConfigError: a text is no string, no padding token.

    >>> loader = text_dataloader(texts, tokenizer, TokenBudget(16384), max_length=512)  # doctest: +SKIP
    """
    budget, pad_id = as_budget(budget), getattr(tokenizer, "pad_token_id", None)
    if pad_id is None:
        raise ConfigError(
            "`tokenizer` has no padding token; set one, e.g. tokenizer.pad_token = tokenizer.eos_token"
        )
    texts, max_length = by_position(texts), limit_of(max_length)
    tokens = begun_once(tokenizer, texts)
    known: Any = (
        measure_lengths(texts, tokens, max_length=max_length) if lengths is None else lengths
    )
    window = options.get("window") or (None if shuffle else len(texts))
    budget = few_shapes(
        shapes,
        known,
        budget,
        samples_per_update=options.get("samples_per_update"),
        window=window,
        grouping=options.get("grouping"),
        work=options.get("work"),
        strata=options.get("strata"),
    )
    how = {
        name: options.pop(name)
        for name in options.keys() & inspect.signature(LengthAwareBatchSampler).parameters
    }
    sampler = LengthAwareBatchSampler(known, budget, shuffle=shuffle, **how)
    kind = PackingCollator if budget.layout == "packed" else TokenizingCollator
    made = kind(tokens, max_length, budget.pad_to_multiple_of, labels)
    collate: Any = (
        made
        if budget.ladder is None
        else FillingCollator(made, budget.ladder, {"input_ids": pad_id})
    )
    ours: dict[str, Any] = {"batch_sampler": sampler, "collate_fn": collate}
    return DataLoader(_Texts(texts), **ours, **checked_kwargs(options, **ours))


class TokenizingCollator:
    """Collates texts to padded ``input_ids``, ``attention_mask`` (and ``labels``), int64 (num_samples, longest)."""

    def __init__(
        self, tokens: Callable[..., Any], max_length: int | None, multiple: int, labels: bool
    ) -> None:
        self._tokens, self._max_length, self._multiple, self._labels = (
            tokens,
            max_length,
            multiple,
            labels,
        )

    @sendable(lambda: "the tokenizer failed")
    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        batch = padded(self._tokens, texts, self._max_length, pad_to_multiple_of=self._multiple)
        if self._labels:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch


class PackingCollator(TokenizingCollator):
    """Collates texts to one unpadded row of ``input_ids`` (and ``labels``), ``position_ids`` and the texts' borders.
    Texts without tokens are left out; if no text has tokens, the row is one padding token."""

    @sendable(lambda: "the tokenizer failed")
    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        from transformers import DataCollatorWithFlattening

        tokenizer: Any = getattr(self._tokens, "func", self._tokens)
        encoded = self._tokens(list(texts), **shortened(self._max_length))["input_ids"]
        rows = [{"input_ids": ids} for ids in encoded if ids] or [
            {"input_ids": [tokenizer.pad_token_id]}
        ]
        batch: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
        if not self._labels:
            del batch["labels"]
        return batch


class _Texts(Dataset[str]):
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> str:
        with sendable(
            lambda: f"text {index} failed"
        ):  # measure_lengths checks texts, but `lengths` may be the user's
            return check_text(self._texts[index], index)
