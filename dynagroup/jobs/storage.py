"""Stores results on disk: in a journal while a job runs, so that a crash loses nothing, then in the output file."""

import json
import logging
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError, StateError
from dynagroup.jobs.formats import Format
from dynagroup.state import opened, sealed

_log = logging.getLogger(__name__)
_OWN_FILE = re.compile(r"[0-9a-f]{32}\.(journal|new)")
_HEAD = struct.Struct("<IIq")  # bytes of the result, checksum, index of the sample
_UNKNOWN = " " * 31  # as long as the checksum of an output
_BLOCK_BYTES = 2**20


# A write-ahead journal. The file PATH.job describes the job and, once the job is finished, its output. The run that
# works on the job locks that file, which is never removed or replaced. In the folder PATH.journal, each process of each
# run writes its own file of records (length, checksum, index, result). Checksums start from the job's identity, so an
# intact record is a result of this job. A file is read up to its first record that is not intact (torn by a crash, or
# damaged later). The output is renamed into place after PATH.job describes it. Cost: one fsync per batch. Memory: one
# result at a time, and a few integers for each sample.
class Output:
    """A job's output file, and until it is complete, the journal of finished samples beside it."""

    def __init__(
        self, path: Path, identity: Mapping[str, object], num_samples: int, form: Format
    ) -> None:
        self._path = path
        self.identity = dict(identity)
        self.num_samples = num_samples
        self._format = form
        # All files of the output; the last to be renamed into place is `output` itself.
        self._paths = [path, *(path.with_suffix(suffix) for suffix in form.suffixes[1:])]
        self._receipt = path.with_name(path.name + ".job")
        self.journal = path.with_name(path.name + ".journal")
        self._seed = zlib.crc32(json.dumps(self.identity, sort_keys=True).encode())
        self._lock: IO[bytes] | None = None
        self._file: IO[bytes] | None = None

    def is_finished(self) -> bool:
        """Returns whether this job's output is complete. Raises for an output of another job, or a changed one."""
        if not self._path.exists():
            return False
        if not self._path.is_file() or not self._receipt.exists():
            raise ConfigError(
                f"`output` {self._path} exists, but no {self._receipt.name!r} beside it says which job wrote it; "
                "remove the file, or name another one"
            )
        self._check_receipt(self._paths)
        return True

    def log_earlier_results(self, num_finished: int) -> None:
        """Logs from when the results are that this run continues or returns, and how to start anew."""
        files = [self._path] if self._path.exists() else self._own_files(".journal")
        begun = time.localtime(min(path.stat().st_mtime for path in files))
        _log.warning(
            "%s: %d of %d results are from %s, by a job with the same %s; code is not compared. To start anew, remove %s, %s "
            "and %s, or name another `output`",
            self._path,
            num_finished,
            self.num_samples,
            time.strftime("%Y-%m-%d %H:%M:%S", begun),
            ", ".join(self.identity),
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
        except BlockingIOError:
            raise ConfigError(
                f"{self._receipt} is locked: another process is running this job, or a killed run's workers have not "
                "ended yet; wait until they have"
            ) from None
        except (ImportError, OSError) as error:  # systems and file systems that have no locks
            _log.info("%s cannot be locked: %s", self._receipt, error)
        if self.is_finished():
            return True
        if self._own_files():
            self._check_receipt()
        self._write_receipt(_UNKNOWN)
        return False

    def _check_receipt(self, outputs: Sequence[Path] = ()) -> None:
        """Raises StateError if the job file describes another job, or output files other than these."""
        try:
            line = self._receipt.read_bytes().partition(b"\n")[0]
            receipt = opened(json.loads(line), "job", self.identity)[0] if line else {}
            if outputs and receipt.get("output") != _checksum_of(outputs):
                raise StateError(f"{self._path.name} was changed after its job was finished")
        except (OSError, ValueError, RecursionError, StateError) as error:
            raise StateError(
                f"{self._receipt} was written by another job: {error}. Give the same arguments as then, name another "
                f"`output`, or remove {self._receipt.name}, {self._path.name} and {self.journal.name} to start over"
            ) from error

    def _write_receipt(self, output: str) -> None:
        """Overwrites the first line of the job file in place. Older text after it does no harm, because it is not read."""
        assert self._lock is not None
        line = json.dumps(sealed("job", self.identity, {"output": output}))
        self._lock.seek(0)
        self._lock.write(line.encode() + b"\n")
        _sync(self._lock)

    def finished(self) -> "Finished":
        """Returns the results of samples that any run has finished. Warns about damaged records."""
        finished = Finished(self._format, self.num_samples)
        for path in self._own_files(".journal"):
            end = self._find_records(path, finished)
            num_bytes = path.stat().st_size
            if end < num_bytes:
                _log.warning(
                    "%s: the last %d of %d bytes are not complete results of this job (a run was killed while writing, or "
                    "the file was damaged); their samples are run again",
                    path,
                    num_bytes - end,
                    num_bytes,
                )
        return finished

    def _find_records(self, path: Path, finished: "Finished") -> int:
        """Notes the intact records of a journal in ``finished``; returns where the last of them ends."""
        finished.paths.append(path)
        end = 0
        with path.open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum, index = _HEAD.unpack(head)
                data = file.read(length)
                if len(data) < length or self._checksum(index, data) != checksum:
                    break
                finished.note(index, end + _HEAD.size, length)
                end = file.tell()
        return end

    def append(self, indices: Sequence[int], results: Iterable[object]) -> None:
        """Appends finished samples to the journal; they are on disk when the call returns."""
        if self._file is None:
            self.journal.mkdir(exist_ok=True)
            self._file = self._new_path(".journal").open("xb")
        for index, result in zip(indices, results, strict=True):
            data = self._format.pack(result)
            self._file.write(_HEAD.pack(len(data), self._checksum(index, data), index) + data)
        _sync(self._file)

    def publish(self) -> None:
        """Writes the output in input order; called by the run that has the lock, when all samples are finished."""
        results = self.finished()
        num_missing = self.num_samples - int(results.are_finished.sum())
        if num_missing > 0:
            raise StateError(
                f"{num_missing} of {self.num_samples} samples are missing in {self.journal}; run again"
            )
        self.journal.mkdir(exist_ok=True)  # a job without samples has no journal yet
        # Only this process writes them; they are removed with the journal.
        new_paths = [self._new_path(".new") for _ in self._paths]
        with closing(results), ExitStack() as opened_files:
            files = [opened_files.enter_context(path.open("wb")) for path in new_paths]
            self._format.write(files, results)
            for file in files:
                _sync(file)
        self._write_receipt(_checksum_of(new_paths))
        for new, path in reversed([*zip(new_paths, self._paths, strict=True)]):
            os.replace(new, path)

    def close(self) -> None:
        """Releases the lock, also from workers that were forked meanwhile."""
        with ExitStack() as files:  # unlocks last, and also if the disk is full
            if self._lock is not None:
                files.callback(self._lock.close)
                files.callback(_unlock, self._lock)
            if self._file is not None:
                files.callback(self._file.close)

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
        return self._format.read(self._paths)

    def _new_path(self, suffix: str) -> Path:
        return self.journal / f"{uuid.uuid4().hex}{suffix}"

    def _own_files(self, suffix: str = "") -> list[Path]:
        try:  # Path.glob would not report a folder without read permission
            names = sorted(os.listdir(self.journal))
        except FileNotFoundError:
            return []
        own = [name for name in names if _OWN_FILE.fullmatch(name) and name.endswith(suffix)]
        return [self.journal / name for name in own]

    def _checksum(self, index: int, data: bytes) -> int:
        start = zlib.crc32(index.to_bytes(8, "little", signed=True), self._seed)
        return zlib.crc32(data, start)


class Finished(Sequence[Any]):
    """The finished results of a job by index, read from the journals one at a time."""

    def __init__(self, form: Format, num_samples: int) -> None:
        self.paths: list[Path] = []
        """Of the journals that have been read."""
        self._format = form
        self._files: dict[int, IO[bytes]] = {}  # open ones, by their place in ``paths``
        self._places = np.full(num_samples, -1, np.int32)  # in ``paths``; -1: not finished
        self._starts = np.zeros(num_samples, np.int64)
        self._sizes = np.zeros(num_samples, np.int64)

    @property
    def are_finished(self) -> NDArray[np.bool_]:
        return self._places >= 0

    def note(self, index: int, start: int, size: int) -> None:
        """Remembers where a result is in the last journal."""
        self._places[index] = len(self.paths) - 1
        self._starts[index] = start
        self._sizes[index] = size

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        place = int(self._places[index])
        if place not in self._files:
            self._files[place] = self.paths[place].open("rb")
        file = self._files[place]
        file.seek(int(self._starts[index]))
        return self._format.unpack(file.read(int(self._sizes[index])))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _unlock(file: IO[bytes]) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
    except (ImportError, OSError):  # systems and file systems that have no locks
        pass


def _checksum_of(paths: Iterable[Path]) -> str:
    checksum = 0
    num_bytes = 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
            num_bytes += file.tell()
    return f"{num_bytes:20} {checksum:10}"
