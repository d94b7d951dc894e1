"""What the Trainer adapter costs on equal batches, and what it gains on the lengths that texts have."""

from __future__ import annotations

import ctypes
import math
import platform
import tempfile
import threading
import time
import warnings
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from dynagroup import TokenBudget
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import DynagroupTrainer

LONGEST, BATCH, ACCUMULATION = 128, 8, 4
MODEL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
WARM_UP = 3
"""Updates of each that are not counted: the first ones plan, ask the model about its loss, and fill caches."""


def steady_memory() -> None:
    """One heap for both trainings that is never given back: otherwise page faults decide which of them is faster."""
    if platform.libc_ver()[0] == "glibc":
        arena_max, trim_threshold, mmap_threshold = -8, -1, -3  # malloc.h
        for option, value in ((arena_max, 1), (trim_threshold, 2**31 - 1), (mmap_threshold, 2**25)):
            ctypes.CDLL(None).mallopt(option, value)


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


def trainer(model: dict[str, Any], lengths: np.ndarray, updates: int, fits: bool, folder: str, clock: Clock) -> Trainer:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(1, model["vocab_size"], n).tolist()} for n in lengths]
    net = LlamaForCausalLM(LlamaConfig(**model, max_position_embeddings=LONGEST, pad_token_id=0))
    args = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION, max_steps=updates, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    common: dict[str, Any] = {"args": args, "train_dataset": rows, "data_collator": collate, "callbacks": [clock]}
    if not fits:
        return Trainer(net, **common)
    config = DynagroupConfig(budget=TokenBudget(BATCH * LONGEST), lengths=lengths)
    return DynagroupTrainer(net, dynagroup=config, **common)


def take_turns(
    model: dict[str, Any], lengths: np.ndarray, updates: int, fits: tuple[bool, bool]
) -> tuple[list[np.ndarray], list[float]]:
    """CPU seconds of each update and the training loss, of two Trainers; ``fits``: which of them has batches that fit."""
    turns = Turns()
    clocks = [Clock(turns, me) for me in (0, 1)]
    losses: list[float] = [math.nan, math.nan]
    with tempfile.TemporaryDirectory() as folder:
        trainers = [trainer(model, lengths, updates, fits[me], f"{folder}/{me}", clocks[me]) for me in (0, 1)]

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


def pairs(
    model: dict[str, Any], lengths: np.ndarray, updates: int, sessions: int, *, first: bool, second: bool
) -> dict[str, Any]:
    """The second Trainer's CPU seconds over the first's, update by update; which is built first changes with the session."""
    seconds: list[list[np.ndarray]] = [[], []]
    losses = [math.nan, math.nan]
    for session in range(sessions):
        places = (0, 1) if session % 2 else (1, 0)
        found, lost = take_turns(model, lengths, updates, (first, second) if session % 2 else (second, first))
        for which, place in enumerate(places):
            seconds[which].append(found[place])
            losses[which] = lost[place]
    one, other = (np.concatenate(parts) for parts in seconds)
    return {
        "num_pairs": len(one),
        "cpu_s_per_update": [float(np.median(one)), float(np.median(other))],
        "ratio": spread(other / one),
        "ratio_median_by_session": [float(np.median(b / a)) for a, b in zip(*seconds, strict=True)],
        "difference_ms": spread((other - one) * 1e3),
        "training_loss": losses,
    }


def spread(values: np.ndarray) -> dict[str, Any]:
    """Median and quartiles, and the order statistics that hold the true median with 95 % probability."""
    ordered, off = np.sort(values), round(0.98 * math.sqrt(len(values)))
    middle = len(values) // 2
    return {
        "median": float(np.median(values)),
        "quartiles": [float(q) for q in np.quantile(values, [0.25, 0.75])],
        "median_95": [float(ordered[middle - off]), float(ordered[middle + off])],
    }


def adapter(updates: int = 30, sessions: int = 3) -> dict[str, Any]:
    """CPU seconds of an update under our Trainer over the plain one's, update by update."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    steady_memory()
    samples = updates * BATCH * ACCUMULATION
    varied = np.random.default_rng(0).lognormal(4.0, 0.8, samples).clip(8, LONGEST).astype(int)
    equal, sizes = np.full(samples, LONGEST), (updates, sessions)
    return {
        "setup": {
            "model": MODEL, "tiny": TINY, "samples_per_update": BATCH * ACCUMULATION, "fixed_batch": BATCH,
            "budget": BATCH * LONGEST, "threads": 1, "updates": updates, "sessions": sessions, "warm_up": WARM_UP,
        },
        "plain_over_plain": pairs(MODEL, equal, *sizes, first=False, second=False),
        "equal_batches": pairs(MODEL, equal, *sizes, first=False, second=True),
        "tiny_plain_over_plain": pairs(TINY, equal, *sizes, first=False, second=False),
        "tiny_equal_batches": pairs(TINY, equal, *sizes, first=False, second=True),
        "texts": pairs(MODEL, varied, *sizes, first=False, second=True),
    }  # fmt: skip
