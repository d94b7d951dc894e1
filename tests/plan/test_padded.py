"""One window cut into runs: every batch fits, and no cut of the order into runs takes less time, of one stream or several."""

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
from dynagroup.plan.batches import Batches, allowed_sizes, friendly_size, multiple_of, shapes_of
from dynagroup.plan.cost import Work
from dynagroup.plan.padded import FEWEST, OrderedWindow, by_queue, in_order, one_by_one
from dynagroup.plan.ranks import cut
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import IntArray, Streams
from tests import strategies

WORKS = st.builds(Work, per_step=st.sampled_from([0.0, 1.0, 30.0, 1024.0]), crossover=st.sampled_from([10.0, math.inf]))
FEW = st.lists(st.integers(0, 20), min_size=1, max_size=8)


def streams(values: list[int], **others: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(of, np.int32) for name, of in {"tokens": values, **others}.items()}


def fits(batches: Batches, lengths: Streams, budget: Budget) -> bool:
    return bool((budget.fits(shapes_of(batches, lengths)) | (batches.sizes == 1)).all())


def time_of(batches: Batches, lengths: Streams, budget: Budget, work: Work) -> float:
    return work.of_rows(work.of_batches(batches, lengths, budget)[:, None])


KINDS = st.one_of(
    st.tuples(strategies.budgets, st.just("one")),
    st.tuples(strategies.budgets, st.just("two")),
    st.tuples(strategies.capped_budgets, st.just("patches")),
)


@settings(max_examples=150, deadline=None)
@given(strategies.lengths, KINDS, strategies.ROUNDINGS, WORKS)
def test_every_batch_fits_and_nothing_is_lost(values, kind, rounding, work):
    others: dict[str, Any] = {"two": {"labels": values[::-1]}, "patches": {"patches": [n % 37 for n in values]}}
    lengths = streams(values, **others.get(kind[1], {}))
    budget = kind[0].bind(lengths)
    batches = cut(lengths, budget, work=work, round_batch=rounding)
    assert sorted(batches.order.tolist()) == list(range(len(values)))
    assert fits(batches, lengths, budget)
    assert budget.layout == "packed" or strategies.are_allowed(batches.sizes, rounding)


class WithoutTable(TokenBudget):
    """Forces the search that serves budgets which cannot be tabulated by length."""

    def largest(self, longest: IntArray, /) -> None:
        return None


@settings(max_examples=60)
@given(strategies.lengths, st.integers(1, 300))
def test_table_and_search_cut_alike(values: list[int], max_tokens: int) -> None:
    for lengths, most in ((values, max_tokens), (np.random.default_rng(0).integers(0, 9, 3000).tolist(), 3000)):
        table, search = cut(streams(lengths), TokenBudget(most)), cut(streams(lengths), WithoutTable(most))
        assert table.offsets.tolist() == search.offsets.tolist()
        assert table.order.tolist() == search.order.tolist()


def cuts(order: IntArray, lengths: Streams, budget: Budget, rounding: Any) -> Iterator[Batches]:
    """Every cut of an ordered window into runs that fit and have allowed sizes."""
    for number in range(len(order)):
        for inner in combinations(range(1, len(order)), number):
            batches = Batches(order, np.array([0, *inner, len(order)]))
            if fits(batches, lengths, budget) and strategies.are_allowed(batches.sizes, rounding):
                yield batches


@settings(max_examples=60, deadline=None)
@given(FEW, st.booleans(), st.integers(5, 120), strategies.ROUNDINGS, WORKS)
def test_no_cut_into_runs_takes_less_time(values: list[int], two: bool, most: int, rounding: Any, work: Work) -> None:
    lengths, budget = streams(values, **({"labels": sorted(values)} if two else {})), TokenBudget(most)
    order = in_order(lengths, budget, work, None)[0]
    found = list(cuts(order, lengths, budget, rounding))
    best = min(time_of(batches, lengths, budget, work) for batches in found)
    taken = time_of(cut(lengths, budget, work=work, round_batch=rounding), lengths, budget, work)
    assert taken == pytest.approx(best, rel=1e-9, abs=1e-9)
    if not two:  # the fewest batches, and of those cuts the one that pads least
        key = lambda batches: (len(batches), int(padded_tokens(shapes_of(batches, lengths), budget).sum()))  # noqa: E731
        fewest = cut(lengths, budget, work=Work(per_step=FEWEST, crossover=math.inf), round_batch=rounding)
        assert key(fewest) == min(map(key, found))


