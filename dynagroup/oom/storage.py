"""Results on disk: a journal while a job runs, so that a crash loses nothing, and the file that they end up in."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError, StateError
from dynagroup.state import opened, sealed

__all__ = ["TEXTS", "VECTORS", "Journal", "Kind", "Output"]

_log = logging.getLogger(__name__)
_Place: TypeAlias = "tuple[Path, int, int]"  # of a result: its file, where it begins there, its bytes
_JOURNAL, _RECEIPT = "journal 4", "receipt"  # kinds of saved states; the number is the format of records
_OWN = re.compile(r"rank-\d+\.journal|[0-9a-f]{32}\.new")
_HEAD = struct.Struct("<IIq")  # bytes of the result, checksum of index and result, index of the sample
_LONGEST_HEADER = 2**20
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # to some readers; JSON escapes the other ones


def _as_json(value: Any) -> str:
    """One line of JSON for every reader: no character in it ends a line, none is half of a pair."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate
        line = json.dumps(value, separators=(",", ":"))
    return line.translate(_LINE_BREAKS)


def _stacked(rows: Iterable[Any], num_rows: int) -> np.ndarray:
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return np.zeros((0, 0), np.float32)
    return np.fromiter(chain([first], rows), np.dtype((np.float32, len(first))), num_rows)


@dataclass(frozen=True)
class Kind:
    """What a job's results are: files that can hold them, one as bytes and back, all of them from (results, how many)."""

    suffixes: tuple[str, ...]
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]
    gather: Callable[[Iterable[Any], int], Any]


TEXTS = Kind((".jsonl", ".parquet"), lambda text: _as_json(text).encode(), json.loads, lambda texts, _: list(texts))
"""Texts, or lists of texts."""
VECTORS = Kind(
    (".jsonl", ".parquet", ".npy"),
    lambda vector: np.ascontiguousarray(vector, dtype="<f4").tobytes(),
    lambda data: np.frombuffer(data, dtype="<f4"),
    _stacked,
)
"""Float32 vectors of one width: together one array (num_samples, width)."""


