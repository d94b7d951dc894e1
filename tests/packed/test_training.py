"""Packed batches train what padded fixed batches train: the same samples an update, the same losses and parameters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from tests.integrations.ranks import on_ranks  # noqa: E402
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


def test_two_ranks_on_packed_batches_make_the_updates_of_fixed_ones(tmp_path) -> None:
    for (ours, losses, updates, _), (others, *_rest) in zip(
        *on_ranks(2, training.packed_on_ranks, tmp_path, ["planned", "online"]), strict=True
    ):
        assert torch.equal(ours, others)
        theirs, fixed_losses = training.fixed(updates, "sdpa")
        assert losses == pytest.approx(fixed_losses, rel=1e-9)
        assert (ours - theirs).abs().max() < 1e-8


def test_the_trainer_on_packed_batches_ends_with_the_parameters_of_fixed_ones(tmp_path) -> None:
    (theirs, _), (ours, logs) = training.trained_both(tmp_path)
    assert (ours - theirs).abs().max() < 1e-8
    assert float(next(entry for entry in logs if "padding" in entry)["padding"]) == 0


@pytest.mark.slow
def test_the_trainer_on_two_ranks_too(tmp_path) -> None:
    for (theirs, _), (ours, _logs) in on_ranks(2, training.trained_both, tmp_path, str(tmp_path)):
        assert (ours - theirs).abs().max() < 1e-8
