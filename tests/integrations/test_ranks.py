"""Two real gloo ranks, started once, and once more for slow tests: they learn what one process learns."""

import contextlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dynagroup import (
    ConfigError,
    LengthAwareBatchSampler,
    OnlineDataLoader,
    PlannedDataLoader,
    ShapeLadder,
    TokenBudget,
)
from dynagroup.integrations.hf import DynagroupTrainer
from dynagroup.testing import assert_conserves
from tests.integrations import test_accelerate, test_hf_losses, test_hf_mixture, toys
from tests.integrations.test_hf_losses import with_and_without_failures
from tests.integrations.toys import parameters, train, train_both, trainer
from tests.packed import test_training as training
from tests.torchrun import on_ranks
from tests.update.test_filling import Model, Texts, collate

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LAST = 7


def shortly(folder: str) -> dict[str, Any]:
    """What one rank finds; accelerate first, which starts the process group."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {"accelerated": accelerated()}
    results["gradients"] = gradients()
    results["trainers"] = trainers(folder)
    results["planned"] = planned_together()
    return results


def planned_together() -> tuple[list[list[int]], list[list[int]]]:
    """Returns this rank's batches, and those of the plan that it makes alone."""
    lengths = np.random.default_rng(0).integers(1, 60, 2000).astype(np.int32)
    budget = TokenBudget(400)
    loader = PlannedDataLoader(range(2000), lengths, budget, samples_per_update=40, weigh="samples")
    plan = loader.plan_of(0)
    alone = [plan.batches[number].tolist() for number in plan.table[:, dist.get_rank()]]
    return [list(step.indices) for step in loader], alone


