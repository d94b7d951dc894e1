"""Pictures and clips in buckets of resolution and frames: one batch holds clips of one shape, as many as the pixels allow.

Each clip is scaled to the bucket that is nearest to its own shape, and its bucket is its kind. A small 3D convolution learns
which way a bar moves. ``one_kind="batch"``: ranks may have clips of different shapes, as they meet only to average gradients.

usage: python examples/train_clips.py        or: torchrun --nproc-per-node 2 examples/train_clips.py
"""

from __future__ import annotations

import contextlib
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynagroup import PlannedDataLoader, TokenBudget

BUCKETS = [
    (frames, 8 * high, 8 * wide) for frames in (2, 8) for high, wide in ((2, 2), (1, 3), (3, 1))
]
COUNT, MOST_PIXELS = 96, 12_000


def bucket_of(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The bucket whose number of frames and aspect are nearest."""
    aspect = lambda s: math.log(s[1] / s[2])  # noqa: E731
    return min(BUCKETS, key=lambda b: (abs(b[0] - shape[0]), abs(aspect(b) - aspect(shape))))


class Clips(torch.utils.data.Dataset):
    """A bar that moves left or right over frames of any shape, scaled to its bucket."""

    def __len__(self) -> int:
        return COUNT

    def shape(self, index: int) -> tuple[int, int, int]:
        return 2 + 7 * index % 9, 12 + 5 * index % 20, 12 + 11 * index % 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        shape, left = self.shape(index), index // 3 % 2
        when, _, where = torch.meshgrid(
            *(torch.linspace(0, 1, side) for side in shape), indexing="ij"
        )
        clip = torch.exp(-50 * (where - (1 - when if left else when)) ** 2)
        return nn.functional.interpolate(clip[None, None], bucket_of(shape))[0], left


def make_model() -> nn.Module:
    """Without batch normalisation: its statistics would depend on how an update is divided."""
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(8, 2))


def main(epochs: int = 3) -> tuple[list[float], list[tuple[int, ...]]]:
    """Losses by update, and the shapes of this rank's batches."""
    clips = Clips()
    buckets = [bucket_of(clips.shape(index)) for index in range(COUNT)]
    loader = PlannedDataLoader(
        clips,
        [math.prod(bucket) for bucket in buckets],
        TokenBudget(MOST_PIXELS),
        kinds=buckets,
        one_kind="batch",
        samples_per_update=32,
        weigh="samples",  # the loss is a mean over clips
    )
    several = dist.is_initialized()
    model = DistributedDataParallel(make_model()) if several else make_model()
    optimizer, losses, shapes = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = torch.zeros(())
            for step in update:
                pixels, left = step.batch
                with (
                    contextlib.nullcontext() if step.ends_update or not several else model.no_sync()
                ):
                    loss = nn.functional.cross_entropy(model(pixels), left) * step.loss_scale
                    loss.backward()
                total += loss.detach()
                shapes.append(tuple(pixels.shape))
            optimizer.step()
            optimizer.zero_grad()
            if several:
                dist.all_reduce(total)
            losses.append(float(total) / (dist.get_world_size() if several else 1))
    return losses, shapes


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    print(" ".join(f"{loss:.4f}" for loss in main()[0]))
