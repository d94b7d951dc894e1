"""A traced model says what simulating all of it says, for shapes that nobody traced; what fits a device follows from it."""

import re
from functools import cache, partial
from inspect import isfunction

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
from dynagroup.memory.trace.model import as_meta_model, checkpoint_layers
from dynagroup.memory.trace.program import REDUCE_BUCKET, kept_bytes, static_bytes
from dynagroup.memory.traced import line_above, optimizer_bytes
from dynagroup.shapes import BatchShape
from tests import models

SMALL = {"vocab": 400, "width": 32, "heads": 4, "inner": 64}
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
MAMBA = hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)

AUTOCAST = {
    "dtype": "float32",
    "autocast": "bfloat16",
    "attention": "eager",
    "gradient_checkpointing": True,
}
CASES = {
    "llama": (LLAMA, "train", {"dtype": "bfloat16"}),
    "llama autocast": (LLAMA, "train", AUTOCAST),
    "llama generating": (LLAMA, "generate", {"dtype": "bfloat16", "max_new_tokens": 70}),
    "bert": (BERT, "train", {}),
    "t5": (T5, "train", {"dtype": "bfloat16"}),
    "wide generating": (WIDE, "generate", {"max_new_tokens": 40}),
    "mixed generating": (MIXED, "generate", {"max_new_tokens": 900}),
    "bart generating": (BART, "generate", {"max_new_tokens": 30}),
    "gemma generating": (GEMMA, "generate", {"dtype": "bfloat16", "max_new_tokens": 40}),
    "olmoe": (OLMOE, "train", {"dtype": "bfloat16"}),
    "glm": (GLM, "train", {"gradient_checkpointing": True}),
    "bert adapted": (BERT, "train", {"dtype": "bfloat16", "lora": 4}),
}
SHAPES = [(9, 33), (3, 120), (2, 500)]
GEMMAS, LAWFUL = "gemma generating", ["llama", "wide generating", "bert adapted"]
IMAGES = hf.LlavaConfig(text_config=models.llama(**SMALL))
GEMMA2 = models.config(hf.Gemma2Config, **SMALL, layers=2, num_key_value_heads=2, head_dim=16)
NO_PAD = hf.ModernBertConfig(
    vocab_size=2000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
)
positive = st.floats(1, 1e12)


@cache
def memory_of(name):
    config, mode, how = CASES[name]
    with torch.inference_mode():  # whatever the caller is in the midst of
        return TracedMemory.of(config, mode, **how)


def assert_as_simulated(memory, model, shapes, least=0.97, most=1.05):
    rows = simulate(model, memory.workload, shapes)
    for row in rows:
        share = (
            float(memory.batch_bytes(BatchShape.of(row.num_samples, dict(row.longest)))[0])
            / row.batch_bytes
        )
        assert least <= share <= most, (row.num_samples, row.longest)
    return rows


@pytest.mark.parametrize("name", [name for name in CASES if name != GEMMAS])
def test_what_was_traced_is_what_the_whole_model_takes(name):
    config, _, how = CASES[name]
    shapes = (
        [(13, 1), (13, 10)] if name == "wide generating" else SHAPES
    )  # its cache takes more than a short prompt
    if name == "t5":  # a target counts under any name
        shapes = [
            (n, {"tokens": ln, "target": to})
            for (n, ln), to in zip(SHAPES, (90, 14, 600), strict=True)
        ]
        renamed = [
            BatchShape.of(8, {"tokens": [64, 300], other: [200, 50]})
            for other in ("target", "labels")
        ]
        assert (
            memory_of(name).batch_bytes(renamed[0]) == memory_of(name).batch_bytes(renamed[1])
        ).all()
    model = as_meta_model(
        config, dtype=how.get("dtype"), attention=how.get("attention"), lora=how.get("lora")
    )
    assert_as_simulated(memory_of(name), model, shapes, most=1.05 if shapes[0][0] != 13 else 2.0)


