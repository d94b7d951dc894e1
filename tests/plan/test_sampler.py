"""The sampler emits its plan, moves through epochs and resumes; an epoch's order, seeded or a user's."""

import copy
import json
import pickle
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import islice
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
from dynagroup.plan import epoch as epoch_module
from dynagroup.plan import sampler as sampler_module
from dynagroup.plan import window as window_module
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.cut import cut_kinds
from dynagroup.plan.epoch import (
    EpochOrder,
    Mixture,
    OrderSource,
    Windows,
    epoch_order,
)
from dynagroup.testing import assert_conserves, run_ranks
from tests import strategies

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 300).astype(np.int32).clip(max=1024)
BUDGET = TokenBudget(1024)
MODES: list[Any] = [
    {},
    {"shuffle": True, "window": 40, "uneven": "drop"},
    {"samples_per_update": 37},
]
MODES += [{"window": 64, "round_batch": multiple_of(4)}]
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
    mine = [
        LengthAwareBatchSampler(values, budget, rank=r, world_size=ranks, **mode)
        for r in (0, ranks - 1)
    ]
    every = LengthAwareBatchSampler(values, budget, world_size=ranks, **mode)
    for one in (*mine, every):
        one.set_epoch(epoch)
    rows = list(mine[0].plan.rows)
    assert [list(one) for one in mine] == [[row[rank] for row in rows] for rank in (0, ranks - 1)]
    assert list(every) == [batch for row in rows for batch in row]
    assert len(mine[0]) == len(every) / ranks == len(rows)


def test_a_state_is_small_and_only_what_comes_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sampler(shuffle=True, window=40), sampler(shuffle=True, window=40)
    assert len(list(islice(one, 5))) == 5
    state = one.state_dict()
    assert set(state) == {
        "kind",
        "version",
        "identity",
        "cursor",
        "learned",
        "left_out",
        "order",
        "seal",
    }
    assert Cursor.of(reread(state["cursor"])) == Cursor(
        steps=5, window_size=40, segments=((1, 5, None),)
    )
    other.load_state_dict(state)
    asked = []
    monkeypatch.setattr(
        window_module, "cut_kinds", lambda *args, **how: asked.append(1) or cut_kinds(*args, **how)
    )
    next(iter(other))
    assert len(asked) == 1


def test_epochs_advance_by_themselves_and_by_set_epoch() -> None:
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    first, second = list(one), list(one)
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


def test_a_state_from_the_end_of_an_epoch_continues_with_the_next_and_frameworks_may_count_from_zero() -> (
    None
):
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    list(one)
    state = one.state_dict()
    other.load_state_dict(state)
    assert (other.epoch, other.plan.epoch, len(other)) == (1, 1, other.plan.num_steps)
    assert list(other) == list(one)
    other.load_state_dict(state)
    other.set_epoch(0)  # a loop that counts its epochs itself: nothing of epoch 0 remains
    assert list(other) == []
    one, other, third = sampler(shuffle=True), sampler(shuffle=True), sampler(shuffle=True)
    list(one)
    next(iter(one))
    rest = list(copy.deepcopy(one.plan.rows))[1:]
    other.load_state_dict(one.state_dict())
    other.sampler.set_epoch(0)
    assert list(other) == [row[0] for row in rest]
    other.sampler.set_epoch(1)
    third.set_epoch(2)
    assert list(other) == list(third)


@pytest.mark.parametrize("ranks", [2, 4])
def test_after_a_resume_the_plan_is_what_is_emitted_and_len_is_the_whole_epoch(ranks: int) -> None:
    one = sampler(0, 2, samples_per_update=64)
    resumed, whole = (sampler(0, ranks, samples_per_update=64) for _ in range(2))
    steps = int(np.flatnonzero(one.plan.update_ends)[1]) + 1
    assert len(list(islice(one, steps))) == steps
    resumed.load_state_dict(reread(one.state_dict(num_steps=steps)))
    plan = resumed.plan
    assert list(resumed) == [row[0] for row in plan.rows]
    assert plan.num_updates == 3  # of five
    assert plan.report().startswith(
        f"epoch 0: {sum(len(batch) for row in plan.rows for batch in row)} samples "
    )
    assert resumed.plan_of(0).fingerprint == whole.plan.fingerprint
    assert len(resumed) == len(whole) > plan.num_steps


