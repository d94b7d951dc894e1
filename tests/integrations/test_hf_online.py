"""The Trainer adapter with samples measured after processing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from dynagroup import ConfigError  # noqa: E402
from dynagroup.schedule import doubling  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import parameters, train, trainer  # noqa: E402
from tests.integrations.ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONLINE = {"mode": "online", "lengths": None}


def test_online_updates_are_the_same_updates(tmp_path):
    changes = {"exact_loss": True, "max_steps": 8}
    fixed, _ = train("causal", tmp_path, False, dict(changes))
    ours, logs = train("causal", tmp_path, True, {**changes, "config": ONLINE, "dataloader_num_workers": 1})
    assert (fixed - ours).abs().max() < 1e-8
    assert logs[-2]["train_coverage"] == pytest.approx(5 / 6)


def test_an_online_run_resumes_exactly_within_an_epoch(tmp_path):
    def run(folder, resume=None):
        found = trainer(
            "causal",
            tmp_path / folder,
            fits=True,
            exact_loss=True,
            max_steps=10,
            save_strategy="steps",
            save_steps=4,
            config=ONLINE,
        )
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run("whole")
    for step in (4, 8):
        resumed = run("resumed", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert torch.equal(parameters(resumed.model), parameters(whole.model))
        assert resumed.state.epoch == whole.state.epoch


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from toys.samples("causal", 40)


def test_a_stream_needs_only_max_steps(tmp_path):
    run = trainer(
        "causal", tmp_path, fits=True, max_steps=4, config={**ONLINE, "updates": "free"}, gradient_accumulation_steps=1
    )
    run.train_dataset = Stream()
    run.train()
    assert run.state.global_step == 4


def test_schedules_are_refused_online(tmp_path):
    run = trainer("causal", tmp_path, fits=True, config={**ONLINE, "samples_per_update": doubling(8, milestones=(2,))})
    with pytest.raises(ConfigError, match="needs mode='offline'"):
        run.train()


def both_online(folder):
    changes = {"exact_loss": True, "max_steps": 8, "gradient_accumulation_steps": 2}
    fixed, _ = train("causal", f"{folder}/fixed", False, dict(changes))
    ours, _ = train("causal", f"{folder}/ours", True, {**changes, "config": ONLINE})
    return fixed, ours


@pytest.mark.slow
def test_online_updates_are_the_same_on_two_ranks(tmp_path):
    for fixed, ours in on_ranks(2, both_online, tmp_path, tmp_path):
        assert (fixed - ours).abs().max() < 1e-8
