"""Out of memory on some ranks of a real job on gloo; and pre-flight, with DistributedDataParallel and FSDP."""

import gc
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dynagroup import (
    BudgetError,
    ConfigError,
    LearningBudget,
    PlannedDataLoader,
    TokenBudget,
    preflight,
)
from dynagroup.distributed import DistributedWorld
from dynagroup.errors import AlignmentError
from dynagroup.oom import OomSafeBackward, train
from tests.jobs.test_storage import identity
from tests.models import Allocator
from tests.online.helpers import make_loader
from tests.oom import test_train as loop
from tests.torchrun import on_ranks

ROWS = [[1 + (i + k) % 49 for k in range(2 + (7 * i) % 40)] for i in range(128)]
HELD, ALL = 100, 1 << 40  # tokens
TIMEOUT_S, NEVER = 6, float("inf")
WRAPS = DistributedDataParallel, fully_shard
TOO_LARGE = "a batch of 23 samples of 11 tokens, which the budget allows, ran out of memory"
CASES: list[tuple[str, bool, list[float]]] = [  # where, whether it learns, limit of each rank
    ("forward", True, [40, 48]),
    ("third layer", False, [NEVER, 48]),
    ("backward", False, [48, NEVER]),
    ("end of backward", False, [NEVER, 48]),
]


def together(ranks: int, *jobs: Callable[[int, int], Any]) -> list[list[Any]]:
    """Run every ``job(rank, size)`` on so many gloo ranks; [job][rank] -> what it returned."""
    return [list(per_rank) for per_rank in zip(*on_ranks(ranks, _rank, ranks, jobs), strict=True)]


def _rank(size: int, jobs: tuple[Callable[[int, int], Any], ...]) -> list[Any]:
    gc.freeze()  # recovery collects garbage: what was imported is none, and walking over it takes half a second each time
    dist.init_process_group("gloo")
    return [job(dist.get_rank(), size) for job in jobs]


def several_places(rank: int, size: int) -> list[Any]:
    answers = []
    train.BUCKET_BYTES = 1024  # so that a small model has several, and tensors that travel alone
    for place, learns, limits in CASES:
        learned = LearningBudget() if learns else loop.Forgetful()
        limit = limits[rank % len(limits)]
        parameters, backward, failures = loop.train_with_failures(
            place, limit, rank=rank, size=size, learned=learned
        )
        answers.append((parameters, failures, backward.learned.limit))
    return answers


def no_way_out(rank: int, size: int) -> str:
    """An error that must be the same on every rank."""
    model = loop.small_model()
    Allocator(5 if rank == 1 else NEVER).in_forward(model.transformer.h[0])
    ddp = DistributedDataParallel(model)
    with pytest.raises(BudgetError) as caught:
        OomSafeBackward(ddp)(lambda b: loop.mean_loss(ddp, b), loop.batch_of(1))
    return str(caught.value)


def identity_of_a_job(rank: int, size: int) -> dict[str, Any]:
    return identity()


def a_rank_that_leaves(rank: int, size: int) -> list[str]:
    """First it is silent for a while, and then it is gone."""
    model = loop.small_model()
    dist.barrier()  # from here on no rank has much to do: the timeout is that of the one that waits in vain
    short, world = dist.new_group(timeout=timedelta(seconds=5)), DistributedWorld(timeout_s=3.0)
    ddp = DistributedDataParallel(model, process_group=short)
    backward = OomSafeBackward(ddp)
    if rank == 1:
        time.sleep(5)
        return []
    with pytest.raises(AlignmentError) as unheard:
        next(iter(make_loader(world, [3, 4, 5])))
    with pytest.raises(AlignmentError) as caught:
        backward(lambda b: loop.mean_loss(ddp, b), loop.batch_of(1))
    with pytest.raises(AlignmentError) as late:
        DistributedWorld(timeout_s=2.0)
    return [str(unheard.value), str(caught.value), str(late.value)]


