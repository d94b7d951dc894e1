"""Lengths and budgets that hypothesis draws from."""

from operator import and_

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynagroup import AdditiveCap, Budget, MemoryBudget, TokenBudget
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan.batches import RoundBatch, allowed_sizes, friendly_size, multiple_of
from dynagroup.plan.inputs import PlanConfig

ROUNDINGS = st.sampled_from([None, multiple_of(2), multiple_of(8), friendly_size])


def are_allowed(sizes: NDArray[np.int64], rounding: RoundBatch | None) -> bool:
    """Whether batches have sizes that a rounding produces, or smaller ones than any."""
    if rounding is None:
        return True
    allowed = allowed_sizes(int(sizes.max()), rounding)
    return bool(np.isin(sizes, allowed).all())


def _heavy_tailed(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).lognormal(3, 1.2, count).astype(int).tolist()


def _constant(value: int, count: int) -> list[int]:
    return [value] * count


def _short_and_one_long(short: int, long: int, count: int) -> list[int]:
    return [short] * count + [long]


drawn = st.lists(st.integers(0, 60), min_size=1, max_size=60)
constant = st.builds(_constant, st.integers(0, 40), st.integers(1, 60))
one_long = st.builds(
    _short_and_one_long, st.integers(0, 5), st.integers(20, 60), st.integers(0, 59)
)
heavy_tailed = st.builds(_heavy_tailed, st.integers(0, 2**32), st.integers(1, 60))
empty = st.builds(_constant, st.just(0), st.integers(1, 40))
too_long_for_small_budgets = st.builds(_constant, st.just(1000), st.integers(1, 20))
lengths = st.one_of(drawn, constant, one_long, heavy_tailed, empty, too_long_for_small_budgets)

PADDINGS = st.sampled_from([1, 8])
LAYOUTS = st.sampled_from(["padded", "packed"])
MOST = st.none() | st.integers(1, 9)
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
capped_budgets: st.SearchStrategy[Budget] = st.builds(and_, token_budgets, CAPS)
SEEDS = st.integers(0, 9)
KINDS = st.sampled_from(["step", "batch"])
windows = st.builds(
    PlanConfig,
    shuffle=st.booleans(),
    window=st.none() | st.integers(1, 40),
    seed=SEEDS,
    one_kind=KINDS,
    hardest_first=st.integers(0, 3),
    round_batch=ROUNDINGS,
    uneven=st.sampled_from(["repeat", "drop"]),
    oversize=st.sampled_from(["alone", "drop"]),
)
updates = st.builds(
    PlanConfig,
    samples_per_update=st.integers(16, 40),
    grouping=st.none() | st.integers(1, 3),
    seed=SEEDS,
    one_kind=KINDS,
)
configs = windows | updates
