"""Measures the lengths of samples in files on all CPU cores. A killed measurement continues from its journal."""

import glob
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeAlias
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.fingerprint import hashed, tokenizer_text
from dynagroup.jobs.storage import VECTORS, Kind, Output
from dynagroup.lengths import LONGEST, as_streams, limit_of
from dynagroup.shapes import TOKENS, primary
from dynagroup.text.measure import IDS, MASK, by_position, measure_lengths
from dynagroup.validation import check_int, explained, sendable, warn_user

KINDS = "npy, npz, txt, csv, tsv, jsonl, json, parquet, or a folder of them, of a Hub dataset or saved by datasets"
USUAL = (
    "length",
    "lengths",
    "num_tokens",
    "tokens",
    "input_ids",
)  # usual names of columns of lengths or token ids
UTF8 = "utf-8-sig"  # with or without the byte order mark that Windows writes
ROWS = 10_000  # rows in a chunk, for files without row groups
Chunk: TypeAlias = "tuple[int, tuple[Path, list[str], Any]]"
"""(number, (file, column names, table)). Instead of the table, a function of column names that a worker calls."""


def measure_files(
    data: str | Path | Sequence[str | Path],
    tokenizer: Callable[..., Any] | None = None,
    column: str | Sequence[str] | None = None,
    max_length: int | None = None,
    num_proc: int | None = None,
    *,
    output: str | Path | None = None,
    kinds: str | None = None,
    progress: bool = True,
) -> Any:
    """Measures the tokens of every row of files; returns int32 (N,) in file order, or a dict of such arrays by column.

    Args:
        data: a file (csv, tsv, jsonl, json, parquet, txt), a pattern such as "data/*.parquet", a folder of a Hub
            dataset or one saved by ``datasets`` (only its ``train`` split is read); or a list of these, read in order.
        tokenizer: called like a transformers tokenizer; not needed for columns of lengths or of token ids.
        column: name of a column of texts, token ids or lengths; several columns ("source,target", or a list) are
            measured as separate streams. None: the only column, or one with a usual name.
        max_length: int, tokens: longer samples count as this many (in the column ``tokens``, or without it the first).
        num_proc: int, number of processes; each reads a parquet row group or 10,000 rows at a time. None: one per core.
        output: path of the ``.npy`` file (``.npz`` for several columns) to write; the result is then a memory map of
            the file. Finished chunks are saved beside it: the same call again measures only the rest, if any remains.
        kinds: name of a column of labels, which is not measured unless ``column`` names it.

    Raises ConfigError if a file is missing, cannot be read in its format, or has other rows than texts, ids or lengths;
    StateError if ``output`` or its journal was made from other files or with another tokenizer.

    >>> measure_files("data/*.parquet", tokenizer, "text", output="lengths.npy").dtype  # doctest: +SKIP
    dtype('int32')
    """
    paths, affinity = _paths(data), getattr(os, "sched_getaffinity", None)
    cores = (
        len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    )  # cores that this process may use
    chunks = _chunks(paths)
    if (first := next(chunks, None)) is None:
        raise ConfigError(f"{str(data)!r} has no samples; give files with at least one row")
    columns, limit = (
        _chosen(first, column, kinds, texts=tokenizer is not None),
        limit_of(max_length) or LONGEST,
    )
    work = _Measure(columns, tokenizer, limit)
    found = partial(
        _measured, chain([first], chunks), work, check_int("num_proc", num_proc or cores), progress
    )
    if output is None:
        return _by_name(columns, np.concatenate([lengths for _, lengths in found((), [])], axis=1))
    inside = [file for path in paths for file in sorted(path.rglob("*.arrow")) or [path]]
    stats = hashed(
        repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in inside])
    )
    identity = {
        "files": f"{len(inside)} #{stats}",
        "column": ",".join(columns),
        "max_length": limit,
        "rows": ROWS,
    }
    out = Output(
        Path(output), {**identity, "tokenizer": tokenizer_text(tokenizer)}, 0, _kind(columns)
    )
    if not out.is_finished():
        with closing(out):
            if (
                not out.claim()
            ):  # claim() is true if another process has finished the file meanwhile
                numbers: list[int] = []
                for number, lengths in found(out.finished().keys(), numbers):
                    out.append([number], [lengths])
                out.num_samples = len(numbers)
                out.publish()
    out.clear()
    return out.read()


def _by_name(names: Sequence[str], rows: Any) -> Any:
    return rows[0] if len(names) == 1 else dict(zip(names, rows, strict=True))


