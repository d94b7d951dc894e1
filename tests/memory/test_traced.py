"""A traced model says what simulating all of it says, for shapes that nobody traced; what fits a device follows from it."""

import re
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from inspect import isfunction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dynagroup import (
    AdditiveCap,
    BudgetError,
    ConfigError,
    LengthAwareBatchSampler,
    MemoryBudget,
    TokenBudget,
)
from dynagroup.integrations.varlen import use_varlen_attention
from dynagroup.memory import (
    Measurement,
    Measurements,
    MemoryRegressor,
    ProfiledMemory,
    TracedMemory,
    Workload,
    simulate,
)
from dynagroup.memory.phases import Phases
from dynagroup.memory.trace.kernels import LiveBytes
from dynagroup.memory.trace.model import as_meta_model, checkpoint_layers
from dynagroup.memory.trace.program import REDUCE_BUCKET, kept_bytes, static_bytes
from dynagroup.memory.traced import line_above, optimizer_bytes
from dynagroup.shapes import BatchShape
from dynagroup.testing import Allocator
from tests import models
from tests.memory.helpers import bytes_of, phase

SMALL: Any = {"vocab": 400, "width": 32, "heads": 4, "inner": 64}
GROUPED: Any = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
LONG: Any = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 40_000}
EXPERTS: Any = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
STATES: Any = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 32}


def gemma3(num_sliding: int, window: int) -> Any:
    """Its last layer attends to all tokens, the layers before it to so many."""
    kinds = ["sliding_attention"] * num_sliding
    kinds.append("full_attention")
    return models.config(
        hf.Gemma3TextConfig,
        **GROUPED,
        layers=len(kinds),
        layer_types=kinds,
        sliding_window=window,
    )


def few_positions(num_positions: int) -> Any:
    return models.bert(width=64, heads=4, inner=64, max_position_embeddings=num_positions)


LLAMA = models.llama(**LONG, layers=5)
SHALLOW = models.llama(**LONG, layers=2)
PLAIN = models.llama(**GROUPED, layers=1)
EAGER = models.llama(**GROUPED, layers=1, attn_implementation="eager")
WIDE = models.llama(vocab=400, width=256, heads=4, layers=2, num_key_value_heads=1)
BERT = models.bert(**SMALL, dropout=0.1)
T5 = models.t5(**SMALL, dropout=0.1)
BART = models.bart(**SMALL)
GPT2 = models.gpt2(**SMALL, n_positions=5000, pad_token_id=1)
# What one of its layers adds is not what the next one does.
GEMMA = gemma3(num_sliding=2, window=144)
MIXED = gemma3(num_sliding=4, window=16)
GEMMA2 = models.config(hf.Gemma2Config, **GROUPED)
OLMOE = models.config(hf.OlmoeConfig, **SMALL, num_experts=4, num_experts_per_tok=2)
GLM = models.config(hf.Glm4MoeConfig, **GROUPED, **EXPERTS, layers=5, first_k_dense_replace=3)
LONGFORMER = models.config(hf.LongformerConfig, **SMALL, layers=1, attention_window=32)
MAMBA = hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
MAMBA2 = hf.Mamba2Config(vocab_size=90, hidden_size=32, num_hidden_layers=2, **STATES)
IMAGES = hf.LlavaConfig(text_config=models.llama(**SMALL))
NO_PAD = hf.ModernBertConfig(
    vocab_size=2000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
)


@dataclass(frozen=True)
class Case:
    """A model, how it runs, and shapes that are simulated."""

    config: Any
    mode: Any = "train"
    known: dict[str, Any] = field(default_factory=dict)
    shapes: Any = ((9, 33), (3, 120), (2, 500))
    most: float = 1.05

    @cached_property
    def memory(self) -> TracedMemory:
        with torch.inference_mode():  # whatever the caller is in the midst of
            return TracedMemory.of(self.config, self.mode, **self.known)


PAIRS = (
    (9, {"tokens": 33, "target": 90}),
    (3, {"tokens": 120, "target": 14}),
    (2, {"tokens": 500, "target": 600}),
)
PROMPTS = ((13, 1), (13, 10))  # the cache of what is generated takes more than these
BF16 = {"dtype": "bfloat16"}
AUTOCAST = {
    "dtype": "float32",
    "autocast": "bfloat16",
    "attention": "eager",
    "gradient_checkpointing": True,
}


def generating(config: Any, num_tokens: int, **known: Any) -> Case:
    return Case(config, mode="generate", known={**known, "max_new_tokens": num_tokens})


CASES = {
    "llama": Case(LLAMA, known=BF16),
    "llama autocast": Case(LLAMA, known=AUTOCAST),
    "llama generating": generating(LLAMA, 70, dtype="bfloat16"),
    "bert": Case(BERT),
    "t5": Case(T5, known=BF16, shapes=PAIRS),
    "wide generating": replace(generating(WIDE, 40), shapes=PROMPTS, most=2.0),
    "mixed generating": generating(MIXED, 900, attention="eager"),
    "bart generating": generating(BART, 30, attention="eager"),
    "gemma generating": generating(GEMMA, 40, dtype="bfloat16"),
    "olmoe": Case(OLMOE, known={**BF16, "attention": "eager"}),
    "glm": Case(GLM, known={"attention": "eager", "gradient_checkpointing": True}),
    "bert adapted": Case(BERT, known={**BF16, "attention": "eager", "lora": 4}),
}


