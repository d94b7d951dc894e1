"""Models of sound: what `dynagroup check` says of their padding and losses."""

from typing import Any

import pytest
import torch
import transformers as hf

from dynagroup import ConfigError, check_loss
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


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Waveforms without a mask, as the feature extractor of wav2vec2-base makes them; each has the labels 1 and 2."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_values": padded, "labels": torch.tensor([[1, 2]] * len(rows))}


def rule_of(model_config: Any, lengths: tuple[int, ...], weigh: Any = "auto") -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCTC.from_config(model_config)
    rows = [torch.randn(length) for length in lengths]
    return check_loss(model, lambda step: model(**step.batch).loss, rows, weigh, collate_fn=collate)


def test_the_split_test_of_a_group_norm_says_that_padding_changes_the_result() -> None:
    cause = r"% off.*padded as in the batch, they do add up.*feat_extract_norm='group'"
    with pytest.raises(ConfigError, match=cause):
        rule_of(GROUP, (4_000, 9_000))
    with pytest.warns(UserWarning, match=cause):
        assert rule_of(GROUP, (4_000, 9_000), "samples") == "samples"


def test_waveforms_of_one_length_pass_the_split_test() -> None:
    assert rule_of(GROUP, (6_000, 6_000)) == "sum"


def test_a_loss_that_compares_samples_is_not_said_to_be_due_to_padding() -> None:
    layer = torch.nn.Linear(2, 2)
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]

    def spread(step: Any) -> torch.Tensor:
        return layer(step.batch["x"]).std()

    with pytest.raises(ConfigError, match="% off") as refused:
        check_loss(layer, spread, rows, collate_fn=lambda rows: {"x": torch.stack(rows)})
    assert "padded" not in str(refused.value)
