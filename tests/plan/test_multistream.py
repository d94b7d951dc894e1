"""Samples with several padded lengths: their order, and the table of the work of runs."""

import numpy as np
import pytest

from dynagroup import TokenBudget
from dynagroup.plan import padded
from dynagroup.plan.cut import cut
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.multistream import SAVED_BOUNDS, SAVED_SHARE, alike_order
from dynagroup.plan.planner import Planner
from dynagroup.plan.rules import CutRules
from dynagroup.plan.window import plan_update


def boxes_of(box, lengths, least_saved):
    """The definition, box by box: returns the undivided boxes, those with larger samples first."""
    undivided = len(box) * lengths[:, box].max(axis=1).sum()
    padding = undivided - least_saved + 1
    parts = []
    for stream in lengths:
        ordered = box[np.argsort(-stream[box], kind="stable")]
        for size in range(1, len(box)):
            first = ordered[:size]
            second = ordered[size:]
            needed = len(first) * lengths[:, first].max(axis=1).sum()
            needed += len(second) * lengths[:, second].max(axis=1).sum()
            if needed < padding:
                padding = needed
                parts = [first, second]
    if not parts:
        return [box]
    return sum((boxes_of(part, lengths, least_saved) for part in parts), [])


@pytest.mark.parametrize("seed", range(6))
def test_samples_are_in_the_order_of_the_boxes_that_bisection_finds(seed):
    rng = np.random.default_rng(seed)
    units = [rng.integers(0, longest, 60) for longest in (300, 40, 900)[: 2 + seed % 2]]
    lengths = np.stack(units)
    least_saved = int(np.clip(lengths.sum() // SAVED_SHARE, *SAVED_BOUNDS))
    expected = []
    for box in boxes_of(np.arange(60), lengths, least_saved):
        expected += sorted(box, key=lambda i: (-lengths[:, i].sum(), *(-lengths[:, i]), i))
    assert alike_order(units).tolist() == expected


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_batches_are_the_same_with_and_without_a_table_of_runs(num_ranks, monkeypatch):
    rng = np.random.default_rng(0)
    lengths = {name: rng.integers(1, 500, 200).astype(np.int32) for name in ("tokens", "target")}
    rules = CutRules(TokenBudget(4096))
    with_table = cut(lengths, rules, num_ranks)
    monkeypatch.setattr(padded, "FEW_RUNS", 0)
    without = cut(lengths, rules, num_ranks)
    np.testing.assert_array_equal(with_table.order, without.order)
    np.testing.assert_array_equal(with_table.offsets, without.offsets)


def test_windows_that_are_sorted_at_once_are_sorted_as_each_by_itself():
    rng = np.random.default_rng(0)
    units = [rng.integers(0, longest, (5, 40)) for longest in (30, 900)]
    of_each = [alike_order([stream[window] for stream in units]) for window in range(5)]
    expected = np.stack(of_each) + 40 * np.arange(5)[:, None]
    at_once = alike_order([stream.ravel() for stream in units], 40)
    np.testing.assert_array_equal(at_once, expected.ravel())


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_updates_of_a_block_have_the_plans_that_each_has_by_itself(layout, num_ranks):
    rng = np.random.default_rng(0)
    lengths = {name: rng.integers(1, 500, 200).astype(np.int32) for name in ("tokens", "target")}
    config = PlanConfig(samples_per_update=32)
    planner = Planner.of(lengths, TokenBudget(4096, layout=layout), config)
    samples = planner.order_of(0, shuffle=True)
    start = planner.start_of(0, num_ranks)
    rows = []
    for first in range(0, 200, 32):
        rows += plan_update(planner, samples[first : first + 32], start, num_ranks).rows
    assert planner.plan(0, num_ranks).rows == rows
