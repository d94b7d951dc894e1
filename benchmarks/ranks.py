"""The online loader on up to 1,024 ranks, simulated on counts alone with the loader's own decisions; and four that train."""

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
DEPTH, LOW_WATER = 2, 32  # windows fetched ahead; batches below which a rank loads more


def batches_of(lengths: np.ndarray) -> int:
    return len(cut({"tokens": lengths}, CutRules(BUDGET)))


def epoch_of(lengths: np.ndarray, ranks: int, window: int) -> tuple[int, int, int, int]:
    """The loader's decisions on counts of batches alone: steps, batches of all ranks, exchanges and the bytes of a rank's."""
    queued, pending = [0] * ranks, [list[tuple[int, int]]() for _ in range(ranks)]
    start = made = taken = steps = exchanges = sent = 0
    while True:
        if start < len(lengths):
            waiting = (sum(last - first for first, last in windows) for windows in pending)
            per_batch = taken / max(made, 1)
            loads = [round(q * per_batch) + w for q, w in zip(queued, waiting, strict=True)]
            target = (DEPTH + 1) * window + round(LOW_WATER * per_batch)
            grants, start = hand_out(loads, start, len(lengths), window=window, target=target)
            pending = [[*windows, *grant] for windows, grant in zip(pending, grants, strict=True)]
        for rank, windows in enumerate(pending):
            while windows and queued[rank] < LOW_WATER:
                first, last = windows.pop(0)
                count = batches_of(lengths[first:last])
                queued[rank] += count
                made, taken = made + count, taken + last - first
        closed = start >= len(lengths)
        offers = [
            offer([q], bool(windows) or not closed)
            for q, windows in zip(queued, pending, strict=True)
        ]
        [agreed], last, _ = agree([max(column) for column in zip(*offers, strict=True)])
        steps, exchanges = steps + agreed, exchanges + 1
        sent += 8 * (WIDTH + 2 * agreed + 2 + (0 if closed else ranks))
        queued = [max(0, q - agreed) for q in queued]
        if last:
            return steps, made, exchanges, sent


def simulated(ranks: int, samples: int = 16_000, window: int = 1024) -> dict[str, Any]:
    """One epoch of lengths of CV 1.0, and what shards fixed beforehand would take."""
    lengths = np.random.default_rng(ranks).choice(lengths_of(CV_ONE), ranks * samples)
    steps, batches, exchanges, sent = epoch_of(lengths, ranks, window)
    shards, edges = lengths.reshape(ranks, samples)[:512], [*range(0, samples, window), samples]
    counts = np.array([[batches_of(shard[a:b]) for a, b in pairwise(edges)] for shard in shards])
    mean = counts.sum(axis=1).mean()
    return {
        "ranks": ranks,
        "samples_a_rank": samples,
        "steps": steps,
        "above_all_batches_over_ranks": steps * ranks / batches - 1,
        "above_with_fixed_shards": float(counts.sum(axis=1).max() / mean - 1),
        "above_with_alignment_of_every_window": float(counts.max(axis=0).sum() / mean - 1),
        "exchanges": exchanges,
        "bytes_a_rank_a_step": sent / steps,
    }


def windows(_machine: Machine, ranks: Sequence[int] = (8, 64, 512, 1024)) -> dict[str, Any]:
    """Steps above what all batches over all ranks would take."""
    return {"windows": {CV_ONE: [simulated(number) for number in ranks]}}


def train(_machine: Machine, repeats: int = 2) -> dict[str, Any]:
    """Four gloo ranks train on equal samples: fixed batches, sorted or not, and ours. Seconds on the wall, in turns."""
    return on_ranks(4, _on_ranks, texts_of(3000), repeats)


def _on_ranks(texts: list[np.ndarray], repeats: int) -> dict[str, Any]:
    data = [sample_of(torch.from_numpy(ids[:SHORT])) for ids in texts]
    found: dict[str, list[dict[str, Any]]] = {"fixed": [], "sorted": [], "free": [], "update": []}
    for _ in range(repeats):
        for kind, runs in found.items():
            one = _trained(kind, data[HELD_OUT : HELD_OUT + 2048])
            loss = loss_on(one.pop("model"), [ids[:SHORT] for ids in texts[:HELD_OUT]])
            runs.append({**one, "held_out_loss": loss})
    rates = {kind: [one["samples_per_s"] for one in runs] for kind, runs in found.items()}
    over = {
        kind: sorted(a / b for a, b in zip(own, rates["fixed"], strict=True))
        for kind, own in rates.items()
    }
    return {
        kind: {**runs[0], "samples_per_s": sorted(rates[kind]), "speed_over_fixed": over[kind]}
        for kind, runs in found.items()
    }


def _trained(kind: str, data: list[Row], epochs: int = 2) -> dict[str, Any]:
    model, budget = DistributedDataParallel(build("small")), TokenBudget(FIXED * SHORT)
    of_updates = {"samples_per_update": 4 * FIXED * dist.get_world_size()}
    options: dict[str, Any] = of_updates if kind == "update" else {"window": 128}
    loader = OnlineDataLoader(data, budget, collate_fn=collate, shuffle=True, **options)
    ours = (
        (step.batch, step.loss_scale, step.ends_update) for _ in range(epochs) for step in loader
    )
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
    return {
        "samples": samples,
        "samples_per_s": rate,
        "updates": updates,
        "steps": number,
        "model": model.module,
    }


def _fixed(data: list[Row], epoch: int, *, ordered: bool) -> Iterator[tuple[Row, float, bool]]:
    """Batches of eight samples a rank, four an update, a rank's share of it ``ordered`` by length or as it comes; weighed
    exactly, too, by an exchange an update."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    for share in in_fixed(list(sampler), 4 * FIXED):
        share = sorted(share, key=lambda i: len(data[i]["input_ids"])) if ordered else share
        update = [collate([data[i] for i in batch]) for batch in in_fixed(share, FIXED)]
        weights = [int((batch["labels"][:, 1:] != -100).sum()) for batch in update]
        total = torch.tensor([sum(weights)])
        dist.all_reduce(total)
        for number, (batch, weight) in enumerate(zip(update, weights, strict=True), start=1):
            yield batch, weight / int(total) * dist.get_world_size(), number == len(update)
