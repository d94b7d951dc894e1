"""Lengths from whatever file a user has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.lengths import as_streams, by_position, limit_of, measure_lengths
from dynagroup.shapes import Streams, said

KINDS = "npy, npz, txt, csv, tsv, jsonl, json, parquet, or a folder saved by datasets"
USUAL = ("length", "lengths", "num_tokens", "tokens", "input_ids")  # what a column of lengths or ids is usually called
UTF8 = "utf-8-sig"  # with or without a mark, as Windows writes it


def lengths_of(args: argparse.Namespace) -> Streams:
    """Lengths by stream: read, counted from token ids, or measured with a tokenizer. Several streams are named.

    Raises:
        ConfigError: no such file, not readable as what it seems to be, or a column that is not there.
    """
    limit = limit_of(args.max_length)
    try:
        table = _read(Path(args.data))
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # what a broken file makes of its reader
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{args.data!r} cannot be read as what its name says: {reason}") from error
    found = {name: _measured(table[name], args) for name in _chosen(table, args)}
    streams = dict(as_streams(found if len(found) > 1 else next(iter(found.values()))))
    if not len(streams["tokens"]):
        raise ConfigError(f"{args.data!r} holds no samples")
    if limit is not None:
        streams["tokens"] = np.minimum(streams["tokens"], np.int32(limit))
    if len(streams) > 1:  # beside the output where machines read that
        line = f"streams: {', '.join(map(said, streams))} (a batch holds the tokens of all; to take others: --column A[,B])"
        print(line, file=sys.stderr if args.json else sys.stdout)
    return streams


def _read(path: Path) -> Any:
    """A file's columns by name, as numpy, pandas, pyarrow or datasets read them; one without a name is called tokens."""
    kind = path.suffix.lower()
    if not path.exists():
        raise ConfigError(f"there is no file {str(path)!r}; give {KINDS}")
    if path.is_dir():
        from datasets import DatasetDict, load_from_disk

        data = load_from_disk(str(path))
        return data["train"] if isinstance(data, DatasetDict) else data  # another split has a folder of its own inside
    if kind in (".npy", ".npz"):
        with path.open("rb") as file:  # numpy leaves a broken file open that it opened itself
            found = np.load(file)
            return {"tokens": found} if kind == ".npy" else dict(found)
    if kind == ".txt":
        return {"tokens": _numbers_or_texts(path.read_text(encoding=UTF8).split("\n"))}
    if kind == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path)
    import pandas

    if kind in (".csv", ".tsv"):
        form = {"sep": "," if kind == ".csv" else "\t", "index_col": False, "keep_default_na": False}
        return pandas.read_csv(path, encoding=UTF8, **form)
    if kind in (".json", ".jsonl"):
        form = {"lines": kind == ".jsonl", "dtype": False, "encoding": UTF8}
        return pandas.read_json(path, **form)
    raise ConfigError(f"{str(path)!r} has an unknown ending; give {KINDS}")


def _numbers_or_texts(lines: Sequence[str]) -> list[Any]:
    texts = [line for line in lines if line.strip()]
    try:
        return [float(text) for text in texts]
    except ValueError:
        return list(texts)


def _chosen(table: Any, args: argparse.Namespace) -> Sequence[str]:
    """The columns that are meant: the named ones, the only one, or one whose name says it; of arrays all."""
    names = list(getattr(table, "column_names", table))
    if args.column is not None:
        found = args.column.split(",")
        if missing := [name for name in found if name not in names]:
            raise ConfigError(f"`--column` must be one of {names} in {args.data!r}, but is {missing[0]!r}")
        return found
    usual = [name for name in (["text"] if args.tokenizer is not None else USUAL) if name in names][:1]
    if len(names) > 1 and not usual and not isinstance(table, dict):
        raise ConfigError(f"{args.data!r} has the columns {names}; choose with `--column A`, or streams with `A,B`")
    return names if isinstance(table, dict) else usual or names


def _measured(values: Any, args: argparse.Namespace) -> Any:
    values = by_position(values)
    first = next(iter(values), 0)
    if isinstance(first, str):
        if args.tokenizer is None:
            raise ConfigError(f"{args.data!r} holds texts; say which `--tokenizer` measures them")
        from transformers import AutoTokenizer

        return measure_lengths(values, AutoTokenizer.from_pretrained(args.tokenizer))
    return measure_lengths(values) if hasattr(first, "__len__") else values
