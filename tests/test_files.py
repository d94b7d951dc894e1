"""Lengths of files are those of all their rows in order, whatever their kinds, chunks and processes, killed or not."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dynagroup
from dynagroup import (
    ConfigError,
    LengthAwareBatchSampler,
    StateError,
    files,
    measure_files,
    measure_lengths,
)
from dynagroup.cli import main
from dynagroup.lengths import as_streams
from tests.models import TEXTS, small_tokenizer

LENGTHS = [1 + (7 * i) % 13 for i in range(40)]
ROWS = 6
SAMPLES = [{"input_ids": [1] * n} for n in LENGTHS]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "ROWS", ROWS)


def write(folder: Path, kind: str) -> str:
    """Two files, or one, of 40 texts, their lengths and ids; what is then given as data."""
    columns = {"text": TEXTS, "n": LENGTHS, "input_ids": [[1] * n for n in LENGTHS]}
    if kind == "saved":
        Dataset.from_dict(columns).save_to_disk(str(folder / kind))
        return str(folder / kind)
    if kind == "hub":
        kind, folder = "parquet", folder / "data"
        folder.mkdir()
        (folder / "README.md").write_text("# Some texts\n")
    for name, first, last in (("a", 0, 13), ("b", 13, 40)):
        part = Dataset.from_dict({key: values[first:last] for key, values in columns.items()})
        path = str(folder / f"{name}.{kind}")
        if kind == "parquet":
            pq.write_table(pa.table(part.to_dict()), path, row_group_size=ROWS)
        else:
            (part.to_csv if kind == "csv" else part.to_json)(path)
    return str(folder if folder.name == "data" else folder / f"*.{kind}")


@pytest.mark.parametrize("kind", ["parquet", "hub", "saved", "csv", "jsonl"])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_lengths_are_those_of_all_rows_in_order(tmp_path, kind, num_proc):
    data, how = write(tmp_path, kind), {"num_proc": num_proc, "progress": False}
    for output in (None, tmp_path / "lengths.npy"):
        found = measure_files(data, small_tokenizer(), "text", output=output, **how)
        assert found.dtype == np.int32
        assert found.tolist() == LENGTHS == measure_lengths(TEXTS, small_tokenizer()).tolist()
    assert np.load(tmp_path / "lengths.npy").tolist() == LENGTHS
    assert sorted(path.name for path in tmp_path.glob("lengths*")) == [
        "lengths.npy",
        "lengths.npy.job",
    ]
    columns = ["n", "text"] if kind == "csv" else ["n", "text", "input_ids"]
    streams = measure_files(
        data, small_tokenizer(), columns, 5, output=tmp_path / "lengths.npz", **how
    )
    expected = dict.fromkeys(columns, LENGTHS) | {"n": np.minimum(LENGTHS, 5).tolist()}
    for found in (streams, np.load(tmp_path / "lengths.npz")):
        assert {name: n.tolist() for name, n in found.items()} == expected


@pytest.mark.parametrize("kind", ["csv", "tsv", "txt"])
def test_the_first_file_decides_whether_a_column_has_texts(tmp_path, kind):
    """A file whose texts are all numbers is no file of lengths, if the first one has other texts."""
    head = [] if kind == "txt" else ["text"]
    for name, rows in (("a", ["w1 w2", "w3"]), ("b", ["100000", "7"]), ("c", ["w1 w2 w3", "w1"])):
        (tmp_path / f"{name}.{kind}").write_text("\n".join([*head, *rows]) + "\n")
    how: Any = {"num_proc": 1, "progress": False}
    found = measure_files(
        [tmp_path / f"{name}.{kind}" for name in "abc"], small_tokenizer(), **how
    ).tolist()
    assert (
        found
        == measure_lengths(
            ["w1 w2", "w3", "100000", "7", "w1 w2 w3", "w1"], small_tokenizer()
        ).tolist()
    )
    with pytest.raises(ConfigError):
        measure_files([tmp_path / f"{name}.{kind}" for name in "bc"], small_tokenizer(), **how)


class Killed(BaseException):
    pass


class Mortal:
    """Counts words; dies at a text, if it is told to."""

    fingerprint = "words"  # what it has seen is not what it does

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.dies_at: int | None = None

    def __call__(self, texts: list[str]) -> dict[str, Any]:
        if self.dies_at is not None and len(self.seen) >= self.dies_at:
            raise Killed
        self.seen += texts
        return {"input_ids": [text.split() for text in texts]}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["parquet", "csv", "saved"]),
    st.lists(st.integers(0, 39), max_size=3),
    st.data(),
)
def test_a_killed_job_goes_on_and_does_nothing_again(tmp_path_factory, kind, deaths, data):
    """Killed up to three times, also while it writes: every text is measured once, what was torn is measured again."""
    tmp_path = tmp_path_factory.mktemp("job")
    tokenizer, source, output = Mortal(), write(tmp_path, kind), tmp_path / "lengths.npy"
    how: Any = {"column": "text", "output": output, "num_proc": 1, "progress": False}
    for at in sorted(deaths):
        tokenizer.dies_at = at
        with suppress(Killed):
            measure_files(source, tokenizer, **how)
    torn = [path for path in tmp_path.glob("lengths.npy.journal/*.journal") if path.stat().st_size]
    if torn and (torn := torn[: data.draw(st.integers(0, 1))]):
        torn[0].write_bytes(torn[0].read_bytes()[:-1])
    tokenizer.dies_at = None
    assert measure_files(source, tokenizer, **how).tolist() == [len(text.split()) for text in TEXTS]
    assert len(tokenizer.seen) <= len(TEXTS) + ROWS * len(torn)
    assert torn or sorted(tokenizer.seen) == sorted(TEXTS)
    tokenizer.dies_at = 0
    assert measure_files(source, tokenizer, **how).tolist() == LENGTHS  # read
    for changed in ({"max_length": 3}, {"tokenizer": small_tokenizer()}):
        with pytest.raises(StateError, match=f"{next(iter(changed))} was .* then, is .* now"):
            measure_files(source, **{"tokenizer": tokenizer, **how, **changed})
    os.utime(
        next(path for path in tmp_path.rglob("*") if path.suffix in (".parquet", ".csv", ".arrow")),
        (1, 1),
    )
    with pytest.raises(StateError, match="files was .* then, is .* now"):
        measure_files(source, tokenizer, **how)


def test_a_wrong_row_column_or_file_is_named(tmp_path, capfd):
    (tmp_path / "a.csv").write_text("text,n\nw1 w2,2\n" + "7,1\n" * 9)
    (tmp_path / "b.csv").write_text("other\nw1\n")
    data, how = str(tmp_path / "*.csv"), {"num_proc": 2, "progress": False}
    with pytest.raises(ConfigError, match=r"must be one of \['other'\] in .*b.csv', but is 'text'"):
        measure_files(data, small_tokenizer(), "text", **how)
    assert (
        measure_files(tmp_path / "a.csv", small_tokenizer(), "text", **how).tolist()
        == [2] + [1] * 9
    )
    with pytest.raises(
        ConfigError, match=r"name the `--tokenizer` .*\(in .*a.csv', chunk 0 of all files\)"
    ):
        measure_files(tmp_path / "a.csv", None, "text", **how)
    with pytest.raises(ConfigError, match="no file .*nothing"):
        measure_files([data, tmp_path / "nothing*"], None, "n", **how)
    (tmp_path / "c.jsonl").write_text('{"n": 3}\n')
    with (
        pytest.warns(match="does not read 1 files .*c.jsonl"),
        pytest.raises(ConfigError, match="must be one of"),
    ):
        measure_files(tmp_path, small_tokenizer(), "text", **how)
    with pytest.raises(ConfigError, match=r"must end in \.npz"):
        measure_files(
            tmp_path / "a.csv", small_tokenizer(), "text,n", output=tmp_path / "x.npy", **how
        )
    arguments = [
        "lengths",
        str(tmp_path / "a.csv"),
        "--column",
        "n",
        "--output",
        str(tmp_path / "n.npy"),
    ]
    assert (main(arguments), main([*arguments, "--processes", "2"])) == (0, 0)
    assert capfd.readouterr().out.startswith(
        "tokens: 10 samples, 11 in all, the longest 2\nwritten: "
    )
    assert np.load(tmp_path / "n.npy").tolist() == [2] + [1] * 9


def test_a_path_or_a_memory_map_is_taken_for_lengths_and_not_copied(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS, np.int32))
    mapped = np.load(path, mmap_mode="r")
    assert np.shares_memory(as_streams(mapped)["tokens"], mapped)
    assert isinstance(as_streams(path)["tokens"].base, np.memmap)
    np.savez(tmp_path / "pairs.npz", tokens=LENGTHS, target=LENGTHS[::-1])
    pairs, how = (
        {"tokens": LENGTHS, "target": LENGTHS[::-1]},
        {"weigh": "samples", "collate_fn": list},
    )
    for saved, plain in (
        (path, LENGTHS),
        (str(path), LENGTHS),
        (mapped, LENGTHS),
        (tmp_path / "pairs.npz", pairs),
    ):
        plan, same = (LengthAwareBatchSampler(n, 50).plan for n in (saved, plain))
        assert plan.fingerprint == same.fingerprint
        loaders = (dynagroup.PlannedDataLoader(TEXTS, n, 50, **how) for n in (saved, plain))
        steps, same = ([step.indices for step in loader] for loader in loaders)
        assert steps == same
        if not isinstance(plain, dict):
            loaders = (
                dynagroup.OnlineDataLoader(SAMPLES, 50, length_hint=n, **how)
                for n in (saved, plain)
            )
            steps, same = ([step.indices for step in loader] for loader in loaders)
            assert steps == same
    np.save(tmp_path / "one.npy", 5)
    np.save(tmp_path / "rows.npy", [LENGTHS] * 2)
    np.savez(tmp_path / "uneven.npz", a=LENGTHS, b=LENGTHS[1:])
    for wrong in (
        "lengths.npy",
        tmp_path / "x.txt",
        *(tmp_path / f for f in ("one.npy", "rows.npy", "uneven.npz")),
    ):
        with pytest.raises(
            ConfigError, match=f"'{wrong}' cannot be read as lengths in a .npy or .npz file"
        ):
            as_streams(wrong)
