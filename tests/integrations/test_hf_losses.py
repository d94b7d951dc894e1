"""Losses of every kind, also when memory runs out, and evaluation: our Trainer gives what the plain Trainer gives."""

import warnings
from itertools import chain
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
ROWS_COUNT = "the loss counts the rows of weight 0 that `shapes` adds"
COUNT = 37
BY_KIND = [{"kinds": "kind"}, {"mode": "online", "kind_of": lambda row: row["kind"]}]


def mean_of_tokens(logits, labels):
    predictions = logits[:, :-1].reshape(-1, toys.VOCAB)
    targets = labels[:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(predictions, targets, ignore_index=-100)


def mean_of_outputs(outputs, labels, num_items_in_batch=None):
    return mean_of_tokens(outputs.logits, labels)


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
        share_of_rows = (inputs["labels"] >= 0).any(1).double().mean()
        return super().compute_loss(model, inputs) * share_of_rows


PlainMean: Any = type("PlainMean", (MeanLoss, Trainer), {})
OursMean: Any = type("OursMean", (DynagroupTrainerMixin, PlainMean), {})  # the loss is below ours
MeanOurs: Any = type("MeanOurs", (MeanLoss, DynagroupTrainer), {})  # the loss is above ours


def trained(cls, tmp_path, monkeypatch, mean=False, **changes):
    name = "DynagroupTrainer" if issubclass(cls, DynagroupTrainerMixin) else "Trainer"
    monkeypatch.setattr(toys, name, cls)
    settings = ONCE | changes
    run = trainer("causal", tmp_path, fits=name != "Trainer", **settings)
    if mean == "attribute":
        run.asked = 0
        run.compute_loss = MethodType(MeanLoss.compute_loss, run)
    elif mean:
        run.compute_loss_func = mean_of_outputs
    run.train()
    return run


def largest_difference(one, other):
    """Of the parameters of two trained models."""
    return (parameters(one) - parameters(other)).abs().max()


def train_loss(run):
    return run.state.log_history[-1]["train_loss"]


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
    assert largest_difference(plain.model, ours.model) < 1e-8
    assert train_loss(plain) == pytest.approx(train_loss(ours))


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("cls", [OursMean, DynagroupTrainer])
def test_retries_are_exact_where_few_samples_have_labels(cls, first, tmp_path, monkeypatch):
    """The first samples, or the whole first update, have none: whether the loss is a mean is found out nevertheless."""
    rows = toys.samples("causal", 48)
    for i, row in enumerate(rows):
        if i % 6 < 5 or i < first:
            row["labels"] = [-100] * len(row["labels"])
    monkeypatch.setattr(toys, "samples", lambda *_: rows)
    limit = Allocator(45)
    model = toys.causal_lm()
    limit.in_forward(model)
    changes = {"train_sampling_strategy": "sequential"}
    whole = trained(cls, tmp_path, monkeypatch, **changes)
    changes["config"] = {"out_of_memory": "retry"}
    parts = trained(cls, tmp_path, monkeypatch, model=model, **changes)
    assert limit.failures
    assert largest_difference(whole.model, model) < 1e-8
    assert train_loss(whole) == pytest.approx(train_loss(parts))


def test_the_balancing_loss_of_experts_counts_once_an_update(tmp_path, monkeypatch):
    def loss(cls, weight):
        torch.manual_seed(0)
        config = models.config(
            OlmoeConfig,
            vocab=toys.VOCAB,
            pad_token_id=0,
            num_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=weight,
        )
        changes = {"model": OlmoeForCausalLM(config), "max_steps": 1}
        if cls is DynagroupTrainer:
            changes["config"] = {"weigh": "tokens"}
        return train_loss(trained(cls, tmp_path, monkeypatch, **changes))

    plain = loss(Trainer, 0.5) - loss(Trainer, 0.0)
    ours = loss(DynagroupTrainer, 0.5) - loss(DynagroupTrainer, 0.0)
    assert 0.1 < plain == pytest.approx(ours, rel=0.05)


class Differentiating(MeanLoss):
    """A loss that needs gradients itself, as gradient penalties do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        torch.autograd.grad(loss, next(model.parameters()), create_graph=True)
        return loss


DifferentiatingOurs: Any = type("DifferentiatingOurs", (Differentiating, DynagroupTrainer), {})


def test_who_defines_the_loss():
    assert not defines_compute_loss(DynagroupTrainer)
    assert defines_compute_loss(PlainMean)
    assert defines_compute_loss(OursMean)


def test_filled_rows_must_not_count(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=ROWS_COUNT):
        trained(CountedRows, tmp_path, monkeypatch, config={"shapes": 3})
    with pytest.warns(match=ROWS_COUNT):
        trained(CountedRows, tmp_path, monkeypatch, config={"shapes": 3, "weigh": "samples"})


def test_a_loss_that_needs_gradients_is_that_of_the_plain_trainer(tmp_path, monkeypatch):
    plain = trained(PlainMean, tmp_path, monkeypatch)
    ours = trained(DifferentiatingOurs, tmp_path, monkeypatch)
    assert largest_difference(plain.model, ours.model) < 1e-8


def test_an_idle_rank_does_not_divide_by_no_items(tmp_path):
    run = trainer("causal", tmp_path, fits=True, **ONCE)
    batch = toys.collate(toys.samples("causal", 2))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    _, num_items = run.get_batch_samples(iter([batch]), 1, "cpu")
    assert num_items == 1


def with_and_without_failures(
    folder: Any, limits: list[float]
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """For each mode and place: parameters without failures and with them, and how often this rank failed."""

    def run(config: dict[str, Any], place: str | None) -> tuple[torch.Tensor, int]:
        retry = None if place is None else "retry"
        trained_here = trainer(
            "causal",
            f"{folder}/run",
            fits=True,
            exact_loss=True,
            config=config | {"out_of_memory": retry},
            gradient_accumulation_steps=4 // len(limits),
            count=48,
            max_steps=4,
            max_grad_norm=0.3,
        )
        allocator = Allocator(limits[trained_here.args.process_index])
        if place is not None:
            getattr(allocator, place)(trained_here.model.transformer.h[0])
        trained_here.train()
        return parameters(trained_here.model), len(allocator.failures)

    results = []
    for config in ({}, ONLINE):
        for place in ("in_forward", "in_backward"):
            without_failures, _ = run(config, None)
            with_failures, num_failures = run(config, place)
            results.append((without_failures, with_failures, num_failures))
    return results


@pytest.mark.parametrize(("kind", "weigh"), [("causal", "samples"), ("classifier", "auto")])
def test_batches_that_run_out_of_memory_are_repeated_in_parts(kind, weigh, tmp_path):
    """A loss that is divided by the update's items needs no weights, whatever ``weigh`` says of losses that are means."""

    def run(folder, retry, limit=10**6):
        trained_here = trainer(
            kind,
            tmp_path / folder,
            fits=True,
            exact_loss=kind == "causal",
            config={"weigh": weigh, "out_of_memory": retry},
            max_steps=2,
            logging_steps=2,
        )
        Allocator(limit).in_forward(trained_here.model)
        trained_here.train()
        return parameters(trained_here.model), trained_here.state.log_history[0]

    plain, _ = run("plain", retry=None)
    whole, logs = run("whole", retry="retry")
    split, split_logs = run("split", retry="retry", limit=120)
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
        trained_here = trainer(
            "causal",
            tmp_path / folder,
            fits=True,
            exact_loss=True,
            max_steps=-1,
            num_train_epochs=2,
            count=count,
            logging_steps=1,
            save_strategy="steps",
            save_steps=1,
            config={"out_of_memory": "retry"} | config,
        )
        Allocator(137).in_forward(trained_here.model)
        trained_here.train(resume_from_checkpoint=resume)
        return trained_here

    whole = run("whole")
    retries = {True: 0, False: 0}
    for row in whole.state.log_history:
        retries[row["epoch"] <= 1] += row.get("oom_retries", 0)
    assert retries[True] > 0
    assert retries[False] == 0
    assert whole.state.epoch == 2
    assert whole.update_loader.stats.samples == 2 * count
    learned = whole.update_loader.budget.applied
    assert learned is not None
    for step in (1, whole.state.global_step - 1):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        resumed = run(f"from{step}", resume=str(checkpoint))
        assert largest_difference(resumed.model, whole.model) < 1e-10
        assert resumed.update_loader.budget.applied == learned


def test_each_training_guards_the_model_that_it_trains(tmp_path):
    """``train()`` with ``model_init``, as a search of hyperparameters calls it, has a new model every time."""
    limit = Allocator(10**6)

    def new_model():
        model = toys.causal_lm()
        limit.in_backward(model.transformer.h[0])
        return model

    def thrice(folder, retry, second_limit=10**6):
        run = trainer(
            "causal",
            tmp_path / folder,
            fits=True,
            exact_loss=True,
            config={"out_of_memory": retry},
            max_steps=2,
        )
        run.model_init = new_model
        limit.limit = 10**6
        run.train()
        limit.limit = second_limit
        run.train()
        run.args.gradient_accumulation_steps = 3  # as a search for hyperparameters sets it
        run.train()
        assert run.update_loader.stats.update_samples == 2 * 12
        return run.model

    whole = thrice("whole", retry=None)
    split = thrice("split", retry="retry", second_limit=120)
    assert limit.failures
    assert largest_difference(whole, split) < 1e-8


def shares(results: Any) -> dict[str, float]:
    """Of two samples in a known place, and of all: wrong as soon as results lie in another order."""
    logits = results.predictions
    labels = results.label_ids
    is_right = logits.argmax(-1) == labels
    accuracy = is_right[labels != -100].mean()
    third = float(logits[2].reshape(-1)[0])
    last = float(logits[-1].reshape(-1)[0])
    return {"accuracy": accuracy, "third": third, "last": last}


def evaluated(
    kind: str, folder: Any, *, fits: bool, eval_config: Any = True, **changes: Any
) -> Any:
    settings = {"compute_metrics": shares, "max_steps": 1, "per_device_eval_batch_size": 5}
    settings["eval_dataset"] = toys.samples(kind, COUNT, seed=3)
    settings.update(changes)
    run = trainer(kind, folder, fits=fits, **settings)
    if fits:
        run.dynagroup_eval = eval_config
    return run


def figures(metrics: dict[str, float]) -> dict[str, float]:
    """Those that do not measure time."""
    of_time = ("runtime", "per_second", "preparation_time")
    return {name: value for name, value in metrics.items() if not name.endswith(of_time)}


def same_figures(metrics: dict[str, float], expected: dict[str, float]) -> None:
    assert figures(metrics) == pytest.approx(figures(expected), abs=1e-6)


def cut_to(shape: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    """Without what is beyond ``shape`` in all dimensions but the first."""
    return values[(slice(None), *map(slice, shape[1:]))]


def largest(shapes: list[tuple[int, int]]) -> int:
    return max(num_rows * width for num_rows, width in shapes)


@pytest.mark.parametrize("shapes", [None, 3])
@pytest.mark.parametrize("kind", ["classifier", "causal"])
def test_metrics_and_predictions_are_the_plain_trainers(kind, shapes, tmp_path):
    """With few shapes the model sees no others, and predictions are padded to the widest of them."""
    ladder = True
    if shapes is not None:
        lengths = toys.lengths(toys.samples(kind, COUNT, seed=3))
        ladder = ShapeLadder(lengths, TokenBudget(160), shapes)
    plain = evaluated(kind, tmp_path, fits=False)
    ours = evaluated(kind, tmp_path, fits=True, eval_config=ladder)
    seen = models.shapes_seen(ours.model)
    results = ours.predict(ours.eval_dataset)
    expected = plain.predict(plain.eval_dataset)
    labels = cut_to(expected.label_ids.shape, results.label_ids)
    logits = cut_to(expected.predictions.shape, results.predictions)
    assert (labels == expected.label_ids).all()
    differences = np.abs(logits - expected.predictions)
    assert differences[expected.label_ids != -100].max() < 1e-6
    if kind == "classifier":  # the plain Trainer's mean of tokens depends on its batch size
        same_figures(ours.evaluate(), plain.evaluate())
        same_figures(results.metrics, expected.metrics)
    assert largest(seen) <= 160
    assert len({n for n, _ in seen}) > 1, "as many as fit"
    if shapes is not None:
        assert set(seen) <= set(ladder.shapes)


ONE_LABEL = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}


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
        plain.__class__ = PlainMean
        ours.__class__ = OursMean
    for run in (plain, ours):  # in a batch of its own it weighs as little as one can
        run.eval_dataset.append(ONE_LABEL)
    plain.args.per_device_eval_batch_size += 1
    expected = plain.evaluate()["eval_loss"]
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    ours.dynagroup_eval = TokenBudget(1)
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_weighs_its_samples_whatever_its_first_field_has(tmp_path):
    ours = evaluated(
        "classifier", tmp_path, fits=True, eval_config=TokenBudget(40), config={"weigh": "samples"}
    )
    collate = ours.data_collator
    expected = ours.evaluate()["eval_loss"]
    one_flag = {"output_attentions": torch.tensor([False])}
    ours.data_collator = lambda samples: one_flag | collate(samples)
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def results_of_evaluation(folder, *, fits, include):
    """What the metrics are computed from."""
    seen = []

    def compute_metrics(results):
        seen.append(results)
        return {}

    changes = {"compute_metrics": compute_metrics, "include_for_metrics": [include]}
    run = evaluated("classifier", folder, fits=fits, **changes)
    run.evaluate()
    return seen[0]


def test_inputs_reach_the_metrics_in_order(tmp_path):
    plain = results_of_evaluation(tmp_path, fits=False, include="inputs")
    ours = results_of_evaluation(tmp_path, fits=True, include="inputs")
    np.testing.assert_array_equal(np.maximum(ours.inputs, 0), np.maximum(plain.inputs, 0))


def test_losses_of_samples_are_those_of_the_trainers_own_batches(tmp_path):
    """It is left to evaluate by itself."""
    plain = results_of_evaluation(tmp_path, fits=False, include="loss")
    with pytest.warns(match="the Trainer's own batches"):
        ours = results_of_evaluation(tmp_path, fits=True, include="loss")
    np.testing.assert_allclose(ours.losses, plain.losses, atol=1e-6)


def without_padding(ids):
    """Within a batch they are padded with 0, between batches with -100."""
    return [tuple(token for token in row if token not in (0, -100)) for row in ids.tolist()]


def predictor(cls, folder, **settings):
    """A Trainer that generates texts."""
    usual = arguments(folder, per_device_eval_batch_size=4).to_dict()
    usual["accelerator_config"] = None
    usual["predict_with_generate"] = True
    usual["generation_max_length"] = 9
    args = Seq2SeqTrainingArguments(**usual)
    run = cls(toys.seq2seq(), args, data_collator=toys.collate_seq2seq, **settings)
    run.model.generation_config.eos_token_id = 1
    run.model.generation_config.pad_token_id = 0
    return run


def test_generated_texts_are_the_plain_trainers(tmp_path):
    rows = toys.samples("seq2seq", 23, seed=3)
    plain = predictor(Seq2SeqTrainer, tmp_path)
    expected = plain.predict(rows)
    ours = predictor(dynagroup_trainer(Seq2SeqTrainer), tmp_path, dynagroup=TokenBudget(160))
    seen = models.shapes_seen(ours.model)
    results = ours.predict(rows)
    labels = [tuple(row["labels"]) for row in rows]
    assert without_padding(results.predictions) == without_padding(expected.predictions)
    assert without_padding(results.label_ids) == labels
    assert without_padding(expected.label_ids) == labels
    assert max(n for n, _ in seen) > 4


def test_evaluation_can_be_left_to_the_trainer_or_have_its_own_budget(tmp_path):
    run = evaluated("classifier", tmp_path, fits=True, eval_config=False)
    seen = models.shapes_seen(run.model)
    run.evaluate()
    assert {n for n, _ in seen} == {5, COUNT % 5}
    run.dynagroup_eval = TokenBudget(64)
    seen.clear()
    run.evaluate()
    assert largest([shape for shape in seen if shape[0] > 1]) <= 64


class Chosen(Trainer):
    """Evaluates every second sample, by a sampler of its own."""

    def get_eval_dataloader(self, eval_dataset=None):
        return torch.utils.data.DataLoader(
            self.eval_dataset,
            collate_fn=self.data_collator,
            sampler=range(0, COUNT, 2),
            batch_size=4,
        )

    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


def test_a_class_that_chooses_its_samples_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(toys, "DynagroupTrainer", dynagroup_trainer(Chosen))
    run = evaluated("classifier", tmp_path, fits=True)
    seen = models.shapes_seen(run.model)
    message = "another order: choose them in eval_dataset; dynagroup_eval=False: no warning"
    with pytest.warns(UserWarning, match=message):
        run.evaluate()
    assert [n for n, _ in seen] == [4, 4, 4, 4, 3]


def test_a_step_of_its_own_is_not_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(toys, "DynagroupTrainer", dynagroup_trainer(Chosen))
    message = "out_of_memory='retry' with a training_step of .*leave one of them out"
    with pytest.raises(ConfigError, match=message):
        trainer("causal", tmp_path, fits=True, config={"out_of_memory": "retry"})


@pytest.mark.parametrize(
    "name", ["training_step", "get_batch_samples", "prediction_step", "get_train_dataloader"]
)
def test_methods_that_form_and_weigh_batches_cannot_be_replaced(name, tmp_path, monkeypatch):
    own = type("Own", (toys.DynagroupTrainer,), {name: lambda self, *args, **kwargs: None})
    derived = type("Derived", (own,), {})
    for cls in (own, derived):
        monkeypatch.setattr(toys, "DynagroupTrainer", cls)
        message = f"{name} of {cls.__name__} must not replace dynagr"
        with pytest.raises(ConfigError, match=message):
            trainer("classifier", tmp_path, fits=True)


def question(i):
    return {"input_ids": [i + 1] * 10, "start_positions": i % 5, "end_positions": 5 + i % 5}


def stacked(batch):
    return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}


