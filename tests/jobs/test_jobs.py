"""Whole datasets: results are those of one text at a time, whatever batches, memory, crashes, ranks and files do."""

import copy
import sys
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

SMALL: Any = {"budget": TokenBudget(40), "progress": False}
NEW: Any = {"max_new_tokens": 4, **SMALL}


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer()


def one_by_one(model: Any, encode: Any, **how: Any) -> list[str]:
    """Nothing to pad, nothing to plan."""
    answers = []
    for text in TEXTS:
        ids = encode(text, return_tensors="pt", return_token_type_ids=False)
        new = model.generate(**ids, **how)
        answers.append(encode.decode(new[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


@pytest.fixture(scope="module")
def expected(model: Any, tokenizer: Any) -> list[str]:
    return one_by_one(model, tokenizer, max_new_tokens=4)


def small(head: str, **options: Any) -> Any:
    """A model of that class of transformers."""
    torch.manual_seed(0)
    if head.startswith("Bert"):
        config = models.bert(vocab=30, layers=3, inner=16, dropout=0.1, **options)
    elif head.startswith("GPT2"):
        config = models.gpt2(
            vocab=30, width=8, layers=1, heads=1, bos_token_id=1, eos_token_id=2, **options
        )
    else:
        config = models.t5(
            vocab=30, layers=1, inner=16, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0
        )
    return getattr(transformers, head)(config).eval()


def states(model: Any, limit: int = 99) -> list[torch.Tensor]:
    """Hidden states of one text at a time."""
    ids = [
        small_tokenizer()(t, truncation=True, max_length=limit, return_tensors="pt")["input_ids"]
        for t in TEXTS
    ]
    with torch.no_grad():
        return [model(input_ids=row).last_hidden_state[0] for row in ids]


def nothing_runs(*args: Any, **options: Any) -> Any:
    raise AssertionError


def same(got: Any, want: Any) -> None:
    np.testing.assert_allclose(
        got, np.asarray(torch.stack(list(want)).detach()), rtol=1e-4, atol=1e-5
    )
    assert got.dtype == np.float32


def test_results_are_those_of_one_text_at_a_time_in_input_order_or_as_they_come(
    model, tokenizer, expected, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # the bar stays out of pipes
    for size in (SMALL, {"batch_size": 4, "progress": True}):
        assert (
            generate_dataset(model, tokenizer, TEXTS, **{**NEW, "budget": None, **size}) == expected
        )
    assert len(set(expected)) > 20
    assert tokenizer.padding_side == "right"  # what we were given is left as it was
    assert "tok/s" in capsys.readouterr().err
    assert generate_dataset(model, tokenizer, [], **NEW) == []
    assert len(generate_dataset(model, tokenizer, ["", "w1"], **NEW)) == 2
    pairs = list(iter_generate(model, tokenizer, TEXTS, **NEW))
    assert dict(pairs) == dict(enumerate(expected))
    assert len(TEXTS[pairs[0][0]].split()) == 13  # longest first
    assert list(iter_generate(model, tokenizer, TEXTS, skip=range(39), **NEW)) == [
        (39, expected[39])
    ]


def test_a_memory_budget_without_a_model_is_that_of_the_batch_size(model, tokenizer):
    """The hardest four of another run fit; of what, this model says. One without a config is taken for a hungry one."""
    MemoryRegressor.of_model(
        model.model, "forward", max_new_tokens=0
    )  # a trace runs the hooks of a copy, too
    seen, runs = models.shapes_seen(model.model), []
    budgets = MemoryBudget(4), MemoryBudget(4, model=MemoryRegressor.pretrained())
    for how in ({"batch_size": 4}, *({"budget": budget} for budget in budgets)):
        embed_dataset(model, tokenizer, TEXTS, progress=False, **how)
        runs.append([*seen])
        seen.clear()
    assert runs[0] == runs[1] != runs[2]
    own = torch.nn.Linear(1, 1)
    assert MemoryRegressor.of_model(own, "forward").workload.mode == "forward"
    assert MemoryRegressor.of_model(own, "forward") is MemoryRegressor.of_model(own, "forward")


def test_running_out_of_memory_changes_nothing_and_teaches_the_plan(model, tokenizer, expected):
    allocator, learned = Allocator(60), LearningBudget()
    remove = allocator.in_forward(model.model.layers[2])
    assert (
        generate_dataset(
            model, tokenizer, TEXTS, **{**NEW, "budget": TokenBudget(100)}, learned=learned
        )
        == expected
    )
    assert 1 <= len(allocator.failures) <= 4
    assert learned.report.num_ooms == len(allocator.failures)
    assert all(a > b for a, b in pairwise(allocator.failures))  # never the same twice
    allocator.limit = 12
    longest = next(i for i, text in enumerate(TEXTS) if len(text.split()) == 13)
    with pytest.raises(BudgetError, match=f"sample {longest} does not fit even alone .*13"):
        generate_dataset(model, tokenizer, TEXTS, **NEW)
    remove()


def test_a_finished_job_called_again_gives_its_results_back(
    model, tokenizer, expected, tmp_path, monkeypatch, caplog
):
    path = tmp_path / "out.jsonl"
    call = lambda texts=TEXTS, **more: generate_dataset(  # noqa: E731
        model, tokenizer, texts, output=path, **NEW, **more
    )
    assert call() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        path.name,
        f"{path.name}.job",
    ]  # the journal is gone
    assert not caplog.text
    monkeypatch.setattr(type(model), "generate", nothing_runs)
    assert call() == expected
    assert "out.jsonl: 40 of 40 results are from 2" in caplog.text
    assert "To start anew, remove out.jsonl, out.jsonl.job and out.jsonl.journal" in caplog.text
    with pytest.raises(StateError, match="settings: identity was None then, is 'v2' now"):
        call(identity="v2")
    with pytest.raises(ConfigError, match="`identity` must be a text, or another value that JSON"):
        call(identity={1, 2})
    with pytest.raises(
        StateError, match=r"settings: texts was '40 texts #\w+' then, is '39 .*remove out.jsonl.job"
    ):
        call(TEXTS[1:])
    with pytest.raises(StateError, match="arguments was '{}' then, is \"{'num_beams': 2}\" now"):
        call(num_beams=2)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(StateError, match="out.jsonl was changed after its job was finished"):
        call()
    (tmp_path / f"{path.name}.job").unlink()
    with pytest.raises(
        ConfigError, match="out.jsonl exists, but no 'out.jsonl.job' beside it says which job"
    ):
        call()


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
    call = (  # noqa: E731
        lambda: embed_dataset(  # noqa: E731
            model.model, tokenizer, TEXTS[:4], output=tmp_path / "out.npy", **SMALL
        )
    )
    before = call()
    np.testing.assert_array_equal(call(), before)
    setattr(tokenizer, setting, value)
    with pytest.raises(StateError, match="settings: tokenizer was"):
        call()


class Wrapped(torch.nn.Module):
    """A model of the user's own, whose arguments are not known by name."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.decoder = model, model.config, model.decoder

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


ALL = (generate_dataset, embed_dataset, classify_dataset)
WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (
        ALL,
        {"texts": ["w1", None]},
        "text 1 must be a string, but is None; correct or filter out that sample",
    ),
    (ALL, {"budget": TokenBudget(64, layout="packed")}, "these batches are padded"),
    (ALL, {"batch_size": 3}, r"`batch_size` \(3\) and `budget` both limit a batch"),
    (ALL, {"batch_size": 0, "budget": None}, "`batch_size` must be an int of at least 1"),
    (ALL, {"output": "out.csv"}, "must end in .(jsonl|npy), but"),
    (ALL, {"world": SimpleNamespace(rank=0, size=2, all_max=list)}, "2 ranks need `output`"),
    (ALL[:1], {"attention_mask": torch.ones(2, 2)}, "`attention_mask` is for one batch"),
    (
        ALL[1:2],
        {"pooling": "max"},
        "`pooling` must be one of 'auto', 'mean', 'first', 'last', None, but is 'max'",
    ),
    (ALL[1:2], {"model": small("T5ForConditionalGeneration")}, r"pass model.get_encoder\(\)"),
    (
        ALL[1:2],
        {"model": transformers.T5Model(small("T5EncoderModel").config)},
        r"pass model.get_encoder\(\)",
    ),
    (ALL[1:2], {"model": Wrapped(small("T5Model"))}, r"pass model.get_encoder\(\)"),
    (
        ALL[2:],
        {"model": small_llama()},
        r"LlamaForCausalLM returns logits \(2, 2, 30\) for 2 texts; for a classifier of tokens",
    ),
    (
        ALL[2:],
        {"model": small_llama().model},
        "the output of LlamaModel has no `logits`; give .* with a head",
    ),
]


@pytest.mark.parametrize(("calls", "given", "message"), WRONG, ids=range(len(WRONG)))
def test_what_no_job_can_run_is_refused_by_name(calls, given, message, model, tokenizer):
    for call in calls:
        with pytest.raises(ConfigError, match=message):
            call(
                **{
                    "model": model,
                    "tokenizer": tokenizer,
                    "texts": ["w1", "w2 w3"],
                    **SMALL,
                    **given,
                }
            )


def test_a_generation_config_counts_like_arguments(model: Any, tokenizer: Any) -> None:
    """Several sequences a text, beams and new tokens may be asked for there."""
    asked: Any = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 3}
    config = transformers.GenerationConfig(**asked, pad_token_id=0, eos_token_id=2)
    run = lambda **options: generate_dataset(model, tokenizer, TEXTS[:6], **SMALL, **options)  # noqa: E731
    want = run(**asked)
    assert [len(texts) for texts in want] == [2] * 6
    assert run(generation_config=config) == want
    assert {
        len(text.split())
        for texts in run(generation_config=config, max_new_tokens=1)
        for text in texts
    } <= {0, 1}
    assert config.max_new_tokens == 3
    before, model.generation_config = model.generation_config, config
    try:
        assert run() == want
    finally:
        model.generation_config = before


def test_generation_ends_with_stop_strings():
    """The tokenizer that `generate` needs for them is the job's."""
    tokenizer = train_tokenizer(TEXTS, vocabulary=290)
    torch.manual_seed(0)
    own = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = models.sharp(
        transformers.LlamaForCausalLM(models.llama(vocab=290, layers=1, **own)).eval()
    )
    how: Any = {"stop_strings": [*"0123456789"], "max_new_tokens": 6}
    want = one_by_one(model, tokenizer, tokenizer=tokenizer, **how)
    assert generate_dataset(model, tokenizer, TEXTS, **how, **SMALL) == want
    assert 0 < sum(text[-1:].isdigit() for text in want) < len(TEXTS)
    batch = dict(tokenizer(TEXTS[0], return_tensors="pt", return_token_type_ids=False))
    alone = generate_with_oom_retry(model, batch, tokenizer=tokenizer, **how).output
    assert torch.equal(alone, model.generate(**batch, tokenizer=tokenizer, **how))


def test_a_model_in_training_mode_runs_without_dropout_and_is_left_as_it_was(
    tokenizer: Any,
) -> None:
    model = small("BertModel")
    want = embed_dataset(model, tokenizer, TEXTS, **SMALL)
    model.train()
    model.encoder.layer[1].eval()
    np.testing.assert_array_equal(embed_dataset(model, tokenizer, TEXTS, **SMALL), want)
    assert model.training
    assert [layer.training for layer in model.encoder.layer] == [True, False, True]


def test_an_error_on_one_rank_ends_all_and_other_jobs_are_noticed(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "there.jsonl").write_text("")

    def ended(
        second: str | None, texts: Any = TEXTS, run: Any = generate_dataset, how: Any = NEW
    ) -> list[str]:
        def rank(world: Any) -> str:
            call, of, name, more = (
                (generate_dataset, TEXTS, "out.jsonl", NEW),
                (run, texts, second, how),
            )[world.rank]
            with pytest.raises((ConfigError, AlignmentError)) as caught:
                call(model, tokenizer, of, output=name and tmp_path / name, world=world, **more)
            return f"{type(caught.value).__name__}: {caught.value}"

        return run_ranks(2, rank)

    others = ended("out.jsonl", TEXTS[1:])
    assert (
        others
        == [
            "ConfigError: all ranks must run the same job, but have different texts; give all ranks the same"
        ]
        * 2
    )
    assert (
        "task, max_new_tokens, arguments, max_length; give"
        in ended("x.npy", TEXTS, embed_dataset, SMALL)[0]
    )
    first, second = ended("there.jsonl")
    assert "exists, but no 'there.jsonl.job'" in second
    assert first == "AlignmentError: rank 1 of 2 could not continue the job; see that rank's error"
    assert ended(None) == [
        first,
        "ConfigError: 2 ranks need `output`, the path of a file that all ranks can read and write",
    ]

    def retried(world: Any) -> Any:
        own, fails = copy.deepcopy(model), [world.rank]
        own.register_forward_pre_hook(lambda *_: 1 / (1 - fails[0]) and None)
        with pytest.raises(ZeroDivisionError if fails[0] else AlignmentError):
            generate_dataset(
                own, tokenizer, TEXTS, output=tmp_path / "again.jsonl", world=world, **NEW
            )
        fails[0] = 0
        return generate_dataset(
            own, tokenizer, TEXTS, output=tmp_path / "again.jsonl", world=world, **NEW
        )

    assert run_ranks(2, retried) == [generate_dataset(model, tokenizer, TEXTS, **NEW)] * 2


def test_ranks_with_other_budgets_share_what_a_crash_has_left(
    tokenizer, expected, tmp_path, monkeypatch, caplog
):
    """Of one process, on two ranks: every text once, and what was finished not again."""
    own, append, left, done = [small_llama(), small_llama()], Output.append, iter(range(3)), []

    def rank(world: Any) -> list[str]:
        options = {
            **NEW,
            "budget": TokenBudget(100 - 40 * world.rank),
            "output": tmp_path / "out.jsonl",
        }
        return generate_dataset(own[world.rank], tokenizer, TEXTS, world=world, **options)

    def dying(self: Output, indices: list[int], results: list[str]) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        noting(self, indices, results)

    def noting(self: Output, indices: list[int], results: list[str]) -> None:
        done.extend(indices)
        append(self, indices, results)

    monkeypatch.setattr(Output, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        rank(SingleProcess())
    assert 0 < len(done) < 30
    monkeypatch.setattr(Output, "append", noting)
    assert run_ranks(2, rank) == [expected] * 2
    assert sorted(done) == [*range(40)]
    assert "of 40 results are from 2" in caplog.text


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_embeddings_are_those_of_one_text_at_a_time_also_read_again(pooling, tokenizer, tmp_path):
    model, allocator = small("BertModel"), Allocator(60)
    remove = allocator.in_forward(model.encoder.layer[2])
    options: Any = {
        "pooling": pooling,
        "budget": TokenBudget(100),
        "progress": False,
        "output": tmp_path / "out.npy",
    }
    got = embed_dataset(model, tokenizer, TEXTS, **options)
    remove()
    assert allocator.failures
    np.testing.assert_array_equal(embed_dataset(model, tokenizer, TEXTS, **options), got)
    pick = {"mean": lambda s: s.mean(0), "first": lambda s: s[0], "last": lambda s: s[-1]}[pooling]
    same(got, map(pick, states(model)))


def test_an_adapted_causal_model_is_embedded_by_its_states_with_its_adapter(tokenizer: Any) -> None:
    """An adapter that puts tokens before the text is no part of the layers: the model beneath it would run without it."""
    peft = pytest.importorskip("peft")
    prompted = adapted(
        small_llama(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(
        ConfigError, match="has no `last_hidden_state`; give the model without its head"
    ):
        embed_dataset(prompted, tokenizer, TEXTS[:3], **SMALL)
    model = adapted(
        small_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    got = embed_dataset(model, tokenizer, TEXTS, pooling="last", **SMALL)
    same(got, (s[-1] for s in states(model.get_base_model().model)))
    with model.disable_adapter():
        assert not np.allclose(
            embed_dataset(model, tokenizer, TEXTS, pooling="last", **SMALL), got, atol=1e-3
        )


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_batches_are_as_wide_as_the_budget_rounds_them(multiple: int, tokenizer: Any) -> None:
    """Also the parts of one that ran out of memory, and texts without a token."""
    model, allocator = small_llama(), Allocator(32)
    seen = models.shapes_seen(model.model)
    allocator.in_forward(model.model.layers[0])
    budget = TokenBudget(48, pad_to_multiple_of=multiple)
    for run in (
        embed_dataset,
        lambda *args, **options: generate_dataset(*args, max_new_tokens=1, **options),
    ):
        failed = len(allocator.failures)
        run(model, tokenizer, [*TEXTS, ""], budget=budget, progress=False)
        assert len(allocator.failures) > failed
        assert {width % multiple for _, width in seen} == {0}
        assert multiple > 1 or {width % 2 for _, width in seen} == {0, 1}
        seen.clear()


def test_classification_normalised_embeddings_and_those_of_few_shapes(tokenizer: Any) -> None:
    model = small("BertForSequenceClassification")
    rows = [tokenizer(t, return_tensors="pt", return_token_type_ids=False) for t in TEXTS]
    want = [model(**row).logits[0] for row in rows]
    same(classify_dataset(model, tokenizer, TEXTS, **SMALL), want)
    same(
        np.stack([row for _, row in sorted(iter_classify(model, tokenizer, TEXTS, **SMALL))]), want
    )
    nothing = embed_dataset(small("BertModel"), tokenizer, [], **SMALL)
    assert (nothing.dtype, nothing.shape) == (np.float32, (0, 0))
    vectors = embed_dataset(small("BertModel"), tokenizer, TEXTS, normalize=True, **SMALL)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    model = small("BertModel")
    shapes = models.shapes_seen(model)
    got = embed_dataset(model, tokenizer, TEXTS, budget=TokenBudget(60), shapes=2, progress=False)
    assert len({*shapes}) == 2
    same(got, (state.mean(0) for state in states(model)))


def test_texts_are_shortened_to_what_the_model_takes_and_that_is_said(tokenizer, caplog):
    model, texts = small("BertModel", max_position_embeddings=8), [" ".join(["w1"] * 20), "w2 w3"]
    got = embed_dataset(model, tokenizer, texts, **SMALL)
    assert "1 of 2 texts have at least 8 tokens" in caplog.text
    np.testing.assert_array_equal(
        got, embed_dataset(model, tokenizer, texts, max_length=8, **SMALL)
    )
    with pytest.raises(
        ConfigError, match="1 texts are too long .* 8 positions: text 0 has 9 tokens .*max_length=8"
    ):
        embed_dataset(model, tokenizer, texts, max_length=9, **SMALL)
    generating = small("GPT2LMHeadModel", n_positions=16)
    with pytest.raises(
        ConfigError, match="16 positions: text .* has 13 tokens and 4 new ones; .*max_length=12"
    ):
        generate_dataset(generating, tokenizer, TEXTS, **NEW)
    assert len(generate_dataset(generating, tokenizer, TEXTS[:8], max_length=12, **NEW)) == 8
