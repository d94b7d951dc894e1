"""Makes a PyTorch ``DataLoader`` from texts and a tokenizer in one call; all batches fit the budget."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.lengths import limit_of
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.text.measure import by_position, is_pair, measure_lengths, tokenized
from dynagroup.update.filling import FillingCollator
from dynagroup.update.loader import checked_kwargs
from dynagroup.validation import sendable

IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores by default


def text_dataloader(
    texts: Sequence[str],
    tokenizer: Any,
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
        texts: sequence of str, or of pairs of str; for a ``datasets.Dataset``, its text column (``dataset["text"]``).
        tokenizer: a transformers tokenizer that has a padding token. It adds its special tokens to every text; chat
            templates write the first (BOS) already: ``text.removeprefix(tokenizer.bos_token)``.
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
    budget = as_budget(budget)
    if getattr(tokenizer, "pad_token_id", None) is None:
        raise ConfigError(
            "`tokenizer` has no padding token; set one, e.g. tokenizer.pad_token = tokenizer.eos_token"
        )
    dataset: Any = by_position(texts)
    max_length = limit_of(max_length)
    known: Any = lengths
    if known is None:
        known = measure_lengths(dataset, tokenizer, max_length=max_length)
    window = options.get("window")
    if window is None and not shuffle:
        window = len(dataset)
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
    of_sampler = inspect.signature(LengthAwareBatchSampler).parameters
    sampler_options = {name: options.pop(name) for name in [*options] if name in of_sampler}
    sampler = LengthAwareBatchSampler(known, budget, shuffle=shuffle, **sampler_options)

    collator = PackingCollator if budget.layout == "packed" else TokenizingCollator
    collate: Any = collator(tokenizer, max_length, budget.pad_to_multiple_of, labels)
    if budget.ladder is not None:
        padding = {"input_ids": tokenizer.pad_token_id}
        collate = FillingCollator(collate, budget.ladder, padding)
    options = checked_kwargs(options, batch_sampler=sampler, collate_fn=collate)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **options)


@dataclass(frozen=True)
class TokenizingCollator:
    """Collates texts to padded ``input_ids``, ``attention_mask`` (and ``labels``), int64 (num_samples, longest).

    Args:
        tokenizer: a transformers tokenizer that has a padding token.
        max_length: int, tokens: longer texts are truncated. None: no limit.
        pad_to_multiple_of: int, tokens: ``longest`` is rounded up to a multiple of it.
        labels: True adds ``labels``: the ids, with -100 on padding.
    """

    tokenizer: Any
    max_length: int | None = None
    pad_to_multiple_of: int = 1
    labels: bool = False

    @sendable(lambda: "the tokenizer failed")
    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        encoded = tokenized(self.tokenizer, texts, self.max_length)
        fields = fields_of(encoded, texts)
        batch = pad_texts(self.tokenizer, fields, multiple=self.pad_to_multiple_of)
        if self.labels:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch


class PackingCollator(TokenizingCollator):
    """Collates texts to one unpadded row of ``input_ids`` (and ``labels``), ``position_ids`` and the texts' borders.

    Texts without tokens are left out; if no text has tokens, the row is one padding token.
    """

    @sendable(lambda: "the tokenizer failed")
    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        from transformers import DataCollatorWithFlattening

        encoded = tokenized(self.tokenizer, texts, self.max_length)
        if "token_type_ids" in fields_of(encoded, texts):
            raise ConfigError(
                "pairs of texts with `token_type_ids` cannot be packed; give a budget with layout='padded'"
            )
        rows = [{"input_ids": ids} for ids in encoded["input_ids"] if ids]
        if not rows:
            rows.append({"input_ids": [self.tokenizer.pad_token_id]})
        batch: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
        if not self.labels:
            del batch["labels"]
        return batch


def fields_of(encoded: Mapping[str, Any], texts: Sequence[object]) -> dict[str, Any]:
    """Returns the fields of tokenized texts that models read; of single texts without the types, which are all 0."""
    names = ["input_ids", "attention_mask"]
    if "token_type_ids" in encoded and any(map(is_pair, texts)):
        names.append("token_type_ids")
    return {name: encoded[name] for name in names}


def pad_texts(
    tokenizer: Any,
    encoded: Mapping[str, Any],
    *,
    multiple: int = 1,
    padding_side: str | None = None,
) -> dict[str, torch.Tensor]:
    """Returns tokenized texts as int64 tensors: ids, masks (and types) are padded to (num_samples, longest)."""
    # Texts without any token are padded to one position, because an embedding refuses the dtype of an empty tensor.
    has_tokens = any(encoded["input_ids"])
    return dict(
        tokenizer.pad(
            encoded,
            padding="longest" if has_tokens else "max_length",
            max_length=None if has_tokens else 1,
            pad_to_multiple_of=multiple,
            padding_side=padding_side,
            return_tensors="pt",
        )
    )
