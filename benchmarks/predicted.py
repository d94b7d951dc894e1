"""Batches that are counted, not run: padding, steps and predicted time of ours and of other packers and balancers.

A method turns lengths into rows: ``rows[step][rank]`` is a batch; a row takes its dearest batch and the price of a step. TRL's
packing and transformers' sampler are their own code; the other rules are written from their descriptions.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.data import FILES, lengths_of
from benchmarks.machine import Machine
from benchmarks.methods import METHODS, Job, group_by_length, in_fixed, padded_tokens, planned, trl_packs
from dynagroup import TokenBudget, Work, shard_micro_batches

UPDATE, RANKS, WORK = 256, 8, Work()


def in_rows(batches: Sequence[Any]) -> list[list[Any]]:
    """Batches in the order in which ranks take them."""
    return [list(batches[i : i + RANKS]) for i in range(0, len(batches), RANKS)]


def updates_of(count: int) -> list[np.ndarray]:
    """Updates as the sampler draws them, so that all who keep updates have the same ones."""
    equal = Job(np.ones(count, np.int32), UPDATE, UPDATE)
    return [np.concatenate(update) for update in METHODS["dynagroup"].updates(equal, 0)]


# Padding: real over padded tokens and steps, one rank; 16 of the longest samples set the peak for all.


def padding(_machine: Machine) -> dict[str, Any]:
    """One row a length file: (real tokens / padded tokens, steps) of each method."""
    figures = {}
    for name in FILES:
        tokens = lengths_of(name, 20_000)
        budget = TokenBudget(16 * int(tokens.max()))
        whole = planned(tokens, budget)
        batches: dict[str, list[Any]] = {
            "fixed_16_shuffled": in_fixed(np.arange(len(tokens)), 16),
            "hf_group_by_length_16": in_fixed(group_by_length(tokens, 16, 0), 16),
        }
        ways: dict[str, dict[str, Any]] = {
            "dynagroup_whole_set": {},
            "dynagroup_window_50_batches": {"shuffle": True, "window": 50 * round(len(tokens) / whole.num_steps)},
            "dynagroup_shuffle": {"shuffle": True},
            "dynagroup_update_of_256": {"samples_per_update": UPDATE},
            "dynagroup_update_of_32": {"samples_per_update": 32},
            "dynagroup_grouping_50_of_32": {"samples_per_update": 32, "grouping": 50},
        }
        batches |= {way: [row[0] for row in planned(tokens, budget, **how).rows] for way, how in ways.items()}
        real = int(tokens.sum(dtype=np.int64))
        rows = {way: (real / padded_tokens(made, tokens), len(made)) for way, made in batches.items()}
        figures[name] = {"samples": len(tokens), "cv": float(tokens.std() / tokens.mean()), **rows}
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
    """TRL padding-free: a number of samples that fits the cap even if all are the longest; batches as they come."""
    size = max(1, cap // int(tokens.max()))
    return in_rows(in_fixed(tokens, size)), {"samples_a_batch": size, "same_updates": True}


def trl(strategy: str) -> Callable[[np.ndarray, int], Packed]:
    def packed(tokens: np.ndarray, cap: int) -> Packed:
        packs, pieces = trl_packs(tokens, cap, strategy), np.zeros(len(tokens), np.int64)
        for members, _ in packs:
            pieces[members] += 1
        rows = in_rows(_shuffled([counts.tolist() for _, counts in packs]))
        return rows, {"samples_cut": int((pieces > 1).sum()), "same_updates": False}

    return packed


def _shuffled(packs: list[list[int]]) -> list[list[int]]:
    return [packs[i] for i in np.random.default_rng(1).permutation(len(packs))]


def multipack(tokens: np.ndarray, cap: int) -> Packed:
    """Axolotl's rule as described: first fit decreasing into bins of the cap, dealt to ranks, the rest of a row dropped."""
    bins: list[list[int]] = []
    room: list[int] = []
    for length in np.sort(tokens)[::-1].tolist():
        place = next((i for i, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(cap)
        bins[place].append(length)
        room[place] -= length
    bins, whole = _shuffled(bins), len(bins) - len(bins) % RANKS
    return in_rows(bins[:whole]), {"samples_dropped": sum(map(len, bins[whole:])), "same_updates": False}


def verl(tokens: np.ndarray, cap: int) -> Packed:
    """verl's rule as described: samples of an update to ranks by tokens, as many to each, then :func:`by_differencing`."""
    rows: list[Any] = []
    for update in updates_of(len(tokens)):
        drawn = tokens[update]
        ranks = differencing(drawn.astype(float), RANKS, equal_size=True)
        parts = [[drawn[part].tolist() for part in rank] for rank in by_differencing(drawn, ranks, cap, "packed")]
        for made in parts:
            made.sort(key=lambda pack: -float(WORK.of_lengths(pack).sum()))
        rows += [[made[step] for made in parts] for step in range(len(parts[0]))]
    return rows, {"same_updates": True}


def by_differencing(tokens: np.ndarray, ranks: list[list[int]], cap: int, layout: str) -> list[list[list[int]]]:
    """Each rank's samples in parts of about equal work, as many on all: the fewest of which none is above the cap."""

    def size(part: list[int]) -> int:
        return int(tokens[part].max() * len(part) if layout == "padded" else tokens[part].sum()) if part else 0

    each = WORK.of_lengths(tokens)
    for number in itertools.count(max(-(-int(tokens[rank].sum()) // cap) for rank in ranks)):
        made = [[[rank[i] for i in part] for part in differencing(each[rank], number)] for rank in ranks]
        if all(size(part) <= cap for parts in made for part in parts):
            return made
    raise AssertionError


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


def ours(samples_per_update: int | None) -> Callable[[np.ndarray, int], Packed]:
    def packed(tokens: np.ndarray, cap: int) -> Packed:
        how: dict[str, Any] = {"shuffle": samples_per_update is None, "samples_per_update": samples_per_update}
        plan = planned(tokens, TokenBudget(cap, layout="packed"), RANKS, **how)
        rows = [[tokens[batch].tolist() for batch in row] for row in plan.rows]
        return rows, {"samples_dropped": len(plan.dropped), "same_updates": samples_per_update is not None}

    return packed


PACKERS = {
    "TRL padding-free, a count that always fits": padding_free,
    "TRL packing, wrapped": trl("wrapped"),
    "TRL packing, bfd": trl("bfd"),
    "multipack (Axolotl's rule)": multipack,
    "dynagroup packed": ours(None),
    "verl's rule, updates of 256": verl,
    "dynagroup packed, updates of 256": ours(UPDATE),
}


def packs(_machine: Machine) -> dict[str, Any]:
    """Every packer on every length file."""
    files: dict[str, Any] = {}
    for name, cap in PACKED.items():
        tokens = lengths_of(name, 8_192)
        methods = {method: pack_figures(*run(tokens, cap), cap) for method, run in PACKERS.items()}
        files[name] = {"cap": cap, "samples": len(tokens), "longest": int(tokens.max()), "methods": methods}
    return {"ranks": RANKS, "update": UPDATE, "crossover": WORK.crossover, "per_step": WORK.per_step, "files": files}


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


# A rollout's samples to ranks and micro-batches, against Karmarkar-Karp over ranks, then over each rank's micro-batches.


def shares_of_time(updates: int = 10) -> list[float]:
    """Of each file, padded and packed: our critical path of some updates of 256 samples over the usual way's."""
    found = []
    for (name, cap), layout in itertools.product(PACKED.items(), ("packed", "padded")):
        tokens, sums = lengths_of(name, updates * UPDATE).clip(max=cap), np.zeros(2)
        for part in tokens.reshape(-1, UPDATE):
            mine: Any = shard_micro_batches(part, RANKS, TokenBudget(cap, layout=layout), work=WORK)
            theirs = by_differencing(part, differencing(WORK.of_lengths(part), RANKS), cap, layout)
            sums += [critical_path(made, part, layout) for made in (mine, theirs)]
        found.append(sums[0] / sums[1])
    return found


def critical_path(made: Any, tokens: np.ndarray, layout: str) -> float:
    """The dearest rank of each row, and the price of rows."""

    def of(part: Any) -> float:
        each = WORK.of_lengths(tokens[part])
        return float(len(part) * each.max() if layout == "padded" else each.sum()) if len(part) else 0.0

    return WORK.of_rows(np.asarray([sorted(map(of, rank), reverse=True) for rank in made]).T)
