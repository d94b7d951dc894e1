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

LENGTHS = np.random.default_rng(0).integers(1, 200, 300)
VARIED = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1


def plan(
    budget: Any = None, lengths: Any = LENGTHS, world_size: int = 2, **options: Any
) -> BatchPlan:
    budget = budget or TokenBudget(2000)
    return LengthAwareBatchSampler(lengths, budget, rank=0, world_size=world_size, **options).plan


def row_of(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if name in line).split()


def test_reports_and_plots_show_the_plans_own_figures_with_units_and_leave_pyplot_alone() -> None:
    made = plan()
    text, stats = made.report(), made.statistics
    assert text.startswith("epoch 0: 300 samples for 2 ranks, padded layout")
    for shown in (
        f"{stats['real_tokens']:,}",
        f"{stats['padded_tokens']:,}",
        f"{stats['padding']:.1%}",
    ):
        assert shown in text
    assert f"{made.num_steps}, {made.num_updates}" in text
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert float(row_of(text, "shuffled batches of")[-4].rstrip("%")) > 30
    assert format_table(["a", "b"], [["long", "1"], ["x", "10"]]) == "a      b\nlong   1\nx     10"
    before, figure = "matplotlib.pyplot" in sys.modules, made.plot()
    first, second = (axes.get_title() for axes in figure.axes)
    assert first.startswith("fixed ")
    assert second == f"this plan: {made.statistics['padding']:.0%} padding, {made.num_steps} steps"
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == before
    assert (
        plots.draw_padding([np.arange(1, 11)] * 5000).get_xlim()[1] <= 2000
    )  # of a long run few samples


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.filterwarnings("ignore")
def test_every_layout_and_an_empty_dataset_have_a_report_and_a_picture(
    layout: Any, tmp_path: Any
) -> None:
    assert "padding" in plan(TokenBudget(2000, layout=layout)).report()
    for lengths in ([0, 0], []):
        made = plan(TokenBudget(500, layout=layout), lengths, 1)
        assert f"{len(lengths)} samples" in made.report()
        picture = made.plot()
        if not lengths:
            picture.savefig(tmp_path / "x.png")


def test_a_plan_is_exported_by_indices(tmp_path: Any) -> None:
    made = plan(TokenBudget(2000), samples_per_update=64, shuffle=True)
    made.to_parquet(tmp_path / "plan.parquet")
    table = pandas.read_parquet(tmp_path / "plan.parquet")
    batch = lambda step, rank: table[(table.step == step) & (table["rank"] == rank)]  # noqa: E731
    steps = [
        [batch(step, rank) for rank in range(made.world_size)] for step in range(made.num_steps)
    ]
    assert [[batch["sample"].tolist() for batch in row] for row in steps] == made.rows
    assert [
        [batch["loss_scale"].iloc[0] for batch in row] for row in steps
    ] == made.loss_scale.tolist()
    assert [row[0]["update"].iloc[0] for row in steps] == [
        int(made.update_ends[:s].sum()) for s in range(len(steps))
    ]
    assert table["sample"].is_unique


def test_the_fixed_batch_that_a_plan_is_held_against_fits_at_its_hardest() -> None:
    lengths = {
        "tokens": np.array([100, 10, 10, 10, 900]),
        "labels": np.array([10, 10, 10, 100, 900]),
    }
    with pytest.warns(UserWarning, match="do not fit"):
        made = plan(TokenBudget(400), lengths, 1)
    assert (
        most_of_the_longest(lengths, made.budget) == 2
    )  # the longest source and the longest target may meet
    assert "(shuffled batches of 2 instead)" in made.report()
    assert "(shuffled batches of 3 instead; the longest would not fit)" in made.report(batch_size=3)
    assert row_of(made.report(), "do not fit even alone")[-1] == "1"
    budget = TokenBudget(4000) & AdditiveCap("patches", 20)
    capped = plan(budget, {"tokens": [9] * 9, "patches": [4, 4, 9, 8] + [1] * 5}, 1)
    assert (
        most_of_the_longest(capped.lengths, budget) == 2
    )  # 9 + 8 patches; a third sample may have 4


