"""What the plain Trainer does to losses without a word, and ours does not. When an upstream half fails, upstream changed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
from transformers import BartForConditionalGeneration, Trainer  # noqa: E402

from dynagroup.integrations.hf import attach  # noqa: E402
from dynagroup.testing import assert_conserves  # noqa: E402
from tests import models  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import arguments, trained_on, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("hint", [1, 8], ids=["too short", "too long"])
def test_our_trainer_runs_every_sample_however_many_batches_that_takes(tmp_path, hint):
    """The lengths known beforehand are wrong by far, so there are more, or fewer, batches than could be expected."""
    rows = toys.samples("causal", 70)
    config = {"mode": "online", "lengths": [max(1, n * hint // 4) for n in toys.lengths(rows)]}
    run = trainer("causal", tmp_path, fits=True, count=70, max_steps=-1, num_train_epochs=2, config=config)
    seen = trained_on(run, rows)
    run.train()
    assert run.state.global_step == run.state.max_steps == 10
    for epoch in (0, 1):
        assert_conserves((seen[update] for update in range(5 * epoch, 5 * epoch + 5)), range(70))


def bart():
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    return BartForConditionalGeneration(models.bart(layers=1, max_position_embeddings=128, **ids)).double()


@pytest.mark.parametrize(
    ("model", "kind"), [(toys.seq2seq, "seq2seq"), (bart, "seq2seq"), (toys.classifier, "classifier")], ids=["T5", "BART", "BERT"]
)  # fmt: skip
def test_fact_means_of_accumulated_batches_are_summed_where_a_model_drops_num_items(model, kind, tmp_path):
    """transformers#47688: the plain Trainer's loss and gradient are ``gradient_accumulation_steps`` times too large, so clipping
    sets in that much earlier. Ours are those of the update in one batch."""

    def first(fits, steps):
        sizes = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 16 // steps}
        args = arguments(tmp_path, max_steps=1, logging_steps=1, train_sampling_strategy="sequential", **sizes)
        collate = toys.collate_seq2seq if kind == "seq2seq" else toys.collate
        run = Trainer(model(), args, train_dataset=toys.samples(kind, 16), data_collator=collate)
        if fits:
            attach(run, 160)
        assert run.model_accepts_loss_kwargs, "it takes the number of items, and drops it"
        run.train()
        return run.state.log_history[0]

    whole, inflated, ours = first(False, 1), first(False, 4), first(True, 4)
    for figure in ("loss", "grad_norm"):
        assert ours[figure] == pytest.approx(whole[figure], rel=1e-6)
    assert inflated["loss"] == pytest.approx(4 * whole["loss"], rel=0.1), "upstream has changed: the probe can go"
    assert inflated["grad_norm"] > 2.5 * whole["grad_norm"]


@pytest.mark.parametrize(("module", "package"), [("hf", "transformers"), ("lightning", "lightning")])
def test_a_missing_framework_is_named_with_the_extra_that_brings_it(module, package):
    code = f"import sys; sys.modules[{package!r}] = None; import dynagroup.integrations.{module}"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1]
    assert f"dynagroup.integrations.{module} needs {package}" in said
    assert f"pip install 'dynagroup[{module}]'" in said
