"""The price of a batch, and the few shapes that compiled models are given."""

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
)

from dynagroup import (
    AdditiveCap,
    ConfigError,
    LearningBudget,
    LengthAwareBatchSampler,
    MemoryBudget,
    OnlineDataLoader,
    TokenBudget,
)
from dynagroup.plan.batches import Batches
from dynagroup.plan.cost import CPU_PER_STEP, Price, Work
from dynagroup.plan.few_shapes import ShapeLadder
from dynagroup.testing import assert_budget_law
from dynagroup.update.planned import PlannedDataLoader
from tests import models

LLAMA = models.llama(vocab=512, width=256, inner=688, heads=4, num_key_value_heads=2)
GPT2 = models.gpt2(vocab=512, width=256, heads=4)
VALUES = st.lists(st.integers(0, 300), min_size=1, max_size=60)


def test_literal_work_prices_and_where_ranks_meet() -> None:
    work, budget = Work(per_step=10, crossover=100), TokenBudget(1000, pad_to_multiple_of=8)
    lengths = {"tokens": np.array([10, 3, 20], np.int32)}
    batches = Batches(np.array([0, 1, 2]), np.array([0, 2, 3]))
    assert work.of_batches(batches, lengths, budget).tolist() == [2 * (16 + 2.56), 24 + 5.76]
    packed = work.of_batches(batches, lengths, TokenBudget(1000, layout="packed"))
    assert packed.tolist() == pytest.approx([11 + 3.09, 24])
    assert work.of_rows(np.array([[5.0, 7.0], [1.0, 0.0]])) == 2 * 10 + 7 + 1
    assert Work(per_step=0, crossover=math.inf).of_lengths([7]).tolist() == [7]
    lengths = {
        "tokens": np.array([10, 30, 20], np.int32),
        "patches": np.array([0, 8, 40], np.int32),
    }
    prices = {"patches": Price(unit=0.5, crossover=40)}
    work, budget = (
        Work(per_step=7, crossover=math.inf, streams=prices),
        TokenBudget(99) & AdditiveCap("patches", 99),
    )
    batches = Batches(np.array([0, 1, 2]), np.array([0, 2, 3]))
    found = work.by_stream(batches, lengths, budget)
    assert found.tolist() == [[2 * 30, 0.5 * (8 + 1.6)], [20, 0.5 * (40 + 40)]]
    assert work.of_batches(batches, lengths, budget).tolist() == pytest.approx([64.8, 60])
    assert work.of_rows(found[None]) == pytest.approx(7 + 64.8)
    assert dataclasses.replace(work, meet="stream").of_rows(found[None]) == pytest.approx(
        7 + 60 + 40
    )
    unpriced = Work(crossover=math.inf).of_batches(batches, lengths, budget)
    assert unpriced.tolist() == [60, 20], "without a price, no time"
    assert work.of_batches(batches, {"tokens": lengths["tokens"]}, TokenBudget(99)).tolist() == [
        60,
        20,
    ]
    with pytest.raises(
        ConfigError, match="`work` has a price for the stream 'patches', but `lengths` has"
    ):
        work.of_batches(
            batches, {"tokens": lengths["tokens"], "frames": lengths["patches"]}, TokenBudget(99)
        )


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
    assert Work.of(config).crossover == pytest.approx(
        (short / 128 - 128 * quadratic) / quadratic, rel=0.05
    )


SMALL: Any = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
GROUPED: Any = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
SPEECH = [transformers.Wav2Vec2Config, transformers.HubertConfig, transformers.WavLMConfig]
SPEECH += [transformers.SEWConfig, transformers.UniSpeechConfig, transformers.Data2VecAudioConfig]
FEW_CONVOLUTIONS: Any = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
HYBRID = {
    "attention in no layer": transformers.Mamba2Config(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        chunk_size=64,
    ),
    "in one of four": transformers.Qwen3NextConfig(
        **SMALL,
        vocab_size=64,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "in one of eight": transformers.BambaConfig(
        **(SMALL | {"num_hidden_layers": 8}),
        vocab_size=64,
        attn_layer_indices=[4],
        num_key_value_heads=4,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=64,
    ),
}


def grown(model: Any, field: str, shapes: list[tuple[int, ...]], kind: Any, device: str) -> float:
    """How many times the operations of the first shape the second one takes."""
    counts = []
    for shape in shapes:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device(device):
            model(**{field: torch.ones(shape, dtype=kind)})
        counts.append(counter.get_total_flops())
    return counts[1] / counts[0]


@pytest.mark.parametrize("convolutions", [{}, FEW_CONVOLUTIONS], ids=["seven", "two"])
@pytest.mark.parametrize("kind", SPEECH, ids=lambda kind: kind.__name__)
def test_only_what_convolutions_leave_of_a_waveform_attends(kind: Any, convolutions: Any) -> None:
    grouped = {} if kind is transformers.Data2VecAudioConfig else GROUPED
    config = kind(**SMALL, **grouped, **convolutions)
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation="eager").eval()
    shapes: Any = [(1, 16_000), (1, 160_000)]
    wanted = grown(model, "input_values", shapes, torch.float32, "meta")
    short, long = Work.of(config).of_lengths([16_000, 160_000])
    assert wanted / 1.5 < long / short < 1.5 * wanted


