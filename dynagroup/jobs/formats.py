"""Formats of result files: how one result becomes bytes, and how all results become a file."""

import json
import re
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch

from dynagroup.errors import ConfigError
from dynagroup.memory.phases import needed

# Characters that some readers take for line ends, and surrogates, which UTF-8 cannot encode.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
_WIDTH = struct.Struct("<I")  # features of a token
_GROUP = 256  # texts that are written to a Parquet file at a time


class Format(Protocol):
    """What the results of a job are, and how they are stored. Results are written one by one, so memory is bounded."""

    suffixes: tuple[str, ...]
    """Endings of the files that it writes; the first is that of ``output``."""

    def pack(self, result: Any, /) -> bytes:
        """Returns one result as bytes, for the journal."""
        ...

    def unpack(self, data: bytes, /) -> Any:
        """Returns a result that :meth:`pack` made bytes of."""
        ...

    def gather(self, results: list[Any], /) -> Any:
        """Returns the results of all samples as the user gets them."""
        ...

    def write(self, files: Sequence[IO[bytes]], results: Sequence[Any], /) -> None:
        """Writes all results in order, to one file for each suffix."""
        ...

    def read(self, paths: Sequence[Path], /) -> Any:
        """Returns gathered results that were written to files."""
        ...


class JsonLines:
    """One value for JSON per sample, such as a text. Each line is ``{"index": ..., "result": ...}``."""

    suffixes: tuple[str, ...] = (".jsonl",)

    def pack(self, result: object) -> bytes:
        return _as_json(result).encode()

    def unpack(self, data: bytes) -> Any:
        return json.loads(data)

    def gather(self, results: list[Any]) -> list[Any]:
        return results

    def write(self, files: Sequence[IO[bytes]], results: Sequence[object]) -> None:
        for index, result in enumerate(results):
            line = _as_json({"index": index, "result": result})
            files[0].write(f"{line}\n".encode())

    def read(self, paths: Sequence[Path]) -> list[Any]:
        with paths[0].open("rb") as file:
            return [json.loads(line)["result"] for line in file]


class Vectors:
    """One float32 vector per sample, all of one width; gathered into an array (num_samples, width)."""

    suffixes: tuple[str, ...] = (".npy",)

    def pack(self, result: Any) -> bytes:
        if isinstance(result, torch.Tensor):
            result = result.detach().float().cpu().numpy()
        vector = np.ascontiguousarray(result, dtype="<f4")
        if vector.ndim > 1:
            raise ConfigError(
                f"a .npy file takes one vector per item, but a result has the shape {vector.shape}; flatten it, or "
                "give `output` the ending .jsonl"
            )
        return vector.tobytes()

    def unpack(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype="<f4")

    def gather(self, results: list[np.ndarray]) -> np.ndarray:
        if not results:
            return np.zeros((0, 0), np.float32)
        return np.stack(results)

    def write(self, files: Sequence[IO[bytes]], results: Sequence[np.ndarray]) -> None:
        width = len(results[0]) if len(results) else 0
        _write_header(files[0], (len(results), width), "<f4")
        for index, vector in enumerate(results):
            if len(vector) != width:
                raise ConfigError(
                    f"result {index} has {len(vector)} numbers, but result 0 has {width}; a .npy file needs vectors of "
                    "one width, so give `output` the ending .jsonl"
                )
            files[0].write(vector.tobytes())

    def read(self, paths: Sequence[Path]) -> np.ndarray:
        return np.load(paths[0])


class _Ragged:
    """One float32 array (num_tokens, features) per sample; gathered into a list."""

    def pack(self, result: np.ndarray) -> bytes:
        width = _WIDTH.pack(result.shape[1])
        return width + np.ascontiguousarray(result, dtype="<f4").tobytes()

    def unpack(self, data: bytes) -> np.ndarray:
        (width,) = _WIDTH.unpack_from(data)
        return np.frombuffer(data, dtype="<f4", offset=_WIDTH.size).reshape(-1, width)

    def gather(self, results: list[np.ndarray]) -> list[np.ndarray]:
        return results


