"""Real gloo ranks, started once: Trainers, samplers under accelerate, DDP's gradients. To start ranks takes longer than to run
them."""

import contextlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dynagroup import ConfigError, LengthAwareBatchSampler, OnlineDataLoader, TokenBudget
from dynagroup.testing import assert_conserves
from tests.integrations import toys
from tests.integrations.jobs import parameters, train_both, trainer
from tests.online.helpers import Tokens, collate, ids_in, lengths_of
from tests.packed import training
from tests.torchrun import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LAST = 7


def everything(folder: str) -> dict[str, Any]:
    """What one rank finds; accelerate first, which starts the process group."""
    warnings.simplefilter("ignore")
    return {**{job.__name__: job() for job in (accelerated, gradients)}, "trainers": trainers(folder)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return on_ranks(2, everything, str(tmp_path_factory.mktemp("ranks")))


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sampler(**options: Any) -> LengthAwareBatchSampler:
    lengths = np.random.default_rng(0).lognormal(4, 1, 200).astype(np.int32).clip(max=512)
    return LengthAwareBatchSampler(lengths, TokenBudget(512), shuffle=True, **options)


def accelerated() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes

    def emitted(made: Any, prepare: Any = accelerator.prepare) -> list[Any]:
        return [batch.tolist() for batch in prepare(DataLoader(range(200), batch_sampler=made))]  # type: ignore[arg-type]

    loader = accelerator.prepare(DataLoader(range(200), batch_sampler=sampler(world_size=size)))  # type: ignore[arg-type]
    found = {"length": len(loader), "epochs": [[batch.tolist() for batch in loader] for _ in range(2)]}
    with pytest.raises(ConfigError, match="would shard it a second time"):
        emitted(sampler())
    # a framework that counts its epochs from 0 again after a restart must not lose the place
    saved, again = sampler(world_size=size), sampler(world_size=size)
    emitted(saved)
    again.load_state_dict(saved.state_dict(num_steps=len(saved) // size))
    return {**found, "own": emitted(sampler(), lambda made: made), "resumed": emitted(again)}


def test_accelerate_shards_a_sampler_that_came_out_whole_or_is_refused(ranks: Any) -> None:
    """Facts read from accelerate 1.15; sharded a second time, each rank would see only every other of its own batches."""
    first, second = (found["accelerated"] for found in ranks)
    for key in ("own", "resumed"):
        assert_conserves([*first[key], *second[key]], range(200))
    for ours, theirs in zip(first["epochs"], second["epochs"], strict=True):
        assert len(ours) == len(theirs)
        assert_conserves([*ours, *theirs], range(200))
    assert first["length"] == len(first["epochs"][0])
    assert first["epochs"][0] != first["epochs"][1], "the epoch moved on, though nobody could say set_epoch"
    assert [first["resumed"], second["resumed"]] == [first["epochs"][1], second["epochs"][1]]


class Causal(nn.Module):
    """Next-token loss, averaged over the predicted tokens of a batch, as causal models compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 80, dtype=torch.float64)

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = torch.tanh(self.embed(batch["input_ids"].clamp(min=0))).cumsum(1) * 0.1
        logits, labels = self.head(hidden)[:, :-1], batch["labels"][:, 1:]
        return nn.functional.cross_entropy(logits.reshape(-1, 80), labels.reshape(-1), ignore_index=-100)


def difference_of(**options: Any) -> float:
    """The largest of the updates' accumulated gradients from those of one process on their samples, relative."""
    torch.manual_seed(0)
    model, whole = Causal(), Causal()
    whole.load_state_dict(model.state_dict())
    parallel = DistributedDataParallel(model)
    data = Tokens([max(2, n) for n in lengths_of(80, seed=6)])
    loader = OnlineDataLoader(data, TokenBudget(128), collate_fn=collate, window=8, shuffle=True, **options)
    held, difference = [], 0.0
    for step in loader:
        with contextlib.nullcontext() if step.ends_update else parallel.no_sync():
            (parallel(step.batch) * step.loss_scale).backward()
        held += ids_in(step)
        if step.ends_update:
            whole.zero_grad()
            whole(collate([data[i] for ids in gathered(held) for i in ids])).backward()
            for ours, truth in zip(model.parameters(), whole.parameters(), strict=True):
                scale = truth.grad.abs().max().item() or 1.0
                difference = max(difference, (ours.grad - truth.grad).abs().max().item() / scale)
            parallel.zero_grad()
            held = []
    return difference


def gradients() -> list[float]:
    return [difference_of(), difference_of(accumulation=3), difference_of(samples_per_update=16)]


def test_gradients_of_updates_equal_those_of_one_process(ranks: Any) -> None:
    assert max(ranks[0]["gradients"] + ranks[1]["gradients"]) < 1e-6


def free_online(folder: str, last: int, resume: str | None = None) -> Any:
    free = {"mode": "online", "lengths": None, "updates": "free"}
    run = trainer(
        "causal", folder, fits=True, exact_loss=True, count=30, max_steps=last, save_strategy="steps", save_steps=1,
        logging_steps=1, lr_scheduler_type="constant", gradient_accumulation_steps=1, config=free,
    )  # fmt: skip
    run.train(resume_from_checkpoint=resume)
    return run


def resumed_at_an_epochs_end(folder: str) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """A run that is resumed within its first epoch, stopped with that epoch's last update, and resumed again."""
    whole = free_online(f"{folder}/whole", LAST)
    ends = [row["step"] for row in whole.state.log_history if row["epoch"] == 1.0]
    free_online(f"{folder}/part", ends[0], f"{folder}/whole/checkpoint-1")
    again = free_online(f"{folder}/again", LAST, f"{folder}/part/checkpoint-{ends[0]}")
    return ends[0], again.state.global_step, parameters(whole.model), parameters(again.model)


def trainers(folder: str) -> dict[str, Any]:
    cut = {"exact_loss": True, "gradient_accumulation_steps": 2, "count": 48, "max_steps": 3, "logging_steps": 1}
    run = trainer("classifier", folder, fits=True, eval_dataset=toys.samples("classifier", 11))
    return {
        "same": train_both("causal", f"{folder}/same", cut),
        "resumed": resumed_at_an_epochs_end(folder),
        "evaluated": run.predict(run.eval_dataset),
        "packed": [training.packed(kind, "sdpa") for kind in ("planned", "online")],
    }


def test_two_ranks_make_the_updates_of_fixed_batches(ranks):
    for rank in ranks:
        (fixed, fixed_logs), (ours, our_logs) = rank["trainers"]["same"]
        assert (fixed - ours).abs().max() < 1e-8
        rates = [[row.get("learning_rate") for row in logs] for logs in (fixed_logs, our_logs)]
        assert rates[0] == rates[1], "a scheduler counts updates, not ranks"
    assert torch.equal(ranks[0]["trainers"]["same"][1][0], ranks[1]["trainers"]["same"][1][0])


def test_a_run_resumed_at_an_epochs_end_goes_on(ranks):
    for rank in ranks:
        end, step, whole, again = rank["trainers"]["resumed"]
        assert 1 < end < LAST
        assert step == LAST, "the training ended silently"
        assert (whole - again).abs().max() < 1e-8


def test_two_ranks_predict_in_dataset_order(ranks, tmp_path):
    run = trainer("classifier", tmp_path, fits=False, eval_dataset=toys.samples("classifier", 11))
    expected = run.predict(run.eval_dataset)
    for found in (rank["trainers"]["evaluated"] for rank in ranks):
        assert abs(found.predictions - expected.predictions).max() < 1e-6
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


def test_two_ranks_on_packed_batches_make_the_updates_of_fixed_ones(ranks):
    for (ours, losses, updates, _), (others, *_) in zip(*(rank["trainers"]["packed"] for rank in ranks), strict=True):
        assert torch.equal(ours, others)
        theirs, fixed_losses = training.fixed(updates, "sdpa")
        assert losses == pytest.approx(fixed_losses, rel=1e-9)
        assert (ours - theirs).abs().max() < 1e-8
