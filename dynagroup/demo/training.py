"""One training run of the demo: the same updates whatever the batches, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from dynagroup.text import IGNORED

__all__ = ["Run", "TimeLimit", "held_out_loss", "train"]

Batches = Sequence[Sequence[int]]
Tensors = dict[str, torch.Tensor]


@dataclass
class Run:
    """What is trained on, and what came of it.

    Args:
        name: how the table calls it.
        updates: for each optimizer update its batches, each a list of sample indices; after training, of those made.
        seconds: of each update: loading, forward, backward, step. On a CPU they are seconds of CPU time, which other
            work on the machine does not lengthen.
        loss: mean loss a token on the held-out texts, after the last update.
        peak_bytes: on a CUDA device, the most memory allocated; otherwise 0.
    """

    name: str
    updates: Sequence[Batches]
    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")
    peak_bytes: int = 0

    @property
    def batches(self) -> list[Sequence[int]]:
        return [batch for update in self.updates for batch in update]

    def padded_tokens(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Tokens of each batch, padding included."""
        return np.asarray([len(batch) * int(lengths[batch].max()) for batch in self.batches], np.int64)

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


class TimeLimit:
    """Says before each update whether there is still time for it; all runs hear the same answers.

    The first update always happens. The clock starts with the first question.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: list[bool] = []
        self._started: float | None = None

    def allows(self, number: int) -> bool:
        """Whether update ``number``, from 0, may start."""
        now = time.perf_counter()
        self._started = now if self._started is None else self._started
        if number == len(self._answers):
            self._answers.append(number == 0 or now - self._started < self._seconds)
        return self._answers[number]


def train(
    run: Run,
    texts: Sequence[str],
    collate: Callable[[Sequence[str]], Tensors],
    make_model: Callable[[], torch.nn.Module],
    device: torch.device,
    learning_rate: float,
    limit: TimeLimit,
    after: Callable[[torch.nn.Module], float],
) -> Iterator[None]:
    """Train a fresh model; yields after every update, so that runs can take turns.

    Each update is one AdamW step on the mean loss over *all its label tokens*, however they are divided into batches.
    """
    model = make_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    loader = DataLoader(texts, batch_sampler=run.batches, collate_fn=collate)  # type: ignore[arg-type]
    batches = iter(loader)
    _warm_up(model, device)
    for number, update in enumerate(run.updates):
        if not limit.allows(number):
            break
        started = _now(device)
        _update(model, optimizer, [next(batches) for _ in update], device)
        run.seconds.append(_now(device) - started)
        yield
    run.updates = run.updates[: len(run.seconds)]
    if device.type == "cuda":
        run.peak_bytes = torch.cuda.max_memory_allocated(device)
    run.loss = after(model)


def _update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensors], device: torch.device
) -> None:
    counts = [_num_labels(batch) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        if count:  # a batch without labels has no mean loss, and no gradient
            loss = model(**_to(batch, device)).loss
            (loss * (count / sum(counts))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _num_labels(batch: Tensors) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())  # a causal model predicts all but the first token


def _to(batch: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _warm_up(model: torch.nn.Module, device: torch.device) -> None:
    """First calls set up threads and kernels; neither run should be charged for it."""
    ids = torch.zeros(2, 8, dtype=torch.int64, device=device)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def held_out_loss(model: Any, loader: DataLoader[Any], device: torch.device) -> float:
    """Mean loss a token over a loader's batches."""
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        num_labels = _num_labels(batch)
        if num_labels:
            total += float(model(**_to(batch, device)).loss) * num_labels
            count += num_labels
    return total / max(count, 1)
