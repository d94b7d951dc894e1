"""Packed batches: every sample once, every batch within its budget, the batches of a row of equal work, few of them."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap, Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.plan.batches import shapes_of
from dynagroup.plan.cost import Work
from dynagroup.plan.packed import pack
from dynagroup.plan.planner import PlanConfig, Planner
from dynagroup.shapes import BatchShape

LENGTHS = Path(__file__).parents[2] / "benchmarks" / "lengths"


class Quadratic(Budget):
    """A memory of its own kind: tokens, the longest sample's square, and something for every sample."""

    layout = "packed"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.asked = 0

    def fits(self, shape: BatchShape, /) -> np.ndarray:
        self.asked += 1
        return shape.total["tokens"] + shape.longest["tokens"] ** 2 // 50 + 3 * shape.num_samples <= self.limit


def streams(values: list[int], patches: list[int] | None = None) -> dict[str, np.ndarray]:
    found = {"tokens": np.asarray(values, np.int32)}
    return found if patches is None else found | {"patches": np.asarray(patches, np.int32)}


BUDGETS = st.one_of(
    st.builds(
        TokenBudget, st.integers(5, 80), max_samples=st.none() | st.integers(1, 5), layout=st.just("packed"),
        pad_to_multiple_of=st.integers(1, 9),
    ),
    st.builds(lambda t, p: TokenBudget(t, layout="packed") & AdditiveCap("patches", p), st.integers(5, 80), st.integers(3, 30)),
    st.builds(Quadratic, st.integers(10, 200)),
    st.builds(lambda t, q: TokenBudget(t, layout="packed") & Quadratic(q), st.integers(5, 80), st.integers(10, 200)),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(0, 60), max_size=40),
    patches=st.lists(st.integers(0, 9), min_size=40, max_size=40),
    budget=BUDGETS,
    multiple=st.integers(1, 5),
)
def test_every_sample_once_and_every_batch_fits(values, patches, budget, multiple):
    lengths = streams(values, patches[: len(values)])
    batches = pack(lengths, budget, multiple)
    assert sorted(batches.order.tolist()) == list(range(len(values)))
    assert (batches.sizes > 0).all()
    fits = budget.fits(shapes_of(batches, lengths)) if len(values) else np.ones(0, bool)
    assert (fits | (batches.sizes == 1)).all()
    assert all((np.diff(batch) > 0).all() for batch in batches)  # samples keep their order of arrival
    assert (np.diff(Work().of_batches(batches, lengths, budget)) <= 1e-9).all()  # batches come dearest first
    assert len(batches) % multiple == 0 or len(batches) == len(values)
    again = pack(lengths, budget, multiple)
    assert (again.order == batches.order).all()
    assert (again.offsets == batches.offsets).all()


def test_literal_packs() -> None:
    budget = TokenBudget(10, layout="packed")
    assert [b.tolist() for b in pack(streams([4, 6, 3, 7, 2, 8]), budget)] == [[4, 5], [2, 3], [0, 1]]
    assert [b.tolist() for b in pack(streams([12, 1, 5, 5]), budget)] == [[0], [1, 2], [3]]
    assert [b.tolist() for b in pack(streams([5, 5, 1, 1]), TokenBudget(12, layout="packed"), 2)] == [[0, 2], [1, 3]]
    assert [b.tolist() for b in pack(streams([50, 3, 4, 60]), budget, 3)] == [[3], [0], [1, 2]]  # two fit nowhere


def test_a_batch_is_padded_to_a_multiple_as_a_whole() -> None:
    budget = TokenBudget(10, layout="packed", pad_to_multiple_of=4)
    assert [b.tolist() for b in pack(streams([4, 4, 2, 2, 4]), budget)] == [[0, 4], [1, 2, 3]]
    assert budget.fits(BatchShape.of(2, 6, 9)).tolist() == [False]
    two = TokenBudget(160, layout="packed", pad_to_multiple_of=8)  # the sum of all streams is rounded, once
    assert len(pack(streams([50, 47], [30, 33]), two)) == 1
    assert len(pack(streams([50, 47], [30, 34]), two)) == 2


CAPS = {
    "azure_llm_code_2023": 16_384, "azure_llm_conv_2023": 16_384, "gsm8k": 8_192, "hh_rlhf_harmless_test": 8_192,
    "mooncake_conv": 131_072, "python_files": 65_536, "synth_llava": 8_192, "synth_sharegpt4o": 16_384,
    "synth_ultrachat": 16_384, "t0_mix_50k": 8_192,
}  # fmt: skip


def window_of(name: str, count: int = 4096) -> np.ndarray:
    tokens = np.load(LENGTHS / f"{name}.npz")["tokens"]
    return np.maximum(np.random.default_rng(0).permutation(tokens)[:count], 1).astype(np.int64)


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
    "cases", [((1, None), (8, None), (64, None)), ((8, 256), (64, 1024))], ids=["windows", "updates"]
)
def test_rows_are_filled_and_of_equal_work_and_ranks_wait_little(cases: Any) -> None:
    """On real lengths: as few rows as 99 % of full batches need, or one more that takes less time; and law 9."""
    count = bad = 0
    for (name, cap), (num_ranks, update) in product(CAPS.items(), cases):
        tokens = window_of(name)
        planner = Planner(streams(tokens), TokenBudget(cap, layout="packed"), PlanConfig(samples_per_update=update))
        plan = planner.plan(0, num_ranks)
        count, bad = count + plan.num_steps, bad + len(uneven(plan.rows, tokens, cap, few=update is not None))
        if update is None:
            assert plan.num_steps <= 1 + -(-int(tokens.sum()) // int(0.99 * cap * num_ranks)), name
            continue
        each = plan.work.of_lengths(tokens)
        forced = np.asarray([each[batch].max() for batch in plan.batches])[plan.table].max(axis=1)
        waited = plan.work_by_row.max(axis=1).sum() - np.maximum(plan.work_by_row.mean(axis=1), forced).sum()
        assert waited <= 0.03 * plan.predicted_time, name
    assert bad <= 0.01 * count


def test_a_budget_that_must_be_asked_is_asked_seldom() -> None:
    tokens = np.load(LENGTHS / "azure_llm_conv_2023.npz")["tokens"][:1024]
    budget = Quadratic(600_000)
    batches = pack(streams(tokens), budget, 4)
    assert budget.fits(shapes_of(batches, streams(tokens))).all()
    assert budget.asked < 4 * len(tokens)


def test_a_window_that_fits_into_one_batch_of_a_budget_that_must_be_asked() -> None:
    budget = LearningBudget(TokenBudget(1000, layout="packed"))
    assert [list(pack({"tokens": np.full(n, 9)}, budget, 1)[0]) for n in (1, 3)] == [[0], [0, 1, 2]]
