"""Ways side by side: every sample once in each, padding as counted by hand, time of a step that of its slowest rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.plan.batches import fixed_batches
from dynagroup.plan.cost import Work
from dynagroup.plan.report import compare, grouped_batches

LENGTHS = np.random.default_rng(0).lognormal(4, 0.9, 400).clip(4, 400).astype(np.int32)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
@pytest.mark.filterwarnings("ignore")
def test_every_way_has_every_sample_and_counts_its_padding(lengths, batch_size, world_size, accumulation):
    found = compare(lengths, batch_size, world_size=world_size, accumulation=accumulation)
    longest = max(lengths)
    for way in found.ways:
        seen = np.concatenate([np.asarray(batch) for batch in way.plan.batches])
        assert set(seen.tolist()) == set(range(len(lengths)))
        padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in way.plan.batches)
        assert int(way.padded.sum()) == padded
        assert way.largest_batch <= batch_size * longest
        assert way.plan.table.shape[1] == world_size
        assert 0 <= way.waiting < 1
    assert found.ways[0].num_steps == -(-len(lengths) // (batch_size * world_size))


def test_a_literal_example():
    found = compare([4, 2, 4, 2], 2, budget=TokenBudget(8), work=Work(per_step=10, crossover=float("inf")))
    ordered = found["dynagroup, sorted"]
    assert ordered.padding == 0
    assert ordered.num_steps == 2
    assert ordered.time == 2 * 10 + 8 + 4
    assert found.figures()["ways"]["dynagroup, sorted"]["steps"] == 2


def test_a_step_takes_as_long_as_its_slowest_rank():
    found = compare([8, 1, 8, 1], 1, world_size=2, work=Work(per_step=0, crossover=float("inf")))
    first = found.ways[0]
    assert first.time == first.plan.work_by_row.max(axis=1).sum()
    assert first.waiting == pytest.approx(1 - 18 / (2 * first.time))


def test_fixed_batches_of_varied_lengths_are_slower_than_ours():
    found = compare(LENGTHS, 8, world_size=4)
    today, same, free = found.ways[0], found.ways[2], found.ways[3]
    assert free.time < 0.7 * today.time
    assert same.time < today.time
    assert free.waiting < today.waiting


def test_group_by_length_sorts_fifty_batches_at_a_time():
    lengths = np.arange(1, 401)
    batches = grouped_batches(lengths, 2)
    assert int(lengths[batches[0]].max()) == 400  # the longest of all comes first
    for piece in range(1, 4):
        longest = [int(lengths[batch].max()) for batch in batches[50 * piece + 1 : 50 * piece + 50]]
        assert longest == sorted(longest, reverse=True)


def test_fixed_batches_keep_the_order():
    assert [batch.tolist() for batch in fixed_batches(np.array([3, 1, 2]), 2)] == [[3, 1], [2]]


def test_a_report_has_a_row_a_way_and_waiting_only_with_ranks():
    alone, many = compare(LENGTHS, 8), compare(LENGTHS, 8, world_size=2)
    assert len(alone.report().splitlines()) == 6
    assert "ranks wait" not in alone.report()
    assert "ranks wait" in many.report()
    assert many.report().splitlines()[1].split()[-1] == "1.00"


def test_a_comparison_can_be_drawn(tmp_path):
    figure = compare(LENGTHS, 8, world_size=2).plot()
    assert len(figure.axes) == 6
    assert all(axes.get_xlabel() for axes in figure.axes)
    figure.savefig(tmp_path / "x.png")


@pytest.mark.parametrize("name", ["batch_size", "world_size", "accumulation"])
def test_what_is_no_number_is_named(name):
    with pytest.raises(ConfigError, match=f"`{name}` must be an int"):
        compare(LENGTHS, **{"batch_size": 8, name: 0})
