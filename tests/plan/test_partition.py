from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import BudgetError, ConfigError, TokenBudget, Work, balanced_partitions, shard_micro_batches

LENGTHS = Path(__file__).parents[2] / "benchmarks" / "lengths"
HARD, HARD_LIMIT = [5, 3, 2, 10, 5, 9, 12], 23  # 12 + 9 + 2 and 10 + 5 + 5 + 3, which none of the heuristics finds


@settings(max_examples=150)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9), st.booleans(), st.none() | st.integers(1, 200))
def test_every_item_is_in_one_part_of_about_equal_cost_within_the_limit(costs, num_parts, equal, limit):
    sizes = np.random.default_rng(len(costs)).integers(0, 60, len(costs))
    try:
        parts = balanced_partitions(costs, num_parts, sizes=sizes, limit=limit, equal_size=equal)
    except BudgetError:
        assert limit is not None
        # with half the room it always succeeds
        assert equal or sizes.max() > limit or sizes.sum() > limit * num_parts / 2
        return
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert limit is None or all(sizes[part].sum() <= limit for part in parts)
    counts = [len(part) for part in parts]
    assert not equal or max(counts) - min(counts) <= 1
    if limit is None and not equal:
        assert max(sum(costs[i] for i in part) for part in parts) <= sum(costs) / num_parts + max(costs, default=0)


def test_literal_parts() -> None:
    sizes = [10, 2, 2, 3, 5, 3, 3]  # first fit: 10 + 2 + 2 and 3 + 5 + 3 + 3; neither by cost nor by size do they fit
    assert [sum(sizes[i] for i in part) for part in balanced_partitions(sizes, 2, limit=14)] == [14, 14]
    sizes = [20, 37, 36, 22, 34, 16, 21, 14, 28, 40, 15, 32, 20, 17, 36, 39, 33, 29, 13, 32, 39, 32, 28, 13, 25, 32, 29]
    assert all(balanced_partitions(sizes, 13, limit=64)), "best fit leaves one of the thirteen over"
    costs = np.random.default_rng(0).lognormal(5, 1, 1000)
    for equal in (False, True):
        loads = [costs[part].sum() for part in balanced_partitions(costs, 8, equal_size=equal)]
        assert max(loads) <= 1.001 * np.mean(loads)


SOME = st.lists(st.integers(1, 50), min_size=24, max_size=120)


@settings(max_examples=40)
@given(SOME, st.integers(1, 6), st.integers(1, 4), st.sampled_from(["padded", "packed"]))
def test_ranks_get_equally_many_batches_that_fit_and_every_sample_once(lengths, num_ranks, multiple_of, layout):
    shards = shard_micro_batches(lengths, num_ranks, TokenBudget(100, layout=layout), multiple_of=multiple_of)
    assert [len(rank) % multiple_of for rank in shards] == [0] * num_ranks
    assert len({len(rank) for rank in shards}) == 1
    assert sorted(i for rank in shards for batch in rank for i in batch) == list(range(len(lengths)))
    for held in ([lengths[i] for i in batch] for rank in shards for batch in rank):
        assert (max(held) * len(held) if layout == "padded" else sum(held)) <= 100


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("oversize", "done"), [("alone", "emitted alone"), ("drop", "left out")])
def test_a_sample_that_does_not_fit_comes_alone_or_is_left_out(layout: Any, oversize: Any, done: str) -> None:
    with pytest.warns(UserWarning, match=f"1 samples do not fit .* alone and are {done}; the first is sample 1"):
        shards = shard_micro_batches([3, 12, 4, 2, 5, 1], 2, TokenBudget(10, layout=layout), oversize=oversize)
    batches = [batch for rank in shards for batch in rank]
    assert len({len(rank) for rank in shards}) == 1
    assert sorted(i for batch in batches for i in batch) == [0, *([1] if oversize == "alone" else []), 2, 3, 4, 5]
    assert ([1] in batches) == (oversize == "alone")
    assert shard_micro_batches([], 2, TokenBudget(10)) == [[], []]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: balanced_partitions([1, -1], 2), ConfigError, "`costs` must be one finite number"),
        (lambda: balanced_partitions(HARD, 2, limit=HARD_LIMIT), BudgetError, "first fit found none; allow more parts"),
        (lambda: balanced_partitions([3, 3, 3], 2, limit=4), BudgetError, "into 2 parts .* they need at least 3;"),
        (lambda: shard_micro_batches([3, 12], 1, 10, oversize="error"), BudgetError, "sample 1 .12 tokens."),
        (lambda: shard_micro_batches([3, 3, 3], 4, 10), ConfigError, "num_ranks x multiple_of = 4; collect 1 more"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize(
    ("name", "cap", "layout", "time"),
    [("python_files", 65_536, "padded", 214_093), ("mooncake_conv", 131_072, "packed", 1_271_862)],
)
def test_steps_of_real_lengths_take_about_the_time_that_they_took(name: str, cap: int, layout: Any, time: int) -> None:
    tokens = np.random.default_rng(0).permutation(np.load(LENGTHS / f"{name}.npz")["tokens"])[:256]
    shards, each = shard_micro_batches(tokens, 8, TokenBudget(cap, layout=layout)), Work().of_lengths(tokens)
    cost = (lambda batch: each[batch].sum()) if layout == "packed" else (lambda batch: len(batch) * each[batch].max())
    assert Work().of_rows(np.asarray([[cost(batch) for batch in rank] for rank in shards]).T) <= 1.01 * time
