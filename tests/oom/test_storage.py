"""Whatever happens to a journal: its whole records count, the rest is done again, or an error names the file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.errors import ConfigError, StateError
from dynagroup.oom.storage import TEXTS, VECTORS, Journal, Output

JOB = {"task": "test", "texts": 4}
RESULTS = [b"zero", "eins\u2028".encode(), b"", b"\0\n\xff"]


def journal(folder: Path, job: Any = JOB) -> Journal:
    return Journal(folder / "out.jsonl.journal", job, 4)


def written(folder: Path, indices: list[int], rank: int = 0) -> Path:
    with closing(journal(folder)) as new:
        new.open(rank)
        for index in indices:
            new.append([index], [RESULTS[index]])
    return folder / "out.jsonl.journal" / f"rank-{rank}.journal"


def whole(folder: Path) -> bool:
    found = journal(folder).finished()
    return sorted(found) == [0, 1, 2, 3] and list(journal(folder).read(found)) == RESULTS


def test_what_was_written_comes_back_and_an_empty_journal_is_nobodys(tmp_path: Path) -> None:
    written(tmp_path, [])
    assert journal(tmp_path, {"task": "another"}).finished() == {}
    written(tmp_path, [3, 1])
    written(tmp_path, [0, 2], rank=5)
    assert whole(tmp_path)


def test_another_jobs_journal_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = written(tmp_path, [1])
    with pytest.raises(StateError, match=r"rank-0.journal .* belongs to another run; texts: 4 then, 5 now. .*remove"):
        journal(tmp_path, {**JOB, "texts": 5}).finished()
    path.write_bytes(path.read_bytes().replace(b"journal 4", b"journal 3"))
    with pytest.raises(StateError, match="'journal 3', not of journal 4"):
        journal(tmp_path).finished()


DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda data, at: data[:at],
    "zeros to the end": lambda data, at: data[:at] + b"\0" * (len(data) - at),
    "a flipped bit": lambda data, at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
    "a byte more": lambda data, at: data[:at] + b"x" + data[at:],
    "a byte less": lambda data, at: data[:at] + data[at + 1 :],
    "other lines": lambda data, at: data[:at] + b'{"index": 0, "result": "wrong"}\n' * 3,
    "twice": lambda data, at: data + data[at:],
}


@settings(max_examples=100)
@given(st.sampled_from(sorted(DAMAGE)), st.floats(0, 1, exclude_max=True))
def test_no_damage_gives_a_wrong_result(tmp_path_factory: Any, kind: str, place: float) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = written(folder, [2, 0, 3, 1])
    data = path.read_bytes()
    path.write_bytes(DAMAGE[kind](data, int(place * len(data))))
    try:
        finished = journal(folder).finished()
    except StateError as error:
        assert str(path) in str(error)  # noqa: PT017
        assert "remove" in str(error)  # noqa: PT017
        path.unlink()
        finished = {}
    written(folder, [i for i in range(4) if i not in finished])
    assert whole(folder)


def test_a_damaged_first_line_is_an_error_that_names_file_and_way_out(tmp_path: Path) -> None:
    path = written(tmp_path, [2])
    records = path.read_bytes().partition(b"\n")[2]
    for first in (b"garbage\n", b"\xff\xfe\n", b"[3]\n", b"\0" * 99, b"[" * 99999 + b"\n"):
        path.write_bytes(first + records)
        with pytest.raises(StateError, match=r"rank-0.journal cannot be read: .*remove that file"):
            journal(tmp_path).finished()


def test_a_torn_record_is_said_and_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, [1, 2, 3])
    size = path.stat().st_size
    os.truncate(path, size - 2)
    written(tmp_path, [])
    assert f"its last {path.stat().st_size and size - 2 - path.stat().st_size} of {size - 2} bytes" in caplog.text
    assert journal(tmp_path).finished().keys() == {1, 2}


def test_files_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, [0])
    (tmp_path / "file.journal").write_text("")
    with pytest.raises(ConfigError, match="file.journal is not a folder"):
        Journal(tmp_path / "file.journal", JOB, 4).open(0)

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StateError, match=r"rank-0.journal cannot be read: no. .*remove"):
        journal(tmp_path).finished()


def test_two_runs_of_one_job_are_told_apart(tmp_path: Path) -> None:
    first, second = journal(tmp_path), journal(tmp_path)
    first.open(0)
    first.append([0], [RESULTS[0]])
    with pytest.raises(ConfigError, match="another process is writing .*rank-0.journal: this job is running already"):
        second.open(0)
    first.append([1], [RESULTS[1]])
    first.close()
    second.open(0)
    second.close()
    assert journal(tmp_path).finished().keys() == {0, 1}


@pytest.mark.parametrize("moment", [(fcntl, "flock"), (Path, "is_dir"), (os.path, "samestat")], ids=lambda at: at[1])
def test_a_journal_that_was_removed_while_it_was_opened_is_opened_again(
    moment: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run that has just published: between creating and locking, within ``mkdir`` (which finds something, then looks
    whether it is a folder), and before it is cut to its whole records: then the output is there, and nothing is written."""
    first, second = journal(tmp_path), journal(tmp_path)
    first.open(0)
    act: Any = getattr(*moment)

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        found = act(*args) if moment[1] == "samestat" else None
        first.close()
        first.remove()
        return found or act(*args)

    if moment[1] == "samestat":
        first.close()
    monkeypatch.setattr(*moment, late)
    second.open(0)
    second.append([0], [RESULTS[0]])
    second.close()
    assert moment[1] == "samestat" or journal(tmp_path).finished().keys() == {0}


