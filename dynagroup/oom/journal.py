"""Results on disk while a run goes on: nothing that was finished is lost or done again after a crash."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynagroup.errors import ConfigError, StateError
from dynagroup.oom.results import Kind
from dynagroup.state import differences

__all__ = ["Journal"]

_log = logging.getLogger(__name__)
_VERSION = 2
_NAME = re.compile(r"rank-\d+\.journal")
_HEAD = struct.Struct("<IIq")  # bytes of the result, checksum of index and result, index of the sample
_LONGEST_HEADER = 2**20


# One file a rank. Its first line is JSON: which job it belongs to. Then one record a finished sample: length, checksum,
# index, result. A file counts up to its first record that is not whole, be it torn by a crash or damaged later: what stands
# behind is done again, so a wrong result is never taken for a right one, and a rank that goes on with a file cuts it there.
# Only a damaged first line cannot be helped: whose results are these? Reading costs one pass and 24 bytes a sample.
class Journal:
    """The finished samples of a job, beside its output.

    Args:
        output: where results will be published.
        identity: what the job is, JSON-able; a journal of another job is refused.
        num_samples: samples of the whole job.
        kind: what a result is.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any], num_samples: int, kind: Kind) -> None:
        self._identity, self._num_samples, self._kind = dict(identity), num_samples, kind
        self._header = json.dumps({"version": _VERSION, "job": self._identity}).encode() + b"\n"
        self._folder = output.with_name(output.name + ".journal")
        self._file: Any = None

    @property
    def exists(self) -> bool:
        """Whether an earlier run has begun."""
        return bool(self._paths())

    def finished(self, *, warn: bool = True) -> dict[int, tuple[Path, int]]:
        """Samples that any run has finished: index -> where its record is. Warns of what is not whole.

        Raises:
            StateError: the journal belongs to another job, or cannot be read; names the file.
        """
        found: dict[int, tuple[Path, int]] = {}
        for path in self._paths():
            for index, at in self._records(path, warn)[0]:
                found.setdefault(index, (path, at))
        return found

    def open(self, rank: int) -> None:
        """Start or go on writing as this rank.

        Raises:
            ConfigError: another process is writing there.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"{self._folder.name!r} is not a folder, but finished samples are kept there") from None
        path = self._folder / f"rank-{rank}.journal"
        self._file = path.open("ab")
        try:
            _lock(self._file, path)
            os.truncate(path, self._records(path, False)[1])
        except BaseException:
            self.close()
            raise
        self._file.seek(0, os.SEEK_END)

    def append(self, indices: Sequence[int], results: Sequence[Any]) -> None:
        """Add finished samples; they are on disk when this returns."""
        records = [] if self._file.tell() else [self._header]
        for index, result in zip(indices, results, strict=True):
            data = self._kind.pack(result)
            records.append(_HEAD.pack(len(data), _checksum(index, data), index) + data)
        self._file.write(b"".join(records))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

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

    def remove(self) -> None:
        """Delete the journal's own files, and the folder if nothing else is in it."""
        if not self._folder.is_dir():
            return
        try:
            for path in self._paths():
                path.unlink()
            self._folder.rmdir()
        except OSError as error:  # the output is safe: no reason to fail
            _log.warning("%s is left behind: %s", self._folder, error)

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file())

    def _records(self, path: Path, warn: bool) -> tuple[list[tuple[int, int]], int]:
        """(index, position) of the whole records of a file, and where they end."""
        try:
            with path.open("rb") as file:
                if not self._is_ours(file.readline(_LONGEST_HEADER), path):
                    return [], 0
                records, end, size = self._whole_records(file)
        except OSError as error:
            raise StateError(f"{path} cannot be read ({error}); {_way_out(path)}") from error
        if warn and end < size:
            _log.warning(
                "%s: its last %d of %d bytes are no whole results (a run was killed while writing, or the file was damaged); "
                "those samples are done again", path, size - end, size,
            )  # fmt: skip
        return records, end

    def _whole_records(self, file: Any) -> tuple[list[tuple[int, int]], int, int]:
        records: list[tuple[int, int]] = []
        end, size = file.tell(), os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum, index = _HEAD.unpack(head)
            if end + len(head) + length > size or not 0 <= index < self._num_samples:
                break
            if _checksum(index, file.read(length)) != checksum:
                break
            records.append((index, end))
            end += len(head) + length
        return records, end, size

    def _is_ours(self, header: bytes, path: Path) -> bool:
        if header == self._header:
            return True
        if self._header.startswith(header):  # nothing, or torn: no result was written after it
            return False
        try:
            saved = json.loads(header)
            version, job = saved["version"], dict(saved["job"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise StateError(f"the first line of {path} is damaged, which says whose it is; {_way_out(path)}") from None
        differing = differences(job, self._identity) or [f"version: {version!r} then, {_VERSION} now"]
        raise StateError(
            f"{path} belongs to another job; {'; '.join(differing)}. Give the arguments of then, name another `output`, or "
            f"remove {path.parent} to start over"
        )

    def _read(self, file: Any, at: int, index: int) -> Any:
        file.seek(at)
        length, checksum, found = _HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size, b"\0"))
        data = file.read(length)
        if found == index and _checksum(index, data) == checksum:
            try:
                return self._kind.unpack(data)
            except ValueError:
                pass
        path = Path(file.name)
        raise StateError(f"the result of sample {index} in {path} is damaged; {_way_out(path)}")


def _checksum(index: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(index.to_bytes(8, "little", signed=True)))


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
