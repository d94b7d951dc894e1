"""Stores results on disk: in a journal while a job runs, so that a crash loses nothing, then in the output file."""

import json
import logging
import mmap
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeAlias, cast
from weakref import WeakSet

import numpy as np

from dynagroup.errors import ConfigError, StateError
from dynagroup.state import opened, sealed

Buffer: TypeAlias = bytes | memoryview
_log = logging.getLogger(__name__)
_OWN = re.compile(r"[0-9a-f]{32}\.(journal|new)")
_HEAD = struct.Struct("<IIq")  # bytes of the result, checksum, index of the sample
_UNKNOWN = " " * 31  # as long as the checksum of an output
_LOCKS: WeakSet[Any] = (
    WeakSet()
)  # of running jobs; a forked worker that outlives a killed run must not keep them
getattr(os, "register_at_fork", lambda **_: None)(
    after_in_child=lambda: [lock.close() for lock in _LOCKS]
)
_ESCAPED = re.compile(
    "[\x85\u2028\u2029\ud800-\udfff]"
)  # characters that some readers take for line ends; surrogates


@dataclass(frozen=True)
class Kind:
    """The format of a job's results: its file suffix, and functions that turn one result into bytes, and write all."""

    suffix: str
    pack: Callable[[Any], bytes]
    unpack: Callable[[Buffer], Any]
    gather: Callable[[list[Any]], Any]
    write: Callable[[IO[bytes], Any], None]
    read: Callable[[Path], Any]


def _as_json(value: Any) -> str:
    """Returns a value as JSON text in one line, without characters that some readers take for a line end."""
    return _ESCAPED.sub(
        lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False)
    )


TEXTS = Kind(  # texts, or lists of texts
    ".jsonl",
    lambda text: _as_json(text).encode(),
    lambda data: json.loads(bytes(data)),
    list,
    lambda file, rows: file.writelines(
        f"{_as_json({'index': k, 'result': r})}\n".encode() for k, r in enumerate(rows)
    ),
    lambda path: [json.loads(line)["result"] for line in path.read_bytes().splitlines()],
)
VECTORS = Kind(  # float32 vectors of one width, gathered into an array (num_samples, width)
    ".npy",
    lambda vector: np.ascontiguousarray(vector, dtype="<f4").tobytes(),
    lambda data: np.frombuffer(data, dtype="<f4"),
    lambda rows: np.stack(rows) if rows else np.zeros((0, 0), np.float32),
    lambda file, rows: np.save(cast("Any", SimpleNamespace(write=file.write)), rows),
    np.load,  # else full disks are hidden
)


