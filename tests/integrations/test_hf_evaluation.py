"""Evaluation and prediction with batches that fit give what the plain Trainer gives, in dataset order."""

import warnings
from typing import Any

import numpy as np
import pytest
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from dynagroup import TokenBudget
from dynagroup.integrations.hf import dynagroup_trainer
from dynagroup.integrations.hf_evaluate import EvaluationRows
from tests import models
from tests.integrations import toys
from tests.integrations.jobs import arguments, trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
COUNT = 37


def shares(found: Any) -> dict[str, float]:
    """Of two samples in a known place, and of all: wrong as soon as results lie in another order."""
    logits, labels = found.predictions, found.label_ids
    right = (logits.argmax(-1) == labels)[labels != -100]
    third, last = (float(logits[row].reshape(-1)[0]) for row in (2, -1))
    return {"accuracy": right.mean(), "third": third, "last": last}


def evaluated(kind: str, folder: Any, *, fits: bool, eval_config: Any = True, **changes: Any) -> Any:
    usual = {"compute_metrics": shares, "max_steps": 1, "per_device_eval_batch_size": 5}
    run = trainer(kind, folder, fits=fits, eval_dataset=toys.samples(kind, COUNT, seed=3), **{**usual, **changes})
    if fits:
        run.dynagroup_eval = eval_config
    return run


def same(found: dict[str, float], expected: dict[str, float]) -> bool:
    timed = ("runtime", "per_second", "preparation_time")
    found, expected = ({k: v for k, v in one.items() if not k.endswith(timed)} for one in (found, expected))
    return found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["classifier", "causal"])
def test_metrics_and_predictions_are_the_plain_trainers(kind, tmp_path):
    plain, ours = (evaluated(kind, tmp_path, fits=fits) for fits in (False, True))
    seen = models.shapes_seen(ours.model)
    found, expected = ours.predict(ours.eval_dataset), plain.predict(plain.eval_dataset)
    assert (found.label_ids == expected.label_ids).all()
    assert found.predictions.shape == expected.predictions.shape
    assert np.abs(found.predictions - expected.predictions)[expected.label_ids != -100].max() < 1e-6
    if kind == "classifier":  # the plain Trainer's mean of tokens depends on its batch size
        assert same(ours.evaluate(), plain.evaluate())
        assert same(found.metrics, expected.metrics)
    assert max(n * width for n, width in seen) <= 160
    assert len({n for n, _ in seen}) > 2, "as many as fit"


@pytest.mark.parametrize("exact_loss", [True, False])
def test_the_loss_is_that_of_one_batch_of_everything(exact_loss, tmp_path):
    """The plain Trainer's mean over batches of their means depends on its batch size; ours does not."""
    plain = evaluated("causal", tmp_path, fits=False, per_device_eval_batch_size=COUNT, exact_loss=exact_loss)
    ours = evaluated("causal", tmp_path, fits=True, exact_loss=exact_loss)
    for run in (plain, ours):  # in a batch of its own it weighs as little as one can
        run.eval_dataset.append({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]})
    plain.args.per_device_eval_batch_size += 1
    expected = plain.evaluate()["eval_loss"]
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    ours.dynagroup_eval = TokenBudget(1)
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wanted", ["inputs", "loss"])
def test_inputs_and_losses_reach_the_metrics_in_order(wanted, tmp_path):
    """Losses of samples are those of the Trainer's own batches: it is left to evaluate by itself."""
    seen = []
    for fits in (False, True):
        how = {"compute_metrics": lambda found: seen.append(found) or {}, "include_for_metrics": [wanted]}
        evaluated("classifier", tmp_path, fits=fits, **how).evaluate()
    for name in ("inputs", "losses"):
        found, expected = (getattr(one, name) for one in seen)
        assert (found is None) == (expected is None)
        # within a batch they are padded with 0, between batches with -100
        assert found is None or np.allclose(np.maximum(found, 0), np.maximum(expected, 0), atol=1e-6)


def test_generated_texts_are_the_plain_trainers(tmp_path):
    rows, found = toys.samples("seq2seq", 23, seed=3), []

    def decoded(ids):  # within a batch they are padded with 0, between batches with -100
        return [tuple(t for t in row if t not in (0, -100)) for row in ids.tolist()]

    for cls, extra in ((Seq2SeqTrainer, {}), (dynagroup_trainer(Seq2SeqTrainer), {"dynagroup": TokenBudget(160)})):
        shared = {**arguments(tmp_path, per_device_eval_batch_size=4).to_dict(), "accelerator_config": None}
        args = Seq2SeqTrainingArguments(**{**shared, "predict_with_generate": True, "generation_max_length": 9})
        run = cls(toys.seq2seq(), args, data_collator=toys.collate_seq2seq, **extra)
        run.model.generation_config.eos_token_id, run.model.generation_config.pad_token_id = 1, 0
        seen = models.shapes_seen(run.model)
        output = run.predict(rows)
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


@pytest.mark.filterwarnings("error::UserWarning")
def test_unknown_lengths_are_said_once_and_evaluated_as_ever(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = evaluated("classifier", tmp_path, fits=True, compute_metrics=None)
    run.data_collator = lambda rows: toys.collate([{"input_ids": r["tokens"], "labels": r["labels"]} for r in rows])
    data = [{"labels": 0, "tokens": [1] * n} for n in range(1, 9)]
    with pytest.warns(UserWarning, match="batches of per_device_eval_batch_size=5 .*dynagroup_eval=False says"):
        run.evaluate(data)
    assert run.evaluate(data)["eval_loss"] > 0


@pytest.mark.parametrize("num_ranks", [1, 3, 50])
def test_rows_hold_every_sample_once_and_fit(num_ranks):
    rng = np.random.default_rng(num_ranks)
    lengths = rng.integers(1, 40, COUNT)
    rows = EvaluationRows({"tokens": lengths}, TokenBudget(120), num_ranks)
    batches = list(rows)
    assert len(batches) == len(rows) == num_ranks * len(rows.rows)
    gathered = []
    for row in range(len(rows.rows)):
        dealt = batches[row * num_ranks : (row + 1) * num_ranks]
        assert len({len(batch) for batch in dealt}) == 1
        assert all(len(b) == 1 or len(b) * max(lengths[b]) <= 120 for b in dealt)
        gathered += [i for batch in dealt[: rows.num_real(row)] for i in batch]
    assert gathered == rows.order.tolist()
    assert sorted(gathered) == list(range(COUNT))
