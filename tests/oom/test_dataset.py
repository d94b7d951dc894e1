from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers  # noqa: F401

from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import ConfigError, StateError
from dynagroup.oom import LearningBudget, classify_dataset, embed_dataset, generate_dataset
from dynagroup.oom.journal import Journal
from tests.allocator import Allocator
from tests.oom.fixtures import collecting_garbage_is_quick as collecting_garbage_is_quick
from tests.oom.texts import TEXTS, small_llama, small_tokenizer
from tests.torchrun import ROOT, torchrun

SMALL: Any = {"budget": TokenBudget(40), "progress": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer()


@pytest.fixture(scope="module")
def expected(model: Any, tokenizer: Any) -> list[str]:
    """One text at a time: nothing to pad, nothing to plan."""
    answers = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")
        new = model.generate(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=4)
        answers.append(tokenizer.decode(new[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_results_are_those_of_one_text_at_a_time_in_input_order(
    model: Any, tokenizer: Any, expected: list[str]
) -> None:
    assert generate_dataset(model, tokenizer, TEXTS, max_new_tokens=4, **SMALL) == expected
    assert len(set(expected)) > 20
    assert tokenizer.padding_side == "right"  # what we were given is left as it was


def test_a_batch_size_is_enough(model: Any, tokenizer: Any, expected: list[str]) -> None:
    assert generate_dataset(model, tokenizer, TEXTS, batch_size=4, max_new_tokens=4, progress=False) == expected


def test_running_out_of_memory_changes_nothing_and_teaches_the_plan(
    model: Any, tokenizer: Any, expected: list[str]
) -> None:
    allocator = Allocator(60)
    remove = allocator.in_forward(model.model.layers[2])
    learned = LearningBudget()
    got = generate_dataset(
        model, tokenizer, TEXTS, budget=TokenBudget(100), max_new_tokens=4, progress=False, learned=learned
    )
    remove()
    assert got == expected
    assert 1 <= len(allocator.failures) <= 4
    assert learned.report.num_ooms == len(allocator.failures)
    assert all(a > b for a, b in pairwise(allocator.failures))  # never the same twice


def test_several_sequences_a_text_come_as_lists(model: Any, tokenizer: Any) -> None:
    got = generate_dataset(model, tokenizer, TEXTS[:5], max_new_tokens=3, num_beams=2, num_return_sequences=2, **SMALL)
    assert [len(g) for g in got] == [2] * 5


def test_empty_texts_and_no_texts(model: Any, tokenizer: Any) -> None:
    assert generate_dataset(model, tokenizer, [], max_new_tokens=2, **SMALL) == []
    assert len(generate_dataset(model, tokenizer, ["", "w1"], max_new_tokens=2, **SMALL)) == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_output_file_holds_one_row_a_text(
    suffix: str, model: Any, tokenizer: Any, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / f"out{suffix}"
    assert generate_dataset(model, tokenizer, TEXTS, output=path, max_new_tokens=4, **SMALL) == expected
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # the journal is gone
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows == [{"index": i, "result": r} for i, r in enumerate(expected)]
    with pytest.raises(ConfigError, match="exists: a run has finished there"):
        generate_dataset(model, tokenizer, TEXTS, output=path, max_new_tokens=4, **SMALL)


def run_alone(output: Path, die_after: int) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "tests/ranks/generate_job.py"), str(output), str(die_after)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT)


def test_a_killed_run_goes_on_where_it_was(expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    killed = run_alone(path, die_after=6)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    journal = (tmp_path / "out.jsonl.journal" / "rank-0.jsonl").read_text().splitlines()
    finished = {json.loads(line)["index"] for line in journal[1:-1]}
    assert 5 <= len(finished) < len(TEXTS)
    again = run_alone(path, die_after=0)
    assert again.returncode == 0, again.stderr[-3000:]
    report = json.loads(again.stdout.split("REPORT ")[1])
    assert report["results"] == expected
    assert report["batches"] < 20  # the first five were not repeated


def test_nothing_finished_is_done_again(
    model: Any, tokenizer: Any, expected: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "out.jsonl"
    done: list[int] = []
    append = Journal.append

    def stopping(self: Journal, indices: list[int], results: list[str]) -> None:
        append(self, indices, results)
        done.extend(indices)
        if len(done) > 10 and len(done) == len(set(done)) and not stopping.__dict__:
            stopping.__dict__["once"] = True
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", stopping)
    with pytest.raises(KeyboardInterrupt):
        generate_dataset(model, tokenizer, TEXTS, output=path, max_new_tokens=4, **SMALL)
    assert generate_dataset(model, tokenizer, TEXTS, output=path, max_new_tokens=4, **SMALL) == expected
    assert sorted(done) == list(range(len(TEXTS)))


def test_another_jobs_journal_is_refused(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path, "something else", 3)
    journal.open(0)
    journal.append([0], ["x"])
    journal.close()
    with pytest.raises(StateError, match="belongs to another job .*'something else'.*remove it to start over"):
        generate_dataset(model, tokenizer, TEXTS, output=path, max_new_tokens=4, **SMALL)


def test_a_journal_with_holes_is_not_published(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl", "job", 3)
    journal.open(0)
    journal.append([0, 2], ["x", "z"])
    journal.close()
    assert journal.finished() == {0, 2}
    with pytest.raises(StateError, match="1 of 3 samples are in no journal"):
        journal.publish()


@pytest.mark.slow
def test_ranks_share_the_work_also_after_a_crash_on_fewer(expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert run_alone(path, die_after=4).returncode == -signal.SIGKILL
    reports = torchrun("generate_job.py", str(path), "0", ranks=2)
    assert [r["results"] for r in reports] == [expected] * 2
    assert min(r["batches"] for r in reports) >= 3


def test_several_ranks_need_a_file(model: Any, tokenizer: Any) -> None:
    class Two:
        rank, size = 0, 2

        def all_max(self, values: Any) -> Any:
            raise AssertionError("nothing may be exchanged before the arguments are checked")

        all_sum = all_max

    with pytest.raises(ConfigError, match="on several ranks `output` must name a file"):
        generate_dataset(model, tokenizer, TEXTS, world=Two(), **SMALL)


@pytest.mark.parametrize(("name", "message"), [("out.csv", "must end in .jsonl or .parquet")])
def test_wrong_output(name: str, message: str, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_dataset(model, tokenizer, TEXTS, output=tmp_path / name, **SMALL)


def bert(head: str) -> Any:

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=16, vocab_size=30
    )
    return getattr(transformers, head)(config).eval()


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_embeddings_are_those_of_one_text_at_a_time(pooling: Any, tokenizer: Any) -> None:
    model = bert("BertModel")
    allocator = Allocator(60)
    allocator.in_forward(model.encoder.layer[2])
    got = embed_dataset(model, tokenizer, TEXTS, pooling=pooling, budget=TokenBudget(100), progress=False)
    assert allocator.failures
    states = [
        model(**tokenizer(t, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0] for t in TEXTS
    ]
    pick = {"mean": lambda s: s.mean(0), "first": lambda s: s[0], "last": lambda s: s[-1]}[pooling]
    want = torch.stack([pick(s) for s in states]).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert got.dtype == np.float32


def test_classification_and_normalised_embeddings(tokenizer: Any) -> None:
    model = bert("BertForSequenceClassification")
    got = classify_dataset(model, tokenizer, TEXTS, **SMALL)
    want = [model(**tokenizer(t, return_tensors="pt", return_token_type_ids=False)).logits[0].tolist() for t in TEXTS]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    vectors = embed_dataset(bert("BertModel"), tokenizer, TEXTS, normalize=True, **SMALL)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    with pytest.raises(ConfigError, match="`pooling` must be 'mean', 'first' or 'last', but is 'max'"):
        embed_dataset(bert("BertModel"), tokenizer, TEXTS, pooling="max", **SMALL)  # type: ignore[arg-type]


def test_progress_is_shown_in_tokens_and_samples(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_dataset(model, tokenizer, TEXTS, budget=TokenBudget(40), max_new_tokens=2)
    shown = capsys.readouterr().err
    assert "40/40 samples" in shown
    assert "tok/s" in shown
