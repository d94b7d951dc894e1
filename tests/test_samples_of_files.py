"""The command ``lengths`` says what it counted, and counts a sample a line, paragraph, document or row, also compressed."""

import gzip
import json

import datasets
import numpy as np
import pytest

from dynagroup.cli import main


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_row_of_a_compressed_file_is_counted_as_a_row(tmp_path, capsys):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"length": length}) + "\n" for length in (3, 5))
    output = tmp_path / "lengths.npy"
    main(["lengths", str(tmp_path / "a.jsonl.gz"), "--output", str(output)])
    assert "2 samples (rows), 8 in all, the longest 5" in capsys.readouterr().out
    assert np.load(output).tolist() == [3, 5]


def test_a_line_of_a_compressed_text_file_is_counted_as_a_line(tmp_path, capsys):
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("3\n5\n")
    main(["lengths", str(tmp_path / "a.txt.gz"), "--output", str(tmp_path / "lengths.npy")])
    assert "2 samples (lines), 8 in all, the longest 5" in capsys.readouterr().out


def test_each_text_file_is_a_document_if_asked_for(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("3\n")
    (tmp_path / "b.txt").write_text("5\n")
    output = tmp_path / "lengths.npy"
    data = str(tmp_path / "*.txt")
    main(["lengths", data, "--sample-by", "document", "--output", str(output), "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert [row["counted"] for row in figures.values()] == ["documents"]
    assert np.load(output).tolist() == [3, 5]
