"""Lengths from whatever file a user has."""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    from dynagroup.shapes import Streams

__all__ = ["KINDS", "lengths_of", "tokens"]

KINDS = "npy, npz, txt, csv, tsv, jsonl, json, parquet, or a folder saved by datasets"
USUAL = ("length", "lengths", "num_tokens", "tokens", "input_ids")  # what a column of lengths or ids is usually called
NO_INDEX_BELOW = 8  # samples: so few lengths may well be 1, 2, 3
UTF8 = "utf-8-sig"  # with or without a mark, as Windows writes it
Table: TypeAlias = tuple[Sequence[str], Callable[[str], Any]]
"""The names of a file's columns, none where it holds one nameless column; and what a column holds."""


def tokens(text: str) -> int:
    """A number of tokens; ``k`` is 1,024.

    >>> tokens("4096"), tokens("16k"), tokens("16_384")
    (4096, 16384, 16384)
    """
    number, times = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    try:
        return int(float(number) * times) if "." in number else int(number) * times
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be a number of tokens, such as 16384 or 16k, but is {text!r}") from None


def lengths_of(args: argparse.Namespace) -> Streams:
    """Lengths by stream: read, counted from token ids, or measured with a tokenizer.

    Raises:
        ConfigError: no such file, not readable as what it seems to be, or a column that is not there.
    """
    import numpy as np

    from dynagroup.lengths import as_streams, limit_of

    limit, columns = limit_of(args.max_length), _read(Path(args.data), args)
    if args.tokenizer is not None and columns and not any(map(_are_texts, columns.values())):
        raise ConfigError(f"{args.data!r} holds no texts; leave out `--tokenizer`, or name the texts' `--column`")
    found = {name: _measured(values, args) for name, values in columns.items()}
    streams = dict(as_streams(found if len(found) > 1 else next(iter(found.values()), {})))
    if not len(streams["tokens"]):
        raise ConfigError(f"{args.data!r} holds no samples")
    if limit is not None:
        streams["tokens"] = np.minimum(streams["tokens"], np.int32(limit))
    return streams


def _are_texts(values: Any) -> bool:
    """Texts, or the chats that are refused where texts are measured."""
    first = values[0] if isinstance(values, list) and values else None
    return isinstance(first, str) or (isinstance(first, list) and isinstance(next(iter(first), None), dict))


def _measured(values: Any, args: argparse.Namespace) -> Any:
    from dynagroup.lengths import measure_lengths, named_tokenizer

    if _are_texts(values) and args.tokenizer is not None:
        return measure_lengths(values, named_tokenizer(args.tokenizer))
    if isinstance(values, list) and values and isinstance(values[0], str):
        raise ConfigError(f"{args.data!r} holds texts; say which `--tokenizer` measures them")
    is_ids = isinstance(values, list) and any(hasattr(value, "__len__") for value in values[:1])
    return measure_lengths(values) if is_ids else values


