"""Draws the pictures of docs/concepts.md from small plans. usage: python scripts/doc_pictures.py [demo]

With `demo` it runs the demo on the CPU instead (two minutes): its picture, and benchmarks/results/demo_cpu.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.patches import Rectangle

from dynagroup import LengthAwareBatchSampler, TokenBudget
from dynagroup.plan.plots import LINE, PADDING, REAL, draw_padding, new_figure

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
RESULT = ROOT / "benchmarks" / "results" / "demo_cpu.json"
LENGTHS = np.random.default_rng(3).lognormal(4, 0.8, 64).clip(8, 400).astype(np.int32)


def budget() -> Any:
    """Two batches of one budget: few long samples, many short ones; both are 1,600 tokens at most."""
    figure = new_figure(8, 2.8)
    ordered = np.sort(LENGTHS)[::-1]
    short = ordered[28:][: 1600 // int(ordered[28])]
    sides = figure.subplots(1, 2, sharey=True)
    for axes, batch, name in zip(sides, (ordered[:4], short), ("long", "short"), strict=True):
        draw_padding([batch], ax=axes)
        axes.set_title(f"{len(batch)} {name} samples: {len(batch) * int(batch.max()):,} of 1,600 tokens")
        axes.set(xlabel="samples of the batch", xlim=(0, len(short) + 2))
    return figure


def window() -> Any:
    """The same samples in their order, and sorted inside windows."""
    figure = new_figure(8, 2.8)
    left, right = figure.subplots(1, 2, sharey=True)
    draw_padding([LENGTHS[start : start + 8] for start in range(0, 64, 8)], ax=left)
    left.set_title("batches of 8, as the samples come")
    how: dict[str, Any] = {"shuffle": True, "window": 32, "hardest_first": 0, "rank": 0, "world_size": 1}
    sampler = LengthAwareBatchSampler(LENGTHS, TokenBudget(1600), **how)
    draw_padding([LENGTHS[batch] for batch in sampler.plan.batches], ax=right)
    right.set_title("sorted inside windows of 32, cut to fit")
    right.axvline(32, color=LINE, linestyle="--")
    return figure


def steps() -> Any:
    """Two updates on two ranks: columns are steps, and a rank with nothing left idles."""
    figure = new_figure(8, 2.6)
    axes = figure.subplots()
    for rank, sizes in enumerate(([24, 6, 10, 36, 8], [22, 7, 9, 34, 0])):
        for step, size in enumerate(sizes):
            fill, hatch, ink = (REAL, "", "white") if size else ("white", "////", LINE)
            axes.barh(rank, 0.9, left=step, height=0.7, color=fill, edgecolor=LINE, hatch=hatch)
            text = f"{size} samples" if size else "idle\nweight 0"
            axes.text(step + 0.45, rank, text, ha="center", va="center", color=ink, fontsize=9, backgroundcolor=fill)
    axes.add_patch(Rectangle((0.93, -0.45), 1.04, 1.9, fill=False, edgecolor=LINE, linestyle="--"))
    axes.text(1.45, -0.52, "one step: a batch on every rank", ha="center", va="bottom", fontsize=9)
    for start, stop, name in ((0, 3, "update 1: 78 samples"), (3, 5, "update 2: 78 samples")):
        axes.annotate("", (start, -0.75), (stop - 0.1, -0.75), arrowprops={"arrowstyle": "<->", "color": LINE})
        axes.text((start + stop - 0.1) / 2, -0.82, name, ha="center", va="bottom", fontsize=9)
    axes.set(yticks=[0, 1], yticklabels=["rank 0", "rank 1"], xlim=(-0.05, 5), ylim=(1.6, -1.25), xlabel="step")
    axes.set_xticks([step + 0.45 for step in range(5)], [str(step) for step in range(5)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


def layouts() -> Any:
    """The same four samples padded and packed."""
    figure = new_figure(8, 2.4)
    left, right = figure.subplots(1, 2)
    lengths = [300, 190, 120, 60]
    starts = np.cumsum([0, *lengths])
    for row, length in enumerate(lengths):
        left.barh(row, 300, color=PADDING, edgecolor=LINE, hatch="////")
        left.barh(row, length, color=REAL, edgecolor=LINE)
        right.barh(0, length, left=starts[row], color=REAL, edgecolor="white", linewidth=2)
        right.text(starts[row] + length / 2, 0, str(row), color="white", ha="center", va="center")
    left.set(title="padded: 4 x 300 = 1,200 tokens", yticks=range(4), ylabel="sample", xlabel="tokens")
    left.invert_yaxis()
    right.set(title=f"packed: {starts[-1]} tokens, end to end", yticks=[], xlabel="tokens", ylim=(-1, 1))
    return figure


def demo() -> Any:
    """The first update of both runs of the demo: the same samples, so that the eye can compare them."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.record import environment
    from dynagroup.demo import DemoConfig, run_demo, speedup

    torch.set_num_threads(1)
    runs, lengths = run_demo(DemoConfig(device="cpu"))
    low, median, high = speedup(runs).tolist()
    found = {run.name: run.figures(lengths) for run in runs}
    about = {**environment("transformers"), "device": "cpu", "clock": "CPU"}
    saved = {**about, "runs": found, "speedup": median, "speedup_quartiles": [low, high]}
    RESULT.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    figure = new_figure(12, 3.8)
    for axes, run in zip(figure.subplots(1, 2, sharey=True), runs, strict=True):
        draw_padding([lengths[batch] for batch in run.updates[0]], ax=axes)
        padding, steps, seconds = (found[run.name][name] for name in ("padding", "steps", "seconds"))
        axes.set(xlabel="samples of the first update, batch after batch")
        axes.set_title(f"{run.name}: {padding:.0%} padding, {steps:,} steps, {seconds:.0f} s in all", fontsize=10)
    return figure


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    if sys.argv[1:] == ["demo"]:
        demo().savefig(IMAGES / "demo.png", dpi=110)
    else:
        for draw in (budget, window, steps, layouts):
            draw().savefig(IMAGES / f"concept_{draw.__name__}.png", dpi=90)
