"""What fits a device, from the model alone: the same answer everywhere, and the one that the whole model gives."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, OlmoeConfig

from dynagroup.budget.base import AdditiveCap
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.memory import PaddedTokens, TracedMemory, Workload, simulate, what_fits
from dynagroup.memory.fits import parsed_bytes
from dynagroup.memory.trace.model import as_run_model
from dynagroup.memory.trace.program import kept_bytes
from dynagroup.memory.traced import optimizer_bytes
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape
from tests import models

POSITIONS = 40_000
LLAMA = models.llama(vocab=4000, width=256, layers=5, heads=8, num_key_value_heads=2, max_position_embeddings=POSITIONS)
GPT2 = models.gpt2(vocab=1000, width=128, layers=5, heads=4, inner=512, dropout=0.1, n_positions=POSITIONS)
BERT = models.bert(vocab=900, width=128, layers=3, heads=4, dropout=0.1, max_position_embeddings=POSITIONS)
T5 = models.t5(vocab=900, width=64, layers=3, heads=4, d_kv=16, dropout=0.1)
BART = models.bart(vocab=900, width=64, layers=3, heads=4, max_position_embeddings=POSITIONS)
OLMOE = models.config(OlmoeConfig, vocab=900, width=64, layers=3, heads=4, inner=64, num_experts=8, num_experts_per_tok=2,
                      max_position_embeddings=POSITIONS)  # fmt: skip
ROOM = 0.9 * 8e9


def named(value):
    return "-".join(value) if isinstance(value, dict) else type(value).__name__


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (LLAMA, {"dtype": "bf16", "lora": 8, "gradient_checkpointing": True}),
        (LLAMA, {"dtype": "bf16", "layout": "packed", "attention": "flash"}),
        (LLAMA, {"dtype": torch.bfloat16, "pad_to_multiple_of": 16}),
        (GPT2, {"mode": "generate", "max_new_tokens": 100}),
        (BERT, {"mode": "forward", "autocast": "bf16"}),
        (T5, {"gradient_checkpointing": True}),
        (OLMOE, {"dtype": "bf16", "lora": 8}),
        (BART, {"mode": "generate", "lora": 8, "max_new_tokens": 50}),
    ],
    ids=named,
)
def test_the_answer_is_the_largest_batch_that_the_whole_model_fits(config, how):
    multiple = how.get("pad_to_multiple_of", 1)
    lengths = [128, 32768] if multiple == 16 else [127, 32767]  # most lengths are no multiple of 16
    found = what_fits(config, 8 * 10**9, lengths=lengths, **how)
    model = as_run_model(
        config, dtype=found.memory.workload.dtype, attention=how.get("attention"), lora=how.get("lora")
    )
    for length, count in zip(found.lengths, found.samples, strict=True):
        shapes = [(max(count, 1), length), (int(count * 1.02) + 1, length)]
        fits, does_not = (row.peak_bytes for row in simulate(model, found.memory.workload, shapes))
        assert count == 0 or fits <= 1.02 * ROOM, (length, count, fits / ROOM)
        assert does_not > ROOM, (length, count, does_not / ROOM)
    budget = MemoryBudget.from_bytes(8 * 10**9, model=found.memory, pad_to_multiple_of=multiple)
    if how.get("layout") != "packed":
        assert tuple(budget.largest(np.array(lengths)).tolist()) == found.samples
    some = np.maximum(found.samples, 1)
    assert budget.fits(BatchShape.of(some, lengths)).tolist() == [count > 0 for count in found.samples]


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (GPT2, {"mode": "generate", "max_new_tokens": 200}),
        (LLAMA, {"mode": "generate", "max_new_tokens": 37, "pad_to_multiple_of": 16}),
        (LLAMA, {"dtype": "bf16"}),
    ],
    ids=named,
)
def test_the_token_budget_is_safe_and_the_largest_that_is(config, how):
    """Of prompts it counts what is generated, too: one-token prompts, which bring caches of all new tokens, decide no more."""
    found = what_fits(config, "4GB", lengths=[64, 1024], **how)
    multiple, new = how.get("pad_to_multiple_of", 1), how.get("max_new_tokens", 0)
    traced = MemoryBudget.from_bytes(4 * 10**9, model=found.memory, pad_to_multiple_of=multiple)
    lengths = np.arange(1, 1025)

    def safe(tokens):
        counts = TokenBudget(tokens, pad_to_multiple_of=multiple).largest(lengths + new)
        return bool(traced.fits(BatchShape.of(np.maximum(counts, 1), lengths)).all())

    assert safe(found.max_tokens)
    assert not safe(found.max_tokens + multiple)
    assert found.max_tokens > 0.5 * min(total for _, _, total, _ in found.rows())
    assert f"TokenBudget({found.max_tokens}" in str(found)
    (_, few, total, _), _ = found.rows()
    assert total == few * (64 + new)
    told = f"of lengths + {new} (prompts with what is generated) that is safe for prompts of up to 1024: TokenB"
    assert (told in str(found)) == (new > 0)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (
            lambda: MemoryBudget.from_model(LLAMA, "8GB", dtype="bf16", pad_to_multiple_of=16, headroom=0.8),
            ["6.4 GB (0.8 of 8,000,000,000 bytes)", "LlamaConfig of", "traced", "train, bfloat16, sdpa attention, no check",
             "AdamW of 4 bytes a trained parameter", "static", "whatever the batch", "to multiples of 16"],
        ),
        (
            lambda: MemoryBudget.from_model(LLAMA, "8GB", lora=8, optimizer="lion", gradient_checkpointing=True,
                                            attention="flash", layout="packed", keeps_outputs=False),
            ["flash attention, packed, LoRA of rank 8, checkpointing, lion of 4 bytes", "logits let go", " tokens"],
        ),
        (
            lambda: MemoryBudget.from_model(BART, "8GB", mode="generate", max_new_tokens=64, dtype="fp16"),
            ["generate, float16, sdpa attention, 64 new tokens", "samples by tokens of the longest"],
        ),
        (
            lambda: MemoryBudget(32, longest=1000),
            ["0.9 of the memory of the hardest batch, 32 samples of 1,000 tokens", "not known in full", "32 of 1,000"],
        ),
        (lambda: MemoryBudget(32, model=PaddedTokens()), ["however long", "padded tokens"]),
    ],
    ids=["train", "packed", "generate", "first batch", "not bound"],
)  # fmt: skip
def test_a_budget_says_what_it_took_for_granted(budget, said):
    made = budget()
    assert [part for part in said if part not in str(made)] == []
    assert "\n" not in repr(made)
    assert len(repr(made)) < 80
    shown = re.findall(r"([\d,]+) of ([\d,]+)", str(made).splitlines()[-1])
    if shown and "not known" not in str(made):  # the batches that it names are the largest that fit
        counts, lengths = (np.array([int(n.replace(",", "")) for n in part]) for part in zip(*shown, strict=True))
        assert made.largest(lengths).tolist() == counts.tolist()


def test_packed_batches_are_held_against_the_sum_of_their_tokens():
    found = what_fits(LLAMA, "1GB", layout="packed", attention="flash", dtype="bf16")
    budget = MemoryBudget.from_bytes(10**9, model=found.memory)
    assert (budget.layout, budget.largest(np.array([8]))) == ("packed", None)
    most = found.max_tokens
    shape = BatchShape.of([1, 1, 90, 90], [1, 1, most, most], [most, most + 1, most, most + 1])
    assert budget.fits(shape).tolist() == [True, False, True, False]
    squared = TracedMemory.of(LLAMA, layout="packed", attention="sdpa")
    line, square = (memory.batch_bytes(BatchShape.of(1, [8192, 16384])) for memory in (found.memory, squared))
    assert line[1] / line[0] == pytest.approx(2, rel=0.02)
    assert square[1] / square[0] > 3


def test_static_memory_is_divided_over_ranks():
    def static_of(kind, n):
        how = {} if kind is None else {"sharding": kind, "num_ranks": n}
        workload = Workload.from_model(LLAMA, "train", trace=False, dtype="bf16", **how)
        return simulate(LLAMA, workload, [(1, 16)]).rows[0].static_bytes

    cases = ((None, 1), ("ddp", 8), ("zero1", 8), ("zero2", 8), ("zero3", 8), ("fsdp", 8), ("fsdp", 1))
    static = {case: static_of(*case) for case in cases}
    whole = static[None, 1]
    part = whole / 4  # parameters, gradients, and two states of as many bytes
    buffers = static[None, 1] - 4 * part
    bucket = part  # of all gradients
    assert static["ddp", 8] == pytest.approx(whole + part, rel=0.01)
    assert static["zero1", 8] == pytest.approx(2 * part + 2 * part / 8 + bucket, rel=0.01)
    assert static["zero2", 8] == pytest.approx(part + 3 * part / 8 + bucket, rel=0.01)
    assert 4 * part / 8 + buffers < static["zero3", 8] == static["fsdp", 8] < whole
    assert static["fsdp", 1] == whole


@pytest.mark.parametrize(("sharding", "gb"), [(None, 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_what_a_rank_keeps_is_what_the_zero_paper_says(sharding, gb):
    """Its figure 1 (arXiv:1910.02054): 7.5 billion parameters in half precision, 12 bytes of Adam's state each, 64 ranks."""
    model = torch.nn.Linear(75_000, 100_000, bias=False, device="meta", dtype=torch.float16)
    state = optimizer_bytes("adamw_master", "float16")
    workload = Workload(mode="train", dtype="float16", optimizer_bytes=state, sharding=sharding, num_ranks=64)
    assert round(kept_bytes(model, workload) / 1e9, 1) == gb


