"""What a learning budget knows of costs: limits fall when a batch fails and rise while batches pass; ranks take the lowest."""

from __future__ import annotations

import numpy as np
import pytest

from dynagroup.budget.base import Budget, cost_of
from dynagroup.budget.limits import CostLimits, Limits
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget, as_budget
from dynagroup.errors import ConfigError
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.shapes import BatchShape
from dynagroup.testing import run_ranks


def limits(**knobs: float) -> CostLimits:
    return CostLimits(**{"backoff": 0.5, "growth": 1.5, "patience": 2, "full": 0.95, **knobs})  # type: ignore[arg-type]


def test_limits_fall_at_a_failure_and_rise_after_enough_passes_near_them():
    learned = limits()
    learned.failed(100.0)
    assert learned.known == Limits(limit=50.0, wall=100.0)
    for cost in (24.0, 25.0, 50.0):  # the first is too far from the limit to say anything
        learned.passed(lambda cost=cost: cost, None)
    assert learned.known == Limits(limit=75.0, wall=100.0)
    for _ in range(4):  # 112.5 would pass the wall
        learned.passed(lambda: 75.0, None)
    assert learned.known == Limits(limit=75.0, wall=100.0)
    assert learned.curve == ((0, 0.5), (3, 0.75))
    assert learned.known.allow(np.array([75.0, 76.0])).tolist() == [True, False]


def test_a_failure_in_between_starts_the_count_of_passes_anew():
    learned = limits()
    learned.failed(100.0)
    learned.passed(lambda: 50.0, None)
    learned.failed(100.0)
    learned.passed(lambda: 50.0, None)
    assert learned.known.limit == 50.0


def test_plans_follow_only_what_is_applied_and_ranks_the_lowest_of_all():
    def run(world):
        learned = limits()
        learned.failed([100.0, 80.0][world.rank])
        before = learned.applied
        learned.apply(world)
        return before, learned.applied, learned.known

    assert run_ranks(2, run) == [(Limits(), Limits(40.0, 80.0), Limits(40.0, 80.0))] * 2


def test_a_rank_that_learned_nothing_takes_over_what_another_did():
    def run(world):
        learned = limits()
        if world.rank == 1:
            learned.failed(100.0)
        learned.apply(world)
        return learned.applied

    assert run_ranks(2, run) == [Limits(50.0, 100.0)] * 2


def test_a_cost_is_what_grows_as_a_share_of_the_limit():
    class Bytes(PaddedTokens):
        static_bytes = 100

        def batch_bytes(self, shape: BatchShape, /) -> np.ndarray:
            return shape.num_samples * shape.longest["tokens"] * 2.0

    budget = MemoryBudget.from_bytes(1000, model=Bytes())
    shape = BatchShape.of([5, 10], 20)
    assert cost_of(budget, shape).tolist() == [0.2, 0.4]
    assert budget.predicted(shape).tolist() == pytest.approx([0.3, 0.5])


@pytest.mark.parametrize("answer", [np.ones(3), np.ones(2, bool), np.array(["a", "b"]), 1.0])
def test_costs_of_ones_own_budget_are_a_number_for_every_shape(answer):
    class Mine(TokenBudget):
        def cost(self, shape, /):
            return answer

    with pytest.raises(ConfigError, match=r"Mine\.cost must answer for all shapes at once"):
        cost_of(Mine(100), BatchShape.of([1, 2], 3))


def test_half_a_budget_is_none():
    class Half:
        fits = Budget.fits

    with pytest.raises(ConfigError, match="a budget of your own subclasses"):
        as_budget(Half())
