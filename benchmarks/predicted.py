"""Batches that are counted, not run: padding, steps and predicted time of ours and of other packers and balancers.

A method turns lengths into rows: ``rows[step][rank]`` is a batch; a row takes its dearest batch and the price of a step. TRL's
packing and transformers' sampler are their own code; the other rules are written from their descriptions.
"""

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.data import FILES, lengths_of
from benchmarks.machine import Machine
from benchmarks.methods import (
    group_by_length,
    in_capped,
    in_fixed,
    longest_first,
    padded_tokens,
    planned,
    trl_packs,
)
from dynagroup import TokenBudget, Work, shard_micro_batches
from dynagroup.plan.epoch import epoch_order

UPDATE = 256
RANKS = 8
WORK = Work()


def updates_of(count: int) -> list[list[int]]:
    """Updates as our plans draw them, so that all who keep updates have the same ones."""
    return in_fixed(epoch_order(count, seed=0, epoch=0), UPDATE)


def held(values: np.ndarray, layout: str) -> float:
    """Tokens or work of a batch, from its samples': the sum, or padded as many times the most."""
    if layout == "padded":
        return float(values.max(initial=0) * len(values))
    return float(values.sum())


# Padding: real over padded tokens, steps and predicted time, one rank; 16 of the longest samples set the peak for all.


def predicted_time_of(batches: list[list[int]], tokens: np.ndarray) -> float:
    """Predicted time of padded batches on one rank, in linear tokens, by the default ``Work``."""
    sizes = np.array([len(batch) for batch in batches])
    longest = np.array([tokens[batch].max() for batch in batches])
    return float((WORK.per_step + sizes * WORK.of_lengths(longest)).sum())


PADDED_PLANS: dict[str, dict[str, Any]] = {
    "dynagroup_whole_set": {},
    "dynagroup_shuffle": {"shuffle": True},
    "dynagroup_update_of_256": {"samples_per_update": UPDATE},
    "dynagroup_update_of_32": {"samples_per_update": 32},
    "dynagroup_grouping_50_of_32": {"samples_per_update": 32, "grouping": 50},
}


def padding(_machine: Machine) -> dict[str, Any]:
    """One row a length file: (real tokens / padded tokens, steps, predicted time over that of fixed batches) of each method."""
    return {name: padding_of(lengths_of(name, 20_000)) for name in FILES}


def padding_of(tokens: np.ndarray) -> dict[str, Any]:
    real = int(tokens.sum(dtype=np.int64))
    batches = padded_batches(tokens)
    time_of_fixed = predicted_time_of(batches["fixed_16_shuffled"], tokens)
    figures: dict[str, Any] = {
        "samples": len(tokens),
        "cv": float(tokens.std() / tokens.mean()),
    }
    for way, batches_of_way in batches.items():
        time = predicted_time_of(batches_of_way, tokens) / time_of_fixed
        share_real = real / padded_tokens(batches_of_way, tokens)
        figures[way] = (share_real, len(batches_of_way), time)
    return figures


def padded_batches(tokens: np.ndarray) -> dict[str, list[list[int]]]:
    """Each method's batches, for one rank."""
    sorted_in_updates: list[list[int]] = []
    for update in updates_of(len(tokens)):
        sorted_in_updates += in_fixed(longest_first(update, tokens), 16)
    batches = {
        "fixed_16_shuffled": in_fixed(np.arange(len(tokens)), 16),
        "update_of_256_sorted_16": sorted_in_updates,
        "hf_group_by_length_16": in_fixed(group_by_length(tokens, 16, 0), 16),
        "hf_group_by_length_256": in_fixed(group_by_length(tokens, UPDATE, 0), 16),
    }
    budget = TokenBudget(16 * int(tokens.max()))
    for way, options in PADDED_PLANS.items():
        rows = planned(tokens, budget, **options).rows
        batches[way] = [row[0] for row in rows]
    return batches


