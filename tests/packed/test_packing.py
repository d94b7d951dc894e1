"""Packed collation: what a model needs, what it would get wrong is refused before training, and what `dynagroup check` says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import transformers
from transformers import FalconH1Config, Mamba2Config

from dynagroup import ConfigError, TokenBudget, text_dataloader
from dynagroup.integrations.check import QUESTIONS, check_model
from dynagroup.integrations.packing import packing_collator
from dynagroup.integrations.varlen import use_varlen_attention
from dynagroup.oom.split import packed_borders
from tests import models
from tests.test_text import numbered
from tests.test_text import tokenizer as tokenizer


def llama(attention: str = "sdpa", **changes: object) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(models.llama(attn_implementation=attention, **{"use_cache": False, **changes}))


def roberta() -> Any:
    config = models.config(transformers.RobertaConfig, pad_token_id=1)
    return use_varlen_attention(transformers.RobertaForMaskedLM(config))


def test_a_model_that_keeps_samples_apart_is_given_its_collator_and_positions_begin_where_it_lets_them() -> None:
    model = llama().train()
    batch = packing_collator(model)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, -100]]
    assert "cu_seq_lens_q" not in batch
    assert model.training
    assert packing_collator(use_varlen_attention(llama()))([{"input_ids": [5, 6]}])["cu_seq_lens_q"].tolist() == [0, 2]
    assert packing_collator(roberta())([{"input_ids": [5, 6]}])["position_ids"].tolist() == [[2, 3]]


def mamba() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def bert() -> Any:
    return transformers.BertForMaskedLM(models.bert())


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(models.t5())


VARLEN = "call dynagroup.integrations.varlen.use_varlen_attention"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "cache": (partial(llama, use_cache=True), {}, f"set model.config.use_cache = False .*, {VARLEN}"),
    "BERT": (bert, {}, "its attention 'sdpa' mixes them; "),
    "Mamba": (mamba, {}, "mixes them; .* or use the padded layout"),
    "T5": (t5, {}, "cannot run two packed samples .*only models that read one row"),
    "positions": (roberta, {"position_ids_start": 0}, "its positions, or layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_with_the_ways_out(name: str) -> None:
    make, options, message = REFUSED[name]
    model = make()
    before = str(model.config)
    with pytest.raises(ConfigError, match=message):
        packing_collator(model, **options)
    assert str(model.config) == before


def test_the_one_liner_packs(tokenizer) -> None:
    texts = numbered([7, 3, 9, 1, 4, 4, 0])
    loader = text_dataloader(texts, tokenizer, TokenBudget(16, layout="packed"), labels=True)
    seen = []
    for batch in loader:
        borders = packed_borders(batch)
        assert borders is not None
        assert batch["input_ids"].shape == batch["labels"].shape == (1, borders[-1])
        assert borders[-1] <= 16
        ids = batch["input_ids"][0].tolist()
        seen += [" ".join(str(i - 2) for i in ids[a:b]) for a, b in zip(borders[:-1], borders[1:], strict=True)]
    assert sorted(seen) == sorted(text for text in texts if text)
    assert len(loader) == 2
    batch = next(iter(text_dataloader(["", ""], tokenizer, TokenBudget(16, layout="packed"))))
    assert (batch["input_ids"].tolist(), "labels" in batch) == ([[0]], False)


APART, PACK = "samples are kept apart with ", ": use layout='packed'"
NONE = "not possible for encoder-decoders: use the padded layout, with both lengths"


@pytest.mark.parametrize(("config", "answers"), [
    (models.llama(), {"loss": "the mean over label tokens", "packed": f"{APART}sdpa or use_varlen_attention{PACK}"}),
    (models.bert(), {"padding": "changes no answer", "packed": f"{APART}use_varlen_attention{PACK}"}),
    (models.t5(), {"loss": "the mean over label tokens", "packed": NONE}),
], ids=["llama", "bert", "t5"])  # fmt: skip
def test_answers_of_architectures_that_are_known(config, answers):
    found = check_model(config)
    assert answers.items() <= found.items()
    assert found["memory"].startswith("can be traced")


def test_layers_that_run_along_the_row_are_told_their_kernels_and_no_text_model_is_refused(monkeypatch):
    """Where transformers hands the borders of samples to such layers; Mamba 2's head drops them: no kernel helps there."""
    for name in ("padding", "loss", "memory"):
        monkeypatch.setitem(QUESTIONS, name, lambda model: "not asked")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}
    found = check_model(FalconH1Config(**sizes, **heads, intermediate_size=32))
    assert "only by kernels: on a GPU install causal_conv1d and mamba_ssm" in found["packed"]
    found = check_model(Mamba2Config(**sizes, num_heads=4, head_dim=16, state_size=8, n_groups=1))
    assert "not kept apart: use the padded layout" in found["packed"]
    with pytest.raises(ConfigError, match="no config found for 'no/such'"):
        check_model("no/such")
