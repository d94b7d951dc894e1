"""Losses of every kind, also when memory runs out, and evaluation: our Trainer gives what the plain Trainer gives."""

import warnings
from contextlib import nullcontext
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertForQuestionAnswering,
    OlmoeConfig,
    OlmoeForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)

from dynagroup import ConfigError, ShapeLadder, TokenBudget
from dynagroup.integrations.hf import DynagroupTrainer, DynagroupTrainerMixin, dynagroup_trainer
from dynagroup.integrations.hf_evaluate import EvaluationRows
from dynagroup.integrations.hf_step import defines_compute_loss
from tests import models
from tests.integrations import toys
from tests.integrations.toys import arguments, parameters, trainer
from tests.models import Allocator

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONLINE: dict[str, Any] = {"mode": "online", "lengths": None}
ONCE = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 16,
    "max_steps": 3,
    "max_grad_norm": 0.0,
}
COUNT = 37
BY_KIND = [{"kinds": "kind"}, {"mode": "online", "kind_of": lambda row: row["kind"]}]


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


class CountedRows(DynagroupTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * (inputs["labels"] >= 0).any(1).double().mean()


PlainMean: Any = type("PlainMean", (MeanLoss, Trainer), {})
OursMean: Any = type("OursMean", (DynagroupTrainerMixin, PlainMean), {})  # the loss is below ours
MeanOurs: Any = type("MeanOurs", (MeanLoss, DynagroupTrainer), {})  # the loss is above ours


def trained(cls, tmp_path, monkeypatch, mean=False, **changes):
    name = "DynagroupTrainer" if issubclass(cls, DynagroupTrainerMixin) else "Trainer"
    monkeypatch.setattr(toys, name, cls)
    run = trainer("causal", tmp_path, fits=name != "Trainer", **{**ONCE, **changes})
    if mean == "attribute":
        run.asked, run.compute_loss = 0, MethodType(MeanLoss.compute_loss, run)
    elif mean:
        run.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: mean_of_tokens(
            outputs.logits, labels
        )
    run.train()
    return run


@pytest.mark.parametrize(
    ("cls", "config", "mean"),
    [
        (OursMean, {}, False),
        (MeanOurs, {}, False),
        (MeanOurs, ONLINE, False),
        (OursMean, {"out_of_memory": "retry"}, False),
        (DynagroupTrainer, {}, True),
        (DynagroupTrainer, {}, "attribute"),
    ],
)
def test_a_loss_that_is_a_mean_counts_once_an_update(cls, config, mean, tmp_path, monkeypatch):
    """Of a method, of a function that the Trainer is given, or of a method of this one object."""
    plain = trained(PlainMean, tmp_path, monkeypatch)
    ours = trained(cls, tmp_path, monkeypatch, config=config, mean=mean)
    assert ours.update_loader.stats.samples == 48
    assert sum(ours.update_loader.stats.batch_sizes.values()) > 3, "an update is several batches"
    assert (parameters(plain.model) - parameters(ours.model)).abs().max() < 1e-8
    assert plain.state.log_history[-1]["train_loss"] == pytest.approx(
        ours.state.log_history[-1]["train_loss"]
    )


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("cls", [OursMean, DynagroupTrainer])
def test_retries_are_exact_where_few_samples_have_labels(cls, first, tmp_path, monkeypatch):
    """The first samples, or the whole first update, have none: whether the loss is a mean is found out nevertheless."""
    rows, limit, model = toys.samples("causal", 48), Allocator(45), toys.causal_lm()
    for row in [row for i, row in enumerate(rows) if i % 6 < 5 or i < first]:
        row["labels"] = [-100] * len(row["labels"])
    monkeypatch.setattr(toys, "samples", lambda *_: rows)
    limit.in_forward(model)
    how = {"train_sampling_strategy": "sequential"}
    whole = trained(cls, tmp_path, monkeypatch, **how)
    parts = trained(
        cls, tmp_path, monkeypatch, config={"out_of_memory": "retry"}, model=model, **how
    )
    assert limit.failures
    assert (parameters(whole.model) - parameters(model)).abs().max() < 1e-8
    losses = [run.state.log_history[-1]["train_loss"] for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1])


