"""Predicted times of plans of real lengths, as commit bbc3155 made them: what a simpler planner may cost.

``python -m tests.plan.golden`` compares all of them, ``--record`` writes them anew, ``--same`` wants the same plans.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynagroup import LengthAwareBatchSampler, TokenBudget

__all__ = ["CASES", "GOLDEN", "Case", "differences"]

LENGTHS = Path(__file__).parents[2] / "benchmarks" / "lengths"
GOLDEN = Path(__file__).with_suffix(".json")
SAMPLES = 2048
CAPS = {
    "azure_llm_code_2023": 16_384, "azure_llm_conv_2023": 16_384, "gsm8k": 8_192, "hh_rlhf_harmless_test": 8_192,
    "mooncake_conv": 131_072, "python_files": 65_536, "synth_llava": 8_192, "synth_sharegpt4o": 16_384,
    "synth_ultrachat": 16_384, "t0_mix_50k": 8_192,
}  # fmt: skip
PAIRS = ("azure_llm_code_2023", "azure_llm_conv_2023", "gsm8k", "mooncake_conv", "t0_mix_50k")
UPDATES: dict[str, dict[str, Any]] = {
    **{str(size): {"samples_per_update": size} for size in (64, 256, 1024)},
    "window": {"shuffle": True},
}


class Case(NamedTuple):
    """One plan: which lengths, in which layout, for how many ranks, in updates of how many samples."""

    layout: str
    file: str
    update: str
    ranks: int

    @property
    def key(self) -> str:
        return "/".join(map(str, self))

    def plan(self) -> Any:
        found = np.load(LENGTHS / f"{self.file}.npz")
        names = {"tokens": "src_tokens", "target": "tgt_tokens"} if self.layout == "pairs" else {"tokens": "tokens"}
        order = np.random.default_rng(0).permutation(len(found["tokens"]))[:SAMPLES]
        lengths = {name: found[column][order].astype(np.int32) for name, column in names.items()}
        total = np.sum(list(lengths.values()), axis=0)
        budget = TokenBudget(max(4 * int(np.quantile(total, 0.99)), int(total.max())))
        if self.layout == "pairs":
            budget = TokenBudget(max(budget.max_tokens, sum(int(values.max()) for values in lengths.values())))
        if self.layout == "packed":
            budget = TokenBudget(CAPS[self.file], layout="packed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = LengthAwareBatchSampler(lengths, budget, rank=0, world_size=self.ranks, **UPDATES[self.update])
            return sampler.plan


CASES = [
    Case(layout, file, update, ranks)
    for layout in ("padded", "packed", "pairs")
    for file in (PAIRS if layout == "pairs" else CAPS)
    for update in UPDATES
    for ranks in (1, 2, 8)
]


def differences(cases: Iterable[Case], golden: Mapping[str, Any]) -> dict[str, float]:
    """By how much more predicted time a plan takes than the recorded one, as a share of that."""
    return {case.key: case.plan().predicted_time / golden[case.key]["time"] - 1 for case in cases}


def _record() -> None:
    found = {}
    for case in CASES:
        plan = case.plan()
        found[case.key] = {"time": round(plan.predicted_time), "steps": plan.num_steps, "plan": plan.fingerprint}
    GOLDEN.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")


def _compare(cases: list[Case], same: bool) -> None:
    golden = json.loads(GOLDEN.read_text())
    if same:
        changed = [case.key for case in cases if case.plan().fingerprint != golden[case.key]["plan"]]
        print(len(changed), "of", len(cases), "plans changed", *changed[:20])
        return
    for layout in dict.fromkeys(case.layout for case in cases):
        start = time.process_time()
        more = differences([case for case in cases if case.layout == layout], golden)
        taken = time.process_time() - start
        print(f"{layout}: mean {np.mean(list(more.values())):+.2%}, {taken:.1f} s")
        for key in sorted(more, key=lambda key: -more[key])[:8]:
            print(f"  {more[key]:+.2%} {key}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--only", default="", help="part of the names of the cases")
    given = parser.parse_args()
    if given.record:
        _record()
    else:
        _compare([case for case in CASES if given.only in case.key], given.same)
