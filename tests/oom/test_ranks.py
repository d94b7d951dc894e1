"""Out of memory on some ranks of a real job on gloo; and pre-flight, with DistributedDataParallel and FSDP."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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

NEVER = float("inf")
HELD = 100  # tokens
EVERYTHING = 1 << 40  # tokens
TIMEOUT_S = 6
WRAPS = (DistributedDataParallel, fully_shard)
TOO_LARGE = "a batch of 23 samples of 11 tokens, which the budget allows, ran out of memory"


def row_of(index: int) -> list[int]:
    length = 2 + (7 * index) % 40
    return [1 + (index + place) % 49 for place in range(length)]


ROWS = [row_of(index) for index in range(128)]


@dataclass(frozen=True)
class Case:
    """Where a batch fails, the tokens that each rank's memory holds, and whether they learn from it."""

    place: str
    limits: tuple[float, float]
    learns: bool = False


CASES = [
    Case("forward", (40, 48), learns=True),
    Case("third layer", (NEVER, 48)),
    Case("backward", (48, NEVER)),
    Case("end of backward", (NEVER, 48)),
]


def together(ranks: int, *jobs: Callable[[int, int], Any]) -> dict[Any, tuple[Any, ...]]:
    """What every ``job(rank, size)`` returned on each of so many gloo ranks, which are started once."""
    answers = on_ranks(ranks, run_jobs, ranks, jobs)
    return dict(zip(jobs, zip(*answers, strict=True), strict=True))


def run_jobs(size: int, jobs: tuple[Callable[[int, int], Any], ...]) -> list[Any]:
    dist.init_process_group("gloo")
    return [job(dist.get_rank(), size) for job in jobs]


def several_places(rank: int, size: int) -> list[Any]:
    answers = []
    train.BUCKET_BYTES = 1024  # so that a small model has several, and tensors that travel alone
    for case in CASES:
        learned = LearningBudget() if case.learns else loop.Forgetful()
        parameters, backward, num_failures = loop.train_with_failures(
            case.place, case.limits[rank], rank=rank, size=size, learned=learned
        )
        answers.append((parameters, num_failures, backward.learned.limit))
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
    short = dist.new_group(timeout=timedelta(seconds=5))
    world = DistributedWorld(timeout_s=3.0)
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


class Branches(torch.nn.Module):
    """Each rank uses its own branch, and counts what it has seen by its own step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.left = torch.nn.Linear(2, 1).double()
        self.right = torch.nn.Linear(2, 1).double()
        self.never = torch.nn.Linear(2, 1).double()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1 + self.rank
        branch = self.left if self.rank == 0 else self.right
        return branch(x)


def buffers_and_unused_parameters(rank: int, size: int) -> tuple[float, list[Any]]:
    torch.manual_seed(0)
    model = Branches(rank)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    backward = OomSafeBackward(ddp, weigh="samples", learned=LearningBudget())
    for _ in range(2):
        model.zero_grad()
        backward(lambda x: ddp(x).mean(), torch.ones(4, 2, dtype=torch.float64))
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        gradients.append(None if gradient is None else gradient.flatten().tolist())
    return float(model.seen), gradients


def gradients_from_before(rank: int, size: int) -> list[list[float]]:
    """After an update that ends in an error, and after one that is averaged: [.., ..] of one weight."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    ddp = DistributedDataParallel(model)
    gradient = torch.full((1, 1), 7.0 + 2 * rank, dtype=torch.float64)
    model.weight.grad = gradient
    limit = Allocator(0 if rank == 1 else NEVER)

    def loss(x: torch.Tensor) -> torch.Tensor:
        limit.claim(len(x))
        return ddp(x).mean()

    backward = OomSafeBackward(ddp, weigh="samples", learned=loop.Forgetful())
    with pytest.raises(BudgetError):
        backward(loss, torch.ones(2, 1).double())
    after_an_error = gradient.flatten().tolist()
    assert model.weight.grad is gradient
    limit.limit = 1
    backward(loss, torch.ones(2, 1).double())
    assert model.weight.grad is gradient
    return [after_an_error, gradient.flatten().tolist()]


