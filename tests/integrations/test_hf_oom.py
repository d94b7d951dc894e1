"""The Trainer adapter goes on when memory runs out, with the gradients it would have had."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from tests.integrations.jobs import parameters, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("kind", ["causal", "classifier"])
def test_batches_that_run_out_of_memory_are_repeated_in_parts(kind, tmp_path):
    def run(folder, config, limit=None):
        changes = {"exact_loss": kind == "causal", "max_steps": 4, "logging_steps": 4}
        found = trainer(kind, tmp_path / folder, fits=True, config=config, **changes)
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
