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
    figures = {run.name: run.figures(lengths) for run in runs}
    low, median, high = speedup(runs).tolist()
    results = {
        **environment("transformers"),
        "device": "cpu",
        "clock": "CPU",
        "runs": figures,
        "speedup": median,
        "speedup_quartiles": [low, high],
    }
    (RESULTS / "demo_cpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    picture = new_figure(12, 3.8)
    for axes, run in zip(picture.subplots(1, 2, sharey=True), runs, strict=True):
        draw_padding([lengths[batch] for batch in run.updates[0]], ax=axes)
        axes.set(xlabel="samples of the first update, batch after batch")
        axes.set_title(title_of(run.name, figures[run.name]), fontsize=10)
    picture.savefig(ROOT / "docs" / "images" / "demo.png", dpi=110)


def title_of(name: str, figures: dict[str, float]) -> str:
    padding = figures["padding"]
    steps = figures["steps"]
    seconds = figures["seconds"]
    return f"{name}: {padding:.0%} padding, {steps:,} steps, {seconds:.0f} s in all"


if __name__ == "__main__":
    demo()
