"""The Trainer adapter on two real ranks: checkpoints, memory that runs out, idle steps, learning rates."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
from dynagroup import TokenBudget  # noqa: E402
from dynagroup.update.schedule import doubling  # noqa: E402
from tests.allocator import Allocator  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import MODELS, parameters, train, train_both, trained_on, trainer  # noqa: E402
from tests.integrations.test_hf_evaluation import predicted, same  # noqa: E402
from tests.packed import training  # noqa: E402
from tests.torchrun import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONLINE = {"mode": "online", "lengths": None}
MODES: list[dict[str, Any]] = [{}, ONLINE]
UPDATES_AN_EPOCH, SAVED, LAST = 6, 8, 10  # the checkpoint lies within epoch 1


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def resumed_and_whole(folder: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each mode, the parameters of a run that was not interrupted and of one that was."""

    def run(config: dict[str, Any], name: str, resume: str | None = None) -> torch.Tensor:
        found = trainer(
            "causal", f"{folder}/{name}", fits=True, exact_loss=True, model=toys.with_dropout(toys.causal_lm()), config=config,
            gradient_accumulation_steps=2, max_steps=LAST, save_strategy="steps", save_steps=SAVED,
        )  # fmt: skip
        found.data_collator = toys.collate_noisily
        found.train(resume_from_checkpoint=resume)
        assert (found.update_loader.num_updates_in(0), found.state.global_step) == (UPDATES_AN_EPOCH, LAST)
        return parameters(found.model)

    pairs = []
    for number, config in enumerate(MODES):
        whole = run(config, f"whole{number}")
        pairs.append((whole, run(config, f"resumed{number}", f"{folder}/whole{number}/checkpoint-{SAVED}")))
    return pairs


NEVER = float("inf")
PLACES = ("in_forward", "in_backward")


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

    found = []
    for config in MODES:
        untroubled, _ = run(config, None)
        found += [(untroubled, *run(config, place)) for place in PLACES]
    return found


def learning_rates(folder: Any) -> list[list[float]]:
    """Of each update, for a Trainer of fixed batches and one of batches that fit."""
    rates = []
    for fits in (False, True):
        run = trainer(
            "causal", f"{folder}/rates", fits=fits, max_steps=LAST, logging_steps=1, gradient_accumulation_steps=2
        )
        run.train()
        rates.append([entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry])
    return rates


STRATEGIES: dict[str, dict[str, Any]] = {
    "upstream": {"fits": False, "train_sampling_strategy": "batch_rebalance"},
    "offline": {"fits": True},
    "online": {"fits": True, "config": ONLINE},
}


def samples_resumed(folder: Any, settings: dict[str, Any]) -> list[dict[int, list[int]]]:
    """This rank's samples of each update, of a run that was not interrupted and of one that was."""
    runs = []
    for name, resume in (("whole", None), ("resumed", f"{folder}/whole/checkpoint-{SAVED}")):
        run = trainer(
            "causal", f"{folder}/{name}", gradient_accumulation_steps=2, max_steps=2 * UPDATES_AN_EPOCH,
            save_strategy="steps", save_steps=SAVED, **settings,
        )  # fmt: skip
        runs.append(trained_on(run, toys.samples("causal", 96)))
        run.train(resume_from_checkpoint=resume)
    return runs


def with_idle_steps(folder: Any) -> dict[Any, tuple[torch.Tensor, int]]:
    """Parameters, and steps on which this rank had nothing to run: epochs end with three samples, each alone."""
    found = {}
    for kind in ("causal", "classifier"):
        for number, mode in enumerate(MODES):
            run = trainer(
                kind, f"{folder}/idle", fits=True, exact_loss=kind == "causal", count=19, max_steps=-1, num_train_epochs=2,
                per_device_train_batch_size=4 // world_size(), gradient_accumulation_steps=1,
                train_sampling_strategy="sequential", config={**mode, "budget": TokenBudget(160, max_samples=1)},
            )  # fmt: skip
            run.train()
            found[kind, number] = parameters(run.model), run.update_loader.stats.idle_steps
    return found


CASES = list(product(["causal", "seq2seq", "classifier"], [0.0, 0.3]))


