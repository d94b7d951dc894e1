"""TRL's trainers with batches that fit, SFT on packed ones too: TRL's updates, figures and refusals."""

import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import GPT2ForSequenceClassification, LlamaForCausalLM  # noqa: E402

from dynagroup import ConfigError, MemoryBudget, TokenBudget  # noqa: E402
from dynagroup.integrations.hf import DynagroupConfig, attach, dynagroup_trainer  # noqa: E402
from dynagroup.integrations.hf_data import sample_lengths  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.toys import parameters  # noqa: E402
from tests.models import gpt2, llama  # noqa: E402
from tests.torchrun import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = [" ".join(f"w{4 + (7 * i + k) % 40}" for k in range(2 + (11 * i) % 37)) for i in range(48)]
WORDS = [text.split() for text in TEXTS]
UPDATE = 12
COMMON: dict[str, Any] = {
    "learning_rate": 1e-2,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "logging_steps": 1,
    "dataloader_pin_memory": False,
    "gradient_checkpointing": False,
    "max_grad_norm": 0.0,
    "per_device_eval_batch_size": len(TEXTS),
}
PADDED = TokenBudget(280)
PACKED = TokenBudget(100, layout="packed")
Run = tuple[torch.Tensor, list[dict[str, Any]]]
REWARDS = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]
FIGURES = [*REWARDS, "logps/chosen", "logps/rejected", "num_tokens"]
LOGGED = {"dpo": FIGURES, "cpo": FIGURES[:-1], "sft": ["num_tokens"]}
SUMMED_IN_FLOAT32 = ("cpo", "dpo")


def trainer_of(
    cls: type, args: Any, budget: TokenBudget | None, data: Dataset, **options: Any
) -> Any:
    """TRL's own trainer, or with a budget ours."""
    options.update(args=args, train_dataset=data, processing_class=toys.tokenizer())
    if budget is None:
        return cls(**options)
    config = DynagroupConfig(budget=budget, preflight=True)
    return dynagroup_trainer(cls)(dynagroup=config, **options)


