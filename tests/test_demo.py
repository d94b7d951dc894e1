"""The demo's claims: real texts, the same samples in the same updates, the same loss, fewer padded tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from dynagroup.cli import main
from dynagroup.demo import DemoConfig, TimeLimit, run_demo
from dynagroup.demo.corpus import docstrings, train_tokenizer
from dynagroup.errors import ConfigError
from tests import models


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return docstrings(at_least=400)


@pytest.fixture
def text_file(texts, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(" ".join(text.split()) for text in texts), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_docstrings_are_real_different_and_the_same_again(texts):
    assert len(texts) >= 400
    assert len(set(texts)) == len(texts)
    assert docstrings(at_least=400) == texts
    sizes = np.array([len(text) for text in texts])
    assert sizes.std() / sizes.mean() > 0.8


def test_the_tokenizer_reads_any_text_back(texts):
    tokenizer = train_tokenizer(texts[:50], vocabulary=300)
    for text in (*texts[:5], "Grüße, 世界 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def small(text_file, tmp_path, **changes) -> DemoConfig:
    settings = {
        "texts": str(text_file),
        "device": "cpu",
        "budget": 512,
        "max_length": 64,
        "samples": 96,
        "samples_per_update": 32,
        "picture": str(tmp_path / "demo.png"),
        "seconds": 1000.0,
    }
    return DemoConfig(**{**settings, **changes})


def test_same_updates_same_loss_less_padding(text_file, tmp_path, capsys, monkeypatch):
    runs = []
    import dynagroup.demo as demo

    make = demo.make_runs
    monkeypatch.setattr(demo, "make_runs", lambda *args: runs.extend(make(*args)) or runs)
    figures = run_demo(small(text_file, tmp_path))
    fixed, ours = runs
    contents = [[Counter(i for batch in update for i in batch) for update in run.updates] for run in runs]
    assert contents[0] == contents[1]
    assert [sum(update.values()) for update in contents[0]] == [32, 32, 32]
    found_fixed, found_ours = figures["runs"].values()
    assert found_ours["held_out_loss"] == pytest.approx(found_fixed["held_out_loss"], rel=1e-3)
    assert found_ours["padding"] < found_fixed["padding"] / 1.5
    assert max(found_fixed["largest_batch_tokens"], found_ours["largest_batch_tokens"]) <= 512
    assert len(fixed.seconds) == len(ours.seconds) == 3
    table = capsys.readouterr().out
    for word in ("samples/s", "real tokens/s", "padding", "steps", "CPU s", "held-out loss", fixed.name, "dynagroup"):
        assert word in table
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_time_ends_both_runs_after_the_same_update(text_file, tmp_path):
    figures = run_demo(small(text_file, tmp_path, seconds=1e-9))
    assert [found["updates"] for found in figures["runs"].values()] == [1, 1]


def test_a_time_limit_gives_every_run_the_same_answers():
    limit = TimeLimit(1e-9)
    assert [limit.allows(number) for number in (0, 1, 0, 1)] == [True, False, True, False]
    generous = TimeLimit(1000)
    assert all(generous.allows(number) for number in (0, 1, 2, 3, 0, 1, 2, 3))


def test_a_users_own_tokenizer_and_model(text_file, texts, tmp_path):
    from transformers import GPT2LMHeadModel

    train_tokenizer(texts[:100], vocabulary=300).save_pretrained(tmp_path / "mine")
    GPT2LMHeadModel(models.gpt2(vocab=300, layers=1, n_positions=64)).save_pretrained(tmp_path / "mine")
    figures = run_demo(small(text_file, tmp_path, model=str(tmp_path / "mine"), results=str(tmp_path / "figures.json")))
    assert (tmp_path / "figures.json").exists()
    assert figures["runs"]["dynagroup"]["samples"] == 96


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "x"], "`dataset` needs `column`"),
        (["--texts", "FILE", "--budget", "10"], "`budget` \\(10\\) must hold the longest text"),
    ],
)
def test_mistakes_are_explained(text_file, arguments, message, capsys):
    arguments = [str(text_file) if a == "FILE" else a for a in arguments]
    assert main(["demo", "--device", "cpu", *arguments]) == 2
    assert message.replace("\\", "") in capsys.readouterr().err


def test_too_few_texts_are_refused(tmp_path):
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match="at least 4 texts, but found 2"):
        run_demo(DemoConfig(texts=str(tmp_path / "few.txt")))
