"""A mixture with fixed shares: each update holds them up to rounding, also when they change, are dealt or resumed."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import LengthAwareBatchSampler, Mixture, OnlineDataLoader, PlannedDataLoader
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.plan.shares import rounded_shares
from dynagroup.testing import run_ranks
from dynagroup.update.schedule import linear_ramp

SOURCES = {"code": range(60), "text": range(60, 160), "rare": range(160, 170)}
SHARES = {"code": 5, "text": 10, "rare": 1.4}
LENGTHS = np.random.default_rng(0).integers(1, 60, 170)
UPDATE = 8


def shares_that_change(update: int) -> dict[str, float]:
    return {"code": 1 + update, "text": 10, "rare": 1.4}


def mixed(
    shares: Any = SHARES, world: Any = None, sizes: Any = UPDATE, **options: Any
) -> tuple[Mixture, Any]:
    mixture = Mixture(SOURCES, shares, num_samples=132, samples_per_update=UPDATE)
    loader = PlannedDataLoader(
        range(170),
        LENGTHS,
        120,
        samples_per_update=sizes,
        sampler=mixture,
        collate_fn=list,
        weigh="samples",
        world=world,
        **options,
    )
    return mixture, loader


def samples_of(update: list[Any]) -> list[int]:
    return sorted(index for step in update if not step.idle for index in step.indices)


def updates_of(loader: Any) -> list[list[int]]:
    return [samples_of(update) for update in loader.updates()]


def counts_of(updates: list[list[int]]) -> np.ndarray:
    counts = []
    for update in updates:
        counts.append([sum(index in members for index in update) for members in SOURCES.values()])
    return np.array(counts)


def assert_shares(counts: np.ndarray, exact: np.ndarray) -> None:
    """Each update has its shares rounded up or down, and all updates so far those of all their samples."""
    assert (np.abs(counts - exact) < 1).all()
    assert (np.abs((counts - exact).cumsum(axis=0)) < 1).all()


def exact_shares(counts: np.ndarray, shares: list[dict[str, float]]) -> np.ndarray:
    weights = np.array([list(of_update.values()) for of_update in shares], float)
    return counts.sum(axis=1, keepdims=True) * weights / weights.sum(axis=1, keepdims=True)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    slopes=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    size=st.integers(1, 30),
    num_updates=st.integers(1, 40),
)
def test_shares_are_rounded_and_remainders_carried(weights, slopes, size, num_updates):
    steps = np.arange(num_updates)[:, None]
    changing = np.array(weights) + steps * np.array(slopes[: len(weights)])
    exact = size * changing / changing.sum(axis=1, keepdims=True)
    counts = rounded_shares(exact, np.zeros(len(weights)))
    assert (counts.sum(axis=1) == size).all()
    assert_shares(counts, exact)


def test_ten_five_one_of_sixteen_in_every_update():
    exact = np.tile([10.0, 5.0, 1.0], (3, 1))
    assert rounded_shares(exact, np.zeros(3)).tolist() == [[10, 5, 1]] * 3
    assert rounded_shares(exact / 2, np.zeros(3)).tolist() == [[5, 3, 0], [5, 2, 1], [5, 3, 0]]


@pytest.mark.parametrize("grouping", [None, 4])
@pytest.mark.parametrize("shares", [SHARES, shares_that_change])
def test_each_update_holds_its_shares(shares, grouping):
    _, loader = mixed(shares, grouping=grouping)
    for epoch in range(2):
        updates = updates_of(loader)
        assert list(map(len, updates)) == [UPDATE] * 16 + [4]
        numbers = range(epoch * 17, (epoch + 1) * 17)
        known = [shares(number) if callable(shares) else shares for number in numbers]
        counts = counts_of(updates)
        assert_shares(counts, exact_shares(counts, known))


def test_dealt_updates_pad_less_and_have_the_same_samples():
    sources = {"code": range(600), "text": range(600, 3000)}
    lengths = np.random.default_rng(0).lognormal(4, 1, 3000).astype(int) + 1
    padding = []
    drawn = []
    for grouping in (None, 50):
        order = Mixture(sources, {"code": 1, "text": 3}, samples_per_update=16, num_samples=1600)
        plan = LengthAwareBatchSampler(
            lengths,
            4096,
            samples_per_update=16,
            order=order,
            grouping=grouping,
            strata=None if grouping is None else 4,
            rank=0,
            world_size=1,
        ).plan
        padding.append(plan.statistics["padding"])
        drawn.append(sorted(np.concatenate(plan.batches).tolist()))
    assert drawn[0] == drawn[1]
    assert padding[1] < 0.6 * padding[0]


@pytest.mark.parametrize(("grouping", "first"), [(None, 4), (3, 6)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_set_shares_counts_from_the_next_window_on(grouping, first, num_workers):
    if num_workers and grouping:
        return
    usual = updates_of(mixed(grouping=grouping)[1])
    mixture, loader = mixed(grouping=grouping, num_workers=num_workers)
    updates = []
    for update in loader.updates():
        updates.append(samples_of(update))
        if len(updates) == 4:
            number = mixture.set_shares({"code": 0, "text": 0, "rare": 1})
            assert number >= first if num_workers else number == first
    assert updates[:number] == usual[:number]
    counts = counts_of(updates)
    assert counts[number:, :2].sum() <= 2  # what was behind until then
    assert (counts_of(updates_of(loader))[:, :2] == 0).all()  # the next epoch


@pytest.mark.parametrize("grouping", [None, 3])
@pytest.mark.parametrize("taken", [4, 5, 7])
def test_a_run_resumes_with_the_shares_that_were_set(grouping, taken):
    mixture, whole = mixed(grouping=grouping)
    expected = []
    state = None
    for update in whole.updates():
        expected.append(samples_of(update))
        if len(expected) == 4:
            mixture.set_shares({"code": 1, "text": 1, "rare": 6})
        if len(expected) == taken:
            state = json.loads(json.dumps(whole.state_dict()))
    following = updates_of(whole)

    def resumed(world: Any) -> list[list[list[int]]]:
        _, loader = mixed(grouping=grouping, world=world)
        loader.load_state_dict(state)
        return [updates_of(loader), updates_of(loader)]

    assert run_ranks(1, resumed) == [[expected[taken:], following]]
    parts = run_ranks(2, resumed)
    for number, updates in enumerate([expected[taken:], following]):
        pairs = zip(parts[0][number], parts[1][number], strict=True)
        assert [sorted(one + other) for one, other in pairs] == updates


def test_ranks_that_share_their_plans_follow_shares_that_are_set():
    def run(world: Any) -> list[list[int]]:
        mixture, loader = mixed(world=world)
        updates = []
        for update in loader.updates():
            updates.append(samples_of(update))
            if len(updates) == 4:
                mixture.set_shares({"code": 1, "text": 1, "rare": 6})
        return updates

    [alone] = run_ranks(1, run)
    pairs = zip(*run_ranks(2, run), strict=True)
    assert [sorted(one + other) for one, other in pairs] == alone


def test_a_state_of_another_mixture_is_refused():
    _, loader = mixed()
    next(loader.updates())
    _, resumed = mixed(shares={"code": 1, "text": 1, "rare": 1})
    with pytest.raises(StateError, match="give the Mixture the same sources"):
        resumed.load_state_dict(loader.state_dict())


def test_ranks_that_set_different_shares_are_told():
    def run(world: Any) -> None:
        mixture, loader = mixed(world=world)
        updates = loader.updates()
        next(updates)
        with pytest.raises(AlignmentError, match="different shares of a Mixture"):
            mixture.set_shares({"code": 1, "text": 1, "rare": world.rank})

    run_ranks(2, run)


def test_shares_that_could_not_hold_are_refused():
    mixture, loader = mixed()
    with pytest.raises(ConfigError, match="set_shares"):
        mixture.set_shares({"code": 1})
    alone = Mixture(SOURCES, SHARES, samples_per_update=UPDATE)
    with pytest.raises(ConfigError, match="set_shares needs"):
        alone.set_shares(SHARES)
    settings: dict[str, Any] = {"samples_per_update": 12, "weigh": "samples"}
    with pytest.raises(ConfigError, match=r"`samples_per_update` \(12\) must be a multiple"):
        PlannedDataLoader(range(170), LENGTHS, 120, sampler=mixture, **settings)
    common = Mixture({"a": [0, 1], "b": [1, 2]}, {"a": 1, "b": 1}, samples_per_update=2)
    with pytest.raises(ConfigError, match="without common samples"):
        LengthAwareBatchSampler([1, 2, 3], 9, samples_per_update=2, grouping=2, order=common)
    with pytest.raises(ConfigError, match="PlannedDataLoader"):
        OnlineDataLoader(range(170), 120, samples_per_update=UPDATE, sampler=mixture, grouping=2)


def test_growing_updates_have_the_shares_that_were_set():
    mixture, loader = mixed(sizes=linear_ramp(8, 32, num_updates=6, multiple_of=8))
    shares = [SHARES]
    updates = []
    for update in loader.updates():
        updates.append(samples_of(update))
        if len(updates) in (2, 5):
            shares.append({"code": 1, "text": len(updates), "rare": 3})
            assert mixture.set_shares(shares[-1]) == len(updates)
    assert list(map(len, updates)) == [8, 8, 16, 16, 24, 24, 32, 4]
    counts = counts_of(updates)
    of_updates = [shares[0]] * 2 + [shares[1]] * 3 + [shares[2]] * 3
    ahead = (counts - exact_shares(counts, of_updates)).cumsum(axis=0)
    assert (np.abs(ahead) < 1).all()


def test_sizes_that_are_no_multiple_of_a_mixtures_are_refused():
    with pytest.raises(ConfigError, match="`samples_per_update` of a Mixture must be an int"):
        Mixture(SOURCES, SHARES, samples_per_update=linear_ramp(8, 32, num_updates=6))
    mixture, loader = mixed(sizes=linear_ramp(8, 32, num_updates=6))
    with pytest.raises(ConfigError, match="12 at update 1.* must be a multiple"):
        list(loader)
    mixture, loader = mixed(sizes=UPDATE)
    with pytest.raises(ConfigError, match="must be a multiple"):
        loader.set_samples_per_update(12)
    with pytest.raises(ConfigError, match="must be a multiple"):
        OnlineDataLoader(range(170), 120, samples_per_update=12, sampler=mixture)
