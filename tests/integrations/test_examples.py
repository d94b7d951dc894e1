"""The example programs run, and sharded or replicated ranks learn what one process learns."""

from __future__ import annotations

import runpy

import pytest
import torch

from tests.torchrun import ROOT, started


def losses_of(script: str, ranks: int) -> list[float]:
    return [float(word) for word in started(ROOT / script, ranks=ranks).strip().splitlines()[-1].split()]


def alone() -> list[float]:
    torch.set_num_threads(1)
    return runpy.run_path(str(ROOT / "examples" / "train_plain.py"))["main"]()


def test_the_plain_loop_learns():
    losses = alone()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_plain.py", "train_fsdp2.py"])
def test_two_ranks_learn_what_one_process_learns(script):
    assert losses_of(f"examples/{script}", 2) == pytest.approx(alone(), abs=2e-3)


def test_images_fit_both_budgets_and_are_learned_from():
    pytest.importorskip("PIL")
    torch.set_num_threads(1)
    losses, shapes = runpy.run_path(str(ROOT / "examples" / "train_images.py"))["main"](epochs=2, num_workers=1)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert max(tokens for tokens, _ in shapes) <= 400
    assert 250 < max(patches for _, patches in shapes) <= 300
