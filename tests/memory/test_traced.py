"""A traced model says what simulating all of it says, for shapes that nobody traced; what fits a device follows from it."""

import re
from dataclasses import dataclass, field
from functools import cache, partial
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

SMALL: Any = {"vocab": 400, "width": 32, "heads": 4, "inner": 64}
LLAMA = models.llama(**SMALL, layers=5, num_key_value_heads=2, max_position_embeddings=40_000)
WIDE = models.llama(vocab=400, width=256, heads=4, inner=512, layers=2, num_key_value_heads=1)
BERT = models.bert(**SMALL, layers=2, dropout=0.1)
T5 = models.t5(**SMALL, layers=2, d_kv=8, dropout=0.1)
BART = models.bart(**SMALL, layers=2)
SHALLOW = models.llama(**SMALL, layers=2, num_key_value_heads=2, max_position_embeddings=40_000)
# Its first two of three layers slide; what one layer adds is not what the next one does.
GEMMA = models.config(
    hf.Gemma3TextConfig,
    **SMALL,
    layers=3,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=144,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)
MIXED = models.config(
    hf.Gemma3TextConfig,
    **SMALL,
    layers=5,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=16,
    layer_types=["sliding_attention"] * 4 + ["full_attention"],
)
OLMOE = models.config(hf.OlmoeConfig, **SMALL, layers=2, num_experts=4, num_experts_per_tok=2)
GLM = models.config(
    hf.Glm4MoeConfig,
    **SMALL,
    layers=5,
    num_key_value_heads=2,
    head_dim=16,
    n_routed_experts=64,
    n_group=1,
    moe_intermediate_size=64,
    num_experts_per_tok=2,
    topk_group=1,
    first_k_dense_replace=3,
)
LONGFORMER = models.config(hf.LongformerConfig, **SMALL, attention_window=32)
MAMBA = hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
MAMBA2 = hf.Mamba2Config(
    vocab_size=90,
    hidden_size=32,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=16,
    state_size=8,
    n_groups=1,
    chunk_size=32,
)
GEMMA2 = models.config(hf.Gemma2Config, **SMALL, layers=2, num_key_value_heads=2, head_dim=16)
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


PAIRS = (
    (9, {"tokens": 33, "target": 90}),
    (3, {"tokens": 120, "target": 14}),
    (2, {"tokens": 500, "target": 600}),
)
BF16 = {"dtype": "bfloat16"}
AUTOCAST = {
    "dtype": "float32",
    "autocast": "bfloat16",
    "attention": "eager",
    "gradient_checkpointing": True,
}
CASES = {
    "llama": Case(LLAMA, known=BF16),
    "llama autocast": Case(LLAMA, known=AUTOCAST),
    "llama generating": Case(LLAMA, "generate", {**BF16, "max_new_tokens": 70}),
    "bert": Case(BERT),
    "t5": Case(T5, known=BF16, shapes=PAIRS),
    # its cache takes more than a short prompt
    "wide generating": Case(
        WIDE, "generate", {"max_new_tokens": 40}, shapes=((13, 1), (13, 10)), most=2.0
    ),
    "mixed generating": Case(MIXED, "generate", {"max_new_tokens": 900}),
    "bart generating": Case(BART, "generate", {"max_new_tokens": 30}),
    "gemma generating": Case(GEMMA, "generate", {**BF16, "max_new_tokens": 40}),
    "olmoe": Case(OLMOE, known=BF16),
    "glm": Case(GLM, known={"gradient_checkpointing": True}),
    "bert adapted": Case(BERT, known={**BF16, "lora": 4}),
}


@cache
def memory_of(name: str) -> TracedMemory:
    case = CASES[name]
    with torch.inference_mode():  # whatever the caller is in the midst of
        return TracedMemory.of(case.config, case.mode, **case.known)


def bytes_of(memory: Any, num_samples: int, longest: Any) -> float:
    """Predicted bytes of one batch."""
    return float(memory.batch_bytes(BatchShape.of(num_samples, longest))[0])


