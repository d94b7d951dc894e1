"""Grouped updates: of exactly the size that was asked, of samples that were drawn together, of similar length."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynagroup import LengthAwareBatchSampler, PlannedDataLoader, TokenBudget
from dynagroup.plan.epoch import EpochOrder, GroupedOrder, epoch_order

LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 2000).astype(np.int32) + 1


@given(count=st.integers(0, 60), size=st.integers(1, 9), pool=st.integers(1, 5), seed=st.integers(0, 3), data=st.data())
def test_pools_keep_their_samples_and_updates_are_neighbours(count, size, pool, seed, data):
    lengths = np.array(data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)), np.int32)
    drawn = epoch_order(count, seed=seed, epoch=1)
    order = GroupedOrder(EpochOrder(count, seed=seed, epoch=1), lengths, size=size, pool=pool, seed=seed, epoch=1)
    whole, span = order[:], size * pool
    for start in range(0, count, span):
        here = whole[start : start + span]
        assert sorted(here) == sorted(drawn[start : start + span])
        updates = [sorted(lengths[here[at : at + size]]) for at in range(0, len(here), size)]
        assert np.concatenate(sorted(updates)).tolist() == sorted(lengths[here])
    start, stop = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    assert order[start:stop].tolist() == whole[start:stop].tolist()


def test_small_updates_hardly_pad_and_are_as_many_as_before():
    padding, sizes = {}, {}
    for grouping in (None, 50):
        how = {"samples_per_update": 8, "grouping": grouping, "collate_fn": list, "weigh": "samples"}
        plan = PlannedDataLoader(range(len(LENGTHS)), LENGTHS, TokenBudget(8 * int(LENGTHS.max())), **how).plan
        padded = sum(len(batch) * int(LENGTHS[batch].max()) for batch in plan.batches)
        padding[grouping] = 1 - int(LENGTHS.sum()) / padded
        sizes[grouping] = np.add.reduceat(plan.batches.sizes, np.append(0, 1 + np.flatnonzero(plan.update_ends)[:-1]))
    assert sizes[None].tolist() == sizes[50].tolist() == [8] * 250
    assert padding[50] < padding[None] / 4


def test_a_sampler_and_a_planned_loader_group_alike():
    how = {"samples_per_update": 16, "grouping": 10, "seed": 3}
    sampler = LengthAwareBatchSampler(LENGTHS, 4000, rank=0, world_size=1, shuffle=True, **how)
    loader = PlannedDataLoader(range(len(LENGTHS)), LENGTHS, 4000, collate_fn=list, weigh="samples", **how)
    assert list(sampler) == [step.indices for step in loader]


def test_a_schedule_is_grouped_by_its_epochs_first_size_and_keeps_its_sizes():
    schedule = lambda update, current: 4 + update  # noqa: E731
    how = {"samples_per_update": schedule, "grouping": 3, "collate_fn": list, "weigh": "samples"}
    loader = PlannedDataLoader(range(50), LENGTHS[:50], 4000, **how)
    updates = [sum(step.samples.local for step in update) for update in loader.updates()]
    assert updates[:5] == [4, 5, 6, 7, 8]
    assert sum(updates) == 50
