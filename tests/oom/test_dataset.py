from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers  # noqa: F401
from tokenizers.processors import TemplateProcessing

from dynagroup.budget.tokens import TokenBudget
from dynagroup.demo import train_tokenizer
from dynagroup.distributed import SingleProcess
from dynagroup.errors import BudgetError, ConfigError, StateError
from dynagroup.oom import (
    LearningBudget,
    classify_dataset,
    embed_dataset,
    generate_dataset,
    iter_classify,
    iter_embed,
    iter_generate,
    jobs,
)
from dynagroup.oom.tasks import Generation
from dynagroup.plan.cost import Work
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.testing import run_ranks
from tests import models
from tests.allocator import Allocator
from tests.oom.fixtures import collecting_garbage_is_quick as collecting_garbage_is_quick
from tests.oom.texts import TEXTS, adapted, small_llama, small_tokenizer
from tests.torchrun import HANG_S, ROOT, torchrun

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
    for size in (SMALL, {"batch_size": 4, "progress": False}):
        assert generate_dataset(model, tokenizer, TEXTS, max_new_tokens=4, **size) == expected
    assert len(set(expected)) > 20
    assert tokenizer.padding_side == "right"  # what we were given is left as it was


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


def test_empty_texts_and_no_texts(model: Any, tokenizer: Any) -> None:
    assert generate_dataset(model, tokenizer, [], max_new_tokens=2, **SMALL) == []
    assert len(generate_dataset(model, tokenizer, ["", "w1"], max_new_tokens=2, **SMALL)) == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_output_file_holds_one_row_a_text(
    suffix: str, model: Any, tokenizer: Any, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / f"out{suffix}"
    assert generate_dataset(model, tokenizer, TEXTS, output=path, max_new_tokens=4, **SMALL) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, f"{path.name}.job"]  # the journal is gone
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows == [{"index": i, "result": r} for i, r in enumerate(expected)]


def test_a_finished_job_called_again_gives_its_results_back(
    model: Any, tokenizer: Any, expected: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "out.jsonl"
    call = lambda texts=TEXTS, **more: generate_dataset(  # noqa: E731
        model, tokenizer, texts, output=path, max_new_tokens=4, **SMALL, **more
    )
    assert call() == expected
    monkeypatch.setattr(Generation, "process", None)  # nothing is run again
    assert call() == expected
    with pytest.raises(StateError, match=r"belongs to another job; texts: '40 texts #\w+' then, '39 .*remove it and"):
        call(TEXTS[1:])
    with pytest.raises(StateError, match="arguments: '{}' then, \"{'num_beams': 2}\" now"):
        call(num_beams=2)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(StateError, match="out.jsonl has changed since its job was finished"):
        call()
    (tmp_path / "out.jsonl.job").write_text("{}")
    with pytest.raises(StateError, match="out.jsonl.job is damaged, which says what job out.jsonl is from"):
        call()
    (tmp_path / "out.jsonl.job").unlink()
    with pytest.raises(ConfigError, match="out.jsonl exists, and no 'out.jsonl.job' beside it says which job"):
        call()


def run_alone(output: Path, die_after: int) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "tests/ranks/generate_job.py"), str(output), str(die_after)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment, cwd=ROOT)