def assert_as_simulated(
    memory: TracedMemory, model: Any, shapes: Any, least: float = 0.97, most: float = 1.05
) -> None:
    for row in simulate(model, memory.workload, shapes):
        longest = dict(row.longest)
        ratio = bytes_of(memory, row.num_samples, longest) / row.batch_bytes
        assert least <= ratio <= most, (row.num_samples, longest)


@pytest.mark.parametrize("name", CASES)
def test_what_was_traced_is_what_the_whole_model_takes(name: str) -> None:
    case = CASES[name]
    adapters = case.known.get("lora")
    run = case.memory.workload
    model = as_meta_model(case.config, dtype=run.dtype, attention=run.attention, lora=adapters)
    assert_as_simulated(case.memory, model, case.shapes, most=case.most)


def test_a_target_counts_under_any_name() -> None:
    tokens = [64, 300]
    others = [200, 50]
    target = BatchShape.of(8, {"tokens": tokens, "target": others})
    labels = BatchShape.of(8, {"tokens": tokens, "labels": others})
    memory = CASES["t5"].memory
    assert memory.batch_bytes(target).tolist() == memory.batch_bytes(labels).tolist()


# Layers that are not alike


@pytest.mark.parametrize(
    ("trained", "checkpointed"),
    [("layers.[34]|norm", True), ("4.*norm|model.norm", True), ("layers.4|lm_head", False)],
)
def test_layers_of_which_other_parameters_are_trained_are_not_alike(trained, checkpointed):
    """Frozen layers below the first that is trained keep nothing; norms that are trained keep their inputs."""
    config = models.config(hf.Gemma2Config, **GROUPED, layers=5)
    model = as_meta_model(config, attention="eager")
    for name, parameter in model.named_parameters():
        is_trained = re.search(trained, name) is not None
        parameter.requires_grad_(is_trained)
    memory = TracedMemory.of(model, gradient_checkpointing=checkpointed)
    assert_as_simulated(memory, model, [(8, 256), (4, 100)], least=0.999, most=1.01)


def eager_llama(num_layers: int) -> Any:
    config = models.llama(**GROUPED, layers=num_layers)
    return as_meta_model(config, attention="eager")


def test_layers_of_other_dropout_are_not_alike():
    model = eager_llama(5)
    model.model.layers[-1].self_attn.attention_dropout = 0.1
    memory = TracedMemory.of(model)
    assert_as_simulated(memory, model, [(4, 100), (32, 40)], least=0.999)


@pytest.fixture(scope="module")
def bytes_by_checkpointing() -> dict[bool, float]:
    """Of a batch of 8 samples of 256 tokens, if every layer is checkpointed, and if none is."""
    result = {}
    for is_checkpointed in (True, False):
        memory = TracedMemory.of(eager_llama(4), gradient_checkpointing=is_checkpointed)
        result[is_checkpointed] = bytes_of(memory, 8, 256)
    return result


@pytest.mark.parametrize(
    "without", [slice(0, None, 2), slice(2, None)], ids=["every second", "upper half"]
)
def test_a_model_that_checkpoints_some_layers_is_not_taken_for_one_that_checkpoints_all(
    without, bytes_by_checkpointing
):
    model = eager_llama(4)
    checkpoint_layers(model)
    for layer in model.model.layers[without]:
        layer.gradient_checkpointing = False
    memory = TracedMemory.of(model)
    assert_as_simulated(memory, model, [(8, 256), (4, 100)], least=0.999)
    some = bytes_of(memory, 8, 256)
    assert bytes_by_checkpointing[True] < 0.9 * some
    assert some < 0.9 * bytes_by_checkpointing[False]


def test_checkpointing_of_some_layers_is_switched_off_by_a_setting(bytes_by_checkpointing):
    model = eager_llama(4)
    checkpoint_layers(model)
    model.model.layers[0].gradient_checkpointing = False
    memory = TracedMemory.of(model, gradient_checkpointing=False)
    assert bytes_of(memory, 8, 256) == bytes_by_checkpointing[False]


# Ways to checkpoint


KEPT = [torch.ops.aten.bmm.default, torch.ops.aten.addmm.default]
KEEPS = partial(create_selective_checkpoint_contexts, KEPT)
CHECKPOINTS: dict[str, Any] = {
    "usual": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": KEEPS},
}


