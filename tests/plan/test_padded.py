from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import Budget, padded_tokens
from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.plan.batches import (
    Batches,
    RoundBatch,
    allowed_sizes,
    friendly_size,
    multiple_of,
    shapes_of,
    smaller_size,
)
from dynagroup.plan.cost import Work
from dynagroup.plan.padded import OrderedWindow, by_queue, cut, one_by_one
from dynagroup.shapes import BatchShape, IntArray, Streams
from tests import strategies


def streams(values: list[int], patches: bool = False) -> dict[str, np.ndarray]:
    tokens = np.asarray(values, np.int32)
    return {"tokens": tokens, "patches": tokens[::-1] % 37} if patches else {"tokens": tokens}


def assert_cut(batches: Batches, lengths: Streams, budget: Budget) -> None:
    assert np.array_equal(np.sort(batches.order), np.arange(len(lengths["tokens"])))
    fits = budget.fits(shapes_of(batches, lengths))
    assert (fits | (batches.sizes == 1)).all()


OBJECTIVES = st.sampled_from(["time", "fewest"])
WORKS = st.builds(Work, per_step=st.sampled_from([0.0, 1.0, 30.0, 1024.0]), crossover=st.sampled_from([10.0, math.inf]))


@settings(max_examples=150)
@given(strategies.lengths, strategies.budgets, strategies.ROUNDINGS, OBJECTIVES, WORKS)
def test_every_batch_fits_and_nothing_is_lost(
    values: list[int], budget: Budget, rounding: object, objective: str, work: Work
) -> None:
    lengths = streams(values)
    bound = budget.bind(lengths)
    batches = cut(lengths, bound, work=work, objective=objective, round_batch=rounding)  # type: ignore[arg-type]
    assert_cut(batches, lengths, bound)
    assert all(smaller_size(size, rounding) == size for size in batches.sizes.tolist())  # type: ignore[arg-type]


@settings(max_examples=100)
@given(strategies.lengths, strategies.capped_budgets, OBJECTIVES)
def test_several_streams(values: list[int], budget: Budget, objective: str) -> None:
    lengths = streams(values, patches=True)
    assert_cut(cut(lengths, budget, objective=objective), lengths, budget)  # type: ignore[arg-type]


class WithoutTable(TokenBudget):
    """Forces the search that serves budgets which cannot be tabulated by length."""

    def largest(self, longest: IntArray, /) -> None:
        return None


@settings(max_examples=100)
@given(strategies.lengths, st.integers(1, 300))
def test_table_and_search_cut_alike(values: list[int], max_tokens: int) -> None:
    lengths = streams(values)
    table, search = cut(lengths, TokenBudget(max_tokens)), cut(lengths, WithoutTable(max_tokens))
    assert table.offsets.tolist() == search.offsets.tolist()
    assert table.order.tolist() == search.order.tolist()


def test_search_beyond_one_block_and_reach() -> None:
    lengths = streams(np.random.default_rng(0).integers(0, 9, 20_000).tolist())
    assert cut(lengths, WithoutTable(3000)).offsets.tolist() == cut(lengths, TokenBudget(3000)).offsets.tolist()


