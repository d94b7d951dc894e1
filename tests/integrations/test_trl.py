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
from transformers import GPT2ForSequenceClassification  # noqa: E402

from dynagroup import ConfigError, MemoryBudget, TokenBudget  # noqa: E402
from dynagroup.integrations.hf import DynagroupConfig, attach, dynagroup_trainer  # noqa: E402
from dynagroup.integrations.hf_data import sample_lengths  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.toys import parameters  # noqa: E402
from tests.models import gpt2, small_llama  # noqa: E402
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
PADDED, PACKED = TokenBudget(280), TokenBudget(100, layout="packed")
Run = tuple[torch.Tensor, list[dict[str, Any]]]
FIGURES = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "num_tokens",
]


def made(cls: type, args: Any, budget: TokenBudget | None, data: Dataset, **how: Any) -> Any:
    if budget is not None:
        cls, how = (
            dynagroup_trainer(cls),
            {**how, "dynagroup": DynagroupConfig(budget=budget, preflight=True)},
        )
    return cls(args=args, train_dataset=data, processing_class=toys.tokenizer(), **how)


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def sft(
    folder: Any,
    budget: TokenBudget | None = None,
    *,
    loss: Any = toys.float64_causal_loss,
    **changes: Any,
) -> Any:
    """Three updates of twelve samples. Prompts are not learned from, so no sample's first token counts, padded or not."""
    halves = [(" ".join(w[: len(w) // 2]), " " + " ".join(w[len(w) // 2 :])) for w in WORDS]
    data = Dataset.from_dict(
        {"prompt": [a for a, _ in halves], "completion": [b for _, b in halves]}
    )
    settings = {
        "per_device_train_batch_size": 4 // ranks(),
        "gradient_accumulation_steps": 3,
        "max_steps": 3,
    }
    args = trl.SFTConfig(str(folder), **{**COMMON, **settings, "max_length": None, **changes})
    return made(trl.SFTTrainer, args, budget, data, model=toys.causal_lm(), compute_loss_func=loss)


def pairs() -> Dataset:
    chosen = [" " + " ".join(w[len(w) // 3 :]) for w in WORDS]
    rejected = [" " + " ".join(w[: 1 + (5 * i) % len(w)]) for i, w in enumerate(WORDS)]
    prompts = [" ".join(w[: 1 + len(w) // 3]) for w in WORDS]
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def dpo(folder: Any, budget: TokenBudget | None = None, **changes: Any) -> Any:
    settings = {"per_device_train_batch_size": UPDATE // ranks(), "max_steps": 2, **changes}
    args = trl.DPOConfig(str(folder), **{**COMMON, **settings})
    torch.manual_seed(1)
    reference = toys.causal_lm()
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.02 * torch.randn_like(weight)
    how = {
        "model": toys.causal_lm(),
        "ref_model": reference,
        "eval_dataset": pairs().select(range(24)),
    }
    return made(trl.DPOTrainer, args, budget, pairs(), **how)


def reward(folder: Any, budget: TokenBudget | None = None) -> Any:
    args = trl.RewardConfig(
        str(folder), **COMMON, per_device_train_batch_size=UPDATE // ranks(), max_steps=2
    )
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(
        gpt2(num_labels=1, pad_token_id=0, n_positions=128)
    ).double()
    return made(trl.RewardTrainer, args, budget, pairs(), model=model)


def cpo(folder: Any, budget: TokenBudget | None = None) -> Any:
    from trl.experimental import cpo

    how = {"per_device_train_batch_size": UPDATE // ranks(), "max_steps": 2, "cpo_alpha": 0.0}
    return made(
        cpo.CPOTrainer,
        cpo.CPOConfig(str(folder), **COMMON, **how),
        budget,
        pairs(),
        model=toys.causal_lm(),
    )


def found(run: Any) -> Run:
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    if isinstance(
        run, trl.SFTTrainer
    ):  # its evaluation divides by the items of a rank, its training by those of all
        run.compute_loss_func = None
        logs.append({**logs[-1], "loss": run.evaluate(run.train_dataset)["eval_loss"]})
    return parameters(run.model), logs


def all_runs(folder: Any) -> dict[str, tuple[Run, Run]]:
    """Every trainer, ours and theirs, on this rank. All in float64."""
    warnings.simplefilter("ignore")  # the libraries' own, in a process that is not pytest's
    theirs = found(sft(folder))
    pairs = {"reward": reward, "dpo": dpo, "cpo": cpo}
    return {
        "sft": (found(sft(folder, TokenBudget(160))), theirs),
        "sft, packed": (found(sft(folder, PACKED, padding_free=True)), theirs),
        **{
            name: (found(make(folder, PADDED)), found(make(folder))) for name, make in pairs.items()
        },
    }


def assert_all_same(runs: dict[str, tuple[Run, Run]]) -> None:
    for name, ((ours, our_logs), (theirs, their_logs)) in runs.items():
        assert (ours - theirs).abs().max() < (1e-6 if name in ("cpo", "dpo") else 1e-8), (
            name
        )  # they sum float32
        for one, other in zip(our_logs, their_logs, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
            figures = {"dpo": FIGURES, "cpo": FIGURES[:-1], "sft": ["num_tokens"]}.get(name, [])
            assert [one[key] for key in figures] == pytest.approx(
                [other[key] for key in figures], rel=1e-4, abs=1e-5
            )


def test_batches_that_fit_make_the_updates_of_trls_own_and_log_their_figures(tmp_path) -> None:
    """Parameters and losses. A figure of an update is a mean over all its pairs, however cut."""
    assert_all_same(all_runs(tmp_path))


@pytest.mark.slow
def test_on_two_ranks_too(tmp_path) -> None:
    both = on_ranks(2, all_runs, str(tmp_path))
    for runs in both:
        assert_all_same(runs)
    assert all(torch.equal(both[0][name][0][0], both[1][name][0][0]) for name in both[0])


def test_preferences_are_measured_and_evaluated_within_the_budget(tmp_path) -> None:
    plain, ours = dpo(tmp_path), dpo(tmp_path, PADDED)
    seen = []
    ours.model.register_forward_pre_hook(
        lambda m, a, kw: seen.append(kw["input_ids"].numel()), with_kwargs=True
    )
    expected, evaluated = plain.evaluate(), ours.evaluate()
    assert max(seen) <= PADDED.max_tokens
    assert len(set(seen)) > 1
    figures = [f"eval_{key}" for key in ("loss", *FIGURES)]
    assert [evaluated[k] for k in figures] == pytest.approx(
        [expected[k] for k in figures], rel=1e-4, abs=1e-5
    )
    alike = [reward(tmp_path, *budget) for budget in ((), (PADDED,))]
    with pytest.warns(UserWarning, match="several rows a sample stay in the order of the plan"):
        scores = [np.sort(run.predict(run.train_dataset).predictions, axis=None) for run in alike]
    assert len(scores[0]) == 2 * len(alike[0].train_dataset), "chosen and rejected"
    np.testing.assert_allclose(*scores, atol=1e-6)
    cut = dpo(tmp_path, PADDED, max_length=12)
    assert sample_lengths(cut, cut.train_dataset, name="pairs")["tokens"].max() == 2 * 12


def test_losses_that_need_their_own_batches_are_refused(tmp_path) -> None:
    """By their gradients: a mean over pairs beside a mean over tokens."""
    with pytest.raises(ConfigError, match="the loss depends on how an update is cut: .* off"):
        dpo(tmp_path, PADDED, loss_type=["sigmoid", "sft"]).train()
    with pytest.raises(ConfigError, match="with a training_step of DynagroupDPOTrainer cannot be"):
        attach(dpo(tmp_path), DynagroupConfig(budget=PADDED, out_of_memory="retry"))


def test_figures_that_are_ratios_are_those_of_all_samples(tmp_path) -> None:
    """TRL's own are means of batches' ratios, so that they depend on the batches."""
    found = []
    for size, budget in ((len(TEXTS), None), (4, TokenBudget(160)), (4, TokenBudget(300))):
        run = sft(tmp_path, budget, per_device_eval_batch_size=size)
        run.compute_loss_func = None
        figures = run.evaluate(run.train_dataset)
        found.append([figures[f"eval_{name}"] for name in ("mean_token_accuracy", "entropy")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("lora", [None, 4])
def test_memory_of_a_model_whose_forward_trl_replaced_is_that_of_its_own(lora, tmp_path):
    peft_config = lora and LoraConfig(r=lora, target_modules="all-linear")
    model = small_llama()
    plain = MemoryBudget.from_model(model, "1GB", lora=peft_config).figures()
    changed = trl.SFTTrainer(
        model,
        trl.SFTConfig(str(tmp_path), **COMMON),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=toys.tokenizer(),
        peft_config=peft_config,
    ).model
    assert any("forward" in vars(part) for part in changed.modules()), (
        "TRL no longer does so: then this test can go"
    )
    assert MemoryBudget.from_model(changed, "1GB").figures() == plain