def test_steps_are_counted_from_the_beginning_of_the_epoch_across_resumes() -> None:
    everything, one, steps = (
        list(sampler(shuffle=True, window=40)),
        sampler(shuffle=True, window=40),
        0,
    )
    seen: list[list[int]] = []
    for more in (3, 4, 2):
        seen += list(islice(one, more + 2))[:more]  # two more were fetched ahead
        steps += more
        state = reread(one.state_dict(num_steps=steps))
        with pytest.raises(
            StateError, match=f"must be from {steps - more} to {steps + 2}, .* but is {steps + 3}"
        ):
            one.state_dict(num_steps=steps + 3)
        one = sampler(shuffle=True, window=40)
        one.load_state_dict(state)
        assert one.state_dict() == state
    assert seen + list(one) == everything


def test_given_order_is_read_once_an_epoch_and_checked() -> None:
    one, expected = sampler(order=shuffled_order(3), samples_per_update=50), list(shuffled_order(3))
    seen = [index for batch in list(one) for index in batch]
    assert [set(seen[k : k + 50]) for k in range(0, 300, 50)] == [
        set(expected[k : k + 50]) for k in range(0, 300, 50)
    ]
    assert_conserves(sampler(order=[5, 5, 7, 9], shuffle=True), [5, 5, 7, 9])
    for order in (range(300), None):
        with pytest.raises(StateError, match="must yield the same indices in epoch 0"):
            sampler(order=order, samples_per_update=50).load_state_dict(one.state_dict())


def test_arguments_and_samples_that_do_not_fit() -> None:
    with pytest.warns(
        UserWarning, match=r"1 samples do not fit .* alone and are each a batch .* sample 1 with 99"
    ):
        LengthAwareBatchSampler([3, 99], TokenBudget(10), rank=0, world_size=1)
    with pytest.warns(UserWarning, match=r"samples \[1\] are repeated"):
        list(LengthAwareBatchSampler([9, 3, 9], TokenBudget(10), rank=0, world_size=2))
    assert not hasattr(sampler(None, 4), "batch_size")
    with pytest.raises(ConfigError, match="sharding them again"):
        _ = sampler(1, 4).batch_size


def test_a_state_behind_workers_is_told_the_steps_that_training_used() -> None:
    one, other = sampler(shuffle=True), sampler(shuffle=True)
    batches = iter(DataLoader(range(300), batch_sampler=one, num_workers=2, prefetch_factor=4))  # type: ignore[arg-type]
    used = [next(batches).tolist() for _ in range(3)]
    other.load_state_dict(one.state_dict(num_steps=3))
    assert used + list(other) == list(sampler(shuffle=True))


class Renamed(LengthAwareBatchSampler):
    """A sampler of the user's own that passes through what torchdata asks."""

    def state_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        return super().state_dict(num_steps)


