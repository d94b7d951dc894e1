"""A vision tower and a language tower under FSDP2, where a quarter of the samples have images.

Sharded layers gather their parameters when they run, so all ranks must run the same layers. With ``kinds`` the batches of a step
all have images, or none has. Without, the program hangs in the first step in which one rank has images and another has none.

usage: torchrun --nproc-per-node 2 examples/train_two_towers.py [ignore-kinds]
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dynagroup import AdditiveCap, PlannedDataLoader, TokenBudget

VOCAB = 50
WIDTH = 16
NUM_SAMPLES = 120
PATIENCE = timedelta(seconds=30 if "ignore-kinds" in sys.argv else 1800)


def make_words(number: int) -> torch.Tensor:
    length = 3 + 7 * number % 30
    return 1 + torch.arange(number, number + length) % (VOCAB - 1)


def make_patches(number: int) -> torch.Tensor:
    """The patches of an image, float (patches, WIDTH); three of four samples have none."""
    num_patches = 0 if number % 4 else 2 + number % 9
    return torch.sin(torch.arange(num_patches * WIDTH) + number).view(-1, WIDTH)


WORDS = [make_words(number) for number in range(NUM_SAMPLES)]
PATCHES = [make_patches(number) for number in range(NUM_SAMPLES)]


def collate(indices: list[int]) -> dict[str, torch.Tensor]:
    words = [WORDS[index] for index in indices]
    patches = [PATCHES[index] for index in indices]
    num_patches = torch.tensor([len(image) for image in patches])
    return {
        "ids": nn.utils.rnn.pad_sequence(words, batch_first=True),
        "patches": torch.cat(patches),  # of all samples, no padding
        "owner": torch.arange(len(indices)).repeat_interleave(num_patches),
    }


def predicted_tokens(batch: dict[str, torch.Tensor]) -> float:
    """The weight of a batch: its loss is a mean over so many tokens."""
    return float(batch["ids"][:, 1:].ne(0).sum())


def tower() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*layers)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = tower()
        self.language = tower()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self, ids: torch.Tensor, patches: torch.Tensor, owner: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.words(ids[:, :-1])
        if len(patches):  # without images the tower is skipped, as in most vision-language models
            images = torch.zeros_like(hidden[:, 0]).index_add(0, owner, self.vision(patches))
            hidden = hidden + images[:, None]
        logits = self.head(self.language(hidden)).transpose(1, 2)
        return nn.functional.cross_entropy(logits, ids[:, 1:], ignore_index=0)


def new_mesh() -> DeviceMesh:
    group: Any = dist.new_group(timeout=PATIENCE)
    return DeviceMesh.from_group(group, "cpu")


def shard(model: TwoTowers) -> None:
    """Gives each tower a process group: what one rank waits for in a tower is never taken for a message of the other."""
    vision_mesh = new_mesh()
    language_mesh = new_mesh()
    for layer in model.vision:
        fully_shard(layer, mesh=vision_mesh)
    for layer in model.language:
        fully_shard(layer, mesh=language_mesh)
    fully_shard(model, mesh=language_mesh)


def train(ignore_kinds: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each update, and the parameters in the end, whole."""
    num_patches = [len(image) for image in PATCHES]
    kinds = ["image" if number else "text" for number in num_patches]
    loader = PlannedDataLoader(
        range(NUM_SAMPLES),
        {"tokens": [len(words) for words in WORDS], "patches": num_patches},
        TokenBudget(160) & AdditiveCap("patches", 40),
        samples_per_update=30,
        collate_fn=collate,
        kinds=None if ignore_kinds else kinds,
        weigh=predicted_tokens,
    )
    torch.manual_seed(0)
    model: Any = TwoTowers()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
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
    parameters = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return losses, parameters


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=PATIENCE)
    losses, _ = train("ignore-kinds" in sys.argv)
    print(" ".join(f"{loss:.4f}" for loss in losses))
