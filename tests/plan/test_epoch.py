"""The order of an epoch, seeded or a user's: it has one, whenever it is asked for, and windows hold all of it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from dynagroup import ConfigError, LengthAwareBatchSampler, PlannedDataLoader, TokenBudget
from dynagroup.plan.epoch import EpochOrder, GroupedOrder, Mixture, OrderSource, epoch_order, windows_of

COUNT = 20


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SOURCES: dict[str, Callable[[], Any]] = {
    "torch": lambda: RandomSampler(range(COUNT), generator=seeded()),  # pyright: ignore[reportArgumentType]
    "weighted": lambda: WeightedRandomSampler([1.0] * COUNT, COUNT, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(5, COUNT), generator=seeded()),
}


@pytest.mark.parametrize("kind", SOURCES)
@given(asked=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_an_epoch_has_one_order_in_whatever_order_epochs_are_asked_for(kind: str, asked: list[int]) -> None:
    plain = SOURCES[kind]()
    epochs = [list(plain) for _ in range(7)]
    source = OrderSource(SOURCES[kind](), COUNT)
    assert [source.of_epoch(epoch).tolist() for epoch in asked] == [epochs[epoch] for epoch in asked]
    assert epochs[0] != epochs[1]


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="a list or a sampler, that gives indices anew every epoch"):
        OrderSource(iter(range(3)), 3)

    class Hiding:
        rows = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.rows

    source = OrderSource(Hiding(), 3)
    assert source.of_epoch(0).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="Hiding gave indices once and then none; its __iter__ must start again"):
        source.of_epoch(1)
    assert OrderSource([], 3).of_epoch(1).tolist() == []


LITERAL = [[2, 6, 0, 3, 7, 4, 5, 1], [0, 2, 1, 6, 3, 7, 5, 4]]


@given(st.integers(0, 3000), st.integers(0, 2**40), st.integers(0, 50))
def test_is_a_permutation_that_can_be_read_anywhere(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    third = num_samples // 3
    assert np.array_equal(EpochOrder(num_samples, seed=seed, epoch=epoch)[third:], order[third:])
    for place in {0, num_samples // 2} if num_samples else ():
        assert EpochOrder(num_samples, seed=seed, epoch=epoch).position_of(int(order[place])) == place


def test_literal_orders_and_every_sample_equally_likely_everywhere_with_unrelated_neighbours() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == LITERAL[0]
    assert epoch_order(8, seed=0, epoch=1).tolist() == LITERAL[1]
    counts = np.zeros((6, 6))
    for epoch in range(2000):
        counts[np.arange(6), epoch_order(6, seed=3, epoch=epoch)] += 1
    assert ((counts - 2000 / 6) ** 2 / (2000 / 6)).sum() < 60  # chi squared, 25 degrees of freedom: 99.99th percentile
    order = epoch_order(100_000, seed=5, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert 0.7 < order.reshape(100, 1000).mean(axis=1).std() / (100_000 / np.sqrt(12 * 1000)) < 1.3


@given(st.integers(0, 300), st.integers(1, 60), st.integers(0, 299))
def test_windows_hold_every_sample_once_and_the_one_with_the_longest_comes_first(count, size, longest):
    at = min(longest, count - 1)
    windows = windows_of(count, size, longest=lambda: at)
    assert sorted(place for start, stop in windows for place in range(start, stop)) == list(range(count))
    held = [stop - start for start, stop in windows]
    assert held[1:] == [size] * (len(held) - 1)
    assert not count or (windows[0][0] <= at < windows[0][1] and held[0] < 2 * size)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 5),
)
def test_a_mixture_gives_shares_and_each_source_pass_after_pass(sizes, weights, num_samples, seed):
    starts = np.cumsum([0, *sizes])
    sources = {str(k): range(starts[k], starts[k + 1]) for k in range(len(sizes))}
    shares = lambda epoch: {name: weights[3 * epoch % 12 + k % 3] + (k == 0) for k, name in enumerate(sources)}  # noqa: E731
    order, drawn = Mixture(sources, shares, num_samples=num_samples, seed=seed), []
    for epoch in range(4):
        order.set_epoch(epoch)
        found = list(order)
        assert len(found) == len(order) == num_samples
        assert found == Mixture(sources, shares, num_samples=num_samples, seed=seed).of_epoch(epoch).tolist()
        for name, members in sources.items():
            wanted = num_samples * shares(epoch)[name] / sum(shares(epoch).values())
            assert abs(sum(i in members for i in found) - wanted) < 1
        drawn += found
    for members in sources.values():
        times = np.bincount([i - members[0] for i in drawn if i in members], minlength=len(members))
        assert np.ptp(times) <= 1


def test_a_loader_over_a_mixture_resumes_and_keeps_the_size_of_updates():
    make = lambda: PlannedDataLoader(  # noqa: E731
        range(50), np.arange(1, 51), TokenBudget(100), samples_per_update=8, weigh="samples",
        sampler=Mixture({"a": range(10), "b": range(10, 50)}, lambda epoch: {"a": 1 + epoch, "b": 1}, num_samples=32),
    )  # fmt: skip
    whole = make()
    epochs = [[list(step.indices) for step in whole] for _ in range(2)]
    assert [sum(map(len, epoch)) for epoch in epochs] == [32, 32]
    again = make()
    next(iter(again.updates()))
    resumed = make()
    resumed.load_state_dict(again.state_dict())
    rest = [list(step.indices) for step in resumed]
    assert rest == epochs[0][len(epochs[0]) - len(rest) :]
    assert sum(map(len, rest)) == 24
    assert [list(step.indices) for step in resumed] == epochs[1]


# Grouped updates: of exactly the size that was asked, of samples that were drawn together, of similar length.
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


def test_samplers_and_planned_loaders_group_alike_and_a_schedule_by_its_epochs_first_size():
    how = {"samples_per_update": 16, "grouping": 10, "seed": 3}
    sampler = LengthAwareBatchSampler(LENGTHS, 4000, rank=0, world_size=1, shuffle=True, **how)
    loader = PlannedDataLoader(range(len(LENGTHS)), LENGTHS, 4000, collate_fn=list, weigh="samples", **how)
    assert list(sampler) == [step.indices for step in loader]
    schedule = lambda update, current: 4 + update  # noqa: E731
    how = {"samples_per_update": schedule, "grouping": 3, "collate_fn": list, "weigh": "samples"}
    loader = PlannedDataLoader(range(50), LENGTHS[:50], 4000, **how)
    updates = [sum(step.samples.local for step in update) for update in loader.updates()]
    assert updates[:5] == [4, 5, 6, 7, 8]
    assert sum(updates) == 50