def stateful(workers: int, kind: type[LengthAwareBatchSampler], budget: int) -> Any:
    work = Work(per_step=10_000)
    how: dict[str, Any] = {"shuffle": True, "window": 60, "rank": 0, "world_size": 1, "work": work}
    made = kind(LENGTHS[:60], TokenBudget(budget), **how)
    return made, StatefulDataLoader(
        range(60),  # type: ignore[arg-type]
        batch_sampler=made,
        collate_fn=tuple,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("chosen", [False, True], ids=["counted", "set_epoch"])
@pytest.mark.parametrize("budget", [1024, 6000], ids=["long epochs", "short epochs"])
@pytest.mark.parametrize(("workers", "kind"), [(0, LengthAwareBatchSampler), (3, Renamed)])
def test_a_stateful_dataloader_resumes_with_exactly_what_remained(
    workers: int, kind: type[LengthAwareBatchSampler], budget: int, chosen: bool
) -> None:
    """A short epoch has fewer batches than workers fetch ahead, also from iterators that torchdata throws away."""
    reference, _ = stateful(0, kind, budget)
    epochs = [[tuple(batch) for batch in reference] for _ in range(4)]
    assert (len(epochs[1]) < 2 * 3) == (budget == 6000)  # two batches for each of three workers
    for stop in (0, 1, len(epochs[1]) - 1, len(epochs[1]) + 1):
        one, loader = stateful(workers, kind, budget)
        list(loader)
        batches = iter(loader)
        assert list(islice(batches, stop)) == epochs[1][:stop]
        other, resumed = stateful(workers, kind, budget)
        resumed.load_state_dict(loader.state_dict())
        has_ended = stop > len(epochs[1])
        comes = [epochs[2], epochs[3]] if has_ended else [epochs[1][stop:], epochs[2], epochs[3]]
        for epoch, batches in enumerate(comes, start=4 - len(comes)):
            if chosen:
                other.set_epoch(epoch)
            assert list(resumed) == batches


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_is_thrown_away_counts_as_no_epoch(workers: int) -> None:
    reference, _ = stateful(0, LengthAwareBatchSampler, 1024)
    epochs = [[tuple(batch) for batch in reference] for _ in range(2)]
    _, loader = stateful(workers, LengthAwareBatchSampler, 1024)
    next(iter(loader))
    assert [list(loader), list(loader)] == epochs


def test_an_epoch_ends_with_its_last_batch_or_is_begun_again() -> None:
    reference, one = sampler(shuffle=True), sampler(shuffle=True)
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
        one, other = sampler(shuffle=True), sampler(shuffle=True)
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


def test_an_order_that_differs_between_ranks_is_found_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = threading.local()
    monkeypatch.setattr(sampler_module, "rank_and_size", lambda: (mine.world.rank, mine.world.size))
    monkeypatch.setattr(epoch_module, "current_world", lambda: mine.world)

    def run(world: World, seed: int) -> list[list[int]]:
        mine.world = world
        return list(sampler(None, None, order=shuffled_order(seed), samples_per_update=50))

    with pytest.raises(
        AlignmentError, match="`order` yields different indices .* in epoch 0, .* seed it the same"
    ):
        run_ranks(2, lambda world: run(world, world.rank))
    assert_conserves(
        (batch for column in run_ranks(2, lambda world: run(world, 7)) for batch in column),
        range(300),
    )


@pytest.mark.parametrize("settings", [{"samples_per_update": 2}, {"shuffle": True, "window": 2}])
def test_a_last_window_that_fills_no_row_does_not_hold_an_epoch_open(
    settings: dict[str, Any],
) -> None:
    def make() -> LengthAwareBatchSampler:
        return LengthAwareBatchSampler(
            [5] * 9, TokenBudget(10), uneven="drop", rank=0, world_size=2, **settings
        )

    sampler, resumed = make(), make()
    resumed.load_state_dict(sampler.state_dict(num_steps=len(list(sampler))))
    assert (resumed.epoch, len(list(resumed))) == (1, 4)


@pytest.mark.parametrize("uneven", ["drop", "repeat"])
def test_a_resume_on_more_ranks_than_an_update_has_samples_is_refused_as_a_new_epoch_is(
    uneven: Any,
) -> None:
    """With "drop", the rest of the epoch was left out without a word."""

    def made(world_size: int) -> LengthAwareBatchSampler:
        how: Any = {"samples_per_update": 2, "uneven": uneven, "rank": 0, "world_size": world_size}
        return LengthAwareBatchSampler(range(1, 101), TokenBudget(200), **how)

    begun, other = made(2), made(4)
    list(islice(begun, 10))
    with pytest.raises(
        ConfigError, match=r"`samples_per_update` \(2\) must be at least the number of ranks \(4\)"
    ):
        next(iter(made(4)))
    with pytest.raises(ConfigError, match="must be at least the number of ranks"):  # noqa: PT012
        other.load_state_dict(begun.state_dict())
        assert other.epoch == 0
        next(iter(other))


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"samples_per_update": 4}], ids=str)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_samples_make_no_batches(how: dict[str, Any], layout: Any) -> None:
    made = LengthAwareBatchSampler([], TokenBudget(9, layout=layout), rank=0, world_size=2, **how)
    assert (list(made), len(made), made.plan.num_steps) == ([], 0, 0)


