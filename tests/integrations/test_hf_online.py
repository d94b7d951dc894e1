"""The Trainer adapter with samples measured after processing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import TrainerCallback  # noqa: E402

from dynagroup.update.schedule import doubling  # noqa: E402
from tests.integrations.jobs import parameters, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONLINE = {"mode": "online", "lengths": None}


def test_an_online_run_resumes_exactly_within_an_epoch(tmp_path):
    def run(folder, resume=None):
        found = trainer(
            "causal",
            tmp_path / folder,
            fits=True,
            exact_loss=True,
            max_steps=5,
            count=48,
            save_strategy="steps",
            save_steps=2,
            config=ONLINE,
        )
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run("whole")
    for step in (2, 4):
        resumed = run("resumed", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert torch.equal(parameters(resumed.model), parameters(whole.model))
        assert resumed.state.epoch == whole.state.epoch


def test_an_epoch_of_which_nothing_remains_does_not_end_the_training(tmp_path):
    """A loader may find out only after resuming that an epoch was over; the Trainer would stop without a word."""
    common = {"exact_loss": True, "config": ONLINE, "save_strategy": "steps", "save_steps": 2}
    trainer("causal", tmp_path, fits=True, max_steps=2, **common).train()
    run = trainer("causal", tmp_path, fits=True, max_steps=8, **common)
    loader_of = run.get_train_dataloader

    def with_an_empty_epoch():
        items = loader_of()
        updates, calls = items.loader.updates, []
        items.loader.updates = lambda: updates() if calls else iter(calls.append(1) or ())
        return items

    run.get_train_dataloader = with_an_empty_epoch
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert run.state.global_step == 8


SCHEDULE = doubling(7, milestones=(2, 5))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_schedule_makes_the_same_updates_as_offline(drop_last, tmp_path):
    changes = {
        "exact_loss": True,
        "max_steps": -1,
        "num_train_epochs": 2,
        "dataloader_drop_last": drop_last,
        "config": {"samples_per_update": SCHEDULE, "learning_rate_scaling": "sqrt"},
    }
    runs = []
    for mode, workers in (("offline", 0), ("online", 1)):
        config = {**changes["config"], "mode": mode, **({"lengths": None} if workers else {})}
        runs.append(
            trainer(
                "causal", tmp_path / mode, fits=True, **{**changes, "config": config}, dataloader_num_workers=workers
            )
        )
        runs[-1].train()
    offline, online = runs
    assert (parameters(offline.model) - parameters(online.model)).abs().max() < 1e-8
    assert online.state.global_step == online.state.max_steps == offline.state.global_step
    assert online.update_loader.stats.samples == (168 if drop_last else 192)
    ends = [[row.get(k) for row in run.state.log_history] for run in runs for k in ("epoch", "learning_rate")]
    assert ends[:2] == ends[2:]


def test_a_scheduled_run_resumes_within_an_epoch_and_with_its_sizes_changed(tmp_path):
    def run(folder, resume=None):
        found = trainer(
            "causal", tmp_path / folder, fits=True, exact_loss=True, max_steps=-1, num_train_epochs=2, save_steps=4,
            save_strategy="steps", callbacks=[Grow()], config={**ONLINE, "samples_per_update": doubling(6, milestones=(2,))},
        )  # fmt: skip
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run("whole")
    assert whole.update_loader is not None
    assert whole.update_loader.num_changes == 1
    assert whole.state.global_step == whole.state.max_steps == 12
    for step in (4, 8):
        resumed = run("resumed", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert torch.equal(parameters(resumed.model), parameters(whole.model))
        assert resumed.state.global_step == 12


class Grow(TrainerCallback):
    def on_step_end(self, args, state, control, train_dataloader: Any = None, **kwargs):
        if state.global_step == 3:
            assert train_dataloader.set_samples_per_update(20) == 3
