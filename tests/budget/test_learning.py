"""Limits fall when a batch fails and rise while batches pass; plans follow what is applied, ranks the lowest of all."""

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap, AllOf, Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import StateError
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.shapes import BatchShape
from dynagroup.testing import assert_budget_law, run_ranks

LENGTHS = {"tokens": np.array([3, 90, 40, 100, 7], dtype=np.int32)}


class Bytes(PaddedTokens):
    """A model in bytes, with static memory that no smaller batch can save."""

    static_bytes = 900

    def batch_bytes(self, shape: BatchShape, /) -> Any:
        return shape.num_samples * shape.longest["tokens"] / 10


IN_BYTES = MemoryBudget.from_bytes(1000, model=Bytes(), headroom=1.0)
BUDGETS: list[Budget | None] = [
    None,
    TokenBudget(1000, pad_to_multiple_of=8, max_samples=30),
    TokenBudget(1000, layout="packed"),
    IN_BYTES,
    TokenBudget(1000) & AdditiveCap("patches", 50),
]
EVENTS = st.tuples(st.booleans(), st.integers(1, 12), st.integers(1, 120), st.floats(0.1, 1.0))


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: "none" if b is None else b.fingerprint)
@settings(max_examples=25)
@given(events=st.lists(EVENTS, max_size=30))
def test_what_failed_and_all_that_is_predicted_as_heavy_never_fits_again(budget: Any, events: list[Any]) -> None:
    learning = LearningBudget(budget)
    bound = learning.bind({**LENGTHS, "patches": LENGTHS["tokens"]})
    counts, longests = (a.ravel() for a in np.meshgrid(np.arange(1, 13), np.arange(1, 121, 7)))
    grid = BatchShape.of(counts, {"tokens": longests, "patches": 1})
    own = np.ones(len(grid), bool) if budget is None else budget.fits(grid)
    failed = math.inf
    for oom, count, longest, share in events:
        shape = BatchShape.of(count, {"tokens": longest, "patches": 1})
        if oom:
            failed = min(failed, float(learning.cost(shape)[0]))
            learning.record_oom(shape)
        else:
            for _ in range(32):
                learning.record_pass(shape, peak_bytes=int(share * 1000), device_bytes=1000)
        learning.apply()
        ok = learning.fits(grid)
        assert (ok == (own & learning.allows(grid))).all()
        assert not ok[learning.cost(grid) >= failed].any()
        assert bound.limits == learning.limits, "what is learned is shared"
    if not isinstance(budget, AllOf):
        assert_budget_law(learning, LENGTHS, num_shapes=50)


def test_the_limit_falls_at_once_and_grows_slowly_up_to_what_failed() -> None:
    learning = LearningBudget()
    learning.record_oom(BatchShape.of(10, 100))
    curve = []
    for _ in range(32 * 12):
        learning.record_pass(BatchShape.of(1, 500))  # far from the limit: proves nothing
        learning.record_pass(BatchShape.of(1, int(learning.limits[0])))
        curve.append(round(learning.limits[0]))
    assert curve[30:33] + curve[62:65] == [900, 909, 909, 909, 918, 918]
    assert curve[-1] == round(900 * 1.01**10) < learning.limits[1] == 1000, "one more would pass what failed"


def test_a_failure_starts_the_count_anew_and_a_full_device_stops_growth_before_an_error_does() -> None:
    learning, near = LearningBudget(), BatchShape.of(1, 900)
    for _ in range(2):
        learning.record_oom(BatchShape.of(10, 100))
        for _ in range(31):
            learning.record_pass(near)
    for _ in range(40):
        learning.record_pass(near, peak_bytes=97, device_bytes=100)
    assert learning.limits == (900.0, 1000.0)
    full = LearningBudget(TokenBudget(10_000))
    full.record_pass(BatchShape.of(5, 1000), peak_bytes=97, device_bytes=100)
    assert full.allows(BatchShape.of([5, 6], 1000)).tolist() == [True, False]


def test_static_memory_is_no_reason_to_forbid_every_batch() -> None:
    learning = LearningBudget(IN_BYTES)
    learning.record_oom(BatchShape.of(10, 100))
    assert learning.allows(BatchShape.of([8, 9, 10], 100)).tolist() == [True, True, False]


@pytest.mark.parametrize("costs", [(100, 80), (None, 100)])
def test_plans_follow_only_what_is_applied_and_ranks_the_lowest_of_all(costs: Any) -> None:
    def run(world: Any) -> Any:
        learning = LearningBudget(TokenBudget(1000))
        if costs[world.rank] is not None:
            learning.record_oom(BatchShape.of(1, costs[world.rank]))
        before = learning.applied
        learning.apply(world)
        return before, learning.limits, learning.applied

    limit, wall = 0.9 * costs[1], float(costs[1])
    assert run_ranks(2, run) == [(None, (pytest.approx(limit), wall), limit)] * 2


def test_state_goes_through_json_and_belongs_to_a_budget() -> None:
    learning = LearningBudget(TokenBudget(1000))
    learning.record_oom(BatchShape.of(8, 100), wasted_s=1.5)
    learning.apply()
    state = json.loads(json.dumps(learning.state_dict(), allow_nan=False))
    again = LearningBudget(TokenBudget(1000))
    again.load_state_dict(state)
    assert json.dumps(again.state_dict()) == json.dumps(learning.state_dict())
    assert again.applied == learning.applied == 720
    assert str(again.report).startswith("1 out-of-memory errors, 2 parts run again, 1.5 s wasted")
    with pytest.raises(StateError, match=r"budget: .*max_tokens=1000.* then, .*max_tokens=2000.* now"):
        LearningBudget(TokenBudget(2000)).load_state_dict(state)
    for damaged in [{**state, key: "x"} for key in state] + [{**state, "numbers": [1, *state["numbers"][1:]]}, [], 3]:
        with pytest.raises(StateError):
            again.load_state_dict(damaged)
    assert json.dumps(again.state_dict()) == json.dumps(state), "half of nothing is taken over"


def fits_in_a_worker(learning: LearningBudget, asked: Any, answers: Any) -> None:
    while asked.get() is not None:
        answers.put(learning.fits(BatchShape.of(8, 100)).tolist())


def test_workers_see_shared_lessons_at_once() -> None:
    context = torch.multiprocessing.get_context("fork")
    learning = LearningBudget(TokenBudget(1000)).share_memory()
    asked, answers = context.SimpleQueue(), context.SimpleQueue()
    worker = context.Process(target=fits_in_a_worker, args=(learning, asked, answers))
    worker.start()
    for seen in (True, False):
        asked.put(1)
        assert answers.get() == [seen]
        learning.record_oom(BatchShape.of(8, 100))
        learning.apply()
    asked.put(None)
    worker.join()
    assert pickle.loads(pickle.dumps(learning)).fingerprint == learning.fingerprint
