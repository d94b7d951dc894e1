"""The price of a batch, and the few shapes that compiled models are given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from dynagroup import ConfigError, LengthAwareBatchSampler, ShapeLadder, TokenBudget, Work
from dynagroup.plan.batches import Batches
from dynagroup.testing import assert_budget_law
from tests import models


def test_literal_work() -> None:
    work, budget = Work(per_step=10, crossover=100), TokenBudget(1000, pad_to_multiple_of=8)
    lengths = {"tokens": np.array([10, 3, 20], np.int32)}
    batches = Batches(np.array([0, 1, 2]), np.array([0, 2, 3]))
    assert work.of_batches(batches, lengths, budget).tolist() == [2 * (16 + 2.56), 24 + 5.76]
    packed = work.of_batches(batches, lengths, TokenBudget(1000, layout="packed"))
    assert packed.tolist() == pytest.approx([11 + 3.09, 24])
    assert work.of_rows(np.array([[5.0, 7.0], [1.0, 0.0]])) == 2 * 10 + 7 + 1
    assert Work(per_step=0, crossover=math.inf).of_lengths([7]).tolist() == [7]


LLAMA = models.llama(vocab=512, width=256, inner=688, heads=4, num_key_value_heads=2)
GPT2 = models.gpt2(vocab=512, width=256, heads=4)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_crossover_is_what_a_traced_model_multiplies(config: object) -> None:
    def operations(tokens: int) -> float:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            ids = torch.zeros((1, tokens), dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=ids)
        return float(counter.get_total_flops())

    short, long = operations(128), operations(512)
    quadratic = (long / 512 - short / 128) / (512 - 128)
    linear = short / 128 - 128 * quadratic
    assert Work.of(config).crossover == pytest.approx(linear / quadratic, rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Work(per_step=-1), "`per_step` must be greater than 0 and finite, but is -1"),
        (lambda: Work.fit([(1, 8, 0.1)] * 2), "at least three different shapes, but was given 2 rows of 1 shapes"),
        (lambda: Work.of(object()), "does not state hidden_size"),
        (lambda: ShapeLadder([5], TokenBudget(100, layout="packed")), "needs a padded budget"),
        (lambda: ShapeLadder([5], 100).shape_for(9), "sample of 9 tokens is longer than the highest rung, 5"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(("name", "config"), [("GPT-2", GPT2Config()), ("Llama-2-7B", LlamaConfig())])
def test_the_planning_page_shows_what_configs_say(name: str, config: PretrainedConfig) -> None:
    work = Work.of(config)
    row = f"| {name} | {config.hidden_size:,}, {config.num_hidden_layers} | {work.per_step:,.0f} | {work.crossover:,.0f} |"
    assert row in (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 9), st.sampled_from([1, 8]))
def test_planned_batches_have_few_shapes_that_fit(lengths: list[int], num_shapes: int, multiple: int) -> None:
    budget = TokenBudget(400, pad_to_multiple_of=multiple)
    ladder = ShapeLadder(lengths, budget, num_shapes)
    assert len(ladder.shapes) <= num_shapes
    assert all(samples * longest <= 400 for samples, longest in ladder.shapes)
    for batch in LengthAwareBatchSampler(lengths, ladder, rank=0, world_size=1):
        samples, longest = ladder.shape_for(max(lengths[i] for i in batch))
        assert len(batch) <= samples
        assert max(lengths[i] for i in batch) <= longest
    assert_budget_law(ladder, {"tokens": np.asarray(lengths, np.int32)})


def test_rungs_stand_where_lengths_are() -> None:
    lengths = [100] * 50 + [300] * 50 + [290] * 20 + [900] * 2
    assert ShapeLadder(lengths, 1800, num_shapes=3).shapes == [(18, 100), (6, 300), (2, 900)]
