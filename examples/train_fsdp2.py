"""FSDP2 with batches that fit. Every rank takes equally many steps, which sharded parameters need.

usage: torchrun --nproc-per-node 2 examples/train_fsdp2.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dynagroup import PlannedDataLoader, TokenBudget

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


def make_sharded_model(device: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, VOCAB))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return fully_shard(model.to(device), mesh=mesh)


def train(device: str, epochs: int = 3) -> list[float]:
    """Returns the loss of each update."""
    rows = make_rows()
    loader = PlannedDataLoader(
        rows,
        [len(row) for row in rows],
        TokenBudget(256),
        samples_per_update=32,
        collate_fn=collate,
        weigh=predicted_tokens,
    )
    model = make_sharded_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = torch.zeros((), device=device)
            for step in update:
                model.set_requires_gradient_sync(step.ends_update)
                loss = loss_of(model, step.batch.to(device)) * step.loss_scale
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
    return losses


def main() -> None:
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    losses = train("cuda" if has_gpu else "cpu")
    if dist.get_rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
