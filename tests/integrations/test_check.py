"""`dynagroup check`: the answers of architectures whose nature is known."""

from __future__ import annotations

import pytest
from transformers import Mamba2Config

from dynagroup.errors import ConfigError
from dynagroup.integrations.check import QUESTIONS, check_model
from tests import models

APART, PACK = "samples are kept apart with ", ": use layout='packed'"
NONE = "not possible for encoder-decoders: use the padded layout, with both lengths"


@pytest.mark.parametrize(
    ("config", "answers"),
    [
        (
            models.llama(),
            {
                "loss": "the mean over label tokens",
                "packed": f"{APART}sdpa or use_varlen_attention{PACK}",
            },
        ),
        (
            models.bert(),
            {"padding": "changes no answer", "packed": f"{APART}use_varlen_attention{PACK}"},
        ),
        (
            models.t5(),
            {
                "loss": "the mean over label tokens",
                "packed": NONE,
            },
        ),
    ],
    ids=["llama", "bert", "t5"],
)
def test_answers_of_architectures_that_are_known(config, answers):
    found = check_model(config)
    assert answers.items() <= found.items()
    assert found["memory"].startswith("can be traced")


def test_layers_that_run_along_the_row_are_told_their_kernels_not_another_attention(monkeypatch):
    """State-space models: flash attention would change nothing."""
    monkeypatch.setitem(QUESTIONS, "memory", lambda model: "not asked")
    config = Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1, num_hidden_layers=2, vocab_size=64
    )
    found = check_model(config)
    assert "flash-linear-attention and causal_conv1d" in found["packed"]


def test_what_is_no_text_model_is_refused():
    with pytest.raises(ConfigError, match="no config found for 'no/such'"):
        check_model("no/such")
