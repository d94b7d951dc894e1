"""The tables of figures in README.md and docs/benchmarks.md, from benchmarks/results. usage: python scripts/doc_tables.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
SHOWN = ("gsm8k", "azure_llm_conv_2023", "t0_mix_50k", "mooncake_conv", "python_files")
COLUMNS = (
    *("fixed_16_shuffled", "hf_group_by_length_16"),
    *("dynagroup_update_of_256", "dynagroup_shuffle", "dynagroup_whole_set"),
)


def padding_rows() -> list[str]:
    """One row a dataset: name and variation of its lengths, then padding and steps of each method."""
    figures = _read("plan_padding")["figures"]
    return [
        _row(f"{name} (CV {figures[name]['cv']:.2f})", *(_padding(figures[name][column]) for column in COLUMNS))
        for name in SHOWN
    ]


def demo_rows() -> list[str]:
    """One row a run of the demo."""
    return [
        _row(
            name,
            f"{run['samples_per_s']:.0f}",
            f"{run['real_tokens_per_s']:,.0f}",
            f"{run['padding']:.1%}",
            f"{run['largest_batch_tokens']:,}",
            *(str(run[key]) for key in ("steps", "updates")),
            f"{run['seconds']:.0f}",
            f"{run['held_out_loss']:.4f}",
        )
        for name, run in _read("demo_cpu")["runs"].items()
    ]


def demo_sentence() -> str:
    """How much faster, with its spread."""
    figures = _read("demo_cpu")
    low, high = figures["speedup_quartiles"]
    return f"{figures['speedup']:.2f}x samples/s in the median update (middle half: {low:.2f}x to {high:.2f}x)"


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _padding(found: tuple[float, int]) -> str:
    efficiency, steps = found
    return f"{1 - efficiency:.1%}, {steps:,}"


if __name__ == "__main__":
    print("\n".join([*padding_rows(), "", *demo_rows(), "", demo_sentence()]))
