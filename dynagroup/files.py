"""Measures the lengths of samples in files, which ``datasets`` reads and caches."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.lengths import as_streams, limit_of
from dynagroup.shapes import Streams, primary
from dynagroup.text.measure import CHATS, is_chat, measure_lengths, with_answers
from dynagroup.validation import check_choice, warn_user

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = (
    "npy, npz, txt, csv, tsv, jsonl, json, parquet, fasta, fastq (also .gz or .zst), "
    "or a folder of them, of a Hub dataset or saved by datasets"
)
# Usual names of columns of lengths or token ids.
USUAL = ("length", "lengths", "num_tokens", "tokens", "input_ids")
# Usual names of columns of texts.
TEXTS = ("text", "sequence", *CHATS)
SampleBy: TypeAlias = Literal["line", "paragraph", "document"]
Table: TypeAlias = "Dataset | dict[str, np.ndarray]"
_ARRAYS = (".npy", ".npz")
_FOLDER = "folder"
_COMPRESSED = (".gz", ".zst")
_TABLES = {".csv", ".tsv", ".jsonl", ".parquet"}
_RECORDS = {"columns": ["sequence"]}
_SAVED = ("state.json", "dataset_dict.json")  # in a folder saved by `datasets`
_CSV = {"keep_default_na": False, "index_col": False, "encoding": "utf-8-sig"}
# Ending -> the name of a loading script of `datasets`, and its options.
_LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", _CSV),
    ".tsv": ("csv", _CSV | {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"encoding": "utf-8-sig"}),
    **dict.fromkeys((".fasta", ".fa", ".faa", ".fna", ".ffn"), ("fasta", _RECORDS)),
    **dict.fromkeys((".fastq", ".fq"), ("fastq", _RECORDS)),
}


def measure_files(
    data: str | Path | Sequence[str | Path],
    tokenizer: Callable[..., Any] | None = None,
    column: str | Sequence[str] | None = None,
    max_length: int | None = None,
    num_proc: int | None = None,
    *,
    output: str | Path | None = None,
    kinds: str | None = None,
    sample_by: SampleBy = "line",
    length_of: Callable[[Any], int] | None = None,
    progress: bool = True,
) -> Any:
    """Measures the tokens of every row of files; returns int32 (N,) in file order, or a dict of such arrays by column.

    ``datasets`` reads the files, and caches rows and lengths: the same call again measures nothing, and after a kill it
    measures what no process had finished.

    Args:
        data: a file (csv, tsv, jsonl, json, parquet, txt, FASTA, FASTQ; also compressed, ``.gz`` or ``.zst``), a
            pattern such as "data/*.parquet", a folder of a Hub dataset or one saved by ``datasets`` (only its ``train``
            split is read); or a list of these, read in order.
        tokenizer: called like a transformers tokenizer; not needed for columns of lengths or of token ids. Without it, a
            txt file has one length per line.
        column: name of a column of texts, token ids or lengths; several columns ("source,target", or a list) are
            measured as separate streams. None: the only column, or one with a usual name.
        max_length: int, tokens: longer samples count as this many (in the column ``tokens``, or without it the first).
        num_proc: int, number of processes. None: one, in which a fast tokenizer uses all cores.
        output: path of the ``.npy`` file (``.npz`` for several columns) to write; the result is then a memory map of
            the file.
        kinds: name of a column of labels, which is not measured unless ``column`` names it.
        sample_by: what is a sample of a txt file: a "line", a "paragraph", or the "document".
        length_of: function from a value of the column to its length, instead of a tokenizer: ``len`` counts the
            characters of a text, or the residues of a FASTA record.

    Raises ConfigError if a file is missing, cannot be read in its format, or has other rows than texts, ids or lengths.

    >>> measure_files("data/*.parquet", tokenizer, "text", output="lengths.npy").dtype  # doctest: +SKIP
    dtype('int32')
    """
    check_choice("sample_by", sample_by, get_args(SampleBy))
    limit = limit_of(max_length)
    paths = _paths(data)
    named = str(data) if isinstance(data, (str, Path)) else ", ".join(map(str, data))
    are_arrays = all(_ending(path) in _ARRAYS for path in paths)
    if are_arrays and length_of is not None:
        raise ConfigError(
            f"{named!r} contains lengths, not samples to count; leave out `length_of`"
        )
    measures_texts = tokenizer is not None or length_of is not None
    with nullcontext() if are_arrays else _progress_bars(progress):
        tables = list(_tables(paths, sample_by))
        if not any(map(_num_rows, tables)):
            raise _without_samples(named)
        if tokenizer is not None and column is None:
            tables = list(map(_with_answers, tables))
        names = _chosen(tables[0], named, column, kinds, measures_texts=measures_texts)
        if output is not None:
            _check_output(Path(output), names)
        streams = {}
        for name in names:
            streams[name] = _lengths(tables, name, tokenizer, length_of, num_proc, progress)
    streams = _limited(as_streams(streams), limit)
    if output is not None:
        streams = _written(Path(output), streams)
    return streams[names[0]] if len(names) == 1 else streams


def _limited(streams: Streams, limit: int | None) -> dict[str, NDArray[np.int32]]:
    """Counts longer samples as ``limit`` tokens, in the primary stream."""
    limited = dict(streams)
    if limit is not None:
        first = primary(streams)
        limited[first] = np.minimum(streams[first], np.int32(limit))
    return limited


def read_column(data: Any, name: str, option: str) -> list[Any]:
    """Returns all values of one column of the files, in file order."""
    values: list[Any] = []
    for table in _tables(_paths(data), "line"):
        _check_column(table, name, option)
        values.extend(
            np.atleast_1d(table[name]).tolist() if isinstance(table, dict) else table[name]
        )
    return values


def name_of_samples(data: Any, sample_by: SampleBy) -> str:
    """Returns what a sample of these files is: "lines", "paragraphs" or "documents" of txt files, "records" of FASTA and
    FASTQ files, else "rows"."""
    files: list[Path] = []
    for path in _paths(data):
        files.extend(path.rglob("*") if path.is_dir() else [path])
    loaders = {_LOADERS[_ending(file)][0] for file in files if _ending(file) in _LOADERS}
    if loaders == {"text"}:
        return f"{sample_by}s"
    return "records" if loaders and loaders <= {"fasta", "fastq"} else "rows"


@contextmanager
def _progress_bars(is_shown: bool) -> Iterator[None]:
    from datasets.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_shown = not are_progress_bars_disabled()
    if not is_shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bars()


def _paths(data: Any) -> list[Path]:
    """Returns the files and folders that ``data`` names."""
    if not isinstance(data, (str, Path)):
        paths = []
        for entry in data:
            paths.extend(_paths(entry))
        return paths
    if Path(data).exists():
        return [Path(data)]
    paths = [Path(name) for name in sorted(glob.glob(str(data), recursive=True))]
    if not paths:
        raise ConfigError(f"there is no file {str(data)!r}; give {FORMATS}")
    return paths


def _ending(path: Path) -> str:
    """Returns the ending that tells a file's format, without that of its compression; or "folder"."""
    if path.is_dir():
        return _FOLDER
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _tables(paths: Sequence[Path], sample_by: SampleBy) -> Iterator[Table]:
    """Yields the rows of each file or folder; files of one format that follow each other are read together."""
    for ending, group in groupby(paths, _ending):
        files = list(group)
        if ending in _LOADERS:
            yield _load_files(files, sample_by)
        elif ending == _FOLDER:
            for path in files:
                yield _load_folder(path, sample_by)
        elif ending in _ARRAYS:
            yield from map(_load_arrays, files)
        else:
            raise ConfigError(f"{str(files[0])!r} has an unknown file ending; give {FORMATS}")