class RaggedArrays(_Ragged):
    """All tokens in one array (num_tokens, features), and the offsets (num_samples + 1,) of the samples in it."""

    suffixes: tuple[str, ...] = (".npy", ".offsets.npy")

    def write(self, files: Sequence[IO[bytes]], results: Sequence[np.ndarray]) -> None:
        offsets = np.zeros(len(results) + 1, "<i8")
        width = 0
        for index, result in enumerate(results):
            offsets[index + 1] = offsets[index] + len(result)
            width = result.shape[1]
        _write_header(files[0], (int(offsets[-1]), width), "<f4")
        for result in results:
            files[0].write(result.tobytes())
        _write_header(files[1], offsets.shape, "<i8")
        files[1].write(offsets.tobytes())

    def read(self, paths: Sequence[Path]) -> list[np.ndarray]:
        offsets = np.load(paths[1]).tolist()
        if offsets[-1] == 0:  # numpy cannot map an empty file
            values = np.load(paths[0])
        else:
            values = np.load(paths[0], mmap_mode="r")
        return [values[start:stop] for start, stop in pairwise(offsets)]


class ParquetLists(_Ragged):
    """One row per sample, whose column ``result`` is a list of the tokens' lists of features."""

    suffixes: tuple[str, ...] = (".parquet",)

    def write(self, files: Sequence[IO[bytes]], results: Sequence[np.ndarray]) -> None:
        pyarrow = needed("pyarrow", "an output that ends in .parquet", "parquet")
        parquet = needed("pyarrow.parquet", "an output that ends in .parquet", "parquet")
        width = results[0].shape[1] if len(results) else 0
        features = pyarrow.list_(pyarrow.float32(), width)
        schema = pyarrow.schema({"result": pyarrow.list_(features)})
        with parquet.ParquetWriter(files[0], schema) as writer:
            for group in _groups(results):
                offsets = np.cumsum([0, *map(len, group)], dtype="<i4")
                numbers = np.concatenate(group).reshape(-1)
                tokens = pyarrow.FixedSizeListArray.from_arrays(numbers, width)
                rows = pyarrow.ListArray.from_arrays(offsets, tokens)
                writer.write_table(pyarrow.table([rows], schema=schema))

    def read(self, paths: Sequence[Path]) -> list[np.ndarray]:
        parquet = needed("pyarrow.parquet", "an output that ends in .parquet", "parquet")
        results: list[np.ndarray] = []
        for batch in parquet.ParquetFile(paths[0]).iter_batches():
            rows = batch.column("result")
            numbers = rows.flatten().flatten().to_numpy()
            width = rows.type.value_type.list_size
            starts = np.cumsum(rows.value_lengths().to_numpy())[:-1]
            results += np.split(numbers.reshape(-1, width), starts)
        return results


JSON_LINES = JsonLines()
VECTORS = Vectors()
RAGGED = (RaggedArrays(), ParquetLists())


def format_of(path: Path, formats: Sequence[Format]) -> Format:
    """Returns the format that has the file's ending. ConfigError: none has it."""
    for form in formats:
        if path.suffix == form.suffixes[0]:
            return form
    endings = " or ".join(form.suffixes[0] for form in formats)
    raise ConfigError(f"`output` must end in {endings}, but is {path.name!r}")


def _groups(results: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    for start in range(0, len(results), _GROUP):
        stop = min(start + _GROUP, len(results))
        yield [results[index] for index in range(start, stop)]


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: str) -> None:
    """Writes the head of a ``.npy`` file. ``np.save`` would need the whole array, and hides that a disk is full."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _as_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _plain(value: Any) -> Any:
    """Returns numbers and arrays of numpy and torch as values for JSON."""
    if not hasattr(value, "tolist"):
        raise ConfigError(
            f"a result contains {value!r:.100}, which JSON cannot store; return texts, numbers, lists or dicts"
        )
    return value.tolist()