def test_ranks_that_share_parameters_gather_them_in_the_precision_that_runs():
    """Autocast would keep a lower copy of every weight, and hidden states in float32; sharding's mixed precision does not."""
    shape, how = [(2, 256)], {"trace": False, "gradient_checkpointing": True}
    half, mixed, shared = (
        simulate(LLAMA, Workload.from_model(LLAMA, "train", **how, **more), shape).rows[0]
        for more in (
            {"dtype": "bf16"},
            {"dtype": "fp32", "autocast": "bf16"},
            {"dtype": "fp32", "autocast": "bf16", "sharding": "fsdp", "num_ranks": 8},
        )
    )
    assert shared.batch_bytes == half.batch_bytes < mixed.batch_bytes
    assert half.static_bytes / 8 < shared.static_bytes < mixed.static_bytes / 2


def test_logits_that_the_loop_lets_go_are_not_there_in_the_backward_pass():
    wide = models.llama(vocab=50_000, width=64, layers=2, heads=2)
    kept, gone = (
        simulate(wide, Workload.from_model(wide, "train", trace=False, dtype="bf16", keeps_outputs=kept), [(4, 128)])
        for kept in (None, False)
    )
    logits = 4 * 128 * 50_000 * 2
    assert kept.rows[0].batch_bytes - gone.rows[0].batch_bytes == pytest.approx(logits, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"), [("adamw", "bfloat16", 4), ("adamw_8bit", "bfloat16", 2), (3, "float32", 3)]
)
def test_optimizers_by_name_or_bytes(name, dtype, expected):
    assert optimizer_bytes(name, dtype) == expected


