"""The one-liner: texts and a tokenizer in, a ready ``DataLoader`` out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.lengths import begun_once, by_position, check_text, limit_of, measure_lengths, padded, shortened
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.plan.static_shapes import few_shapes
from dynagroup.update.filling import FillingCollator
from dynagroup.update.loader import checked_kwargs

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

__all__ = ["text_dataloader"]

IGNORED = -100  # torch.nn.functional.cross_entropy leaves such labels out


def text_dataloader(
    texts: Sequence[str], tokenizer: Callable[..., Any], budget: Budget | int, *,
    max_length: int | None = None, labels: bool = False, lengths: ArrayLike | Mapping[str, ArrayLike] | None = None,
    shuffle: bool = False, shapes: int | None = None, **options: Any,
) -> DataLoader[str]:  # fmt: skip
    """A ``DataLoader`` of batches that fit ``budget``: measures, plans, and tokenizes in its collate function.

    Args:
        texts: a sequence of strings; of a ``datasets.Dataset`` pass the column, ``dataset["text"]``.
        tokenizer: a transformers tokenizer with a padding token. Texts that all bring its first token, as chat templates
            write them, get no second one.
        budget: what fits, e.g. ``TokenBudget(16384)``; its ``pad_to_multiple_of`` is applied. With ``layout="packed"`` a batch
            is one row without padding, made by transformers' ``DataCollatorWithFlattening``: ``position_ids`` and
            ``cu_seq_lens_q`` say where samples begin. Not every model keeps them apart: see ``integrations.packing``.
        max_length: longer texts are truncated to so many tokens.
        labels: add ``labels`` for a causal language model: the inputs, with -100 on the padding, or on the first
            tokens of packed samples.
        lengths: the texts' lengths if you measured them before, with the same ``max_length``.
        shuffle: other batches every epoch; False: longest first, for inference.
        shapes: a compiled model meets at most so many (samples, tokens): batches are filled to them with padding, and with rows
            behind the texts that repeat the first, their ``labels`` all -100.
        options: any further argument of :class:`LengthAwareBatchSampler` (``samples_per_update``, ``seed``, ``window``,
            ``rank``, ...) or of ``DataLoader`` (``num_workers``, ``pin_memory``, ...).

    The sampler is ``loader.batch_sampler``: ask it for its ``plan``, tell it the epoch.

    Raises:
        ConfigError: a text is none, or the tokenizer cannot pad.

    >>> loader = text_dataloader(texts, tokenizer, TokenBudget(16384), max_length=512)  # doctest: +SKIP
    """
    budget = as_budget(budget)
    pad_id = getattr(tokenizer, "pad_token_id", None)
    if pad_id is None:
        raise ConfigError("`tokenizer` has no padding token; set one, e.g. tokenizer.pad_token = tokenizer.eos_token")
    texts, max_length = by_position(texts), limit_of(max_length)
    tokens = begun_once(tokenizer, texts)
    known: Any = measure_lengths(texts, tokens, max_length=max_length) if lengths is None else lengths
    window = options.get("window") or (None if shuffle else len(texts))
    update, grouping, work = map(options.get, ("samples_per_update", "grouping", "work"))
    budget = few_shapes(shapes, known, budget, update, window, grouping, work)
    of_sampler = options.keys() & inspect.signature(LengthAwareBatchSampler).parameters
    how = {name: options.pop(name) for name in of_sampler}
    sampler = LengthAwareBatchSampler(known, budget, shuffle=shuffle, **how)
    kind = PackingCollator if budget.layout == "packed" else TokenizingCollator
    made = kind(tokens, max_length, budget.pad_to_multiple_of, labels)
    collate: Any = made if budget.ladder is None else FillingCollator(made, budget.ladder, {"input_ids": pad_id})
    return DataLoader(_Texts(texts), batch_sampler=sampler, collate_fn=collate, **checked_kwargs(options))


class TokenizingCollator:
    """Texts -> padded ``input_ids`` and ``attention_mask`` (and ``labels``), int64 tensors (num_samples, longest)."""

    def __init__(self, tokens: Callable[..., Any], max_length: int | None, multiple: int, labels: bool) -> None:
        self._tokens, self._max_length, self._multiple, self._labels = tokens, max_length, multiple, labels

    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        batch = padded(self._tokens, texts, self._max_length, pad_to_multiple_of=self._multiple)
        if self._labels:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch


class PackingCollator(TokenizingCollator):
    """Texts -> one row of ``input_ids`` (and ``labels``), with ``position_ids`` and the borders of the texts; a text without any
    token adds nothing, and a row of such texts alone is one padding token."""

    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        from transformers import DataCollatorWithFlattening

        tokenizer: Any = getattr(self._tokens, "func", self._tokens)
        encoded = self._tokens(list(texts), **shortened(self._max_length))["input_ids"]
        rows = [{"input_ids": ids} for ids in encoded if ids] or [{"input_ids": [tokenizer.pad_token_id]}]
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
        return check_text(self._texts[index], index)  # here for `lengths` measured elsewhere
