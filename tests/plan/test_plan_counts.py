"""Plans of real lengths in counts, frozen as upper bounds: they may improve, and a change that needs more says so here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.config import PlanConfig
from dynagroup.plan.planner import Planner
from dynagroup.plan.shard import shard_micro_batches

LENGTHS = Path(__file__).parents[2] / "benchmarks" / "lengths"
MODES: dict[str, dict[str, Any]] = {
    "64": {"samples_per_update": 64},
    "256": {"samples_per_update": 256},
    "free": {"shuffle": True},
}
FROZEN: dict[tuple[str, str, int], tuple[int, int, int]] = {
    ("azure_llm_conv_2023", "64", 1): (276, 2_888_988, 3_706_613),
    ("azure_llm_conv_2023", "64", 8): (52, 2_961_544, 530_804),
    ("azure_llm_conv_2023", "256", 1): (154, 2_828_815, 3_508_699),
    ("azure_llm_conv_2023", "256", 8): (22, 2_917_597, 466_526),
    ("azure_llm_conv_2023", "free", 1): (81, 2_791_092, 3_388_220),
    ("azure_llm_conv_2023", "free", 8): (12, 2_828_121, 436_048),
    ("python_files", "64", 1): (498, 4_471_163, 7_569_108),
    ("python_files", "64", 8): (47, 5_065_500, 1_748_159),
    ("python_files", "256", 1): (286, 4_414_786, 7_286_997),
    ("python_files", "256", 8): (22, 4_981_605, 1_092_489),
    ("python_files", "free", 1): (164, 4_367_378, 7_102_898),
    ("python_files", "free", 8): (15, 4_492_092, 961_562),
    ("t0_mix_50k", "64", 1): (172, 620_667, 837_871),
    ("t0_mix_50k", "64", 8): (32, 599_565, 132_205),
    ("t0_mix_50k", "256", 1): (95, 573_923, 709_552),
    ("t0_mix_50k", "256", 8): (14, 588_399, 96_626),
    ("t0_mix_50k", "free", 1): (48, 547_341, 633_631),
    ("t0_mix_50k", "free", 8): (8, 546_947, 82_548),
    ("mooncake_conv", "64", 1): (1077, 24_145_651, 83_425_387),
    ("mooncake_conv", "64", 8): (51, 28_924_112, 19_938_631),
    ("mooncake_conv", "256", 1): (684, 24_129_450, 83_032_556),
    ("mooncake_conv", "256", 8): (68, 25_250_798, 12_473_600),
    ("mooncake_conv", "free", 1): (431, 24_083_290, 82_694_787),
    ("mooncake_conv", "free", 8): (55, 24_109_568, 11_878_425),
}
"""File, mode, ranks -> steps, padded tokens, predicted time in linear tokens."""


def tokens_of(name: str) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.load(LENGTHS / f"{name}.npz")["tokens"])[:2048]


@pytest.mark.parametrize(("name", "mode", "ranks"), FROZEN, ids=lambda value: str(value))
def test_steps_padded_tokens_and_predicted_time_do_not_grow(name: str, mode: str, ranks: int) -> None:
    tokens = tokens_of(name)
    planner = Planner({"tokens": tokens}, TokenBudget(16 * int(tokens.max())), PlanConfig(**MODES[mode]))
    plan = planner.plan(0, ranks)
    steps, padded, time = FROZEN[name, mode, ranks]
    assert plan.num_steps <= steps
    assert plan.padded.sum() <= padded
    assert plan.predicted_time <= time


@pytest.mark.parametrize(
    ("name", "cap", "layout", "micro_batches"),
    [
        ("azure_llm_conv_2023", 16_384, "packed", 3),
        ("python_files", 65_536, "padded", 3),
        ("mooncake_conv", 131_072, "packed", 3),
        ("mooncake_conv", 131_072, "padded", 5),
    ],
)
def test_micro_batches_do_not_grow(name: str, cap: int, layout: Any, micro_batches: int) -> None:
    tokens = tokens_of(name)[:256]
    assert len(shard_micro_batches(tokens, 8, TokenBudget(cap, layout=layout))[0]) <= micro_batches
