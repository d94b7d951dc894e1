"""What the Trainer adapter costs on equal batches, and what it gains on the lengths that texts have.

usage: python scripts/bench_trainer.py [--updates 200]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
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
WARM_UP = 3
"""Updates of each that are not counted: the first ones plan, ask the model about its loss, and fill caches."""


class Turns:
    """Two trainings in one process that take turns, update by update: A, B, B, A, A, B, ... Only one runs at a time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.finished = 0
        self.ended: set[int] = set()

    def of(self) -> int:
        return (self.finished + 1) // 2 % 2

    def wait_for(self, me: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.of() == me or 1 - me in self.ended)

    def hand_over(self) -> None:
        with self.changed:
            self.finished += 1
            self.changed.notify_all()

    def end(self, me: int) -> None:
        with self.changed:
            self.ended.add(me)
            self.changed.notify_all()


class Clock(TrainerCallback):
    """CPU seconds of each update: this process's, so that other work on the machine does not count."""

    def __init__(self, turns: Turns, me: int) -> None:
        self.turns, self.me = turns, me
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.turns.wait_for(self.me)
        self.last = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self.last)
        self.turns.hand_over()
        self.on_train_begin()


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.where(ids > 0, ids, -100)}


def trainer(lengths: np.ndarray, updates: int, fits: bool, folder: str, clock: Clock) -> Trainer:
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
    common: dict[str, Any] = {"args": args, "train_dataset": rows, "data_collator": collate, "callbacks": [clock]}
    if not fits:
        return Trainer(model, **common)
    config = DynagroupConfig(budget=TokenBudget(BATCH * LONGEST), lengths=lengths)
    return DynagroupTrainer(model, dynagroup=config, **common)


def both(lengths: np.ndarray, updates: int, folder: str) -> tuple[list[np.ndarray], list[float]]:
    """CPU seconds of each update and the training loss, of fixed batches and of batches that fit."""
    turns = Turns()
    clocks = [Clock(turns, me) for me in (0, 1)]
    trainers = [trainer(lengths, updates, bool(me), f"{folder}/{me}", clocks[me]) for me in (0, 1)]
    losses: list[float] = [math.nan, math.nan]

    def run(me: int) -> None:
        try:
            losses[me] = trainers[me].train().training_loss
        finally:
            turns.end(me)

    threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [np.asarray(clock.seconds[WARM_UP:]) for clock in clocks], losses


def compare(lengths: np.ndarray, updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (fixed, fits), losses = both(lengths, updates, folder)
    ratios = np.sort(fits / fixed)
    off = round(0.98 * math.sqrt(len(ratios)))  # the order statistics that hold the median with 95 %
    middle = len(ratios) // 2
    return {
        "num_pairs": len(ratios),
        "cpu_s_per_update_fixed": float(np.median(fixed)),
        "cpu_s_per_update_dynagroup": float(np.median(fits)),
        "ratio_median": float(np.median(ratios)),
        "ratio_quartiles": [float(q) for q in np.quantile(ratios, [0.25, 0.75])],
        "ratio_median_95": [float(ratios[middle - off]), float(ratios[middle + off])],
        "training_loss_fixed": losses[0],
        "training_loss_dynagroup": losses[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    samples = given.updates * BATCH * ACCUMULATION
    varied = np.random.default_rng(0).lognormal(4.0, 0.8, samples).clip(8, LONGEST).astype(int)
    figures = {
        "setup": {
            "model": "Llama, 2 layers of 64", "samples_per_update": BATCH * ACCUMULATION, "fixed_batch": BATCH,
            "budget": BATCH * LONGEST, "threads": 1, "updates": given.updates, "warm_up": WARM_UP,
        },
        "equal_batches": compare(np.full(samples, LONGEST), given.updates),
        "texts": compare(varied, given.updates),
    }  # fmt: skip
    print(results.save("trainer", figures, "transformers", "accelerate"))
    for name in ("equal_batches", "texts"):
        print(name, json.dumps(figures[name]))


if __name__ == "__main__":
    main()