@dataclass(frozen=True)
class _Measure:
    """Measures a chunk in a worker; returns the chunk's number, and int32 lengths (columns, rows) or a ConfigError."""

    columns: list[str]
    tokenizer: Callable[..., Any] | None
    limit: int

    @sendable(lambda: "measuring a file failed")
    def __getitem__(self, chunk: Chunk) -> tuple[int, NDArray[np.int32] | ConfigError]:
        number, (path, names, table) = chunk
        try:
            if missing := [name for name in self.columns if name not in names]:
                raise ConfigError(
                    f"`--column` must be one of {names} in {str(path)!r}, but is {missing[0]!r}"
                )
            with _reading(path):
                masks = [MASK] if MASK in names and not {*IDS}.isdisjoint(self.columns) else []
                table = table(columns=[*self.columns, *masks]) if callable(table) else table
            streams = as_streams({name: self._lengths(table, name) for name in self.columns})
            found = np.stack([streams[name] for name in self.columns])
        except ConfigError as error:
            return number, ConfigError(f"{error} (in {str(path)!r}, chunk {number} of all files)")
        limits = [self.limit if name == primary(self.columns) else LONGEST for name in self.columns]
        return number, np.minimum(found, np.array(limits, np.int32)[:, None])

    def _lengths(self, table: Any, name: str) -> NDArray[np.int32]:
        if (ndim := getattr(table[name], "ndim", 1)) != 1:
            raise ConfigError(
                f"column {name!r} has {ndim} dimensions; give one number per sample, an array (N,)"
            )
        first = next(iter(by_position(table[name][:1])), 0)
        if isinstance(first, Mapping):
            raise ConfigError(
                f"column {name!r} must have texts, token ids or lengths, but has {first!r:.80}"
            )
        if isinstance(first, str):
            if self.tokenizer is None:
                raise ConfigError(
                    f"column {name!r} contains texts; name the `--tokenizer` that measures them"
                )
            return measure_lengths(by_position(table[name]), self.tokenizer, progress=False)
        values = by_position(table[name])
        if not hasattr(first, "__len__"):
            return as_streams(values)[TOKENS]
        if hasattr(table, "column_names"):  # pyarrow counts ids without decoding them
            from datasets import Dataset

            return measure_lengths(Dataset(table), column=name)
        if name in IDS and MASK in table:
            masks = by_position(table[MASK])
            rows = [{name: ids, MASK: mask} for ids, mask in zip(values, masks, strict=True)]
            return measure_lengths(rows, column=name, progress=False)
        return measure_lengths(values, progress=False)


