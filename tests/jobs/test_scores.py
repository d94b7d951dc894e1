"""Scores are the log-probabilities of one text at a time, and logits exist for a few tokens only."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynagroup import ConfigError, MemoryBudget, TokenBudget, iter_score, score_dataset
from dynagroup.demo import train_tokenizer
from dynagroup.jobs.scoring import Scorer
from dynagroup.memory.trace.model import as_meta_model
from dynagroup.memory.trace.program import prepare, trace
from dynagroup.shapes import BatchShape
from dynagroup.testing import run_ranks
from tests import models
from tests.models import TEXTS, Allocator, adapted, small_llama, small_tokenizer

SMALL: Any = {"budget": TokenBudget(60), "progress": False}
PROMPTS = TEXTS[:20]
ANSWERS = [f" {text}" for text in TEXTS[20:]]
SIZES: Any = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
OF_OPT: Any = {"ffn_dim": 32, "word_embed_proj_dim": 16}
# Heads that scale or cap logits, or that call a part of the layers' module.
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "caps": transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=1.0),
    "multiplies": transformers.CohereConfig(**SIZES, logit_scale=0.3),
    "divides": transformers.GraniteConfig(**SIZES, logits_scaling=3.0),
    "gpt2": models.gpt2(vocab=30),
    "opt": transformers.OPTConfig(**SIZES, **OF_OPT),
}


TOKENIZER = small_tokenizer()


def scores_of(model: Any, texts: Any = TEXTS, **options: Any) -> Any:
    return score_dataset(model, TOKENIZER, texts, **{**SMALL, **options})


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def log_probabilities(model: Any, ids: list[int]) -> list[float]:
    """Of the second token on, from the logits of the whole text."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    scores = logits.log_softmax(dim=-1)
    return [scores[place, token].item() for place, token in enumerate(ids[1:])]


def assert_scores(results: Any, expected: list[list[float]]) -> None:
    assert [result["num_tokens"] for result in results] == [len(values) for values in expected]
    for result, values in zip(results, expected, strict=True):
        assert result["sum"] == pytest.approx(sum(values), rel=1e-6, abs=1e-6)
        if values:
            assert result["mean"] == pytest.approx(sum(values) / len(values), rel=1e-6)
        else:
            assert result["mean"] is None


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_one_text_at_a_time(name: str) -> None:
    torch.manual_seed(0)
    model = models.sharp(transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval())
    expected = [log_probabilities(model, ids_of(text)) for text in TEXTS]
    results = scores_of(model, per_token=True)
    assert_scores(results, expected)
    for result, values in zip(results, expected, strict=True):
        assert result["tokens"] == pytest.approx(values, rel=1e-6, abs=2e-6)
    assert {result["num_tokens"] for result in results} == set(range(13))


def test_an_answer_is_scored_after_its_prompt() -> None:
    model = small_llama()
    expected = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        num_prompt = len(ids_of(prompt))
        whole = ids_of(prompt + answer)
        expected.append(log_probabilities(model, whole)[num_prompt - 1 :])
    results = scores_of(model, PROMPTS, answers=ANSWERS)
    assert_scores(results, expected)
    assert results[0].keys() == {"sum", "mean", "num_tokens"}
    assert_scores(scores_of(model, PROMPTS, answers=[""] * 20), [[]] * 20)


def test_a_token_that_joins_prompt_and_answer_is_the_answers() -> None:
    tokenizer = train_tokenizer(["ab ab ab ab"] * 4, vocabulary=290)
    # BOS and EOS are 1 and 2; "ab" is one token
    assert tokenizer("a")["input_ids"] == [1, 67, 2]
    assert tokenizer("ab ab")["input_ids"] == [1, 259, 260, 2]
    model = transformers.LlamaForCausalLM(models.llama(vocab=300)).eval()
    results = score_dataset(model, tokenizer, ["a", "ab"], answers=["b ab", " ab"], **SMALL)
    assert_scores(results[:1], [log_probabilities(model, [1, 259, 260, 2])])
    assert_scores(results[1:], [log_probabilities(model, [1, 259, 260, 2])[1:]])


def test_memory_ranks_files_and_skipped_texts_change_nothing(tmp_path: Path) -> None:
    model = small_llama()
    expected = scores_of(model, budget=None, batch_size=1)
    sums = [[result["sum"]] for result in expected]
    allocator = Allocator(30)
    remove = allocator.in_forward(model.model.layers[0])
    split = scores_of(model)
    assert [[result["sum"]] for result in split] == [pytest.approx(values) for values in sums]
    assert allocator.failures
    remove()
    rest = dict(iter_score(model, TOKENIZER, TEXTS, skip=range(1, 40), **SMALL))
    assert rest == {0: pytest.approx(expected[0], nan_ok=True)}
    copies = [copy.deepcopy(model), copy.deepcopy(model)]

    def rank(world: Any) -> Any:
        output = tmp_path / "scores.jsonl"
        return scores_of(copies[world.rank], output=output, world=world)

    first, second = run_ranks(2, rank)
    assert first == second
    assert [[result["sum"]] for result in first] == [pytest.approx(values) for values in sums]


