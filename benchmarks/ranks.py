"""The online loader on up to 1,024 ranks, simulated on counts alone with the loader's own decisions; and four that train."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.data import CV_ONE, collate, lengths_of
from benchmarks.loader import BUDGET
from benchmarks.machine import Machine, build, on_ranks
from benchmarks.methods import in_fixed
from benchmarks.train import FIXED, HELD_OUT, IGNORED, SHORT, loss_on, texts_of
from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.online.protocol import WIDTH, agree, hand_out, offer
from dynagroup.plan.ranks import cut

DEPTH, LOW_WATER = 2, 32  # windows fetched ahead; batches below which a rank loads more


class Job:
    """Ranks as rows of arrays: the loader's decision functions on counts of batches alone."""

    def __init__(self, lengths: np.ndarray, ranks: int, *, budget: int, window: int) -> None:
        self.lengths, self.ranks, self.budget, self.window = lengths, ranks, TokenBudget(budget), window
        self.queued = [0] * ranks
        self.pending: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.start = self.made = self.taken = self.steps = self.exchanges = self.bytes = 0

    def load(self, rank: int) -> None:
        while self.pending[rank] and self.queued[rank] < LOW_WATER:
            first, last = self.pending[rank].pop(0)
            count = len(cut({"tokens": self.lengths[first:last]}, self.budget))
            self.queued[rank] += count
            self.made, self.taken = self.made + count, self.taken + last - first

    def grant(self) -> None:
        waiting = [sum(last - first for first, last in windows) for windows in self.pending]
        per_batch = self.taken / max(self.made, 1)
        loads = [round(q * per_batch) + w for q, w in zip(self.queued, waiting, strict=True)]
        target = (DEPTH + 1) * self.window + round(LOW_WATER * per_batch)
        grants, self.start = hand_out(loads, self.start, len(self.lengths), window=self.window, target=target)
        for rank, grant in enumerate(grants):
            self.pending[rank] += grant

    def run(self) -> Job:
        while True:
            if self.start < len(self.lengths):
                self.grant()
            for rank in range(self.ranks):
                self.load(rank)
            closed = self.start >= len(self.lengths)
            offers = [offer(q, bool(p) or not closed) for q, p in zip(self.queued, self.pending, strict=True)]
            agreement = agree([max(column) for column in zip(*offers, strict=True)])
            self.steps += agreement.steps
            self.exchanges += 1
            self.bytes += 8 * (WIDTH + 2 * agreement.steps + 2 + (0 if closed else self.ranks))
            self.queued = [max(0, queued - agreement.steps) for queued in self.queued]
            if agreement.last:
                return self


def simulated(ranks: int, samples: int = 16_000, window: int = 1024) -> dict[str, Any]:
    """One epoch of lengths of CV 1.0, and what shards fixed beforehand would take."""
    lengths = np.random.default_rng(ranks).choice(lengths_of(CV_ONE), ranks * samples)
    job = Job(lengths, ranks, budget=BUDGET, window=window).run()
    shards = lengths.reshape(ranks, samples)[:512]
    edges = [*range(0, samples, window), samples]
    counts = np.array(
        [[len(cut({"tokens": shard[a:b]}, TokenBudget(BUDGET))) for a, b in pairwise(edges)] for shard in shards]
    )
    mean = counts.sum(axis=1).mean()
    return {
        "ranks": ranks, "samples_a_rank": samples, "steps": job.steps,
        "above_all_batches_over_ranks": job.steps * ranks / job.made - 1,
        "above_with_fixed_shards": float(counts.sum(axis=1).max() / mean - 1),
        "above_with_alignment_of_every_window": float(counts.max(axis=0).sum() / mean - 1),
        "exchanges": job.exchanges, "bytes_a_rank_a_step": job.bytes / job.steps,
    }  # fmt: skip


def windows(_machine: Machine, ranks: Sequence[int] = (8, 64, 512, 1024)) -> dict[str, Any]:
    """Steps above what all batches over all ranks would take."""
    return {"windows": {CV_ONE: [simulated(number) for number in ranks]}}


def train(_machine: Machine, repeats: int = 2) -> dict[str, Any]:
    """Four gloo ranks train on equal samples: fixed batches, sorted or not, and ours. Seconds on the wall, in turns."""
    return on_ranks(4, _on_ranks, texts_of(3000), repeats)


def _on_ranks(texts: list[np.ndarray], repeats: int) -> dict[str, Any]:
    rows = [{"input_ids": torch.from_numpy(ids[:SHORT])} for ids in texts]
    data = [{**row, "attention_mask": torch.ones_like(row["input_ids"]), "labels": row["input_ids"]} for row in rows]
    found: dict[str, list[dict[str, Any]]] = {"fixed": [], "sorted": [], "free": [], "update": []}
    for _ in range(repeats):
        for kind, runs in found.items():
            one = _trained(kind, data[HELD_OUT : HELD_OUT + 2048])
            loss = loss_on(one.pop("model"), [ids[:SHORT] for ids in texts[:HELD_OUT]])
            runs.append({**one, "held_out_loss": loss})
    rates = {kind: [one["samples_per_s"] for one in runs] for kind, runs in found.items()}
    over = {kind: sorted(a / b for a, b in zip(own, rates["fixed"], strict=True)) for kind, own in rates.items()}
    return {
        kind: {**runs[0], "samples_per_s": sorted(rates[kind]), "speed_over_fixed": over[kind]}
        for kind, runs in found.items()
    }


def _trained(kind: str, data: list[dict[str, torch.Tensor]], epochs: int = 2) -> dict[str, Any]:
    model, budget = DistributedDataParallel(build("small")), TokenBudget(FIXED * SHORT)
    options: dict[str, Any] = (
        {"samples_per_update": 4 * FIXED * dist.get_world_size()} if kind == "update" else {"window": 128}
    )
    loader = OnlineDataLoader(data, budget, collate_fn=collate, shuffle=True, **options)
    ours = ((step.batch, step.loss_scale, step.ends_update) for _ in range(epochs) for step in loader)
    plain = chain(*(_fixed(data, epoch, ordered=kind == "sorted") for epoch in range(epochs)))
    steps: Any = plain if kind in ("fixed", "sorted") else ours
    optimizer, number, updates = torch.optim.AdamW(model.parameters(), lr=1e-3), 0, 0
    dist.barrier()
    start = time.perf_counter()
    for batch, scale, ends in steps:
        number += 1
        with nullcontext() if ends else model.no_sync():
            (model(**batch, use_cache=False).loss * scale).backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    dist.barrier()
    samples = epochs * len(data)
    rate = samples / (time.perf_counter() - start)
    return {"samples": samples, "samples_per_s": rate, "updates": updates, "steps": number, "model": model.module}


def _fixed(
    data: list[dict[str, torch.Tensor]], epoch: int, *, ordered: bool
) -> Iterator[tuple[dict[str, torch.Tensor], float, bool]]:
    """Batches of eight samples a rank, four an update, a rank's share of it ``ordered`` by length or as it comes; weighed
    exactly, too, by an exchange an update."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    for share in in_fixed(list(sampler), 4 * FIXED):
        share = sorted(share, key=lambda i: len(data[i]["input_ids"])) if ordered else share
        update = [collate([data[i] for i in batch]) for batch in in_fixed(share, FIXED)]
        weights = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in update]
        total = torch.tensor([sum(weights)])
        dist.all_reduce(total)
        for number, (batch, weight) in enumerate(zip(update, weights, strict=True), start=1):
            yield batch, weight / int(total) * dist.get_world_size(), number == len(update)
