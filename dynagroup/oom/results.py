"""Kinds of results, and the files they end up in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = ["TEXTS", "VECTORS", "Kind", "Texts", "Vectors", "read_results", "write_results"]

_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # to some readers; JSON escapes the other ones


class Kind(Protocol):
    """What a result is: how one is kept, and how all of them are given back."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the files that hold them."""
        ...

    def pack(self, result: Any, /) -> bytes:
        """One result as bytes."""
        ...

    def unpack(self, data: bytes, /) -> Any:
        """What was packed.

        Raises:
            ValueError: these bytes are no result of this kind.
        """
        ...

    def gather(self, num_samples: int, parts: Iterable[tuple[Sequence[int], Any]], /) -> Any:
        """All results in input order, from (indices, their results) in any order."""
        ...


class Texts:
    """A text a sample, or a list of texts.

    >>> Texts().gather(2, [([1], ["b"]), ([0], ["a"])])
    ['a', 'b']
    """

    suffixes = (".jsonl", ".parquet")

    def pack(self, result: Any) -> bytes:
        return as_json(result).encode()

    def unpack(self, data: bytes) -> Any:
        result = json.loads(data)
        if isinstance(result, str) or (isinstance(result, list) and all(isinstance(text, str) for text in result)):
            return result
        raise ValueError("neither a text nor a list of texts")

    def gather(self, num_samples: int, parts: Iterable[tuple[Sequence[int], Any]]) -> list[Any]:
        results: list[Any] = [None] * num_samples
        for indices, values in parts:
            for index, value in zip(indices, values, strict=True):
                results[index] = value
        return results


class Vectors:
    """A float32 vector a sample, all of one width: results are one array (num_samples, width).

    >>> Vectors().gather(2, [([1, 0], np.eye(2, dtype=np.float32))]).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """

    suffixes = (".jsonl", ".parquet", ".npy")

    def pack(self, result: Any) -> bytes:
        return np.ascontiguousarray(result, dtype="<f4").tobytes()

    def unpack(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)

    def gather(self, num_samples: int, parts: Iterable[tuple[Sequence[int], Any]]) -> np.ndarray:
        results = np.zeros((num_samples, 0), np.float32)
        for indices, rows in parts:
            rows = np.asarray(rows, np.float32)
            if results.shape[1] != rows.shape[1]:
                results = np.empty((num_samples, rows.shape[1]), np.float32)
            results[list(indices)] = rows
        return results


TEXTS, VECTORS = Texts(), Vectors()


def as_json(value: Any) -> str:
    """One line of JSON for every reader: no character in it ends a line, none is half of a pair."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate
        line = json.dumps(value, separators=(",", ":"))
    return line.translate(_LINE_BREAKS)


def write_results(path: Path, suffix: str, chunks: Iterator[list[Any]]) -> None:
    """All results, in input order, a chunk at a time: never more than one is in memory."""
    {".jsonl": _write_jsonl, ".parquet": _write_parquet, ".npy": _write_npy}[suffix](path, chunks)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_jsonl(path: Path, chunks: Iterator[list[Any]]) -> None:
    index = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for chunk in chunks:
            for result in chunk:
                value = result.tolist() if isinstance(result, np.ndarray) else result
                file.write(as_json({"index": index, "result": value}) + "\n")
                index += 1


def _write_parquet(path: Path, chunks: Iterator[list[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(chunks, [])
    schema = pa.schema({"index": pa.int64(), "result": _parquet_type(first)})
    start = 0
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in chain([first], chunks):
            column = [r.tolist() if isinstance(r, np.ndarray) else r for r in chunk]
            rows = {"index": range(start, start + len(chunk)), "result": column}
            writer.write_table(pa.table(rows, schema))
            start += len(chunk)


def _parquet_type(rows: list[Any]) -> Any:
    import pyarrow as pa

    if rows and isinstance(rows[0], np.ndarray):
        return pa.list_(pa.float32(), len(rows[0]))
    return pa.list_(pa.string()) if rows and isinstance(rows[0], list) else pa.string()


def _write_npy(path: Path, chunks: Iterator[list[Any]]) -> None:
    num_rows, width = 0, 0
    with path.open("wb") as file:
        header = _npy_header(0, 0)
        file.write(header)
        for chunk in chunks:
            rows = np.ascontiguousarray(chunk, dtype="<f4")
            file.write(rows.tobytes())
            num_rows, width = num_rows + len(rows), rows.shape[1]
        file.seek(0)
        file.write(_npy_header(num_rows, width))


def _npy_header(num_rows: int, width: int) -> bytes:
    """Always as long: version 1 of the format pads a header with blanks."""
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({num_rows}, {width}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + said.ljust(117).encode() + b"\n"


def read_results(path: Path, kind: Kind, num_samples: int) -> Any:
    """What :func:`write_results` wrote, as ``kind`` gathers it."""
    if path.suffix == ".npy":
        return np.load(path)
    return kind.gather(num_samples, _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path))


def _read_jsonl(path: Path) -> Iterator[tuple[list[int], list[Any]]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            row = json.loads(line)
            yield [row["index"]], [row["result"]]


def _read_parquet(path: Path) -> Iterator[tuple[list[int], Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            results = batch.column("result")
            if pa.types.is_fixed_size_list(results.type):
                values: Any = results.flatten().to_numpy().reshape(len(results), results.type.list_size)
            else:
                values = results.to_pylist()
            yield batch.column("index").to_pylist(), values
