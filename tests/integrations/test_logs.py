"""What the Trainers' own loggers get, against batches that are counted here."""

import csv
from typing import Any

import numpy as np
import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from dynagroup import MemoryBudget, OnlineDataLoader, PlannedDataLoader  # noqa: E402
from dynagroup.integrations.lightning import LightningSteps, update_loss  # noqa: E402
from dynagroup.memory.protocols import PaddedTokens  # noqa: E402
from tests.integrations import toys  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = toys.samples("causal", 48)
LONGEST = max(toys.lengths(ROWS))
MOST_SAMPLES = 6  # of the longest
EVERY = 2  # updates


def memory_budget() -> MemoryBudget:
    return MemoryBudget(MOST_SAMPLES, longest=LONGEST, model=PaddedTokens())


class Counted:
    """Notes samples, width and tokens of each batch that a model learns from."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.batches: list[tuple[int, int, int]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and next(module.children()).training:  # not in the split test
            num_samples, width = kwargs["input_ids"].shape
            self.batches.append((num_samples, width, int(kwargs["attention_mask"].sum())))

    def figures(self) -> dict[str, float]:
        num_rows, width, tokens = np.array(self.batches).T
        padded = num_rows * width
        return {
            "padding": 1 - tokens.sum() / padded.sum(),
            "predicted_memory": padded.max() / (MOST_SAMPLES * LONGEST),
        }


def check(entries: list[dict[str, float]], counted: Counted) -> None:
    """The figures of all entries together are those of all batches."""
    assert {entry["samples_per_update"] for entry in entries} == {16}
    assert all(entry["tokens_per_s"] > 0 for entry in entries)
    largest = max(entry["predicted_memory"] for entry in entries)
    expected = counted.figures()
    assert expected["predicted_memory"] <= largest < expected["predicted_memory"] + 0.011
    paddings = [entry["padding"] for entry in entries]
    assert min(paddings) <= expected["padding"] <= max(paddings)


def test_the_trainer_logs_padding_speed_and_predicted_memory(tmp_path: Any) -> None:
    settings = {"count": len(ROWS), "max_steps": 6, "logging_steps": EVERY}
    config = {"budget": memory_budget()}
    run = toys.trainer("causal", tmp_path, fits=True, config=config, **settings)
    counted = Counted(run.model)
    run.train()
    check([entry for entry in run.state.log_history if "loss" in entry], counted)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = toys.causal_lm()

    def training_step(self, step: Any, batch_idx: int) -> torch.Tensor:
        return update_loss(self, step, self.model(**step.batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("online", [False, True], ids=["planned", "online"])
def test_lightnings_loggers_get_the_same(tmp_path: Any, online: bool) -> None:
    settings: dict[str, Any] = {"samples_per_update": 16, "collate_fn": toys.collate}
    if online:
        loader: Any = OnlineDataLoader(ROWS, memory_budget(), shuffle=True, **settings)
    else:
        loader = PlannedDataLoader(ROWS, toys.lengths(ROWS), memory_budget(), **settings)
    steps = LightningSteps(loader)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=EVERY,
        logger=CSVLogger(tmp_path, name="", version=""),
        callbacks=[steps],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    counted = Counted(module.model)
    trainer.fit(module, steps)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row.pop("step")) for row in rows] == [2, 4, 6]
    check([{name: float(value) for name, value in row.items()} for row in rows], counted)
