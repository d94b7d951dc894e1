"""What a batch weighs: label tokens, samples, or what the user says."""

import numpy as np
import pytest
import torch
import transformers as hf

from dynagroup import ConfigError
from dynagroup.update.loss_weight import count_label_tokens, mean_items, predicts_next_token, weigher
from tests import models

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


TINY = {"vocab": 16, "width": 8, "layers": 1, "heads": 1}


def test_models_say_whether_their_loss_shifts():
    gpt2 = hf.GPT2LMHeadModel(models.gpt2(**TINY))
    t5 = hf.T5ForConditionalGeneration(models.t5(**TINY))
    assert predicts_next_token(gpt2)
    assert predicts_next_token(torch.nn.DataParallel(gpt2))
    assert predicts_next_token(hf.LlamaForCausalLM(models.llama(**TINY)))
    assert not predicts_next_token(t5)
    assert not predicts_next_token(hf.BertForMaskedLM(models.bert(**TINY)))
    assert not predicts_next_token(hf.BertForSequenceClassification(models.bert(**TINY)))
    assert not predicts_next_token(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_function_must_give_a_number(weight):
    with pytest.raises(ConfigError, match="`weigh` must give a weight from 0 to 1e\\+30, but gives"):
        weigher(lambda batch: weight)(None, 1)