def test_frames_of_speech_to_text_are_joined_by_its_convolutions() -> None:
    config = transformers.Speech2TextConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=20_000,
    )
    with torch.device("meta"):
        encoder = transformers.Speech2TextModel(config).eval().get_encoder()
    shapes: Any = [(1, 1000, 80), (1, 10_000, 80)]
    wanted = grown(encoder, "input_features", shapes, torch.float32, "meta")
    work = Work.of(config)
    short, long = work.of_lengths([1000, 10_000])
    assert wanted / 1.5 < long / short < 1.5 * wanted
    assert work.price("target").unit == 1.0


@pytest.mark.parametrize("name", HYBRID)
def test_attention_counts_in_the_layers_that_have_it(name: str) -> None:
    config = HYBRID[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    wanted = grown(model, "input_ids", [(1, 256), (1, 2048)], torch.int64, "cpu")
    short, long = Work.of(config).of_lengths([256, 2048])
    assert wanted / 1.5 < long / short < 1.5 * wanted


def test_attention_within_a_window_grows_with_the_length_and_not_with_its_square() -> None:
    whole = LlamaConfig(**SMALL)
    windows = transformers.MistralConfig(**SMALL, num_key_value_heads=4, sliding_window=64)
    mixed = transformers.GptOssConfig(
        **SMALL, num_key_value_heads=4, head_dim=16, sliding_window=64
    )
    assert Work.of(windows).crossover == math.inf
    assert 2 < Work.of(mixed).crossover / Work.of(whole).crossover
    wide = transformers.MistralConfig(**SMALL, num_key_value_heads=4, sliding_window=100_000)
    assert Work.of(wide).crossover < math.inf  # hardly a sample is longer


def test_without_a_known_model_attention_takes_at_most_half_of_the_time_at_the_median() -> None:
    with pytest.warns(UserWarning, match="half of the samples are longer than 160,000"):
        plan = LengthAwareBatchSampler([160_000] * 9, 640_000, rank=0, world_size=1).plan
    assert plan.work.of_lengths([160_000])[0] == 320_000
    known = LengthAwareBatchSampler([160_000] * 9, 640_000, work=Work(), rank=0, world_size=1)
    assert known.plan.work == Work()
    short = LengthAwareBatchSampler([100] * 9, 640_000, rank=0, world_size=1)
    assert short.plan.work.crossover == Work().crossover


@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: b & TokenBudget(10**6), LearningBudget])
def test_a_step_of_generation_costs_a_forward_pass_for_each_new_token(wrap: Any) -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 300)
    budgets = {
        mode: wrap(MemoryBudget.from_model(LLAMA, "1GB", mode=mode, **more))
        for mode, more in (("forward", {}), ("generate", {"max_new_tokens": 32}))
    }
    work = Work(per_step=100)
    plans = {
        mode: LengthAwareBatchSampler(lengths, budget, work=work, rank=0, world_size=1).plan
        for mode, budget in budgets.items()
    }
    assert plans["forward"].work.per_step == 100
    assert plans["generate"].work.per_step == 3200
    assert plans["generate"].num_steps < plans["forward"].num_steps
    assert plans["generate"].predicted_time > 3200 * plans["generate"].num_steps


