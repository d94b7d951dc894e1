"""Models of sound: what `dynagroup check` says of their padding and losses."""

from typing import Any

import pytest
import torch
import transformers as hf

from dynagroup.integrations.check import QUESTIONS
from tests.memory.test_speech import CONVOLUTIONS, GROUP, SMALL, SPEECH_TO_TEXT
from tests.models import config

LAYER = config(
    hf.Wav2Vec2Config,
    **SMALL,
    **CONVOLUTIONS,
    feat_extract_norm="layer",
    do_stable_layer_norm=True,
)


def answers(model_config: Any) -> dict[str, str]:
    torch.manual_seed(0)
    if model_config is SPEECH_TO_TEXT:
        model = hf.Speech2TextForConditionalGeneration(model_config)
    else:
        model = hf.AutoModelForCTC.from_config(model_config)
    return {name: QUESTIONS[name](model) for name in ("padding", "loss", "packed")}


def test_a_group_norm_of_a_waveform_counts_padding_and_a_layer_norm_does_not() -> None:
    group = answers(GROUP)
    layer = answers(LAYER)
    assert group["padding"].startswith("changes answers by ")
    assert layer["padding"] == "changes no answer"
    assert group["loss"] == layer["loss"] == "a sum over the batch: divide it by step.weight.total"
    assert group["packed"] == "not possible for models of sound: use the padded layout"


@pytest.mark.parametrize(
    ("model_config", "padding", "loss"),
    [
        (config(hf.Wav2Vec2BertConfig, **SMALL), "changes no answer", "a sum over the batch"),
        (SPEECH_TO_TEXT, "changes answers by 0.", "the mean over all labels"),
    ],
    ids=["wav2vec2-bert", "speech to text"],
)
def test_models_of_features_are_checked(model_config: Any, padding: str, loss: str) -> None:
    found = answers(model_config)
    assert found["padding"].startswith(padding)
    assert found["loss"].startswith(loss)
