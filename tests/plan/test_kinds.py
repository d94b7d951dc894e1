"""Kinds: all batches of a step, on all ranks, are of one kind (law 10), and nothing else changes."""

from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import ConfigError, LengthAwareBatchSampler, PlannedDataLoader
from dynagroup.plan.planner import PlanConfig
from dynagroup.plan.report import compare
from dynagroup.testing import assert_conserves, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:too few samples for an equal number")
RNG = np.random.default_rng(0)
LENGTHS = np.clip(RNG.lognormal(4, 0.8, 6000), 4, 2000).astype(np.int32)
SHARES = RNG.choice(["text", "image", None], 6000, p=[0.75, 0.2, 0.05])


def plan(lengths: Any, ranks: int, kinds: Any = None, budget: Any = 60, **how: Any) -> Any:
    return LengthAwareBatchSampler(lengths, budget, kinds=kinds, rank=0, world_size=ranks, **how).plan


def test_rows_by_hand():
    """Two ranks: one kind fills its row, a single sample idles beside itself, None is a kind."""
    made = plan([5, 4, 3, 2, 9], 2, ["a", None, "a", None, ("b", 1)], samples_per_update=5)
    assert made.rows == [[[0], [2]], [[1], [3]], [[4], [4]]]
    assert made.kinds == [["a", "a"], [None, None], [("b", 1), ("b", 1)]]
    assert made.loss_scale[2].tolist() == [2 / 5, 0]
    assert made.repeated.tolist() == [4]
    dropped = plan([5, 4, 3, 2, 9], 2, ["a", None, "a", None, ("b", 1)], samples_per_update=5, uneven="drop")
    assert (dropped.num_steps, dropped.dropped.tolist()) == (2, [4])
    assert plan([5, 4, 3], 8, [1, 1, 2], samples_per_update=8).num_steps == 2, "fewer samples of a kind than ranks"
    apart = plan([5, 4, 3, 2], 2, [*"aabb"], one_kind="batch")
    assert apart.kinds == [["a", "b"]], "ranks may run different kinds at a time"


def test_one_kind_is_none():
    for how in ({"shuffle": True}, {"samples_per_update": 64}):
        one, same = plan(LENGTHS, 4, budget=4000, **how), plan(LENGTHS, 4, ["x"] * 6000, budget=4000, **how)
        assert one.fingerprint == same.fingerprint
        assert (one.kinds[0], same.kinds[0]) == ([None] * 4, ["x"] * 4)


@pytest.mark.parametrize("how", [{"shuffle": True}, {"samples_per_update": 500}, {"one_kind": "batch"}], ids=str)
def test_a_thousand_kinds(how):
    labels = RNG.integers(0, 1000, 6000)
    made = plan(LENGTHS, 8, labels, budget=8000, **how)
    assert_conserves(made.batches, [*range(6000), *made.repeated.tolist()])
    assert len({kind for row in made.kinds for kind in row}) == len(set(labels.tolist()))


def test_without_updates_kinds_come_throughout_an_epoch_in_full_batches():
    free = [plan(LENGTHS, 4, SHARES, budget=4000, shuffle=True, seed=seed) for seed in range(3)]
    for made in free:
        first = [row[0] for row in made.kinds]
        quarters = np.array_split(np.arange(len(first)), 4)
        assert all({first[row] for row in quarter} >= {"text", "image"} for quarter in quarters)
        assert not len(made.repeated)
        assert made.statistics["padding"] < 0.07
        assert made.predicted_time < 1.06 * plan(LENGTHS, 4, budget=4000, shuffle=True).predicted_time
        longest = max(max(LENGTHS[i] for i in batch) for batch in made.rows[0])
        assert longest == LENGTHS.max(), "the hardest lead"
    assert free[0].rows != free[1].rows
    done = plan(LENGTHS, 4, SHARES, budget=4000)
    tokens = [max(LENGTHS[i] for batch in row for i in batch) for row in done.rows]
    assert tokens == sorted(tokens, reverse=True), "without shuffle the longest come first, whatever their kind"


def test_what_kinds_cost_is_told():
    made = plan(LENGTHS, 8, SHARES, budget=4000, samples_per_update=64)
    report = made.report()
    assert "steps of each of 3 kinds" in report
    plain = plan(LENGTHS, 8, budget=4000, samples_per_update=64)
    [line] = [line for line in report.splitlines() if "(kinds ignored)" in line]
    cost = f"{plain.num_steps - made.num_steps:+,} steps, {plain.predicted_time / made.predicted_time:.1%}"
    assert cost in line
    found = compare(LENGTHS, 8, world_size=8, kinds=SHARES).figures()["ways"]
    assert found["fixed 8, shuffled"]["mixed_steps"] > 80
    assert all(way["mixed_steps"] == 0 for name, way in found.items() if name.startswith("dynagroup"))
    how = {"kinds": ["a", "a", "b"], "collate_fn": list, "weigh": "samples"}

    def stats_of(world: Any) -> str:
        loader = PlannedDataLoader(range(3), [5, 4, 3], 60, world=world, **how)
        list(loader)
        return str(loader.stats)

    assert "(1 idle, of 3 tokens)" in run_ranks(2, stats_of)[1]


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["a", "b"], "`kinds` has 2 labels, but there are lengths for 3 samples"),
        (["a", ["b"], "c"], r"kinds\[1\] must be a label that can be told from others, .* but is \['b'\]"),
        ([0.5, 1.0, float("nan")], r"kinds\[2\] must be .* but is nan"),
        (list(torch.tensor([1, 1, 2])), r"kinds\[0\] must be .* but is tensor\(1\)"),
        (["a", ("b", object()), "c"], r"kinds\[1\] must be .* but is \('b', <object"),
        ("abc", "`kinds` must be one label a sample, but is 'abc'"),
    ],
)
def test_what_is_no_label_is_named(kinds, message):
    with pytest.raises(ConfigError, match=message):
        plan([1, 2, 3], 1, kinds)
    with pytest.raises(ConfigError, match="`one_kind` \\('batch'\\) needs `kinds`"):
        plan([1, 2, 3], 1, one_kind="batch")
    with pytest.raises(ConfigError, match="`one_kind` must be one of 'step', 'batch'"):
        PlanConfig(one_kind="row")  # type: ignore[arg-type]