@pytest.mark.parametrize("moment", ["first", "publishing", "published"])
def test_the_same_job_started_while_another_publishes_is_refused_or_finds_all_of_it(
    moment: str, model: Any, tokenizer: Any, expected: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    """The second looks for the output before the first has published, and comes back to it at some moment."""
    path = tmp_path / "out.jsonl"
    call = lambda: generate_dataset(model, tokenizer, TEXTS, output=path, max_new_tokens=4, **SMALL)  # noqa: E731
    others: list[Any] = []

    def other() -> None:
        monkeypatch.undo()
        try:
            others.append(call())
        except ConfigError as error:
            others.append(str(error))

    if moment == "published":  # the other was slow to measure its texts
        measure = jobs.measure_lengths

        def slow(*args: Any, **options: Any) -> Any:
            other()
            return measure(*args, **options)

        monkeypatch.setattr(jobs, "measure_lengths", slow)
        assert call() == expected
        assert others == [expected]
    else:
        replace, left = os.replace, [1 if moment == "first" else 2]

        def publishing(source: Path, target: Path) -> None:
            left[0] -= 1
            if not left[0]:
                other()
            replace(source, target)

        monkeypatch.setattr(os, "replace", publishing)
        assert call() == expected
        assert "another process is writing" in others[0]
    assert call() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, f"{path.name}.job"]


def test_a_file_that_is_not_ours_is_neither_removed_nor_in_the_way(
    model: Any, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stray = tmp_path / "out.jsonl.journal" / "notes.txt"
    stray.parent.mkdir()
    stray.write_text("mine")
    path = tmp_path / "out.jsonl"
    first, again = (
        generate_dataset(model, tokenizer, TEXTS[:4], output=path, max_new_tokens=2, **SMALL) for _ in range(2)
    )
    assert first == again
    assert stray.read_text() == "mine"
    assert "out.jsonl.journal is left behind" in caplog.text


def test_a_sample_that_does_not_fit_is_named_as_the_dataset_has_it(model: Any, tokenizer: Any) -> None:
    allocator = Allocator(12)
    remove = allocator.in_forward(model.model.layers[0])
    longest = [i for i, text in enumerate(TEXTS) if len(text.split()) == 13]
    with pytest.raises(BudgetError, match=f"sample {longest[0]} does not fit even alone .*13"):
        generate_dataset(model, tokenizer, TEXTS, max_new_tokens=4, **SMALL)
    remove()


def test_texts_of_a_series_are_taken_by_position(model: Any, tokenizer: Any, expected: list[str]) -> None:
    """Rows that were shuffled or filtered keep their labels: those name other texts, or none."""
    pandas = pytest.importorskip("pandas")
    for series in (pandas.Series(TEXTS)[::-1], pandas.Series(TEXTS)[5:]):
        wanted = [expected[label] for label in series.index]
        assert generate_dataset(model, tokenizer, series, max_new_tokens=4, **SMALL) == wanted
    keys = dict.fromkeys(TEXTS[:6]).keys()
    assert generate_dataset(model, tokenizer, keys, max_new_tokens=4, **SMALL) == [
        expected[TEXTS.index(t)] for t in keys
    ]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "`texts` must be a sequence of texts, but is one str; put it into a list"),
        ({"text": TEXTS}, r"is a whole dict; give one column of it"),
        (
            datasets.Dataset.from_dict({"text": TEXTS}),
            r"is a whole Dataset; give one column of it, e.g. texts\['text'\]",
        ),
        ((text for text in TEXTS), r"must have a length, but is generator; give list\(texts\)"),
        ([[{"role": "user", "content": "w1"}]], "sample 0 is a chat .*apply_chat_template"),
        (["w1", "a\ud800"], "text 1 has a lone surrogate at character 1"),
        (["w1", None], "text 1 must be a string, but is None; correct or filter out that sample"),
    ],
)
def test_what_are_no_texts(texts: Any, message: str, model: Any, tokenizer: Any) -> None:
    for job_of in (generate_dataset, embed_dataset, classify_dataset):
        with pytest.raises(ConfigError, match=message):
            job_of(model, tokenizer, texts, **SMALL)


def test_generation_stops_at_strings_without_being_given_the_tokenizer_twice() -> None:
    texts = ["a word or two", "two", "or a word"]
    tokenizer = train_tokenizer(texts, vocabulary=270)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(models.llama(vocab=len(tokenizer), layers=1, pad_token_id=0, eos_token_id=1))
    whole = generate_dataset(model, tokenizer, texts, max_new_tokens=8, **SMALL)
    at, stop = next((i, letter) for i, text in enumerate(whole) for letter in text[:-1] if letter.isalnum())
    cut = generate_dataset(model, tokenizer, texts, max_new_tokens=8, stop_strings=[stop], **SMALL)
    assert cut[at] == whole[at][: whole[at].index(stop) + 1]


