"""The demo's claims: real texts, the same samples in the same updates, the same loss, fewer padded tokens."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
from transformers import GPT2LMHeadModel

from dynagroup import ConfigError
from dynagroup.demo import DemoConfig, docstrings, run_demo, train_tokenizer
from tests import models


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return docstrings(at_least=400)


@pytest.fixture
def small(texts, tmp_path):
    path = tmp_path / "texts.txt"
    lines = [" ".join(text.split()) for text in texts]
    path.write_text("\n".join(lines), encoding="utf-8")
    config = DemoConfig(
        texts=str(path),
        device="cpu",
        budget=512,
        max_length=64,
        samples=96,
        samples_per_update=32,
        seconds=1000.0,
    )
    return partial(replace, config)


def test_docstrings_are_different_the_same_again_and_what_the_tokenizer_reads_back(texts):
    assert len(set(texts)) == len(texts) >= 400
    assert docstrings(at_least=400) == texts
    sizes = np.array([len(text) for text in texts])
    assert sizes.std() / sizes.mean() > 0.8
    tokenizer = train_tokenizer(texts[:50], vocabulary=300)
    for text in (*texts[:5], "Grüße, 世界 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def samples_of_updates(run):
    return [Counter(chain.from_iterable(update)) for update in run.updates]


def test_same_updates_same_loss_less_padding(small, capsys):
    runs, lengths = run_demo(small())
    samples_fixed, samples_ours = (samples_of_updates(run) for run in runs)
    assert samples_fixed == samples_ours
    assert [update.total() for update in samples_ours] == [32, 32, 32]
    fixed, ours = (run.figures(lengths) for run in runs)
    assert ours["held_out_loss"] == pytest.approx(fixed["held_out_loss"], rel=1e-3)
    assert ours["padding"] < fixed["padding"] / 1.5
    assert max(fixed["largest_batch_tokens"], ours["largest_batch_tokens"]) <= 512
    assert [len(run.seconds) for run in runs] == [3, 3]
    table = capsys.readouterr().out
    rows = ["samples a second", "real tokens", "padding", "CPU time", "held out loss"]
    for word in (*rows, runs[0].name, "dynagroup"):
        assert word in table


def test_time_ends_both_runs_of_ones_own_model_after_the_same_update(small, texts, tmp_path):
    folder = tmp_path / "mine"
    train_tokenizer(texts[:100], vocabulary=300).save_pretrained(folder)
    config = models.gpt2(vocab=300, layers=1, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    runs, _ = run_demo(small(model=str(folder), samples_per_update=8, seconds=1e-9))
    assert [len(run.updates) for run in runs] == [5, 5]  # of fewer a median says nothing
    with pytest.raises(ConfigError, match=r"`budget` \(10\) must be at least the longest text"):
        run_demo(small(budget=10, device=None))
