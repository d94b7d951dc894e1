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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from dynagroup.memory import TracedMemory
from dynagroup.shapes import BatchShape, largest_within
from regressor.configs import config_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "token_budgets.json"
PICTURE = ROOT / "docs" / "images" / "token_budgets.png"
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
USUAL = 512
LIMIT = 80 * 10**9
HEADROOM = 0.9
FULL = "#3b6ea5"
REST = "#d9d9d9"


@dataclass(frozen=True)
class Case:
    """A model of ``data/configs.json``, the longest length of its samples, and how it is run."""

    model: str
    longest: int
    run: dict[str, Any]
    is_headless: bool = False
    """Without its output matrix, as it is used for embeddings."""


CASES = {
    "training, FlashAttention": Case("qwen2", 8192, {"attention": "flash"}),
    "training, attention without fused kernels": Case("qwen2", 8192, {"attention": "eager"}),
    "training, source and target, 250k words (mT5)": Case("mt5", 2048, {}),
    "embedding, padding masks, long context": Case("qwen2", 32768, {"mode": "forward"}, True),
    "generating 8 tokens, long prompts": Case(
        "qwen2", 8192, {"mode": "generate", "max_new_tokens": 8}
    ),
    "generating 1,024 tokens, their cache": Case(
        "qwen2", 8192, {"mode": "generate", "max_new_tokens": 1024}
    ),
}


def model_of(case: Case) -> Any:
    config = config_of("token_budgets", case.model)
    if not case.is_headless:
        return config
    with torch.device("meta"):
        return hf.Qwen2Model(config)


def lengths_of(two_streams: bool, longest: int) -> dict[str, np.ndarray]:
    """Every length up to the longest; of two streams every pair."""
    known = np.array([length for length in LENGTHS if length <= longest])
    if not two_streams:
        return {"tokens": known}
    source, target = np.meshgrid(known, known, indexing="ij")
    return {"tokens": source.ravel(), "target": target.ravel()}


def judged(case: Case) -> dict[str, Any]:
    memory = TracedMemory.of(model_of(case), dtype="bfloat16", **case.run)
    streams = lengths_of(bool(memory.workload.encoder_decoder), case.longest)
    tokens = np.sum(list(streams.values()), axis=0)  # what a token budget counts of a sample
    distance = np.abs(streams["tokens"] - USUAL)
    if "target" in streams:
        distance = distance + np.abs(streams["target"] - USUAL // 4)
    usual = int(distance.argmin())

    def peak(count: np.ndarray) -> np.ndarray:
        shape = BatchShape.of(np.maximum(count, 1), streams)
        return memory.static_bytes + memory.batch_bytes(shape)

    largest = largest_within(lambda count: peak(count) <= HEADROOM * LIMIT, len(tokens))
    is_possible = largest > 0
    tuned = int(largest[usual] * tokens[usual])
    is_allowed = is_possible & (tokens <= tuned)
    peaks = np.where(is_allowed, peak(tuned // tokens), 0.0) / LIMIT
    worst = int(peaks.argmax())
    fails = (largest + 1) * tokens
    safe = int(fails[is_possible].min() - 1)
    largest_usual = int(largest[usual])
    safe_usual = int(safe // tokens[usual])
    row: dict[str, Any] = {"static_share": round(memory.static_bytes / LIMIT, 4)}
    row["usual"] = _at(streams, usual)
    row["tuned_tokens"] = tuned
    row["hardest"] = _at(streams, worst)
    row["hardest_samples"] = int(tuned // tokens[worst])
    row["peak_share_of_hardest"] = round(float(peaks[worst]), 3)
    row["safe_tokens"] = safe
    row["largest_usual"] = largest_usual
    row["safe_usual"] = safe_usual
    row["share_used_by_safe"] = round(safe_usual / largest_usual, 3)
    row["longest_that_fits"] = int(streams["tokens"][is_possible].max())
    return row


def _at(streams: dict[str, np.ndarray], place: int) -> dict[str, int]:
    return {name: int(lengths[place]) for name, lengths in streams.items()}


def draw(result: dict[str, Any], path: Path = PICTURE) -> None:
    """Two bars a workload, with their figures; what runs out of memory is hatched."""
    from matplotlib.figure import Figure

    rows = list(result["rows"].items())[::-1]
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


def measure() -> None:
    warnings.simplefilter("ignore")
    about = {
        "torch": torch.__version__,
        "transformers": hf.__version__,
        "hardware": "2-core CPU, simulated",
        "date": str(datetime.date.today()),
        "limit_bytes": LIMIT,
        "headroom": HEADROOM,
    }
    rows = {name: judged(case) for name, case in CASES.items()}
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--draw", action="store_true", help="only draw the figures that are there")
    if not parser.parse_args().draw:
        measure()
    draw(json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