def buffers_and_unused_parameters(rank: int, size: int) -> tuple[list[float], list[Any]]:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.never = (torch.nn.Linear(2, 1).double() for _ in range(3))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1 + rank
            return (self.left if rank == 0 else self.right)(x)

    torch.manual_seed(0)
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    backward = OomSafeBackward(ddp, weigh="samples", learned=LearningBudget())
    for _ in range(2):
        model.zero_grad()
        backward(lambda x: ddp(x).mean(), torch.ones(4, 2, dtype=torch.float64))
    return [float(model.seen)], [
        None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()
    ]


def gradients_from_before(rank: int, size: int) -> list[list[float]]:
    """After an update that ends in an error, and after one that is averaged: [.., ..] of one weight."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    ddp = DistributedDataParallel(model)
    held = model.weight.grad = torch.full((1, 1), 7.0 + 2 * rank, dtype=torch.float64)
    limit = Allocator(0 if rank == 1 else NEVER)

    def loss(x: torch.Tensor) -> torch.Tensor:
        limit.claim(len(x))
        return ddp(x).mean()

    backward = OomSafeBackward(ddp, weigh="samples", learned=loop.Forgetful())
    with pytest.raises(BudgetError):
        backward(loss, torch.ones(2, 1).double())
    after_an_error = held.flatten().tolist()
    assert model.weight.grad is held
    limit.limit = 1
    backward(loss, torch.ones(2, 1).double())
    assert model.weight.grad is held
    return [after_an_error, held.flatten().tolist()]


@pytest.fixture(scope="module")
def two_ranks() -> dict[Any, list[Any]]:
    """One start of two processes for all that is asked of them."""
    jobs = (
        several_places,
        no_way_out,
        buffers_and_unused_parameters,
        gradients_from_before,
        identity_of_a_job,
    )
    return dict(
        zip((*jobs, a_rank_that_leaves), together(2, *jobs, a_rank_that_leaves), strict=True)
    )


def test_parameters_are_those_of_a_run_that_never_failed(two_ranks: dict[Any, list[Any]]) -> None:
    untroubled = loop.train_plainly(2)
    for per_rank in zip(*two_ranks[several_places], strict=True):
        assert sum(failures for _, failures, _ in per_rank) > 0
        assert (
            len({learned for _, _, learned in per_rank}) == 1
        )  # so that later plans stay the same everywhere
        for parameters, _, _ in per_rank:
            assert (parameters - untroubled).abs().max() < 1e-8


def test_ranks_raise_alike_and_gradients_from_before_are_kept_when_an_update_fails(
    two_ranks,
) -> None:
    first, second = two_ranks[no_way_out]
    assert first == second
    assert "on rank 1 even alone" in first
    assert two_ranks[gradients_from_before] == [[[7.0], [9.0]], [[9.0], [9.0]]]
    assert all(
        "rank 0 of 2 lost contact with the others" in said
        for said in two_ranks[a_rank_that_leaves][0]
    )


def test_buffers_follow_the_first_rank_a_parameter_used_on_one_is_averaged_and_jobs_are_the_same_everywhere(
    two_ranks,
):
    first, second = two_ranks[buffers_and_unused_parameters]
    assert first == second == ([2.0], [[0.5, 0.5], [0.5], [0.5, 0.5], [0.5], None, None])
    assert two_ranks[identity_of_a_job] == [identity()] * 2


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def compute_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=0
    )


def loader_of(budget: Any) -> Any:
    how: dict[str, Any] = {
        "samples_per_update": 32,
        "weigh": lambda ids: float(ids[:, 1:].ne(0).sum()),
    }
    return PlannedDataLoader(ROWS, [len(row) for row in ROWS], budget, collate_fn=collate, **how)


def made(wrap: Any, budget: Any, held: float = ALL) -> tuple[Any, Any, Allocator]:
    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.Embedding(50, 8), torch.nn.Dropout(), torch.nn.Linear(8, 50)
    )
    allocator = Allocator(held)
    allocator.in_forward(inner[2])
    return wrap(inner.double()), loader_of(budget), allocator


def trained(wrap: Any, *, first: bool) -> torch.Tensor:
    model, loader, _ = made(wrap, TokenBudget(256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first:
        assert 0 < len(preflight(model, loader, compute_loss)) <= 4
    for update in loader.updates():
        for step in update:
            (compute_loss(model, step.batch) * step.loss_scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat(
        [getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()]
    )


def told(wrap: Any, held: float) -> str:
    model, loader, _ = made(wrap, TokenBudget(256), held)
    with pytest.raises(BudgetError) as error:
        preflight(model, loader, compute_loss)
    return str(error.value)


def flown() -> dict[str, Any]:
    """The last case breaks the group of the model: its ranks wait in it until it times out."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    on_last = HELD if dist.get_rank() == dist.get_world_size() - 1 else ALL
    found = {
        f"{wrap.__name__} {first}": trained(wrap, first=first)
        for wrap in WRAPS
        for first in (False, True)
    }
    model, loader, allocator = made(
        DistributedDataParallel, LearningBudget(TokenBudget(256)), on_last
    )
    found["passed"], found["limits"] = (
        preflight(model, loader, compute_loss),
        loader.budget.learner.limit,
    )
    allocator.failures.clear()
    for step in loader:
        model.module(step.batch)
    found["failures"] = len(allocator.failures)
    found["messages"] = [
        told(DistributedDataParallel, on_last),
        told(fully_shard, HELD),
        told(fully_shard, on_last),
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_agree_on_what_ran_out_of_memory_and_nothing_has_changed(ranks: int) -> None:
    by_rank = on_ranks(ranks, flown)
    for found in by_rank:
        for wrap in WRAPS:
            assert torch.equal(found[f"{wrap.__name__} False"], found[f"{wrap.__name__} True"])
        assert all(samples * tokens <= HELD for samples, tokens in found["passed"])
        assert found["passed"][0][0] * found["passed"][0][1] > 0.7 * HELD
        assert found["failures"] == 0
        assert all(found[name] == by_rank[0][name] for name in ("passed", "limits", "messages"))
        for message in found["messages"]:
            assert TOO_LARGE in message
            assert "add `& TokenBudget(227)` to the budget. Rank " in message
            assert "253 tokens; 100 fit" in message


# DeepSpeed's ZeRO: an update is one step, and a pre-flight is refused. Run by scripts/test_deepspeed.sh.
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="bash scripts/test_deepspeed.sh has it"
)


