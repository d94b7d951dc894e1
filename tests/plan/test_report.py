"""Reports say what the plan says."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan.report import format_table, most_of_the_longest, shuffled_way
from dynagroup.plan.sampler import LengthAwareBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 200, 300)


def report(budget, lengths=LENGTHS, **options) -> str:
    return LengthAwareBatchSampler(lengths, budget, rank=0, **{"world_size": 2, **options}).plan.report()


def test_a_report_shows_the_plans_own_figures():
    plan = LengthAwareBatchSampler(LENGTHS, TokenBudget(2000), rank=0, world_size=2).plan
    text = plan.report()
    stats = plan.statistics
    assert text.startswith("epoch 0: 300 samples for 2 ranks, padded layout")
    for shown in (f"{stats['real_tokens']:,}", f"{stats['padded_tokens']:,}", f"{stats['padding']:.1%}"):
        assert shown in text
    assert f"{plan.num_steps}, {plan.num_updates}" in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_row_about_fixed_batches_is_larger_where_lengths_vary():
    line = next(line for line in report(TokenBudget(2000)).splitlines() if "shuffled batches of" in line)
    assert float(line.split()[-4].rstrip("%")) > 30


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_every_layout_and_an_empty_dataset_have_a_report(layout):
    assert "padding" in report(TokenBudget(500, layout=layout))
    assert "0 samples" in report(TokenBudget(500, layout=layout), [])


def test_a_memory_budget_shows_its_predicted_peak():
    text = report(MemoryBudget(8, model=PaddedTokens(), headroom=0.9), world_size=1)
    line = next(line for line in text.splitlines() if "predicted peak memory, share of the hardest batch" in line)
    assert 50 < float(line.split()[-1].rstrip("%")) <= 100


def test_oversize_samples_are_counted():
    with pytest.warns(UserWarning, match="do not fit"):
        text = report(TokenBudget(100), [50, 500, 600, 20], world_size=1)
    assert text.splitlines()[-2].split()[-1] == "2"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_padding_of_fixed_batches_is_what_padding_each_stream_of_each_batch_gives(lengths, batch_size, multiple):
    source, target = np.array(lengths, np.int64).T
    budget = TokenBudget(10_000, pad_to_multiple_of=multiple)
    plan = LengthAwareBatchSampler({"tokens": source, "labels": target}, budget, rank=0, world_size=1).plan
    fixed = shuffled_way(plan, batch_size, seed=3)[0]
    order = np.random.default_rng(3).permutation(len(lengths))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    padded = sum(len(b) * -(-max(stream[b]) // multiple) * multiple for b in batches for stream in (source, target))
    if padded:
        assert fixed.padding == pytest.approx(1 - (source.sum() + target.sum()) / padded)


def test_the_fixed_batch_that_a_plan_is_held_against_fits_at_its_hardest():
    lengths = {"tokens": np.array([100, 10, 10, 10, 900]), "labels": np.array([10, 10, 10, 100, 900])}
    with pytest.warns(UserWarning, match="do not fit"):
        plan = LengthAwareBatchSampler(lengths, TokenBudget(400), rank=0, world_size=1).plan
    assert most_of_the_longest(lengths, plan.budget) == 2  # the longest source and the longest target may meet
    assert "(shuffled batches of 2 instead)" in plan.report()
    assert "(shuffled batches of 3 instead; the longest would not fit)" in plan.report(batch_size=3)
    budget = TokenBudget(4000) & AdditiveCap("patches", 20)
    capped = LengthAwareBatchSampler(
        {"tokens": [9] * 9, "patches": [4, 4, 9, 8] + [1] * 5}, budget, world_size=1, rank=0
    )
    assert most_of_the_longest(capped.plan.lengths, budget) == 2  # 9 + 8 patches; a third sample may have 4


def test_every_padded_stream_is_counted_and_told_apart():
    lengths = {"tokens": np.array([10, 8]), "labels": np.array([1, 5]), "patches": np.array([7, 9])}
    budget = TokenBudget(1000) & AdditiveCap("patches", 100)
    plan = LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1).plan
    assert plan.statistics["real_tokens"] == 24
    assert plan.statistics["padded_tokens"] == plan.padded.sum() == 2 * (10 + 5)
    text = plan.report()
    assert "sample length in 'tokens', median" in text
    assert "sample length in 'labels', median" in text
    assert "patches" not in text
    left_out = LengthAwareBatchSampler(lengths, TokenBudget(1000, streams=("tokens",)), rank=0, world_size=1).plan
    assert left_out.statistics["padded_tokens"] == 20


def test_columns_line_up():
    assert format_table(["a", "b"], [["long name", "1"], ["x", "1000"]]).splitlines() == [
        "a             b",
        "long name     1",
        "x          1000",
    ]


def test_a_plan_that_is_faster_is_not_shown_as_a_loss():
    lengths = np.random.default_rng(0).lognormal(5, 1, 2000).astype(int) + 1
    plan = LengthAwareBatchSampler(lengths, TokenBudget(16_384), samples_per_update=64, rank=0, world_size=1).plan
    lines = plan.report(batch_size=8).splitlines()
    assert any("(shuffled batches of 8 instead; the longest would not fit)" in line for line in lines)
    share = next(line for line in lines if "(predicted time against batches of 8)" in line)
    assert 0 < float(share.split()[-1].rstrip("%")) < 100
    shuffled = np.random.default_rng(0).permutation(lengths)
    time = sum(
        plan.work.per_step + len(b) * float(plan.work.of_lengths(b.max()))
        for b in np.split(shuffled, range(8, 2000, 8))
    )
    assert float(share.split()[-1].rstrip("%")) == pytest.approx(100 * plan.predicted_time / time, abs=0.1)


def test_what_keeps_a_plan_from_saving_more_is_said_once():
    lengths = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1
    few = LengthAwareBatchSampler(lengths, TokenBudget(1 << 20), samples_per_update=4, rank=0, world_size=1)
    with pytest.warns(UserWarning, match=r"^\d\d% of the tokens are padding: "):
        list(few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(few)
    assert "more samples an update" in few.plan.report().splitlines()[-1]
    several = LengthAwareBatchSampler(lengths, TokenBudget(1 << 20), samples_per_update=32, rank=0, world_size=1).plan
    assert several.advice() == (
        "35% of the tokens are padding: batches have 11 samples, because more and smaller ones are predicted to take longer; if "
        "steps are cheap with you, say so: work=Work(per_step=...), or work=loader.stats.work of an earlier run; 128 times as "
        "many samples would fit every batch: a larger budget changes nothing"
    )
    assert LengthAwareBatchSampler(lengths, TokenBudget(4096), rank=0, world_size=1).plan.advice() is None


def test_a_window_too_small_to_sort_is_named():
    lengths = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1
    with pytest.warns(
        UserWarning, match="39% of .*: a window of 16 samples is 2 batches, too few to sort; raise `window`$"
    ):
        list(LengthAwareBatchSampler(lengths, TokenBudget(4096), shuffle=True, window=16, rank=0, world_size=1))


def test_an_update_that_is_one_batch_and_a_budget_that_never_binds_are_named():
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    plan = LengthAwareBatchSampler(lengths, TokenBudget(1700), samples_per_update=8, rank=0, world_size=1).plan
    said = plan.advice()
    assert said is not None
    assert (
        f"{plan.statistics['padding']:.0%} of the tokens are padding: an update of 8 samples is one batch a rank"
        in said
    )
    assert (
        "take more samples an update (gradient accumulation), or free updates; 2 times as many samples would fit"
        in said
    )
    assert plan.num_steps == plan.num_updates


def test_predicted_memory_is_that_of_batches_as_padded_by_any_part_of_the_budget():
    """100 % are 4 samples of 100: batches of 3 of 65 tokens, padded to 128 for the other part, take 384 of 400."""
    memory = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=1.0)
    said = report(memory & TokenBudget(10_000, pad_to_multiple_of=64), [65] * 21, world_size=1)
    assert next(line for line in said.splitlines() if "predicted peak" in line).split()[-1] == "96.0%"
