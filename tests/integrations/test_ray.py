"""Blocks of Ray Data: models give what they give in this process. What needs Ray is run by scripts/test_ray.sh."""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import (
    ConfigError,
    classify_dataset,
    embed_dataset,
    generate_dataset,
    measure_lengths,
)
from dynagroup.integrations.ray import Predictor
from dynagroup.testing import Allocator
from tests import models
from tests.models import TEXTS, small_llama, small_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
HELD = 60  # tokens
OPTIONS: dict[str, dict[str, Any]] = {
    "embed": {"normalize": True},
    "classify": {},
    "generate": {"max_new_tokens": 3},
}
RUN = {"embed": embed_dataset, "classify": classify_dataset, "generate": generate_dataset}
COLUMNS = {"embed": "embedding", "classify": "logits", "generate": "generated_text"}


def load(task: str = "embed", held: float = float("inf")) -> tuple[Any, Any]:
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    model: Any = (
        small_llama()
        if task != "classify"
        else BertForSequenceClassification(models.bert(vocab=30, inner=16))
    )
    model.allocator = Allocator(held)
    model.allocator.in_forward(model.model if task == "embed" else model)
    return model, small_tokenizer()


@pytest.mark.parametrize("column", ["text", "ids"])
@pytest.mark.parametrize("task", RUN)
def test_a_block_gets_a_column_in_its_own_order(task: str, column: str) -> None:
    how = {"column": column, "batch_size": 9, **OPTIONS[task]}
    predict = Predictor(lambda: load(task, HELD), task, **how)
    wanted = RUN[task](*load(task), TEXTS, progress=False, **OPTIONS[task])
    ids = np.empty(len(TEXTS), object)
    ids[:] = [np.array(row) for row in small_tokenizer()(TEXTS)["input_ids"]]
    for rows in (slice(0, 0), slice(4, 5), slice(5, None)):
        block = {
            "text": np.array(TEXTS, object)[rows],
            "ids": ids[rows],
            "n": np.arange(len(TEXTS))[rows],
        }
        made = predict(block)
        assert [*made] == ["text", "ids", "n", COLUMNS[task]]
        assert all(made[name] is block[name] for name in block)
        assert len(made[COLUMNS[task]]) == len(block["n"])
        if task == "generate":
            assert [*made[COLUMNS[task]]] == [*wanted[rows]]
        elif len(block["n"]):
            np.testing.assert_allclose(made[COLUMNS[task]], wanted[rows], rtol=1e-4, atol=1e-5)
    assert predict.model.allocator.failures
    with pytest.raises(
        ConfigError, match=f"a block must be a dict of arrays with '{column}'.* but is .'other'"
    ):
        predict({"other": np.zeros(1)})


class Watched(Predictor):
    """Says beside each row which process made it, and how often memory had run out there."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.3)
        made, count = super().__call__(batch), len(batch["text"])
        failures = len(self.model.allocator.failures)
        return {
            **made,
            "process": np.full(count, os.getpid()),
            "failures": np.full(count, failures),
        }


@pytest.fixture(scope="module")
def ray() -> Any:
    pytest.importorskip("ray.data")
    ray = import_module("ray")
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    yield ray
    ray.shutdown()


def blocks(ray: Any) -> Any:
    """Eight blocks of five rows; one is empty, and one has a single row."""
    rows = ray.data.from_items(
        [{"text": text, "n": n} for n, text in enumerate(TEXTS)], override_num_blocks=8
    )
    return rows.filter(lambda row: not (5 <= row["n"] < 10 or 16 <= row["n"] < 20))


@pytest.mark.parametrize("task", ["embed", "generate"])
def test_two_actors_give_what_this_process_gives(ray: Any, task: str) -> None:
    how = {"load": lambda: load(task, HELD), "task": task, "batch_size": 9, **OPTIONS[task]}
    made = (
        blocks(ray)
        .map_batches(Watched, fn_constructor_kwargs=how, batch_size=None, concurrency=2)
        .take_all()
    )
    kept = [n for n in range(len(TEXTS)) if not (5 <= n < 10 or 16 <= n < 20)]
    assert [row["n"] for row in made] == kept
    assert [row["text"] for row in made] == [TEXTS[n] for n in kept]
    wanted = RUN[task](*load(task), [TEXTS[n] for n in kept], progress=False, **OPTIONS[task])
    found = [row[COLUMNS[task]] for row in made]
    assert (
        found == wanted if task == "generate" else np.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    )
    assert len({row["process"] for row in made} - {os.getpid()}) == 2
    assert max(row["failures"] for row in made) > 0


def test_ray_measures_lengths_on_a_local_cluster_as_this_process_does(ray: Any) -> None:
    tokenizer = small_tokenizer()
    count = lambda batch: {  # noqa: E731
        "length": measure_lengths(list(batch["text"]), tokenizer, progress=False)
    }
    rows = ray.data.from_items([{"text": text} for text in TEXTS], override_num_blocks=3)
    batches = rows.map_batches(count, batch_size=7).iter_batches()
    assert (
        np.concatenate([batch["length"] for batch in batches]).tolist()
        == measure_lengths(TEXTS, tokenizer).tolist()
    )