def test_real_ranks_share_the_planning(ranks: Any) -> None:
    for rank in ranks:
        batches, alone = rank["planned"]
        assert batches == alone


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return on_ranks(2, shortly, str(tmp_path_factory.mktemp("ranks")))


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sampler(**options: Any) -> LengthAwareBatchSampler:
    lengths = np.random.default_rng(0).lognormal(4, 1, 200).astype(np.int32).clip(max=512)
    return LengthAwareBatchSampler(lengths, TokenBudget(512), shuffle=True, **options)


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def accelerated() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes

    def loader_of(batches: Any) -> DataLoader[Any]:
        return DataLoader(range(200), batch_sampler=batches)  # type: ignore[arg-type]

    results: dict[str, Any] = {"own": batches_of(loader_of(sampler()))}
    loader = accelerator.prepare(loader_of(sampler(world_size=size)))
    results["length"] = len(loader)
    results["epochs"] = [batches_of(loader) for _ in range(2)]
    with pytest.raises(ConfigError, match="sharding them again"):
        batches_of(accelerator.prepare(loader_of(sampler())))
    # A framework that counts its epochs from 0 again after a restart must not lose the place.
    saved = sampler(world_size=size)
    batches_of(accelerator.prepare(loader_of(saved)))
    again = sampler(world_size=size)
    again.load_state_dict(saved.state_dict(num_steps=len(saved) // size))
    results["resumed"] = batches_of(accelerator.prepare(loader_of(again)))
    return results


def of_both(ranks: Any, name: str) -> list[Any]:
    return [rank["accelerated"][name] for rank in ranks]


@pytest.mark.parametrize("name", ["own", "resumed"])
def test_ranks_have_every_sample_once_also_where_accelerate_shards(ranks: Any, name: str) -> None:
    """Sharded a second time, each rank would see only every other of its own batches."""
    first, second = of_both(ranks, name)
    assert_conserves(first + second, range(200))


def test_epochs_that_accelerate_shards_differ_and_have_as_many_steps_everywhere(ranks: Any) -> None:
    """The epoch moves on, though nobody could say set_epoch. Facts read from accelerate 1.15."""
    first, second = of_both(ranks, "epochs")
    for ours, theirs in zip(first, second, strict=True):
        assert len(ours) == len(theirs)
        assert_conserves(ours + theirs, range(200))
    assert of_both(ranks, "length") == [len(first[0]), len(second[0])]
    assert first[0] != first[1]


def test_a_sampler_that_accelerate_shards_resumes_in_its_second_epoch(ranks: Any) -> None:
    for resumed, epochs in zip(of_both(ranks, "resumed"), of_both(ranks, "epochs"), strict=True):
        assert resumed == epochs[1]


def relative_difference(model: Any, expected: Any) -> float:
    """The largest difference of their gradients, each relative to the largest of its parameter."""
    differences = []
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        difference = (ours.grad - theirs.grad).abs().max().item()
        differences.append(difference if scale == 0.0 else difference / scale)
    return max(differences)


def difference_of(**options: Any) -> float:
    """The largest of the updates' accumulated gradients from those of one process on their samples, relative."""
    model = Model()
    whole = Model()
    parallel = DistributedDataParallel(model)
    data = [text for text in map(Texts().__getitem__, range(60)) if len(text) > 1]
    loader = OnlineDataLoader(
        data,
        TokenBudget(90),
        collate_fn=collate,
        length_of=len,
        window=8,
        shuffle=True,
        **options,
    )
    differences = []
    indices: list[int] = []
    for step in loader:
        with contextlib.nullcontext() if step.ends_update else parallel.no_sync():
            (parallel(**step.batch) * step.loss_scale).backward()
        if not step.idle:
            indices += step.indices
        if not step.ends_update:
            continue
        whole.zero_grad()
        update = sum(gathered(indices), [])
        whole(**collate([data[index] for index in update])).backward()
        differences.append(relative_difference(model, whole))
        parallel.zero_grad()
        indices = []
    return max(differences)


def gradients() -> list[float]:
    return [difference_of(), difference_of(accumulation=3), difference_of(samples_per_update=16)]


FREE_ONLINE: dict[str, Any] = {
    "exact_loss": True,
    "config": {"mode": "online", "lengths": None, "updates": "free"},
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


def free_online(folder: str, last: int, resume: str | None = None) -> Any:
    run = trainer("causal", folder, fits=True, count=30, max_steps=last, **FREE_ONLINE)
    run.train(resume_from_checkpoint=resume)
    return run


def resumed_at_an_epochs_end(folder: str) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """A run that is resumed within its first epoch, stopped with that epoch's last update, and resumed again."""
    whole = free_online(f"{folder}/whole", LAST)
    ends = [row["step"] for row in whole.state.log_history if row["epoch"] == 1.0]
    free_online(f"{folder}/part", ends[0], f"{folder}/whole/checkpoint-1")
    again = free_online(f"{folder}/again", LAST, f"{folder}/part/checkpoint-{ends[0]}")
    return ends[0], again.state.global_step, parameters(whole.model), parameters(again.model)


class OfSums(DynagroupTrainer):
    """Loss of one's own, divided by the items of all ranks, whose mean gradient DDP takes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        mean = toys.float64_causal_loss(outputs, inputs["labels"], num_items_in_batch)
        loss = mean * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def loss_of(cls: type, folder: str) -> float:
    run = trainer("causal", folder, fits=True, eval_dataset=toys.samples("causal", 11))
    run.__class__ = cls
    return run.evaluate()["eval_loss"]


def predictions(folder: str) -> list[Any]:
    """Without and with few shapes; ranks whose settings differ from then on do not train."""
    run = trainer("classifier", folder, fits=True, eval_dataset=toys.samples("classifier", 11))
    padded = run.predict(run.eval_dataset)
    run.dynagroup_eval = ShapeLadder(toys.lengths(run.eval_dataset), TokenBudget(160), 2)
    with pytest.raises(ConfigError, match="ranks would train apart: after evaluate"):
        run.train()
    return [padded, run.predict(run.eval_dataset)]


def trainers(folder: str) -> dict[str, Any]:
    changes = {
        "exact_loss": True,
        "gradient_accumulation_steps": 2,
        "count": 48,
        "max_steps": 3,
        "logging_steps": 2,
        "max_grad_norm": 0.3,
    }
    results: dict[str, Any] = {}
    results["evaluated"] = predictions(folder)
    results["same"] = train_both("causal", f"{folder}/same", changes)
    results["packed"] = [training.packed(kind, "sdpa") for kind in ("planned", "online")]
    results["resumed"] = resumed_at_an_epochs_end(folder)
    results["losses"] = [loss_of(OfSums, folder), loss_of(DynagroupTrainer, folder)]
    results["shares"] = test_hf_mixture.shares_of_a_run(f"{folder}/shares")
    return results


def trained(ranks: Any, name: str) -> list[Any]:
    return [rank["trainers"][name] for rank in ranks]


def test_the_log_has_the_shares_of_a_mixture_since_the_entry_before(ranks: Any) -> None:
    assert trained(ranks, "shares") == [[(0.75, 0.25)] * 3 + [(0.25, 0.75)] * 3] * 2


def test_gradients_of_two_ranks_are_those_of_one_process(ranks: Any) -> None:
    for rank in ranks:
        assert max(rank["gradients"]) < 1e-6


def test_two_ranks_make_the_updates_of_fixed_batches(ranks: Any) -> None:
    for (fixed, fixed_logs), (ours, our_logs) in trained(ranks, "same"):
        assert (fixed - ours).abs().max() < 1e-8
        rates = [entry.get("learning_rate") for entry in our_logs]
        fixed_rates = [entry.get("learning_rate") for entry in fixed_logs]
        assert rates == fixed_rates, "a scheduler counts updates, not ranks"
    first, second = (ours for _, (ours, _) in trained(ranks, "same"))
    assert torch.equal(first, second)


def test_the_loss_of_a_run_is_the_mean_over_ranks(ranks: Any) -> None:
    """The plain Trainer adds a rank's own losses since the last log."""
    theirs = [logs[-1]["train_loss"] for (_, logs), _ in trained(ranks, "same")]
    ours = [logs[-1]["train_loss"] for _, (_, logs) in trained(ranks, "same")]
    assert theirs[0] != theirs[1]
    assert ours == pytest.approx([np.mean(theirs)] * 2)


def test_two_ranks_make_the_updates_of_fixed_batches_also_of_packed_ones(ranks: Any) -> None:
    for first, second in zip(*trained(ranks, "packed"), strict=True):
        ours, losses, updates, *_ = first
        assert torch.equal(ours, second[0])
        fixed, fixed_losses = training.fixed(updates)
        assert losses == pytest.approx(fixed_losses, rel=1e-9)
        assert (ours - fixed).abs().max() < 1e-8


def test_a_run_resumed_at_an_epochs_end_goes_on(ranks: Any) -> None:
    for end, last, whole, again in trained(ranks, "resumed"):
        assert 1 < end < LAST
        assert last == LAST, "the training ended silently"
        assert (whole - again).abs().max() < 1e-8


def test_losses_of_an_evaluation_are_those_of_one_process(ranks: Any, tmp_path: Any) -> None:
    alone = loss_of(DynagroupTrainer, tmp_path)
    for losses in trained(ranks, "losses"):
        assert losses == pytest.approx([alone] * 2)


def test_predictions_are_in_dataset_order(ranks: Any, tmp_path: Any) -> None:
    run = trainer("classifier", tmp_path, fits=False, eval_dataset=toys.samples("classifier", 11))
    expected = run.predict(run.eval_dataset)
    for outputs in sum(trained(ranks, "evaluated"), []):
        assert abs(outputs.predictions - expected.predictions).max() < 1e-6
        loss = outputs.metrics["test_loss"]
        assert loss == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


ONLINE = {"mode": "online", "lengths": None}
KINDS = {"kinds": [0, 1, 1] * 32}
COMMON: dict[str, Any] = {"exact_loss": True, "gradient_accumulation_steps": 2}
NEVER = float("inf")
LIMITS = {"one": [NEVER, 90.0], "both": [60.0, 60.0]}
"""Tokens that each rank's memory holds, by which ranks run out of it. What one learns, both then avoid."""


def with_dropout(folder: str, config: dict[str, Any], resume: str | None) -> torch.Tensor:
    run = trainer(
        "causal",
        folder,
        fits=True,
        model=toys.with_dropout(toys.causal_lm()),
        config=config,
        **COMMON,
        max_steps=10,
        save_strategy="steps",
        save_steps=8,
    )
    run.data_collator = toys.collate_noisily
    run.train(resume_from_checkpoint=resume)
    return parameters(run.model)


def resumed_and_whole(folder: Any, config: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters of a run that was not interrupted, and of one that was, within its second epoch of six updates."""
    whole = with_dropout(f"{folder}/whole", config, None)
    resumed = with_dropout(f"{folder}/resumed", config, f"{folder}/whole/checkpoint-8")
    return [whole, resumed]


def with_idle_steps(kind: str, folder: Any, mode: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Parameters, and steps on which this rank had nothing to run: epochs end with three samples, each alone."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    run = trainer(
        kind,
        f"{folder}/idle",
        fits=True,
        exact_loss=kind == "causal",
        count=19,
        max_steps=-1,
        num_train_epochs=2,
        per_device_train_batch_size=4 // size,
        gradient_accumulation_steps=1,
        train_sampling_strategy="sequential",
        config={**mode, "budget": TokenBudget(160, max_samples=1)},
    )
    run.train()
    return parameters(run.model), run.update_loader.stats.idle_steps


IDLE: dict[str, dict[str, Any]] = {"causal": {}, "classifier": ONLINE}


def idle_runs(folder: Any) -> dict[str, tuple[torch.Tensor, int]]:
    return {kind: with_idle_steps(kind, folder, mode) for kind, mode in IDLE.items()}


LONGER = {**COMMON, "max_steps": 8}


def causal_of(folder: str, *configs: dict[str, Any]) -> list[Any]:
    return [train("causal", folder, True, {**LONGER, "config": config}) for config in configs]


def agreeing(folder: Any) -> dict[str, list[torch.Tensor]]:
    """Parameters that are to be the same: of fixed batches and of batches that fit; of two ways to a schedule."""
    by_samples = {**LONGER, "exact_loss": False}
    schedule = {"samples_per_update": toys.doubling(7, 2, 5)}
    pairs: dict[str, Any] = {}
    pairs["seq2seq"] = train_both("seq2seq", f"{folder}/b", LONGER)
    pairs["classifier"] = train_both("classifier", f"{folder}/c", by_samples)
    fixed = train("causal", f"{folder}/d", False, {**LONGER, "config": {}})
    pairs["online"] = [fixed, *causal_of(f"{folder}/d", ONLINE)]
    pairs["kinds"] = causal_of(f"{folder}/f", {}, KINDS)
    pairs["scheduled"] = causal_of(f"{folder}/e", schedule, {**ONLINE, **schedule})
    results = {}
    for name, ((one, _), (other, _)) in pairs.items():
        results[name] = [one, other]
    return results


def everything(folder: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {"agreeing": {**agreeing(folder), **test_accelerate.agreeing()}}
    results["resumed"] = [
        resumed_and_whole(f"{folder}/planned", {}),
        resumed_and_whole(f"{folder}/online", ONLINE),
    ]
    results["idle"] = idle_runs(folder)
    results["evaluated"] = test_hf_losses.evaluated_by_kind(f"{folder}/kinds", {"kinds": "kind"})
    for name, limits in LIMITS.items():
        results[name] = with_and_without_failures(folder, limits)
    return results


@pytest.fixture(scope="module")
def at_length(tmp_path_factory):
    return on_ranks(2, everything, tmp_path_factory.mktemp("at_length"))


@pytest.mark.slow
def test_evaluation_on_two_ranks_runs_steps_of_one_kind(at_length, tmp_path):
    (ours, kinds), (theirs, their_kinds) = (rank["evaluated"] for rank in at_length)
    assert kinds == their_kinds
    assert {len(kinds_of_step) for kinds_of_step in kinds} == {1}
    alone, _ = test_hf_losses.evaluated_by_kind(tmp_path, {"kinds": "kind"})
    expected = pytest.approx(test_hf_losses.figures(alone), abs=1e-6)
    assert test_hf_losses.figures(ours) == expected
    assert test_hf_losses.figures(theirs) == expected


@pytest.mark.slow
def test_parameters_agree_on_two_ranks(at_length):
    for name in at_length[0]["agreeing"]:
        pairs = [rank["agreeing"][name] for rank in at_length]
        for fixed, ours in pairs:
            assert (fixed - ours).abs().max() < 1e-8, name
        assert torch.equal(pairs[0][1], pairs[1][1]), f"{name}: the ranks part"


@pytest.mark.slow
def test_two_ranks_resume_exactly(at_length):
    for rank in at_length:
        for whole, resumed in rank["resumed"]:
            assert torch.equal(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", IDLE)
def test_steps_without_samples_change_no_update(at_length, tmp_path, kind):
    alone, _ = with_idle_steps(kind, tmp_path, IDLE[kind])
    runs = [rank["idle"][kind] for rank in at_length]
    assert sum(num_idle for _, num_idle in runs) > 0
    for trained_parameters, _ in runs:
        assert (trained_parameters - alone).abs().max() < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("which", LIMITS)
def test_running_out_of_memory_on_two_ranks_changes_no_update(at_length, which):
    for first, second in zip(*(rank[which] for rank in at_length), strict=True):
        untroubled, parts, num_failures = first
        second_untroubled, second_parts, second_failures = second
        assert num_failures + second_failures > 0
        assert which == "both" or num_failures == 0
        assert (untroubled - parts).abs().max() < 1e-8
        assert (second_untroubled - second_parts).abs().max() < 1e-8
        assert torch.equal(parts, second_parts), "the ranks part"
