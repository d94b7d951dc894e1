"""The same updates, cut into the fewest batches that fit and for least predicted time: measured CPU seconds, on one thread.

``loop``: a plain loop with the demo's texts, model and updates, under its budget and under one that never binds; ``trainer``:
the Trainer adapter at its defaults (one batch of 16 an update, no accumulation), whose budget holds a whole update.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.utils import logging

from benchmarks.trainer import MODEL, collate
from dynagroup import LengthAwareBatchSampler, TokenBudget, Work
from dynagroup.demo.corpus import load_texts, train_tokenizer
from dynagroup.demo.training import Run, TimeLimit, train
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import DynagroupTrainer
from dynagroup.lengths import measure_lengths
from dynagroup.text import TokenizingCollator

__all__ = ["objectives"]

LONGEST, UPDATES, GROUP, LIMIT_S = 512, 8, 128, 300.0
PLANS: dict[str, dict[str, Any]] = {
    "fewest": {"objective": "fewest"},
    "time": {"work": Work()},
    "time, a step costs 128": {"work": Work(per_step=128)},
}


def loop(budget: int) -> dict[str, Any]:
    """Samples/s of each plan's training; they take turns, update by update, and start from the same weights."""
    texts = load_texts(None, None, None, "train")
    tokenizer = train_tokenizer(texts)
    lengths = np.minimum(measure_lengths(texts, tokenizer), LONGEST).astype(np.int32)
    chosen = np.random.default_rng(0).permutation(len(texts))[: UPDATES * GROUP]

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**MODEL, "vocab_size": len(tokenizer)}, max_position_embeddings=LONGEST))

    runs = []
    for name, how in PLANS.items():
        sampler = LengthAwareBatchSampler(
            lengths, TokenBudget(budget), order=chosen, samples_per_update=GROUP, rank=0, world_size=1, **how
        )
        ends, batches = (np.flatnonzero(sampler.plan.update_ends) + 1).tolist(), list(sampler)
        runs.append(Run(name, [batches[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]))
    limit, device = TimeLimit(LIMIT_S), torch.device("cpu")
    collator = TokenizingCollator(tokenizer, LONGEST, 1, labels=True)
    norms: list[float] = []

    def after(model: torch.nn.Module) -> float:
        norms.append(float(sum(p.detach().double().pow(2).sum() for p in model.parameters())))
        return norms[-1]

    trainings = [train(run, texts, collator, make, device, 3e-3, limit, after) for run in runs]
    for _ in zip_longest(*trainings):
        pass
    return {
        run.name: {
            "samples_per_s": GROUP * len(run.seconds) / run.total_s,
            "steps": len(run.batches),
            "padding": 1 - int(lengths[np.concatenate(run.batches)].sum()) / int(run.padded_tokens(lengths).sum()),
            "squares_of_weights": run.loss,
        }
        for run in runs
    }


class Clock(TrainerCallback):
    """CPU seconds of the updates but the first three."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seconds, self.last = [], time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self.last)
        self.last = now


def trainer(samples: int = 16, updates: int = 24) -> dict[str, Any]:
    """The same for the Trainer adapter; each plan's training runs twice, in the order A, B, C, C, B, A."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4.5, 0.9, samples * updates).clip(8, LONGEST).astype(int)
    rows = [{"input_ids": rng.integers(1, MODEL["vocab_size"], n).tolist()} for n in lengths]
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in PLANS}
    for name in [*PLANS, *reversed(PLANS)]:
        torch.manual_seed(0)
        net, clock = (
            LlamaForCausalLM(LlamaConfig(**MODEL, max_position_embeddings=LONGEST, pad_token_id=0)),
            Clock(),
        )
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder, per_device_train_batch_size=samples, max_steps=updates, report_to=[], save_strategy="no", use_cpu=True,
                disable_tqdm=True, remove_unused_columns=False, logging_strategy="no", dataloader_pin_memory=False,
            )  # fmt: skip
            config = DynagroupConfig(budget=TokenBudget(samples * LONGEST), lengths=lengths, plan=PLANS[name])
            run = DynagroupTrainer(
                net, dynagroup=config, args=args, train_dataset=rows, data_collator=collate, callbacks=[clock]
            )
            loss = run.train().training_loss
        stats = run.update_loader.stats
        found[name]["seconds"] += clock.seconds[3:]
        found[name] |= {"steps": stats.steps, "padding": stats.padding, "training_loss": loss}
    return {
        name: {"samples_per_s": samples * len(run["seconds"]) / sum(run.pop("seconds")), **run}
        for name, run in found.items()
    }


def objectives() -> dict[str, Any]:
    """Figures of the loop at two budgets, and of the Trainer."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    return {"loop, budget 8,192": loop(8192), "loop, budget 65,536": loop(65_536), "Trainer, updates of 16": trainer()}
