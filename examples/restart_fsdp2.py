"""FSDP2 that is started again after it ran out of memory: from its last checkpoint, with smaller batches, every sample once.

usage: torchrun --nproc-per-node 2 --max-restarts 3 examples/restart_fsdp2.py FOLDER [TOKENS]
  FOLDER: of the checkpoint, on a file system that all ranks see. TOKENS: pretend that larger batches run out of memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from dynagroup import LearningBudget, PlannedDataLoader, TokenBudget
from dynagroup.shapes import BatchShape
from dynagroup.testing import Allocator

VOCAB, EPOCHS = 50, 2
ROWS = [[1 + (i + k) % (VOCAB - 1) for k in range(2 + (7 * i) % 40)] for i in range(128)]


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def saved(folder: Path, model: Any, optimizer: Any, loader: Any) -> None:
    """After an update: parameters, optimizer, and where all ranks stand. The old checkpoint stays until the new one is whole."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    parameters, moments = get_state_dict(model, optimizer)
    name = f"update-{loader.cursor.update}"
    save({"model": parameters, "optimizer": moments}, checkpoint_id=folder / name)
    if dist.get_rank() == 0:
        (folder / "new.json").write_text(json.dumps({"name": name, "loader": states}))
        (folder / "new.json").replace(folder / "last.json")


def restored(folder: Path, model: Any, optimizer: Any, loader: Any) -> None:
    last = json.loads((folder / "last.json").read_text())
    parameters, moments = get_state_dict(model, optimizer)
    load({"model": parameters, "optimizer": moments}, checkpoint_id=folder / last["name"])
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    loader.load_state_dict(last["loader"])


def main(folder: Path, pretended: float = float("inf")) -> dict[str, Any]:
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    budget = LearningBudget(TokenBudget(256))
    how: dict[str, Any] = {
        "samples_per_update": 32,
        "weigh": lambda ids: float(ids[:, 1:].ne(0).sum()),
    }
    loader = PlannedDataLoader(ROWS, [len(row) for row in ROWS], budget, collate_fn=collate, **how)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = fully_shard(
        torch.nn.Sequential(torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, VOCAB)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if (folder / "last.json").exists():
        restored(folder, model, optimizer, loader)
    for path in sorted(folder.glob("failed-*.json")):  # all ranks read all of them, and plan alike
        budget.record_oom(BatchShape.of(*json.loads(path.read_text())))
    budget.apply()  # what remains is cut smaller
    allocator, seen = Allocator(int(min(pretended, 1 << 40))), list[int]()
    allocator.in_forward(model[1])
    while loader.epoch < EPOCHS:
        for step in loader:
            ids = step.batch.to(device)
            model.set_requires_gradient_sync(step.ends_update)
            try:
                loss = torch.nn.functional.cross_entropy(
                    model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=0
                )
                (loss * step.loss_scale).backward()
            except torch.OutOfMemoryError:
                (folder / f"failed-{loader.cursor.update}-{dist.get_rank()}.json").write_text(
                    json.dumps([*ids.shape])
                )
                raise
            seen += [] if step.idle else step.indices
            if step.ends_update:
                optimizer.step()
                optimizer.zero_grad()
                saved(folder, model, optimizer, loader)
                with (folder / f"seen-{dist.get_rank()}.txt").open("a") as file:
                    file.write("".join(f"{index}\n" for index in seen))
                seen.clear()
    weights = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    return {"weights": weights.detach().cpu(), "limit": budget.limit}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
    dist.destroy_process_group()
