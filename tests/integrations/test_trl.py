"""TRL's SFTTrainer and compiled models."""

from __future__ import annotations

import pytest
import torch

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from dynagroup import ConfigError, TokenBudget  # noqa: E402
from dynagroup.integrations.hf import DynagroupTrainer, attach, dynagroup_trainer  # noqa: E402
from tests.integrations import jobs, toys  # noqa: E402
from tests.integrations.jobs import parameters, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = [" ".join(f"w{(7 * i + k) % 40}" for k in range(2 + (11 * i) % 37)) for i in range(48)]


def tokenizer():
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.train_from_iterator(TEXTS, trainers.WordLevelTrainer(vocab_size=64, special_tokens=["<pad>", "</s>", "<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def test_sft_makes_the_updates_of_fixed_batches(tmp_path):
    def run(fits):
        args = trl.SFTConfig(
            str(tmp_path / str(fits)), per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=6,
            learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
            logging_steps=3, dataloader_pin_memory=False, gradient_checkpointing=False,
        )  # fmt: skip
        cls, extra = (
            (dynagroup_trainer(trl.SFTTrainer), {"dynagroup": TokenBudget(160)}) if fits else (trl.SFTTrainer, {})
        )
        found = cls(
            toys.causal_lm(),
            args,
            train_dataset=Dataset.from_dict({"text": TEXTS}),
            processing_class=tokenizer(),
            **extra,
        )
        found.train()
        return parameters(found.model), found

    (fixed, plain), (ours, fitted) = run(False), run(True)
    assert (fixed - ours).abs().max() < 1e-5
    assert fitted.update_loader.stats.padded_tokens < 0.9 * sum(12 * 38 for _ in range(6))
    logs = [entry for entry in fitted.state.log_history if "loss" in entry]
    assert logs[0]["mean_token_accuracy"] >= 0
    assert logs[0]["num_tokens"] == [e for e in plain.state.log_history if "loss" in e][0]["num_tokens"]
    assert logs[0]["train_coverage"] == 0.75


def preferences(count=24):
    words = [text.split() for text in TEXTS]
    return Dataset.from_dict(
        {
            "prompt": [" ".join(w[: 1 + len(w) // 3]) for w in words[:count]],
            "chosen": [" ".join(w[len(w) // 3 :]) for w in words[:count]],
            "rejected": [" ".join(w[: 1 + (5 * i) % len(w)]) for i, w in enumerate(words[:count])],
        }
    )


def dpo(folder, fits, *, data=None, **changes):
    args = trl.DPOConfig(
        str(folder), **{"per_device_train_batch_size": 12, "max_steps": 2, "learning_rate": 1e-2, **changes}, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False,
        gradient_checkpointing=False, max_grad_norm=0.0, per_device_eval_batch_size=24,
    )  # fmt: skip
    data = preferences() if data is None else data
    cls, extra = (dynagroup_trainer(trl.DPOTrainer), {"dynagroup": TokenBudget(280)}) if fits else (trl.DPOTrainer, {})
    torch.manual_seed(1)
    reference = toys.causal_lm()
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return cls(
        toys.causal_lm(), reference, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), **extra
    )


FIGURES = [
    "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
    "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy", "num_tokens",
]  # fmt: skip


def logged(run):
    run.train()
    found = [entry for entry in run.state.log_history if "rewards/chosen" in entry]
    return [{key: entry[key] for key in FIGURES} for entry in found], run.evaluate()


def test_dpo_logs_what_one_batch_an_update_logs(tmp_path):
    """A figure of an update is a mean over all its pairs, or all its tokens, however unequal the batches are."""
    (expected, whole), (found, evaluated) = (logged(dpo(tmp_path / str(fits), fits)) for fits in (False, True))
    assert len(found) == len(expected) == 2
    for ours, plain in zip(found, expected, strict=True):
        assert ours == pytest.approx(plain, rel=1e-4, abs=1e-5)
    figures = [f"eval_{key}" for key in FIGURES]
    assert {k: evaluated[k] for k in figures} == pytest.approx({k: whole[k] for k in figures}, rel=1e-4, abs=1e-5)


def test_preferences_need_no_lengths(tmp_path):
    run = dpo(tmp_path, True)
    run.train()
    budget = run.update_loader.budget
    assert run.update_loader.stats.largest_batch > run.update_loader.stats.smallest_batch
    seen = []
    run.model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["input_ids"].numel()), with_kwargs=True)
    run.evaluate()
    assert max(seen) <= budget.max_tokens


@pytest.mark.parametrize("loss_type", ["aot", ["sigmoid", "aot_unpaired"]])
def test_losses_that_compare_the_pairs_of_a_batch_are_refused(tmp_path, loss_type):
    with pytest.raises(ConfigError, match="loss_type='aot.*it sorts the pairs of a batch"):
        dpo(tmp_path, True, loss_type=loss_type)


def test_trainers_that_need_their_own_batches_are_refused(tmp_path):
    from dynagroup.integrations.config import COUPLED

    run = trainer("causal", tmp_path, fits=False)
    for original in [getattr(trl, name) for name in COUPLED if hasattr(trl, name)]:
        run.__class__ = type("Mine", (original,), {})
        with pytest.raises(ConfigError, match=f"TRL's {original.__name__} does not go with dynagroup"):
            attach(run, 100)


def test_what_other_trainers_note_is_left_alone(tmp_path, monkeypatch):
    """``_metrics`` is TRL's own where the loss is TRL's; a Trainer of the user's may keep what it likes under that name."""
    mine = type("Mine", (DynagroupTrainer,), {"_metrics": {"train": "mine"}})
    monkeypatch.setattr(jobs, "DynagroupTrainer", mine)
    run = trainer("causal", tmp_path, fits=True, max_steps=1)
    run.train()
    assert (type(run), run.state.global_step, run._metrics) == (mine, 1, {"train": "mine"})


@pytest.mark.slow
def test_a_compiled_model_agrees(tmp_path):
    found = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        run = trainer("causal", tmp_path, fits=True, exact_loss=True, max_steps=3, **settings)
        run.train()
        found.append(parameters(run.model))
    torch._dynamo.reset()
    assert (found[0] - found[1]).abs().max() < 1e-8