class Crash(BaseException):
    """The process ends here."""


def crashing(monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
    """Ends the process before its n-th operation on files. (What half a write leaves is told above.)"""
    left = [operation]

    def before(act: Any) -> Any:
        def acting(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return act(*args, **kwargs)

        return acting

    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "rmdir"), (Path, "open")):
        monkeypatch.setattr(owner, name, before(getattr(owner, name)))


def run(folder: Path, done: list[int]) -> Any:
    """A job of twenty samples in batches of three; ``done`` is what was worked on."""
    out = Output(folder / "out.jsonl", JOB, 20, TEXTS)
    if not out.is_finished():
        with closing(out.journal):
            out.journal.open(0)
            finished = range(20) if (ends := out.is_finished()) else out.journal.finished()  # by another, meanwhile
            missing = [i for i in range(20) if i not in finished]
            for batch in (missing[i : i + 3] for i in range(0, len(missing), 3)):
                done += batch
                out.append(batch, [f"result {i}" for i in batch])
            if not ends:
                out.publish()
    out.journal.remove()
    return out.read()


def test_a_crash_at_any_operation_loses_nothing_and_repeats_at_most_the_batch_it_was_in(tmp_path: Path) -> None:
    for operation in range(1, 40):
        folder, done = tmp_path / str(operation), []
        folder.mkdir()
        for _ in range(2):  # and the run after the crash crashes at its own operation of that number
            with pytest.MonkeyPatch.context() as patched:
                try:
                    crashing(patched, operation)
                    run(folder, done)
                except Crash:
                    pass
        assert run(folder, done) == [f"result {i}" for i in range(20)]
        assert set(done) == set(range(20))
        assert len(done) <= 20 + 2 * 3
        assert sorted(p.name for p in folder.iterdir()) == ["out.jsonl", "out.jsonl.job"]


@pytest.mark.parametrize("suffix", VECTORS.suffixes)
def test_vectors_are_kept_in_four_bytes_a_number_and_published_whole(suffix: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 1000), dtype=np.float32)
    out = Output(tmp_path / f"v{suffix}", JOB, 3, VECTORS)
    out.journal.open(0)
    out.append([2, 0], rows[[2, 0]])
    with pytest.raises(StateError, match=f"1 of 3 samples are in no file of .*v{suffix}.journal; run again"):
        out.publish()
    out.append([1], rows[[1]])
    assert sum(p.stat().st_size for p in out.journal.folder.iterdir()) < rows.nbytes + 200
    out.publish()
    out.journal.close()
    out.journal.remove()
    np.testing.assert_array_equal(out.read(), rows)
    assert out.read().dtype == np.float32


RECEIPTS = [b"", b"\xff", b"null", b"{}", b"[" * 99999, b'{"job": 3, "bytes": 4, "checksum": 5}']


def test_a_receipt_that_is_damaged_or_an_output_that_is_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    run(tmp_path, [])
    out = Output(tmp_path / "out.jsonl", JOB, 20, TEXTS)
    for damaged in RECEIPTS:
        (tmp_path / "out.jsonl.job").write_bytes(damaged)
        with pytest.raises(StateError, match="not what out.jsonl.job says: .* remove both to start over"):
            out.is_finished()
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(ConfigError, match="out.jsonl is no file"):
        out.is_finished()
