"""Batches that are counted, not run: padding, steps and predicted time of ours and of the rules of other packers and balancers.

A method turns lengths into rows: ``rows[step][rank]`` is a batch. A measure turns rows into figures. Time is predicted by
``Work``: a row takes its dearest batch and the price of a step. TRL's packing and transformers' sampler are their own code; the
other rules are written from their descriptions. Real lengths (``benchmarks/lengths``), drawn with a seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.data import FILES, lengths_of, pairs_of
from benchmarks.methods import METHODS, Job, group_by_length, in_fixed, padded_tokens, planned
from dynagroup import TokenBudget, Work, shard_micro_batches

PRICE, UPDATE, RANKS, WORK = 1024.0, 256, 8, Work()


def in_rows(batches: Sequence[Any]) -> list[list[Any]]:
    """Batches in the order in which ranks take them."""
    return [list(batches[i : i + RANKS]) for i in range(0, len(batches), RANKS)]


def updates_of(count: int) -> list[np.ndarray]:
    """Updates as the sampler draws them, so that all who keep updates have the same ones."""
    equal = Job(np.ones(count, np.int32), UPDATE, UPDATE)
    return [np.concatenate(update) for update in METHODS["dynagroup"].updates(equal, 0)]


# Padding: real over padded tokens and steps, one rank; 16 of the longest samples set the peak for all.


def padding() -> dict[str, Any]:
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
        }
        batches |= {way: [row[0] for row in planned(tokens, budget, **how).rows] for way, how in ways.items()}
        real = int(tokens.sum(dtype=np.int64))
        rows = {way: (real / padded_tokens(made, tokens), len(made)) for way, made in batches.items()}
        figures[name] = {"samples": len(tokens), "cv": float(tokens.std() / tokens.mean()), **rows}
    return figures


# The cut: fewest batches against least time. The budget holds 16 of the longest sample; a step costs 1,024 tokens.


CUT = (
    *("gsm8k", "azure_llm_conv_2023", "python_files", "mooncake_conv", "t0_mix_50k", "synth_ultrachat"),
    "synth_sharegpt4o",
)


def cuts() -> dict[str, Any]:
    """Padded tokens of each row's dearest rank, plus 1,024 a step, of updates of 16 to 256 samples and of free ones."""
    work, found = Work(per_step=PRICE, crossover=math.inf), {}
    for name, group, ranks in itertools.product(CUT, (16, 32, 64, 256, None), (1, 8)):
        tokens = lengths_of(name, 20_000 if group is None or group >= 256 else 4_000)
        size: dict[str, Any] = {"shuffle": True} if group is None else {"samples_per_update": group}
        ways: dict[str, Any] = {"before": {"work": Work(per_step=1e12, crossover=math.inf)}, "now": {"work": work}}
        budget = TokenBudget(16 * int(tokens.max()))
        found[f"{name}/{group or 'free'}/{ranks}"] = {
            way: cut_figures(planned(tokens, budget, ranks, seed=1, **size, **how)) for way, how in ways.items()
        }
    return found


def cut_figures(plan: Any) -> dict[str, float]:
    """With padded tokens for work, whatever the plan was made to save."""
    by_row = plan.padded[plan.table].astype(float)
    dearest = float(by_row.max(axis=1).sum())
    cost, waiting = PRICE * len(by_row) + dearest, dearest / max(float(by_row.mean(axis=1).sum()), 1e-9)
    return {"steps": plan.num_steps, "real_share": plan.statistics["efficiency"], "cost": cost, "waiting": waiting}


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
        import pyarrow as pa
        from datasets import Dataset
        from trl.data_utils import pack_dataset

        flat = np.repeat(np.arange(len(tokens), dtype=np.int32), tokens)
        offsets = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))})
        pieces, made = np.zeros(len(tokens), np.int64), []
        for row in pack_dataset(Dataset(table), seq_length=cap, strategy=strategy).with_format("numpy"):
            members, counts = np.unique(row["input_ids"], return_counts=True)
            made.append(counts.tolist())
            pieces[members] += 1
        lost = int(tokens.sum()) - sum(map(sum, made))
        return in_rows(_shuffled(made)), {
            "samples_cut": int((pieces > 1).sum()),
            "tokens_lost": lost,
            "same_updates": False,
        }

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
        parts = [[drawn[part].tolist() for part in rank] for rank in by_differencing(drawn, ranks, cap, WORK, "packed")]
        for made in parts:
            made.sort(key=lambda pack: -float(WORK.of_lengths(pack).sum()))
        rows += [[made[step] for made in parts] for step in range(len(parts[0]))]
    return rows, {"same_updates": True}


