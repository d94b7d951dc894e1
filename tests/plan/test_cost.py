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
    BatchPlan,
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
from tests.plan.helpers import streams

LLAMA = models.llama(vocab=512, width=256, inner=688, heads=4, num_key_value_heads=2)
GPT2 = models.gpt2(vocab=512, width=256, heads=4)
VALUES = st.lists(st.integers(0, 300), min_size=1, max_size=60)


def plan_of(lengths: Any, budget: Any, **options: Any) -> BatchPlan:
    sampler = LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1, **options)
    return sampler.plan


TWO_BATCHES = Batches(np.array([0, 1, 2]), np.array([0, 2, 3]))
IMAGES = streams([10, 30, 20], patches=[0, 8, 40])
PRICED = Work(per_step=7, crossover=math.inf, streams={"patches": Price(unit=0.5, crossover=40)})
CAPPED = TokenBudget(99) & AdditiveCap("patches", 99)


def test_the_work_of_a_batch_is_that_of_its_longest_sample_times_their_number() -> None:
    work = Work(per_step=10, crossover=100)
    lengths = streams([10, 3, 20])
    budget = TokenBudget(1000, pad_to_multiple_of=8)
    first, second = work.of_batches(TWO_BATCHES, lengths, budget)
    assert first == 2 * (16 + 2.56)
    assert second == 24 + 5.76


def test_the_work_of_a_packed_batch_is_that_of_its_samples() -> None:
    work = Work(per_step=10, crossover=100)
    lengths = streams([10, 3, 20])
    budget = TokenBudget(1000, layout="packed")
    first, second = work.of_batches(TWO_BATCHES, lengths, budget)
    assert first == pytest.approx(11 + 3.09)
    assert second == pytest.approx(24)


def test_a_step_takes_a_fixed_time_and_that_of_its_dearest_batch() -> None:
    work = Work(per_step=10)
    rows = np.array([[5.0, 7.0], [1.0, 0.0]])
    assert work.of_rows(rows) == 2 * 10 + 7 + 1


def test_without_attention_a_token_costs_one() -> None:
    work = Work(per_step=0, crossover=math.inf)
    assert work.of_lengths([7]).tolist() == [7]


def test_a_stream_with_a_price_costs_time() -> None:
    first, second = PRICED.by_stream(TWO_BATCHES, IMAGES, CAPPED)
    assert first.tolist() == [2 * 30, 0.5 * (8 + 1.6)]
    assert second.tolist() == [20, 0.5 * (40 + 40)]
    work = PRICED.of_batches(TWO_BATCHES, IMAGES, CAPPED)
    assert work.tolist() == pytest.approx([64.8, 60])


def test_ranks_meet_after_each_step_or_after_each_stream() -> None:
    by_stream = PRICED.by_stream(TWO_BATCHES, IMAGES, CAPPED)[None]
    assert PRICED.of_rows(by_stream) == pytest.approx(7 + 64.8)
    by_streams = dataclasses.replace(PRICED, meet="stream")
    assert by_streams.of_rows(by_stream) == pytest.approx(7 + 60 + 40)


def test_a_stream_without_a_price_costs_no_time() -> None:
    unpriced = Work(crossover=math.inf)
    work = unpriced.of_batches(TWO_BATCHES, IMAGES, CAPPED)
    assert work.tolist() == [60, 20]


def test_a_price_of_a_stream_that_is_not_there_costs_no_time() -> None:
    tokens = {"tokens": IMAGES["tokens"]}
    work = PRICED.of_batches(TWO_BATCHES, tokens, TokenBudget(99))
    assert work.tolist() == [60, 20]


def test_a_price_of_a_stream_of_another_name_is_refused() -> None:
    lengths = {"tokens": IMAGES["tokens"], "frames": IMAGES["patches"]}
    message = "`work` has a price for the stream 'patches', but `lengths` has"
    with pytest.raises(ConfigError, match=message):
        PRICED.of_batches(TWO_BATCHES, lengths, TokenBudget(99))