@pytest.fixture(scope="module")
def two_ranks() -> dict[Any, tuple[Any, ...]]:
    """One start of two processes for all that is asked of them; the last job leaves them apart."""
    return together(
        2,
        several_places,
        no_way_out,
        buffers_and_unused_parameters,
        gradients_from_before,
        identity_of_a_job,
        a_rank_that_leaves,
    )


def test_parameters_are_those_of_a_run_that_never_failed(
    two_ranks: dict[Any, tuple[Any, ...]],
) -> None:
    untroubled = loop.train_plainly(2)
    for answers in zip(*two_ranks[several_places], strict=True):
        num_failures = [count for _, count, _ in answers]
        assert sum(num_failures) > 0
        for parameters, _, _ in answers:
            assert (parameters - untroubled).abs().max() < 1e-8


def test_ranks_learn_the_same_so_that_later_plans_stay_the_same_everywhere(two_ranks) -> None:
    first, second = two_ranks[several_places]
    limits = [limit for _, _, limit in first]
    assert limits == [limit for _, _, limit in second]
    assert limits[0] < NEVER


def test_ranks_raise_alike_where_one_has_no_way_out(two_ranks) -> None:
    first, second = two_ranks[no_way_out]
    assert first == second
    assert "on rank 1 even alone" in first


def test_gradients_from_before_are_kept_when_an_update_fails(two_ranks) -> None:
    first, second = two_ranks[gradients_from_before]
    assert first == [[7.0], [9.0]]
    assert second == [[9.0], [9.0]]


def test_a_rank_that_waits_for_one_that_left_says_that_it_lost_contact(two_ranks) -> None:
    messages, _ = two_ranks[a_rank_that_leaves]
    assert len(messages) == 3
    for message in messages:
        assert "rank 0 of 2 lost contact with the others" in message


def test_buffers_follow_the_first_rank(two_ranks) -> None:
    for seen, _ in two_ranks[buffers_and_unused_parameters]:
        assert seen == 2.0


def test_the_gradient_of_a_parameter_used_on_one_rank_is_averaged(two_ranks) -> None:
    for _, gradients in two_ranks[buffers_and_unused_parameters]:
        assert gradients == [[0.5, 0.5], [0.5], [0.5, 0.5], [0.5], None, None]


def test_a_job_is_the_same_on_every_rank(two_ranks) -> None:
    for of_rank in two_ranks[identity_of_a_job]:
        assert of_rank == identity()


# Pre-flight


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def compute_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:], ignore_index=0)


def num_targets(ids: torch.Tensor) -> float:
    return float(ids[:, 1:].ne(0).sum())


def loader_of(budget: Any) -> Any:
    lengths = [len(row) for row in ROWS]
    return PlannedDataLoader(
        ROWS, lengths, budget, samples_per_update=32, weigh=num_targets, collate_fn=collate
    )