def assert_as_simulated(
    memory: TracedMemory, model: Any, shapes: Any, least: float = 0.97, most: float = 1.05
) -> None:
    for row in simulate(model, memory.workload, shapes):
        predicted = bytes_of(memory, row.num_samples, dict(row.longest))
        assert least <= predicted / row.batch_bytes <= most, (row.num_samples, row.longest)


@pytest.mark.parametrize("name", CASES)
def test_what_was_traced_is_what_the_whole_model_takes(name: str) -> None:
    case = CASES[name]
    model = as_meta_model(
        case.config,
        dtype=case.known.get("dtype"),
        attention=case.known.get("attention"),
        lora=case.known.get("lora"),
    )
    assert_as_simulated(memory_of(name), model, case.shapes, most=case.most)


def test_a_target_counts_under_any_name() -> None:
    tokens = [64, 300]
    others = [200, 50]
    target = BatchShape.of(8, {"tokens": tokens, "target": others})
    labels = BatchShape.of(8, {"tokens": tokens, "labels": others})
    memory = memory_of("t5")
    assert memory.batch_bytes(target).tolist() == memory.batch_bytes(labels).tolist()


# Layers that are not alike


@pytest.mark.parametrize(
    ("trained", "checkpointed"),
    [("layers.[34]|norm", True), ("4.*norm|model.norm", True), ("layers.4|lm_head", False)],
)
def test_layers_of_which_other_parameters_are_trained_are_not_alike(trained, checkpointed):
    """Frozen layers below the first that is trained keep nothing; norms that are trained keep their inputs."""
    config = models.config(hf.Gemma2Config, **SMALL, layers=5, num_key_value_heads=2, head_dim=16)
    model = as_meta_model(config, attention="eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(re.search(trained, name)))
    memory = TracedMemory.of(model, "train", gradient_checkpointing=checkpointed)
    assert_as_simulated(memory, model, [(8, 256), (4, 100)], least=0.999, most=1.01)


def eager_llama(layers: int) -> Any:
    config = models.config(
        hf.LlamaConfig, **SMALL, layers=layers, num_key_value_heads=2, head_dim=16
    )
    return as_meta_model(config, attention="eager")


def test_layers_of_other_dropout_are_not_alike():
    model = eager_llama(8)
    model.model.layers[-1].self_attn.attention_dropout = 0.1
    assert_as_simulated(TracedMemory.of(model, "train"), model, [(4, 100), (32, 40)], least=0.999)


@pytest.fixture(scope="module")
def bytes_without_and_with_checkpoints() -> tuple[float, float]:
    """Of a batch of 8 samples of 256 tokens, if no layer is checkpointed, and if every layer is."""
    without = TracedMemory.of(eager_llama(6), "train", gradient_checkpointing=False)
    every = TracedMemory.of(eager_llama(6), "train", gradient_checkpointing=True)
    return bytes_of(without, 8, 256), bytes_of(every, 8, 256)


@pytest.mark.parametrize(
    "without", [slice(0, None, 2), slice(3, None)], ids=["every second", "upper half"]
)
def test_a_model_that_checkpoints_some_layers_is_not_taken_for_one_that_checkpoints_all(
    without, bytes_without_and_with_checkpoints
):
    most, least = bytes_without_and_with_checkpoints
    some = eager_llama(6)
    checkpoint_layers(some)
    for layer in some.model.layers[without]:
        layer.gradient_checkpointing = False
    memory = TracedMemory.of(some, "train")
    assert_as_simulated(memory, some, [(8, 256), (4, 100)], least=0.999)
    assert least < 0.9 * bytes_of(memory, 8, 256)
    assert bytes_of(memory, 8, 256) < 0.9 * most
    switched_off = TracedMemory.of(some, "train", gradient_checkpointing=False)
    assert bytes_of(switched_off, 8, 256) == most


# Ways to checkpoint


KEPT = [torch.ops.aten.bmm.default, torch.ops.aten.addmm.default]
CHECKPOINTS: dict[str, Any] = {
    "usual": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, KEPT),
    },
}


