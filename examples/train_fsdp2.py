"""FSDP2 with batches that fit. Every rank takes equally many steps, which sharded parameters need.

usage: torchrun --nproc-per-node 2 examples/train_fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dynagroup import TokenBudget
from dynagroup.update.planned import PlannedDataLoader

VOCAB = 50


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def predicted_tokens(ids: torch.Tensor) -> float:
    return float(ids[:, 1:].ne(0).sum())


def main() -> None:
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
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
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, VOCAB)).to(
        device
    )
    sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = torch.zeros((), device=device)
            for step in update:
                ids = step.batch.to(device)
                sharded.set_requires_gradient_sync(step.ends_update)
                logits = model(ids[:, :-1])
                loss = torch.nn.functional.cross_entropy(
                    logits.transpose(1, 2), ids[:, 1:], ignore_index=0
                )
                (loss * step.loss_scale).backward()
                total += loss.detach() * step.loss_scale
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
    if dist.get_rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
