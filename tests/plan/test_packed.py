"""Packed batches: every sample once, every batch within its budget, the batches of a row of equal work, few of them."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.data import lengths_of
from dynagroup import (
    AdditiveCap,
    BatchPlan,
    Budget,
    BudgetError,
    TokenBudget,
    Work,
    balanced_partitions,
    shard_micro_batches,
)
from dynagroup.plan import packed
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.planner import Planner
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import BatchShape, Streams
from tests.plan.helpers import CAPS, as_lists, joined, streams, uneven_rows


class Quadratic(Budget):
    """A memory of its own kind: tokens, the longest sample's square, and something for every sample."""

    layout = "packed"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_asked = 0

    def fits(self, shape: BatchShape, /) -> np.ndarray:
        self.num_asked += 1
        square = shape.longest["tokens"] ** 2 // 50
        return shape.total["tokens"] + square + 3 * shape.num_samples <= self.limit


def packed_tokens(limit: int, **options: Any) -> TokenBudget:
    return TokenBudget(limit, layout="packed", **options)


def tokens_and_patches(tokens: int, patches: int) -> Budget:
    return packed_tokens(tokens) & AdditiveCap("patches", patches)


def tokens_and_squares(tokens: int, squares: int) -> Budget:
    return packed_tokens(tokens) & Quadratic(squares)


def pack(lengths: Streams, budget: Budget, num_ranks: int = 1) -> Batches:
    return packed.pack(lengths, CutRules(budget, Work()), num_ranks)


@dataclass(frozen=True)
class Pack:
    """A window that is packed."""

    lengths: Streams
    budget: Budget
    num_ranks: int

    @property
    def num_samples(self) -> int:
        return len(self.lengths["tokens"])

    @cached_property
    def batches(self) -> Batches:
        return self.again()

    def again(self) -> Batches:
        return pack(self.lengths, self.budget, self.num_ranks)


def pack_of(pairs: list[tuple[int, int]], budget: Budget, num_ranks: int) -> Pack:
    tokens = [pair[0] for pair in pairs]
    patches = [pair[1] for pair in pairs]
    return Pack(streams(tokens, patches=patches), budget, num_ranks)


