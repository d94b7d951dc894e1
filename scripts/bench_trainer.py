"""What the Trainer adapter costs on equal batches, and what it gains on the lengths that texts have.

usage: python scripts/bench_trainer.py [--repeats 7] [--updates 24]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import results
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from dynagroup import TokenBudget
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import DynagroupTrainer

VOCAB, LONGEST, BATCH, ACCUMULATION = 2048, 128, 8, 4


class Clock(TrainerCallback):
    """CPU seconds of each update: this process's, so that other work on the machine does not count."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self.last)
        self.last = now


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.where(ids > 0, ids, -100)}


def run(lengths: np.ndarray, updates: int, fits: bool, folder: str) -> tuple[list[float], float]:
    """CPU seconds of each update, and the last loss."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(1, VOCAB, n).tolist()} for n in lengths]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LONGEST, pad_token_id=0,
        )
    )  # fmt: skip
    args = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION, max_steps=updates, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    clock = Clock()
    common: dict[str, Any] = {"args": args, "train_dataset": rows, "data_collator": collate, "callbacks": [clock]}
    if fits:
        config = DynagroupConfig(budget=TokenBudget(BATCH * LONGEST), lengths=lengths)
        found = DynagroupTrainer(model, dynagroup=config, **common).train()
    else:
        found = Trainer(model, **common).train()
    return clock.seconds[1:], found.training_loss


def compare(lengths: np.ndarray, repeats: int, updates: int) -> dict[str, Any]:
    ratios, loss, totals = [], {}, {False: 0.0, True: 0.0}
    for repeat in range(repeats):
        medians = {}
        for fits in (False, True) if repeat % 2 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                seconds, loss[fits] = run(lengths, updates, fits, folder)
            medians[fits] = statistics.median(seconds)
            totals[fits] += sum(seconds)
        ratios.append(medians[True] / medians[False])
    return {
        "cpu_s_per_update_fixed": totals[False] / repeats / (updates - 1),
        "cpu_s_per_update_dynagroup": totals[True] / repeats / (updates - 1),
        "ratio_median": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "training_loss_fixed": loss[False],
        "training_loss_dynagroup": loss[True],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--updates", type=int, default=24)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    samples = given.updates * BATCH * ACCUMULATION
    varied = np.random.default_rng(0).lognormal(4.0, 0.8, samples).clip(8, LONGEST).astype(int)
    figures = {
        "setup": {
            "model": "Llama, 2 layers of 64", "samples_per_update": BATCH * ACCUMULATION, "fixed_batch": BATCH,
            "budget": BATCH * LONGEST, "threads": 1, "repeats": given.repeats, "updates": given.updates,
        },
        "equal_batches": compare(np.full(samples, LONGEST), given.repeats, given.updates),
        "texts": compare(varied, given.repeats, given.updates),
    }  # fmt: skip
    print(results.save("trainer", figures, "transformers", "accelerate"))
    for name in ("equal_batches", "texts"):
        print(name, {key: round(value, 4) for key, value in figures[name].items()})


if __name__ == "__main__":
    main()
