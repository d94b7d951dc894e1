"""The command line says what the library says, and a user's mistake in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoConfig, AutoTokenizer

import dynagroup
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.cli import main
from dynagroup.demo import train_tokenizer
from dynagroup.lengths import measure_lengths
from dynagroup.plan.cost import Work
from dynagroup.plan.report import compare
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape
from tests import models

LENGTHS = np.random.default_rng(0).integers(1, 100, 200).astype(np.int32)


@pytest.fixture
def lengths_file(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return str(tmp_path / "lengths.npy")


def test_plan_prints_the_plans_report(lengths_file, capsys):
    assert main(["plan", lengths_file, "--max-tokens", "800", "--world-size", "4"]) == 0
    expected = LengthAwareBatchSampler(LENGTHS, TokenBudget(800), rank=0, world_size=4).plan.report()
    assert capsys.readouterr().out == expected + "\n"


def test_plan_prints_figures_for_machines(lengths_file, capsys):
    arguments = ["--max-tokens", "800", "--shuffle", "--epoch", "3", "--samples-per-update", "32", "--json"]
    assert main(["plan", lengths_file, *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_samples"] == 200
    assert figures["num_updates"] == 7


def write_lengths(path, kind):
    """The same lengths as users have them: bare, beside other columns, or as the ids themselves."""
    ids = [[7] * int(n) for n in LENGTHS]
    if kind == "npy":
        np.save(path, LENGTHS)
    elif kind == "npz":
        np.savez(path, tokens=LENGTHS, target=LENGTHS)
    elif kind == "txt":
        np.savetxt(path, LENGTHS, fmt="%d")
    elif kind == "csv":
        path.write_text("\n".join(["name,length", *(f"a,{n}" for n in LENGTHS)]))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"input_ids": row}) for row in ids))
    elif kind == "json":
        path.write_text(json.dumps([{"input_ids": row} for row in ids]))
    elif kind == "parquet":
        Dataset.from_dict({"input_ids": ids, "label": [0] * len(ids)}).to_parquet(str(path))
    else:
        DatasetDict({"train": Dataset.from_dict({"length": LENGTHS})}).save_to_disk(str(path))


@pytest.mark.parametrize("kind", ["npy", "npz", "txt", "csv", "jsonl", "json", "parquet", "folder"])
def test_lengths_come_in_several_kinds_of_files(tmp_path, kind, capsys):
    path = tmp_path / ("saved" if kind == "folder" else f"lengths.{kind}")
    write_lengths(path, kind)
    capsys.readouterr()
    assert main(["plan", str(path), "--batch-size", "32", "--max-length", "50", "--json"]) == 0
    target = LENGTHS.sum() if kind == "npz" else 0  # --max-length is of the first stream
    assert json.loads(capsys.readouterr().out)["real_tokens"] == int(np.minimum(LENGTHS, 50).sum() + target)


@pytest.mark.parametrize("kind", ["npz", "csv", "jsonl", "json", "parquet", "folder"])
def test_streams_are_the_columns_that_were_named_and_the_output_says_which(tmp_path, kind, capsys):
    path, target, columns = tmp_path / f"pairs.{kind}", LENGTHS[::-1], {}
    columns = {
        "name": ["x"] * 200,
        "source": LENGTHS.tolist(),
        "target": target.tolist(),
        "chars": (4 * LENGTHS).tolist(),
    }
    table = Dataset.from_dict(columns)
    if kind == "npz":
        np.savez(path, **{name: values for name, values in columns.items() if name != "name"})
    elif kind == "json":
        path.write_text(json.dumps(table.to_list()))
    else:
        save = {"csv": table.to_csv, "jsonl": table.to_json, "parquet": table.to_parquet, "folder": table.save_to_disk}
        save[kind](str(path))
    capsys.readouterr()
    assert main(["plan", str(path), "--column", "source,target", "--max-tokens", "800"]) == 0
    first, report = capsys.readouterr().out.split("\n", 1)
    assert first.startswith("padded streams: source, target (")
    streams = {"source": LENGTHS, "target": target}
    assert report == LengthAwareBatchSampler(streams, TokenBudget(800), rank=0, world_size=1).plan.report() + "\n"
    assert main(["plan", str(path), "--column", "source", "--max-tokens", "800"]) == 0
    assert "streams:" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "compare", "doctor"])
def test_arrays_that_were_not_chosen_are_told_of(tmp_path, command, capsys):
    np.savez(tmp_path / "a.npz", words=LENGTHS, tokens=LENGTHS, chars=LENGTHS)
    size = ["--max-tokens" if command == "plan" else "--batch-size", "800"]
    assert main([command, str(tmp_path / "a.npz"), *size]) == 0
    assert capsys.readouterr().out.startswith("padded streams: words, tokens, chars (")
    assert main([command, str(tmp_path / "a.npz"), *size, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert err.startswith("padded streams: words, tokens, chars (")


def test_both_sides_may_be_texts(tmp_path, tokenizer, capsys):
    table = Dataset.from_dict({"source": TEXTS, "target": TEXTS[::-1]})
    table.to_parquet(str(tmp_path / "pairs.parquet"))
    capsys.readouterr()
    arguments = ["--column", "source,target", "--tokenizer", tokenizer, "--max-tokens", "1k", "--json"]
    assert main(["plan", str(tmp_path / "pairs.parquet"), *arguments]) == 0
    counts = measure_lengths(TEXTS, AutoTokenizer.from_pretrained(tokenizer))
    assert json.loads(capsys.readouterr().out)["real_tokens"] == 2 * int(counts.sum())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a few words to learn from, and some more"] * 4, vocabulary=300).save_pretrained(folder)
    return str(folder)


TEXTS = ["a few words", "to learn from, and some more words, all of them", "some", "words"]


@pytest.mark.parametrize("kind", ["txt", "csv", "tsv", "jsonl", "parquet", "folder"])
def test_texts_are_measured_with_the_tokenizer(tmp_path, tokenizer, kind, capsys):
    path = tmp_path / ("saved" if kind == "folder" else f"texts.{kind}")
    table = Dataset.from_dict({"id": ["x"] * 4, "body": TEXTS})
    if kind == "txt":
        path.write_text("\n".join(TEXTS))
    elif kind in ("csv", "tsv"):
        table.to_csv(str(path), index=False, sep="," if kind == "csv" else "\t")
    elif kind == "jsonl":
        table.to_json(str(path))
    else:
        table.save_to_disk(str(path)) if kind == "folder" else table.to_parquet(str(path))
    column = [] if kind == "txt" else ["--column", "body"]
    capsys.readouterr()
    assert main(["plan", str(path), *column, "--tokenizer", tokenizer, "--max-tokens", "1k", "--json"]) == 0
    counts = measure_lengths(TEXTS, AutoTokenizer.from_pretrained(tokenizer))
    assert json.loads(capsys.readouterr().out)["real_tokens"] == int(counts.sum())


CHATS = b'{"c": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}\n'


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("x.npy", b"no array", [], "cannot be read as .npy"),
        ("x.npz", b"no archive", [], "cannot be read as .npz"),
        ("x.parquet", b"no table", ["--column", "a"], "cannot be read as .parquet"),
        ("x.txt", b"\xff\xfe\x00", [], "cannot be read as .txt"),
        ("x.txt", b"", [], "holds no samples"),
        ("x.txt", b"3\nfour\n", [], "say which `--tokenizer`"),
        ("x.txt", b"3\n-4\n", [], "must be a whole number from 0"),
        ("x.csv", b"a,b\n1,2\n", [], "columns ['a', 'b']; choose one with `--column`"),
        ("x.csv", b"a,length\n1,2\n3\n", [], "row 2 of"),
        ("x.csv", b"id,b\n" + b"".join(b"%d,7\n" % i for i in range(9)), ["--column", "id"], "that is an index"),
        ("x.jsonl", b"".join(b'{"nr": %d}\n' % i for i in (3, 9, 4, 10, 5, 8, 7, 6)), [], "numbers its rows (3 to 10"),
        ("x.csv", b"", ["--column", "c"], "has no columns: it is empty"),
        ("x.csv", b"a,length\n1,2\n3,4,5\n", [], "row 2 of 'x.csv' has 3 values, but the header names 2 columns"),
        ("x.TSV", b"a\tlength\n1\t2\n3\n", [], "row 2 of 'x.TSV' has 1 values"),
        ("x.csv", b'a,length\n1,"2\n3,4\n', [], "cannot be read as .csv: unexpected end of data"),
        ("x.csv", b"length,length\n1,2\n", [], "the name 'length' stands twice in 'x.csv'"),
        ("x.csv", b"length,a,a\n1,2,3\n", [], "the name 'a' stands twice in 'x.csv'"),
        ("x.jsonl", b'{"length": 3, "length": 4}\n', [], "the name 'length' stands twice in an object"),
        ("x.json", b'[{"length": 3, "length": 4}]', [], "the name 'length' stands twice in an object"),
        ("x.txt", b"3\n4\n", ["--column", "c"], "`--column` is of a table, and there are no columns in 'x.txt'"),
        ("x.jsonl", CHATS, ["--column", "c"], "sample 0 is a chat"),
        (
            "x.jsonl",
            CHATS,
            ["--column", "c", "--tokenizer", "TOKENIZER"],
            "apply_chat_template(messages, tokenize=False)",
        ),
        ("x.json", b'["one", "\\ud800"]', ["--tokenizer", "TOKENIZER"], "text 1 has a lone surrogate at character 0"),
        ("x.csv", b"a,b\n1,2\n", ["--column", "c"], "must be one of ['a', 'b']"),
        ("x.csv", b"a,b\n1,2\n", ["--column", "a,c"], "must be one of ['a', 'b'] in"),
        ("x.jsonl", b'{"length": 3}\n{"length": \n', [], "no JSON in line 2"),
        ("x.jsonl", b'{"length": 3}\n{"size": 3}\n', [], "sample 1 of"),
        ("x.json", b'{"length": 3}', [], "must hold a list"),
        ("x.json", b"[null, 4]", [], "must be a whole number from 0"),
        ("x.docx", b"", [], "unknown ending"),
        ("x.npy", b"no array", ["--tokenizer", "t"], "cannot be read as .npy"),
        ("x.json", b"[3, 4]", ["--tokenizer", "t"], "holds no texts"),
        ("x.json", b"[" * 100_000, [], "cannot be read as .json"),
        ("x.txt", b"some text", ["--tokenizer", "no/such/tokenizer/here"], "no tokenizer found for 'no/such/tokenizer"),
        ("x.txt", b"some text", ["--tokenizer", "nosuch"], "no tokenizer found for 'nosuch'"),
        (None, b"", [], "cannot be read as a folder saved by datasets"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, name, content, arguments, message, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    if name is not None:
        (tmp_path / name).write_bytes(content)
    arguments = [tokenizer if a == "TOKENIZER" else a for a in arguments]
    assert main(["plan", name or ".", "--max-tokens", "8", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("dynagroup plan: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", b"3\n4\n"),
        ("x.csv", b"length\r\n3\r\n4\r\n"),
        ("x.TSV", b"length\ta\n3\t1\n4\t1\n"),
        ("x.jsonl", b'{"length": 3}\n{"length": 4}'),
        ("x.json", b"[3, 4]"),
    ],
)
def test_a_mark_of_utf_8_changes_nothing(tmp_path, name, content, mark, capsys):
    (tmp_path / name).write_bytes(mark + content)
    assert main(["plan", str(tmp_path / name), "--max-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["real_tokens"] == 7


def test_a_text_ends_with_its_line_alone(tmp_path, tokenizer, capsys):
    (tmp_path / "x.txt").write_text("one\u2028two\x0cthree\nfour\n", encoding="utf-8")
    assert main(["plan", str(tmp_path / "x.txt"), "--max-tokens", "80", "--tokenizer", tokenizer, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 2


@pytest.mark.parametrize(
    "arguments", [[], ["plan"], ["plan", "x.npy"], ["doctor", "x.npy"], ["fit"], ["plan", "--what"], ["x"]]
)
def test_missing_and_unknown_arguments_are_one_line(arguments, lengths_file, capsys):
    arguments = [lengths_file if a == "x.npy" else a for a in arguments]
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("dynagroup")


@pytest.mark.parametrize(("text", "tokens"), [("16k", 16384), ("4096", 4096), ("1.5k", 1536), ("16_384", 16384)])
def test_tokens_are_written_as_people_write_them(text, tokens, lengths_file, capsys):
    assert main(["plan", lengths_file, "--max-tokens", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == expected_fingerprint(tokens)


def expected_fingerprint(tokens):
    return LengthAwareBatchSampler(LENGTHS, TokenBudget(tokens), rank=0, world_size=1).plan.fingerprint


@pytest.mark.parametrize("text", ["many", "16kk", "k", "", "1e3"])
def test_what_is_no_number_of_tokens_is_refused(text, lengths_file, capsys):
    with pytest.raises(SystemExit):
        main(["plan", lengths_file, "--max-tokens", text])
    assert "such as 16384 or 16k" in capsys.readouterr().err


def test_the_version_is_shown(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"dynagroup {dynagroup.__version__}\n")


def test_plan_saves_a_picture(lengths_file, tmp_path):
    picture = tmp_path / "a new folder" / "plan.png"
    assert main(["plan", lengths_file, "--max-tokens", "800", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.npy", "--max-tokens", "8"], "there is no file 'nowhere.npy'"),
        (["LENGTHS", "--max-tokens", "-8"], "`max_tokens` must be"),
        (["LENGTHS", "--max-tokens", "800", "--picture", "a.nothing"], "cannot be a picture"),
    ],
)
def test_mistakes_are_one_line_and_status_2(lengths_file, arguments, message, capsys):
    arguments = [lengths_file if a == "LENGTHS" else a for a in arguments]
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dynagroup plan: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_package_is_named_with_what_to_install(lengths_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", lengths_file, "--max-tokens", "800", "--picture", "x.png"]) == 2
    assert "install dynagroup[viz]" in capsys.readouterr().err


@pytest.fixture
def model_folder(tmp_path):
    config = models.gpt2(
        vocab=500, width=64, layers=1, dropout=0.1, n_positions=96, bos_token_id=None, eos_token_id=None
    )
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_profile_prints_what_fits_and_the_line_that_decides_the_same_and_saves_a_picture(
    model_folder, tmp_path, capsys
):
    from dynagroup import MemoryBudget
    from dynagroup.memory import what_fits

    picture = tmp_path / "a new folder" / "profile.png"
    arguments = ["--gpu-memory", "2GB", "--dtype", "bfloat16", "--picture", str(picture)]
    assert main(["profile", model_folder, "--mode", "generate", "--max-new-tokens", "8", *arguments]) == 0
    found = what_fits(model_folder, "2GB", mode="generate", dtype="bfloat16", max_new_tokens=8)
    shown = capsys.readouterr().out
    assert shown == f"{found}\npicture: {picture}\n"
    (code,) = (line for line in shown.splitlines() if line.startswith("MemoryBudget.from_model("))
    budget = eval(code, {"MemoryBudget": MemoryBudget})
    assert budget.largest(np.array(found.lengths)).tolist() == list(found.samples)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_profile_says_what_simulate_says_of_given_shapes(model_folder, tmp_path, capsys):

    from dynagroup.memory import Measurements, Workload, simulate

    saved, picture = tmp_path / "found.parquet", str(tmp_path / "profile.png")
    arguments = ["--shapes", "2x32", "4x64", "--dtype", "bfloat16", "--output", str(saved), "--picture", picture]
    assert main(["profile", model_folder, *arguments]) == 0
    config = AutoConfig.from_pretrained(model_folder)
    expected = simulate(config, Workload.from_model(config, "train", dtype="bfloat16"), [(2, 32), (4, 64)])
    assert list(Measurements.from_parquet(saved))[:2] == list(expected)
    table = capsys.readouterr().out
    assert "4 x 64" in table
    assert "peak GiB" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "lots"], "80GB or 24GiB, or a number of bytes, but is 'lots'"),
        (["--headroom", "1.5"], "at most 1.0, but is 1.5"),
        (["--dtype", "int3"], "`dtype` must be one of"),
    ],
)
def test_profile_refuses_what_makes_no_sense(model_folder, arguments, message, capsys):
    assert main(["profile", model_folder, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_profile_without_a_device_to_measure_on_says_so(model_folder, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["profile", model_folder, "--measure"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_shape_is_samples_x_tokens(capsys):
    with pytest.raises(SystemExit):
        main(["profile", "x", "--shapes", "8by512"])
    assert "such as 8x512, but is '8by512'" in capsys.readouterr().err


def test_python_m_dynagroup_runs():
    shown = subprocess.run([sys.executable, "-m", "dynagroup", "--help"], capture_output=True, text=True, check=True)
    assert all(command in shown.stdout for command in ("plan", "profile", "demo"))


def test_compare_shows_every_way_and_its_picture(lengths_file, tmp_path, capsys):
    picture = tmp_path / "new" / "compare.png"
    arguments = [lengths_file, "--batch-size", "8", "--world-size", "2"]
    assert main(["compare", *arguments, "--picture", str(picture)]) == 0
    assert capsys.readouterr().out == compare(LENGTHS, 8, world_size=2).report() + f"\npicture: {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["compare", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare(LENGTHS, 8, world_size=2).figures()


def test_compare_predicts_time_for_a_model(lengths_file, model_folder, capsys):
    assert main(["compare", lengths_file, "--batch-size", "8", "--model", model_folder, "--json"]) == 0
    work = Work.of(AutoConfig.from_pretrained(model_folder))
    assert json.loads(capsys.readouterr().out) == compare(LENGTHS, 8, work=work).figures()


def test_doctor_says_it_in_five_lines(lengths_file, capsys):
    assert main(["doctor", lengths_file, "--batch-size", "8", "--world-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["waste", "ranks", "memory", "change", "gain"]
    found = compare(LENGTHS, 8, world_size=4)
    assert f"{found.ways[0].padding:.0%} of the tokens" in lines[0]
    assert f"{found.ways[0].waiting:.0%} of their time" in lines[1]
    assert f"TokenBudget({8 * LENGTHS.max()}), samples_per_update=32" in lines[3]


def test_doctor_has_nothing_to_change_where_lengths_are_equal(tmp_path, capsys):
    (tmp_path / "equal.txt").write_text("64\n" * 200)
    assert main(["doctor", str(tmp_path / "equal.txt"), "--batch-size", "8"]) == 0
    assert "nothing: lengths vary too little" in capsys.readouterr().out


@pytest.mark.parametrize(("memory", "message"), [("1MB", "do not fit 1MB: 0 do"), ("80GB", "fit 80GB, and")])
def test_doctor_asks_whether_the_largest_batch_fits(lengths_file, model_folder, memory, message, capsys):
    arguments = ["--batch-size", "8", "--max-length", "96", "--model", model_folder, "--gpu-memory", memory]
    assert main(["doctor", lengths_file, *arguments]) == 0
    out = capsys.readouterr().out
    assert message in out
    assert "(train, float32, sdpa attention, no checkpointing, AdamW of 8 bytes a trained parameter)" in out


def test_doctor_asks_about_all_streams(tmp_path, capsys):
    """Answers of up to 90 tokens beside questions of up to 500: what fits is what the memory budget lets fit."""
    source = 500
    config = models.t5(vocab=900, width=64, layers=1, heads=4, d_kv=16)
    config.save_pretrained(tmp_path / "t5")
    np.savez(tmp_path / "pairs.npz", source=[source, 5, 7] * 20, target=[3, 90, 4] * 20)
    arguments = ["--batch-size", "8", "--model", str(tmp_path / "t5"), "--gpu-memory", "400MB"]
    assert main(["doctor", str(tmp_path / "pairs.npz"), *arguments]) == 0
    out = capsys.readouterr().out
    found = re.search(
        r"8 samples of (\d+) source and 90 target fit 400MB, and (\d+) would .* safe: ([\d,]+) tokens", out
    )
    assert found, out
    most, tokens = int(found[2]), int(found[3].replace(",", ""))
    budget = MemoryBudget.from_model(config, "400MB")
    longest = {"tokens": source, "target": 90}
    assert budget.fits(BatchShape.of([most, most + 1], longest)).tolist() == [True, False]
    assert most < budget.largest(np.array([90]))[0]
    of_budget = np.array([[tokens // (s + t), s, t] for s in (1, 50, source) for t in (1, 45, 90)]).T
    assert budget.fits(BatchShape.of(of_budget[0], {"tokens": of_budget[1], "target": of_budget[2]})).all()


def test_doctor_advises_no_update_too_small_to_sort(tmp_path, capsys):
    (tmp_path / "two.txt").write_text("10\n1000\n" * 200)
    assert main(["doctor", str(tmp_path / "two.txt"), "--batch-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "the same updates in 0.99 of the time" in shown
    assert "samples_per_update=" not in shown
    assert "updates as large as fit, or more samples an update" in shown


def test_doctor_advises_no_budget_that_does_not_fit(lengths_file, model_folder, capsys):
    arguments = ["doctor", lengths_file, "--batch-size", "8", "--max-length", "96", "--model", model_folder]
    assert main([*arguments, "--gpu-memory", "1MB"]) == 0
    shown = capsys.readouterr().out
    safe = int(shown.split("a budget that is safe: ")[1].split(" tokens")[0].replace(",", ""))
    assert f"TokenBudget({max(safe, 1)})" in shown


def test_a_column_of_numbers_beside_texts_holds_lengths(tmp_path, capsys, tokenizer):
    rows = "\n".join(f"some words of text,{100 + 7 * (i % 5)}" for i in range(12))
    (tmp_path / "mix.csv").write_text("text,target\n" + rows)
    arguments = ["plan", str(tmp_path / "mix.csv"), "--column", "text,target", "--tokenizer", tokenizer]
    assert main([*arguments, "--max-tokens", "1000", "--json"]) == 0
    targets = sum(100 + 7 * (i % 5) for i in range(12))
    texts = int(measure_lengths(["some words of text"], AutoTokenizer.from_pretrained(tokenizer))[0])
    assert json.loads(capsys.readouterr().out)["real_tokens"] == targets + 12 * texts


def test_doctor_needs_the_model_to_know_what_fits(lengths_file, capsys):
    assert main(["doctor", lengths_file, "--batch-size", "8", "--gpu-memory", "24GB"]) == 2
    assert "`--gpu-memory` needs `--model`" in capsys.readouterr().err


def test_fit_says_what_what_fits_says(model_folder, tmp_path, capsys):
    from dynagroup.memory.fits import what_fits

    picture = tmp_path / "new" / "fit.png"
    arguments = ["--gpu-memory", "2GB", "--dtype", "bfloat16", "--lengths", "32", "96"]
    assert main(["fit", model_folder, *arguments, "--picture", str(picture)]) == 0
    expected = what_fits(model_folder, "2GB", lengths=[32, 96], dtype="bfloat16")
    assert capsys.readouterr().out == f"{expected}\npicture: {picture}\n"
    assert main(["fit", model_folder, *arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["samples"] == {"32": expected.samples[0], "96": expected.samples[1]}
    assert figures["code"] == expected.code


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_fit_knows_sharding_and_adapters(model_folder, capsys):
    arguments = ["--gpu-memory", "2GB", "--lengths", "96", "--json"]
    static = []
    for extra in ([], ["--fsdp", "8"], ["--lora"]):
        assert main(["fit", model_folder, *arguments, *extra]) == 0
        static.append(json.loads(capsys.readouterr().out)["static_bytes"])
    assert static[1] < static[0]
    assert static[2] < static[0]


def test_fit_refuses_what_makes_no_sense(model_folder, capsys):
    assert main(["fit", model_folder, "--gpu-memory", "lots"]) == 2
    assert "'lots'" in capsys.readouterr().err
    assert main(["fit", "no/such/model/here"]) == 2
    error = capsys.readouterr().err
    assert "no/such/model/here" in error
    assert error.count("\n") == 1