@cache
def bytes_checkpointed(checkpoints: str | None, autocast: str | None) -> float:
    """Of a batch of 4 samples of 400 tokens; the trace is compared with simulations."""
    config = models.config(hf.MegatronBertConfig, **SMALL, layers=5, attn_implementation="eager")
    model = hf.MegatronBertForMaskedLM(config)
    if checkpoints is not None:
        model.activation_checkpointing_enable(CHECKPOINTS[checkpoints])
    memory = TracedMemory.of(model, autocast=autocast)
    assert_as_simulated(memory, model, [(4, 400), (16, 64)], least=0.999)
    return bytes_of(memory, 4, 400)


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_reentrant_checkpointing_is_traced_as_such(autocast):
    """It runs a layer anew to its end before any of its gradients, so its scores and their gradients are alive at once; the
    other kind stops at the last stored tensor."""
    usual = bytes_checkpointed("usual", autocast)
    assert bytes_checkpointed("reentrant", autocast) > 1.2 * usual


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_selective_checkpointing_is_traced_as_such(autocast):
    """It keeps what some operations return."""
    selective = bytes_checkpointed("selective", autocast)
    assert bytes_checkpointed("usual", autocast) < 0.9 * selective
    assert selective < bytes_checkpointed(None, autocast)


# How a model attends


def forward_bytes(config: Any, attention: Any = None) -> float:
    """Of 4 samples of 200 tokens."""
    memory = TracedMemory.of(config, "forward", attention=attention)
    return bytes_of(memory, 4, 200)


def test_a_config_that_asks_for_eager_attention_gets_it():
    eager = forward_bytes(PLAIN, "eager")
    assert forward_bytes(EAGER) == eager
    assert forward_bytes(EAGER, "eager") == eager
    fused = forward_bytes(PLAIN)
    assert forward_bytes(EAGER, "sdpa") == fused
    assert fused < eager


def test_a_config_that_asks_for_eager_attention_is_simulated_so():
    [row] = simulate(EAGER, None, [(4, 200)])
    memory = TracedMemory.of(EAGER, attention="eager")
    predicted = bytes_of(memory, 4, 200)
    assert row.batch_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(
    ("config", "mode"), [(LONGFORMER, "train"), (MAMBA2, "forward")], ids=["longformer", "mamba2"]
)
def test_a_program_that_pads_its_input_is_never_predicted_smaller(config, mode):
    """To windows or chunks of 32: traced at multiples of 32, a batch one token longer would be predicted far too small."""
    counts = [3, 2, 5, 3, 8, 3, 1]
    lengths = [1, 33, 16, 65, 200, 257, 500]
    memory = TracedMemory.of(config, mode)
    assert_as_simulated(memory, config, zip(counts, lengths, strict=True), most=2.0)


def test_a_model_with_few_positions_is_never_predicted_smaller_near_the_last_of_them():
    """A mask of 16 more tokens is copied to be padded, one of a multiple of 16 is not; so the last length is not the worst."""
    config = few_positions(128)
    memory = TracedMemory.of(config, "forward", dtype="bfloat16")
    shapes = [(50, length) for length in (128, 124, 120, 113, 112, 97)]
    assert_as_simulated(memory, config, shapes, most=1.2)


def test_a_model_with_any_number_of_positions_is_traced():
    """XLNet states -1 of them."""
    config = hf.XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64, vocab_size=100)
    memory = TracedMemory.of(config, "forward")
    assert memory.longest is None
    assert_as_simulated(memory, config, [(3, 200)])


# What cannot be traced


class Odd(hf.LlamaForCausalLM):
    """Its operations depend on the values of its input."""

    def forward(self, input_ids=None, **kwargs):
        is_odd = input_ids.sum().item() > 3
        return super().forward(input_ids=input_ids + int(is_odd), **kwargs)


def test_what_cannot_be_traced_is_estimated_and_that_is_said():
    message = "estimated from its sizes, because this model cannot be traced"
    with pytest.warns(UserWarning, match=message):
        workload = Workload.from_model(Odd(SHALLOW))
    assert workload.phases is None
    assert workload.hidden_size == 32


def test_a_state_space_model_without_its_kernels_cannot_be_traced():
    """Its program is another one for each length."""
    with pytest.raises(ConfigError, match="its operations depend on the shape .* simulate"):
        TracedMemory.of(MAMBA, "forward", dtype="bf16")


def test_what_cannot_be_traced_may_be_simulated():
    workload = Workload.from_model(MAMBA, "forward", trace=False, dtype="bf16")
    shapes = product((1, 8, 64), (1, 33, 200))
    profile = ProfiledMemory.fit(simulate(MAMBA, workload, shapes))
    for row in simulate(MAMBA, workload, [(8, 64), (3, 150)]):
        predicted = bytes_of(profile, row.num_samples, dict(row.longest))
        assert predicted == pytest.approx(row.batch_bytes, rel=0.3)


# The law of budgets


def assert_law(name: str, num_samples: int, length: int, more: int, longer: int) -> None:
    """A batch of more samples, or of longer ones, never needs less."""
    regressor = MemoryRegressor.pretrained(CASES[name].memory.workload)
    larger_count = num_samples + more
    larger_length = length + longer
    shapes = BatchShape.of(
        [num_samples, larger_count, num_samples, larger_count],
        [length, length, larger_length, larger_length],
    )
    baseline = BatchShape.of(8, 256)
    smallest, larger, longest, largest = regressor.relative(shapes, baseline)
    assert smallest <= min(larger, longest)
    assert max(larger, longest) <= largest