def test_the_balancing_loss_of_experts_counts_once_an_update(tmp_path, monkeypatch):
    def loss(cls, weight):
        torch.manual_seed(0)
        how = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": weight,
        }
        model = OlmoeForCausalLM(
            models.config(OlmoeConfig, vocab=toys.VOCAB, pad_token_id=0, **how)
        )
        given = {"config": {"weigh": "tokens"}} if cls is DynagroupTrainer else {}
        run = trained(cls, tmp_path, monkeypatch, model=model, max_steps=1, **given)
        return run.state.log_history[-1]["train_loss"]

    plain, ours = (loss(cls, 0.5) - loss(cls, 0.0) for cls in (Trainer, DynagroupTrainer))
    assert 0.1 < plain == pytest.approx(ours, rel=0.05)


class Differentiating(MeanLoss):
    """A loss that needs gradients itself, as gradient penalties do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        torch.autograd.grad(loss, next(model.parameters()), create_graph=True)
        return loss


def test_a_loss_that_needs_gradients_is_tested_and_filled_rows_must_not_count(
    tmp_path, monkeypatch
):
    assert [defines_compute_loss(kind) for kind in (DynagroupTrainer, PlainMean, OursMean)] == [
        False,
        True,
        True,
    ]
    with pytest.raises(
        ConfigError, match="the loss counts the rows of weight 0 that `shapes` adds"
    ):
        trained(CountedRows, tmp_path, monkeypatch, config={"shapes": 3})
    with pytest.warns(match="the loss counts the rows of weight 0 that `shapes` adds"):
        trained(CountedRows, tmp_path, monkeypatch, config={"shapes": 3, "weigh": "samples"})
    own = type("Mine", (Differentiating, DynagroupTrainer), {})
    plain, ours = trained(PlainMean, tmp_path, monkeypatch), trained(own, tmp_path, monkeypatch)
    assert (parameters(plain.model) - parameters(ours.model)).abs().max() < 1e-8


def test_an_idle_rank_does_not_divide_by_no_items(tmp_path):
    run = trainer("causal", tmp_path, fits=True, **ONCE)
    batch = toys.collate(toys.samples("causal", 2))
    blank = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert run.get_batch_samples(iter([blank]), 1, "cpu")[1] == 1


def with_and_without_failures(
    folder: Any, limits: list[float]
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """For each mode and place: parameters without failures and with them, and how often this rank failed."""

    def run(config: dict[str, Any], place: str | None) -> tuple[torch.Tensor, int]:
        found = trainer(
            "causal",
            f"{folder}/run",
            fits=True,
            exact_loss=True,
            config={**config, "out_of_memory": "retry" if place else None},
            gradient_accumulation_steps=4 // len(limits),
            count=48,
            max_steps=4,
            max_grad_norm=0.3,
        )
        allocator = Allocator(limits[found.args.process_index])
        if place is not None:
            getattr(allocator, place)(found.model.transformer.h[0])
        found.train()
        return parameters(found.model), len(allocator.failures)

    cases = [(config, place) for config in ({}, ONLINE) for place in ("in_forward", "in_backward")]
    return [(run(config, None)[0], *run(config, place)) for config, place in cases]


def tight(run: Any, limit: int) -> Any:
    Allocator(limit).in_forward(run.model)
    return run


@pytest.mark.parametrize(("kind", "weigh"), [("causal", "samples"), ("classifier", "auto")])
def test_batches_that_run_out_of_memory_are_repeated_in_parts(kind, weigh, tmp_path):
    """A loss that is divided by the update's items needs no weights, whatever ``weigh`` says of losses that are means."""

    def run(folder, config, limit=10**6):
        changes = {"exact_loss": kind == "causal", "max_steps": 2, "logging_steps": 2}
        found = tight(
            trainer(
                kind, tmp_path / folder, fits=True, config={"weigh": weigh, **config}, **changes
            ),
            limit,
        )
        found.train()
        return parameters(found.model), found.state.log_history[0]

    plain, _ = run("plain", {})
    whole, logs = run("whole", {"out_of_memory": "retry"})
    split, split_logs = run("split", {"out_of_memory": "retry"}, limit=120)
    assert (plain - whole).abs().max() < 1e-12
    assert (plain - split).abs().max() < 1e-8
    assert logs["oom_retries"] == 0 < split_logs["oom_retries"]
    assert split_logs["loss"] == pytest.approx(logs["loss"], rel=1e-6)


