"""What a batch weighs: label tokens, samples, or what the user says."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dynagroup import ConfigError
from dynagroup.update.weigh import count_label_tokens, mean_items, predicts_next_token, weigher

ROWS = [[-100, 5, 6], [7, 8, -100]]


@pytest.mark.parametrize(
    ("batch", "shifted", "expected"),
    [
        ({"labels": torch.tensor(ROWS)}, True, 3),
        ({"labels": np.array(ROWS)}, False, 4),
        ({"labels": ROWS}, True, 3),
        ({"shift_labels": torch.tensor(ROWS), "labels": torch.tensor(ROWS)}, True, 4),
        ({"labels": torch.tensor([0, 2, 1])}, True, 3),
        ({"labels": torch.full((2, 3), -100)}, True, 0),
        ({"labels": torch.tensor([[0.5, -100.0], [1.0, 2.0]])}, True, 4),
    ],
)
def test_label_tokens_are_those_that_are_predicted(batch, shifted, expected):
    assert count_label_tokens(batch, shifted=shifted) == mean_items(batch, shifted=shifted) == expected


def test_a_batch_without_labels_is_a_mean_over_its_samples():
    assert mean_items({"name": "a", "input_ids": torch.ones(4, 7)}) == 4
    assert mean_items(torch.ones(3, 2)) == 3
    assert mean_items({"labels": None, "input_ids": torch.ones(4, 7)}) == 4
    with pytest.raises(ConfigError, match="cannot see how many samples a batch has: this dict holds no tensors"):
        mean_items({"name": "a"})
    with pytest.raises(ConfigError, match="weigh='tokens' counts a batch's 'labels', but this dict has none"):
        weigher("tokens")({"input_ids": torch.ones(4, 7)}, 4)


def tiny(config, model, **options):
    return model(config(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, **options))


def test_models_say_whether_their_loss_shifts():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1))
    assert predicts_next_token(gpt2)
    assert predicts_next_token(torch.nn.DataParallel(gpt2))
    assert predicts_next_token(tiny(LlamaConfig, LlamaForCausalLM, intermediate_size=8))
    assert not predicts_next_token(t5)
    assert not predicts_next_token(tiny(BertConfig, BertForMaskedLM))
    assert not predicts_next_token(tiny(BertConfig, BertForSequenceClassification))
    assert not predicts_next_token(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_function_must_give_a_number(weight):
    with pytest.raises(ConfigError, match="`weigh` must give a weight from 0 to 1e\\+30, but gives"):
        weigher(lambda batch: weight)(None, 1)


def test_weighing_travels_to_workers():
    for weigh in ("tokens", "samples", partial(mean_items, shifted=False)):
        function = pickle.loads(pickle.dumps(weigher(weigh)))
        assert function({"labels": torch.tensor(ROWS)}, 2) == {"tokens": 3, "samples": 2}.get(str(weigh), 4)
