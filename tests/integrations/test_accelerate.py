"""The Accelerate adapter against the real Accelerate, and the facts about it that shaped it."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from dynagroup import ConfigError, LengthAwareBatchSampler, OnlineDataLoader, TokenBudget
from dynagroup.integrations.accelerate import prepare
from dynagroup.update.planned import PlannedDataLoader
from tests.integrations import toys
from tests.integrations.jobs import parameters

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROWS = toys.samples("classifier", 48)
LABELS = ["a", None, "a"] * 16


def loader(online=False, budget=160, **how):
    how = {"collate_fn": toys.collate, "samples_per_update": 12, "weigh": "samples", **how}
    if online:
        return OnlineDataLoader(ROWS, TokenBudget(budget), shuffle=True, kinds=LABELS, **how)
    return PlannedDataLoader(ROWS, toys.lengths(ROWS), TokenBudget(budget), kinds=LABELS, **how)


def train(steps, accelerator, model, optimizer, epochs=(0, 1), stop=None):
    updates = 0
    for epoch in epochs:
        steps.set_epoch(epoch)
        for step in steps:
            assert {LABELS[i] for i in step.indices} <= {step.kind}
            with steps.local_until_update(model, step):
                accelerator.backward(model(**step.batch).loss * step.loss_scale)
            if step.ends_update:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                if updates == stop:
                    return


def run(online, budget=160, **settings):
    accelerator, model = Accelerator(cpu=True), toys.classifier()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = prepare(accelerator, loader(online, budget))
    train(steps, accelerator, model, optimizer, **settings)
    return accelerator, model, optimizer, steps


def agreeing():
    """Parameters of updates in one batch a rank, and of updates in several."""
    whole = parameters(run(False, budget=10**6)[1])
    return {f"accelerate, online={online}": [whole, parameters(run(online)[1])] for online in (False, True)}


@pytest.mark.parametrize("online", [False, True])
def test_a_state_saved_within_an_epoch_resumes_exactly(tmp_path, online):
    whole = parameters(run(online)[1])
    accelerator, *_ = run(online, stop=6)
    accelerator.save_state(tmp_path)
    accelerator, model, optimizer, steps = run(online, epochs=())
    accelerator.load_state(tmp_path)
    train(steps, accelerator, model, optimizer, epochs=(1,))
    assert (parameters(model) - whole).abs().max() < 1e-12


def test_misuse_is_named():
    with pytest.raises(ConfigError, match="`gradient_accumulation_steps` at 1: `loss_scale` already weighs"):
        prepare(Accelerator(cpu=True, gradient_accumulation_steps=2), loader())
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="must be of dynagroup, or have"):
        prepare(accelerator, DataLoader(range(4)))
    sampler = LengthAwareBatchSampler(toys.lengths(ROWS), TokenBudget(160))
    prepared = prepare(accelerator, DataLoader(ROWS, batch_sampler=sampler, collate_fn=toys.collate))
    assert sum(len(batch["labels"]) for batch in prepared) == 48
    accelerator.dataloader_config.split_batches = True
    with pytest.raises(ConfigError, match="split_batches=True"):
        prepare(accelerator, DataLoader(ROWS, batch_sampler=sampler))
