"""Samples with several padded lengths: their order, and the table of the work of runs."""

import numpy as np
import pytest

from dynagroup import TokenBudget
from dynagroup.plan import padded
from dynagroup.plan.cut import cut
from dynagroup.plan.multistream import SAVED_BOUNDS, SAVED_SHARE, alike_order
from dynagroup.plan.rules import CutRules


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
