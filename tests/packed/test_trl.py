"""TRL's trainers with batches that fit, SFT on packed ones, and what TRL itself changes when padding goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402

from dynagroup import TokenBudget  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.test_trl import TEXTS  # noqa: E402
from tests.packed import trl_jobs  # noqa: E402
from tests.packed.trl_jobs import Run  # noqa: E402
from tests.torchrun import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_same(ours: Run, theirs: Run, *, atol: float = 1e-8) -> None:
    assert (ours[0] - theirs[0]).abs().max() < atol
    assert ours[1] == pytest.approx(theirs[1], abs=1e-6)  # logged in float32


def assert_all_same(runs: dict[str, Run]) -> None:
    assert_same(runs["sft, packed"], runs["sft, padded"])
    assert_same(runs["reward, ours"], runs["reward"])
    assert_same(runs["dpo, ours"], runs["dpo"], atol=1e-6)  # TRL takes its log-probabilities in float32


def test_batches_that_fit_make_the_updates_of_trls_padded_ones(tmp_path) -> None:
    """SFT packed, DPO and reward models padded: parameters and losses, in float64."""
    assert_all_same(trl_jobs.all_runs(tmp_path))


@pytest.mark.slow
def test_on_two_ranks_too(tmp_path) -> None:
    both = on_ranks(2, trl_jobs.all_runs, str(tmp_path))
    for runs in both:
        assert_all_same(runs)
    assert all(torch.equal(both[0][name][0], both[1][name][0]) for name in both[0])


def test_trl_divides_a_padded_loss_by_the_first_tokens_too(tmp_path) -> None:
    """The same samples, the same sum: a padded loss is divided by all tokens, a padding-free one by those predicted."""
    items: dict[bool, list[int]] = {False: [], True: []}

    def noting(padding_free: bool) -> Any:
        def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            items[padding_free].append(int(num_items_in_batch))
            return toys.float64_causal_loss(outputs, labels, num_items_in_batch)

        return loss

    whole = Dataset.from_dict({"text": TEXTS})
    for free in (False, True):
        trl_jobs.sft(tmp_path, data=whole, padding_free=free, max_steps=1, loss=noting(free))
    assert [a - b for a, b in zip(items[False], items[True], strict=True)] == [trl_jobs.UPDATE] * 3


def test_joined_blocks_leave_nothing_to_gain_and_that_is_said(tmp_path) -> None:
    how = {"packing": True, "max_length": 64, "per_device_train_batch_size": 2, "max_steps": 2}
    theirs = trl_jobs.found(trl_jobs.sft(tmp_path, **how))
    with pytest.warns(
        UserWarning, match="packing=True TRL has already joined .* nothing left .* Leave dynagroup out"
    ) as told:
        run = trl_jobs.sft(tmp_path, TokenBudget(130, layout="packed"), quiet=False, **how)
    assert_same(trl_jobs.found(run), theirs)
    assert len([w for w in told if "laid end to end" in str(w.message) or "packing=True" in str(w.message)]) == 1


def test_rows_that_trl_pads_to_a_multiple_fit(tmp_path) -> None:
    """It pads the row, not the samples: a budget of the same multiple leaves room for that."""
    seen: list[int] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(labels.numel())
        return toys.float64_causal_loss(outputs, labels, num_items_in_batch)

    budget = TokenBudget(93, layout="packed", pad_to_multiple_of=8)
    trl_jobs.sft(tmp_path, budget, padding_free=True, pad_to_multiple_of=8, loss=loss)
    assert all(tokens % 8 == 0 for tokens in seen)
    assert max(seen) == 88
