"""Plain PyTorch with batches that fit: one process, or several with torchrun.

usage: python examples/train_plain.py        or: torchrun --nproc-per-node 2 examples/train_plain.py
"""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynagroup import TokenBudget
from dynagroup.update.planned import PlannedDataLoader

VOCAB = 50


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=0)


def predicted_tokens(ids: torch.Tensor) -> float:
    return float(ids[:, 1:].ne(0).sum())


def train() -> list[float]:
    torch.manual_seed(0)
    rows = [[1 + (i + k) % (VOCAB - 1) for k in range(2 + (7 * i) % 40)] for i in range(128)]
    loader = PlannedDataLoader(
        rows,
        [len(row) for row in rows],
        TokenBudget(256),
        samples_per_update=32,
        collate_fn=collate,
        weigh=predicted_tokens,
    )
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, VOCAB)
    )
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = torch.zeros(())
            for step in update:
                local = getattr(model, "no_sync", contextlib.nullcontext)
                with contextlib.nullcontext() if step.ends_update else local():
                    loss = loss_of(model, step.batch) * step.loss_scale
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            if dist.is_initialized():
                dist.all_reduce(
                    total, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
                )
                total /= 1 if dist.get_backend() == "nccl" else dist.get_world_size()
            losses.append(float(total))
    return losses


def main() -> list[float]:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    losses = train()  # a model in DistributedDataParallel has to go before its process group
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
