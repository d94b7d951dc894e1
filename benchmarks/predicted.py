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

UPDATE, RANKS, WORK = 256, 8, Work()


def updates_of(count: int) -> list[list[int]]:
    """Updates as our plans draw them, so that all who keep updates have the same ones."""
    return in_fixed(epoch_order(count, seed=0, epoch=0), UPDATE)


def held(values: np.ndarray, layout: str) -> float:
    """Tokens or work of a batch, from its samples': the sum, or padded as many times the most."""
    return float(values.max(initial=0) * len(values) if layout == "padded" else values.sum())


# Padding: real over padded tokens, steps and predicted time, one rank; 16 of the longest samples set the peak for all.


def predicted_time_of(batches: list[list[int]], tokens: np.ndarray) -> float:
    """Predicted time of padded batches on one rank, in linear tokens, by the default ``Work``."""
    sizes = np.array([len(batch) for batch in batches])
    longest = np.array([tokens[batch].max() for batch in batches])
    return float((WORK.per_step + sizes * WORK.of_lengths(longest)).sum())


def padding(_machine: Machine) -> dict[str, Any]:
    """One row a length file: (real tokens / padded tokens, steps, predicted time over that of fixed batches) of each method."""
    figures = {}
    for name in FILES:
        tokens = lengths_of(name, 20_000)
        budget = TokenBudget(16 * int(tokens.max()))
        update_of_256 = [longest_first(update, tokens) for update in updates_of(len(tokens))]
        batches: dict[str, list[Any]] = {
            "fixed_16_shuffled": in_fixed(np.arange(len(tokens)), 16),
            "update_of_256_sorted_16": [
                batch for update in update_of_256 for batch in in_fixed(update, 16)
            ],
            "hf_group_by_length_16": in_fixed(group_by_length(tokens, 16, 0), 16),
            "hf_group_by_length_256": in_fixed(group_by_length(tokens, UPDATE, 0), 16),
        }
        ways: dict[str, dict[str, Any]] = {
            "dynagroup_whole_set": {},
            "dynagroup_shuffle": {"shuffle": True},
            "dynagroup_update_of_256": {"samples_per_update": UPDATE},
            "dynagroup_update_of_32": {"samples_per_update": 32},
            "dynagroup_grouping_50_of_32": {"samples_per_update": 32, "grouping": 50},
        }
        batches |= {
            way: [row[0] for row in planned(tokens, budget, **how).rows]
            for way, how in ways.items()
        }
        real = int(tokens.sum(dtype=np.int64))
        time_of_fixed = predicted_time_of(batches["fixed_16_shuffled"], tokens)
        rows = {}
        for way, made in batches.items():
            time = predicted_time_of(made, tokens) / time_of_fixed
            rows[way] = (real / padded_tokens(made, tokens), len(made), time)
        figures[name] = {"samples": len(tokens), "cv": float(tokens.std() / tokens.mean()), **rows}
    return figures


STRATA: dict[str, dict[str, Any]] = {
    "one stratum": {"strata": 1},
    "two strata": {"strata": 2},
    "grouping 50": {},
}


def strata(_machine: Machine) -> dict[str, Any]:
    """Predicted time of updates that are dealt by strata, over that of exact updates of as many samples."""
    figures: dict[str, Any] = {}
    for name in FILES:
        tokens = lengths_of(name, 8_000)
        budget = TokenBudget(16 * int(tokens.max()))
        figures[name] = {}
        for size, ranks in ((8, 1), (32, 1), (32, 8), (64, 8), (256, 8)):
            exact = planned(tokens, budget, ranks, samples_per_update=size)
            figures[name][f"size_{size}_ranks_{ranks}"] = {
                way: planned(
                    tokens, budget, ranks, samples_per_update=size, grouping=50, **how
                ).predicted_time
                / exact.predicted_time
                for way, how in STRATA.items()
            }
    return figures


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
    most = {
        size: np.add.reduceat(tokens, range(0, len(tokens), size)).max()
        for size in (1 << n for n in range(9))
    }
    size = max(size for size in most if most[size] <= cap)
    batches = [tokens[batch].tolist() for batch in in_fixed(np.arange(len(tokens)), size)]
    return in_fixed(batches, RANKS), {"samples_a_batch": size, "same_updates": True}


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
    rows = in_fixed(dealt([counts.tolist() for _, counts in packs]), RANKS)
    return rows, {"samples_cut": int((pieces > 1).sum()), "same_updates": False}


def multipack(tokens: np.ndarray, cap: int) -> Packed:
    """Axolotl's rule as described: first fit decreasing into bins of the cap, dealt to ranks, the rest of a row dropped."""
    bins: Packs = [[] for _ in tokens]
    room = np.full(len(tokens), cap)
    for length in np.sort(tokens)[::-1].tolist():
        first = int((room >= length).argmax())
        bins[first].append(length)
        room[first] -= length
    bins = _shuffled([members for members in bins if members])
    whole = len(bins) - len(bins) % RANKS
    return in_fixed(bins[:whole], RANKS), {
        "samples_dropped": sum(map(len, bins[whole:])),
        "same_updates": False,
    }