@pytest.mark.parametrize(
    ("trained", "checkpointed"),
    [
        ("layers.[45]|norm", True),
        ("5.*norm|model.norm", True),
        ("layers.5|lm_head", False),
    ],
)
def test_layers_of_which_other_parameters_are_trained_are_not_alike(trained, checkpointed):
    """Frozen layers below the first that is trained keep nothing; norms that are trained keep their inputs."""
    config = models.config(hf.Gemma2Config, **SMALL, layers=6, num_key_value_heads=2, head_dim=16)
    model = as_meta_model(config, attention="eager")
    for name, p in model.named_parameters():
        p.requires_grad_(bool(re.search(trained, name)))
    memory = TracedMemory.of(model, "train", gradient_checkpointing=checkpointed)
    assert_as_simulated(memory, model, [(8, 256), (4, 100)], least=0.999, most=1.01)


def test_a_config_that_asks_for_eager_attention_gets_it():
    asks, shape = (
        models.config(hf.LlamaConfig, **SMALL, layers=2, attn_implementation="eager"),
        BatchShape.of(4, 200),
    )
    plain = models.config(hf.LlamaConfig, **SMALL, layers=2)
    found = [TracedMemory.of(asks, "train", attention=name) for name in (None, "eager", "sdpa")]
    eager = TracedMemory.of(plain, "train", attention="eager")
    assert [memory.batch_bytes(shape)[0] for memory in found[:2]] == [
        eager.batch_bytes(shape)[0]
    ] * 2
    assert (
        found[2].batch_bytes(shape)[0]
        == TracedMemory.of(plain, "train").batch_bytes(shape)[0]
        < eager.batch_bytes(shape)[0]
    )
    assert [row.batch_bytes for row in simulate(asks, None, [(4, 200)])] == pytest.approx(
        [eager.batch_bytes(shape)[0]], rel=0.01
    )


def test_layers_of_other_dropout_are_not_alike():
    model = as_meta_model(
        models.config(hf.LlamaConfig, **SMALL, layers=8, num_key_value_heads=2, head_dim=16),
        attention="eager",
    )
    model.model.layers[-1].self_attn.attention_dropout = 0.1
    assert_as_simulated(TracedMemory.of(model, "train"), model, [(4, 100), (32, 40)], least=0.999)


@pytest.mark.parametrize(
    "without", [slice(0, None, 2), slice(3, None)], ids=["every second", "upper half"]
)
def test_a_model_that_checkpoints_some_layers_is_not_taken_for_one_that_checkpoints_all(without):
    config = models.config(hf.LlamaConfig, **SMALL, layers=6)
    none, some, every = (as_meta_model(config) for _ in range(3))
    checkpoint_layers(some)
    for layer in some.model.layers[without]:
        layer.gradient_checkpointing = False
    memory = TracedMemory.of(some, "train")
    assert_as_simulated(memory, some, [(8, 256), (4, 100)], least=0.999)
    most, ours, least = (
        TracedMemory.of(model, "train", gradient_checkpointing=on).batch_bytes(
            BatchShape.of(8, 256)
        )[0]
        for model, on in ((none, False), (some, None), (every, True))
    )
    assert (
        TracedMemory.of(some, "train", gradient_checkpointing=False).batch_bytes(
            BatchShape.of(8, 256)
        )[0]
        == most
    )
    assert least < 0.9 * ours
    assert ours < 0.9 * most


@pytest.mark.parametrize("how", [{}, {"autocast": "bfloat16"}])
def test_reentrant_checkpointing_is_traced_as_such(how):
    """It runs a layer anew to its end before any of its gradients; the other kind stops at the last stored tensor."""
    model = hf.MegatronBertForMaskedLM(models.config(hf.MegatronBertConfig, **SMALL, layers=6))
    size = {}
    for reentrant in (False, True):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        memory = TracedMemory.of(model, "train", **how)
        assert_as_simulated(memory, model, [(4, 400), (16, 64)], least=0.999)
        size[reentrant] = memory.batch_bytes(BatchShape.of(4, 400))[0]
    assert size[True] > 1.2 * size[False], "its scores and their gradients are alive at once"
    keep = partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.bmm.default, torch.ops.aten.addmm.default],
    )
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep})
    memory, without = (
        TracedMemory.of(model, "train", gradient_checkpointing=on, **how) for on in (None, False)
    )
    assert_as_simulated(memory, model, [(4, 400), (16, 64)], least=0.999)
    assert (
        size[False]
        < 0.9 * memory.batch_bytes(BatchShape.of(4, 400))[0]
        < 0.9 * without.batch_bytes(BatchShape.of(4, 400))[0]
    )


