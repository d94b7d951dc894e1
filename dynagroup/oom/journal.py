"""Results on disk while a run goes on: nothing that was finished is lost or done again after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dynagroup.errors import ConfigError, StateError

__all__ = ["Journal", "read_results"]

_VERSION = 1


class Journal:
    """One line of JSON per finished sample, in one file per rank beside the output.

    A line counts once it ends; a torn last line, which a crash may leave, is cut off by the rank that goes on with the
    file. The output is written at the end, whole, by renaming.

    Args:
        output: ``.jsonl`` or ``.parquet``; must not exist yet.
        job: text that says what is computed from what; a journal of another job is refused.
        num_samples: samples of the whole job.
    """

    def __init__(self, output: Path, job: str, num_samples: int) -> None:
        if output.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"`output` must end in .jsonl or .parquet, but is {output.name!r}")
        if output.exists():
            raise ConfigError(f"`output` {output.name!r} exists: a run has finished there; remove it, or name another")
        self._output, self._job, self._num_samples = output, job, num_samples
        self._folder = output.with_name(output.name + ".journal")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: Any = None

    def finished(self) -> set[int]:
        """Samples that any earlier run has finished.

        Raises:
            StateError: the journal belongs to another job.
        """
        return {line["index"] for path in self._paths() for line in self._lines(path)}

    def open(self, rank: int) -> None:
        """Start or go on writing as this rank."""
        path = self._folder / f"rank-{rank}.jsonl"
        if path.exists():
            text = path.read_bytes()
            os.truncate(path, text.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._write([{"version": _VERSION, "job": self._job}])

    def append(self, indices: Sequence[int], results: Sequence[Any]) -> None:
        """Add finished samples; they are on disk when this returns."""
        self._write([{"index": i, "result": r} for i, r in zip(indices, results, strict=True)])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def publish(self) -> None:
        """Write the output in input order and remove the journal. One rank does this, when all have closed theirs."""
        results = {line["index"]: line["result"] for path in self._paths() for line in self._lines(path)}
        missing = self._num_samples - len(results)
        if missing:
            raise StateError(f"{missing} of {self._num_samples} samples are in no journal; run again to finish them")
        new = self._output.with_name(self._output.name + ".new")
        _write_results(new, self._output.suffix, [results[i] for i in range(self._num_samples)])
        os.replace(new, self._output)
        for path in self._paths():
            path.unlink()
        self._folder.rmdir()

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("rank-*.jsonl"))

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1].decode("utf-8").splitlines()
        if not whole:
            return
        header = json.loads(whole[0])
        if header != {"version": _VERSION, "job": self._job}:
            raise StateError(
                f"the journal {path.parent.name!r} belongs to another job ({header.get('job')!r}, this one is {self._job!r}): "
                "other texts, model or options; remove it to start over"
            )
        for line in whole[1:]:
            yield json.loads(line)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self._file.write("".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())


def _write_results(path: Path, suffix: str, results: list[Any]) -> None:
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"index": list(range(len(results))), "result": results}), path)
        return
    with path.open("w", encoding="utf-8") as file:
        for index, result in enumerate(results):
            file.write(json.dumps({"index": index, "result": result}, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(output: Path) -> list[Any]:
    """The results of a finished run, in input order."""
    if output.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(output)["result"].to_pylist()
    return [json.loads(line)["result"] for line in output.read_text(encoding="utf-8").splitlines()]