def runs_that_fit(values: list[int], budget: TokenBudget, rounding: RoundBatch | None) -> Iterator[list[list[int]]]:
    """Every cut of the sorted window into runs that fit and have allowed sizes."""
    ordered = sorted(values, reverse=True)
    for number in range(len(values)):
        for inner in combinations(range(1, len(values)), number):
            edges = [0, *inner, len(values)]
            runs = [ordered[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
            if all(len(r) == 1 or len(r) * r[0] <= budget.max_tokens for r in runs) and all(
                smaller_size(len(r), rounding) == len(r) for r in runs
            ):
                yield runs


FEW = st.lists(st.integers(0, 20), min_size=1, max_size=9)


@settings(max_examples=60)
@given(FEW, st.integers(5, 60), strategies.ROUNDINGS)
def test_fewest_batches_and_the_least_padding_among_those(values: list[int], max_tokens: int, rounding: Any) -> None:
    budget, lengths = TokenBudget(max_tokens), streams(values)
    best = min((len(runs), sum(len(r) * r[0] for r in runs)) for runs in runs_that_fit(values, budget, rounding))
    batches = cut(lengths, budget, objective="fewest", round_batch=rounding)
    assert (len(batches), padded_tokens(shapes_of(batches, lengths), budget).sum()) == best


@settings(max_examples=100)
@given(FEW, st.integers(5, 60), strategies.ROUNDINGS, WORKS)
def test_no_cut_into_runs_takes_less_time(values: list[int], max_tokens: int, rounding: Any, work: Work) -> None:
    budget, lengths = TokenBudget(max_tokens), streams(values)
    best = min(
        sum(work.per_step + len(r) * float(work.of_lengths(r[0])) for r in runs)
        for runs in runs_that_fit(values, budget, rounding)
    )
    batches = cut(lengths, budget, work=work, round_batch=rounding)
    taken = work.per_step * len(batches) + work.of_batches(batches, lengths, budget).sum()
    assert taken == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_a_cheap_step_buys_less_padding_with_more_batches() -> None:
    lengths = streams([10, 6, 6, 1, 1, 1])
    batches = cut(lengths, TokenBudget(60), work=Work(per_step=1))
    assert [batch.tolist() for batch in batches] == [[0], [1, 2], [3, 4, 5]]
    assert len(cut(lengths, TokenBudget(60), work=Work(per_step=100))) == 1
    assert len(cut(lengths, TokenBudget(60), work=Work(per_step=1), objective="fewest")) == 1


@pytest.mark.parametrize(("per_step", "max_tokens"), [(256.0, 20_000), (1024.0, 200_000)])
def test_large_windows_are_cut_run_by_run_nearly_as_well(per_step: float, max_tokens: int) -> None:
    tokens = np.sort(np.random.default_rng(0).lognormal(5.5, 0.8, 70_000).astype(np.int64) + 1)[::-1]
    most = np.minimum(np.maximum(max_tokens // tokens, 1), np.arange(len(tokens), 0, -1))
    window = OrderedWindow(tokens.astype(np.float64), most)
    exact, greedy = (
        window.total(offsets).sum() + per_step * (len(offsets) - 1)
        for offsets in (by_queue(window, per_step), one_by_one(window, per_step))
    )
    assert exact <= greedy <= 1.001 * exact
    rounded = replace(window, allowed=allowed_sizes(int(most.max()), multiple_of(8))).least_time(per_step)
    assert (np.diff(rounded) <= most[rounded[:-1]]).all()
    assert not (np.diff(rounded)[np.diff(rounded) > 8] % 8).any()


def test_literal_cut() -> None:
    batches = cut(streams([3, 9, 2, 8, 50]), TokenBudget(18))
    assert [batch.tolist() for batch in batches] == [[4], [1, 3], [0, 2]]


def test_rounding_happens_before_the_fit_check_and_only_downwards() -> None:
    lengths = streams([10] * 23)
    assert sorted(cut(lengths, TokenBudget(100), round_batch=multiple_of(8)).sizes.tolist()) == [7, 8, 8]
    sizes = cut(lengths, TokenBudget(70), round_batch=friendly_size).sizes.tolist()
    assert len(sizes) == 5  # 6, 6, 6, 4 and 1: the rest has a friendly size too
    assert set(sizes) <= {1, 2, 3, 4, 6}
    assert cut(lengths, TokenBudget(70), round_batch=lambda n: n + 2).sizes.max() <= 7  # 5 -> 7 fits, 6 -> 8 does not


@given(st.integers(1, 5000))
def test_friendly_sizes_are_the_largest_of_their_kind(size: int) -> None:
    kinds = [2**n for n in range(14)] + [3 * 2**n for n in range(13)]
    assert friendly_size(size) == max(k for k in kinds if k <= size)
    assert smaller_size(size, friendly_size) == friendly_size(size)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, None])
def test_a_rounding_that_is_none_is_named(wrong: object) -> None:
    with pytest.raises(ConfigError, match="`round_batch` must return an int of at least 1, but returned"):
        cut(streams([1, 2]), TokenBudget(9), round_batch=lambda n: wrong)  # type: ignore[arg-type,return-value]


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(ConfigError, match="`objective` must be one of 'time', 'fewest', but is 'best'"):
        cut(streams([1]), TokenBudget(9), objective="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`number` must be an int of at least 1, but is 0"):
        multiple_of(0)

    class Falling(TokenBudget):
        def largest(self, longest: IntArray, /) -> IntArray:
            return longest

    with pytest.raises(BudgetError, match="falls for shorter samples"):
        cut(streams([1, 5]), Falling(9))


def test_the_model_is_asked_a_number_of_times_that_does_not_grow_with_the_batches() -> None:
    asked = []

    class Counting(TokenBudget):
        def largest(self, longest: IntArray, /) -> IntArray | None:
            asked.append(len(longest))
            return super().largest(longest)

    cut(streams(np.random.default_rng(0).integers(1, 500, 10_000).tolist()), Counting(1000))
    assert len(asked) == 1
    assert asked[0] <= 500


def test_batches_behave_like_a_sequence() -> None:
    batches = Batches(np.array([5, 3, 9, 1]), np.array([0, 1, 1, 4]))
    assert [b.tolist() for b in batches] == [[5], [], [3, 9, 1]]
    assert batches[-1].tolist() == [3, 9, 1]
    assert [b.tolist() for b in batches[1:]] == [[], [3, 9, 1]]
    assert [b.tolist() for b in batches.take(np.array([2, 0]))] == [[3, 9, 1], [5]]
    with pytest.raises(IndexError):
        batches[3]
    assert len(Batches.concatenate([])) == 0
    empty = cut({"tokens": np.zeros(0, np.int32)}, TokenBudget(5))
    assert len(empty) == 0
    assert len(shapes_of(empty, {"tokens": np.zeros(0, np.int32)})) == 0
    assert isinstance(BatchShape.of_samples({"tokens": np.zeros(0, np.int32)}), BatchShape)
