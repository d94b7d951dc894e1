"""Losses and weights that fail, on one rank or in one batch, are told of on all ranks and by name."""

import re

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

from dynagroup import (
    AlignmentError,
    ConfigError,
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
    check_loss,
)
from dynagroup.integrations.accelerate import prepare
from dynagroup.integrations.hf import DynagroupConfig, DynagroupTrainer
from dynagroup.testing import run_ranks
from dynagroup.update.loader import StepLoader

ROWS = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor([2.0, 7.0])]


@pytest.mark.parametrize("rule", ["sum", "mean"])
@pytest.mark.parametrize(
    ("error", "of_rank_1", "of_rank_0"),
    [
        (
            KeyError("gold"),
            "cannot test .*KeyError: 'gold'",
            "it failed on another rank; see its log",
        ),
        (ConfigError("no gold"), "no gold", "another rank refused the loss"),
    ],
)
def test_a_loss_that_fails_on_one_rank_ends_the_split_test_on_all(
    rule, error, of_rank_1, of_rank_0
):
    def run(world):
        layer = torch.nn.Linear(2, 1)
        calls = []

        def loss_of(step):
            calls.append(step)
            if world.rank == 1 and len(calls) > 2:
                raise error
            loss = layer(step.batch)
            return loss.mean() if rule == "mean" else loss.sum() / step.samples.total

        with pytest.raises((ConfigError, AlignmentError)) as told:
            check_loss(layer, loss_of, ROWS, world=world)
        return str(told.value)

    texts = run_ranks(2, run)
    for text, expected in zip(texts, [of_rank_0, of_rank_1], strict=True):
        assert re.search(expected, text), text


class OneGone:
    """Rows of which those behind the second are missing on rank 1."""

    def __init__(self, world, num_rows=6):
        self.world = world
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        if self.world.rank == 1 and index > 1:
            raise KeyError(f"row {index} is gone")
        return {"input_ids": torch.ones(3), "labels": torch.ones(3)}


def list_of(world):
    return OneGone(world)


def planned(world):
    return PlannedDataLoader(OneGone(world), [3] * 6, TokenBudget(9), world=world)


def online(world):
    return OnlineDataLoader(OneGone(world), TokenBudget(9), length_of=len, world=world)


@pytest.mark.parametrize("samples_of", [list_of, planned, online])
def test_samples_that_one_rank_cannot_read_end_the_split_test_on_all(samples_of):
    def run(world):
        layer = torch.nn.Linear(2, 1)
        samples = samples_of(world)
        arguments = {} if isinstance(samples, StepLoader) else {"world": world}
        with pytest.raises((KeyError, AlignmentError)) as told:
            check_loss(layer, lambda step: layer.weight.sum(), samples, **arguments)
        return str(told.value)

    of_rank_0, of_rank_1 = run_ranks(2, run)
    assert re.search(
        "rank 1 of 2 could not read and .* a few samples; see that rank's error", of_rank_0
    )
    assert "is gone" in of_rank_1


def loader_of(collate_fn, weigh):
    return PlannedDataLoader(range(6), [3] * 6, TokenBudget(9), collate_fn=collate_fn, weigh=weigh)


def test_ragged_labels_are_named_with_the_way_out():
    ragged = loader_of(lambda indices: {"labels": [[1] * (1 + i) for i in indices]}, "labels")
    with pytest.raises(
        ConfigError, match="`labels` of a batch .* equal lengths.*pad them with -100"
    ):
        next(iter(ragged))


def test_a_weigh_that_fails_is_named_with_its_samples():
    failing = loader_of(lambda indices: {"ids": indices}, lambda batch: batch["weights"])
    with pytest.raises(RuntimeError, match=r"weigh failed on .*indices \[.*KeyError: 'weights'"):
        next(iter(failing))


class TwoHeads(torch.nn.Module):
    """Two named losses; ``penalty`` is in the loss alone."""

    def __init__(self, penalty):
        super().__init__()
        self.first = torch.nn.Linear(2, 1)
        self.second = torch.nn.Linear(2, 1)
        self.penalty = penalty

    def forward(self, rows):
        losses = {"first": self.first(rows).mean(), "second": self.second(rows).square().mean()}
        loss = losses["first"] + losses["second"] + self.penalty * self.first.weight.square().sum()
        return {"loss": loss, "losses": losses}


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_a_term_beside_the_named_losses_is_refused(penalty, tmp_path):
    args = TrainingArguments(
        tmp_path, max_steps=2, use_cpu=True, report_to=[], remove_unused_columns=False
    )
    config = DynagroupConfig(
        budget=TokenBudget(8), lengths=[2] * 3, weigh={"first": "samples", "second": "samples"}
    )
    trainer = DynagroupTrainer(
        TwoHeads(penalty),
        args,
        train_dataset=ROWS,
        data_collator=lambda rows: {"rows": torch.stack(rows)},
        dynagroup=config,
    )
    if not penalty:
        assert trainer.train().global_step == 2
        return
    with pytest.raises(ConfigError, match="the sum of `losses` is trained.*each of its terms"):
        trainer.train()


def test_accelerate_tells_that_a_loss_is_a_sum():
    loader = PlannedDataLoader(ROWS, [2, 2, 2], TokenBudget(6), weigh="samples")
    layer = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="is a sum, not a mean: leave `step.loss_scale` out"):
        prepare(
            Accelerator(cpu=True),
            loader,
            layer,
            lambda step: layer(step.batch).sum() / step.samples.total,
        )
