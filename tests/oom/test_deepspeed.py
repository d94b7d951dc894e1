"""DeepSpeed's ZeRO on gloo ranks: a pre-flight changes nothing, an update is one step. Run by scripts/test_deepspeed.sh."""

import os
import tempfile
from typing import Any

import pytest
import torch

from dynagroup import BudgetError, PlannedDataLoader, TokenBudget, preflight
from dynagroup.testing import Allocator
from tests.integrations import toys
from tests.oom.test_ranks import ALL, HELD, ROWS, collate, compute_loss
from tests.torchrun import on_ranks

pytest.importorskip("deepspeed")
FLOAT32, OFFLOADED = {"data_types": {"grad_accum_dtype": "fp32"}}, {"offload_optimizer": {"device": "cpu"}}
CASES: list[tuple[int, bool, dict[str, Any]]] = [
    (0, False, {}), (1, True, FLOAT32), (2, True, FLOAT32), (2, False, OFFLOADED), (3, False, {}), (3, False, OFFLOADED)
]  # fmt: skip


class Model(torch.nn.Module):
    """``before`` training it uses a layer that training does not use, as that of images in a batch of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.head, self.other = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50), torch.nn.Linear(8, 50)
        self.before = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(self.embedded(ids))
        return (self.head(hidden) + (self.other(hidden) if self.before else 0)).float()


def engine_of(case: tuple[int, bool, dict[str, Any]], held: float = ALL) -> tuple[Any, Any]:
    import deepspeed

    stage, low, how = case
    torch.manual_seed(0)
    model = Model()
    Allocator(held).in_forward(model.head)
    zero = {"stage": stage, **(how if how is OFFLOADED else {})}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": zero}
    config |= {"bf16": {"enabled": low}, "zero_force_ds_cpu_optimizer": False, **(how if how is FLOAT32 else {})}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), config=config)
    budget, how = TokenBudget(256), {"samples_per_update": 32, "weigh": lambda ids: float(ids[:, 1:].ne(0).sum())}
    return engine, PlannedDataLoader(ROWS, [len(row) for row in ROWS], budget, collate_fn=collate, **how)


def gathered(engine: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return torch.cat([p.detach().flatten() for p in engine.module.parameters()]).clone()


def trained(case: tuple[int, bool, dict[str, Any]], *, first: bool) -> torch.Tensor:
    engine, loader = engine_of(case)
    if first:
        engine.module.before = True
        assert 0 < len(preflight(engine, loader, compute_loss)) <= 4
        engine.module.before = False
    for step in loader:
        engine.set_gradient_accumulation_boundary(step.ends_update)
        engine.backward(compute_loss(engine, step.batch) * step.loss_scale, scale_wrt_gas=False)
        if step.ends_update:
            engine.step()
    assert engine.global_steps == 4
    return gathered(engine)


def flown() -> tuple[list[bool], list[str]]:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    said = []
    for stage in (2, 3):
        with pytest.raises(BudgetError) as error:
            preflight(*engine_of((stage, False, {}), HELD), compute_loss)
        said.append(str(error.value))
    return [torch.equal(trained(case, first=False), trained(case, first=True)) for case in CASES], said


def run_of_trainer(stage: int | None) -> torch.Tensor:
    os.environ.pop("ACCELERATE_USE_CPU")  # with it, there is no DeepSpeed
    zero = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    how: dict[str, Any] = {} if stage is None else {"deepspeed": {**zero, "zero_optimization": {"stage": stage}}}
    with tempfile.TemporaryDirectory() as folder:
        model, config = toys.causal_lm().float(), {"preflight": True}
        how |= {"use_cpu": stage is None, "max_steps": 4, "optim": "adamw_torch", "max_grad_norm": 0.0}
        run = toys.trainer("causal", folder, fits=stage is not None, model=model, config=config, **how)
        run.train()
        assert stage is None or run.deepspeed.global_steps == 4
        return toys.parameters(run.model) if stage is None else gathered(run.deepspeed)


@pytest.mark.slow
def test_a_preflight_changes_nothing_and_ends_alike_on_all_ranks() -> None:
    (same, said), (others, other_said) = on_ranks(2, flown)
    assert same == others == [True] * len(CASES)
    assert said == other_said
    assert all(
        "a batch of 23 samples of 11 tokens, which the budget allows, ran out of memory" in text for text in said
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_of_the_trainer_is_one_step_of_the_engine(stage: int) -> None:
    [fixed], [ours] = on_ranks(1, run_of_trainer, None), on_ranks(1, run_of_trainer, stage)
    assert (fixed - ours).abs().max() < 1e-4
