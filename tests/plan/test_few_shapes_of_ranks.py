"""Few shapes: a batch costs what its shape costs, in every place that asks."""

import numpy as np

from dynagroup import LengthAwareBatchSampler, TokenBudget
from dynagroup.plan.cost import Work
from dynagroup.plan.few_shapes import ShapeLadder
from dynagroup.plan.padded import in_order
from dynagroup.plan.rules import CutRules


def test_a_cut_into_shapes_costs_what_its_shapes_cost() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 64).astype(np.int32)
    ladder = ShapeLadder(lengths, TokenBudget(2000), 4)
    _, window = in_order({"tokens": lengths}, CutRules(ladder, Work()))
    offsets = window.least_time(100.0)
    assert (
        window.work_of_cut(offsets).tolist()
        == window.work_of(offsets[:-1], np.diff(offsets)).tolist()
    )


def test_samples_of_one_length_fill_packed_batches_on_ranks() -> None:
    sampler = LengthAwareBatchSampler(
        np.full(160, 1024, np.int32),
        TokenBudget(4096, layout="packed"),
        samples_per_update=8,
        rank=0,
        world_size=2,
    )
    assert set(sampler.plan.batches.sizes.tolist()) == {4}
    assert sampler.plan.num_steps == 20