STRATA: dict[str, dict[str, Any]] = {
    "one stratum": {"strata": 1},
    "two strata": {"strata": 2},
    "grouping 50": {},
}


UPDATES_OF_RANKS = ((8, 1), (32, 1), (32, 8), (64, 8), (256, 8))
"""Samples an update, ranks."""


def strata(_machine: Machine) -> dict[str, Any]:
    """Predicted time of updates that are dealt by strata, over that of exact updates of as many samples."""
    figures: dict[str, Any] = {}
    for name in FILES:
        tokens = lengths_of(name, 8_000)
        figures[name] = {}
        for size, ranks in UPDATES_OF_RANKS:
            figures[name][f"size_{size}_ranks_{ranks}"] = strata_of(tokens, size, ranks)
    return figures


def strata_of(tokens: np.ndarray, size: int, ranks: int) -> dict[str, float]:
    budget = TokenBudget(16 * int(tokens.max()))
    exact = planned(tokens, budget, ranks, samples_per_update=size)
    ratios = {}
    for way, options in STRATA.items():
        plan = planned(tokens, budget, ranks, samples_per_update=size, grouping=50, **options)
        ratios[way] = plan.predicted_time / exact.predicted_time
    return ratios


# Packed batches: what they hold and how equal their work is.


PACKED = {
    "gsm8k": 8_192,
    "azure_llm_conv_2023": 16_384,
    "t0_mix_50k": 8_192,
    "synth_sharegpt4o": 16_384,
    "python_files": 65_536,
}
Packed = tuple[list[list[list[int]]], dict[str, Any]]
"""Rows of batches, each as the tokens of its samples or parts of samples; and what was cut or dropped."""


def padding_free(tokens: np.ndarray, cap: int) -> Packed:
    """TRL padding-free: batches as they come, of the most samples (a power of two) that here never held more than the cap."""
    largest = 0
    for size in (1 << n for n in range(9)):
        starts = range(0, len(tokens), size)
        if np.add.reduceat(tokens, starts).max() <= cap:
            largest = size
    batches = [tokens[batch].tolist() for batch in in_fixed(np.arange(len(tokens)), largest)]
    return in_fixed(batches, RANKS), {"samples_a_batch": largest, "same_updates": True}


Packs = list[list[int]]


def _shuffled(packs: Packs) -> Packs:
    return [packs[i] for i in np.random.default_rng(1).permutation(len(packs))]


def by_work(packs: Packs) -> Packs:
    """So that those of a row are alike."""
    return sorted(packs, key=lambda pack: -float(WORK.of_lengths(pack).sum()))


def trl(
    tokens: np.ndarray, cap: int, *, strategy: str, dealt: Callable[[Packs], Packs] = _shuffled
) -> Packed:
    """Its packs dealt to ranks in this order."""
    packs = trl_packs(tokens, cap, strategy)
    pieces = np.bincount(np.concatenate([members for members, _ in packs]))
    tokens_of_packs = [counts.tolist() for _, counts in packs]
    rows = in_fixed(dealt(tokens_of_packs), RANKS)
    num_cut = int((pieces > 1).sum())
    return rows, {"samples_cut": num_cut, "same_updates": False}


def multipack(tokens: np.ndarray, cap: int) -> Packed:
    """Axolotl's rule as described: first fit decreasing into bins of the cap, dealt to ranks, the rest of a row dropped."""
    bins: Packs = [[] for _ in tokens]
    room = np.full(len(tokens), cap)
    for length in np.sort(tokens)[::-1].tolist():
        first = int((room >= length).argmax())
        bins[first].append(length)
        room[first] -= length
    bins = _shuffled([members for members in bins if members])
    num_dealt = len(bins) - len(bins) % RANKS
    num_dropped = sum(map(len, bins[num_dealt:]))
    return in_fixed(bins[:num_dealt], RANKS), {
        "samples_dropped": num_dropped,
        "same_updates": False,
    }


