"""Batches that are counted, not run: padding, steps and predicted time of ours and of the rules of other packers and balancers.

A method turns lengths into rows: ``rows[step][rank]`` is a batch of sample indices. A measure turns rows into figures. Time is
predicted by ``Work``: a row takes its dearest batch and the price of a step. TRL's packing and transformers' sampler are their
own code; the other rules are written from their descriptions. Real lengths (``benchmarks/lengths``), drawn with a seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup import LengthAwareBatchSampler, TokenBudget, Work, shard_micro_batches
from dynagroup.plan.epoch import EpochOrder

__all__ = ["cuts", "lognormal", "packs", "padding", "shards", "streams"]

LENGTHS = Path(__file__).parent / "lengths"
PRICE, UPDATE, RANKS = 1024.0, 256, 8
Batch = Sequence[int]
Rows = list[list[Batch]]
Method = Callable[[np.ndarray, int], Rows]
"""(lengths, tokens that fit) -> rows."""


def lengths_of(name: str, most: int) -> np.ndarray:
    """At most so many lengths of a file, drawn with a seed."""
    found = np.random.default_rng(0).permutation(np.load(LENGTHS / f"{name}.npz")["tokens"])
    return np.maximum(found[:most], 1).astype(np.int32)


def lognormal(count: int, *, mean: float = 500.0, cv: float = 1.0, longest: int = 16384) -> np.ndarray:
    sigma = np.sqrt(np.log(1 + cv**2))
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, 1, longest).astype(np.int32)


def planned(lengths: Any, budget: Any, ranks: int = 1, **options: Any) -> Any:
    return LengthAwareBatchSampler(lengths, budget, rank=0, world_size=ranks, **options).plan


def in_rows(batches: Sequence[Batch], ranks: int = RANKS) -> Rows:
    """Batches in the order in which ranks take them."""
    return [list(batches[i : i + ranks]) for i in range(0, len(batches), ranks)]


def fixed(order: Sequence[int], size: int) -> list[Batch]:
    return [order[k : k + size] for k in range(0, len(order), size)]


def updates_of(count: int) -> list[np.ndarray]:
    """Updates as the sampler draws them, so that all who keep updates have the same ones."""
    return [np.asarray(update) for update in fixed(EpochOrder(count, seed=0, epoch=0)[:], UPDATE)]


# Padding: real over padded tokens and steps, one rank; 16 of the longest samples set the peak for all.


def group_by_length(lengths: np.ndarray, size: int) -> list[Batch]:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(0)
    return fixed(list(LengthGroupedSampler(size, lengths=lengths.tolist(), generator=generator)), size)


def efficiency(lengths: np.ndarray, batches: Sequence[Batch]) -> tuple[float, int]:
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return float(lengths.sum(dtype=np.int64) / padded), len(batches)


def padding() -> dict[str, Any]:
    """One row a length file: (real tokens / padded tokens, steps) of each method."""
    figures = {}
    for path in sorted(LENGTHS.glob("*.npz")):
        tokens = lengths_of(path.stem, 20_000)
        budget = TokenBudget(16 * int(tokens.max()))
        whole = planned(tokens, budget)
        batches = {
            "fixed_16_shuffled": fixed(np.arange(len(tokens)), 16),
            "hf_group_by_length_16": group_by_length(tokens, 16),
        }
        ways: dict[str, dict[str, Any]] = {
            "dynagroup_whole_set": {},
            "dynagroup_window_50_batches": {"shuffle": True, "window": 50 * round(len(tokens) / whole.num_steps)},
            "dynagroup_shuffle": {"shuffle": True},
            "dynagroup_update_of_256": {"samples_per_update": UPDATE},
        }
        batches |= {name: [row[0] for row in planned(tokens, budget, **way).rows] for name, way in ways.items()}
        rows = {name: efficiency(tokens, made) for name, made in batches.items()}
        figures[path.stem] = {"samples": len(tokens), "cv": float(tokens.std() / tokens.mean()), **rows}
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
        ways: dict[str, Any] = {"before": {"objective": "fewest"}, "now": {"work": work}}
        budget = TokenBudget(16 * int(tokens.max()))
        found[f"{name}/{group or 'free'}/{ranks}"] = {
            way: cut_figures(planned(tokens, budget, ranks, seed=1, **size, **how)) for way, how in ways.items()
        }
    return found


def cut_figures(plan: Any) -> dict[str, float]:
    """With padded tokens for work, whatever the plan was made to save."""
    by_row = plan.padded[plan.table].astype(float)
    dearest = float(by_row.max(axis=1).sum())
    return {"steps": plan.num_steps, "real_share": plan.statistics["efficiency"], "cost": PRICE * len(by_row) + dearest,
            "waiting": dearest / max(float(by_row.mean(axis=1).sum()), 1e-9)}  # fmt: skip


# Packed batches: what they hold and how equal their work is.


WORK = Work()
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
    return in_rows(fixed(tokens.tolist(), size)), {"samples_a_batch": size, "same_updates": True}  # type: ignore[return-value]


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
        order = np.random.default_rng(1).permutation(len(made))
        lost = int(tokens.sum()) - sum(map(sum, made))
        counted = {"samples_cut": int((pieces > 1).sum()), "tokens_lost": lost, "same_updates": False}
        return in_rows([made[i] for i in order]), counted

    return packed


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
    order = np.random.default_rng(1).permutation(len(bins))
    whole = len(bins) - len(bins) % RANKS
    dropped = sum(len(bins[i]) for i in order[whole:])
    return in_rows([bins[i] for i in order[:whole]]), {"samples_dropped": dropped, "same_updates": False}


def verl(tokens: np.ndarray, cap: int) -> Packed:
    """verl's rule as described: samples of an update to ranks by largest differencing on tokens, as many to each.

    On a rank as few micro-batches as the fullest rank's tokens allow, by differencing on work; one more while any is too large.
    """
    rows: list[Any] = []
    for update in updates_of(len(tokens)):
        drawn = tokens[update]
        ranks = [drawn[part] for part in differencing(drawn.astype(float), RANKS, equal_size=True)]
        parts = fewest_parts(ranks, cap, lambda rank: WORK.of_lengths(rank))
        for made in parts:
            made.sort(key=lambda pack: -float(WORK.of_lengths(pack).sum()))
        rows += [[made[step] for made in parts] for step in range(len(parts[0]))]
    return rows, {"same_updates": True}


def fewest_parts(ranks: list[np.ndarray], cap: int, cost: Callable[[Any], Any]) -> list[list[list[int]]]:
    """Each rank's lengths in the fewest parts, as many on all, of which none is above the cap."""
    for number in itertools.count(max(-(-int(rank.sum()) // cap) for rank in ranks)):
        parts = [[rank[p].tolist() for p in differencing(cost(rank), number)] for rank in ranks]
        if all(sum(part) <= cap for made in parts for part in made):
            return parts
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
            started = time.process_time()
            rows, more = run(tokens, cap)
            taken = round(time.process_time() - started, 3)
            none = {"samples_cut": 0, "samples_dropped": 0, "tokens_lost": 0}
            files[name]["methods"][method] = {**none, **pack_figures(rows, cap), **more, "cpu_s": taken}
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
            mine = shard_micro_batches(part, RANKS, TokenBudget(cap, layout=layout), work=SHARD_WORK)
            theirs = rival_shards(part, cap, layout)
            paths = [critical_path(made, part, layout) for made in (mine, theirs)]
            sums += [*paths, len(mine[0]), len(theirs[0]), least_path(part, cap, layout)]
        found[f"{name}/{layout}"] = {
            "critical_path": sums[0] / sums[1], "over_bound": sums[0] / sums[4], "rival_over_bound": sums[1] / sums[4],
            "micro_batches": sums[2], "rival_micro_batches": sums[3],
        }  # fmt: skip
    return found


def rival_shards(tokens: np.ndarray, cap: int, layout: str) -> Any:
    """Balance work over ranks, then over each rank's micro-batches; as few of them as keep every one under the cap."""
    each = SHARD_WORK.of_lengths(tokens)
    mine = [np.asarray(part) for part in differencing(each, RANKS)]
    size = (lambda part: tokens[part].max() * len(part)) if layout == "padded" else (lambda part: tokens[part].sum())
    for number in itertools.count(max(-(-int(tokens[part].sum()) // cap) for part in mine)):
        cut = [[rank[part].tolist() for part in differencing(each[rank], number)] for rank in mine]
        if all(size(part) <= cap for rank in cut for part in rank if part):
            return cut
    raise AssertionError


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
    alone = planned(tokens, TokenBudget(cap), work=SHARD_WORK)
    return max(least, SHARD_WORK.of_rows(alone.work_by_row) / RANKS)


# Two padded streams: sorted by the first alone, as most samplers do, against an order of both.


PAIRS = {
    "gsm8k": "questions and worked answers, correlation 0.52",
    "t0_mix_50k": "prompts and short answers, correlation 0.12",
    "azure_llm_conv_2023": "long conversations and answers, correlation -0.11",
}


def streams() -> dict[str, Any]:
    """20,000 pairs in updates of 256, windows of 4,096 and sorted whole; one rank, one budget over both streams."""
    found: dict[str, Any] = {}
    for name, (what, lengths) in pairs().items():
        budget = TokenBudget(max(16_384, 2 * sum(int(values.max()) for values in lengths.values())))
        rows: dict[str, Any] = {"what": what, "pairs": len(lengths["tokens"]), "max_tokens": budget.max_tokens}
        for label, window in {"updates of 256": 256, "windows of 4,096": 4096, "sorted whole": 20_000}.items():
            before, after = (stream_figures(lengths, budget, window, rule) for rule in (by_first, by_both))
            share = after["predicted_time"] / before["predicted_time"]
            rows[label] = {"by_first_stream": before, "by_both": after, "share_of_time": share}
        found[name] = rows
    return {"pairs": found}


def pairs() -> dict[str, tuple[str, dict[str, np.ndarray]]]:
    """Name -> (what it is, source and target tokens)."""
    rng = np.random.default_rng(0)
    source = rng.lognormal(3.3, 0.6, 20_000).clip(2, 512)
    drawn = {"tokens": source, "target": (source * rng.lognormal(0.1, 0.25, 20_000)).clip(1, 512)}
    found = {"translation": ("drawn: target = source x 1.1, ratio varies by 25 %", drawn)}
    for name, what in PAIRS.items():
        read = np.load(LENGTHS / f"{name}.npz")
        chosen = np.random.default_rng(0).permutation(len(read["tokens"]))[:20_000]
        found[name] = (what, {"tokens": read["src_tokens"][chosen], "target": read["tgt_tokens"][chosen]})
    return {
        name: (what, {k: v.astype(np.int32) for k, v in lengths.items()}) for name, (what, lengths) in found.items()
    }


def by_both(lengths: dict[str, np.ndarray], budget: TokenBudget) -> list[Batch]:
    return [row[0] for row in planned(lengths, budget, work=WORK).rows]


def by_first(lengths: dict[str, np.ndarray], budget: TokenBudget) -> list[Batch]:
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
        time_to = best[start] + WORK.per_step + count[fits] * each
        ends = start + count[fits]
        better = time_to < best[ends]
        best[ends[better]], came[ends[better]] = time_to[better], start
    batches, end = [], len(order)
    while end:
        batches.append(order[came[end] : end])
        end = int(came[end])
    return batches[::-1]


def stream_figures(lengths: dict[str, np.ndarray], budget: TokenBudget, window: int, rule: Any) -> dict[str, float]:
    """Padding over both streams, steps, predicted time in linear tokens, CPU seconds of planning."""
    padded, steps, predicted, begun = 0, 0, 0.0, time.process_time()
    for first in range(0, len(lengths["tokens"]), window):
        part = {name: values[first : first + window] for name, values in lengths.items()}
        for batch in rule(part, budget):
            longest = {name: values[batch].max() for name, values in part.items()}
            padded += len(batch) * int(sum(longest.values()))
            predicted += WORK.per_step + len(batch) * float(WORK.of_lengths(longest))
            steps += 1
    real = sum(int(values.sum()) for values in lengths.values())
    return {"padding": 1.0 - real / padded, "steps": steps, "predicted_time": predicted,
            "planning_s": time.process_time() - begun}  # fmt: skip
