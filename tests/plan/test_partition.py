from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import BudgetError, ConfigError, balanced_partitions

COSTS = st.lists(st.integers(0, 50), max_size=40)


@settings(max_examples=100)
@given(COSTS, st.integers(1, 9), st.booleans())
def test_every_item_is_in_one_part_and_no_part_is_far_from_the_mean(
    costs: list[int], num_parts: int, equal: bool
) -> None:
    parts = balanced_partitions(costs, num_parts, equal_size=equal)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    if equal:
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1
    else:
        heaviest = max(sum(costs[i] for i in part) for part in parts)
        assert heaviest <= sum(costs) / num_parts + max(costs, default=0)


@settings(max_examples=100)
@given(COSTS, st.integers(1, 9), st.integers(1, 200), st.integers(0, 9))
def test_no_part_is_larger_than_the_limit(costs: list[int], num_parts: int, limit: int, seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(0, 60, len(costs))
    try:
        parts = balanced_partitions(costs, num_parts, sizes=sizes, limit=limit)
    except BudgetError:
        assert sizes.max() > limit or sizes.sum() > limit * num_parts / 2  # with half the room it always succeeds
        return
    assert all(sizes[part].sum() <= limit for part in parts)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))


def test_as_few_parts_as_first_fit_needs_are_enough() -> None:
    sizes = [10, 2, 2, 3, 5, 3, 3]  # first fit: 10 + 2 + 2 and 3 + 5 + 3 + 3; neither by cost nor by size do they fit
    parts = balanced_partitions(sizes, 2, limit=14)
    assert [sum(sizes[i] for i in part) for part in parts] == [14, 14]


def test_no_part_is_empty_where_there_are_items_enough() -> None:
    sizes = [20, 37, 36, 22, 34, 16, 21, 14, 28, 40, 15, 32, 20, 17, 36, 39, 33, 29, 13, 32, 39, 32, 28, 13, 25, 32, 29]
    assert all(balanced_partitions(sizes, 13, limit=64)), "best fit leaves one of the thirteen over"


def test_a_thousand_items_are_divided_almost_exactly() -> None:
    costs = np.random.default_rng(0).lognormal(5, 1, 1000)
    for equal in (False, True):
        loads = [costs[part].sum() for part in balanced_partitions(costs, 8, equal_size=equal)]
        assert max(loads) <= 1.001 * np.mean(loads)


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(ConfigError, match="`num_parts` must be an int of at least 1, but is 0"):
        balanced_partitions([1], 0)
    with pytest.raises(ConfigError, match="`costs` must be one finite number"):
        balanced_partitions([1, -1], 2)
    with pytest.raises(ConfigError, match=r"`sizes` must be as many as `costs` \(2\), but are 1"):
        balanced_partitions([1, 2], 2, sizes=[1])
    with pytest.raises(BudgetError, match="were not brought into 2 parts of at most 4 each; allow more parts"):
        balanced_partitions([3, 3, 3], 2, limit=4)
