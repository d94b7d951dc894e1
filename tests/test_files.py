"""Lengths of files are those of all their rows in order, whatever their formats, compression and processes."""

import gzip
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

import dynagroup
from dynagroup import ConfigError, LengthAwareBatchSampler, measure_files, measure_lengths
from dynagroup.cli import main
from dynagroup.lengths import as_streams
from tests.models import TEXTS, small_tokenizer

LENGTHS = [1 + (7 * i) % 13 for i in range(40)]
ROWS = 6
SAMPLES = [{"input_ids": [1] * n} for n in LENGTHS]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


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
    assert [path.name for path in tmp_path.glob("*lengths*")] == ["lengths.npy"]
    columns = ["n", "text"] if kind == "csv" else ["n", "text", "input_ids"]
    streams = measure_files(
        data, small_tokenizer(), columns, 5, output=tmp_path / "lengths.npz", **how
    )
    expected = dict.fromkeys(columns, LENGTHS) | {"n": np.minimum(LENGTHS, 5).tolist()}
    for found in (streams, np.load(tmp_path / "lengths.npz")):
        assert {name: n.tolist() for name, n in found.items()} == expected


ROWS_OF_LENGTHS = b'{"length": 3}\n{"length": 5}\n'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", ROWS_OF_LENGTHS),
        ("x.json", b'[{"length": 3}, {"length": 5}]'),
        ("x.json.gz", gzip.compress(ROWS_OF_LENGTHS, mtime=0)),
        ("x.txt", b"3\n5\n\n"),
        ("x.txt.gz", gzip.compress(b"3\n5\n", mtime=0)),
        ("x.csv.gz", gzip.compress(b"length\n3.0\n5.0\n", mtime=0)),
        ("x.tsv", b"a\tlength\nx\t3\ny\t5\n"),
    ],
)
def test_files_of_lengths_may_be_compressed(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert measure_files(tmp_path / name, progress=False).tolist() == [3, 5]


def test_files_may_be_compressed_by_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.compress(ROWS_OF_LENGTHS))
    assert measure_files(tmp_path / "x.jsonl.zst", progress=False).tolist() == [3, 5]


def test_a_text_file_has_a_text_per_line_paragraph_or_document(tmp_path):
    (tmp_path / "a.txt").write_text("w1 w2\nw3\n\nw4 w5 w6\n")
    (tmp_path / "b.txt").write_text("w1\n")
    found = {
        by: measure_files(
            str(tmp_path / "*.txt"), small_tokenizer(), sample_by=by, progress=False
        ).tolist()
        for by in ("line", "paragraph", "document")
    }
    assert found == {"line": [2, 1, 0, 3, 1], "paragraph": [3, 3, 1], "document": [6, 1]}


def test_the_same_call_again_measures_nothing(tmp_path):
    data = write(tmp_path, "parquet")
    tokenizer = small_tokenizer()
    call = lambda: measure_files(data, tokenizer, "text", progress=False).tolist()  # noqa: E731
    first = call()
    files = {path for path in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")}
    assert call() == first
    assert {path for path in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")} == files


def test_a_wrong_row_column_or_file_is_named(tmp_path, capfd):
    (tmp_path / "a.csv").write_text("text,n\nw1 w2,2\n" + "w7,1\n" * 9)
    (tmp_path / "b.csv").write_text("other\nw1\n")
    data, how = str(tmp_path / "*.csv"), {"num_proc": 2, "progress": False}
    with pytest.raises(ConfigError, match=r"must be one of \['other'\], but is 'text'"):
        measure_files(tmp_path / "b.csv", small_tokenizer(), "text", **how)
    with pytest.raises(ConfigError, match=r"a.csv, .*b.csv' cannot be read"):
        measure_files(data, small_tokenizer(), "text", **how)
    assert (
        measure_files(tmp_path / "a.csv", small_tokenizer(), "text", **how).tolist()
        == [2] + [1] * 9
    )
    with pytest.raises(ConfigError, match=r"column 'text' contains texts; name the `--tokenizer`"):
        measure_files(tmp_path / "a.csv", None, "text", **how)
    with pytest.raises(ConfigError, match="no file .*nothing"):
        measure_files([data, tmp_path / "nothing*"], None, "n", **how)
    (tmp_path / "c.jsonl").write_text('{"n": 3}\n')
    (tmp_path / "b.csv").unlink()
    with pytest.warns(match=r"has files of several formats \(.csv, .jsonl\)"):
        measure_files(tmp_path, None, "n", **how)
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
    assert capfd.readouterr().out.startswith("10 rows, 11 tokens in all, the longest 2\nwritten: ")
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