@settings(max_examples=25)
@given(
    st.sampled_from(["llama", "wide generating", "bert adapted"]),
    st.integers(1, 300),
    st.integers(1, 3000),
    st.integers(0, 50),
    st.integers(0, 400),
)
def test_a_traced_workload_keeps_the_law_of_budgets(name, num_samples, length, more, longer):
    assert_law(name, num_samples, length, more, longer)


@pytest.mark.parametrize(
    ("num_samples", "length", "more", "longer"),
    [(3, 20, 5, 100), (16, 103, 1, 2), (1, 140, 50, 400), (90, 7, 0, 3000)],
)
def test_a_cache_that_slides_keeps_the_law_of_budgets(num_samples, length, more, longer):
    assert_law("gemma generating", num_samples, length, more, longer)


@pytest.mark.parametrize("name", ["llama", "wide generating", "bert adapted", "gemma generating"])
def test_the_first_batch_needs_once_what_it_needs(name):
    regressor = MemoryRegressor.pretrained(CASES[name].memory.workload)
    baseline = BatchShape.of(8, 250)
    assert regressor.relative(baseline, baseline).tolist() == [1.0]


def test_a_cache_that_slides_stops_growing():
    """The cache of two layers of three holds 143 positions, whatever the length."""
    phases = CASES["gemma generating"].memory.workload.phases
    assert phases.until == 144 - 40
    beyond = Phases(phases.after)
    within = Phases(phases.rows)
    short = BatchShape.of(16, 20)
    long = BatchShape.of(16, 180)
    assert phases.bytes(short) == within.bytes(short) < beyond.bytes(short)
    assert phases.bytes(long) == beyond.bytes(long) <= within.bytes(long)


def test_generating_has_positions_and_so_rotary_embeddings_of_each_row():
    shapes = BatchShape.of([8, 1], 512)
    many, one = CASES["gemma generating"].memory.batch_bytes(shapes)
    assert many > 7.95 * one


def test_a_first_batch_is_not_charged_for_a_padded_mask():
    """512 is a multiple of 16, so this batch has one mask less than its successors, which masks dominate here."""
    workload = Workload.from_model(BERT, mode="forward")
    budget = MemoryBudget(16, longest=512, model=MemoryRegressor.pretrained(workload))
    lengths = [280, 171, 60]
    counts = budget.largest(np.array(lengths)).tolist()
    later = zip(counts, lengths, strict=True)
    first, *others = simulate(BERT, workload, [(16, 512), *later])
    most = max(row.batch_bytes for row in others)
    assert 0.75 * first.batch_bytes < most <= 0.92 * first.batch_bytes


# Workloads


def test_what_was_traced_holds_for_that_workload_only():
    workload = CASES["llama"].memory.workload
    assert workload.phases is not None
    assert workload.dtype == "bfloat16"
    assert workload.replace(dtype="bfloat16").phases == workload.phases
    assert workload.replace(gradient_checkpointing=True).phases is None


def test_a_traced_workload_survives_json():
    workload = CASES["llama"].memory.workload
    assert Workload.from_json(workload.to_json()) == workload


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "nope"),
        ("attention", "flash2"),
        ("layout", "pack"),
        ("sharding", "zz"),
        ("dtype", "int3"),
    ],
)
def test_a_wrong_setting_of_a_workload_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        Workload(**{name: value})


# What fits a device


@dataclass(frozen=True)
class OnDevice:
    """A model on a device of 1 GB, and two lengths of its batches, which mostly are no multiples of 16."""

    config: Any
    settings: dict[str, Any]
    lengths: tuple[int, int] = (127, 4095)

    @cached_property
    def budget(self) -> MemoryBudget:
        return MemoryBudget.from_model(self.config, 10**9, **self.settings)

    @cached_property
    def counts(self) -> list[int]:
        """The largest number of samples of each length."""
        return self.budget.most_samples(self.lengths).tolist()


FLASH_PACKED: Any = {"dtype": "bf16", "layout": "packed", "attention": "flash"}
ADAPTED: Any = {"dtype": "bf16", "lora": 8, "gradient_checkpointing": True}
GENERATING: Any = {"mode": "generate", "max_new_tokens": 50}
TO_16: Any = {"dtype": torch.bfloat16, "pad_to_multiple_of": 16}
ON_DEVICE = {
    "adapted": OnDevice(SHALLOW, ADAPTED),
    "packed": OnDevice(SHALLOW, FLASH_PACKED),
    "to 16": OnDevice(SHALLOW, TO_16, lengths=(128, 4096)),
    "generating": OnDevice(BART, {**GENERATING, "attention": "eager", "lora": 8}),
    "encoder": OnDevice(BERT, FLASH_PACKED),
    "padding id": OnDevice(GPT2, {"dtype": "bf16", "attention": "flash"}),
}


