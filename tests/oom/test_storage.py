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
from dynagroup.oom.formats import Texts, Vectors
from dynagroup.oom.storage import Journal, Output

JOB = {"task": "test", "texts": 4}
RESULTS = ["zero", "eins\u2028", "deux", "\u4e09"]


def journal(folder: Path, job: Any = JOB, num_samples: int = 4) -> Journal:
    return Journal(folder / "out.jsonl", job, num_samples, Texts())


def written(folder: Path, indices: list[int], rank: int = 0) -> Path:
    new = journal(folder)
    new.open(rank)
    for index in indices:
        new.append([index], [RESULTS[index]])
    new.close()
    return folder / "out.jsonl.journal" / f"rank-{rank}.journal"


def test_what_was_written_comes_back_in_input_order(tmp_path: Path) -> None:
    written(tmp_path, [3, 1])
    written(tmp_path, [0, 2], rank=5)
    assert set(journal(tmp_path).finished()) == {0, 1, 2, 3}
    assert list(journal(tmp_path).results(at_once=3)) == [RESULTS[:3], RESULTS[3:]]


def test_results_with_holes_are_not_published(tmp_path: Path) -> None:
    written(tmp_path, [0, 2, 3])
    with pytest.raises(StateError, match="1 of 4 samples are in no file of 'out.jsonl.journal'; run again"):
        list(journal(tmp_path).results())


def test_another_jobs_journal_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = written(tmp_path, [1])
    with pytest.raises(StateError, match=r"rank-0.journal belongs to another job; texts: 4 then, 5 now. .*remove"):
        journal(tmp_path, {**JOB, "texts": 5}).finished()
    path.write_bytes(path.read_bytes().replace(b'format": 3', b'format": 2'))
    with pytest.raises(StateError, match="journal's format: 2 then, 3 now"):
        journal(tmp_path).finished()


def test_a_run_that_was_killed_before_its_first_result_leaves_nothing_behind(tmp_path: Path) -> None:
    written(tmp_path, [])
    assert journal(tmp_path, {"task": "another"}).finished() == {}


@pytest.mark.parametrize("keep", [0, 1, 20])
def test_a_torn_first_line_is_begun_again(keep: int, tmp_path: Path) -> None:
    path = written(tmp_path, [1])
    os.truncate(path, keep)
    assert journal(tmp_path).finished() == {}
    written(tmp_path, [0, 1, 2, 3])
    assert list(journal(tmp_path).results()) == [RESULTS]


def zeros(data: bytes, at: int) -> bytes:
    return data[:at] + b"\0" * (len(data) - at)


DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda data, at: data[:at],
    "zeros to the end": zeros,
    "a flipped bit": lambda data, at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
    "a byte more": lambda data, at: data[:at] + b"x" + data[at:],
    "a byte less": lambda data, at: data[:at] + data[at + 1 :],
    "other lines": lambda data, at: data[:at] + b'{"index": 0, "result": "wrong"}\n' * 3,
    "twice": lambda data, at: data + data[at:],
}


@settings(max_examples=150)
@given(st.sampled_from(sorted(DAMAGE)), st.floats(0, 1, exclude_max=True))
def test_no_damage_gives_a_wrong_result(tmp_path_factory: Any, kind: str, place: float) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = written(folder, [2, 0, 3, 1])
    data = path.read_bytes()
    path.write_bytes(DAMAGE[kind](data, int(place * len(data))))
    again = journal(folder)
    try:
        finished = set(again.finished())
    except StateError as error:
        assert str(path) in str(error)  # noqa: PT017
        assert "remove" in str(error)  # noqa: PT017
        path.unlink()
        finished = set()
    again.open(0)
    missing = [i for i in range(4) if i not in finished]
    again.append(missing, [RESULTS[i] for i in missing])
    again.close()
    assert list(journal(folder).results()) == [RESULTS]


@pytest.mark.parametrize(
    "first",
    [
        b"garbage\n",
        b"\xff\xfe\n",
        b"[3]\n",
        b"null\n",
        b"\0" * 99,
        b"[" * 99999 + b"\n",
    ],
)
def test_a_damaged_first_line_is_an_error_that_names_file_and_way_out(first: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, [2])
    path.write_bytes(first + path.read_bytes().partition(b"\n")[2])
    with pytest.raises(
        StateError, match=r"the first line of .*rank-0.journal is damaged, .*remove that file to do its"
    ):
        journal(tmp_path).finished()


