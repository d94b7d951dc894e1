"""Several padded streams: batches are cut from an order in which neighbours are alike in all of them."""

from __future__ import annotations

import warnings
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap, Budget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan import multistream
from dynagroup.plan.batches import Batches, multiple_of, shapes_of, smaller_size
from dynagroup.plan.cost import Work
from dynagroup.plan.multistream import alike_order
from dynagroup.plan.padded import OrderedWindow, cut, in_order
from dynagroup.plan.ranks import cut_rows
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import Streams
from dynagroup.testing import assert_resumes_exactly
from tests import strategies

NAMES: tuple[str, ...] = ("tokens", "labels", "third")
samples = st.integers(2, 3).flatmap(
    lambda num: st.lists(st.tuples(*[st.integers(0, 60)] * num), min_size=1, max_size=60)
)
budgets: st.SearchStrategy[Budget] = st.one_of(
    st.builds(
        TokenBudget,
        st.integers(1, 600),
        max_samples=st.one_of(st.none(), st.integers(1, 9)),
        pad_to_multiple_of=st.sampled_from([1, 8]),
    ),
    st.builds(lambda n: MemoryBudget(n, model=PaddedTokens(), headroom=1.0), st.integers(1, 8)),
    st.builds(lambda most, cap: TokenBudget(most) & AdditiveCap("third", cap), st.integers(1, 400), st.integers(1, 90)),
)
WORKS = st.builds(Work, per_step=st.sampled_from([0.0, 30.0, 1024.0]), crossover=st.sampled_from([10.0, 12_288.0]))


def streams(values: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    columns = dict(zip(NAMES, np.asarray(values, np.int32).T, strict=False))
    return columns if len(columns) == 3 else {**columns, "third": columns["labels"][::-1]}


def pairs(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A source and a target that have little to do with one another."""
    drawn = np.random.default_rng(seed).lognormal(4, 0.8, (2, count)).clip(1, 900).astype(np.int32)
    return {"tokens": drawn[0], "labels": drawn[1]}


def fits_or_is_alone(batches: Batches, lengths: Streams, budget: Budget) -> bool:
    return bool((budget.fits(shapes_of(batches, lengths)) | (batches.sizes == 1)).all())


def time_of(batches: Batches, lengths: Streams, budget: Budget, work: Work) -> float:
    return work.per_step * len(batches) + float(work.of_batches(batches, lengths, budget).sum())


@settings(max_examples=80, deadline=None)
@given(samples, budgets, strategies.ROUNDINGS, st.sampled_from(["time", "fewest"]), WORKS, st.integers(1, 4))
def test_nothing_is_lost_and_every_batch_fits(
    values: list[tuple[int, ...]], budget: Budget, rounding: Any, objective: Any, work: Work, ranks: int
) -> None:
    lengths = streams(values)
    bound = budget.bind(lengths)
    how: dict[str, Any] = {"work": work, "objective": objective, "round_batch": rounding}
    batches = cut_rows(lengths, bound, ranks, **how)
    assert sorted(batches.order.tolist()) == list(range(len(values)))
    assert fits_or_is_alone(batches, lengths, bound)
    assert len(batches) % ranks == 0 or (batches.sizes == 1).all()
    assert all(smaller_size(size, rounding) == size for size in cut(lengths, bound, **how).sizes.tolist())
    again = cut_rows(lengths, bound, ranks, **how)
    assert (again.order.tolist(), again.offsets.tolist()) == (batches.order.tolist(), batches.offsets.tolist())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8), st.integers(9, 120), WORKS)
def test_no_cut_of_the_order_into_runs_takes_less_time(values: list[tuple[int, int]], most: int, work: Work) -> None:
    lengths, budget = dict(zip(NAMES, np.asarray(values, np.int32).T, strict=False)), TokenBudget(most)
    order, _ = in_order(lengths, budget, work, "time", None)
    best = min(
        time_of(batches, lengths, budget, work)
        for number in range(len(values))
        for inner in combinations(range(1, len(values)), number)
        if fits_or_is_alone(batches := Batches(order, np.array([0, *inner, len(values)])), lengths, budget)
    )
    assert time_of(cut(lengths, budget, work=work), lengths, budget, work) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_streams_that_have_little_to_do_with_one_another_are_hardly_padded() -> None:
    lengths, budget = pairs(2000), TokenBudget(16_384)
    plan = LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1).plan
    assert plan.statistics["padding"] < 0.2  # sorted by one stream: 0.5
    other = LengthAwareBatchSampler(dict(reversed(lengths.items())), budget, rank=0, world_size=1).plan
    assert other.predicted_time == pytest.approx(plan.predicted_time, rel=0.02)  # whichever comes first


def test_literal_cut() -> None:
    lengths = {"tokens": np.array([90, 10, 90, 11, 9], np.int32), "labels": np.array([10, 90, 11, 90, 9], np.int32)}
    batches = cut(lengths, TokenBudget(210), work=Work(per_step=10))
    assert [sorted(batch.tolist()) for batch in batches] == [[0, 2], [1, 3], [4]]
    assert alike_order([np.full(9, 7)] * 2).tolist() == list(range(9))  # of no difference: the order of arrival
    assert alike_order([np.zeros(3, np.int64)] * 2).tolist() == [0, 1, 2]


def test_long_runs_end_at_few_places_but_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [np.sort(np.random.default_rng(n).integers(3, 20, 6000))[::-1].astype(np.float64) for n in range(2)]
    most = np.minimum((40_000 // (drawn[0] + drawn[1].max())).astype(np.int64), np.arange(6000, 0, -1))
    window = OrderedWindow(drawn[0] + drawn[1], np.maximum(most, 1), None, tuple(drawn))
    coarse = window.least_time(5000.0)
    assert (np.diff(coarse) <= window.most[coarse[:-1]]).all()
    monkeypatch.setattr(multistream, "FINE", 1 << 20)
    exact = window.least_time(5000.0)
    times = [float(window.total(o).sum()) + 5000.0 * (len(o) - 1) for o in (exact, coarse)]
    assert times[0] <= times[1] <= 1.01 * times[0]


FREE: list[dict[str, Any]] = [{"shuffle": True, "window": 60}, {"round_batch": multiple_of(2)}]


@pytest.mark.parametrize(
    ("mode", "before", "after"), [*((mode, 3, 2) for mode in FREE), ({"samples_per_update": 48}, 2, 2)]
)
def test_resumes_exactly(mode: dict[str, Any], before: int, after: int) -> None:
    lengths = pairs(240)

    def make(world: Any) -> LengthAwareBatchSampler:
        return LengthAwareBatchSampler(lengths, TokenBudget(3000), rank=world.rank, world_size=world.size, **mode)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="too few samples for an equal number of steps")
        assert_resumes_exactly(
            make, world_size=before, resume_world_size=after, steps=range(0, 6, 3), fillers=after - 1
        )


def test_the_first_batch_holds_the_sample_of_most_tokens() -> None:
    lengths = pairs(500)
    lengths["labels"][317] = 2000
    for mode in ({"shuffle": True, "window": 50}, {}):
        first = next(iter(LengthAwareBatchSampler(lengths, TokenBudget(5000), rank=0, world_size=1, **mode)))
        assert 317 in first
