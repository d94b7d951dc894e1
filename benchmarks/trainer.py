"""What the Trainer adapter costs on equal batches, and what it gains on the lengths that texts have."""

from __future__ import annotations

import ctypes
import math
import platform
import tempfile
import threading
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from benchmarks.data import Numbered, collate, lognormal
from benchmarks.machine import Machine, build, cpu_seconds
from benchmarks.record import spread
from dynagroup import TokenBudget
from dynagroup.integrations.hf import DynagroupConfig, DynagroupTrainer

LONGEST, BATCH, ACCUMULATION = 128, 8, 4
WARM_UP = 3
"""Updates of each that are not counted: the first ones plan, ask the model about its loss, and fill caches."""


def steady_memory() -> None:
    """One heap for both trainings that is never given back: otherwise page faults decide which of them is faster."""
    if platform.libc_ver()[0] == "glibc":
        arena_max, trim_threshold, mmap_threshold = -8, -1, -3  # malloc.h
        for option, value in ((arena_max, 1), (trim_threshold, 2**31 - 1), (mmap_threshold, 2**25)):
            ctypes.CDLL(None).mallopt(option, value)


class Turns(TrainerCallback):
    """One of two trainings in one process that take turns, update by update; CPU seconds of each of its updates.

    Args:
        mine, other: held by whoever may run; the first training's is open from the start.
    """

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore) -> None:
        self.mine, self.other, self.seconds = mine, other, []
        self.loss = math.nan

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.mine.acquire()
        self.began = cpu_seconds()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(cpu_seconds() - self.began)
        self.other.release()
        self.on_train_begin()

    def run(self, trainer: Trainer) -> None:
        try:
            self.loss = trainer.train().training_loss
        finally:
            self.other.release(1 << 20)  # nothing holds the other up any more


def trainer(size: str, lengths: np.ndarray, fits: bool, folder: str, turns: Turns) -> Trainer:
    updates = len(lengths) // (BATCH * ACCUMULATION)
    args = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION, max_steps=updates, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    data = Words(lengths)
    common: dict[str, Any] = {"args": args, "train_dataset": data, "data_collator": collate, "callbacks": [turns]}
    if not fits:
        return Trainer(build(size), **common)
    config = DynagroupConfig(budget=TokenBudget(BATCH * LONGEST), lengths=lengths)
    return DynagroupTrainer(build(size), dynagroup=config, **common)


class Words(Numbered):
    """Numbered samples whose tokens every model has."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values.clamp(max=32) for name, values in super().__getitem__(index).items()}


def take_turns(size: str, lengths: np.ndarray, fits: tuple[bool, bool]) -> list[Turns]:
    """Two Trainers, of which these have batches that fit."""
    first, second = threading.Semaphore(1), threading.Semaphore(0)
    turns = [Turns(first, second), Turns(second, first)]
    with tempfile.TemporaryDirectory() as folder:
        trainers = [trainer(size, lengths, fits[me], f"{folder}/{me}", turns[me]) for me in (0, 1)]
        threads = [threading.Thread(target=one.run, args=(made,)) for one, made in zip(turns, trainers, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return turns


def pairs(size: str, lengths: np.ndarray, sessions: int, *, control: bool = False) -> dict[str, Any]:
    """The adapter's CPU seconds over the plain Trainer's, update by update; which is built first changes with the session.

    Args:
        control: a second plain Trainer instead of the adapter.
    """
    seconds: list[list[np.ndarray]] = [[], []]
    losses = [math.nan, math.nan]
    for session in range(sessions):
        found = take_turns(size, lengths, (False, not control) if session % 2 else (not control, False))
        for which, one in enumerate(found if session % 2 else found[::-1]):
            seconds[which].append(np.asarray(one.seconds[WARM_UP:]))
            losses[which] = one.loss
    plain, other = (np.concatenate(parts) for parts in seconds)
    return {
        "num_pairs": len(plain),
        "cpu_s_per_update": [float(np.median(plain)), float(np.median(other))],
        "ratio": {**spread(other / plain), "median_95": median_95(other / plain)},
        "difference_ms": spread((other - plain) * 1e3),
        "training_loss": losses,
    }


def median_95(values: np.ndarray) -> list[float]:
    """The order statistics that hold the true median with 95 % probability."""
    ordered, middle, off = np.sort(values), len(values) // 2, round(0.98 * math.sqrt(len(values)))
    return [float(ordered[max(middle - off, 0)]), float(ordered[min(middle + off, len(ordered) - 1)])]


def adapter(_machine: Machine, updates: int = 30, sessions: int = 3) -> dict[str, Any]:
    """CPU seconds of an update under our Trainer over the plain one's, update by update."""
    logging.set_verbosity_error()
    steady_memory()
    samples = updates * BATCH * ACCUMULATION
    equal, texts = np.full(samples, LONGEST), lognormal(samples, mean=75, cv=0.95, shortest=8, longest=LONGEST)
    setup = {"samples_per_update": BATCH * ACCUMULATION, "fixed_batch": BATCH, "updates": updates, "sessions": sessions}
    return {
        "setup": setup,
        "plain_over_plain": pairs("small", equal, sessions, control=True),
        "equal_batches": pairs("small", equal, sessions),
        "tiny_equal_batches": pairs("tiny", equal, sessions),
        "texts": pairs("small", texts, sessions),
    }
