"""Formats of result files: how one result becomes bytes, and how all results become a file."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Protocol, TypeAlias, cast

import numpy as np

from dynagroup.errors import ConfigError

Buffer: TypeAlias = bytes | memoryview
# Characters that some readers take for line ends, and surrogates, which UTF-8 cannot encode.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


class Format(Protocol):
    """What the results of a job are, and how they are stored."""

    suffix: str

    def pack(self, result: Any, /) -> bytes:
        """Returns one result as bytes, for the journal."""
        ...

    def unpack(self, data: Buffer, /) -> Any:
        """Returns a result that :meth:`pack` made bytes of."""
        ...

    def gather(self, results: list[Any], /) -> Any:
        """Returns the results of all samples as the user gets them."""
        ...

    def write(self, file: IO[bytes], results: Any, /) -> None:
        """Writes gathered results."""
        ...

    def read(self, path: Path, /) -> Any:
        """Returns gathered results that were written to a file."""
        ...


class JsonLines:
    """One value for JSON per sample, such as a text. Each line is ``{"index": ..., "result": ...}``."""

    suffix = ".jsonl"

    def pack(self, result: Any) -> bytes:
        return _as_json(result).encode()

    def unpack(self, data: Buffer) -> Any:
        return json.loads(bytes(data))

    def gather(self, results: list[Any]) -> list[Any]:
        return results

    def write(self, file: IO[bytes], results: list[Any]) -> None:
        for index, result in enumerate(results):
            line = _as_json({"index": index, "result": result})
            file.write(f"{line}\n".encode())

    def read(self, path: Path) -> list[Any]:
        return [json.loads(line)["result"] for line in path.read_bytes().splitlines()]


class Vectors:
    """One float32 vector per sample, all of one width; gathered into an array (num_samples, width)."""

    suffix = ".npy"

    def pack(self, result: Any) -> bytes:
        return np.ascontiguousarray(result, dtype="<f4").tobytes()

    def unpack(self, data: Buffer) -> np.ndarray:
        return np.frombuffer(data, dtype="<f4")

    def gather(self, results: list[Any]) -> np.ndarray:
        if not results:
            return np.zeros((0, 0), np.float32)
        return np.stack(results)

    def write(self, file: IO[bytes], results: np.ndarray) -> None:
        save_array(file, results)

    def read(self, path: Path) -> np.ndarray:
        return np.load(path)


JSON_LINES = JsonLines()
VECTORS = Vectors()


def format_of(path: Path, formats: Sequence[Format]) -> Format:
    """Returns the format that has the file's ending. ConfigError: none has it."""
    for form in formats:
        if path.suffix == form.suffix:
            return form
    endings = " or ".join(form.suffix for form in formats)
    raise ConfigError(f"`output` must end in {endings}, but is {path.name!r}")


def save_array(file: IO[bytes], array: np.ndarray) -> None:
    """Writes an array as ``np.save`` does. numpy writes to a real file past its buffer, and hides that a disk is full."""
    np.save(cast("Any", SimpleNamespace(write=file.write)), array)


def _as_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
