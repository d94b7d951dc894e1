"""The online loader on up to 1,024 ranks, simulated on counts alone with the loader's own decisions; and four that train."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.data import CV_ONE, collate, lengths_of, sample_of
from benchmarks.loader import BUDGET
from benchmarks.machine import Machine, build, on_ranks
from benchmarks.methods import in_fixed
from benchmarks.train import FIXED, HELD_OUT, SHORT, loss_on, texts_of
from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.online.protocol import WIDTH, agree, hand_out, offer
from dynagroup.plan.cut import cut
from dynagroup.plan.rules import CutRules

Row = dict[str, torch.Tensor]
DEPTH = 2
"""Windows fetched ahead."""
LOW_WATER = 32
"""Batches below which a rank loads more."""


def batches_of(lengths: np.ndarray) -> int:
    return len(cut({"tokens": lengths}, CutRules(BUDGET)))


class Epoch:
    """The loader's decisions on counts of batches alone."""

    def __init__(self, lengths: np.ndarray, ranks: int, window: int) -> None:
        self.lengths = lengths
        self.window = window
        self.num_queued = [0] * ranks
        self.pending: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        """Windows that each rank has not loaded: (start, stop)."""
        self.num_granted = 0
        self.num_loaded = 0
        self.batches = 0
        self.steps = 0
        self.exchanges = 0
        self.bytes_a_rank = 0
        is_last = False
        while not is_last:
            self._grant()
            self._load()
            is_last = self._agree()

    @property
    def _is_granted(self) -> bool:
        return self.num_granted >= len(self.lengths)

    def _grant(self) -> None:
        """Deals windows to ranks that have little."""
        if self._is_granted:
            return
        per_batch = self.num_loaded / max(self.batches, 1)
        loads = []
        for number, windows in zip(self.num_queued, self.pending, strict=True):
            num_waiting = sum(stop - start for start, stop in windows)
            loads.append(round(number * per_batch) + num_waiting)
        grants, self.num_granted = hand_out(
            loads,
            self.num_granted,
            len(self.lengths),
            window=self.window,
            target=(DEPTH + 1) * self.window + round(LOW_WATER * per_batch),
        )
        for windows, grant in zip(self.pending, grants, strict=True):
            windows += grant

    def _load(self) -> None:
        for rank, windows in enumerate(self.pending):
            while windows and self.num_queued[rank] < LOW_WATER:
                start, stop = windows.pop(0)
                num_batches = batches_of(self.lengths[start:stop])
                self.num_queued[rank] += num_batches
                self.batches += num_batches
                self.num_loaded += stop - start

    def _agree(self) -> bool:
        """Ranks agree how many steps they run; returns whether these are the last."""
        offers = []
        for number, windows in zip(self.num_queued, self.pending, strict=True):
            has_more = bool(windows) or not self._is_granted
            offers.append(offer([number], has_more))
        largest = [max(column) for column in zip(*offers, strict=True)]
        [num_steps], is_last, _ = agree(largest)
        self.steps += num_steps
        self.exchanges += 1
        self.bytes_a_rank += 8 * (WIDTH + 2 * num_steps + 2)
        if not self._is_granted:
            self.bytes_a_rank += 8 * len(self.num_queued)
        self.num_queued = [max(0, number - num_steps) for number in self.num_queued]
        return is_last


def simulated(ranks: int, samples: int = 16_000, window: int = 1024) -> dict[str, Any]:
    """One epoch of lengths of CV 1.0, and what shards fixed beforehand would take."""
    lengths = np.random.default_rng(ranks).choice(lengths_of(CV_ONE), ranks * samples)
    epoch = Epoch(lengths, ranks, window)
    counts = _batches_of_windows(lengths.reshape(ranks, samples)[:512], window)
    mean = counts.sum(axis=1).mean()
    most_of_a_shard = counts.sum(axis=1).max()
    most_of_each_window = counts.max(axis=0).sum()
    return {
        "ranks": ranks,
        "samples_a_rank": samples,
        "steps": epoch.steps,
        "above_all_batches_over_ranks": epoch.steps * ranks / epoch.batches - 1,
        "above_with_fixed_shards": float(most_of_a_shard / mean - 1),
        "above_with_alignment_of_every_window": float(most_of_each_window / mean - 1),
        "exchanges": epoch.exchanges,
        "bytes_a_rank_a_step": epoch.bytes_a_rank / epoch.steps,
    }


