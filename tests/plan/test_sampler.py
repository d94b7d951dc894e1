"""The sampler emits its plan, moves through epochs and resumes; an epoch's order, seeded or a user's."""

import copy
import json
import pickle
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dynagroup import (
    Budget,
    LengthAwareBatchSampler,
    PlannedDataLoader,
    TokenBudget,
    Work,
    multiple_of,
)
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.plan import order as order_module
from dynagroup.plan import sampler as sampler_module
from dynagroup.plan import window as window_module
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.cut import cut_kinds
from dynagroup.plan.epoch import EpochOrder, Windows, epoch_order
from dynagroup.plan.mixture import Mixture
from dynagroup.plan.order import OrderSource
from dynagroup.testing import assert_conserves, run_ranks
from dynagroup.validation import LARGEST
from tests import strategies
from tests.plan.helpers import joined

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 300).astype(np.int32).clip(max=1024)
BUDGET = TokenBudget(1024)
MODES: list[Any] = [
    {},
    {"shuffle": True, "window": 40, "uneven": "drop"},
    {"samples_per_update": 37},
    {"window": 64, "round_batch": multiple_of(4)},
]
COUNT = 20
LITERAL = [[2, 6, 0, 3, 7, 4, 5, 1], [0, 2, 1, 6, 3, 7, 5, 4]]


def sampler(
    rank: int | None = 0, world_size: int | None = 1, **options: Any
) -> LengthAwareBatchSampler:
    return LengthAwareBatchSampler(LENGTHS, BUDGET, rank=rank, world_size=world_size, **options)


