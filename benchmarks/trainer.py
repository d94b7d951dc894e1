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

LONGEST = 128
BATCH = 8
ACCUMULATION = 4
SESSIONS = 4
WARM_UP = 3
"""Updates of each that are not counted: the first ones plan, ask the model about its loss, and fill caches."""


def steady_memory() -> None:
    """A heap that is never given back: otherwise page faults decide which training is faster."""
    if platform.libc_ver()[0] == "glibc":
        trim_threshold = -1  # malloc.h
        mmap_threshold = -3
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)


class Clock(TrainerCallback):
    """CPU seconds at the end of each update."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(cpu_seconds())

    def seconds(self) -> np.ndarray:
        """Of each update but the first ones."""
        return np.diff(self.ends)[WARM_UP:]


def arguments(folder: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **options,
    )


def trained(size: str, lengths: np.ndarray, way: str) -> np.ndarray:
    """CPU seconds of each update, under our Trainer (``"dynagroup"``) or the plain one with this sampling strategy."""
    trainer_class: Any = Trainer
    strategy = way
    if way == "dynagroup":
        config = DynagroupConfig(budget=TokenBudget(BATCH * LONGEST), lengths=lengths)
        trainer_class = partial(DynagroupTrainer, dynagroup=config)
        strategy = "random"
    clock = Clock()
    data = [sample_of(torch.ones(length, dtype=torch.int64)) for length in lengths.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=len(lengths) // (BATCH * ACCUMULATION),
            remove_unused_columns=False,
            train_sampling_strategy=strategy,
        )
        trainer = trainer_class(
            build(size), args, train_dataset=data, data_collator=collate, callbacks=[clock]
        )
        trainer.train()
    return clock.seconds()


def pairs(
    size: str, lengths: np.ndarray, way: str = "dynagroup", over: str = "random"
) -> dict[str, Any]:
    """CPU seconds of one way over another's, session by session (A, B, B, A, ...) and update by update."""
    of_way: list[np.ndarray] = []
    of_other: list[np.ndarray] = []
    for session in range(SESSIONS):
        if session % 2:
            of_other.append(trained(size, lengths, over))
            of_way.append(trained(size, lengths, way))
        else:
            of_way.append(trained(size, lengths, way))
            of_other.append(trained(size, lengths, over))
    ours = np.concatenate(of_way)
    others = np.concatenate(of_other)
    return {
        "num_pairs": len(others),
        "ratio": spread(ours / others),
        "difference_ms": spread((ours - others) * 1e3),
    }


def adapter(_machine: Machine, updates: int = 30) -> dict[str, Any]:
    """CPU seconds of an update under our Trainer over the plain one's."""
    logging.set_verbosity_error()
    steady_memory()
    samples = updates * BATCH * ACCUMULATION
    equal = np.full(samples, LONGEST)
    texts = lognormal(samples, mean=75, cv=0.95, shortest=8, longest=LONGEST)
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


SAMPLES = 1024
HELD_OUT = 512
CUT = 320
"""Tokens to which texts are cut."""
SEEDS = 3
WAYS: dict[str, DynagroupConfig | None] = {
    "plain": None,
    "exact updates": DynagroupConfig(budget="auto"),
    "README": DynagroupConfig(budget="auto", grouping=50),
}


def recipe(_machine: Machine) -> Iterator[dict[str, Any]]:
    """README's first recipe on docstrings, batches of 8 without accumulation: CPU seconds of an epoch, over updates after
    the first ones, and the loss on other docstrings after it; the ways of a seed in turns."""
    from benchmarks.train import loss_on, texts_of

    logging.set_verbosity_error()
    steady_memory()
    rows = [ids[:CUT] for ids in texts_of()]
    held_out = rows[SAMPLES : SAMPLES + HELD_OUT]
    lengths = np.array([len(row) for row in rows[:SAMPLES]])
    ways: dict[str, Any] = {way: {"seconds": [], "held_out_loss": []} for way in WAYS}
    for seed in range(SEEDS):
        for way, config in WAYS.items():
            model, seconds = trained_as_in_readme(rows[:SAMPLES], config, seed)
            ways[way]["seconds"].append(float(seconds.sum()))
            ways[way]["held_out_loss"].append(loss_on(model, held_out))
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
    rows: list[np.ndarray], config: DynagroupConfig | None, seed: int
) -> tuple[Any, np.ndarray]:
    """Returns the model after an epoch, and the CPU seconds of each update but the first ones; None: the plain Trainer."""
    trainer_class: Any = Trainer
    if config is not None:
        trainer_class = partial(DynagroupTrainer, dynagroup=config)
    clock = Clock()
    model = build("small", seed=seed)
    data = Dataset.from_list([{"input_ids": row.tolist()} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, num_train_epochs=1, learning_rate=1e-3, seed=seed)
        trainer = trainer_class(
            model, args, train_dataset=data, data_collator=as_labels, callbacks=[clock]
        )
        trainer.train()
    return model, clock.seconds()


def as_labels(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return collate([sample_of(torch.tensor(row["input_ids"])) for row in rows])