def by_differencing(
    tokens: np.ndarray, ranks: list[list[int]], cap: int, work: Work, layout: str
) -> list[list[list[int]]]:
    """Each rank's samples in parts of about equal work, as many on all: the fewest of which none is above the cap."""

    def size(part: list[int]) -> int:
        return int(tokens[part].max() * len(part) if layout == "padded" else tokens[part].sum()) if part else 0

    each = work.of_lengths(tokens)
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
        lost = {"samples_dropped": len(plan.dropped), "samples_repeated": len(plan.repeated)}
        rows = [[tokens[batch].tolist() for batch in row] for row in plan.rows]
        return rows, {**lost, "same_updates": samples_per_update is not None}

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


def packs() -> dict[str, Any]:
    """Every packer on every length file."""
    files: dict[str, Any] = {}
    for name, cap in PACKED.items():
        tokens = lengths_of(name, 8_192)
        files[name] = {"cap": cap, "samples": len(tokens), "tokens": int(tokens.sum()), "longest": int(tokens.max()),
                       "least_imbalance_of_updates": least_imbalance(tokens), "methods": {}}  # fmt: skip
        for method, run in PACKERS.items():
            rows, more = run(tokens, cap)
            none = {"samples_cut": 0, "samples_dropped": 0, "tokens_lost": 0}
            files[name]["methods"][method] = {**none, **pack_figures(rows, cap), **more}
    return {"ranks": RANKS, "update": UPDATE, "crossover": WORK.crossover, "per_step": WORK.per_step, "files": files}


def least_imbalance(tokens: np.ndarray) -> float:
    """Of a row's dearest batch to its mean, over all updates: none takes less than its dearest sample, or an equal share."""
    work = [WORK.of_lengths(tokens[update]) for update in updates_of(len(tokens))]
    least = sum(max(float(each.sum()) / RANKS, float(each.max())) for each in work)
    return round(least * RANKS / float(WORK.of_lengths(tokens).sum()), 4)


def pack_figures(rows: list[list[list[int]]], cap: int) -> dict[str, Any]:
    work = [[float(WORK.of_lengths(pack).sum()) for pack in row] for row in rows]
    dearest, tokens = sum(map(max, work)), [sum(pack) for row in rows for pack in row]
    return {
        "steps": len(rows),
        "fill": round(sum(tokens) / (cap * RANKS * len(rows)), 4),
        "largest_batch_tokens": max(tokens),
        "row_imbalance": round(dearest * RANKS / sum(map(sum, work)), 4),
        "critical_path": round(dearest + WORK.per_step * len(rows)),
    }


# Shards: a rollout's samples to ranks and micro-batches, against Karmarkar-Karp over ranks, then over each rank's micro-batches.


SHARDED = {
    "azure_llm_conv_2023": 16_384,
    "python_files": 65_536,
    "synth_sharegpt4o": 16_384,
    "t0_mix_50k": 8_192,
    "mooncake_conv": 131_072,
}
SHARD_WORK = Work(per_step=PRICE, crossover=24_576)  # verl's model of a 7B


def shards() -> dict[str, Any]:
    """Critical path of ten updates of 256 samples: the dearest rank of each step, and the price of steps."""
    found: dict[str, Any] = {}
    for (name, cap), layout in itertools.product(SHARDED.items(), ("packed", "padded")):
        tokens = lengths_of(name, 20_000).astype(np.int64)
        tokens, sums = tokens[tokens <= cap], np.zeros(5)
        for first in range(0, min(len(tokens), 10 * UPDATE) - UPDATE + 1, UPDATE):
            part = tokens[first : first + UPDATE]
            mine: Any = shard_micro_batches(part, RANKS, TokenBudget(cap, layout=layout), work=SHARD_WORK)
            theirs = by_differencing(part, differencing(SHARD_WORK.of_lengths(part), RANKS), cap, SHARD_WORK, layout)
            paths = [critical_path(made, part, layout) for made in (mine, theirs)]
            sums += [*paths, len(mine[0]), len(theirs[0]), least_path(part, cap, layout)]
        found[f"{name}/{layout}"] = {
            "critical_path": sums[0] / sums[1], "over_bound": sums[0] / sums[4], "rival_over_bound": sums[1] / sums[4],
            "micro_batches": sums[2], "rival_micro_batches": sums[3],
        }  # fmt: skip
    return found


def critical_path(made: Any, tokens: np.ndarray, layout: str) -> float:
    def of(part: Any) -> float:
        if not part:
            return 0.0
        longest = len(part) * SHARD_WORK.of_lengths(tokens[part].max())
        return float(longest if layout == "padded" else SHARD_WORK.of_lengths(tokens[part]).sum())

    by_rank = np.asarray([sorted((of(part) for part in rank), reverse=True) for rank in made])
    return SHARD_WORK.of_rows(by_rank.T)


