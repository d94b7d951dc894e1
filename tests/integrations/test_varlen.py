"""Packed attention with torch alone gives what padded batches give, and refuses what it would get wrong."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DataCollatorWithFlattening,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dynagroup.errors import ConfigError
from dynagroup.integrations.varlen import kernel, use_varlen_attention
from tests import models

SIZES = {"width": 32, "heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 8}),
    "mistral, window of 3": (MistralForCausalLM, MistralConfig, {"sliding_window": 3}),
}
LENGTHS = (7, 1, 4, 12)


def built(name):
    torch.manual_seed(0)
    model_class, config_class, more = MODELS[name]
    return model_class(models.config(config_class, **SIZES, **more, attn_implementation="sdpa")).double()


def samples():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 64, (n,), generator=generator).tolist()} for n in LENGTHS]


def padded_loss(model, rows):
    width = max(LENGTHS)
    ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
    mask = (ids > 0).long()
    logits = model(input_ids=ids, attention_mask=mask).logits
    labels = ids.masked_fill(mask == 0, -100)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def packed_loss(model, rows):
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    labels = batch.pop("labels")
    logits = model(**batch).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_padded_batches(name):
    model = built(name)
    loss = padded_loss(model, samples())
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    found = packed_loss(use_varlen_attention(model), samples())
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    for n, p in model.named_parameters():
        exact = name != "gemma"  # it normalises in float32
        torch.testing.assert_close(p.grad, wanted[n], rtol=1e-9 if exact else 1e-5, atol=1e-12 if exact else 1e-9)


def test_samples_do_not_see_each_other():
    model = use_varlen_attention(built("llama"))
    rows = samples()
    alone = [
        packed_loss(model, [row]).item() * (len(row["input_ids"]) - 1) for row in rows if len(row["input_ids"]) > 1
    ]
    together = packed_loss(model, rows).item() * (sum(LENGTHS) - len(LENGTHS))
    assert together == pytest.approx(sum(alone), rel=1e-12)


def test_a_padded_batch_is_refused():
    model = use_varlen_attention(built("llama"))
    with pytest.raises(ConfigError, match="given a padded batch"):
        padded_loss(model, samples())


def test_a_pack_without_borders_is_refused():
    model = use_varlen_attention(built("llama"))
    batch = DataCollatorWithFlattening()(samples())
    with pytest.raises(ConfigError, match="does not say where its samples begin"):
        model(**batch)


def test_equal_rows_need_no_borders():
    model = built("llama")
    ids = torch.arange(1, 13).reshape(3, 4)
    wanted = model(input_ids=ids).logits
    torch.testing.assert_close(use_varlen_attention(model)(input_ids=ids).logits, wanted)


def test_generating_with_a_cache_is_refused_and_says_how():
    model = use_varlen_attention(built("llama"))
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        model.generate(torch.arange(1, 5)[None], max_new_tokens=2, do_sample=False)


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(ConfigError, match="Linear"):
        use_varlen_attention(torch.nn.Linear(2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on CUDA devices only")
def test_the_kernel_gives_what_one_by_one_gives():
    from dynagroup.integrations.varlen import one_by_one

    borders = torch.tensor([0, 7, 8, 24], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(24, heads, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    for window in (None, 4):
        options = {"causal": True, "scale": 0.3, "window": window}
        torch.testing.assert_close(
            kernel(q, k, v, borders, 16, **options), one_by_one(q, k, v, borders, **options, dropout=0.0),
            rtol=2e-2, atol=2e-2,
        )  # fmt: skip