def operations_of(config: Any, num_tokens: int) -> float:
    """A forward pass with one sample, traced."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        ids = torch.zeros((1, num_tokens), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_crossover_is_what_a_traced_model_multiplies(config: Any) -> None:
    of_token = operations_of(config, 128) / 128
    of_later_token = operations_of(config, 512) / 512
    quadratic = (of_later_token - of_token) / (512 - 128)
    linear = of_token - 128 * quadratic
    expected = linear / quadratic
    work = Work.of(config)
    assert work.crossover == pytest.approx(expected, rel=0.05)


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
MAMBA = transformers.Mamba2Config(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_heads=8,
    head_dim=16,
    state_size=16,
    n_groups=1,
    chunk_size=64,
)
QWEN = transformers.Qwen3NextConfig(
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
)
EIGHT_LAYERS: Any = {**SMALL, "num_hidden_layers": 8}
BAMBA = transformers.BambaConfig(
    **EIGHT_LAYERS,
    vocab_size=64,
    attn_layer_indices=[4],
    num_key_value_heads=4,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=16,
    mamba_n_groups=1,
    mamba_chunk_size=64,
)
HYBRID = {"attention in no layer": MAMBA, "in one of four": QWEN, "in one of eight": BAMBA}


def grown(model: Any, field: str, shapes: list[tuple[int, ...]], kind: Any, device: str) -> float:
    """How many times the operations of the first shape the second one takes."""
    counts = []
    for shape in shapes:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device(device):
            inputs = {field: torch.ones(shape, dtype=kind)}
            model(**inputs)
        counts.append(counter.get_total_flops())
    return counts[1] / counts[0]


def assert_grows(work: Work, lengths: list[int], growth: float) -> None:
    short, long = work.of_lengths(lengths)
    predicted = long / short
    assert growth / 1.5 < predicted < 1.5 * growth


@pytest.mark.parametrize("convolutions", [{}, FEW_CONVOLUTIONS], ids=["seven", "two"])
@pytest.mark.parametrize("kind", SPEECH, ids=lambda kind: kind.__name__)
def test_only_what_convolutions_leave_of_a_waveform_attends(kind: Any, convolutions: Any) -> None:
    grouped = {} if kind is transformers.Data2VecAudioConfig else GROUPED
    config = kind(**SMALL, **grouped, **convolutions)
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation="eager")
    model.eval()
    shapes: Any = [(1, 16_000), (1, 160_000)]
    growth = grown(model, "input_values", shapes, torch.float32, "meta")
    assert_grows(Work.of(config), [16_000, 160_000], growth)


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
        model = transformers.Speech2TextModel(config)
    encoder = model.eval().get_encoder()
    shapes: Any = [(1, 1000, 80), (1, 10_000, 80)]
    growth = grown(encoder, "input_features", shapes, torch.float32, "meta")
    work = Work.of(config)
    assert_grows(work, [1000, 10_000], growth)
    assert work.price("target").unit == 1.0


@pytest.mark.parametrize("name", HYBRID)
def test_attention_counts_in_the_layers_that_have_it(name: str) -> None:
    config = HYBRID[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval()
    growth = grown(model, "input_ids", [(1, 256), (1, 2048)], torch.int64, "cpu")
    assert_grows(Work.of(config), [256, 2048], growth)


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
        plan = plan_of([160_000] * 9, 640_000)
    [work_of_sample] = plan.work.of_lengths([160_000])
    assert work_of_sample == 320_000


def test_work_that_is_given_is_left_as_it_is() -> None:
    work = Work()
    plan = plan_of([160_000] * 9, 640_000, work=work)
    assert plan.work == work


def test_short_samples_have_the_usual_crossover() -> None:
    usual = Work()
    plan = plan_of([100] * 9, 640_000)
    assert plan.work.crossover == usual.crossover


FORWARD = MemoryBudget.from_model(LLAMA, "1GB", mode="forward")
GENERATE = MemoryBudget.from_model(LLAMA, "1GB", mode="generate", max_new_tokens=32)


def as_it_is(budget: Any) -> Any:
    return budget


def capped(budget: Any) -> Any:
    return budget & TokenBudget(10**6)


@pytest.mark.parametrize("wrap", [as_it_is, capped, LearningBudget])
def test_a_step_of_generation_costs_a_forward_pass_for_each_new_token(wrap: Any) -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 300)
    work = Work(per_step=100)
    forward = plan_of(lengths, wrap(FORWARD), work=work)
    generate = plan_of(lengths, wrap(GENERATE), work=work)
    assert forward.work.per_step == 100
    assert generate.work.per_step == 3200
    assert generate.num_steps < forward.num_steps
    assert generate.predicted_time > 3200 * generate.num_steps


@pytest.mark.parametrize(
    ("name", "config"), [("GPT-2", GPT2Config()), ("Llama-2-7B", LlamaConfig())]
)
def test_the_planning_page_shows_what_configs_say(name: str, config: Any) -> None:
    work = Work.of(config)
    sizes = f"{config.hidden_size:,}, {config.num_hidden_layers}"
    row = f"| {name} | {sizes} | {work.per_step:,.0f} | {work.crossover:,.0f} |"
    page = Path(__file__).parents[2] / "docs" / "planning.md"
    assert row in page.read_text()


# Few shapes


def assert_few_shapes_of_which_one_may_be_too_large(ladder: ShapeLadder, num_shapes: int) -> None:
    """That of all samples that do not fit even alone."""
    assert len(ladder.shapes) <= num_shapes
    too_large = [shape for shape in ladder.shapes if math.prod(shape) > 400]
    assert len(too_large) <= 1


def assert_about_the_smallest_shape_that_holds(
    ladder: ShapeLadder, size: int, longest: int
) -> None:
    """The cheapest, attention counted."""
    shape = ladder.shape_for(size, longest)
    holding = []
    for num_samples, width in ladder.shapes:
        if num_samples >= size and width >= longest:
            holding.append((num_samples, width))
    assert shape in holding
    least = min(math.prod(other) for other in holding)
    assert math.prod(shape) <= 1.1 * least or math.prod(shape) > 400


@settings(max_examples=60, deadline=None)
@given(VALUES, st.integers(2, 9), st.sampled_from([1, 8]), st.integers(1, 3))
def test_planned_batches_have_few_shapes_that_fit(values, num_shapes, multiple, ranks) -> None:
    lengths = streams(values)
    budget = TokenBudget(400, pad_to_multiple_of=multiple)
    ladder = ShapeLadder(lengths, budget, num_shapes, window=7)
    assert_few_shapes_of_which_one_may_be_too_large(ladder, num_shapes)
    assert_budget_law(ladder, lengths)
    with warnings.catch_warnings(action="ignore"):
        plan = LengthAwareBatchSampler(lengths, ladder, rank=0, world_size=ranks).plan
    work = plan.work.of_batches(plan.batches, lengths, ladder)
    for number, batch in enumerate(plan.batches):
        longest = max(int(lengths["tokens"][batch].max()), 1)
        assert_about_the_smallest_shape_that_holds(ladder, len(batch), longest)
        num_samples, width = ladder.shape_for(len(batch), longest)
        [work_of_sample] = plan.work.of_lengths([width])
        assert work[number] == pytest.approx(num_samples * work_of_sample)
        assert plan.padded[number] == num_samples * width
        is_oversize = bool(np.isin(plan.oversize, batch).any())
        assert num_samples * width <= 400 or is_oversize


def test_a_literal_ladder() -> None:
    lengths = [100] * 50 + [300] * 50 + [290] * 20 + [900] * 2
    ladder = ShapeLadder(lengths, 1800, num_shapes=3, window=122, work=Work())
    assert ladder.shapes == [(17, 100), (6, 300), (2, 900)]


def test_what_was_learned_rules_rungs_out() -> None:
    budget = LearningBudget(TokenBudget(1000))
    ladder = ShapeLadder([10] * 90 + [100] * 9, budget, 4, window=20, work=Work())
    lengths = np.array([10, 100])
    short_before, long_before = ladder.largest(lengths).tolist()
    failed = long_before * 100.0
    budget.record_failed_cost(failed)
    budget.apply()
    short_after, long_after = ladder.largest(lengths).tolist()
    assert long_after < long_before
    assert short_after == short_before
    assert ladder.learner is not None


@pytest.mark.parametrize(("sigma", "most"), [(0.35, 1.12), (1.0, 1.35)], ids=["narrow", "wide"])
def test_few_shapes_cost_little_more_than_free_ones(sigma: float, most: float) -> None:
    """Of updates of 64: against any shape, and against uniform lengths at their largest sizes."""
    drawn = np.random.default_rng(0).lognormal(6, sigma, 6400)
    lengths = drawn.astype(np.int32).clip(1, 8000)
    longest = int(lengths.max())
    budget = TokenBudget(4 * longest)
    work = Work()
    ladder = ShapeLadder(lengths, budget, 16, window=64, work=work)
    free = plan_of(lengths, budget, samples_per_update=64, work=work)
    few = plan_of(lengths, ladder, samples_per_update=64, work=work)
    assert few.predicted_time <= most * free.predicted_time


# Defaults and measured steps


@pytest.mark.parametrize(("device", "price"), [("cpu", CPU_PER_STEP), ("cuda", 1024)])
def test_the_default_is_that_of_the_device_that_torch_has(
    device: str, price: float, monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    data: list[dict] = [{"input_ids": [1, 2]}]
    plan = plan_of([2], 8)
    assert plan.work.per_step == price
    planned = PlannedDataLoader(data, [2], 8, work=None)
    assert planned.plan.work.per_step == price
    online = OnlineDataLoader(data, 8)
    assert online.config.work.per_step == price


def time_of(work: Work, num_samples: int, lengths: dict[str, int]) -> float:
    return work.per_step + num_samples * float(work.of_lengths(lengths))


@settings(max_examples=40, deadline=None)
@given(
    per_step=st.floats(0, 5000),
    crossover=st.floats(100, 1e5),
    unit=st.floats(0.01, 9),
    crossover_of_patches=st.floats(10, 1e5),
    seed=st.integers(0, 99),
)
def test_measured_steps_with_several_lengths_are_fitted(
    per_step: float, crossover: float, unit: float, crossover_of_patches: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    patches = Price(unit=unit, crossover=crossover_of_patches)
    work = Work(per_step=per_step, crossover=crossover, streams={"patches": patches})
    steps = []
    for _ in range(30):
        num_tokens = int(rng.integers(1, 8000))
        num_patches = int(rng.integers(0, 4000))
        lengths = {"tokens": num_tokens, "patches": num_patches}
        num_samples = int(rng.integers(1, 32))
        seconds = 1e-6 * time_of(work, num_samples, lengths)
        steps.append((num_samples, lengths, seconds))
    fitted = Work.fit(steps)
    for num_samples, lengths, _ in steps:
        expected = time_of(work, num_samples, lengths)
        assert time_of(fitted, num_samples, lengths) == pytest.approx(expected, rel=1e-3)
    assert fitted.streams["patches"].unit == pytest.approx(unit, rel=0.02)
