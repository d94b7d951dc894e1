"""Recompute where needed, against checkpointing that is always on, at the same memory: share of tokens, and time.

Predicted, for a 0.5B model (Qwen2.5's sizes, bfloat16, FlashAttention) on eight ranks, by real lengths cut off where a sample
no longer fits even recomputed: a forward pass counts one, a backward pass two, recomputing the layers one more. Measured, on
one core: CPU seconds of forward and backward of a small Llama in float32, over the same samples. Two
minutes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from dynagroup.budget import Budget, MemoryBudget, RecomputeBudget
from dynagroup.memory.fits import largest_within
from dynagroup.oom import RecomputeWhereNeeded, recomputed_steps
from dynagroup.plan.cost import Work
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape

QWEN = Qwen2Config(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                   intermediate_size=4864, vocab_size=151936, max_position_embeddings=131072)  # fmt: skip
SMALL = LlamaConfig(hidden_size=256, num_hidden_layers=6, num_attention_heads=8, intermediate_size=768, vocab_size=2000,
                    max_position_embeddings=4096)  # fmt: skip
CASES = (
    ("t0_mix_50k", "24GB"),
    ("azure_llm_code_2023", "24GB"),
    ("synth_sharegpt4o", "24GB"),
    ("python_files", "80GB"),
)
SAMPLES, RANKS, SHRUNK, MEASURED, LIMIT = 8000, 8, 16, 400, "300MB"
AGAIN = 4 / 3  # forward, forward again, backward: against forward, backward


def lengths_of(name: str, budget: Budget, count: int, shrunk: int = 1) -> np.ndarray:
    """Real lengths, none longer than what fits alone."""
    known = np.load(Path(__file__).parent / "lengths" / f"{name}.npz")["tokens"]
    found = np.random.default_rng(0).choice(known, count, replace=False) // shrunk
    longest = int(largest_within(lambda length: budget.fits(BatchShape.of(1, length)), 1)[0])
    return np.clip(found, 2, longest).astype(np.int32)


def plan_of(lengths: np.ndarray, budget: Budget, work: Work, ranks: int) -> BatchPlan:
    return LengthAwareBatchSampler(lengths, budget, shuffle=True, work=work, rank=0, world_size=ranks).plan


def figures(plan: BatchPlan, recomputed: np.ndarray, work: Work, budget: RecomputeBudget) -> dict[str, Any]:
    """Steps, the share of tokens that is recomputed, time in linear tokens, and the fullest batch."""
    rows = plan.work_by_row.max(axis=1) + work.per_step
    tokens = plan.padded[plan.table].sum(axis=1)
    shapes = plan.shapes
    again = np.zeros(len(shapes), np.bool_)
    again[plan.table[recomputed].ravel()] = True
    without, with_it = budget.without, budget.recomputed
    assert isinstance(without, MemoryBudget)
    assert isinstance(with_it, MemoryBudget)
    peak = np.where(again, with_it.predicted(shapes), without.predicted(shapes)).max()
    return {"steps": plan.num_steps, "tokens_recomputed": round(float(tokens[recomputed].sum() / tokens.sum()), 4),
            "linear_tokens": round(float((rows * np.where(recomputed, AGAIN, 1.0)).sum())),
            "fullest_batch": round(float(peak), 4)}  # fmt: skip


def compared(lengths: np.ndarray, budget: RecomputeBudget, work: Work, ranks: int) -> dict[str, Any]:
    needed, always = plan_of(lengths, budget, work, ranks), plan_of(lengths, budget.recomputed, work, ranks)
    some = figures(needed, recomputed_steps(needed, budget), work, budget)
    every = figures(always, np.ones(always.num_steps, np.bool_), work, budget)
    saved = 1 - some["linear_tokens"] / every["linear_tokens"]
    return {"where needed": some, "always": every, "predicted_time_saved": round(saved, 4)}


def predicted() -> list[dict[str, Any]]:
    work, found = Work.of(QWEN), []
    for name, memory in CASES:
        budget = RecomputeBudget.from_model(QWEN, memory, dtype="bfloat16", attention="flash")
        lengths = lengths_of(name, budget, SAMPLES)
        longest = int(lengths.max())
        alone = float((budget.without.largest(lengths) == 0).mean())  # type: ignore[operator]
        rows = compared(lengths, budget, work, RANKS)
        found.append(
            {"lengths": name, "memory": memory, "longest": longest, "samples_too_long": round(alone, 4), **rows}
        )
        print(found[-1], flush=True)
    return found


def measured() -> dict[str, Any]:
    """CPU seconds of both, turn about over the same samples, and of the pieces that explain them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    budget = RecomputeBudget.from_model(SMALL, LIMIT, attention="flash")
    lengths = lengths_of("python_files", budget, MEASURED, SHRUNK)
    model = LlamaForCausalLM(SMALL)
    work = Work.of(SMALL)
    recompute = RecomputeWhereNeeded(model, budget)
    plans = {"where needed": plan_of(lengths, budget, work, 1), "always": plan_of(lengths, budget.recomputed, work, 1)}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(3):
        for name, plan in plans.items():
            started = time.process_time()
            for row in plan.rows:
                ids = torch.ones(len(row[0]), int(lengths[row[0]].max()), dtype=torch.long)
                recompute({"input_ids": ids}) if name == "where needed" else recompute._switch(True)
                model(input_ids=ids, labels=ids).loss.backward()
                model.zero_grad()
            seconds[name].append(time.process_time() - started)
    best = {name: min(values) for name, values in seconds.items()}
    rows = compared(lengths, budget, work, 1)
    return {"lengths": f"python_files / {SHRUNK}", "samples": MEASURED, "memory": LIMIT, "longest": int(lengths.max()), **rows,
            "cpu_s": {name: [round(s, 2) for s in values] for name, values in seconds.items()},
            "measured_time_saved": round(1 - best["where needed"] / best["always"], 4)}  # fmt: skip


def run() -> dict[str, Any]:
    """What is predicted for a GPU, and what this CPU shows."""
    return {"predicted": predicted(), "measured": measured()}
