"""The file that a job's results end up in, and the proof of which job it is from."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynagroup.errors import ConfigError, StateError
from dynagroup.oom.journal import Journal
from dynagroup.oom.results import Kind, read_results, write_results
from dynagroup.state import differences
from dynagroup.validation import a_mapping, an_int

__all__ = ["Output"]

_VERSION = 1
_RECEIPT = a_mapping(
    {"version": an_int(_VERSION, _VERSION), "job": a_mapping(), "bytes": an_int(), "checksum": an_int()}
)


class Output:
    """A results file, written whole by renaming, with a small receipt beside it (``.job``) that says which job wrote it.

    Args:
        path: ``.jsonl`` or ``.parquet``; vectors also ``.npy``.
        identity: what the job is, JSON-able.

    Raises:
        ConfigError: another suffix.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], num_samples: int, kind: Kind) -> None:
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
        if not self._receipt.exists():
            # a run that was killed between publishing and its receipt has left its whole journal: it publishes again
            if self.journal.exists and len(self.journal.finished()) == self._num_samples:
                return False
            raise ConfigError(
                f"`output` {self._path} exists, and no {self._receipt.name!r} beside it says which job it is from; "
                "remove it, or name another"
            )
        receipt = self._read_receipt()
        differing = differences(receipt["job"], self._identity)
        if differing:
            raise StateError(
                f"{self._path} holds the results of another job; {'; '.join(differing)}. Give the arguments of then, name "
                f"another `output`, or remove it and {self._receipt.name} to start over"
            )
        if (receipt["bytes"], receipt["checksum"]) != _sum(self._path):
            raise StateError(
                f"{self._path} has changed since its job was finished; read it yourself, or remove it and "
                f"{self._receipt.name} to start over"
            )
        return True

    def publish(self) -> None:
        """Write the output in input order, then remove the journal. One rank does this, when all have closed theirs."""
        new = self._path.with_name(self._path.name + ".new")
        write_results(new, self._path.suffix, self.journal.results())
        size, checksum = _sum(new)
        receipt = {"version": _VERSION, "job": self._identity, "bytes": size, "checksum": checksum}
        self._receipt.unlink(missing_ok=True)  # of an output that was removed: it must not vouch for this one
        os.replace(new, self._path)
        new.write_text(json.dumps(receipt) + "\n", encoding="utf-8")
        os.replace(new, self._receipt)
        self.journal.remove()

    def read(self) -> Any:
        """The results in input order."""
        return read_results(self._path, self._kind, self._num_samples)

    def _read_receipt(self) -> Mapping[str, Any]:
        try:
            receipt = json.loads(self._receipt.read_text(encoding="utf-8"))
            _RECEIPT(receipt, "receipt")
        except (OSError, ValueError, RecursionError) as error:
            raise StateError(
                f"{self._receipt} is damaged, which says what job {self._path.name} is from ({error}); remove both to start over"
            ) from error
        return receipt


def _sum(path: Path) -> tuple[int, int]:
    """Size and checksum of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
        return file.tell(), checksum
