"""Plans of real lengths take no more predicted time than those of commit bbc3155, which cut by many more mechanisms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup import LengthAwareBatchSampler, TokenBudget

LENGTHS = Path(__file__).parents[2] / "benchmarks" / "lengths"
SAMPLES = 2048
CAPS = {
    "azure_llm_code_2023": 16_384, "azure_llm_conv_2023": 16_384, "gsm8k": 8_192, "hh_rlhf_harmless_test": 8_192,
    "mooncake_conv": 131_072, "python_files": 65_536, "synth_llava": 8_192, "synth_sharegpt4o": 16_384,
    "synth_ultrachat": 16_384, "t0_mix_50k": 8_192,
}  # fmt: skip
UPDATES: dict[str, dict[str, Any]] = {
    **{str(size): {"samples_per_update": size} for size in (64, 256, 1024)},
    "window": {"shuffle": True},
}


BEFORE: dict[tuple[str, str, str, int], int] = {
    ("padded", "azure_llm_code_2023", "64", 1): 6_359_333,
    ("padded", "azure_llm_conv_2023", "64", 2): 1_930_474,
    ("padded", "gsm8k", "64", 8): 110_436,
    ("padded", "hh_rlhf_harmless_test", "256", 1): 483_788,
    ("padded", "mooncake_conv", "256", 2): 43_978_720,
    ("padded", "python_files", "256", 8): 1_135_474,
    ("padded", "synth_llava", "1024", 1): 1_427_320,
    ("padded", "synth_sharegpt4o", "1024", 2): 2_903_840,
    ("padded", "synth_ultrachat", "1024", 8): 397_967,
    ("padded", "t0_mix_50k", "window", 1): 652_207,
    ("packed", "azure_llm_code_2023", "window", 2): 2_954_341,
    ("packed", "azure_llm_conv_2023", "window", 8): 427_804,
    ("packed", "hh_rlhf_harmless_test", "64", 1): 369_371,
    ("packed", "mooncake_conv", "64", 2): 43_141_348,
    ("packed", "python_files", "64", 8): 1_672_949,
    ("packed", "synth_llava", "256", 1): 1_255_108,
    ("packed", "synth_sharegpt4o", "256", 2): 2_906_240,
    ("packed", "synth_ultrachat", "256", 8): 386_876,
    ("packed", "t0_mix_50k", "1024", 1): 611_772,
    ("pairs", "azure_llm_code_2023", "1024", 2): 3_012_447,
    ("pairs", "azure_llm_conv_2023", "1024", 8): 450_169,
    ("pairs", "gsm8k", "window", 1): 642_940,
    ("pairs", "mooncake_conv", "window", 2): 42_724_203,
    ("pairs", "t0_mix_50k", "window", 8): 93_820,
}
"""Layout, lengths, update, ranks -> predicted time in linear tokens."""


def predicted_time(layout: str, file: str, update: str, ranks: int) -> float:
    found = np.load(LENGTHS / f"{file}.npz")
    names = {"tokens": "src_tokens", "target": "tgt_tokens"} if layout == "pairs" else {"tokens": "tokens"}
    order = np.random.default_rng(0).permutation(len(found["tokens"]))[:SAMPLES]
    lengths = {name: found[column][order].astype(np.int32) for name, column in names.items()}
    total = np.sum(list(lengths.values()), axis=0)
    longest = sum(int(values.max()) for values in lengths.values())
    budget = TokenBudget(max(4 * int(np.quantile(total, 0.99)), longest))
    if layout == "packed":
        budget = TokenBudget(CAPS[file], layout="packed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LengthAwareBatchSampler(lengths, budget, rank=0, world_size=ranks, **UPDATES[update]).plan.predicted_time


def test_plans_take_about_the_time_that_they_took() -> None:
    more = {case: predicted_time(*case) / time - 1 for case, time in BEFORE.items()}
    assert np.mean(list(more.values())) <= 0.006
    assert max(more.values()) <= 0.03, max(more, key=lambda case: more[case])