def least_path(tokens: np.ndarray, cap: int, layout: str) -> float:
    """No division takes less: each row's dearest rank has at least the row's mean work, and one row has the longest sample.

    Padded, the batches' work and price come to at least those of the exact cut for one rank.
    """
    each = SHARD_WORK.of_lengths(tokens)
    rows = max(-(-int(tokens.sum()) // (RANKS * cap)), 1)
    least = SHARD_WORK.per_step * rows + max(float(each.sum()) / RANKS, float(each.max()))
    if layout == "packed":
        return least
    return max(least, planned(tokens, TokenBudget(cap), work=SHARD_WORK).predicted_time / RANKS)


# Two padded streams: sorted by the first alone, as most samplers do, against an order of both.


PAIRS = {
    "gsm8k": "questions and worked answers, correlation 0.52",
    "t0_mix_50k": "prompts and short answers, correlation 0.12",
    "azure_llm_conv_2023": "long conversations and answers, correlation -0.11",
}


def streams() -> dict[str, Any]:
    """20,000 pairs in updates of 256, windows of 4,096 and sorted whole; one rank, one budget over both streams."""
    rng = np.random.default_rng(0)
    source = rng.lognormal(3.3, 0.6, 20_000).clip(2, 512)
    target = (source * rng.lognormal(0.1, 0.25, 20_000)).clip(1, 512)
    drawn = {"tokens": source.astype(np.int32), "target": target.astype(np.int32)}
    pairs = {"translation": ("drawn: target = source x 1.1, ratio varies by 25 %", drawn)}
    pairs |= {name: (what, pairs_of(name, 20_000)) for name, what in PAIRS.items()}
    found: dict[str, Any] = {}
    for name, (what, lengths) in pairs.items():
        budget = TokenBudget(max(16_384, 2 * sum(int(values.max()) for values in lengths.values())))
        rows: dict[str, Any] = {"what": what, "pairs": len(lengths["tokens"]), "max_tokens": budget.max_tokens}
        for label, window in {"updates of 256": 256, "windows of 4,096": 4096, "sorted whole": 20_000}.items():
            before, after = (stream_figures(lengths, budget, window, rule) for rule in (by_first, by_both))
            share = after["predicted_time"] / before["predicted_time"]
            rows[label] = {"by_first_stream": before, "by_both": after, "share_of_time": share}
        found[name] = rows
    return {"pairs": found}


def by_both(lengths: dict[str, np.ndarray], budget: TokenBudget) -> list[Any]:
    return [row[0] for row in planned(lengths, budget, work=WORK).rows]


def by_first(lengths: dict[str, np.ndarray], budget: TokenBudget) -> list[Any]:
    """Sorted by the source, ties by the target; cut for least time of both (dynamic programming over the sorted samples)."""
    order = np.lexsort((-lengths["target"], -lengths["tokens"]))
    source, target = (lengths[name][order].astype(np.int64) for name in ("tokens", "target"))
    best, came = np.full(len(order) + 1, np.inf), np.zeros(len(order) + 1, np.int64)
    best[0] = 0.0
    for start in range(len(order)):
        most = np.maximum.accumulate(target[start : start + 4096])
        count = np.arange(1, len(most) + 1)
        fits = count * (source[start] + most) <= budget.max_tokens
        fits[0] = True
        each = WORK.of_lengths(source[start]) + WORK.of_lengths(most[fits])
        time_to, ends = best[start] + WORK.per_step + count[fits] * each, start + count[fits]
        better = time_to < best[ends]
        best[ends[better]], came[ends[better]] = time_to[better], start
    batches, end = [], len(order)
    while end:
        batches.append(order[came[end] : end])
        end = int(came[end])
    return batches[::-1]


def stream_figures(lengths: dict[str, np.ndarray], budget: TokenBudget, window: int, rule: Any) -> dict[str, float]:
    """Padding over both streams, steps, predicted time in linear tokens."""
    padded, steps, predicted = 0, 0, 0.0
    for first in range(0, len(lengths["tokens"]), window):
        part = {name: values[first : first + window] for name, values in lengths.items()}
        for batch in rule(part, budget):
            longest = {name: values[batch].max() for name, values in part.items()}
            padded += len(batch) * int(sum(longest.values()))
            predicted += WORK.per_step + len(batch) * float(WORK.of_lengths(longest))
            steps += 1
    real = sum(int(values.sum()) for values in lengths.values())
    return {"padding": 1.0 - real / padded, "steps": steps, "predicted_time": predicted}
