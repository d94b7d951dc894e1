"""Runs the demo on the CPU (two minutes): docs/images/demo.png, benchmarks/results/demo_cpu.json. usage: python
scripts/doc_pictures.py demo"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynagroup.plan.plots import draw_padding, new_figure

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
RESULT = ROOT / "benchmarks" / "results" / "demo_cpu.json"
LENGTHS = np.random.default_rng(3).lognormal(4, 0.8, 64).clip(8, 400).astype(np.int32)


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
    demo().savefig(IMAGES / "demo.png", dpi=110)
