"""TRL's padding-free SFT with packed batches that fit, and what TRL itself changes when padding goes."""

from __future__ import annotations

from typing import Any

import pytest

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402

from dynagroup import TokenBudget  # noqa: E402
from dynagroup.integrations.hf import dynagroup_trainer  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import parameters  # noqa: E402
from tests.integrations.test_trl import TEXTS, tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(folder: Any, *, padding_free: bool, budget: TokenBudget | None = None) -> tuple[Any, list[int], Any]:
    """Parameters after four updates of twelve samples, the items that each loss was divided by, and the trainer."""
    base = trl.SFTTrainer if budget is None else dynagroup_trainer(trl.SFTTrainer)
    items: list[int] = []

    class Noting(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            items.append(int(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    args = trl.SFTConfig(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=4, learning_rate=1e-2,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=2,
        dataloader_pin_memory=False, gradient_checkpointing=False, padding_free=padding_free, max_length=None,
    )  # fmt: skip
    more = {} if budget is None else {"dynagroup": budget}
    data = Dataset.from_dict({"text": TEXTS})
    run = Noting(toys.causal_lm(), args, train_dataset=data, processing_class=tokenizer(), **more)
    run.train()
    return parameters(run.model), items, run


def test_packed_batches_that_fit_make_the_updates_of_padding_free_ones(tmp_path) -> None:
    theirs, items, _ = trained(tmp_path / "trl", padding_free=True)
    ours, own_items, run = trained(tmp_path / "fits", padding_free=True, budget=TokenBudget(100, layout="packed"))
    assert (ours - theirs).abs().max() < 1e-6  # transformers' causal loss is float32; the model moved by 0.04
    assert set(items) <= set(own_items)  # beside them what the adapter asks the loss beforehand
    assert float(next(entry for entry in run.state.log_history if "padding" in entry)["padding"]) == 0


def test_trl_divides_a_padded_loss_by_the_first_tokens_too(tmp_path) -> None:
    """The same samples, the same sum: a padded loss is divided by all tokens, a padding-free one by those predicted."""
    _, padded, _ = trained(tmp_path / "padded", padding_free=False)
    _, free, _ = trained(tmp_path / "free", padding_free=True)
    assert [a - b for a, b in zip(padded, free, strict=True)] == [12] * len(padded)