def test_logits_of_at_most_256_tokens_exist_at_a_time() -> None:
    model = small_llama()
    sizes: list[int] = []
    model.lm_head.register_forward_hook(
        lambda _, args, logits: sizes.append(logits[..., 0].numel())
    )
    texts = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"] * 100
    results = scores_of(model, texts, budget=2000)
    assert sum(result["num_tokens"] for result in results) == sum(sizes) == 900
    assert sizes == [256, 256, 256, 132]


def test_the_memory_that_a_budget_predicts_is_that_of_the_run() -> None:
    config = models.llama(vocab=32_000, width=64, layers=4, heads=4)
    scorer = Scorer.of(transformers.LlamaForCausalLM(config).eval())
    memory = scorer.memory()
    workload = memory.traced.workload
    on_meta = prepare(as_meta_model(scorer, workload), workload)

    def all_tokens(model: Any, num_samples: int, longest: Any) -> dict[str, Any]:
        ids = torch.zeros(num_samples, longest["tokens"], dtype=torch.long)
        chunks = torch.zeros(ids.numel(), dtype=torch.long).split(256)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "chunks": chunks}

    for num_samples, tokens in ((8, 193), (16, 481), (200, 481)):
        run = trace(on_meta, workload, num_samples, {"tokens": tokens}, inputs=all_tokens)
        predicted = workload.phases.bytes(BatchShape.of(num_samples, tokens))[0]
        assert 1.0 <= predicted / max(run.timeline) < 1.002
        assert predicted < num_samples * tokens * 32_000 * 4 / 2, "all logits need more"
    budget = MemoryBudget(8, longest=481, model=memory)
    fits = budget.fits(BatchShape.of([8, 80, 120], [481, 40, 40]))
    assert fits.tolist() == [True, True, False], "more short texts fit beside one chunk of logits"


def test_adapters_count_as_they_are_set() -> None:
    peft = pytest.importorskip("peft")
    plain = scores_of(small_llama())
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = adapted(small_llama(), lora)
    expected = [log_probabilities(model, ids_of(text)) for text in TEXTS]
    assert_scores(scores_of(model), expected)
    with model.disable_adapter():
        assert scores_of(model) == plain
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="without prompt tuning"):
        scores_of(adapted(small_llama(), prompt))


def test_what_has_no_scores_is_refused() -> None:
    llama = small_llama()
    without_scores = [
        llama.model,
        transformers.BertForMaskedLM(models.bert(vocab=30)),
        transformers.T5ForConditionalGeneration(models.t5(vocab=30)),
    ]
    for model in without_scores:
        with pytest.raises(ConfigError, match="cannot score texts; give a causal model"):
            scores_of(model)
    with pytest.raises(ConfigError, match="`answers` has 1 texts for 40 prompts"):
        scores_of(llama, answers=["w1"])
    with pytest.raises(ConfigError, match="pass the second texts as `answers`"):
        scores_of(llama, [("w1", "w2")])
    short = transformers.GPT2LMHeadModel(models.gpt2(vocab=30, n_positions=8))
    with pytest.raises(ConfigError, match="8 positions: .*max_length=8"):
        scores_of(short)


@pytest.mark.filterwarnings("ignore")
def test_columns_for_dpo_are_those_that_trl_computes_and_it_trains_on_them(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": ANSWERS[::-1]}
    data = Dataset.from_dict(rows)
    reference = small_llama()
    columns = {}
    for name in ("chosen", "rejected"):
        answers = [answer + TOKENIZER.eos_token for answer in data[name]]
        scores = scores_of(reference, data["prompt"], answers=answers, max_length=16)
        columns[f"ref_{name}_logps"] = [score["sum"] for score in scores]
    settings: Any = {"report_to": [], "use_cpu": True, "bf16": False, "max_steps": 2}
    settings["max_length"] = 16

    def trainer(data: Any, **changes: Any) -> Any:
        args = trl.DPOConfig(str(tmp_path), **settings, **changes)
        model = small_llama()
        with torch.no_grad():
            model.lm_head.weight += 0.1
        return trl.DPOTrainer(
            model=model,
            ref_model=reference,
            args=args,
            train_dataset=data,
            processing_class=TOKENIZER,
        )

    precomputed = trainer(data, precompute_ref_log_probs=True)
    for name, values in columns.items():
        theirs = precomputed.train_dataset[name]
        assert values == pytest.approx(list(theirs), rel=1e-6, abs=1e-5)
    for name, values in columns.items():
        data = data.add_column(name, values)
    ours = trainer(data)
    ours.precompute_ref_logps = True  # use the columns; as in docs/inference.md
    ours.ref_model = None
    losses = []
    for each in (precomputed, ours):
        each.train()
        losses.append([row["loss"] for row in each.state.log_history if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
