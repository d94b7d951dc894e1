"""Results on disk: a journal while a job runs, so that a crash loses nothing, and the file that they end up in."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynagroup.errors import ConfigError, StateError
from dynagroup.oom.formats import Texts, Vectors, read_results, write_results
from dynagroup.state import differences

__all__ = ["Journal", "Output"]

_log = logging.getLogger(__name__)
_FORMAT = {"journal's format": 3}
_OWN = re.compile(r"rank-\d+\.journal|[0-9a-f]{32}\.new")
_HEAD = struct.Struct("<IIq")  # bytes of the result, checksum of index and result, index of the sample
_LONGEST_HEADER = 2**20


# One file a rank. Its first line is JSON: which job it belongs to. Then one record a finished sample: length, checksum,
# index, result. A file counts up to its first record that is not whole, be it torn by a crash or damaged later: what stands
# behind is done again, so a wrong result is never taken for a right one, and a rank that goes on with a file cuts it there.
# Only a damaged first line cannot be helped: whose results are these? Reading costs one pass and 24 bytes a sample.
class Journal:
    """The finished samples of a job, in a folder beside its output.

    Args:
        output: where results will be published.
        identity: what the job is, JSON-able; a journal of another job is refused.
        num_samples: samples of the whole job.
        kind: what a result is.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any], num_samples: int, kind: Texts | Vectors) -> None:
        self._job, self._num_samples, self._kind = {**_FORMAT, **identity}, num_samples, kind
        self._header = json.dumps(self._job).encode() + b"\n"
        self._folder = output.with_name(output.name + ".journal")
        self._file: Any = None

    def open(self, rank: int) -> None:
        """Start or go on writing as this rank, alone until :meth:`close`.

        Raises:
            ConfigError: another process is writing there.
        """
        path = self._folder / f"rank-{rank}.journal"
        try:
            while not self._is_there(path):  # another run may have ended, and removed what had just been opened
                self.close()
                self._open(path)
            os.truncate(path, self._records(path)[1])
        except BaseException:
            self.close()
            raise
        self._file.seek(0, os.SEEK_END)

    def finished(self, *, warn: bool = True) -> dict[int, tuple[Path, int]]:
        """Samples that any run has finished: index -> where its record is. Warns of what is not whole.

        Raises:
            StateError: the journal belongs to another job, or cannot be read; names the file.
        """
        found: dict[int, tuple[Path, int]] = {}
        for path in self._paths(".journal"):
            records, end, size = self._records(path)
            found = {**records, **found}
            if warn and end < size:
                _log.warning(
                    "%s: its last %d of %d bytes are no whole results (a run was killed while writing, or the file was "
                    "damaged); those samples are done again", path, size - end, size,
                )  # fmt: skip
        return found

    def append(self, indices: Sequence[int], results: Sequence[Any]) -> None:
        """Add finished samples; they are on disk when this returns."""
        records = [] if self._file.tell() else [self._header]
        for index, result in zip(indices, results, strict=True):
            data = self._kind.pack(result)
            records.append(_HEAD.pack(len(data), _checksum(index, data), index) + data)
        self._file.write(b"".join(records))
        self._file.flush()
        os.fsync(self._file.fileno())

    def results(self, at_once: int = 4096) -> Iterator[list[Any]]:
        """All results in input order, so many at a time.

        Raises:
            StateError: samples are missing, or a file has changed since it was read; names it.
        """
        where = self.finished(warn=False)
        missing = self._num_samples - len(where)
        if missing:
            raise StateError(
                f"{missing} of {self._num_samples} samples are in no file of {self._folder.name!r}; run again to finish them"
            )
        files = {path: path.open("rb") for path in {path for path, _ in where.values()}}
        try:
            for start in range(0, self._num_samples, at_once):
                chunk = range(start, min(start + at_once, self._num_samples))
                yield [self._read(files[where[i][0]], where[i][1], i) for i in chunk]
        finally:
            for file in files.values():
                file.close()

    def close(self) -> None:
        """Let others write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def new_path(self) -> Path:
        """For a file that nobody else writes; it goes with the journal, if it is still there."""
        return self._folder / f"{uuid.uuid4().hex}.new"

    def remove(self) -> None:
        """Delete the journal's own files, and the folder if nothing else is in it."""
        if not self._folder.is_dir():
            return
        try:
            for path in self._paths():
                path.unlink(missing_ok=True)
            self._folder.rmdir()
        except FileNotFoundError:  # another process has done it
            pass
        except OSError as error:  # the output is safe: no reason to fail
            _log.warning("%s is left behind: %s", self._folder, error)

    def _open(self, path: Path) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except FileExistsError:
            raise ConfigError(f"{self._folder.name!r} is not a folder, but finished samples are kept there") from None
        except FileNotFoundError:  # the folder was removed in between
            return
        _lock(self._file, path)

    def _is_there(self, path: Path) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except FileNotFoundError:
            return False

    def _paths(self, suffix: str = "") -> list[Path]:
        if not self._folder.is_dir():
            return []
        own = (path for path in self._folder.iterdir() if _OWN.fullmatch(path.name) and path.name.endswith(suffix))
        return sorted(path for path in own if path.is_file())

    def _records(self, path: Path) -> tuple[dict[int, tuple[Path, int]], int, int]:
        """Whole records of a file, where they end, and the file's size."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not self._is_ours(file.readline(_LONGEST_HEADER), path):
                    return {}, 0, size
                return *self._whole_records(file, path, size), size
        except FileNotFoundError:  # the run that it belonged to has just ended
            return {}, 0, 0
        except OSError as error:
            raise StateError(f"{path} cannot be read ({error}); {_way_out(path)}") from error

    def _whole_records(self, file: Any, path: Path, size: int) -> tuple[dict[int, tuple[Path, int]], int]:
        records: dict[int, tuple[Path, int]] = {}
        end = file.tell()
        while (record := _record(file, size)) is not None and 0 <= record[0] < self._num_samples:
            records.setdefault(record[0], (path, end))
            end = file.tell()
        return records, end

    def _is_ours(self, header: bytes, path: Path) -> bool:
        if header == self._header:
            return True
        if self._header.startswith(header):  # nothing, or torn: no result was written after it
            return False
        try:
            job = dict(json.loads(header))
        except (ValueError, TypeError, RecursionError):
            raise StateError(f"the first line of {path} is damaged, which says whose it is; {_way_out(path)}") from None
        raise StateError(
            f"{path} belongs to another job; {'; '.join(differences(job, self._job))}. Give the arguments of then, name "
            f"another `output`, or remove {path.parent} to start over"
        )

    def _read(self, file: Any, at: int, index: int) -> Any:
        file.seek(at)
        record = _record(file, os.fstat(file.fileno()).st_size)
        if record is None or record[0] != index:
            path = Path(file.name)
            raise StateError(f"the result of sample {index} in {path} is damaged; {_way_out(path)}")
        return self._kind.unpack(record[1])


def _record(file: Any, size: int) -> tuple[int, bytes] | None:
    """Index and result of the record that begins here, in a file of so many bytes; None if it is not whole."""
    head = file.read(_HEAD.size)
    length, checksum, index = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    data = file.read(min(length, size))
    whole = len(head) == _HEAD.size and len(data) == length and _checksum(index, data) == checksum
    return (index, data) if whole else None


class Output:
    """A results file, written whole by renaming, with a small receipt beside it (``.job``) that says which job wrote it.

    Args:
        path: ``.jsonl`` or ``.parquet``; vectors also ``.npy``.
        identity: what the job is, JSON-able.

    Raises:
        ConfigError: another suffix.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], num_samples: int, kind: Texts | Vectors) -> None:
        if path.suffix not in kind.suffixes:
            wanted = ", ".join(kind.suffixes[:-1]) + f" or {kind.suffixes[-1]}"
            raise ConfigError(f"`output` must end in {wanted}, but is {path.name!r}")
        self._path, self._identity, self._num_samples, self._kind = path, dict(identity), num_samples, kind
        self._receipt = path.with_name(path.name + ".job")
        self.journal = Journal(path, identity, num_samples, kind)

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
            receipt = json.loads(self._receipt.read_text(encoding="utf-8"))
            job, size, checksum = dict(receipt["job"]), receipt["bytes"], receipt["checksum"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise StateError(
                f"{self._receipt} is damaged, which says what job {self._path.name} is from ({error}); remove both to start over"
            ) from error
        differing = differences(job, self._identity)
        if differing:
            raise StateError(
                f"{self._path} holds the results of another job; {'; '.join(differing)}. Give the arguments of then, name "
                f"another `output`, or remove it and {self._receipt.name} to start over"
            )
        if (size, checksum) != _sum(self._path):
            raise StateError(
                f"{self._path} has changed since its job was finished; read it yourself, or remove it and "
                f"{self._receipt.name} to start over"
            )

    def publish(self) -> None:
        """Write the output in input order. One rank does this while its journal is open, when all have written theirs."""
        new = self.journal.new_path()
        write_results(new, self._path.suffix, self.journal.results(), self._num_samples)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        size, checksum = _sum(new)
        self._receipt.unlink(missing_ok=True)  # of an output that was removed: it must not vouch for this one
        os.replace(new, self._path)
        new.write_text(
            json.dumps({"job": self._identity, "bytes": size, "checksum": checksum}) + "\n", encoding="utf-8"
        )
        os.replace(new, self._receipt)

    def read(self) -> Any:
        """The results in input order."""
        return self._kind.gather(self._num_samples, read_results(self._path))


def _checksum(index: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(index.to_bytes(8, "little", signed=True)))


def _sum(path: Path) -> tuple[int, int]:
    """Size and checksum of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
        return file.tell(), checksum


def _way_out(path: Path) -> str:
    return f"remove that file to do its samples again, or {path.parent} to start over"


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