def test_a_model_with_few_positions_is_never_predicted_smaller_near_the_last_of_them():
    """A mask of 16 more tokens is copied to be padded, one of a multiple of 16 is not; so the last length is not the worst."""
    config = models.bert(
        vocab=64, width=64, inner=64, layers=5, heads=4, max_position_embeddings=128
    )
    shapes = [(50, 128 - less) for less in (0, 4, 8, 15, 16, 31)]
    assert_as_simulated(
        TracedMemory.of(config, "forward", dtype="bfloat16"), config, shapes, most=1.2
    )


def test_a_model_with_any_number_of_positions_is_traced():
    """XLNet states -1 of them."""
    config = hf.XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64, vocab_size=100)
    memory = TracedMemory.of(config, "forward")
    assert memory.longest is None
    assert_as_simulated(memory, as_meta_model(config), [(3, 200)])


def test_what_cannot_be_traced_is_estimated_or_simulated_and_that_is_said():
    """A state space model without its kernels: its program is another one for each length."""
    with pytest.warns(
        UserWarning, match="estimated from its sizes, because this model cannot be traced"
    ):
        workload = Workload.from_model(Odd(LLAMA))
    assert (workload.phases, workload.hidden_size) == (None, 32)
    with pytest.raises(ConfigError, match="its operations depend on the shape .* simulate"):
        TracedMemory.of(MAMBA, "forward", dtype="bf16")
    simulated = Workload.from_model(MAMBA, "forward", trace=False, dtype="bf16")
    shapes = [(n, length) for n in (1, 8, 64) for length in (1, 33, 200)]
    profile = ProfiledMemory.fit(simulate(MAMBA, simulated, shapes))
    for row in simulate(MAMBA, simulated, [(8, 64), (3, 150)]):
        said = profile.batch_bytes(BatchShape.of(row.num_samples, dict(row.longest)))[0]
        assert said == pytest.approx(row.batch_bytes, rel=0.3)


def test_a_cache_that_slides_stops_growing_and_a_first_batch_is_not_charged_for_a_padded_mask():
    """The cache of two layers of three holds 143 positions, whatever the length."""
    test_what_was_traced_is_what_the_whole_model_takes(GEMMAS)
    for n, length, more, longer in (
        (3, 20, 5, 100),
        (16, 103, 1, 2),
        (1, 140, 50, 400),
        (90, 7, 0, 3000),
    ):
        assert_law(GEMMAS, n, length, more, longer)
    found = memory_of(GEMMAS).workload.phases
    assert found.until == 144 - 40
    beyond, without = Phases(found.after), Phases(found.rows)
    short, long = BatchShape.of(16, 20), BatchShape.of(16, 180)
    many, one = memory_of(GEMMAS).batch_bytes(BatchShape.of([8, 1], 512))
    assert many > 7.95 * one, "generate() has positions, so rotary embeddings, of each row"
    assert found.bytes(short) == without.bytes(short) < beyond.bytes(short)
    assert found.bytes(long) == beyond.bytes(long) <= without.bytes(long)
    # 512 is a multiple of 16, so this batch has one mask less than its successors, which masks dominate here.
    workload = Workload.from_model(BERT, mode="forward")
    budget = MemoryBudget(16, longest=512, model=MemoryRegressor.pretrained(workload))
    lengths = np.array([280, 171, 60])
    shapes = [(16, 512), *zip(budget.largest(lengths).tolist(), lengths.tolist(), strict=True)]
    first, *later = [row.batch_bytes for row in simulate(BERT, workload, shapes)]
    assert 0.75 * first < max(later) <= 0.92 * first