def test_a_tokenizer_without_a_limit_may_say_so(model: Any, tokenizer: Any, expected: list[str]) -> None:
    limit = tokenizer.model_max_length
    assert limit > 2**62
    assert generate_dataset(model, tokenizer, TEXTS, max_new_tokens=4, max_length=limit, **SMALL) == expected
    assert len(embed_dataset(model, tokenizer, TEXTS[:3], max_length=limit, **SMALL)) == 3


def test_a_generation_config_counts_like_arguments(model: Any, tokenizer: Any) -> None:
    """Several sequences a text, beams and new tokens may be asked for there."""
    config = transformers.GenerationConfig(
        num_beams=2, num_return_sequences=2, max_new_tokens=3, pad_token_id=0, eos_token_id=2
    )
    want = generate_dataset(model, tokenizer, TEXTS[:6], num_beams=2, num_return_sequences=2, max_new_tokens=3, **SMALL)
    assert generate_dataset(model, tokenizer, TEXTS[:6], generation_config=config, **SMALL) == want
    one = generate_dataset(model, tokenizer, TEXTS[:6], generation_config=config, max_new_tokens=1, **SMALL)
    assert {len(text.split()) for texts in one for text in texts} <= {0, 1}
    assert config.max_new_tokens == 3
    before, model.generation_config = model.generation_config, config
    try:
        assert generate_dataset(model, tokenizer, TEXTS[:6], **SMALL) == want
    finally:
        model.generation_config = before
    assert [len(texts) for texts in want] == [2] * 6