@pytest.mark.parametrize(
    "config", [{}, ONLINE, {"updates": "free"}], ids=["offline", "online", "free"]
)
def test_later_epochs_are_planned_by_what_failed_also_after_resuming(config, tmp_path):
    count = 96 if "updates" in config else 48

    def run(folder, resume=None):
        changes = {
            "exact_loss": True,
            "max_steps": -1,
            "num_train_epochs": 2,
            "count": count,
            "logging_steps": 1,
        }
        changes |= {
            "save_strategy": "steps",
            "save_steps": 1,
            "config": {"out_of_memory": "retry", **config},
        }
        found = tight(trainer("causal", tmp_path / folder, fits=True, **changes), 137)
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run("whole")
    retries = [
        (row["epoch"], row["oom_retries"])
        for row in whole.state.log_history
        if "oom_retries" in row
    ]
    assert sum(count for epoch, count in retries if epoch <= 1) > 0
    assert not any(count for epoch, count in retries if epoch > 1)
    assert (whole.state.epoch, whole.update_loader.stats.samples) == (2, 2 * count)
    learned = whole.update_loader.budget.applied
    assert learned is not None
    for step in (1, whole.state.global_step - 1):
        resumed = run(f"from{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert (parameters(resumed.model) - parameters(whole.model)).abs().max() < 1e-10
        assert resumed.update_loader.budget.applied == learned


def test_each_training_guards_the_model_that_it_trains(tmp_path):
    """``train()`` with ``model_init``, as a search of hyperparameters calls it, has a new model every time."""
    limit = Allocator(10**6)

    def new_model():
        model = toys.causal_lm()
        limit.in_backward(model.transformer.h[0])
        return model

    def twice(folder, config):
        found = trainer(
            "causal", tmp_path / folder, fits=True, exact_loss=True, config=config, max_steps=2
        )
        found.model_init = new_model
        for limit.limit in (10**6, 120 if config else 10**6):
            found.train()
        found.args.gradient_accumulation_steps = 3  # as a search for hyperparameters sets it
        found.train()
        assert found.update_loader.stats.update_samples == 2 * 12
        return parameters(found.model)

    whole, split = twice("whole", {}), twice("split", {"out_of_memory": "retry"})
    assert limit.failures
    assert (whole - split).abs().max() < 1e-8


def shares(found: Any) -> dict[str, float]:
    """Of two samples in a known place, and of all: wrong as soon as results lie in another order."""
    logits, labels = found.predictions, found.label_ids
    third, last = (float(logits[row].reshape(-1)[0]) for row in (2, -1))
    return {
        "accuracy": (logits.argmax(-1) == labels)[labels != -100].mean(),
        "third": third,
        "last": last,
    }


def evaluated(
    kind: str, folder: Any, *, fits: bool, eval_config: Any = True, **changes: Any
) -> Any:
    usual = {"compute_metrics": shares, "max_steps": 1, "per_device_eval_batch_size": 5}
    run = trainer(
        kind,
        folder,
        fits=fits,
        eval_dataset=toys.samples(kind, COUNT, seed=3),
        **{**usual, **changes},
    )
    if fits:
        run.dynagroup_eval = eval_config
    return run


def figures(found: dict[str, float]) -> dict[str, float]:
    return {
        k: v
        for k, v in found.items()
        if not k.endswith(("runtime", "per_second", "preparation_time"))
    }


@pytest.mark.parametrize("shapes", [None, 3])
@pytest.mark.parametrize("kind", ["classifier", "causal"])
def test_metrics_and_predictions_are_the_plain_trainers(kind, shapes, tmp_path):
    """With few shapes the model sees no others, and predictions are padded to the widest of them."""
    lengths = [len(row["input_ids"]) for row in toys.samples(kind, COUNT, seed=3)]
    fits = True if shapes is None else ShapeLadder(lengths, TokenBudget(160), shapes)
    plain, ours = (
        evaluated(kind, tmp_path, fits=False),
        evaluated(kind, tmp_path, fits=True, eval_config=fits),
    )
    seen = models.shapes_seen(ours.model)
    found, expected = ours.predict(ours.eval_dataset), plain.predict(plain.eval_dataset)
    kept = expected.label_ids.shape[1:], expected.predictions.shape[1:]
    both = zip((found.label_ids, found.predictions), kept, strict=True)
    labels, logits = (of[(slice(None), *map(slice, wide))] for of, wide in both)
    assert (labels == expected.label_ids).all()
    assert np.abs(logits - expected.predictions)[expected.label_ids != -100].max() < 1e-6
    if kind == "classifier":  # the plain Trainer's mean of tokens depends on its batch size
        assert figures(ours.evaluate()) == pytest.approx(figures(plain.evaluate()), abs=1e-6)
        assert figures(found.metrics) == pytest.approx(figures(expected.metrics), abs=1e-6)
    assert max(n * width for n, width in seen) <= 160
    assert len({n for n, _ in seen}) > 1, "as many as fit"
    assert shapes is None or {*seen} <= {*fits.shapes}


@pytest.mark.parametrize(("exact_loss", "own"), [(True, False), (False, False), (False, True)])
def test_the_loss_is_that_of_one_batch_of_everything(exact_loss, own, tmp_path):
    """The plain Trainer's mean over batches of their means depends on its batch size; ours does not, also untrained."""
    plain = evaluated(
        "causal", tmp_path, fits=False, per_device_eval_batch_size=COUNT, exact_loss=exact_loss
    )
    ours = evaluated(
        "causal", tmp_path, fits=True, exact_loss=exact_loss, config={"weigh": "tokens"}
    )
    if own:
        plain.__class__, ours.__class__ = PlainMean, OursMean
    for run in (plain, ours):  # in a batch of its own it weighs as little as one can
        run.eval_dataset.append({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]})
    plain.args.per_device_eval_batch_size += 1
    expected = plain.evaluate()["eval_loss"]
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    ours.dynagroup_eval = TokenBudget(1)
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_weighs_its_samples_whatever_its_first_field_has(tmp_path):
    ours = evaluated(
        "classifier", tmp_path, fits=True, eval_config=TokenBudget(40), config={"weigh": "samples"}
    )
    collate, expected = ours.data_collator, ours.evaluate()["eval_loss"]
    ours.data_collator = lambda samples: {
        "output_attentions": torch.tensor([False]),
        **collate(samples),
    }
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("wanted", "name"), [("inputs", "inputs"), ("loss", "losses")])
def test_inputs_and_losses_reach_the_metrics_in_order(wanted, name, tmp_path):
    """Losses of samples are those of the Trainer's own batches: it is left to evaluate by itself."""
    seen = []
    for fits in (False, True):
        how = {
            "compute_metrics": lambda found: seen.append(found) or {},
            "include_for_metrics": [wanted],
        }
        with (
            pytest.warns(match="the Trainer's own batches")
            if fits and wanted == "loss"
            else nullcontext()
        ):
            evaluated("classifier", tmp_path, fits=fits, **how).evaluate()
    found, expected = (np.maximum(getattr(one, name), 0) for one in seen)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_generated_texts_are_the_plain_trainers(tmp_path):
    rows, found = toys.samples("seq2seq", 23, seed=3), []

    def decoded(ids):  # within a batch they are padded with 0, between batches with -100
        return [tuple(t for t in row if t not in (0, -100)) for row in ids.tolist()]

    for cls, extra in (
        (Seq2SeqTrainer, {}),
        (dynagroup_trainer(Seq2SeqTrainer), {"dynagroup": TokenBudget(160)}),
    ):
        own = {
            "accelerator_config": None,
            "predict_with_generate": True,
            "generation_max_length": 9,
        }
        args = Seq2SeqTrainingArguments(
            **{**arguments(tmp_path, per_device_eval_batch_size=4).to_dict(), **own}
        )
        run = cls(toys.seq2seq(), args, data_collator=toys.collate_seq2seq, **extra)
        run.model.generation_config.eos_token_id, run.model.generation_config.pad_token_id = 1, 0
        seen, output = models.shapes_seen(run.model), run.predict(rows)
        found.append((decoded(output.predictions), decoded(output.label_ids)))
    assert found[0] == found[1]
    assert found[0][1] == [tuple(row["labels"]) for row in rows]
    assert max(n for n, _ in seen) > 4


