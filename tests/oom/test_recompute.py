"""Checkpointing for the steps that need it: what fits, what is decided, and that gradients are the same."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget import MemoryBudget, RecomputeBudget, TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.memory import ProfiledMemory
from dynagroup.oom import RecomputeWhereNeeded, recomputed_steps
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape
from dynagroup.update.planned import PlannedDataLoader
from tests import models
from tests.torchrun import on_ranks

# 10 bytes a token and one a pair of tokens without, a quarter of the first with.
WITHOUT = MemoryBudget.from_bytes(
    10_000, model=ProfiledMemory(0, ("tokens",), ((0.0, 0.0, 10.0, 1.0),), 0.0), headroom=1.0
)
WITH = MemoryBudget.from_bytes(10_000, model=ProfiledMemory(0, ("tokens",), ((0.0, 0.0, 2.5, 0.5),), 0.0), headroom=1.0)
LENGTHS = np.concatenate([np.full(3, 130), np.random.default_rng(0).integers(4, 60, 40)]).astype(np.int32)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 5), st.integers(0, 50), st.integers(1, 4))
def test_a_batch_that_fits_still_fits_with_less(n, longest, more, longer, most_samples):
    budget = RecomputeBudget(WITHOUT, WITH, most_samples)
    less, large = budget.fits(BatchShape.of([n, n + more], [longest, longest + longer]))
    assert less or not large
    small, big = budget.cost(BatchShape.of([n, n + more], [longest, longest + longer]))
    assert small <= big
    largest = budget.largest(np.array([longest]))[0]
    assert budget.fits(BatchShape.of([max(largest, 1), largest + 1], longest)).tolist() == [largest > 0, False]


def test_long_samples_recompute_and_short_ones_do_not():
    budget = RecomputeBudget(WITHOUT, WITH)
    plan = LengthAwareBatchSampler(LENGTHS, budget, world_size=2, rank=0).plan
    decided = recomputed_steps(plan, budget)
    for row, recomputed in zip(plan.rows, decided, strict=True):
        shapes = [BatchShape.of(len(batch), int(LENGTHS[batch].max())) for batch in row]
        assert all(budget.fits(shape)[0] for shape in shapes)
        assert recomputed == any(LENGTHS[batch].max() == 130 for batch in row)
    assert 0 < decided.sum() < len(decided)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RecomputeBudget(TokenBudget(5), TokenBudget(9, layout="packed")),
            "`without` has layout='padded', but",
        ),
        (
            lambda: RecomputeBudget(TokenBudget(5), TokenBudget(9), most_samples=0),
            "`most_samples` must be an int of at least 1",
        ),
        (lambda: RecomputeBudget.from_model(models.llama(), "1GB", gradient_checkpointing=True), "leave it out"),
        (
            lambda: RecomputeWhereNeeded(torch.nn.Linear(2, 2), RecomputeBudget(WITHOUT, WITH)),
            "Linear has no layers that",
        ),
    ],
)
def test_what_cannot_be_is_said(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_both_budgets_come_from_one_model():
    budget = RecomputeBudget.from_model(models.llama(width=32), "60MB", attention="flash", headroom=1.0)
    lengths = np.array([64, 1024])
    without, recomputed = budget.without.largest(lengths), budget.recomputed.largest(lengths)
    assert (without < recomputed).all()
    assert budget.largest(lengths).tolist() == np.maximum(without, np.minimum(recomputed, 1)).tolist()


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(where_needed: bool) -> dict[str, Any]:
    """Gradients of two updates on this process's ranks, and what was decided."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model: Any = _llama()
    budget = RecomputeBudget(WITHOUT, WITH)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    recompute = RecomputeWhereNeeded(model, budget)
    rng = np.random.default_rng(1)
    dataset = [torch.tensor(rng.integers(1, 60, int(n))) for n in LENGTHS]
    loader = PlannedDataLoader(dataset, LENGTHS, budget, samples_per_update=16, collate_fn=collate, shuffle=True)
    decided = []
    for step in loader:
        if where_needed:
            decided.append(recompute(step.batch))
        (model(**step.batch).loss * step.loss_scale).backward()
    return {"decided": decided, "gradient": torch.cat([p.grad.flatten() for p in model.parameters()])}


def _llama() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(models.llama(vocab=64, width=16, layers=3)).double()


def test_gradients_are_those_without_recomputing():
    plain, some = trained(False), trained(True)
    assert True in some["decided"]
    assert False in some["decided"]
    assert (some["gradient"] - plain["gradient"]).abs().max() <= 1e-12 * plain["gradient"].abs().max()


def test_two_ranks_decide_alike_and_have_the_gradient_of_one():
    alone = trained(True)["gradient"]
    first, second = on_ranks(2, trained, True)
    assert first["decided"] == second["decided"]
    assert {True, False} == set(first["decided"])
    for report in (first, second):
        assert (report["gradient"] - alone).abs().max() <= 1e-6 * alone.abs().max()


def test_layers_really_run_again_only_where_it_is_needed():
    model = _llama()
    runs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))  # recomputing stops before the end
    recompute = RecomputeWhereNeeded(model, RecomputeBudget(TokenBudget(32), TokenBudget(512)))
    counted = []
    for length in (16, 100, 20):
        runs.clear()
        recompute(batch := {"input_ids": torch.ones(1, length, dtype=torch.long)})
        model(**batch, labels=batch["input_ids"]).loss.backward()
        counted.append(len(runs))
    assert counted == [1, 2, 1]
    assert (recompute.num_steps, recompute.num_recomputed) == (3, 1)
