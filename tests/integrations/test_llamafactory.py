"""LLaMA-Factory's own trainers, template and collators. Needs an environment of its own: scripts/test_llamafactory.sh."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip(
    "llamafactory", reason="LLaMA-Factory has an environment of its own: bash scripts/test_llamafactory.sh"
)
from datasets import Dataset  # noqa: E402
from llamafactory.data import PairwiseDataCollatorWithPadding  # noqa: E402
from llamafactory.data.template import get_template_and_fix_tokenizer  # noqa: E402
from llamafactory.hparams import DataArguments, FinetuningArguments  # noqa: E402
from llamafactory.hparams.training_args import TrainingArguments  # noqa: E402
from llamafactory.train.rm.trainer import PairwiseTrainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from dynagroup import TokenBudget  # noqa: E402
from dynagroup.integrations.hf_data import UpdateItems
from dynagroup.integrations.llamafactory import dynamic_batching, stage_trainer  # noqa: E402
from dynagroup.update.planned import PlannedDataLoader  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import parameters  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class ValueHead(torch.nn.Module):
    """The reward model's interface: (logits, loss, values)."""

    def __init__(self):
        super().__init__()
        self.pretrained_model = toys.causal_lm()
        self.config, self.v_head = self.pretrained_model.config, torch.nn.Linear(16, 1).double()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        out = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return out.logits, None, self.v_head(out.hidden_states[-1]).squeeze(-1)


SIDES = {"chosen": "chosen", "rejected": "rejected"}


def pairs():
    rng, rows = np.random.default_rng(0), []
    for size in rng.integers(6, 40, 32):
        row = {"images": None, "videos": None, "audios": None}
        for side, length in (("chosen", size), ("rejected", size // 2 + 1)):
            ids = rng.integers(4, toys.VOCAB, length).tolist()
            row |= {f"{side}_input_ids": ids, f"{side}_labels": ids, f"{side}_attention_mask": [1] * len(ids)}
        rows.append(row)
    return Dataset.from_list(rows)


def test_a_reward_model_learns_what_it_learns_from_fixed_batches(tmp_path):
    found, tok = [], toys.tokenizer()
    template = get_template_and_fix_tokenizer(tok, DataArguments(template="empty"))
    collate = PairwiseDataCollatorWithPadding(template=template, model=None, tokenizer=tok, label_pad_token_id=-100)
    for make in (PairwiseTrainer, stage_trainer("rm", TokenBudget(320))):
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, report_to=[],
            learning_rate=1e-2, save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False,
        )  # fmt: skip
        run = make(
            model=ValueHead(), args=args, finetuning_args=FinetuningArguments(stage="rm", finetuning_type="full"),
            data_collator=collate, train_dataset=pairs(), tokenizer=tok, processor=None,
        )  # fmt: skip
        run.train()
        found.append(parameters(run.model))
    assert run.update_loader.stats.batches > 4, "updates were divided"
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_workflows_are_as_they_were_after_the_block():
    from llamafactory.train.dpo import trainer as dpo
    from llamafactory.train.sft import workflow as sft

    before = sft.CustomSeq2SeqTrainer, dpo.CustomDPOTrainer
    with dynamic_batching(TokenBudget(128)):
        assert sft.CustomSeq2SeqTrainer is not before[0]
        assert dpo.CustomDPOTrainer is not before[1]
    assert (sft.CustomSeq2SeqTrainer, dpo.CustomDPOTrainer) == before


class Watch(TrainerCallback):
    """Remembers what the workflow trained with."""

    def on_train_end(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self.parameters, self.loader, self.num_updates = parameters(model), train_dataloader, state.global_step


def saved(folder):
    """A model, its tokenizer and a data set of pairs and texts, as LLaMA-Factory reads them from disk."""
    toys.causal_lm().float().save_pretrained(folder / "model")
    toys.tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)

    def text(size):
        return " ".join(f"w{i}" for i in rng.integers(4, toys.VOCAB, size))

    sizes = [int(size) for size in rng.integers(2, 40, 32)]
    talks = [{"instruction": text(4), "output": text(size)} for size in sizes]
    pairs = [{"instruction": text(4), "chosen": text(size), "rejected": text(size // 2 + 1)} for size in sizes]
    data = folder / "data"
    data.mkdir()
    (data / "talks.json").write_text(json.dumps(talks))
    (data / "pairs.json").write_text(json.dumps(pairs))
    info = {
        "talks": {"file_name": "talks.json", "columns": {"prompt": "instruction", "response": "output"}},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"prompt": "instruction", **SIDES}},
    }
    (data / "dataset_info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("stage", ["sft", "pt", "dpo"])
def test_the_whole_program_makes_the_updates_of_fixed_batches(stage, tmp_path):
    from llamafactory.train.tuner import run_exp

    saved(tmp_path)

    def run(name):
        watch = Watch()
        arguments = {
            "model_name_or_path": str(tmp_path / "model"), "stage": stage, "do_train": True, "finetuning_type": "full",
            "dataset_dir": str(tmp_path / "data"), "dataset": "pairs" if stage == "dpo" else "talks", "template": "empty",
            "output_dir": str(tmp_path / name), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
            "num_train_epochs": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "save_strategy": "no",
            "cutoff_len": 16 if stage == "pt" else 128, "overwrite_cache": True, "dataloader_pin_memory": False,
            "disable_tqdm": True, "disable_gradient_checkpointing": True,
        }  # fmt: skip
        run_exp(arguments, callbacks=[watch])
        return watch

    fixed = run("fixed")
    with dynamic_batching(TokenBudget(96 if stage == "pt" else 320)):  # texts are packed into blocks of 16 tokens
        ours = run("ours")
    assert not isinstance(fixed.loader, UpdateItems)
    assert isinstance(ours.loader.loader, PlannedDataLoader)
    assert ours.num_updates == fixed.num_updates >= 2
    assert ours.loader.loader.stats.batches > ours.num_updates, "updates were divided"
    assert (fixed.parameters - ours.parameters).abs().max() < 2e-5
    assert (fixed.parameters - parameters(toys.causal_lm().float())).abs().max() > 1e-2, "nothing was trained"
    assert (tmp_path / "ours" / "model.safetensors").exists()