def test_adapters_train_alone():
    whole, adapted = (TracedMemory.of(BART, dtype="bf16", lora=lora) for lora in (None, 2))
    assert adapted.static_bytes < 0.5 * whole.static_bytes
    assert adapted.workload.optimizer_bytes == 8.0  # they are kept in float32
    assert 0 < (adapted.workload.trainable_share or 0) < 0.1


def test_code_that_is_printed_makes_the_same_decisions():
    found = what_fits(LLAMA, "1GB", dtype=torch.bfloat16, gradient_checkpointing=True, mode="train")
    assert found.code == "MemoryBudget.from_model(model, '1GB', dtype='bfloat16', gradient_checkpointing=True)"
    again = eval(found.code, {"MemoryBudget": MemoryBudget, "model": LLAMA})
    assert tuple(again.largest(np.array(found.lengths)).tolist()) == found.samples
    assert found.code in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "lots"}, "`memory` must be a size such as 80GB or 24GiB"),
        ({"memory": 0}, "`memory` must be a size"),
        ({"memory": 80.0}, "`memory` must be a size"),
        ({"memory": "24"}, "write 24GB"),
        ({"headroom": 1.5}, "at most 1(.0)?, but is 1.5"),
        ({"optimizer": "best"}, "`optimizer` must be one of adamw"),
        ({"sharding": "fsdp"}, "say how many: num_ranks=8"),
        ({"sharding": "zero9", "num_ranks": 2}, "`sharding` must be one of 'ddp'"),
        ({"lora": "all"}, "`lora` must be True, a rank"),
        ({"dtype": "int3"}, "`dtype` must be one of"),
        ({"mode": "generate", "layout": "packed"}, "`layout` 'packed' is for training"),
        ({"model": T5, "layout": "packed"}, "`layout` 'packed' is for models of one stack"),
        ({"model": BERT, "mode": "generate"}, "'generate' is for models that decode, but BertConfig is of an encoder"),
        ({"colour": 1}, "Workload has no field 'colour'"),
    ],
)
def test_what_cannot_be_is_said(arguments, message):
    model, arguments = arguments.get("model", LLAMA), {"memory": "1GB", **arguments}
    arguments.pop("model", None)
    for ask in (what_fits, MemoryBudget.from_model):
        with pytest.raises(ConfigError, match=message):
            ask(model, **arguments)