@settings(max_examples=25)
@given(
    st.sampled_from(LAWFUL),
    st.integers(1, 300),
    st.integers(1, 3000),
    st.integers(0, 50),
    st.integers(0, 400),
)
def test_a_traced_workload_keeps_the_law_of_budgets(name, n, length, more, longer):
    assert_law(name, n, length, more, longer)


def assert_law(name, n, length, more, longer):
    regressor = MemoryRegressor.pretrained(memory_of(name).workload)
    shapes = BatchShape.of(
        [n, n + more, n, n + more], [length, length, length + longer, length + longer]
    )
    ratio = regressor.relative(shapes, BatchShape.of(8, 256))
    assert ratio[0] <= min(ratio[1:3])
    assert max(ratio[1:3]) <= ratio[3]
    assert regressor.relative(BatchShape.of(8, 250), BatchShape.of(8, 250)).tolist() == [1.0]


def test_what_was_traced_holds_for_that_workload_only_and_a_wrong_one_is_named():
    workload = memory_of("llama").workload
    assert (workload.phases is None, workload.dtype) == (False, "bfloat16")
    assert workload.replace(gradient_checkpointing=True).phases is None
    assert workload.replace(dtype="bfloat16").phases == workload.phases
    assert Workload.from_json(workload.to_json()) == workload
    for rows in ([[1.0, 2.0]], [[float("nan")] * 12]):
        with pytest.raises(ConfigError, match="must have rows of 12 numbers"):
            Phases(rows)
    for wrong in (
        {"mode": "nope"},
        {"attention": "flash2"},
        {"layout": "pack"},
        {"sharding": "zz"},
        {"dtype": "int3"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Workload(**wrong)


class Odd(hf.LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids + int(input_ids.sum().item() > 3), **kwargs)


@pytest.mark.parametrize(
    ("config", "how"),
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
def test_the_answer_is_the_largest_batch_that_the_whole_model_fits(config, how):
    lengths = (
        [128, 4096] if "pad_to_multiple_of" in how else [127, 4095]
    )  # most lengths are no multiple of 16
    budget = MemoryBudget.from_model(config, 10**9, **how)
    workload, samples = budget.model.workload, budget.most_samples(lengths)
    model = as_meta_model(
        config, dtype=workload.dtype, attention=how.get("attention"), lora=how.get("lora")
    )
    for length, count in zip(lengths, samples.tolist(), strict=True):
        shapes = [(max(count, 1), length), (int(count * 1.05) + 1, length)]
        fits, does_not = (row.peak_bytes for row in simulate(model, workload, shapes))
        assert count == 0 or fits <= 1.02 * 0.9e9, (length, count)
        assert does_not > 0.9e9, (length, count)
    some = np.maximum(samples, 1)
    assert budget.fits(BatchShape.of(some, lengths)).tolist() == (samples > 0).tolist()
    assert not budget.fits(BatchShape.of(some + 1, lengths)).any()


@pytest.mark.parametrize("name", ["llama", "llama generating"])
def test_the_token_budget_is_safe_and_the_largest_that_is(name):
    """Of prompts it counts what is generated, too: one-token prompts, which bring caches of all new tokens, decide no more."""
    config, mode, how = CASES[name]
    budget = MemoryBudget.from_model(config, "1GB", mode=mode, pad_to_multiple_of=16, **how)
    new, lengths = how.get("max_new_tokens", 0), np.arange(1, 513)

    def safe(tokens):
        counts = TokenBudget(tokens, pad_to_multiple_of=16).largest(lengths + new)
        return bool(budget.fits(BatchShape.of(np.maximum(counts, 1), lengths)).all())

    found = budget.figures([512, 64])
    assert safe(found["max_tokens"])
    assert not safe(found["max_tokens"] + 16)
    assert found["tokens"][0] == found["samples"][0] * (64 + new)
    said = (
        f"of lengths + {new} (prompts with what is generated) that is safe for prompts of"
        in str(budget)
    )
    assert said == (new > 0)


def test_packed_batches_are_held_against_the_sum_of_their_tokens():
    budget = MemoryBudget.from_model(
        SHALLOW, "1GB", layout="packed", attention="flash", dtype="bf16"
    )
    most = budget.max_tokens(512)
    shape = BatchShape.of([1, 1, 90, 90], [1, 1, most, most], [most, most + 1, most, most + 1])
    assert budget.fits(shape).tolist() == [True, False, True, False]
    squared = TracedMemory.of(SHALLOW, layout="packed", attention="sdpa")
    line, square = (
        memory.batch_bytes(BatchShape.of(1, [8192, 16384])) for memory in (budget.model, squared)
    )
    assert line[1] / line[0] == pytest.approx(2, rel=0.02)
    assert square[1] / square[0] > 3
    packed = use_varlen_attention(hf.LlamaForCausalLM(SHALLOW).bfloat16())
    assert MemoryBudget.from_model(packed, "1GB", layout="packed").max_tokens(512) == most


def test_static_memory_is_divided_over_ranks():
    def static_of(kind, n):
        how = {} if kind is None else {"sharding": kind, "num_ranks": n}
        workload = Workload.from_model(BERT, "train", trace=False, dtype="bf16", **how)
        return simulate(BERT, workload, [(1, 16)]).rows[0].static_bytes

    whole = static_of(None, 1)
    part = (
        static_of("ddp", 8) - whole
    )  # a bucket of all gradients: as large as the parameters, and each of two states
    assert part == pytest.approx(whole / 4, rel=0.1)
    for kind, shared in (("zero1", 2), ("zero2", 3)):
        assert static_of(kind, 8) == pytest.approx(whole - shared * part * 7 / 8 + part, rel=0.05)
    assert part / 2 < static_of("zero3", 8) == static_of("fsdp", 8) < whole == static_of("fsdp", 1)


def test_what_a_rank_keeps_is_what_the_zero_paper_says():
    """Its figure 1 (arXiv:1910.02054): 7.5 billion parameters in half precision, 12 bytes of Adam's state each, 64 ranks."""
    model = torch.nn.Linear(75_000, 100_000, bias=False, device="meta", dtype=torch.float16)
    known = {
        "mode": "train",
        "dtype": "float16",
        "optimizer_bytes": optimizer_bytes("adamw_master", "float16"),
    }
    for sharding, gb in ((None, 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)):
        assert (
            round(kept_bytes(model, Workload(**known, sharding=sharding, num_ranks=64)) / 1e9, 1)
            == gb
        )


def test_a_bucket_of_gradients_is_as_wide_as_the_widest_of_them():
    wide, exact = (
        torch.nn.Linear(*size, bias=False, device="meta") for size in ((40_000, 30_000), (8, 8))
    )
    shared = Workload(
        mode="train", dtype="bfloat16", optimizer_bytes=0.0, sharding="zero2", num_ranks=10**9
    )
    model = torch.nn.Sequential(wide.to(torch.bfloat16), exact)
    assert static_bytes(model, shared) - kept_bytes(model, shared) == 4 * REDUCE_BUCKET


def test_ranks_that_share_parameters_gather_them_as_they_run_and_hold_two_of_the_largest_layers():
    """Autocast would keep a lower copy of every weight, and hidden states in float32; sharding's mixed precision does not."""
    mixed = {"dtype": "fp32", "autocast": "bf16"}
    runs = ({"dtype": "bf16"}, mixed, {**mixed, "sharding": "fsdp", "num_ranks": 8})
    workloads = (Workload.from_model(SHALLOW, trace=False, **how) for how in runs)
    half, whole, shared = (
        simulate(SHALLOW, workload, [(2, 256)]).rows[0] for workload in workloads
    )
    assert shared.batch_bytes == half.batch_bytes < whole.batch_bytes
    assert half.static_bytes / 8 < shared.static_bytes < whole.static_bytes / 2
    model = as_meta_model(models.t5(**SMALL, layers=4, d_kv=8))
    sizes = [
        sum(p.numel() for p in layer.parameters())
        for layer in (*model.encoder.block, *model.decoder.block)
    ]
    outside = sum(p.numel() for p in model.parameters()) - sum(sizes)
    shared = Workload(
        mode="train", dtype="float32", optimizer_bytes=8.0, sharding="fsdp", num_ranks=10**9
    )
    assert min(sizes) < 0.8 * max(sizes)
    for mode, layers in (("train", 3), ("forward", 2)):
        expected = 4 * (outside + layers * max(sizes))
        assert static_bytes(model, shared.replace(mode=mode)) == pytest.approx(expected, rel=0.01)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft reads it
def test_adapters_train_alone_and_a_quantised_models_dtype_is_that_of_what_it_computes_with():
    adapted = TracedMemory.of(SHALLOW, dtype="bf16", lora=2)
    assert adapted.static_bytes < 0.6 * TracedMemory.of(SHALLOW, dtype="bf16").static_bytes
    assert adapted.workload.optimizer_bytes == 8.0  # they are kept in float32
    assert 0 < (adapted.workload.trainable_share or 0) < 0.2
    quantised = hf.LlamaForCausalLM(models.llama(vocab=100, width=32, layers=1, heads=2)).to(
        torch.bfloat16
    )
    weight = torch.nn.Parameter(torch.zeros(100, 16, dtype=torch.uint8), requires_grad=False)
    quantised.get_input_embeddings().weight = weight
    assert next(quantised.parameters()).dtype == torch.uint8
    assert Workload.from_model(quantised, "forward", trace=False).dtype == "bfloat16"
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["query"])  # of no task, so its class is PeftModel
    classifier = peft.get_peft_model(hf.BertForSequenceClassification(BERT), lora)
    assert_as_simulated(TracedMemory.of(classifier), classifier, [(8, 40)])
    shares = [
        TracedMemory.of(SHALLOW, lora=how).workload.trainable_share
        for how in (2, peft.LoraConfig(r=2))
    ]
    assert 0 < shares[1] < shares[0] / 2, (
        "without layers, a LoraConfig means those that peft chooses for the model"
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
        (
            {"model": lambda: Odd(LLAMA)},
            r"cannot be traced in mode .train. \(.*ProfiledMemory\.fit\(measure",
        ),
        ({"model": MAMBA, "mode": "generate"}, "cannot be traced"),  # its cache has no length
        (
            {"model": IMAGES},
            "the model reads images, whose memory cannot be computed from the text",
        ),
        (
            {"model": lambda: hf.Gemma2ForCausalLM(GEMMA2), "attention": "sdpa"},
            "because Gemma2ForCausalLM has only 'eager'",
        ),
        ({"model": GEMMA2, "attention": "sdpa"}, "because Gemma2ForCausalLM has only 'eager'"),
        (
            {"model": NO_PAD},
            r"cannot build a model from a ModernBertConfig \(AssertionError.*Padding",
        ),
        ({"model": lambda: torch.nn.Linear(2, 2)}, "has no transformers config; describe it"),
    ],
)
def test_what_cannot_be_is_said_with_a_way_out(arguments, message):
    model, arguments = arguments.get("model", LLAMA), {"memory": "1GB", **arguments}
    arguments.pop("model", None)
    with pytest.raises(ConfigError, match=message):
        MemoryBudget.from_model(model() if isfunction(model) else model, **arguments)


def test_memory_may_be_said_in_any_way_and_static_memory_that_exceeds_it_is_named():
    found = {
        MemoryBudget.from_bytes(limit, model=memory_of("bert"))
        for limit in (24e9, "24.0 GB", "24e9", 24 * 10**9)
    }
    assert {budget.fingerprint.split(",")[0] for budget in found} == {
        "MemoryBudget(limit_bytes=24000000000"
    }
    with pytest.raises(
        BudgetError, match="static memory .* alone exceeds 90% of limit_bytes=500,000"
    ):
        MemoryBudget.from_model(BERT, "500KB")
    assert "not even one sample fits" in str(MemoryBudget.from_model(BERT, "895KB"))
    with pytest.warns(
        UserWarning, match="use_cache=False needs more memory than predicted .*; lower the limit"
    ):
        MemoryBudget.from_model(
            type(LLAMA)(**{**LLAMA.to_dict(), "use_cache": False}), "1GB", mode="generate"
        )


def test_a_decoder_does_not_take_a_second_padded_stream_for_nothing():
    budget = MemoryBudget.from_bytes(10**9, model=memory_of("llama"))
    pairs = {"tokens": [400] * 60, "target": [100] * 60}
    with pytest.raises(
        ConfigError, match="one stream of tokens, but batches also have the stream 'target'"
    ):
        LengthAwareBatchSampler(pairs, budget)
    assert (
        max(
            map(
                len,
                LengthAwareBatchSampler(pairs, budget & AdditiveCap("target", 1000)).plan.batches,
            )
        )
        <= 10
    )


# 5,000 bytes whatever the batch, or 100 a token and one a pair of tokens.
PHASES = Phases(((5000.0, *[0.0] * 11), (0, 0, 0, 100, 0, 1, *[0] * 6)))  # type: ignore[arg-type]
TRACED = TracedMemory(1000, Workload(mode="train", phases=PHASES))


def rows_of(memory, factor=1.0, constant=0.0, workload=None):
    shapes = [(n, length) for n in (1, 3, 20) for length in (16, 100, 900)]
    sizes = memory.batch_bytes(BatchShape.of(*np.array(shapes).T)) * factor + constant
    rows = [
        Measurement(n, {"tokens": ln}, 1000, int(s))
        for (n, ln), s in zip(shapes, sizes, strict=True)
    ]
    return Measurements(tuple(rows), workload or memory.workload, "measured")


@settings(max_examples=60)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=12))
def test_the_line_lies_above_every_row_and_never_below_the_trace(points):
    said, taken = np.array(points).T
    factor, constant = line_above(said, taken)
    assert min(factor - 1, constant) >= 0
    assert (factor * said + constant >= taken * (1 - 1e-9)).all()
    excess = np.mean((factor * said + constant) / taken)
    for other in (
        1.0,
        1.1,
        2.0,
        float(np.max(taken / said)),
    ):  # no other line above them exceeds them less
        gap = max(float(np.max(taken - max(other, 1.0) * said)), 0.0)
        assert excess <= np.mean((max(other, 1.0) * said + gap) / taken) * (1 + 1e-9)


