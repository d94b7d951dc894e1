"""Whole datasets: results are those of one text at a time, whatever batches, memory, crashes, ranks and files do."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dynagroup import (
    AlignmentError,
    BudgetError,
    ConfigError,
    MemoryBudget,
    StateError,
    TokenBudget,
    generate_with_oom_retry,
)
from dynagroup.budget.learning import LearningBudget
from dynagroup.demo import train_tokenizer
from dynagroup.distributed import SingleProcess
from dynagroup.jobs import (
    classify_dataset,
    embed_dataset,
    generate_dataset,
    iter_classify,
    iter_generate,
)
from dynagroup.jobs.storage import Output
from dynagroup.memory import MemoryRegressor
from dynagroup.testing import run_ranks
from tests import models
from tests.models import TEXTS, Allocator, adapted, small_llama, small_tokenizer

TOKENIZER = small_tokenizer()
BUDGET = TokenBudget(40)
SMALL: Any = {"budget": BUDGET, "progress": False}
TWO_TEXTS = ["w1", "w2 w3"]
LONG_AND_SHORT = [" ".join(["w1"] * 20), "w2 w3"]
STOPS = list("0123456789")
ALL_JOBS = (generate_dataset, embed_dataset, classify_dataset)
OTHER_RANK_FAILED = "AlignmentError: rank 1 of 2 could not continue the job; see that rank's error"


def generated(
    model: Any,
    texts: Any = TEXTS,
    *,
    max_new_tokens: int | None = 4,
    budget: Any = BUDGET,
    **options: Any,
) -> Any:
    options["max_new_tokens"] = max_new_tokens
    return generate_dataset(model, TOKENIZER, texts, budget=budget, progress=False, **options)


def embedded(model: Any, texts: Any = TEXTS, *, budget: Any = BUDGET, **options: Any) -> Any:
    return embed_dataset(model, TOKENIZER, texts, budget=budget, progress=False, **options)


def one_by_one(model: Any, encode: Any, **options: Any) -> list[str]:
    """Nothing to pad, nothing to plan."""
    answers = []
    for text in TEXTS:
        batch = encode(text, return_tensors="pt", return_token_type_ids=False)
        num_tokens = batch["input_ids"].shape[1]
        [ids] = model.generate(**batch, **options)
        answers.append(encode.decode(ids[num_tokens:], skip_special_tokens=True))
    return answers


def bert(head: Any = transformers.BertModel, **options: Any) -> Any:
    torch.manual_seed(0)
    config = models.bert(vocab=30, layers=3, inner=16, dropout=0.1, **options)
    return head(config).eval()


def short_gpt2() -> Any:
    """It has 16 positions."""
    torch.manual_seed(0)
    config = models.gpt2(vocab=30, width=8, layers=1, heads=1, n_positions=16)
    config.bos_token_id = 1
    config.eos_token_id = 2
    return transformers.GPT2LMHeadModel(config).eval()


def t5_config() -> Any:
    config = models.t5(vocab=30, layers=1, inner=16, pad_token_id=0, eos_token_id=2)
    config.decoder_start_token_id = 0
    return config


def states_of(model: Any) -> list[torch.Tensor]:
    """Hidden states of one text at a time."""
    states = []
    for text in TEXTS:
        ids = TOKENIZER(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states.append(model(input_ids=ids).last_hidden_state[0])
    return states


def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    if pooling == "mean":
        return states.mean(dim=0)
    return states[0 if pooling == "first" else -1]


def assert_close(array: Any, rows: list[torch.Tensor]) -> None:
    expected = torch.stack(rows).detach().numpy()
    np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
    assert array.dtype == np.float32


def nothing_runs(*args: Any, **options: Any) -> Any:
    raise AssertionError


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[str]:
    return one_by_one(model, TOKENIZER, max_new_tokens=4)


@pytest.mark.parametrize(("budget", "batch_size"), [(BUDGET, None), (None, 4)])
def test_results_are_those_of_one_text_at_a_time(
    budget: Any, batch_size: int | None, model: Any, expected: list[str]
) -> None:
    sizes = {} if batch_size is None else {"batch_size": batch_size}
    assert generated(model, budget=budget, **sizes) == expected
    assert len(set(expected)) > 20


def test_a_job_leaves_the_tokenizer_as_it_was(model: Any) -> None:
    assert TOKENIZER.padding_side == "right"
    generated(model)
    assert TOKENIZER.padding_side == "right"


def test_a_terminal_shows_a_bar(model: Any, expected: list[str], capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # the bar stays out of pipes
    answers = generate_dataset(model, TOKENIZER, TEXTS, max_new_tokens=4, batch_size=4)
    assert answers == expected
    assert "tok/s" in capsys.readouterr().err


def test_no_texts_and_empty_texts_have_results(model: Any) -> None:
    assert generated(model, []) == []
    assert len(generated(model, ["", "w1"])) == 2


def test_an_iterator_gives_the_longest_first(model: Any, expected: list[str]) -> None:
    pairs = list(iter_generate(model, TOKENIZER, TEXTS, max_new_tokens=4, **SMALL))
    assert dict(pairs) == dict(enumerate(expected))
    first, _ = pairs[0]
    assert len(TEXTS[first].split()) == 13


def test_an_iterator_skips_what_was_done(model: Any, expected: list[str]) -> None:
    rest = iter_generate(model, TOKENIZER, TEXTS, max_new_tokens=4, skip=range(39), **SMALL)
    assert list(rest) == [(39, expected[39])]


def test_a_memory_budget_without_a_model_is_that_of_the_batch_size() -> None:
    """The hardest four of another run fit; of what, this model says."""
    model = small_llama().model
    MemoryRegressor.of_model(model, "forward", max_new_tokens=0)  # runs the hooks of a copy, too
    shapes = models.shapes_seen(model)

    def shapes_of_run(**options: Any) -> list[Any]:
        shapes.clear()
        embedded(model, **options)
        return list(shapes)

    of_size = shapes_of_run(budget=None, batch_size=4)
    of_budget = shapes_of_run(budget=MemoryBudget(4))
    pretrained = MemoryBudget(4, model=MemoryRegressor.pretrained())
    assert of_budget == of_size
    assert shapes_of_run(budget=pretrained) != of_size


def test_the_memory_of_a_model_without_a_config_is_traced_once() -> None:
    model = torch.nn.Linear(1, 1)
    memory = MemoryRegressor.of_model(model, "forward")
    assert memory.workload.mode == "forward"
    assert MemoryRegressor.of_model(model, "forward") is memory


def test_running_out_of_memory_changes_nothing_and_teaches_the_plan(expected: list[str]) -> None:
    model = small_llama()
    allocator = Allocator(60)
    allocator.in_forward(model.model.layers[2])
    learned = LearningBudget()
    assert generated(model, budget=TokenBudget(100), learned=learned) == expected
    assert 1 <= len(allocator.failures) <= 4
    assert learned.report.num_ooms == len(allocator.failures)
    for earlier, later in pairwise(allocator.failures):
        assert earlier > later, "never the same twice"


def test_a_text_that_does_not_fit_alone_is_named() -> None:
    model = small_llama()
    Allocator(12).in_forward(model.model.layers[2])
    num_words = [len(text.split()) for text in TEXTS]
    longest = num_words.index(13)
    with pytest.raises(BudgetError, match=f"sample {longest} does not fit even alone .*13"):
        generated(model)


@pytest.fixture
def finished(model: Any, expected: list[str], tmp_path: Path, monkeypatch, caplog) -> Any:
    """Calls a finished job again: nothing may run."""
    job = partial(generated, model, output=tmp_path / "out.jsonl")
    assert job() == expected
    assert not caplog.text
    monkeypatch.setattr(type(model), "generate", nothing_runs)
    return job


def test_a_finished_job_leaves_its_output_and_a_receipt(finished: Any, tmp_path: Path) -> None:
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.jsonl", "out.jsonl.job"], "the journal is gone"


def test_a_finished_job_called_again_gives_its_results_back(
    finished: Any, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert finished() == expected
    assert "out.jsonl: 40 of 40 results are from 2" in caplog.text
    assert "To start anew, remove out.jsonl, out.jsonl.job and out.jsonl.journal" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"identity": "v2"}, "identity was None then, is 'v2' now"),
        ({"texts": TEXTS[1:]}, r"texts was '40 texts #\w+' then, is '39 .*remove out.jsonl.job"),
        ({"num_beams": 2}, "arguments was '{}' then, is \"{'num_beams': 2}\" now"),
    ],
)
def test_another_job_is_refused_with_what_differs(
    options: Any, message: str, finished: Any
) -> None:
    with pytest.raises(StateError, match=message) as caught:
        finished(**options)
    assert "settings: " in str(caught.value)


def test_an_identity_is_a_value_for_json(finished: Any) -> None:
    with pytest.raises(ConfigError, match="`identity` must be a text, or another value that JSON"):
        finished(identity={1, 2})


def test_an_output_that_was_changed_is_refused(finished: Any, tmp_path: Path) -> None:
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b"\n")
    with pytest.raises(StateError, match="out.jsonl was changed after its job was finished"):
        finished()


def test_an_output_without_a_receipt_is_refused(finished: Any, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.job").unlink()
    message = "out.jsonl exists, but no 'out.jsonl.job' beside it says which job"
    with pytest.raises(ConfigError, match=message):
        finished()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("bos_token", "w1"),
        ("split_special_tokens", True),
        ("eos_token", "w2"),
        ("clean_up_tokenization_spaces", True),
        ("truncation_side", "left"),
    ],
)
def test_a_tokenizer_set_otherwise_is_another_job(
    setting: str, value: Any, model: Any, tmp_path: Path
) -> None:
    """Each decides about ids or texts; the vocabulary, the rules and the ids of plain words stay the same."""
    tokenizer: Any = small_tokenizer()
    tokenizer.clean_up_tokenization_spaces = False
    output = tmp_path / "out.npy"
    job = partial(embed_dataset, model.model, tokenizer, TEXTS[:4], output=output, **SMALL)
    vectors = job()
    np.testing.assert_array_equal(job(), vectors)
    setattr(tokenizer, setting, value)
    with pytest.raises(StateError, match="settings: tokenizer was"):
        job()


@pytest.mark.parametrize("job", ALL_JOBS)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("budget", TokenBudget(64, layout="packed"), "these batches are padded"),
        ("batch_size", 3, r"`batch_size` \(3\) and `budget` both limit a batch"),
        ("output", "out.csv", "must end in .(jsonl|npy), but"),
        ("world", SimpleNamespace(rank=0, size=2, all_max=list), "2 ranks need `output`"),
    ],
)
def test_no_job_takes_such_an_option(
    option: str, value: Any, message: str, job: Any, model: Any
) -> None:
    options = SMALL | {option: value}
    with pytest.raises(ConfigError, match=message):
        job(model, TOKENIZER, TWO_TEXTS, **options)


@pytest.mark.parametrize("job", ALL_JOBS)
def test_every_text_is_a_string(job: Any, model: Any) -> None:
    message = "text 1 must be a string, but is None; correct or filter out that sample"
    with pytest.raises(ConfigError, match=message):
        job(model, TOKENIZER, ["w1", None], **SMALL)


@pytest.mark.parametrize("job", ALL_JOBS)
def test_a_batch_has_a_text(job: Any, model: Any) -> None:
    with pytest.raises(ConfigError, match="`batch_size` must be an int of at least 1"):
        job(model, TOKENIZER, TWO_TEXTS, batch_size=0, progress=False)


def test_an_argument_of_one_batch_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="`attention_mask` is for one batch"):
        generated(model, TWO_TEXTS, attention_mask=torch.ones(2, 2))


def test_unknown_pooling_is_refused(model: Any) -> None:
    message = "`pooling` must be one of 'auto', 'mean', 'first', 'last', None, but is 'max'"
    with pytest.raises(ConfigError, match=message):
        embedded(model, TWO_TEXTS, pooling="max")


def test_a_model_with_a_decoder_is_not_embedded() -> None:
    encoder_config = t5_config()
    encoder_config.is_encoder_decoder = False
    with_decoder = [
        transformers.T5ForConditionalGeneration(t5_config()),
        transformers.T5Model(encoder_config),
    ]
    for model in with_decoder:
        with pytest.raises(ConfigError, match=r"pass model.get_encoder\(\)"):
            embedded(model.eval(), TWO_TEXTS)


def test_a_model_that_does_not_classify_texts_is_refused(model: Any) -> None:
    message = r"LlamaForCausalLM returns logits \(2, 2, 30\) for 2 texts; .* classifier of tokens"
    with pytest.raises(ConfigError, match=message):
        classify_dataset(model, TOKENIZER, TWO_TEXTS, **SMALL)
    message = "the output of LlamaModel has no `logits`; give .* with a head"
    with pytest.raises(ConfigError, match=message):
        classify_dataset(model.model, TOKENIZER, TWO_TEXTS, **SMALL)


@pytest.fixture
def beams() -> Any:
    config = transformers.GenerationConfig(num_beams=2, num_return_sequences=2, max_new_tokens=3)
    config.pad_token_id = 0
    config.eos_token_id = 2
    return config


def answers_of_beams(model: Any) -> list[list[str]]:
    texts = TEXTS[:6]
    answers = generated(model, texts, num_beams=2, num_return_sequences=2, max_new_tokens=3)
    assert [len(of_text) for of_text in answers] == [2] * 6
    return answers


def test_a_generation_config_counts_like_arguments(model: Any, beams: Any) -> None:
    """Several sequences a text, beams and new tokens may be asked for there."""
    answers = generated(model, TEXTS[:6], max_new_tokens=None, generation_config=beams)
    assert answers == answers_of_beams(model)


def test_the_generation_config_of_the_model_counts(model: Any, beams: Any, monkeypatch) -> None:
    expected = answers_of_beams(model)
    monkeypatch.setattr(model, "generation_config", beams)
    assert generated(model, TEXTS[:6], max_new_tokens=None) == expected


def test_an_argument_counts_before_the_generation_config(model: Any, beams: Any) -> None:
    pairs = generated(model, TEXTS[:6], max_new_tokens=1, generation_config=beams)
    for first, second in pairs:
        assert len(first.split()) <= 1
        assert len(second.split()) <= 1
    assert beams.max_new_tokens == 3


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    return train_tokenizer(TEXTS, vocabulary=290)


@pytest.fixture(scope="module")
def byte_llama(byte_tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = models.llama(vocab=290, layers=1)
    config.eos_token_id = byte_tokenizer.eos_token_id
    config.pad_token_id = byte_tokenizer.pad_token_id
    return models.sharp(transformers.LlamaForCausalLM(config).eval())


def test_generation_ends_with_stop_strings(byte_llama: Any, byte_tokenizer: Any) -> None:
    """The tokenizer that `generate` needs for them is the job's."""
    stops: Any = {"stop_strings": STOPS, "max_new_tokens": 6}
    expected = one_by_one(byte_llama, byte_tokenizer, tokenizer=byte_tokenizer, **stops)
    assert generate_dataset(byte_llama, byte_tokenizer, TEXTS, **stops, **SMALL) == expected
    num_stopped = sum(text[-1:].isdigit() for text in expected)
    assert 0 < num_stopped < len(TEXTS)


