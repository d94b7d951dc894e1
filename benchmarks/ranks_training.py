"""Four gloo ranks train a small causal model: fixed batches, free-running and update mode, on the same samples.

Started by ``scripts/bench.py ranks train``; prints one line ``REPORT <json>``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.update.loss_weight import Share, count_label_tokens, loss_scale
from dynagroup.update.step import Step

VOCABULARY = 64
SAMPLES = 2048
PER_RANK = 8
ACCUMULATION = 4
EPOCHS = 2
REPEATS = 2
LONGEST = 256


class Walks(Dataset):
    """Token sequences of a fixed Markov chain, lognormal lengths of CV 1.0: something to learn in a minute."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sigma = np.sqrt(np.log(2))
        self.lengths = np.clip(rng.lognormal(np.log(48) - sigma**2 / 2, sigma, count), 4, LONGEST).astype(int)
        chain = np.random.default_rng(0).dirichlet(np.full(VOCABULARY, 0.05), VOCABULARY).cumsum(1)
        self.samples = []
        for length in self.lengths:
            walk = [int(rng.integers(VOCABULARY))]
            for draw in rng.random(length - 1):
                walk.append(min(int(np.searchsorted(chain[walk[-1]], draw)), VOCABULARY - 1))
            self.samples.append(torch.tensor(walk))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([s["input_ids"] for s in samples], batch_first=True),
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(batch["input_ids"].shape[1])
        hidden = self.layers(self.embed(batch["input_ids"]), mask=mask, is_causal=True)
        logits = self.head(hidden)[:, :-1].reshape(-1, VOCABULARY)
        return nn.functional.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), ignore_index=-100)


def fixed(data: Dataset, epoch: int) -> Iterator[Step[Any]]:
    """A plain loader of eight samples a rank, four batches an update; its steps are weighed exactly, too."""
    sampler = DistributedSampler(data, seed=0)
    sampler.set_epoch(epoch)
    batches = list(DataLoader(data, batch_size=PER_RANK, sampler=sampler, collate_fn=collate))
    for start in range(0, len(batches), ACCUMULATION):
        update = batches[start : start + ACCUMULATION]
        weights = [count_label_tokens(batch) for batch in update]
        total = torch.tensor([sum(weights)])
        dist.all_reduce(total)
        for number, (batch, weight) in enumerate(zip(update, weights, strict=True)):
            share, samples = Share(weight, int(total)), len(batch["input_ids"])
            scale = loss_scale(share, dist.get_world_size())
            yield Step(batch, [], Share(samples, samples), share, scale, number == len(update) - 1)


def run(kind: str, data: Walks, held_out: dict[str, torch.Tensor]) -> dict[str, Any]:
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    model = DistributedDataParallel(Model())
    budget = TokenBudget(PER_RANK * LONGEST)  # what the fixed batches need at worst
    if kind == "fixed":
        epochs: Any = (fixed(data, epoch) for epoch in range(EPOCHS))
    else:
        options: dict[str, Any] = (
            {"samples_per_update": PER_RANK * ACCUMULATION * ranks} if kind == "update" else {"window": 128}
        )
        loader = OnlineDataLoader(data, budget, collate_fn=collate, shuffle=True, **options)
        epochs = (loader for _ in range(EPOCHS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    used = updates = num_steps = 0
    dist.barrier()
    start = time.perf_counter()
    for step in chain.from_iterable(epochs):
        with contextlib.nullcontext() if step.ends_update else model.no_sync():
            (model(step.batch) * step.loss_scale).backward()
        used += 0 if step.idle else int(step.samples.local)
        num_steps += 1
        if step.ends_update:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    dist.barrier()
    seconds = time.perf_counter() - start
    total = torch.tensor([used])
    dist.all_reduce(total)
    with torch.no_grad():
        loss = model.module(held_out).item()
    return {
        "samples": int(total),
        "samples_per_s": int(total) / seconds,
        "held_out_loss": loss,
        "updates": updates,
        "steps": num_steps,
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, held_out = Walks(SAMPLES, seed=1), collate([Walks(128, seed=2)[i] for i in range(128)])
    figures: dict[str, list[Any]] = {}
    for _ in range(REPEATS):
        for kind in ("fixed", "free", "update"):
            figures.setdefault(kind, []).append(run(kind, data, held_out))
    if dist.get_rank() == 0:
        report: dict[str, Any] = {}
        for kind, runs in figures.items():
            rates = sorted(r["samples_per_s"] for r in runs)
            report[kind] = {**runs[0], "samples_per_s": rates}
            ratios = [a["samples_per_s"] / b["samples_per_s"] for a, b in zip(runs, figures["fixed"], strict=True)]
            report[kind]["speed_over_fixed"] = sorted(ratios)
        print("REPORT " + json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