class Drawn(list[int]):
    """A sampler whose epochs are set."""

    def set_epoch(self, epoch: int) -> None:
        self[:] = epoch_order(COUNT, seed=3, epoch=epoch).tolist()


@given(asked=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_an_epoch_has_one_order_in_whatever_order_epochs_are_asked_for(asked: list[int]) -> None:
    for source, wanted in (
        (Drawn(), lambda epoch: epoch_order(COUNT, seed=3, epoch=epoch).tolist()),
        ([3, 1, 2], lambda _: [3, 1, 2]),
    ):
        order = OrderSource(source, COUNT)
        assert [order.of_epoch(epoch).tolist() for epoch in asked] == [*map(wanted, asked)]


def test_an_order_that_draws_is_read_once_an_epoch_and_another_one_is_refused_after_a_resume() -> (
    None
):
    one, expected = sampler(order=shuffled_order(3)), shuffled_order(3)
    for _ in range(2):
        assert_conserves(one, list(expected))
    first = sampler(order=shuffled_order(3))
    list(islice(first, 2))
    resumed = sampler(order=shuffled_order(3))  # the same draw comes first in both runs
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == list(sampler(order=shuffled_order(3)))[2:]
    with pytest.raises(
        StateError, match="in epoch 1 .* give a list, or a sampler that has set_epoch"
    ):
        sampler(order=shuffled_order(3)).load_state_dict(one.state_dict())


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="a list or a sampler, which can be read anew in every epoch"
    ):
        OrderSource(iter(range(3)), 3)

    class Hiding:
        rows = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.rows

    source = OrderSource(Hiding(), 3)
    assert source.of_epoch(0).tolist() == [0, 1, 2]
    said = "Hiding.* yields nothing after its first epoch; its __iter__ must begin anew"
    with pytest.raises(ConfigError, match=said):
        source.of_epoch(1)
    assert OrderSource([], 3).of_epoch(1).tolist() == []


