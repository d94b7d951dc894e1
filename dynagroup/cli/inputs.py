"""Lengths from whatever file a user has, budgets from what he says."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dynagroup.budget.base import Budget
    from dynagroup.shapes import Streams

__all__ = [
    "add_budget",
    "add_lengths",
    "add_picture",
    "budget_of",
    "check_picture",
    "lengths_of",
    "show_picture",
    "show_streams",
    "tokens",
]

KINDS = "npy, npz, txt, csv, tsv, jsonl, json, parquet, or a folder saved by datasets"
NAMES = ("length", "lengths", "num_tokens", "tokens", "input_ids")  # what a column of lengths or ids is usually called
NO_INDEX_BELOW = 8  # samples: so few lengths may well be 1, 2, 3


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


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """The arguments that say where lengths come from."""
    parser.add_argument("data", metavar="DATA", help=f"lengths, token ids or texts: {KINDS}")
    parser.add_argument(
        "--column",
        metavar="C[,C]",
        help="of a table or .npz: lengths, ids or (with --tokenizer) texts; several are padded streams, such as source,target",
    )
    parser.add_argument("--split", metavar="S", help="of a folder saved by datasets (default: train)")
    parser.add_argument("--tokenizer", metavar="NAME", help="transformers tokenizer: DATA then holds texts")
    parser.add_argument("--max-length", type=tokens, metavar="T", help="tokens that longer samples are truncated to")


def lengths_of(args: argparse.Namespace) -> Streams:
    """Lengths by stream: read, counted from token ids, or measured with a tokenizer.

    Raises:
        ConfigError: no such file, not readable as what it seems to be, or a column that is not there.
    """
    import numpy as np

    from dynagroup.lengths import as_streams
    from dynagroup.tokenizer import LONGEST

    path = Path(args.data)
    if not path.exists():
        raise ConfigError(f"there is no file {args.data!r}; give {KINDS}")
    columns = _read(path, args)
    if args.tokenizer is not None and columns and not any(_holds_texts(values) for values in columns.values()):
        raise ConfigError(f"{args.data!r} holds no texts; leave out `--tokenizer`, or name the texts' `--column`")
    found = {name: _measured(values, args) for name, values in columns.items()}
    streams = dict(as_streams(found if len(found) > 1 else next(iter(found.values()), {})))
    if not len(streams["tokens"]):
        raise ConfigError(f"{args.data!r} holds no samples")
    if args.max_length is not None:
        if args.max_length < 1:
            raise ConfigError(f"`--max-length` must be at least 1, but is {args.max_length}")
        streams["tokens"] = np.minimum(streams["tokens"], np.int32(min(args.max_length, LONGEST)))
    return streams


def show_streams(streams: Streams, args: argparse.Namespace) -> None:
    """Say which streams were found, where there are several; beside the output where machines read that."""
    from dynagroup.shapes import said

    if len(streams) > 1:
        names = ", ".join(map(said, streams))
        how = "padded streams" if args.layout == "padded" else "streams"
        line = f"{how}: {names} (a batch holds the tokens of all; to take others: --column NAME[,NAME])"
        print(line, file=sys.stderr if args.json else sys.stdout)


def _holds_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and isinstance(values[0], str)


def _measured(values: Any, args: argparse.Namespace) -> Any:
    """Lengths of what a column holds."""
    from dynagroup.lengths import measure_lengths
    from dynagroup.tokenizer import named_tokenizer

    if _holds_texts(values):
        if args.tokenizer is not None:
            return measure_lengths(values, named_tokenizer(args.tokenizer))
        raise ConfigError(f"{args.data!r} holds texts; say which `--tokenizer` measures them")
    is_ids = isinstance(values, list) and any(hasattr(value, "__len__") for value in values[:1])
    return measure_lengths(values) if is_ids else values


def _read(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Columns by name; what has no names is called tokens."""
    kind = "folder" if path.is_dir() else path.suffix.lower()
    if kind not in READERS:
        raise ConfigError(f"{str(path)!r} has an unknown ending; give {KINDS}")
    try:
        found = READERS[kind](path, args)
        return found if isinstance(found, dict) else {"tokens": found}
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # what a broken file makes of numpy's, pyarrow's and datasets' readers
        what = "a folder saved by datasets" if kind == "folder" else kind
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{str(path)!r} cannot be read as {what}: {reason}") from error


def _npy(path: Path, args: argparse.Namespace) -> Any:
    import numpy as np

    return np.load(path)