def verl(tokens: np.ndarray, cap: int) -> Packed:
    """verl's rule as described: samples of an update to ranks by tokens, as many to each, then :func:`by_differencing`."""
    rows: list[Any] = []
    for update in updates_of(len(tokens)):
        drawn = tokens[update]
        ranks = differencing(drawn.astype(float), RANKS, equal_size=True)
        columns = []
        for parts in by_differencing(drawn, ranks, cap, "packed"):
            columns.append(by_work([drawn[part].tolist() for part in parts]))
        rows += zip(*columns, strict=True)
    return rows, {"same_updates": True}


def by_differencing(
    tokens: np.ndarray, ranks: list[list[int]], cap: int, layout: str
) -> list[list[list[int]]]:
    """Each rank's samples in parts of about equal work, as many on all: the fewest of which none is above the cap."""
    work = WORK.of_lengths(tokens)
    number = max(-(-int(tokens[rank].sum()) // cap) for rank in ranks)
    while True:
        division = [_divided(work, rank, number) for rank in ranks]
        parts = itertools.chain.from_iterable(division)
        if all(held(tokens[part], layout) <= cap for part in parts):
            return division
        number += 1


def _divided(work: np.ndarray, rank: list[int], number: int) -> list[list[int]]:
    """A rank's samples in so many parts of about equal work."""
    parts = []
    for places in differencing(work[rank], number):
        parts.append([rank[place] for place in places])
    return parts


Division = list[tuple[float, list[int]]]
"""Parts, dearest first: (cost, members)."""


def differencing(costs: np.ndarray, parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Largest differencing (Karmarkar and Karp 1982): of all partial divisions the two most uneven are joined, the dearest part
    of one with the cheapest of the other."""
    tie = itertools.count()
    heap: list[tuple[float, int, Division]] = []

    def push(division: Division) -> None:
        unevenness = division[0][0] - division[-1][0]
        heapq.heappush(heap, (-unevenness, next(tie), division))

    order = np.argsort(-costs, kind="stable")
    for group in in_fixed(order, parts if equal_size else 1):
        division: Division = [(float(costs[i]), [int(i)]) for i in group]
        num_empty = parts - len(group)
        push(division + [(0.0, [])] * num_empty)
    while len(heap) > 1:
        one = heapq.heappop(heap)[2]
        other = heapq.heappop(heap)[2]
        push(_joined(one, other))
    return [members for _, members in heap[0][2]]


def _joined(one: Division, other: Division) -> Division:
    joined = []
    for (cost, members), (more, others) in zip(one, reversed(other), strict=True):
        joined.append((cost + more, members + others))
    return sorted(joined, key=lambda part: -part[0])


def ours(tokens: np.ndarray, cap: int, **how: Any) -> Packed:
    plan = planned(tokens, TokenBudget(cap, layout="packed"), RANKS, **how)
    rows = [[tokens[batch].tolist() for batch in row] for row in plan.rows]
    return rows, {"samples_dropped": len(plan.dropped), "same_updates": "samples_per_update" in how}


PACKERS = {
    "TRL padding-free, the largest count that fits": padding_free,
    "TRL packing, wrapped": partial(trl, strategy="wrapped"),
    "TRL packing, bfd": partial(trl, strategy="bfd"),
    "TRL packing, bfd, sorted by work before dealing": partial(trl, strategy="bfd", dealt=by_work),
    "multipack (Axolotl's rule)": multipack,
    "dynagroup packed": partial(ours, shuffle=True),
    "verl's rule, updates of 256": verl,
    "dynagroup packed, updates of 256": partial(ours, samples_per_update=UPDATE),
}


def packs(_machine: Machine) -> dict[str, Any]:
    """Every packer on every length file."""
    files: dict[str, Any] = {}
    for name, cap in PACKED.items():
        tokens = lengths_of(name, 8_192)
        methods = {}
        for method, run in PACKERS.items():
            rows, lost = run(tokens, cap)
            methods[method] = pack_figures(rows, lost, cap)
        files[name] = {
            "cap": cap,
            "samples": len(tokens),
            "longest": int(tokens.max()),
            "methods": methods,
        }
    return {
        "ranks": RANKS,
        "update": UPDATE,
        "crossover": WORK.crossover,
        "per_step": WORK.per_step,
        "files": files,
    }


def pack_figures(rows: list[list[list[int]]], lost: dict[str, Any], cap: int) -> dict[str, Any]:
    dearest = 0.0
    work = 0.0
    tokens = 0
    for row in rows:
        costs = [float(WORK.of_lengths(pack).sum()) for pack in row]
        dearest += max(costs)
        work += sum(costs)
        tokens += sum(map(sum, row))
    figures = {
        "steps": len(rows),
        "fill": round(tokens / (cap * RANKS * len(rows)), 4),
        "row_imbalance": round(dearest * RANKS / work, 4),
        "critical_path": round(dearest + WORK.per_step * len(rows)),
        "samples_cut": 0,
        "samples_dropped": 0,
    }
    return figures | lost


# A rollout's samples to ranks and micro-batches


Rule = Callable[[np.ndarray, int, str], Any]
"""(tokens of an update, cap, layout) -> each rank's micro-batches."""
SHARES = (1, 2, 4, 8, 16)


def by_dynagroup(tokens: np.ndarray, cap: int, layout: Any) -> Any:
    return shard_micro_batches(tokens, RANKS, TokenBudget(cap, layout=layout), work=WORK)


def by_differencing_twice(tokens: np.ndarray, cap: int, layout: str) -> list[list[list[int]]]:
    """To ranks, then to micro-batches."""
    ranks = differencing(WORK.of_lengths(tokens), RANKS)
    return by_differencing(tokens, ranks, cap, layout)


def shards(_machine: Machine, updates: int = 10) -> dict[str, Any]:
    """Of each file, padded and packed: predicted time of some updates of 256 samples by ``shard_micro_batches`` and two rules."""
    times = {}
    for name, cap in PACKED.items():
        lengths = lengths_of(name, updates * UPDATE).clip(max=cap)
        drawn = lengths.reshape(-1, UPDATE)
        for layout in ("padded", "packed"):
            times[f"{name}, {layout}"] = shard_times(drawn, cap, layout)
    return {"ranks": RANKS, "update": UPDATE, "updates": updates, "times": times}


def shard_times(updates: np.ndarray, cap: int, layout: str) -> dict[str, float]:
    def time_of(rule: Rule) -> float:
        return sum(critical_path(rule(part, cap, layout), part, layout) for part in updates)

    return {
        "cap": cap,
        "ours": time_of(by_dynagroup),
        "differencing": time_of(by_differencing_twice),
        "dealt": min(time_of(partial(sorted_and_dealt, share=share)) for share in SHARES),
    }


def sorted_and_dealt(
    tokens: np.ndarray, cap: int, layout: str, *, share: int
) -> list[list[list[int]]]:
    """Sorted by length, cut at a share of the cap, the largest halved until they fill rows, dealt to ranks by work."""
    cap = max(cap // share, int(tokens.max()))
    order = longest_first(np.arange(len(tokens)), tokens)
    batches = in_capped(order, tokens, cap, packed=layout == "packed")
    while len(batches) % RANKS:
        sizes = [len(batch) for batch in batches]
        largest = batches.pop(int(np.argmax(sizes)))
        half = len(largest) // 2
        batches.append(largest[:half])
        batches.append(largest[half:])
    batches.sort(key=lambda part: -held(WORK.of_lengths(tokens[part]), layout))
    return [batches[rank::RANKS] for rank in range(RANKS)]


def critical_path(ranks: Any, tokens: np.ndarray, layout: str) -> float:
    """The dearest rank of each row, and the price of rows."""
    columns = []
    for parts in ranks:
        work = [held(WORK.of_lengths(tokens[part]), layout) for part in parts]
        columns.append(sorted(work, reverse=True))
    return WORK.of_rows(np.asarray(columns).T)
