"""The demo's texts and tokenizer: real, varied, and already on every machine that runs Python."""

from __future__ import annotations

import ast
import gc
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dynagroup.errors import ConfigError

__all__ = ["docstrings", "load_texts", "train_tokenizer"]

LARGEST_FILE = 100_000  # bytes; parsing larger, mostly generated, files costs more than their texts are worth
SKIPPED = {"site-packages", "__pycache__", "test", "tests"}


def load_texts(texts: str | None, dataset: str | None, column: str | None, split: str) -> list[str]:
    """A file's lines, a ``datasets`` column, or docstrings when neither is named.

    Raises:
        ConfigError: both are named, ``column`` is missing, or there are too few texts to train on.
    """
    if texts and dataset:
        raise ConfigError("`texts` and `dataset` both name a source; give one of them")
    found = _lines(texts) if texts else _dataset_column(dataset, column, split) if dataset else docstrings()
    if len(found) < 4:
        raise ConfigError(f"the demo needs at least 4 texts, but found {len(found)}")
    return found


def _lines(texts: str) -> list[str]:
    try:
        content = Path(texts).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"`texts` must be a text file in UTF-8, but {texts!r} cannot be read: {error}") from error
    return [line for line in content.split("\n") if line.strip()]


def _dataset_column(dataset: str, column: str | None, split: str) -> list[str]:
    from datasets import load_dataset

    if column is None:
        raise ConfigError("`dataset` needs `column`: the name of the column that holds the texts")
    try:
        data = load_dataset(dataset, split=split)
    except Exception as error:  # whatever a hub, a script or a broken file raise
        raise ConfigError(f"`dataset` {dataset!r} (split {split!r}) cannot be loaded: {error}") from error
    if column not in data.column_names:  # type: ignore[operator]
        raise ConfigError(f"`column` must be one of {data.column_names}, but is {column!r}")
    return list(data[column])  # type: ignore[index,call-overload]


def docstrings(at_least: int = 12_000) -> list[str]:
    """Different docstrings of the standard library and the installed packages: so many, or all there are.

    Files are taken in an order that mixes packages and is the same wherever the same packages are installed.
    """
    found: dict[str, None] = {}
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are many small objects that all live until the end of a file: collecting would find none
    try:
        with tqdm(total=at_least, desc="reading docstrings", unit=" texts", disable=None) as bar:
            for path in _python_files():
                found.update(dict.fromkeys(_docstrings_of(path)))
                bar.update(min(len(found), at_least) - bar.n)
                if len(found) >= at_least:
                    break
    finally:
        if collecting:
            gc.enable()
    return list(found)


def _python_files() -> list[str]:
    named: dict[str, str] = {}
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED]
            paths = (os.path.join(folder, name) for name in files if name.endswith(".py"))
            named.update((os.path.relpath(path, root), path) for path in paths)
    return [named[name] for name in sorted(named, key=lambda name: (zlib.crc32(name.encode()), name))]


def _docstrings_of(path: str) -> Iterator[str]:
    try:
        source = Path(path).read_bytes()
        tree = ast.parse(source) if b'"""' in source and len(source) <= LARGEST_FILE else ast.parse("")
    except (OSError, SyntaxError, ValueError):  # broken links, and files that are broken on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield text


def train_tokenizer(texts: Sequence[str], vocabulary: int = 1536) -> Any:
    """A byte-level BPE tokenizer of these texts, with begin, end and padding tokens: a ``PreTrainedTokenizerFast``.

    >>> tokenizer = train_tokenizer(["some text"], vocabulary=300)
    >>> tokenizer.decode(tokenizer("some text")["input_ids"])
    '[BOS]some text[EOS]'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw: Any = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special, alphabet = ["[PAD]", "[BOS]", "[EOS]"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]")