def test_a_retried_batch_ends_with_stop_strings(byte_llama: Any, byte_tokenizer: Any) -> None:
    tokens = byte_tokenizer(TEXTS[0], return_tensors="pt", return_token_type_ids=False)
    stops: Any = {"stop_strings": STOPS, "max_new_tokens": 6, "tokenizer": byte_tokenizer}
    result = generate_with_oom_retry(byte_llama, dict(tokens), **stops)
    assert torch.equal(result.output, byte_llama.generate(**tokens, **stops))


def test_a_model_in_training_mode_runs_without_dropout_and_is_left_as_it_was() -> None:
    model = bert()
    expected = embedded(model)
    model.train()
    model.encoder.layer[1].eval()
    np.testing.assert_array_equal(embedded(model), expected)
    assert model.training
    assert [layer.training for layer in model.encoder.layer] == [True, False, True]


def errors_of_ranks(*jobs: Callable[..., Any]) -> list[str]:
    """One job for each rank."""

    def error_of(world: Any) -> str:
        with pytest.raises((ConfigError, AlignmentError)) as caught:
            jobs[world.rank](world=world)
        return f"{caught.typename}: {caught.value}"

    return run_ranks(len(jobs), error_of)


def test_ranks_with_other_texts_are_noticed(model: Any, tmp_path: Path) -> None:
    job = partial(generated, model, output=tmp_path / "out.jsonl")
    message = "all ranks must run the same job, but have different texts; give all ranks the same"
    assert errors_of_ranks(job, partial(job, TEXTS[1:])) == [f"ConfigError: {message}"] * 2


