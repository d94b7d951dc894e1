"""Packed batches: every sample once, every batch within its budget, the batches of a row of equal work, few of them."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.data import lengths_of
from dynagroup import (
    AdditiveCap,
    Budget,
    BudgetError,
    TokenBudget,
    Work,
    balanced_partitions,
    shard_micro_batches,
)
from dynagroup.plan import packed
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.planner import Planner
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import BatchShape
from tests.plan.test_padded import streams

SOME = st.lists(st.integers(1, 50), min_size=24, max_size=120)
CAPS = {
    "azure_llm_code_2023": 16_384,
    "azure_llm_conv_2023": 16_384,
    "gsm8k": 8_192,
    "hh_rlhf_harmless_test": 8_192,
    "mooncake_conv": 131_072,
    "python_files": 65_536,
    "synth_llava": 8_192,
    "synth_sharegpt4o": 16_384,
    "synth_ultrachat": 16_384,
    "t0_mix_50k": 8_192,
}


class Quadratic(Budget):
    """A memory of its own kind: tokens, the longest sample's square, and something for every sample."""

    layout = "packed"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.asked = 0

    def fits(self, shape: BatchShape, /) -> np.ndarray:
        self.asked += 1
        return (
            shape.total["tokens"] + shape.longest["tokens"] ** 2 // 50 + 3 * shape.num_samples
            <= self.limit
        )


def pack(lengths: Any, budget: Budget, num_ranks: int = 1) -> Any:
    return packed.pack(lengths, CutRules(budget, Work()), num_ranks)


BUDGETS = st.one_of(
    st.builds(
        TokenBudget,
        st.integers(5, 80),
        max_samples=st.none() | st.integers(1, 5),
        layout=st.just("packed"),
        pad_to_multiple_of=st.integers(1, 9),
    ),
    st.builds(
        lambda t, p: TokenBudget(t, layout="packed") & AdditiveCap("patches", p),
        st.integers(5, 80),
        st.integers(3, 30),
    ),
    st.builds(Quadratic, st.integers(10, 200)),
    st.builds(
        lambda t, q: TokenBudget(t, layout="packed") & Quadratic(q),
        st.integers(5, 80),
        st.integers(10, 200),
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(0, 60), max_size=40),
    patches=st.lists(st.integers(0, 9), min_size=40, max_size=40),
    budget=BUDGETS,
    multiple=st.integers(1, 5),
)
def test_every_sample_once_and_every_batch_fits(values, patches, budget, multiple):
    lengths = streams(values, patches=patches[: len(values)])
    batches = pack(lengths, budget, multiple)
    assert sorted(batches.order.tolist()) == list(range(len(values)))
    assert (batches.sizes > 0).all()
    assert (
        not len(values) or (budget.fits(shapes_of(batches, lengths)) | (batches.sizes == 1)).all()
    )
    assert all(
        (np.diff(batch) > 0).all() for batch in batches
    )  # samples keep their order of arrival
    assert (
        np.diff(Work().of_batches(batches, lengths, budget)) <= 1e-9
    ).all()  # batches come dearest first
    assert len(batches) % multiple == 0 or len(batches) == len(values)
    again = pack(lengths, budget, multiple)
    assert (again.order == batches.order).all()
    assert (again.offsets == batches.offsets).all()


