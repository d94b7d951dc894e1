"""Whatever is said on the command line: it runs, or one line says what is wrong. Never a traceback."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynagroup.cli import main

NUMBERS = ["0", "-1", "1", "2", "3", "64", "1k", "16k", "1.5", "0.5", "1e3", "nan", "inf", "-inf", "", "x", "9" * 30]
DATA = ["lengths.npy", "texts.txt", "table.csv", "nowhere.npy", "", ".", "\0", "lengths.npy/x"]
COLUMNS = ["length", "id", "text", "", "nowhere"]
OPTIONS = {
    "plan": {
        **dict.fromkeys(
            ["--max-tokens", "--batch-size", "--max-samples", "--headroom", "--pad-to-multiple-of"], NUMBERS
        ),
        **dict.fromkeys(
            ["--world-size", "--window", "--samples-per-update", "--seed", "--epoch", "--max-length"], NUMBERS
        ),
        "--layout": ["padded", "packed", "x"],
        "--column": COLUMNS,
        "--split": COLUMNS,
        "--shuffle": None,
        "--json": None,
    },
    "compare": {
        **dict.fromkeys(["--batch-size", "--accumulation", "--world-size", "--max-tokens", "--max-length"], NUMBERS),
        **dict.fromkeys(["--pad-to-multiple-of", "--seed"], NUMBERS),
        "--layout": ["padded", "packed", "x"],
        "--column": COLUMNS,
        "--json": None,
    },
}
OPTIONS["doctor"] = {**OPTIONS["compare"], "--gpu-memory": ["24GB", "", "x", "0"]}
NEEDED = {"plan": "--max-tokens", "compare": "--batch-size", "doctor": "--batch-size"}


def said(arguments: list[str]) -> tuple[int, str]:
    """Exit status and standard error of one command, in this process."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            status = main(arguments)
        except SystemExit as stopped:  # argparse's own refusal
            status = int(stopped.code or 0)
    return status, error.getvalue()


def assert_runs_or_says_why(arguments: list[str]) -> None:
    status, error = said(arguments)
    lines = [line for line in error.splitlines() if ": warning: " not in line and not line.startswith((" ", "usage:"))]
    assert status in (0, 2), error
    assert "Traceback" not in error
    if status:
        assert len(lines) == 1, error
        assert lines[0].startswith(f"dynagroup {arguments[0]}: ")


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(sorted(OPTIONS)))
    options = OPTIONS[command]
    names = draw(st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True))
    line = [command, draw(st.sampled_from(DATA[:1] * 8 + DATA))]
    if NEEDED[command] not in names and draw(st.integers(0, 9)):
        line += [NEEDED[command], "64"]
    for name in names:
        values = options[name]
        line += [name] if values is None else [f"{name}={draw(st.sampled_from(values))}"]
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    lengths = np.random.default_rng(0).integers(1, 60, 40)
    np.save(path / "lengths.npy", lengths)
    (path / "texts.txt").write_text("some text\nmore of it\n")
    (path / "table.csv").write_text("id,text,length\n" + "".join(f"{i},t,{n}\n" for i, n in enumerate(lengths)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=command_lines())
def test_any_command_line_runs_or_says_what_is_wrong_in_one_line(line, folder):
    assert_runs_or_says_why(line)


ENDINGS = [".npy", ".npz", ".txt", ".csv", ".tsv", ".jsonl", ".json", ".parquet"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_cut_off_anywhere_is_one_line(ending, tmp_path):
    from tests.test_cli import write_lengths

    write_lengths(whole := tmp_path / f"whole{ending}", "csv" if ending == ".tsv" else ending[1:])
    content = whole.read_bytes()
    for share in (0, 1, 3, len(content) // 2, len(content) - 1):
        (broken := tmp_path / f"broken{ending}").write_bytes(content[:share])
        assert_runs_or_says_why(["plan", str(broken), "--max-tokens", "64"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.text(max_size=40).map(str.encode), ending=st.sampled_from(ENDINGS))
def test_any_bytes_under_any_ending_are_read_or_refused_in_one_line(content, ending, tmp_path):
    (path := tmp_path / f"data{ending}").write_bytes(content)
    assert_runs_or_says_why(["plan", str(path), "--max-tokens", "64"])


@pytest.fixture
def broken(folder, monkeypatch):
    """Models and texts that are none, as a user has them by mistake; a hub that cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, config in (("unknown", '{"model_type": "nosuch"}'), ("cut_off", '{"model_type": '), ("empty", None)):
        (folder / name).mkdir(exist_ok=True)
        if config is not None:
            (folder / name / "config.json").write_text(config)
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("command", ["fit", "profile"])
@pytest.mark.parametrize(
    "model", ["unknown", "cut_off", "empty", "nosuch", "no/such/model/here", "lengths.npy", "", "\0"]
)
def test_what_is_no_model_is_refused_in_one_line(command, model, broken):
    status, error = said([command, model])
    assert (status, error.count("\n")) == (2, 1), error
    assert error.startswith(f"dynagroup {command}: no config found for {model!r}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "m", "--picture", "a.nothing"], "cannot be a picture"),
        (["profile", "m", "--picture", "/"], "cannot be a picture"),
        (["doctor", "lengths.npy", "--batch-size", "8", "--model", "nosuch"], "no config found for 'nosuch'"),
        (["compare", "lengths.npy", "--batch-size", "8", "--picture", "."], "cannot be a picture"),
        (["demo", "--texts", "nowhere.txt"], "`texts` must be a text file"),
        (["demo", "--texts", "bytes.txt"], "`texts` must be a text file"),
        (["demo", "--texts", "."], "`texts` must be a text file"),
        (["demo", "--texts", "texts.txt"], "at least 4 texts, but found 2"),
        (["demo", "--texts", "many.txt", "--tokenizer", "nosuch"], "no tokenizer found for 'nosuch'"),
        (["demo", "--texts", "many.txt", "--model", "nosuch"], "no tokenizer found for 'nosuch'"),
        (["demo", "--texts", "many.txt", "--device", "nosuch"], "`device` must be a device of this machine"),
        (["demo", "--texts", "many.txt", "--picture", "x.nothing"], "cannot be a picture"),
        (["demo", "--texts", "many.txt", "--samples", "0"], "`samples` must be an int of at least 1"),
        (["demo", "--texts", "many.txt", "--max-length", "0"], "`max_length` must be an int of at least 1"),
        (["demo", "--texts", "many.txt", "--seconds", "nan"], "`seconds` must be"),
    ],
)
def test_mistakes_of_every_command_are_one_line(arguments, message, broken, folder):
    (folder / "many.txt").write_text("one text\n" * 8)
    status, error = said(arguments)
    assert (status, error.count("\n")) == (2, 1), error
    assert error.startswith(f"dynagroup {arguments[0]}: ")
    assert message in error


def test_a_traceback_would_be_noticed(monkeypatch, folder):
    from dynagroup.plan import sampler

    monkeypatch.setattr(sampler.LengthAwareBatchSampler, "set_epoch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        assert_runs_or_says_why(["plan", "lengths.npy", "--max-tokens", "64"])
