"""Runs of TRL's trainers, theirs and with batches that fit, importable from spawned ranks. All in float64."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import GPT2ForSequenceClassification

from dynagroup import TokenBudget
from dynagroup.integrations.hf import dynagroup_trainer
from tests import models
from tests.integrations import toys
from tests.integrations.jobs import parameters
from tests.integrations.test_trl import TEXTS, tokenizer

COMMON: dict[str, Any] = {
    "learning_rate": 1e-2, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "logging_steps": 1, "dataloader_pin_memory": False, "gradient_checkpointing": False, "max_grad_norm": 0.0,
}  # fmt: skip
UPDATE = 12
Run = tuple[torch.Tensor, list[float]]


def conversations() -> Dataset:
    """Prompts are not learned from, so no sample's first token counts, padded or not."""
    words = [text.split() for text in TEXTS]
    halves = [(" ".join(w[: len(w) // 2]), " " + " ".join(w[len(w) // 2 :])) for w in words]
    return Dataset.from_dict({"prompt": [a for a, _ in halves], "completion": [b for _, b in halves]})


def pairs() -> Dataset:
    words = [text.split() for text in TEXTS]
    return Dataset.from_dict(
        {
            "prompt": [" ".join(w[: 1 + len(w) // 3]) for w in words],
            "chosen": [" " + " ".join(w[len(w) // 3 :]) for w in words],
            "rejected": [" " + " ".join(w[: 1 + (5 * i) % len(w)]) for i, w in enumerate(words)],
        }
    )


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def trained(trainer_class: type, budget: TokenBudget | None, *args: Any, quiet: bool = True, **kwargs: Any) -> Any:
    with warnings.catch_warnings() if quiet else contextlib.nullcontext():
        if quiet:
            warnings.simplefilter("ignore")  # the libraries' own, in a process that is not pytest's
        if budget is not None:
            trainer_class, kwargs = dynagroup_trainer(trainer_class), {**kwargs, "dynagroup": budget}
        run = trainer_class(*args, processing_class=tokenizer(), **kwargs)
        run.train()
    return run


def found(run: Any) -> Run:
    return parameters(run.model), [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def sft(
    folder: Any,
    budget: TokenBudget | None = None,
    *,
    data: Dataset | None = None,
    loss: Any = toys.float64_causal_loss,
    quiet: bool = True,
    **changes: Any,
) -> Any:
    """Three updates of twelve samples; the loss stays in float64, which the models' own does not."""
    settings = {"per_device_train_batch_size": 4 // ranks(), "gradient_accumulation_steps": 3, "max_steps": 3}
    args = trl.SFTConfig(str(folder), **{**COMMON, **settings, "max_length": None, **changes})
    data = conversations() if data is None else data
    how = {"train_dataset": data, "compute_loss_func": loss, "quiet": quiet}
    return trained(trl.SFTTrainer, budget, toys.causal_lm(), args, **how)


def dpo(folder: Any, budget: TokenBudget | None = None) -> Any:
    args = trl.DPOConfig(str(folder), **COMMON, per_device_train_batch_size=UPDATE // ranks(), max_steps=2)
    torch.manual_seed(1)
    reference = toys.causal_lm()
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return trained(trl.DPOTrainer, budget, toys.causal_lm(), reference, args, train_dataset=pairs())


def reward(folder: Any, budget: TokenBudget | None = None) -> Any:
    args = trl.RewardConfig(str(folder), **COMMON, per_device_train_batch_size=UPDATE // ranks(), max_steps=2)
    torch.manual_seed(0)
    config = models.gpt2(num_labels=1, pad_token_id=0, n_positions=128)
    model = GPT2ForSequenceClassification(config).double()
    return trained(trl.RewardTrainer, budget, model, args, train_dataset=pairs())


def all_runs(folder: Any) -> dict[str, Run]:
    """Every trainer, theirs and ours, on this rank."""
    packed, padded = TokenBudget(100, layout="packed"), TokenBudget(280)
    return {
        "sft, padded": found(sft(folder)),
        "sft, packed": found(sft(folder, packed, padding_free=True)),
        "dpo": found(dpo(folder)),
        "dpo, ours": found(dpo(folder, padded)),
        "reward": found(reward(folder)),
        "reward, ours": found(reward(folder, padded)),
    }