def agreeing(folder: Any) -> dict[Any, list[torch.Tensor]]:
    """Parameters of fixed batches and of batches that fit: planned, each kind clipped and not; online; and two schedules."""
    found: dict[Any, list[torch.Tensor]] = {}
    common: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 10}
    for kind, max_grad_norm in CASES:
        settings = {**common, "exact_loss": kind != "classifier", "max_grad_norm": max_grad_norm}
        found[kind, max_grad_norm] = [found for found, _ in train_both(kind, f"{folder}/{kind}", settings)]
    common["exact_loss"] = True
    fixed, _ = train("causal", f"{folder}/fixed", False, dict(common))
    found["online"] = [fixed, train("causal", f"{folder}/online", True, {**common, "config": ONLINE})[0]]
    configs = [{**mode, "samples_per_update": doubling(7, milestones=(2, 5))} for mode in MODES]
    found["scheduled"] = [train("causal", f"{folder}/s", True, {**common, "config": config})[0] for config in configs]
    found["packed"] = [found for found, _ in training.trained_both(folder)]
    return found


LIMITS = {"one": [NEVER, 90.0], "both": [60.0, 60.0]}
"""Tokens that each rank's memory holds, by which ranks run out of it. What one learns, both then avoid."""


def everything(folder: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # the libraries' own, in a process that is not pytest's
    found: dict[str, Any] = {
        "resumed": resumed_and_whole(folder),
        "rates": learning_rates(folder),
        "idle": with_idle_steps(folder),
        "agreeing": agreeing(folder),
        "predicted": predicted(folder),
    }
    for name, settings in STRATEGIES.items():
        found[name] = samples_resumed(f"{folder}/{name}", settings)
    return found | {name: with_and_without_failures(folder, limits) for name, limits in LIMITS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(2, everything, folder)  # once for all tests: to start ranks takes longer than to train


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "online", "scheduled", "packed"])
def test_parameters_agree_on_two_ranks(ranks, case):
    for rank in ranks:
        fixed, ours = rank["agreeing"][case]
        assert (fixed - ours).abs().max() < 1e-8
        if isinstance(case, tuple):
            kind, max_grad_norm = case
            assert (ours - rank["agreeing"][kind, 0.3 - max_grad_norm][1]).abs().max() > 1e-4, (
                "clipping changes what is learned"
            )
            assert (ours - parameters(MODELS[kind]())).abs().max() > 1e-2, "nothing was trained"
    assert torch.equal(*(rank["agreeing"][case][1] for rank in ranks)), "the ranks part"


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(ranks, tmp_path):
    alone = predicted(tmp_path)
    for rank in ranks:
        for (metrics, predictions, labels), (expected, wanted, targets) in zip(rank["predicted"], alone, strict=True):
            assert same(metrics, expected)
            assert (labels == targets).all()
            assert abs(predictions - wanted)[labels != -100].max() < 1e-6


@pytest.mark.slow
def test_two_ranks_resume_within_the_second_epoch(ranks):
    for first, second in zip(*(rank["resumed"] for rank in ranks), strict=True):
        assert torch.equal(*first)
        assert torch.equal(*second)
        assert torch.equal(first[0], second[0]), "the ranks part"


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_resume_with_the_samples_that_remained(ranks, name):
    """FACTS: accelerate's loader that skips hides the sampler from set_epoch: upstream, the end of epoch 0 comes again. When
    that half fails, upstream has changed."""

    def samples(run: int, updates: range) -> list[int]:
        return sorted(i for rank in ranks for update in updates for i in rank[name][run].get(update, ()))

    ends = [range(SAVED - UPDATES_AN_EPOCH, UPDATES_AN_EPOCH), range(SAVED, 2 * UPDATES_AN_EPOCH)]
    assert (
        samples(0, range(UPDATES_AN_EPOCH))
        == samples(0, range(UPDATES_AN_EPOCH, 2 * UPDATES_AN_EPOCH))
        == list(range(96))
    )
    first, second = (samples(0, updates) for updates in ends)
    assert first != second
    assert samples(1, ends[1]) == (first if name == "upstream" else second)


@pytest.mark.slow
def test_steps_without_samples_change_no_update(ranks, tmp_path):
    for case, (alone, _) in with_idle_steps(tmp_path).items():
        assert sum(rank["idle"][case][1] for rank in ranks) > 0, case
        for rank in ranks:
            assert (rank["idle"][case][0] - alone).abs().max() < 1e-8, case


@pytest.mark.slow
def test_the_learning_rate_counts_updates_on_two_ranks(ranks):
    """FACTS: a scheduler that Accelerate prepares steps once for each rank; the Trainer leaves its own unprepared."""
    intended = [1e-2 * (1 - k / LAST) for k in range(LAST)]
    for rank in ranks:
        for rates in rank["rates"]:
            assert rates == pytest.approx(intended)


def test_running_out_of_memory_changes_no_update(tmp_path):
    for untroubled, parts, failures in with_and_without_failures(tmp_path, [90.0]):
        assert failures > 0
        assert (untroubled - parts).abs().max() < 1e-8


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