@cache
def bytes_checkpointed(checkpoints: str | None, autocast: str | None) -> float:
    """Of a batch of 4 samples of 400 tokens; the trace is compared with simulations."""
    config = models.config(hf.MegatronBertConfig, **SMALL, layers=5, attn_implementation="eager")
    model = hf.MegatronBertForMaskedLM(config)
    if checkpoints is not None:
        model.activation_checkpointing_enable(CHECKPOINTS[checkpoints])
    memory = TracedMemory.of(model, "train", autocast=autocast)
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


def test_a_config_that_asks_for_eager_attention_gets_it():
    asks = models.config(hf.LlamaConfig, **SMALL, layers=2, attn_implementation="eager")
    plain = models.config(hf.LlamaConfig, **SMALL, layers=2)
    eager = bytes_of(TracedMemory.of(plain, "forward", attention="eager"), 4, 200)
    assert bytes_of(TracedMemory.of(asks, "forward"), 4, 200) == eager
    assert bytes_of(TracedMemory.of(asks, "forward", attention="eager"), 4, 200) == eager
    fused = bytes_of(TracedMemory.of(plain, "forward"), 4, 200)
    assert bytes_of(TracedMemory.of(asks, "forward", attention="sdpa"), 4, 200) == fused
    assert fused < eager


def test_a_config_that_asks_for_eager_attention_is_simulated_so():
    asks = models.config(hf.LlamaConfig, **SMALL, layers=2, attn_implementation="eager")
    [row] = simulate(asks, None, [(4, 200)])
    memory = TracedMemory.of(asks, "train", attention="eager")
    assert row.batch_bytes == pytest.approx(bytes_of(memory, 4, 200), rel=0.01)


@pytest.mark.parametrize(
    ("config", "mode"), [(LONGFORMER, "train"), (MAMBA2, "forward")], ids=["longformer", "mamba2"]
)
def test_a_program_that_pads_its_input_is_never_predicted_smaller(config, mode):
    """To windows or chunks of 32: traced at multiples of 32, a batch one token longer would be predicted far too small."""
    shapes = [(3, 1), (2, 33), (5, 16), (3, 65), (8, 200), (3, 257), (1, 500)]
    assert_as_simulated(TracedMemory.of(config, mode), config, shapes, most=2.0)


def test_a_model_with_few_positions_is_never_predicted_smaller_near_the_last_of_them():
    """A mask of 16 more tokens is copied to be padded, one of a multiple of 16 is not; so the last length is not the worst."""
    config = models.bert(
        vocab=64, width=64, inner=64, layers=5, heads=4, max_position_embeddings=128
    )
    memory = TracedMemory.of(config, "forward", dtype="bfloat16")
    shapes = [(50, length) for length in (128, 124, 120, 113, 112, 97)]
    assert_as_simulated(memory, config, shapes, most=1.2)


def test_a_model_with_any_number_of_positions_is_traced():
    """XLNet states -1 of them."""
    config = hf.XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64, vocab_size=100)
    memory = TracedMemory.of(config, "forward")
    assert memory.longest is None
    assert_as_simulated(memory, as_meta_model(config), [(3, 200)])


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


def test_what_cannot_be_traced_may_be_simulated():
    """A state space model without its kernels: its program is another one for each length."""
    with pytest.raises(ConfigError, match="its operations depend on the shape .* simulate"):
        TracedMemory.of(MAMBA, "forward", dtype="bf16")
    workload = Workload.from_model(MAMBA, "forward", trace=False, dtype="bf16")
    shapes = list(product((1, 8, 64), (1, 33, 200)))
    profile = ProfiledMemory.fit(simulate(MAMBA, workload, shapes))
    for row in simulate(MAMBA, workload, [(8, 64), (3, 150)]):
        predicted = bytes_of(profile, row.num_samples, dict(row.longest))
        assert predicted == pytest.approx(row.batch_bytes, rel=0.3)


# The law of budgets


