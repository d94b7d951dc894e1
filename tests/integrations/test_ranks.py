"""Trainer and Accelerate on two real ranks, at length: what one process learns. ``tests/test_ranks.py`` is the short start."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynagroup import TokenBudget
from tests.integrations import test_accelerate, toys
from tests.integrations.jobs import parameters, train, train_both, trainer
from tests.integrations.test_hf_losses import with_and_without_failures
from tests.torchrun import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONLINE = {"mode": "online", "lengths": None}
MODES: list[dict[str, Any]] = [{}, ONLINE]
COMMON: dict[str, Any] = {"exact_loss": True, "gradient_accumulation_steps": 2}
NEVER = float("inf")
LIMITS = {"one": [NEVER, 90.0], "both": [60.0, 60.0]}
"""Tokens that each rank's memory holds, by which ranks run out of it. What one learns, both then avoid."""


def resumed_and_whole(folder: Any, config: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters of a run that was not interrupted, and of one that was, within its second epoch of six updates."""
    found = []
    for name, resume in (("whole", None), ("resumed", f"{folder}/whole/checkpoint-8")):
        run = trainer(
            "causal", f"{folder}/{name}", fits=True, model=toys.with_dropout(toys.causal_lm()), config=config, **COMMON,
            max_steps=10, save_strategy="steps", save_steps=8,
        )  # fmt: skip
        run.data_collator = toys.collate_noisily
        run.train(resume_from_checkpoint=resume)
        found.append(parameters(run.model))
    return found


def with_idle_steps(folder: Any) -> dict[Any, tuple[torch.Tensor, int]]:
    """Parameters, and steps on which this rank had nothing to run: epochs end with three samples, each alone."""
    found, size = {}, dist.get_world_size() if dist.is_initialized() else 1
    for kind, config in (("causal", {}), ("classifier", ONLINE)):
        run = trainer(
            kind, f"{folder}/idle", fits=True, exact_loss=kind == "causal", count=19, max_steps=-1, num_train_epochs=2,
            per_device_train_batch_size=4 // size, gradient_accumulation_steps=1, train_sampling_strategy="sequential",
            config={**config, "budget": TokenBudget(160, max_samples=1)},
        )  # fmt: skip
        run.train()
        found[kind] = parameters(run.model), run.update_loader.stats.idle_steps
    return found


def agreeing(folder: Any) -> dict[str, list[torch.Tensor]]:
    """Parameters that are to be the same: of fixed batches and of batches that fit; of two ways to a schedule."""
    longer = {**COMMON, "max_steps": 8}
    schedule = {"samples_per_update": toys.doubling(7, 2, 5)}
    pairs = {
        "clipped": train_both("causal", f"{folder}/a", {**longer, "max_grad_norm": 0.3}),
        "seq2seq": train_both("seq2seq", f"{folder}/b", longer),
        "classifier": train_both("classifier", f"{folder}/c", {**longer, "exact_loss": False}),
        "online": [train("causal", f"{folder}/d", bool(c), {**longer, "config": c}) for c in MODES],
        "kinds": [
            train("causal", f"{folder}/f", True, {**longer, "config": c}) for c in ({}, {"kinds": [0, 1, 1] * 32})
        ],
        "scheduled": [train("causal", f"{folder}/e", True, {**longer, "config": {**c, **schedule}}) for c in MODES],
    }
    return {name: [found for found, _ in pair] for name, pair in pairs.items()}


def everything(folder: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {
        "agreeing": {**agreeing(folder), **test_accelerate.agreeing()},
        "resumed": [resumed_and_whole(f"{folder}/{number}", config) for number, config in enumerate(MODES)],
        "idle": with_idle_steps(folder),
        **{name: with_and_without_failures(folder, limits) for name, limits in LIMITS.items()},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(2, everything, tmp_path_factory.mktemp("ranks"))  # to start ranks takes longer than to train


@pytest.mark.slow
def test_parameters_agree_on_two_ranks(ranks):
    for name, pairs in ((name, [rank["agreeing"][name] for rank in ranks]) for name in ranks[0]["agreeing"]):
        for fixed, ours in pairs:
            assert (fixed - ours).abs().max() < 1e-8, name
        assert torch.equal(pairs[0][1], pairs[1][1]), f"{name}: the ranks part"
    for pair in (pair for rank in ranks for pair in rank["resumed"]):
        assert torch.equal(*pair)


@pytest.mark.slow
def test_steps_without_samples_change_no_update(ranks, tmp_path):
    for case, (alone, _) in with_idle_steps(tmp_path).items():
        assert sum(rank["idle"][case][1] for rank in ranks) > 0, case
        for rank in ranks:
            assert (rank["idle"][case][0] - alone).abs().max() < 1e-8, case


@pytest.mark.slow
@pytest.mark.parametrize("which", LIMITS)
def test_running_out_of_memory_on_two_ranks_changes_no_update(ranks, which):
    for case in zip(*(rank[which] for rank in ranks), strict=True):
        failures = [failed for _, _, failed in case]
        assert sum(failures) > 0
        assert which == "both" or failures[0] == 0
        for untroubled, parts, _ in case:
            assert (untroubled - parts).abs().max() < 1e-8
            assert torch.equal(parts, case[0][1]), "the ranks part"