def test_literal_packs_also_padded_to_a_multiple_as_a_whole() -> None:
    budget = TokenBudget(10, layout="packed")
    assert [b.tolist() for b in pack(streams([4, 6, 3, 7, 2, 8]), budget)] == [
        [4, 5],
        [2, 3],
        [0, 1],
    ]
    assert [b.tolist() for b in pack(streams([12, 1, 5, 5]), budget)] == [[0], [1, 2], [3]]
    assert [
        b.tolist() for b in pack(streams([5, 5, 1, 1]), TokenBudget(12, layout="packed"), 2)
    ] == [[0, 2], [1, 3]]
    assert [b.tolist() for b in pack(streams([50, 3, 4, 60]), budget, 3)] == [
        [3],
        [0],
        [1, 2],
    ]  # two fit nowhere
    budget = TokenBudget(10, layout="packed", pad_to_multiple_of=4)
    assert [b.tolist() for b in pack(streams([4, 4, 2, 2, 4]), budget)] == [[0, 4], [1, 2, 3]]
    assert budget.fits(BatchShape.of(2, 6, 9)).tolist() == [False]
    two = TokenBudget(
        160, layout="packed", pad_to_multiple_of=8
    )  # the sum of all streams is rounded, once
    assert len(pack(streams([50, 47], target=[30, 33]), two)) == 1
    assert len(pack(streams([50, 47], target=[30, 34]), two)) == 2


def uneven(rows: list[list[np.ndarray]], tokens: np.ndarray, cap: int, *, few: bool) -> list[int]:
    """Rows whose batches are more than 5 % apart; where one sample is more work than the row's mean, those whose other batches
    are neither up to it nor full to the cap (of ``few`` rows the last holds what is left)."""
    each, found = Work().of_lengths(tokens), []
    for number, row in enumerate(rows):
        work = np.asarray([each[batch].sum() for batch in row])
        if max(each[batch].max() for batch in row) <= work.mean():
            equal = work.max() - work.min() <= 0.05 * work.mean()
        else:
            filled = np.asarray([tokens[batch].sum() for batch in row])
            equal = few or ((work >= 0.95 * work.max()) | (filled >= 0.95 * cap)).all()
        found += [] if equal else [number]
    return found


@pytest.mark.parametrize(
    "cases", [((1, None), (8, None), (64, None)), ((8, 256), (64, 1024))], ids=["free", "updates"]
)
def test_rows_are_filled_and_of_equal_work_and_ranks_wait_little(cases: Any) -> None:
    """On real lengths: as few rows as 99 % of full batches need, or one more that takes less time; and law 9."""
    count = bad = 0
    for (name, cap), (num_ranks, update) in product(CAPS.items(), cases):
        tokens = lengths_of(name, 4096)
        planner = Planner(
            streams(tokens),
            TokenBudget(cap, layout="packed"),
            PlanConfig(samples_per_update=update),
        )
        plan = planner.plan(0, num_ranks)
        count, bad = (
            count + plan.num_steps,
            bad + len(uneven(plan.rows, tokens, cap, few=update is not None)),
        )
        if update is None:
            assert plan.num_steps <= 1 + -(-int(tokens.sum()) // int(0.99 * cap * num_ranks)), name
            continue
        each = plan.work.of_lengths(tokens)
        forced = np.asarray([each[batch].max() for batch in plan.batches])[plan.table].max(axis=1)
        waited = (
            plan.work_by_row.max(axis=1).sum()
            - np.maximum(plan.work_by_row.mean(axis=1), forced).sum()
        )
        assert waited <= 0.03 * plan.predicted_time, name
    assert bad <= 0.01 * count


def test_a_budget_that_must_be_asked_is_asked_seldom() -> None:
    tokens, budget = lengths_of("azure_llm_conv_2023", 1024).clip(max=5000), Quadratic(600_000)
    assert budget.fits(shapes_of(pack(streams(tokens), budget, 4), streams(tokens))).all()
    assert budget.asked < 4 * len(tokens)


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 50), max_size=40),
    st.integers(1, 9),
    st.booleans(),
    st.none() | st.integers(1, 200),
)
def test_every_item_is_in_one_part_of_about_equal_cost_within_the_limit(
    costs, num_parts, equal, limit
):
    sizes = np.random.default_rng(len(costs)).integers(0, 60, len(costs))
    try:
        parts = balanced_partitions(costs, num_parts, sizes=sizes, limit=limit, equal_size=equal)
    except BudgetError:
        assert limit is not None
        assert equal or sizes.max() > limit or sizes.sum() > limit * num_parts / 2, (
            "half the room is enough"
        )
        return
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert limit is None or all(sizes[part].sum() <= limit for part in parts)
    counts = [len(part) for part in parts]
    assert not equal or max(counts) - min(counts) <= 1
    if limit is None and not equal:
        assert max(sum(costs[i] for i in part) for part in parts) <= sum(costs) / num_parts + max(
            costs, default=0
        )


