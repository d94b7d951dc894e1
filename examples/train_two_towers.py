"""A vision tower and a language tower under FSDP2, where a quarter of the samples have images.

Sharded layers gather their parameters when they run, so all ranks must run the same layers. With ``kinds`` the batches of a step
all have images, or none has. Without, the program hangs in the first step in which one rank has images and another has none.

usage: torchrun --nproc-per-node 2 examples/train_two_towers.py [ignore-kinds]
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dynagroup import AdditiveCap, PlannedDataLoader, TokenBudget

VOCAB, WIDTH = 50, 16
WORDS = [1 + torch.arange(i, i + 3 + 7 * i % 30) % (VOCAB - 1) for i in range(120)]
PATCHES = [
    torch.sin(torch.arange((0 if i % 4 else 2 + i % 9) * WIDTH) + i).view(-1, WIDTH)
    for i in range(120)
]
PATIENCE = timedelta(seconds=30 if "ignore-kinds" in sys.argv else 1800)


def tower() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language = tower(), tower()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(
        self, ids: torch.Tensor, patches: torch.Tensor, owner: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.words(ids[:, :-1])
        if len(
            patches
        ):  # a batch without images skips the tower, as in most vision-language models
            hidden = (
                hidden
                + torch.zeros_like(hidden[:, 0]).index_add(0, owner, self.vision(patches))[:, None]
            )
        logits = self.head(self.language(hidden)).transpose(1, 2)
        return nn.functional.cross_entropy(logits, ids[:, 1:], ignore_index=0)


def collate(indices: list[int]) -> dict[str, torch.Tensor]:
    patches = [PATCHES[i] for i in indices]
    return {
        "ids": nn.utils.rnn.pad_sequence([WORDS[i] for i in indices], batch_first=True),
        "patches": torch.cat(patches),  # of all samples, no padding
        "owner": torch.arange(len(indices)).repeat_interleave(torch.tensor([*map(len, patches)])),
    }


def train(ignore_kinds: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each update, and the parameters in the end, whole."""
    lengths = {"tokens": [*map(len, WORDS)], "patches": [*map(len, PATCHES)]}
    loader = PlannedDataLoader(
        range(120),
        lengths,
        TokenBudget(160) & AdditiveCap("patches", 40),
        samples_per_update=30,
        collate_fn=collate,
        kinds=None if ignore_kinds else ["image" if len(image) else "text" for image in PATCHES],
        weigh=lambda batch: float(batch["ids"][:, 1:].ne(0).sum()),
    )
    torch.manual_seed(0)
    model, losses = TwoTowers(), []
    # A process group for each tower: what one rank waits for in a tower is never taken for a message of the other.
    vision, language = (
        DeviceMesh.from_group(dist.new_group(timeout=PATIENCE), "cpu") for _ in range(2)
    )
    for part in model.vision:
        fully_shard(part, mesh=vision)
    for part in (*model.language, model):
        fully_shard(part, mesh=language)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = torch.zeros(())
            for step in update:
                model.set_requires_gradient_sync(step.ends_update)
                loss = model(**step.batch) * step.loss_scale
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
    return losses, {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=PATIENCE)
    print(" ".join(f"{loss:.4f}" for loss in train("ignore-kinds" in sys.argv)[0]))
