"""Losses of every kind weigh under our Trainer what they weigh under the plain one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from transformers import Trainer  # noqa: E402

from dynagroup import ConfigError  # noqa: E402
from dynagroup.distributed import SingleProcess  # noqa: E402
from dynagroup.integrations.hf import DynagroupTrainer, DynagroupTrainerMixin  # noqa: E402
from dynagroup.integrations.hf_step import is_a_mean  # noqa: E402
from tests.integrations import jobs, toys  # noqa: E402
from tests.integrations.jobs import parameters, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONCE = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16, "max_steps": 3, "max_grad_norm": 0.0}


def mean_of_tokens(logits, labels):
    flat, wanted = logits[:, :-1].reshape(-1, toys.VOCAB), labels[:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(flat, wanted, ignore_index=-100)


class MeanLoss:
    """The override that most subclasses have: a mean over the batch, whatever it is told."""

    asked = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.asked += 1
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = mean_of_tokens(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class SumLoss:
    """A mean only where it is not told the number of items."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        items = labels[:, 1:].ne(-100).sum()
        total = mean_of_tokens(outputs.logits, labels) * items
        return total / (items if num_items_in_batch is None else num_items_in_batch)


class PlainMean(MeanLoss, Trainer):
    pass


class PlainSum(SumLoss, Trainer):
    pass


class OursMean(DynagroupTrainerMixin, PlainMean):
    """The loss is below ours in the order of classes."""


class OursSum(DynagroupTrainerMixin, PlainSum):
    pass


class MeanOurs(MeanLoss, DynagroupTrainer):
    """The loss is above ours."""


def trained(cls, tmp_path, monkeypatch, **changes):
    name = "DynagroupTrainer" if issubclass(cls, DynagroupTrainerMixin) else "Trainer"
    monkeypatch.setattr(jobs, name, cls)
    run = trainer("causal", tmp_path, fits=name != "Trainer", **{**ONCE, **changes})
    run.train()
    return run


@pytest.mark.parametrize("cls", [OursMean, MeanOurs])
@pytest.mark.parametrize("config", [{}, {"mode": "online", "lengths": None}, {"out_of_memory": "retry"}])
def test_a_compute_loss_that_returns_a_mean_counts_once_an_update(cls, config, tmp_path, monkeypatch):
    plain = trained(PlainMean, tmp_path, monkeypatch)
    ours = trained(cls, tmp_path, monkeypatch, config=config)
    assert ours.update_loader.stats.samples == 48
    assert ours.asked > 3 + 2, "an update is several batches"
    assert (parameters(plain.model) - parameters(ours.model)).abs().max() < 1e-8
    assert plain.state.log_history[-1]["train_loss"] == pytest.approx(ours.state.log_history[-1]["train_loss"])


def test_a_compute_loss_that_divides_by_the_items_counts_once_an_update(tmp_path, monkeypatch):
    changes = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    plain, ours = (trained(cls, tmp_path, monkeypatch, **changes) for cls in (PlainSum, OursSum))
    assert (parameters(plain.model) - parameters(ours.model)).abs().max() < 1e-8


@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_function_that_returns_a_mean_counts_once_an_update(counts, tmp_path):
    """``compute_loss_func``; with and without a key ``labels``, from which the Trainer counts items."""
    targets = []

    def collate(rows):
        batch = toys.collate(rows)
        return batch if counts else {"targets" if k == "labels" else k: v for k, v in batch.items()}

    def loss(outputs, labels, num_items_in_batch=None):
        return mean_of_tokens(outputs.logits, labels if counts else targets.pop())

    def note(module, args, kwargs):
        targets.append(kwargs.pop("targets", None))
        return args, kwargs

    found = []
    for fits in (False, True):
        config = {} if counts else {"weigh": lambda batch: float(batch["targets"][:, 1:].ne(-100).sum())}
        run = trainer("causal", tmp_path, fits=fits, config=config, **ONCE)
        run.data_collator, run.compute_loss_func = collate, loss
        run.model.register_forward_pre_hook(note, with_kwargs=True)
        run.train()
        found.append(parameters(run.model))
    assert (found[0] - found[1]).abs().max() < 1e-8


class Undecided(MeanLoss):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        return loss if num_items_in_batch is None else loss * 1.3**num_items_in_batch


class Failing(MeanLoss):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        torch.autograd.grad(loss, next(model.parameters()), create_graph=True)
        return loss


@pytest.mark.parametrize(("loss", "why"), [(Undecided, "neither halves nor stays"), (Failing, "does not require grad")])
def test_a_loss_that_cannot_be_asked_is_refused_with_the_way_out(loss, why, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=f"{why}.*`loss_is_scaled_for_ga` to False"):
        trained(type("Mine", (loss, DynagroupTrainer), {}), tmp_path, monkeypatch)
    cls = type("Mine", (loss, DynagroupTrainer), {"loss_is_scaled_for_ga": False})
    if loss is Failing:
        plain, ours = trained(PlainMean, tmp_path, monkeypatch), trained(cls, tmp_path, monkeypatch)
        assert (parameters(plain.model) - parameters(ours.model)).abs().max() < 1e-8


def test_asking_leaves_no_trace_and_a_batch_without_labels_does_not_decide(tmp_path):
    """Random numbers and training modes stay. The first batch has nothing to predict, so its loss, 0 / 0, says nothing."""

    class Blank(MeanOurs):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * (torch.nan if self.asked <= 2 else 1.0)

    run = trainer("causal", tmp_path, fits=True, model=toys.with_dropout(toys.causal_lm()), **ONCE)
    run.__class__ = Blank
    run.model.train()
    run.model.transformer.h[0].eval()
    run.model.register_forward_hook(lambda *_: (torch.rand(1), None)[1])
    before, modes = torch.get_rng_state(), [m.training for m in run.model.modules()]
    batch = toys.collate(toys.samples("causal", 2))
    assert is_a_mean(run, run.model, batch, SingleProcess()) is None
    assert is_a_mean(run, run.model, batch, SingleProcess()) is True
    assert torch.equal(before, torch.get_rng_state())
    assert modes == [m.training for m in run.model.modules()]