def answering(folder, *, fits, shapes=None):
    """A Trainer of questions and answers."""
    torch.manual_seed(0)
    rows = [question(i) for i in range(9)]
    config = models.bert(vocab=toys.VOCAB, layers=1)
    run = trainer(
        "classifier",
        folder,
        fits=fits,
        model=BertForQuestionAnswering(config).double(),
        config={"lengths": [10] * 96, "budget": TokenBudget(40), "shapes": shapes},
        eval_dataset=rows,
        max_steps=1,
    )
    run.data_collator = stacked
    run.train_dataset = [rows[i % 9] for i in range(96)]
    return run


def test_rows_are_not_added_to_batches_whose_targets_are_no_labels(tmp_path):
    """Their targets would count: no label of -100 says that a row has weight 0."""
    plain = answering(tmp_path, fits=False)
    ours = answering(tmp_path, fits=True)
    filled = answering(tmp_path, fits=True, shapes=1)
    expected = pytest.approx(plain.evaluate()["eval_loss"], abs=1e-7)
    assert ours.evaluate()["eval_loss"] == expected
    assert filled.evaluate()["eval_loss"] == expected
    with pytest.raises(ConfigError, match=ROWS_COUNT):
        filled.train()


def collate_tokens(rows):
    return toys.collate([{"input_ids": row["tokens"], "labels": row["labels"]} for row in rows])