def assert_law(name: str, num_samples: int, length: int, more: int, longer: int) -> None:
    """A batch of more samples, or of longer ones, never needs less."""
    regressor = MemoryRegressor.pretrained(memory_of(name).workload)
    counts = [num_samples, num_samples + more, num_samples, num_samples + more]
    lengths = [length, length, length + longer, length + longer]
    smallest, larger, longest, largest = regressor.relative(
        BatchShape.of(counts, lengths), BatchShape.of(8, 256)
    )
    assert smallest <= min(larger, longest)
    assert max(larger, longest) <= largest
    baseline = BatchShape.of(8, 250)
    assert regressor.relative(baseline, baseline).tolist() == [1.0]


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


def test_a_cache_that_slides_stops_growing():
    """The cache of two layers of three holds 143 positions, whatever the length."""
    phases = memory_of("gemma generating").workload.phases
    assert phases.until == 144 - 40
    beyond = Phases(phases.after)
    within = Phases(phases.rows)
    short = BatchShape.of(16, 20)
    long = BatchShape.of(16, 180)
    assert phases.bytes(short) == within.bytes(short) < beyond.bytes(short)
    assert phases.bytes(long) == beyond.bytes(long) <= within.bytes(long)


def test_generating_has_positions_and_so_rotary_embeddings_of_each_row():
    many, one = memory_of("gemma generating").batch_bytes(BatchShape.of([8, 1], 512))
    assert many > 7.95 * one


def test_a_first_batch_is_not_charged_for_a_padded_mask():
    """512 is a multiple of 16, so this batch has one mask less than its successors, which masks dominate here."""
    workload = Workload.from_model(BERT, mode="forward")
    budget = MemoryBudget(16, longest=512, model=MemoryRegressor.pretrained(workload))
    lengths = np.array([280, 171, 60])
    shapes = [(16, 512), *zip(budget.largest(lengths).tolist(), lengths.tolist(), strict=True)]
    first, *later = [row.batch_bytes for row in simulate(BERT, workload, shapes)]
    assert 0.75 * first < max(later) <= 0.92 * first


# Workloads


def test_what_was_traced_holds_for_that_workload_only():
    workload = memory_of("llama").workload
    assert workload.phases is not None
    assert workload.dtype == "bfloat16"
    assert workload.replace(gradient_checkpointing=True).phases is None
    assert workload.replace(dtype="bfloat16").phases == workload.phases
    assert Workload.from_json(workload.to_json()) == workload


@pytest.mark.parametrize("rows", [[[1.0, 2.0]], [[float("nan")] * 12]])
def test_phases_are_rows_of_twelve_numbers(rows):
    with pytest.raises(ConfigError, match="must have rows of 12 numbers"):
        Phases(rows)


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


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (SHALLOW, {"dtype": "bf16", "lora": 8, "gradient_checkpointing": True}),
        (SHALLOW, {"dtype": "bf16", "layout": "packed", "attention": "flash"}),
        (SHALLOW, {"dtype": torch.bfloat16, "pad_to_multiple_of": 16}),
        (BART, {"mode": "generate", "lora": 8, "max_new_tokens": 50}),
        (BERT, {"dtype": "bf16", "layout": "packed", "attention": "flash"}),
        (
            models.gpt2(**SMALL, layers=2, n_positions=5000, pad_token_id=1),
            {"dtype": "bf16", "attention": "flash"},
        ),
    ],
    ids=["adapted", "packed", "to 16", "generating", "encoder", "padding id"],
)
def test_the_answer_is_the_largest_batch_that_the_whole_model_fits(config, known):
    lengths = [127, 4095]  # most lengths are no multiple of 16
    if "pad_to_multiple_of" in known:
        lengths = [128, 4096]
    budget = MemoryBudget.from_model(config, 10**9, **known)
    workload = budget.model.workload
    counts = budget.most_samples(lengths)
    model = as_meta_model(
        config, dtype=workload.dtype, attention=known.get("attention"), lora=known.get("lora")
    )
    for length, count in zip(lengths, counts.tolist(), strict=True):
        shapes = [(max(count, 1), length), (int(count * 1.05) + 1, length)]
        largest, too_large = simulate(model, workload, shapes)
        assert count == 0 or largest.peak_bytes <= 1.02 * 0.9e9, (length, count)
        assert too_large.peak_bytes > 0.9e9, (length, count)
    at_least_one = np.maximum(counts, 1)
    assert budget.fits(BatchShape.of(at_least_one, lengths)).tolist() == (counts > 0).tolist()
    assert not budget.fits(BatchShape.of(at_least_one + 1, lengths)).any()


