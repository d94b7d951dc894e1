"""The example programs run, and sharded or replicated ranks learn what one process learns."""

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchrun import ROOT, on_ranks, started


def losses_of(script: str, ranks: int) -> list[float]:
    lines = started(ROOT / script, ranks=ranks).strip().splitlines()
    return list(map(float, lines[-1].split()))


def example(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return runpy.run_path(str(ROOT / "examples" / name))


def alone() -> list[float]:
    return example("train_plain.py")["main"]()


def test_the_plain_loop_learns():
    losses = alone()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_plain.py", "train_fsdp2.py"])
def test_two_ranks_learn_what_one_process_learns(script):
    assert losses_of(f"examples/{script}", 2) == pytest.approx(alone(), abs=2e-3)


def test_images_fit_both_budgets_and_are_learned_from():
    pytest.importorskip("PIL")
    losses, shapes = example("train_images.py")["main"](epochs=2, num_workers=1)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert max(tokens for tokens, _ in shapes) <= 400
    assert 250 < max(patches for _, patches in shapes) <= 300


def two_towers() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    return example("train_two_towers.py")["train"]()


@pytest.mark.slow
def test_towers_that_some_batches_skip_are_trained_by_two_ranks_as_by_one_process():
    [(losses, weights)] = on_ranks(1, two_towers)
    assert losses[-1] < 0.9 * losses[0]
    for losses_of_rank, weights_of_rank in on_ranks(2, two_towers):
        assert losses_of_rank == pytest.approx(losses, abs=1e-12)
        torch.testing.assert_close(weights_of_rank, weights, rtol=1e-9, atol=1e-12)


def test_graphs_fit_both_budgets_and_are_learned_from():
    pytest.importorskip(
        "torch_geometric", reason="bash scripts/test_graphs.sh makes an environment with it"
    )
    program = example("train_graphs.py")
    losses, batches = program["main"](epochs=2)
    assert losses[-1] < losses[0]
    num_nodes, num_edges = zip(*batches, strict=True)
    graphs = map(program["graph"], range(240))
    assert sum(num_nodes) == 2 * sum(graph.num_nodes for graph in graphs)
    assert 290 < max(num_nodes) <= 300
    assert 1490 < max(num_edges) <= 1500


def test_clips_of_one_bucket_share_a_batch_within_the_pixels_and_are_learned_from():
    program = example("train_clips.py")
    losses, shapes = program["main"](epochs=3)
    assert losses[-1] < 0.7 * losses[0]
    assert {shape[2:] for shape in shapes} == set(program["BUCKETS"])
    num_pixels = [torch.Size(shape).numel() for shape in shapes]
    assert 10_000 < max(num_pixels) <= 12_000
    assert sum(shape[0] for shape in shapes) == 3 * 96


def test_a_vision_language_batch_has_an_image_for_every_sample_or_for_none():
    pytest.importorskip("PIL")
    losses, steps = example("train_vision_language.py")["main"](epochs=2)
    assert losses[-1] < losses[0]
    assert {step.kind for step in steps} == {"image", "text"}
    for step in steps:
        num_images = len(step.batch.get("image_grid_thw", ()))
        assert num_images == (len(step.indices) if step.kind == "image" else 0)
    num_tokens = [step.batch["input_ids"].numel() for step in steps]
    num_patches = [len(step.batch.get("pixel_values", ())) for step in steps]
    assert 180 < max(num_tokens) <= 200
    assert 70 < max(num_patches) <= 80


def trained(folder: Path, *pretended: float) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return example("restart_fsdp2.py")["main"](folder, *pretended)


@pytest.mark.slow
def test_a_run_that_ran_out_of_memory_goes_on_with_smaller_batches_to_the_same_parameters(
    tmp_path: Path,
) -> None:
    whole, _ = on_ranks(2, trained, tmp_path / "once")
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        on_ranks(2, trained, tmp_path / "again", 245)
    assert (tmp_path / "again" / "last.json").exists(), "it had not even saved"
    for result in on_ranks(2, trained, tmp_path / "again"):
        assert result["limit"] <= 0.9 * 256
        torch.testing.assert_close(result["weights"], whole["weights"], rtol=1e-9, atol=1e-12)
    seen: Counter[str] = Counter()
    for path in tmp_path.glob("again/seen-*.txt"):
        seen.update(path.read_text().split())
    assert seen == Counter(list(map(str, range(128))) * 2)


def test_a_mixture_follows_the_loss_of_each_source():
    counts = example("train_mixture.py")["main"]()
    assert len(counts) == 40
    assert all(sum(of_update.values()) == 16 for of_update in counts)
    assert counts[:5] == [{"easy": 10, "hard": 5, "rare": 1}] * 5
    assert counts[-1]["hard"] > 2 * counts[-1]["easy"]


def test_a_speech_model_learns_its_letters_with_little_padding():
    losses, padding = example("train_speech.py")["main"](epochs=7)
    assert losses[-1] < 0.2 * losses[0]
    assert padding < 0.1
