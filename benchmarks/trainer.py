"""What the Trainer adapter costs on equal batches, and what it gains on the lengths that texts have."""

import ctypes
import platform
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from benchmarks.data import collate, lognormal, sample_of
from benchmarks.machine import Machine, build, cpu_seconds
from benchmarks.record import spread
from dynagroup import TokenBudget
from dynagroup.integrations.hf import DynagroupConfig, DynagroupTrainer

LONGEST, BATCH, ACCUMULATION, SESSIONS = 128, 8, 4, 4
WARM_UP = 3
"""Updates of each that are not counted: the first ones plan, ask the model about its loss, and fill caches."""


def steady_memory() -> None:
    """A heap that is never given back: otherwise page faults decide which training is faster."""
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        for option, value in ((trim_threshold, 2**31 - 1), (mmap_threshold, 2**25)):
            ctypes.CDLL(None).mallopt(option, value)


def trained(size: str, lengths: np.ndarray, way: str) -> np.ndarray:
    """CPU seconds of each update, under our Trainer (``"dynagroup"``) or the plain one with this sampling strategy."""
    after, ours = list[float](), way == "dynagroup"

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            after.append(cpu_seconds())

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            report_to=[],
            max_steps=len(lengths) // (BATCH * ACCUMULATION),
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            logging_strategy="no",
            dataloader_pin_memory=False,
            train_sampling_strategy="random" if ours else way,
        )
        data = [sample_of(torch.ones(n, dtype=torch.int64)) for n in lengths.tolist()]
        how: dict[str, Any] = {
            "train_dataset": data,
            "data_collator": collate,
            "callbacks": [Clock()],
        }
        config = DynagroupConfig(budget=TokenBudget(BATCH * LONGEST), lengths=lengths)
        made = partial(DynagroupTrainer, dynagroup=config) if ours else Trainer
        made(build(size), args, **how).train()
    return np.diff(after)[WARM_UP:]


def pairs(
    size: str, lengths: np.ndarray, way: str = "dynagroup", over: str = "random"
) -> dict[str, Any]:
    """CPU seconds of one way over another's, session by session (A, B, B, A, ...) and update by update."""
    seconds: tuple[list[np.ndarray], ...] = ([], [])
    for session in range(SESSIONS):
        for place in (0, 1) if session % 2 else (1, 0):
            seconds[place].append(trained(size, lengths, (over, way)[place]))
    plain, ours = map(np.concatenate, seconds)
    return {
        "num_pairs": len(plain),
        "ratio": spread(ours / plain),
        "difference_ms": spread((ours - plain) * 1e3),
    }


def adapter(_machine: Machine, updates: int = 30) -> dict[str, Any]:
    """CPU seconds of an update under our Trainer over the plain one's."""
    logging.set_verbosity_error()
    steady_memory()
    samples = updates * BATCH * ACCUMULATION
    equal, texts = (
        np.full(samples, LONGEST),
        lognormal(samples, mean=75, cv=0.95, shortest=8, longest=LONGEST),
    )
    return {
        "samples_per_update": BATCH * ACCUMULATION,
        "fixed_batch": BATCH,
        "updates": updates,
        "sessions": SESSIONS,
        "plain_over_plain": pairs("small", equal, way="random"),
        "equal_batches": pairs("small", equal),
        "tiny_equal_batches": pairs("tiny", equal),
        "texts": pairs("small", texts),
        "texts_batch_rebalance": pairs("small", texts, over="batch_rebalance"),
    }


SAMPLES, HELD_OUT, CUT, SEEDS = 1024, 512, 320, 3
WAYS = {"plain": None, "exact updates": "auto", "README": {"budget": "auto", "grouping": 50}}


def recipe(_machine: Machine) -> Iterator[dict[str, Any]]:
    """README's first recipe on docstrings, batches of 8 without accumulation: CPU seconds of an epoch, over updates after
    the first ones, and the loss on other docstrings after it; the ways of a seed in turns."""
    from benchmarks.train import loss_on, texts_of

    logging.set_verbosity_error()
    steady_memory()
    rows = [ids[:CUT] for ids in texts_of()]
    lengths = np.array([len(row) for row in rows[:SAMPLES]])
    ways: dict[str, Any] = {way: {"seconds": [], "held_out_loss": []} for way in WAYS}
    for seed in range(SEEDS):
        for way, settings in WAYS.items():
            model, seconds = trained_as_in_readme(rows[:SAMPLES], settings, seed)
            ways[way]["seconds"].append(float(seconds.sum()))
            ways[way]["held_out_loss"].append(loss_on(model, rows[SAMPLES : SAMPLES + HELD_OUT]))
        yield {
            "samples": SAMPLES,
            "batch": BATCH,
            "cv": float(lengths.std() / lengths.mean()),
            "fixed_padding": fixed_padding(lengths),
            "ways": ways,
        }


def fixed_padding(lengths: np.ndarray) -> float:
    """Padding of shuffled batches of eight."""
    order = np.random.default_rng(0).permutation(len(lengths))
    batches = lengths[order].reshape(-1, BATCH)
    return float(1 - lengths.sum() / (BATCH * batches.max(axis=1)).sum())


def trained_as_in_readme(
    rows: list[np.ndarray], settings: Any, seed: int
) -> tuple[Any, np.ndarray]:
    """Returns the model after an epoch, and the CPU seconds of each update but the first ones."""
    after = list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            after.append(cpu_seconds())

    model = build("small", seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            learning_rate=1e-3,
            seed=seed,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
        )
        data = Dataset.from_list([{"input_ids": row.tolist()} for row in rows])
        how: dict[str, Any] = {
            "train_dataset": data,
            "data_collator": as_labels,
            "callbacks": [Clock()],
        }
        if settings is None:
            trainer: Any = Trainer(model, args, **how)
        else:
            config = DynagroupConfig(**settings) if isinstance(settings, dict) else settings
            trainer = DynagroupTrainer(model, args, dynagroup=config, **how)
        trainer.train()
    return model, np.diff(after)[WARM_UP:]


def as_labels(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return collate([sample_of(torch.tensor(row["input_ids"])) for row in rows])