def _load_files(paths: Sequence[Path], sample_by: SampleBy) -> Table:
    from datasets import load_dataset_builder

    loader, options = _LOADERS[_ending(paths[0])]
    names = [str(path) for path in paths]
    if loader == "text":
        options = options | {"sample_by": sample_by}
    elif sample_by != "line":
        raise ConfigError(
            f"`sample_by` is for txt files, but {names[0]!r} is another; leave it out"
        )
    compressed = [str(path) for path in paths if path.suffix == ".zst"]
    if compressed and find_spec("zstandard") is None:
        raise ConfigError(f"{compressed[0]!r} needs a package: pip install zstandard")
    if not any(path.stat().st_size for path in paths):
        raise _without_samples(", ".join(names))
    with _reading(", ".join(names)):
        load: Any = load_dataset_builder
        return _rows(load(loader, data_files=names, **options), ", ".join(names))


def _load_folder(path: Path, sample_by: SampleBy) -> Table:
    from datasets import DatasetDict, load_dataset_builder, load_from_disk

    with _reading(str(path)):
        if any((path / name).exists() for name in _SAVED):
            saved: Any = load_from_disk(str(path))
            return saved["train"] if isinstance(saved, DatasetDict) else saved
        if sample_by == "line":
            builder = load_dataset_builder(str(path))
        else:  # only of txt files
            builder = load_dataset_builder(str(path), sample_by=sample_by)
        table = _rows(builder, str(path))
    endings = {_ending(file) for file in path.rglob("*")} & _TABLES
    if len(endings) > 1:
        warn_user(
            f"{str(path)!r} has files of several formats ({', '.join(sorted(endings))}), of which `datasets` reads one; "
            "give patterns such as '*.csv' to choose files yourself"
        )
    return table


def _rows(builder: Any, names: str) -> Table:
    """Returns the split ``train`` of what `datasets` reads. ConfigError: it has no rows."""
    builder.download_and_prepare()
    splits = list(builder.info.splits)
    if "train" not in splits:
        raise ConfigError(
            f"{names!r} has the splits {splits}, but only 'train' is read; name the files themselves"
        )
    if builder.info.splits["train"].num_examples == 0:
        raise _without_samples(names)
    return builder.as_dataset(split="train")


