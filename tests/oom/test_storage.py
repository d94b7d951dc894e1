"""Whatever happens to a journal: its whole records count, the rest is done again."""

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
from dynagroup.oom.storage import TEXTS, VECTORS, Output

JOB = {"task": "test", "texts": 4}
RESULTS = ["zero", "eins\u2028", "", ["\0", "\n"]]


def out_of(folder: Path, job: Any = JOB) -> Output:
    return Output(folder / "out.jsonl", job, 4, TEXTS)


def written(folder: Path, indices: list[int]) -> Path:
    """One run's journal; these samples were finished in it."""
    with closing(out := out_of(folder)):
        before = {*out.journal.glob("*")}
        out.claim()
        for index in indices:
            out.append([index], [RESULTS[index]])
        return next(iter({*out.journal.glob("*")} - before), out.journal)


def whole(folder: Path) -> bool:
    with closing(out := out_of(folder)):
        out.claim()
        out.publish()
    return out.read() == RESULTS


def test_what_was_written_comes_back_and_a_job_that_finished_nothing_is_in_nobodys_way(tmp_path: Path) -> None:
    with closing(other := out_of(tmp_path, {"task": "another"})):
        other.claim()
    written(tmp_path, [3, 1])
    written(tmp_path, [0, 2])
    assert whole(tmp_path)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4  # whatever a reader splits at


def test_another_jobs_journal_is_refused_with_what_differs_and_never_read(tmp_path: Path) -> None:
    written(tmp_path, [1])
    said = r"out.jsonl.job .* belongs to another run; texts: 4 then, 5 now. .*remove"
    refused = pytest.raises(StateError, match=said)
    with closing(other := out_of(tmp_path, {**JOB, "texts": 5})), refused:
        other.claim()
    (tmp_path / "out.jsonl.job").unlink()
    with closing(other):
        other.claim()
        assert other.finished() == {}


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
    finished = out_of(folder).finished()
    written(folder, [i for i in range(4) if i not in finished])
    assert whole(folder)


def test_a_torn_record_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, [1, 2, 3])
    os.truncate(path, path.stat().st_size - 2)
    assert out_of(tmp_path).finished().keys() == {1, 2}
    assert "its last 30 of 76 bytes" in caplog.text


def test_two_runs_of_one_job_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the first publishes: its lock is given back once the output is there."""
    first, second, replace = out_of(tmp_path), out_of(tmp_path), os.replace

    def refused(*names: Path) -> None:
        with closing(second), pytest.raises(ConfigError, match="holds .*out.jsonl.job: this job is running already"):
            second.claim()
        if names:
            replace(*names)

    first.claim()
    first.append([0], [RESULTS[0]])
    refused()
    first.append([1, 2, 3], RESULTS[1:])
    monkeypatch.setattr(os, "replace", refused)
    first.publish()
    first.close()
    assert second.claim()
    second.close()


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

    operations = {os: ("fsync", "open", "replace"), Path: ("unlink", "rmdir", "open")}
    for owner, name in ((owner, name) for owner, names in operations.items() for name in names):
        monkeypatch.setattr(owner, name, before(getattr(owner, name)))


def run(folder: Path, done: list[int]) -> Any:
    """A job of twenty samples in batches of three; ``done`` is what was worked on."""
    out = Output(folder / "out.jsonl", JOB, 20, TEXTS)
    if not out.is_finished():
        with closing(out):
            if not out.claim():
                finished = out.finished()
                missing = [i for i in range(20) if i not in finished]
                for batch in (missing[i : i + 3] for i in range(0, len(missing), 3)):
                    done += batch
                    out.append(batch, [f"result {i}" for i in batch])
                out.publish()
    out.clear()
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


def test_vectors_are_kept_in_four_bytes_a_number_and_published_whole(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 1000), dtype=np.float32)
    with closing(out := Output(tmp_path / "v.npy", JOB, 3, VECTORS)):
        out.claim()
        out.append([2, 0], rows[[2, 0]])
        with pytest.raises(StateError, match="1 of 3 samples are not in .*v.npy.journal; run again"):
            out.publish()
        out.append([1], rows[[1]])
        assert sum(p.stat().st_size for p in out.journal.iterdir()) < rows.nbytes + 200
        out.publish()
    np.testing.assert_array_equal(out.read(), rows)
    assert out.read().dtype == np.float32


RECEIPTS = [b"", b"\xff", b"null", b"{}", b"[" * 99999, b'{"job": 3, "bytes": 4, "checksum": 5}']


def test_a_receipt_that_is_damaged_or_an_output_that_is_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    run(tmp_path, [])
    out = Output(tmp_path / "out.jsonl", JOB, 20, TEXTS)
    for damaged in RECEIPTS:
        (tmp_path / "out.jsonl.job").write_bytes(damaged)
        with pytest.raises(StateError, match="out.jsonl.job is not of this job: .* remove .* to start over"):
            out.is_finished()
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(ConfigError, match="out.jsonl exists, and"):
        out.is_finished()