LIMITS = st.integers(5, 80)
SQUARES = st.integers(10, 200)
COUNTS = st.none() | st.integers(1, 5)
MULTIPLES = st.integers(1, 9)
PADDED_TO = st.builds(packed_tokens, LIMITS, max_samples=COUNTS, pad_to_multiple_of=MULTIPLES)
CAPPED = st.builds(tokens_and_patches, LIMITS, st.integers(3, 30))
SQUARED = st.builds(Quadratic, SQUARES)
BOTH = st.builds(tokens_and_squares, LIMITS, SQUARES)
BUDGETS = st.one_of(PADDED_TO, CAPPED, SQUARED, BOTH)
PAIR = st.tuples(st.integers(0, 60), st.integers(0, 9))
PAIRS = st.lists(PAIR, max_size=40)
PACKS = st.builds(pack_of, PAIRS, BUDGETS, st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(PACKS)
def test_every_sample_is_in_one_batch_that_fits(drawn: Pack) -> None:
    assert sorted(drawn.batches.order.tolist()) == list(range(drawn.num_samples))
    assert (drawn.batches.sizes > 0).all()
    if drawn.num_samples:
        fits = drawn.budget.fits(shapes_of(drawn.batches, drawn.lengths))
        assert (fits | (drawn.batches.sizes == 1)).all()


@settings(max_examples=60, deadline=None)
@given(PACKS)
def test_samples_keep_their_order_of_arrival_and_the_dearest_batch_is_first(drawn: Pack) -> None:
    for batch in drawn.batches:
        assert (np.diff(batch) > 0).all()
    work = Work().of_batches(drawn.batches, drawn.lengths, drawn.budget)
    assert (np.diff(work) <= 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(PACKS)
def test_each_rank_gets_as_many_batches_unless_each_sample_is_one(drawn: Pack) -> None:
    num_batches = len(drawn.batches)
    assert num_batches % drawn.num_ranks == 0 or num_batches == drawn.num_samples


@settings(max_examples=60, deadline=None)
@given(PACKS)
def test_the_same_window_is_packed_the_same(drawn: Pack) -> None:
    again = drawn.again()
    assert (again.order == drawn.batches.order).all()
    assert (again.offsets == drawn.batches.offsets).all()


TEN = packed_tokens(10)
TEN_TO_4 = packed_tokens(10, pad_to_multiple_of=4)
TWELVE = packed_tokens(12)


@pytest.mark.parametrize(
    ("tokens", "budget", "num_ranks", "batches"),
    [
        ([4, 6, 3, 7, 2, 8], TEN, 1, [[4, 5], [2, 3], [0, 1]]),
        ([12, 1, 5, 5], TEN, 1, [[0], [1, 2], [3]]),
        ([5, 5, 1, 1], TWELVE, 2, [[0, 2], [1, 3]]),
        ([50, 3, 4, 60], TEN, 3, [[3], [0], [1, 2]]),  # two fit nowhere
        ([4, 4, 2, 2, 4], TEN_TO_4, 1, [[0, 4], [1, 2, 3]]),
    ],
)
def test_literal_packs(tokens: Any, budget: Any, num_ranks: int, batches: Any) -> None:
    assert as_lists(pack(streams(tokens), budget, num_ranks)) == batches


def test_the_sum_of_a_batch_is_padded() -> None:
    assert TEN_TO_4.fits(BatchShape.of(2, 6, 9)).tolist() == [False]


@pytest.mark.parametrize(("last", "num_batches"), [(33, 1), (34, 2)])
def test_the_sum_of_all_streams_is_padded_once_for_the_whole_batch(
    last: int, num_batches: int
) -> None:
    budget = packed_tokens(160, pad_to_multiple_of=8)
    lengths = streams([50, 47], target=[30, last])
    assert len(pack(lengths, budget)) == num_batches


def packed_plan(name: str, num_ranks: int, samples_per_update: int | None) -> BatchPlan:
    """The plan of 4,096 real lengths."""
    lengths = streams(lengths_of(name, 4096))
    config = PlanConfig(samples_per_update=samples_per_update)
    return Planner(lengths, packed_tokens(CAPS[name]), config).plan(0, num_ranks)


def share_of_uneven_rows(plans: dict[tuple[str, int], BatchPlan], *, few: bool) -> float:
    num_rows = 0
    num_uneven = 0
    for (name, _), plan in plans.items():
        tokens = plan.lengths["tokens"]
        num_rows += plan.num_steps
        num_uneven += len(uneven_rows(plan.rows, tokens, CAPS[name], few=few))
    return num_uneven / num_rows


def test_rows_of_real_lengths_are_filled_and_of_equal_work() -> None:
    """As few rows as 99 % of full batches need, or one more that takes less time; and law 9 in 99 % of the rows."""
    plans = {}
    for name, num_ranks in product(CAPS, (1, 8, 64)):
        plan = packed_plan(name, num_ranks, None)
        filled = int(0.99 * CAPS[name] * num_ranks)
        num_needed = -(-int(plan.lengths["tokens"].sum()) // filled)
        assert plan.num_steps <= 1 + num_needed, name
        plans[name, num_ranks] = plan
    assert share_of_uneven_rows(plans, few=False) <= 0.01


def waiting(plan: BatchPlan) -> float:
    """What ranks wait beyond what the dearest sample of a row makes them, of the predicted time."""
    work_of = plan.work.of_lengths(plan.lengths["tokens"])
    dearest_samples = np.asarray([work_of[batch].max() for batch in plan.batches])
    forced = dearest_samples[plan.table].max(axis=1)
    least = np.maximum(plan.work_by_row.mean(axis=1), forced)
    waited = plan.work_by_row.max(axis=1).sum() - least.sum()
    return float(waited) / plan.predicted_time


def test_rows_of_updates_of_real_lengths_are_of_equal_work_and_ranks_wait_little() -> None:
    """Law 9 in 99 % of the rows; and 3 % of the time."""
    plans = {}
    for name, (num_ranks, update) in product(CAPS, ((8, 256), (64, 1024))):
        plan = packed_plan(name, num_ranks, update)
        assert waiting(plan) <= 0.03, name
        plans[name, num_ranks] = plan
    assert share_of_uneven_rows(plans, few=True) <= 0.01


def test_a_budget_that_must_be_asked_is_asked_seldom() -> None:
    tokens = lengths_of("azure_llm_conv_2023", 1024).clip(max=5000)
    lengths = streams(tokens)
    budget = Quadratic(600_000)
    batches = pack(lengths, budget, 4)
    assert budget.fits(shapes_of(batches, lengths)).all()
    assert budget.num_asked < 4 * len(tokens)


# Parts of equal cost

COSTS = st.lists(st.integers(0, 50), max_size=40)
NUM_PARTS = st.integers(1, 9)


@settings(max_examples=150)
@given(COSTS, NUM_PARTS, st.booleans())
def test_every_item_is_in_one_part(costs: list[int], num_parts: int, equal_size: bool) -> None:
    parts = balanced_partitions(costs, num_parts, equal_size=equal_size)
    assert len(parts) == num_parts
    assert sorted(joined(parts)) == list(range(len(costs)))
    if equal_size:
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1
        return
    costs_of_parts = [sum(costs[item] for item in part) for part in parts]
    assert max(costs_of_parts) <= sum(costs) / num_parts + max(costs, default=0)


@settings(max_examples=150)
@given(COSTS, NUM_PARTS, st.booleans(), st.integers(1, 200))
def test_parts_keep_a_limit_unless_that_needs_more_than_half_the_room(
    costs: list[int], num_parts: int, equal_size: bool, limit: int
) -> None:
    sizes = np.random.default_rng(len(costs)).integers(0, 60, len(costs))
    try:
        parts = balanced_partitions(
            costs, num_parts, sizes=sizes, limit=limit, equal_size=equal_size
        )
    except BudgetError:
        half_the_room = limit * num_parts / 2
        assert equal_size or sizes.max() > limit or sizes.sum() > half_the_room
        return
    assert len(parts) == num_parts
    assert sorted(joined(parts)) == list(range(len(costs)))
    for part in parts:
        assert sizes[part].sum() <= limit
    counts = [len(part) for part in parts]
    assert not equal_size or max(counts) - min(counts) <= 1


def test_parts_are_found_that_fill_their_limits_to_the_last() -> None:
    """First fit: 10 + 2 + 2 and 3 + 5 + 3 + 3; neither by cost nor by size do they fit."""
    sizes = [10, 2, 2, 3, 5, 3, 3]
    for part in balanced_partitions(sizes, 2, limit=14):
        assert sum(sizes[item] for item in part) == 14


def test_no_part_is_empty_where_best_fit_leaves_one_over() -> None:
    listed = "20 37 36 22 34 16 21 14 28 40 15 32 20 17 36 39 33 29 13 32 39 32 28 13 25 32 29"
    sizes = [int(size) for size in listed.split()]
    assert all(balanced_partitions(sizes, 13, limit=64))


@pytest.mark.parametrize("equal_size", [False, True])
def test_parts_of_many_items_cost_the_same(equal_size: bool) -> None:
    costs = np.random.default_rng(0).lognormal(5, 1, 1000)
    parts = balanced_partitions(costs, 8, equal_size=equal_size)
    loads = [costs[part].sum() for part in parts]
    assert max(loads) <= 1.001 * np.mean(loads)


# Micro-batches of samples in memory

LAYOUTS: Any = ["padded", "packed"]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=24, max_size=120),
    num_ranks=st.integers(1, 6),
    multiple_of=st.integers(1, 4),
    layout=st.sampled_from(LAYOUTS),
)
def test_ranks_get_equally_many_batches_that_fit_and_every_sample_once(
    lengths, num_ranks, multiple_of, layout
):
    budget = TokenBudget(100, layout=layout)
    shards = shard_micro_batches(lengths, num_ranks, budget, multiple_of=multiple_of)
    [num_batches] = {len(rank) for rank in shards}
    assert len(shards) == num_ranks
    assert num_batches % multiple_of == 0
    batches = joined(shards)
    assert sorted(joined(batches)) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[sample] for sample in batch)
        padded = len(batch) * longest
        total = sum(lengths[sample] for sample in batch)
        assert (padded if layout == "padded" else total) <= 100


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("oversize", "what_is_done"), [("alone", "a batch of its own"), ("drop", "left out")]
)
def test_a_sample_that_does_not_fit_comes_alone_or_is_left_out(
    layout: Any, oversize: Any, what_is_done: str
) -> None:
    budget = TokenBudget(10, layout=layout)
    message = f"sample 1 with 12 tokens does not fit the budget even alone and is {what_is_done};"
    with pytest.warns(UserWarning, match=message):
        shards = shard_micro_batches([3, 12, 4, 2, 5, 1], 2, budget, oversize=oversize)
    assert len({len(rank) for rank in shards}) == 1
    batches = joined(shards)
    others = [batch for batch in batches if batch != [1]]
    assert sorted(joined(others)) == [0, 2, 3, 4, 5]
    assert ([1] in batches) == (oversize == "alone")


def test_no_samples_are_no_micro_batches() -> None:
    assert shard_micro_batches([], 2, TokenBudget(10)) == [[], []]


@pytest.mark.parametrize(
    ("name", "cap", "layout", "time"),
    [("python_files", 65_536, "padded", 214_093), ("mooncake_conv", 131_072, "packed", 1_271_862)],
)
def test_steps_of_real_lengths_take_about_the_time_that_they_took(
    name: str, cap: int, layout: Any, time: int
) -> None:
    lengths = streams(lengths_of(name, 256))
    budget = TokenBudget(cap, layout=layout)
    shards = shard_micro_batches(lengths["tokens"], 8, budget)
    by_rank = []
    for rank in shards:
        batches = Batches.of([np.asarray(batch) for batch in rank])
        by_rank.append(Work().of_batches(batches, lengths, budget))
    assert Work().of_rows(np.stack(by_rank, axis=1)) <= 1.01 * time
