"""Lengths and budgets that hypothesis draws from."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynagroup import AdditiveCap, Budget, MemoryBudget, TokenBudget
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan.batches import RoundBatch, allowed_sizes, friendly_size, multiple_of
from dynagroup.plan.planner import PlanConfig

ROUNDINGS = st.sampled_from([None, multiple_of(2), multiple_of(8), friendly_size])


def are_allowed(sizes: NDArray[np.int64], rounding: RoundBatch | None) -> bool:
    """Whether batches have sizes that a rounding produces, or smaller ones than any."""
    return rounding is None or bool(np.isin(sizes, allowed_sizes(int(sizes.max()), rounding)).all())


def _heavy_tailed(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).lognormal(3, 1.2, count).astype(int).tolist()


lengths = st.one_of(
    st.lists(st.integers(0, 60), min_size=1, max_size=60),
    st.builds(lambda n, value: [value] * n, st.integers(1, 60), st.integers(0, 40)),  # constant
    st.builds(
        lambda a, b, n: ([a] * n + [b])[:60],
        st.integers(0, 5),
        st.integers(20, 60),
        st.integers(0, 60),
    ),
    st.builds(_heavy_tailed, st.integers(0, 2**32), st.integers(1, 60)),
    st.builds(lambda n: [0] * n, st.integers(1, 40)),  # all empty
    st.builds(lambda n: [1000] * n, st.integers(1, 20)),  # none fits a small budget
)

PADDINGS, LAYOUTS, MOST = (
    st.sampled_from([1, 8]),
    st.sampled_from(["padded", "packed"]),
    st.none() | st.integers(1, 9),
)
LIMITS = st.integers(1, 200)
token_budgets = st.builds(
    TokenBudget, LIMITS, max_samples=MOST, pad_to_multiple_of=PADDINGS, layout=LAYOUTS
)
HEADROOMS = st.sampled_from([0.5, 0.9, 1.0])
memory_budgets = st.builds(
    MemoryBudget, st.integers(1, 8), model=st.just(PaddedTokens()), headroom=HEADROOMS
)
budgets: st.SearchStrategy[Budget] = st.one_of(token_budgets, memory_budgets)
CAPS = st.builds(AdditiveCap, st.just("patches"), st.integers(1, 90))
capped_budgets: st.SearchStrategy[Budget] = st.builds(
    lambda budget, cap: budget & cap, token_budgets, CAPS
)
SEEDS, KINDS = st.integers(0, 9), st.sampled_from(["step", "batch"])
configs = st.builds(
    PlanConfig,
    shuffle=st.booleans(),
    window=st.none() | st.integers(1, 40),
    seed=SEEDS,
    one_kind=KINDS,
    hardest_first=st.integers(0, 3),
    round_batch=ROUNDINGS,
    uneven=st.sampled_from(["repeat", "drop"]),
    oversize=st.sampled_from(["alone", "drop"]),
) | st.builds(
    PlanConfig,
    samples_per_update=st.integers(16, 40),
    grouping=st.none() | st.integers(1, 3),
    seed=SEEDS,
    one_kind=KINDS,
)
