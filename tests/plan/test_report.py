"""Reports say what plans say, comparisons count padding as by hand, and pictures show the plan's own figures."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import (
    AdditiveCap,
    BatchPlan,
    LengthAwareBatchSampler,
    MemoryBudget,
    TokenBudget,
    Work,
)
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan import plots
from dynagroup.plan.compare import compare
from dynagroup.plan.plan import format_table, most_of_the_longest
from dynagroup.shapes import BatchShape
from tests.plan.helpers import joined

LENGTHS = np.random.default_rng(0).integers(1, 200, 300)


def plan(
    budget: Any = None, lengths: Any = LENGTHS, world_size: int = 2, **options: Any
) -> BatchPlan:
    budget = budget or TokenBudget(2000)
    return LengthAwareBatchSampler(lengths, budget, rank=0, world_size=world_size, **options).plan


def row_of(text: str, name: str) -> list[str]:
    """The words of the first line that has a name."""
    return next(line for line in text.splitlines() if name in line).split()


# Reports


def test_a_report_shows_the_plans_own_figures_with_units() -> None:
    planned = plan()
    text = planned.report()
    stats = planned.statistics
    assert text.startswith("epoch 0: 300 samples for 2 ranks, padded layout")
    assert f"{stats['real_tokens']:,}" in text
    assert f"{stats['padded_tokens']:,}" in text
    assert f"{stats['padding']:.1%}" in text
    assert f"{planned.num_steps}, {planned.num_updates}" in text
    for line in text.splitlines():
        assert line == line.rstrip()


def test_a_report_compares_with_shuffled_batches() -> None:
    padding = row_of(plan().report(), "shuffled batches of")[-4]
    assert float(padding.rstrip("%")) > 30


def test_a_table_has_columns_of_equal_width() -> None:
    text = format_table(["a", "b"], [["long", "1"], ["x", "10"]])
    assert text == "a      b\nlong   1\nx     10"


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], []], ids=["some", "of no tokens", "none"])
@pytest.mark.filterwarnings("ignore")
def test_every_layout_and_an_empty_dataset_have_a_report_and_a_picture(
    layout: Any, lengths: Any, tmp_path: Any
) -> None:
    planned = plan(TokenBudget(500, layout=layout), lengths, 1)
    text = planned.report()
    assert f"{len(lengths)} samples" in text
    assert "padding" in text
    planned.plot().savefig(tmp_path / "x.png")


LONG_PAIRS = {
    "tokens": np.array([100, 10, 10, 10, 900]),
    "labels": np.array([10, 10, 10, 100, 900]),
}


def test_the_fixed_batch_that_a_plan_is_held_against_fits_at_its_hardest() -> None:
    """The longest source and the longest target may meet."""
    with pytest.warns(UserWarning, match="sample 4 with 900 tokens, 900 labels does not fit"):
        planned = plan(TokenBudget(400), LONG_PAIRS, 1)
    assert most_of_the_longest(LONG_PAIRS, planned.budget) == 2
    text = planned.report()
    assert "(shuffled batches of 2 instead)" in text
    assert row_of(text, "do not fit even alone")[-1] == "1"
    larger = planned.report(batch_size=3)
    assert "(shuffled batches of 3 instead; the longest would not fit)" in larger


def test_the_fixed_batch_that_a_plan_is_held_against_keeps_caps() -> None:
    """9 + 8 patches; a third sample may have 4."""
    lengths = {"tokens": [9] * 9, "patches": [4, 4, 9, 8, 1, 1, 1, 1, 1]}
    budget = TokenBudget(4000) & AdditiveCap("patches", 20)
    assert most_of_the_longest(plan(budget, lengths, 1).lengths, budget) == 2


def test_every_padded_stream_is_counted() -> None:
    lengths = {"tokens": np.array([10, 8]), "labels": np.array([1, 5]), "patches": np.array([7, 9])}
    planned = plan(TokenBudget(1000) & AdditiveCap("patches", 100), lengths, 1)
    assert planned.statistics["real_tokens"] == 24
    assert planned.statistics["padded_tokens"] == 2 * (10 + 5)
    assert planned.padded.sum() == 2 * (10 + 5)
    text = planned.report()
    assert "sample length in 'tokens', median" in text
    assert "sample length in 'labels', median" in text
    assert "length in 'patches'" not in text


class PaddedBytes(PaddedTokens):
    """A byte for each padded token, and 10 for all batches."""

    static_bytes = 10

    def batch_bytes(self, shape: BatchShape, /) -> np.ndarray:
        return shape.num_samples * shape.longest["tokens"]


def test_predicted_memory_is_that_of_batches_as_padded_by_any_part() -> None:
    """100 % are 4 samples of 100: batches of 3 of 65 tokens, padded to 128 for the other part, take 384 of 400."""
    memory = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=1.0)
    both = plan(memory & TokenBudget(10_000, pad_to_multiple_of=64), [65] * 21, 1)
    report = both.report()
    assert row_of(report, "predicted peak memory, headroom: shares of")[-2:] == ["96.0%,", "100.0%"]
    assert "shares of the hardest batch, which fits" in report
    by_bytes = plan(MemoryBudget.from_bytes(400, model=PaddedBytes(), headroom=0.9), [65] * 21, 1)
    report = by_bytes.report()
    assert row_of(report, "predicted peak memory, headroom: shares of")[-2:] == ["83.8%,", "90.0%"]


# Pictures


def test_a_picture_shows_fixed_batches_beside_the_plan() -> None:
    planned = plan()
    figure = planned.plot()
    fixed, ours = figure.axes
    padding = planned.statistics["padding"]
    assert fixed.get_title().startswith("fixed ")
    assert ours.get_title() == f"this plan: {padding:.0%} padding, {planned.num_steps} steps"
    assert fixed.get_ylim() == ours.get_ylim()
    for axes in (fixed, ours):
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_pictures_leave_pyplot_alone() -> None:
    was_imported = "matplotlib.pyplot" in sys.modules
    plan().plot()
    assert ("matplotlib.pyplot" in sys.modules) == was_imported


def test_few_samples_of_a_long_run_are_drawn() -> None:
    axes = plots.draw_padding([np.arange(1, 11)] * 5000)
    assert axes.get_xlim()[1] <= 2000


@pytest.mark.parametrize(("layout", "num_areas"), [("padded", 2), ("packed", 1)])
def test_pictures_of_packed_plans_draw_no_padding(layout: Any, num_areas: int) -> None:
    axes = plan(TokenBudget(18, layout=layout), [3, 9, 2, 8], 1).plot().axes[1]
    assert len(axes.patches) == num_areas


# Files


def test_a_plan_is_exported_by_indices(tmp_path: Any) -> None:
    planned = plan(TokenBudget(2000), samples_per_update=64, shuffle=True)
    planned.to_parquet(tmp_path / "plan.parquet")
    table = pandas.read_parquet(tmp_path / "plan.parquet")
    assert table["sample"].is_unique
    update = 0
    for step in range(planned.num_steps):
        for rank in range(planned.world_size):
            batch = table[(table["step"] == step) & (table["rank"] == rank)]
            assert batch["sample"].tolist() == planned.rows[step][rank]
            assert set(batch["loss_scale"]) == {planned.loss_scale[step, rank]}
            assert set(batch["update"]) == {update}
        update += int(planned.update_ends[step])


# Comparisons


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
)
@pytest.mark.filterwarnings("ignore")
def test_every_way_has_every_sample_and_counts_its_padding(
    lengths, batch_size, world_size, accumulation
):
    result = compare(lengths, batch_size, world_size=world_size, accumulation=accumulation)
    for way in result.ways:
        assert set(way.plan.batches.order.tolist()) == set(range(len(lengths)))
        num_padded = 0
        for batch in way.plan.batches:
            tokens = [lengths[index] for index in batch]
            is_packed = way.plan.budget.layout == "packed"
            num_padded += sum(tokens) if is_packed else len(tokens) * max(tokens)
        assert way.plan.padded.sum() == num_padded
        assert way.largest_batch <= batch_size * max(lengths)
        assert way.plan.table.shape[1] == world_size
        assert 0 <= way.waiting < 1
    num_fixed = -(-len(lengths) // (batch_size * world_size))
    assert result.ways[0].plan.num_steps == num_fixed


@pytest.mark.parametrize("num_samples", [7, 33, 64])
def test_every_way_has_each_sample_once_on_all_ranks(num_samples: int, tmp_path: Path) -> None:
    for way in compare(list(range(1, num_samples + 1)), 4, world_size=3).ways:
        way.plan.to_parquet(tmp_path / "plan.parquet")
        written = pq.read_table(tmp_path / "plan.parquet")["sample"].to_pylist()
        batches = joined(way.plan.rows)
        assert all(batches)
        samples = sorted(joined(batches))
        assert sorted(written) == samples
        assert samples == sorted([*range(num_samples), *way.plan.repeated.tolist()])
        assert len(way.plan.repeated) < 3


def test_a_literal_comparison() -> None:
    work = Work(per_step=10, crossover=float("inf"))
    result = compare([4, 2, 4, 2], 2, budget=TokenBudget(8), work=work)
    in_order = result.ways[5]
    assert in_order.padding == 0
    assert in_order.plan.num_steps == 2
    assert in_order.plan.predicted_time == 2 * 10 + 8 + 4
    assert result.figures()["ways"]["dynagroup, sorted"]["steps"] == 2


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_others_wait() -> None:
    lengths = [8, 1, 8, 1, 8]
    work = Work(per_step=0, crossover=float("inf"))
    fixed = compare(lengths, 1, world_size=2, work=work).ways[0]
    time = fixed.plan.predicted_time
    assert time == fixed.plan.work_by_row.max(axis=1).sum()
    [repeated] = fixed.plan.repeated  # so that both ranks have one
    num_tokens = sum(lengths) + lengths[repeated]
    assert fixed.waiting == pytest.approx(1 - num_tokens / (2 * time))


VARIED = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1


def test_fixed_batches_of_varied_lengths_are_slower_and_it_shows() -> None:
    result = compare(VARIED, 8, world_size=4)
    times = [way.plan.predicted_time for way in result.ways[:5]]
    today, _, same, grouping, free = times
    assert free < grouping < same < today
    assert free < 0.7 * today
    assert result.ways[4].waiting < result.ways[0].waiting
    assert result.report().splitlines()[1].split()[-1] == "1.00"
    assert len(result.plot().axes) == 3


def test_one_rank_does_not_wait() -> None:
    assert compare(VARIED, 8).ways[0].waiting == 0