def shuffled_order(seed: int) -> Any:
    return RandomSampler(range(300), generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


def reread(state: Any) -> Any:
    return json.loads(json.dumps(state))


def batches_of(rows: Any, rank: int = 0) -> list[list[int]]:
    return [row[rank] for row in rows]


@settings(max_examples=40, deadline=None)
@given(
    strategies.lengths,
    strategies.budgets,
    st.sampled_from(MODES),
    st.integers(1, 16),
    st.integers(0, 2),
)
@pytest.mark.filterwarnings("ignore")
def test_ranks_together_emit_the_plan(
    values: list[int], budget: Budget, mode: dict, ranks: int, epoch: int
) -> None:
    first = LengthAwareBatchSampler(values, budget, rank=0, world_size=ranks, **mode)
    last = LengthAwareBatchSampler(values, budget, rank=ranks - 1, world_size=ranks, **mode)
    every = LengthAwareBatchSampler(values, budget, world_size=ranks, **mode)
    for one in (first, last, every):
        one.set_epoch(epoch)
    rows = list(first.plan.rows)
    assert list(first) == batches_of(rows)
    assert list(last) == batches_of(rows, ranks - 1)
    assert list(every) == joined(rows)
    assert len(first) == len(rows)
    assert len(every) == len(rows) * ranks


# States


def test_a_state_is_a_few_integers() -> None:
    one = sampler(shuffle=True, window=40)
    assert len(list(islice(one, 5))) == 5
    state = one.state_dict()
    names = "kind version identity cursor learned left_out order seal"
    assert set(state) == set(names.split())
    cursor = Cursor(steps=5, window_size=40, segments=((1, 5, None),))
    assert Cursor.of(reread(state["cursor"])) == cursor


def test_after_a_resume_only_what_comes_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sampler(shuffle=True, window=40)
    other = sampler(shuffle=True, window=40)
    assert len(list(islice(one, 5))) == 5
    other.load_state_dict(one.state_dict())
    windows = []

    def noted(lengths: Any, *args: Any, **options: Any) -> Any:
        windows.append(lengths)
        return cut_kinds(lengths, *args, **options)

    monkeypatch.setattr(window_module, "cut_kinds", noted)
    next(iter(other))
    assert len(windows) == 1


def test_epochs_advance_by_themselves_and_by_set_epoch() -> None:
    one = sampler(shuffle=True)
    other = sampler(shuffle=True)
    first = list(one)
    second = list(one)
    assert first != second
    for _ in range(2):  # frameworks say it twice
        other.set_epoch(1)
    assert list(other) == second
    other.set_epoch(0)
    assert list(other) == first
    other.sampler.set_epoch(1)  # what accelerate and Lightning reach
    assert list(other) == second
    with pytest.raises(ConfigError, match="`epoch` must be an int of at least 0, but is -1"):
        one.set_epoch(-1)


def test_a_state_from_the_end_of_an_epoch_continues_with_the_next() -> None:
    one = sampler(shuffle=True)
    other = sampler(shuffle=True)
    list(one)
    state = one.state_dict()
    other.load_state_dict(state)
    assert other.epoch == 1
    assert other.plan.epoch == 1
    assert len(other) == other.plan.num_steps
    assert list(other) == list(one)
    other.load_state_dict(state)
    other.set_epoch(0)  # a loop that counts its epochs itself: nothing of epoch 0 remains
    assert list(other) == []


def test_after_a_resume_frameworks_may_count_epochs_from_zero() -> None:
    one = sampler(shuffle=True)
    other = sampler(shuffle=True)
    third = sampler(shuffle=True)
    list(one)
    next(iter(one))
    rest = list(copy.deepcopy(one.plan.rows))[1:]
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(0)
    assert list(other) == batches_of(rest)
    other.sampler.set_epoch(1)
    third.set_epoch(2)
    assert list(other) == list(third)


@pytest.mark.parametrize("ranks", [2, 4])
def test_after_a_resume_the_plan_is_what_is_emitted_and_len_is_the_whole_epoch(ranks: int) -> None:
    one = sampler(0, 2, samples_per_update=64)
    resumed = sampler(0, ranks, samples_per_update=64)
    whole = sampler(0, ranks, samples_per_update=64)
    steps = int(np.flatnonzero(one.plan.update_ends)[1]) + 1
    assert len(list(islice(one, steps))) == steps
    resumed.load_state_dict(reread(one.state_dict(num_steps=steps)))
    plan = resumed.plan
    assert list(resumed) == batches_of(plan.rows)
    assert plan.num_updates == 3  # of five
    num_samples = len(joined(joined(plan.rows)))
    assert plan.report().startswith(f"epoch 0: {num_samples} samples ")
    assert resumed.plan_of(0).fingerprint == whole.plan.fingerprint
    assert len(resumed) == len(whole) > plan.num_steps


def test_steps_are_counted_from_the_beginning_of_the_epoch_across_resumes() -> None:
    whole = list(sampler(shuffle=True, window=40))
    one = sampler(shuffle=True, window=40)
    seen: list[list[int]] = []
    for more in (3, 4, 2):
        first = len(seen)
        seen += list(islice(one, more + 2))[:more]  # two more were fetched ahead
        last = len(seen) + 2
        state = reread(one.state_dict(num_steps=len(seen)))
        message = f"must be from {first} to {last}, .* but is {last + 1}"
        with pytest.raises(StateError, match=message):
            one.state_dict(num_steps=last + 1)
        one = sampler(shuffle=True, window=40)
        one.load_state_dict(state)
        assert one.state_dict() == state
    assert seen + list(one) == whole


def test_given_order_is_read_once_an_epoch() -> None:
    one = sampler(order=shuffled_order(3), samples_per_update=50)
    order = list(shuffled_order(3))
    seen = joined(list(one))
    for start in range(0, 300, 50):
        assert set(seen[start : start + 50]) == set(order[start : start + 50])
    assert_conserves(sampler(order=[5, 5, 7, 9], shuffle=True), [5, 5, 7, 9])


@pytest.mark.parametrize("order", [range(300), None])
def test_a_state_of_another_order_is_refused(order: Any) -> None:
    one = sampler(order=shuffled_order(3), samples_per_update=50)
    list(one)
    other = sampler(order=order, samples_per_update=50)
    with pytest.raises(StateError, match="must yield the same indices in epoch 0"):
        other.load_state_dict(one.state_dict())


def test_samples_that_do_not_fit_are_told() -> None:
    message = "sample 1 with 99 tokens does not fit the budget even alone and is a batch of its own"
    with pytest.warns(UserWarning, match=message):
        LengthAwareBatchSampler([3, 99], TokenBudget(10), rank=0, world_size=1)


def test_samples_that_are_repeated_are_told() -> None:
    with pytest.warns(UserWarning, match=r"samples \[1\] are repeated"):
        list(LengthAwareBatchSampler([9, 3, 9], TokenBudget(10), rank=0, world_size=2))


def test_a_sampler_of_one_rank_is_not_sharded_again() -> None:
    assert not hasattr(sampler(None, 4), "batch_size")
    with pytest.raises(ConfigError, match="sharding them again"):
        _ = sampler(1, 4).batch_size


# Workers


def test_a_state_behind_workers_is_told_the_steps_that_training_used() -> None:
    one = sampler(shuffle=True)
    other = sampler(shuffle=True)
    loader = DataLoader(range(300), batch_sampler=one, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    used = [next(batches).tolist() for _ in range(3)]
    other.load_state_dict(one.state_dict(num_steps=3))
    assert used + list(other) == list(sampler(shuffle=True))


class Renamed(LengthAwareBatchSampler):
    """A sampler of the user's own that passes through what torchdata asks."""

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        return super().state_dict(num_steps)


def stateful(
    workers: int, kind: type[LengthAwareBatchSampler], budget: int
) -> tuple[LengthAwareBatchSampler, Any]:
    """A sampler, and a loader that uses it."""
    batch_sampler = kind(
        LENGTHS[:60],
        TokenBudget(budget),
        shuffle=True,
        window=60,
        work=Work(per_step=10_000),
        rank=0,
        world_size=1,
    )
    loader = StatefulDataLoader(
        range(60),  # type: ignore[arg-type]
        batch_sampler=batch_sampler,
        collate_fn=tuple,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    return batch_sampler, loader


def epochs_of(one: LengthAwareBatchSampler, count: int) -> list[list[Any]]:
    """What comes without workers and without stops."""
    return [[tuple(batch) for batch in one] for _ in range(count)]


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("chosen", [False, True], ids=["counted", "set_epoch"])
@pytest.mark.parametrize("budget", [1024, 6000], ids=["long epochs", "short epochs"])
@pytest.mark.parametrize(("workers", "kind"), [(0, LengthAwareBatchSampler), (3, Renamed)])
def test_a_stateful_dataloader_resumes_with_exactly_what_remained(
    workers: int, kind: type[LengthAwareBatchSampler], budget: int, chosen: bool
) -> None:
    """A short epoch has fewer batches than workers fetch ahead, also from iterators that torchdata throws away."""
    reference, _ = stateful(0, kind, budget)
    epochs = epochs_of(reference, 4)
    assert (len(epochs[1]) < 2 * 3) == (budget == 6000)  # two batches for each of three workers
    for stop in (0, 1, len(epochs[1]) - 1, len(epochs[1]) + 1):
        _, loader = stateful(workers, kind, budget)
        list(loader)
        batches = iter(loader)
        assert list(islice(batches, stop)) == epochs[1][:stop]
        other, resumed = stateful(workers, kind, budget)
        resumed.load_state_dict(loader.state_dict())
        has_ended = stop > len(epochs[1])
        rest = [] if has_ended else [epochs[1][stop:]]
        comes = [*rest, epochs[2], epochs[3]]
        for epoch, batches in enumerate(comes, start=4 - len(comes)):
            if chosen:
                other.set_epoch(epoch)
            assert list(resumed) == batches


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_is_thrown_away_counts_as_no_epoch(workers: int) -> None:
    reference, _ = stateful(0, LengthAwareBatchSampler, 1024)
    epochs = epochs_of(reference, 2)
    _, loader = stateful(workers, LengthAwareBatchSampler, 1024)
    next(iter(loader))
    assert [list(loader), list(loader)] == epochs


def test_an_epoch_ends_with_its_last_batch_or_is_begun_again() -> None:
    reference = sampler(shuffle=True)
    one = sampler(shuffle=True)
    epochs = [list(reference) for _ in range(3)]
    assert list(islice(one, 5)) == epochs[0][:5]
    assert list(islice(one, len(epochs[0]))) == epochs[0]  # nobody asks for one more
    assert list(islice(one, len(epochs[1]))) == epochs[1]
    one.set_epoch(1)
    assert list(one) == epochs[1]
    assert list(one) == epochs[2]


def test_a_host_that_counts_from_zero_after_a_resume_gets_the_epochs_that_remain() -> None:
    reference = sampler(shuffle=True)
    epochs = [list(reference) for _ in range(6)]
    for stop in (5, len(epochs[2])):
        one = sampler(shuffle=True)
        other = sampler(shuffle=True)
        one.set_epoch(2)
        assert list(islice(one, stop)) == epochs[2][:stop]
        other.load_state_dict(one.state_dict())
        seen = []
        for epoch in range(3):
            other.sampler.set_epoch(epoch)
            other.sampler.set_epoch(epoch)
            seen.append(list(other))
        rest = [epochs[2][stop:]] if stop == 5 else []
        assert seen == [*rest, *epochs[3:]][:3]


@pytest.fixture
def run_with_order(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs two ranks whose samplers find their world; each draws its order from a seed."""
    mine = threading.local()
    monkeypatch.setattr(sampler_module, "rank_and_size", lambda: (mine.world.rank, mine.world.size))
    monkeypatch.setattr(order_module, "current_world", lambda: mine.world)

    def run(seeds: list[int]) -> list[list[list[int]]]:
        def batches(world: World) -> list[list[int]]:
            mine.world = world
            order = shuffled_order(seeds[world.rank])
            return list(sampler(None, None, order=order, samples_per_update=50))

        return run_ranks(2, batches)

    return run


def test_an_order_that_differs_between_ranks_is_found_before_the_first_step(
    run_with_order: Any,
) -> None:
    message = "`order` yields different indices .* in epoch 0, .* seed it the same"
    with pytest.raises(AlignmentError, match=message):
        run_with_order([0, 1])


def test_ranks_of_one_order_have_each_sample_once(run_with_order: Any) -> None:
    assert_conserves(joined(run_with_order([7, 7])), range(300))


@pytest.mark.parametrize("settings", [{"samples_per_update": 2}, {"shuffle": True, "window": 2}])
def test_a_last_window_that_fills_no_row_does_not_hold_an_epoch_open(
    settings: dict[str, Any],
) -> None:
    def make() -> LengthAwareBatchSampler:
        return LengthAwareBatchSampler(
            [5] * 9, TokenBudget(10), uneven="drop", rank=0, world_size=2, **settings
        )

    one = make()
    num_steps = len(list(one))
    resumed = make()
    resumed.load_state_dict(one.state_dict(num_steps=num_steps))
    assert resumed.epoch == 1
    assert len(list(resumed)) == 4


@pytest.mark.parametrize("uneven", ["drop", "repeat"])
def test_a_resume_on_more_ranks_than_an_update_has_samples_is_refused_as_a_new_epoch_is(
    uneven: Any,
) -> None:
    """With "drop", the rest of the epoch was left out without a word."""

    def make(world_size: int) -> LengthAwareBatchSampler:
        return LengthAwareBatchSampler(
            range(1, 101),
            TokenBudget(200),
            samples_per_update=2,
            uneven=uneven,
            rank=0,
            world_size=world_size,
        )

    message = r"`samples_per_update` \(2\) must be at least the number of ranks \(4\)"
    with pytest.raises(ConfigError, match=message):
        next(iter(make(4)))
    begun = make(2)
    list(islice(begun, 10))
    other = make(4)
    with pytest.raises(ConfigError, match=message):  # noqa: PT012
        other.load_state_dict(begun.state_dict())
        assert other.epoch == 0
        next(iter(other))


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"samples_per_update": 4}], ids=str)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_samples_make_no_batches(options: dict[str, Any], layout: Any) -> None:
    budget = TokenBudget(9, layout=layout)
    none = LengthAwareBatchSampler([], budget, rank=0, world_size=2, **options)
    assert list(none) == []
    assert len(none) == 0
    assert none.plan.num_steps == 0


# Orders


class Drawn(list[int]):
    """A sampler whose epochs are set."""

    def set_epoch(self, epoch: int) -> None:
        self[:] = epoch_order(COUNT, seed=3, epoch=epoch).tolist()


@given(asked=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_an_epoch_has_one_order_in_whatever_order_epochs_are_asked_for(asked: list[int]) -> None:
    drawn = OrderSource(Drawn(), COUNT)
    listed = OrderSource([3, 1, 2], COUNT)
    for epoch in asked:
        order = epoch_order(COUNT, seed=3, epoch=epoch)
        assert drawn.of_epoch(epoch).tolist() == order.tolist()
        assert listed.of_epoch(epoch).tolist() == [3, 1, 2]


def test_an_order_that_draws_is_read_once_an_epoch() -> None:
    one = sampler(order=shuffled_order(3))
    order = shuffled_order(3)
    for _ in range(2):
        assert_conserves(one, list(order))


def test_an_order_that_draws_the_same_first_epoch_resumes_in_it() -> None:
    first = sampler(order=shuffled_order(3))
    list(islice(first, 2))
    resumed = sampler(order=shuffled_order(3))
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == list(sampler(order=shuffled_order(3)))[2:]


def test_an_order_that_draws_cannot_resume_in_a_later_epoch() -> None:
    one = sampler(order=shuffled_order(3))
    for _ in range(2):
        list(one)
    message = "in epoch 1 .* give a list, or a sampler that has set_epoch"
    with pytest.raises(StateError, match=message):
        sampler(order=shuffled_order(3)).load_state_dict(one.state_dict())


def test_an_iterator_is_refused() -> None:
    message = "a list or a sampler, which can be read anew in every epoch"
    with pytest.raises(ConfigError, match=message):
        OrderSource(iter(range(3)), 3)


class Hiding:
    """What can be read only once, and does not look so."""

    def __init__(self) -> None:
        self.rows = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self.rows


def test_what_can_be_read_only_once_is_refused() -> None:
    source = OrderSource(Hiding(), 3)
    assert source.of_epoch(0).tolist() == [0, 1, 2]
    message = "Hiding.* yields nothing after its first epoch; its __iter__ must begin anew"
    with pytest.raises(ConfigError, match=message):
        source.of_epoch(1)


def test_an_empty_order_may_be_read_again() -> None:
    assert OrderSource([], 3).of_epoch(1).tolist() == []


@given(st.integers(0, 3000), st.integers(0, 2**40), st.integers(0, 50))
def test_is_a_permutation_that_can_be_read_anywhere(
    num_samples: int, seed: int, epoch: int
) -> None:
    whole = epoch_order(num_samples, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(whole), np.arange(num_samples))
    order = EpochOrder(num_samples, seed=seed, epoch=epoch)
    third = num_samples // 3
    assert np.array_equal(order[third:], whole[third:])
    if num_samples:
        for place in (0, num_samples // 2):
            assert order.position_of(int(whole[place])) == place


@pytest.mark.parametrize("num_samples", [2**32 + 1, LARGEST])
def test_an_order_of_very_many_samples_is_a_permutation_too(num_samples: int) -> None:
    order = EpochOrder(num_samples, seed=0, epoch=0)
    places = np.random.default_rng(0).integers(0, num_samples, 50)
    indices = order.index_at(places)
    assert indices.min() >= 0
    assert indices.max() < num_samples
    assert [order.position_of(index) for index in indices.tolist()] == places.tolist()


@pytest.mark.parametrize("epoch", [0, 1])
def test_literal_orders(epoch: int) -> None:
    assert epoch_order(8, seed=0, epoch=epoch).tolist() == LITERAL[epoch]


def test_every_sample_is_equally_likely_everywhere() -> None:
    """Chi squared, 25 degrees of freedom: 60 is above the 99.99th percentile."""
    counts = np.zeros((6, 6))
    for epoch in range(2000):
        counts[np.arange(6), epoch_order(6, seed=3, epoch=epoch)] += 1
    expected = 2000 / 6
    assert ((counts - expected) ** 2 / expected).sum() < 60


def test_neighbours_are_unrelated() -> None:
    order = epoch_order(100_000, seed=5, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    means = order.reshape(100, 1000).mean(axis=1)
    expected = 100_000 / np.sqrt(12 * 1000)
    assert 0.7 < means.std() / expected < 1.3


@given(st.integers(0, 300), st.integers(1, 60), st.integers(0, 299))
def test_windows_hold_every_sample_once_and_the_one_with_the_longest_comes_first(
    count, size, longest
):
    place = max(min(longest, count - 1), 0)
    windows = list(Windows(count, size, place // size))
    places = joined(range(start, stop) for start, stop in windows)
    assert sorted(places) == list(range(count))
    sizes = [stop - start for start, stop in windows]
    assert sizes[1:] == [size] * (len(sizes) - 1)
    if count:
        start, stop = windows[0]
        assert start <= place < stop
        assert sizes[0] < 2 * size


@given(st.integers(0, 300), st.integers(1, 60))
def test_windows_of_no_longest_sample_are_those_of_the_order(count, size):
    windows = [(start, min(start + size, count)) for start in range(0, count, size)]
    assert list(Windows(count, size)) == windows


@given(st.lists(st.booleans(), max_size=60), st.booleans(), st.data())
def test_an_order_without_samples_is_never_stored_and_is_that_of_those_kept(is_out, shuffle, data):
    kept = np.flatnonzero(~np.array(is_out, bool))
    drawn = np.arange(len(kept))
    if shuffle:
        drawn = epoch_order(len(kept), seed=1, epoch=2)
    whole = kept[drawn].tolist()
    left_out = np.flatnonzero(is_out)
    order = EpochOrder(len(kept), seed=1, epoch=2, shuffle=shuffle, left_out=left_out)
    places = st.integers(0, len(kept))
    start, stop = sorted(data.draw(st.tuples(places, places)))
    assert order[start:stop].tolist() == whole[start:stop]
    assert [order.position_of(index) for index in whole] == list(range(len(order)))


# Mixtures


def assert_passes(indices: list[int], members: range) -> None:
    """The samples of one source come pass after pass: none a second time before all others came."""
    of_source = [index for index in indices if index in members]
    for start in range(0, len(of_source), len(members)):
        part = of_source[start : start + len(members)]
        assert len(set(part)) == len(part)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    num_samples=st.integers(1, 60),
    weights=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    seed=st.integers(0, 5),
)
def test_a_mixture_gives_shares_and_each_source_pass_after_pass(sizes, weights, num_samples, seed):
    starts = np.cumsum([0, *sizes])
    sources = {}
    for number, (start, stop) in enumerate(pairwise(starts.tolist())):
        sources[str(number)] = range(start, stop)

    def shares(epoch: int) -> dict[str, int]:
        result = {}
        for number, name in enumerate(sources):
            result[name] = weights[3 * epoch % 12 + number % 3] + int(number == 0)
        return result

    mixture = Mixture(sources, shares, num_samples=num_samples, seed=seed)
    drawn = []
    for epoch in range(4):
        mixture.set_epoch(epoch)
        indices = list(mixture)
        drawn += indices
        assert len(indices) == len(mixture) == num_samples
        other = Mixture(sources, shares, num_samples=num_samples, seed=seed)
        assert indices == other.of_epoch(epoch).tolist()
        total = sum(shares(epoch).values())
        for name, members in sources.items():
            expected = num_samples * shares(epoch)[name] / total
            assert abs(sum(index in members for index in indices) - expected) < 1
    for members in sources.values():
        assert_passes(drawn, members)


TWO_SOURCES = {"a": range(10), "b": range(10, 50)}


def test_a_mixture_may_be_pickled():
    mixture = Mixture(TWO_SOURCES, {"a": 1, "b": 3}, num_samples=32)
    assert list(pickle.loads(pickle.dumps(mixture))) == list(mixture)


def mixed_loader() -> PlannedDataLoader:
    mixture = Mixture(TWO_SOURCES, lambda epoch: {"a": 1 + epoch, "b": 1}, num_samples=32)
    return PlannedDataLoader(
        range(50),
        np.arange(1, 51),
        TokenBudget(100),
        samples_per_update=8,
        weigh="samples",
        sampler=mixture,
    )


def steps_of(loader: PlannedDataLoader) -> list[list[int]]:
    return [list(step.indices) for step in loader]


def test_a_loader_over_a_mixture_resumes_and_keeps_the_size_of_updates():
    whole = mixed_loader()
    first = steps_of(whole)
    second = steps_of(whole)
    assert len(joined(first)) == 32
    assert len(joined(second)) == 32
    begun = mixed_loader()
    next(iter(begun.updates()))
    resumed = mixed_loader()
    resumed.load_state_dict(begun.state_dict())
    rest = steps_of(resumed)
    assert rest == first[len(first) - len(rest) :]
    assert len(joined(rest)) == 24
    assert steps_of(resumed) == second


NAMES = ["tokens", "target"]


@pytest.mark.parametrize(
    ("num_streams", "layout", "options"),
    [
        (1, "padded", {"window": 4096}),
        (1, "packed", {"shuffle": True}),
        (2, "padded", {"shuffle": True}),
        (2, "packed", {"samples_per_update": 4096, "grouping": 4}),
    ],
)
def test_the_first_batch_of_many_samples_needs_no_memory_in_proportion_to_them(
    num_streams, layout, options
):
    """Of 20 million lengths, which are not stored either: no array has an entry a sample, not even a byte."""
    lengths = np.broadcast_to(np.int32(9), 20_000_000)
    streams = dict.fromkeys(NAMES[:num_streams], lengths)
    budget = TokenBudget(1024, layout=layout)
    tracemalloc.start()
    one = LengthAwareBatchSampler(streams, budget, rank=0, world_size=8, **options)
    first = next(iter(one))
    assert 0 < 9 * num_streams * len(first) <= 1024
    one.load_state_dict(one.state_dict(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 18e6