def test_literal_parts() -> None:
    sizes = [
        10,
        2,
        2,
        3,
        5,
        3,
        3,
    ]  # first fit: 10 + 2 + 2 and 3 + 5 + 3 + 3; neither by cost nor by size do they fit
    assert [sum(sizes[i] for i in part) for part in balanced_partitions(sizes, 2, limit=14)] == [
        14,
        14,
    ]
    sizes = [
        20,
        37,
        36,
        22,
        34,
        16,
        21,
        14,
        28,
        40,
        15,
        32,
        20,
        17,
        36,
        39,
        33,
        29,
        13,
        32,
        39,
        32,
        28,
        13,
        25,
        32,
        29,
    ]
    assert all(balanced_partitions(sizes, 13, limit=64)), "best fit leaves one of the thirteen over"
    costs = np.random.default_rng(0).lognormal(5, 1, 1000)
    for equal in (False, True):
        loads = [costs[part].sum() for part in balanced_partitions(costs, 8, equal_size=equal)]
        assert max(loads) <= 1.001 * np.mean(loads)


@settings(max_examples=40)
@given(SOME, st.integers(1, 6), st.integers(1, 4), st.sampled_from(["padded", "packed"]))
def test_ranks_get_equally_many_batches_that_fit_and_every_sample_once(
    lengths, num_ranks, multiple_of, layout
):
    shards = shard_micro_batches(
        lengths, num_ranks, TokenBudget(100, layout=layout), multiple_of=multiple_of
    )
    assert [len(rank) % multiple_of for rank in shards] == [0] * num_ranks
    assert len({len(rank) for rank in shards}) == 1
    assert sorted(i for rank in shards for batch in rank for i in batch) == list(
        range(len(lengths))
    )
    for held in ([lengths[i] for i in batch] for rank in shards for batch in rank):
        assert (max(held) * len(held) if layout == "padded" else sum(held)) <= 100


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("oversize", "done"), [("alone", "each a batch of its own"), ("drop", "left out")]
)
def test_a_sample_that_does_not_fit_comes_alone_or_is_left_out(
    layout: Any, oversize: Any, done: str
) -> None:
    with pytest.warns(
        UserWarning, match=f"1 samples do not fit .* alone and are {done}; the first is sample 1"
    ):
        shards = shard_micro_batches(
            [3, 12, 4, 2, 5, 1], 2, TokenBudget(10, layout=layout), oversize=oversize
        )
    batches = [batch for rank in shards for batch in rank]
    assert len({len(rank) for rank in shards}) == 1
    assert sorted(i for batch in batches for i in batch) == [
        0,
        *([1] if oversize == "alone" else []),
        2,
        3,
        4,
        5,
    ]
    assert ([1] in batches) == (oversize == "alone")
    assert shard_micro_batches([], 2, TokenBudget(10)) == [[], []]


@pytest.mark.parametrize(
    ("name", "cap", "layout", "time"),
    [("python_files", 65_536, "padded", 214_093), ("mooncake_conv", 131_072, "packed", 1_271_862)],
)
def test_steps_of_real_lengths_take_about_the_time_that_they_took(
    name: str, cap: int, layout: Any, time: int
) -> None:
    tokens = lengths_of(name, 256)
    shards, each = (
        shard_micro_batches(tokens, 8, TokenBudget(cap, layout=layout)),
        Work().of_lengths(tokens),
    )
    cost = (
        (lambda batch: each[batch].sum())
        if layout == "packed"
        else (lambda batch: len(batch) * each[batch].max())
    )
    assert (
        Work().of_rows(np.asarray([[cost(batch) for batch in rank] for rank in shards]).T)
        <= 1.01 * time
    )
