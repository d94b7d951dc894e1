"""Every state that a loader gives is taken back, on any number of ranks, and each sample of the epoch comes once."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynagroup import LearningBudget, LengthAwareBatchSampler, StateError, TokenBudget
from dynagroup.distributed import SingleProcess
from dynagroup.testing import run_ranks
from tests.laws.loaders import ENTRIES, graphs_of, kinds_of, planned, sampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:too few samples for an equal number"),
    pytest.mark.filterwarnings("ignore:.*do not fit the budget even alone"),
]
LENGTHS = np.random.default_rng(24).integers(1, 60, 23).tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    most=st.integers(1, 150),
    kind=st.sampled_from([name for name, entry in ENTRIES.items() if entry.moves]),
    layout=st.sampled_from(["padded", "packed"]),
    seed=st.integers(0, 9),
    chain=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=3, max_size=3),
)
@example(lengths=LENGTHS, most=1, kind="planned-free", layout="padded", seed=1, chain=[(2, 1, 0), (5, 3, 0), (1, 1, 0)])
@example(
    lengths=LENGTHS, most=150, kind="planned-free", layout="padded", seed=1, chain=[(2, 1, 0), (2, 3, 1), (1, 1, 1)]
)
def test_a_state_is_taken_back_after_three_changes_of_ranks_and_of_what_was_learned(
    lengths, most, kind, layout, seed, chain
):
    """Rows are filled by repeats where a batch holds one sample: those come beyond the epoch's samples, never instead of them.

    What is learned is applied when a state was loaded, and again while the epoch is under way."""
    emitted: Counter[int] = Counter()
    states: Any = None
    layout = "padded" if "shapes" in ENTRIES[kind].base else layout
    how = {"lengths": lengths, "max_tokens": most, **ENTRIES[kind].base, "seed": seed}
    how |= {"lengths": graphs_of(lengths)} if kind.endswith("graphs") else {}
    how |= {"length_hint": lengths} if "length_hint" in how else {}
    how |= {"kinds": kinds_of(len(lengths))} if "kinds" in how else {}
    for ranks, steps, learns in [*chain, (2, None, True)]:

        def run(world: Any, states: Any = states, steps: int | None = steps, learns: Any = learns) -> tuple[Any, ...]:
            budget = LearningBudget(TokenBudget(most, layout=layout))

            def learn() -> None:
                if learns:
                    budget.record_failed_cost(min(budget.limits[0], most) * 0.8)
                    budget.apply()

            loader = ENTRIES[kind].make(world, layout, **{**how, "max_tokens": lambda _layout: budget})
            if states is not None:
                loader.load_state_dict(states)
                learn()
            used, kinds = list[int](), list[Any]()
            for number, step in enumerate(islice(loader, steps)):
                used += step.indices if kind.startswith("sampler") or not step.idle else []
                kinds += [how["kinds"][step.indices[0]]] if how.get("kinds") else []
                if number == 1:
                    learn()
            return used, json.loads(json.dumps(loader.state_dict())), kinds

        if len(emitted) == len(lengths):
            break
        found = run_ranks(min(ranks, how.get("samples_per_update", 5)) if kind.startswith("sampler") else ranks, run)
        emitted.update(index for used, _, _ in found for index in used)
        states = [state for _, state, _ in found]
        assert how.get("one_kind") == "batch" or len({tuple(kinds) for _, _, kinds in found}) == 1, "law 10"
    assert set(emitted) == set(range(len(lengths)))
    assert kind.startswith("sampler") or emitted.total() == len(lengths)


def learned_at(budget: LearningBudget, cost: float) -> None:
    budget.record_failed_cost(cost)
    budget.apply()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_of_a_sampler_follows_what_was_applied_before_it(ranks: int) -> None:
    budget = LearningBudget(TokenBudget(1000))
    made = LengthAwareBatchSampler(np.full(64, 100), budget, shuffle=True, rank=0, world_size=ranks)
    assert max(map(len, made)) == 10
    learned_at(budget, 600)
    assert max(map(len, made)) == 5


def test_what_was_learned_is_not_forgotten_by_a_budget_that_does_not_learn() -> None:
    budget = LearningBudget(TokenBudget(400))
    saved = LengthAwareBatchSampler(range(10, 74), budget, rank=0, world_size=1)
    learned_at(budget, 200)
    assert len(list(islice(saved, 2))) == 2
    state = saved.state_dict()
    other = LengthAwareBatchSampler(range(10, 74), TokenBudget(400), rank=0, world_size=1)
    with pytest.raises(StateError, match="uses limits of a LearningBudget"):
        other.load_state_dict(state)
    assert len(list(other)) == len(list(LengthAwareBatchSampler(range(10, 74), TokenBudget(400), rank=0, world_size=1)))


@pytest.mark.parametrize("kind", ["sampler", "planned"])
@pytest.mark.parametrize("when", ["before the state", "after it was loaded"])
def test_an_epoch_under_way_leaves_out_what_it_left_out_or_is_refused(kind: str, when: str) -> None:
    def made(budget: LearningBudget) -> Any:
        how: dict[str, Any] = {"lengths": list(range(10, 74)), "max_tokens": lambda _layout: budget, "oversize": "drop"}
        return (sampler if kind == "sampler" else planned)(SingleProcess(), "padded", **how, shuffle=True)

    budget, again = LearningBudget(TokenBudget(400)), LearningBudget(TokenBudget(400))
    loader, other = made(budget), made(again)
    for number, _step in enumerate(loader):
        if number == 1 and when == "before the state":
            learned_at(budget, 60)
        if number == 2:
            break
    state, said = loader.state_dict(), r"leave out other samples .* set_epoch to the next"
    if when == "before the state":
        with pytest.raises(StateError, match=said):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)
        learned_at(again, 60)
        with pytest.raises(StateError, match=said):
            list(other)
    if when == "after it was loaded" and kind == "planned":
        other.set_epoch(1)
        assert {i for step in other for i in step.indices} == set(range(45))  # lengths up to 0.9 * 60