def verl(tokens: np.ndarray, cap: int) -> Packed:
    """verl's rule as described: samples of an update to ranks by tokens, as many to each, then :func:`by_differencing`."""
    rows: list[Any] = []
    for update in updates_of(len(tokens)):
        drawn = tokens[update]
        ranks = differencing(drawn.astype(float), RANKS, equal_size=True)
        parts = by_differencing(drawn, ranks, cap, "packed")
        rows += zip(
            *(by_work([drawn[part].tolist() for part in rank]) for rank in parts), strict=True
        )
    return rows, {"same_updates": True}


def by_differencing(
    tokens: np.ndarray, ranks: list[list[int]], cap: int, layout: str
) -> list[list[list[int]]]:
    """Each rank's samples in parts of about equal work, as many on all: the fewest of which none is above the cap."""
    each, least = WORK.of_lengths(tokens), max(-(-int(tokens[rank].sum()) // cap) for rank in ranks)
    ways = (
        [[[rank[i] for i in part] for part in differencing(each[rank], number)] for rank in ranks]
        for number in itertools.count(least)
    )
    return next(
        way
        for way in ways
        if all(held(tokens[part], layout) <= cap for parts in way for part in parts)
    )


def differencing(costs: np.ndarray, parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Largest differencing (Karmarkar and Karp 1982): of all partial divisions the two most uneven are joined, the dearest part
    of one with the cheapest of the other."""
    tie, width = itertools.count(), parts if equal_size else 1
    order = np.argsort(-costs, kind="stable")
    heap = []
    for group in (order[i : i + width] for i in range(0, len(order), width)):
        division = [(float(costs[i]), [int(i)]) for i in group] + [(0.0, [])] * (parts - len(group))
        heap.append((division[-1][0] - division[0][0], next(tie), division))
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], next(tie), joined))
    return [members for _, members in heap[0][2]]


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
        methods = {method: pack_figures(*run(tokens, cap), cap) for method, run in PACKERS.items()}
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


def pack_figures(rows: list[list[list[int]]], more: dict[str, Any], cap: int) -> dict[str, Any]:
    work = [[float(WORK.of_lengths(pack).sum()) for pack in row] for row in rows]
    dearest, tokens = sum(map(max, work)), [sum(pack) for row in rows for pack in row]
    return {
        "steps": len(rows),
        "fill": round(sum(tokens) / (cap * RANKS * len(rows)), 4),
        "row_imbalance": round(dearest * RANKS / sum(map(sum, work)), 4),
        "critical_path": round(dearest + WORK.per_step * len(rows)),
        **{"samples_cut": 0, "samples_dropped": 0, **more},
    }


# A rollout's samples to ranks and micro-batches


def shards(_machine: Machine, updates: int = 10) -> dict[str, Any]:
    """Of each file, padded and packed: predicted time of some updates of 256 samples by ``shard_micro_batches`` and two rules."""
    rules = {
        "ours": lambda part, cap, layout: shard_micro_batches(
            part, RANKS, TokenBudget(cap, layout=layout), work=WORK
        ),
        "differencing": lambda part, cap, layout: by_differencing(
            part, differencing(WORK.of_lengths(part), RANKS), cap, layout
        ),
        **{f"dealt {share}": partial(sorted_and_dealt, share=share) for share in (1, 2, 4, 8, 16)},
    }
    found = {}
    for (name, cap), layout in itertools.product(PACKED.items(), ("padded", "packed")):
        parts = lengths_of(name, updates * UPDATE).clip(max=cap).reshape(-1, UPDATE)
        times = {
            rule: sum(critical_path(made(part, cap, layout), part, layout) for part in parts)
            for rule, made in rules.items()
        }
        dealt = min(time for rule, time in times.items() if rule.startswith("dealt"))
        found[f"{name}, {layout}"] = {
            "cap": cap,
            **{k: times[k] for k in ("ours", "differencing")},
            "dealt": dealt,
        }
    return {"ranks": RANKS, "update": UPDATE, "updates": updates, "times": found}


def sorted_and_dealt(
    tokens: np.ndarray, cap: int, layout: str, *, share: int
) -> list[list[list[int]]]:
    """Sorted by length, cut at a share of the cap, the largest halved until they fill rows, dealt to ranks by work."""
    cap = max(cap // share, int(tokens.max()))
    made = in_capped(
        longest_first(np.arange(len(tokens)), tokens), tokens, cap, packed=layout == "packed"
    )
    while len(made) % RANKS:
        largest = made.pop(max(range(len(made)), key=lambda k: len(made[k])))
        made += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    made.sort(key=lambda part: -held(WORK.of_lengths(tokens[part]), layout))
    return [made[rank::RANKS] for rank in range(RANKS)]


def critical_path(made: Any, tokens: np.ndarray, layout: str) -> float:
    """The dearest rank of each row, and the price of rows."""
    work = [
        sorted((held(WORK.of_lengths(tokens[part]), layout) for part in rank), reverse=True)
        for rank in made
    ]
    return WORK.of_rows(np.asarray(work).T)
