"""The law: updates made of the same samples are the same updates, whatever batches memory allows."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from tests.integrations.jobs import MODELS, parameters, train, train_both  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("kind", ["causal", "seq2seq", "classifier"])
def test_parameters_agree_after_eight_updates(kind, tmp_path):
    """Clipped and not; beyond an epoch of six."""
    found = {}
    for max_grad_norm in (0.0, 0.3):
        changes = {
            "exact_loss": kind != "classifier",
            "max_grad_norm": max_grad_norm,
            "max_steps": 8,
            "logging_steps": 4,
        }
        (fixed, fixed_logs), (ours, our_logs) = train_both(kind, tmp_path, changes)
        assert (fixed - ours).abs().max() < 1e-8
        assert our_logs[0]["loss"] == pytest.approx(fixed_logs[0]["loss"], rel=1e-5)
        assert our_logs[-2]["epoch"] == fixed_logs[-2]["epoch"]
        found[max_grad_norm] = ours
    assert (found[0.0] - parameters(MODELS[kind]())).abs().max() > 1e-2, "nothing was trained"
    assert (found[0.0] - found[0.3]).abs().max() > 1e-4, "clipping changes what is learned"


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_parameters_agree_with_the_library_loss(kind, tmp_path):
    changes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1} if kind == "seq2seq" else {}
    (fixed, _), (ours, _) = train_both(kind, tmp_path, {**changes, "max_steps": 6})
    assert (fixed - ours).abs().max() < 1e-5


def test_online_updates_are_the_same_updates(tmp_path):
    changes = {"exact_loss": True, "max_steps": 8}
    online = {"config": {"mode": "online", "lengths": None}, "dataloader_num_workers": 1}
    fixed, _ = train("causal", tmp_path, False, dict(changes))
    ours, logs = train("causal", tmp_path, True, {**changes, **online, "logging_steps": 5})
    assert (fixed - ours).abs().max() < 1e-8
    assert logs[-2]["train_coverage"] == pytest.approx(5 / 6)