def test_sizes_as_people_write_them():
    assert parsed_bytes("24GiB") == parsed_bytes("25769803776") == 24 * 2**30


def test_a_device_that_the_model_alone_fills():
    found = what_fits(BERT, "5MB")
    assert not any(found.samples)
    with pytest.raises(BudgetError, match="static memory .* alone exceeds 90% of limit_bytes=5,000,000"):
        MemoryBudget.from_bytes(5 * 10**6, model=found.memory)


def test_a_model_is_traced_under_no_grad_too():
    with torch.no_grad():
        under = Workload.from_model(BART, "forward")
    with torch.inference_mode():
        inside = Workload.from_model(BART, "forward")
    assert under == inside == Workload.from_model(BART, "forward")
    assert under.phases is not None


def test_a_target_of_any_name_counts_as_the_decoder_does():
    memory = TracedMemory.of(T5, "train", dtype="bf16")
    lengths = [(511, 65), (65, 511)]
    rows = simulate(T5, memory.workload, [(8, {"tokens": source, "target": target}) for source, target in lengths])
    for name in ("target", "labels", "answer"):
        shape = BatchShape.of(8, {"tokens": [511, 65], name: [65, 511]})
        assert memory.batch_bytes(shape) == pytest.approx(rows.batch_bytes(), rel=0.02)


def test_a_decoder_does_not_take_a_second_padded_stream_for_nothing():
    budget = MemoryBudget.from_model(LLAMA, "1GB", dtype="bf16")
    pairs = {"tokens": [400] * 60, "target": [100] * 60}
    with pytest.raises(ConfigError, match="traced with one stream of tokens, but batches have 'target' beside it"):
        LengthAwareBatchSampler(pairs, budget)
    capped = LengthAwareBatchSampler(pairs, budget & AdditiveCap("target", 1000))  # laid end to end: no padded stream
    assert max(map(len, capped.plan.batches)) <= 10


def test_a_quantised_models_dtype_is_that_of_what_it_computes_with():
    quantised = LlamaForCausalLM(models.llama(vocab=100, width=32, layers=1, heads=2)).to(torch.bfloat16)
    table = quantised.get_input_embeddings()
    table.weight = torch.nn.Parameter(torch.zeros(100, 16, dtype=torch.uint8), requires_grad=False)
    assert next(quantised.parameters()).dtype == torch.uint8
    assert Workload.from_model(quantised, "forward", trace=False).dtype == "bfloat16"