# A DataLoader measures the chunks: its sampler reads files that one process must read in order (csv, jsonl), and its
# workers read row groups and measure, two chunks each. Results come back in order, and a killed worker raises an error.
def _measured(
    chunks: Iterator[Chunk],
    work: Any,
    processes: int,
    progress: bool,
    done: Collection[int],
    numbers: list[int],
) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Yields (number, lengths) of each chunk that is not ``done``; appends the number of every chunk to ``numbers``."""
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm

    todo = (chunk for chunk in chunks if not (numbers.append(chunk[0]) or chunk[0] in done))
    how: Any = {
        "sampler": todo,
        "num_workers": processes if processes > 1 else 0,
        "collate_fn": tuple,
    }
    with tqdm(
        desc="measuring lengths",
        unit=" samples",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for number, lengths in DataLoader(work, batch_size=None, **how):
            if isinstance(lengths, ConfigError):
                raise lengths
            yield number, lengths
            bar.update(lengths.shape[1])


def _reading(path: Path) -> AbstractContextManager[None]:
    return explained(
        f"{str(path)!r} cannot be read in the format of its ending",
        ConfigError,
        ModuleNotFoundError,
    )


def _paths(data: Any) -> list[Path]:
    """Returns the files that ``data`` names; a folder saved by ``datasets`` counts as one file."""
    if not isinstance(data, (str, Path)):
        return [path for one in data for path in _paths(one)]
    path = Path(data)
    if path.is_dir() and not any(
        (path / name).exists() for name in ("state.json", "dataset_dict.json")
    ):
        from datasets import load_dataset_builder

        with _reading(
            path
        ):  # datasets finds the files of a split by the folder's README, or by the files' names
            found = {**(load_dataset_builder(str(path)).config.data_files or {})}
            train, used = found["train"], {Path(name) for names in found.values() for name in names}
        tables = {
            file
            for file in path.resolve().rglob("*")
            if file.suffix in (".csv", ".tsv", ".jsonl", ".parquet")
        }
        if others := sorted(tables - used):
            few = f"does not read {len(others)} files of {str(path)!r}, such as {str(others[0])!r}"
            warn_user(f"`datasets` {few}; give a pattern such as '*.csv' to choose files yourself")
        return [*map(Path, train)]
    found = (
        [path]
        if path.exists()
        else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    )
    if not found:
        raise ConfigError(f"there is no file {str(path)!r}; give {KINDS}")
    return found


def _chunks(data: Any) -> Iterator[Chunk]:
    texts: dict[
        str, bool
    ] = {}  # whether a column without a type has texts, decided by the first rows of the first file
    return enumerate((path, *part) for path in _paths(data) for part in _parts(path, texts))


def _parts(path: Path, texts: dict[str, bool]) -> Iterator[tuple[list[str], Any]]:
    with _reading(path):
        if path.is_dir():
            from datasets import DatasetDict, load_from_disk

            saved: Any = load_from_disk(str(path))
            data = (
                saved["train"] if isinstance(saved, DatasetDict) else saved
            )  # to read another split, give its folder
            yield from (
                (data.column_names, partial(_rows, data, first))
                for first in range(0, len(data), ROWS)
            )
        elif path.suffix.lower() == ".parquet":
            import pyarrow.dataset

            groups = next(pyarrow.dataset.dataset(str(path)).get_fragments()).split_by_row_group()
            yield from ((group.physical_schema.names, group.to_table) for group in groups)
        else:
            yield from ((list(table), table) for table in _tables(path, path.suffix.lower(), texts))


def _rows(data: Any, first: int, columns: list[str]) -> Any:
    return data.select_columns(columns).with_format("arrow")[first : first + ROWS]


def _tables(path: Path, kind: str, texts: dict[str, bool]) -> Iterator[Any]:
    """Yields the chunks of a file without row groups."""
    import pandas

    if kind in (".npy", ".npz"):
        with path.open("rb") as file:  # np.load(path) would not close a file that it cannot read
            found: Any = np.load(file)
            yield {"tokens": found} if kind == ".npy" else dict(found)
    elif kind == ".txt":
        with path.open(encoding=UTF8) as file:
            lines = (line.rstrip("\n") for line in file)
            while chunk := list(islice(lines, ROWS)):
                numbers: Any = pandas.to_numeric(
                    pandas.Series([s for s in chunk if s.strip()]), errors="coerce"
                )
                found = texts.setdefault("tokens", not len(numbers) or bool(numbers.isna().any()))
                yield {"tokens": chunk if found else numbers}
    elif kind in (".csv", ".tsv"):
        form: Any = {
            "sep": "," if kind == ".csv" else "\t",
            "index_col": False,
            "keep_default_na": False,
            "encoding": UTF8,
        }
        head = pandas.read_csv(path, nrows=ROWS, **form)
        for name in (name for name in head if not pandas.api.types.is_numeric_dtype(head[name])):
            if not texts.setdefault(name, True):
                raise ConfigError(
                    f"column {name!r} has texts, but numbers in an earlier file; measure such files apart"
                )
        types = {name: str for name in head if texts.setdefault(name, False)}
        yield from pandas.read_csv(path, chunksize=ROWS, dtype=types, **form)
    elif kind in (".json", ".jsonl"):
        by_line: Any = {"lines": True, "chunksize": ROWS} if kind == ".jsonl" else {}
        found = pandas.read_json(path, encoding=UTF8, **{"dtype": False, **by_line})
        yield from found if by_line else [found]
    else:
        raise ConfigError(f"{str(path)!r} has an unknown file ending; give {KINDS}")


def read_column(data: Any, name: str, option: str) -> list[Any]:
    """Returns all values of one column of the files, in file order."""
    found: list[Any] = []
    for _, (path, names, table) in _chunks(data):
        if name not in names:
            raise ConfigError(
                f"`{option}` must be one of {names} in {str(path)!r}, but is {name!r}"
            )
        with _reading(path):
            read: Any = table(columns=[name]) if callable(table) else table
            found.extend(by_position(read[name]))  # `+=` would add arrays elementwise
    return found


def _chosen(
    chunk: Chunk, column: str | Sequence[str] | None, kinds: str | None, *, texts: bool
) -> list[str]:
    """Returns the columns to measure: the named ones, else the only one, else one with a usual name."""
    path, names, _ = chunk[1]
    names = [name for name in names if name != kinds]
    usual = [name for name in (["text"] if texts else USUAL) if name in names][:1]
    usual = (
        names if path.suffix.lower() == ".npz" else usual
    )  # every array of an .npz file is a stream
    if column is None and len(names) > 1 and not usual:
        raise ConfigError(
            f"{str(path)!r} has the columns {names}; choose one with `--column A`, or streams with `A,B`"
        )
    return (
        (usual or names)
        if column is None
        else column.split(",")
        if isinstance(column, str)
        else list(column)
    )


def _kind(names: list[str]) -> Kind:
    pack = lambda lengths: np.ascontiguousarray(lengths, "<i4").tobytes()  # noqa: E731
    unpack = lambda data: np.frombuffer(data, "<i4").reshape(len(names), -1)  # noqa: E731
    read = lambda path: _by_name(names, [*as_streams(path).values()])  # noqa: E731
    return Kind(
        ".npz" if len(names) > 1 else ".npy", pack, unpack, list, partial(_write, names), read
    )


def _write(names: Sequence[str], file: IO[bytes], chunks: Sequence[NDArray[np.int32]]) -> None:
    """Writes all lengths to ``file``, one column at a time, so that memory use is 4 bytes per sample."""
    if len(names) == 1:
        return VECTORS.write(file, np.concatenate([chunk[0] for chunk in chunks]))
    with ZipFile(file, "w") as archive:  # an .npz file is a zip archive of .npy files
        for place, name in enumerate(names):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.save(member, np.concatenate([chunk[place] for chunk in chunks]))  # type: ignore[arg-type]
