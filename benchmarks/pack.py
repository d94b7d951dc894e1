"""Packed batches: what they hold and how equal their work is, beside the rules of other packers, in the same run.

TRL's packing is TRL's own code; Axolotl's multipack and verl's rearranging are written here from their descriptions.
Everything is counted, nothing is trained: "work" is l + l^2 / 12,288 a sample, and a row is what all ranks do at once.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.config import PlanConfig
from dynagroup.plan.order import EpochOrder
from dynagroup.plan.planner import Planner
from dynagroup.plan.work import Work

LENGTHS = Path(__file__).parent / "lengths"
FILES = {
    "gsm8k": 8_192,
    "azure_llm_conv_2023": 16_384,
    "t0_mix_50k": 8_192,
    "synth_sharegpt4o": 16_384,
    "python_files": 65_536,
}
NUM_SAMPLES, RANKS, UPDATE = 8_192, 8, 256
WORK = Work()

Pack = list[int]
"""Tokens of the samples, or parts of samples, of one batch on one rank."""
Rows = list[list[Pack]]


def fixed_count(tokens: np.ndarray, cap: int) -> tuple[Rows, dict[str, Any]]:
    """TRL padding-free: a number of samples that fits the cap even if all are the longest; batches as they come."""
    size = max(1, cap // int(tokens.max()))
    packs = [tokens[i : i + size].tolist() for i in range(0, len(tokens), size)]
    return rows_of(packs), {"samples_a_batch": size, "same_updates": True}


def trl(strategy: str) -> Callable[[np.ndarray, int], tuple[Rows, dict[str, Any]]]:
    def packed(tokens: np.ndarray, cap: int) -> tuple[Rows, dict[str, Any]]:
        import pyarrow as pa
        from datasets import Dataset
        from trl.data_utils import pack_dataset

        flat = np.repeat(np.arange(len(tokens), dtype=np.int32), tokens)
        offsets = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))})
        found = pack_dataset(Dataset(table), seq_length=cap, strategy=strategy).with_format("numpy")
        packs, pieces = [], np.zeros(len(tokens), np.int64)
        for row in found:
            members, counts = np.unique(row["input_ids"], return_counts=True)
            packs.append(counts.tolist())
            pieces[members] += 1
        order = np.random.default_rng(1).permutation(len(packs))
        kept = sum(map(sum, packs))
        return rows_of([packs[i] for i in order]), {
            "samples_cut": int((pieces > 1).sum()),
            "tokens_lost": int(tokens.sum()) - kept,
            "same_updates": False,
        }

    return packed


def multipack(tokens: np.ndarray, cap: int) -> tuple[Rows, dict[str, Any]]:
    """Axolotl's rule as described: first fit decreasing into bins of the cap, dealt to ranks, the rest of a row dropped."""
    packs: list[Pack] = []
    room: list[int] = []
    for length in np.sort(tokens)[::-1].tolist():
        place = next((i for i, left in enumerate(room) if left >= length), None)
        if place is None:
            packs.append([])
            room.append(cap)
            place = len(packs) - 1
        packs[place].append(length)
        room[place] -= length
    order = np.random.default_rng(1).permutation(len(packs))
    whole = len(packs) - len(packs) % RANKS
    dropped = sum(len(packs[i]) for i in order[whole:])
    return rows_of([packs[i] for i in order[:whole]]), {"samples_dropped": dropped, "same_updates": False}


