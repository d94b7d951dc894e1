"""Compiled models that meet few shapes: how many graphs torch makes of them, forward and backward, over two epochs."""

import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from dynagroup import MemoryBudget, PlannedDataLoader, TokenBudget
from dynagroup.memory import simulate
from tests.integrations.toys import trainer
from tests.models import small_llama
from tests.torchrun import on_ranks
from tests.update.test_filling import LENGTHS, WORDS, Model, Texts, collate

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of compiling
SHAPES = 4


def graphs_of(model: torch.nn.Module) -> Counter[str]:
    """Compiles the model, for each shape anew; how many graphs are made of it from now on."""
    torch._dynamo.reset()
    counters.clear()
    found: Counter[str] = Counter()

    def counting(name: str) -> Any:
        return lambda graph, inputs: found.update([name]) or graph

    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    model.compile(backend=backend, dynamic=False)
    return found


def plain_loop(shapes: int | None) -> Counter[str]:
    """Two epochs, on as many ranks as there are."""
    found = graphs_of(model := Model())
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    how: dict[str, Any] = {"samples_per_update": 16, "shapes": shapes, "collate_fn": collate}
    loader = PlannedDataLoader(Texts(), LENGTHS, TokenBudget(90), **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (step for _ in range(2) for step in loader):
        (model(**step.batch) * step.loss_scale).backward()
        if step.ends_update:
            optimizer.step()
            optimizer.zero_grad()
    del model
    return found


@pytest.fixture(autouse=True)
def _no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        logging.getLogger("torch.__trace"), "disabled", True
    )  # pytest would keep thousands of lines


def compiles_once_a_shape(found: Counter[str]) -> bool:
    return 1 < found["forward"] == found["backward"] <= SHAPES


def test_a_loop_compiles_once_a_shape() -> None:
    assert compiles_once_a_shape(plain_loop(SHAPES))


@pytest.mark.slow
def test_two_ranks_compile_once_a_shape() -> None:
    assert all(map(compiles_once_a_shape, on_ranks(2, plain_loop, SHAPES)))


class WithLoss(Model):
    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        return {
            "loss": super().forward(
                input_ids % WORDS, attention_mask, labels.where(labels < 0, labels % WORDS)
            )
        }


def test_the_trainer_compiles_once_a_shape(tmp_path: Any) -> None:
    model = WithLoss()
    how: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "config": {"shapes": SHAPES}}
    run = trainer("causal", tmp_path, fits=True, model=model, **how)
    run.loss_is_scaled_for_ga = False  # known: it need not be asked, without gradients
    found = graphs_of(model)
    run.train()
    assert run.state.epoch == 2
    assert compiles_once_a_shape(found)
    assert counters["stats"]["unique_graphs"] == found["forward"]


def test_a_trace_of_memory_neither_compiles_a_compiled_model_nor_keeps_it_from_being_compiled() -> (
    None
):
    torch._dynamo.reset()
    counters.clear()
    compiled: Any = torch.compile(small_llama(), backend="eager", dynamic=False)
    plain, found = (
        MemoryBudget.from_model(model, "1GB").figures() for model in (small_llama(), compiled)
    )
    simulate(compiled, None, [(2, 8)])
    assert found == plain
    assert counters["stats"]["unique_graphs"] == 0
    compiled(torch.ones(2, 8, dtype=torch.int64), use_cache=False)
    assert counters["stats"]["unique_graphs"] == 1