def test_literal_cuts() -> None:
    assert [b.tolist() for b in cut(streams([3, 9, 2, 8, 50]), TokenBudget(18))] == [[4], [1, 3], [0, 2]]
    lengths = streams([10, 6, 6, 1, 1, 1])  # a cheap step buys less padding with more batches
    assert [b.tolist() for b in cut(lengths, TokenBudget(60), work=Work(per_step=1))] == [[0], [1, 2], [3, 4, 5]]
    assert len(cut(lengths, TokenBudget(60), work=Work(per_step=100))) == 1
    assert len(cut(streams([]), TokenBudget(5))) == 0


@pytest.mark.parametrize(("per_step", "max_tokens"), [(256.0, 20_000), (1024.0, 200_000)])
def test_large_windows_are_cut_run_by_run_nearly_as_well(per_step: float, max_tokens: int) -> None:
    tokens = np.sort(np.random.default_rng(0).lognormal(5.5, 0.8, 20_000).astype(np.int64) + 1)[::-1]
    most = np.minimum(np.maximum(max_tokens // tokens, 1), np.arange(len(tokens), 0, -1))
    window = OrderedWindow(tokens.astype(np.float64), most)
    exact, greedy = (
        window.total(offsets).sum() + per_step * (len(offsets) - 1)
        for offsets in (by_queue(window, per_step), one_by_one(window, per_step))
    )
    assert exact <= greedy <= 1.002 * exact
    rounded = replace(window, allowed=allowed_sizes(int(most.max()), multiple_of(8))).least_time(per_step)
    assert (np.diff(rounded) <= most[rounded[:-1]]).all()
    assert not (np.diff(rounded)[np.diff(rounded) > 8] % 8).any()


def test_rounding_happens_before_the_fit_check_and_only_downwards() -> None:
    lengths = streams([10] * 23)
    assert sorted(cut(lengths, TokenBudget(100), round_batch=multiple_of(8)).sizes.tolist()) == [7, 8, 8]
    assert sorted(cut(lengths, TokenBudget(70), round_batch=friendly_size).sizes.tolist()) == [1, 4, 6, 6, 6]
    assert cut(lengths, TokenBudget(70), round_batch=lambda n: n + 2).sizes.max() <= 7  # 5 -> 7 fits, 6 -> 8 does not
    kinds = [2**n for n in range(8)] + [3 * 2**n for n in range(7)]
    assert all(friendly_size(size) == max(k for k in kinds if k <= size) for size in range(1, 200))


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(ConfigError, match="`number` must be an int of at least 1, but is 0"):
        multiple_of(0)
    for wrong in (0, 2.5, True, None):
        with pytest.raises(ConfigError, match="`round_batch` must return an int of at least 1, but returned"):
            cut(streams([1, 2]), TokenBudget(9), round_batch=lambda n, wrong=wrong: wrong)  # type: ignore[arg-type,return-value]

    class Falling(TokenBudget):
        def largest(self, longest: IntArray, /) -> IntArray:
            return longest

    with pytest.raises(BudgetError, match="falls for shorter samples"):
        cut(streams([1, 5]), Falling(9))


def test_streams_that_have_little_to_do_with_one_another_are_hardly_padded() -> None:
    tokens, labels = np.random.default_rng(0).lognormal(4, 0.8, (2, 2000)).clip(1, 900).astype(np.int32)
    labels[317] = 3000
    lengths = {"tokens": tokens, "labels": labels}
    plan = LengthAwareBatchSampler(lengths, TokenBudget(16_384), rank=0, world_size=1).plan
    assert plan.statistics["padding"] < 0.2
    assert 317 in plan.rows[0][0]  # the sample of most tokens comes first
