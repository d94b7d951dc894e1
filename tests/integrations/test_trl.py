"""TRL's SFTTrainer and compiled models."""

from __future__ import annotations

import pytest
import torch

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from dynagroup import TokenBudget  # noqa: E402
from dynagroup.integrations.hf import dynagroup_trainer  # noqa: E402
from tests.integrations import toys  # noqa: E402
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


@pytest.mark.slow
def test_a_compiled_model_agrees(tmp_path):
    found = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        run = trainer("causal", tmp_path, fits=True, exact_loss=True, max_steps=3, **settings)
        run.train()
        found.append(parameters(run.model))
    torch._dynamo.reset()
    assert (found[0] - found[1]).abs().max() < 1e-8
