"""A loss that the plain Trainer logs too large is said where it happens: as training begins."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from dynagroup import TokenBudget
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import DynagroupTrainer
from tests.integrations import toys

ROWS = toys.samples("seq2seq", 32)
MODELS = {"T5": toys.seq2seq, "GPT-2": toys.causal_lm}


def settings(name: str, folder: Path, accumulation: int) -> dict[str, Any]:
    """Arguments of a Trainer of one update."""
    changes = {"gradient_accumulation_steps": accumulation, "max_steps": 1, "logging_steps": 1}
    is_seq2seq = name == "T5"
    return {
        "model": MODELS[name](),
        "args": toys.arguments(folder, **changes),
        "train_dataset": ROWS if is_seq2seq else toys.samples("causal", 32),
        "data_collator": toys.collate_seq2seq if is_seq2seq else toys.collate,
    }


def ours(name: str, folder: Path, accumulation: int) -> DynagroupTrainer:
    config = DynagroupConfig(budget=TokenBudget(400))
    return DynagroupTrainer(**settings(name, folder, accumulation), dynagroup=config)


@pytest.mark.parametrize(
    ("name", "accumulation", "is_said"),
    [("T5", 2, True), ("T5", 1, False), ("GPT-2", 2, False)],
)
def test_a_mean_that_the_plain_trainer_adds_up_is_said(
    name: str,
    accumulation: int,
    is_said: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ours(name, tmp_path, accumulation).train()
    said = [message for message in caplog.messages if "2 times as large" in message]
    assert len(said) == is_said


def test_the_plain_trainers_loss_is_as_many_times_as_large(tmp_path: Path) -> None:
    plain = Trainer(**settings("T5", tmp_path, 2))
    run = ours("T5", tmp_path, 2)
    plain.train()
    run.train()
    logged = run.state.log_history[0]["loss"]
    assert plain.state.log_history[0]["loss"] == pytest.approx(2 * logged, rel=0.05)
