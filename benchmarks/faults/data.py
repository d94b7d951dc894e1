"""Data that shows what happened to it: sample ``i`` is the token ``i`` repeated, so a batch says which samples it holds."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Numbered", "Seen", "collate", "value_of"]


class Numbered(torch.utils.data.Dataset):
    """Sample ``i`` is the token ``i``, as often as it is long. ``broken`` raises, ``deadly`` kills its worker."""

    def __init__(self, lengths: Sequence[int], *, broken: int | None = None, deadly: int | None = None) -> None:
        self.lengths, self.broken, self.deadly = list(lengths), broken, deadly

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.broken:
            raise KeyError(f"record {index} is broken")
        if index == self.deadly and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        ids = torch.full((self.lengths[index],), index, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}


def collate(samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([s["input_ids"] for s in samples], batch_first=True, padding_value=-1)
    return {"input_ids": ids, "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100)}


def value_of(sample: int) -> float:
    """The made-up loss of each token of a sample."""
    return math.sin(1.0 + sample)


@dataclass
class Seen:
    """One step as the training loop saw it."""

    samples: list[int]
    loss: float
    """Factor times the batch's mean loss over its predicted tokens."""
    ends: bool

    @classmethod
    def of(cls, step: Any) -> Seen:
        samples = [] if step.idle else step.batch["input_ids"][:, 0].tolist()
        counts = (step.batch["labels"][:, 1:] != -100).sum(dim=1).tolist() if not step.idle else []
        total = sum(counts)
        mean = sum(n * value_of(i) for n, i in zip(counts, samples, strict=True)) / total if total else 0.0
        return cls(samples, step.loss_scale * mean, step.ends_update)
