"""How large a batch may be, by length, as each way of deciding says, and as is true.

The model has the sizes of Qwen2.5-0.5B, trained in bfloat16; the hardest batch is 8 samples of 2,048 tokens. Truth is the
largest batch whose simulated memory is at most the hardest batch's, found by running the simulation on both sides of it.
The regressor keeps a headroom of 0.9 and has seen this family in training; once it knows the workload, once it knows nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config

from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.memory import MemoryRegressor, Workload, simulate

ROOT = Path(__file__).parent.parent
BATCH_SIZE, LONGEST = 8, 2048
LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048)
CONFIG = Qwen2Config(
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
    tie_word_embeddings=True,
)


def true_largest(workload: Workload, longest: int, limit: int) -> int:
    """Most samples whose simulated memory is at most ``limit``: bisection, from a bracket around the linear guess."""

    def size(n: int) -> int:
        (row,) = simulate(CONFIG, workload, [(n, longest)])
        assert row.batch_bytes is not None
        return row.batch_bytes

    def fits(n: int) -> bool:
        return size(n) <= limit

    guess = max(1, int(BATCH_SIZE * limit / size(BATCH_SIZE)))
    guess = max(1, int(guess * limit / size(guess)))
    low, high = max(1, int(0.98 * guess) - 1), int(1.02 * guess) + 2
    while not fits(low):
        low = max(1, low // 2)
    while fits(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def batch_sizes() -> dict[str, list[int]]:
    """Samples a batch may have at each of LENGTHS."""
    workload = Workload.from_model(CONFIG, "train", dtype="bfloat16")
    lengths = np.array(LENGTHS)
    (hardest,) = simulate(CONFIG, workload, [(BATCH_SIZE, LONGEST)])
    assert hardest.batch_bytes is not None
    known = MemoryBudget(BATCH_SIZE, longest=LONGEST, model=MemoryRegressor.pretrained(workload))
    tokens = TokenBudget(BATCH_SIZE * LONGEST)
    answers = {
        "token budget": tokens.largest(lengths),
        "regressor, workload known": known.largest(lengths),
        "regressor, workload unknown": MemoryBudget(BATCH_SIZE, longest=LONGEST).largest(lengths),
    }
    return {
        "fixed": [BATCH_SIZE] * len(LENGTHS),
        **{name: [int(n) for n in found] for name, found in answers.items() if found is not None},
        "truth (simulated)": [true_largest(workload, length, hardest.batch_bytes) for length in LENGTHS],
    }


def draw(sizes: dict[str, list[int]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    looks: dict[str, dict[str, Any]] = {
        "fixed": {"color": "#888888", "linestyle": ":"},
        "token budget": {"color": "#d08a4e", "linestyle": "--"},
        "regressor, workload known": {"color": "#3b6ea5", "marker": "o", "markersize": 4},
        "regressor, workload unknown": {"color": "#9db8d2", "marker": "o", "markersize": 4},
        "truth (simulated)": {"color": "#222222", "linewidth": 1},
    }
    for name, found in sizes.items():
        axes.loglog(LENGTHS, found, label=name, **looks[name])
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="tokens of the longest sample", ylabel="samples in the batch")
    axes.set_title(
        f"As much memory as {BATCH_SIZE} samples of {LONGEST} tokens (0.5B model, training, bfloat16)", size=10
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def picture() -> dict[str, Any]:
    """The figures, and the picture drawn of them."""
    torch.set_num_threads(1)
    sizes = batch_sizes()
    draw(sizes, ROOT / "docs" / "images" / "batch_sizes.png")
    return {"lengths": LENGTHS, "samples": sizes}