@pytest.mark.parametrize(
    ("name", "config"), [("GPT-2", GPT2Config()), ("Llama-2-7B", LlamaConfig())]
)
def test_the_planning_page_shows_what_configs_say(name: str, config: Any) -> None:
    work = Work.of(config)
    row = f"| {name} | {config.hidden_size:,}, {config.num_hidden_layers} | {work.per_step:,.0f} | {work.crossover:,.0f} |"
    assert row in (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


@settings(max_examples=60, deadline=None)
@given(VALUES, st.integers(2, 9), st.sampled_from([1, 8]), st.integers(1, 3))
def test_planned_batches_have_few_shapes_that_fit(values, most, multiple, ranks) -> None:
    """Also of samples that do not fit even alone, of which all have one shape; no other batch has it."""
    budget, lengths = (
        TokenBudget(400, pad_to_multiple_of=multiple),
        {"tokens": np.asarray(values, np.int32)},
    )
    ladder = ShapeLadder(lengths, budget, most, window=7)
    assert len(ladder.shapes) <= most
    assert sum(samples * sum(longest) > 400 for samples, *longest in ladder.shapes) <= 1
    assert_budget_law(ladder, lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = LengthAwareBatchSampler(lengths, ladder, rank=0, world_size=ranks).plan
    work = plan.work.of_batches(plan.batches, lengths, ladder)
    for number, batch in enumerate(plan.batches):
        longest = [max(int(values[batch].max()), 1) for values in lengths.values()]
        samples, *wide = ladder.shape_for(len(batch), *longest)
        holds = [
            (n, *w) for n, *w in ladder.shapes if n >= len(batch) and (np.array(longest) <= w).all()
        ]
        assert (samples, *wide) in holds
        assert work[number] == pytest.approx(samples * plan.work.of_lengths(wide).sum())
        assert plan.padded[number] == samples * sum(wide)
        assert samples * sum(wide) <= 400 or bool(np.isin(plan.oversize, batch).any())
        least = min(n * sum(w) for n, *w in holds)
        assert samples * sum(wide) <= 1.1 * least or samples * sum(wide) > 400, (
            "the cheapest, attention counted"
        )


def test_literal_ladders_and_what_was_learned_rules_rungs_out() -> None:
    lengths = [100] * 50 + [300] * 50 + [290] * 20 + [900] * 2
    assert ShapeLadder(lengths, 1800, num_shapes=3, window=122, work=Work()).shapes == [
        (17, 100),
        (6, 300),
        (2, 900),
    ]
    budget = LearningBudget(TokenBudget(1000))
    ladder = ShapeLadder([10] * 90 + [100] * 9, budget, 4, window=20, work=Work())
    before = ladder.largest(np.array([10, 100])).tolist()
    budget.record_failed_cost(before[1] * 100.0)
    budget.apply()
    after = ladder.largest(np.array([10, 100]))
    assert after[1] < before[1]
    assert ladder.learner is not None
    assert after[0] == before[0]


@pytest.mark.parametrize(("values", "most"), [("narrow", 1.12), ("wide", 1.35)])
def test_few_shapes_cost_little_more_than_free_ones(values: str, most: float) -> None:
    """Of updates of 64: against any shape, and against uniform lengths at their largest sizes."""
    rng, spread = np.random.default_rng(0), 0.35 if values == "narrow" else 1.0
    lengths = rng.lognormal(6, spread, 6400).astype(np.int32).clip(1, 8000)
    budget = TokenBudget(4 * int(lengths.max()))
    how = {"samples_per_update": 64, "work": Work(), "rank": 0, "world_size": 1}
    ladder = ShapeLadder(lengths, budget, 16, window=64, work=Work())
    free, few = (
        LengthAwareBatchSampler(lengths, asked, **how).plan.predicted_time
        for asked in (budget, ladder)
    )
    assert few <= most * free


@pytest.mark.parametrize(("device", "price"), [("cpu", CPU_PER_STEP), ("cuda", 1024)])
def test_the_default_is_that_of_the_device_that_torch_has(
    device: str, price: float, monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    data: list[dict] = [{"input_ids": [1, 2]}]
    found = [
        LengthAwareBatchSampler([2], 8, rank=0, world_size=1).plan.work,
        PlannedDataLoader(data, [2], 8, work=None).plan.work,
        OnlineDataLoader(data, 8).config.work,
    ]
    assert [work.per_step for work in found] == [price] * 3


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0, 5000),
    st.floats(100, 1e5),
    st.floats(0.01, 9),
    st.floats(10, 1e5),
    st.integers(0, 99),
)
def test_measured_steps_with_several_lengths_are_fitted(
    a: float, b: float, unit: float, c: float, seed: int
) -> None:
    rng, rows = np.random.default_rng(seed), []
    work = Work(per_step=a, crossover=b, streams={"patches": Price(unit=unit, crossover=c)})
    for _ in range(30):
        each = {"tokens": int(rng.integers(1, 8000)), "patches": int(rng.integers(0, 4000))}
        n = int(rng.integers(1, 32))
        rows.append((n, each, 1e-6 * (a + n * float(work.of_lengths(each)))))
    fitted = Work.fit(rows)
    for n, each, _ in rows:
        predicted = (fitted.per_step + n * float(fitted.of_lengths(each))) / (
            a + n * float(work.of_lengths(each))
        )
        assert predicted == pytest.approx(1, rel=1e-3)
    assert fitted.streams["patches"].unit == pytest.approx(unit, rel=0.02)
