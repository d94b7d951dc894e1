"""FSDP2 that is started again after it ran out of memory: from its last checkpoint, with smaller batches, every sample once.

usage: torchrun --nproc-per-node 2 --max-restarts 3 examples/restart_fsdp2.py FOLDER [TOKENS]
  FOLDER: of the checkpoint, on a file system that all ranks see. TOKENS: pretend that larger batches run out of memory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
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

VOCAB = 50
EPOCHS = 2


def make_rows() -> list[list[int]]:
    rows = []
    for number in range(128):
        length = 2 + (7 * number) % 40
        rows.append([1 + (number + place) % (VOCAB - 1) for place in range(length)])
    return rows


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=0)


def predicted_tokens(ids: torch.Tensor) -> float:
    """The weight of a batch: its loss is a mean over so many tokens."""
    return float(ids[:, 1:].ne(0).sum())


@dataclass
class Run:
    """What is saved together after an update, and the folder of the checkpoints and of what failed."""

    folder: Path
    model: Any  # an FSDPModule
    optimizer: torch.optim.Optimizer
    loader: PlannedDataLoader
    budget: LearningBudget

    @property
    def last(self) -> Path:
        return self.folder / "last.json"

    def save(self) -> None:
        """Saves parameters, optimizer, and where all ranks stand. The old checkpoint stays until the new one is whole."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.loader.state_dict())
        parameters, moments = get_state_dict(self.model, self.optimizer)
        name = f"update-{self.loader.cursor.update}"
        save({"model": parameters, "optimizer": moments}, checkpoint_id=self.folder / name)
        if dist.get_rank() == 0:
            new = self.folder / "new.json"
            new.write_text(json.dumps({"name": name, "loader": states}))
            new.replace(self.last)

    def restore(self) -> None:
        last = json.loads(self.last.read_text())
        parameters, moments = get_state_dict(self.model, self.optimizer)
        checkpoint = {"model": parameters, "optimizer": moments}
        load(checkpoint, checkpoint_id=self.folder / last["name"])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=parameters,
            optim_state_dict=moments,
        )
        self.loader.load_state_dict(last["loader"])

    def note_failure(self, ids: torch.Tensor) -> None:
        name = f"failed-{self.loader.cursor.update}-{dist.get_rank()}.json"
        num_samples, longest = ids.shape
        (self.folder / name).write_text(json.dumps([num_samples, longest]))

    def learn_from_failures(self) -> None:
        """All ranks read the failures of all ranks, and plan alike: what remains is cut smaller."""
        for path in sorted(self.folder.glob("failed-*.json")):
            num_samples, longest = json.loads(path.read_text())
            self.budget.record_oom(BatchShape.of(num_samples, longest))
        self.budget.apply()

    def note_seen(self, indices: list[int]) -> None:
        with (self.folder / f"seen-{dist.get_rank()}.txt").open("a") as file:
            file.writelines(f"{index}\n" for index in indices)


def make_run(folder: Path, device: str) -> Run:
    torch.manual_seed(0)
    rows = make_rows()
    budget = LearningBudget(TokenBudget(256))
    loader = PlannedDataLoader(
        rows,
        [len(row) for row in rows],
        budget,
        samples_per_update=32,
        collate_fn=collate,
        weigh=predicted_tokens,
    )
    layers = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 16), torch.nn.Linear(16, VOCAB))
    model = fully_shard(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Run(folder, model, optimizer, loader, budget)


def train_epoch(run: Run, device: str) -> None:
    seen: list[int] = []
    for step in run.loader:
        ids = step.batch.to(device)
        run.model.set_requires_gradient_sync(step.ends_update)
        try:
            loss = loss_of(run.model, ids) * step.loss_scale
            loss.backward()
        except torch.OutOfMemoryError:
            run.note_failure(ids)
            raise  # torchrun starts all ranks again
        if not step.idle:
            seen += step.indices
        if step.ends_update:
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.save()
            run.note_seen(seen)
            seen = []


def main(folder: Path, pretended_tokens: float = float("inf")) -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.set_default_dtype(torch.float64)
    run = make_run(folder, device)
    if run.last.exists():
        run.restore()
    run.learn_from_failures()
    allocator = Allocator(int(min(pretended_tokens, 1 << 40)))
    allocator.in_forward(run.model[1])
    while run.loader.epoch < EPOCHS:
        train_epoch(run, device)
    weights = [parameter.full_tensor().flatten() for parameter in run.model.parameters()]
    return {"weights": torch.cat(weights).detach().cpu(), "limit": run.budget.limit}


if __name__ == "__main__":
    tokens = float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
    main(Path(sys.argv[1]), tokens)
    dist.destroy_process_group()
