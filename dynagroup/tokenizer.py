"""Texts and the tokenizers that read them: what a text is, where a tokenizer is found, and how it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any, cast

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.validation import check_int

__all__ = ["BegunOnce", "as_texts", "check_text", "is_chat", "limit_of", "named_tokenizer", "refuse_chat"]

LONGEST = int(np.iinfo(np.int32).max)
"""Tokens of the longest sample that dynagroup counts."""


def limit_of(max_length: Any) -> int | None:
    """How many tokens of a text are read at most; None for all, also where a tokenizer says so by 10**30.

    Raises:
        ConfigError: it is no such number.

    >>> limit_of(512), limit_of(10**30), limit_of(None)
    (512, None, None)
    """
    if max_length is None or (isinstance(max_length, (int, np.integer)) and max_length > LONGEST):
        return None
    return check_int("max_length", max_length)


def as_texts(texts: Any) -> Sequence[Any]:
    """Texts that an index finds by position. Labels, as a Series of pandas has them, would find others.

    Raises:
        ConfigError: it is one text, a table, or has no length; says what to give instead.

    >>> as_texts({"a": 1, "b": 2}.keys())
    ['a', 'b']
    """
    if isinstance(texts, (str, bytes)):
        raise ConfigError(f"`texts` must be a sequence of texts, but is one {type(texts).__name__}; put it into a list")
    if isinstance(texts, Mapping) or hasattr(texts, "columns") or hasattr(texts, "column_names"):
        raise ConfigError(
            f"`texts` must be a sequence of texts, but is a whole {type(texts).__name__}; give one column of it, e.g. "
            "texts['text']"
        )
    if not isinstance(texts, Sized):
        raise ConfigError(
            f"`texts` must have a length, but is {type(texts).__name__}; give list(texts), or for a stream OnlineDataLoader"
        )
    by_position = hasattr(texts, "__getitem__") and not hasattr(texts, "iloc")
    return cast("Sequence[Any]", texts) if by_position else list(cast("Iterable[Any]", texts))


def check_text(text: Any, index: int) -> str:
    """``text``, if it is one that tokenizers read.

    Raises:
        ConfigError: it is no string, or holds a lone surrogate, which UTF-8 cannot write; names its index.

    >>> check_text("some text", 0)
    'some text'
    """
    if is_chat(text):
        refuse_chat(text, index)
    if not isinstance(text, str):
        raise ConfigError(f"text {index} must be a string, but is {text!r:.200}; correct or filter out that sample")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"text {index} has a lone surrogate at character {error.start} ({text[error.start]!r}), which is no character of "
            "its own; correct or filter out that sample, e.g. text.encode('utf-8', 'replace').decode()"
        ) from None
    return text


def is_chat(value: Any) -> bool:
    """Whether a sample is a chat: a list of messages, each a mapping."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Mapping)


def refuse_chat(chat: Any, index: int) -> None:
    """Say how a chat becomes a text."""
    raise ConfigError(
        f"sample {index} is a chat ({chat!r:.100}), and a chat's length depends on its template: "
        "tokenizer.apply_chat_template(messages, tokenize=False) makes a text of it"
    )


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


def named_tokenizer(name: str) -> Any:
    """The transformers tokenizer of that name or folder.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except ImportError:  # a tokenizer's own package: its message says which
        raise
    except Exception as error:  # whatever a hub, a folder's files or a tokenizer's own code raise
        raise ConfigError(
            f"no tokenizer found for {name!r}; give the name of a transformers tokenizer, or a folder with its files"
        ) from error