def _batches_of_windows(shards: np.ndarray, window: int) -> np.ndarray:
    """Number of batches: (shards, windows)."""
    starts = range(0, shards.shape[1], window)
    counts = []
    for shard in shards:
        counts.append([batches_of(shard[start : start + window]) for start in starts])
    return np.array(counts)


def windows(_machine: Machine, ranks: Sequence[int] = (8, 64, 512, 1024)) -> dict[str, Any]:
    """Steps above what all batches over all ranks would take."""
    return {"windows": {CV_ONE: [simulated(number) for number in ranks]}}


def train(_machine: Machine, repeats: int = 2) -> dict[str, Any]:
    """Four gloo ranks train on equal samples: fixed batches, sorted or not, and ours. Seconds on the wall, in turns."""
    return on_ranks(4, _on_ranks, texts_of(3000), repeats)


KINDS = ("fixed", "sorted", "free", "update")


def _on_ranks(texts: list[np.ndarray], repeats: int) -> dict[str, Any]:
    short = [ids[:SHORT] for ids in texts]
    held_out = short[:HELD_OUT]
    data = [sample_of(torch.from_numpy(ids)) for ids in short[HELD_OUT : HELD_OUT + 2048]]
    figures: dict[str, dict[str, Any]] = {}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, kind in product(range(repeats), KINDS):
        of_training, model = _trained(kind, data)
        rates[kind].append(of_training["samples_per_s"])
        loss = loss_on(model, held_out)
        figures.setdefault(kind, {**of_training, "held_out_loss": loss})
    for kind in KINDS:
        over_fixed = [a / b for a, b in zip(rates[kind], rates["fixed"], strict=True)]
        figures[kind]["samples_per_s"] = sorted(rates[kind])
        figures[kind]["speed_over_fixed"] = sorted(over_fixed)
    return figures


EPOCHS = 2
Step = tuple[Any, float, bool]
"""A batch, the factor of its loss, and whether it ends an update."""


def _trained(kind: str, data: list[Row]) -> tuple[dict[str, Any], Any]:
    """Figures of a training, and the model."""
    model = DistributedDataParallel(build("small"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_steps = 0
    num_updates = 0
    steps = _steps(data, kind)
    dist.barrier()
    start = time.perf_counter()
    for batch, scale, ends_update in steps:
        num_steps += 1
        with nullcontext() if ends_update else model.no_sync():
            loss = model(**batch, use_cache=False).loss
            (loss * scale).backward()
        if ends_update:
            optimizer.step()
            optimizer.zero_grad()
            num_updates += 1
    dist.barrier()
    seconds = time.perf_counter() - start
    num_samples = EPOCHS * len(data)
    figures = {
        "samples": num_samples,
        "samples_per_s": num_samples / seconds,
        "updates": num_updates,
        "steps": num_steps,
    }
    return figures, model.module


def _steps(data: list[Row], kind: str) -> Iterator[Step]:
    if kind in ("fixed", "sorted"):
        return _fixed(data, ordered=kind == "sorted")
    new_loader = partial(
        OnlineDataLoader, data, TokenBudget(FIXED * SHORT), collate_fn=collate, shuffle=True
    )
    if kind == "free":
        return _steps_of(new_loader(window=128))
    return _steps_of(new_loader(samples_per_update=4 * FIXED * dist.get_world_size()))


def _steps_of(loader: OnlineDataLoader) -> Iterator[Step]:
    for _ in range(EPOCHS):
        for step in loader:
            yield step.batch, step.loss_scale, step.ends_update


def _fixed(data: list[Row], *, ordered: bool) -> Iterator[Step]:
    """Batches of eight samples a rank, four an update, a rank's share of it ``ordered`` by length or as it comes; weighed
    exactly, too, by an exchange an update."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)  # type: ignore[arg-type]
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for share in in_fixed(list(sampler), 4 * FIXED):
            if ordered:
                share.sort(key=lambda sample: len(data[sample]["input_ids"]))
            yield from _weighed_update(data, share)


def _weighed_update(data: list[Row], share: list[int]) -> Iterator[Step]:
    batches = []
    for samples in in_fixed(share, FIXED):
        batches.append(collate([data[sample] for sample in samples]))
    weights = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    total = torch.tensor([sum(weights)])
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), start=1):
        yield batch, weight / int(total) * world_size, number == len(batches)