class DeepSpeedEngine(torch.nn.Linear):
    """Named like that of DeepSpeed."""


def test_a_preflight_of_deepspeed_is_refused_in_plain_words() -> None:
    with pytest.raises(ConfigError, match="does not run a DeepSpeedEngine, because ZeRO keeps"):
        preflight(DeepSpeedEngine(1, 1), loader_of(TokenBudget(256)), compute_loss)


def gathered(engine: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return torch.cat([p.detach().flatten() for p in engine.module.parameters()]).clone()


def run_of_trainer(stage: int | None) -> torch.Tensor:
    from tests.integrations import toys

    os.environ.pop("ACCELERATE_USE_CPU")  # with it, there is no DeepSpeed
    zero = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    how: dict[str, Any] = (
        {} if stage is None else {"deepspeed": {**zero, "zero_optimization": {"stage": stage}}}
    )
    with tempfile.TemporaryDirectory() as folder:
        model = toys.causal_lm().float()
        how |= {
            "use_cpu": stage is None,
            "max_steps": 4,
            "optim": "adamw_torch",
            "max_grad_norm": 0.0,
        }
        run = toys.trainer("causal", folder, fits=stage is not None, model=model, **how)
        run.train()
        assert stage is None or run.deepspeed.global_steps == 4
        return toys.parameters(run.model) if stage is None else gathered(run.deepspeed)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_of_the_trainer_is_one_step_of_the_engine(stage: int) -> None:
    [fixed], [ours] = on_ranks(1, run_of_trainer, None), on_ranks(1, run_of_trainer, stage)
    assert (fixed - ours).abs().max() < 1e-4