def test_results_with_every_kind_of_line_break_come_back(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    breaks = ["a\u2028b", "\u0085", "c\x0b\x0c\x1cd", "e\r\nf", "\u2029", "\ud800", ""]

    class Odd(type(tokenizer)):
        def batch_decode(self, sequences: Any, **_: Any) -> list[str]:
            return [breaks[int(s[0]) % len(breaks)] for s in sequences]

    odd = copy.copy(tokenizer)
    odd.__class__ = Odd
    path = tmp_path / "out.jsonl"
    got = generate_dataset(model, odd, TEXTS, output=path, max_new_tokens=2, **SMALL)
    assert len(set(got)) > 4
    assert generate_dataset(model, odd, TEXTS, output=path, max_new_tokens=2, **SMALL) == got
    rows = [json.loads(line)["result"] for line in path.read_text().splitlines()]  # whatever a reader splits at
    assert rows == got


def test_iterating_gives_the_same_as_they_come(model: Any, tokenizer: Any, expected: list[str]) -> None:
    pairs = list(iter_generate(model, tokenizer, TEXTS, max_new_tokens=4, **SMALL))
    assert dict(pairs) == dict(enumerate(expected))
    first = next(iter_generate(model, tokenizer, TEXTS, max_new_tokens=4, **SMALL))[0]
    assert len(TEXTS[first].split()) == 13  # longest first
    rest = iter_generate(model, tokenizer, TEXTS, max_new_tokens=4, skip=range(39), **SMALL)
    assert list(rest) == [(39, expected[39])]


def test_a_model_in_training_mode_runs_without_dropout_and_is_left_as_it_was(tokenizer: Any) -> None:
    model = bert("BertModel")
    want = embed_dataset(model, tokenizer, TEXTS, **SMALL)
    model.train()
    model.encoder.layer[1].eval()
    np.testing.assert_array_equal(embed_dataset(model, tokenizer, TEXTS, **SMALL), want)
    assert model.training
    assert [layer.training for layer in model.encoder.layer] == [True, False, True]


def test_ranks_wait_for_each_other_however_long_it_takes(model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    asked: list[float] = []

    def world(*, timeout_s: float) -> SingleProcess:
        asked.append(timeout_s)
        return SingleProcess()

    monkeypatch.setattr(jobs, "current_world", world)
    generate_dataset(model, tokenizer, TEXTS[:1], max_new_tokens=1, **SMALL)
    assert asked[0] > 7 * 24 * 3600


def test_an_error_on_one_rank_ends_all_and_other_jobs_are_noticed(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("")

    def rank(world: Any, other_texts: bool) -> str:
        texts = TEXTS[: 40 - world.rank] if other_texts else TEXTS
        path = tmp_path / ("out.jsonl" if other_texts or world.rank == 0 else "there.jsonl")
        with pytest.raises(ConfigError) as caught:
            generate_dataset(model, tokenizer, texts, output=path, max_new_tokens=4, world=world, **SMALL)
        return str(caught.value)

    both = run_ranks(2, lambda world: rank(world, True))
    assert both == ["ranks were given different jobs: texts differ; give all ranks the same"] * 2
    first, second = run_ranks(2, lambda world: rank(world, False))
    assert first == "rank 1 of 2 could not go on with the job; see its error"
    assert "exists, and no 'there.jsonl.job'" in second


def test_ranks_that_have_learned_different_things_still_share_every_text(
    tokenizer: Any, expected: list[str], tmp_path: Path
) -> None:
    models = [small_llama(), small_llama()]

    def rank(world: Any) -> list[str]:
        learned = LearningBudget()
        if world.rank == 0:
            learned.record_failed_cost(30)
        budget = TokenBudget(100 if world.rank == 0 else 60)  # and another device
        path = tmp_path / "out.jsonl"
        return generate_dataset(
            models[world.rank], tokenizer, TEXTS, budget=budget, learned=learned, output=path, max_new_tokens=4,
            progress=False, world=world,
        )  # fmt: skip

    assert run_ranks(2, rank) == [expected] * 2


@pytest.mark.slow
def test_ranks_share_the_work_also_after_a_crash_on_fewer(expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert run_alone(path, die_after=4).returncode == -signal.SIGKILL
    reports = torchrun("generate_job.py", str(path), "0", ranks=2)
    assert [r["results"] for r in reports] == [expected] * 2
    assert min(r["batches"] for r in reports) >= 3


def test_wrong_output(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must end in .jsonl or .parquet"):
        generate_dataset(model, tokenizer, TEXTS, output=tmp_path / "out.csv", **SMALL)
    nothing_exchanged = SimpleNamespace(rank=0, size=2)
    with pytest.raises(ConfigError, match="on several ranks `output` must name a file"):
        generate_dataset(model, tokenizer, TEXTS, world=nothing_exchanged, **SMALL)  # type: ignore[arg-type]


def bert(head: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = models.bert(vocab=30, layers=3, inner=16, dropout=0.1, **options)
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


@pytest.mark.parametrize("adapter", ["lora", "prompt"])
def test_an_adapted_causal_model_is_embedded_by_its_states_with_its_adapter(adapter: str, tokenizer: Any) -> None:
    """An adapter that puts tokens before the text is no part of the layers: the model beneath it would run without it."""
    peft = pytest.importorskip("peft")
    own: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    }
    model = adapted(small_llama(), own[adapter]())
    if adapter == "prompt":
        with pytest.raises(ConfigError, match="has `last_hidden_state`, but .*: give the model without its head"):
            embed_dataset(model, tokenizer, TEXTS[:3], **SMALL)
        return
    got = embed_dataset(model, tokenizer, TEXTS, pooling="last", **SMALL)
    states = [model(**tokenizer(t, return_tensors="pt"), output_hidden_states=True).hidden_states[-1] for t in TEXTS]
    np.testing.assert_allclose(got, torch.cat([s[:, -1] for s in states]).detach().numpy(), rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        assert not np.allclose(embed_dataset(model, tokenizer, TEXTS, pooling="last", **SMALL), got, atol=1e-3)


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_batches_are_as_wide_as_the_budget_rounds_them(multiple: int, model: Any, tokenizer: Any) -> None:
    """Also the parts of one that ran out of memory, and texts without a token."""
    widths: list[int] = []
    note = lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1])  # noqa: E731
    handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
    remove = Allocator(32).in_forward(model.model.layers[0])
    budget = TokenBudget(48, pad_to_multiple_of=multiple)
    embed_dataset(model, tokenizer, [*TEXTS, ""], budget=budget, progress=False)
    remove()
    assert {width % multiple for width in widths} == {0}
    assert multiple > 1 or {width % 2 for width in widths} == {0, 1}
    widths.clear()
    generate_dataset(model, tokenizer, TEXTS, budget=budget, max_new_tokens=1, progress=False)
    handle.remove()
    assert {width % multiple for width in widths} == {0}
    assert multiple > 1 or {width % 2 for width in widths} == {0, 1}


def test_classification_and_normalised_embeddings(tokenizer: Any) -> None:
    model = bert("BertForSequenceClassification")
    got = classify_dataset(model, tokenizer, TEXTS, **SMALL)
    want = [model(**tokenizer(t, return_tensors="pt", return_token_type_ids=False)).logits[0].tolist() for t in TEXTS]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    vectors = embed_dataset(bert("BertModel"), tokenizer, TEXTS, normalize=True, **SMALL)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    with pytest.raises(ConfigError, match="`pooling` must be one of 'mean', 'first', 'last', but is 'max'"):
        embed_dataset(bert("BertModel"), tokenizer, TEXTS, pooling="max", **SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".jsonl"])
def test_vectors_are_kept_as_float32(suffix: str, tokenizer: Any, tmp_path: Path) -> None:
    model, path = bert("BertModel"), tmp_path / f"vectors{suffix}"
    want = embed_dataset(model, tokenizer, TEXTS, **SMALL)
    for _ in range(2):  # the second time it is read
        got = embed_dataset(model, tokenizer, TEXTS, output=path, **SMALL)
        assert (got.dtype, got.shape) == (np.float32, (40, 16))
        np.testing.assert_array_equal(got, want)
    nothing = embed_dataset(model, tokenizer, [], output=tmp_path / f"none{suffix}", **SMALL)
    assert (nothing.dtype, nothing.shape) == (np.float32, (0, 0))
    for index, vector in iter_embed(model, tokenizer, TEXTS, skip=range(30), **SMALL):
        np.testing.assert_allclose(vector, want[index], rtol=1e-5, atol=1e-6)
    heads = dict(iter_classify(bert("BertForSequenceClassification"), tokenizer, TEXTS, **SMALL))
    assert (len(heads), heads[0].shape) == (40, (2,))


def test_texts_are_shortened_to_what_the_model_takes_and_that_is_said(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, texts = bert("BertModel", max_position_embeddings=8), [" ".join(["w1"] * 20), "w2 w3"]
    got = embed_dataset(model, tokenizer, texts, **SMALL)
    assert "1 of 2 texts have the 8 tokens that the model takes, or more" in caplog.text
    np.testing.assert_array_equal(got, embed_dataset(model, tokenizer, texts, max_length=8, **SMALL))
    with pytest.raises(ConfigError, match="1 texts are too long .* 8 positions: text 0 has 9 tokens; .*max_length=8"):
        embed_dataset(model, tokenizer, texts, max_length=9, **SMALL)


def test_a_prompt_that_leaves_no_position_for_new_tokens_is_refused(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = models.gpt2(vocab=30, width=8, layers=1, heads=1, n_positions=16, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    with pytest.raises(
        ConfigError, match="which has 16 positions: text .* has 13 tokens and 4 new ones; .*max_length=12"
    ):
        generate_dataset(model, tokenizer, TEXTS, max_new_tokens=4, **SMALL)
    assert len(generate_dataset(model, tokenizer, TEXTS[:8], max_new_tokens=4, max_length=12, **SMALL)) == 8


def test_progress_is_shown_in_tokens_and_samples(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_dataset(model, tokenizer, TEXTS, budget=TokenBudget(40), max_new_tokens=2)
    shown = capsys.readouterr().err
    assert "40/40 samples" in shown
    assert "tok/s" in shown


class TestTextsThatBringTheirFirstToken:
    """As a chat template writes them: they are tokenized as ``apply_chat_template`` tokenizes them, and others as ever."""

    CHAT = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}"

    @pytest.fixture
    def beginning(self) -> Any:
        tokenizer = small_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "[BOS]"})
        tokenizer.chat_template = self.CHAT
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[BOS] $A", special_tokens=[("[BOS]", 1)]
        )
        return tokenizer

    def test_the_model_sees_the_first_token_once(self, model: Any, beginning: Any) -> None:
        chats = [[{"role": "user", "content": text}] for text in TEXTS[:6]]
        texts = [*TEXTS[6:9], *(beginning.apply_chat_template(chat, tokenize=False) for chat in chats)]
        seen: list[list[int]] = []

        def note(module: Any, args: Any, kwargs: Any) -> None:
            for ids, mask in zip(kwargs["input_ids"], kwargs["attention_mask"], strict=True):
                seen.append(ids[mask.bool()].tolist())

        handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            embed_dataset(model, beginning, texts, **SMALL)
        finally:
            handle.remove()
        plain = [beginning(text)["input_ids"] for text in texts[:3]]
        chats_ids = [beginning.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
        assert sorted(seen) == sorted([*plain, *chats_ids])
        assert all(ids.count(1) == 1 for ids in seen)

    def test_a_text_is_truncated_to_what_was_asked_for(self, model: Any, beginning: Any) -> None:
        short, whole = (
            embed_dataset(model, beginning, [text], max_length=4, **SMALL) for text in ("[BOS] w1 w2 w3 w4", "w1 w2 w3")
        )
        assert np.array_equal(short, whole)


def test_batches_are_planned_for_the_time_that_the_model_takes(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new token is a step of its own: the price of a step counts as often."""
    planned: list[Work] = []

    def sampler(*args: Any, work: Work, **options: Any) -> Any:
        planned.append(work)
        return LengthAwareBatchSampler(*args, work=work, **options)

    monkeypatch.setattr(jobs, "LengthAwareBatchSampler", sampler)
    next(iter_embed(model, tokenizer, TEXTS, **SMALL))
    next(iter_generate(model, tokenizer, TEXTS, max_new_tokens=4, num_beams=2, **SMALL))
    own = Work.of(model, device="cpu")
    assert planned == [own, Work(per_step=own.per_step * 5 / 2, crossover=own.crossover)]


@pytest.mark.parametrize("run", [embed_dataset, classify_dataset, generate_dataset])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"budget": TokenBudget(64, layout="packed")}, "these batches are padded"),
        ({"model": "some/folder"}, "`model` must be a loaded model, but is 'some/folder'"),
    ],
)
def test_what_no_job_can_run_is_refused_by_name(model, tokenizer, run, what, said):
    """A packed budget was taken without a word, and batches exceeded it."""
    given = {"model": model, "tokenizer": tokenizer, "texts": ["w1", "w2 w3"], "progress": False, **what}
    with pytest.raises(ConfigError, match=said):
        run(**given)


def test_a_model_that_cannot_generate_is_refused(model, tokenizer):
    with pytest.raises(ConfigError, match=r"LlamaModel has no generate\(\)"):
        generate_dataset(model.model, tokenizer, ["w1"], progress=False)