@pytest.mark.parametrize("name", ON_DEVICE)
def test_the_answer_is_the_largest_batch_that_the_whole_model_fits(name):
    case = ON_DEVICE[name]
    workload = case.budget.model.workload
    adapters = case.settings.get("lora")
    model = as_meta_model(
        case.config, dtype=workload.dtype, attention=workload.attention, lora=adapters
    )
    for length, count in zip(case.lengths, case.counts, strict=True):
        more = int(count * 1.05) + 1
        shapes = [(max(count, 1), length), (more, length)]
        largest, too_large = simulate(model, workload, shapes)
        assert count == 0 or largest.peak_bytes <= 1.02 * 0.9e9, (length, count)
        assert too_large.peak_bytes > 0.9e9, (length, count)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_batches_fit_up_to_the_answer(name):
    case = ON_DEVICE[name]
    for length, count in zip(case.lengths, case.counts, strict=True):
        at_least_one = max(count, 1)
        shapes = BatchShape.of([at_least_one, at_least_one + 1], length)
        assert case.budget.fits(shapes).tolist() == [count > 0, False]


@pytest.mark.parametrize("name", ["llama", "llama generating"])
def test_the_token_budget_is_safe_and_the_largest_that_is(name):
    """Of prompts it counts what is generated, too: one-token prompts, which bring caches of all new tokens, decide no more."""
    case = CASES[name]
    num_new = case.known.get("max_new_tokens", 0)
    budget = MemoryBudget.from_bytes(10**9, model=case.memory, pad_to_multiple_of=16)
    lengths = np.arange(1, 513)

    def is_safe(max_tokens: int) -> bool:
        tokens = TokenBudget(max_tokens, pad_to_multiple_of=16)
        counts = tokens.largest(lengths + num_new)
        shapes = BatchShape.of(np.maximum(counts, 1), lengths)
        return bool(budget.fits(shapes).all())

    figures = budget.figures([512, 64])
    assert is_safe(figures["max_tokens"])
    assert not is_safe(figures["max_tokens"] + 16)
    assert figures["tokens"][0] == figures["samples"][0] * (64 + num_new)


@pytest.mark.parametrize(("name", "num_new"), [("llama", 0), ("llama generating", 70)])
def test_a_budget_of_prompts_says_that_it_counts_what_is_generated(name, num_new):
    budget = MemoryBudget.from_bytes(10**9, model=CASES[name].memory, pad_to_multiple_of=16)
    prompts = f"of lengths + {num_new} (prompts with what is generated) that is safe for prompts of"
    assert (prompts in str(budget)) == (num_new > 0)


@pytest.fixture(scope="module")
def packed_budget() -> MemoryBudget:
    return ON_DEVICE["packed"].budget


def test_packed_batches_are_held_against_the_sum_of_their_tokens(packed_budget):
    most = packed_budget.max_tokens(512)
    num_samples = [1, 1, 90, 90]
    longest = [1, 1, most, most]
    total = [most, most + 1, most, most + 1]
    shapes = BatchShape.of(num_samples, longest, total)
    assert packed_budget.fits(shapes).tolist() == [True, False, True, False]


def growth_when_doubled(memory: Any) -> float:
    """From a batch of 8,192 tokens to one of 16,384."""
    return bytes_of(memory, 1, 16384) / bytes_of(memory, 1, 8192)


def test_memory_of_packed_batches_is_linear_unless_attention_takes_a_mask(packed_budget):
    masked = TracedMemory.of(SHALLOW, layout="packed", attention="sdpa")
    assert growth_when_doubled(packed_budget.model) == pytest.approx(2, rel=0.02)
    assert growth_when_doubled(masked) > 3


def test_a_model_with_varlen_attention_is_one_with_flash_attention(packed_budget):
    model = use_varlen_attention(hf.LlamaForCausalLM(SHALLOW).bfloat16())
    budget = MemoryBudget.from_model(model, "1GB", layout="packed")
    assert budget.max_tokens(512) == packed_budget.max_tokens(512)


# Static memory


@cache
def static_of_bert(sharding: Any = None, num_ranks: int | None = None) -> int:
    workload = Workload.from_model(
        BERT, "train", trace=False, dtype="bf16", sharding=sharding, num_ranks=num_ranks
    )
    [row] = simulate(BERT, workload, [(1, 16)])
    return row.static_bytes


@pytest.fixture
def bucket() -> int:
    """A bucket of all gradients: as large as the parameters, and as each of two states of the optimizer."""
    return static_of_bert("ddp", 8) - static_of_bert()


def test_replicated_ranks_have_a_bucket_of_all_gradients(bucket):
    assert bucket == pytest.approx(static_of_bert() / 4, rel=0.1)


@pytest.mark.parametrize(("sharding", "num_shared"), [("zero1", 2), ("zero2", 3)])
def test_ranks_divide_states_and_then_gradients(sharding, num_shared, bucket):
    without_shared = static_of_bert() - num_shared * bucket * 7 / 8
    expected = without_shared + bucket
    assert static_of_bert(sharding, 8) == pytest.approx(expected, rel=0.05)