@pytest.mark.parametrize("name", ["llama", "llama generating"])
def test_the_token_budget_is_safe_and_the_largest_that_is(name):
    """Of prompts it counts what is generated, too: one-token prompts, which bring caches of all new tokens, decide no more."""
    num_new = CASES[name].known.get("max_new_tokens", 0)
    budget = MemoryBudget.from_bytes(10**9, model=memory_of(name), pad_to_multiple_of=16)
    lengths = np.arange(1, 513)

    def is_safe(max_tokens: int) -> bool:
        counts = TokenBudget(max_tokens, pad_to_multiple_of=16).largest(lengths + num_new)
        shapes = BatchShape.of(np.maximum(counts, 1), lengths)
        return bool(budget.fits(shapes).all())

    figures = budget.figures([512, 64])
    assert is_safe(figures["max_tokens"])
    assert not is_safe(figures["max_tokens"] + 16)
    assert figures["tokens"][0] == figures["samples"][0] * (64 + num_new)
    prompts = f"of lengths + {num_new} (prompts with what is generated) that is safe for prompts of"
    assert (prompts in str(budget)) == (num_new > 0)


@pytest.fixture(scope="module")
def packed_budget() -> MemoryBudget:
    return MemoryBudget.from_model(SHALLOW, "1GB", layout="packed", attention="flash", dtype="bf16")


def test_packed_batches_are_held_against_the_sum_of_their_tokens(packed_budget):
    most = packed_budget.max_tokens(512)
    shape = BatchShape.of([1, 1, 90, 90], [1, 1, most, most], [most, most + 1, most, most + 1])
    assert packed_budget.fits(shape).tolist() == [True, False, True, False]


def test_memory_of_packed_batches_is_linear_unless_attention_takes_a_mask(packed_budget):
    shape = BatchShape.of(1, [8192, 16384])
    short, long = packed_budget.model.batch_bytes(shape)
    assert long / short == pytest.approx(2, rel=0.02)
    squared = TracedMemory.of(SHALLOW, layout="packed", attention="sdpa")
    short, long = squared.batch_bytes(shape)
    assert long / short > 3


def test_a_model_with_varlen_attention_is_one_with_flash_attention(packed_budget):
    model = use_varlen_attention(hf.LlamaForCausalLM(SHALLOW).bfloat16())
    budget = MemoryBudget.from_model(model, "1GB", layout="packed")
    assert budget.max_tokens(512) == packed_budget.max_tokens(512)


# Static memory


def test_static_memory_is_divided_over_ranks():
    def static_of(sharding: str | None, num_ranks: int | None) -> int:
        workload = Workload.from_model(
            BERT, "train", trace=False, dtype="bf16", sharding=sharding, num_ranks=num_ranks
        )
        [row] = simulate(BERT, workload, [(1, 16)])
        return row.static_bytes

    whole = static_of(None, None)
    # a bucket of all gradients: as large as the parameters, and each of two states
    bucket = static_of("ddp", 8) - whole
    assert bucket == pytest.approx(whole / 4, rel=0.1)
    for sharding, num_shared in (("zero1", 2), ("zero2", 3)):
        without_shared = whole - num_shared * bucket * 7 / 8
        assert static_of(sharding, 8) == pytest.approx(without_shared + bucket, rel=0.05)
    assert bucket / 2 < static_of("zero3", 8) < whole
    assert static_of("fsdp", 8) == static_of("zero3", 8)
    assert static_of("fsdp", 1) == whole