def model_of(wrap: Any, limit: float = EVERYTHING) -> tuple[Any, Allocator]:
    """A wrapped model whose last layer fails above so many tokens."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(50, 8)
    head = torch.nn.Linear(8, 50)
    model = torch.nn.Sequential(embedding, torch.nn.Dropout(), head)
    allocator = Allocator(limit)
    allocator.in_forward(head)
    return wrap(model.double()), allocator


def whole(parameter: Any) -> torch.Tensor:
    """All of a parameter of which a rank may have a shard."""
    tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach().flatten()


def trained(wrap: Any, *, flies_first: bool) -> torch.Tensor:
    model, _ = model_of(wrap)
    loader = loader_of(TokenBudget(256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if flies_first:
        assert 0 < len(preflight(model, loader, compute_loss)) <= 4
    for update in loader.updates():
        for step in update:
            loss = compute_loss(model, step.batch) * step.loss_scale
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([whole(parameter) for parameter in model.parameters()])


def message_of_a_preflight(wrap: Any, limit: float) -> str:
    model, _ = model_of(wrap, limit)
    loader = loader_of(TokenBudget(256))
    with pytest.raises(BudgetError) as error:
        preflight(model, loader, compute_loss)
    return str(error.value)


def learned_in_a_preflight(limit: float) -> dict[str, Any]:
    """And how many batches of the epoch fail after it."""
    model, allocator = model_of(DistributedDataParallel, limit)
    loader = loader_of(LearningBudget(TokenBudget(256)))
    passed = preflight(model, loader, compute_loss)
    learned = loader.budget.learner.limit
    allocator.failures.clear()
    for step in loader:
        model.module(step.batch)
    return {"passed": passed, "limit": learned, "num_failures": len(allocator.failures)}


def preflights() -> dict[str, Any]:
    """The last message breaks the group of the model: its ranks wait in it until it times out."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    limit = HELD if is_last else EVERYTHING
    parameters = []
    for wrap in WRAPS:
        pair = [trained(wrap, flies_first=flies_first) for flies_first in (False, True)]
        parameters.append(pair)
    learned = learned_in_a_preflight(limit)
    messages = [
        message_of_a_preflight(DistributedDataParallel, limit),
        message_of_a_preflight(fully_shard, HELD),
        message_of_a_preflight(fully_shard, limit),
    ]
    return {"parameters": parameters, "learned": learned, "messages": messages}


@pytest.fixture(scope="module", params=[1, 2, 4])
def flown(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of so many ranks found."""
    return on_ranks(request.param, preflights)


@pytest.mark.slow
def test_a_preflight_changes_nothing(flown: list[dict[str, Any]]) -> None:
    for rank in flown:
        for without, after in rank["parameters"]:
            assert torch.equal(without, after)


@pytest.mark.slow
def test_nothing_runs_out_of_memory_after_a_preflight(flown: list[dict[str, Any]]) -> None:
    for rank in flown:
        learned = rank["learned"]
        sizes = [num_samples * length for num_samples, length in learned["passed"]]
        assert max(sizes) <= HELD
        assert sizes[0] > 0.7 * HELD
        assert learned["num_failures"] == 0


@pytest.mark.slow
def test_ranks_agree_on_what_ran_out_of_memory(flown: list[dict[str, Any]]) -> None:
    first = flown[0]
    for rank in flown:
        assert rank["messages"] == first["messages"]
        assert rank["learned"]["passed"] == first["learned"]["passed"]
        assert rank["learned"]["limit"] == first["learned"]["limit"]
    for message in first["messages"]:
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

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().flatten() for parameter in parameters])


def settings_of_deepspeed(stage: int) -> dict[str, Any]:
    zero = {"stage": stage}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": zero,
    }


def run_of_trainer(stage: int | None) -> torch.Tensor:
    """Parameters after four updates: of fixed batches without DeepSpeed, or of a stage of ZeRO."""
    from tests.integrations import toys

    os.environ.pop("ACCELERATE_USE_CPU")  # with it, there is no DeepSpeed
    settings: dict[str, Any] = {"optim": "adamw_torch", "max_grad_norm": 0.0, "max_steps": 4}
    model = toys.causal_lm().float()
    with tempfile.TemporaryDirectory() as folder:
        if stage is None:
            run = toys.trainer("causal", folder, fits=False, model=model, use_cpu=True, **settings)
            run.train()
            return toys.parameters(run.model)
        run = toys.trainer(
            "causal",
            folder,
            fits=True,
            model=model,
            use_cpu=False,
            deepspeed=settings_of_deepspeed(stage),
            **settings,
        )
        run.train()
        assert run.deepspeed.global_steps == 4
        return gathered(run.deepspeed)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_of_the_trainer_is_one_step_of_the_engine(stage: int) -> None:
    [fixed] = on_ranks(1, run_of_trainer, None)
    [ours] = on_ranks(1, run_of_trainer, stage)
    assert (fixed - ours).abs().max() < 1e-4
