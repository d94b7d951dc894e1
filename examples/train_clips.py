"""Pictures and clips in buckets of resolution and frames: one batch holds clips of one shape, as many as the pixels allow.

Each clip is scaled to the bucket that is nearest to its own shape, and its bucket is its kind. A small 3D convolution learns
which way a bar moves. ``one_kind="batch"``: ranks may have clips of different shapes, as they meet only to average gradients.

usage: python examples/train_clips.py        or: torchrun --nproc-per-node 2 examples/train_clips.py
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynagroup import PlannedDataLoader, Step, TokenBudget

NUM_CLIPS = 96
MOST_PIXELS = 12_000  # in a batch
BUCKETS = [  # (frames, height, width)
    (2, 16, 16),
    (2, 8, 24),
    (2, 24, 8),
    (8, 16, 16),
    (8, 8, 24),
    (8, 24, 8),
]


def aspect(shape: tuple[int, int, int]) -> float:
    _, height, width = shape
    return math.log(height / width)


def bucket_of(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The bucket whose number of frames and aspect are nearest."""

    def distance(bucket: tuple[int, int, int]) -> tuple[int, float]:
        return abs(bucket[0] - shape[0]), abs(aspect(bucket) - aspect(shape))

    return min(BUCKETS, key=distance)


class Clips(torch.utils.data.Dataset):
    """A bar that moves left or right over frames of any shape, scaled to its bucket."""

    def __len__(self) -> int:
        return NUM_CLIPS

    def shape(self, index: int) -> tuple[int, int, int]:
        return 2 + 7 * index % 9, 12 + 5 * index % 20, 12 + 11 * index % 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        shape = self.shape(index)
        moves_left = index // 3 % 2
        sides = [torch.linspace(0, 1, side) for side in shape]
        time, _, place = torch.meshgrid(*sides, indexing="ij")
        bar = 1 - time if moves_left else time
        clip = torch.exp(-50 * (place - bar) ** 2)
        scaled = nn.functional.interpolate(clip[None, None], bucket_of(shape))
        return scaled[0], moves_left


def make_model() -> nn.Module:
    """Without batch normalisation: its statistics would depend on how an update is divided."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool3d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def gradient_sync(model: nn.Module, step: Step) -> AbstractContextManager[None]:
    """Ranks average their gradients once an update, in its last step."""
    if isinstance(model, DistributedDataParallel) and not step.ends_update:
        return model.no_sync()
    return nullcontext()


def mean_of_ranks(total: torch.Tensor) -> float:
    if not dist.is_initialized():
        return float(total)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main(epochs: int = 3) -> tuple[list[float], list[tuple[int, ...]]]:
    """Losses by update, and the shapes of this rank's batches."""
    clips = Clips()
    buckets = [bucket_of(clips.shape(index)) for index in range(NUM_CLIPS)]
    loader = PlannedDataLoader(
        clips,
        [math.prod(bucket) for bucket in buckets],
        TokenBudget(MOST_PIXELS),
        kinds=buckets,
        one_kind="batch",
        samples_per_update=32,
        weigh="samples",  # the loss is a mean over clips
    )
    model = make_model()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    shapes = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = torch.zeros(())
            for step in update:
                pixels, moves_left = step.batch
                with gradient_sync(model, step):
                    loss = nn.functional.cross_entropy(model(pixels), moves_left) * step.loss_scale
                    loss.backward()
                total += loss.detach()
                shapes.append(tuple(pixels.shape))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_of_ranks(total))
    return losses, shapes


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    losses, _ = main()
    print(" ".join(f"{loss:.4f}" for loss in losses))