def _load_arrays(path: Path) -> Table:
    with (
        _reading(str(path)),
        path.open("rb") as file,
    ):  # np.load(path) would leave it open on errors
        arrays: Any = np.load(file)
        return {"tokens": arrays} if isinstance(arrays, np.ndarray) else dict(arrays)


@contextmanager
def _reading(names: str) -> Iterator[None]:
    """Context manager that turns errors of a format into a ConfigError that names the files."""
    try:
        yield
    except (ModuleNotFoundError, ConfigError):
        raise
    except Exception as error:  # of pandas, pyarrow or numpy; `datasets` hides them behind its own
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
        raise ConfigError(
            f"{names!r:.300} cannot be read in the format of its ending ({reason:.200})"
        ) from error


def _without_samples(names: str) -> ConfigError:
    return ConfigError(
        f"{names!r:.300} has no samples (records, rows or lines); give files with at least one"
    )


def _names(table: Table) -> list[str]:
    return list(table) if isinstance(table, dict) else table.column_names


def _with_answers(table: Table) -> Table:
    return table if isinstance(table, dict) else with_answers(table)


def _num_rows(table: Table) -> int:
    if isinstance(table, dict):
        return sum(array.size for array in table.values())
    return len(table)


def _check_column(table: Table, name: str, option: str) -> None:
    if name not in _names(table):
        raise ConfigError(f"`{option}` must be one of {_names(table)}, but is {name!r}")


def _chosen(
    table: Table,
    data: str,
    column: str | Sequence[str] | None,
    kinds: str | None,
    *,
    measures_texts: bool,
) -> list[str]:
    """Returns the columns to measure: the named ones, else the only one, else one with a usual name."""
    if column is not None:
        return column.split(",") if isinstance(column, str) else list(column)
    names = [name for name in _names(table) if name != kinds]
    if isinstance(table, dict) or len(names) == 1:  # every array of an .npz file is a stream
        return names
    for name in TEXTS if measures_texts else USUAL:
        if name in names:
            return [name]
    raise ConfigError(
        f"{data!r} has the columns {names}; choose one with `--column A`, or streams with `A,B`"
    )


def _lengths(
    tables: Sequence[Table],
    column: str,
    tokenizer: Callable[..., Any] | None,
    length_of: Callable[[Any], int] | None,
    num_proc: int | None,
    progress: bool,
) -> NDArray[np.int32]:
    """Returns the lengths of a column of all tables."""
    parts = []
    for table in tables:
        if length_of is None:
            lengths = _lengths_of_table(table, column, tokenizer, num_proc)
        else:
            lengths = measure_lengths(
                table, tokenizer, column, num_proc=num_proc, length_of=length_of, progress=progress
            )
        parts.append(lengths)
    return np.concatenate(parts)


def _lengths_of_table(
    table: Table, column: str, tokenizer: Callable[..., Any] | None, num_proc: int | None
) -> NDArray[np.int32]:
    """Returns the lengths of a column of texts, token ids or lengths."""
    _check_column(table, column, "--column")
    if isinstance(table, dict):
        return _as_lengths(table[column], column)
    dtype = getattr(table.features[column], "dtype", None)  # None: of lists
    if dtype is not None and "string" in dtype:
        if tokenizer is None:
            return _as_lengths(_numbers(table[column], column), column)
        return measure_lengths(table, tokenizer, column, num_proc=num_proc)
    if dtype is not None:
        return _as_lengths(table.with_format("numpy")[column][:], column)
    if tokenizer is not None and len(table) and is_chat(table[0][column]):
        return measure_lengths(table, tokenizer, column, num_proc=num_proc)
    return measure_lengths(table, column=column)


def _as_lengths(values: Any, name: str) -> NDArray[np.int32]:
    return as_streams({name: values})[name]


def _numbers(texts: Iterable[str], name: str) -> NDArray[np.int64]:
    """Returns the numbers in the lines of a txt file; blank lines are left out."""
    try:
        return np.array([int(text) for text in texts if text.strip()], np.int64)
    except ValueError as error:
        raise ConfigError(
            f"column {name!r} contains texts; name the `--tokenizer` that measures them, or "
            f"`--length-of characters` or words ({error!s:.200})"
        ) from None


def _check_output(path: Path, names: Sequence[str]) -> None:
    suffix = ".npy" if len(names) == 1 else ".npz"
    if path.suffix != suffix:
        raise ConfigError(f"`output` must end in {suffix}, but is {path.name!r}")


def _written(path: Path, streams: dict[str, NDArray[np.int32]]) -> dict[str, Any]:
    """Writes lengths to a file; returns them as read from there. A run that is killed leaves no part of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}{path.suffix}")
    if len(streams) == 1:
        name = next(iter(streams))
        np.save(new, streams[name])
        os.replace(new, path)
        return {name: np.load(path, mmap_mode="r")}
    np.savez(new, allow_pickle=False, **streams)
    os.replace(new, path)
    return streams