def settings_of(config: type, folder: Any, **changes: Any) -> Any:
    return config(str(folder), **{**COMMON, **changes})


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def halves() -> Dataset:
    prompts = [" ".join(words[: len(words) // 2]) for words in WORDS]
    completions = [" " + " ".join(words[len(words) // 2 :]) for words in WORDS]
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


def pairs() -> Dataset:
    prompts = [" ".join(words[: 1 + len(words) // 3]) for words in WORDS]
    chosen = [" " + " ".join(words[len(words) // 3 :]) for words in WORDS]
    ends = [1 + (5 * i) % len(words) for i, words in enumerate(WORDS)]
    rejected = [" " + " ".join(words[:end]) for words, end in zip(WORDS, ends, strict=True)]
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def sft(folder: Any, budget: TokenBudget | None = None, **changes: Any) -> Any:
    """Three updates of twelve samples. Prompts are not learned from, so no sample's first token counts, padded or not."""
    settings = {"per_device_train_batch_size": 4 // ranks(), "gradient_accumulation_steps": 3}
    settings.update(max_steps=3, max_length=None)
    settings.update(changes)
    args = settings_of(trl.SFTConfig, folder, **settings)
    model = toys.causal_lm()
    loss = toys.float64_causal_loss
    return trainer_of(trl.SFTTrainer, args, budget, halves(), model=model, compute_loss_func=loss)


def two_updates(config: type, folder: Any, **changes: Any) -> Any:
    size = UPDATE // ranks()
    return settings_of(config, folder, per_device_train_batch_size=size, max_steps=2, **changes)


def dpo(folder: Any, budget: TokenBudget | None = None, **changes: Any) -> Any:
    args = two_updates(trl.DPOConfig, folder, **changes)
    torch.manual_seed(1)
    reference = toys.causal_lm()
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return trainer_of(
        trl.DPOTrainer,
        args,
        budget,
        pairs(),
        model=toys.causal_lm(),
        ref_model=reference,
        eval_dataset=pairs().select(range(24)),
    )


def reward(folder: Any, budget: TokenBudget | None = None) -> Any:
    args = two_updates(trl.RewardConfig, folder)
    torch.manual_seed(0)
    config = gpt2(num_labels=1, pad_token_id=0, n_positions=128)
    model = GPT2ForSequenceClassification(config).double()
    return trainer_of(trl.RewardTrainer, args, budget, pairs(), model=model)


def cpo(folder: Any, budget: TokenBudget | None = None) -> Any:
    from trl.experimental import cpo

    args = two_updates(cpo.CPOConfig, folder, cpo_alpha=0.0)
    return trainer_of(cpo.CPOTrainer, args, budget, pairs(), model=toys.causal_lm())


def trained(trainer: Any) -> Run:
    """Parameters after the updates, and what was logged at each."""
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    if isinstance(trainer, trl.SFTTrainer):
        # Its evaluation divides by the items of a rank, its training by those of all.
        trainer.compute_loss_func = None
        evaluated = trainer.evaluate(trainer.train_dataset)
        logs.append({**logs[-1], "loss": evaluated["eval_loss"]})
    return parameters(trainer.model), logs


def all_runs(folder: Any) -> dict[str, tuple[Run, Run]]:
    """Every trainer, ours and theirs, on this rank. All in float64."""
    warnings.simplefilter("ignore")  # the libraries' own, in a process that is not pytest's
    theirs = trained(sft(folder))
    runs = {"sft": (trained(sft(folder, TokenBudget(160))), theirs)}
    runs["sft, packed"] = (trained(sft(folder, PACKED, padding_free=True)), theirs)
    for make in (reward, dpo, cpo):
        runs[make.__name__] = (trained(make(folder, PADDED)), trained(make(folder)))
    return runs


def assert_all_same(runs: dict[str, tuple[Run, Run]]) -> None:
    """Parameters and losses. A figure of an update is a mean over all its pairs, however cut."""
    for name, ((ours, our_logs), (theirs, their_logs)) in runs.items():
        tolerance = 1e-6 if name in SUMMED_IN_FLOAT32 else 1e-8
        assert (ours - theirs).abs().max() < tolerance, name
        for our_log, their_log in zip(our_logs, their_logs, strict=True):
            assert our_log["loss"] == pytest.approx(their_log["loss"], abs=1e-6)
            assert_close(our_log, their_log, LOGGED.get(name, []))


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], names: list[str]) -> None:
    expected = [theirs[name] for name in names]
    assert [ours[name] for name in names] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_batches_that_fit_make_the_updates_of_trls_own_and_log_their_figures(tmp_path) -> None:
    assert_all_same(all_runs(tmp_path))


@pytest.mark.slow
def test_on_two_ranks_too(tmp_path) -> None:
    first, second = on_ranks(2, all_runs, str(tmp_path))
    assert_all_same(first)
    assert_all_same(second)
    for name, (ours, _) in first.items():
        assert torch.equal(ours[0], second[name][0][0])


def test_preferences_are_evaluated_within_the_budget_as_trl_evaluates_them(tmp_path) -> None:
    sizes = []
    ours = dpo(tmp_path, PADDED)

    def note_size(model: Any, args: Any, options: dict[str, Any]) -> None:
        sizes.append(options["input_ids"].numel())

    ours.model.register_forward_pre_hook(note_size, with_kwargs=True)
    theirs = dpo(tmp_path).evaluate()
    names = [f"eval_{name}" for name in ("loss", *FIGURES)]
    assert_close(ours.evaluate(), theirs, names)
    assert max(sizes) <= PADDED.max_tokens
    assert len(set(sizes)) > 1


def test_predictions_of_pairs_are_those_of_trl_in_the_order_of_the_plan(tmp_path) -> None:
    theirs = reward(tmp_path)
    ours = reward(tmp_path, PADDED)
    expected = theirs.predict(theirs.train_dataset).predictions
    with pytest.warns(UserWarning, match="several rows a sample stay in the order of the plan"):
        scores = ours.predict(ours.train_dataset).predictions
    assert len(expected) == 2 * len(theirs.train_dataset), "chosen and rejected"
    np.testing.assert_allclose(np.sort(scores, axis=None), np.sort(expected, axis=None), atol=1e-6)


def test_a_pair_is_measured_as_trl_cuts_it(tmp_path) -> None:
    cut = dpo(tmp_path, PADDED, max_length=12)
    lengths = sample_lengths(cut, cut.train_dataset, name="pairs")
    assert lengths["tokens"].max() == 2 * 12


def test_a_loss_that_needs_its_own_batches_is_refused(tmp_path) -> None:
    """By its gradients: a mean over pairs beside a mean over tokens."""
    mixed = dpo(tmp_path, PADDED, loss_type=["sigmoid", "sft"])
    with pytest.raises(ConfigError, match="the loss depends on how an update is cut: .* off"):
        mixed.train()


def test_a_retry_is_refused_where_the_trainer_has_a_training_step_of_its_own(tmp_path) -> None:
    config = DynagroupConfig(budget=PADDED, out_of_memory="retry")
    with pytest.raises(ConfigError, match="with a training_step of DynagroupDPOTrainer cannot be"):
        attach(dpo(tmp_path), config)


def evaluated_ratios(folder: Any, size: int, budget: TokenBudget | None) -> list[float]:
    trainer = sft(folder, budget, per_device_eval_batch_size=size)
    trainer.compute_loss_func = None
    figures = trainer.evaluate(trainer.train_dataset)
    return [figures["eval_mean_token_accuracy"], figures["eval_entropy"]]


def test_figures_that_are_ratios_are_those_of_all_samples(tmp_path) -> None:
    """TRL's own are means of batches' ratios, so that they depend on the batches."""
    expected = evaluated_ratios(tmp_path, len(TEXTS), None)
    for max_tokens in (160, 300):
        ratios = evaluated_ratios(tmp_path, 4, TokenBudget(max_tokens))
        assert ratios == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("lora", [None, 4])
def test_memory_of_a_model_whose_forward_trl_replaced_is_that_of_its_own(lora, tmp_path):
    peft_config = None
    if lora is not None:
        peft_config = LoraConfig(r=lora, target_modules="all-linear")
    # Eager attention needs half the traces.
    model = LlamaForCausalLM(llama(layers=1, attn_implementation="eager"))
    plain = MemoryBudget.from_model(model, "1GB", lora=peft_config).figures()
    texts = Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(
        model,
        settings_of(trl.SFTConfig, tmp_path),
        train_dataset=texts,
        processing_class=toys.tokenizer(),
        peft_config=peft_config,
    )
    replaced = [part for part in trainer.model.modules() if "forward" in vars(part)]
    assert replaced, "TRL no longer does so: then this test can go"
    assert MemoryBudget.from_model(trainer.model, "1GB").figures() == plain