def test_every_padded_stream_is_counted_and_predicted_memory_is_that_of_batches_as_padded_by_any_part() -> (
    None
):
    lengths = {"tokens": np.array([10, 8]), "labels": np.array([1, 5]), "patches": np.array([7, 9])}
    made = plan(TokenBudget(1000) & AdditiveCap("patches", 100), lengths, 1)
    assert made.statistics["real_tokens"] == 24
    assert made.statistics["padded_tokens"] == made.padded.sum() == 2 * (10 + 5)
    text = made.report()
    assert "sample length in 'tokens', median" in text
    assert "sample length in 'labels', median" in text
    assert "length in 'patches'" not in text
    # 100 % are 4 samples of 100: batches of 3 of 65 tokens, padded to 128 for the other part, take 384 of 400.
    memory = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=1.0)
    both = plan(memory & TokenBudget(10_000, pad_to_multiple_of=64), [65] * 21, 1)
    assert row_of(both.report(), "predicted peak memory, share of the limit")[-1] == "96.0%"


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
    found = compare(lengths, batch_size, world_size=world_size, accumulation=accumulation)
    for way in found.ways:
        assert set(way.plan.batches.order.tolist()) == set(range(len(lengths)))
        tokens = [[lengths[i] for i in batch] for batch in way.plan.batches]
        packed = way.plan.budget.layout == "packed"
        assert int(way.plan.padded.sum()) == sum(
            sum(b) if packed else len(b) * max(b) for b in tokens
        )
        assert way.largest_batch <= batch_size * max(lengths)
        assert way.plan.table.shape[1] == world_size
        assert 0 <= way.waiting < 1
    assert found.ways[0].plan.num_steps == -(-len(lengths) // (batch_size * world_size))


VALUES = [8, 1, 8, 1, 8]


@pytest.mark.parametrize("num_samples", [7, 33, 64])
def test_every_way_has_each_sample_once_on_all_ranks(num_samples: int, tmp_path: Path) -> None:
    found = compare(list(range(1, num_samples + 1)), 4, world_size=3)
    for way in found.ways:
        way.plan.to_parquet(tmp_path / "plan.parquet")
        written = pq.read_table(tmp_path / "plan.parquet")["sample"].to_pylist()
        rows = [sample for row in way.plan.rows for batch in row for sample in batch]
        assert sorted(written) == sorted(rows)
        assert sorted(rows) == sorted([*range(num_samples), *way.plan.repeated.tolist()])
        assert len(way.plan.repeated) < 3
        assert all(batch for row in way.plan.rows for batch in row)


def test_pictures_of_packed_plans_draw_no_padding() -> None:
    for layout, drawn in (("padded", 2), ("packed", 1)):
        plan = LengthAwareBatchSampler(
            [3, 9, 2, 8], TokenBudget(18, layout=layout), rank=0, world_size=1
        ).plan
        axes = plan.plot().axes[1]
        assert len(axes.patches) == drawn


def test_literal_comparisons_and_fixed_batches_of_varied_lengths_are_slower_and_it_shows() -> None:
    found = compare(
        [4, 2, 4, 2], 2, budget=TokenBudget(8), work=Work(per_step=10, crossover=float("inf"))
    )
    ordered = found.ways[5]
    assert (ordered.padding, ordered.plan.num_steps, ordered.plan.predicted_time) == (
        0,
        2,
        2 * 10 + 8 + 4,
    )
    assert found.figures()["ways"]["dynagroup, sorted"]["steps"] == 2
    first = compare(VALUES, 1, world_size=2, work=Work(per_step=0, crossover=float("inf"))).ways[0]
    assert (
        first.plan.predicted_time == first.plan.work_by_row.max(axis=1).sum()
    )  # a step takes as long as its slowest rank
    run = (
        26 + VALUES[first.plan.repeated[0]]
    )  # one sample more than there are, so that both ranks have one
    assert first.waiting == pytest.approx(1 - run / (2 * first.plan.predicted_time))
    alone, many = compare(VARIED, 8), compare(VARIED, 8, world_size=4)
    today, _, same, grouping, free = many.ways[:5]
    assert free.plan.predicted_time < 0.7 * today.plan.predicted_time
    assert (
        free.plan.predicted_time
        < grouping.plan.predicted_time
        < same.plan.predicted_time
        < today.plan.predicted_time
    )
    assert free.waiting < today.waiting
    assert alone.ways[0].waiting == 0
    assert many.report().splitlines()[1].split()[-1] == "1.00"
    assert len(many.plot().axes) == 3
