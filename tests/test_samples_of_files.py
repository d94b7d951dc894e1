"""The command ``lengths`` says what it counted, and counts a sample a line, paragraph, document or row, also compressed."""

import gzip
import json

import datasets
import numpy as np
import pytest

from dynagroup import ConfigError, files, measure_files
from dynagroup.cli import main


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_row_of_a_compressed_file_is_counted_as_a_row(tmp_path, capsys):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"length": length}) + "\n" for length in (3, 5))
    output = tmp_path / "lengths.npy"
    main(["lengths", str(tmp_path / "a.jsonl.gz"), "--output", str(output)])
    assert "2 rows, 8 tokens in all, the longest 5" in capsys.readouterr().out
    assert np.load(output).tolist() == [3, 5]


def test_a_line_of_a_compressed_text_file_is_counted_as_a_line(tmp_path, capsys):
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("3\n5\n")
    main(["lengths", str(tmp_path / "a.txt.gz"), "--output", str(tmp_path / "lengths.npy")])
    assert "2 lines, 8 tokens in all, the longest 5" in capsys.readouterr().out


def test_each_text_file_is_a_document_if_asked_for(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("3\n")
    (tmp_path / "b.txt").write_text("5\n")
    output = tmp_path / "lengths.npy"
    data = str(tmp_path / "*.txt")
    main(["lengths", data, "--sample-by", "document", "--output", str(output), "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert [row["counted"] for row in figures.values()] == ["documents"]
    assert np.load(output).tolist() == [3, 5]


FASTA = b">a a protein\nMKV\nLL\n>b\nM\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.fasta", FASTA),
        ("a.faa.gz", gzip.compress(FASTA, mtime=0)),
        ("a.fastq", b"@a\nMKVLL\n+\n!!!!!\n@b\nM\n+\n!\n"),
    ],
)
def test_a_record_of_sequences_is_a_sample_and_its_residues_are_counted(
    tmp_path, capsys, name, content
):
    (tmp_path / name).write_bytes(content)
    output = tmp_path / "lengths.npy"
    data = str(tmp_path / name)
    main(["lengths", data, "--length-of", "characters", "--output", str(output)])
    assert "2 records, 6 characters in all, the longest 5" in capsys.readouterr().out
    assert np.load(output).tolist() == [5, 1]


def test_sequences_may_be_compressed_by_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.fasta.zst").write_bytes(zstandard.compress(FASTA))
    lengths = measure_files(tmp_path / "a.fasta.zst", length_of=len, progress=False)
    assert lengths.tolist() == [5, 1]


def test_a_missing_package_for_zstandard_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    (tmp_path / "a.fasta.zst").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a.fasta.zst' needs a package: pip install zstandard"):
        measure_files(tmp_path / "a.fasta.zst", length_of=len)


@pytest.mark.parametrize(
    ("unit", "expected"), [("words", [3, 1]), ("characters", [7, 1]), ("bytes", [8, 1])]
)
def test_words_characters_or_bytes_of_texts_are_counted(tmp_path, unit, expected):
    texts = ["one é c", "d"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    output = tmp_path / "lengths.npy"
    data = str(tmp_path / "texts.jsonl")
    main(["lengths", data, "--length-of", unit, "--output", str(output)])
    assert np.load(output).tolist() == expected


COMMANDS = {
    "doctor": ["--batch-size", "2"],
    "compare": ["--batch-size", "2"],
    "plan": ["--max-tokens", "100"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_counted(tmp_path, capsys, command):
    folder = tmp_path / "texts"  # beside the cache
    folder.mkdir()
    (folder / "a.txt").write_text("one two\n\nthree\n")
    (folder / "b.txt").write_text("four\n")
    options = [*COMMANDS[command], "--length-of", "words", "--sample-by", "document"]
    for data in ([str(folder)], [str(folder / "a.txt"), str(folder / "b.txt")]):
        main([command, *data, *options])
        printed = capsys.readouterr().out
        assert "2 documents, 4 words in all, the longest 3; above, each of them" in printed
    main([command, str(folder), *options, "--json"])
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts["tokens"]["counted"] == "documents"
    assert counts["tokens"]["unit"] == "words"


def test_streams_and_the_lengths_of_a_file_are_named_as_they_are(tmp_path, capsys):
    np.savez(tmp_path / "pairs.npz", source=[3, 5], target=[4, 4])
    main(["plan", str(tmp_path / "pairs.npz"), "--max-tokens", "100"])
    printed = capsys.readouterr().out
    assert "2 rows, 8 source in all, the longest 5\n" in printed
    assert "2 rows, 8 target in all, the longest 4\n" in printed


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("a.fasta", [], "name the `--tokenizer` that measures them, or `--length-of characters`"),
        ("a.npy", ["--length-of", "words"], "contains lengths, not samples to count"),
        ("a.csv", ["--sample-by", "document"], "`sample_by` is for txt files, but"),
        ("a.csv", ["--length-of", "words"], "`--length-of` counts the words of texts, but a value"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path, capsys, name, arguments, message):
    np.save(tmp_path / "a.npy", [3, 5])
    (tmp_path / "a.csv").write_text("length\n3\n")
    (tmp_path / "a.fasta").write_bytes(FASTA)
    assert main(["doctor", str(tmp_path / name), "--batch-size", "2", *arguments]) == 2
    assert message in capsys.readouterr().err
