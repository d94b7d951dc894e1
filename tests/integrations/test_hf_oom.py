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


@pytest.mark.parametrize(("kind", "weigh"), [("causal", "auto"), ("causal", "samples"), ("classifier", "auto")])
def test_batches_that_run_out_of_memory_are_repeated_in_parts(kind, weigh, tmp_path):
    """A loss that is divided by the update's items needs no weights, whatever ``weigh`` says of losses that are means."""

    def run(folder, config, limit=None):
        changes = {"exact_loss": kind == "causal", "max_steps": 2, "logging_steps": 2}
        found = trainer(kind, tmp_path / folder, fits=True, config={"weigh": weigh, **config}, **changes)
        if limit is not None:
            forward = found.model.forward

            def tight(*args, **kwargs):
                if kwargs["input_ids"].numel() > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")
                return forward(*args, **kwargs)

            found.model.forward = tight
        found.train()
        return parameters(found.model), found.state.log_history[0]

    plain, _ = run("plain", {})
    whole, logs = run("whole", {"out_of_memory": "retry"})
    split, split_logs = run("split", {"out_of_memory": "retry"}, limit=120)
    assert (plain - whole).abs().max() < 1e-12
    assert (plain - split).abs().max() < 1e-8
    assert logs["oom_retries"] == 0 < split_logs["oom_retries"]
    assert split_logs["loss"] == pytest.approx(logs["loss"], rel=1e-6)


@pytest.mark.parametrize("mode", ["offline", "online", "free"])
def test_later_epochs_are_planned_by_what_failed_also_after_resuming(mode, tmp_path):
    count = 96 if mode == "free" else 48

    def run(folder, resume=None):
        changes = {
            "exact_loss": True,
            "max_steps": -1,
            "num_train_epochs": 2,
            "count": count,
            "save_strategy": "steps",
            "save_steps": 1,
        }
        config: dict[str, Any] = {"out_of_memory": "retry"}
        config |= {"updates": "free"} if mode == "free" else {"mode": mode}
        config |= {"lengths": None} if mode == "online" else {}
        found = trainer("causal", tmp_path / folder, fits=True, config=config, logging_steps=1, **changes)
        assert found.model is not None
        forward = found.model.forward

        def tight(*args, **kwargs):
            if kwargs["input_ids"].numel() > 137:
                raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")
            return forward(*args, **kwargs)

        found.model.forward = tight
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run("whole")
    retries = [(row["epoch"], row["oom_retries"]) for row in whole.state.log_history if "oom_retries" in row]
    assert sum(count for epoch, count in retries if epoch <= 1) > 0
    assert not any(count for epoch, count in retries if epoch > 1)
    assert whole.state.epoch == 2
    assert whole.update_loader.stats.samples == 2 * count
    assert "cost <=" in whole.update_loader.budget.fingerprint
    last = whole.state.global_step
    for step in (1, last - 1):
        resumed = run(f"from{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert (parameters(resumed.model) - parameters(whole.model)).abs().max() < 1e-10
        assert resumed.update_loader.budget.fingerprint == whole.update_loader.budget.fingerprint


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
        found.train()
        limit.limit = 120 if config else 10**6
        found.train()
        limit.limit = 10**6
        return parameters(found.model)

    whole, split = twice("whole", {}), twice("split", {"out_of_memory": "retry"})
    assert limit.failures
    assert (whole - split).abs().max() < 1e-8
