"""What a job's results are, and the files that hold them: a format is a line of a table, a writer and a reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Parts", "Texts", "Vectors", "read_results", "write_results"]

Parts: TypeAlias = Iterable[tuple[Sequence[int], Any]]
"""(indices of samples, their results), in any order."""
Chunks: TypeAlias = Iterator[list[Any]]
"""Results in input order, some at a time."""

_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # to some readers; JSON escapes the other ones


class Texts:
    """Results that are texts, or lists of texts.

    >>> Texts().gather(2, [([1], ["b"]), ([0], ["a"])])
    ['a', 'b']
    """

    suffixes = (".jsonl", ".parquet")

    def pack(self, result: Any) -> bytes:
        return as_json(result).encode()

    def unpack(self, data: bytes) -> Any:
        return json.loads(data)

    def gather(self, num_samples: int, parts: Parts) -> list[Any]:
        """All results in input order."""
        results: list[Any] = [None] * num_samples
        for indices, values in parts:
            for index, value in zip(indices, values, strict=True):
                results[index] = value
        return results


class Vectors:
    """Results that are float32 vectors of one width: together one array (num_samples, width).

    >>> Vectors().gather(2, [([1, 0], np.eye(2, dtype=np.float32))]).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """

    suffixes = (".jsonl", ".parquet", ".npy")

    def pack(self, result: Any) -> bytes:
        return np.ascontiguousarray(result, dtype="<f4").tobytes()

    def unpack(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)

    def gather(self, num_samples: int, parts: Parts) -> np.ndarray:
        """All results in input order."""
        results = np.zeros((num_samples, 0), np.float32)
        for indices, values in parts:
            rows = np.asarray(values, np.float32)
            if results.shape[1] != rows.shape[1]:
                results = np.empty((num_samples, rows.shape[1]), np.float32)
            results[list(indices)] = rows
        return results


def as_json(value: Any) -> str:
    """One line of JSON for every reader: no character in it ends a line, none is half of a pair."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate
        line = json.dumps(value, separators=(",", ":"))
    return line.translate(_LINE_BREAKS)


def _listed(chunk: list[Any]) -> list[Any]:
    return [result.tolist() if isinstance(result, np.ndarray) else result for result in chunk]


def _write_jsonl(path: Path, chunks: Chunks, num_samples: int) -> None:
    rows = enumerate(chain.from_iterable(map(_listed, chunks)))
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(as_json({"index": index, "result": result}) + "\n" for index, result in rows)


def _read_jsonl(path: Path) -> Iterator[tuple[list[int], list[Any]]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            row = json.loads(line)
            yield [row["index"]], [row["result"]]


def _write_parquet(path: Path, chunks: Chunks, num_samples: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(chunks, [])
    one = first[0] if first else ""
    kind = pa.list_(pa.float32(), len(one)) if isinstance(one, np.ndarray) else pa.string()
    schema = pa.schema({"index": pa.int64(), "result": pa.list_(pa.string()) if isinstance(one, list) else kind})
    start = 0
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in chain([first], chunks):
            writer.write_table(pa.table({"index": range(start, start + len(chunk)), "result": _listed(chunk)}, schema))
            start += len(chunk)


def _read_parquet(path: Path) -> Iterator[tuple[list[int], Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            results: Any = batch.column("result")
            vectors = pa.types.is_fixed_size_list(results.type)
            values = results.flatten().to_numpy().reshape(len(batch), -1) if vectors else results.to_pylist()
            yield batch.column("index").to_pylist(), values


def _write_npy(path: Path, chunks: Chunks, num_samples: int) -> None:
    first = next(chunks, [])
    shape = (num_samples, len(first[0]) if first else 0)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for chunk in chain([first], chunks):
            file.write(b"".join(np.ascontiguousarray(row, dtype="<f4").tobytes() for row in chunk))


def _read_npy(path: Path) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    rows = np.load(path)
    yield range(len(rows)), rows


_FORMATS: dict[str, tuple[Callable[[Path, Chunks, int], None], Callable[[Path], Any]]] = {
    ".jsonl": (_write_jsonl, _read_jsonl),
    ".parquet": (_write_parquet, _read_parquet),
    ".npy": (_write_npy, _read_npy),
}


def write_results(path: Path, suffix: str, chunks: Chunks, num_samples: int) -> None:
    """All results in a file of that format, never more than one chunk in memory."""
    _FORMATS[suffix][0](path, chunks, num_samples)


def read_results(path: Path) -> Parts:
    """What :func:`write_results` wrote, piece by piece."""
    return _FORMATS[path.suffix][1](path)
