"""Collated batches are held against the budget and the plan, whatever rows a collate function makes of samples."""

import re
import warnings

import pytest
import torch

from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget

LENGTHS = [3, 9, 2, 8, 7, 4, 5, 6]
PACKED = TokenBudget(40, layout="packed")


def padded(lengths):
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = 1
    return {"input_ids": ids, "attention_mask": ids}


def twice(lengths):
    """Two rows a sample: a chosen and a rejected answer, or an augmented copy."""
    return padded([length for length in lengths for _ in range(2)])


def without_short(lengths):
    return padded([length for length in lengths if length > 2] or lengths)


def one_more(lengths):
    return padded([*lengths, lengths[0]])


def choices(lengths):
    ids = padded(lengths)["input_ids"]
    return {"input_ids": ids[:, None].expand(-1, 3, -1)}


def packed_rows(lengths):
    """Two rows, each of which holds half of the samples."""
    half = len(lengths) // 2
    sums = [sum(part) for part in (lengths[:half], lengths[half:])]
    return padded([total for total in sums if total])


def one_row(lengths):
    return {"input_ids": torch.ones(1, sum(lengths))}


def planned(collate_fn, lengths=LENGTHS, budget=40, **settings):
    return PlannedDataLoader(LENGTHS, lengths, budget, collate_fn=collate_fn, **settings)


def online(collate_fn, **settings):
    return OnlineDataLoader(
        LENGTHS, TokenBudget(40), collate_fn=collate_fn, length_of=int, window=8, **settings
    )


@pytest.mark.parametrize(("collate_fn", "rows"), [(twice, 2), (choices, 3)])
def test_rows_that_were_not_planned_are_told_of_with_the_way_out(collate_fn, rows):
    loader = planned(collate_fn, weigh="samples", shuffle=False)
    shape = f"{4 * rows} x 9" if collate_fn is twice else "12 x 9"
    with pytest.warns(UserWarning, match="not fit the budget.*all rows of a sample") as all_:
        list(loader)
    assert f"4 samples were collated to {shape} tokens, but planned as 4 x 9" in str(
        all_[0].message
    )
    assert len(all_) == 1


@pytest.mark.parametrize("collate_fn", [twice, choices])
def test_online_batches_fit_with_all_rows_that_samples_have(collate_fn):
    loader = online(collate_fn, weigh="samples")
    with pytest.warns(UserWarning, match="tokens per sample .* measured as"):
        steps = list(loader)
    assert sorted(index for step in steps for index in step.indices) == list(range(8))
    for step in steps:
        assert step.batch["input_ids"].numel() <= 40 or len(step.indices) == 1


@pytest.mark.parametrize("make", [planned, online])
@pytest.mark.parametrize(("collate_fn", "rows"), [(without_short, 3), (one_more, 5)])
def test_rows_that_a_collate_function_leaves_out_or_adds_are_told_of(make, collate_fn, rows):
    with pytest.warns(UserWarning) as told:  # noqa: PT030 (also that batches are wider)
        list(make(collate_fn, weigh="samples", shuffle=False))
    texts = [str(one.message) for one in told if "weigh='samples' is wrong" in str(one.message)]
    assert re.search(f"{rows} (x|rows of the 4)", texts[0])


@pytest.mark.parametrize(
    ("collate_fn", "lengths", "budget"),
    [
        (twice, [2 * length for length in LENGTHS], TokenBudget(80)),
        (choices, [3 * length for length in LENGTHS], TokenBudget(120)),
        (packed_rows, LENGTHS, TokenBudget(40)),
        (one_row, LENGTHS, TokenBudget(40)),
        (one_row, LENGTHS, PACKED),
        (torch.tensor, LENGTHS, TokenBudget(40)),
    ],
)
def test_rows_that_were_planned_are_not_told_of(collate_fn, lengths, budget):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(planned(collate_fn, lengths, budget, weigh="samples"))) > 1


def test_a_batch_that_exceeds_the_budget_is_told_of_after_one_that_is_only_another():
    """Short samples are collated narrower than planned, long ones wider than fits."""

    def collate(lengths):
        longest = max(lengths)
        return padded([longest + 20 if longest > 8 else 1] * len(lengths))

    loader = planned(
        collate, weigh="samples", samples_per_update=4, sampler=[0, 2, 5, 6, 1, 3, 4, 7]
    )
    with pytest.warns(UserWarning, match="planned shape") as told:
        list(loader)
    assert ["not fit" in str(one.message) for one in told] == [False, True]
