"""Runs the demo on the CPU (two minutes): docs/images/demo.png, benchmarks/results/demo_cpu.json. usage: python
scripts/doc_pictures.py demo"""

import json
import sys
from pathlib import Path

import torch

from dynagroup.demo import DemoConfig, run_demo, speedup
from dynagroup.plan.plots import draw_padding, new_figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.record import RESULTS, environment  # noqa: E402


def demo() -> None:
    """The picture shows the first update of both runs: the same samples, so that the eye can compare them."""
    torch.set_num_threads(1)
    runs, lengths = run_demo(DemoConfig(device="cpu"))
    low, median, high = speedup(runs).tolist()
    found = {run.name: run.figures(lengths) for run in runs}
    about = {**environment("transformers"), "device": "cpu", "clock": "CPU"}
    saved = {**about, "runs": found, "speedup": median, "speedup_quartiles": [low, high]}
    (RESULTS / "demo_cpu.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    figure = new_figure(12, 3.8)
    for axes, run in zip(figure.subplots(1, 2, sharey=True), runs, strict=True):
        draw_padding([lengths[batch] for batch in run.updates[0]], ax=axes)
        padding, steps, seconds = (
            found[run.name][name] for name in ("padding", "steps", "seconds")
        )
        axes.set(xlabel="samples of the first update, batch after batch")
        axes.set_title(
            f"{run.name}: {padding:.0%} padding, {steps:,} steps, {seconds:.0f} s in all",
            fontsize=10,
        )
    figure.savefig(ROOT / "docs" / "images" / "demo.png", dpi=110)


if __name__ == "__main__":
    demo()
