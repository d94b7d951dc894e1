"""Compiled models that meet few shapes: how many graphs torch makes of them, forward and backward, over two epochs."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from dynagroup import MemoryBudget, PlannedDataLoader, TokenBudget
from dynagroup.memory import simulate
from tests import models
from tests.integrations.toys import trainer
from tests.torchrun import on_ranks
from tests.update.test_filling import LENGTHS, WORDS, Model, Texts, collate

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of compiling
SHAPES = 4


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest would keep thousands of its lines."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


def forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs_of(model: torch.nn.Module) -> Counter[str]:
    """Compiles the model, for each shape anew; how many graphs are made of it from now on."""
    forget_graphs()
    graphs: Counter[str] = Counter()

    def counting(name: str) -> Callable[[Any, Any], Any]:
        def compiler(graph: Any, _inputs: Any) -> Any:
            graphs[name] += 1
            return graph

        return compiler

    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    model.compile(backend=backend, dynamic=False)
    return graphs


def steps_of_two_epochs(shapes: int) -> Iterator[Any]:
    loader = PlannedDataLoader(
        Texts(),
        LENGTHS,
        TokenBudget(90),
        samples_per_update=16,
        shapes=shapes,
        collate_fn=collate,
    )
    yield from loader
    yield from loader


def plain_loop(shapes: int) -> Counter[str]:
    """Two epochs, on as many ranks as there are."""
    model: torch.nn.Module = Model()
    graphs = graphs_of(model)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps_of_two_epochs(shapes):
        loss = model(**step.batch) * step.loss_scale
        loss.backward()
        if step.ends_update:
            optimizer.step()
            optimizer.zero_grad()
    return graphs


def assert_compiled_once_a_shape(graphs: Counter[str]) -> None:
    assert 1 < graphs["forward"] <= SHAPES
    assert graphs["backward"] == graphs["forward"]


def test_a_loop_compiles_once_a_shape() -> None:
    assert_compiled_once_a_shape(plain_loop(SHAPES))


def plain_loop_of_a_rank(shapes: int) -> Counter[str]:
    dist.init_process_group("gloo")
    return plain_loop(shapes)


@pytest.mark.slow
def test_two_ranks_compile_once_a_shape() -> None:
    for graphs in on_ranks(2, plain_loop_of_a_rank, SHAPES):
        assert_compiled_once_a_shape(graphs)


class WithLoss(Model):
    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        known = labels.where(labels < 0, labels % WORDS)
        return {"loss": super().forward(input_ids % WORDS, attention_mask, known)}


def test_the_trainer_compiles_once_a_shape(tmp_path: Any) -> None:
    model = WithLoss()
    run = trainer(
        "causal",
        tmp_path,
        fits=True,
        model=model,
        max_steps=-1,
        num_train_epochs=2,
        config={"shapes": SHAPES},
    )
    run.loss_is_scaled_for_ga = False  # known: it need not be asked, without gradients
    graphs = graphs_of(model)
    run.train()
    assert run.state.epoch == 2
    assert_compiled_once_a_shape(graphs)
    assert counters["stats"]["unique_graphs"] == graphs["forward"]


@pytest.fixture
def compiled() -> Any:
    forget_graphs()
    return torch.compile(small_llama(), backend="eager", dynamic=False)


def small_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(models.llama(layers=1, attn_implementation="eager"))


def test_memory_of_a_compiled_model_is_that_of_the_model(compiled: Any) -> None:
    budget = MemoryBudget.from_model(compiled, "1GB")
    assert budget.figures() == MemoryBudget.from_model(small_llama(), "1GB").figures()


def test_a_trace_and_a_simulation_neither_compile_a_model_nor_keep_it_from_being_compiled(
    compiled: Any,
) -> None:
    MemoryBudget.from_model(compiled, "1GB")
    simulate(compiled, None, [(2, 8)])
    assert counters["stats"]["unique_graphs"] == 0
    compiled(torch.ones(2, 8, dtype=torch.int64), use_cache=False)
    assert counters["stats"]["unique_graphs"] == 1