# One file a rank. Its first line is JSON: which job it belongs to. Then one record a finished sample: length, checksum,
# index, result. A file counts up to its first record that is not whole, be it torn by a crash or damaged later: what stands
# behind is done again, so a wrong result is never taken for a right one, and a rank that goes on with a file cuts it there.
# Only a damaged first line cannot be helped: whose results are these? Cost of reading: one pass, and 100 bytes or so a sample.
class Journal:
    """The finished samples of a job, as bytes, in a folder; ``identity``, JSON-able, says which job."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], num_samples: int) -> None:
        self.folder, self._identity, self._num_samples = folder, identity, num_samples
        self._header = json.dumps(sealed(_JOURNAL, identity, {})).encode() + b"\n"
        self._file: Any = None

    def open(self, rank: int) -> None:
        """Start or go on writing as this rank, alone until :meth:`close`.

        Raises:
            ConfigError: another process is writing there.
        """
        path = self.folder / f"rank-{rank}.journal"
        try:
            while not self._is_there(path):  # another run may have ended, and removed what had just been opened
                self.close()
                self._open(path)
            self._file.truncate(self._records(path)[1])
        except BaseException:
            self.close()
            raise
        self._file.seek(0, os.SEEK_END)

    def finished(self) -> dict[int, _Place]:
        """Samples that any run has finished: index -> where its result is.

        Raises:
            StateError: the journal belongs to another job, or cannot be read; names the file.
        """
        found: dict[int, _Place] = {}
        for path in self._paths(".journal"):
            found = {**self._records(path)[0], **found}
        return found

    def read(self, found: Mapping[int, _Place]) -> Iterator[bytes]:
        """The results that :meth:`finished` has found, in order of their samples, one in memory at a time."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in {place[0] for place in found.values()}}
            for _, (path, start, length) in sorted(found.items()):
                files[path].seek(start)
                yield files[path].read(length)

    def append(self, indices: Sequence[int], results: Iterable[bytes]) -> None:
        """Add finished samples; they are on disk when this returns."""
        records = [] if self._file.tell() else [self._header]
        for index, data in zip(indices, results, strict=True):
            records.append(_HEAD.pack(len(data), _checksum(index, data), index) + data)
        self._file.write(b"".join(records))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the journal's own files, and the folder if nothing else is in it."""
        try:
            for path in self._paths():
                path.unlink(missing_ok=True)
            self.folder.rmdir()
        except FileNotFoundError:  # another process has done it
            pass
        except OSError as error:  # the output is safe: no reason to fail
            _log.warning("%s is left behind: %s", self.folder, error)

    def _open(self, path: Path) -> None:
        """Open and lock it; nothing is open if another run has removed the folder in between."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except FileNotFoundError:
            return
        except FileExistsError:  # also where the folder went after mkdir had found it, before it looked what it is
            if self.folder.exists() and not self.folder.is_dir():
                raise ConfigError(f"{self.folder} is not a folder, but finished samples are kept there") from None
            return
        _lock(self._file, path)

    def _is_there(self, path: Path) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except FileNotFoundError:
            return False

    def _paths(self, suffix: str = "") -> list[Path]:
        try:
            names = sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [self.folder / name for name in names if _OWN.fullmatch(name) and name.endswith(suffix)]

    def _records(self, path: Path) -> tuple[dict[int, _Place], int]:
        """Where the results of whole records are in a file, and where these records end. Warns of what is not whole."""
        records: dict[int, _Place] = {}
        try:
            with path.open("rb") as file:
                size, header = os.fstat(file.fileno()).st_size, file.readline(_LONGEST_HEADER)
                if not self._header.startswith(header):  # else it is whole, or torn and nothing was written after it
                    opened(json.loads(header), _JOURNAL, self._identity)
                end = len(header) if header == self._header else 0
                while end and (record := _record(file, size)) and 0 <= record[0] < self._num_samples:
                    end = file.tell()
                    records.setdefault(record[0], (path, end - len(record[1]), len(record[1])))
        except FileNotFoundError:  # the run that it belonged to has just ended
            return {}, 0
        except (OSError, ValueError, RecursionError, StateError) as error:
            raise StateError(
                f"{path} cannot be read: {error}. Give the arguments of then, name another `output`, or remove that file to "
                f"do its samples again, or {path.parent} to start over"
            ) from error
        if end < size:
            _log.warning(
                "%s: its last %d of %d bytes are no whole results (a run was killed while writing, or the file was damaged); "
                "those samples are done again", path, size - end, size,
            )  # fmt: skip
        return records, end


def _record(file: Any, size: int) -> tuple[int, bytes] | None:
    """Index and result of the record that begins here, in a file of so many bytes; None if it is not whole."""
    head = file.read(_HEAD.size)
    length, checksum, index = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    data = file.read(min(length, size))
    whole = len(head) == _HEAD.size and len(data) == length and _checksum(index, data) == checksum
    return (index, data) if whole else None


class Output:
    """A results file, written whole by renaming, with a small receipt beside it (``.job``) that says which job wrote it."""

    def __init__(self, path: Path, identity: Mapping[str, Any], num_samples: int, kind: Kind) -> None:
        if path.suffix not in kind.suffixes:
            wanted = ", ".join(kind.suffixes[:-1]) + f" or {kind.suffixes[-1]}"
            raise ConfigError(f"`output` must end in {wanted}, but is {path.name!r}")
        self._path, self._identity, self._num_samples, self._kind = path, dict(identity), num_samples, kind
        self._receipt = path.with_name(path.name + ".job")
        self.journal = Journal(path.with_name(path.name + ".journal"), identity, num_samples)

    def append(self, indices: Sequence[int], results: Iterable[Any]) -> None:
        """Keep finished samples."""
        self.journal.append(indices, map(self._kind.pack, results))

    def is_finished(self) -> bool:
        """Whether this very job has been finished there.

        Raises:
            StateError: the file is another job's, or has changed since; says what differs, and the way out.
            ConfigError: a file is there of which nobody knows where it came from.
        """
        if not self._path.exists():
            return False
        if not self._path.is_file():
            raise ConfigError(f"`output` {self._path} is no file; remove it, or name another")
        # A run that was killed between output and receipt has left its whole journal: it is published again. Another
        # process may do so right now: it removes the journal after the receipt is there, so the receipt is looked for last.
        if not self._receipt.exists() and len(self.journal.finished()) == self._num_samples > 0:
            return False
        if not self._receipt.exists():
            raise ConfigError(
                f"`output` {self._path} exists, and no {self._receipt.name!r} beside it says which job it is from; "
                "remove it, or name another"
            )
        self._check_receipt()
        return True

    def _check_receipt(self) -> None:
        try:
            receipt = opened(json.loads(self._receipt.read_bytes()), _RECEIPT, self._identity)[0]
            if [receipt["bytes"], receipt["checksum"]] != _sum(self._path):
                raise StateError(f"{self._path.name} has changed since its job was finished")
        except (OSError, ValueError, RecursionError, StateError) as error:
            raise StateError(
                f"{self._path} is not what {self._receipt.name} says: {error}. Give the arguments of then, name another "
                "`output`, or remove both to start over"
            ) from error

    def publish(self) -> None:
        """Write the output in input order. One rank does this while its journal is open, when all have written theirs.

        Raises:
            StateError: samples are missing.
        """
        found = self.journal.finished()
        if len(found) < self._num_samples:
            missing = self._num_samples - len(found)
            raise StateError(
                f"{missing} of {self._num_samples} samples are in no file of {self.journal.folder}; run again to finish them"
            )
        results = self._kind.gather(map(self._kind.unpack, self.journal.read(found)), len(found))
        new = self.journal.folder / f"{uuid.uuid4().hex}.new"  # nobody else writes it; it goes with the journal
        _FORMATS[self._path.suffix][0](new, results)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        size, checksum = _sum(new)
        receipt = sealed(_RECEIPT, self._identity, {"bytes": size, "checksum": checksum})
        self._receipt.unlink(missing_ok=True)  # of an output that was removed: it must not vouch for this one
        os.replace(new, self._path)
        new.write_text(json.dumps(receipt) + "\n", encoding="utf-8")
        os.replace(new, self._receipt)

    def read(self) -> Any:
        """The results in input order."""
        return self._kind.gather(_FORMATS[self._path.suffix][1](self._path), self._num_samples)


def _write_jsonl(path: Path, results: Any) -> None:
    rows = (row.tolist() if isinstance(row, np.ndarray) else row for row in results)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_as_json({"index": index, "result": row}) + "\n" for index, row in enumerate(rows))


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from (json.loads(line)["result"] for line in file)


def _write_parquet(path: Path, results: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not len(results):
        column: Any = pa.array([], pa.string())
    elif isinstance(results, np.ndarray):
        column = pa.FixedSizeListArray.from_arrays(pa.array(results.reshape(-1)), results.shape[1])
    else:
        column = pa.array(results)
    pq.write_table(pa.table({"index": range(len(results)), "result": column}), path, row_group_size=4096)


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["result"]):
            rows: Any = batch.column("result")
            vectors = hasattr(rows.type, "list_size")
            yield from rows.flatten().to_numpy().reshape(len(rows), -1) if vectors else rows.to_pylist()


def _write_npy(path: Path, results: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, results)


# suffix -> how results are written, and read back in input order
_FORMATS: dict[str, tuple[Callable[[Path, Any], None], Callable[[Path], Iterable[Any]]]] = {
    ".jsonl": (_write_jsonl, _read_jsonl),
    ".parquet": (_write_parquet, _read_parquet),
    ".npy": (_write_npy, np.load),
}


def _checksum(index: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(index.to_bytes(8, "little", signed=True)))


def _sum(path: Path) -> list[int]:
    """Size and checksum of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
        return [file.tell(), checksum]


def _lock(file: Any, path: Path) -> None:
    """Two runs of one job would mix their records."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another process is writing {path}: this job is running already; wait for it, or end it"
        ) from None
    except OSError as error:  # file systems without locks
        _log.info("%s cannot be locked: %s", path, error)
