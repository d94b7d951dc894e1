"""Small models and loops that run out of memory where a test says, on one or many ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dynagroup.oom import LearningBudget, OomSafeBackward
from tests import models
from tests.allocator import Allocator


class Forgetful(LearningBudget):
    """Learns nothing, so that every batch fails that can."""

    def record_failed_cost(self, cost: float) -> None:
        pass


VOCAB = 23
STEPS, ACCUMULATION, SAMPLES = 6, 2, 6


def small_model(seed: int = 0, dropout: float = 0.0) -> Any:
    """A GPT-2 in float64: its layer norms and softmax stay in float64, unlike Llama's."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(seed)
    config = models.gpt2(vocab=VOCAB, width=8, layers=4, dropout=dropout, n_positions=16, use_cache=False)
    return GPT2LMHeadModel(config).double().train()


def batch_of(seed: int, num_samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    """Right padded; every third sample has no label to learn from."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 13, (num_samples,), generator=generator)
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()
    ids = torch.randint(1, VOCAB, mask.shape, generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[::3] = -100
    labels[1, 1] = 5  # but the batch always has one
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over next-token labels, in float64 (transformers' own casts logits to float32)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def batches_of(step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    return [batch_of(1000 * step + 10 * rank + k) for k in range(ACCUMULATION)]


def loss_scales(step: int, size: int) -> list[list[float]]:
    """[rank][micro-batch]: so that DDP's mean over ranks is the mean over all labels of the update."""
    counts = [[int((b["labels"][:, 1:] != -100).sum()) for b in batches_of(step, rank)] for rank in range(size)]
    total = sum(map(sum, counts))
    return [[c * size / total for c in row] for row in counts]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_plainly(size: int, steps: int = STEPS) -> torch.Tensor:
    """What all of this must come to: one process, every rank's batches, nothing fails."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(steps):
        for rank, scales in enumerate(loss_scales(step, size)):
            for batch, scale in zip(batches_of(step, rank), scales, strict=True):
                (mean_loss(model, batch) * scale / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def install(model: Any, place: str, allocator: Allocator) -> None:
    layers = model.transformer
    {
        "forward": lambda: allocator.in_forward(layers.h[0]),
        "third layer": lambda: allocator.in_forward(layers.h[2]),
        "backward": lambda: allocator.in_backward(layers.h[1]),
        "start of backward": lambda: allocator.in_backward(model.lm_head),
        "end of backward": lambda: allocator.in_backward(layers.wte),  # most buckets have been sent, if they are small
    }[place]()


def train_with_failures(
    place: str, limit: float, *, rank: int = 0, size: int = 1, steps: int = STEPS, **options: Any
) -> tuple[torch.Tensor, OomSafeBackward, int]:
    """The same training in which a batch above ``limit`` tokens fails at ``place``. Returns parameters and failures."""
    model = small_model()
    allocator = Allocator(limit)
    install(model, place, allocator)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    backward = OomSafeBackward(wrapped, **options)
    for step in range(steps):
        scales = loss_scales(step, size)[rank]
        for k, (batch, scale) in enumerate(zip(batches_of(step, rank), scales, strict=True)):
            ends = k == ACCUMULATION - 1
            backward(lambda b: mean_loss(wrapped, b), batch, loss_scale=scale, ends_update=ends)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), backward, len(allocator.failures)