def test_ranks_that_divide_parameters_too_gather_some_of_them(bucket):
    assert bucket / 2 < static_of_bert("zero3", 8) < static_of_bert()
    assert static_of_bert("fsdp", 8) == static_of_bert("zero3", 8)


def test_one_rank_divides_nothing():
    assert static_of_bert("fsdp", 1) == static_of_bert()


def linear_on_meta(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> torch.nn.Linear:
    return torch.nn.Linear(num_inputs, num_outputs, bias=False, device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("sharding", "gb"), [(None, 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_what_a_rank_keeps_is_what_the_zero_paper_says(sharding, gb):
    """Its figure 1 (arXiv:1910.02054): 7.5 billion parameters in half precision, 12 bytes of Adam's state each, 64 ranks."""
    model = linear_on_meta(75_000, 100_000, torch.float16)
    workload = Workload(
        mode="train",
        dtype="float16",
        optimizer_bytes=optimizer_bytes("adamw_master", "float16"),
        sharding=sharding,
        num_ranks=64,
    )
    kept = kept_bytes(model, workload)
    assert round(kept / 1e9, 1) == gb


def shared_by_many(sharding: Any, mode: Any = "train", **known: Any) -> Workload:
    """Each of a billion ranks keeps nearly nothing."""
    return Workload(mode=mode, sharding=sharding, num_ranks=10**9, **known)


def test_a_bucket_of_gradients_is_as_wide_as_the_widest_of_them():
    wide = linear_on_meta(40_000, 30_000, torch.bfloat16)
    exact = linear_on_meta(8, 8, torch.float32)
    model = torch.nn.Sequential(wide, exact)
    workload = shared_by_many("zero2", dtype="bfloat16", optimizer_bytes=0.0)
    bucket = static_bytes(model, workload) - kept_bytes(model, workload)
    assert bucket == 4 * REDUCE_BUCKET


def simulated_row(**known: Any) -> Measurement:
    workload = Workload.from_model(SHALLOW, trace=False, **known)
    [row] = simulate(SHALLOW, workload, [(2, 256)])
    return row


def test_mixed_precision_of_sharding_keeps_no_lower_copy_and_no_float32_states():
    """Autocast would keep a lower copy of every weight, and hidden states in float32."""
    half = simulated_row(dtype="bf16")
    whole = simulated_row(dtype="fp32", autocast="bf16")
    shared = simulated_row(dtype="fp32", autocast="bf16", sharding="fsdp", num_ranks=8)
    assert shared.batch_bytes == half.batch_bytes < whole.batch_bytes
    assert half.static_bytes / 8 < shared.static_bytes < whole.static_bytes / 2


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("mode", "num_layers"), [("train", 3), ("forward", 2)])
def test_ranks_that_share_parameters_gather_them_as_they_run(mode, num_layers):
    """And hold two of the largest layers, in training with the gradients of one."""
    model = as_meta_model(models.t5(**SMALL, layers=4))
    layers = [*model.encoder.block, *model.decoder.block]
    sizes = [num_parameters(layer) for layer in layers]
    assert min(sizes) < 0.8 * max(sizes)
    outside = num_parameters(model) - sum(sizes)
    workload = shared_by_many("fsdp", mode, dtype="float32", optimizer_bytes=8.0)
    expected = 4 * (outside + num_layers * max(sizes))
    assert static_bytes(model, workload) == pytest.approx(expected, rel=0.01)


# Adapters

# peft reads it
ignores_deprecation = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def adapted() -> TracedMemory:
    return TracedMemory.of(SHALLOW, dtype="bf16", attention="flash", lora=2)


@ignores_deprecation
def test_adapters_train_alone(adapted):
    whole = simulated_row(dtype="bf16")
    assert adapted.static_bytes < 0.6 * whole.static_bytes
    assert adapted.workload.optimizer_bytes == 8.0  # they are kept in float32
    assert 0 < adapted.workload.trainable_share < 0.2


def test_a_quantised_models_dtype_is_that_of_what_it_computes_with():
    config = models.llama(vocab=100, width=32, layers=1)
    model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
    packed = torch.zeros(100, 16, dtype=torch.uint8)
    model.get_input_embeddings().weight = torch.nn.Parameter(packed, requires_grad=False)
    assert next(model.parameters()).dtype == torch.uint8
    workload = Workload.from_model(model, "forward", trace=False)
    assert workload.dtype == "bfloat16"


@ignores_deprecation
def test_a_model_of_peft_is_traced_as_it_is():
    """Its adapters are of no task, so its class is PeftModel."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"])
    classifier = peft.get_peft_model(hf.BertForSequenceClassification(BERT), config)
    memory = TracedMemory.of(classifier, attention="eager")
    assert_as_simulated(memory, classifier, [(8, 40)])


@ignores_deprecation
def test_without_layers_a_lora_config_means_those_that_peft_chooses(adapted):
    peft = pytest.importorskip("peft")
    chosen = TracedMemory.of(SHALLOW, attention="flash", lora=peft.LoraConfig(r=2))
    share = chosen.workload.trainable_share
    assert 0 < share < adapted.workload.trainable_share / 2


# Messages


def odd_llama() -> Any:
    return Odd(SHALLOW)


def gemma2() -> Any:
    return hf.Gemma2ForCausalLM(GEMMA2)


def linear() -> Any:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "lots"}, "`memory` must be a size such as 80GB or 24GiB"),
        ({"memory": "24"}, "write 24GB"),
        ({"memory": "1e999"}, "`memory` must be a size"),
        ({"dtpye": "bf16"}, r"has no option `dtpye`; did you mean `dtype`\?$"),
        ({"gradient_checkpoint": True}, r"did you mean `gradient_checkpointing`\?$"),
        ({"num_layer": 3}, r"did you mean `num_layers`\?$"),
        ({"zzz": 3}, "no option `zzz`$"),
        ({"headroom": 1.5}, "at most 1(.0)?, but is 1.5"),
        ({"optimizer": "best"}, "or one of adamw, .* but is 'best'"),
        ({"sharding": "fsdp"}, "pass e.g. num_ranks=8"),
        ({"lora": "all"}, "`lora` must be True, an int"),
        ({"dtype": "int3"}, "`dtype` must be one of"),
        ({"mode": "generate", "layout": "packed"}, "`layout` 'packed' needs mode 'train'"),
        (
            {"model": T5, "layout": "packed"},
            "`layout` 'packed' is not available for encoder-decoder",
        ),
        (
            {"model": BERT, "mode": "generate"},
            "'generate' needs a model that decodes, but BertConfig is of an encoder",
        ),
        ({"model": odd_llama}, r"cannot be traced in mode .train. \(.*ProfiledMemory\.fit\(mea"),
        ({"model": MAMBA, "mode": "generate"}, "cannot be traced"),  # its cache has no length
        ({"model": few_positions(96), "mode": "forward"}, "96 positions are too few to find how"),
        (
            {"model": IMAGES},
            "the model reads images, whose memory cannot be computed from the text",
        ),
        ({"model": gemma2, "attention": "sdpa"}, "because Gemma2ForCausalLM has only 'eager'"),
        ({"model": GEMMA2, "attention": "sdpa"}, "because Gemma2ForCausalLM has only 'eager'"),
        (
            {"model": NO_PAD},
            r"cannot build a model from a ModernBertConfig \(AssertionError.*Padding",
        ),
        ({"model": linear}, "has no transformers config; describe it"),
    ],
)
def test_what_cannot_be_is_said_with_a_way_out(arguments, message):
    arguments = {"model": SHALLOW, "memory": "1GB", **arguments}
    model = arguments.pop("model")
    if isfunction(model):
        model = model()
    with pytest.raises(ConfigError, match=message):
        MemoryBudget.from_model(model, **arguments)


@pytest.mark.parametrize("limit", [24e9, "24.0 GB", "24e9", 24 * 10**9])
def test_memory_may_be_said_in_any_way(limit):
    budget = MemoryBudget.from_bytes(limit, model=CASES["bert"].memory)
    assert budget.fingerprint.startswith("MemoryBudget(limit_bytes=24000000000,")


def test_static_memory_that_exceeds_the_limit_is_named():
    message = "static memory .* alone exceeds 90% of limit_bytes=500,000"
    with pytest.raises(BudgetError, match=message):
        MemoryBudget.from_model(BERT, "500KB")


def test_a_budget_says_that_not_even_one_sample_fits():
    budget = MemoryBudget.from_bytes("895KB", model=CASES["bert"].memory)
    assert "not even one sample fits" in str(budget)


def test_generation_without_a_cache_is_warned_of():
    config = models.llama(**LONG, use_cache=False)
    message = "use_cache=False needs more memory than predicted .*; lower the limit"
    with pytest.warns(UserWarning, match=message):
        MemoryBudget.from_model(config, "1GB", mode="generate")


PAIRED = {"tokens": [400] * 60, "target": [100] * 60}


def test_a_decoder_does_not_take_a_second_padded_stream_for_nothing():
    budget = MemoryBudget.from_bytes(10**9, model=CASES["llama"].memory)
    message = "one stream of tokens, but batches also have the stream 'target'"
    with pytest.raises(ConfigError, match=message):
        LengthAwareBatchSampler(PAIRED, budget)


def test_a_second_stream_of_a_decoder_may_have_a_budget_of_its_own():
    budget = MemoryBudget.from_bytes(10**9, model=CASES["llama"].memory)
    sampler = LengthAwareBatchSampler(PAIRED, budget & AdditiveCap("target", 1000))
    assert sampler.plan.batches.sizes.max() <= 10


# Measured rows

# 5,000 bytes whatever the batch, or 100 a token and one a pair of tokens.
PHASES = Phases((phase({"1": 5000}), phase({"nL": 100, "nL2": 1})))
TRACED = TracedMemory(1000, Workload(mode="train", phases=PHASES))
positive = st.floats(1, 1e12)


def rows_of(
    memory: TracedMemory,
    *,
    factor: float = 1.0,
    constant: float = 0.0,
    workload: Workload | None = None,
) -> Measurements:
    """As if a device needed ``factor`` times the trace and a constant."""
    rows = []
    for num_samples, length in product((1, 3, 20), (16, 100, 900)):
        size = factor * bytes_of(memory, num_samples, length) + constant
        rows.append(Measurement(num_samples, {"tokens": length}, 1000, int(size)))
    return Measurements(tuple(rows), workload or memory.workload, "measured")


POINTS = st.lists(st.tuples(positive, positive), min_size=1, max_size=12)


@settings(max_examples=60)
@given(POINTS)
def test_the_line_lies_above_every_row_and_never_below_the_trace(points):
    predicted, measured = np.array(points).T
    factor, constant = line_above(predicted, measured)
    assert factor >= 1
    assert constant >= 0
    line = factor * predicted + constant
    assert (line >= measured * (1 - 1e-9)).all()


@settings(max_examples=60)
@given(POINTS)
def test_no_other_line_above_every_row_is_lower_on_average(points):
    predicted, measured = np.array(points).T
    factor, constant = line_above(predicted, measured)
    line = factor * predicted + constant
    mean = np.mean(line / measured)
    steepest = max(1.0, float(np.max(measured / predicted)))
    for slope in (1.0, 1.1, 2.0, steepest):
        gap = np.max(measured - slope * predicted)
        other_line = slope * predicted + max(gap, 0.0)
        assert mean <= np.mean(other_line / measured) * (1 + 1e-9)


def test_measured_rows_raise_the_trace():
    better = TRACED.corrected(rows_of(TRACED, factor=1.5, constant=2000.0))
    unseen = BatchShape.of([2, 50], [333, 5000])
    expected = 1.5 * TRACED.batch_bytes(unseen) + 2000
    assert better.batch_bytes(unseen) == pytest.approx(expected, rel=1e-3)
    assert better.fingerprint != TRACED.fingerprint
    baseline = BatchShape.of(20, 900)
    assert better.relative(baseline, baseline) == pytest.approx(1.0)


def test_a_device_that_takes_less_makes_no_batch_larger():
    assert TRACED.corrected(rows_of(TRACED, factor=0.5)) == TRACED


def test_measured_static_memory_replaces_the_traced_one():
    row = Measurement(1, {"tokens": 16}, 7777, 1)
    corrected = TRACED.corrected(Measurements((row,), TRACED.workload))
    assert corrected.static_bytes == 7777


@pytest.mark.parametrize(
    ("name", "value"), [("mode", "forward"), ("num_layers", 9), ("attention", "eager")]
)
def test_rows_of_another_workload_are_refused(name, value):
    workload = Workload(mode="train", num_layers=3, attention="sdpa", phases=PHASES)
    other = Workload(**{"mode": "train", name: value})
    rows = rows_of(TRACED, workload=other)
    message = f"`measured` has {name}={value!r}, but the traced model {name}="
    with pytest.raises(ConfigError, match=message):
        TracedMemory(0, workload).corrected(rows)


OUT_OF_MEMORY = Measurement(1, {"tokens": 5}, 0, None)


@pytest.mark.parametrize("rows", [Measurements((OUT_OF_MEMORY,), TRACED.workload), [1, 2]])
def test_rows_of_no_size_are_refused(rows):
    with pytest.raises(ConfigError, match="at least one row that did not run out of memory"):
        TRACED.corrected(rows)


def test_a_tests_allocator_does_not_break_the_trace() -> None:
    """A limit of 80 tokens, which the shapes of a trace exceed: they have no data."""
    config = models.llama(vocab=500, width=64, layers=1)
    model = hf.AutoModelForCausalLM.from_config(config)
    allocator = Allocator(limit=80)
    allocator.in_forward(model)
    traced = MemoryBudget.from_model(model, "1GB")
    assert allocator.claims == []
    of_config = MemoryBudget.from_model(config, "1GB")
    assert traced.most_samples(100) == of_config.most_samples(100)
    with pytest.raises(torch.OutOfMemoryError, match="90 tokens; 80 fit"):
        model(torch.zeros(9, 10, dtype=torch.long))


# Layouts that are remembered


def layouts_of_results(dtype: torch.dtype) -> list[Any]:
    """Of operators on a matrix that is transposed, with rows of another dtype and with numbers that are equal."""
    x = torch.empty(4, 6, dtype=dtype, device="meta").t()
    row = torch.empty(4, device="meta")
    with_rows = [x + row, x * row, row * x]
    with_numbers = [x * 2, x * 2.0, x * True, x / 2, x**2]
    alone = [-x, x.rsqrt()]
    sums = [x.sum(0), x.sum((0, 1))]
    means = [row.mean(-1, keepdim=True), row.mean(-1)]
    results = [*with_rows, *with_numbers, *alone, *sums, *means]
    return [(result.shape, result.stride(), result.dtype) for result in results]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_a_remembered_result_has_the_layout_of_a_computed_one(dtype):
    computed = layouts_of_results(dtype)
    for _ in range(2):
        with LiveBytes():
            assert layouts_of_results(dtype) == computed
