"""Two real ranks in one start, few updates: what runs always, while the long multi-rank tests are marked slow."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import parameters, train_both, trainer  # noqa: E402
from tests.packed import training  # noqa: E402
from tests.torchrun import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LAST = 7


def free_online(folder: str, last: int, resume: str | None = None) -> Any:
    run = trainer(
        "causal", folder, fits=True, exact_loss=True, count=30, max_steps=last, save_strategy="steps", save_steps=1,
        logging_steps=1, lr_scheduler_type="constant", gradient_accumulation_steps=1,
        config={"mode": "online", "lengths": None, "updates": "free"},
    )  # fmt: skip
    run.train(resume_from_checkpoint=resume)
    return run


def resumed_at_an_epochs_end(folder: str) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """A run that is resumed within its first epoch, stopped with that epoch's last update, and resumed again."""
    whole = free_online(f"{folder}/whole", LAST)
    ends = [row["step"] for row in whole.state.log_history if row["epoch"] == 1.0]
    free_online(f"{folder}/part", ends[0], f"{folder}/whole/checkpoint-1")
    again = free_online(f"{folder}/again", LAST, f"{folder}/part/checkpoint-{ends[0]}")
    return ends[0], again.state.global_step, parameters(whole.model), parameters(again.model)


def everything(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # the libraries' own, in a process that is not pytest's
    changes = {"exact_loss": True, "count": 48, "gradient_accumulation_steps": 2, "max_steps": 3}
    (fixed, _), (ours, _) = train_both("causal", f"{folder}/same", changes)
    run = trainer("classifier", folder, fits=True, eval_dataset=toys.samples("classifier", 11))
    return {
        "same": (fixed, ours),
        "resumed": resumed_at_an_epochs_end(folder),
        "evaluated": run.predict(run.eval_dataset).predictions,
        "packed": [training.packed(kind, "sdpa") for kind in ("planned", "online")],
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(2, everything, str(folder))


def test_two_ranks_make_the_updates_of_fixed_batches(ranks):
    for rank in ranks:
        fixed, ours = rank["same"]
        assert (fixed - ours).abs().max() < 1e-8
    assert torch.equal(ranks[0]["same"][1], ranks[1]["same"][1])


def test_a_run_resumed_at_an_epochs_end_goes_on(ranks):
    for rank in ranks:
        end, step, whole, again = rank["resumed"]
        assert 1 < end < LAST
        assert step == LAST, "the training ended silently"
        assert (whole - again).abs().max() < 1e-8


def test_two_ranks_predict_in_dataset_order(ranks, tmp_path):
    run = trainer("classifier", tmp_path, fits=False, eval_dataset=toys.samples("classifier", 11))
    expected = run.predict(run.eval_dataset).predictions
    for rank in ranks:
        assert abs(rank["evaluated"] - expected).max() < 1e-6


def test_two_ranks_on_packed_batches_make_the_updates_of_fixed_ones(ranks):
    for (ours, losses, updates, _), (others, *_rest) in zip(*(rank["packed"] for rank in ranks), strict=True):
        assert torch.equal(ours, others)
        theirs, fixed_losses = training.fixed(updates, "sdpa")
        assert losses == pytest.approx(fixed_losses, rel=1e-9)
        assert (ours - theirs).abs().max() < 1e-8
