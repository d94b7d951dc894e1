"""The Trainer adapter goes on when memory runs out, with the gradients it would have had."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.allocator import Allocator  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import parameters, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONLINE = {"mode": "online", "lengths": None}


def with_and_without_failures(folder: Any, limits: list[float]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """For each mode and place: parameters without failures and with them, and how often this rank failed."""

    def run(config: dict[str, Any], place: str | None) -> tuple[torch.Tensor, int]:
        found = trainer(
            "causal", f"{folder}/run", fits=True, exact_loss=True, config={**config, "out_of_memory": "retry" if place else None},
            gradient_accumulation_steps=4 // len(limits), count=48, max_steps=4, max_grad_norm=0.3,
        )  # fmt: skip
        allocator = Allocator(limits[found.args.process_index])
        if place is not None:
            getattr(allocator, place)(found.model.transformer.h[0])
        found.train()
        return parameters(found.model), len(allocator.failures)

    return [
        (run(config, None)[0], *run(config, place))
        for config in ({}, ONLINE)
        for place in ("in_forward", "in_backward")
    ]


def test_running_out_of_memory_changes_no_update(tmp_path):
    for untroubled, parts, failures in with_and_without_failures(tmp_path, [90.0]):
        assert failures > 0
        assert (untroubled - parts).abs().max() < 1e-8


def tight(run: Any, limit: int) -> Any:
    forward = run.model.forward

    def tightly(*args, **kwargs):
        if kwargs["input_ids"].numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")
        return forward(*args, **kwargs)

    run.model.forward = tightly
    return run


@pytest.mark.parametrize(("kind", "weigh"), [("causal", "samples"), ("classifier", "auto")])
def test_batches_that_run_out_of_memory_are_repeated_in_parts(kind, weigh, tmp_path):
    """A loss that is divided by the update's items needs no weights, whatever ``weigh`` says of losses that are means."""

    def run(folder, config, limit=10**6):
        changes = {"exact_loss": kind == "causal", "max_steps": 2, "logging_steps": 2}
        found = tight(trainer(kind, tmp_path / folder, fits=True, config={"weigh": weigh, **config}, **changes), limit)
        found.train()
        return parameters(found.model), found.state.log_history[0]

    plain, _ = run("plain", {})
    whole, logs = run("whole", {"out_of_memory": "retry"})
    split, split_logs = run("split", {"out_of_memory": "retry"}, limit=120)
    assert (plain - whole).abs().max() < 1e-12
    assert (plain - split).abs().max() < 1e-8
    assert logs["oom_retries"] == 0 < split_logs["oom_retries"]
    assert split_logs["loss"] == pytest.approx(logs["loss"], rel=1e-6)


@pytest.mark.parametrize("config", [{}, ONLINE, {"updates": "free"}], ids=["offline", "online", "free"])
def test_later_epochs_are_planned_by_what_failed_also_after_resuming(config, tmp_path):
    count = 96 if "updates" in config else 48

    def run(folder, resume=None):
        changes = {"exact_loss": True, "max_steps": -1, "num_train_epochs": 2, "count": count, "logging_steps": 1}
        changes |= {"save_strategy": "steps", "save_steps": 1, "config": {"out_of_memory": "retry", **config}}
        found = tight(trainer("causal", tmp_path / folder, fits=True, **changes), 137)
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run("whole")
    retries = [(row["epoch"], row["oom_retries"]) for row in whole.state.log_history if "oom_retries" in row]
    assert sum(count for epoch, count in retries if epoch <= 1) > 0
    assert not any(count for epoch, count in retries if epoch > 1)
    assert (whole.state.epoch, whole.update_loader.stats.samples) == (2, 2 * count)
    learned = whole.update_loader.budget.fingerprint
    assert "cost <=" in learned
    for step in (1, whole.state.global_step - 1):
        resumed = run(f"from{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert (parameters(resumed.model) - parameters(whole.model)).abs().max() < 1e-10
        assert resumed.update_loader.budget.fingerprint == learned


def test_each_training_guards_the_model_that_it_trains(tmp_path):
    """``train()`` with ``model_init``, as a search of hyperparameters calls it, has a new model every time."""
    limit = Allocator(10**6)

    def new_model():
        model = toys.causal_lm()
        limit.in_backward(model.transformer.h[0])
        return model

    def twice(folder, config):
        found = trainer("causal", tmp_path / folder, fits=True, exact_loss=True, config=config, max_steps=2)
        found.model_init = new_model
        for limit.limit in (10**6, 120 if config else 10**6):
            found.train()
        return parameters(found.model)

    whole, split = twice("whole", {}), twice("split", {"out_of_memory": "retry"})
    assert limit.failures
    assert (whole - split).abs().max() < 1e-8