def test_ranks_with_other_tasks_are_noticed(model: Any, tmp_path: Path) -> None:
    job = partial(generated, model, output=tmp_path / "out.jsonl")
    other = partial(embedded, model, output=tmp_path / "x.npy")
    first, _ = errors_of_ranks(job, other)
    assert "task, max_new_tokens, arguments, max_length; give" in first


def test_an_output_that_one_rank_cannot_use_ends_all(model: Any, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("")
    job = partial(generated, model, output=tmp_path / "out.jsonl")
    other = partial(generated, model, output=tmp_path / "there.jsonl")
    first, second = errors_of_ranks(job, other)
    assert first == OTHER_RANK_FAILED
    assert "exists, but no 'there.jsonl.job'" in second


def test_a_rank_without_an_output_ends_all(model: Any, tmp_path: Path) -> None:
    job = partial(generated, model, output=tmp_path / "out.jsonl")
    first, second = errors_of_ranks(job, partial(generated, model))
    assert first == OTHER_RANK_FAILED
    message = "2 ranks need `output`, the path of a file that all ranks can read and write"
    assert second == f"ConfigError: {message}"


def test_after_an_error_on_one_rank_the_same_call_runs_the_rest(
    model: Any, expected: list[str], tmp_path: Path
) -> None:
    def divide_by_zero(*args: Any) -> None:
        raise ZeroDivisionError

    def retried(world: Any) -> Any:
        replica = copy.deepcopy(model)
        job = partial(generated, replica, output=tmp_path / "again.jsonl", world=world)
        if world.rank == 0:
            with pytest.raises(AlignmentError):
                job()
            return job()
        hook = replica.register_forward_pre_hook(divide_by_zero)
        with pytest.raises(ZeroDivisionError):
            job()
        hook.remove()
        return job()

    assert run_ranks(2, retried) == [expected] * 2


def test_ranks_with_other_budgets_share_what_a_crash_has_left(
    expected: list[str], tmp_path: Path, monkeypatch, caplog
) -> None:
    """Of one process, on two ranks: every text once, and what was finished not again."""
    replicas = [small_llama(), small_llama()]
    budgets = [TokenBudget(100), TokenBudget(60)]
    append = Output.append
    done: list[int] = []

    def job(world: Any) -> list[str]:
        output = tmp_path / "out.jsonl"
        budget = budgets[world.rank]
        return generated(replicas[world.rank], budget=budget, output=output, world=world)

    def noting(self: Output, indices: list[int], results: list[str]) -> None:
        done.extend(indices)
        append(self, indices, results)

    def dying(self: Output, indices: list[int], results: list[str]) -> None:
        if len(done) > 15:
            raise KeyboardInterrupt
        noting(self, indices, results)

    monkeypatch.setattr(Output, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        job(SingleProcess())
    assert 0 < len(done) < 30
    monkeypatch.setattr(Output, "append", noting)
    assert run_ranks(2, job) == [expected] * 2
    assert sorted(done) == list(range(40))
    assert "of 40 results are from 2" in caplog.text


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_embeddings_are_those_of_one_text_at_a_time_also_read_again(
    pooling: str, tmp_path: Path
) -> None:
    model = bert()
    allocator = Allocator(60)
    remove = allocator.in_forward(model.encoder.layer[2])
    output = tmp_path / "out.npy"
    job = partial(embedded, model, pooling=pooling, budget=TokenBudget(100), output=output)
    vectors = job()
    remove()
    assert allocator.failures
    np.testing.assert_array_equal(job(), vectors)
    assert_close(vectors, [pooled(states, pooling) for states in states_of(model)])


def test_an_adapted_causal_model_is_embedded_by_its_states_with_its_adapter() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = adapted(small_llama(), lora)
    vectors = embedded(model, pooling="last")
    assert_close(vectors, [states[-1] for states in states_of(model.get_base_model().model)])
    with model.disable_adapter():
        without_adapter = embedded(model, pooling="last")
    assert not np.allclose(without_adapter, vectors, atol=1e-3)


def test_a_model_with_a_tuned_prompt_is_not_embedded() -> None:
    """An adapter that puts tokens before the text is no part of the layers: the model beneath it would run without it."""
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = adapted(small_llama(), prompt)
    message = "has no `last_hidden_state`; give the model without its head"
    with pytest.raises(ConfigError, match=message):
        embedded(model, TEXTS[:3])


@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("job", [embedded, partial(generated, max_new_tokens=1)])
def test_batches_are_as_wide_as_the_budget_rounds_them(job: Any, multiple: int) -> None:
    """Also the parts of one that ran out of memory, and texts without a token."""
    model = small_llama()
    shapes = models.shapes_seen(model.model)
    allocator = Allocator(32)
    allocator.in_forward(model.model.layers[0])
    job(model, [*TEXTS, ""], budget=TokenBudget(48, pad_to_multiple_of=multiple))
    assert allocator.failures
    widths = {width for _, width in shapes}
    assert {width % multiple for width in widths} == {0}
    if multiple == 1:
        assert {width % 2 for width in widths} == {0, 1}


def test_logits_of_texts_are_those_of_one_text_at_a_time() -> None:
    model = bert(transformers.BertForSequenceClassification)
    expected = []
    for text in TEXTS:
        tokens = TOKENIZER(text, return_tensors="pt", return_token_type_ids=False)
        expected.append(model(**tokens).logits[0])
    assert_close(classify_dataset(model, TOKENIZER, TEXTS, **SMALL), expected)
    rows = dict(iter_classify(model, TOKENIZER, TEXTS, **SMALL))
    assert_close(np.stack([rows[index] for index in range(40)]), expected)


def test_no_texts_have_an_empty_array() -> None:
    vectors = embedded(bert(), [])
    assert vectors.dtype == np.float32
    assert vectors.shape == (0, 0)


def test_normalized_embeddings_have_length_one() -> None:
    vectors = embedded(bert(), normalize=True)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)


def test_batches_of_few_shapes_change_no_embedding() -> None:
    model = bert()
    shapes = models.shapes_seen(model)
    vectors = embedded(model, budget=TokenBudget(60), shapes=2)
    assert len(set(shapes)) == 2
    assert_close(vectors, [states.mean(dim=0) for states in states_of(model)])


def test_texts_are_shortened_to_what_the_model_takes_and_that_is_said(caplog) -> None:
    model = bert(max_position_embeddings=8)
    vectors = embedded(model, LONG_AND_SHORT)
    assert "1 of 2 texts have at least 8 tokens" in caplog.text
    np.testing.assert_array_equal(vectors, embedded(model, LONG_AND_SHORT, max_length=8))


def test_a_length_above_the_positions_of_the_model_is_refused() -> None:
    model = bert(max_position_embeddings=8)
    message = "1 texts are too long .* 8 positions: text 0 has 9 tokens .*max_length=8"
    with pytest.raises(ConfigError, match=message):
        embedded(model, LONG_AND_SHORT, max_length=9)


def test_new_tokens_need_positions_too() -> None:
    model = short_gpt2()
    message = "16 positions: text .* has 13 tokens and 4 new ones; .*max_length=12"
    with pytest.raises(ConfigError, match=message):
        generated(model)
    assert len(generated(model, TEXTS[:8], max_length=12)) == 8
