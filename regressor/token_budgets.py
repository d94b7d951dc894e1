"""Where a token budget fails: the batch it would run out of memory on, and what a safe one leaves unused.

For each workload on one device: the token budget that just fits samples of the usual length, and the memory of the hardest
batch that it allows at any other length; and the largest token budget that no length takes beyond the device, and how many
samples of the usual length it still allows. Writes ``benchmarks/results/token_budgets.json`` and draws
``docs/images/token_budgets.png`` from it; some minutes on one core.

    python -m regressor.token_budgets [--draw]
"""

from __future__ import annotations

import argparse
import datetime
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from dynagroup.memory import TracedMemory
from dynagroup.shapes import BatchShape, largest_within

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "token_budgets.json"
PICTURE = ROOT / "docs" / "images" / "token_budgets.png"
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
USUAL = 512
LIMIT = 80 * 10**9
HEADROOM = 0.9
FULL = "#3b6ea5"
REST = "#d9d9d9"

QWEN = hf.Qwen2Config(
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
    max_position_embeddings=32768,
)
MT5 = hf.MT5Config(
    d_model=768,
    num_layers=12,
    num_decoder_layers=12,
    num_heads=12,
    d_kv=64,
    d_ff=2048,
    vocab_size=250112,
    decoder_start_token_id=0,
)


def encoder() -> torch.nn.Module:
    """The same model without its output matrix, as it is used for embeddings."""
    with torch.device("meta"):
        return hf.Qwen2Model(QWEN)


WORKLOADS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "training, FlashAttention": (QWEN, {"attention": "flash"}, 8192),
    "training, attention without fused kernels": (QWEN, {"attention": "eager"}, 8192),
    "training, source and target, 250k words (mT5)": (MT5, {}, 2048),
    "embedding, padding masks, long context": (encoder, {"mode": "forward"}, 32768),
    "generating 8 tokens, long prompts": (QWEN, {"mode": "generate", "max_new_tokens": 8}, 8192),
    "generating 1,024 tokens, their cache": (
        QWEN,
        {"mode": "generate", "max_new_tokens": 1024},
        8192,
    ),
}


def lengths_of(two_streams: bool, longest: int) -> dict[str, np.ndarray]:
    """Every length up to the longest; of two streams every pair."""
    known = np.array([length for length in LENGTHS if length <= longest])
    if not two_streams:
        return {"tokens": known}
    source, target = np.meshgrid(known, known, indexing="ij")
    return {"tokens": source.ravel(), "target": target.ravel()}


def judged(config: Any, how: dict[str, Any], longest: int) -> dict[str, Any]:
    how = {"mode": "train", **how}
    model = config() if callable(config) else config
    memory = TracedMemory.of(model, how.pop("mode"), dtype="bfloat16", **how)
    streams = lengths_of(bool(memory.workload.encoder_decoder), longest)
    tokens = np.sum(list(streams.values()), axis=0)  # what a token budget counts of a sample
    goals = (USUAL, USUAL // 4)
    usual = int(
        np.argmin(
            sum(abs(known - goal) for known, goal in zip(streams.values(), goals, strict=False))
        )
    )

    def peak(count: np.ndarray) -> np.ndarray:
        return memory.static_bytes + memory.batch_bytes(
            BatchShape.of(np.maximum(count, 1), streams)
        )

    most = largest_within(lambda count: peak(count) <= HEADROOM * LIMIT, len(tokens))
    possible = most > 0
    tuned = int((most * tokens)[usual])
    peaks = np.where(possible & (tuned >= tokens), peak(tuned // tokens), 0.0) / LIMIT
    worst = int(peaks.argmax())
    safe = int(((most + 1) * tokens)[possible].min() - 1)
    return {
        "static_share": round(memory.static_bytes / LIMIT, 4),
        "usual": {name: int(known[usual]) for name, known in streams.items()},
        "tuned_tokens": tuned,
        "hardest": {name: int(known[worst]) for name, known in streams.items()},
        "hardest_samples": int(tuned // tokens[worst]),
        "peak_share_of_hardest": round(float(peaks[worst]), 3),
        "safe_tokens": safe,
        "largest_usual": int(most[usual]),
        "safe_usual": int(safe // tokens[usual]),
        "share_used_by_safe": round(float(safe // tokens[usual] / most[usual]), 3),
        "longest_that_fits": int(streams["tokens"][possible].max()),
    }


def draw(found: dict[str, Any], path: Path = PICTURE) -> None:
    """Two bars a workload, with their figures; what runs out of memory is hatched."""
    from matplotlib.figure import Figure

    rows = list(found["rows"].items())[::-1]
    figure = Figure(figsize=(10.5, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))
    for place, (_, row) in enumerate(rows):
        _draw_peak(left, place, 100 * row["peak_share_of_hardest"])
        _draw_used(right, place, 100 * row["share_used_by_safe"])
    left.axvline(100, color="black", linestyle="--", linewidth=1)
    left.set_yticks(range(len(rows)), [name for name, _ in rows])
    left.set(
        xlim=(0, 640), xticks=[0, 100, 200, 300, 400], xlabel="its hardest batch, % of the memory"
    )
    left.set_title("A token budget that just fits\nsamples of the usual length", fontsize=10)
    right.set(xlim=(0, 100), xlabel="usual samples allowed, % of what fits")
    right.set_title("The largest token budget\nthat is safe at every length", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_peak(axes: Any, place: int, percent: float) -> None:
    if percent > 100:
        outcome = "out of memory"
        axes.barh(place, percent, height=0.62, color="white", hatch="////", edgecolor="black")
    else:
        outcome = "fits"
        axes.barh(place, percent, height=0.62, color=FULL, edgecolor=FULL)
    words = f"{percent:.0f} %: {outcome}"
    axes.text(max(percent, 100) + 8, place, words, va="center", fontsize=9)


def _draw_used(axes: Any, place: int, percent: float) -> None:
    axes.barh(place, 100, height=0.62, color=REST, edgecolor="#888888")
    axes.barh(place, percent, height=0.62, color=FULL, edgecolor=FULL)
    words = f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"
    if percent > 30:
        axes.text(percent - 2, place, words, va="center", ha="right", color="white", fontsize=9)
    else:
        axes.text(percent + 2, place, words, va="center", ha="left", color="black", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only draw the figures that are there")
    if not parser.parse_args().draw:
        warnings.simplefilter("ignore")
        about = {
            "torch": torch.__version__,
            "transformers": hf.__version__,
            "hardware": "2-core CPU, simulated",
        }
        about |= {"date": str(datetime.date.today()), "limit_bytes": LIMIT, "headroom": HEADROOM}
        rows = {name: judged(*workload) for name, workload in WORKLOADS.items()}
        RESULTS.write_text(
            json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
        print(json.dumps(rows, indent=1))
    draw(json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
