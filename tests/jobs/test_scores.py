"""Scores are the log-probabilities of one text at a time, and logits exist for a few tokens only."""

from functools import partial
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

BUDGET = TokenBudget(60)
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
# Heads that scale or cap logits, or that call a part of the layers' module.
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "caps": transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=1.0),
    "multiplies": transformers.CohereConfig(**SIZES, logit_scale=0.3),
    "divides": transformers.GraniteConfig(**SIZES, logits_scaling=3.0),
    "gpt2": models.gpt2(vocab=30),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=16),
}
TOKENIZER = small_tokenizer()


def scores_of(model: Any, texts: Any = TEXTS, *, budget: Any = BUDGET, **options: Any) -> Any:
    return score_dataset(model, TOKENIZER, texts, budget=budget, progress=False, **options)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def log_probabilities(model: Any, ids: list[int]) -> list[float]:
    """Of the second token on, from the logits of the whole text."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    scores = logits.log_softmax(dim=-1)
    return [scores[place, token].item() for place, token in enumerate(ids[1:])]


def assert_scores(results: Any, expected: list[list[float]]) -> None:
    for result, values in zip(results, expected, strict=True):
        num_tokens = len(values)
        total = sum(values)
        assert result["num_tokens"] == num_tokens
        assert result["sum"] == pytest.approx(total, rel=1e-6, abs=1e-6)
        if num_tokens == 0:
            assert result["mean"] is None
        else:
            assert result["mean"] == pytest.approx(total / num_tokens, rel=1e-6)


def assert_same_sums(results: Any, expected: Any) -> None:
    sums = [result["sum"] for result in results]
    assert sums == pytest.approx([result["sum"] for result in expected])


@pytest.fixture(scope="module")
def expected() -> Any:
    """The scores of small_llama, one text at a time."""
    return scores_of(small_llama(), budget=None, batch_size=1)


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
        first = len(ids_of(prompt)) - 1
        scores = log_probabilities(model, ids_of(prompt + answer))
        expected.append(scores[first:])
    results = scores_of(model, PROMPTS, answers=ANSWERS)
    assert_scores(results, expected)
    assert results[0].keys() == {"sum", "mean", "num_tokens"}


def test_an_empty_answer_has_no_token() -> None:
    results = scores_of(small_llama(), PROMPTS, answers=[""] * 20)
    assert_scores(results, [[]] * 20)


def test_a_token_that_joins_prompt_and_answer_is_the_answers() -> None:
    tokenizer = train_tokenizer(["ab ab ab ab"] * 4, vocabulary=290)
    # BOS and EOS are 1 and 2; "ab" is one token
    assert tokenizer("a")["input_ids"] == [1, 67, 2]
    assert tokenizer("ab ab")["input_ids"] == [1, 259, 260, 2]
    model = transformers.LlamaForCausalLM(models.llama(vocab=300)).eval()
    job = partial(score_dataset, model, tokenizer, ["a", "ab"], answers=["b ab", " ab"])
    whole = log_probabilities(model, [1, 259, 260, 2])
    assert_scores(job(budget=BUDGET, progress=False), [whole, whole[1:]])


def test_running_out_of_memory_changes_no_score(expected: Any) -> None:
    model = small_llama()
    allocator = Allocator(30)
    allocator.in_forward(model.model.layers[0])
    assert_same_sums(scores_of(model), expected)
    assert allocator.failures


def test_an_iterator_skips_what_was_done(expected: Any) -> None:
    job = partial(iter_score, small_llama(), TOKENIZER, TEXTS, skip=range(1, 40))
    [(index, score)] = job(budget=BUDGET, progress=False)
    assert index == 0
    assert score == pytest.approx(expected[0], nan_ok=True)


def test_ranks_have_the_same_scores_from_one_file(expected: Any, tmp_path: Path) -> None:
    replicas = [small_llama(), small_llama()]

    def job(world: Any) -> Any:
        output = tmp_path / "scores.jsonl"
        return scores_of(replicas[world.rank], output=output, world=world)

    first, second = run_ranks(2, job)
    assert first == second
    assert_same_sums(first, expected)


def test_logits_of_at_most_256_tokens_exist_at_a_time() -> None:
    model = small_llama()
    sizes: list[int] = []

    def note(head: Any, args: Any, logits: torch.Tensor) -> None:
        sizes.append(logits[..., 0].numel())

    model.lm_head.register_forward_hook(note)
    texts = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"] * 100
    results = scores_of(model, texts, budget=2000)
    assert sizes == [256, 256, 256, 132]
    assert sum(result["num_tokens"] for result in results) == sum(sizes)


def all_tokens(model: Any, num_samples: int, longest: Any) -> dict[str, Any]:
    """A batch without padding, and the chunks of its scores."""
    ids = torch.zeros(num_samples, longest["tokens"], dtype=torch.long)
    chunks = torch.zeros(ids.numel(), dtype=torch.long).split(256)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "chunks": chunks}


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    config = models.llama(vocab=32_000, width=64, layers=4, heads=4)
    return Scorer.of(transformers.LlamaForCausalLM(config).eval())


def test_the_memory_that_a_budget_predicts_is_that_of_the_run(scorer: Scorer) -> None:
    workload = scorer.memory().traced.workload
    on_meta = prepare(as_meta_model(scorer), workload)
    for num_samples, tokens in ((8, 193), (16, 481), (200, 481)):
        run = trace(on_meta, workload, num_samples, {"tokens": tokens}, inputs=all_tokens)
        [predicted] = workload.phases.bytes(BatchShape.of(num_samples, tokens))
        assert 1.0 <= predicted / max(run.timeline) < 1.002
        all_logits_bytes = num_samples * tokens * 32_000 * 4
        assert predicted < all_logits_bytes / 2


def test_more_short_texts_fit_beside_one_chunk_of_logits(scorer: Scorer) -> None:
    budget = MemoryBudget(8, longest=481, model=scorer.memory())
    fits = budget.fits(BatchShape.of([8, 80, 120], [481, 40, 40]))
    assert fits.tolist() == [True, True, False]


def test_an_adapter_counts_as_it_is_set() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = adapted(small_llama(), lora)
    expected = [log_probabilities(model, ids_of(text)) for text in TEXTS]
    assert_scores(scores_of(model), expected)
    with model.disable_adapter():
        without_adapter = scores_of(model)
    assert without_adapter == scores_of(small_llama())


def test_a_model_with_a_tuned_prompt_has_no_scores() -> None:
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="without prompt tuning"):
        scores_of(adapted(small_llama(), prompt))


def test_a_model_that_is_not_causal_has_no_scores() -> None:
    not_causal = [
        small_llama().model,
        transformers.BertForMaskedLM(models.bert(vocab=30)),
        transformers.T5ForConditionalGeneration(models.t5(vocab=30)),
    ]
    for model in not_causal:
        with pytest.raises(ConfigError, match="cannot score texts; give a causal model"):
            scores_of(model)


def test_each_prompt_has_an_answer() -> None:
    with pytest.raises(ConfigError, match="`answers` has 1 texts for 40 prompts"):
        scores_of(small_llama(), answers=["w1"])


def test_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="pass the second texts as `answers`"):
        scores_of(small_llama(), [("w1", "w2")])


def test_texts_have_no_more_tokens_than_the_model_has_positions() -> None:
    model = transformers.GPT2LMHeadModel(models.gpt2(vocab=30, n_positions=8))
    with pytest.raises(ConfigError, match="8 positions: .*max_length=8"):
        scores_of(model)


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


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
        of_trl = list(precomputed.train_dataset[name])
        assert values == pytest.approx(of_trl, rel=1e-6, abs=1e-5)
        data = data.add_column(name, values)
    ours = trainer(data)
    ours.precompute_ref_logps = True  # use the columns; as in docs/inference.md
    ours.ref_model = None
    assert losses_of(precomputed) == pytest.approx(losses_of(ours), rel=1e-5)