def _npz(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    with (
        path.open("rb") as file,
        np.load(file) as arrays,
    ):  # a broken archive leaves the file open where numpy opened it
        streams = {name: arrays[name] for name in arrays.files}
    return streams if args.column is None else {name: streams[name] for name in _columns(list(streams), args, path)}


def _txt(path: Path, args: argparse.Namespace) -> list[Any]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines if args.tokenizer is not None else _numbers_or_texts(lines)


def _csv(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    with path.open(encoding="utf-8", newline="") as file:
        csv.field_size_limit(2**30)  # a text may be a book
        rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        columns: dict[str, list[Any]] = {name: [] for name in _columns(list(rows.fieldnames or []), args, path)}
        for row in rows:
            for name, values in columns.items():
                values.append(row[name])
    for name, values in columns.items():
        if None in values:
            raise ConfigError(f"row {values.index(None) + 1} of {str(path)!r} ends before the column {name!r}")
    return {name: _no_index(name, _numbers_or_texts(values), path) for name, values in columns.items()}


def _jsonl(path: Path, args: argparse.Namespace) -> Any:
    with path.open(encoding="utf-8") as file:
        rows = list(_json_rows(file, path))
    return _of_rows(rows, args, path)


def _json_rows(lines: Any, path: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{str(path)!r} is no JSON in line {number}: {error.msg}") from None


def _json(path: Path, args: argparse.Namespace) -> Any:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ConfigError(f"{str(path)!r} must hold a list, but holds {type(rows).__name__}")
    return _of_rows(rows, args, path)


def _of_rows(rows: list[Any], args: argparse.Namespace, path: Path) -> Any:
    if not rows or not isinstance(rows[0], dict):
        return rows
    columns = _columns(list(rows[0]), args, path)
    for number, row in enumerate(rows):
        missing = [name for name in columns if not isinstance(row, dict) or name not in row]
        if missing:
            raise ConfigError(f"sample {number} of {str(path)!r} has no {missing[0]!r}")
    return {name: _no_index(name, [row[name] for row in rows], path) for name in columns}


def _parquet(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    import pyarrow.parquet as pq

    columns = _columns(pq.read_schema(path).names, args, path)
    table = pq.read_table(path, columns=columns)
    return {name: _no_index(name, table.column(name).to_pylist(), path) for name in columns}


def _folder(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(str(path))
    if isinstance(data, DatasetDict):
        data = data[_chosen(args.split or "train", list(map(str, data)), path, "--split")]
    return {name: _no_index(name, list(data[name]), path) for name in _columns(data.column_names, args, path)}


READERS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    **{".npy": _npy, ".npz": _npz, ".txt": _txt, ".csv": _csv, ".tsv": _csv},
    **{".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, "folder": _folder},
}


def _columns(names: list[str], args: argparse.Namespace, path: Path) -> list[str]:
    """The columns that are meant: the named ones, the only one, or one whose name says it."""
    if not names:
        raise ConfigError(f"{str(path)!r} has no columns: it is empty, or of another kind than its name says")
    if args.column is not None:
        parts = [args.column] if args.column in names else args.column.split(",")
        return list(dict.fromkeys(_chosen(part, names, path) for part in parts))
    usual = ["text"] if args.tokenizer is not None else [name for name in NAMES if name in names]
    if len(names) == 1 or (usual and usual[0] in names):
        return names if len(names) == 1 else usual[:1]
    raise ConfigError(
        f"{str(path)!r} has the columns {names}; choose one with `--column`, or padded streams: `--column A,B`"
    )


def _chosen(name: str, names: list[str], path: Path, option: str = "--column") -> str:
    if name not in names:
        raise ConfigError(f"`{option}` must be one of {names} in {str(path)!r}, but is {name!r}")
    return name


def _no_index(column: str, values: list[Any], path: Path) -> list[Any]:
    """The column's values, unless they are numbers of rows: every number of a range once, under a name that says nothing
    of lengths. Lengths repeat; eight or more that do not, and leave none out, are no lengths."""
    if column not in NAMES and len(values) >= NO_INDEX_BELOW and all(type(v) in (int, float) for v in values):
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
    except (TypeError, ValueError):
        return list(values)


def add_budget(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what fits."""
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--max-tokens", type=tokens, metavar="T", help="tokens a batch may have, padding counted: 16k")
    size.add_argument("--batch-size", type=int, metavar="N", help="samples of the hardest batch, known to fit")
    parser.add_argument("--max-samples", type=int, metavar="N", help="samples a batch may have (with --max-tokens)")
    parser.add_argument("--layout", choices=["padded", "packed"], default="padded", help="with --max-tokens")
    parser.add_argument("--headroom", type=float, default=0.9, help="with --batch-size (default: %(default)s)")
    parser.add_argument("--pad-to-multiple-of", type=int, default=1, metavar="N")


def budget_of(args: argparse.Namespace) -> Budget:
    from dynagroup.budget.memory import MemoryBudget
    from dynagroup.budget.tokens import TokenBudget

    if args.max_tokens is not None:
        return TokenBudget(
            args.max_tokens,
            max_samples=args.max_samples,
            pad_to_multiple_of=args.pad_to_multiple_of,
            layout=args.layout,
        )
    return MemoryBudget(args.batch_size, headroom=args.headroom, pad_to_multiple_of=args.pad_to_multiple_of)


def add_picture(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--picture", metavar="PNG", default=default, help=f"default: {default}" if default else "also save a picture"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def check_picture(args: argparse.Namespace) -> None:
    """Refuse what cannot be a picture before the work that it would show."""
    if args.picture:
        from dynagroup.plan.pictures import picture_path

        picture_path(args.picture)


def show_picture(draw: Callable[[], Figure], args: argparse.Namespace) -> None:
    """Draw and save the picture that was asked for, and say where it is, unless machines read what is printed."""
    if args.picture:
        from dynagroup.plan.pictures import save_picture

        save_picture(draw(), args.picture)
        if not args.json:
            print(f"picture: {args.picture}")
