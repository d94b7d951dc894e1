"""Plain PyTorch with batches that fit: one process, or several with torchrun.

usage: python examples/train_plain.py        or: torchrun --nproc-per-node 2 examples/train_plain.py
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynagroup import PlannedDataLoader, Step, TokenBudget

VOCAB = 50


def make_rows() -> list[list[int]]:
    rows = []
    for number in range(128):
        length = 2 + (7 * number) % 40
        rows.append([1 + (number + place) % (VOCAB - 1) for place in range(length)])
    return rows


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=0)


def predicted_tokens(ids: torch.Tensor) -> float:
    """The weight of a batch: its loss is a mean over so many tokens."""
    return float(ids[:, 1:].ne(0).sum())


def gradient_sync(model: torch.nn.Module, step: Step) -> AbstractContextManager[None]:
    """Ranks average their gradients once an update, in its last step."""
    if isinstance(model, DistributedDataParallel) and not step.ends_update:
        return model.no_sync()
    return nullcontext()


def mean_of_ranks(total: torch.Tensor) -> float:
    if not dist.is_initialized():
        return float(total)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(epochs: int = 3) -> list[float]:
    """Returns the loss of each update."""
    torch.manual_seed(0)
    rows = make_rows()
    loader = PlannedDataLoader(
        rows,
        [len(row) for row in rows],
        TokenBudget(256),
        samples_per_update=32,
        collate_fn=collate,
        weigh=predicted_tokens,
    )
    embedding = torch.nn.Embedding(VOCAB, 16)
    model: torch.nn.Module = torch.nn.Sequential(embedding, torch.nn.Linear(16, VOCAB))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = torch.zeros(())
            for step in update:
                with gradient_sync(model, step):
                    loss = loss_of(model, step.batch) * step.loss_scale
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_of_ranks(total))
    return losses


def main() -> list[float]:
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    losses = train()  # a model in DistributedDataParallel has to go before its process group
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