@pytest.mark.filterwarnings("error::UserWarning")
def test_unknown_lengths_are_said_once_and_evaluated_as_ever(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = evaluated("classifier", tmp_path, fits=True, compute_metrics=None)
    run.data_collator = collate_tokens
    data = [{"labels": 0, "tokens": [1] * n} for n in range(1, 9)]
    message = "batches of per_device_eval_batch_size=5 .*dynagroup_eval=False: no warning"
    with pytest.warns(UserWarning, match=message):
        run.evaluate(data)
    assert run.evaluate(data)["eval_loss"] > 0


def evaluated_by_kind(
    folder: Any, config: dict[str, Any]
) -> tuple[dict[str, float], list[set[str]]]:
    """Metrics, and the kinds in each batch of this rank."""
    run = evaluated("classifier", folder, fits=True, config=config)
    for number, row in enumerate(run.eval_dataset):
        row["kind"] = "text" if number % 5 else "image"
    seen = []

    def collate(rows):
        seen.append({row["kind"] for row in rows})
        return toys.collate(rows)

    run.data_collator = collate
    return run.evaluate(), seen


@pytest.mark.parametrize("config", BY_KIND, ids=["column", "kind_of"])
def test_evaluation_follows_kinds(config, tmp_path):
    metrics, seen = evaluated_by_kind(tmp_path, config)
    assert all(kinds in ({"text"}, {"image"}) for kinds in seen)
    assert set.union(*seen) == {"text", "image"}
    plain = evaluated("classifier", tmp_path, fits=False)
    same_figures(metrics, plain.evaluate())


@pytest.mark.parametrize("num_ranks", [1, 3, 50])
@pytest.mark.parametrize("kinds", [1, 2, 30])
def test_rows_hold_every_sample_once_and_fit(num_ranks, kinds):
    rng = np.random.default_rng(num_ranks)
    lengths = rng.integers(1, 40, COUNT)
    labels = rng.integers(0, kinds, COUNT)
    rows = EvaluationRows({"tokens": lengths}, TokenBudget(120), num_ranks, kinds=labels)
    batches = list(rows)
    assert len(batches) == len(rows) == num_ranks * len(rows.rows)
    gathered = []
    for number, row in enumerate(rows.rows):
        dealt = batches[number * num_ranks :][:num_ranks]
        assert len({len(batch) for batch in dealt}) == 1
        assert len(np.unique(labels[dealt])) == 1, "a row of two kinds"
        for batch in dealt:
            assert len(batch) == 1 or len(batch) * max(lengths[batch]) <= 120
        gathered += chain.from_iterable(dealt[: row.num_real])
    assert gathered == rows.order.tolist()
    assert sorted(gathered) == list(range(COUNT))