@given(st.integers(0, 3000), st.integers(0, 2**40), st.integers(0, 50))
def test_is_a_permutation_that_can_be_read_anywhere(
    num_samples: int, seed: int, epoch: int
) -> None:
    order = epoch_order(num_samples, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    third = num_samples // 3
    assert np.array_equal(EpochOrder(num_samples, seed=seed, epoch=epoch)[third:], order[third:])
    for place in {0, num_samples // 2} if num_samples else ():
        assert (
            EpochOrder(num_samples, seed=seed, epoch=epoch).position_of(int(order[place])) == place
        )


def test_literal_orders_and_every_sample_equally_likely_everywhere_with_unrelated_neighbours() -> (
    None
):
    assert epoch_order(8, seed=0, epoch=0).tolist() == LITERAL[0]
    assert epoch_order(8, seed=0, epoch=1).tolist() == LITERAL[1]
    counts = np.zeros((6, 6))
    for epoch in range(2000):
        counts[np.arange(6), epoch_order(6, seed=3, epoch=epoch)] += 1
    assert (
        (counts - 2000 / 6) ** 2 / (2000 / 6)
    ).sum() < 60  # chi squared, 25 degrees of freedom: 99.99th percentile
    order = epoch_order(100_000, seed=5, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert 0.7 < order.reshape(100, 1000).mean(axis=1).std() / (100_000 / np.sqrt(12 * 1000)) < 1.3


@given(st.integers(0, 300), st.integers(1, 60), st.integers(0, 299))
def test_windows_hold_every_sample_once_and_the_one_with_the_longest_comes_first(
    count, size, longest
):
    at = min(longest, count - 1)
    windows = list(Windows(count, size, max(at, 0) // size))
    assert sorted(place for start, stop in windows for place in range(start, stop)) == list(
        range(count)
    )
    held = [stop - start for start, stop in windows]
    assert held[1:] == [size] * (len(held) - 1)
    assert not count or (windows[0][0] <= at < windows[0][1] and held[0] < 2 * size)
    assert list(Windows(count, size)) == [
        (start, min(start + size, count)) for start in range(0, count, size)
    ]


@given(st.lists(st.booleans(), max_size=60), st.booleans(), st.data())
def test_an_order_without_samples_is_never_stored_and_is_that_of_those_kept(out, shuffle, data):
    kept, left_out = np.flatnonzero(~np.array(out, bool)), np.flatnonzero(out)
    drawn = epoch_order(len(kept), seed=1, epoch=2) if shuffle else np.arange(len(kept))
    order = EpochOrder(len(kept), seed=1, epoch=2, shuffle=shuffle, left_out=left_out)
    wanted = kept[drawn].tolist()
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(kept)), st.integers(0, len(kept)))))
    assert order[start:stop].tolist() == wanted[start:stop]
    assert [order.position_of(index) for index in wanted] == list(range(len(order)))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    num_samples=st.integers(1, 60),
    weights=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    seed=st.integers(0, 5),
)
def test_a_mixture_gives_shares_and_each_source_pass_after_pass(sizes, weights, num_samples, seed):
    starts = np.cumsum([0, *sizes])
    sources = {str(k): range(starts[k], starts[k + 1]) for k in range(len(sizes))}
    shares = lambda epoch: {  # noqa: E731
        name: weights[3 * epoch % 12 + k % 3] + (k == 0) for k, name in enumerate(sources)
    }
    order, drawn = Mixture(sources, shares, num_samples=num_samples, seed=seed), []
    for epoch in range(4):
        order.set_epoch(epoch)
        found = list(order)
        assert len(found) == len(order) == num_samples
        assert (
            found
            == Mixture(sources, shares, num_samples=num_samples, seed=seed).of_epoch(epoch).tolist()
        )
        for name, members in sources.items():
            wanted = num_samples * shares(epoch)[name] / sum(shares(epoch).values())
            assert abs(sum(i in members for i in found) - wanted) < 1
        drawn += found
    for members in sources.values():
        own, size = [i for i in drawn if i in members], len(members)
        assert all(
            len({*own[k : k + size]}) == len(own[k : k + size]) for k in range(0, len(own), size)
        )


def test_a_loader_over_a_mixture_resumes_and_keeps_the_size_of_updates():
    mixed = Mixture({"a": range(10), "b": range(10, 50)}, {"a": 1, "b": 3}, num_samples=32)
    assert [*pickle.loads(pickle.dumps(mixed))] == [*mixed]
    make = lambda: PlannedDataLoader(  # noqa: E731
        range(50),
        np.arange(1, 51),
        TokenBudget(100),
        samples_per_update=8,
        weigh="samples",
        sampler=Mixture(
            {"a": range(10), "b": range(10, 50)},
            lambda epoch: {"a": 1 + epoch, "b": 1},
            num_samples=32,
        ),
    )
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


@pytest.mark.parametrize(
    ("streams", "layout", "options"),
    [
        (1, "padded", {}),
        (1, "packed", {"shuffle": True}),
        (2, "padded", {"shuffle": True}),
        (2, "packed", {"samples_per_update": 4096, "grouping": 4}),
    ],
)
def test_the_first_batch_of_many_samples_needs_no_memory_in_proportion_to_them(
    streams, layout, options
):
    """Of 20 million lengths, which are not stored either: no array has an entry a sample, not even a byte."""
    lengths = {
        name: np.broadcast_to(np.int32(9), 20_000_000) for name in ("tokens", "target")[:streams]
    }
    how = {"window": None if options else 4096, "rank": 0, "world_size": 8, **options}
    tracemalloc.start()
    sampler = LengthAwareBatchSampler(lengths, TokenBudget(1024, layout=layout), **how)
    assert 0 < 9 * streams * len(next(iter(sampler))) <= 1024
    sampler.load_state_dict(sampler.state_dict(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 18e6