def test_damage_after_reading_is_found_too(tmp_path: Path) -> None:
    long = ["x" * 10**5] * 4
    kept = journal(tmp_path)
    kept.open(0)
    kept.append(range(4), long)
    kept.close()
    path = tmp_path / "out.jsonl.journal" / "rank-0.journal"
    results = kept.results(at_once=1)
    assert next(results) == long[:1]
    data = path.read_bytes()
    path.write_bytes(zeros(data, len(data) - 3))
    assert [next(results), next(results)] == [long[:1]] * 2
    with pytest.raises(StateError, match="the result of sample 3 in .*rank-0.journal is damaged"):
        next(results)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, [0])

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StateError, match=r"rank-0.journal cannot be read \(no\); remove"):
        journal(tmp_path).finished()


def test_two_runs_of_one_job_are_told_apart(tmp_path: Path) -> None:
    first, second = journal(tmp_path), journal(tmp_path)
    first.open(0)
    first.append([0], ["zero"])
    with pytest.raises(ConfigError, match="another process is writing .*rank-0.journal: this job is running already"):
        second.open(0)
    first.append([1], [RESULTS[1]])
    first.close()
    second.open(0)
    second.close()
    assert set(journal(tmp_path).finished()) == {0, 1}


def test_a_journal_that_was_removed_while_it_was_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run that has just published: what is written afterwards must be found."""
    first, second = journal(tmp_path), journal(tmp_path)
    first.open(0)
    lock = fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.close()
        first.remove()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second.open(0)
    second.append([0], ["zero"])
    second.close()
    assert set(journal(tmp_path).finished()) == {0}


class Crash(BaseException):
    """The process ends here."""


class Crashing:
    """Ends the process before its n-th operation on files; a write leaves half of itself behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
        self.left = operation
        for owner, name in ((os, "fsync"), (os, "replace"), (os, "truncate"), (Path, "unlink"), (Path, "rmdir")):
            monkeypatch.setattr(owner, name, self.before(getattr(owner, name)))
        whole = Path.open

        def opened(path: Path, mode: str = "r", *more: Any, **how: Any) -> Any:
            file = whole(path, mode, *more, **how)
            return self.write(file) if "a" in mode else file

        monkeypatch.setattr(Path, "open", opened)

    def before(self, act: Any) -> Any:
        def acting(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return act(*args, **kwargs)

        return acting

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash

    def write(self, file: Any) -> Any:
        crashing = self

        class File:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(self, data: bytes) -> int:
                try:
                    crashing.count()
                except Crash:
                    file.write(data[: len(data) // 2])
                    file.flush()
                    raise
                return file.write(data)

        return File()


def run(folder: Path, done: list[int]) -> Any:
    """A job of twenty samples in batches of three; ``done`` is what was worked on."""
    out = Output(folder / "out.jsonl", JOB, 20, Texts())
    if not out.is_finished():
        with closing(out.journal):
            out.journal.open(0)
            finished = out.journal.finished()
            missing = [i for i in range(20) if i not in finished]
            for batch in (missing[i : i + 3] for i in range(0, len(missing), 3)):
                done += batch
                out.journal.append(batch, [f"result {i}" for i in batch])
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
                    Crashing(patched, operation)
                    run(folder, done)
                except Crash:
                    pass
        assert run(folder, done) == [f"result {i}" for i in range(20)]
        assert set(done) == set(range(20))
        assert len(done) <= 20 + 2 * 3
        assert sorted(p.name for p in folder.iterdir()) == ["out.jsonl", "out.jsonl.job"]


def test_vectors_are_kept_in_four_bytes_a_number(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 1000), dtype=np.float32)
    kept = Journal(tmp_path / "v.npy", JOB, 3, Vectors())
    kept.open(0)
    kept.append([2, 0, 1], rows[[2, 0, 1]])
    kept.close()
    assert sum(p.stat().st_size for p in (tmp_path / "v.npy.journal").iterdir()) < rows.nbytes + 200
    np.testing.assert_array_equal(np.concatenate(list(kept.results())), rows)
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.journal").write_text("")
    with pytest.raises(ConfigError, match="'out.jsonl.journal' is not a folder"):
        journal(tmp_path).open(0)


RECEIPTS = [b"", b"\xff", b"null", b"[]", b"{}", b"[" * 99999, b'{"job": {}}', b"\0" * 40]
RECEIPTS += [b'{"job": 3, "bytes": 4, "checksum": 5}']


@pytest.mark.parametrize("damaged", RECEIPTS, ids=lambda d: d[:20].decode(errors="replace"))
def test_a_damaged_receipt_is_an_error_that_names_it(damaged: bytes, tmp_path: Path) -> None:
    run(tmp_path, [])
    (tmp_path / "out.jsonl.job").write_bytes(damaged)
    with pytest.raises(StateError, match="out.jsonl.job is damaged, .*; remove both to start over"):
        Output(tmp_path / "out.jsonl", JOB, 20, Texts()).is_finished()


def test_an_output_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(ConfigError, match="out.jsonl is no file"):
        Output(tmp_path / "out.jsonl", JOB, 20, Texts()).is_finished()