@pytest.mark.parametrize(
    ("sharding", "gb"), [(None, 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_what_a_rank_keeps_is_what_the_zero_paper_says(sharding, gb):
    """Its figure 1 (arXiv:1910.02054): 7.5 billion parameters in half precision, 12 bytes of Adam's state each, 64 ranks."""
    model = torch.nn.Linear(75_000, 100_000, bias=False, device="meta", dtype=torch.float16)
    workload = Workload(
        mode="train",
        dtype="float16",
        optimizer_bytes=optimizer_bytes("adamw_master", "float16"),
        sharding=sharding,
        num_ranks=64,
    )
    assert round(kept_bytes(model, workload) / 1e9, 1) == gb


def test_a_bucket_of_gradients_is_as_wide_as_the_widest_of_them():
    wide = torch.nn.Linear(40_000, 30_000, bias=False, device="meta", dtype=torch.bfloat16)
    exact = torch.nn.Linear(8, 8, bias=False, device="meta")
    model = torch.nn.Sequential(wide, exact)
    shared = Workload(
        mode="train", dtype="bfloat16", optimizer_bytes=0.0, sharding="zero2", num_ranks=10**9
    )
    assert static_bytes(model, shared) - kept_bytes(model, shared) == 4 * REDUCE_BUCKET


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
    model = as_meta_model(models.t5(**SMALL, layers=4, d_kv=8))
    layers = [*model.encoder.block, *model.decoder.block]
    sizes = [num_parameters(layer) for layer in layers]
    assert min(sizes) < 0.8 * max(sizes)
    outside = num_parameters(model) - sum(sizes)
    shared = Workload(
        mode=mode, dtype="float32", optimizer_bytes=8.0, sharding="fsdp", num_ranks=10**9
    )
    expected = 4 * (outside + num_layers * max(sizes))
    assert static_bytes(model, shared) == pytest.approx(expected, rel=0.01)


# Adapters

# peft reads it
ignores_deprecation = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@ignores_deprecation
def test_adapters_train_alone():
    adapted = TracedMemory.of(SHALLOW, "train", dtype="bf16", lora=2)
    whole = simulated_row(dtype="bf16")
    assert adapted.static_bytes < 0.6 * whole.static_bytes
    assert adapted.workload.optimizer_bytes == 8.0  # they are kept in float32
    assert 0 < adapted.workload.trainable_share < 0.2


def test_a_quantised_models_dtype_is_that_of_what_it_computes_with():
    config = models.llama(vocab=100, width=32, layers=1, heads=2)
    model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
    weight = torch.nn.Parameter(torch.zeros(100, 16, dtype=torch.uint8), requires_grad=False)
    model.get_input_embeddings().weight = weight
    assert next(model.parameters()).dtype == torch.uint8
    assert Workload.from_model(model, "forward", trace=False).dtype == "bfloat16"


@ignores_deprecation
def test_a_model_of_peft_is_traced_as_it_is():
    """Its adapters are of no task, so its class is PeftModel."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["query"])
    classifier = peft.get_peft_model(hf.BertForSequenceClassification(BERT), lora)
    assert_as_simulated(TracedMemory.of(classifier), classifier, [(8, 40)])


@ignores_deprecation
def test_without_layers_a_lora_config_means_those_that_peft_chooses():
    peft = pytest.importorskip("peft")
    every_layer = TracedMemory.of(SHALLOW, lora=2).workload.trainable_share
    config = peft.LoraConfig(r=2)
    chosen = TracedMemory.of(SHALLOW, lora=config).workload.trainable_share
    assert 0 < chosen < every_layer / 2


# Messages


def odd_llama() -> Any:
    return Odd(SHALLOW)


def gemma2() -> Any:
    return hf.Gemma2ForCausalLM(GEMMA2)


def linear() -> Any:
    return torch.nn.Linear(2, 2)


FEW_POSITIONS = models.bert(
    vocab=64, width=64, inner=64, layers=5, heads=4, max_position_embeddings=96
)


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
        ({"model": FEW_POSITIONS, "mode": "forward"}, "96 positions are too few to find how"),
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
    budget = MemoryBudget.from_bytes(limit, model=memory_of("bert"))
    assert budget.fingerprint.startswith("MemoryBudget(limit_bytes=24000000000,")


def test_static_memory_that_exceeds_the_limit_is_named():
    with pytest.raises(
        BudgetError, match="static memory .* alone exceeds 90% of limit_bytes=500,000"
    ):
        MemoryBudget.from_model(BERT, "500KB")


def test_a_budget_says_that_not_even_one_sample_fits():
    budget = MemoryBudget.from_bytes("895KB", model=memory_of("bert"))
    assert "not even one sample fits" in str(budget)


def test_generation_without_a_cache_is_warned_of():
    config = type(SHALLOW)(**{**SHALLOW.to_dict(), "use_cache": False})
    message = "use_cache=False needs more memory than predicted .*; lower the limit"
    with pytest.warns(UserWarning, match=message):
        MemoryBudget.from_model(config, "1GB", mode="generate")


def test_a_decoder_does_not_take_a_second_padded_stream_for_nothing():
    budget = MemoryBudget.from_bytes(10**9, model=memory_of("llama"))
    pairs = {"tokens": [400] * 60, "target": [100] * 60}
    message = "one stream of tokens, but batches also have the stream 'target'"
    with pytest.raises(ConfigError, match=message):
        LengthAwareBatchSampler(pairs, budget)
    capped = LengthAwareBatchSampler(pairs, budget & AdditiveCap("target", 1000))
    assert capped.plan.batches.sizes.max() <= 10


# Measured rows

REST: Any = [0.0] * 6
# 5,000 bytes whatever the batch, or 100 a token and one a pair of tokens.
PHASES = Phases(((5000.0, 0, 0, 0, 0, 0, *REST), (0, 0, 0, 100, 0, 1, *REST)))
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
        size = bytes_of(memory, num_samples, length) * factor + constant
        rows.append(Measurement(num_samples, {"tokens": length}, 1000, int(size)))
    return Measurements(tuple(rows), workload or memory.workload, "measured")


@settings(max_examples=60)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=12))
def test_the_line_lies_above_every_row_and_never_below_the_trace(points):
    predicted, measured = np.array(points).T
    factor, constant = line_above(predicted, measured)
    assert factor >= 1
    assert constant >= 0
    line = factor * predicted + constant
    assert (line >= measured * (1 - 1e-9)).all()
    for other in (1.0, 1.1, 2.0, float(np.max(measured / predicted))):
        slope = max(other, 1.0)
        gap = max(float(np.max(measured - slope * predicted)), 0.0)
        other_line = slope * predicted + gap
        assert np.mean(line / measured) <= np.mean(other_line / measured) * (1 + 1e-9)


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
    assert TRACED.corrected(Measurements((row,), TRACED.workload)).static_bytes == 7777


@pytest.mark.parametrize(
    ("name", "value"), [("mode", "forward"), ("num_layers", 9), ("attention", "eager")]
)
def test_rows_of_another_workload_are_refused(name, value):
    workload = Workload(mode="train", num_layers=3, attention="sdpa", phases=PHASES)
    rows = rows_of(TRACED, workload=Workload(**{"mode": "train", name: value}))
    message = f"`measured` has {name}={value!r}, but the traced model {name}="
    with pytest.raises(ConfigError, match=message):
        TracedMemory(0, workload).corrected(rows)


OUT_OF_MEMORY = Measurement(1, {"tokens": 5}, 0, None, oom=True)


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
    assert traced.most_samples(100) == MemoryBudget.from_model(config, "1GB").most_samples(100)
    with pytest.raises(torch.OutOfMemoryError, match="90 tokens; 80 fit"):
        model(torch.zeros(9, 10, dtype=torch.long))


# Layouts that are remembered


def layouts_of_results(dtype: torch.dtype) -> list[Any]:
    """Of operators on a matrix that is transposed, with rows of another dtype and with numbers that are equal."""
    x = torch.empty(4, 6, dtype=dtype, device="meta").t()
    row = torch.empty(4, device="meta")
    results = [x + row, x * row, row * x, x * 2, x * 2.0, x * True, x / 2, x**2, -x, x.rsqrt()]
    results += [x.sum(0), x.sum((0, 1)), row.mean(-1, keepdim=True), row.mean(-1)]
    return [(result.shape, result.stride(), result.dtype) for result in results]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_a_remembered_result_has_the_layout_of_a_computed_one(dtype):
    computed = layouts_of_results(dtype)
    for _ in range(2):
        with LiveBytes():
            assert layouts_of_results(dtype) == computed
