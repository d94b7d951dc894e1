"""Packed batches train what padded fixed batches train: the same samples an update, the same losses and parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from dynagroup import ConfigError  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import trainer  # noqa: E402
from tests.packed import training  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(
    ("kind", "attention"), [("planned", "eager"), ("planned", "sdpa"), ("planned", "varlen"), ("online", "sdpa")]
)
def test_a_plain_loop_on_packed_batches_makes_the_updates_of_fixed_ones(kind: str, attention: str) -> None:
    ours, losses, updates, padding = training.packed(kind, attention)
    assert sorted(i for update in updates for i in update) == list(range(48))
    assert [len(update) for update in updates] == [16, 16, 16]
    theirs, fixed_losses = training.fixed(updates, "sdpa")
    assert losses == pytest.approx(fixed_losses, rel=1e-9)
    assert (ours - theirs).abs().max() < 1e-8
    assert padding == 0


def test_the_trainer_on_packed_batches_ends_with_the_parameters_of_fixed_ones(tmp_path) -> None:
    (theirs, fixed_logs), (ours, logs) = training.trained_both(tmp_path)
    assert (ours - theirs).abs().max() < 1e-8
    losses, fixed_losses = ([float(e["loss"]) for e in log if "loss" in e] for log in (logs, fixed_logs))
    assert len(losses) == 1
    assert losses == pytest.approx(fixed_losses, abs=1e-8)
    assert float(next(entry for entry in logs if "padding" in entry)["padding"]) == 0


def packed_trainer(folder: Any, **changes: Any) -> Any:
    run = trainer(
        "causal", folder, fits=True, max_steps=2, model=training.llama("sdpa"), config={"budget": training.BUDGET}
    )
    run.data_collator = training.FLAT
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def test_the_trainer_asks_a_model_before_it_trains_on_packed_samples(tmp_path) -> None:
    """With a cache transformers builds no mask: samples would see each other, and the loss would look healthy."""
    run = packed_trainer(tmp_path)
    run.model.config.use_cache = True
    before = training.parameters(run.model)
    with pytest.raises(ConfigError, match=r"answers otherwise on packed samples .* set model.config.use_cache = False"):
        run.train()
    assert run.state.global_step == 0
    assert torch.equal(training.parameters(run.model), before)
    with pytest.raises(ConfigError, match=r"`collate_fn` does not pack: .* \(2, 5\); use the padded layout"):
        packed_trainer(tmp_path, data_collator=toys.collate).train()


def test_what_the_trainer_cannot_ask_is_warned_of_and_trains(tmp_path) -> None:
    def picky(rows: list[dict[str, Any]]) -> dict[str, Any]:
        assert len(rows[0]["input_ids"]) != 5, "another kind of sample"
        return training.FLAT(rows)

    run = packed_trainer(tmp_path, data_collator=picky)
    run.train_dataset = [row for row in toys.samples("causal", 64) if len(row["input_ids"]) != 5]
    run.dynagroup = replace(run.dynagroup, lengths=toys.lengths(run.train_dataset))
    with pytest.warns(UserWarning, match=r"could not be checked; try .*check_packing.*AssertionError: another kind"):
        run.train()
    assert run.state.global_step == 2
