"""Pre-flight on real ranks: what one rank learns all know, an error is the same on all, and none waits for ever."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dynagroup import BudgetError, LearningBudget, PlannedDataLoader, TokenBudget, preflight
from dynagroup.testing import Allocator
from tests.torchrun import on_ranks

ROWS = [[1 + (i + k) % 49 for k in range(2 + (7 * i) % 40)] for i in range(128)]
HELD, ALL = 100, 1 << 40  # tokens
TIMEOUT_S = 6


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def compute_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=0)


def made(wrap: Any, budget: Any, held: float = ALL) -> tuple[Any, Any, Allocator]:
    torch.manual_seed(0)
    inner, allocator = (
        torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Dropout(), torch.nn.Linear(8, 50)),
        Allocator(held),
    )
    how: dict[str, Any] = {"samples_per_update": 32, "weigh": lambda ids: float(ids[:, 1:].ne(0).sum())}
    loader = PlannedDataLoader(ROWS, [len(row) for row in ROWS], budget, collate_fn=collate, **how)
    allocator.in_forward(inner[2])
    return wrap(inner.double()), loader, allocator


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
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()])


def told(wrap: Any, held: float) -> str:
    model, loader, _ = made(wrap, TokenBudget(256), held)
    with pytest.raises(BudgetError) as error:
        preflight(model, loader, compute_loss)
    return str(error.value)


def everything() -> dict[str, Any]:
    """The last case breaks the group of the model: its ranks wait in it until it times out."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    on_last = HELD if dist.get_rank() == dist.get_world_size() - 1 else ALL
    found = {f"{wrap.__name__} {first}": trained(wrap, first=first) for wrap in WRAPS for first in (False, True)}
    model, loader, allocator = made(DistributedDataParallel, LearningBudget(TokenBudget(256)), on_last)
    found["passed"], found["limits"] = preflight(model, loader, compute_loss), loader.budget.learner.limits
    allocator.failures.clear()
    for step in loader:
        model.module(step.batch)
    found["failures"] = len(allocator.failures)
    found["messages"] = [told(DistributedDataParallel, on_last), told(fully_shard, HELD), told(fully_shard, on_last)]
    return found


WRAPS = DistributedDataParallel, fully_shard


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_agree_on_what_ran_out_of_memory_and_nothing_has_changed(ranks: int) -> None:
    by_rank = on_ranks(ranks, everything)
    for found in by_rank:
        for wrap in WRAPS:
            assert torch.equal(found[f"{wrap.__name__} False"], found[f"{wrap.__name__} True"])
        assert all(samples * tokens <= HELD for samples, tokens in found["passed"])
        assert found["passed"][0][0] * found["passed"][0][1] > 0.7 * HELD
        assert found["failures"] == 0
        assert [found[name] for name in ("passed", "limits", "messages")] == [
            by_rank[0][name] for name in ("passed", "limits", "messages")
        ]
        for message in found["messages"]:
            assert "a batch of 23 samples of 11 tokens, which the budget allows, runs out of memory" in message
            assert "add `& TokenBudget(227)` to the budget. Rank " in message
            assert "253 tokens, but 100 fit" in message
