"""Packed batches train what padded fixed batches train: the same samples an update, the same losses and parameters."""

from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import ConfigError, OnlineDataLoader, TokenBudget
from dynagroup.testing import run_ranks
from tests.integrations import toys
from tests.integrations.jobs import parameters, trainer
from tests.online.helpers import Tokens
from tests.packed import training
from tests.plan.test_packed import uneven, window_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(("kind", "attention"), [("planned", "eager"), ("planned", "varlen"), ("online", "sdpa")])
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
    [fixed_loss], [logged] = ([entry for entry in log if "loss" in entry] for log in (fixed_logs, logs))
    assert logged["loss"] == pytest.approx(fixed_loss["loss"], abs=1e-8)
    assert logged["padding"] == 0


def packed_trainer(folder: Any, collate: Any = training.FLAT, **config: Any) -> Any:
    how = {"max_steps": 2, "model": training.llama("sdpa"), "config": {"budget": training.BUDGET, **config}}
    run = trainer("causal", folder, fits=True, **how)
    run.data_collator = collate
    return run


def test_the_trainer_asks_a_model_before_it_trains_on_packed_samples(tmp_path) -> None:
    """With a cache transformers builds no mask: samples would see each other, and the loss would look healthy."""
    run = packed_trainer(tmp_path)
    run.model.config.use_cache = True
    before = parameters(run.model)
    with pytest.raises(ConfigError, match=r"answers otherwise on packed samples .* set model.config.use_cache = False"):
        run.train()
    assert run.state.global_step == 0
    assert torch.equal(parameters(run.model), before)
    with pytest.raises(ConfigError, match=r"`collate_fn` does not pack: .* \(2, 5\); use packing_collator"):
        packed_trainer(tmp_path, toys.collate).train()


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 256}], ids=["free", "updates"])
def test_rows_of_learned_epochs_are_equal_work_on_eight_ranks(options: dict[str, Any]) -> None:
    """Law 9 where lengths were seen in the first epoch. A batch of one long sample and one of many short ones may hold as
    many tokens: they must not change places on one rank alone."""
    tokens, cap = window_of("python_files", 1024), 65_536
    budget = TokenBudget(cap, layout="packed")

    def run(world: Any) -> list[list[np.ndarray]]:
        loader = OnlineDataLoader(
            Tokens(tokens), budget, collate_fn=len, shuffle=True, window=128, weigh="samples", world=world, **options
        )
        return [[np.asarray(step.indices) for step in loader] for _ in range(2)]

    rows = zip(*(epochs[1] for epochs in run_ranks(8, run)), strict=True)
    assert not uneven([list(row) for row in rows], tokens, cap, few=True)
