"""Texts that begin with the tokenizer's own first token, as chat templates write them, get no second one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

__all__ = ["BegunOnce"]


class BegunOnce:
    """A tokenizer that adds no special tokens to texts that bring its first one, as its ``apply_chat_template`` does not.

    Args:
        tokenizer: a transformers tokenizer; one that would not begin such a text twice is called as it is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], **options: Any) -> Mapping[str, list[list[int]]]:
        """``input_ids`` and ``attention_mask`` of every text."""
        begun = [bool(self._first) and text.startswith(self._first) for text in texts]
        if not any(begun):
            return self._tokenizer(texts, **options)
        found: dict[str, list[list[int]]] = {"input_ids": [[]] * len(texts), "attention_mask": [[]] * len(texts)}
        for adds in {not is_begun for is_begun in begun}:
            at = [i for i, is_begun in enumerate(begun) if is_begun != adds]
            encoded = self._tokenizer([texts[i] for i in at], add_special_tokens=adds, **options)
            for name, values in found.items():
                for i, ids in zip(at, encoded[name], strict=True):
                    values[i] = ids
        return found

    @cached_property
    def _first(self) -> str:
        """The first token as it is written, if a text that begins with it would be begun twice; else an empty text."""
        written, number = (getattr(self._tokenizer, name, None) for name in ("bos_token", "bos_token_id"))
        return written if written and self._tokenizer([written])["input_ids"][0][:2] == [number] * 2 else ""