# A write-ahead journal. The file PATH.job describes the job and, once the job is finished, its output. The run that
# works on the job locks that file, which is never removed or replaced. In the folder PATH.journal, each process of each
# run writes its own file of records (length, checksum, index, result). Checksums start from the job's identity, so an
# intact record is a result of this job. A file is read up to its first record that is not intact (torn by a crash, or
# damaged later). The output is renamed into place after PATH.job describes it. Cost: one fsync per batch.
class Output:
    """A job's output file, and until it is complete, the journal of finished samples beside it."""

    def __init__(
        self, path: Path, identity: Mapping[str, Any], num_samples: int, kind: Kind
    ) -> None:
        if path.suffix != kind.suffix:
            raise ConfigError(f"`output` must end in {kind.suffix}, but is {path.name!r}")
        self._path, self.identity, self.num_samples, self._kind = (
            path,
            dict(identity),
            num_samples,
            kind,
        )
        self._receipt = path.with_name(path.name + ".job")
        self.journal = path.with_name(path.name + ".journal")
        self._seed = zlib.crc32(json.dumps(self.identity, sort_keys=True).encode())
        self._lock: Any = None
        self._file: Any = None

    def is_finished(self) -> bool:
        """Returns whether this job's output is complete. Raises for an output of another job, or a changed one."""
        if not self._path.exists():
            return False
        if not self._path.is_file() or not self._receipt.exists():
            missing = f"no {self._receipt.name!r} beside it says which job wrote it"
            raise ConfigError(
                f"`output` {self._path} exists, but {missing}; remove the file, or name another one"
            )
        self._said(_sum(self._path))
        return True

    def tell_of_earlier(self, num_finished: int) -> None:
        """Logs from when the results are that this run continues or returns, and how to start anew."""
        files = [self._path] if self._path.exists() else self._own_files("journal")
        begun = time.localtime(min(path.stat().st_mtime for path in files))
        _log.warning(
            "%s: %d of %d results are from %s, by a job of the same texts, arguments, tokenizer, config, weights and "
            "`identity`; code is not compared. To start anew, remove %s, %s and %s, or name another `output`",
            self._path,
            num_finished,
            self.num_samples,
            time.strftime("%Y-%m-%d %H:%M:%S", begun),
            self._path.name,
            self._receipt.name,
            self.journal.name,
        )

    def claim(self) -> bool:
        """Locks the output for this run until :meth:`close`; returns True if another process has finished the job in
        the meantime. Raises StateError if the journal has another job's samples."""
        self._receipt.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.fdopen(os.open(self._receipt, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:  # without a lock, two runs of one job would do the work twice
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _LOCKS.add(self._lock)
        except BlockingIOError:
            running = "another process is running this job"
            raise ConfigError(
                f"{self._receipt} is locked: {running}; wait until it has finished"
            ) from None
        except (ImportError, OSError) as error:  # systems and file systems that have no locks
            _log.info("%s cannot be locked: %s", self._receipt, error)
        if self.is_finished():
            return True
        if self._own_files():
            self._said()
        self._say(_UNKNOWN)
        return False

    def _said(self, found: str = "") -> None:
        """Raises StateError if the job file describes another job, or another output than ``found``."""
        try:
            line = self._receipt.read_bytes()
            receipt = (
                opened(json.loads(line.partition(b"\n")[0]), "job", self.identity)[0]
                if line
                else {}
            )
            if found and receipt.get("output") != found:
                raise StateError(f"{self._path.name} was changed after its job was finished")
        except (OSError, ValueError, RecursionError, StateError) as error:
            files = f"{self._receipt.name}, {self._path.name} and {self.journal.name}"
            way_out = f"Give the same arguments as then, name another `output`, or remove {files} to start over"
            raise StateError(
                f"{self._receipt} was written by another job: {error}. {way_out}"
            ) from error

    def _say(self, output: str) -> None:
        """Overwrites the first line of the job file in place. Older text after it does no harm, because it is not read."""
        self._lock.seek(0)
        self._lock.write(
            json.dumps(sealed("job", self.identity, {"output": output})).encode() + b"\n"
        )
        self._lock.flush()
        os.fsync(self._lock.fileno())

    def finished(self) -> dict[int, Buffer]:
        """Returns the results of samples that any run has finished: index -> result. Warns about damaged records."""
        found: dict[int, Buffer] = {}
        for path in filter(os.path.getsize, self._own_files("journal")):
            with path.open("rb") as file:  # read as a memory map, whose pages the system can free
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            data, end = memoryview(mapped), 0
            while end + _HEAD.size <= len(data):
                length, checksum, index = _HEAD.unpack_from(data, end)
                start, stop = end + _HEAD.size, end + _HEAD.size + length
                result = data[start:stop]
                if len(result) < length or self._checksum(index, result) != checksum:
                    break
                found.setdefault(index, result)
                end = stop
            if end < len(data):
                _log.warning(
                    "%s: the last %d of %d bytes are not complete results of this job (a run was killed while writing, or the "
                    "file was damaged); their samples are run again",
                    path,
                    len(data) - end,
                    len(data),
                )
        return found

    def append(self, indices: Sequence[int], results: Iterable[Any]) -> None:
        """Appends finished samples to the journal; they are on disk when the call returns."""
        if self._file is None:
            self.journal.mkdir(exist_ok=True)
            self._file = (self.journal / f"{uuid.uuid4().hex}.journal").open("xb")
        for index, data in zip(indices, map(self._kind.pack, results), strict=True):
            self._file.write(_HEAD.pack(len(data), self._checksum(index, data), index) + data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Writes the output in input order; called by the run that has the lock, when all samples are finished."""
        found = self.finished()
        if missing := max(self.num_samples - len(found), 0):
            raise StateError(
                f"{missing} of {self.num_samples} samples are missing in {self.journal}; run again"
            )
        self.journal.mkdir(exist_ok=True)  # a job without samples has no journal yet
        new = (
            self.journal / f"{uuid.uuid4().hex}.new"
        )  # only this process writes it; removed together with the journal
        results = self._kind.gather([self._kind.unpack(found[i]) for i in range(len(found))])
        with new.open("wb") as file:
            self._kind.write(file, results)
            file.flush()
            os.fsync(file.fileno())
        self._say(_sum(new))
        os.replace(new, self._path)

    def close(self) -> None:
        """Releases the lock."""
        with ExitStack() as files:  # closes the lock last, and also if the disk is full
            for file in filter(None, (self._lock, self._file)):
                files.callback(file.close)

    def clear(self) -> None:
        """Deletes the journal's own files, and its folder if nothing else is in it."""
        try:
            for path in self._own_files():
                path.unlink(missing_ok=True)
            self.journal.rmdir()
        except FileNotFoundError:  # another process has removed it
            pass
        except OSError as error:  # not raised, because the output is complete
            _log.warning("%s could not be removed: %s", self.journal, error)

    def read(self) -> Any:
        """Returns the results in input order."""
        return self._kind.read(self._path)

    def _own_files(self, kind: str = "") -> list[Path]:
        try:
            names = os.listdir(
                self.journal
            )  # Path.glob would not report a folder without read permission
        except FileNotFoundError:
            return []
        return [
            self.journal / name
            for name in sorted(names)
            if name.endswith(kind) and _OWN.fullmatch(name)
        ]

    def _checksum(self, index: int, data: Buffer) -> int:
        return zlib.crc32(data, zlib.crc32(index.to_bytes(8, "little", signed=True), self._seed))


def _sum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
        return f"{file.tell():20} {checksum:10}"