def test_evaluation_can_be_left_to_the_trainer_or_have_its_own_budget(tmp_path):
    run = evaluated("classifier", tmp_path, fits=True, eval_config=False)
    seen = models.shapes_seen(run.model)
    run.evaluate()
    assert {n for n, _ in seen} == {5, COUNT % 5}
    run.dynagroup_eval = TokenBudget(64)
    seen.clear()
    run.evaluate()
    assert max(n * width for n, width in seen if n > 1) <= 64


class Chosen(Trainer):
    """Evaluates every second sample, by a sampler of its own."""

    def get_eval_dataloader(self, eval_dataset=None):
        how = {"collate_fn": self.data_collator, "sampler": range(0, COUNT, 2), "batch_size": 4}
        return torch.utils.data.DataLoader(self.eval_dataset, **how)

    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


def test_a_class_that_chooses_its_samples_keeps_them_and_a_step_of_its_own_is_not_skipped(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(toys, "DynagroupTrainer", dynagroup_trainer(Chosen))
    run = evaluated("classifier", tmp_path, fits=True)
    seen = models.shapes_seen(run.model)
    with pytest.warns(
        UserWarning,
        match="another order: choose them in eval_dataset; dynagroup_eval=False: no warning",
    ):
        run.evaluate()
    assert [n for n, _ in seen] == [4, 4, 4, 4, 3]
    with pytest.raises(
        ConfigError, match="out_of_memory='retry' with a training_step of .*leave one of them out"
    ):
        trainer("causal", tmp_path, fits=True, config={"out_of_memory": "retry"})


@pytest.mark.parametrize(
    "name", ["training_step", "get_batch_samples", "prediction_step", "get_train_dataloader"]
)
def test_methods_that_form_and_weigh_batches_cannot_be_replaced(name, tmp_path, monkeypatch):
    own = type("Own", (toys.DynagroupTrainer,), {name: lambda self, *args, **kwargs: None})
    for cls in (own, type("Derived", (own,), {})):
        monkeypatch.setattr(toys, "DynagroupTrainer", cls)
        with pytest.raises(ConfigError, match=f"{name} of {cls.__name__} must not replace dynagr"):
            trainer("classifier", tmp_path, fits=True)


def test_rows_are_not_added_to_batches_whose_targets_are_no_labels(tmp_path):
    """Their targets would count: no label of -100 says that a row has weight 0."""
    rows = [
        {"input_ids": [i + 1] * 10, "start_positions": i % 5, "end_positions": 5 + i % 5}
        for i in range(9)
    ]
    found = []
    for fits, shapes in ((False, None), (True, None), (True, 1)):
        torch.manual_seed(0)
        model = BertForQuestionAnswering(models.bert(vocab=toys.VOCAB, layers=1)).double()
        config = {"lengths": [10] * 96, "budget": TokenBudget(40), "shapes": shapes}
        run = trainer(
            "classifier",
            tmp_path,
            fits=fits,
            model=model,
            config=config,
            eval_dataset=rows,
            max_steps=1,
        )
        run.data_collator = lambda batch: {
            name: torch.tensor([row[name] for row in batch]) for name in batch[0]
        }
        run.train_dataset = [rows[i % 9] for i in range(96)]
        found.append(run.evaluate()["eval_loss"])
    assert found == pytest.approx([found[0]] * 3, abs=1e-7)
    with pytest.raises(
        ConfigError, match="the loss counts the rows of weight 0 that `shapes` adds"
    ):
        run.train()


@pytest.mark.filterwarnings("error::UserWarning")
def test_unknown_lengths_are_said_once_and_evaluated_as_ever(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = evaluated("classifier", tmp_path, fits=True, compute_metrics=None)
    run.data_collator = lambda rows: toys.collate(
        [{"input_ids": r["tokens"], "labels": r["labels"]} for r in rows]
    )
    data = [{"labels": 0, "tokens": [1] * n} for n in range(1, 9)]
    with pytest.warns(
        UserWarning,
        match="batches of per_device_eval_batch_size=5 .*dynagroup_eval=False: no warning",
    ):
        run.evaluate(data)
    assert run.evaluate(data)["eval_loss"] > 0


def evaluated_by_kind(
    folder: Any, config: dict[str, Any]
) -> tuple[dict[str, float], list[set[str]]]:
    """Metrics, and the kinds in each batch of this rank."""
    run, seen = evaluated("classifier", folder, fits=True, config=config), []
    for number, row in enumerate(run.eval_dataset):
        row["kind"] = "text" if number % 5 else "image"
    run.data_collator = lambda rows: (
        seen.append({row["kind"] for row in rows}) or toys.collate(rows)
    )
    return run.evaluate(), seen


@pytest.mark.parametrize("config", BY_KIND, ids=["column", "kind_of"])
def test_evaluation_follows_kinds(config, tmp_path):
    found, seen = evaluated_by_kind(tmp_path, config)
    assert {frozenset(kinds) for kinds in seen} == {frozenset({"text"}), frozenset({"image"})}
    assert figures(found) == pytest.approx(
        figures(evaluated("classifier", tmp_path, fits=False).evaluate()), abs=1e-6
    )


@pytest.mark.parametrize("num_ranks", [1, 3, 50])
@pytest.mark.parametrize("kinds", [1, 2, 30])
def test_rows_hold_every_sample_once_and_fit(num_ranks, kinds):
    rng = np.random.default_rng(num_ranks)
    lengths, labels = rng.integers(1, 40, COUNT), rng.integers(0, kinds, COUNT)
    rows = EvaluationRows({"tokens": lengths}, TokenBudget(120), num_ranks, kinds=labels)
    batches = list(rows)
    assert len(batches) == len(rows) == num_ranks * len(rows.rows)
    gathered = []
    for row in range(len(rows.rows)):
        dealt = batches[row * num_ranks : (row + 1) * num_ranks]
        assert len({len(batch) for batch in dealt}) == 1
        assert len({label for batch in dealt for label in labels[batch]}) == 1, "a row of two kinds"
        assert all(len(b) == 1 or len(b) * max(lengths[b]) <= 120 for b in dealt)
        gathered += [i for batch in dealt[: rows.rows[row].num_real] for i in batch]
    assert gathered == rows.order.tolist()
    assert sorted(gathered) == list(range(COUNT))