def _read(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The columns that are meant, by name; one without a name is called tokens."""
    if not path.exists():
        raise ConfigError(f"there is no file {args.data!r}; give {KINDS}")
    kind = "folder" if path.is_dir() else path.suffix.lower()
    if kind not in READERS:
        raise ConfigError(f"{str(path)!r} has an unknown ending; give {KINDS}")
    try:
        names, column = READERS[kind](path, args)
        return {name: _no_index(name, column(name), path) for name in _chosen(names, args, kind)}
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # what a broken file makes of numpy's, pyarrow's and datasets' readers
        what = "a folder saved by datasets" if kind == "folder" else kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{str(path)!r} cannot be read as {what}: {reason}") from error


def _numpy(path: Path, args: argparse.Namespace) -> Table:
    import numpy as np

    with path.open("rb") as file:  # numpy leaves a broken file open that it opened itself
        found = np.load(file)
        if path.suffix.lower() == ".npy":
            return [], lambda _: found
        return found.files, {name: found[name] for name in found.files}.__getitem__


def _txt(path: Path, args: argparse.Namespace) -> Table:
    lines = [line for line in path.read_text(encoding=UTF8).split("\n") if line.strip()]
    return [], lambda _: lines if args.tokenizer is not None else _numbers_or_texts(lines)


def _csv(path: Path, args: argparse.Namespace) -> Table:
    csv.field_size_limit(2**30)  # a text may be a book
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding=UTF8, newline="") as file:
        rows = [row for row in csv.reader(file, delimiter=delimiter, strict=True) if row]
    if not rows:
        raise ConfigError(f"{str(path)!r} has no columns: it is empty, or of another kind than its name says")
    header, *rows = rows
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            counts = f"{len(row)} values, but the header names {len(header)} columns"
            raise ConfigError(f"row {number} of {str(path)!r} has {counts}")
    return header, lambda name: _numbers_or_texts([row[header.index(name)] for row in rows])


def _json(path: Path, args: argparse.Namespace) -> Table:
    text = path.read_text(encoding=UTF8)
    pieces = [text] if path.suffix.lower() == ".json" else text.split("\n")
    parsed = []
    for number, piece in enumerate(pieces, 1):
        try:
            parsed += [json.loads(piece, object_pairs_hook=_object)] if piece.strip() else []
        except json.JSONDecodeError as error:
            line = error.lineno if len(pieces) == 1 else number
            raise ConfigError(f"{str(path)!r} is no JSON in line {line}: {error.msg}") from None
    rows = parsed if path.suffix.lower() == ".jsonl" else parsed[0] if parsed else None
    if not isinstance(rows, list):
        raise ConfigError(f"{str(path)!r} must hold a list, but holds {type(rows).__name__}")
    if not rows or not isinstance(rows[0], dict):
        return [], lambda _: rows
    return list(rows[0]), lambda name: [_value(row, name, number, path) for number, row in enumerate(rows)]


def _value(row: Any, name: str, number: int, path: Path) -> Any:
    if not isinstance(row, dict) or name not in row:
        raise ConfigError(f"sample {number} of {str(path)!r} has no {name!r}")
    return row[name]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice([name for name, _ in pairs], "an object")
    return dict(pairs)


def _parquet(path: Path, args: argparse.Namespace) -> Table:
    import pyarrow.parquet as pq

    return pq.read_schema(path).names, lambda name: pq.read_table(path, columns=[name]).column(0).to_pylist()


def _folder(path: Path, args: argparse.Namespace) -> Table:
    from datasets import DatasetDict, load_from_disk

    data, split = load_from_disk(str(path)), args.split or "train"
    if isinstance(data, DatasetDict) and split not in data:
        raise ConfigError(f"`--split` must be one of {list(map(str, data))} in {str(path)!r}, but is {split!r}")
    table = data[split] if isinstance(data, DatasetDict) else data
    return table.column_names, lambda name: list(table[name])


READERS: dict[str, Callable[[Path, argparse.Namespace], Table]] = {
    **{".npy": _numpy, ".npz": _numpy, ".txt": _txt, ".csv": _csv, ".tsv": _csv},
    **{".jsonl": _json, ".json": _json, ".parquet": _parquet, "folder": _folder},
}


def _chosen(names: Sequence[str], args: argparse.Namespace, kind: str) -> Sequence[str]:
    """The columns that are meant: the named ones, the only one, or one whose name says it; of arrays all."""
    _refuse_twice(names, repr(args.data))
    if args.column is not None:
        parts = [args.column] if args.column in names else args.column.split(",")
        for name in parts:
            if name not in names:
                what = f"must be one of {list(names)} in" if names else "is of a table, and there are no columns in"
                raise ConfigError(f"`--column` {what} {args.data!r}, but is {name!r}")
        return list(dict.fromkeys(parts))
    if len(names) < 2 or kind == ".npz":
        return names or ["tokens"]
    usual = [name for name in (["text"] if args.tokenizer is not None else USUAL) if name in names]
    if not usual:
        raise ConfigError(
            f"{args.data!r} has the columns {list(names)}; choose one with `--column`, or padded streams: `--column A,B`"
        )
    return usual[:1]


def _refuse_twice(names: Sequence[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"the name {twice[0]!r} stands twice in {where}: which one is meant? Rename or remove one")


def _no_index(column: str, values: Any, path: Path) -> Any:
    """The column's values, unless they are numbers of rows: every number of a range once, under a name that says nothing
    of lengths. Lengths repeat; eight or more that do not, and leave none out, are no lengths."""
    numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if not numbers or column in USUAL or len(values) < NO_INDEX_BELOW:
        return values
    first, last = min(values), max(values)
    if last - first == len(values) - 1 and len(set(values)) == len(values):
        raise ConfigError(
            f"the column {column!r} of {str(path)!r} numbers its rows ({first:g} to {last:g}, each once): that is an "
            "index, no lengths; choose another `--column`, or call it 'length' if it is one"
        )
    return values


def _numbers_or_texts(values: Sequence[str]) -> list[Any]:
    try:
        return [float(value) for value in values]
    except ValueError:
        return list(values)
