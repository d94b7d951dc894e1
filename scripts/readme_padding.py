"""The rows of the README's table, from benchmarks/results/plan_padding.json. usage: python scripts/readme_padding.py"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "plan_padding.json"
SHOWN = ("gsm8k", "azure_llm_conv_2023", "t0_mix_50k", "mooncake_conv", "python_files")
COLUMNS = ("fixed_16_shuffled", "hf_group_by_length_16", "dynagroup_shuffle", "dynagroup_whole_set")


def rows() -> list[str]:
    """One table row a dataset: name and variation of its lengths, then padding and steps of each method."""
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))["figures"]
    return [
        " | ".join([f"| {name} (CV {figures[name]['cv']:.2f})", *(_cell(figures[name][column]) for column in COLUMNS)])
        + " |"
        for name in SHOWN
    ]


def _cell(found: tuple[float, int]) -> str:
    efficiency, steps = found
    return f"{1 - efficiency:.1%}, {steps:,}"


if __name__ == "__main__":
    print("\n".join(rows()))