def verl(tokens: np.ndarray, cap: int) -> tuple[Rows, dict[str, Any]]:
    """verl's rule as described: samples of an update to ranks by largest differencing on tokens, as many to each.

    On a rank as few micro-batches as the fullest rank's tokens allow, by differencing on work; one more while any is too large.
    """
    rows: Rows = []
    for update in updates_of(tokens):
        ranks = [update[part] for part in differencing(update.astype(float), RANKS, equal_size=True)]
        number = max(-(-int(rank.sum()) // cap) for rank in ranks)
        while True:
            parts = [[rank[p].tolist() for p in differencing(WORK.of_lengths(rank), number)] for rank in ranks]
            if all(sum(pack) <= cap for packs in parts for pack in packs):
                break
            number += 1
        for packs in parts:
            packs.sort(key=lambda pack: -float(WORK.of_lengths(pack).sum()))
        rows += [[packs[step] for packs in parts] for step in range(number)]
    return rows, {"same_updates": True}


def differencing(costs: np.ndarray, parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Karmarkar and Karp: the two divisions that differ most are joined, dearest part of one to cheapest of the other."""
    tie = itertools.count()
    order = np.argsort(-costs, kind="stable")
    groups = (
        [order[i : i + parts] for i in range(0, len(order), parts)]
        if equal_size
        else [order[i : i + 1] for i in range(len(order))]
    )
    heap = []
    for group in groups:
        division = [(float(costs[i]), [int(i)]) for i in group] + [(0.0, [])] * (parts - len(group))
        heap.append((-(division[0][0] - division[-1][0]), next(tie), division))
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (-(joined[0][0] - joined[-1][0]), next(tie), joined))
    return [members for _, members in heap[0][2]]


def ours(samples_per_update: int | None) -> Callable[[np.ndarray, int], tuple[Rows, dict[str, Any]]]:
    def planned(tokens: np.ndarray, cap: int) -> tuple[Rows, dict[str, Any]]:
        config = PlanConfig(shuffle=samples_per_update is None, samples_per_update=samples_per_update)
        plan = Planner({"tokens": tokens}, TokenBudget(cap, layout="packed"), config).plan(0, RANKS)
        rows = [[tokens[batch].tolist() for batch in row] for row in plan.rows]
        lost = {"samples_dropped": len(plan.dropped), "samples_repeated": len(plan.repeated)}
        return rows, {**lost, "same_updates": samples_per_update is not None}

    return planned


METHODS = {
    "TRL padding-free, a count that always fits": fixed_count,
    "TRL packing, wrapped": trl("wrapped"),
    "TRL packing, bfd": trl("bfd"),
    "multipack (Axolotl's rule)": multipack,
    "dynagroup packed": ours(None),
    "verl's rule, updates of 256": verl,
    "dynagroup packed, updates of 256": ours(UPDATE),
}


def rows_of(packs: Sequence[Pack]) -> Rows:
    """Batches in the order in which ranks take them."""
    return [list(packs[i : i + RANKS]) for i in range(0, len(packs), RANKS)]


def updates_of(tokens: np.ndarray) -> list[np.ndarray]:
    """Updates of ``UPDATE`` samples as the planner draws them, so that all who keep updates have the same ones."""
    drawn = tokens[EpochOrder(len(tokens), seed=0, epoch=0)[:]]
    return [drawn[start : start + UPDATE] for start in range(0, len(drawn), UPDATE)]


def least_imbalance(tokens: np.ndarray) -> float:
    """Of a row's dearest batch to its mean, over all updates: none takes less than its dearest sample, or an equal share."""
    work = [WORK.of_lengths(update) for update in updates_of(tokens)]
    least = sum(max(float(each.sum()) / RANKS, float(each.max())) for each in work)
    return round(least * RANKS / float(WORK.of_lengths(tokens).sum()), 4)


def measured(rows: Rows, cap: int) -> dict[str, Any]:
    work = [[float(WORK.of_lengths(pack).sum()) for pack in row] for row in rows]
    tokens = sum(sum(pack) for row in rows for pack in row)
    return {
        "steps": len(rows),
        "fill": round(tokens / (cap * RANKS * len(rows)), 4),
        "largest_batch_tokens": max(sum(pack) for row in rows for pack in row),
        "row_imbalance": round(sum(map(max, work)) * RANKS / sum(map(sum, work)), 4),
        "critical_path": round(sum(map(max, work)) + WORK.per_step * len(rows)),
    }


def packs() -> dict[str, Any]:
    """Every packer on every length file."""
    figures: dict[str, Any] = {}
    for name, cap in FILES.items():
        loaded = np.maximum(np.load(LENGTHS / f"{name}.npz")["tokens"], 1)
        tokens = np.random.default_rng(0).permutation(loaded)[:NUM_SAMPLES]
        figures[name] = {
            "cap": cap,
            "samples": len(tokens),
            "tokens": int(tokens.sum()),
            "longest": int(tokens.max()),
            "least_imbalance_of_updates": least_imbalance(tokens),
            "methods": {},
        }
        for method, run in METHODS.items():
            started = time.process_time()
            rows, more = run(tokens, cap)
            taken = time.process_time() - started
            found = {
                "samples_cut": 0,
                "samples_dropped": 0,
                "tokens_lost": 0,
                **measured(rows, cap),
                **more,
                "cpu_s": round(taken, 3),
            }
            figures[name]["methods"][method] = found
            print(f"{name:22s} {method:46s} {found}", flush=True)
    return {"ranks": RANKS, "update": UPDATE, "crossover": WORK.crossover, "per_step": WORK.per_step, "files": figures}