def test_measured_rows_raise_the_trace_and_those_of_another_workload_or_of_none_are_refused():
    better = TRACED.corrected(rows_of(TRACED, 1.5, 2000.0))
    unseen = BatchShape.of([2, 50], [333, 5000])
    assert better.batch_bytes(unseen) == pytest.approx(
        1.5 * TRACED.batch_bytes(unseen) + 2000, rel=1e-3
    )
    assert better.fingerprint != TRACED.fingerprint
    assert better.relative(BatchShape.of(20, 900), BatchShape.of(20, 900)) == pytest.approx(1.0)
    assert (
        TRACED.corrected(rows_of(TRACED, 0.5)) == TRACED
    )  # a device that takes less makes no batch larger
    small = Measurements((Measurement(1, {"tokens": 16}, 7777, 1),), TRACED.workload)
    assert TRACED.corrected(small).static_bytes == 7777
    asked = TracedMemory(
        0, Workload(mode="train", num_layers=3, attention="sdpa", phases=TRACED.workload.phases)
    )
    for change in ({"mode": "forward"}, {"num_layers": 9}, {"attention": "eager"}):
        (name, value), *_ = change.items()
        with pytest.raises(
            ConfigError, match=f"`measured` has {name}={value!r}, but the traced model {name}="
        ):
            asked.corrected(rows_of(TRACED, workload=Workload(**{"mode": "train", **change})))
    for rows in (
        Measurements((Measurement(1, {"tokens": 5}, 0, None, oom=True),), TRACED.workload),
        [1, 2],
    ):
        with pytest.raises(ConfigError, match="at least one row that did not run out of memory"):
            TRACED.corrected(rows)
