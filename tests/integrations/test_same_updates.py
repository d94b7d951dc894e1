"""The law: updates made of the same samples are the same updates, whatever batches memory allows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("transformers")
from tests.integrations.jobs import MODELS, parameters, train, train_both  # noqa: E402
from tests.torchrun import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("kind", ["causal", "seq2seq", "classifier"])
def test_parameters_agree_after_twenty_updates(kind, max_grad_norm, tmp_path):
    changes = {"exact_loss": kind != "classifier", "max_grad_norm": max_grad_norm}
    (fixed, fixed_logs), (ours, our_logs) = train_both(kind, tmp_path, changes)
    assert (fixed - ours).abs().max() < 1e-8
    assert our_logs[0]["loss"] == pytest.approx(fixed_logs[0]["loss"], rel=1e-5)
    assert our_logs[-2]["epoch"] == fixed_logs[-2]["epoch"]
    start, _ = train(kind, tmp_path, True, {**changes, "learning_rate": 0.0})
    assert (ours - start).abs().max() > 1e-2, "nothing was trained"


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_parameters_agree_with_the_library_loss(kind, tmp_path):
    changes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1} if kind == "seq2seq" else {}
    (fixed, _), (ours, _) = train_both(kind, tmp_path, changes)
    assert (fixed - ours).abs().max() < 1e-5


CASES = list(product(["causal", "seq2seq", "classifier"], [0.0, 0.3]))


def all_cases(folder):
    """Parameters of fixed batches and of batches that fit, for each case; all in one start of the ranks."""
    found = {}
    for kind, max_grad_norm in CASES:
        exact = {"exact_loss": kind != "classifier", "max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 2}
        runs = train_both(kind, f"{folder}/{kind}", exact)
        found[kind, max_grad_norm] = [parameters for parameters, _ in runs]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(2, all_cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "max_grad_norm"), CASES)
def test_parameters_agree_on_two_ranks(ranks, kind, max_grad_norm):
    for found in ranks:
        fixed, ours = found[kind, max_grad_norm]
        assert (fixed - ours).abs().max() < 1e-8
        assert (ours - found[kind, 0.3 - max_grad_norm][1]).abs().max() > 1e-4, "clipping changes what is learned"
        start = parameters(MODELS[kind]())
        assert (ours - start).abs().max() > 1e-2, "nothing was trained"
    assert torch.equal(ranks[0][kind, max_grad_norm][1], ranks[1][kind, max_grad_norm][1]), "the ranks part"
